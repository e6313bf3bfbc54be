/* Plans of several reductions, walked from the registry: what the ranks sum between the reductions, and what comes of it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

void test_reductions(void);
void test_reductions_low_rank(void);
void test_reductions_nonfinite(void);
void test_reductions_failed(void);
void test_reductions_limit(void);
void test_shapes_refused(void);

enum {
    MOST_RANKS = 8,
    STEPS = 3,
    N = 5000
};

/* Tensors of all kinds: vectors, tall and wide ones, a last row that is short, one element, none. */
static const sid_shape shapes[] = {{7, 1},    {1200, 40}, {0, 0},     {1, 1},     {1001, 50}, {64, 64},
                                   {900, 30}, {300, 2},   {300, 150}, {1127, 49}, {100, 0}};

static float x[MOST_RANKS][N], before[MOST_RANKS][N], after[N], out[N];

typedef struct ranks {
    uint32_t world;
    group g[MOST_RANKS];
    vec v[MOST_RANKS];
} ranks;

static int ranks_open(ranks *r, const sid_config *c, uint32_t world) {
    r->world = world;
    for (uint32_t i = 0; i < world; i++) {
        if (!group_open(&r->g[i], c)) return 0;
        r->v[i] = vec_new(c->dtype, c->n, CUT_ODD);
    }
    return r->g[0].sizes.reductions > 1;
}

static void ranks_close(ranks *r) {
    for (uint32_t i = 0; i < r->world; i++) {
        CHECK(group_intact(&r->g[i]) && vec_intact(&r->v[i]), "%s: wrote past a block", r->g[i].name);
        group_close(&r->g[i]);
        vec_free(&r->v[i]);
    }
}

static uint64_t width(const ranks *r) { return r->g[0].sizes.body_dtype == SID_I8 ? 1 : 4; }

/* The all-reduce of a slice: every rank gets the sum, in rank order; of bytes modulo 256. */
static void sum_slices(ranks *r, uint32_t reduction) {
    const sid_slice s = sid_plan_slice(r->g[0].plan, reduction);
    for (uint64_t i = 0; i < s.count; i++) {
        float sum = 0, v;
        uint8_t whole = 0;
        if (width(r) == 1) {
            for (uint32_t k = 0; k < r->world; k++) whole = (uint8_t)(whole + r->g[k].payload.p[s.offset + i]);
            for (uint32_t k = 0; k < r->world; k++) r->g[k].payload.p[s.offset + i] = whole;
            continue;
        }
        for (uint32_t k = 0; k < r->world; k++) {
            memcpy(&v, r->g[k].payload.p + s.offset + 4 * i, 4);
            sum = k ? sum + v : v;
        }
        for (uint32_t k = 0; k < r->world; k++) memcpy(r->g[k].payload.p + s.offset + 4 * i, &sum, 4);
    }
}

/* A step of all ranks, with the gradients that their vectors hold; returns whether it was not finite. Ranks whose bit is
 * set in `failing` send 0xff from reduction `from` on, and decode nothing. */
static uint32_t step_but(ranks *r, uint64_t step, uint32_t failing, uint32_t from) {
    uint32_t not_finite = 0, first = 0;
    while (failing >> first & 1) first++;
    sid_error err;
    sid_report report;
    for (uint32_t reduction = 0; reduction < r->g[0].sizes.reductions; reduction++) {
        for (uint32_t k = 0; k < r->world; k++) {
            const sid_step at = {.step = step, .seed = 3, .group = 1, .rank = k, .world = r->world};
            group *g = &r->g[k];
            const sid_slice slice = sid_plan_slice(g->plan, reduction);
            sid_status s;
            if (failing >> k & 1 && reduction >= from) {
                memset(g->payload.p + slice.offset, 0xff, slice.count * width(r));
                continue;
            }
            if (!reduction)
                s = sid_encode(g->plan, r->v[k].seg, r->v[k].n_seg, g->state.p, g->work.p, &at, g->payload.p, NULL);
            else
                s = sid_next_reduction(g->plan, reduction, r->v[k].seg, r->v[k].n_seg, g->state.p, g->work.p, &at,
                                       g->payload.p);
            CHECK(s == SID_OK, "%s: reduction %u: %s", g->name, reduction, sid_status_text(s));
        }
        sum_slices(r, reduction);
    }
    for (uint32_t k = 0; k < r->world; k++) {
        const sid_step at = {.step = step, .group = 1, .rank = k, .world = r->world};
        group *g = &r->g[k];
        if (failing >> k & 1) continue;
        const sid_status s = sid_decode(g->plan, g->payload.p, 0, 1, 1.0f / (float)r->world, r->v[k].seg, r->v[k].n_seg,
                                        g->state.p, &at, &report, &err);
        CHECK(s == SID_OK, "%s: %s", g->name, err.text);
        CHECK(vec_equal(&r->v[k], &r->v[first]), "%s: rank %u has decoded something else", g->name, k);
        CHECK(k == first || not_finite == report.nonfinite, "%s: rank %u reports %u", g->name, k, report.nonfinite);
        not_finite = report.nonfinite;
        const uint64_t extra = sid_plan_extra(g->plan);
        const int learns = (sid_plan_codec(g->plan)->traits & SID_SHAPED) != 0;
        CHECK((extra || !learns) && extra <= g->state.bytes, "%s: extra of %llu bytes", g->name,
              (unsigned long long)extra);
    }
    return not_finite;
}

