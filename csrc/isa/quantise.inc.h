/* simd.c: quantisers: x * inverse becomes a number of a grid, integers or 8-bit floats, by rounding to nearest or at random; or |x| one
 * of two magnitudes; and what was sent is taken out of x. A loop for each kind of grid and of rounding.
 *
 * The bits are those of bits.h, whose functions do what is left at the end: l = x * inverse is rounded to float32, cut off at
 * `top`, then rounded to the grid. take_out subtracts scale * number: one product and one difference, each rounded. */

INLINE vi to_int(vf v) { return __builtin_convertvector(v, vi); }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi load_bytes(const uint8_t *p) {
#if BYTES == 64
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif BYTES == 32
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#elif defined(SID_HAS_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    return (vi)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#else
    return (vi){p[0], p[1], p[2], p[3]};
#endif
}
INLINE vi load_signed_bytes(const uint8_t *p) {
#if BYTES == 64
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif BYTES == 32
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#elif defined(SID_HAS_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
#else
    return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
#endif
}
#if BYTES >= 32
/* Each half of a register is packed alone; this is the order of elements that were packed twice. */
INLINE __m256i in_order(__m256i x) { return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)); }
#endif
/* The low 8 bits of 4 * WIDE numbers, each of which fits in 8 bits, with a sign or without. */
INLINE void store_bytes(uint8_t *p, const vi *v, int with_sign) {
#if BYTES == 64
    const __m512i *x = (const __m512i *)v;
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i a = with_sign ? _mm512_packs_epi32(x[0], x[1]) : _mm512_packus_epi32(x[0], x[1]);
    const __m512i b = with_sign ? _mm512_packs_epi32(x[2], x[3]) : _mm512_packus_epi32(x[2], x[3]);
    const __m512i all = with_sign ? _mm512_packs_epi16(a, b) : _mm512_packus_epi16(a, b);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, all));
#elif BYTES == 32
    const __m256i *x = (const __m256i *)v;
    const __m256i a = with_sign ? _mm256_packs_epi32(x[0], x[1]) : _mm256_packus_epi32(x[0], x[1]);
    const __m256i b = with_sign ? _mm256_packs_epi32(x[2], x[3]) : _mm256_packus_epi32(x[2], x[3]);
    const __m256i all = with_sign ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
    _mm256_storeu_si256((__m256i *)(void *)p, in_order(all));
#elif defined(SID_HAS_NEON)
    (void)with_sign;
    const uint16x8_t a = vuzp1q_u16((uint16x8_t)v[0], (uint16x8_t)v[1]);
    const uint16x8_t b = vuzp1q_u16((uint16x8_t)v[2], (uint16x8_t)v[3]);
    vst1q_u8(p, vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b));
#else
    (void)with_sign;
    for (int q = 0; q < 4; q++)
        for (int j = 0; j < WIDE; j++) p[q * WIDE + j] = (uint8_t)v[q][j];
#endif
}
/* Random bits of WIDE elements from the i-th on. */
INLINE vi load_draws(const void *draws, uint32_t i, sid_rounding rounding) {
    vi v = {0};
    if (rounding == SID_ROUND_DRAW32) memcpy(&v, (const uint32_t *)draws + i, sizeof v);
    if (rounding == SID_ROUND_DRAW16) {
        const uint16_t *p = (const uint16_t *)draws + i;
#if BYTES == 64
        v = (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)p));
#elif BYTES == 32
        v = (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif defined(SID_HAS_NEON)
        v = (vi)vmovl_u16(vld1_u16(p));
#else
        v = (vi){p[0], p[1], p[2], p[3]};
#endif
    }
    return v;
}
INLINE uint32_t load_draw(const void *draws, uint32_t i, sid_rounding rounding) {
    if (rounding == SID_ROUND_NEAREST) return 0;
    return rounding == SID_ROUND_DRAW16 ? ((const uint16_t *)draws)[i] : ((const uint32_t *)draws)[i];
}

