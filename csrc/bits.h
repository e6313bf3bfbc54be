/* Bit views of floats, the half and 8-bit formats, rounding to integers. Shared by host and device: integer arithmetic, and
 * float operations that IEEE 754 defines to the last bit, so that every compiler and instruction set gives the same bits.
 * Conversions to half round to nearest, ties to even; NaN stays NaN, Inf stays Inf. */
#ifndef SID_BITS_H
#define SID_BITS_H

#include <stdint.h>
#include <string.h>

#include "wire.h"

SID_HD uint32_t sid_f32_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}
SID_HD float sid_bits_f32(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}

/* Magnitude key: orders |x| as unsigned integers. Finite below SID_KEY_INF, Inf equal to it, NaN above. */
#define SID_KEY_INF 0x7f800000u
#define SID_KEY_NONE 0xffffffffu /* above every key: a rule that sends nothing */
SID_HD uint32_t sid_key(float x) { return sid_f32_bits(x) & 0x7fffffffu; }

/* The nearest finite number, of Inf too; NaN stays NaN. */
SID_HD float sid_saturated(float x) {
    const float max = 0x1.fffffep127f;
    return x > max ? max : x < -max ? -max : x;
}

SID_HD uint16_t sid_f32_to_bf16(float x) {
    const uint32_t u = sid_f32_bits(x);
    if ((u & 0x7fffffffu) > SID_KEY_INF) return (uint16_t)((u >> 16) | 0x40u); /* quiet NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
SID_HD float sid_bf16_to_f32(uint16_t h) { return sid_bits_f32((uint32_t)h << 16); }

SID_HD uint16_t sid_f32_to_f16(float x) {
    const uint32_t u = sid_f32_bits(x), sign = (u >> 16) & 0x8000u, k = u & 0x7fffffffu;
    if (k > SID_KEY_INF) return (uint16_t)(sign | 0x7e00u | ((k >> 13) & 0x1ffu));
    if (k >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* 65520 and above round to Inf */
    if (k < 0x38800000u) {                                   /* below 2^-14: subnormal half */
        if (k < 0x33000000u) return (uint16_t)sign;          /* below 2^-25 */
        const uint32_t shift = 126u - (k >> 23), m = (k & 0x7fffffu) | 0x800000u;
        const uint32_t q = m >> shift, rest = m & ((1u << shift) - 1u), half = 1u << (shift - 1u);
        return (uint16_t)(sign | (q + (rest > half || (rest == half && (q & 1u)))));
    }
    const uint32_t r = k - 0x38000000u; /* rebias 127 -> 15 */
    return (uint16_t)(sign | ((r + 0xfffu + ((r >> 13) & 1u)) >> 13));
}
SID_HD float sid_f16_to_f32(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000u) << 16;
    uint32_t e = (h >> 10) & 0x1fu, m = h & 0x3ffu;
    if (e == 0x1fu) return sid_bits_f32(sign | 0x7f800000u | (m ? 0x400000u : 0u) | (m << 13));
    if (e == 0) {
        if (m == 0) return sid_bits_f32(sign);
        e = 1;
        while (!(m & 0x400u)) {
            m <<= 1;
            e--; /* wraps below 1; the sum below is modulo 2^32 */
        }
        m &= 0x3ffu;
    }
    return sid_bits_f32(sign | ((e + 112u) << 23) | (m << 13));
}

/* Finite x, of at most the format's largest magnitude, becomes one of the format's two numbers beside it: the one farther
 * from zero if x's distance from the other one, in 2^-16 of the distance of the two, and 16 random bits add up to 2^16 or
 * more. Among float16's subnormal numbers x's distance is rounded; elsewhere it is exact. Returns the number as a float32;
 * NaN and Inf as they are. */
SID_HD float sid_bf16_dithered(float x, uint32_t draw) {
    const uint32_t u = sid_f32_bits(x);
    return (u & 0x7fffffffu) < SID_KEY_INF ? sid_bits_f32((u + draw) & 0xffff0000u) : x;
}
SID_HD float sid_f16_dithered(float x, uint32_t draw) {
    const uint32_t u = sid_f32_bits(x), k = u & 0x7fffffffu;
    if (k >= SID_KEY_INF) return x;
    if (k >= 0x38800000u) return sid_bits_f32((u + (draw >> 3)) & ~0x1fffu); /* 13 bits are cut off */
    const int32_t twice = (int32_t)(sid_bits_f32(k) * 0x1p41f);              /* in 2^-17 of the least number */
    const float low = (float)((twice + 2 * (int32_t)draw + 1) >> 17) * 0x1p-24f;
    return sid_bits_f32(sid_f32_bits(low) | (u & 0x80000000u));
}

