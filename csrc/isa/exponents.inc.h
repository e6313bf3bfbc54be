/* simd.c: elements taken apart into codes of their exponents, bit by bit in planes, bytes of sign and mantissa, and what else of
 * the mantissa there is; and put together again (bits.h, lossless.c).
 *
 * Nothing here rounds, except that join adds: one float32 sum an element. */

/* Bit k of each of 8 codes, one a byte, as a byte. */
INLINE uint32_t plane_of(uint64_t codes, uint32_t k) {
    return (uint32_t)(((codes >> k & 0x0101010101010101ull) * 0x0102040810204080ull) >> 56);
}
/* The reverse: bytes of 0 and 1. */
INLINE uint64_t bytes_of(uint32_t plane) {
    const uint64_t bit = (uint64_t)plane * 0x0101010101010101ull & 0x8040201008040201ull;
    return (bit + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}

/* Which of 8 codes have all of their bits. */
INLINE uint32_t far_of(uint64_t codes, uint32_t width) {
    const uint64_t three = codes & codes >> 1 & codes >> 2;
    return plane_of(width > 3 ? three & codes >> 3 : three, 0);
}

#if BYTES >= 32
enum {
    PARTED = 32 /* elements at a time: a byte of a register each */
};
/* Bit k of each byte. */
INLINE uint32_t bits_k(__m256i bytes, uint32_t k) {
    return (uint32_t)_mm256_movemask_epi8(_mm256_slli_epi16(bytes, 7 - (int)k));
}
/* The reverse: `is` in the bytes whose bit is set. */
INLINE __m256i where_set(const uint8_t *bits, uint32_t is) {
    uint32_t m;
    memcpy(&m, bits, 4);
    const __m256i from = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
    const __m256i own = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32((int32_t)m), from), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(own, bit), _mm256_set1_epi8((char)is));
}
INLINE __m256i load_32(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE void store_32(void *p, __m256i x) { _mm256_storeu_si256((__m256i *)p, x); }

/* PARTED elements from the i-th on, i a multiple of it, all of one block. Returns how many exponents are written to far. */
INLINE uint32_t split_32(const uint32_t *u, uint32_t i, uint32_t stride, const sid_parts *to, uint8_t *far,
                         const uint32_t width, const int half) {
    __m256i x[4], high[2], low[2], m[4];
    const __m256i far_code = _mm256_set1_epi8((char)((1u << width) - 1)), words = _mm256_set1_epi32(0xffff);
    for (int j = 0; j < 4; j++) {
        x[j] = load_32(u + i + 8 * j);
        if (half) m[j] = _mm256_and_si256(_mm256_srli_epi32(x[j], 13), _mm256_set1_epi32(7));
    }
    for (int j = 0; j < 2; j++) {
        high[j] = _mm256_packus_epi32(_mm256_srli_epi32(x[2 * j], 16), _mm256_srli_epi32(x[2 * j + 1], 16));
        low[j] = _mm256_packus_epi32(_mm256_and_si256(x[2 * j], words), _mm256_and_si256(x[2 * j + 1], words));
    }
    __m256i e[2], h[2];
    for (int j = 0; j < 2; j++) {
        e[j] = _mm256_and_si256(_mm256_srli_epi16(high[j], 7), _mm256_set1_epi16(0xff));
        h[j] = _mm256_or_si256(_mm256_and_si256(high[j], _mm256_set1_epi16(0x7f)),
                               _mm256_and_si256(_mm256_srli_epi16(high[j], 8), _mm256_set1_epi16(0x80)));
    }
    const __m256i exponent = in_order(_mm256_packus_epi16(e[0], e[1]));
    const __m256i none = _mm256_cmpeq_epi8(exponent, _mm256_setzero_si256());
    const __m256i below = _mm256_sub_epi8(_mm256_set1_epi8((char)(to->top[i / to->block] + 1)), exponent);
    const __m256i code = _mm256_andnot_si256(none, _mm256_min_epu8(below, far_code));
    store_32(to->high + i, in_order(_mm256_packus_epi16(h[0], h[1])));
    if (to->low)
        for (int j = 0; j < 2; j++) store_32(to->low + 2 * i + 32 * j, _mm256_permute4x64_epi64(low[j], 0xd8));
    for (uint32_t k = 0; k < width; k++) {
        const uint32_t plane = bits_k(code, k);
        memcpy(to->plane + k * stride + i / 8, &plane, 4);
    }
    if (half) {
        const __m256i rest =
            in_order(_mm256_packus_epi16(_mm256_packus_epi32(m[0], m[1]), _mm256_packus_epi32(m[2], m[3])));
        for (uint32_t k = 0; k < 3; k++) {
            const uint32_t plane = bits_k(rest, k);
            memcpy(to->plane + (width + k) * stride + i / 8, &plane, 4);
        }
    }
    uint32_t count = 0;
    for (uint32_t left = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, far_code)); left; left &= left - 1)
        far[count++] = (uint8_t)(u[i + (uint32_t)__builtin_ctz(left)] >> 23);
    return count;
}
#endif

