/* The C tests of the core. `ctest` runs all, `ctest word ...` those whose name holds a word; `ctest -a [word ...]` with
 * every combination of codec, memory and dtype. */
#include <stdio.h>
#include <string.h>

#include "test.h"

#define TESTS(X)                                                                                                       \
    X(allocator)                                                                                                       \
    X(status_texts)                                                                                                    \
    X(registry)                                                                                                        \
    X(sizing)                                                                                                          \
    X(refusals)                                                                                                        \
    X(calls_refused)                                                                                                   \
    X(half_formats)                                                                                                    \
    X(half_draws)                                                                                                      \
    X(checksum)                                                                                                        \
    X(checksum_keys)                                                                                                   \
    X(checksum_triples)                                                                                                \
    X(checksum_finds)                                                                                                  \
    X(scale)                                                                                                           \
    X(random)                                                                                                          \
    X(rans_division)                                                                                                   \
    X(rans)                                                                                                            \
    X(special)                                                                                                         \
    X(moments)                                                                                                         \
    X(deadzone_full)                                                                                                   \
    X(deadzone_parts)                                                                                                  \
    X(delta_order)                                                                                                     \
    X(delta_changes)                                                                                                   \
    X(delta_gaps)                                                                                                      \
    X(delta_no_changes)                                                                                                \
    X(delta_round_trip)                                                                                                \
    X(delta_segments)                                                                                                  \
    X(delta_size)                                                                                                      \
    X(delta_refused)                                                                                                   \
    X(delta_strict)                                                                                                    \
    X(delta_flips)                                                                                                     \
    X(delta_raced)                                                                                                     \
    X(cuda_absent)                                                                                                     \
    X(round_trip)                                                                                                      \
    X(settings)                                                                                                        \
    X(edge_values)                                                                                                     \
    X(gather)                                                                                                          \
    X(linear_sum)                                                                                                      \
    X(reductions)                                                                                                      \
    X(reductions_low_rank)                                                                                             \
    X(reductions_nonfinite)                                                                                            \
    X(reductions_failed)                                                                                               \
    X(reductions_limit)                                                                                                \
    X(shapes_refused)                                                                                                  \
    X(exchanges)                                                                                                       \
    X(exchange_configs_refused)                                                                                        \
    X(exchange_nonfinite)                                                                                              \
    X(exchange_faults)                                                                                                 \
    X(exchange_names_nobody)                                                                                           \
    X(exchange_refused_late)                                                                                           \
    X(exchange_sums_watched)                                                                                           \
    X(exchange_counts_checked)                                                                                         \
    X(exchange_thrown_away)                                                                                            \
    X(isa_agrees)                                                                                                      \
    X(steady)                                                                                                          \
    X(kept)                                                                                                            \
    X(nonfinite)                                                                                                       \
    X(thrown_away)                                                                                                     \
    X(header_flips)                                                                                                    \
    X(body_flips)                                                                                                      \
    X(two_bits)                                                                                                        \
    X(signed_mutations)                                                                                                \
    X(packed_ones)                                                                                                     \
    X(random_bytes)                                                                                                    \
    X(other_step)                                                                                                      \
    X(state_edits)                                                                                                     \
    X(state_words)                                                                                                     \
    X(threads)                                                                                                         \
    X(map)                                                                                                             \
    X(fuse_optimal)                                                                                                    \
    X(fuse_vectors)                                                                                                    \
    X(fuse_shift)                                                                                                      \
    X(fuse_robust)                                                                                                     \
    X(fuse_limits)                                                                                                     \
    X(fuse_many)                                                                                                       \
    X(fuse_edges)                                                                                                      \
    X(fuse_timeline)                                                                                                   \
    X(fuse_refusals)

#define DECLARE(name) void test_##name(void);
TESTS(DECLARE)

static const struct {
    const char *name;
    void (*run)(void);
} tests[] = {
#define ROW(name) {#name, test_##name},
    TESTS(ROW)};

static int asked(const char *name, char **words) {
    if (!*words) return 1;
    for (; *words; words++)
        if (strstr(name, *words)) return 1;
    return 0;
}

int main(int argc, char **argv) {
    unsigned passed = 0, failed = 0;
    test_all = argc > 1 && !strcmp(argv[1], "-a");
    argv += 1 + test_all;
    for (size_t i = 0; i < sizeof tests / sizeof *tests; i++) {
        if (!asked(tests[i].name, argv)) continue;
        const unsigned long bad = atomic_load(&test_failures), before = atomic_load(&test_checks);
        tests[i].run();
        const unsigned long checks = atomic_load(&test_checks) - before;
        const int ok = atomic_load(&test_failures) == bad;
        passed += ok && checks;
        failed += !ok;
        printf("%s %-18s %lu checks\n", !ok ? "FAIL" : checks ? "pass" : "none", tests[i].name, checks);
        fflush(stdout);
    }
    printf("digest of all payloads: %016llx\n", (unsigned long long)test_digest);
    printf("%u passed, %u failed\n", passed, failed);
    return failed || !passed;
}