static uint32_t step_all(ranks *r, uint64_t step) { return step_but(r, step, 0, 0); }

static float largest(const float *v, uint64_t n) {
    float m = 0;
    for (uint64_t i = 0; i < n; i++) m = fabsf(v[i]) > m ? fabsf(v[i]) : m;
    return m;
}

static sid_config shaped(const sid_info *codec, const char *memory, sid_dtype dtype) {
    sid_config c = {.codec = codec->name, .memory = memory, .n = N, .dtype = dtype};
    c.shapes = shapes;
    c.n_shapes = sizeof shapes / sizeof *shapes;
    return c;
}

/* fmax(), as it stands, makes gcc 12 for aarch64 break off in its vectoriser. */
static double larger(double a, double b) { return b > a ? b : a; }

/* What the ranks sent and what they keep make up what came in, for every number of ranks. */
static void conserved(const sid_info *codec, sid_dtype dtype, uint32_t world) {
    ranks r;
    const sid_config c = shaped(codec, "residual", dtype);
    if (!ranks_open(&r, &c, world)) {
        ranks_close(&r);
        return;
    }
    uint64_t body = 0;
    for (uint32_t i = 0; i < r.g[0].sizes.reductions; i++) {
        const sid_slice s = sid_plan_slice(r.g[0].plan, i);
        CHECK(s.count && s.offset == r.g[0].sizes.body_offset + width(&r) * body, "%s: slice %u", r.g[0].name, i);
        body += s.count;
    }
    CHECK(body == r.g[0].sizes.body_count && width(&r) * body < 2 * N, "%s: slices of %llu", r.g[0].name,
          (unsigned long long)body);
    for (uint64_t step = 0; step < STEPS; step++) {
        double bad = 0, top = 0, sum_of[N] = {0};
        for (uint32_t k = 0; k < world; k++) {
            data_make(x[k], N, step == 1 ? DATA_HEAVY : DATA_NORMAL, 10 * step + k);
            vec_set(&r.v[k], x[k]);
            vec_get(&r.v[k], x[k]);
            sid_residual_out(r.g[k].plan, r.g[k].state.p, before[k]);
            for (uint32_t i = 0; i < N; i++) sum_of[i] += (double)x[k][i] + (double)before[k][i];
            top += (double)(largest(x[k], N) + largest(before[k], N));
        }
        CHECK(!step_all(&r, step), "%s: not finite", r.g[0].name);
        vec_get(&r.v[0], out);
        top += (double)world * (double)largest(out, N);
        for (uint32_t k = 0; k < world; k++) {
            sid_residual_out(r.g[k].plan, r.g[k].state.p, after);
            for (uint32_t i = 0; i < N; i++) sum_of[i] -= (double)after[i];
            CHECK(largest(after, N) > 0, "%s: keeps nothing", r.g[0].name);
        }
        for (uint32_t i = 0; i < N; i++) bad = larger(bad, fabs(sum_of[i] - (double)world * (double)out[i]));
        const double unit = dtype == SID_F32 ? 0x1p-20 : dtype == SID_F16 ? 0x1p-10 : 0x1p-7;
        CHECK(bad <= top * unit, "%s, %u ranks, step %llu: %g is lost (of %g)", r.g[0].name, world,
              (unsigned long long)step, bad, top);
    }
    ranks_close(&r);
}

void test_reductions(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (int d = SID_F32; d <= SID_BF16; d++)
            for (uint32_t world = 1; world <= MOST_RANKS; world++)
                if (sid_codec_at(i)->traits & SID_SEVERAL_REDUCTIONS) conserved(sid_codec_at(i), (sid_dtype)d, world);
}

