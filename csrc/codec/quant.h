/* quant.c and the kernels share this file: a codec's form, the layout of a payload, and scales. */
#ifndef SID_QUANT_H
#define SID_QUANT_H

#include <math.h>
#include <string.h>

#include "../codec.h"

#define QUANT_M_MAX 0x1.fffffcp127
#define QUANT_SCALE_MIN 0x1p-126f

typedef enum quant_norm {
    NORM_MAX,
    NORM_L2,
    NORM_FITTED, /* no norm: the scale of the least squared error */
    NORM_CLIPPED /* the maximum after clipping at `clip` standard deviations */
} quant_norm;

typedef struct quant_form {
    uint32_t block; /* elements that share a scale; 0: all of them */
    uint32_t bits;
    sid_grid_kind kind;
    sid_rounding rounding;
    quant_norm norm;
    float top;
} quant_form;

/* plan() derives this from the parameters and keeps it in plan->derived. */
typedef struct quant_derived {
    quant_form form;
    double clip; /* of NORM_CLIPPED, in standard deviations */
} quant_derived;

static inline quant_derived quant_derived_of(const sid_plan *p) {
    quant_derived d;
    memcpy(&d, p->derived, sizeof d);
    return d;
}
static inline quant_form quant_form_of(const sid_plan *p) { return quant_derived_of(p).form; }

SID_HD uint64_t quant_blocks(uint64_t n, uint32_t block) { return block ? (n + block - 1) / block : 0; }
SID_HD uint64_t quant_codes_at(uint64_t n, uint32_t block) {
    return SID_HEADER_BYTES + sid_round_up(4 * quant_blocks(n, block), 8);
}
/* The bytes of the codes of n elements. For whole tiles, this is also the offset of the next tile's codes. */
SID_HD uint64_t quant_code_bytes(const quant_form *f, uint64_t n) {
    if (f->kind == SID_GRID_THREE) return n / SID_TILE * SID_TRIT_BYTES + sid_trit_columns((uint32_t)(n % SID_TILE));
    return (n * f->bits + 7) / 8;
}

SID_HD float quant_scale(double m, float top) {
    const float s = (float)((m < QUANT_M_MAX ? m : QUANT_M_MAX) / (double)top);
    return s >= QUANT_SCALE_MIN ? s : 0.0f;
}
/* The same of a float: the float32 quotient is the float64 one, rounded. */
SID_HD float quant_scale_of(float m, float top) {
    const float most = (float)QUANT_M_MAX, s = (m < most ? m : most) / top;
    return s >= QUANT_SCALE_MIN ? s : 0.0f;
}
/* The largest scale that there is. */
SID_HD float quant_scale_max(const quant_form *f) { return quant_scale(QUANT_M_MAX, f->top); }
/* 1 if these bits are 0, or a scale that quant_scale returns. */
SID_HD int quant_sound(uint32_t bits, uint32_t most) {
    return !bits || (bits >= sid_f32_bits(QUANT_SCALE_MIN) && bits <= most);
}

/* ---- scales that are fitted: grids of two magnitudes, low and high --------------------------------------------------
 * A block's elements from `edge` on are sent as the high magnitude. The edge of a normal variable's quantiser is the middle of
 * both, 0.98159882 standard deviations for four levels and 0.61200318 for three; here it is measured in mean magnitudes, which
 * are 0.79788456 of them. The mean takes float32 sums alone, and one large element moves it less than it moves the root
 * mean square. */
#define QUANT_FOUR_EDGE 1.2302516802431513
#define QUANT_THREE_EDGE 0.7670322387823336

/* From the sum of the magnitudes of a block of n elements. */
SID_HD float quant_edge(sid_grid_kind kind, double sum, uint32_t n) {
    const double m = sum / (double)n * (kind == SID_GRID_FOUR ? QUANT_FOUR_EDGE : QUANT_THREE_EDGE);
    const float edge = (float)(m < QUANT_M_MAX ? m : QUANT_M_MAX);
    return edge > QUANT_SCALE_MIN ? edge : QUANT_SCALE_MIN; /* above the zeros that fill up a tile */
}
/* The scale s that makes the sum of (|x| - s * l)^2 smallest, l the magnitude of each element's number: the sum of |x| * l over
 * the sum of l * l. `above`: the sum of the `count` magnitudes from the edge on. */
SID_HD float quant_fit(sid_grid_kind kind, double sum, double above, uint32_t n, uint32_t count) {
    const double low = kind == SID_GRID_FOUR ? (double)SID_FOUR_LOW : 0,
                 high = kind == SID_GRID_FOUR ? (double)SID_FOUR_HIGH : 1;
    if (kind == SID_GRID_THREE && !count) return 0; /* no element is as large as its block's edge: all are zero */
    const double products = low * sum + (high - low) * above;
    const double squares = low * low * (double)n + (high * high - low * low) * (double)count;
    const double s = products / squares, most = QUANT_M_MAX / high;
    const float scale = (float)(s < most ? s : most);
    return scale >= QUANT_SCALE_MIN ? scale : 0.0f;
}

/* The group's scale from the largest key, the sum and the sum of squares. Standard deviations are of the elements about
 * their mean. Where all of them are equal, to half the digits of float64, there is nothing to clip: c * 0 would be the end
 * of a constant gradient. */
SID_HD float quant_group_scale(const quant_form *f, uint32_t key, double sum, double squares, uint64_t n, double clip) {
    double m = (double)sid_bits_f32(key);
    if (f->norm == NORM_L2) m = sqrt(squares);
    if (f->norm == NORM_CLIPPED && n) {
        const double mean = sum / (double)n, square = squares / (double)n;
        const double variance = square - mean * mean, limit = clip * sqrt(variance > 0 ? variance : 0);
        if (variance > square * 0x1p-40 && limit < m) m = limit;
    }
    return quant_scale(m, f->top);
}

#endif
