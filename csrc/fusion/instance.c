/* Instances: what is refused, what a group costs, prefix sums. */
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "planner.h"

sid_fuse_status sid_fuse_fail(sid_fuse_error *err, sid_fuse_status s, const char *fmt, ...) {
    if (!err) return s;
    va_list a;
    va_start(a, fmt);
    vsnprintf(err->text, sizeof err->text, fmt, a);
    va_end(a);
    return s;
}

void *sid_take(sid_arena *a, size_t count, size_t size) {
    uint8_t *p = a->base ? a->base + a->used : NULL;
    a->used += (count * size + 63) / 64 * 64;
    return p;
}

/* ---- costs ------------------------------------------------------------------------------------------------------ */

sid_piece sid_piece_of(const sid_curve *c, int64_t x) {
    const sid_knot *k = c->knots;
    if (c->n == 1) return (sid_piece){0, INT64_MAX, k->ps, 0, 0, 1, 0};
    uint32_t lo = 0, hi = c->n - 1; /* the piece that starts at the last knot <= x, or the last piece */
    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (k[mid].bytes <= x)
            lo = mid;
        else
            hi = mid;
    }
    sid_piece p = sid_slope(k[lo + 1].ps - k[lo].ps, k[lo + 1].bytes - k[lo].bytes);
    p.from = k[lo].bytes;
    if (lo + 2 < c->n) p.to = k[lo + 1].bytes;
    p.ps = k[lo].ps;
    return p;
}

sid_piece sid_slope(int64_t rise, int64_t width) {
    sid_piece p = {0, INT64_MAX, 0, rise / width, 0, (uint64_t)width, 0};
    int64_t rest = rise % width;
    if (rest < 0) { /* round down, also where the curve falls */
        p.slope--;
        rest += width;
    }
    p.rest = (uint64_t)rest;
    p.inverse = rest ? (uint64_t)(((sid_wide_unsigned)p.rest << 64) / p.width) : 0;
    return p;
}

int64_t sid_curve_at(const sid_curve *c, int64_t x) {
    const sid_piece p = sid_piece_of(c, x);
    return sid_piece_at(&p, x);
}

int64_t sid_least(const sid_curve *c, int64_t from, int64_t to) {
    if (!c->n) return 0;
    int64_t low = sid_min(sid_curve_at(c, from), sid_curve_at(c, to));
    for (uint32_t i = 0; i < c->n && c->knots[i].bytes <= to; i++)
        if (c->knots[i].bytes > from) low = sid_min(low, c->knots[i].ps);
    return low;
}

sid_cost sid_cost_at(const sid_method *m, int64_t x, int64_t rest) {
    return (sid_cost){m->encode.n ? sid_curve_at(&m->encode, x) : -1, sid_curve_at(&m->exchange, x),
                      m->decode.n ? sid_curve_at(&m->decode, x) : -1,
                      m->delay.n ? sid_min(sid_curve_at(&m->delay, x), rest) : 0};
}

/* ---- checks ----------------------------------------------------------------------------------------------------- */

/* At most what n groups of `total` bytes together can cost; more than the limit counts as the limit + 1. */
static int64_t cost_of_all(const sid_curve *c, uint32_t n, int64_t total) {
    if (!c->n) return 0;
    /* A line above the curve: from its first knot, as steep as its steepest view of any other point up to `total`. */
    const int64_t latency = c->knots[0].ps;
    sid_wide most = 0;
    for (uint32_t i = 1; i <= c->n; i++) {
        const int last = i == c->n || c->knots[i].bytes > total;
        const int64_t x = last ? total : c->knots[i].bytes, y = last ? sid_curve_at(c, total) : c->knots[i].ps;
        if (x && y > latency) {
            const sid_wide rise = (sid_wide)(y - latency) * total / x + n;
            if (rise > most) most = rise;
        }
        if (last) break;
    }
    most += (sid_wide)n * latency;
    return most > SID_FUSE_LIMIT ? SID_FUSE_LIMIT + 1 : (int64_t)most;
}

