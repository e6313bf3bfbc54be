/* simd.c: checksums (wire.h): integers modulo 2^64, so that any order gives the same value. */

/* A long of data has two words and one of `keys` their key: two products. */
enum {
    AT_ONCE = 8
}; /* registers */
INLINE void add_products(const uint32_t *w, const uint64_t *key, vu *even, vu *odd) {
    vu x, k;
    memcpy(&x, w, BYTES);
    memcpy(&k, __builtin_assume_aligned(key, BYTES), BYTES);
    *even += product(x, k);
    *odd += product(x >> 32, k);
}

static uint64_t checksum(const uint32_t *w, uint64_t from, uint64_t count) {
    uint64_t total = 0;
    while (count) {
        const uint64_t offset = from % SID_SUM_BLOCK, room = SID_SUM_BLOCK - offset, len = count < room ? count : room;
        const uint32_t *const end = w + len;
        const uint64_t *key = sid_sum_pairs + offset / 2;
        uint64_t evens = 0, odds = 0;
        vu even = {0}, odd = {0};
        for (; end - w >= AT_ONCE * WIDE; w += AT_ONCE * WIDE, key += AT_ONCE * LONGS)
            for (int q = 0; q < AT_ONCE; q++) add_products(w + q * WIDE, key + q * LONGS, &even, &odd);
        for (; end - w >= WIDE; w += WIDE, key += LONGS) add_products(w, key, &even, &odd);
        for (; w < end; w += 2, key++) {
            evens += w[0] * *key;
            odds += w[1] * *key;
        }
        for (int j = 0; j < LONGS; j++) {
            evens += even[j];
            odds += odd[j];
        }
        total += (evens + odds * SID_SUM_ODD) * sid_sum_block(from / SID_SUM_BLOCK);
        from += len;
        count -= len;
    }
    return total;
}
