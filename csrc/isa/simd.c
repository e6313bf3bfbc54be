/* The primitives of internal.h's sid_simd. This file is compiled once per instruction set with SID_ISA set to the name
 * of the variant; only static functions, so that no AVX code can leak into another object. The plain loops are the law;
 * intrinsics stand only where compilers do not vectorise (compaction, half floats, stores past the caches). */
#include <string.h>

#include "../special.h"
#include "simd.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SID_HAS_AVX512 1
#endif
#if defined(__AVX2__) && defined(__BMI2__) && defined(__F16C__)
#define SID_HAS_AVX2 1
#endif
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

/* The compilers' own vector type, as wide as this variant's registers. */
#if defined(SID_HAS_AVX512)
#define BYTES 64
#elif defined(SID_HAS_AVX2)
#define BYTES 32
#else
#define BYTES 16
#endif
enum {
    WIDE = BYTES / 4,
    PARTS = LANES / WIDE
};
typedef float vf __attribute__((vector_size(BYTES)));
typedef int32_t vi __attribute__((vector_size(BYTES)));
typedef uint32_t vn __attribute__((vector_size(BYTES)));

static inline vf load(const float *x) {
    vf v;
    memcpy(&v, x, sizeof v);
    return v;
}
typedef double vd __attribute__((vector_size(BYTES)));
typedef int64_t vl __attribute__((vector_size(BYTES)));
typedef uint64_t vu __attribute__((vector_size(BYTES)));
enum {
    LONGS = BYTES / 8
};
#if BYTES == 16
typedef float vh __attribute__((vector_size(BYTES / 2)));
#endif

static inline vd wide(const float *x) {
#if BYTES == 64 /* compilers make two halves of it */
    return (vd)_mm512_cvtps_pd(_mm256_loadu_ps(x));
#elif BYTES == 32
    return (vd)_mm256_cvtps_pd(_mm_loadu_ps(x));
#else
    vh v;
    memcpy(&v, x, sizeof v);
    return __builtin_convertvector(v, vd);
#endif
}
static inline vd magnitudes(vd v) { return (vd)((vl)v & INT64_MAX); }
static inline void store(float *x, vf v) { memcpy(x, &v, sizeof v); }
static inline void store_wide(double *x, vd v) { memcpy(x, &v, sizeof v); }
static inline vi bits(vf v) { return (vi)v; }
static inline vi keys(vf v) { return (vi)v & 0x7fffffff; } /* below 2^31: signed comparisons will do */
static inline vi either(vi mask, vi a, vi b) { return (a & mask) | (b & ~mask); }

static inline uint32_t total(vi v) {
    uint32_t sum = 0;
    for (int j = 0; j < WIDE; j++) sum += (uint32_t)v[j];
    return sum;
}

/* Of signed integers. */
static inline vi lower(vi a, vi b) {
#if BYTES == 64
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return either(a < b, a, b);
#endif
}
static inline vi higher(vi a, vi b) {
#if BYTES == 64
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return either(a > b, a, b);
#endif
}

#ifdef SID_HAS_AVX512
/* The lanes of a comparison as a number. gcc 12 takes the 16 bits of a mask that is used as a mask, too, for 32: where it
 * runs out of registers, it stores two bytes and reads four. So gcc is told which instruction extends them. */
static inline uint32_t number(__mmask16 m) {
#if defined(__GNUC__) && !defined(__clang__)
    uint32_t n;
    __asm__("kmovw %1, %0" : "=r"(n) : "k"(m));
    return n;
#else
    return m;
#endif
}
#endif

/* Bit j: element j of a mask is set. */
static inline uint64_t mask_of(vi m) {
#if defined(SID_HAS_AVX512)
    return _mm512_movepi32_mask((__m512i)m);
#elif defined(SID_HAS_AVX2)
    return (uint64_t)_mm256_movemask_ps((__m256)m);
#elif defined(__SSE2__)
    return (uint64_t)_mm_movemask_ps((__m128)m);
#else
    uint64_t bit = 0;
    for (int j = 0; j < WIDE; j++) bit |= (uint64_t)(m[j] & 1) << j;
    return bit;
#endif
}

INLINE uint32_t max_of(const float *x, uint32_t n) {
    vi top[4] = {{0}};
    uint32_t i = 0, max;
    for (; i + 4 * WIDE <= n; i += 4 * WIDE)
        for (int q = 0; q < 4; q++) top[q] = higher(top[q], keys(load(x + i + q * WIDE)));
    const vi all = higher(higher(top[0], top[1]), higher(top[2], top[3]));
#if BYTES == 64
    max = (uint32_t)_mm512_reduce_max_epi32((__m512i)all);
#else
    max = 0;
    for (int j = 0; j < WIDE; j++) max = (uint32_t)all[j] > max ? (uint32_t)all[j] : max;
#endif
    for (; i < n; i++) max = sid_key(x[i]) > max ? sid_key(x[i]) : max;
    return max;
}

static uint32_t max_key(const float *x, uint32_t n) { return max_of(x, n); }
static void block_keys(const float *x, uint32_t n, uint32_t block, uint32_t *key) {
    for (uint32_t b = 0, i = 0; i < n; b++, i += block) key[b] = max_of(x + i, n - i < block ? n - i : block);
}
static int finite(const float *x, uint32_t n) { return max_key(x, n) < SID_KEY_INF; }

static inline float saturated1(float s) {
    const float max = 0x1.fffffep127f;
    return s > max ? max : s < -max ? -max : s;
}
/* x where key < limit, else 0. */
static inline vf below(vf x, vi key, vi limit) {
#if BYTES == 64
    return (vf)_mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask((__m512i)key, (__m512i)limit), (__m512)x);
#else
    return (vf)(bits(x) & (key < limit));
#endif
}
static inline vi wide_key(uint32_t key) { return (vi){0} + (int32_t)(key > 0x7fffffffu ? 0x7fffffffu : key); }