#if BYTES == 64
INLINE __m512i both(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
/* The low bytes of 64 elements in words. */
INLINE __m512i bytes_of_words(__m512i low, __m512i high) {
    return both(_mm512_cvtepi16_epi8(low), _mm512_cvtepi16_epi8(high));
}
INLINE void put_plane(const sid_parts *to, uint32_t k, uint32_t stride, uint32_t i, uint64_t plane) {
    memcpy(to->plane + k * stride + i / 8, &plane, 8);
}

/* As split_32, 64 elements. */
INLINE uint32_t split_64(const uint32_t *u, uint32_t i, uint32_t stride, const sid_parts *to, uint8_t *far,
                         const uint32_t width, const int half) {
    __m512i x[4], e[2], h[2];
    const __m512i far_code = _mm512_set1_epi8((char)((1u << width) - 1));
    for (int j = 0; j < 4; j++) x[j] = _mm512_loadu_si512(u + i + 16 * j);
    for (int j = 0; j < 2; j++) {
        const __m512i high = both(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x[2 * j], 16)),
                                  _mm512_cvtepi32_epi16(_mm512_srli_epi32(x[2 * j + 1], 16)));
        e[j] = _mm512_srli_epi16(high, 7);
        h[j] = _mm512_or_si512(_mm512_and_si512(high, _mm512_set1_epi16(0x7f)),
                               _mm512_andnot_si512(_mm512_set1_epi16(0x7f), _mm512_srli_epi16(high, 8)));
    }
    const __m512i exponent = bytes_of_words(e[0], e[1]);
    const __m512i below = _mm512_sub_epi8(_mm512_set1_epi8((char)(to->top[i / to->block] + 1)), exponent);
    const __m512i code = _mm512_maskz_min_epu8(_mm512_test_epi8_mask(exponent, exponent), below, far_code);
    _mm512_storeu_si512(to->high + i, bytes_of_words(h[0], h[1]));
    for (int j = 0; j < 4 && to->low; j++)
        _mm256_storeu_si256((__m256i *)(void *)(to->low + 2 * i + 32 * j), _mm512_cvtepi32_epi16(x[j]));
    for (uint32_t k = 0; k < width; k++)
        put_plane(to, k, stride, i, _mm512_test_epi8_mask(code, _mm512_set1_epi8((char)(1u << k))));
    if (half) {
        __m512i m[2];
        for (int j = 0; j < 2; j++)
            m[j] = both(_mm512_cvtepi32_epi16(_mm512_srli_epi32(x[2 * j], 13)),
                        _mm512_cvtepi32_epi16(_mm512_srli_epi32(x[2 * j + 1], 13)));
        const __m512i rest = bytes_of_words(m[0], m[1]);
        for (uint32_t k = 0; k < 3; k++)
            put_plane(to, width + k, stride, i, _mm512_test_epi8_mask(rest, _mm512_set1_epi8((char)(1u << k))));
    }
    uint32_t count = 0;
    for (uint64_t left = _mm512_cmpeq_epi8_mask(code, far_code); left; left &= left - 1)
        far[count++] = (uint8_t)(u[i + (uint32_t)__builtin_ctzll(left)] >> 23);
    return count;
}