/* Rounds l = x * inverse to an integer of the grid. */
INLINE int32_t integer_of(float l, float top, sid_rounding rounding, uint32_t draw) {
    if (rounding == SID_ROUND_NEAREST) return sid_nearest(l);
    const uint32_t k = sid_key(l), most = sid_f32_bits(top);
    const float a = sid_bits_f32(k < most ? k : most);
    const int32_t i = rounding == SID_ROUND_DRAW16 ? sid_dither16(a, draw) : sid_dither32(a, draw);
    return k == sid_f32_bits(l) ? i : -i;
}
/* The smaller one of |l| and top. */
INLINE vf at_most(vf l, float top) {
#if BYTES == 64
    return (vf)_mm512_range_ps((__m512)l, _mm512_set1_ps(top),
                               8 | 2); /* without a sign; of magnitudes the smaller one */
#else
    return (vf)lower(keys(l), (vi){0} + (int32_t)sid_f32_bits(top));
#endif
}
/* sid_dither16's sum; the product in it is exact. */
INLINE vf dithered16(vf a, vi draw) {
    const vf d = to_float(draw) + 0.5f;
#if BYTES == 64
    return (vf)_mm512_fmadd_ps((__m512)d, _mm512_set1_ps(0x1p-16f), (__m512)a);
#elif BYTES == 32
    return (vf)_mm256_fmadd_ps((__m256)d, _mm256_set1_ps(0x1p-16f), (__m256)a);
#else
    return a + d * 0x1p-16f;
#endif
}
INLINE vi dither16(vf a, vi draw) { return to_int(dithered16(a, draw)); }
/* sid_nearest. */
INLINE vi nearest(vf l) {
#if BYTES == 64
    return (vi)_mm512_cvtps_epi32((__m512)l);
#elif BYTES == 32
    return (vi)_mm256_cvtps_epi32((__m256)l);
#elif defined(SID_HAS_NEON)
    return (vi)vcvtnq_s32_f32((float32x4_t)l);
#else
    return (vi)(l + 0x1.8p23f) - 0x4b400000;
#endif
}
INLINE vi integers_of(vf l, float top, sid_rounding rounding, vi draw) {
    if (rounding == SID_ROUND_NEAREST) return nearest(l);
    const vi minus = bits(l) >> 31; /* 0 or -1 */
    const vf a = at_most(l, top);
    if (rounding == SID_ROUND_DRAW16) /* towards 0 from either side */
        return to_int((vf)(bits(dithered16(a, draw)) | (bits(l) & INT32_MIN)));
    const vi i = to_int(a), up = to_int((a - to_float(i)) * 0x1p31f) > ((draw >> 1) & 0x7fffffff);
    return ((i - up) ^ minus) - minus;
}

INLINE uint32_t mantissa_of(sid_grid_kind kind) { return kind == SID_GRID_E4M3 ? 3 : 2; }
INLINE uint32_t float8_of(float l, float top, sid_grid_kind kind, sid_rounding rounding, uint32_t draw) {
    const uint32_t k = sid_key(l), most = sid_f32_bits(top);
    const float y = sid_bits_f32((k < most ? k : most) | (sid_f32_bits(l) & 0x80000000u));
    return rounding == SID_ROUND_NEAREST ? sid_f32_to_f8_nearest(y, mantissa_of(kind))
                                         : sid_f32_to_f8_dithered(y, mantissa_of(kind), draw);
}
/* Codes, or with `number` the floats that they stand for. */
INLINE vi float8s_of(vf l, float top, sid_grid_kind kind, sid_rounding rounding, vi draw, int number) {
    const int32_t mantissa = (int32_t)mantissa_of(kind), shift = 23 - mantissa, gap = mantissa == 3 ? 120 : 112;
    const int32_t normal = mantissa == 3 ? 0x3c800000 : 0x38800000, half = shift << 23, centre = 1 << (shift - 17);
    const vi k = bits(at_most(l, top)), sign = bits(l) & (int32_t)0x80000000u;
    if (rounding == SID_ROUND_NEAREST) {
        /* beside a power of two whose last bit is the step in which |l| lies, the sum rounds to a whole number of them */
        const vi power = higher(k, (vi){0} + normal) & 0x7f800000, big = power + half;
        const vf sum = (vf)k + (vf)big;
        if (number) return bits(sum - (vf)big) | sign;
        /* that number is the sum's lowest bits: of big there are none */
        const vi code = bits(sum) + (power >> shift) - (normal >> shift);
        return either((vi){0} + 0x7f, code, (vi)((vn)l >> 24));
    }
    const float unit = mantissa == 3 ? 0x1p-9f : 0x1p-16f;
    const vi up = k + ((draw << (shift - 16)) + centre), small = k < normal;
    const vi high = number ? (up >> shift) << shift : (up >> shift) - (gap << mantissa);
    const vi signs = number ? sign : (sign >> 24) & 0x80;
    if (!mask_of(small)) return high | signs; /* what is below the normal numbers is far below its block's largest */
    const vi low = dither16((vf)(k & small) * (1.0f / unit), draw);
    return either(small, number ? bits(to_float(low) * unit) : low, high) | signs;
}
INLINE vf from_float8s(vi code, sid_grid_kind kind) {
    const int32_t mantissa = (int32_t)mantissa_of(kind), shift = 23 - mantissa, gap = mantissa == 3 ? 120 : 112;
    const int32_t normal = 1 << mantissa, bias = gap << 23;
    const vi k = code & 0x7f, low = bits(to_float(k) * (mantissa == 3 ? 0x1p-9f : 0x1p-16f));
    const vi u = either(k < normal, low, (k << shift) + bias);
    const vi none = mantissa == 3 ? k == 0x7f : k >= 0x7c;
    const vi what = mantissa == 3 ? (vi){0} + 0x7fc00000 : ((k & 3) << 21) | 0x7f800000;
    return (vf)(either(none, what, u) | (code << 24 & (int32_t)0x80000000u));
}

