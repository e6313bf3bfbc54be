/* simd.c: fields of `width` bits an element, one after the other: written from codes of a byte; read and added up, for one payload
 * after the other; and the ternary grid, quantised and packed at once.
 *
 * add_codes: out += scale * number, one product and one sum for each payload, each rounded, in the order of the payloads. A
 * product with 2^8 in between (8-bit floats by way of half floats) is exact. */

static inline uint32_t field(const uint8_t *p, uint32_t i, uint32_t width) {
    const uint32_t at = i * width / 8, off = i * width % 8;
    const uint32_t v = (uint32_t)p[at] | (off + width > 8 ? (uint32_t)p[at + 1] << 8 : 0);
    return v >> off & ((1u << width) - 1);
}

/* WIDE fields from the i-th on, i a multiple of WIDE: to every element comes the word that holds it, of 2 and 4 bits, or the
 * two bytes, for which 16 are read; then it is shifted to the top and, with its sign, down. */
typedef struct spread {
    vi from, up; /* which bytes, how far */
    int32_t down;
} spread;
INLINE int in_words(uint32_t width) { return width == 2 || width == 4; }
INLINE spread spread_of(uint32_t width) {
    spread s = {.down = 32 - (int32_t)width};
    for (uint32_t j = 0; j < WIDE; j++) {
        const uint32_t at = j * width / 8, off = j * width % (in_words(width) ? 32 : 8);
        s.from[j] = (int32_t)(0x80800000u | (off + width > 8 ? at + 1 : 0x80u) << 8 | at);
        s.up[j] = 32 - (int32_t)(width + off);
    }
    return s;
}
#if BYTES >= 32
INLINE int32_t word_at(const uint8_t *p) {
    int32_t w;
    memcpy(&w, p, 4);
    return w;
}
INLINE vi holding(const uint8_t *p, uint32_t i, uint32_t width, const spread *s) {
    p += i * width / 8;
#if BYTES == 64
    if (width == 2) return (vi)_mm512_set1_epi32(word_at(p));
    if (width == 4) return (vi)_mm512_mask_set1_epi32(_mm512_set1_epi32(word_at(p)), 0xff00, word_at(p + 4));
    const __m512i raw = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(const void *)p));
    return (vi)_mm512_shuffle_epi8(raw, (__m512i)s->from);
#else
    if (width == 2) return (vi)_mm256_set1_epi32(p[0] | p[1] << 8);
    if (width == 4) return (vi)_mm256_set1_epi32(word_at(p));
    const __m256i raw = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(const void *)p));
    return (vi)_mm256_shuffle_epi8(raw, (__m256i)s->from);
#endif
}
#endif
INLINE vi load_fields(const uint8_t *p, uint32_t i, const spread *s) {
    const uint32_t width = 32 - (uint32_t)s->down;
#if BYTES == 64
    return (vi)_mm512_sllv_epi32((__m512i)holding(p, i, width, s), (__m512i)s->up) >> s->down;
#elif BYTES == 32
    return (vi)_mm256_sllv_epi32((__m256i)holding(p, i, width, s), (__m256i)s->up) >> s->down;
#else
    vi v;
#ifdef SID_HAS_NEON
    if (in_words(width)) { /* WIDE fields are one byte, or two */
        p += i * width / 8;
        v = (vi){0} + (width == 2 ? p[0] : p[0] | p[1] << 8);
        return (vi)vshlq_s32((int32x4_t)v, (int32x4_t)s->up) >> s->down;
    }
#endif
    for (uint32_t j = 0; j < WIDE; j++) v[j] = (int32_t)(field(p, i + j, width) << s->down);
    return v >> s->down;
#endif
}

/* WIDE codes of 8-bit floats, as they stand in the upper byte of a half float: E5M2 is its upper half, E4M3 has a bit less of
 * exponent, so that it comes out 2^8 times too small. No code may stand for a NaN of E4M3's, which is none as a half. */
