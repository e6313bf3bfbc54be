/* simd.c: what the other fragments stand on: the compilers' own vector types, as wide as this variant's registers, with loads and
 * stores, keys (|x| as an integer), comparisons, and masks as numbers.
 *
 * No function here rounds: they move bits, compare integers, or convert float32 to float64, which is exact. */

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
#ifndef __AARCH64EB__
#define SID_HAS_NEON 1
#endif
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

/* The lesser of signed integers. */
static inline vi lower(vi a, vi b) {
#if BYTES == 64
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#elif defined(SID_HAS_NEON)
    return (vi)vminq_s32((int32x4_t)a, (int32x4_t)b);
#else
    return either(a < b, a, b);
#endif
}
static inline vi higher(vi a, vi b) {
#if BYTES == 64
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif BYTES == 32
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#elif defined(SID_HAS_NEON)
    return (vi)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
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
#elif defined(SID_HAS_NEON)
    return vaddvq_u32((uint32x4_t)(m & (vi){1, 2, 4, 8}));
#else
    uint64_t bit = 0;
    for (int j = 0; j < WIDE; j++) bit |= (uint64_t)(m[j] & 1) << j;
    return bit;
#endif
}

#ifdef SID_HAS_NEON
/* Bit k of byte j: bit 8 j + k of the word, as a byte of all ones or zeros. */
INLINE uint8x16_t bit_weights(void) { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201u)); }
/* The 16 bits of each of four masks of bytes. */
INLINE uint64_t word_of_bytes(const uint8x16_t m[4]) {
    uint8x16_t own[4];
    for (int q = 0; q < 4; q++) own[q] = vandq_u8(m[q], bit_weights());
    const uint8x16_t four = vpaddq_u8(vpaddq_u8(own[0], own[1]), vpaddq_u8(own[2], own[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(four, four)), 0);
}
/* Bit j: element j of 16 masks is set. */
INLINE uint64_t word_of_masks(const vi m[16]) {
    uint8x16_t bytes[4];
    for (int q = 0; q < 4; q++) {
        const vi *const p = m + 4 * q;
        const uint16x8_t a = vuzp1q_u16((uint16x8_t)p[0], (uint16x8_t)p[1]);
        const uint16x8_t b = vuzp1q_u16((uint16x8_t)p[2], (uint16x8_t)p[3]);
        bytes[q] = vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b);
    }
    return word_of_bytes(bytes);
}
#endif

/* x where key < limit, else 0. */
static inline vf below(vf x, vi key, vi limit) {
#if BYTES == 64
    return (vf)_mm512_maskz_mov_ps(_mm512_cmplt_epi32_mask((__m512i)key, (__m512i)limit), (__m512)x);
#else
    return (vf)(bits(x) & (key < limit));
#endif
}
static inline int32_t signed_key(uint32_t key) { return (int32_t)(key > 0x7fffffffu ? 0x7fffffffu : key); }
static inline vi wide_key(uint32_t key) { return (vi){0} + signed_key(key); }

enum {
    FOUR = 4 * WIDE
};

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

/* Lanes of a comparison: sums and counts of these alone. A zero is added to the others where there are no masks. */
#if BYTES == 64
typedef __mmask16 chosen;
INLINE chosen from(vi key, vi low) { return _mm512_cmpge_epi32_mask((__m512i)key, (__m512i)low); }
INLINE uint64_t word_of(chosen m) { return number(m); } /* bit j: lane j */
INLINE vf plus(vf sum, chosen m, vf x) { return (vf)_mm512_mask_add_ps((__m512)sum, m, (__m512)sum, (__m512)x); }
typedef uint32_t counts;
INLINE counts counted(counts c, chosen m) { return c + (uint32_t)__builtin_popcount(number(m)); }
INLINE uint32_t sum_of(counts c) { return c; }
#else
typedef vi chosen;
INLINE chosen from(vi key, vi low) { return key >= low; }
INLINE uint64_t word_of(chosen m) { return mask_of(m); }
INLINE vf plus(vf sum, chosen m, vf x) { return sum + (vf)(bits(x) & m); }
typedef vi counts;
INLINE counts counted(counts c, chosen m) { return c - m; }
INLINE uint32_t sum_of(counts c) { return total(c); }
#endif

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
#endif
#if (defined(SID_HAS_AVX2) && !defined(SID_HAS_AVX512)) || defined(SID_HAS_NEON)
/* Lane numbers of the set bits of a byte, packed to the left, in a byte each. A table: processors that do pext and pdep in
 * microcode (AMD's before Zen 3) take tens of cycles for them. */
#define LANE(m, j) ((m) >> (j) & 1u ? (uint64_t)(j) << 8 * __builtin_popcount((m) & ((1u << (j)) - 1u)) : 0)
#define LEFT(m) (LANE(m, 0) | LANE(m, 1) | LANE(m, 2) | LANE(m, 3) | LANE(m, 4) | LANE(m, 5) | LANE(m, 6) | LANE(m, 7))
#define LEFT4(m) LEFT(m), LEFT((m) + 1u), LEFT((m) + 2u), LEFT((m) + 3u)
#define LEFT16(m) LEFT4(m), LEFT4((m) + 4u), LEFT4((m) + 8u), LEFT4((m) + 12u)
#define LEFT64(m) LEFT16(m), LEFT16((m) + 16u), LEFT16((m) + 32u), LEFT16((m) + 48u)
static const uint64_t left_of[256] = {LEFT64(0u), LEFT64(64u), LEFT64(128u), LEFT64(192u)};
#endif
#if defined(SID_HAS_AVX2) && !defined(SID_HAS_AVX512)
static __m128i left_bytes(unsigned m) { return _mm_loadl_epi64((const __m128i *)(const void *)(left_of + m)); }
static __m256i left8(unsigned m) { return _mm256_cvtepu8_epi32(left_bytes(m)); }
#endif
