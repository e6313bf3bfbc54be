/* Encode and decode, for every codec, memory and dtype of the registry. */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "test.h"

void test_round_trip(void);
void test_settings(void);
void test_edge_values(void);
void test_gather(void);
void test_linear_sum(void);
void test_isa_agrees(void);
void test_steady(void);
void test_kept(void);
void test_nonfinite(void);
void test_thrown_away(void);

enum {
    MAX_N = 70001
};
enum {
    MAX_VECTORS = 4
};
static float grad[MAX_N], before[MAX_VECTORS * MAX_N], after[MAX_VECTORS * MAX_N], sent[MAX_N];

static float largest(const float *x, uint64_t n) {
    float m = 0;
    for (uint64_t i = 0; i < n; i++) m = fabsf(x[i]) > m ? fabsf(x[i]) : m;
    return m;
}

/* A few steps of one group: what was sent and what is kept make up the gradient and what was kept before; segments,
 * canaries, payload bytes and sizes are as promised. */
static void steps(const sid_config *c, cut how, int kind, uint32_t world) {
    group g, twin;
    if (!group_open(&g, c)) return;
    if (!group_open(&twin, c)) return;
    vec x = vec_new(c->dtype, c->n, how), copy = vec_new(c->dtype, c->n, CUT_ONE), out = vec_new(c->dtype, c->n, how);
    const uint32_t traits = sid_plan_codec(g.plan)->traits, vectors = sid_memory_vectors(g.plan);
    const int exact = conserves(&g, c);
    if (g.sizes.reductions > 1) world = 1; /* reductions.c has several */
    for (uint64_t step = 0; step < 3; step++) {
        const sid_step at = {.step = step, .seed = 11, .group = 3, .rank = world - 1, .world = world};
        sid_stats stats, again;
        sid_report report;
        sid_error err;
        data_make(grad, c->n, kind, step + 1);
        vec_set(&x, grad);
        vec_set(&copy, grad);
        vec_get(&x, grad);
        if (exact) sid_residual_out(g.plan, g.state.p, before);

        sid_status s = sid_encode(g.plan, x.seg, x.n_seg, g.state.p, g.work.p, &at, g.payload.p, &stats);
        CHECK(s == SID_OK, "%s, cut %d: encode: %s", g.name, how, sid_status_text(s));
        CHECK(vec_equal(&x, &copy), "%s, cut %d: encode wrote to the gradient", g.name, how);
        CHECK(group_intact(&g) && vec_intact(&x), "%s, cut %d: encode wrote past a block", g.name, how);
        CHECK(stats.count <= c->n && stats.nonfinite == 0, "%s: count %llu, %llu not finite", g.name,
              (unsigned long long)stats.count, (unsigned long long)stats.nonfinite);
        CHECK(stats.passes >= 1 && stats.passes <= 8, "%s: %u passes", g.name, stats.passes);
        s = sid_check(g.plan, g.payload.p, g.sizes.payload, &at, &err);
        CHECK(s == SID_OK, "%s: check: %s", g.name, err.text);

        const sid_segment bytes = {g.payload.p, g.payload.bytes / 4};
        test_digest = test_digest * 0x9e3779b97f4a7c15u + sid_checksum(&bytes, 1, SID_F32);

        /* one long segment, another place in memory: the same bytes */
        s = sid_encode(twin.plan, copy.seg, copy.n_seg, twin.state.p, twin.work.p, &at, twin.payload.p, &again);
        CHECK(s == SID_OK && !memcmp(g.payload.p, twin.payload.p, g.payload.bytes),
              "%s, cut %d: the payload depends on the segments", g.name, how);
        CHECK(stats.count == again.count && stats.found == again.found, "%s: other statistics", g.name);

        vec_fill(&out, 0x77);
        s = sid_decode(g.plan, g.payload.p, g.sizes.payload, 1, 1.0f, out.seg, out.n_seg, NULL, &at, &report, &err);
        CHECK(s == SID_OK && !report.nonfinite, "%s, cut %d: decode: %s", g.name, how, err.text);
        CHECK(vec_intact(&out) && group_intact(&g), "%s, cut %d: decode wrote past a block", g.name, how);
        vec_get(&out, sent);

        if (traits & SID_LOSSLESS && world == 1 && (exact || !vectors))
            CHECK(vec_equal(&out, &copy), "%s: lossless, but changed", g.name);
        if (!exact) continue;
        sid_residual_out(g.plan, g.state.p, after);
        float max = largest(before, c->n), bad = 0;
        max += largest(grad, c->n);
        max = largest(sent, c->n) > max ? largest(sent, c->n) : max; /* such as a sign's magnitude */
        /* elements are sent as they are, or not at all */
        const uint32_t forms = SID_FLAG_LOG8 | SID_FLAG_LOG4 | SID_FLAG_LOG2 | SID_FLAG_MEAN | SID_FLAG_LEVELS;
        const uint32_t changed = ((sid_header *)(void *)g.payload.p)->flags & forms;
        const int whole = (traits & (SID_LINEAR | SID_SPARSE)) && !(traits & SID_SEVERAL_REDUCTIONS) && !changed;
        for (uint64_t i = 0; i < c->n; i++) {
            const float d = fabsf((sent[i] - before[i]) + after[i] - grad[i]);
            if (!whole && fabsf(after[i]) == FLT_MAX) continue; /* saturated */
            bad = d > bad ? d : bad;
        }
        /* `out` has been rounded to the dtype; integers that are sent as they are stand that */
        const float unit = c->dtype == SID_F32 || (whole && kind == DATA_INTEGERS) ? 0x1p-22f
                           : c->dtype == SID_F16                                   ? 0x1p-10f
                                                                                   : 0x1p-7f;
        const float least = whole || c->dtype == SID_F32 ? 0
                            : c->dtype == SID_F16        ? 0x1p-25f
                                                         : 0x1p-134f; /* subnormal */
        CHECK(bad <= max * unit * (world > 1 ? 2 : 1) + least,
              "%s, cut %d, data %d, step %llu: %g is lost (largest %g)", g.name, how, kind, (unsigned long long)step,
              (double)bad, (double)max);
    }
    vec_free(&x);
    vec_free(&copy);
    vec_free(&out);
    group_close(&g);
    group_close(&twin);
}