INLINE void quantise_as(const float *x, uint32_t n, const sid_grid *g, const void *draws, uint8_t *code,
                        sid_grid_kind kind, sid_rounding rounding) {
    const float top = g->top;
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = g->block && g->block < n - i ? i + g->block : n;
        const float inverse = g->inverse[b];
        for (; i + FOUR <= end; i += FOUR) {
            vi c[4];
            for (uint32_t q = 0; q < 4; q++) {
                const vf l = load(x + i + q * WIDE) * inverse;
                const vi draw = load_draws(draws, i + q * WIDE, rounding);
                c[q] = kind == SID_GRID_INTEGERS ? integers_of(l, top, rounding, draw)
                                                 : float8s_of(l, top, kind, rounding, draw, 0);
            }
            store_bytes(code + i, c, kind == SID_GRID_INTEGERS);
        }
        for (; i < end; i++) {
            const float l = x[i] * inverse;
            const uint32_t draw = load_draw(draws, i, rounding);
            code[i] = (uint8_t)(kind == SID_GRID_INTEGERS ? (uint32_t)integer_of(l, top, rounding, draw)
                                                          : float8_of(l, top, kind, rounding, draw));
        }
    }
}
/* Rounds l to an integer grid, as a float. Rounding to nearest needs no integers. */
INLINE vf whole_of(vf l, float top, sid_rounding rounding, vi draw) {
    if (rounding == SID_ROUND_NEAREST) return l + 0x1.8p23f - 0x1.8p23f;
    return to_float(integers_of(l, top, rounding, draw));
}
INLINE void take_out_as(float *x, uint32_t n, const sid_grid *g, const void *draws, sid_grid_kind kind,
                        sid_rounding rounding) {
    const float top = g->top;
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = g->block && g->block < n - i ? i + g->block : n;
        const float inverse = g->inverse[b], scale = g->scale[b];
        for (; i + FOUR <= end; i += FOUR) {
            float *const here = x + i; /* the rest of the address is a constant then */
            for (uint32_t q = 0; q < 4; q++) {
                const vf v = load(here + q * WIDE), l = v * inverse;
                const vi draw = load_draws(draws, i + q * WIDE, rounding);
                const vf number = kind == SID_GRID_INTEGERS ? whole_of(l, top, rounding, draw)
                                                            : (vf)float8s_of(l, top, kind, rounding, draw, 1);
                store(here + q * WIDE, v - number * scale);
            }
        }
        for (; i < end; i++) {
            const float l = x[i] * inverse;
            const uint32_t draw = load_draw(draws, i, rounding);
            x[i] -= scale * (kind == SID_GRID_INTEGERS
                                 ? (float)integer_of(l, top, rounding, draw)
                                 : sid_f8_to_f32(float8_of(l, top, kind, rounding, draw), mantissa_of(kind)));
        }
    }
}

