/* simd.c: the largest magnitude: of a vector, of each of its blocks, and whether a vector is finite.
 *
 * A magnitude's key is an integer, and a maximum does not depend on the order in which it is taken. */

INLINE uint32_t max_of(const float *x, uint32_t n) {
    vi top[4] = {{0}};
    uint32_t i = 0, max;
    for (; i + 4 * WIDE <= n; i += 4 * WIDE)
        for (int q = 0; q < 4; q++) top[q] = higher(top[q], keys(load(x + i + q * WIDE)));
    const vi all = higher(higher(top[0], top[1]), higher(top[2], top[3]));
#if BYTES == 64
    max = (uint32_t)_mm512_reduce_max_epi32((__m512i)all);
#else
    max = 0;
    for (int j = 0; j < WIDE; j++) max = (uint32_t)all[j] > max ? (uint32_t)all[j] : max;
#endif
    for (; i < n; i++) max = sid_key(x[i]) > max ? sid_key(x[i]) : max;
    return max;
}

static uint32_t max_key(const float *x, uint32_t n) { return max_of(x, n); }
static void block_keys(const float *x, uint32_t n, uint32_t block, uint32_t *key) {
    for (uint32_t b = 0, i = 0; i < n; b++, i += block) key[b] = max_of(x + i, n - i < block ? n - i : block);
}
static int finite(const float *x, uint32_t n) { return max_key(x, n) < SID_KEY_INF; }