INLINE vf from_halves(const uint8_t *p, sid_grid_kind kind) {
#if BYTES == 64
    const __m128i raw = _mm_loadu_si128((const __m128i *)(const void *)p);
    __m256i h = kind == SID_GRID_E4M3 ? _mm256_cvtepi8_epi16(raw) : _mm256_cvtepu8_epi16(raw);
    h = kind == SID_GRID_E4M3 ? _mm256_and_si256(_mm256_slli_epi16(h, 7), _mm256_set1_epi16((short)0xbfff))
                              : _mm256_slli_epi16(h, 8);
    return (vf)_mm512_cvtph_ps(h);
#elif BYTES == 32
    const __m128i raw = _mm_loadl_epi64((const __m128i *)(const void *)p);
    __m128i h = kind == SID_GRID_E4M3 ? _mm_cvtepi8_epi16(raw) : _mm_cvtepu8_epi16(raw);
    h = kind == SID_GRID_E4M3 ? _mm_and_si128(_mm_slli_epi16(h, 7), _mm_set1_epi16((short)0xbfff))
                              : _mm_slli_epi16(h, 8);
    return (vf)_mm256_cvtph_ps(h);
#elif defined(SID_HAS_NEON)
    uint32_t four;
    memcpy(&four, p, 4);
    const uint16x8_t raw = kind == SID_GRID_E4M3 ? (uint16x8_t)vmovl_s8(vcreate_s8(four)) : vmovl_u8(vcreate_u8(four));
    const uint16x8_t h =
        kind == SID_GRID_E4M3 ? vandq_u16(vshlq_n_u16(raw, 7), vdupq_n_u16(0xbfff)) : vshlq_n_u16(raw, 8);
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(h)));
#else
    return from_float8s(load_bytes(p), kind);
#endif
}

/* WIDE numbers of the fields from the i-th on, looked up by their lowest bits. */
INLINE vf look_up(const uint8_t *p, uint32_t i, uint32_t width, const spread *s, vf table) {
#if BYTES == 64
    return (vf)_mm512_permutexvar_ps(_mm512_srlv_epi32((__m512i)holding(p, i, width, s), (__m512i)s->up),
                                     (__m512)table);
#elif BYTES == 32
    return (vf)_mm256_permutevar8x32_ps((__m256)table,
                                        _mm256_srlv_epi32((__m256i)holding(p, i, width, s), (__m256i)s->up));
#else
    (void)p, (void)i, (void)width, (void)s;
    return table;
#endif
}

/* For look_up. */
INLINE spread lookup_spread(uint32_t width) {
    spread s = spread_of(width);
    s.up = s.down - s.up;
    return s;
}

#if BYTES >= 32 || defined(SID_HAS_NEON)
#define HALVES 1 /* there are instructions for half floats */
#else
#define HALVES 0
#endif
enum {
    ABREAST = 4 * WIDE,                                /* elements: at most 64, so all of one block */
    LOOKED_UP = BYTES == 64 ? 4 : BYTES == 32 ? 3 : 0, /* bits: as many numbers as a register has floats */
    AHEAD =
        4096 /* elements: several payloads are more streams than processors follow, and few of their pages lie together */
};
/* Bits 7 of the bytes whose lower seven are ones: E4M3's NaN. */
INLINE vu nan_codes(const uint8_t *p) {
    const uint64_t ones = 0x0101010101010101ull;
    vu x;
    memcpy(&x, p, BYTES);
    return ((x & 0x7f * ones) + ones) & 0x80 * ones;
}

INLINE int is_float8(sid_grid_kind kind) { return kind == SID_GRID_E4M3 || kind == SID_GRID_E5M2; }

typedef struct adding {
    const sid_codes *from;
    uint32_t count, block, width;
    sid_grid_kind kind;
    spread s;
    vf number; /* what the fields of up to LOOKED_UP bits stand for */
} adding;

/* The number for a field of a grid of integers or of two magnitudes. */
INLINE float number_of(uint32_t field, sid_grid_kind kind, uint32_t width) {
    const uint32_t down = 32 - width;
    return kind == SID_GRID_FOUR ? sid_four_number(field) : (float)((int32_t)(field << down) >> down);
}
/* The same of load_fields(). */
INLINE vf numbers_of(vi c, sid_grid_kind kind) {
    const vf low = (vf){0} + SID_FOUR_LOW, high = (vf){0} + SID_FOUR_HIGH;
    if (kind != SID_GRID_FOUR) return to_float(c);
    return (vf)(either(-(c & 1), bits(high), bits(low)) | (c & INT32_MIN));
}

