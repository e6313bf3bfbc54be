/* simd.c: random bits: blocks of the counter-based generator of rng.h, integers only.
 *
 * A word of a block is the lower half of each 64-bit lane: the upper half is whatever a round leaves there, which no product
 * reads and no xor carries down. So a round is two products, two shifts and two xors of three for a register of blocks, and
 * SETS of them hide one another's latency: a product's is most of a round. */

enum {
    SETS = BYTES == 64 ? 4 : 2, /* four registers each */
    BLOCKS = SETS * LONGS
};

/* A register of blocks in the order of memory. */
INLINE void interleave(uint8_t *out, vu c0, vu c1, vu c2, vu c3) {
    const vu p = (c0 & 0xffffffff) | c1 << 32, r = (c2 & 0xffffffff) | c3 << 32;
#if BYTES == 64
    const vu x[2] = {(vu)_mm512_unpacklo_epi64((__m512i)p, (__m512i)r),
                     (vu)_mm512_unpackhi_epi64((__m512i)p, (__m512i)r)};
#elif BYTES == 32
    const vu x[2] = {(vu)_mm256_unpacklo_epi64((__m256i)p, (__m256i)r),
                     (vu)_mm256_unpackhi_epi64((__m256i)p, (__m256i)r)};
#else
    const vu x[2] = {{p[0], r[0]}, {p[1], r[1]}};
#endif
    memcpy(out, x, sizeof x);
}

/* Writes 4 * BLOCKS words. Long j of a set is block j / 2, odd ones LONGS / 2 more: then interleaving pairs of longs is
 * the order of memory. */
INLINE void philox(const sid_draw *d, uint64_t block, void *out) {
    const vu m0 = (vu){0} + 0xd2511f53u, m1 = (vu){0} + 0xcd9e8d57u;
    vu c0[SETS], c1[SETS], c2[SETS], c3[SETS];
    uint32_t k0 = d->salt, k1 = d->group;
    vu order;
    for (uint32_t j = 0; j < LONGS; j++) order[j] = j / 2 + j % 2 * (LONGS / 2);
    for (int q = 0; q < SETS; q++) {
        c0[q] = order + (block + (uint32_t)q * LONGS);
        c1[q] = c0[q] >> 32;
        c2[q] = (vu){0} + d->step;
        c3[q] = c2[q] >> 32;
    }
    for (int round = 0; round < SID_ROUNDS; round++) {
        for (int q = 0; q < SETS; q++) {
            const vu a = product(c0[q], m0), b = product(c2[q], m1);
            c0[q] = b >> 32 ^ c1[q] ^ k0;
            c2[q] = a >> 32 ^ c3[q] ^ k1;
            c1[q] = b;
            c3[q] = a;
        }
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    /* written out: arrays that a loop indexes go through memory */
    uint8_t *to = out;
    interleave(to, c0[0], c1[0], c2[0], c3[0]);
    interleave(to + 2 * BYTES, c0[1], c1[1], c2[1], c3[1]);
    if (SETS > 2) {
        interleave(to + 4 * BYTES, c0[SETS - 2], c1[SETS - 2], c2[SETS - 2], c3[SETS - 2]);
        interleave(to + 6 * BYTES, c0[SETS - 1], c1[SETS - 1], c2[SETS - 1], c3[SETS - 1]);
    }
}

static void draw32(const sid_draw *d, uint64_t offset, uint32_t len, uint32_t *out) {
    for (uint32_t i = 0; i < len; i += 4 * BLOCKS) philox(d, (offset + i) / 4, out + i);
}

static void draw16(const sid_draw *d, uint64_t offset, uint32_t len, uint16_t *out) {
    for (uint32_t i = 0; i < len; i += 8 * BLOCKS) philox(d, (offset + i) / 8, out + i); /* the low half is the first */
}
