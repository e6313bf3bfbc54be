/* Bit views of floats and the half formats. Shared by host and device: integer arithmetic only, so that every compiler
 * and instruction set gives the same bits. Conversions round to nearest, ties to even; NaN stays NaN, Inf stays Inf. */
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

#endif