/* Unless all are asked for: every codec with none and residual, in turns with the other memories; of large groups one
 * dtype each. The product of all would outgrow the suite's time with every codec that comes. */
static int chosen(uint32_t codec, uint32_t memory, int dtype, uint64_t n) {
    if (test_all) return 1;
    if (memory > 1 && (codec + memory) % 4) return 0;
    return n < 5000 || dtype == (int)((codec + memory) % 3);
}

static void every(void (*run)(const sid_config *, uint32_t), uint64_t n, uint32_t arg) {
    for (uint32_t i = 0; sid_codec_at(i); i++)
        for (uint32_t m = 0; sid_memory_at(m); m++)
            for (int d = SID_F32; d <= SID_BF16 && go_together(sid_codec_at(i), sid_memory_at(m)); d++) {
                sid_config c = config_of(sid_codec_at(i), sid_memory_at(m), n, (sid_dtype)d);
                if (!chosen(i, m, d, n)) continue;
                run(&c, arg);
                c.flush = 1;
                if (sid_codec_at(i)->traits & SID_LOSSLESS) run(&c, arg);
            }
}

static void run_integers(const sid_config *c, uint32_t how) { steps(c, (cut)how, DATA_INTEGERS, 1); }

void test_round_trip(void) {
    static const uint64_t sizes[] = {0,    1,    2,    15,   16,    17,    1023,  1024,
                                     1025, 4095, 4096, 4097, 65535, 65536, 65537, MAX_N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (uint32_t how = 0; how < CUTS; how++)
            if (sizes[i] < 5000 || how == i % CUTS) every(run_integers, sizes[i], how);
}

static void run_settings(const sid_config *base, uint32_t how) {
    sid_config c = *base;
    sid_setting s;
    for (uint32_t i = 1; setting_at(sid_codec_find(c.codec), sid_memory_find(c.memory), i, &s, &c.n_settings); i++) {
        c.settings = &s;
        steps(&c, (cut)how, i % 2 ? DATA_INTEGERS : DATA_HEAVY, 1);
    }
}

void test_settings(void) {
    every(run_settings, 1500, CUT_ODD);
    every(run_settings, MAX_N, CUT_ONE);
}

static void run_kind(const sid_config *c, uint32_t kind) {
    /* halves cannot hold the largest floats: what they would show is their own overflow */
    if (kind == DATA_HUGE && c->dtype != SID_F32) return;
    if (kind == DATA_HUGE && sid_codec_find(c->codec)->traits & SID_LINEAR) return; /* saturates, as documented */
    steps(c, CUT_ODD, (int)kind, 1 + kind % 3);
}

void test_edge_values(void) {
    for (uint32_t kind = DATA_NORMAL; kind < DATAS; kind++) {
        every(run_kind, 1, kind);
        every(run_kind, 4500, kind);
    }
}

/* ---- several ranks ----------------------------------------------------------------------------------------------- */

enum {
    WORLD = 3
};

/* Encodes for WORLD ranks; payloads lie one after the other in `all`. */
static sid_status encode_all(group *g, const sid_config *c, uint8_t *all, uint64_t stride, vec *x) {
    sid_status s = SID_OK;
    const int alone = g->sizes.reductions > 1; /* reductions.c has the others */
    for (uint32_t rank = 0; rank < WORLD && !s; rank++) {
        const sid_step at = {.step = 4, .rank = alone ? 0 : rank, .world = alone ? 1 : WORLD};
        data_make(grad, c->n, DATA_NORMAL, rank + 10);
        vec_set(x, grad);
        memset(g->state.p, 0, g->state.bytes); /* each rank has its own */
        s = sid_encode(g->plan, x->seg, x->n_seg, g->state.p, g->work.p, &at, g->payload.p, NULL);
        memcpy(all + rank * stride, g->payload.p, g->payload.bytes);
    }
    return s;
}

/* Payloads that are not added up: what all of them say is what comes out, whatever the scale, and nothing larger. */
static void check_vote(group *g, const sid_config *c, const uint8_t *all, uint64_t stride, vec *x) {
    const sid_step at = {.step = 4};
    float most = 0;
    uint64_t agree = 0, bad = 0, same = 0;
    sid_error err;
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        CHECK(!sid_decode(g->plan, all + rank * stride, 0, 1, 1, x->seg, x->n_seg, NULL, &at, NULL, &err), "%s",
              err.text);
        vec_get(x, sent);
        most = largest(sent, c->n) > most ? largest(sent, c->n) : most;
        for (uint64_t i = 0; i < c->n; i++) {
            if (rank == 0) before[i] = sent[i];
            if (before[i] != sent[i]) before[i] = NAN;
        }
    }
    for (int k = 0; k < 2; k++) {
        CHECK(!sid_decode(g->plan, all, stride, WORLD, k ? 1.0f / (float)WORLD : 7.0f, x->seg, x->n_seg, NULL, &at,
                          NULL, &err),
              "%s", err.text);
        vec_get(x, k ? sent : after);
    }
    for (uint64_t i = 0; i < c->n; i++) {
        same += sent[i] == after[i];
        agree += before[i] == before[i];
        bad += before[i] == before[i] ? sent[i] != before[i] : !(fabsf(sent[i]) <= most);
    }
    CHECK(agree && agree < c->n && !bad, "%s: of %llu elements %llu are agreed on, %llu wrong", g->name,
          (unsigned long long)c->n, (unsigned long long)agree, (unsigned long long)bad);
    CHECK(same == c->n, "%s: the scale matters", g->name);
}

