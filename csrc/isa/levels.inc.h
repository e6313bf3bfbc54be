/* simd.c: levels of sparse values in 8, 4 or 2 bits (bits.h).
 *
 * The level is bits.h's sid_level_of, in float32 with a product and a sum, each rounded. The difference of a value and its level
 * is exact, but for 2 bits. */

static void to_levels(const float *x, uint32_t n, const sid_levels *levels, uint8_t *code) {
    const sid_levels l = *levels;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]);
        code[i] = (uint8_t)(sid_level_of(u & 0x7fffffffu, &l) + (u >> 31) * (l.top + 1));
    }
}

static void take_levels(float *x, uint32_t n, uint32_t key, const sid_levels *levels) {
    const sid_levels l = *levels;
    const int32_t from = (int32_t)(key > 0x7fffffffu ? 0x7fffffffu : key);
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    if (l.top < 16) { /* what each level stands for in one register */
        uint32_t what[16];
        for (uint32_t c = 0; c < 16; c++) what[c] = sid_level_key(c, &l);
        const __m512i table = _mm512_loadu_si512(what), base = _mm512_set1_epi32((int)l.origin),
                      top = _mm512_set1_epi32((int)l.top), low = _mm512_set1_epi32(from);
        for (; i + 16 <= n; i += 16) {
            const __m512 v = _mm512_loadu_ps(x + i);
            const __m512i k = keys16(x + i);
            const __m512 steps =
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(k, base)), _mm512_set1_ps(l.inverse));
            __m512i c = _mm512_cvttps_epi32(_mm512_add_ps(steps, _mm512_set1_ps(0.5f)));
            c = _mm512_min_epi32(_mm512_max_epi32(c, _mm512_setzero_si512()), top);
            const __m512i sign = _mm512_xor_si512(_mm512_castps_si512(v), k);
            const __m512 sent = _mm512_castsi512_ps(_mm512_or_si512(_mm512_permutexvar_epi32(c, table), sign));
            _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(v, _mm512_cmpge_epi32_mask(k, low), v, sent));
        }
    }
#endif
    for (; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]), k = u & 0x7fffffffu;
        const uint32_t sent = sid_level_key(sid_level_of(k, &l), &l) | (u & 0x80000000u);
        x[i] -= sid_bits_f32((int32_t)k >= from ? sent : 0u);
    }
}
