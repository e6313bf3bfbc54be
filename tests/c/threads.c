/* Distinct groups at the same time, sharing the plan: ThreadSanitizer watches, and the bytes are those of one thread. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

void test_threads(void);

enum {
    THREADS = 2,
    STEPS = 4,
    N = 5000
};

typedef struct job {
    const sid_plan *plan;
    group own;
    uint32_t id;
    uint64_t sum; /* of all payloads and outputs */
} job;

static void *work(void *arg) {
    job *j = arg;
    vec x = vec_new(SID_F32, N, CUT_ODD);
    float *g = malloc(4 * N);
    j->sum = 0;
    memset(j->own.state.p, 0, j->own.state.bytes);
    for (uint64_t step = 0; step < STEPS; step++) {
        const sid_step at = {.step = step, .seed = 3, .group = j->id, .world = 1};
        data_make(g, N, DATA_HEAVY, step * 10 + j->id);
        vec_set(&x, g);
        sid_status s = sid_encode(j->plan, x.seg, x.n_seg, j->own.state.p, j->own.work.p, &at, j->own.payload.p, NULL);
        const sid_segment bytes = {j->own.payload.p, j->own.payload.bytes / 4};
        j->sum = j->sum * 31 + sid_checksum(&bytes, 1, SID_F32);
        if (!s) s = sid_decode(j->plan, j->own.payload.p, 0, 1, 1, x.seg, x.n_seg, j->own.state.p, &at, NULL, NULL);
        j->sum = j->sum * 31 + sid_checksum(x.seg, x.n_seg, SID_F32);
        CHECK(!s, "%s: %s", j->own.name, sid_status_text(s));
    }
    free(g);
    vec_free(&x);
    return NULL;
}

void test_threads(void) {
    for (uint32_t i = 0; sid_codec_at(i); i++) {
        const sid_config c = config_of(sid_codec_at(i), sid_memory_find("residual"), N, SID_F32);
        job jobs[THREADS];
        uint64_t alone[THREADS];
        pthread_t threads[THREADS];
        for (uint32_t t = 0; t < THREADS; t++) {
            if (!group_open(&jobs[t].own, &c)) return;
            jobs[t].plan = jobs[0].own.plan;
            jobs[t].id = t;
            work(&jobs[t]);
            alone[t] = jobs[t].sum;
        }
        CHECK(alone[0] != alone[1], "%s: two groups, the same bytes", jobs[0].own.name);
        for (uint32_t t = 0; t < THREADS; t++) CHECK(!pthread_create(&threads[t], NULL, work, &jobs[t]), "no thread");
        for (uint32_t t = 0; t < THREADS; t++) {
            pthread_join(threads[t], NULL);
            CHECK(jobs[t].sum == alone[t], "%s: group %u has other bytes beside another thread", jobs[t].own.name, t);
            CHECK(group_intact(&jobs[t].own), "%s: canary", jobs[t].own.name);
        }
        for (uint32_t t = 0; t < THREADS; t++) group_close(&jobs[t].own);
    }
}