/* ABREAST elements of all payloads from the i-th on. halves: by half floats; returns 1, nothing done, where a code is none. */
INLINE int add_some(const adding *a, float *out, uint32_t i, int halves) {
    const uint32_t width = a->width, b = a->block ? i / a->block : 0;
    const int floats = is_float8(a->kind), look = !floats && width <= LOOKED_UP;
    vf sum[4];
    vu none = {0};
    for (uint32_t q = 0; q < 4; q++) sum[q] = load(out + i + q * WIDE);
    for (uint32_t r = 0; r < a->count; r++) {
        const uint8_t *p = a->from[r].code;
        float scale;
        memcpy(&scale, a->from[r].scale + 4 * b, 4);
        __builtin_prefetch(p + (i + AHEAD) * width / 8, 0, 2);
        if (halves && a->kind == SID_GRID_E4M3) {
            none |= nan_codes(p + i);
            scale *= 0x1p8f;
        }
        const vf table = a->number * scale;
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t at = i + q * WIDE;
            if (look)
                sum[q] += look_up(p, at, width, &a->s, table);
            else if (!floats)
                sum[q] +=
                    numbers_of(width == 8 ? load_signed_bytes(p + at) : load_fields(p, at, &a->s), a->kind) * scale;
            else if (halves)
                sum[q] += from_halves(p + at, a->kind) * scale;
            else
                sum[q] += from_float8s(load_bytes(p + at), a->kind) * scale;
        }
    }
    uint64_t any = 0;
    for (int j = 0; j < LONGS; j++) any |= none[j];
    if (halves && a->kind == SID_GRID_E4M3 && any) return 1;
    for (uint32_t q = 0; q < 4; q++) store(out + i + q * WIDE, sum[q]);
    return 0;
}

INLINE void add_as(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block, sid_grid_kind kind,
                   uint32_t width) {
    const uint32_t slack = width == 8 || in_words(width) ? 0 : 16 * 8 / width; /* load_fields reads on */
    const int floats = is_float8(kind);
    adding a = {from, count, block, width, kind, spread_of(width), {0}};
    uint32_t i = 0;
    for (uint32_t j = 0; j < WIDE; j++) a.number[j] = number_of(j, kind, width);
    if (!floats && width <= LOOKED_UP) a.s.up = a.s.down - a.s.up;
    for (; i + ABREAST + slack <= n; i += ABREAST)
        if (add_some(&a, out, i, HALVES)) (void)add_some(&a, out, i, 0);
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t j = i; j < n; j++) {
            const uint32_t c = field(from[r].code, j, width);
            float scale;
            memcpy(&scale, from[r].scale + 4 * (block ? j / block : 0), 4);
            out[j] += scale * (floats ? sid_f8_to_f32(c, mantissa_of(kind)) : number_of(c, kind, width));
        }
}
static void add_codes(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block, sid_grid_kind kind,
                      uint32_t width) {
    if (kind == SID_GRID_E4M3)
        add_as(from, count, out, n, block, SID_GRID_E4M3, 8);
    else if (kind == SID_GRID_E5M2)
        add_as(from, count, out, n, block, SID_GRID_E5M2, 8);
    else if (kind == SID_GRID_FOUR)
        add_as(from, count, out, n, block, SID_GRID_FOUR, 2);
    else if (width == 8)
        add_as(from, count, out, n, block, SID_GRID_INTEGERS, 8);
    else if (width == 4)
        add_as(from, count, out, n, block, SID_GRID_INTEGERS, 4);
    else if (width == 2)
        add_as(from, count, out, n, block, SID_GRID_INTEGERS, 2);
    else
        add_as(from, count, out, n, block, SID_GRID_INTEGERS, width);
}

#if BYTES >= 32
/* Fields of 2 or 4 bits, one a byte. */
INLINE void pack_words(vu x, uint32_t width, uint8_t *out) {
    const int32_t four = 1 | 4 << 8 | 1 << 16 | 4 << 24, sixteen = 1 | 16 << 8 | 1 << 16 | 16 << 24;
#if BYTES == 64
    const __m512i by = _mm512_set1_epi32(width == 2 ? four : sixteen), pairs = _mm512_maddubs_epi16((__m512i)x, by);
    if (width == 4)
        _mm256_storeu_si256((__m256i *)(void *)out, _mm512_cvtepi16_epi8(pairs));
    else
        _mm_storeu_si128((__m128i *)(void *)out,
                         _mm512_cvtepi32_epi8(_mm512_madd_epi16(pairs, _mm512_set1_epi32(1 | 16 << 16))));
#else
    const __m256i by = _mm256_set1_epi32(width == 2 ? four : sixteen), pairs = _mm256_maddubs_epi16((__m256i)x, by);
    const __m256i words = width == 4 ? pairs : _mm256_madd_epi16(pairs, _mm256_set1_epi32(1 | 16 << 16));
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    const __m128i bytes = width == 4 ? _mm_packus_epi16(low, high) : _mm_packus_epi32(low, high);
    if (width == 4)
        _mm_storeu_si128((__m128i *)(void *)out, bytes);
    else
        _mm_storel_epi64((__m128i *)(void *)out, _mm_packus_epi16(bytes, bytes));
#endif
}
#elif defined(SID_HAS_NEON)
INLINE void pack_words(vu x, uint32_t width, uint8_t *out) {
    const uint8x16_t b = (uint8x16_t)x, even = vuzp1q_u8(b, b), odd = vuzp2q_u8(b, b);
    if (width == 4) {
        vst1_u8(out, vsli_n_u8(vget_low_u8(even), vget_low_u8(odd), 4));
    } else {
        const uint8x8_t y = vsli_n_u8(vget_low_u8(even), vget_low_u8(odd), 2);
        const uint32_t four = vget_lane_u32(vreinterpret_u32_u8(vsli_n_u8(vuzp1_u8(y, y), vuzp2_u8(y, y), 4)), 0);
        memcpy(out, &four, 4);
    }
}
#endif