static void run_gather(const sid_config *c, uint32_t how) {
    group g;
    sid_error err;
    if (!group_open(&g, c)) return;
    const uint64_t stride = g.sizes.payload + 64;
    block all = block_new((size_t)stride * WORLD, 0);
    vec x = vec_new(c->dtype, c->n, (cut)how), want = vec_new(c->dtype, c->n, CUT_ONE);
    CHECK(!encode_all(&g, c, all.p, stride, &x), "%s: encode", g.name);
    const sid_step at = {.step = 4};

    /* sum in rank order in float32; the parts are exact in a float32 group */
    memset(after, 0, sizeof after);
    for (uint32_t rank = 0; rank < WORLD; rank++) {
        CHECK(!sid_decode(g.plan, all.p + rank * stride, 0, 1, 1, x.seg, x.n_seg, NULL, &at, NULL, &err), "%s",
              err.text);
        vec_get(&x, sent);
        for (uint64_t i = 0; i < c->n; i++) after[i] += sent[i];
    }
    for (uint64_t i = 0; i < c->n; i++) after[i] *= 1.0f / (float)WORLD;
    CHECK(!sid_decode(g.plan, all.p, stride, WORLD, 1.0f / (float)WORLD, x.seg, x.n_seg, NULL, &at, NULL, &err), "%s",
          err.text);
    vec_get(&x, sent);
    const void *places[WORLD];
    for (uint32_t rank = 0; rank < WORLD; rank++) places[rank] = all.p + rank * stride;
    CHECK(!sid_decode_list(g.plan, places, WORLD, 1.0f / (float)WORLD, x.seg, x.n_seg, NULL, &at, NULL, &err), "%s",
          err.text);
    vec_get(&x, before);
    CHECK(!memcmp(before, sent, 4 * c->n), "%s: a list of payloads decodes to other bits", g.name);
    places[WORLD - 1] = all.p + 4;
    CHECK(sid_decode_list(g.plan, places, WORLD, 1, x.seg, x.n_seg, NULL, &at, NULL, &err) == SID_E_ARG, "%s", g.name);
    float bad = 0;
    for (uint64_t i = 0; i < c->n; i++) bad = fabsf(sent[i] - after[i]) > bad ? fabsf(sent[i] - after[i]) : bad;
    const int linear = (sid_plan_codec(g.plan)->traits & SID_LINEAR) != 0; /* these scale before they sum */
    const float unit = c->dtype == SID_F32 ? (linear ? 0x1p-22f : 0) : c->dtype == SID_F16 ? 0x1p-9f : 0x1p-6f;
    if (sid_plan_codec(g.plan)->traits & SID_VOTE && bad > unit * largest(after, c->n))
        check_vote(&g, c, all.p, stride, &x);
    else
        CHECK(bad <= unit * largest(after, c->n), "%s: decode of 3 is off by %g", g.name, (double)bad);

    CHECK(vec_intact(&x) && block_intact(&all) && group_intact(&g), "%s: canary", g.name);
    /* the second payload is broken: it is named, and nothing is written */
    sid_report report;
    all.p[stride + 20] ^= 1;
    vec_fill(&x, 0x31);
    const sid_status s = sid_decode(g.plan, all.p, stride, WORLD, 1, x.seg, x.n_seg, NULL, &at, &report, &err);
    CHECK(s == SID_E_CORRUPT && report.culprit == 1 && err.text[0], "%s: %s, culprit %u", g.name, sid_status_text(s),
          report.culprit);
    CHECK(vec_filled(&x, 0x31), "%s: a refused decode wrote", g.name);
    vec_free(&x);
    vec_free(&want);
    block_free(&all);
    group_close(&g);
}

