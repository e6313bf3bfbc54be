/* terngrad_shared.c and the kernels share this file: the codec's form and the layout of a payload. */
#ifndef SID_TERNGRAD_SHARED_H
#define SID_TERNGRAD_SHARED_H

#include "quant.h"

enum { /* parameters */
    TERN_CLIP
};

enum {
    TERN_RANKS = 127, /* the most */
    TERN_SLOTS = 128,
    TERN_SLOT_BYTES = 4 * TERN_SLOTS,
    TERN_CODES_AT = SID_HEADER_BYTES + TERN_SLOT_BYTES
};

SID_HD quant_form ternary_form(void) {
    const quant_form f = {0, 8, SID_GRID_INTEGERS, SID_ROUND_DRAW16, NORM_CLIPPED, 1.0f};
    return f;
}

#endif
