/* simd.c: half floats, scaling and storing: float16 and bfloat16 from and to float32, the bodies that they make up, what they leave of
 * acc, and the store of a decoded tile.
 *
 * Each element by itself: it is clamped, multiplied by s, which rounds, then rounded to the half format, to nearest with ties to
 * even, or at random (bits.h). half_keep multiplies by `inverse`, which rounds, and subtracts. */

INLINE float clamped_one(float x, float max) {
    return sid_key(x) >= SID_KEY_INF ? x : x > max ? max : x < -max ? -max : x;
}
INLINE vf clamped_wide(vf x, float max) {
    const vi top = (vi){0} + (int32_t)sid_f32_bits(max), k = keys(x);
    return (vf)(either((k > top) & (k < (int32_t)SID_KEY_INF), top, k) | (bits(x) & ~0x7fffffff));
}
static void clamp(const float *x, float *y, uint32_t n, float max) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) store(y + i, clamped_wide(load(x + i), max));
    for (; i < n; i++) y[i] = clamped_one(x[i], max);
}

static void f32_to_f16(const float *x, uint16_t *y, uint32_t n) {
    uint32_t i = 0;
#if defined(SID_HAS_AVX2) || defined(SID_HAS_AVX512)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(SID_HAS_NEON)
    for (; i + 4 <= n; i += 4) vst1_u16(y + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(x + i))));
#endif
    for (; i < n; i++) y[i] = sid_f32_to_f16(x[i]);
}

static void f16_to_f32(const uint16_t *x, float *y, uint32_t n) {
    uint32_t i = 0;
#if defined(SID_HAS_AVX2) || defined(SID_HAS_AVX512)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + i))));
#elif defined(SID_HAS_NEON)
    for (; i + 4 <= n; i += 4) vst1q_f32(y + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i))));
#endif
    for (; i < n; i++) y[i] = sid_f16_to_f32(x[i]);
}

static void f32_to_bf16(const float *x, uint16_t *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = sid_f32_to_bf16(x[i]);
}

static void bf16_to_f32(const uint16_t *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = sid_bf16_to_f32(x[i]);
}

static void round_bf16(float *x, const uint16_t *u, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t bits = sid_f32_bits(x[i]), up = (bits + u[i]) & 0xffff0000u;
        x[i] = sid_bits_f32((up & 0x7fffffffu) >= SID_KEY_INF ? (bits & 0x80000000u) | 0x7f7f0000u : up);
    }
}

static void scale(const float *x, float *y, uint32_t n, float s) {
    for (uint32_t i = 0; i < n; i++) y[i] = x[i] * s;
}

#ifdef SID_HAS_AVX512
static inline __m512i clamped(const float *x, float max, float s) {
    const __m512 v = _mm512_loadu_ps(x);
    const __m512i k = keys16(x), top = _mm512_set1_epi32((int)sid_f32_bits(max));
    const __mmask16 over =
        _mm512_cmpgt_epi32_mask(k, top) & _mm512_cmplt_epi32_mask(k, _mm512_set1_epi32((int)SID_KEY_INF));
    const __m512i sign = _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32((int)0x80000000u));
    const __m512i y = _mm512_mask_mov_epi32(_mm512_castps_si512(v), over, _mm512_or_si512(top, sign));
    return _mm512_castps_si512(_mm512_mul_ps(_mm512_castsi512_ps(y), _mm512_set1_ps(s)));
}
static inline __m256i to_bf16(__m512i u) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
    const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(0x40));
    const __mmask16 nan = _mm512_cmpgt_epi32_mask(_mm512_and_si512(u, _mm512_set1_epi32(0x7fffffff)),
                                                  _mm512_set1_epi32((int)SID_KEY_INF));
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(up, nan, quiet));
}
static inline __m256i to_half(__m512i u, int bf16) {
    return bf16 ? to_bf16(u) : _mm512_cvtps_ph(_mm512_castsi512_ps(u), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
/* Rounds finite numbers as to_bf16 does, into the upper half of each word. */
static inline __m512i rounded_bf16(__m512i u) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
}
static inline __m512 of_half(__m256i h, int bf16) {
    return bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)) : _mm512_cvtph_ps(h);
}
#endif
#if BYTES == 32 || defined(SID_HAS_NEON)
/* Rounds a finite number to a half type and back to a float. */
INLINE vf through_half(vf x, int bf16) {
    const vi u = bits(x);
    if (bf16) return (vf)((u + 0x7fff + ((vi)((vn)u >> 16) & 1)) & (int32_t)0xffff0000u);
#ifdef SID_HAS_NEON
    return (vf)vcvt_f32_f16(vcvt_f16_f32((float32x4_t)x));
#else
    return (vf)_mm256_cvtph_ps(_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
}
/* Any number, NaN included. */
INLINE void store_half(uint16_t *y, vf x, int bf16) {
    const vi up = bits(through_half(x, 1)), quiet = bits(x) | 0x400000;
    const vn h = (vn)either(keys(x) > (int32_t)SID_KEY_INF, quiet, up) >> 16;
#ifdef SID_HAS_NEON
    vst1_u16(y, bf16 ? vmovn_u32((uint32x4_t)h) : vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)x)));