static sid_fuse_status check_curve(const sid_curve *c, uint32_t method, const char *stage, int64_t total,
                                   sid_fuse_error *err) {
    if (!c->n) return SID_FUSE_OK;
    if (!c->knots) return sid_fuse_fail(err, SID_FUSE_E_ARG, "method %u: %s: knots is NULL", method, stage);
    const sid_knot *k = c->knots;
    if (k[0].bytes)
        return sid_fuse_fail(err, SID_FUSE_E_FIRST_KNOT,
                             "method %u: %s: the first knot is at %" PRId64 " bytes; it must be at 0 (the latency)",
                             method, stage, k[0].bytes);
    for (uint32_t i = 0; i < c->n; i++) {
        if (k[i].ps < 0)
            return sid_fuse_fail(err, SID_FUSE_E_NEGATIVE_TIME,
                                 "method %u: %s: knot %u has %" PRId64 " ps: it must not be negative", method, stage, i,
                                 k[i].ps);
        if (k[i].ps > SID_FUSE_LIMIT || k[i].bytes > SID_FUSE_LIMIT)
            return sid_fuse_fail(err, SID_FUSE_E_SUM, "method %u: %s: knot %u is above 2^60", method, stage, i);
        if (i && k[i].bytes <= k[i - 1].bytes)
            return sid_fuse_fail(err, SID_FUSE_E_KNOT_ORDER,
                                 "method %u: %s: knot %u is at %" PRId64 " bytes, not after knot %u at %" PRId64,
                                 method, stage, i, k[i].bytes, i - 1, k[i - 1].bytes);
    }
    if (c->n > 1 && total > k[c->n - 1].bytes) { /* where the last slope leads */
        const sid_knot a = k[c->n - 2], b = k[c->n - 1];
        const sid_wide width = b.bytes - a.bytes, rise = (sid_wide)(b.ps - a.ps) * (total - b.bytes);
        if (rise < -(sid_wide)b.ps * width)
            return sid_fuse_fail(err, SID_FUSE_E_FALLS,
                                 "method %u: %s: the last slope falls below 0 before %" PRId64
                                 " bytes (all tensors); add "
                                 "a knot there",
                                 method, stage, total);
        if (rise > SID_FUSE_LIMIT * width)
            return sid_fuse_fail(err, SID_FUSE_E_SUM, "method %u: %s: above 2^60 ps at %" PRId64 " bytes (all tensors)",
                                 method, stage, total);
    }
    return SID_FUSE_OK;
}

sid_fuse_status sid_fuse_check(const sid_instance *in, sid_fuse_error *err) {
    return sid_check_instance(in, SID_FUSE_LIMIT, err);
}