/* Eight fields, one a byte, move together: in pairs, in pairs of pairs, and once more. */
static void pack(const uint8_t *code, uint32_t n, uint32_t width, uint8_t *out) {
    const uint64_t first = 0x00ff00ff00ff00ffull, pair = 0x0000ffff0000ffffull, half = 0x00000000ffffffffull;
    const uint64_t mask = 0x0101010101010101ull * ((1u << width) - 1);
    const uint32_t bytes = (uint32_t)(((uint64_t)n * width + 7) / 8);
    for (uint32_t i = 0; i < n; i += 8 * LONGS) {
        const uint32_t left = n - i, take = left < 8 * LONGS ? left : 8 * LONGS;
        vu x = {0};
        if (take == 8 * LONGS)
            memcpy(&x, code + i, sizeof x);
        else
            memcpy(&x, code + i, take);
        x &= mask;
#if BYTES >= 32 || defined(SID_HAS_NEON)
        if (take == 8 * LONGS && in_words(width)) { /* neighbours, and their neighbours, joined by products */
            pack_words(x, width, out + i * width / 8);
            continue;
        }
#endif
        x = (x & first) | (x & ~first) >> (8 - width);
        x = (x & pair) | (x & ~pair) >> (16 - 2 * width);
        x = (x & half) | (x & ~half) >> (32 - 4 * width);
        for (uint32_t j = 0, at = i / 8 * width; j < LONGS && at < bytes; j++, at += width) {
            const uint64_t word = x[j];
            if (at + 8 <= bytes)
                memcpy(out + at, &word, 8); /* the next word covers what is too much */
            else
                memcpy(out + at, &word, bytes - at < 8 ? bytes - at : 8);
        }
    }
}

/* Unit after unit, eight bytes at once: no sum is above 242. */
static void pack_trits(const uint8_t *code, uint32_t n, uint8_t *out) {
    uint8_t trit[SID_TRITS * SID_TRIT_BYTES];
    for (uint32_t at = 0, take; at < n; at += take, out += SID_TRIT_BYTES) {
        take = n - at < SID_TILE ? n - at : SID_TILE;
        const uint32_t columns = sid_trit_columns(take);
        memcpy(trit, code + at, take);
        memset(trit + take, 0, SID_TRITS * columns - take);
        for (uint32_t j = 0; j < columns; j += 8) {
            uint64_t sum = 0, more;
            for (uint32_t k = SID_TRITS; k--;) {
                memcpy(&more, trit + k * columns + j, 8);
                sum = 3 * sum + more;
            }
            memcpy(out + j, &sum, 8);
        }
    }
}

/* floor(v / 3) of 0 <= v < 256. */
INLINE vi third(vi v) {
#if BYTES == 64
    return (vi)_mm512_madd_epi16((__m512i)v, _mm512_set1_epi32(171)) >> 9;
#elif BYTES == 32
    return (vi)_mm256_madd_epi16((__m256i)v, _mm256_set1_epi32(171)) >> 9;
#else
    return (v * 171) >> 9;
#endif
}
/* The numbers for trits, times a scale. */
INLINE vf of_trits(vi trit, float scale) {
#if BYTES == 64
    const __m512 table = (__m512)((vf){0, 1, -1} * scale);
    return (vf)_mm512_permutexvar_ps((__m512i)trit, table);
#elif BYTES == 32
    const __m256 table = (__m256)((vf){0, 1, -1} * scale);
    return (vf)_mm256_permutevar8x32_ps(table, (__m256i)trit);
#else
    return to_float((trit & 1) - (trit >> 1)) * scale;
#endif
}
/* WIDE bytes of all payloads from byte `at` on. Their k-th trits belong to the elements from out + k * columns on, of which
 * have[k] exist, and whose scale is at scale_at[k]. whole: all of them exist. */
