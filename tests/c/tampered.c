/* A state from outside, whose header may hold any bytes: every call ends, keeps to its blocks, sends sound payloads and
 * loses nothing. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "test.h"

enum {
    HEADER = 192,
    READINGS = 64, /* of one encode, at most */
    STEPS = 4
};

/* What hurts: indices, sizes and floats at and beyond the ends of what is allowed. */
static const uint32_t nasty[] = {0,          1,          2,          7,          8,          9,          255,
                                 1u << 17,   1u << 20,   1u << 22,   0x1000000,  0x3f400000, 0x3f800000, 0x40000000,
                                 0x7effffff, 0x7f7fffff, 0x7f800000, 0x7f800001, 0x7fefffff, 0x7fffffff, 0x80000000,
                                 0x80000001, 0xbf800000, 0xff7fffff, 0xff800000, 0xfffffffe, 0xffffffff, 10000};

void state_edit(group *g, const uint8_t *d, size_t size, int own) {
    const uint64_t extra = own ? sid_plan_extra(g->plan) : 0, words = (HEADER + extra) / 4;
    for (; size >= 4; d += 4, size -= 4) {
        const uint64_t place = 4 * (((uint64_t)d[0] | (uint64_t)d[1] << 8) % words);
        uint8_t *to = g->state.p + (place < HEADER ? place : g->state.bytes - extra + place - HEADER);
        const uint32_t noise = d[3] * 0x01010101u ^ (uint32_t)d[2] << 11;
        const uint32_t value = d[2] < 224 ? nasty[d[2] % (sizeof nasty / sizeof *nasty)] : noise;
        memcpy(to, &value, 4);
    }
}

static int finite(const float *x, uint64_t n) {
    for (uint64_t i = 0; i < n; i++)
        if (sid_key(x[i]) >= SID_KEY_INF) return 0;
    return 1;
}

static void check_conserved(const group *g, uint64_t n, const float *grad, const float *before, const float *sent,
                            const float *after) {
    double max = 0, bad = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double all[] = {fabs((double)before[i]), fabs((double)grad[i]), fabs((double)sent[i])};
        for (int k = 0; k < 3; k++) max = all[k] > max ? all[k] : max;
        const double lost = fabs((double)before[i] + (double)grad[i] - (double)sent[i] - (double)after[i]);
        if (fabsf(after[i]) < FLT_MAX && !(lost <= bad)) bad = lost; /* else saturated */
    }
    CHECK(bad <= max * 0x1p-20, "%s: %g is lost (largest %g)", g->name, bad, max);
}

void state_lives(group *g, const sid_config *c, const uint8_t *d, size_t size, int own) {
    const uint64_t n = c->n, kept = sid_memory_vectors(g->plan) * n;
    const uint8_t how = size ? d[0] : 0;
    const int exact = conserves(g, c) && c->dtype == SID_F32 && !own, safe = !own || !sid_plan_extra(g->plan);
    float *room = malloc(4 * (size_t)(4 * n + 2 * kept) + 4), *grad = room, *sent = room + n, *before = sent + n,
          *after = before + n + kept; /* without a memory: n zeros */
    vec x = vec_new(c->dtype, n, (cut)(how >> 2 & 1)), out = vec_new(c->dtype, n, CUT_ONE);
    sid_error err;
    sid_report report;
    d += size != 0;
    size -= size != 0;
    for (uint64_t step = 0; step < STEPS; step++) {
        const uint32_t world = g->sizes.reductions > 1 && step == 2 ? 2 : 1;
        const sid_step at = {.step = step, .seed = 5, .group = 1, .rank = 0, .world = world};
        const int not_finite = step == STEPS - 1 && n;
        sid_stats stats;
        data_make(grad, n, how & 2 ? DATA_INTEGERS : DATA_TAILS, step + 1);
        if (not_finite) grad[n / 2] = NAN;
        vec_set(&x, grad);
        vec_get(&x, grad);
        if (step || !(how & 1)) state_edit(g, d, size, own); /* else the first step is an honest one */
        CHECK(!sid_residual_out(g->plan, g->state.p, before), "%s: residual_out", g->name);
        if (safe) CHECK(finite(before, kept), "%s: step %d: what is kept is not finite", g->name, (int)step);
        CHECK(!sid_encode(g->plan, x.seg, x.n_seg, g->state.p, g->work.p, &at, g->payload.p, &stats), "%s: encode",
              g->name);
        CHECK(stats.passes >= 1 && stats.passes <= READINGS, "%s: %u passes", g->name, stats.passes);
        for (uint32_t reduction = 1; reduction < g->sizes.reductions; reduction++)
            CHECK(!sid_next_reduction(g->plan, reduction, x.seg, x.n_seg, g->state.p, g->work.p, &at, g->payload.p),
                  "%s: reduction %u", g->name, reduction);
        CHECK(!sid_check(g->plan, g->payload.p, g->sizes.payload, &at, &err), "%s: step %d: %s", g->name, (int)step,
              err.text);
        CHECK(!sid_residual_out(g->plan, g->state.p, after), "%s: residual_out", g->name);
        CHECK(!sid_decode(g->plan, g->payload.p, 0, 1, 1, out.seg, out.n_seg, NULL, &at, &report, &err), "%s: %s",
              g->name, err.text);
        vec_get(&out, sent);
        if (exact && world == 1 && !not_finite) check_conserved(g, n, grad, before, sent, after);
        if (how & 8) state_edit(g, d, size, own);
        CHECK(!sid_decode(g->plan, g->payload.p, 0, 1, 1, x.seg, x.n_seg, g->state.p, &at, &report, &err), "%s: %s",
              g->name, err.text);
        CHECK(!not_finite || report.nonfinite, "%s: NaN goes unseen", g->name);
        CHECK(group_intact(g) && vec_intact(&x) && vec_intact(&out), "%s: wrote past a block", g->name);
    }
    state_edit(g, d, size, own);
    CHECK(!sid_rescale(g->plan, g->state.p, 0.5f), "%s: rescale", g->name);
    CHECK(!sid_residual_out(g->plan, g->state.p, after), "%s: residual_out", g->name);
    if (safe) CHECK(finite(after, kept), "%s: what is kept after rescale is not finite", g->name);
    state_edit(g, d, size, own);
    CHECK(!sid_unsend(g->plan, g->state.p), "%s: unsend", g->name);
    memset(after, 0, 4 * kept);
    CHECK(!sid_residual_in(g->plan, g->state.p, after), "%s: residual_in", g->name);
    CHECK(!sid_residual_out(g->plan, g->state.p, before) && !memcmp(before, after, 4 * kept), "%s: back", g->name);
    CHECK(group_intact(g), "%s: wrote past a block", g->name);
    vec_free(&x);
    vec_free(&out);
    free(room);
}