sid_fuse_status sid_check_instance(const sid_instance *in, int64_t limit, sid_fuse_error *err) {
    if (err) err->text[0] = 0;
    if (!in) return sid_fuse_fail(err, SID_FUSE_E_ARG, "the instance is NULL");
    if (!in->n || in->n > SID_FUSE_MAX_TENSORS)
        return sid_fuse_fail(err, SID_FUSE_E_TENSORS, "%u tensors: there must be 1 to %d", in->n, SID_FUSE_MAX_TENSORS);
    if (!in->n_methods || in->n_methods > SID_FUSE_MAX_METHODS)
        return sid_fuse_fail(err, SID_FUSE_E_METHODS, "%u methods: there must be 1 to %d", in->n_methods,
                             SID_FUSE_MAX_METHODS);
    if (!in->backward_ps || !in->bytes || !in->methods)
        return sid_fuse_fail(err, SID_FUSE_E_ARG, "backward_ps, bytes or methods is NULL");
    if (in->forward_ps < 0)
        return sid_fuse_fail(err, SID_FUSE_E_NEGATIVE_TIME, "forward_ps is %" PRId64 ": it must not be negative",
                             in->forward_ps);
    if (in->max_group_bytes < 0)
        return sid_fuse_fail(err, SID_FUSE_E_NEGATIVE_BYTES, "max_group_bytes is %" PRId64 ": it must not be negative",
                             in->max_group_bytes);
    if (in->slowdown_permille > 999)
        return sid_fuse_fail(err, SID_FUSE_E_SHARE, "slowdown_permille is %u: it must be at most 999",
                             in->slowdown_permille);
    if (in->forward_ps > SID_FUSE_LIMIT) return sid_fuse_fail(err, SID_FUSE_E_SUM, "forward_ps is above 2^60");
    int64_t time = in->forward_ps, total = 0;
    for (uint32_t i = 0; i < in->n; i++) {
        const int64_t b = in->backward_ps[i], s = in->bytes[i];
        if (b < 0)
            return sid_fuse_fail(err, SID_FUSE_E_NEGATIVE_TIME,
                                 "tensor %u: backward_ps is %" PRId64 ": it must not be negative", i, b);
        if (s < 0)
            return sid_fuse_fail(err, SID_FUSE_E_NEGATIVE_BYTES,
                                 "tensor %u: bytes is %" PRId64 ": it must not be negative", i, s);
        if (b > SID_FUSE_LIMIT - time || s > SID_FUSE_LIMIT - total)
            return sid_fuse_fail(err, SID_FUSE_E_SUM, "tensor %u: the %s up to here add up to more than 2^60", i,
                                 b > SID_FUSE_LIMIT - time ? "times" : "bytes");
        time += b;
        total += s;
    }
    int64_t worst = 0;
    for (uint32_t m = 0; m < in->n_methods; m++) {
        const sid_method *q = &in->methods[m];
        if (!q->exchange.n)
            return sid_fuse_fail(err, SID_FUSE_E_NO_EXCHANGE, "method %u: exchange has no knots: it needs at least one",
                                 m);
        sid_fuse_status s = check_curve(&q->encode, m, "encode", total, err);
        if (!s) s = check_curve(&q->exchange, m, "exchange", total, err);
        if (!s) s = check_curve(&q->decode, m, "decode", total, err);
        if (!s) s = check_curve(&q->delay, m, "delay", total, err);
        if (s) return s;
        /* The longest time of any plan: all three stages and the delay at their dearest, whichever method it takes for which group. */
        const int64_t parts[4] = {cost_of_all(&q->encode, in->n, total), cost_of_all(&q->exchange, in->n, total),
                                  cost_of_all(&q->decode, in->n, total), cost_of_all(&q->delay, in->n, total)};
        for (int k = 0; k < 4; k++) worst = parts[k] > SID_FUSE_LIMIT - worst ? SID_FUSE_LIMIT + 1 : worst + parts[k];
        if (time > limit || worst > limit - time)
            return sid_fuse_fail(err, SID_FUSE_E_SUM,
                                 "method %u: forward, backward and %u groups by the methods up to here may add up to "
                                 "more than %s ps",
                                 m, in->n, limit == SID_FUSE_LIMIT ? "2^60" : "2^59 (scenarios may double it)");
    }
    return SID_FUSE_OK;
}

/* ---- prepared --------------------------------------------------------------------------------------------------- */

void sid_problem_layout(sid_problem *p, sid_arena *a, uint32_t n) {
    p->back = sid_take(a, n + 1, sizeof *p->back);
    p->size = sid_take(a, n + 1, sizeof *p->size);
    p->far = sid_take(a, n, sizeof *p->far);
}

void sid_problem_fill(sid_problem *p, const sid_instance *in) {
    p->in = in;
    p->n = in->n;
    p->back[0] = p->size[0] = 0;
    for (uint32_t i = 0; i < in->n; i++) {
        p->back[i + 1] = p->back[i] + in->backward_ps[i];
        p->size[i + 1] = p->size[i] + in->bytes[i];
    }
    for (uint32_t i = 0, end = 0; i < in->n; i++) {
        if (end < i + 1) end = i + 1;
        while (end < in->n && !(in->cut_before && in->cut_before[end]) &&
               (!in->max_group_bytes || p->size[end + 1] - p->size[i] <= in->max_group_bytes))
            end++;
        p->far[i] = end;
    }
}
