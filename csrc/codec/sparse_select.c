/* Selection: the key of the rank-th largest candidate, exactly. */
#include <math.h>
#include <string.h>

#include "sparse.h"

enum {
    BINS = 2048,
    WAYS = 4,
    SAMPLE = 2048,
    WORTH = 65536 /* candidates: from so many on a sample costs less than it saves */
};

/* Radix selection on keys within [lo, lo + 2^bits): 2048 bins a round. keys is consumed. */
static sparse_pick select_key(uint32_t *keys, uint64_t n, uint64_t rank, uint32_t lo, uint32_t bits) {
    sparse_pick pick = {0, 0, 0};
    for (;;) {
        uint32_t bin[WAYS][BINS] = {{0}}; /* several copies: equal neighbours would wait for one another's store */
        const uint32_t shift = bits > 11 ? bits - 11 : 0;
        uint64_t i = 0, c = 0;
        for (; i + WAYS <= n; i += WAYS)
            for (uint64_t j = 0; j < WAYS; j++) bin[j][(keys[i + j] - lo) >> shift]++;
        for (; i < n; i++) bin[0][(keys[i] - lo) >> shift]++;
        uint32_t b = BINS;
        uint64_t in = 0, above = 0;
        while (b--) {
            in = 0;
            for (int j = 0; j < WAYS; j++) in += bin[j][b];
            if (above + in >= rank) break;
            above += in;
        }
        pick.above += above;
        rank -= above;
        lo += b << shift;
        bits = shift;
        if (shift == 0) {
            pick.key = lo;
            pick.ties = in;
            return pick;
        }
        for (i = 0; i < n; i++) {
            const uint32_t k = keys[i];
            keys[c] = k;
            c += (k - lo) >> shift == 0;
        }
        n = c;
    }
}

/* *lo, and what is returned: of a sample, three standard deviations and more to either side of where the rank-th largest of
 * `count` values should be. */
static uint32_t between(const float *val, uint64_t count, uint64_t rank, uint32_t *lo) {
    uint32_t sample[2][SAMPLE];
    const uint64_t stride = count / SAMPLE;
    for (uint64_t i = 0; i < SAMPLE; i++) sample[0][i] = sid_key(val[i * stride]);
    memcpy(sample[1], sample[0], sizeof *sample);
    const double all = SAMPLE, at = (double)rank / (double)count * all, margin = 3 * sqrt(at * (1 - at / all)) + 4;
    *lo = at + margin < all ? select_key(sample[0], SAMPLE, (uint64_t)(at + margin) + 1, 0, 31).key : 0;
    return at - margin >= 1 ? select_key(sample[1], SAMPLE, (uint64_t)(at - margin), 0, 31).key + 1 : 0x80000000u;
}

/* Into *pick, if the key lies in [lo, hi). */
static int select_in(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank, uint32_t lo,
                     uint32_t hi, sparse_pick *pick) {
    uint64_t above;
    uint32_t bits = 1;
    const uint64_t n = v->band(val, count, lo, hi, keys, &above);
    if (rank <= above || rank > above + n) return 0;
    while (bits < 31 && hi - lo > 1u << bits) bits++;
    *pick = select_key(keys, n, rank - above, lo, bits);
    pick->above += above;
    return 1;
}

sparse_pick sparse_select_of(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank,
                             uint32_t guess, uint32_t spread) {
    sparse_pick pick;
    /* close by first: fewer keys to sort through */
    const uint32_t half = spread / 8;
    if (half && select_in(v, val, count, keys, rank, guess > half ? guess - half : 0, guess + half, &pick)) return pick;
    if (count >= WORTH) {
        uint32_t lo;
        const uint32_t hi = between(val, count, rank, &lo);
        if (select_in(v, val, count, keys, rank, lo, hi, &pick)) return pick;
    } else if (half && select_in(v, val, count, keys, rank, guess > spread ? guess - spread : 0, guess + spread, &pick))
        return pick;
    select_in(v, val, count, keys, rank, 0, 0x80000000u, &pick);
    return pick;
}

sparse_pick sparse_select(const sid_pass *w, uint64_t rank, uint32_t guess, uint32_t spread) {
    const sparse_work *s = sparse_of(w);
    return sparse_select_of(w->plan->simd, s->val, s->count, s->keys, rank, guess, spread);
}
