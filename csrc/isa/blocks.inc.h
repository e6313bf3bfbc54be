/* simd.c: selection from a few thousand values, which lie in the first cache; and fields of 8 to 12 bits.
 *
 * Only comparisons of integers decide, so that nothing is rounded. */

enum {
    PIVOTS = 4
};
/* How many of n keys, a multiple of WIDE, are at least each of the pivots. */
INLINE void keys_from(const uint32_t *k, uint32_t n, const uint32_t *pivot, uint32_t *count) {
    counts c[PIVOTS];
    vi low[PIVOTS];
    memset(c, 0, sizeof c);
    for (uint32_t q = 0; q < PIVOTS; q++) low[q] = (vi){0} + (int32_t)pivot[q];
    for (uint32_t i = 0; i < n; i += WIDE) {
        vi v;
        memcpy(&v, k + i, sizeof v);
        for (uint32_t q = 0; q < PIVOTS; q++) c[q] = counted(c[q], from(v, low[q]));
    }
    for (uint32_t q = 0; q < PIVOTS; q++) count[q] = sum_of(c[q]);
}

static uint32_t kth_key(const float *val, uint32_t n, uint32_t rank, uint32_t low, uint32_t *above) {
    SID_LINE uint32_t key[SID_MAX_TILE + WIDE];
    uint32_t padded = 0, count[PIVOTS];
    for (; padded + WIDE <= n; padded += WIDE) {
        const vi k = keys(load(val + padded));
        memcpy(key + padded, &k, sizeof k);
    }
    if (padded < n) {
        for (uint32_t q = 0; q < WIDE; q++) key[padded + q] = padded + q < n ? sid_key(val[padded + q]) : 0;
        padded += WIDE;
    }
    /* Rank or more keys are at least `low`, fewer are at least `high`. Branches on the counts would be mispredicted. Padding never
     * counts, because pivots are above 0. */
    uint32_t high = max_of(val, n) + 1, pivot[PIVOTS];
    while (high - low > 1) {
        const uint32_t apart = high - low > PIVOTS ? (high - low) / (PIVOTS + 1) : 1;
        uint32_t passed = 0;
        for (uint32_t q = 0; q < PIVOTS; q++) pivot[q] = low + (q + 1) * apart;
        keys_from(key, padded, pivot, count);
        for (uint32_t q = 0; q < PIVOTS; q++) passed += count[q] >= rank;
        low += passed * apart;
        high = passed < PIVOTS ? low + apart : high;
    }
    for (uint32_t q = 0; q < PIVOTS; q++) pivot[q] = low + 1;
    keys_from(key, padded, pivot, count);
    *above = count[0];
    return low;
}

static void fields(const uint8_t *p, uint32_t bits, uint32_t n, uint16_t *out) {
    uint32_t i = 0;
#ifdef SID_HAS_AVX2
    /* Eight fields are `bits` bytes, each of them within two bytes, which a product brings to the top of a lane. Of 11 bits some
     * lie in three. */
    if (bits != 11) {
        const __m128i count8 = _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7);
        const __m128i at = _mm_mullo_epi16(_mm_set1_epi16((short)bits), count8);
        const __m128i byte = _mm_srli_epi16(at, 3), bit = _mm_and_si128(at, _mm_set1_epi16(7));
        const __m128i bytes = _mm_or_si128(byte, _mm_slli_epi16(_mm_add_epi16(byte, _mm_set1_epi16(1)), 8));
        const __m128i down = _mm_cvtsi32_si128(16 - (int)bits);
        uint16_t power[8];
        _mm_storeu_si128((__m128i *)(void *)power, bit);
        for (uint32_t j = 0; j < 8; j++) power[j] = (uint16_t)(1u << (16 - bits - power[j]));
        const __m128i up = _mm_loadu_si128((const __m128i *)(const void *)power);
        for (; i + 16 <= n; i += 8) { /* 16 fields have 16 bytes at least */
            const __m128i raw = _mm_loadu_si128((const __m128i *)(const void *)(p + i / 8 * bits));
            const __m128i x = _mm_srl_epi16(_mm_mullo_epi16(_mm_shuffle_epi8(raw, bytes), up), down);
            _mm_storeu_si128((__m128i *)(void *)(out + i), x);
        }
    }
#endif
    fields_of(p + i / 8 * bits, 0, bits, n - i, out + i);
}
