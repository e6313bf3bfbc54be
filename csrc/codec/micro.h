/* micro.c and the kernels share this file: a codec's form, the layout of a payload, and scales. */
#ifndef SID_MICRO_H
#define SID_MICRO_H

#include "quant.h"

enum {
    MICRO_MX_MOST = 252, /* E8M0: the scale of a block with an element of 2^127 or more */
    MICRO_E4M3_MOST = 0x7e
};
#define MICRO_E4M3_TOP 448.0f /* the largest E4M3 */
#define MICRO_TOP 2688.0f     /* 448 * 6: the largest magnitude in units of the group's scale */

typedef struct micro_form { /* in plan->derived */
    uint32_t shift;         /* a block has 2^shift elements */
    uint32_t two;           /* 1: a block's scale is an E4M3 times the group's scale; 0: it is an E8M0 */
    uint32_t draws;         /* 1: rounding is at random */
} micro_form;

typedef struct micro_scale {
    uint32_t code;
    float scale, inverse;
} micro_scale;

static inline micro_form micro_form_of(const sid_plan *p) {
    micro_form f;
    memcpy(&f, p->derived, sizeof f);
    return f;
}
SID_HD uint64_t micro_blocks(const micro_form *f, uint64_t n) { return (n + (1u << f->shift) - 1) >> f->shift; }
SID_HD uint64_t micro_codes_at(const micro_form *f, uint64_t n) {
    return SID_HEADER_BYTES + sid_round_up(micro_blocks(f, n), 8);
}

/* E8M0: 2^(code - 127). */
SID_HD float micro_power(uint32_t code) { return sid_bits_f32(code ? code << 23 : 0x400000u); }
/* The scale of a block whose largest magnitude has this key: the power of two below it, divided by 4, which is the
 * largest power of two in E2M1. */
SID_HD micro_scale micro_mx(uint32_t key) {
    const uint32_t e = key >> 23, code = e > 2 ? e - 2 : 0;
    const micro_scale s = {code, micro_power(code), sid_bits_f32((254u - code) << 23)};
    return s;
}

/* 1 / (6 * the group's scale): with it a block's largest magnitude becomes the number that its scale is in E4M3. */
SID_HD float micro_sixth(float group) { return group > 0 ? 1.0f / (group * SID_F4_TOP) : 0.0f; }
SID_HD micro_scale micro_nv(uint32_t key, float group, float sixth) {
    const float r = sid_bits_f32(key) * sixth;
    const uint32_t code = sid_f32_to_f8_nearest(r < MICRO_E4M3_TOP ? r : MICRO_E4M3_TOP, 3);
    const float scale = sid_f8_to_f32(code, 3) * group;
    micro_scale s = {0, 0, 0};
    if (scale < QUANT_SCALE_MIN) return s;
    s.code = code;
    s.scale = scale;
    s.inverse = 1.0f / scale;
    return s;
}
/* The scale that a byte of a payload stands for. */
SID_HD float micro_number(const micro_form *f, uint32_t code, float group) {
    return f->two ? sid_f8_to_f32(code, 3) * group : micro_power(code);
}
/* 1 if an encoder writes this byte beside this group's scale. */
SID_HD int micro_sound(const micro_form *f, uint32_t code, float group) {
    if (!f->two) return code <= MICRO_MX_MOST;
    return !code || (code <= MICRO_E4M3_MOST && sid_f8_to_f32(code, 3) * group >= QUANT_SCALE_MIN);
}

#endif