/* The law of add_weighted. */
static int weighted_each(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma) {
    int any = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int ok = sid_key(g[i]) < SID_KEY_INF;
        acc[i] = saturated1((sid_key(acc[i]) >= key ? 0.0f : acc[i]) * beta + (ok ? g[i] : 0.0f) * gamma);
        any |= !ok;
    }
    return any == 0;
}

enum {
    FOUR = 4 * WIDE
};
INLINE int any_beyond(vi key) { return mask_of(key > 0x7f7fffff) != 0; }

/* What is kept is finite: where a sum is too, so was what was added, and there is nothing to saturate. With weights of 1,
 * which are known when this is inlined, no product is left; nor, where nothing was sent, a comparison. */
INLINE int weighted(float *acc, const float *g, uint32_t n, uint32_t key, const float beta, const float gamma,
                    const int whole) {
    const vi sent = wide_key(key);
    uint32_t i = 0;
    int ok = 1;
    for (; i + FOUR <= n; i += FOUR) {
        vf sum[4];
        vi top = {0};
        for (uint32_t q = 0; q < 4; q++) {
            const vf a = load(acc + i + q * WIDE);
            sum[q] = (whole ? a : below(a, keys(a), sent)) * beta + load(g + i + q * WIDE) * gamma;
            top = higher(top, keys(sum[q]));
        }
        if (any_beyond(top))
            ok &= weighted_each(acc + i, g + i, FOUR, key, beta, gamma);
        else
            for (uint32_t q = 0; q < 4; q++) store(acc + i + q * WIDE, sum[q]);
    }
    return ok & weighted_each(acc + i, g + i, n - i, key, beta, gamma);
}

static int add_kept(float *acc, const float *g, uint32_t n, uint32_t key) {
    return key > 0x7fffffffu ? weighted(acc, g, n, key, 1, 1, 1) : weighted(acc, g, n, key, 1, 1, 0);
}
static int add_weighted(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma) {
    return weighted(acc, g, n, key, beta, gamma, 0);
}

/* plain: of_u is 1 and of_g is 0, whose product would be another signed zero. */
INLINE int velocity_each(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                         const sid_velocity *c, const int plain) {
    int any = 0;
    for (uint32_t i = 0; i < n; i++) {
        const int ok = sid_key(g[i]) < SID_KEY_INF;
        const uint32_t k = sid_key(acc[i]);
        const float x = (ok ? g[i] : 0.0f) * c->factor;
        u[i] = saturated1((k >= mask ? 0.0f : u[i]) * c->momentum + x);
        acc[i] = saturated1((k >= key ? 0.0f : acc[i]) * c->carry + (plain ? u[i] : u[i] * c->of_u + x * c->of_g));
        any |= !ok;
    }
    return any == 0;
}

INLINE int velocity(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                    const sid_velocity *c, const int plain) {
    const float m = c->momentum, f = c->factor, of_u = c->of_u, of_g = c->of_g, carry = c->carry;
    const vi sent = wide_key(key), masked = wide_key(mask);
    uint32_t i = 0;
    int ok = 1;
    for (; i + FOUR <= n; i += FOUR) {
        vf next[4], sum[4];
        vi top = {0};
        for (uint32_t q = 0; q < 4; q++) {
            const vf a = load(acc + i + q * WIDE), v = load(u + i + q * WIDE), x = load(g + i + q * WIDE) * f;
            const vi k = keys(a);
            next[q] = below(v, k, masked) * m + x;
            sum[q] = below(a, k, sent) * carry + (plain ? next[q] : next[q] * of_u + x * of_g);
            top = higher(top, higher(keys(next[q]), keys(sum[q])));
        }
        if (any_beyond(top)) {
            ok &= velocity_each(acc + i, u + i, g + i, FOUR, key, mask, c, plain);
            continue;
        }
        for (uint32_t q = 0; q < 4; q++) {
            store(u + i + q * WIDE, next[q]);
            store(acc + i + q * WIDE, sum[q]);
        }
    }
    return ok & velocity_each(acc + i, u + i, g + i, n - i, key, mask, c, plain);
}

static int add_velocity(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                        const sid_velocity *c) {
    return c->of_u == 1 && c->of_g == 0 ? velocity(acc, u, g, n, key, mask, c, 1)
                                        : velocity(acc, u, g, n, key, mask, c, 0);
}

static void zero_from(float *acc, uint32_t n, uint32_t key) {
    uint32_t i = 0;
    if (key > 0x7fffffffu) return;
    for (; i + WIDE <= n; i += WIDE) {
        const vf x = load(acc + i);
        store(acc + i, (vf)(bits(x) & (keys(x) < (int32_t)key)));
    }
    for (; i < n; i++) acc[i] = sid_key(acc[i]) >= key ? 0.0f : acc[i];
}

static void one_side(const float *x, float *y, uint32_t n, int negative) {
    const vi flip = (vi){0} + (negative ? (int32_t)0x80000000u : 0);
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        const vi v = bits(load(x + i)) ^ flip;
        store(y + i, (vf)(v & (v > 0)));
    }
    for (; i < n; i++) {
        const uint32_t v = sid_f32_bits(x[i]) ^ (negative ? 0x80000000u : 0u);
        y[i] = sid_bits_f32(v >> 31 ? 0 : v);
    }
}

static void subtract_from(float *acc, uint32_t n, uint32_t key, float value) {
    const uint32_t sign = sid_f32_bits(value) & 0x80000000u;
    const vi flip = (vi){0} + (int32_t)sign, low = (vi){0} + (int32_t)key,
             what = (vi){0} + (int32_t)sid_f32_bits(value);
    uint32_t i = 0;
    if (key > 0x7fffffffu) return;
    for (; i + WIDE <= n; i += WIDE) {
        const vf x = load(acc + i);
        store(acc + i, x - (vf)(what & ((bits(x) ^ flip) >= low)));
    }
    for (; i < n; i++) {
        const uint32_t v = sid_f32_bits(acc[i]) ^ sign;
        acc[i] -= v >> 31 || v < key ? 0.0f : value;
    }
}

