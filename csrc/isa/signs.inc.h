/* simd.c: signs: a bit an element, drawn or not; what they are decoded to; and votes.
 *
 * sum_signs adds four ranks' values, in their order, and then their sum to out. sign_sums has the order of sums.h. Signs are
 * compared as integers, so that flushing denormals to zero changes none. */

/* Compares as integers, because flushing denormals to zero must not change a sign. */
#if BYTES == 64
INLINE uint64_t negative_mask(vf v) { return _mm512_cmpgt_epu32_mask((__m512i)v, _mm512_set1_epi32(INT32_MIN)); }
INLINE vf by_sign(vf v, vi up, vi down) {
    return (vf)_mm512_mask_mov_ps((__m512)up, (__mmask16)negative_mask(v), (__m512)down);
}
#else
INLINE vi is_negative(vf v) { return (bits(v) ^ INT32_MIN) > 0; }
INLINE uint64_t negative_mask(vf v) { return mask_of(is_negative(v)); }
INLINE vf by_sign(vf v, vi up, vi down) { return (vf)either(is_negative(v), down, up); }
#endif
static inline uint32_t is_negative1(float x) { return sid_f32_bits(x) > 0x80000000u; }

static uint32_t signs(const float *x, uint32_t n, uint8_t *bit) {
    uint32_t i = 0, count = 0;
    for (; i + 64 <= n; i += 64) {
#ifdef SID_HAS_NEON
        vi m[16];
        for (uint32_t j = 0; j < 16; j++) m[j] = is_negative(load(x + i + j * WIDE));
        const uint64_t w = word_of_masks(m);
#else
        uint64_t w = 0;
        for (uint32_t j = 0; j < 64; j += WIDE) w |= negative_mask(load(x + i + j)) << j;
#endif
        memcpy(bit + i / 8, &w, 8);
        count += (uint32_t)__builtin_popcountll(w);
    }
    for (; i < n; i += 8) {
        uint32_t b = 0;
        for (uint32_t j = 0; j < 8 && i + j < n; j++) b |= is_negative1(x[i + j]) << j;
        bit[i / 8] = (uint8_t)b;
        count += (uint32_t)__builtin_popcount(b);
    }
    return count;
}

/* The sign stays where u, read as a signed number, is at least -|x| * chance; that of 2^31 always does. */
static void draw_signs(const float *x, const uint32_t *u, uint32_t n, float chance, uint8_t *bit) {
    const vi always = (vi){0} + (int32_t)sid_f32_bits(0x1p31f);
    uint32_t i = 0;
    for (; i + 64 <= n; i += 64) {
        uint64_t w = 0;
#ifdef SID_HAS_NEON
        vi m[16];
#endif
        for (uint32_t j = 0; j < 64; j += WIDE) {
            vi drawn;
            memcpy(&drawn, u + i + j, sizeof drawn);
            const vf v = load(x + i + j), least = -.5f - (vf)lower(bits((vf)keys(v) * chance), always);
            const vi other = drawn < __builtin_convertvector(least, vi);
#ifdef SID_HAS_NEON
            m[j / WIDE] = is_negative(v) ^ other;
#else
            w |= (negative_mask(v) ^ mask_of(other)) << j;
#endif
        }
#ifdef SID_HAS_NEON
        w = word_of_masks(m);
#endif
        memcpy(bit + i / 8, &w, 8);
    }
    for (; i < n; i += 8) {
        uint32_t b = 0;
        for (uint32_t j = 0; j < 8 && i + j < n; j++) {
            const float v = x[i + j], stays = sid_bits_f32(sid_key(v)) * chance;
            const float least = -.5f - (stays < 0x1p31f ? stays : 0x1p31f);
            b |= (is_negative1(v) ^ ((int32_t)u[i + j] < (int32_t)least)) << j;
        }
        bit[i / 8] = (uint8_t)b;
    }
}

