/* The random streams: Philox's published vectors, and every instruction set against rng.h. */
#include "internal.h"
#include "test.h"

void test_random(void);

void test_random(void) {
    static const struct {
        uint32_t counter[4], key[2], out[4];
    } known[] = {
        /* Salmon et al. 2011: the known-answer vectors that come with Random123, philox4x32, 7 rounds */
        {{0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t c[4];
        memcpy(c, known[i].counter, sizeof c);
        sid_philox(c, known[i].key[0], known[i].key[1]);
        CHECK(!memcmp(c, known[i].out, sizeof c), "vector %d: %08x %08x %08x %08x", i, c[0], c[1], c[2], c[3]);
    }
    static const uint64_t from[] = {0, 128, 4096, (1ull << 34) - 128, (1ull << 40) - 256};
    static const uint32_t lens[] = {1, 3, 64, 100, 128, 129, 1024, 4096};
    const sid_draw draws[] = {{0, 0, 0}, {0xdeadbeef, 7, 1}, {3, 0xffffffff, 0x123456789abcdefull}};
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        const sid_simd *v = sid_simd_for((sid_isa)isa);
        if (!v) continue;
        for (size_t d = 0; d < 3; d++)
            for (size_t f = 0; f < 5; f++)
                for (size_t l = 0; l < 8; l++) {
                    const uint64_t at = from[f];
                    const uint32_t len = lens[l];
                    if (at + len > SID_MAX_N) continue;
                    uint16_t half[4096];
                    uint32_t word[4096];
                    uint32_t bad = 0;
                    v->draw16(&draws[d], at, len, half);
                    v->draw32(&draws[d], at, len, word);
                    for (uint32_t i = 0; i < len; i++)
                        bad += half[i] != sid_draw_16(&draws[d], at + i) || word[i] != sid_draw_32(&draws[d], at + i);
                    CHECK(!bad, "%s: %u of %u differ from %llu on", v->name, bad, len, (unsigned long long)at);
                }
    }
    uint32_t same = 0;
    for (uint32_t a = 0; a < 4096; a += 7)
        for (uint32_t b = 0; b < a; b++) same += sid_salt(5, a) == sid_salt(5, b);
    CHECK(!same && sid_salt(5, SID_COMMON) == sid_fold_seed(5), "salts of ranks collide");
}