/* ---- sums of a unit: element i in lane i % 128 (internal.h) --------------------------------------------------------
 * Some registers of a row at a time, evenly spaced, down all rows: their sums do not wait for one another, stay in
 * registers, and are the ones that are added to one another first. */

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
/* Of one register's lanes or two's; of smaller registers, of as many as they take. */
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

/* Lanes of a comparison: sums and counts of these alone. A zero is added to the others where there are no masks. */
#if BYTES == 64
typedef __mmask16 chosen;
INLINE chosen from(vi key, vi low) { return _mm512_cmpge_epi32_mask((__m512i)key, (__m512i)low); }
INLINE uint64_t word_of(chosen m) { return number(m); } /* bit j: lane j */
INLINE vf plus(vf sum, chosen m, vf x) { return (vf)_mm512_mask_add_ps((__m512)sum, m, (__m512)sum, (__m512)x); }
typedef uint32_t tallies;
INLINE tallies counted(tallies c, chosen m) { return c + (uint32_t)__builtin_popcount(number(m)); }
INLINE uint32_t sum_of(tallies c) { return c; }
#else
typedef vi chosen;
INLINE chosen from(vi key, vi low) { return key >= low; }
INLINE uint64_t word_of(chosen m) { return mask_of(m); }
INLINE vf plus(vf sum, chosen m, vf x) { return sum + (vf)(bits(x) & m); }
typedef vi tallies;
INLINE tallies counted(tallies c, chosen m) { return c - m; }
INLINE uint32_t sum_of(tallies c) { return total(c); }
#endif

static void tail_sums(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[3], uint32_t count[2]) {
    const vi from_a = (vi){0} + (int32_t)a, from_b = (vi){0} + (int32_t)b;
    vf part[3][ROW / SOME / WIDE];
    float last[ROW];
    tallies count_a = {0}, count_b = {0};
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

#ifdef SID_HAS_AVX512
static __m512i keys16(const float *x) {
    return _mm512_and_si512(_mm512_castps_si512(_mm512_loadu_ps(x)), _mm512_set1_epi32(0x7fffffff));
}
static unsigned bits16(__mmask16 m) { return (unsigned)__builtin_popcount(number(m)); }
#elif defined(SID_HAS_AVX2)
static __m256i keys8(const float *x) {
    return _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x)), _mm256_set1_epi32(0x7fffffff));
}
static unsigned mask8(__m256i m) { return (unsigned)_mm256_movemask_ps(_mm256_castsi256_ps(m)); }
/* Lane numbers of the set bits of m, packed to the left. */
static __m256i left8(unsigned m) {
    const uint64_t spread = _pdep_u64(m, 0x0101010101010101ull) * 0xff;
    return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)_pext_u64(0x0706050403020100ull, spread)));
}
#endif

enum {
    A_FEW = 48 /* of a tile: below, they are taken out one by one */
};
/* Where a hit in FOUR elements is rare, a test skips them; where it is neither rare nor sure, mispredicting the test costs
 * more than writing some entries that may be none. */
INLINE uint32_t capture_few(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                            const uint32_t slots, const int rare) {
    const vi low = (vi){0} + (int32_t)key;
    uint32_t c = 0;
    for (uint32_t i = 0; i < n; i += FOUR) {
        uint64_t hits = 0;
        for (uint32_t q = 0; q < 4; q++) hits |= word_of(from(keys(load(x + i + q * WIDE)), low)) << q * WIDE;
        if (rare && !hits) continue;
        const uint32_t end = c + (uint32_t)__builtin_popcountll(hits);
        for (uint32_t k = 0; k < slots; k++, hits &= hits - 1) {
            const uint32_t j = i + (uint32_t)__builtin_ctzll(hits | 1ull << (FOUR - 1));
            idx[c + k] = (uint16_t)(base + j);
            val[c + k] = x[j];
        }
        for (c += slots; c < end; c++, hits &= hits - 1) {
            const uint32_t j = i + (uint32_t)__builtin_ctzll(hits);
            idx[c] = (uint16_t)(base + j);
            val[c] = x[j];
        }
        c = end;
    }
    return c;
}

static uint32_t capture(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                        uint32_t expected) {
    uint32_t c = 0, i = 0;
    if (key > 0x7fffffffu) return 0;
    if (expected < A_FEW) {
        i = n / FOUR * FOUR;
        if (expected < 4)
            c = capture_few(x, i, key, base, idx, val, 1, 1);
        else if (expected < A_FEW / 3)
            c = capture_few(x, i, key, base, idx, val, (FOUR + 31) / 32, 0);
        else
            c = capture_few(x, i, key, base, idx, val, FOUR / 16, 0);
    }
#ifdef SID_HAS_AVX512
    const __m512i low = _mm512_set1_epi32((int)key - 1), step = _mm512_set1_epi32(16);
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    for (; i + 64 <= n; i += 64) {
        __mmask16 m[4];
        for (int j = 0; j < 4; j++) m[j] = _mm512_cmpgt_epi32_mask(keys16(x + i + 16 * j), low);
        __m512i at = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(base + i)));
        for (int j = 0; j < 4; j++) {
            _mm512_storeu_ps(val + c, _mm512_maskz_compress_ps(m[j], _mm512_loadu_ps(x + i + 16 * j)));
            _mm256_storeu_si256((__m256i *)(void *)(idx + c),
                                _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m[j], at)));
            c += bits16(m[j]);
            at = _mm512_add_epi32(at, step);
        }
    }
