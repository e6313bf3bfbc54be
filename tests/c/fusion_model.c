/* Small instances, the second model, brute force. Nothing here calls the planner's own arithmetic. */
#include <stdlib.h>
#include <string.h>

#include "fusion_test.h"

__extension__ typedef __int128 wide;

uint32_t draw(draws *d, uint32_t below) {
    if (!d->bytes) return rng_below(&d->r, below);
    if (!d->left) return 0;
    d->left--;
    return *d->bytes++ % below;
}

/* ---- instances --------------------------------------------------------------------------------------------------- */

static sid_curve curve(tiny *t, draws *d, kind k, uint32_t at, int64_t scale) {
    sid_knot *q = t->knots[at];
    uint32_t n = 1;
    q[0] = (sid_knot){0, draw(d, 3) ? draw(d, 8) * scale : 0};
    if (k == GENERAL) {
        for (uint32_t more = draw(d, TINY_KNOTS - 1); more; more--, n++)
            q[n] = (sid_knot){q[n - 1].bytes + 1 + draw(d, 20) * scale, draw(d, 40) * scale};
        if (n > 1 && q[n - 1].ps < q[n - 2].ps) { /* may fall, but not for ever */
            q[n] = (sid_knot){q[n - 1].bytes + 1 + draw(d, 9), q[n - 1].ps + draw(d, 3)};
            n++;
        }
    } else {
        const int64_t width = k == AFFINE ? 1 : 1 + draw(d, 7);
        q[n++] = (sid_knot){width, q[0].ps + draw(d, k == AFFINE ? 5 : 9)};
    }
    return (sid_curve){q, n};
}

void tiny_make(tiny *t, draws *d, kind k, uint32_t n, uint32_t n_methods) {
    static const int64_t scales[] = {1, 1, 10, 1000};
    const int64_t scale = scales[draw(d, 4)];
    const uint32_t backward = draw(d, 3), bytes = draw(d, 4), equal = !draw(d, 6);
    int64_t total = 0;
    memset(t, 0, sizeof *t);
    for (uint32_t i = 0; i < n; i++) {
        t->backward[i] = backward && draw(d, 4) >= backward ? (int64_t)draw(d, 30) * scale : 0;
        t->bytes[i] = bytes && draw(d, 4) >= bytes - 1 ? (int64_t)draw(d, 20) * scale : 0;
        if (equal && i) {
            t->backward[i] = t->backward[0];
            t->bytes[i] = t->bytes[0];
        }
        total += t->bytes[i];
    }
    const uint32_t cutting = draw(d, 3);
    for (uint32_t i = 0; i < n; i++) t->cuts[i] = cutting == 1 && !draw(d, 4);
    for (uint32_t m = 0; m < n_methods; m++) {
        if (draw(d, 3)) t->methods[m].encode = curve(t, d, k, 4 * m, scale);
        t->methods[m].exchange = curve(t, d, k, 4 * m + 1, scale);
        if (k == GENERAL && draw(d, 2)) t->methods[m].decode = curve(t, d, k, 4 * m + 2, scale);
        if (k == GENERAL && draw(d, 2)) t->methods[m].delay = curve(t, d, k, 4 * m + 3, scale);
    }
    static const uint32_t slowdowns[] = {0, 0, 0, 1, 200, 500, 700, 999};
    t->in = (sid_instance){.n = n,
                           .backward_ps = t->backward,
                           .bytes = t->bytes,
                           .cut_before = cutting ? t->cuts : NULL,
                           .forward_ps = draw(d, 2) * 7,
                           .n_methods = n_methods,
                           .methods = t->methods};
    if (!draw(d, 3) && total) t->in.max_group_bytes = 1 + draw(d, total > 200 ? 200 : (uint32_t)total) * scale;
    if (k == GENERAL) {
        t->in.slowdown_permille = slowdowns[draw(d, 8)];
        t->in.decode_main = draw(d, 3) == 1;
    }
}

/* ---- the second model -------------------------------------------------------------------------------------------- */

static wide floor_div(wide a, wide b) { return a / b - (a % b < 0); }

static wide cost_of(const sid_curve *c, int64_t x) {
    uint32_t i = 1;
    if (c->n == 1) return c->knots[0].ps;
    while (i + 1 < c->n && c->knots[i].bytes <= x) i++;
    const sid_knot a = c->knots[i - 1], b = c->knots[i];
    return a.ps + floor_div((wide)(b.ps - a.ps) * (x - a.bytes), b.bytes - a.bytes);
}

typedef struct clocks {
    wide main, link, decode, late, moving;
} clocks;

static wide later(wide a, wide b) { return a > b ? a : b; }

/* The end of work that until `busy` goes on at `keeps` per mille of its speed. */
static wide slowed(wide now, wide busy, wide work, int64_t keeps) {
    if (busy <= now) return now + work;
    const wide lag = busy - now, done = lag - lag * (1000 - keeps) / 1000;
    if (work >= done) return busy + work - done;
    const wide end = now + (work * 1000 + keeps - 1) / keeps;
    return end < busy ? end : busy;
}