/* ---- rounding to a grid ------------------------------------------------------------------------------------------
 * Without branches, so that loops over them are vectorised. */

/* To the nearest integer, ties to even; |x| < 2^22. The sum has no bits below 1, so that the addition rounds. */
SID_HD int32_t sid_nearest(float x) { return (int32_t)(sid_f32_bits(x + 0x1.8p23f) - 0x4b400000u); }

/* 0 <= a <= 128 to one of the integers beside it, up with probability a - floor(a): within 2^-17 and the rounding of a
 * sum below 128 with 16 random bits, never more than 2^-31 too rarely with 32. */
SID_HD int32_t sid_dither16(float a, uint32_t draw) { return (int32_t)(a + ((float)(int32_t)draw + 0.5f) * 0x1p-16f); }
SID_HD int32_t sid_dither32(float a, uint32_t draw) {
    const int32_t i = (int32_t)a;
    const float rest = a - (float)i; /* exact */
    return i + ((int32_t)(rest * 0x1p31f) > (int32_t)(draw >> 1));
}

/* ---- levels: magnitudes spaced evenly by key, so nearly by logarithm ------------------------------------------------
 * From the smallest magnitude sent to the largest in `top` steps. Where these would be longer than the width's longest step,
 * levels go down from the largest by that, and level 0 stands for zero. So a level is never farther from its magnitude than
 * zero is, and never twice or half of it, which makes their difference exact.
 *
 * Two levels, of 2 bits, are the means of the smaller and of the larger magnitudes sent instead, and what is sent is the
 * nearer one. So the squared error is at most that of sending nothing. */
typedef struct sid_levels {
    uint32_t base, step, top; /* level c has key base + c * step; of codes with a sign bit beside c, 0 to top */
    uint32_t zero;            /* level 0: ~0, or 0 where it stands for zero */
    uint32_t origin;          /* the nearest level is the rounded (key - origin) / step */
    float inverse;
} sid_levels;

#define SID_LEVEL_LEAST 0x1000000u /* the least base: keys below are no logarithms */
SID_HD uint32_t sid_level_top(uint32_t bits) { return (1u << (bits - 1u)) - 1u; }
SID_HD uint32_t sid_level_longest(uint32_t bits) {
    return bits == 8 ? 1u << 20 : bits == 4 ? 3u << 22 : 3u << 24;
} /* 1/8, 3/2 and 6 octaves */
SID_HD sid_levels sid_levels_from(uint32_t base, uint32_t step, uint32_t bits) {
    sid_levels l;
    l.base = base;
    l.step = step;
    l.top = sid_level_top(bits);
    l.zero = step == sid_level_longest(bits) ? 0u : ~0u;
    l.inverse = 1.0f / (float)(int32_t)step;
    l.origin = base;
    if (bits == 2) { /* so that the border lies in the middle */
        const float low = sid_bits_f32(base & l.zero), high = sid_bits_f32(base + step);
        l.origin = sid_key(0.5f * low + 0.5f * high) - step / 2;
    }
    return l;
}
/* 1 if an encoder may write these levels: all of them are finite, and none is denormal. */
SID_HD int sid_levels_sound(uint32_t base, uint32_t step, uint32_t bits) {
    return step && step <= sid_level_longest(bits) && base >= SID_LEVEL_LEAST && base < SID_KEY_INF &&
           base + sid_level_top(bits) * step < SID_KEY_INF;
}
SID_HD sid_levels sid_levels_between(uint32_t least, uint32_t most, uint32_t bits) {
    const uint32_t top = sid_level_top(bits), longest = sid_level_longest(bits), span = top * longest;
    if (least >= SID_LEVEL_LEAST && most - least < span) {
        const uint32_t step = most - least < top ? 1 : (most - least) / top, last = SID_KEY_INF - 1 - top * step;
        return sid_levels_from(least < last ? least : last, step, bits); /* the highest level is finite */
    }
    return sid_levels_from(most > SID_LEVEL_LEAST + span ? most - span : SID_LEVEL_LEAST, longest, bits);
}
/* Two levels: the key from which on magnitudes belong to the higher one. `count` magnitudes with this sum reach the key
 * `least`. 1.59362 is t = 2 - t / (e^t - 1), with which the means on both sides of least + t (mean - least) have the least
 * squared error of an exponential tail (Lloyd 1982). */