INLINE uint64_t plane_at(const sid_parts *from, uint32_t k, uint32_t stride, uint32_t i) {
    uint64_t plane;
    memcpy(&plane, from->plane + k * stride + i / 8, 8);
    return plane;
}
INLINE __m256i half_register(__m512i x, int j) {
    return j ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
}
/* As join_32, 64 elements. */
INLINE uint32_t join_64(const sid_parts *from, uint32_t stride, uint32_t i, const uint8_t *far, int add, float *out,
                        const uint32_t width, const int half) {
    __m512i exponent = _mm512_set1_epi8((char)(from->top[i / from->block] + 1)), rest = _mm512_setzero_si512();
    uint64_t any = 0, left = ~0ull;
    for (uint32_t k = 0; k < width; k++) {
        const uint64_t plane = plane_at(from, k, stride, i);
        any |= plane;
        left &= plane;
        exponent = _mm512_mask_sub_epi8(exponent, plane, exponent, _mm512_set1_epi8((char)(1u << k)));
    }
    exponent = _mm512_maskz_mov_epi8(any, exponent);
    for (uint32_t k = 0; half && k < 3; k++)
        rest =
            _mm512_mask_add_epi8(rest, plane_at(from, width + k, stride, i), rest, _mm512_set1_epi8((char)(1u << k)));
    uint32_t count = 0;
    if (left) {
        SID_LINE uint8_t each[64];
        _mm512_store_si512(each, exponent);
        for (; left; left &= left - 1) each[__builtin_ctzll(left)] = far[count++];
        exponent = _mm512_load_si512(each);
    }
    const __m512i h = _mm512_loadu_si512(from->high + i);
    for (int j = 0; j < 2; j++) { /* words, whose bits are those of a float16, or the upper ones of a float32 */
        const __m512i mantissa = _mm512_cvtepu8_epi16(half_register(h, j)),
                      e = _mm512_cvtepu8_epi16(half_register(exponent, j));
        const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(mantissa, _mm512_set1_epi16(0x80)), 8);
        const __m512i above = _mm512_and_si512(mantissa, _mm512_set1_epi16(0x7f));
        const __m512i word = half ? _mm512_or_si512(_mm512_or_si512(sign, _mm512_slli_epi16(e, 10)),
                                                    _mm512_or_si512(_mm512_slli_epi16(above, 3),
                                                                    _mm512_cvtepu8_epi16(half_register(rest, j))))
                                  : _mm512_or_si512(_mm512_or_si512(sign, _mm512_slli_epi16(e, 7)), above);
        for (int q = 0; q < 2; q++) {
            float *const to = out + i + 32 * j + 16 * q;
            __m512 x;
            if (half) {
                x = _mm512_cvtph_ps(half_register(word, q));
            } else {
                __m512i bits = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half_register(word, q)), 16);
                if (from->low) {
                    const uint8_t *low = from->low + 2 * i + 64 * j + 32 * q;
                    bits = _mm512_or_si512(
                        bits, _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)low)));
                }
                x = _mm512_castsi512_ps(bits);
            }
            _mm512_storeu_ps(to, add ? _mm512_add_ps(_mm512_loadu_ps(to), x) : x);
        }
    }
    return count;
}
#endif

#ifdef SID_HAS_NEON
enum {
    PARTED = 16 /* elements at a time: a byte of a register each */
};
/* Bits 0 to 3 of each of 16 bytes, 16 bits for each k. */
INLINE uint64_t planes_of(uint8x16_t bytes) {
    uint8x16_t is[4];
    for (int k = 0; k < 4; k++) is[k] = vtstq_u8(bytes, vdupq_n_u8((uint8_t)(1u << k)));
    return word_of_bytes(is);
}
/* The reverse: `is` in the bytes whose bit is set. */
INLINE uint8x16_t where_set(const uint8_t *bits, uint32_t is) {
    const uint8x16_t own = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
    return vandq_u8(vtstq_u8(own, bit_weights()), vdupq_n_u8((uint8_t)is));
}
/* Four bits for each byte of a mask. */
INLINE uint64_t nibbles_of(uint8x16_t m) {
    return vget_lane_u64(vreinterpret_u64_u8(vshrn_n_u16(vreinterpretq_u16_u8(m), 4)), 0);
}

