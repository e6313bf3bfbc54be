/* simd.c: selection by magnitude: elements, pairs or keys from a threshold on, moved together in their order.
 *
 * Only comparisons of integers decide, and values are copied, so that nothing is rounded. */

enum {
    A_FEW = 48, /* of a tile: below, they are taken out one by one */
    /* one in so many: above, moving all of a register costs less than one value after the other */
    A_LOT = BYTES == 64 ? 8 : 4
};
#ifndef SID_HAS_NEON
/* If a hit in FOUR elements is rare, a test skips them. If it is neither rare nor sure, mispredicting the test costs more
 * than writing entries that may be none. */
INLINE uint32_t capture_few(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                            const uint32_t slots, const int rare) {
    const vi low = (vi){0} + (int32_t)key;
    uint32_t c = 0;
    for (uint32_t i = 0; i < n; i += FOUR) {
        uint64_t hits = 0;
        for (uint32_t q = 0; q < 4; q++) hits |= word_of(from(keys(load(x + i + q * WIDE)), low)) << q * WIDE;
        if (rare && !hits) continue;
        const uint32_t end = c + (uint32_t)__builtin_popcountll(hits);
        for (uint32_t k = 0; k < slots; k++, hits &= hits - 1) {
            const uint32_t j = i + (uint32_t)__builtin_ctzll(hits | 1ull << (FOUR - 1));
            idx[c + k] = (uint16_t)(base + j);
            val[c + k] = x[j];
        }
        for (c += slots; c < end; c++, hits &= hits - 1) {
            const uint32_t j = i + (uint32_t)__builtin_ctzll(hits);
            idx[c] = (uint16_t)(base + j);
            val[c] = x[j];
        }
        c = end;
    }
    return c;
}
#endif

#if BYTES == 32
/* First the places of all hits, then their values. n: a multiple of 64. */
INLINE uint32_t capture_some(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val) {
    const vi low = (vi){0} + (int32_t)key;
    uint32_t c = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        uint64_t hits = 0;
        for (uint32_t q = 0; q < 64 / WIDE; q++) hits |= word_of(from(keys(load(x + i + q * WIDE)), low)) << q * WIDE;
        c += places_of(hits, base + i, idx + c);
    }
    for (uint32_t k = 0; k < c; k++) val[k] = x[(uint16_t)(idx[k] - base)];
    return c;
}
#endif

#ifdef SID_HAS_NEON
/* n: a multiple of 64. */
INLINE uint32_t capture_64(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val) {
    const vi low = (vi){0} + (int32_t)key;
    uint32_t c = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        vi m[16];
        for (uint32_t q = 0; q < 16; q++) m[q] = keys(load(x + i + q * WIDE)) >= low;
        for (uint64_t hits = word_of_masks(m); hits; hits &= hits - 1) {
            const uint32_t j = i + (uint32_t)__builtin_ctzll(hits);
            idx[c] = (uint16_t)(base + j);
            val[c++] = x[j];
        }
    }
    return c;
}
#endif

static uint32_t capture(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                        uint32_t expected) {
    uint32_t c = 0, i = 0;
    if (key > 0x7fffffffu) return 0;
#ifdef SID_HAS_NEON
    (void)expected;
    i = n / 64 * 64;
    c = capture_64(x, i, key, base, idx, val);
#else
    if (expected < A_FEW) {
        i = n / FOUR * FOUR;
        if (expected < 4)
            c = capture_few(x, i, key, base, idx, val, 1, 1);
        else if (expected < A_FEW / 3)
            c = capture_few(x, i, key, base, idx, val, (FOUR + 31) / 32, 0);
        else
            c = capture_few(x, i, key, base, idx, val, FOUR / 16, 0);
    }
#endif
#ifdef SID_HAS_AVX512
    const __m512i low = _mm512_set1_epi32((int)key - 1), step = _mm512_set1_epi32(16);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 64 <= n; i += 64) {
        __mmask16 m[4];
        for (int j = 0; j < 4; j++) m[j] = _mm512_cmpgt_epi32_mask(keys16(x + i + 16 * j), low);
        __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(base + i)));
        for (int j = 0; j < 4; j++) {
            _mm512_storeu_ps(val + c, _mm512_maskz_compress_ps(m[j], _mm512_loadu_ps(x + i + 16 * j)));
            _mm256_storeu_si256((__m256i *)(void *)(idx + c),
                                _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m[j], at)));
            c += bits16(m[j]);
            at = _mm512_add_epi32(at, step);
        }
    }
#elif defined(SID_HAS_AVX2)
    if (!i && expected < n / A_LOT) {
        i = n / 64 * 64;
        c = capture_some(x, i, key, base, idx, val);
    }
    const __m256i low = _mm256_set1_epi32((int)key - 1);
    for (; i + 8 <= n; i += 8) {
        const unsigned m = mask8(_mm256_cmpgt_epi32(keys8(x + i), low));
        const __m128i at = _mm_add_epi16(_mm_cvtepu8_epi16(left_bytes(m)), _mm_set1_epi16((short)(base + i)));
        _mm256_storeu_ps(val + c, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i), left8(m)));
        _mm_storeu_si128((__m128i *)(void *)(idx + c), at);
        c += (unsigned)__builtin_popcount(m);
    }
#endif
    for (; i < n; i++) {
        idx[c] = (uint16_t)(base + i);
        val[c] = x[i];
        c += sid_key(x[i]) >= key;
    }
    return c;
}

#ifdef SID_HAS_AVX512
/* Neither few nor many: first the places of all hits, 64 elements at a time, then their values. Stores are what takes time
 * here, so places are stored by 16, which is mostly all that there are. */
