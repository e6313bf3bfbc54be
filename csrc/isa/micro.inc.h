/* simd.c: 4-bit floats (E2M1) in blocks of 16 or 32 elements, which share a scale.
 *
 * The bits are those of bits.h: l = x * inverse is rounded to float32, cut off at 6, then rounded to the grid. A block is a
 * multiple of a register, so that a register has one scale. take_out and add subtract and add scale * number: one product and
 * one sum, each rounded, in the order of the payloads. */

/* The largest key of each block. */
static void small_keys(const float *x, uint32_t n, uint32_t block, uint32_t *key) {
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = n - i < block ? n : i + block;
        vi top = {0};
        for (; i + WIDE <= end; i += WIDE) top = higher(top, keys(load(x + i)));
        uint32_t max = 0;
#if BYTES == 64
        max = (uint32_t)_mm512_reduce_max_epi32((__m512i)top);
#elif defined(SID_HAS_NEON)
        max = (uint32_t)vmaxvq_s32((int32x4_t)top);
#else
        for (int j = 0; j < WIDE; j++) max = (uint32_t)top[j] > max ? (uint32_t)top[j] : max;
#endif
        for (; i < end; i++) max = sid_key(x[i]) > max ? sid_key(x[i]) : max;
        key[b] = max;
    }
}

/* The code of l, or with `number` the float that it stands for. */
INLINE vi float4s_of(vf l, sid_rounding rounding, vi draw, int number) {
    const int32_t one = 0x3f800000;
    const vi k = bits(at_most(l, SID_F4_TOP)), sign = bits(l) & INT32_MIN;
    if (rounding == SID_ROUND_NEAREST) { /* as float8s_of does, with steps of half a power of two */
        const vi power = higher(k, (vi){0} + one) & 0x7f800000, big = power + (22 << 23);
        const vf sum = (vf)k + (vf)big;
        if (number) return bits(sum - (vf)big) | sign;
        return (bits(sum) - big + ((power - one) >> 22)) | (vi)((vn)sign >> 28);
    }
    const vi up = k + ((draw << 6) + 32), small = k < one;
    const vi low = dither16((vf)(k & small) * 2.0f, draw);
    const vi what =
        either(small, number ? bits(to_float(low) * 0.5f) : low, number ? (up >> 22) << 22 : (up >> 22) - 252);
    return what | (number ? sign : (vi)((vn)sign >> 28));
}
INLINE uint32_t float4_of(float l, sid_rounding rounding, uint32_t draw) {
    return rounding == SID_ROUND_NEAREST ? sid_f32_to_f4_nearest(l) : sid_f32_to_f4_dithered(l, draw);
}

INLINE void fp4_codes_as(const float *x, uint32_t n, uint32_t shift, const float *inverse, const void *draws,
                         uint8_t *code, sid_rounding rounding) {
    uint32_t i = 0;
    for (; i + FOUR <= n; i += FOUR) {
        vi c[4];
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t at = i + q * WIDE;
            c[q] = float4s_of(load(x + at) * inverse[at >> shift], rounding, load_draws(draws, at, rounding), 0);
        }
        store_bytes(code + i, c, 0);
    }
    for (; i < n; i++)
        code[i] = (uint8_t)float4_of(x[i] * inverse[i >> shift], rounding, load_draw(draws, i, rounding));
}
INLINE void fp4_take_as(float *x, uint32_t n, uint32_t shift, const float *scale, const float *inverse,
                        const void *draws, sid_rounding rounding) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        const vi number = float4s_of(v * inverse[i >> shift], rounding, load_draws(draws, i, rounding), 1);
        store(x + i, v - (vf)number * scale[i >> shift]);
    }
    for (; i < n; i++) {
        const uint32_t b = i >> shift;
        x[i] -= scale[b] * sid_f4_to_f32(float4_of(x[i] * inverse[b], rounding, load_draw(draws, i, rounding)));
    }
}
static void fp4_codes(const float *x, uint32_t n, uint32_t shift, const float *inverse, const uint16_t *draws,
                      uint8_t *code) {
    if (draws)
        fp4_codes_as(x, n, shift, inverse, draws, code, SID_ROUND_DRAW16);
    else
        fp4_codes_as(x, n, shift, inverse, draws, code, SID_ROUND_NEAREST);
}
static void fp4_take(float *x, uint32_t n, uint32_t shift, const float *scale, const float *inverse,
                     const uint16_t *draws) {
    if (draws)
        fp4_take_as(x, n, shift, scale, inverse, draws, SID_ROUND_DRAW16);
    else
        fp4_take_as(x, n, shift, scale, inverse, draws, SID_ROUND_NEAREST);
}

/* The numbers for WIDE codes from the i-th on; i is a multiple of WIDE. */
INLINE vf float4s_at(const uint8_t *p, uint32_t i) {
#if BYTES == 64
    const vf numbers = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6};
    const spread s = lookup_spread(4);
    return look_up(p, i, 4, &s, numbers);
#elif BYTES == 32
    const __m256 table = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    uint32_t word;
    memcpy(&word, p + i / 2, 4);
    const __m256i c = _mm256_srlv_epi32(_mm256_set1_epi32((int)word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256 sign = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_srli_epi32(c, 3), 31));
    return (vf)_mm256_xor_ps(_mm256_permutevar8x32_ps(table, c), sign); /* it reads the lowest 3 bits */
#elif defined(SID_HAS_NEON)
    static const uint8_t upper[16] = {
        0,    0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, /* of half floats, whose lower bytes are 0 */
        0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};
    uint16_t four;
    memcpy(&four, p + i / 2, 2);
    const uint8x8_t both = vcreate_u8(four), c = vzip1_u8(vand_u8(both, vdup_n_u8(15)), vshr_n_u8(both, 4));
    const uint16x8_t half = vshll_n_u8(vqtbl1_u8(vld1q_u8(upper), c), 8);
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
#else
    const uint8_t *q = p + i / 2;
    const vi c = {q[0] & 15, q[0] >> 4, q[1] & 15, q[1] >> 4}, k = c & 7;
    return (vf)(either(k < 2, bits(to_float(k) * 0.5f), (k << 22) + (126 << 23)) | (c >> 3) << 31);
#endif
}
static void add_fp4(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t shift) {
    uint32_t i = 0;
    for (; i + FOUR <= n; i += FOUR) {
        vf sum[4];
        for (uint32_t q = 0; q < 4; q++) sum[q] = load(out + i + q * WIDE);
        for (uint32_t r = 0; r < count; r++) {
            __builtin_prefetch(from[r].code + (i + AHEAD) / 2, 0, 2);
            for (uint32_t q = 0; q < 4; q++) {
                const uint32_t at = i + q * WIDE;
                float scale;
                memcpy(&scale, from[r].scale + 4 * (at >> shift), 4);
                sum[q] += float4s_at(from[r].code, at) * scale;
            }
        }
        for (uint32_t q = 0; q < 4; q++) store(out + i + q * WIDE, sum[q]);
    }
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t j = i; j < n; j++) {
            float scale;
            memcpy(&scale, from[r].scale + 4 * (j >> shift), 4);
            out[j] += scale * sid_f4_to_f32((uint32_t)from[r].code[j / 2] >> (j % 2 * 4));
        }
}