#elif defined(SID_HAS_AVX2)
    const __m256i low = _mm256_set1_epi32((int)key - 1), lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    for (; i + 32 <= n; i += 32) {
        __m256i in[4];
        for (int j = 0; j < 4; j++) in[j] = _mm256_cmpgt_epi32(keys8(x + i + 8 * j), low);
        const __m256i any = _mm256_or_si256(_mm256_or_si256(in[0], in[1]), _mm256_or_si256(in[2], in[3]));
        if (_mm256_testz_si256(any, any)) continue;
        for (uint32_t j = 0; j < 4; j++) {
            const unsigned m = mask8(in[j]);
            const __m256i left = left8(m);
            const __m256i at =
                _mm256_permutevar8x32_epi32(_mm256_add_epi32(lanes, _mm256_set1_epi32((int)(base + i + 8 * j))), left);
            _mm256_storeu_ps(val + c, _mm256_permutevar8x32_ps(_mm256_loadu_ps(x + i + 8 * j), left));
            _mm_storeu_si128((__m128i *)(void *)(idx + c),
                             _mm_packus_epi32(_mm256_castsi256_si128(at), _mm256_extracti128_si256(at, 1)));
            c += (unsigned)__builtin_popcount(m);
        }
    }
#endif
    for (; i < n; i++) {
        idx[c] = (uint16_t)(base + i);
        val[c] = x[i];
        c += sid_key(x[i]) >= key;
    }
    return c;
}

static uint64_t filter(const uint16_t *idx, const float *val, uint64_t n, uint32_t key, uint16_t *idx_out,
                       float *val_out, uint64_t room) {
    uint64_t c = 0, i = 0;
    if (key > 0x7fffffffu) return 0;
#ifdef SID_HAS_AVX512
    const __m512i low = _mm512_set1_epi32((int)key - 1);
    for (; i + 16 <= n && c + 16 <= room; i += 16) {
        const __m512 v = _mm512_loadu_ps(val + i);
        const __m512i at = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(const void *)(idx + i)));
        const __mmask16 m = _mm512_cmpgt_epi32_mask(keys16(val + i), low);
        _mm512_storeu_ps(val_out + c, _mm512_maskz_compress_ps(m, v));
        _mm256_storeu_si256((__m256i *)(void *)(idx_out + c),
                            _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, at)));
        c += bits16(m);
    }
#elif defined(SID_HAS_AVX2)
    const __m256i low = _mm256_set1_epi32((int)key - 1);
    for (; i + 8 <= n && c + 8 <= room; i += 8) {
        const __m256 v = _mm256_loadu_ps(val + i);
        const unsigned m = mask8(_mm256_cmpgt_epi32(keys8(val + i), low));
        const __m256i left = left8(m);
        const __m256i at = _mm256_permutevar8x32_epi32(
            _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)(idx + i))), left);
        _mm256_storeu_ps(val_out + c, _mm256_permutevar8x32_ps(v, left));
        _mm_storeu_si128((__m128i *)(void *)(idx_out + c),
                         _mm_packus_epi32(_mm256_castsi256_si128(at), _mm256_extracti128_si256(at, 1)));
        c += (unsigned)__builtin_popcount(m);
    }
#endif
    for (; i < n; i++) {
        if (sid_key(val[i]) < key) continue;
        if (c == room) return c;
        const uint16_t at = idx[i];
        const float v = val[i];
        idx_out[c] = at;
        val_out[c++] = v;
    }
    return c;
}

static uint64_t band(const float *val, uint64_t n, uint32_t lo, uint32_t hi, uint32_t *out, uint64_t *above) {
    uint64_t c = 0, over = 0, i = 0;
#ifdef SID_HAS_AVX512
    const __m512i a = _mm512_set1_epi32((int)lo), b = _mm512_set1_epi32((int)hi);
    for (; i + 16 <= n; i += 16) {
        const __m512i k = keys16(val + i);
        const __mmask16 ge = _mm512_cmpge_epu32_mask(k, b), in = _mm512_mask_cmpge_epu32_mask((__mmask16)~ge, k, a);
        _mm512_storeu_si512(out + c, _mm512_maskz_compress_epi32(in, k));
        c += bits16(in);
        over += bits16(ge);
    }
#elif defined(SID_HAS_AVX2)
    if (hi <= 0x7fffffffu) {
        const __m256i a = _mm256_set1_epi32((int)lo - 1), b = _mm256_set1_epi32((int)hi - 1);
        for (; i + 8 <= n; i += 8) {
            const __m256i k = keys8(val + i);
            const unsigned ge = mask8(_mm256_cmpgt_epi32(k, b)), in = mask8(_mm256_cmpgt_epi32(k, a)) & ~ge;
            _mm256_storeu_si256((__m256i *)(void *)(out + c), _mm256_permutevar8x32_epi32(k, left8(in)));
            c += (unsigned)__builtin_popcount(in);
            over += (unsigned)__builtin_popcount(ge);
        }
    }
#endif
    for (; i < n; i++) {
        const uint32_t k = sid_key(val[i]);
        out[c] = k;
        c += k >= lo && k < hi;
        over += k >= hi;
    }
    *above = over;
    return c;
}

/* Appends base + the place of each one of a word; may write 16 more. */
static uint32_t places_of(uint64_t word, uint32_t base, uint16_t *at) {
    uint32_t c = 0;
#if defined(SID_HAS_AVX512)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)base));
    for (int j = 0; j < 64; j += 16) {
        const __mmask16 m = (__mmask16)(word >> j);
        _mm256_storeu_si256((__m256i *)(void *)(at + c), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, here)));
        here = _mm512_add_epi32(here, _mm512_set1_epi32(16));
        c += (unsigned)__builtin_popcount(m);
    }
#elif defined(SID_HAS_AVX2)
    __m128i here = _mm_set1_epi16((short)base);
    for (int j = 0; j < 64; j += 8) {
        const uint64_t m = word >> j & 0xff;
        const uint64_t some = _pext_u64(0x0706050403020100ull, _pdep_u64(m, 0x0101010101010101ull) * 0xff);
        const __m128i places = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)some));
        _mm_storeu_si128((__m128i *)(void *)(at + c), _mm_add_epi16(places, here));
        here = _mm_add_epi16(here, _mm_set1_epi16(8));
        c += (uint32_t)__builtin_popcountll(m);
    }
#else
    for (; word; word &= word - 1) at[c++] = (uint16_t)(base + (uint32_t)__builtin_ctzll(word));
