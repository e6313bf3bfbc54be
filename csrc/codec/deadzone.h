/* deadzone.c and the kernels share this file: the layout of a payload, and its model. */
#ifndef SID_DEADZONE_H
#define SID_DEADZONE_H

#include <math.h>
#include <string.h>

#include "../codec.h"

enum {
    DEADZONE_LEVELS = 5, /* at most */
    DEADZONE_STATE_WORDS = 2 * SID_RANS_LANES
};
enum { /* on a CPU: streams at once, and how many elements of them at a time */
    DEADZONE_TOGETHER = SID_RANS_TOGETHER,
    DEADZONE_BLOCK = SID_DECODE_TILE
};

/* words of state->codec: the last key and its spread, as of topk; the first element that found no room; and of level i the edge
 * above it, in the lower half, and its magnitude, in the upper one. Keys, all of them. */
enum {
    DEADZONE_LAST,
    DEADZONE_SPREAD,
    DEADZONE_LIMIT,
    DEADZONE_STEPS
};

/* In plan->derived. Counts and words are of 16 bits. */
typedef struct deadzone_form {
    uint64_t counts, words; /* where they begin in a payload; the levels' magnitudes precede them */
    uint64_t room;          /* words */
    double share;           /* of the elements of a level and above, how many are above it */
    uint32_t levels, stream;
    uint16_t freq[1 + DEADZONE_LEVELS]; /* of zero, and of a level of one sign */
} deadzone_form;

static inline deadzone_form deadzone_form_of(const sid_plan *p) {
    deadzone_form f;
    memcpy(&f, p->derived, sizeof f);
    return f;
}

SID_HD uint64_t deadzone_streams(uint64_t n, uint32_t stream) { return (n + stream - 1) / stream; }

/* Symbol 0 is zero, 2 i + 1 level i, and 2 i + 2 the same with a minus. */
SID_HD uint32_t deadzone_symbols(const deadzone_form *f) { return 2 * f->levels + 1; }
SID_HD void deadzone_starts(const deadzone_form *f, sid_rans *m) { /* for decode */
    uint16_t freq[SID_RANS_SYMBOLS];
    const uint32_t symbols = deadzone_symbols(f);
    for (uint32_t s = 0; s < symbols; s++) freq[s] = f->freq[(s + 1) / 2];
    sid_rans_starts(m, freq, symbols);
}
SID_HD void deadzone_model(const deadzone_form *f, sid_rans *m) {
    deadzone_starts(f, m);
    sid_rans_inverses(m);
}

/* How many of `count` elements lie above level i. */
SID_HD uint64_t deadzone_above(const deadzone_form *f, uint64_t count, uint32_t i) {
    double share = (double)count;
    for (uint32_t j = 0; j <= i; j++) share *= f->share;
    return (uint64_t)ceil(share);
}
/* The key of a level's magnitude: the mean of its elements, whose keys are from `low` to `high`. */
SID_HD uint32_t deadzone_level(double sum, uint64_t count, uint32_t low, uint32_t high) {
    const uint32_t key = count ? sid_key((float)(sum / (double)count)) : 0;
    return !count ? 0 : key < low ? low : key > high ? high : key;
}

#endif