/* As split_32. */
INLINE uint32_t split_16(const uint32_t *u, uint32_t i, uint32_t stride, const sid_parts *to, uint8_t *far,
                         const uint32_t width, const int half) {
    uint16x8_t x[4], high[2];
    const uint8x16_t far_code = vdupq_n_u8((uint8_t)((1u << width) - 1));
    for (int j = 0; j < 4; j++) x[j] = vreinterpretq_u16_u32(vld1q_u32(u + i + 4 * j));
    for (int j = 0; j < 2; j++) high[j] = vuzp2q_u16(x[2 * j], x[2 * j + 1]);
    const uint8x16_t a = vreinterpretq_u8_u16(high[0]), b = vreinterpretq_u8_u16(high[1]);
    const uint8x16_t exponent = vcombine_u8(vshrn_n_u16(high[0], 7), vshrn_n_u16(high[1], 7));
    const uint8x16_t below = vsubq_u8(vdupq_n_u8((uint8_t)(to->top[i / to->block] + 1)), exponent);
    const uint8x16_t code = vbicq_u8(vminq_u8(below, far_code), vceqzq_u8(exponent));
    vst1q_u8(to->high + i, vbslq_u8(vdupq_n_u8(0x80), vuzp2q_u8(a, b), vuzp1q_u8(a, b)));
    if (to->low)
        for (int j = 0; j < 2; j++)
            vst1q_u8(to->low + 2 * i + 16 * j, vreinterpretq_u8_u16(vuzp1q_u16(x[2 * j], x[2 * j + 1])));
    const uint64_t planes = planes_of(code);
    for (uint32_t k = 0; k < width; k++) {
        const uint16_t plane = (uint16_t)(planes >> 16 * k);
        memcpy(to->plane + k * stride + i / 8, &plane, 2);
    }
    if (half) { /* the lowest bits of a float16's mantissa, which are bits 13 to 15 */
        uint8x8_t m[2];
        for (int j = 0; j < 2; j++) m[j] = vshrn_n_u16(vshrq_n_u16(vuzp1q_u16(x[2 * j], x[2 * j + 1]), 5), 8);
        const uint64_t rest = planes_of(vcombine_u8(m[0], m[1]));
        for (uint32_t k = 0; k < 3; k++) {
            const uint16_t plane = (uint16_t)(rest >> 16 * k);
            memcpy(to->plane + (width + k) * stride + i / 8, &plane, 2);
        }
    }
    uint32_t count = 0;
    for (uint64_t left = nibbles_of(vceqq_u8(code, far_code)) & 0x1111111111111111u; left; left &= left - 1)
        far[count++] = (uint8_t)(u[i + (uint32_t)__builtin_ctzll(left) / 4] >> 23);
    return count;
}
#endif

/* The code, and above it the bits of the mantissa that have no byte. */
INLINE void codes_of(const uint32_t *u, uint32_t n, uint32_t top, const sid_parts *to, uint8_t *code) {
    const uint32_t half = to->planes > to->bits, far = (1u << to->bits) - 1;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t c = sid_exponent_code(u[i] >> 23 & 255, top, far);
        code[i] = (uint8_t)(half ? c | (u[i] >> 13 & 7) << to->bits : c);
    }
}