#else
    const __m128i bfloats =
        _mm_packus_epi32(_mm256_castsi256_si128((__m256i)h), _mm256_extracti128_si256((__m256i)h, 1));
    _mm_storeu_si128((__m128i *)(void *)y,
                     bf16 ? bfloats : _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
}
INLINE uint32_t half_body_wide(const float *x, uint16_t *y, uint32_t n, float s, float max, const int bf16) {
    const vi top = (vi){0} + (int32_t)sid_f32_bits(max);
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        const vi k = keys(v), sign = bits(v) ^ k;
        const vf c = (vf)(either((k > top) & (k < (int32_t)SID_KEY_INF), top, k) | sign);
        store_half(y + i, c * s, bf16);
    }
    return i;
}
INLINE uint32_t half_keep_wide(float *x, uint32_t n, int32_t from, float s, float inverse, float max, const int bf16) {
    const vi top = (vi){0} + (int32_t)sid_f32_bits(max), low = (vi){0} + from;
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        const vi k = keys(v), sign = bits(v) ^ k;
        const vf sent = through_half((vf)(lower(k, top) | sign) * s, bf16) * inverse;
        store(x + i, v - (vf)(bits(sent) & ~(low > k)));
    }
    return i;
}
#endif
enum {
    CHUNK = 64
}; /* elements between two buffers that stay in registers or close by */

static void half_chunk(const float *x, uint16_t *y, uint32_t n, float s, float max, int bf16) {
    float buf[CHUNK];
    clamp(x, buf, n, max);
    scale(buf, buf, n, s);
    if (bf16)
        f32_to_bf16(buf, y, n);
    else
        f32_to_f16(buf, y, n);
}

#ifdef SID_HAS_AVX512
/* Elements beyond max, and those that are not finite, are rare. Looking for them 64 elements at a time halves the
 * instructions for the rest. */