VBMI2 uint32_t capture_vbmi2(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                             uint32_t expected) {
    if (key > 0x7fffffffu || expected < A_FEW || expected > n / A_LOT)
        return capture(x, n, key, base, idx, val, expected);
    const __m512i low = _mm512_set1_epi32((int)key - 1), lanes = _mm512_loadu_si512(lanes8);
    const uint32_t whole = n / 64 * 64;
    uint32_t c = 0;
    for (uint32_t i = 0; i < whole; i += 64) {
        uint64_t hits = 0;
        for (uint32_t q = 0; q < 64; q += 16)
            hits |= (uint64_t)number(_mm512_cmpgt_epi32_mask(keys16(x + i + q), low)) << q;
        const uint32_t some = (uint32_t)__builtin_popcountll(hits);
        const __m512i left = _mm512_maskz_compress_epi8(hits, lanes);
        const __m256i from_i = _mm256_set1_epi16((short)(base + i));
        _mm256_storeu_si256((__m256i *)(void *)(idx + c),
                            _mm256_add_epi16(from_i, _mm256_cvtepu8_epi16(_mm512_castsi512_si128(left))));
        if (some > 16) {
            uint8_t at[64];
            _mm512_storeu_si512(at, left);
            for (uint32_t k = 16; k < some; k++) idx[c + k] = (uint16_t)(base + i + at[k]);
        }
        c += some;
    }
    for (uint32_t k = 0; k < c; k++) val[k] = x[(uint16_t)(idx[k] - base)];
    for (uint32_t i = whole; i < n; i++) {
        idx[c] = (uint16_t)(base + i);
        val[c] = x[i];
        c += sid_key(x[i]) >= key;
    }
    return c;
}
#endif

static uint64_t filter(const uint16_t *idx, const float *val, uint64_t n, uint32_t key, uint16_t *idx_out,
                       float *val_out, uint64_t room) {
    uint64_t c = 0, i = 0;
    if (key > 0x7fffffffu) return 0;
#ifdef SID_HAS_AVX512
    const __m512i low = _mm512_set1_epi32((int)key - 1);
    for (; i + 16 <= n && c + 16 <= room; i += 16) {
        const __m512 v = _mm512_loadu_ps(val + i);
        const __m512i at = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(idx + i)));
        const __mmask16 m = _mm512_cmpgt_epi32_mask(keys16(val + i), low);
        _mm512_storeu_ps(val_out + c, _mm512_maskz_compress_ps(m, v));
        _mm256_storeu_si256((__m256i *)(void *)(idx_out + c),
                            _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, at)));
        c += bits16(m);
    }
#elif defined(SID_HAS_AVX2)
    const __m256i low = _mm256_set1_epi32((int)key - 1);
    for (; i + 8 <= n && c + 8 <= room; i += 8) {
        const __m256 v = _mm256_loadu_ps(val + i);
        const __m128i at = _mm_loadu_si128((const __m128i *)(const void *)(idx + i));
        const unsigned m = mask8(_mm256_cmpgt_epi32(keys8(val + i), low));
        const __m128i left = left_bytes(m), pair = _mm_unpacklo_epi8(left, left); /* of a 16-bit lane, both bytes */
        _mm256_storeu_ps(val_out + c, _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(left)));
        _mm_storeu_si128((__m128i *)(void *)(idx_out + c),
                         _mm_shuffle_epi8(at, _mm_add_epi8(_mm_add_epi8(pair, pair), _mm_set1_epi16(0x100))));
        c += (unsigned)__builtin_popcount(m);
    }
#endif
    for (; i < n; i++) {
        if (sid_key(val[i]) < key) continue;
        if (c == room) return c;
        const uint16_t at = idx[i];
        const float v = val[i];
        idx_out[c] = at;
        val_out[c++] = v;
    }
    return c;
}

static uint64_t band(const float *val, uint64_t n, uint32_t lo, uint32_t hi, uint32_t *out, uint64_t *above) {
    uint64_t c = 0, over = 0, i = 0;
#ifdef SID_HAS_AVX512
    const __m512i a = _mm512_set1_epi32((int)lo), b = _mm512_set1_epi32((int)hi);
    for (; i + 16 <= n; i += 16) {
        const __m512i k = keys16(val + i);
        const __mmask16 ge = _mm512_cmpge_epu32_mask(k, b), in = _mm512_mask_cmpge_epu32_mask((__mmask16)~ge, k, a);
        _mm512_storeu_si512(out + c, _mm512_maskz_compress_epi32(in, k));
        c += bits16(in);
        over += bits16(ge);
    }
#elif defined(SID_HAS_AVX2)
    if (hi <= 0x7fffffffu) {
        const __m256i a = _mm256_set1_epi32((int)lo - 1), b = _mm256_set1_epi32((int)hi - 1);
        for (; i + 8 <= n; i += 8) {
            const __m256i k = keys8(val + i);
            const unsigned ge = mask8(_mm256_cmpgt_epi32(k, b)), in = mask8(_mm256_cmpgt_epi32(k, a)) & ~ge;
            _mm256_storeu_si256((__m256i *)(void *)(out + c), _mm256_permutevar8x32_epi32(k, left8(in)));
            c += (unsigned)__builtin_popcount(in);
            over += (unsigned)__builtin_popcount(ge);
        }
    }
#endif
    for (; i < n; i++) {
        const uint32_t k = sid_key(val[i]);
        out[c] = k;
        c += k >= lo && k < hi;
        over += k >= hi;
    }
    *above = over;
    return c;
}