void test_gather(void) {
    every(run_gather, 33, CUT_ODD);
    every(run_gather, MAX_N, CUT_ODD);
}

/* What an all-reduce does to linear bodies: summed in their own dtype, header and tail untouched. */
static void run_linear_sum(const sid_config *c, uint32_t how) {
    group g;
    sid_error err;
    if (!(sid_codec_find(c->codec)->traits & SID_LINEAR) || !group_open(&g, c)) return;
    const uint32_t traits = sid_plan_memory(g.plan)->traits;
    if (g.sizes.reductions > 1) { /* reductions.c */
        group_close(&g);
        return;
    }
    if (traits & SID_MOMENTUM && !(traits & SID_FEEDBACK)) { /* what is sent in the first step is not the gradient */
        group_close(&g);
        return;
    }
    block all = block_new((size_t)g.sizes.payload * WORLD, 0);
    vec x = vec_new(c->dtype, c->n, (cut)how);
    CHECK(!encode_all(&g, c, all.p, g.sizes.payload, &x), "%s: encode", g.name);
    block single = block_new(all.bytes, 0);
    memcpy(single.p, all.p, all.bytes);
    const sid_dtype d = g.sizes.body_dtype;
    for (uint64_t i = 0; i < g.sizes.body_count; i++) {
        float sum = 0;
        for (uint32_t rank = 0; rank < WORLD; rank++) {
            const uint8_t *b = all.p + rank * g.sizes.payload + g.sizes.body_offset;
            float v = 0;
            uint16_t h;
            if (d == SID_F32)
                memcpy(&v, b + 4 * i, 4);
            else {
                memcpy(&h, b + 2 * i, 2);
                v = d == SID_F16 ? sid_f16_to_f32(h) : sid_bf16_to_f32(h);
            }
            sum += v;
        }
        uint8_t *b = all.p + g.sizes.body_offset;
        const uint16_t h = d == SID_F16 ? sid_f32_to_f16(sum) : sid_f32_to_bf16(sum);
        if (d == SID_F32)
            memcpy(b + 4 * i, &sum, 4);
        else
            memcpy(b + 2 * i, &h, 2);
    }
    const int sparse = (sid_plan_codec(g.plan)->traits & SID_SPARSE) != 0;
    memset(after, 0, sizeof after);
    for (uint32_t rank = 0; rank < WORLD; rank++) { /* what one that does not send all of it sends is its own affair */
        data_make(grad, c->n, DATA_NORMAL, rank + 10);
        if (sparse) {
            const uint8_t *own = single.p + rank * g.sizes.payload;
            CHECK(!sid_decode(g.plan, own, 0, 1, 1, x.seg, x.n_seg, NULL, NULL, NULL, &err), "%s: %s", g.name,
                  err.text);
            vec_get(&x, grad);
        }
        for (uint64_t i = 0; i < c->n; i++) after[i] += grad[i] / (float)WORLD;
    }
    CHECK(!sid_decode(g.plan, all.p, 0, 1, 1.0f / (float)WORLD, x.seg, x.n_seg, NULL, NULL, NULL, &err), "%s: %s",
          g.name, err.text);
    vec_get(&x, sent);
    float bad = 0;
    for (uint64_t i = 0; i < c->n; i++) bad = fabsf(sent[i] - after[i]) > bad ? fabsf(sent[i] - after[i]) : bad;
    const int coarse = c->dtype == SID_BF16 || d == SID_BF16;
    const float unit = c->dtype == SID_F32 && d == SID_F32 ? 0x1p-22f : coarse ? 0x1p-6f : 0x1p-9f;
    const float most = sparse ? largest(after, c->n) : 4; /* |x| < 6 */
    CHECK(bad <= most * unit, "%s: the mean of 3 is off by %g", g.name, (double)bad);
    CHECK(!sparse || largest(after, c->n) > 0, "%s: sends nothing", g.name);
    vec_free(&x);
    block_free(&all);
    block_free(&single);
    group_close(&g);
}