INLINE int over_64(const float *x, __m512i top) {
    const __m512i a = _mm512_max_epi32(keys16(x), keys16(x + 16)), b = _mm512_max_epi32(keys16(x + 32), keys16(x + 48));
    return _mm512_cmpgt_epi32_mask(_mm512_max_epi32(a, b), top) != 0;
}
INLINE void body_16(const float *x, uint16_t *y, float s, float max, const int bf16, const int over) {
    const __m512i u = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x), _mm512_set1_ps(s)));
    const __m256i half = over   ? to_half(clamped(x, max, s), bf16)
                         : bf16 ? _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(u), 16))
                                : to_half(u, 0);
    _mm256_storeu_si256((__m256i *)(void *)y, half);
}
INLINE uint32_t half_body64(const float *x, uint16_t *y, uint32_t n, float s, float max, const int bf16) {
    const __m512i top = _mm512_set1_epi32((int)sid_f32_bits(max));
    const uint32_t whole = n / 64 * 64;
    for (const float *const end = x + whole; x < end; x += 64, y += 64)
        if (over_64(x, top))
            for (int q = 0; q < 64; q += 16) body_16(x + q, y + q, s, max, bf16, 1);
        else
            for (int q = 0; q < 64; q += 16) body_16(x + q, y + q, s, max, bf16, 0);
    return whole;
}
/* all: every element was sent, whatever its key. */
INLINE void keep_16(float *x, __m512i from, float s, float inverse, float max, const int bf16, const int over,
                    const int all) {
    const __m512 v = _mm512_loadu_ps(x);
    const __m512i u = _mm512_castps_si512(_mm512_mul_ps(v, _mm512_set1_ps(s)));
    const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
    const __m512 half = over   ? of_half(to_half(clamped(x, max, s), bf16), bf16)
                        : bf16 ? _mm512_castsi512_ps(_mm512_and_si512(rounded_bf16(u), upper))
                               : of_half(to_half(u, 0), 0);
    const __m512 sent = _mm512_mul_ps(half, _mm512_set1_ps(inverse));
    const __mmask16 m = all ? 0xffff : _mm512_cmpge_epi32_mask(keys16(x), from);
    _mm512_storeu_ps(x, _mm512_mask_sub_ps(v, m, v, sent));
}
INLINE uint32_t half_keep64(float *x, uint32_t n, int32_t from, float s, float inverse, float max, const int bf16,
                            const int all) {
    const __m512i top = _mm512_set1_epi32((int)sid_f32_bits(max)), low = _mm512_set1_epi32(from);
    const uint32_t whole = n / 64 * 64;
    for (float *const end = x + whole; x < end; x += 64)
        if (over_64(x, top))
            for (int q = 0; q < 64; q += 16) keep_16(x + q, low, s, inverse, max, bf16, 1, all);
        else
            for (int q = 0; q < 64; q += 16) keep_16(x + q, low, s, inverse, max, bf16, 0, all);
    return whole;
}
#endif

static void half_body(const float *x, uint16_t *y, uint32_t n, float s, float max, int bf16) {
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    i = bf16 ? half_body64(x, y, n, s, max, 1) : half_body64(x, y, n, s, max, 0);
#elif defined(SID_HAS_AVX2) || defined(SID_HAS_NEON)
    i = bf16 ? half_body_wide(x, y, n, s, max, 1) : half_body_wide(x, y, n, s, max, 0);
#endif
    for (; i < n; i += CHUNK) half_chunk(x + i, y + i, n - i < CHUNK ? n - i : CHUNK, s, max, bf16);
}

static void half_words(const uint16_t *x, uint32_t *u, uint32_t n, int bf16) {
    if (bf16)
        for (uint32_t i = 0; i < n; i++) u[i] = (uint32_t)x[i] << 16;
    else
        for (uint32_t i = 0; i < n; i++) u[i] = (x[i] & 0x8000u) << 16 | (x[i] & 0x7fffu) << 13;
}

static void half_keep(float *x, uint32_t n, uint32_t key, float s, float inverse, float max, int bf16) {
    const int32_t from = signed_key(key);
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    if (from <= 0)
        i = bf16 ? half_keep64(x, n, from, s, inverse, max, 1, 1) : half_keep64(x, n, from, s, inverse, max, 0, 1);
    else
        i = bf16 ? half_keep64(x, n, from, s, inverse, max, 1, 0) : half_keep64(x, n, from, s, inverse, max, 0, 0);
#elif defined(SID_HAS_AVX2) || defined(SID_HAS_NEON)
    i = bf16 ? half_keep_wide(x, n, from, s, inverse, max, 1) : half_keep_wide(x, n, from, s, inverse, max, 0);
#endif
    for (; i < n; i += CHUNK) {
        const uint32_t len = n - i < CHUNK ? n - i : CHUNK;
        uint16_t body[CHUNK];
        float sent[CHUNK] = {0};
        half_chunk(x + i, body, len, s, max, bf16);
        if (bf16)
            bf16_to_f32(body, sent, len);
        else
            f16_to_f32(body, sent, len);
        scale(sent, sent, len, inverse);
        for (uint32_t j = 0; j < len; j++)
            x[i + j] -= sid_bits_f32((int32_t)sid_key(x[i + j]) >= from ? sid_f32_bits(sent[j]) : 0u);
    }
}

