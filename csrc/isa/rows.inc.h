/* simd.c: a few rows of a matrix: y_k is row k of r, `stride` floats apart. What PowerSGD multiplies and orthogonalises with.
 *
 * dots and products add element i to lane i % 16 or i % 32, in the order of i; the other loops take the rows in the order of
 * k. In float32 each product is rounded before it is added; in float64 a product of two floats is exact. */

/* Four rows at once, so that x is read once for them. */
#define DOTS(R)                                                                                                        \
    static void dots##R(const float *x, uint32_t n, const float *y, uint64_t stride, uint32_t from, float *lane) {     \
        uint32_t i = 0;                                                                                                \
        for (; (from + i) % LANES && i < n; i++)                                                                       \
            for (uint32_t k = 0; k < R; k++) lane[k * LANES + (from + i) % LANES] += x[i] * y[k * stride + i];         \
        if (i + LANES <= n) {                                                                                          \
            vf part[R][PARTS];                                                                                         \
            memcpy(part, lane, sizeof part);                                                                           \
            for (; i + LANES <= n; i += LANES)                                                                         \
                for (int q = 0; q < PARTS; q++) {                                                                      \
                    const vf v = load(x + i + q * WIDE);                                                               \
                    for (uint32_t k = 0; k < R; k++) part[k][q] += v * load(y + k * stride + i + q * WIDE);            \
                }                                                                                                      \
            memcpy(lane, part, sizeof part);                                                                           \
        }                                                                                                              \
        for (uint32_t j = 0; i < n; i++, j++)                                                                          \
            for (uint32_t k = 0; k < R; k++) lane[k * LANES + j] += x[i] * y[k * stride + i];                          \
    }
DOTS(1)
DOTS(2)
DOTS(4)

static void dots(const float *x, uint32_t n, const float *y, uint64_t stride, uint32_t r, uint32_t from, float *lane) {
    for (; r >= 4; r -= 4, y += 4 * stride, lane += 4 * LANES) dots4(x, n, y, stride, from, lane);
    if (r & 2) {
        dots2(x, n, y, stride, from, lane);
        y += 2 * stride;
        lane += 2 * LANES;
    }
    if (r & 1) dots1(x, n, y, stride, from, lane);
}

/* Products of floats are exact in float64: one rounding is the same as two. */
static void products(const float *x, const float *y, uint32_t n, double *lane) {
    enum {
        MOST = 32,
        COUNT = MOST / LONGS
    };
    uint32_t i = 0;
    if (n >= MOST) {
        vd sum[COUNT];
        memcpy(sum, lane, sizeof sum);
        for (; i + MOST <= n; i += MOST)
            for (int q = 0; q < COUNT; q++) sum[q] += wide(x + i + q * LONGS) * wide(y + i + q * LONGS);
        memcpy(lane, sum, sizeof sum);
    }
    for (uint32_t j = 0; i < n; i++, j++) lane[j] += (double)x[i] * (double)y[i];
}

static inline void store_floats(float *x, vd v) {
#if BYTES == 64
    _mm256_storeu_ps(x, _mm512_cvtpd_ps((__m512d)v));
#elif BYTES == 32
    _mm_storeu_ps(x, _mm256_cvtpd_ps((__m256d)v));
#else
    for (int j = 0; j < LONGS; j++) x[j] = (float)v[j];
#endif
}
static void take_columns(float *x, uint64_t n, const float *y, uint64_t stride, uint32_t r, const double *c) {
    uint64_t i = 0;
    for (; i + LONGS <= n; i += LONGS) {
        vd v = wide(x + i);
        for (uint32_t k = 0; k < r; k++) v -= c[k] * wide(y + k * stride + i);
        store_floats(x + i, v);
    }
    for (; i < n; i++) {
        double v = (double)x[i];
        for (uint32_t k = 0; k < r; k++) v -= c[k] * (double)y[k * stride + i];
        x[i] = (float)v;
    }
}

static void add_rows(const float *x, uint32_t n, const float *c, uint32_t r, float *y, uint64_t stride) {
    for (uint32_t k = 0; k < r; k++, y += stride) {
        const float f = c[k];
        uint32_t i = 0;
        for (; i + WIDE <= n; i += WIDE) store(y + i, load(y + i) + f * load(x + i));
        for (; i < n; i++) y[i] += f * x[i];
    }
}

static void add_outer(const float *c, const float *y, uint64_t stride, uint32_t r, float *out, uint32_t n, float sign) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        vf s = c[0] * load(y + i);
        for (uint32_t k = 1; k < r; k++) s += c[k] * load(y + k * stride + i);
        store(out + i, load(out + i) + sign * s);
    }
    for (; i < n; i++) {
        float s = c[0] * y[i];
        for (uint32_t k = 1; k < r; k++) s += c[k] * y[k * stride + i];
        out[i] += sign * s;
    }
}