#endif
    return c;
}

/* Four fields of b <= 12 bits, from bit `at` on, in 16 bits each. Loads 8 bytes. */
static uint64_t four_fields(const uint8_t *p, uint64_t at, uint32_t b) {
    const uint64_t mask = (1ull << b) - 1;
    uint64_t x;
    memcpy(&x, p + at / 8, 8);
    x >>= at % 8;
#ifdef SID_HAS_AVX2
    return _pdep_u64(x, mask * 0x0001000100010001ull);
#else
    return (x & mask) | (x >> b & mask) << 16 | (x >> 2 * b & mask) << 32 | (x >> 3 * b & mask) << 48;
#endif
}

typedef uint16_t vs __attribute__((vector_size(BYTES)));

/* By some words at a time: places, then low bits, then both together, so that no load waits for stores half as wide. */
static uint32_t unpack(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx) {
    enum {
        WORDS = 16,
        SIDE = BYTES / 2
    };
    vs lanes;
    for (uint16_t j = 0; j < SIDE; j++) lanes[j] = j;
    const uint32_t bits = from->bits;
    const uint64_t first =
        from->pos + from->runs; /* what entry pos's bit would be at, were it in the tile's first run */
    const uint64_t runs = (end + (1ull << bits) - 1) >> bits; /* so many zeros later there is no entry below `end` */
    uint64_t w = from->from / 64, seen = ~0ull << from->from % 64;
    uint32_t i = 0;
    int there = from->from >= from->stop;
    while (!there && i < most && 64 * w < from->stop) {
        uint16_t low[64 * WORDS + SIDE];
        const uint32_t base = (uint32_t)(64 * w - first) - i;
        uint32_t c = 0;
        for (uint32_t q = 0; q < WORDS && !there && 64 * w < from->stop && i + c < most; q++, w++) {
            uint64_t word = from->high[w] & seen;
            seen = ~0ull;
            if (w == from->stop / 64) word &= (1ull << from->stop % 64) - 1;
            c += places_of(word, base + 64 * q, idx + i + c);
            there = 64 * (w + 1) - first - i - c >= runs;
        }
        for (uint32_t j = 0; j < c; j += 4) {
            const uint64_t four = four_fields(from->low, (from->pos + i + j) * bits, bits);
            memcpy(low + j, &four, 8);
        }
        vs entry = lanes;
        for (uint32_t j = 0; j < c; j += SIDE) {
            vs x, y;
            memcpy(&x, idx + i + j, sizeof x);
            memcpy(&y, low + j, sizeof y);
            x = (x - entry) * (uint16_t)(1u << bits) | y;
            memcpy(idx + i + j, &x, sizeof x);
            entry += SIDE;
        }
        if (c > most - i) c = most - i;
        for (i += c; c && idx[i - 1] >= end; c--, i--) there = 1;
    }
    return i;
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
    tallies count_a = {0}, count_b = {0};
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
    if (smallest < 0x800000) { /* zeros, or denormal ones; what fills up a row is neither */
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

/* ---- grids -------------------------------------------------------------------------------------------------------
 * A loop for each kind and rounding; the arithmetic is that of bits.h, which does what is left at the end. */

INLINE vi to_int(vf v) { return __builtin_convertvector(v, vi); }
INLINE vf to_float(vi v) { return __builtin_convertvector(v, vf); }
INLINE vi load_bytes(const uint8_t *p) {
#if BYTES == 64
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif BYTES == 32
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#else
    return (vi){p[0], p[1], p[2], p[3]};
#endif
}
INLINE vi load_signed_bytes(const uint8_t *p) {
#if BYTES == 64
    return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(const void *)p));
#elif BYTES == 32
    return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
#else
    return (vi){(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
#endif
}
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
    const __m256i *x = (const __m256i *)v, order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const __m256i a = with_sign ? _mm256_packs_epi32(x[0], x[1]) : _mm256_packus_epi32(x[0], x[1]);
    const __m256i b = with_sign ? _mm256_packs_epi32(x[2], x[3]) : _mm256_packus_epi32(x[2], x[3]);
    const __m256i all = with_sign ? _mm256_packs_epi16(a, b) : _mm256_packus_epi16(a, b);
    _mm256_storeu_si256((__m256i *)(void *)p, _mm256_permutevar8x32_epi32(all, order));
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

/* What l = x * inverse becomes. */
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
/* What an integer grid makes of l, as a float: to nearest without leaving floats. */
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
        for (; i + WIDE <= end; i += WIDE) {
            const vf v = load(x + i), l = v * inverse;
            const vi draw = load_draws(draws, i, rounding);
            store(x + i, v - (kind == SID_GRID_INTEGERS ? whole_of(l, top, rounding, draw)
                                                        : (vf)float8s_of(l, top, kind, rounding, draw, 1)) *
                                 scale);
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
    EACH_GRID(QUANTISE)
}

static void take_out(float *x, uint32_t n, const sid_grid *g, const void *draws) {
#define TAKE_OUT(kind, rounding) take_out_as(x, n, g, draws, kind, rounding)
    EACH_GRID(TAKE_OUT)
}

/* ---- fields: `width` bits an element, one after the other ------------------------------------------------------- */

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

typedef struct adding {
    const sid_codes *from;
    uint32_t count, block, width;
    sid_grid_kind kind;
    spread s;
    vi number; /* what the fields of up to LOOKED_UP bits stand for */
} adding;

/* ABREAST elements of all payloads from the i-th on. halves: by half floats; returns 1, nothing done, where a code is none. */
INLINE int add_some(const adding *a, float *out, uint32_t i, int halves) {
    const uint32_t width = a->width, b = a->block ? i / a->block : 0;
    const int integers = a->kind == SID_GRID_INTEGERS, look = integers && width <= LOOKED_UP;
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
        const vf table = to_float(a->number) * scale;
        for (uint32_t q = 0; q < 4; q++) {
            const uint32_t at = i + q * WIDE;
            if (look)
                sum[q] += look_up(p, at, width, &a->s, table);
            else if (integers)
                sum[q] += to_float(width == 8 ? load_signed_bytes(p + at) : load_fields(p, at, &a->s)) * scale;
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
    const int integers = kind == SID_GRID_INTEGERS;
    const int32_t down = 32 - (int32_t)width;
    adding a = {from, count, block, width, kind, spread_of(width), {0}};
    uint32_t i = 0;
    for (int32_t j = 0; j < WIDE; j++) a.number[j] = (int32_t)((uint32_t)j << down) >> down;
    if (integers && width <= LOOKED_UP) a.s.up = down - a.s.up;
    for (; i + ABREAST + slack <= n; i += ABREAST)
        if (add_some(&a, out, i, BYTES >= 32)) (void)add_some(&a, out, i, 0);
    for (uint32_t r = 0; r < count; r++)
        for (uint32_t j = i; j < n; j++) {
            const uint32_t c = field(from[r].code, j, width);
            float scale;
            memcpy(&scale, from[r].scale + 4 * (block ? j / block : 0), 4);
            out[j] += scale * (integers ? (float)((int32_t)(c << down) >> down) : sid_f8_to_f32(c, mantissa_of(kind)));
        }
}
static void add_codes(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block, sid_grid_kind kind,
                      uint32_t width) {
    if (kind == SID_GRID_E4M3)
        add_as(from, count, out, n, block, SID_GRID_E4M3, 8);
    else if (kind == SID_GRID_E5M2)
        add_as(from, count, out, n, block, SID_GRID_E5M2, 8);
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
#if BYTES >= 32
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
        const sid_grid g = {SID_GRID_INTEGERS, SID_ROUND_DRAW16, 1.0f, 0, NULL, &inverse};
        uint8_t code[SID_TILE];
        take = n - i < SID_TILE ? n - i : SID_TILE;
        quantise_as(x + i, take, &g, draws + i, code, SID_GRID_INTEGERS, SID_ROUND_DRAW16);
        pack(code, take, 2, out + i / 4);
    }
}

static void to_levels(const float *x, uint32_t n, const sid_levels *levels, uint8_t *code) {
    const sid_levels l = *levels;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]);
        code[i] = (uint8_t)(sid_level_of(u & 0x7fffffffu, &l) + (u >> 31) * (l.top + 1));
    }
}