SID_HD uint32_t sid_levels_split(uint32_t least, double sum, uint64_t count) {
    const double from = (double)sid_bits_f32(least), most = 3.4028234663852886e38;
    const double over = count ? sum / (double)count - from : 0, split = from + (over > 0 ? 1.59362 * over : 0);
    return sid_key((float)(split < most ? split : most));
}
/* `above`, `many`: of those from the split on. */
SID_HD sid_levels sid_levels_of_means(uint32_t least, double sum, uint64_t count, double above, uint64_t many) {
    const double from = (double)sid_bits_f32(least);
    const double high = many ? above / (double)many : count ? sum / (double)count : 0;
    const double mean = count > many ? (sum - above) / (double)(count - many) : high, low = mean > from ? mean : from;
    return sid_levels_between(sid_key((float)(low < high ? low : high)), sid_key((float)high), 2);
}
/* Without branches; key below 2^31. */
SID_HD uint32_t sid_level_of(uint32_t key, const sid_levels *l) {
    int32_t c = (int32_t)((float)((int32_t)key - (int32_t)l->origin) * l->inverse + 0.5f);
    c = c < 0 ? 0 : c;
    return (uint32_t)(c > (int32_t)l->top ? (int32_t)l->top : c);
}
SID_HD uint32_t sid_level_key(uint32_t c, const sid_levels *l) { return (l->base + c * l->step) & (c ? ~0u : l->zero); }

/* ---- four numbers: a sign, and one of two magnitudes ----------------------------------------------------------------
 * The levels of the quantiser with the least mean squared error of a standard normal variable in 2 bits (Max 1960, table I;
 * Lloyd 1982). Bit 0 of a code is 1 if the magnitude is the high one, bit 1 if the number is negative. */
#define SID_FOUR_LOW 0.45278003f
#define SID_FOUR_HIGH 1.5104176f
SID_HD uint32_t sid_four_code(float x, uint32_t edge) { /* edge: the least key of the high magnitude */
    return (uint32_t)(sid_key(x) >= edge) | (sid_f32_bits(x) >> 30 & 2u);
}
SID_HD float sid_four_number(uint32_t code) {
    const float magnitude = code & 1u ? SID_FOUR_HIGH : SID_FOUR_LOW;
    return code & 2u ? -magnitude : magnitude;
}

/* ---- three numbers: -1, 0, 1, five of them in a byte -------------------------------------------------------------------
 * A code is a trit: 0, 1, and 2 for -1. Units of SID_TILE elements, and what is left at the end, are packed on their own, in
 * columns of bytes: trit k of byte j, its digit of 3^k, belongs to element k * columns + j of the unit. So the trits at one
 * place of neighbouring bytes are neighbours, too, and a vector register of bytes becomes five registers of elements. */
SID_HD uint32_t sid_three_code(float x, uint32_t edge) { /* edge: the least key of 1 and -1 */
    const uint32_t some = sid_key(x) >= edge;
    return some + (some & sid_f32_bits(x) >> 31);
}
SID_HD float sid_three_number(uint32_t code) { return (float)((int32_t)(code & 1u) - (int32_t)(code >> 1 & 1u)); }
/* Bytes of a unit of n elements, at most SID_TILE: a multiple of 16, so that no register has two columns. */
SID_HD uint32_t sid_trit_columns(uint32_t n) { return (n + 79) / 80 * 16; }
enum {
    SID_TRITS = 5,        /* in a byte */
    SID_TRIT_BYTES = 208, /* of a whole unit */
    SID_TRIT_MOST = 242   /* five twos */
};

/* ---- 8-bit floats: sign, exponent, `mantissa` bits (OCP 8-bit Floating Point Specification 1.0) --------------------
 * mantissa 3: E4M3, bias 7, largest 448, no Inf, one NaN. mantissa 2: E5M2, bias 15, largest 57344, Inf and NaN as IEEE. */
SID_HD float sid_f8_to_f32(uint32_t code, uint32_t mantissa) {
    const uint32_t shift = 23u - mantissa, k = code & 0x7fu, gap = mantissa == 3u ? 120u : 112u;
    const float low = (float)(int32_t)k * (mantissa == 3u ? 0x1p-9f : 0x1p-16f);
    uint32_t u = k < 1u << mantissa ? sid_f32_bits(low) : (k << shift) + (gap << 23);
    if (mantissa == 3u)
        u = k == 0x7fu ? 0x7fc00000u : u;
    else
        u = k >= 0x7cu ? 0x7f800000u | (k & 3u) << 21 : u;
    return sid_bits_f32(u | (code & 0x80u) << 24);
}