void test_linear_sum(void) { every(run_linear_sum, 4500, CUT_ODD); }

/* ---- instruction sets -------------------------------------------------------------------------------------------- */

/* Every instruction set that this processor has writes the bytes of the base: payload, what is kept, output. */
static void isas_agree(const sid_config *base, uint32_t kind) {
    for (sid_isa isa = SID_ISA_AVX2; isa <= SID_ISA_LAST; isa++) {
        group g[2];
        sid_config c = *base;
        c.isa = isa;
        if (!group_open(&g[1], &c)) continue;
        c.isa = SID_ISA_BASE;
        if (!group_open(&g[0], &c)) return;
        vec x = vec_new(c.dtype, c.n, CUT_ODD),
            out[2] = {vec_new(c.dtype, c.n, CUT_ODD), vec_new(c.dtype, c.n, CUT_ODD)};
        for (uint64_t step = 0; step < 3; step++) {
            const sid_step at = {.step = step, .seed = 5, .world = g[0].sizes.reductions > 1 ? 1 : 2};
            data_make(grad, c.n, (int)kind, step);
            if (step == 1 && c.n > 5) grad[5] = NAN;
            vec_set(&x, grad);
            sid_report report[2];
            for (int k = 0; k < 2; k++) {
                sid_status s =
                    sid_encode(g[k].plan, x.seg, x.n_seg, g[k].state.p, g[k].work.p, &at, g[k].payload.p, NULL);
                CHECK(!s, "%s: encode: %s", g[k].name, sid_status_text(s));
                memcpy(out[k].blocks[0].p, x.blocks[0].p, x.blocks[0].bytes);
                vec_set(&out[k], grad);
                s = sid_decode(g[k].plan, g[k].payload.p, 0, 1, 0.5f, out[k].seg, out[k].n_seg, g[k].state.p, &at,
                               &report[k], NULL);
                CHECK(!s, "%s: decode: %s", g[k].name, sid_status_text(s));
                sid_residual_out(g[k].plan, g[k].state.p, k ? after : before);
            }
            const char *name = sid_plan_isa(g[1].plan);
            CHECK(!memcmp(g[0].payload.p, g[1].payload.p, g[0].payload.bytes), "%s: %s writes another payload",
                  g[0].name, name);
            CHECK(vec_equal(&out[0], &out[1]), "%s: %s decodes otherwise", g[0].name, name);
            CHECK(report[0].nonfinite == report[1].nonfinite, "%s: %s sees other NaNs", g[0].name, name);
            CHECK(!memcmp(before, after, 4 * c.n * sid_memory_vectors(g[0].plan)), "%s: %s keeps otherwise", g[0].name,
                  name);
            CHECK(group_intact(&g[0]) && group_intact(&g[1]), "%s: canary", g[0].name);
        }
        vec_free(&x);
        vec_free(&out[0]);
        vec_free(&out[1]);
        group_close(&g[0]);
        group_close(&g[1]);
    }
}

static void run_isa(const sid_config *base, uint32_t kind) {
    sid_config c = *base;
    sid_setting s;
    isas_agree(base, kind);
    if (kind != DATA_NORMAL && kind != DATA_HUGE) return;
    for (uint32_t i = 1; setting_at(sid_codec_find("none"), sid_memory_find(c.memory), i, &s, &c.n_settings); i++) {
        c.settings = &s;
        isas_agree(&c, kind);
    }
}