static void take_levels(float *x, uint32_t n, uint32_t key, const sid_levels *levels) {
    const sid_levels l = *levels;
    const int32_t from = (int32_t)(key > 0x7fffffffu ? 0x7fffffffu : key);
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    if (l.top < 16) { /* what each level stands for in one register */
        uint32_t what[16];
        for (uint32_t c = 0; c < 16; c++) what[c] = sid_level_key(c, &l);
        const __m512i table = _mm512_loadu_si512(what), base = _mm512_set1_epi32((int)l.base),
                      top = _mm512_set1_epi32((int)l.top), low = _mm512_set1_epi32(from);
        for (; i + 16 <= n; i += 16) {
            const __m512 v = _mm512_loadu_ps(x + i);
            const __m512i k = keys16(x + i);
            const __m512 steps =
                _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(k, base)), _mm512_set1_ps(l.inverse));
            __m512i c = _mm512_cvttps_epi32(_mm512_add_ps(steps, _mm512_set1_ps(0.5f)));
            c = _mm512_min_epi32(_mm512_max_epi32(c, _mm512_setzero_si512()), top);
            const __m512i sign = _mm512_xor_si512(_mm512_castps_si512(v), k);
            const __m512 sent = _mm512_castsi512_ps(_mm512_or_si512(_mm512_permutexvar_epi32(c, table), sign));
            _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(v, _mm512_cmpge_epi32_mask(k, low), v, sent));
        }
    }
#endif
    for (; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]), k = u & 0x7fffffffu;
        const uint32_t sent = sid_level_key(sid_level_of(k, &l), &l) | (u & 0x80000000u);
        x[i] -= sid_bits_f32((int32_t)k >= from ? sent : 0u);
    }
}

/* The low bits of entries, one after the other. Stores run over by up to 8 bytes. */
static uint8_t *pack_low(const uint16_t *idx, uint64_t n, uint32_t bits, uint8_t *out) {
    const uint64_t mask = (1u << bits) - 1;
    uint64_t held = 0, i = 0;
    uint32_t have = 0;
    for (; i < n; i += 4) {
        const uint32_t some = n - i < 4 ? (uint32_t)(n - i) : 4;
        uint64_t four = 0;
        if (some == 4) {
#ifdef SID_HAS_AVX2
            memcpy(&four, idx + i, 8);
            four = _pext_u64(four, mask * 0x0001000100010001ull);
#else
            four = (idx[i] & mask) | (idx[i + 1] & mask) << bits | (idx[i + 2] & mask) << 2 * bits |
                   (idx[i + 3] & mask) << 3 * bits;
#endif
        } else
            for (uint32_t j = 0; j < some; j++) four |= (idx[i + j] & mask) << j * bits;
        held |= four << have; /* at most 7 + 4 * 12 bits */
        memcpy(out, &held, 8);
        have += some * bits;
        out += have / 8;
        held >>= have & ~7u;
        have &= 7;
    }
    return out + (have > 0);
}

/* ---- a few rows: y_k is row k of r, `stride` floats apart ------------------------------------------------------- */

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

static void clamp(const float *x, float *y, uint32_t n, float max) {
    uint32_t i = 0;
    const vi top = (vi){0} + (int32_t)sid_f32_bits(max);
    for (; i + WIDE <= n; i += WIDE) {
        const vf v = load(x + i);
        const vi k = keys(v);
        store(y + i, (vf)(either((k > top) & (k < (int32_t)SID_KEY_INF), top, k) | (bits(v) & ~0x7fffffff)));
    }
    for (; i < n; i++) {
        const float v = x[i];
        y[i] = sid_key(v) >= SID_KEY_INF ? v : v > max ? max : v < -max ? -max : v;
    }
}

