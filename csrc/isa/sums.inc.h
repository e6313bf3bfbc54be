/* simd.c: sums over a unit: of |x|, x^2, x, logarithms, and of the elements beyond a threshold.
 *
 * Element i is added to lane i % 128, in the order of i, and the lanes are added in halves (sums.h). The loops take some registers of
 * a row at a time, evenly spaced, down all rows: their sums do not wait for one another, stay in registers, and are the ones
 * that are added to one another first. */

enum {
    ROW = SID_UNIT_LANES,
    MANY = 8,                  /* registers of one sum */
    SOME = BYTES == 64 ? 4 : 2 /* of each of two to five */
};

/* Written out: an array that is indexed in nested loops does not stay in registers. */
#define FOLD_2(v) ((v)[0] + (v)[1])
#define FOLD_4(v) (((v)[0] + (v)[2]) + ((v)[1] + (v)[3]))
#define FOLD_8(v) ((((v)[0] + (v)[4]) + ((v)[2] + (v)[6])) + (((v)[1] + (v)[5]) + ((v)[3] + (v)[7])))
#define PRODUCT_8(v) ((((v)[0] * (v)[4]) * ((v)[2] * (v)[6])) * (((v)[1] * (v)[5]) * ((v)[3] * (v)[7])))
#if BYTES == 64
#define FOLD_SOME FOLD_4
#else
#define FOLD_SOME FOLD_2
#endif
#define JOIN(type)                                                                                                     \
    INLINE type join_##type(type *lane, const int n) {                                                                 \
        if (n >= 128)                                                                                                  \
            for (int j = 0; j < 64; j++) lane[j] += lane[j + 64];                                                      \
        if (n >= 64)                                                                                                   \
            for (int j = 0; j < 32; j++) lane[j] += lane[j + 32];                                                      \
        if (n >= 32)                                                                                                   \
            for (int j = 0; j < 16; j++) lane[j] += lane[j + 16];                                                      \
        for (int j = 0; j < 8; j++) lane[j] += lane[j + 8];                                                            \
        for (int j = 0; j < 4; j++) lane[j] += lane[j + 4];                                                            \
        return (lane[0] + lane[1]) + (lane[2] + lane[3]);                                                              \
    }
JOIN(float)
JOIN(double)
/* Joins the lanes of one or two registers; smaller registers count as several. */
INLINE float join_parts(const vf *part, const int n) {
#if BYTES == 64
    const vf all = n == 2 ? part[0] + part[1] : part[0];
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)all), _mm512_extractf32x8_ps((__m512)all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehdup_ps(four)); /* 0 + 1, and 2 + 3 */
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehl_ps(two, two)));
#else
    float lane[ROW];
    for (int j = 0; j < n; j++) store(lane + j * WIDE, part[j]);
    return join_float(lane, n * WIDE);
#endif
}

/* Elements of whole rows. What comes after them goes to `last`, filled up with zeros, which change no sum. */
static inline uint32_t whole_rows(const float *x, uint32_t n, float *last) {
    const uint32_t whole = n / ROW * ROW;
    if (whole == n) return whole;
    memset(last, 0, 4 * ROW);
    memcpy(last, x + whole, 4 * (n - whole));
    return whole;
}
/* Row after row of column c: f(where its next elements are). */
#define DOWN(f)                                                                                                        \
    do {                                                                                                               \
        for (uint32_t i = c; i < whole; i += ROW) f(x + i);                                                            \
        if (whole < n) f(last + c);                                                                                    \
    } while (0)

static float sum_abs(const float *x, uint32_t n) {
    vf part[ROW / MANY / WIDE];
    float last[ROW];
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / MANY; c += WIDE) {
        vf sum[MANY] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < MANY; q++) sum[q] += (vf)keys(load((p) + q * (ROW / MANY)))
        DOWN(ADD);
#undef ADD
        part[c / WIDE] = FOLD_8(sum);
    }
    return join_parts(part, ROW / MANY / WIDE);
}

static void tail_sums(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[3], uint32_t count[2]) {
    const vi from_a = (vi){0} + (int32_t)a, from_b = (vi){0} + (int32_t)b;
    vf part[3][ROW / SOME / WIDE];
    float last[ROW];
    counts count_a = {0}, count_b = {0};
    const uint32_t whole = whole_rows(x, n, last), none = (ROW - n % ROW) % ROW;
    for (uint32_t c = 0; c < ROW / SOME; c += WIDE) {
        vf all[SOME] = {{0}}, above_a[SOME] = {{0}}, above_b[SOME] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < SOME; q++) {                                                                                   \
        const vi k = keys(load((p) + q * (ROW / SOME)));                                                               \
        const chosen in_a = from(k, from_a), in_b = from(k, from_b);                                                   \
        all[q] += (vf)k;                                                                                               \
        above_a[q] = plus(above_a[q], in_a, (vf)k);                                                                    \
        above_b[q] = plus(above_b[q], in_b, (vf)k);                                                                    \
        count_a = counted(count_a, in_a);                                                                              \
        count_b = counted(count_b, in_b);                                                                              \
    }
        DOWN(ADD);
#undef ADD
        part[0][c / WIDE] = FOLD_SOME(all);
        part[1][c / WIDE] = FOLD_SOME(above_a);
        part[2][c / WIDE] = FOLD_SOME(above_b);
    }
    /* the zeros that fill up the last row are not below 0 */
    count[0] = sum_of(count_a) - (a ? 0 : none);
    count[1] = sum_of(count_b) - (b ? 0 : none);
    for (int j = 0; j < 3; j++) sum[j] = join_parts(part[j], ROW / SOME / WIDE);
}