/* sum + v where v's sign is +, or -. */
INLINE vf plus_above(vf sum, vf v) {
#if BYTES == 64
    return (vf)_mm512_mask_add_ps((__m512)sum, _mm512_cmpge_epi32_mask((__m512i)v, _mm512_setzero_si512()), (__m512)sum,
                                  (__m512)v);
#else
    return sum + (vf)(bits(v) & ~(bits(v) >> 31));
#endif
}
INLINE vf plus_beneath(vf sum, vf v) {
#if BYTES == 64
    return (vf)_mm512_mask_add_ps((__m512)sum, _mm512_movepi32_mask((__m512i)v), (__m512)sum, (__m512)v);
#else
    return sum + (vf)(bits(v) & (bits(v) >> 31));
#endif
}

static void sign_sums(const float *x, uint32_t n, float sum[2]) {
    float lane[2][ROW / SOME], last[ROW];
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / SOME; c += WIDE) {
        vf above[SOME] = {{0}}, beneath[SOME] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < SOME; q++) {                                                                                   \
        const vf v = load((p) + q * (ROW / SOME));                                                                     \
        above[q] = plus_above(above[q], v);                                                                            \
        beneath[q] = plus_beneath(beneath[q], v);                                                                      \
    }
        DOWN(ADD);
#undef ADD
        store(lane[0] + c, FOLD_SOME(above));
        store(lane[1] + c, FOLD_SOME(beneath));
    }
    for (int k = 0; k < 2; k++) sum[k] = join_float(lane[k], ROW / SOME);
}

static void take_signs(float *x, uint32_t n, float high, float low) {
    const vi up = (vi){0} + (int32_t)sid_f32_bits(high), down = (vi){0} + (int32_t)sid_f32_bits(low);
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        store(x + i, v - by_sign(v, up, down));
    }
    for (; i < n; i++) x[i] -= is_negative1(x[i]) ? low : high;
}

/* Tabulates the sum for each pattern of up to four ranks' signs. */
static void sign_table(float table[16], const float (*value)[2], uint32_t ranks) {
    for (uint32_t k = 0; k < 16; k++) {
        table[k] = ranks ? value[0][k & 1] : 0;
        for (uint32_t r = 1; r < ranks; r++) table[k] += value[r][k >> r & 1];
    }
}