/* The code of a finite x of at most the format's largest magnitude. Nearest: ties to the even code. Dithered: to one of
 * the numbers beside x, with probabilities that make the mean x, within 2^-17 of their distance. */
SID_HD uint32_t sid_f32_to_f8_nearest(float x, uint32_t mantissa) {
    const uint32_t u = sid_f32_bits(x), k = u & 0x7fffffffu, shift = 23u - mantissa;
    const uint32_t gap = (mantissa == 3u ? 120u : 112u) << mantissa;
    const float base = mantissa == 3u ? 0x1p14f : 0x1p7f; /* its last bit is the smallest number's */
    const uint32_t low = sid_f32_bits(sid_bits_f32(k) + base) - sid_f32_bits(base);
    const uint32_t high = ((k + (1u << (shift - 1u)) - 1u + ((k >> shift) & 1u)) >> shift) - gap;
    return (k < (mantissa == 3u ? 0x3c800000u : 0x38800000u) ? low : high) | (u >> 24 & 0x80u);
}
SID_HD uint32_t sid_f32_to_f8_dithered(float x, uint32_t mantissa, uint32_t draw) {
    const uint32_t u = sid_f32_bits(x), k = u & 0x7fffffffu, shift = 23u - mantissa;
    const uint32_t gap = (mantissa == 3u ? 120u : 112u) << mantissa;
    const uint32_t high = ((k + (draw << (shift - 16u)) + (1u << (shift - 17u))) >> shift) - gap;
    const int small = k < (mantissa == 3u ? 0x3c800000u : 0x38800000u);
    const float a = sid_bits_f32(small ? k : 0u) * (mantissa == 3u ? 0x1p9f : 0x1p16f);
    return (small ? (uint32_t)sid_dither16(a, draw) : high) | (u >> 24 & 0x80u);
}

/* ---- 4-bit floats: E2M1 (OCP Microscaling Formats Specification 1.0) ------------------------------------------------
 * 0, 0.5, 1, 1.5, 2, 3, 4 and 6 are the codes 0 to 7; bit 3 is the sign. */
#define SID_F4_TOP 6.0f
SID_HD float sid_f4_to_f32(uint32_t code) { /* of its lowest 4 bits */
    const uint32_t k = code & 7u;
    return sid_bits_f32((k < 2u ? k * 0x3f000000u : (k << 22) + (126u << 23)) | (code & 8u) << 28);
}
/* The code of a finite x, of which what is beyond 6 becomes 6: to nearest, ties to the even code; or as with 8-bit floats. */
SID_HD uint32_t sid_f32_to_f4_nearest(float x) {
    const uint32_t u = sid_f32_bits(x), key = u & 0x7fffffffu, top = sid_f32_bits(SID_F4_TOP),
                   k = key < top ? key : top;
    const uint32_t power = (k > 0x3f800000u ? k : 0x3f800000u) & 0x7f800000u, big = power + (22u << 23);
    const uint32_t sum =
        sid_f32_bits(sid_bits_f32(k) + sid_bits_f32(big)); /* its last bit is the step in which |x| lies */
    return (sum - big + ((power - 0x3f800000u) >> 22)) | (u >> 28 & 8u);
}
SID_HD uint32_t sid_f32_to_f4_dithered(float x, uint32_t draw) {
    const uint32_t u = sid_f32_bits(x), key = u & 0x7fffffffu, top = sid_f32_bits(SID_F4_TOP),
                   k = key < top ? key : top;
    const int small = k < 0x3f800000u;
    const uint32_t high = ((k + (draw << 6) + 32u) >> 22) - 252u;
    return (small ? (uint32_t)sid_dither16(sid_bits_f32(small ? k : 0u) * 2.0f, draw) : high) | (u >> 28 & 8u);
}

/* ---- exponents in few bits (lossless.c) -----------------------------------------------------------------------------
 * The code of an exponent field e beside the largest one of its block: 0 for e = 0, 1 for the largest, 2 for the next one
 * below, and so on; `far`, which has all bits, for what is further below, whose exponent is written out. */
SID_HD uint32_t sid_exponent_code(uint32_t e, uint32_t top, uint32_t far) {
    const uint32_t below = top - e + 1, code = below < far ? below : far;
    return e ? code : 0;
}

#endif