void test_isa_agrees(void) {
    for (uint32_t kind = 0; kind < DATAS; kind++) every(run_isa, 4099, kind);
    every(run_isa, MAX_N, DATA_HEAVY);
    every(run_isa, 31, DATA_NORMAL);
}

/* Predictions from step to step, as large groups use them: gradients of one distribution, every setting. The best
 * instruction set and the base agree at each step, and nothing is lost. */
void test_steady(void) {
    enum {
        N = 1100000,
        STEPS = 7
    };
    float *x[STEPS], *kept[2], *out = malloc(4 * N);
    for (int k = 0; k < STEPS; k++) data_make(x[k] = malloc(4 * N), N, DATA_TAILS, (uint64_t)k);
    for (int k = 0; k < 2; k++) kept[k] = malloc(4 * N);
    const sid_info *memory = sid_memory_find("residual");
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        sid_setting s;
        sid_config c = config_of(sid_codec_at(i), memory, N, SID_F32);
        if (sid_codec_at(i)->traits & SID_LINEAR) continue; /* nothing is predicted */
        for (uint32_t k = 0; setting_at(sid_codec_at(i), memory, k, &s, &c.n_settings); k++) {
            group best, base;
            if (!test_all && k && k % 8 != i % 8) continue;
            c.settings = &s;
            c.isa = SID_ISA_AUTO;
            if (!group_open(&best, &c)) continue;
            c.isa = SID_ISA_BASE;
            if (!group_open(&base, &c)) continue;
            const int others = strcmp(sid_plan_isa(best.plan), sid_plan_isa(base.plan)) != 0; /* than the base */
            for (uint64_t step = 0; step < STEPS; step++) {
                const sid_step at = {.step = step, .world = 1};
                const sid_segment seg = {x[step], N}, to = {out, N}, bytes = {best.payload.p, best.payload.bytes / 4};
                const int last = step == STEPS - 1;
                sid_status got;
                const int exact = last && conserves(&best, &c);
                if (exact) sid_residual_out(best.plan, best.state.p, kept[0]);
                got = sid_encode(best.plan, &seg, 1, best.state.p, best.work.p, &at, best.payload.p, NULL);
                CHECK(!got, "%s: %s", best.name, sid_status_text(got));
                if (others) got = sid_encode(base.plan, &seg, 1, base.state.p, base.work.p, &at, base.payload.p, NULL);
                CHECK(!others || (!got && !memcmp(best.payload.p, base.payload.p, base.payload.bytes)),
                      "%s, step %llu: %s and base differ", best.name, (unsigned long long)step,
                      sid_plan_isa(best.plan));
                test_digest = test_digest * 0x9e3779b97f4a7c15u + sid_checksum(&bytes, 1, SID_F32);
                if (!exact) continue;
                sid_residual_out(best.plan, best.state.p, kept[1]);
                got = sid_decode(best.plan, best.payload.p, 0, 1, 1, &to, 1, NULL, &at, NULL, NULL);
                CHECK(!got, "%s: %s", best.name, sid_status_text(got));
                float bad = 0;
                for (uint32_t e = 0; e < N; e++) {
                    const float d = fabsf((out[e] - kept[0][e]) + kept[1][e] - x[step][e]);
                    bad = d > bad ? d : bad;
                }
                const int whole = (sid_codec_at(i)->traits & SID_SPARSE) != 0;
                const float most = whole ? 8 : 8 + largest(out, N) + largest(kept[0], N);
                CHECK(bad <= most * 0x1p-22f, "%s: %g is lost", best.name, (double)bad);
                CHECK(group_intact(&best) && group_intact(&base), "%s: canary", best.name);
            }
            group_close(&best);
            group_close(&base);
        }
    }
    for (int k = 0; k < STEPS; k++) free(x[k]);
    for (int k = 0; k < 2; k++) free(kept[k]);
    free(out);
}

/* ---- what is kept ------------------------------------------------------------------------------------------------ */

