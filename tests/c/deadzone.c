/* deadzone where a stream finds no room, which no plan's size lets happen: the plan is changed. And of few payloads the streams,
 * which are decoded side by side. */
#include "codec/deadzone.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "test.h"

void test_deadzone_full(void);
void test_deadzone_parts(void);

void test_deadzone_full(void) {
    enum {
        N = 200000,
        STEPS = 12
    };
    sid_config c = config_of(sid_codec_find("deadzone"), sid_memory_find("residual"), N, SID_F32);
    float *grad = malloc(4 * N), *before = malloc(4 * N), *after = malloc(4 * N), *sent = malloc(4 * N);
    uint64_t digest = 0;
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        if (!sid_simd_for((sid_isa)isa)) continue;
        group g;
        c.isa = (sid_isa)isa;
        if (!group_open(&g, &c)) continue;
        sid_plan *const p = (sid_plan *)(void *)g.plan_mem.p;
        deadzone_form f = deadzone_form_of(p);
        const uint64_t last = (deadzone_streams(N, f.stream) - 1) * f.stream;
        vec x = vec_new(SID_F32, N, CUT_ONE), out = vec_new(SID_F32, N, CUT_ONE);
        uint64_t sum = 0, short_of = 0, reached = 0;
        f.room = f.room / 2;
        memcpy(p->derived, &f, sizeof f);
        for (uint64_t step = 0; step < STEPS; step++) {
            const sid_step at = {.step = step, .world = 1};
            sid_stats stats;
            sid_report report;
            sid_error err;
            if (step == 0) data_make(grad, N, DATA_TAILS, 5);
            if (step == 1) memset(grad, 0, 4 * N);
            if (step == STEPS / 2) { /* room for all */
                f.room *= 2;
                memcpy(p->derived, &f, sizeof f);
            }
            vec_set(&x, grad);
            CHECK(!sid_residual_out(p, g.state.p, before), "residual_out");
            CHECK(!sid_encode(p, x.seg, x.n_seg, g.state.p, g.work.p, &at, g.payload.p, &stats), "encode");
            CHECK(!sid_decode(p, g.payload.p, 0, 1, 1, out.seg, out.n_seg, NULL, &at, &report, &err), "%s", err.text);
            CHECK(group_intact(&g) && vec_intact(&out), "wrote past a block");
            CHECK(!sid_residual_out(p, g.state.p, after), "residual_out");
            vec_get(&out, sent);
            uint64_t count = 0, lost = 0, limit = 0;
            for (uint64_t i = 0; i < N; i++) {
                count += sent[i] != 0;
                limit = sent[i] != 0 ? i / f.stream * f.stream + f.stream : limit;
                lost += after[i] != before[i] + grad[i] - sent[i];
                reached += i >= last && sent[i] != 0;
            }
            CHECK(count == stats.count && !lost, "%s: %llu sent, not %llu; %llu lost", p->simd->name,
                  (unsigned long long)count, (unsigned long long)stats.count, (unsigned long long)lost);
            CHECK(stats.count <= stats.found && (stats.count == stats.found || limit < N),
                  "%llu of %llu sent, up to %llu", (unsigned long long)stats.count, (unsigned long long)stats.found,
                  (unsigned long long)limit);
            short_of += stats.count < stats.found;
            sum = sum * 31 + ((sid_header *)(void *)g.payload.p)->checksum;
        }
        CHECK(short_of == STEPS / 2 && reached,
              "%llu steps were short of room; of the last stream %llu elements were sent", (unsigned long long)short_of,
              (unsigned long long)reached);
        if (!digest) digest = sum;
        CHECK(sum == digest, "%s writes other payloads", p->simd->name);
        vec_free(&x);
        vec_free(&out);
        group_close(&g);
    }
    free(grad);
    free(before);
    free(after);
    free(sent);
}

