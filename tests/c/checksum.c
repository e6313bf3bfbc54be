/* What docs/wire.md promises of the checksum: first of the keys, then of messages, whatever the code that sums them up. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "test.h"

void test_checksum_keys(void);
void test_checksum_triples(void);
void test_checksum_finds(void);

/* The proof's conditions for all words of the first 8 GiB but the last block: keys that are equal modulo 2^33 are of one
 * word, and none is 1. */
void test_checksum_keys(void) {
    enum {
        BLOCKS = 1 << 21
    };
    uint8_t *seen = calloc(BLOCKS / 8, 1), pair[SID_SUM_PAIRS] = {0};
    unsigned odd = 0, twice = 0;
    CHECK(SID_SUM_ODD % 8 == 5, "odd words have the keys of even ones");
    for (uint32_t q = 0; q < SID_SUM_PAIRS; q++) {
        const uint32_t key = sid_sum_pair(q), place = key % (8 * SID_SUM_PAIRS) / 8;
        CHECK(key % 8 == 1, "pair %u: %08x", q, key);
        CHECK(!pair[place], "pair %u is like another one modulo 4096", q);
        CHECK(key == sid_sum_pairs[q], "pair %u of the table", q);
        pair[place] = 1;
    }
    seen[0] = 1; /* a block's key that were 1 */
    for (uint64_t b = 0; b + 1 < BLOCKS; b++) {
        const uint64_t key = sid_sum_block(b), place = key / (8 * SID_SUM_PAIRS) % BLOCKS;
        odd += key % (8 * SID_SUM_PAIRS) != 1;
        twice += seen[place / 8] >> place % 8 & 1;
        seen[place / 8] |= (uint8_t)(1 << place % 8);
    }
    CHECK(!odd && !twice, "of the blocks' keys %u are not 1 modulo 4096, and %u are another one's or 1", odd, twice);
    for (uint64_t i = 0; i < 5000; i++) {
        const uint64_t even = sid_sum_block(i / 1024) * sid_sum_pair(i % 1024 / 2);
        CHECK(sid_sum_key(i) == (i % 2 ? even * SID_SUM_ODD : even), "key %llu", (unsigned long long)i);
    }
    free(seen);
}

/* No three changed bits of a block and of the checksum go unseen either: none of their shares is the sum or the difference
 * of two others. */
enum {
    TABLE = 1 << 18
};
static uint32_t slot_of(const uint64_t *table, uint64_t x) {
    uint32_t at = (uint32_t)(x * 0x9e3779b97f4a7c15u >> 46);
    while (table[at] && table[at] != x) at = (at + 1) % TABLE;
    return at;
}
void test_checksum_triples(void) {
    const uint32_t words = test_all ? SID_SUM_BLOCK : 64;
    uint64_t *share = malloc((32 * words + 64) * sizeof *share), *table = calloc(TABLE, sizeof *table);
    uint32_t count = 0, *of = calloc(TABLE, sizeof *of);
    unsigned long bad = 0;
    for (uint32_t i = 0; i < words; i++)
        for (uint32_t bit = 0; bit < 32 && i / 2 != 7; bit++) share[count++] = sid_sum_key(i) << bit;
    for (uint32_t bit = 0; bit < 64; bit++) share[count++] = 1ull << bit; /* of the checksum */
    for (uint32_t i = 0; i < count; i++)
        for (int side = 0; side < 2; side++) {
            const uint64_t x = side ? 0 - share[i] : share[i];
            const uint32_t at = slot_of(table, x);
            CHECK(!table[at] || of[at] == i + 1, "two bits have one share");
            table[at] = x;
            of[at] = i + 1;
        }
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t j = i + 1; j < count; j++)
            for (int side = 0; side < 2; side++) {
                const uint64_t x = side ? share[i] - share[j] : share[i] + share[j];
                const uint32_t at = slot_of(table, x);
                bad += table[at] && of[at] != i + 1 && of[at] != j + 1;
            }
    CHECK(!bad, "%lu triples of bits go unseen", bad);
    free(share);
    free(table);
    free(of);
}

/* A message by its plain definition, by every instruction set, in parts; and what may happen to it. */
void test_checksum_finds(void) {
    enum {
        WORDS = 4200,
        FEW = 64 /* words */
    };
    static uint32_t w[WORDS];
    rng r = {33};
    for (uint32_t i = 0; i < WORDS; i++) w[i] = (uint32_t)rng_next(&r);
    for (int isa = SID_ISA_BASE; isa <= SID_ISA_LAST; isa++) {
        const sid_simd *v = sid_simd_for((sid_isa)isa);
        for (uint32_t k = 0; v && k < 400; k++) {
            const uint32_t from = k ? 16 * rng_below(&r, WORDS / 16) : 0,
                           count = 2 * rng_below(&r, (WORDS - from) / 2 + 1);
            uint64_t want = 0;
            for (uint32_t i = from; i < from + count; i++) want += w[i] * sid_sum_key(i);
            CHECK(v->checksum(w + from, from, count) == want, "%s: words %u to %u", v->name, from, from + count);
        }
    }
    const sid_simd *v = sid_simd_for(SID_ISA_BASE);
    const uint64_t few = v->checksum(w, 0, FEW), all = v->checksum(w, 0, WORDS);
    for (uint32_t i = 0; i < FEW; i++)
        for (uint32_t j = 0; j < i; j++) {
            const uint32_t other = w[i];
            w[i] = w[j];
            w[j] = other;
            CHECK(v->checksum(w, 0, FEW) != few, "words %u and %u change places", j, i);
            w[j] = w[i];
            w[i] = other;
        }
    for (uint32_t bit = 0; bit + 32 <= 32 * FEW; bit++) /* bursts */
        for (uint32_t k = 0; k < 20; k++) {
            const uint64_t mask = (rng_next(&r) & 0xffffffff) << bit % 32 | 1ull << bit % 32;
            w[bit / 32] ^= (uint32_t)mask;
            if (bit / 32 + 1 < FEW) w[bit / 32 + 1] ^= (uint32_t)(mask >> 32);
            CHECK(v->checksum(w, 0, FEW) != few, "a burst from bit %u on", bit);
            w[bit / 32] ^= (uint32_t)mask;
            if (bit / 32 + 1 < FEW) w[bit / 32 + 1] ^= (uint32_t)(mask >> 32);
        }
    for (uint32_t k = 0; k < 200; k++) { /* runs of words change places, or come twice */
        static uint32_t was[WORDS];
        const uint32_t len = 1 + rng_below(&r, WORDS / 3), a = rng_below(&r, WORDS / 3 - len / 2),
                       b = a + len + rng_below(&r, WORDS - a - 2 * len + 1);
        memcpy(was, w, sizeof w);
        memcpy(w + b, was + a, 4 * len);
        if (k % 2) memcpy(w + a, was + b, 4 * len);
        CHECK(v->checksum(w, 0, WORDS) != all, "%u words at %u and %u", len, a, b);
        memcpy(w, was, sizeof w);
    }
}