static float sum_from(const float *x, uint32_t n, uint32_t key, uint32_t *count) {
    const vi least = (vi){0} + (int32_t)key;
    vf part[ROW / MANY / WIDE];
    float last[ROW];
    counts number_above = {0};
    const uint32_t whole = whole_rows(x, n, last), none = (ROW - n % ROW) % ROW;
    for (uint32_t c = 0; c < ROW / MANY; c += WIDE) {
        vf sum[MANY] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < MANY; q++) {                                                                                   \
        const vi k = keys(load((p) + q * (ROW / MANY)));                                                               \
        const chosen in = from(k, least);                                                                              \
        sum[q] = plus(sum[q], in, (vf)k);                                                                              \
        number_above = counted(number_above, in);                                                                      \
    }
        DOWN(ADD);
#undef ADD
        part[c / WIDE] = FOLD_8(sum);
    }
    *count = sum_of(number_above) - (key ? 0 : none);
    return join_parts(part, ROW / MANY / WIDE);
}

/* sum + v * v, v once a float: the square is exact, so that one rounding is the same as two. */
INLINE vd plus_square(vd sum, vd v) {
#if BYTES == 64
    return (vd)_mm512_fmadd_pd((__m512d)v, (__m512d)v, (__m512d)sum);
#elif BYTES == 32
    return (vd)_mm256_fmadd_pd((__m256d)v, (__m256d)v, (__m256d)sum);
#else
    return sum + v * v;
#endif
}

/* In float64: a register holds half as many. */
enum {
    HALF = WIDE / 2
};
static double sum_squares(const float *x, uint32_t n) {
    double lane[ROW / 4];
    float last[ROW];
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / 4; c += HALF) {
        vd sum[4] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < 4; q++) {                                                                                      \
        const vd v = wide((p) + q * (ROW / 4));                                                                        \
        sum[q] = plus_square(sum[q], v);                                                                               \
    }
        DOWN(ADD);
#undef ADD
        store_wide(lane + c, FOLD_4(sum));
    }
    return join_double(lane, ROW / 4);
}

static void square_sums(const float *x, uint32_t n, float sum[3]) {
    vf part[3][ROW / SOME / WIDE];
    float last[ROW];
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / SOME; c += WIDE) {
        vf size[SOME] = {{0}}, square[SOME] = {{0}}, plain[SOME] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < SOME; q++) {                                                                                   \
        const vf v = load((p) + q * (ROW / SOME));                                                                     \
        size[q] += (vf)keys(v);                                                                                        \
        square[q] += v * v;                                                                                            \
        plain[q] += v;                                                                                                 \
    }
        DOWN(ADD);
#undef ADD
        part[0][c / WIDE] = FOLD_SOME(size);
        part[1][c / WIDE] = FOLD_SOME(square);
        part[2][c / WIDE] = FOLD_SOME(plain);
    }
    for (int j = 0; j < 3; j++) sum[j] = join_parts(part[j], ROW / SOME / WIDE);
}

static void probe_sums(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[5], uint32_t count[2]) {
    const vi from_a = (vi){0} + (int32_t)a, from_b = (vi){0} + (int32_t)b;
    const float at_a = sid_bits_f32(a), at_b = sid_bits_f32(b);
    vf lanes[5][ROW / SOME / WIDE];
    float last[ROW];
    counts count_a = {0}, count_b = {0};
    const uint32_t whole = whole_rows(x, n, last), none = (ROW - n % ROW) % ROW;
    for (uint32_t c = 0; c < ROW / SOME; c += WIDE) {
        vf part[5][SOME] = {{{0}}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < SOME; q++) {                                                                                   \
        const vi k = keys(load((p) + q * (ROW / SOME)));                                                               \
        const chosen in_a = from(k, from_a), in_b = from(k, from_b);                                                   \
        const vf over_b = (vf)k - at_b;                                                                                \
        part[0][q] += (vf)k;                                                                                           \
        part[1][q] += (vf)k * (vf)k;                                                                                   \
        part[2][q] = plus(part[2][q], in_a, (vf)k - at_a);                                                             \
        part[3][q] = plus(part[3][q], in_b, over_b);                                                                   \
        part[4][q] = plus(part[4][q], in_b, over_b * over_b);                                                          \
        count_a = counted(count_a, in_a);                                                                              \
        count_b = counted(count_b, in_b);                                                                              \
    }
        DOWN(ADD);
#undef ADD
        for (int j = 0; j < 5; j++) lanes[j][c / WIDE] = FOLD_SOME(part[j]);
    }
    count[0] = sum_of(count_a) - (a ? 0 : none);
    count[1] = sum_of(count_b) - (b ? 0 : none);
    for (int j = 0; j < 5; j++) sum[j] = join_parts(lanes[j], ROW / SOME / WIDE);
}