INLINE uint32_t split_as(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *far, const uint32_t width) {
    const uint32_t stride = (n + 63) / 64 * 8;
    uint32_t count = 0, i = 0;
#if BYTES == 64
    for (; i + 64 <= n; i += 64)
        count += to->planes > width ? split_64(u, i, stride, to, far + count, width, 1)
                                    : split_64(u, i, stride, to, far + count, width, 0);
#elif BYTES == 32
    for (; i + PARTED <= n / 64 * 64; i += PARTED)
        count += to->planes > width ? split_32(u, i, stride, to, far + count, width, 1)
                                    : split_32(u, i, stride, to, far + count, width, 0);
#elif defined(SID_HAS_NEON)
    for (; i + PARTED <= n / 64 * 64; i += PARTED)
        count += to->planes > width ? split_16(u, i, stride, to, far + count, width, 1)
                                    : split_16(u, i, stride, to, far + count, width, 0);
#endif
    for (; i < n; i += 64) {
        const uint32_t some = n - i < 64 ? n - i : 64;
        uint8_t code[64];
        codes_of(u + i, some, to->top[i / to->block], to, code);
        memset(code + some, 0, 64 - some);
        for (uint32_t j = i; j < i + some; j++) {
            to->high[j] = (uint8_t)((u[j] >> 16 & 0x7f) | (u[j] >> 24 & 0x80));
            if (to->low) {
                to->low[2 * j] = (uint8_t)u[j];
                to->low[2 * j + 1] = (uint8_t)(u[j] >> 8);
            }
        }
        for (uint32_t j = 0; j < 64; j += 8) {
            uint64_t eight;
            memcpy(&eight, code + j, 8);
            for (uint32_t k = 0; k < to->planes; k++) to->plane[k * stride + (i + j) / 8] = (uint8_t)plane_of(eight, k);
            for (uint32_t m = far_of(eight, width); m; m &= m - 1)
                far[count++] = (uint8_t)(u[i + j + (uint32_t)__builtin_ctz(m)] >> 23);
        }
    }
    return count;
}

static uint32_t split(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *far) {
    return to->bits > 3 ? split_as(u, n, to, far, 4) : split_as(u, n, to, far, 3);
}

#if BYTES >= 32
INLINE __m256i words_at(const uint8_t *p) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)(const void *)p));
}
/* One half of the bytes. */
INLINE __m256i words_of(__m256i bytes, int upper) {
    return _mm256_cvtepu8_epi16(upper ? _mm256_extracti128_si256(bytes, 1) : _mm256_castsi256_si128(bytes));
}
INLINE void put_8(float *out, __m256 x, int add) {
    _mm256_storeu_ps(out, add ? _mm256_add_ps(_mm256_loadu_ps(out), x) : x);
}
/* PARTED elements from the i-th on, stored or added. Returns how many exponents were read from far. */
INLINE uint32_t join_32(const sid_parts *from, uint32_t stride, uint32_t i, const uint8_t *far, int add, float *out,
                        const uint32_t width, const int half) {
    const uint8_t *plane = from->plane + i / 8;
    __m256i code = where_set(plane, 1), rest = _mm256_setzero_si256();
    for (uint32_t k = 1; k < width; k++) code = _mm256_or_si256(code, where_set(plane + k * stride, 1u << k));
    for (uint32_t k = 0; half && k < 3; k++)
        rest = _mm256_or_si256(rest, where_set(plane + (width + k) * stride, 1u << k));
    const __m256i none = _mm256_cmpeq_epi8(code, _mm256_setzero_si256());
    const __m256i top = _mm256_set1_epi8((char)(from->top[i / from->block] + 1));
    const __m256i all = _mm256_set1_epi8((char)((1u << width) - 1));
    __m256i e = _mm256_andnot_si256(none, _mm256_sub_epi8(top, code));
    uint32_t count = 0, left = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(code, all));
    if (left) {
        uint8_t exponent[PARTED];
        store_32(exponent, e);
        for (; left; left &= left - 1) exponent[__builtin_ctz(left)] = far[count++];
        e = load_32(exponent);
    }
    if (half) {
        for (uint32_t j = 0; j < PARTED; j += 16) {
            const __m256i h = words_at(from->high + i + j), m = words_of(rest, j > 0), x = words_of(e, j > 0);
            const __m256i number =
                _mm256_or_si256(_mm256_or_si256(_mm256_slli_epi16(_mm256_and_si256(h, _mm256_set1_epi16(0x80)), 8),
                                                _mm256_slli_epi16(_mm256_and_si256(h, _mm256_set1_epi16(0x7f)), 3)),
                                _mm256_or_si256(_mm256_slli_epi16(x, 10), m));
            put_8(out + i + j, _mm256_cvtph_ps(_mm256_castsi256_si128(number)), add);
            put_8(out + i + j + 8, _mm256_cvtph_ps(_mm256_extracti128_si256(number, 1)), add);
        }
        return count;
    }
    /* the upper two bytes of each element: the sign and 7 bits of the exponent; its last bit and 7 of the mantissa */
    const __m256i h = load_32(from->high + i), sign = _mm256_set1_epi8((char)0x80);
    const __m256i upper =
        _mm256_or_si256(_mm256_and_si256(h, sign), _mm256_andnot_si256(sign, _mm256_srli_epi16(e, 1)));
    const __m256i lower =
        _mm256_or_si256(_mm256_andnot_si256(sign, h), _mm256_and_si256(sign, _mm256_slli_epi16(e, 7)));
    __m256i low[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
    if (from->low) {
        const __m256i a = load_32(from->low + 2 * i), b = load_32(from->low + 2 * i + 32);
        low[0] = _mm256_permute2x128_si256(a, b, 0x20);
        low[1] = _mm256_permute2x128_si256(a, b, 0x31);
    }
    for (uint32_t j = 0; j < 2; j++) { /* each half of a register is interleaved alone: 8 and, 16 farther, another 8 */
        const __m256i high = j ? _mm256_unpackhi_epi8(lower, upper) : _mm256_unpacklo_epi8(lower, upper);
        const __m256i a = _mm256_unpacklo_epi16(low[j], high), b = _mm256_unpackhi_epi16(low[j], high);
        put_8(out + i + 8 * j, _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x20)), add);
        put_8(out + i + 8 * j + 16, _mm256_castsi256_ps(_mm256_permute2x128_si256(a, b, 0x31)), add);
    }
    return count;
}
#endif

