/* lossless.c and the kernels share this file: the layout of a payload, and the parts of an element. */
#ifndef SID_LOSSLESS_H
#define SID_LOSSLESS_H

#include <string.h>

#include "../codec.h"

enum {
    LOSSLESS_BLOCK = 128, /* elements that share a largest exponent */
    LOSSLESS_TOPS = SID_TILE / LOSSLESS_BLOCK,
    LOSSLESS_FLOOR = 64 /* exceptions that any group has room for */
};

/* In plan->derived: where the parts of a payload begin. */
typedef struct lossless_form {
    uint64_t starts, pool, planes, high, low, end;
    uint32_t cap;   /* exceptions that the pool holds */
    uint32_t dtype; /* sid_dtype */
    uint32_t bits;  /* of a code */
} lossless_form;

static inline lossless_form lossless_form_of(const sid_plan *p) {
    lossless_form f;
    memcpy(&f, p->derived, sizeof f);
    return f;
}

SID_HD uint64_t lossless_tiles(uint64_t n) { return (n + SID_TILE - 1) / SID_TILE; }
SID_HD uint64_t lossless_blocks(uint64_t n) { return (n + LOSSLESS_BLOCK - 1) / LOSSLESS_BLOCK; }
SID_HD uint32_t lossless_planes(const lossless_form *f) { return f->bits + (f->dtype == SID_F16 ? 3 : 0); }
/* The code of an exception. */
SID_HD uint32_t lossless_far(const lossless_form *f) { return (1u << f->bits) - 1; }
/* Bytes of a plane of a tile of `len` elements. */
SID_HD uint32_t lossless_stride(uint32_t len) { return (uint32_t)sid_round_up((len + 7) / 8, 8); }
SID_HD uint64_t lossless_plane_bytes(uint64_t n, uint32_t planes) {
    return n / SID_TILE * (SID_TILE / 8) * planes + lossless_stride((uint32_t)(n % SID_TILE)) * planes;
}
/* The largest exponent that a number of this dtype has. */
SID_HD uint32_t lossless_largest(uint32_t dtype) { return dtype == SID_F16 ? 30u : 254u; }

/* An element as it travels: sign, 8 bits of exponent, 23 of mantissa, of which float16 uses 5 and 10, bfloat16 8 and 7.
 * x is finite. */
SID_HD uint32_t lossless_bits(float x, uint32_t dtype) {
    if (dtype == SID_F32) return sid_f32_bits(x);
    const uint32_t k = sid_key(x), most = dtype == SID_F16 ? 0x477fe000u : 0x7f7f0000u;
    const float y = sid_bits_f32((k < most ? k : most) | (sid_f32_bits(x) & 0x80000000u));
    if (dtype == SID_BF16) return (uint32_t)sid_f32_to_bf16(y) << 16;
    const uint32_t h = sid_f32_to_f16(y);
    return (h & 0x8000u) << 16 | (h & 0x7fffu) << 13;
}
SID_HD float lossless_number(uint32_t u, uint32_t dtype) {
    if (dtype != SID_F16) return sid_bits_f32(u);
    return sid_f16_to_f32((uint16_t)((u >> 16 & 0x8000u) | (u >> 13 & 0x7fffu)));
}

#endif