/* Bit j of b in byte j. */
static inline uint64_t byte_each(uint8_t b) {
    const uint64_t at = (b * 0x0101010101010101ull) & 0x8040201008040201ull;
    return (at + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}

/* out += one block of up to four ranks. */
static void sum_block(float *out, uint32_t n, const uint8_t *const *bit, const float (*value)[2], uint32_t ranks) {
    uint32_t i = 0;
#if defined(SID_HAS_AVX2)
    const uint8_t *p[4];
    __m256 high[4], low[4];
    for (uint32_t r = 0; r < 4; r++) { /* a rank that is not there has signs too, but they stand for 0 */
        p[r] = bit[r < ranks ? r : 0];
        high[r] = _mm256_set1_ps(r < ranks ? value[r][0] : 0);
        low[r] = _mm256_set1_ps(r < ranks ? value[r][1] : 0);
    }
    for (; i + 32 <= n; i += 32) {
        __m256i w[4], top = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
        for (int r = 0; r < 4; r++) {
            int32_t word;
            memcpy(&word, p[r] + i / 8, 4);
            w[r] = _mm256_set1_epi32(word);
        }
        for (int j = 0; j < 32; j += 8) { /* an element's bit becomes the lane's uppermost, which blendv looks at */
            __m256 x[4];
            for (int r = 0; r < 4; r++)
                x[r] = _mm256_blendv_ps(high[r], low[r], _mm256_castsi256_ps(_mm256_sllv_epi32(w[r], top)));
            const __m256 sum = _mm256_add_ps(_mm256_add_ps(_mm256_add_ps(x[0], x[1]), x[2]), x[3]);
            _mm256_storeu_ps(out + i + j, _mm256_add_ps(_mm256_loadu_ps(out + i + j), sum));
            top = _mm256_sub_epi32(top, _mm256_set1_epi32(8));
        }
    }
#elif defined(SID_HAS_NEON)
    const uint8_t *p[4];
    float32x4_t high[4], low[4];
    for (uint32_t r = 0; r < 4; r++) {
        p[r] = bit[r < ranks ? r : 0];
        high[r] = vdupq_n_f32(r < ranks ? value[r][0] : 0);
        low[r] = vdupq_n_f32(r < ranks ? value[r][1] : 0);
    }
    for (; i + 32 <= n; i += 32) {
        uint32x4_t w[4], own = (uint32x4_t){1, 2, 4, 8};
        for (int r = 0; r < 4; r++) {
            uint32_t word;
            memcpy(&word, p[r] + i / 8, 4);
            w[r] = vdupq_n_u32(word);
        }
        for (int j = 0; j < 32; j += 4) {
            float32x4_t x[4];
            for (int r = 0; r < 4; r++) x[r] = vbslq_f32(vtstq_u32(w[r], own), low[r], high[r]);
            const float32x4_t sum = vaddq_f32(vaddq_f32(vaddq_f32(x[0], x[1]), x[2]), x[3]);
            vst1q_f32(out + i + j, vaddq_f32(vld1q_f32(out + i + j), sum));
            own = vshlq_n_u32(own, 4);
        }
    }
#endif
    float table[16];
    sign_table(table, value, ranks);
    for (; i < n; i += 8) {
        uint64_t at = 0;
        for (uint32_t r = 0; r < ranks; r++) at |= byte_each(bit[r][i / 8]) << r;
        for (uint32_t j = i; j < i + 8 && j < n; j++, at >>= 8) out[j] += table[at & 15];
    }
}

static void sum_signs(float *out, uint32_t n, const uint8_t *const *bit, const float (*value)[2], uint32_t count) {
    uint32_t done = 0;
#if defined(SID_HAS_AVX512)
    done = n / 64 * 64;
    for (uint32_t from = 0; from < count; from += 8) { /* a byte an element: the signs of eight ranks */
        const uint32_t ranks = count - from < 8 ? count - from : 8, first = ranks < 4 ? ranks : 4;
        float table[2][16];
        sign_table(table[0], value + from, first);
        sign_table(table[1], value + from + first, ranks - first);
        const __m512 t0 = _mm512_loadu_ps(table[0]), t1 = _mm512_loadu_ps(table[1]);
        for (uint32_t i = 0; i < done; i += 64) {
            __m512i at = _mm512_setzero_si512();
            for (uint32_t r = 0; r < ranks; r++) {
                uint64_t w;
                memcpy(&w, bit[from + r] + i / 8, 8);
                at = _mm512_mask_add_epi8(at, w, at, _mm512_set1_epi8((char)(1u << r)));
            }
            const __m128i each[4] = {_mm512_castsi512_si128(at), _mm512_extracti32x4_epi32(at, 1),
                                     _mm512_extracti32x4_epi32(at, 2), _mm512_extracti32x4_epi32(at, 3)};
            for (int j = 0; j < 4; j++) { /* a lookup sees the lowest four bits of an index */
                float *to = out + i + 16 * j;
                const __m512i k = _mm512_cvtepu8_epi32(each[j]);
                __m512 v = _mm512_add_ps(_mm512_loadu_ps(to), _mm512_permutexvar_ps(k, t0));
                if (ranks > 4) v = _mm512_add_ps(v, _mm512_permutexvar_ps(_mm512_srli_epi32(k, 4), t1));
                _mm512_storeu_ps(to, v);
            }
        }
    }
#endif
    for (uint32_t from = 0; from < count && done < n; from += 4) {
        const uint8_t *rest[4];
        const uint32_t ranks = count - from < 4 ? count - from : 4;
        for (uint32_t r = 0; r < ranks; r++) rest[r] = bit[from + r] + done / 8;
        sum_block(out + done, n - done, rest, value + from, ranks);
    }
}

static void vote(float *x, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) x[i] = (float)((x[i] > 0) - (x[i] < 0));
}

static void merge(float *x, const uint16_t *u, uint32_t n, uint32_t count) {
    for (uint32_t i = 0; i < n; i++) { /* the positive ones are the first (count + x) / 2 */
        const int32_t drawn = (int32_t)((uint32_t)u[i] * count >> 16);
        x[i] = (float)(2 * drawn - (int32_t)count) < x[i] ? 1.0f : -1.0f;
    }
}
