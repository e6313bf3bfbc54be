/* deadzone where a stream finds no room, which no plan's size lets happen: the plan is changed. */
#include "codec/deadzone.h"

#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "test.h"

void test_deadzone_full(void);

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