static void run_kept(const sid_config *c, uint32_t how) {
    group g;
    if (!group_open(&g, c)) return;
    vec x = vec_new(c->dtype, c->n, (cut)how);
    const sid_step at = {.world = 1};
    const uint32_t vectors = sid_memory_vectors(g.plan);
    const uint64_t all = vectors * c->n;
    CHECK(vectors <= MAX_VECTORS, "%s: %u vectors", g.name, vectors);
    if (!vectors) {
        memset(after, 1, sizeof after);
        CHECK(!sid_residual_out(g.plan, g.state.p, after) && largest(after, c->n) == 0, "%s: kept something", g.name);
    } else {
        data_make(before, all, DATA_NORMAL, 9);
        CHECK(!sid_residual_in(g.plan, g.state.p, before), "%s: in", g.name);
        CHECK(!sid_residual_out(g.plan, g.state.p, after), "%s: out", g.name);
        CHECK(!memcmp(before, after, 4 * all), "%s: in and out differ", g.name);
        CHECK(!sid_rescale(g.plan, g.state.p, 0.25f), "%s: rescale", g.name);
        CHECK(!sid_residual_out(g.plan, g.state.p, after), "%s: out", g.name);
        int same = 1;
        for (uint64_t i = 0; i < all; i++) same &= after[i] == 0.25f * before[i];
        CHECK(same, "%s: rescale is not a product", g.name);
    }
    if (conserves(&g, c)) {
        /* a zero gradient: acc is what was kept; unsend brings all of it back */
        memcpy(before, after, 4 * all);
        data_make(grad, c->n, DATA_ZERO, 1);
        vec_set(&x, grad);
        CHECK(!sid_encode(g.plan, x.seg, x.n_seg, g.state.p, g.work.p, &at, g.payload.p, NULL), "%s: encode", g.name);
        CHECK(!sid_unsend(g.plan, g.state.p), "%s: unsend", g.name);
        CHECK(!sid_residual_out(g.plan, g.state.p, after), "%s: out", g.name);
        int same = 1;
        for (uint64_t i = 0; i < all; i++) same &= after[i] == before[i];
        CHECK(same, "%s: unsend does not bring all back", g.name);
        CHECK(group_intact(&g), "%s: canary", g.name);
    }
    vec_free(&x);
    group_close(&g);
}

void test_kept(void) {
    every(run_kept, 1, CUT_ONE);
    every(run_kept, 2049, CUT_TINY);
}

/* ---- NaN and Inf ------------------------------------------------------------------------------------------------- */

static void run_nonfinite(const sid_config *c, uint32_t how) {
    group g;
    if (!group_open(&g, c)) return;
    vec x = vec_new(c->dtype, c->n, (cut)how);
    const uint32_t vectors = sid_memory_vectors(g.plan);
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    for (uint64_t step = 0; step < 4; step++) {
        const sid_step at = {.step = step, .world = 1};
        const uint64_t where = step == 1 ? 0 : step == 2 ? c->n / 2 : c->n - 1;
        sid_stats stats;
        sid_report report;
        sid_error err;
        data_make(grad, c->n, DATA_NORMAL, step);
        if (vectors) sid_residual_out(g.plan, g.state.p, before);
        if (step) grad[where] = bad[step - 1];
        vec_set(&x, grad);
        CHECK(!sid_encode(g.plan, x.seg, x.n_seg, g.state.p, g.work.p, &at, g.payload.p, &stats), "%s: encode", g.name);
        CHECK(stats.nonfinite == (step ? 1 : 0), "%s: %llu not finite, step %llu", g.name,
              (unsigned long long)stats.nonfinite, (unsigned long long)step);
        CHECK(!sid_decode(g.plan, g.payload.p, 0, 1, 1, x.seg, x.n_seg, g.state.p, &at, &report, &err), "%s: %s",
              g.name, err.text);
        CHECK(report.nonfinite == (step ? 1 : 0), "%s: step %llu reports %u", g.name, (unsigned long long)step,
              report.nonfinite);
        vec_get(&x, sent);
        if (step) CHECK(!isfinite(sent[where]), "%s: the step came out finite: %g", g.name, (double)sent[where]);
        if (!vectors) continue;
        sid_residual_out(g.plan, g.state.p, after);
        const uint32_t traits = sid_plan_codec(g.plan)->traits;
        const int whole = traits & (SID_LINEAR | SID_SPARSE) && !(traits & SID_SEVERAL_REDUCTIONS);
        float off = 0;
        const float most = (sid_plan_memory(g.plan)->traits & SID_MOMENTUM ? 60.0f : 6.0f) * 0x1p-22f *
                           (whole ? 1 : 1 + largest(before, vectors * c->n));
        int finite = 1;
        for (uint64_t i = 0; i < vectors * c->n; i++) {
            finite &= isfinite(after[i]) != 0;
            if (step) off = fabsf(after[i] - before[i]) > off ? fabsf(after[i] - before[i]) : off;
        }
        CHECK(finite, "%s: the memory took in NaN or Inf, step %llu", g.name, (unsigned long long)step);
        CHECK(off <= most, "%s: a skipped step moved the memory by %g", g.name, (double)off);
    }
    CHECK(group_intact(&g) && vec_intact(&x), "%s: canary", g.name);
    vec_free(&x);
    group_close(&g);
}