#ifdef SID_HAS_NEON
INLINE void put_4(float *out, float32x4_t x, int add) { vst1q_f32(out, add ? vaddq_f32(vld1q_f32(out), x) : x); }
/* As join_32. */
INLINE uint32_t join_16(const sid_parts *from, uint32_t stride, uint32_t i, const uint8_t *far, int add, float *out,
                        const uint32_t width, const int half) {
    const uint8_t *plane = from->plane + i / 8;
    uint8x16_t code = where_set(plane, 1), rest = vdupq_n_u8(0);
    for (uint32_t k = 1; k < width; k++) code = vorrq_u8(code, where_set(plane + k * stride, 1u << k));
    for (uint32_t k = 0; half && k < 3; k++) rest = vorrq_u8(rest, where_set(plane + (width + k) * stride, 1u << k));
    const uint8x16_t top = vdupq_n_u8((uint8_t)(from->top[i / from->block] + 1));
    const uint8x16_t all = vdupq_n_u8((uint8_t)((1u << width) - 1)), sign = vdupq_n_u8(0x80);
    uint8x16_t exponent = vbicq_u8(vsubq_u8(top, code), vceqzq_u8(code));
    uint32_t count = 0;
    uint64_t left = nibbles_of(vceqq_u8(code, all)) & 0x1111111111111111u;
    if (left) {
        uint8_t each[PARTED];
        vst1q_u8(each, exponent);
        for (; left; left &= left - 1) each[__builtin_ctzll(left) / 4] = far[count++];
        exponent = vld1q_u8(each);
    }
    const uint8x16_t h = vld1q_u8(from->high + i), minus = vandq_u8(h, sign), mantissa = vbicq_u8(h, sign);
    const uint8x8_t m[2] = {vget_low_u8(mantissa), vget_high_u8(mantissa)};
    const uint8x8_t e[2] = {vget_low_u8(exponent), vget_high_u8(exponent)};
    const uint16x8_t s[2] = {vshll_n_u8(vget_low_u8(minus), 8), vshll_n_u8(vget_high_u8(minus), 8)};
    for (uint32_t j = 0; j < 2; j++) {
        float *const to = out + i + 8 * j;
        if (half) {
            const uint8x8_t r = j ? vget_high_u8(rest) : vget_low_u8(rest);
            const uint16x8_t number = vorrq_u16(vorrq_u16(s[j], vshlq_n_u16(vmovl_u8(m[j]), 3)),
                                                vorrq_u16(vshlq_n_u16(vmovl_u8(e[j]), 10), vmovl_u8(r)));
            put_4(to, vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(number))), add);
            put_4(to + 4, vcvt_f32_f16(vreinterpret_f16_u16(vget_high_u16(number))), add);
            continue;
        }
        const uint16x8_t high = vorrq_u16(vaddw_u8(s[j], m[j]), vshlq_n_u16(vmovl_u8(e[j]), 7));
        const uint16x8_t low = from->low ? vreinterpretq_u16_u8(vld1q_u8(from->low + 2 * i + 16 * j)) : vdupq_n_u16(0);
        put_4(to, vreinterpretq_f32_u16(vzip1q_u16(low, high)), add);
        put_4(to + 4, vreinterpretq_f32_u16(vzip2q_u16(low, high)), add);
    }
    return count;
}
#endif

