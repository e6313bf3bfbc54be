/* Exchanges, walked from the registry beside every codec that they take: counted bytes against what they state, replicas,
 * canaries, gradients that are not finite, bytes that change on the way. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

void test_exchanges(void);
void test_exchange_routes_refused(void);
void test_exchange_nonfinite(void);
void test_exchange_faults(void);

enum {
    MOST = 12
};

typedef struct party {
    uint32_t world, members; /* members that are open */
    uint64_t n;
    sid_exchange_sizes sizes;
    block plan[MOST], state[MOST], work[MOST], wire[MOST];
    vec v[MOST];
    sid_segment *cut[MOST];
    sid_rank rank[MOST];
    sid_message *room;
    char name[160];
} party;

static const sid_exchange *of(const party *p, uint32_t r) { return (const sid_exchange *)(const void *)p->plan[r].p; }

/* 0 where the exchange refuses the codec, with a reason. */
static int open_party(party *p, const char *exchange, const sid_config *c, uint32_t world) {
    *p = (party){.world = world, .n = c->n};
    snprintf(p->name, sizeof p->name, "%s, %s+%s, n %llu, %s, world %u", exchange, c->codec, c->memory,
             (unsigned long long)c->n, dtype_name(c->dtype), world);
    for (uint32_t r = 0; r < world; r++) {
        const sid_route route = {exchange, c, r, world};
        sid_error err;
        size_t bytes = 0;
        sid_status s = sid_exchange_make(&route, NULL, &bytes, &err);
        if (s == SID_E_UNSUPPORTED || s == SID_E_PARAM) {
            CHECK(strlen(err.text) > 30, "%s: refused with '%s'", p->name, err.text);
            CHECK(r == 0, "%s: rank %u refuses what rank 0 takes", p->name, r);
            return 0;
        }
        CHECK(s == SID_OK, "%s: %s", p->name, err.text);
        p->plan[r] = block_new(bytes, 0);
        s = sid_exchange_make(&route, p->plan[r].p, &bytes, &err);
        CHECK(s == SID_OK, "%s: %s", p->name, err.text);
        const sid_exchange_sizes z = sid_exchange_sizes_of(of(p, r));
        if (r) CHECK(z.rounds == p->sizes.rounds && z.messages == p->sizes.messages, "%s: rank %u", p->name, r);
        p->sizes = z;
        p->state[r] = block_new(z.state, 0);
        p->work[r] = block_new(z.work, 0);
        p->wire[r] = block_new(z.wire ? z.wire : 64, 0);
        memset(p->state[r].p, 0, z.state);
        p->v[r] = vec_new(c->dtype, c->n, r % 2 ? CUT_ODD : CUT_TINY);
        p->cut[r] = malloc((p->v[r].n_seg + 1) * sizeof(sid_segment));
        p->rank[r] = (sid_rank){
            of(p, r), p->v[r].seg, p->cut[r], p->state[r].p, p->work[r].p, p->wire[r].p, p->v[r].n_seg, 0, 0, 0};
        p->members++;
    }
    p->room = malloc((2 * p->sizes.messages + 2) * sizeof *p->room);
    return 1;
}

static void close_party(party *p) {
    for (uint32_t r = 0; r < p->members; r++) {
        CHECK(block_intact(&p->plan[r]) && block_intact(&p->state[r]) && block_intact(&p->work[r]) &&
                  block_intact(&p->wire[r]) && vec_intact(&p->v[r]),
              "%s: rank %u wrote past a block", p->name, r);
        block_free(&p->plan[r]);
        block_free(&p->state[r]);
        block_free(&p->work[r]);
        block_free(&p->wire[r]);
        vec_free(&p->v[r]);
        free(p->cut[r]);
    }
    free(p->room);
}

static void fill(party *p, uint64_t seed, int kind, float *x) {
    for (uint32_t r = 0; r < p->world; r++) {
        data_make(x, p->n, kind, seed + 100 * r);
        vec_set(&p->v[r], x);
        memset(p->work[r].p, 0xcd, p->sizes.work); /* garbage between steps */
        memset(p->wire[r].p, 0xcd, p->wire[r].bytes);
    }
}

