/* Counter-based random bits: Philox4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
 * Seven rounds pass BigCrush (as they report); their default of ten is that with a margin, and a third of the time of a
 * codec that draws for every element. Shared by host and device: an element's bits depend on the stream and on its index
 * in the group, on nothing else, so that every instruction set, launch shape and number of threads draws the same. */
#ifndef SID_RNG_H
#define SID_RNG_H

#include "wire.h"

/* One rank's stream in one step of one group. All of it stands in the payload's header, so a reader can draw it again. */
typedef struct sid_draw {
    uint32_t salt, group;
    uint64_t step;
} sid_draw;

/* Spreads a seed over 32 bits. */
SID_HD uint32_t sid_fold_seed(uint64_t seed) {
    seed = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9ull;
    seed = (seed ^ (seed >> 27)) * 0x94d049bb133111ebull;
    return (uint32_t)(seed ^ (seed >> 31));
}

/* The salts of one seed's ranks are distinct, and that of SID_COMMON, which all of them share, is none of them. */
#define SID_COMMON 0xffffffffu
SID_HD uint32_t sid_salt(uint64_t seed, uint32_t rank) {
    return sid_fold_seed(seed) + (rank + 1u) * 0x9e3779b1u; /* odd: one to one */
}

enum {
    SID_ROUNDS = 7
};

/* c: the counter, replaced by four random words. */
SID_HD void sid_philox(uint32_t c[4], uint32_t k0, uint32_t k1) {
    for (int round = 0; round < SID_ROUNDS; round++) {
        const uint64_t a = (uint64_t)c[0] * 0xd2511f53u, b = (uint64_t)c[2] * 0xcd9e8d57u;
        const uint32_t c1 = c[1], c3 = c[3];
        c[0] = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c[1] = (uint32_t)b;
        c[2] = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c[3] = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
}

/* Block `block` of a stream, four words. */
SID_HD void sid_draw_block(const sid_draw *d, uint64_t block, uint32_t out[4]) {
    out[0] = (uint32_t)block;
    out[1] = (uint32_t)(block >> 32);
    out[2] = (uint32_t)d->step;
    out[3] = (uint32_t)(d->step >> 32);
    sid_philox(out, d->salt, d->group);
}

/* The random bits of element i: 16 bits from half-word i % 8 of block i / 8 (low half first), or word i % 4 of block i
 * / 4. A codec uses one of the two in a step. */
SID_HD uint32_t sid_draw_16(const sid_draw *d, uint64_t i) {
    uint32_t w[4];
    sid_draw_block(d, i / 8, w);
    return (w[i % 8 / 2] >> (16 * (i % 2))) & 0xffffu;
}
SID_HD uint32_t sid_draw_32(const sid_draw *d, uint64_t i) {
    uint32_t w[4];
    sid_draw_block(d, i / 4, w);
    return w[i % 4];
}

#endif
