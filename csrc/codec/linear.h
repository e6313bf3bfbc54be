/* All bodies that are summed have this in common: an encoder divides by its world size and says so in header.scale, so
 * that the sum over the ranks is the mean. */
#ifndef SID_LINEAR_H
#define SID_LINEAR_H

#include <math.h>
#include <string.h>

#include "../codec.h"

typedef struct linear_form { /* in plan->derived, of codecs that round to 16 bits */
    uint32_t draws;          /* 1: rounding is at random */
} linear_form;
static inline linear_form linear_form_of(const sid_plan *p) {
    linear_form f;
    memcpy(&f, p->derived, sizeof f);
    return f;
}
/* The largest magnitude that a body in halves carries, so that the bodies of all ranks add up to a finite number even if
 * every rounding goes up: that of the bodies, half a step of the largest numbers in all or, at random, a whole one, and
 * those of the sums, half a step for the half of them that are so large, a quarter for a quarter, and so on: less than
 * ranks / 2 steps. A sum of more than 2^8 or 2^11 equal bodies grows no more. */
SID_HD float linear_limit(sid_dtype body, float ranks, uint32_t draws) {
    const uint32_t wide = body == SID_F16, largest = wide ? 0x477fe000u : 0x7f7f0000u,
                   step = wide ? 1u << 13 : 1u << 16;
    const uint32_t few = 3 + wide + draws, most = wide ? 1023 : 127, steps = (uint32_t)(ranks / 2);
    return sid_bits_f32(largest - (ranks == 1 ? 0 : steps < few ? few : steps > most ? most : steps) * step);
}

/* The factor that undoes header.scale: the sender's world size. */
static inline float linear_inverse(float scale) { return (float)floor(1.0 / (double)scale + 0.5); }

static inline sid_status linear_check_scale(const sid_header *h, sid_error *err) {
    if (!(h->scale > 0 && h->scale <= 1) || 1.0f / linear_inverse(h->scale) != h->scale)
        return sid_fail(err, SID_E_CORRUPT, "scale is %g; it must be 1 / world size", (double)h->scale);
    return SID_OK;
}

/* Checks the header of a body of `count` elements that has no flags of its own. */
static inline sid_status linear_check(const sid_header *h, uint64_t count, sid_error *err) {
    if (h->count != count || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE))
        return sid_fail(err, SID_E_CORRUPT, "count %llu and flags %08x do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags);
    return linear_check_scale(h, err);
}

/* The body already holds the sender's scale, which the caller's replaces: where they are equal, there is nothing to multiply by. */
static inline void linear_open(sid_gather *g) {
    const sid_header *h = (const sid_header *)(const void *)sid_payload(g, 0);
    g->scale = g->scale == h->scale ? 1.0f : (float)((double)g->scale * (double)linear_inverse(h->scale));
}

#endif