enum {
    STREAM = 16384, /* of 1 bit or more */
    RANKS = 9,
    PARTS_N = 11 * STREAM + 777
};
/* What a payload holds, tile after tile from the first one on. */
static void one_by_one(const sid_plan *p, const uint8_t *payload, float *x) {
    sid_cursor cursor;
    sid_gather one = {.plan = p, .payloads = payload, .count = 1, .scale = 1, .cursor = &cursor};
    memset(x, 0, 4 * p->n);
    p->codec->open(&one);
    for (uint64_t at = 0; at < p->n; at += SID_DECODE_TILE)
        p->codec->decode(&one, x + at, at, p->n - at < SID_DECODE_TILE ? (uint32_t)(p->n - at) : SID_DECODE_TILE);
}

static void parts_of_one_variant(group *g, uint8_t *payloads, float *x, float *each) {
    const sid_plan *p = g->plan;
    const uint64_t bytes = g->sizes.payload;
    vec in = vec_new(SID_F32, PARTS_N, CUT_ONE), out = vec_new(SID_F32, PARTS_N, CUT_ODD);
    uint64_t over = 0;
    sid_error err;
    for (uint32_t r = 0; r < RANKS; r++) { /* every third one is the same, and its sums overflow */
        const sid_step at = {.world = 1};
        data_make(x, PARTS_N, r % 3 ? DATA_TAILS : DATA_HUGE, r % 3 ? r : 1);
        if (r == 4) memset(x + 2 * STREAM, 0, 4 * 3 * STREAM); /* streams without words */
        vec_set(&in, x);
        memset(g->state.p, 0, g->state.bytes);
        CHECK(!sid_encode(p, in.seg, in.n_seg, g->state.p, g->work.p, &at, g->payload.p, NULL), "encode");
        memcpy(payloads + r * bytes, g->payload.p, bytes);
        one_by_one(p, payloads + r * bytes, each + r * PARTS_N);
    }
    for (uint32_t count = 1; count <= RANKS; count++) {
        const float scale = 1.0f / (float)count;
        uint64_t wrong = 0;
        sid_report report;
        vec_fill(&out, 0xa5);
        CHECK(!sid_decode(p, payloads, bytes, count, scale, out.seg, out.n_seg, NULL, NULL, &report, &err), "%s",
              err.text);
        CHECK(vec_intact(&out) && !report.nonfinite, "%s: %u payloads", p->simd->name, count);
        vec_get(&out, x);
        for (uint64_t i = 0; i < PARTS_N; i++) {
            float sum = 0;
            double mean = 0;
            for (uint32_t r = 0; r < count; r++) {
                sum += each[r * PARTS_N + i];
                mean += (double)each[r * PARTS_N + i];
            }
            const float plain = sum * scale, want = isfinite(plain) ? plain : sid_mean(mean, scale);
            over += isfinite(plain) ? 0 : 1;
            wrong += sid_f32_bits(want) != sid_f32_bits(x[i]);
        }
        CHECK(!wrong, "%s: %u payloads: %llu elements are not their mean", p->simd->name, count,
              (unsigned long long)wrong);
    }
    CHECK(over, "%s: no sum overflows", p->simd->name);
    vec_free(&in);
    vec_free(&out);
}

void test_deadzone_parts(void) {
    const sid_setting bits = {"bits", 1.5};
    sid_config c = config_of(sid_codec_find("deadzone"), sid_memory_find("residual"), PARTS_N, SID_F32);
    float *x = malloc(4 * PARTS_N), *each = malloc(4ull * RANKS * PARTS_N);
    c.settings = &bits;
    c.n_settings = 1;
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        group g;
        c.isa = (sid_isa)isa;
        if (!sid_simd_for(c.isa) || !group_open(&g, &c)) continue;
        CHECK(deadzone_form_of(g.plan).stream == STREAM, "streams have %u elements", deadzone_form_of(g.plan).stream);
        uint8_t *payloads = malloc(RANKS * g.sizes.payload);
        parts_of_one_variant(&g, payloads, x, each);
        CHECK(group_intact(&g), "wrote past a block");
        free(payloads);
        group_close(&g);
    }
    free(x);
    free(each);
}
