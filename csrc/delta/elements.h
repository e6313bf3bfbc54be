/* Elements as the host and the device see them: their order, and the step from one value to another. */
#ifndef SID_DELTA_ELEMENTS_H
#define SID_DELTA_ELEMENTS_H

#include "../sidcomp_delta.h"
#include "../wire.h"

SID_HD uint32_t delta_width(sid_delta_kind kind) { return (uint32_t)kind & 7u; }
SID_HD int delta_known(sid_delta_kind kind) {
    const uint32_t width = delta_width(kind);
    return ((uint32_t)kind & ~(uint32_t)SID_DELTA_FLOATS) == width && (width == 1 || width == 2 || width == 4);
}
/* Bits that change places to put the bits of negative elements in order; 0 of a plain kind. Its own inverse. */
SID_HD uint32_t delta_flip(sid_delta_kind kind) {
    return (uint32_t)kind & SID_DELTA_FLOATS ? (1u << (8 * delta_width(kind) - 1)) - 1 : 0;
}
SID_HD uint32_t delta_order(uint32_t bits, uint32_t width, uint32_t flip) {
    return bits ^ ((0u - (bits >> (8 * width - 1))) & flip);
}
/* 2 z + sign of a change from x to y; no longer than an element, whatever they are. */
SID_HD uint32_t delta_step_of(uint32_t x, uint32_t y, uint32_t width, uint32_t flip) {
    const uint32_t most = ~0u >> (32 - 8 * width);
    const uint32_t d = (delta_order(y, width, flip) - delta_order(x, width, flip)) & most, sign = d >> (8 * width - 1);
    return (((d ^ (0u - sign)) + sign - 1) << 1 | sign) & most; /* signs are random: no branch */
}
/* The step of 2 z + sign, modulo 2^32. */
SID_HD uint32_t delta_step(uint32_t zz) { return (zz >> 1 ^ (0u - (zz & 1))) + (~zz & 1); }
/* What x becomes by it. */
SID_HD uint32_t delta_moved(uint32_t x, uint32_t zz, uint32_t width, uint32_t flip) {
    const uint32_t most = ~0u >> (32 - 8 * width);
    return delta_order((delta_order(x, width, flip) + delta_step(zz)) & most, width, flip);
}

#endif