/* The bits of elements i to i + n - 1, n up to 64, all of one block; i a multiple of 8. */
INLINE uint32_t join_some(const sid_parts *from, uint32_t stride, uint32_t i, uint32_t n, const uint8_t *far,
                          uint32_t *u) {
    const uint32_t top = from->top[i / from->block] + 1, all = (1u << from->bits) - 1;
    uint8_t code[64], exponent[64];
    uint32_t count = 0;
    for (uint32_t j = 0; j < n; j += 8) {
        uint64_t eight = 0;
        for (uint32_t k = 0; k < from->planes; k++) eight |= bytes_of(from->plane[k * stride + (i + j) / 8]) << k;
        memcpy(code + j, &eight, 8);
    }
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t c = code[j] & all;
        exponent[j] = (uint8_t)(c ? top - c : 0);
    }
    for (uint32_t j = 0; j < n; j += 8) {
        uint64_t eight;
        memcpy(&eight, code + j, 8);
        for (uint32_t m = far_of(eight, from->bits); m; m &= m - 1)
            exponent[j + (uint32_t)__builtin_ctz(m)] = far[count++];
    }
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t h = from->high[i + j];
        u[j] = (uint32_t)exponent[j] << 23 | (h & 0x7f) << 16 | (h & 0x80) << 24;
    }
    if (from->low)
        for (uint32_t j = 0; j < n; j++)
            u[j] |= (uint32_t)from->low[2 * (i + j)] | (uint32_t)from->low[2 * (i + j) + 1] << 8;
    if (from->planes > from->bits)
        for (uint32_t j = 0; j < n; j++) u[j] |= (uint32_t)(code[j] >> from->bits) << 13;
    return count;
}
INLINE void put_joined(const uint32_t *u, uint32_t n, int half, int add, float *out) {
    if (half)
        for (uint32_t j = 0; j < n; j++) {
            const float x = sid_f16_to_f32((uint16_t)((u[j] >> 16 & 0x8000) | (u[j] >> 13 & 0x7fff)));
            out[j] = add ? out[j] + x : x;
        }
    else
        for (uint32_t j = 0; j < n; j++) {
            const float x = sid_bits_f32(u[j]);
            out[j] = add ? out[j] + x : x;
        }
}
INLINE uint32_t join_as(const sid_parts *from, uint32_t n, const uint8_t *far, int add, float *out,
                        const uint32_t width) {
    const uint32_t stride = (n + 63) / 64 * 8;
    const int half = from->planes > width;
    uint32_t count = 0, i = 0;
#if BYTES == 64
    for (; i + 64 <= n; i += 64)
        count += half ? join_64(from, stride, i, far + count, add, out, width, 1)
                      : join_64(from, stride, i, far + count, add, out, width, 0);
#endif
#if BYTES >= 32
    for (; i + PARTED <= n; i += PARTED) {
        count += half ? join_32(from, stride, i, far + count, add, out, width, 1)
                      : join_32(from, stride, i, far + count, add, out, width, 0);
    }
#elif defined(SID_HAS_NEON)
    for (; i + PARTED <= n; i += PARTED)
        count += half ? join_16(from, stride, i, far + count, add, out, width, 1)
                      : join_16(from, stride, i, far + count, add, out, width, 0);
#endif
    for (; i < n; i += 64) {
        uint32_t u[64];
        const uint32_t take = n - i < 64 ? n - i : 64;
        count += join_some(from, stride, i, take, far + count, u);
        put_joined(u, take, half, add, out + i);
    }
    return count;
}
static uint32_t join(const sid_parts *from, uint32_t n, const uint8_t *far, int add, float *out) {
    return from->bits > 3 ? join_as(from, n, far, add, out, 4) : join_as(from, n, far, add, out, 3);
}
