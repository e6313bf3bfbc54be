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

#if BYTES >= 32
/* No branch where nothing was sent: it would be mispredicted more often than it saves work. */
INLINE uint32_t take_eights(float *x, uint32_t n, int32_t low, const sid_steps *steps, const uint32_t edges) {
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
#endif
static void take_steps(float *x, uint32_t n, uint32_t key, const sid_steps *steps) {
    const int32_t low = signed_key(key);
    uint32_t i = 0;
#if BYTES >= 32
    i = steps->count <= 5 ? take_eights(x, n, low, steps, 4) : take_eights(x, n, low, steps, 7);
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

/* count[s] += symbols s, from 1 on to before `symbols`. */
static void count_symbols(const uint8_t *symbol, uint32_t n, uint32_t symbols, uint64_t *count) {
    uint32_t i = 0;
#if BYTES >= 32
    enum {
        MOST = 255 * 32 /* a byte counts no more */
    };
    for (uint32_t s = 1; s < symbols; s++) {
        const eight is = _mm256_set1_epi8((char)s);
        for (i = 0; i + 32 <= n;) {
            const uint32_t to = n - i < MOST ? n / 32 * 32 : i + MOST;
            eight here = _mm256_setzero_si256();
            for (; i < to; i += 32) here = _mm256_sub_epi8(here, _mm256_cmpeq_epi8(load_32(symbol + i), is));
            uint64_t part[4];
            store_32(part, _mm256_sad_epu8(here, _mm256_setzero_si256()));
            count[s] += part[0] + part[1] + part[2] + part[3];
        }
    }
#endif
    for (; i < n; i++)
        if (symbol[i] && symbol[i] < symbols) count[symbol[i]]++;
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