/* x as one of the numbers of a half type beside it. NaN and Inf stay. */
INLINE vf drawn_halves(vf x, vi draw, const int bf16) {
    const vi k = keys(x), sign = bits(x) ^ k, finite = k < (int32_t)SID_KEY_INF;
    if (bf16) return (vf)(either(finite, (vi)((vn)k + (vn)draw) & (int32_t)0xffff0000u, k) | sign);
    const vi small = k < 0x38800000, high = (vi)((vn)k + (vn)(draw >> 3)) & ~0x1fff;
    const vi low = (to_int((vf)(k & small) * 0x1p41f) + 2 * draw + 1) >> 17;
    return (vf)(either(small, bits(to_float(low) * 0x1p-24f), either(finite, high, k)) | sign);
}
INLINE float drawn_half(float x, uint32_t draw, int bf16) {
    return bf16 ? sid_bf16_dithered(x, draw) : sid_f16_dithered(x, draw);
}
/* Numbers of a half type, NaN or Inf. */
INLINE void store_halves(uint16_t *y, vf x, const int bf16) {
#if BYTES == 64
    _mm256_storeu_si256((__m256i *)(void *)y, to_half((__m512i)x, bf16));
#elif BYTES == 32 || defined(SID_HAS_NEON)
    store_half(y, x, bf16);
#else
    for (int j = 0; j < WIDE; j++) y[j] = bf16 ? sid_f32_to_bf16(x[j]) : sid_f32_to_f16(x[j]);
#endif
}
INLINE void half_body_drawn_as(const float *x, uint16_t *y, const uint16_t *u, uint32_t n, float s, float max,
                               const int bf16) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE)
        store_halves(y + i, drawn_halves(clamped_wide(load(x + i), max) * s, load_draws(u, i, SID_ROUND_DRAW16), bf16),
                     bf16);
    for (; i < n; i++) {
        const float half = drawn_half(clamped_one(x[i], max) * s, u[i], bf16);
        y[i] = bf16 ? sid_f32_to_bf16(half) : sid_f32_to_f16(half);
    }
}
INLINE void half_keep_drawn_as(float *x, const uint16_t *u, uint32_t n, float s, float inverse, float max,
                               const int bf16) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        store(x + i, v - drawn_halves(clamped_wide(v, max) * s, load_draws(u, i, SID_ROUND_DRAW16), bf16) * inverse);
    }
    for (; i < n; i++) x[i] -= drawn_half(clamped_one(x[i], max) * s, u[i], bf16) * inverse;
}
static void half_body_drawn(const float *x, uint16_t *y, const uint16_t *u, uint32_t n, float s, float max, int bf16) {
    if (bf16)
        half_body_drawn_as(x, y, u, n, s, max, 1);
    else
        half_body_drawn_as(x, y, u, n, s, max, 0);
}
static void half_keep_drawn(float *x, const uint16_t *u, uint32_t n, float s, float inverse, float max, int bf16) {
    if (bf16)
        half_keep_drawn_as(x, u, n, s, inverse, max, 1);
    else
        half_keep_drawn_as(x, u, n, s, inverse, max, 0);
}

/* y = x * s, past the caches or not, and x = 0; whether y is finite. Past them in two loops: other stores between these
 * would send half a line of them on its way. */
static int drain(float *x, float *y, uint32_t n, float s, int past) {
    uint32_t i = 0, max = 0;
    vi top = {0};
#if defined(__SSE2__)
    if (past) {
        for (; i < n && ((uintptr_t)(y + i) & 63u); i++) {
            y[i] = x[i] * s;
            max = sid_key(y[i]) > max ? sid_key(y[i]) : max;
        }
        for (; i + WIDE <= n; i += WIDE) {
            const vf v = load(x + i) * s;
            top = higher(top, keys(v));
#if BYTES == 64
            _mm512_stream_ps(y + i, (__m512)v);
#elif BYTES == 32
            _mm256_stream_ps(y + i, (__m256)v);
#else
            _mm_stream_ps(y + i, (__m128)v);
#endif
        }
    }
#else
    past = 0; /* there are no such stores */
#endif
    for (; !past && i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i) * s;
        top = higher(top, keys(v));
        store(y + i, v);
        store(x + i, (vf){0});
    }
    for (; i < n; i++) {
        y[i] = x[i] * s;
        max = sid_key(y[i]) > max ? sid_key(y[i]) : max;
        x[i] = 0;
    }
    if (past) memset(x, 0, 4ull * n);
    for (int j = 0; j < WIDE; j++) max = (uint32_t)top[j] > max ? (uint32_t)top[j] : max;
    return max < SID_KEY_INF;
}

static void fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