static void f32_to_f16(const float *x, uint16_t *y, uint32_t n) {
    uint32_t i = 0;
#if defined(SID_HAS_AVX2) || defined(SID_HAS_AVX512)
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(void *)(y + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(x + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#endif
    for (; i < n; i++) y[i] = sid_f32_to_f16(x[i]);
}

static void f16_to_f32(const uint16_t *x, float *y, uint32_t n) {
    uint32_t i = 0;
#if defined(SID_HAS_AVX2) || defined(SID_HAS_AVX512)
    for (; i + 8 <= n; i += 8)
        _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)(x + i))));
#endif
    for (; i < n; i++) y[i] = sid_f16_to_f32(x[i]);
}

static void f32_to_bf16(const float *x, uint16_t *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = sid_f32_to_bf16(x[i]);
}

static void bf16_to_f32(const uint16_t *x, float *y, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) y[i] = sid_bf16_to_f32(x[i]);
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
/* Of a finite number: to_bf16's, in the upper half of each word. */
static inline __m512i rounded_bf16(__m512i u) {
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
}
static inline int any_over(const float *x, __m512i top) { return _mm512_cmpgt_epi32_mask(keys16(x), top) != 0; }
static inline __m512 of_half(__m256i h, int bf16) {
    return bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)) : _mm512_cvtph_ps(h);
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

/* What is beyond max, and no finite number, is rare: the rest takes half the instructions. */
static void half_body(const float *x, uint16_t *y, uint32_t n, float s, float max, int bf16) {
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    const __m512i top = _mm512_set1_epi32((int)sid_f32_bits(max));
    for (; i + 16 <= n; i += 16) {
        const __m512i u = _mm512_castps_si512(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(s)));
        const __m256i half = any_over(x + i, top) ? to_half(clamped(x + i, max, s), bf16)
                             : bf16               ? _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded_bf16(u), 16))
                                                  : to_half(u, 0);
        _mm256_storeu_si256((__m256i *)(void *)(y + i), half);
    }
#endif
    for (; i < n; i += CHUNK) half_chunk(x + i, y + i, n - i < CHUNK ? n - i : CHUNK, s, max, bf16);
}