void test_nonfinite(void) {
    every(run_nonfinite, 1, CUT_ONE);
    every(run_nonfinite, 3000, CUT_TINY);
    every(run_nonfinite, MAX_N, CUT_ODD);
}

/* Two states, of which a step reads one and writes the other: steps that are thrown away leave no trace, and the others
 * have the bits of steps in place. */
static void thrown_away(const sid_config *c, uint32_t how) {
    group g, twice;
    sid_report report;
    sid_error err;
    if (!group_open(&g, c)) return;
    if (!group_open(&twice, c)) return;
    const size_t apart = (size_t)sid_round_up(g.sizes.state, 64);
    block states = block_new(2 * apart, 0), was = block_new(apart, 0);
    uint8_t *now = states.p, *next = states.p + apart;
    vec x = vec_new(c->dtype, c->n, (cut)how), out = vec_new(c->dtype, c->n, CUT_ONE);
    vec wanted = vec_new(c->dtype, c->n, CUT_ONE);
    memset(next, 0xcd, apart);
    for (uint64_t step = 0; step < 4; step++) {
        sid_step at = {.step = step, .seed = 11, .group = 3, .world = 1, .carry = step % 2 ? 0.5f : 1};
        data_make(grad, c->n, DATA_NORMAL, step + 1);
        vec_set(&x, grad);
        CHECK(!sid_encode(g.plan, x.seg, x.n_seg, g.state.p, g.work.p, &at, g.payload.p, NULL), "%s", g.name);
        sid_decode(g.plan, g.payload.p, g.sizes.payload, 1, 1.0f, wanted.seg, 1, g.state.p, &at, &report, &err);
        for (int thrown = 2; thrown >= 0; thrown--) { /* NaN, then huge, then the step itself */
            data_make(grad, c->n, thrown ? DATA_HUGE : DATA_NORMAL, step + 1 + 50u * (unsigned)thrown);
            if (thrown == 2 && c->n) grad[c->n / 2] = NAN;
            vec_set(&x, grad);
            vec_get(&x, grad);
            memcpy(was.p, now, apart);
            at.origin = now - next;
            const sid_status s = sid_encode(twice.plan, x.seg, x.n_seg, next, twice.work.p, &at, twice.payload.p, NULL);
            CHECK(s == SID_OK, "%s: %s", g.name, sid_status_text(s));
            vec_get(&x, grad);
            vec_set(&out, grad); /* a decode into the gradient */
            sid_decode(twice.plan, twice.payload.p, g.sizes.payload, 1, 1.0f, out.seg, 1, next, &at, &report, &err);
            CHECK(!memcmp(was.p, now, apart), "%s, step %llu: the state that was read has changed", g.name,
                  (unsigned long long)step);
        }
        CHECK(!memcmp(g.payload.p, twice.payload.p, g.payload.bytes) && vec_equal(&wanted, &out),
              "%s, step %llu: another payload after steps that were thrown away", g.name, (unsigned long long)step);
        CHECK(!memcmp(g.state.p, next, 192), "%s, step %llu: another header", g.name, (unsigned long long)step);
        const uint64_t extra = sid_plan_extra(g.plan);
        CHECK(!memcmp(g.state.p + g.sizes.state - extra, next + g.sizes.state - extra, extra),
              "%s, step %llu: the codec keeps something else", g.name, (unsigned long long)step);
        sid_residual_out(g.plan, g.state.p, before);
        sid_residual_out(g.plan, next, after);
        CHECK(!memcmp(before, after, 4 * (size_t)(sid_memory_vectors(g.plan) * c->n)),
              "%s, step %llu: something else is kept", g.name, (unsigned long long)step);
        uint8_t *const old = now;
        now = next, next = old;
    }
    const sid_step odd = {.world = 1, .origin = 8};
    CHECK(sid_encode(g.plan, x.seg, x.n_seg, g.state.p, g.work.p, &odd, g.payload.p, NULL) == SID_E_ARG,
          "%s: a misaligned origin", g.name);
    CHECK(block_intact(&states), "%s: wrote past a state", g.name);
    block_free(&states);
    block_free(&was);
    vec_free(&x);
    vec_free(&out);
    vec_free(&wanted);
    group_close(&g);
    group_close(&twice);
}

void test_thrown_away(void) {
    static const uint64_t sizes[] = {0, 1, 1025, 9001, MAX_N};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) every(thrown_away, sizes[i], (uint32_t)(i % CUTS));
}