/* Matrices of rank 2 come through whole, and so does a matrix that is zero in all ranks but one. */
void test_reductions_low_rank(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        ranks r;
        sid_config c = shaped(sid_codec_at(i), "none", SID_F32);
        const sid_shape two[] = {{2400, 60}, {2600, 52}};
        if (!(sid_codec_at(i)->traits & SID_SHAPED)) continue;
        c.shapes = two;
        c.n_shapes = 2;
        if (ranks_open(&r, &c, 3))
            for (uint64_t step = 0; step < STEPS; step++) {
                double mean[N] = {0}, bad = 0, top = 0;
                float part[4 * 100];
                data_make(part, 400, DATA_NORMAL, step);
                for (uint32_t k = 0; k < 3; k++) {
                    for (uint32_t e = 0; e < N; e++) {
                        const uint32_t second = e >= 2400, cols = second ? 52 : 60, at = second ? e - 2400 : e;
                        const float *a = part + at / cols, *b = part + 200 + at % cols;
                        x[k][e] = second && k ? 0 : a[0] * b[0] + (float)k * a[100] * b[100];
                        mean[e] += (double)x[k][e] / 3;
                        top = larger(top, fabs((double)x[k][e]));
                    }
                    vec_set(&r.v[k], x[k]);
                }
                CHECK(!step_all(&r, step), "%s: not finite", r.g[0].name);
                vec_get(&r.v[0], out);
                for (uint32_t e = 0; e < N; e++) bad = larger(bad, fabs(mean[e] - (double)out[e]));
                CHECK(bad <= 1e-5 * top, "%s, step %llu: off by %g of %g", r.g[0].name, (unsigned long long)step, bad,
                      top);
            }
        ranks_close(&r);
    }
}

/* Rank k keeps what it kept before the step, but for rounding. */
static void keeps(ranks *r, uint32_t k, const float *kept) {
    float bad = 0;
    sid_residual_out(r->g[k].plan, r->g[k].state.p, after);
    for (uint32_t e = 0; e < N; e++) bad = fabsf(after[e] - kept[e]) > bad ? fabsf(after[e] - kept[e]) : bad;
    CHECK(bad <= 0x1p-20f * (largest(kept, N) + 6), "%s: rank %u keeps %g more", r->g[0].name, k, (double)bad);
}

/* NaN on one rank: all ranks decode NaN there, nothing of it is kept, and the step after is as if it had not been. */
void test_reductions_nonfinite(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        if (!(sid_codec_at(i)->traits & SID_SEVERAL_REDUCTIONS)) continue;
        for (uint32_t where = 3; where < N; where += 1111) {
            ranks r;
            const sid_config c = shaped(sid_codec_at(i), "residual", SID_F32);
            if (ranks_open(&r, &c, 3)) {
                float kept[3][N];
                for (uint64_t step = 0; step < 3; step++) {
                    for (uint32_t k = 0; k < 3; k++) {
                        data_make(x[k], N, DATA_NORMAL, step + 7 * k);
                        if (step == 1 && k == 1) x[k][where] = where % 2 ? NAN : INFINITY;
                        if (step == 1) sid_residual_out(r.g[k].plan, r.g[k].state.p, kept[k]);
                        vec_set(&r.v[k], x[k]);
                    }
                    CHECK(step_all(&r, step) == (step == 1), "%s: step %llu", r.g[0].name, (unsigned long long)step);
                    vec_get(&r.v[0], out);
                    CHECK(isfinite(out[where]) == (step != 1), "%s: element %u is %g", r.g[0].name, where,
                          (double)out[where]);
                    for (uint32_t k = 0; k < 3 && step == 1; k++) keeps(&r, k, kept[k]);
                    for (uint32_t e = 0; e < N && step == 2; e++) CHECK(isfinite(out[e]), "element %u", e);
                }
            }
            ranks_close(&r);
        }
    }
}

/* Ranks that cannot write a slice, whichever and however many: the step is not finite on the others, which keep nothing of
 * it; then all goes on. */