static void half_keep(float *x, uint32_t n, uint32_t key, float s, float inverse, float max, int bf16) {
    const int32_t from = (int32_t)(key > 0x7fffffffu ? 0x7fffffffu : key);
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    const __m512i top = _mm512_set1_epi32((int)sid_f32_bits(max)), upper = _mm512_set1_epi32((int)0xffff0000u);
    for (; i + 16 <= n; i += 16) {
        const __m512 v = _mm512_loadu_ps(x + i);
        const __m512i u = _mm512_castps_si512(_mm512_mul_ps(v, _mm512_set1_ps(s)));
        const __m512 half = any_over(x + i, top) ? of_half(to_half(clamped(x + i, max, s), bf16), bf16)
                            : bf16               ? _mm512_castsi512_ps(_mm512_and_si512(rounded_bf16(u), upper))
                                                 : of_half(to_half(u, 0), 0);
        const __m512 sent = _mm512_mul_ps(half, _mm512_set1_ps(inverse));
        const __mmask16 m = _mm512_cmpge_epi32_mask(keys16(x + i), _mm512_set1_epi32(from));
        _mm512_storeu_ps(x + i, _mm512_mask_sub_ps(v, m, v, sent));
    }
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

/* ---- signs ----------------------------------------------------------------------------------------------------- */

/* By integers: flushing denormals to zero must not change a sign. */
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
        uint64_t w = 0;
        for (uint32_t j = 0; j < 64; j += WIDE) w |= negative_mask(load(x + i + j)) << j;
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
        for (uint32_t j = 0; j < 64; j += WIDE) {
            vi drawn;
            memcpy(&drawn, u + i + j, sizeof drawn);
            const vf v = load(x + i + j), least = -.5f - (vf)lower(bits((vf)keys(v) * chance), always);
            w |= (negative_mask(v) ^ mask_of(drawn < __builtin_convertvector(least, vi))) << j;
        }
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

/* What each pattern of up to four ranks' signs comes to. */
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

static void fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

INLINE vu product(vu a, vu b) { /* of the lower halves */
#if BYTES == 64
    return (vu)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (vu)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (vu)_mm_mul_epu32((__m128i)a, (__m128i)b);
#elif defined(__aarch64__) /* compilers would multiply longs one by one */
    return (vu)vmull_u32(vmovn_u64((uint64x2_t)a), vmovn_u64((uint64x2_t)b));
#else
    return (a & 0xffffffff) * (b & 0xffffffff);
#endif
}

/* A long of data has two words and one of `keys` their key: two products. */
enum {
    AT_ONCE = 8
}; /* registers */
INLINE void add_products(const uint32_t *w, const uint64_t *key, vu *even, vu *odd) {
    vu x, k;
    memcpy(&x, w, BYTES);
    memcpy(&k, __builtin_assume_aligned(key, BYTES), BYTES);
    *even += product(x, k);
    *odd += product(x >> 32, k);
}

static uint64_t checksum(const uint32_t *w, uint64_t from, uint64_t count) {
    uint64_t total = 0;
    while (count) {
        const uint64_t at = from % SID_SUM_BLOCK, room = SID_SUM_BLOCK - at, len = count < room ? count : room;
        const uint32_t *const end = w + len;
        const uint64_t *key = sid_sum_pairs + at / 2;
        uint64_t evens = 0, odds = 0;
        vu even = {0}, odd = {0};
        for (; end - w >= AT_ONCE * WIDE; w += AT_ONCE * WIDE, key += AT_ONCE * LONGS)
            for (int q = 0; q < AT_ONCE; q++) add_products(w + q * WIDE, key + q * LONGS, &even, &odd);
        for (; end - w >= WIDE; w += WIDE, key += LONGS) add_products(w, key, &even, &odd);
        for (; w < end; w += 2, key++) {
            evens += w[0] * *key;
            odds += w[1] * *key;
        }
        for (int j = 0; j < LONGS; j++) {
            evens += even[j];
            odds += odd[j];
        }
        total += (evens + odds * SID_SUM_ODD) * sid_sum_block(from / SID_SUM_BLOCK);
        from += len;
        count -= len;
    }
    return total;
}

/* ---- random bits -------------------------------------------------------------------------------------------------
 * A word of a block in the lower half of each long: the upper half is whatever a round leaves there, which no product
 * reads and no xor carries down. So a round is two products, two shifts and two xors of three for a register of blocks,
 * and SETS of them hide one another's latency: a product's is most of a round. */
enum {
    SETS = BYTES == 64 ? 4 : 2, /* four registers each */
    BLOCKS = SETS * LONGS
};

/* A register of blocks in the order of memory. */
INLINE void lay(uint8_t *out, vu c0, vu c1, vu c2, vu c3) {
    const vu p = (c0 & 0xffffffff) | c1 << 32, r = (c2 & 0xffffffff) | c3 << 32;
#if BYTES == 64
    const vu x[2] = {(vu)_mm512_unpacklo_epi64((__m512i)p, (__m512i)r),
                     (vu)_mm512_unpackhi_epi64((__m512i)p, (__m512i)r)};
#elif BYTES == 32
    const vu x[2] = {(vu)_mm256_unpacklo_epi64((__m256i)p, (__m256i)r),
                     (vu)_mm256_unpackhi_epi64((__m256i)p, (__m256i)r)};
#else
    const vu x[2] = {{p[0], r[0]}, {p[1], r[1]}};
#endif
    memcpy(out, x, sizeof x);
}

/* Writes 4 * BLOCKS words. Long j of a set is block j / 2, odd ones LONGS / 2 more: then interleaving pairs of longs is
 * the order of memory. */
INLINE void philox(const sid_draw *d, uint64_t at, void *out) {
    const vu m0 = (vu){0} + 0xd2511f53u, m1 = (vu){0} + 0xcd9e8d57u;
    vu c0[SETS], c1[SETS], c2[SETS], c3[SETS];
    uint32_t k0 = d->salt, k1 = d->group;
    vu order;
    for (uint32_t j = 0; j < LONGS; j++) order[j] = j / 2 + j % 2 * (LONGS / 2);
    for (int q = 0; q < SETS; q++) {
        c0[q] = order + (at + (uint32_t)q * LONGS);
        c1[q] = c0[q] >> 32;
        c2[q] = (vu){0} + d->step;
        c3[q] = c2[q] >> 32;
    }
    for (int round = 0; round < SID_ROUNDS; round++) {
        for (int q = 0; q < SETS; q++) {
            const vu a = product(c0[q], m0), b = product(c2[q], m1);
            c0[q] = b >> 32 ^ c1[q] ^ k0;
            c2[q] = a >> 32 ^ c3[q] ^ k1;
            c1[q] = b;
            c3[q] = a;
        }
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    /* written out: arrays that a loop indexes go through memory */
    uint8_t *to = out;
    lay(to, c0[0], c1[0], c2[0], c3[0]);
    lay(to + 2 * BYTES, c0[1], c1[1], c2[1], c3[1]);
    if (SETS > 2) {
        lay(to + 4 * BYTES, c0[SETS - 2], c1[SETS - 2], c2[SETS - 2], c3[SETS - 2]);
        lay(to + 6 * BYTES, c0[SETS - 1], c1[SETS - 1], c2[SETS - 1], c3[SETS - 1]);
    }
}

static void draw32(const sid_draw *d, uint64_t at, uint32_t len, uint32_t *out) {
    for (uint32_t i = 0; i < len; i += 4 * BLOCKS) philox(d, (at + i) / 4, out + i);
}

static void draw16(const sid_draw *d, uint64_t at, uint32_t len, uint16_t *out) {
    for (uint32_t i = 0; i < len; i += 8 * BLOCKS) philox(d, (at + i) / 8, out + i); /* the low half is the first */
}

#define GLUE2(a, b) a##b
#define GLUE(a, b) GLUE2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

const sid_simd GLUE(sid_simd_, SID_ISA) = {
    .name = TEXT(SID_ISA),
    .finite = finite,
    .add_kept = add_kept,
    .add_weighted = add_weighted,
    .add_velocity = add_velocity,
    .zero_from = zero_from,
    .one_side = one_side,
    .subtract_from = subtract_from,
    .capture = capture,
    .filter = filter,
    .band = band,
    .unpack = unpack,
    .sum_abs = sum_abs,
    .tail_sums = tail_sums,
    .sum_squares = sum_squares,
    .moments = moments,
    .two_moments = two_moments,
    .square_sums = square_sums,
    .probe_sums = probe_sums,
    .sum_log2 = sum_log2,
    .max_key = max_key,
    .block_keys = block_keys,
    .quantise = quantise,
    .take_out = take_out,
    .add_codes = add_codes,
    .pack = pack,
    .ternary = ternary,
    .to_levels = to_levels,
    .take_levels = take_levels,
    .pack_low = pack_low,
    .dots = dots,
    .add_rows = add_rows,
    .add_outer = add_outer,
    .products = products,
    .take_columns = take_columns,
    .clamp = clamp,
    .f32_to_f16 = f32_to_f16,
    .f32_to_bf16 = f32_to_bf16,
    .f16_to_f32 = f16_to_f32,
    .bf16_to_f32 = bf16_to_f32,
    .scale = scale,
    .half_body = half_body,
    .half_keep = half_keep,
    .drain = drain,
    .draw16 = draw16,
    .draw32 = draw32,
    .signs = signs,
    .draw_signs = draw_signs,
    .sign_sums = sign_sums,
    .take_signs = take_signs,
    .sum_signs = sum_signs,
    .vote = vote,
    .merge = merge,
    .fence = fence,
    .checksum = checksum,
};
