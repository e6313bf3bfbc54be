/* simd.c: magnitudes in a few levels, each of which stands for one number.
 *
 * Nothing is rounded but the one difference or sum of an element, and sums, whose order is that of sums.inc.h. */

static void step_codes(const float *x, uint64_t n, const sid_steps *steps, uint8_t *symbol) {
    uint32_t edge[8];
    for (uint32_t e = 0; e < 8; e++) edge[e] = e + 1 < steps->count ? steps->edge[e] : INT32_MAX;
    for (uint64_t i = 0; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]), k = u & 0x7fffffffu;
        uint32_t c = 1 + (u >> 31);
        for (uint32_t e = 0; e < 7; e++) c += 2 * (uint32_t)((int32_t)k > (int32_t)edge[e]);
        symbol[i] = (uint8_t)c;
    }
}

/* No branch where nothing was sent: it would be mispredicted more often than it saves work. */
#if BYTES == 64
INLINE uint32_t take_many(float *x, uint32_t n, int32_t low, const sid_steps *steps, const uint32_t edges) {
    const __m512i levels = _mm512_castsi256_si512(load_32(steps->level)), sign = _mm512_set1_epi32(INT32_MIN);
    const __m512i from = _mm512_set1_epi32(low), one = _mm512_set1_epi32(1);
    __m512i edge[7];
    uint32_t i = 0;
    for (uint32_t e = 0; e < edges; e++)
        edge[e] = _mm512_set1_epi32(e + 1 < steps->count ? (int32_t)steps->edge[e] : INT32_MAX);
    for (; i + 16 <= n; i += 16) {
        const __m512i v = _mm512_loadu_si512(x + i), k = _mm512_andnot_si512(sign, v);
        __m512i c = _mm512_setzero_si512();
        for (uint32_t e = 0; e < edges; e++) c = _mm512_mask_add_epi32(c, _mm512_cmpgt_epi32_mask(k, edge[e]), c, one);
        const __m512i sent = _mm512_or_si512(_mm512_permutexvar_epi32(c, levels), _mm512_and_si512(sign, v));
        _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(_mm512_castsi512_ps(v), _mm512_cmpge_epi32_mask(k, from),
                                                   _mm512_castsi512_ps(v), _mm512_castsi512_ps(sent)));
    }
    return i;
}
#elif BYTES == 32
INLINE uint32_t take_many(float *x, uint32_t n, int32_t low, const sid_steps *steps, const uint32_t edges) {
    const eight levels = load_32(steps->level), sign = _mm256_set1_epi32((int32_t)0x80000000u);
    const eight from = _mm256_set1_epi32(low - 1);
    eight edge[7];
    uint32_t i = 0;
    for (uint32_t e = 0; e < edges; e++)
        edge[e] = _mm256_set1_epi32(e + 1 < steps->count ? (int32_t)steps->edge[e] : INT32_MAX);
    for (; i + 8 <= n; i += 8) {
        const eight v = load_32(x + i), k = _mm256_andnot_si256(sign, v);
        eight c = _mm256_setzero_si256();
        for (uint32_t e = 0; e < edges; e++) c = _mm256_sub_epi32(c, _mm256_cmpgt_epi32(k, edge[e]));
        const eight sent = _mm256_or_si256(_mm256_permutevar8x32_epi32(levels, c), _mm256_and_si256(sign, v));
        const eight in = _mm256_and_si256(sent, _mm256_cmpgt_epi32(k, from));
        store_32(x + i, _mm256_castps_si256(_mm256_sub_ps(_mm256_castsi256_ps(v), _mm256_castsi256_ps(in))));
    }
    return i;
}
#elif defined(SID_HAS_NEON)
INLINE uint32_t take_many(float *x, uint32_t n, int32_t low, const sid_steps *steps, const uint32_t edges) {
    const uint8x16x2_t levels = {{(uint8x16_t)vld1q_u32(steps->level), (uint8x16_t)vld1q_u32(steps->level + 4)}};
    const vi least = (vi){0} + low;
    vi edge[7];
    uint32_t i = 0;
    for (uint32_t e = 0; e < edges; e++)
        edge[e] = (vi){0} + (e + 1 < steps->count ? (int32_t)steps->edge[e] : INT32_MAX);
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        const vi k = keys(v);
        vi c = {0};
        for (uint32_t e = 0; e < edges; e++) c -= k > edge[e];
        const vi sent = (vi)vqtbl2q_u8(levels, (uint8x16_t)(c * 0x04040404 + 0x03020100)) | (bits(v) ^ k);
        store(x + i, v - (vf)(sent & (k >= least)));
    }
    return i;
}
#endif
static void take_steps(float *x, uint32_t n, uint32_t key, const sid_steps *steps) {
    const int32_t low = signed_key(key);
    uint32_t i = 0;
#if BYTES >= 32 || defined(SID_HAS_NEON)
    i = steps->count <= 5 ? take_many(x, n, low, steps, 4) : take_many(x, n, low, steps, 7);
#endif
    for (; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]), k = u & 0x7fffffffu;
        uint32_t c = 0;
        for (uint32_t e = 0; e + 1 < steps->count; e++) c += (int32_t)k > (int32_t)steps->edge[e];
        x[i] -= sid_bits_f32((int32_t)k >= low ? steps->level[c] | (u & 0x80000000u) : 0u);
    }
}

