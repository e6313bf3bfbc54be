/* For bench_instructions.py: encodes or decodes in a loop, and marks one call, the instructions of which are counted.
 *
 *     driver TRACED WHAT ISA CODEC MEMORY N RANKS [NAME=VALUE ...]
 *
 * WHAT: encode, decode. The parameters of the codec are numbers. TRACED 1: this process executes the marked call one
 * instruction at a time (ptrace, x86-64), and writes a line for each address: its distance from the program's start, and how
 * often it was executed. TRACED 0: plugin.c does that, in QEMU. The residual is one that many steps have filled, as in
 * bench_codec.py. */
#define _GNU_SOURCE
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sidcomp.h"

#if defined(__x86_64__)
#include <signal.h>
#include <stddef.h>
#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

enum {
    POOL = 5, /* gradients, in turn */
    WARMUP = 24,
    MOST = 64 /* ranks */
};

static __attribute__((noinline, used)) void counted_begin(void) { __asm__ volatile("" ::: "memory"); }
static __attribute__((noinline, used)) void counted_end(void) { __asm__ volatile("" ::: "memory"); }

static void fail(const char *text) {
    fprintf(stderr, "driver: %s\n", text);
    exit(2);
}

#if defined(__x86_64__)
extern const char __executable_start, etext;

static void step_through(pid_t child) {
    const uintptr_t start = (uintptr_t)&__executable_start, size = (uintptr_t)&etext - start;
    uint32_t *counts = calloc(size, sizeof *counts);
    int status = 0, counting = 0;
    if (!counts) fail("no memory");
    while (waitpid(child, &status, 0) == child && WIFSTOPPED(status)) {
        const uintptr_t at = (uintptr_t)ptrace(PTRACE_PEEKUSER, child, offsetof(struct user_regs_struct, rip), 0);
        if (at == (uintptr_t)counted_end) break;
        if (counting && at - start < size) counts[at - start]++;
        counting = 1; /* the first stop is the child's own, just before the marked call */
        if (ptrace(PTRACE_SINGLESTEP, child, 0, 0)) fail("ptrace is not allowed here");
    }
    if (!WIFSTOPPED(status)) fail("the marked call did not end");
    kill(child, SIGKILL);
    for (uintptr_t i = 0; i < size; i++)
        if (counts[i]) printf("%lx %u\n", (unsigned long)i, counts[i]);
    free(counts);
}
#endif

static void begin(int traced) {
#if defined(__x86_64__)
    if (traced) {
        const pid_t child = fork();
        if (child < 0) fail("fork");
        if (child) {
            step_through(child);
            exit(0);
        }
        ptrace(PTRACE_TRACEME, 0, 0, 0);
        raise(SIGSTOP);
    }
#else
    if (traced) fail("single steps: on x86-64 alone");
#endif
    counted_begin();
}

static uint64_t seed = 0x9e3779b97f4a7c15u;
static double uniform(void) { /* above 0, below 1 */
    seed ^= seed << 13, seed ^= seed >> 7, seed ^= seed << 17;
    return ((double)(seed >> 12) + 0.5) / 4503599627370496.0;
}
static void laplace(float *x, uint64_t n, float scale) {
    for (uint64_t i = 0; i < n; i++) {
        const double u = uniform();
        x[i] = scale * (float)(u < 0.5 ? log(2 * u) : -log(2 - 2 * u));
    }
}
static void *block(uint64_t bytes) {
    const uint64_t whole = (bytes + 127) / 64 * 64;
    void *p = aligned_alloc(64, whole);
    if (!p) fail("no memory");
    return memset(p, 0, whole);
}

int main(int argc, char **argv) {
    if (argc < 8) fail("TRACED WHAT ISA CODEC MEMORY N RANKS [NAME=VALUE ...]");
    const int traced = atoi(argv[1]), encode = !strcmp(argv[2], "encode");
    const uint64_t n = strtoull(argv[6], NULL, 10);
    uint32_t ranks = (uint32_t)atoi(argv[7]);
    sid_setting settings[16];
    uint32_t n_settings = 0;
    for (int i = 8; i < argc && n_settings < 16; i++) {
        char *is = strchr(argv[i], '=');
        if (!is) fail("a setting is NAME=VALUE");
        *is = 0;
        settings[n_settings++] = (sid_setting){argv[i], strtod(is + 1, NULL)};
    }
    sid_config config = {.codec = argv[4], .memory = argv[5], .n = n, .dtype = SID_F32, .isa = (sid_isa)atoi(argv[3])};
    config.settings = settings, config.n_settings = n_settings;
    sid_error err = {.text = ""};
    size_t bytes = 0;
    if (!n || ranks < 1 || ranks > MOST) fail("N and RANKS: 1 or more; RANKS: at most 64");
    if (sid_plan_make(&config, NULL, &bytes, &err)) fail(err.text);
    sid_plan *plan = block(bytes);
    if (sid_plan_make(&config, plan, &bytes, &err)) fail(err.text);
    const sid_sizes sizes = sid_plan_sizes(plan);
    const int linear = sizes.body_count != 0;
    float *gradient[POOL], *out = block(4 * n);
    for (int g = 0; g < POOL; g++) laplace(gradient[g] = block(4 * n), n, 1);
    char *state = block(sizes.state), *work = block(sizes.work), *payload = block(sizes.payload);
    if (sid_memory_vectors(plan)) {
        float *x = block(4 * n * sid_memory_vectors(plan));
        laplace(x, n, 20);
        if (sid_residual_in(plan, state, x)) fail("residual_in");
        free(x);
    }
    sid_step step = {.world = linear && sizes.reductions == 1 ? ranks : 1};
    const uint64_t stride = (sizes.payload + 63) / 64 * 64;
    if (linear) ranks = 1; /* one payload arrives, summed */
    char *payloads = block(stride * ranks);
    for (step.step = 0; step.step < WARMUP + ranks; step.step++) {
        const sid_segment from = {gradient[step.step % POOL], n};
        if (sid_encode(plan, &from, 1, state, work, &step, payload, NULL)) fail("encode");
        if (step.step >= WARMUP) memcpy(payloads + stride * (step.step - WARMUP), payload, sizes.payload);
    }
    if (encode) /* a steady step takes one pass and cuts nothing off: which one will is tried on a copy of the state */
        for (int tries = 0; tries < POOL * 4; tries++, step.step++) {
            const sid_segment from = {gradient[step.step % POOL], n};
            sid_stats stats;
            char *before = block(sizes.state);
            memcpy(before, state, sizes.state);
            if (sid_encode(plan, &from, 1, state, work, &step, payload, &stats)) fail("encode");
            const int steady = stats.passes < 2 && stats.found == stats.count;
            if (steady) memcpy(state, before, sizes.state);
            free(before);
            if (steady) break;
        }
    const sid_segment from = {gradient[step.step % POOL], n}, into = {out, n};
    sid_report report;
    sid_status status;
    if (encode) {
        begin(traced);
        status = sid_encode(plan, &from, 1, state, work, &step, payload, NULL);
    } else {
        begin(traced);
        status = sid_decode(plan, payloads, stride, ranks, 1 / (float)ranks, &into, 1, NULL, NULL, &report, &err);
    }
    counted_end();
    if (status) fail(encode ? "encode" : err.text);
    return 0;
}