/* Worlds that do not divide the sizes, primes, one, and the nodes of hierarchical's. */
static sid_status step_all(party *p, uint64_t step, sid_report *report, sid_error *err) {
    const sid_step at = {.step = step, .seed = 5, .group = 3, .world = p->world};
    return sid_loopback(p->rank, p->room, &at, report, err);
}

static const uint32_t worlds[] = {1, 2, 3, 4, 5, 8, 11};
static const uint64_t sizes[] = {0, 1, 255, 257, 5000, 20001};

static int has(const char *exchange, const char *parameter) {
    const sid_info *i = sid_exchange_find(exchange);
    for (uint32_t k = 0; k < i->n_params; k++)
        if (!strcmp(i->params[k].name, parameter)) return 1;
    return 0;
}

/* The settings that a world is met with: 0 the defaults; then nodes of 2 and 3, rows of 2. Returns their number. */
static uint32_t settings_at(const char *exchange, uint32_t world, uint32_t i, sid_setting *s) {
    const uint32_t local = i == 1 ? 2 : 4;
    if (!i) return 0;
    *s = (sid_setting){has(exchange, "rows") ? "rows" : "ranks_per_node", local};
    return has(exchange, s->name) && world % local == 0 ? 1 : 0;
}

static void walk(void (*f)(party *p, const sid_info *codec), uint32_t some) {
    uint32_t turn = 0;
    for (uint32_t e = 0; sid_exchange_at(e); e++)
        for (uint32_t i = 0; sid_codec_at(i); i++)
            for (uint32_t w = 0; w < sizeof worlds / sizeof *worlds; w++)
                for (uint32_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
                    for (uint32_t q = 0; q < 3; q++) {
                        party p;
                        sid_setting s;
                        const sid_info *codec = sid_codec_at(i), *memory = home_of(codec);
                        const uint32_t given = settings_at(sid_exchange_at(e)->name, worlds[w], q, &s);
                        if ((q && !given) || (!test_all && turn++ % some)) continue;
                        sid_config c = config_of(codec, memory, sizes[k], (sid_dtype)((i + w + k) % 3));
                        c.settings = &s;
                        c.n_settings = given;
                        if (open_party(&p, sid_exchange_at(e)->name, &c, worlds[w])) f(&p, codec);
                        close_party(&p);
                    }
}

/* ---- what they state ----------------------------------------------------------------------------------------- */

static void steps(party *p, const sid_info *codec) {
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    for (uint64_t step = 0; step < 3; step++) {
        fill(p, 7 * step, step == 1 ? DATA_HEAVY : DATA_NORMAL, x);
        const sid_status s = step_all(p, step, &report, &err);
        CHECK(s == SID_OK && !report.nonfinite, "%s: %s", p->name, err.text);
        uint64_t most = 0, control = 0;
        for (uint32_t r = 0; r < p->world; r++) {
            if (p->rank[r].sent > most) most = p->rank[r].sent;
            if (p->rank[r].control > control) control = p->rank[r].control;
            CHECK(vec_equal(&p->v[r], &p->v[0]), "%s: rank %u has decoded something else", p->name, r);
        }
        uint64_t stated = 0;
        for (uint32_t r = 0; r < p->world; r++)
            if (sid_exchange_sizes_of(of(p, r)).sent > stated) stated = sid_exchange_sizes_of(of(p, r)).sent;
        CHECK(most == stated && control == p->sizes.control, "%s: states %llu bytes, %llu of control; sent %llu, %llu",
              p->name, (unsigned long long)stated, (unsigned long long)p->sizes.control, (unsigned long long)most,
              (unsigned long long)control);
        vec_get(&p->v[0], x);
        uint64_t wild = 0;
        for (uint64_t i = 0; i < p->n; i++) {
            uint32_t bits;
            memcpy(&bits, &x[i], 4);
            /* statistics of the others may differ between C libraries */
            if (codec->traits & SID_SIGNS) test_digest = (test_digest ^ bits) * 0x100000001b3ull;
            wild += isfinite(x[i]) ? 0 : 1;
        }
        /* a cascade's error grows by sqrt(n) a hop (Marsit, theorem 2): out of a half's range */
        CHECK(!wild || (strstr(p->name, "cascade") && p->v[0].dtype != SID_F32), "%s: %llu elements are not finite",
              p->name, (unsigned long long)wild);
    }
    free(x);
}
void test_exchanges(void) { walk(steps, 5); }

void test_exchange_routes_refused(void) {
    sid_config c = {.codec = "topk", .memory = "residual", .n = 100, .dtype = SID_F32};
    sid_error err;
    size_t bytes = 0;
    sid_message m[4];
    const struct {
        sid_route r;
        sid_status status;
        const char *says;
    } wrong[] = {
        {{"ring", &c, 0, 2}, SID_E_PARAM, "no exchange is named 'ring'"},
        {{NULL, &c, 0, 2}, SID_E_PARAM, "no exchange"},
        {{"twoshot", NULL, 0, 2}, SID_E_ARG, "NULL"},
        {{"twoshot", &c, 2, 2}, SID_E_ARG, "rank 2 of 2"},
        {{"twoshot", &c, 0, 0}, SID_E_ARG, "rank 0 of 0"},
        {{"twoshot", &c, 0, 5000}, SID_E_ARG, "4096"},
        {{"ring1", &c, 0, 2}, SID_E_UNSUPPORTED, "twoshot"},
        {{"allreduce", &c, 0, 2}, SID_E_UNSUPPORTED, "allgather"},
        {{"cascade", &c, 0, 2}, SID_E_UNSUPPORTED, "none"},
    };
    for (uint32_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const sid_status s = sid_exchange_make(&wrong[i].r, NULL, &bytes, &err);
        CHECK(s == wrong[i].status && strstr(err.text, wrong[i].says), "%u: %d, '%s'", i, s, err.text);
    }
    const sid_setting s = {"rows", 3};
    c = (sid_config){.codec = "marsit", .memory = "compensation", .n = 100, .settings = &s, .n_settings = 1};
    const sid_route torus = {"torus1", &c, 0, 4};
    CHECK(sid_exchange_make(&torus, NULL, &bytes, &err) == SID_E_PARAM && strstr(err.text, "rows = 3"), "%s", err.text);
    const sid_setting huge = {"rows", 1e9};
    c.settings = &huge;
    CHECK(sid_exchange_make(&torus, NULL, &bytes, &err) == SID_E_PARAM && strstr(err.text, "range"), "%s", err.text);
    c.n_settings = 0;

    party p;
    CHECK(open_party(&p, "ring1", &c, 3), "ring1");
    const sid_exchange *x = of(&p, 0);
    const sid_step at = {.world = 3, .group = 1}, other = {.world = 3, .rank = 1}, far = {.world = 3, .group = 70000};
    void *st = p.state[0].p, *wk = p.work[0].p, *wi = p.wire[0].p;
    const sid_segment *seg = p.v[0].seg;
    const uint32_t k = p.v[0].n_seg;
    sid_segment *room = p.cut[0];
    CHECK(sid_exchange_advance(NULL, 0, seg, k, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "no exchange");
    CHECK(sid_exchange_advance(x, 99, seg, k, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "round");
    CHECK(sid_exchange_advance(x, 0, seg, k - 1, room, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "segments");
    CHECK(sid_exchange_advance(x, 0, seg, k, NULL, st, wk, &at, wi, NULL, &err) == SID_E_ARG, "no cut");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, st, wk, &other, wi, NULL, &err) == SID_E_ARG, "another rank");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, st, wk, &far, wi, NULL, &err) == SID_E_ARG, "group");
    CHECK(sid_exchange_advance(x, 0, seg, k, room, (char *)st + 8, wk, &at, wi, NULL, &err) == SID_E_ARG, "misaligned");
    CHECK(sid_exchange_meanwhile(NULL, 0, seg, k, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: no exchange");
    CHECK(sid_exchange_meanwhile(x, p.sizes.rounds, seg, k, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: round");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k - 1, room, st, wk, &at, wi) == SID_E_ARG, "meanwhile: segments");
    CHECK(sid_exchange_meanwhile(x, 0, seg, k, room, st, wk, &at, wi) == SID_OK, "meanwhile: no step");
    CHECK(sid_exchange_has_meanwhile(x) && !sid_exchange_has_meanwhile(NULL), "has meanwhile");
    CHECK(sid_exchange_messages(x, 99, 0, m) == 0, "messages of no round");
    CHECK(sid_exchange_residual_out(x, NULL, NULL) == SID_E_ARG, "out");
    CHECK(sid_exchange_rescale(x, st, 0) == SID_E_ARG, "factor");
    close_party(&p);
}

/* ---- gradients that are not finite ----------------------------------------------------------------------------- */

static float *kept_of(party *p, uint32_t r) {
    float *x = malloc(4 * ((p->sizes.vectors ? p->sizes.vectors : 1) * p->n + 1));
    CHECK(sid_exchange_residual_out(of(p, r), p->state[r].p, x) == SID_OK, "%s: residual_out", p->name);
    return x;
}

/* The largest difference between what a rank keeps and `was`, over the largest of either. */
static double moved(party *p, uint32_t r, const float *was) {
    float *now = kept_of(p, r);
    double off = 0, top = 0;
    for (uint64_t i = 0; i < p->sizes.vectors * p->n; i++) {
        const double a = (double)now[i], b = (double)was[i];
        if (fabs(a - b) > off) off = fabs(a - b);
        if (fabs(b) > top) top = fabs(b);
    }
    free(now);
    return top > 0 ? off / top : off;
}

static int momentum(const party *p) { return strstr(p->name, "+momentum") || strstr(p->name, "+dgc"); }

static void spoil(party *p, const sid_info *codec) {
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    if (!p->n) goto out;
    fill(p, 1, DATA_NORMAL, x);
    CHECK(step_all(p, 0, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    float *was[MOST];
    for (uint32_t r = 0; r < p->world; r++) was[r] = kept_of(p, r);
    fill(p, 2, DATA_NORMAL, x);
    data_make(x, p->n, DATA_NORMAL, 2);
    x[p->n / 2] = NAN;
    vec_set(&p->v[p->world - 1], x);
    CHECK(step_all(p, 1, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    CHECK(report.nonfinite, "%s: nobody noticed a NaN", p->name);
    for (uint32_t r = 0; r < p->world; r++) {
        CHECK(vec_equal(&p->v[r], &p->v[0]), "%s: rank %u has decoded something else", p->name, r);
        vec_get(&p->v[r], x);
        CHECK(isnan(x[p->n / 2]), "%s: rank %u decoded %g for NaN", p->name, r, (double)x[p->n / 2]);
        /* Inside of a node the sum is taken before anybody knows, so that the other slices keep the gradient: not lost. */
        if (!strstr(p->name, "hierarchical") && !momentum(p))
            CHECK(moved(p, r, was[r]) < 1e-5, "%s: rank %u's memory has moved by %g", p->name, r, moved(p, r, was[r]));
        float *now = kept_of(p, r);
        uint64_t wild = 0;
        for (uint64_t i = 0; i < p->sizes.vectors * p->n; i++) wild += isfinite(now[i]) ? 0 : 1;
        CHECK(!wild, "%s: rank %u keeps %llu elements that are not finite", p->name, r, (unsigned long long)wild);
        free(now);
        free(was[r]);
    }
    fill(p, 3, DATA_NORMAL, x);
    CHECK(step_all(p, 2, &report, &err) == SID_OK && !report.nonfinite, "%s: the step after", p->name);
out:
    free(x);
    (void)codec;
}
void test_exchange_nonfinite(void) { walk(spoil, 11); }

/* ---- faults on the way ----------------------------------------------------------------------------------------- */

/* As sid_loopback, but one byte of one message of round `where` changes on its way; which ranks failed. */
static uint32_t hurt(party *p, uint64_t step, uint32_t where, rng *r_, uint8_t *failed, sid_error *err) {
    uint32_t count = 0;
    for (uint32_t round = 0; round <= p->sizes.rounds; round++) {
        for (uint32_t r = 0; r < p->world; r++) {
            const sid_step at = {.step = step, .seed = 5, .group = 3, .rank = r, .world = p->world};
            const sid_rank *q = &p->rank[r];
            const sid_status s = sid_exchange_advance(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work,
                                                      &at, q->wire, NULL, err);
            CHECK(!s || s == SID_E_CORRUPT || s == SID_E_MISMATCH, "%s: %s", p->name, err->text);
            if (round == p->sizes.rounds) count += failed[r] = s != SID_OK;
        }
        for (uint32_t r = 1; r < p->world && round < p->sizes.rounds; r += 2) { /* the others leave it to advance */
            const sid_step at = {.step = step, .seed = 5, .group = 3, .rank = r, .world = p->world};
            const sid_rank *q = &p->rank[r];
            CHECK(sid_exchange_meanwhile(q->exchange, round, q->seg, q->n_seg, q->cut, q->state, q->work, &at,
                                         q->wire) == SID_OK,
                  "%s: meanwhile", p->name);
        }
        for (uint32_t r = 0; r < p->world && round < p->sizes.rounds; r++) {
            sid_message *in = p->room, *out = p->room + p->sizes.messages;
            const uint32_t receives = sid_exchange_messages(of(p, r), round, 1, in);
            for (uint32_t i = 0; i < receives; i++) {
                const uint32_t sends = sid_exchange_messages(of(p, in[i].peer), round, 0, out);
                uint32_t k = 0;
                while (k < sends && out[k].peer != r) k++;
                CHECK(k < sends && out[k].bytes == in[i].bytes, "%s: round %u: unequal ends", p->name, round);
                memcpy(p->wire[r].p + in[i].offset, p->wire[in[i].peer].p + out[k].offset, in[i].bytes);
            }
            if (receives && round == where && r == p->world / 2) {
                const sid_message *m = &in[rng_below(r_, receives)];
                p->wire[r].p[m->offset + rng_below(r_, (uint32_t)m->bytes)] ^= (uint8_t)(1u << rng_below(r_, 8));
            }
        }
    }
    return count;
}

static void faults(party *p, const sid_info *codec) {
    rng r_ = {p->n + p->world};
    float *x = malloc(4 * (p->n + 1));
    sid_error err;
    sid_report report;
    uint8_t failed[MOST];
    /* bodies that are summed on the way carry no checksum, as in anybody's all-reduce */
    const int watched = p->sizes.control && !(codec->traits & SID_LINEAR);
    fill(p, 1, DATA_NORMAL, x);
    CHECK(step_all(p, 0, &report, &err) == SID_OK, "%s: %s", p->name, err.text);
    for (uint32_t round = 0; round < p->sizes.rounds; round++) {
        float *was[MOST];
        for (uint32_t r = 0; r < p->world; r++) was[r] = kept_of(p, r);
        fill(p, 2 + round, DATA_NORMAL, x);
        const uint32_t count = hurt(p, 1 + round, round, &r_, failed, &err);
        if (watched && sid_exchange_messages(of(p, p->world / 2), round, 1, p->room)) {
            if (round + 1 < p->sizes.rounds)
                CHECK(count == p->world, "%s: a fault in round %u failed %u ranks", p->name, round, count);
            else
                CHECK(count >= 1, "%s: a fault in the last round failed nobody", p->name);
        }
        for (uint32_t r = 0; r < p->world; r++) {
            if (failed[r] && !momentum(p) && !strstr(p->name, "hierarchical"))
                CHECK(moved(p, r, was[r]) < 1e-5, "%s: round %u: rank %u's memory has moved by %g", p->name, round, r,
                      moved(p, r, was[r]));
            free(was[r]);
        }
        if (!p->sizes.control || round > 8) break;
    }
    fill(p, 50, DATA_NORMAL, x);
    CHECK(step_all(p, 50, &report, &err) == SID_OK, "%s: the step after: %s", p->name, err.text);
    free(x);
}
void test_exchange_faults(void) { walk(faults, 13); }