static void add_steps(float *out, const uint8_t *symbol, uint32_t n, const sid_steps *steps) {
    uint32_t value[17] = {0}, i = 0;
    for (uint32_t s = 0; s < 2 * steps->count; s++) value[1 + s] = steps->level[s / 2] | s % 2 << 31;
#if BYTES == 64
    const __m512i values = _mm512_loadu_si512(value);
    for (; i + 16 <= n && steps->count < 8; i += 16) {
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(symbol + i)));
        store(out + i, load(out + i) + (vf)_mm512_permutexvar_epi32(s, values));
    }
#elif BYTES == 32
    const pairs values = pairs_of(value);
    for (; i + 8 <= n && steps->count < 8; i += 8) {
        const eight s = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(symbol + i)));
        store(out + i, load(out + i) + (vf)look_up_8(&values, s, 1));
    }
#endif
    for (; i < n; i++) out[i] += sid_bits_f32(value[symbol[i]]);
}

/* count[i] += symbols of level i and those above it. */
static void count_levels(const uint8_t *symbol, uint32_t n, uint32_t levels, uint64_t *count) {
    uint32_t i = 0;
#if BYTES >= 32
    enum {
        MOST = 255 * 32 /* a byte counts no more */
    };
    for (uint32_t first = 0; first < levels; first += 5) {
        const uint32_t some = levels - first < 5 ? levels - first : 5;
        for (i = 0; i + 32 <= n;) {
            const uint32_t to = n - i < MOST ? n / 32 * 32 : i + MOST;
            eight here[5];
            for (uint32_t k = 0; k < 5; k++) here[k] = _mm256_setzero_si256();
            for (; i < to; i += 32) {
                const eight s = load_32(symbol + i);
                for (uint32_t k = 0; k < 5; k++) /* symbols are small, and signs do not matter */
                    here[k] = _mm256_sub_epi8(here[k], _mm256_cmpgt_epi8(s, _mm256_set1_epi8((char)(2 * (first + k)))));
            }
            for (uint32_t k = 0; k < some; k++) {
                uint64_t part[4];
                store_32(part, _mm256_sad_epu8(here[k], _mm256_setzero_si256()));
                count[first + k] += part[0] + part[1] + part[2] + part[3];
            }
        }
    }
#elif defined(SID_HAS_NEON)
    enum {
        MOST = 255 * 16 /* a byte counts no more */
    };
    while (i + 16 <= n) {
        const uint32_t to = n - i < MOST ? n / 16 * 16 : i + MOST;
        uint8x16_t here[8];
        for (uint32_t k = 0; k < 8; k++) here[k] = vdupq_n_u8(0);
        for (; i < to; i += 16) {
            const uint8x16_t s = vld1q_u8(symbol + i);
            for (uint32_t k = 0; k < 8; k++) here[k] = vsubq_u8(here[k], vcgtq_u8(s, vdupq_n_u8((uint8_t)(2 * k))));
        }
        for (uint32_t k = 0; k < levels; k++) count[k] += vaddlvq_u8(here[k]);
    }
#endif
    for (; i < n; i++)
        for (uint32_t k = 0; k < levels; k++) count[k] += symbol[i] > 2 * k;
}

static float sum_between(const float *x, uint32_t n, uint32_t low, uint32_t high, uint32_t *count) {
    const vi least = (vi){0} + (int32_t)low, most = (vi){0} + (int32_t)high;
    vf part[ROW / MANY / WIDE];
    float last[ROW];
    vi number_in = {0};
    const uint32_t whole = whole_rows(x, n, last), none = (ROW - n % ROW) % ROW;
    for (uint32_t c = 0; c < ROW / MANY; c += WIDE) {
        vf sum[MANY] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < MANY; q++) {                                                                                   \
        const vi k = keys(load((p) + q * (ROW / MANY))), in = (k >= least) & (k <= most);                              \
        sum[q] += (vf)(k & in);                                                                                        \
        number_in -= in;                                                                                               \
    }
        DOWN(ADD);
#undef ADD
        part[c / WIDE] = FOLD_8(sum);
    }
    *count = total(number_in) - (low ? 0 : none);
    return join_parts(part, ROW / MANY / WIDE);
}