void test_reductions_failed(void) {
    static const uint32_t failing[] = {1, 2, 8, 1 | 4, 1 | 2 | 4, 2 | 4 | 8};
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (uint32_t k = 0; k < 2 * sizeof failing / sizeof *failing; k++) {
            ranks r;
            const sid_config c = shaped(sid_codec_at(i), "residual", SID_F32);
            const uint32_t who = failing[k / 2];
            float kept[4][N];
            if (!(sid_codec_at(i)->traits & SID_SEVERAL_REDUCTIONS)) continue;
            if (ranks_open(&r, &c, 4))
                for (uint64_t step = 0; step < 3; step++) {
                    for (uint32_t q = 0; q < 4; q++) {
                        data_make(x[q], N, DATA_NORMAL, step + 9 * q);
                        vec_set(&r.v[q], x[q]);
                        if (step == 1) sid_residual_out(r.g[q].plan, r.g[q].state.p, kept[q]);
                    }
                    const uint32_t not_finite = step == 1 ? step_but(&r, step, who, k % 2) : step_all(&r, step);
                    CHECK(not_finite == (step == 1), "%s: ranks %x fail in reduction %u, step %llu: %u", r.g[0].name,
                          who, k % 2, (unsigned long long)step, not_finite);
                    for (uint32_t q = 0; q < 4 && step == 1; q++) {
                        if (who >> q & 1) sid_unsend(r.g[q].plan, r.g[q].state.p);
                        if (who >> q & 1) sid_residual_in(r.g[q].plan, r.g[q].state.p, kept[q]);
                        keeps(&r, q, kept[q]);
                    }
                }
            ranks_close(&r);
        }
}

/* More ranks than a sum can hold are refused by every call. */
void test_reductions_limit(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        group g;
        const sid_config c = config_of(sid_codec_at(i), home_of(sid_codec_at(i)), 100, SID_F32);
        if (!(sid_codec_at(i)->traits & SID_SEVERAL_REDUCTIONS) || !group_open(&g, &c)) continue;
        vec v = vec_new(SID_F32, 100, CUT_ONE);
        data_make(x[0], 100, DATA_NORMAL, 1);
        vec_set(&v, x[0]);
        for (uint32_t more = 0; more < 2; more++) {
            const uint32_t world = (g.sizes.ranks ? g.sizes.ranks : 100000) + more;
            const sid_step at = {.rank = world - 1, .world = world};
            const sid_status want = g.sizes.ranks && more ? SID_E_UNSUPPORTED : SID_OK;
            sid_status s = sid_encode(g.plan, v.seg, v.n_seg, g.state.p, g.work.p, &at, g.payload.p, NULL);
            CHECK(s == want, "%s: %u ranks: %s", g.name, world, sid_status_text(s));
            s = sid_next_reduction(g.plan, 1, v.seg, v.n_seg, g.state.p, g.work.p, &at, g.payload.p);
            CHECK(s == want, "%s: %u ranks, reduction 1: %s", g.name, world, sid_status_text(s));
        }
        CHECK(group_intact(&g), "%s: canary", g.name);
        vec_free(&v);
        group_close(&g);
    }
}

void test_shapes_refused(void) {
    sid_error err;
    size_t bytes;
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        sid_config c = shaped(sid_codec_at(i), "residual", SID_F32);
        if (!(sid_codec_at(i)->traits & SID_SHAPED)) continue;
        c.n = N - 1;
        CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG && strstr(err.text, "shapes"), "more: %s", err.text);
        c.n = N + 1;
        CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_E_ARG && strstr(err.text, "shapes"), "less: %s", err.text);
        c.n = 0;
        c.n_shapes = 0;
        CHECK(sid_plan_make(&c, NULL, &bytes, &err) == SID_OK, "none: %s", err.text);
        group g;
        c = shaped(sid_codec_at(i), "residual", SID_F32);
        if (!group_open(&g, &c)) continue;
        const sid_step at = {.world = 2};
        vec v = vec_new(SID_F32, N, CUT_ONE);
        CHECK(!sid_encode(g.plan, v.seg, v.n_seg, g.state.p, g.work.p, &at, g.payload.p, NULL), "%s", g.name);
        for (uint32_t reduction = 0; reduction < 4; reduction++)
            CHECK((sid_next_reduction(g.plan, reduction, v.seg, v.n_seg, g.state.p, g.work.p, &at, g.payload.p) ==
                   SID_OK) == (reduction && reduction < g.sizes.reductions),
                  "reduction %u", reduction);
        const sid_slice none = sid_plan_slice(g.plan, g.sizes.reductions);
        CHECK(!none.count, "a slice past the last reduction");
        CHECK(sid_next_reduction(g.plan, 1, v.seg, 0, g.state.p, g.work.p, &at, g.payload.p) == SID_E_ARG,
              "no segments");
        CHECK(sid_next_reduction(g.plan, 1, v.seg, v.n_seg, NULL, g.work.p, &at, g.payload.p) == SID_E_ARG, "no state");
        vec_free(&v);
        group_close(&g);
    }
}