INLINE void add_columns(const sid_codes *from, uint32_t count, float *out, uint32_t at, uint32_t columns,
                        const uint32_t *have, const uint32_t *scale_at, int whole) {
    vf sum[SID_TRITS] = {{0}};
    for (uint32_t k = 0; k < SID_TRITS; k++)
        if (whole)
            sum[k] = load(out + k * columns);
        else if (have[k])
            memcpy(&sum[k], out + k * columns, 4 * have[k]);
    for (uint32_t r = 0; r < count; r++) {
        vi left = load_bytes(from[r].code + at);
        for (uint32_t k = 0; k < SID_TRITS; k++) {
            const vi next = third(left);
            float scale = 0;
            if (whole || have[k]) memcpy(&scale, from[r].scale + scale_at[k], 4);
            sum[k] += of_trits(left - next - (next << 1), scale);
            left = next;
        }
    }
    for (uint32_t k = 0; k < SID_TRITS; k++)
        if (whole)
            store(out + k * columns, sum[k]);
        else if (have[k])
            memcpy(out + k * columns, &sum[k], 4 * have[k]);
}
static void add_trits(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block) {
    const uint32_t shift = (uint32_t)__builtin_ctz(block);
    for (uint32_t at = 0; at < n; at += SID_TILE) {
        const uint32_t take = n - at < SID_TILE ? n - at : SID_TILE, columns = sid_trit_columns(take);
        for (uint32_t j = 0; j < columns && j < take; j += WIDE) {
            const uint32_t byte = at / SID_TILE * SID_TRIT_BYTES + j;
            uint32_t have[SID_TRITS], scale_at[SID_TRITS];
            for (uint32_t k = 0; k < SID_TRITS; k++) {
                const uint32_t i = k * columns + j;
                have[k] = i >= take ? 0 : take - i < WIDE ? take - i : WIDE;
                scale_at[k] = 4 * ((at + i) >> shift);
            }
            if (have[SID_TRITS - 1] == WIDE)
                add_columns(from, count, out + at + j, byte, columns, have, scale_at, 1);
            else
                add_columns(from, count, out + at + j, byte, columns, have, scale_at, 0);
        }
    }
}

/* quantise() to -1, 0 and 1 by 16 bits, and pack() of that. What |l| and u add up to says it by itself: beyond 1 nothing has
 * to be cut off. */
static void ternary(const float *x, uint32_t n, float inverse, const uint16_t *draws, uint8_t *out) {
    uint32_t i = 0;
#if BYTES == 64
    const vf one = (vf){0} + 1.0f;
    for (; i + FOUR <= n; i += FOUR) {
        uint64_t some = 0, minus = 0;
        for (uint32_t q = 0; q < 4; q++) {
            const vf l = load(x + i + q * WIDE) * inverse;
            const vf sum = dithered16((vf)keys(l), load_draws(draws, i + q * WIDE, SID_ROUND_DRAW16));
            some |= (uint64_t)_mm512_cmp_ps_mask((__m512)sum, (__m512)one, _CMP_GE_OQ) << q * WIDE;
            minus |= mask_of(bits(l)) << q * WIDE;
        }
        minus &= some;
        const uint64_t even = 0x5555555555555555ull,
                       word[2] = {_pdep_u64(some, even) | _pdep_u64(minus, ~even),
                                  _pdep_u64(some >> 32, even) | _pdep_u64(minus >> 32, ~even)};
        memcpy(out + i / 4, word, sizeof word);
    }
#endif
    for (uint32_t take; i < n; i += take) {
        const sid_grid g = {SID_GRID_INTEGERS, SID_ROUND_DRAW16, 1.0f, 0, NULL, &inverse, NULL};
        uint8_t code[SID_TILE];
        take = n - i < SID_TILE ? n - i : SID_TILE;
        quantise_as(x + i, take, &g, draws + i, code, SID_GRID_INTEGERS, SID_ROUND_DRAW16);
        pack(code, take, 2, out + i / 4);
    }
}