static void put(const sid_instance *in, clocks *c, uint32_t from, uint32_t end, uint32_t method) {
    const sid_method *m = &in->methods[method];
    const int64_t left = 1000 - (int64_t)in->slowdown_permille;
    wide work = 0, rest = 0;
    int64_t bytes = 0;
    for (uint32_t i = from; i < end; i++) {
        work += in->backward_ps[i];
        bytes += in->bytes[i];
    }
    for (uint32_t i = end; i < in->n; i++) rest += in->backward_ps[i];
    c->main = in->slowdown_permille ? slowed(c->main, c->moving, work, left) : c->main + work;
    if (m->encode.n) {
        const wide h = cost_of(&m->encode, bytes);
        c->main = in->slowdown_permille ? slowed(c->main, c->moving, h, left) : c->main + h;
    }
    const wide ready = c->main;
    const wide delay = m->delay.n ? cost_of(&m->delay, bytes) : 0, moves = cost_of(&m->exchange, bytes);
    c->link = later(ready, c->link) + (delay < rest ? delay : rest) + moves;
    c->moving = later(ready, c->moving) + moves;
    const wide decode = m->decode.n ? cost_of(&m->decode, bytes) : 0;
    c->decode = later(c->link, c->decode) + decode;
    if (in->decode_main) c->late += decode;
}

int64_t model_time(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods) {
    clocks c = {in->forward_ps, in->forward_ps, in->forward_ps, 0, in->forward_ps};
    for (uint32_t k = 0; k < groups; k++) put(in, &c, k ? ends[k - 1] : 0, ends[k], methods[k]);
    return (int64_t)later(c.decode, c.main + c.late);
}

static int fits(const sid_instance *in, uint32_t from, uint32_t end) {
    int64_t bytes = 0;
    for (uint32_t i = from; i < end; i++) {
        bytes += in->bytes[i];
        if (i > from && in->cut_before && in->cut_before[i]) return 0;
    }
    return end - from == 1 || !in->max_group_bytes || bytes <= in->max_group_bytes;
}

int legal(const sid_instance *in, uint32_t groups, const uint32_t *ends) {
    for (uint32_t k = 0; k < groups; k++)
        if (!fits(in, k ? ends[k - 1] : 0, ends[k])) return 0;
    return 1;
}

static int allowed(const sid_method *m, choice of) {
    return of == ANY || (!m->encode.n && (of == DENSE || !m->decode.n));
}

static wide best_from(const sid_instance *in, clocks c, uint32_t from, choice of) {
    if (from == in->n) return later(c.decode, c.main + c.late);
    wide best = INT64_MAX;
    for (uint32_t end = from + 1; end <= in->n && fits(in, from, end); end++)
        for (uint32_t m = 0; m < in->n_methods; m++) {
            if (!allowed(&in->methods[m], of)) continue;
            clocks next = c;
            put(in, &next, from, end, m);
            const wide t = best_from(in, next, end, of);
            if (t < best) best = t;
        }
    return best;
}

int64_t brute(const sid_instance *in, choice of) {
    const clocks c = {in->forward_ps, in->forward_ps, in->forward_ps, 0, in->forward_ps};
    return (int64_t)best_from(in, c, 0, of);
}

/* ---- a call ------------------------------------------------------------------------------------------------------- */

planned plan_tiny(const sid_instance *in, const char *algorithm, const sid_fuse_setting *settings, uint32_t n_settings,
                  const planned *seed) {
    planned p = {0};
    const sid_fuse_request what = {algorithm,
                                   settings,
                                   n_settings,
                                   seed ? seed->plan.groups : 0,
                                   seed ? seed->ends : NULL,
                                   seed ? seed->methods : NULL};
    size_t bytes = 0;
    p.status = sid_fuse(in, &what, NULL, NULL, &bytes, &p.error);
    if (p.status) return p;
    block scratch = block_new(bytes, 0), ends = block_new(in->n * sizeof(uint32_t), 0), methods = block_new(in->n, 0);
    memset(scratch.p, 0x5a, bytes); /* the planner must not count on zeros */
    p.plan = (sid_fusion){.ends = (uint32_t *)(void *)ends.p, .methods = methods.p};
    p.status = sid_fuse(in, &what, &p.plan, scratch.p, &bytes, &p.error);
    p.intact = block_intact(&scratch) && block_intact(&ends) && block_intact(&methods);
    if (!p.status) {
        memcpy(p.ends, ends.p, p.plan.groups * sizeof *p.ends);
        memcpy(p.methods, methods.p, p.plan.groups);
        for (uint32_t k = 0; k < p.plan.groups; k++) test_digest = test_digest * 31 + p.ends[k] * 256 + p.methods[k];
        test_digest = test_digest * 31 + (uint64_t)p.plan.time_ps + (uint64_t)p.plan.lower_bound_ps + p.plan.work;
    }
    p.plan.ends = NULL; /* gone with their blocks: the copies count */
    p.plan.methods = NULL;
    block_free(&scratch);
    block_free(&ends);
    block_free(&methods);
    return p;
}