/* To a grid of two magnitudes: the block's edge decides, and nothing is multiplied or rounded. */
INLINE void edge_codes(const float *x, uint32_t n, const sid_grid *g, uint8_t *code, sid_grid_kind kind) {
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = g->block < n - i ? i + g->block : n, edge = sid_f32_bits(g->edge[b]);
        const vi least = (vi){0} + (int32_t)edge;
        for (; i + FOUR <= end; i += FOUR) {
            vi c[4];
            for (uint32_t q = 0; q < 4; q++) {
                const vf v = load(x + i + q * WIDE);
                const vi high = (keys(v) >= least) & 1, minus = (vi)((vn)v >> 31);
                c[q] = kind == SID_GRID_FOUR ? high | minus << 1 : high + (high & minus);
            }
            store_bytes(code + i, c, 0);
        }
        for (; i < end; i++)
            code[i] = (uint8_t)(kind == SID_GRID_FOUR ? sid_four_code(x[i], edge) : sid_three_code(x[i], edge));
    }
}
INLINE void take_edge(float *x, uint32_t n, const sid_grid *g, sid_grid_kind kind) {
    const int four = kind == SID_GRID_FOUR;
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = g->block < n - i ? i + g->block : n, edge = sid_f32_bits(g->edge[b]);
        const float scale = g->scale[b];
        const vf low = (vf){0} + scale * SID_FOUR_LOW, high = (vf){0} + scale * (four ? SID_FOUR_HIGH : 1.0f);
        const vi least = (vi){0} + (int32_t)edge;
        for (; i + WIDE <= end; i += WIDE) {
            const vf v = load(x + i);
            const vi from_edge = keys(v) >= least, sign = bits(v) & INT32_MIN;
            store(x + i,
                  v - (vf)(four ? either(from_edge, bits(high), bits(low)) | sign : from_edge & (bits(high) | sign)));
        }
        for (; i < end; i++)
            x[i] -= scale *
                    (four ? sid_four_number(sid_four_code(x[i], edge)) : sid_three_number(sid_three_code(x[i], edge)));
    }
}

/* One call for each pair that there is. */
#define EACH_GRID(call)                                                                                                \
    switch (g->kind * 3u + g->rounding) {                                                                              \
        case SID_GRID_INTEGERS * 3 + SID_ROUND_NEAREST: call(SID_GRID_INTEGERS, SID_ROUND_NEAREST); break;             \
        case SID_GRID_INTEGERS * 3 + SID_ROUND_DRAW16: call(SID_GRID_INTEGERS, SID_ROUND_DRAW16); break;               \
        case SID_GRID_INTEGERS * 3 + SID_ROUND_DRAW32: call(SID_GRID_INTEGERS, SID_ROUND_DRAW32); break;               \
        case SID_GRID_E4M3 * 3 + SID_ROUND_NEAREST: call(SID_GRID_E4M3, SID_ROUND_NEAREST); break;                     \
        case SID_GRID_E4M3 * 3 + SID_ROUND_DRAW16: call(SID_GRID_E4M3, SID_ROUND_DRAW16); break;                       \
        case SID_GRID_E5M2 * 3 + SID_ROUND_NEAREST: call(SID_GRID_E5M2, SID_ROUND_NEAREST); break;                     \
        default: call(SID_GRID_E5M2, SID_ROUND_DRAW16);                                                                \
    }

static void quantise(const float *x, uint32_t n, const sid_grid *g, const void *draws, uint8_t *code) {
#define QUANTISE(kind, rounding) quantise_as(x, n, g, draws, code, kind, rounding)
    if (g->kind == SID_GRID_FOUR)
        edge_codes(x, n, g, code, SID_GRID_FOUR);
    else if (g->kind == SID_GRID_THREE)
        edge_codes(x, n, g, code, SID_GRID_THREE);
    else
        EACH_GRID(QUANTISE)
}

static void take_out(float *x, uint32_t n, const sid_grid *g, const void *draws) {
#define TAKE_OUT(kind, rounding) take_out_as(x, n, g, draws, kind, rounding)
    if (g->kind == SID_GRID_FOUR)
        take_edge(x, n, g, SID_GRID_FOUR);
    else if (g->kind == SID_GRID_THREE)
        take_edge(x, n, g, SID_GRID_THREE);
    else
        EACH_GRID(TAKE_OUT)
}