INLINE void moments_of(const float *x, uint32_t n, double sum[3], const int sizes) {
    double lane[3][ROW / SOME];
    float last[ROW];
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / SOME; c += HALF) {
        vd size[SOME] = {{0}}, square[SOME] = {{0}}, plain[SOME] = {{0}};
#define ADD(p)                                                                                                         \
    for (int q = 0; q < SOME; q++) {                                                                                   \
        const vd v = wide((p) + q * (ROW / SOME));                                                                     \
        if (sizes) size[q] += magnitudes(v);                                                                           \
        square[q] = plus_square(square[q], v);                                                                         \
        plain[q] += v;                                                                                                 \
    }
        DOWN(ADD);
#undef ADD
        store_wide(lane[0] + c, FOLD_SOME(size));
        store_wide(lane[1] + c, FOLD_SOME(square));
        store_wide(lane[2] + c, FOLD_SOME(plain));
    }
    for (int j = 0; j < 3; j++) sum[j] = join_double(lane[j], ROW / SOME);
}
static void moments(const float *x, uint32_t n, double sum[3]) { moments_of(x, n, sum, 1); }
static void two_moments(const float *x, uint32_t n, double sum[2]) {
    double all[3];
    moments_of(x, n, all, 0);
    sum[0] = all[1];
    sum[1] = all[2];
}

/* The exponents add up as integers, the significands in [1, 2) multiply, in the order of sums: until 16 lanes are left they
 * stay below 2^64, and the rounding of 64 products is 6e-8 of one logarithm at most; their significands go on in float64.
 * A zero counts as neither. */
static double sum_log2(const float *x, uint32_t n, uint32_t *count) {
    const vi one = (vi){0} + 0x3f800000;
    float lane[ROW / MANY], last[ROW];
    double rest[ROW / MANY];
    vi exponents = {0}, least = (vi){0} + INT32_MAX;
    uint32_t tiny = 0, smallest = INT32_MAX;
    const uint32_t whole = whole_rows(x, n, last);
    for (uint32_t c = 0; c < ROW / MANY; c += WIDE) {
        vf product[MANY];
        for (int q = 0; q < MANY; q++) product[q] = (vf)one;
#define MULTIPLY(p)                                                                                                    \
    for (int q = 0; q < MANY; q++) {                                                                                   \
        const vi k = keys(load((p) + q * (ROW / MANY)));                                                               \
        product[q] *= (vf)((k & 0x7fffff) | one);                                                                      \
        exponents += k >> 23;                                                                                          \
        least = lower(least, k);                                                                                       \
    }
        DOWN(MULTIPLY);
#undef MULTIPLY
        store(lane + c, PRODUCT_8(product));
    }
    for (int j = 0; j < WIDE; j++) smallest = (uint32_t)least[j] < smallest ? (uint32_t)least[j] : smallest;
    *count = n;
    if (smallest < 0x800000) { /* zeros, or denormal ones; what fills up a row is not counted */
        *count = 0;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t k = sid_key(x[i]), ok = k > 0x7fffff;
            *count += ok;
            tiny |= ok ? 0 : k;
        }
    }
    int64_t exponent = total(exponents) - 127 * (int64_t)*count;
    if (tiny) { /* again, with the denormal ones made normal */
        float all[ROW];
        exponent = *count = 0;
        for (int j = 0; j < ROW; j++) all[j] = 1;
        for (uint32_t i = 0; i < n; i++) {
            const uint32_t key = sid_key(x[i]), k = key < 0x800000 ? sid_f32_bits((float)key) : key; /* key * 2^-149 */
            if (!key) continue;
            exponent += (int32_t)(k >> 23) - 127 - (key < 0x800000 ? 149 : 0);
            all[i % ROW] *= sid_bits_f32((k & 0x7fffff) | 0x3f800000);
            ++*count;
        }
        for (int w = ROW / 2; w >= ROW / MANY; w /= 2)
            for (int j = 0; j < w; j++) all[j] *= all[j + w];
        memcpy(lane, all, sizeof lane);
    }
    for (int j = 0; j < ROW / MANY; j++) {
        const uint32_t k = sid_f32_bits(lane[j]);
        exponent += (int32_t)(k >> 23) - 127;
        rest[j] = (double)sid_bits_f32((k & 0x7fffff) | 0x3f800000);
    }
    for (int j = 0; j < 8; j++) rest[j] *= rest[j + 8];
    for (int j = 0; j < 4; j++) rest[j] *= rest[j + 4];
    return (double)exponent + sid_log((rest[0] * rest[1]) * (rest[2] * rest[3])) * 1.4426950408889634074;
}
