/* Small arithmetic that sparse codecs do with their statistics, the same on host and device. */
#ifndef SID_FITS_H
#define SID_FITS_H

#include <math.h>

#include "../codec.h"

enum { /* 2^19 key units are a sixteenth of an octave */
    SID_SPREAD_LEAST = 1 << 17,
    SID_SPREAD_FIRST = 1 << 20,
    SID_SPREAD_MOST = 1 << 22
};
/* How far from `now` the key of the next step is expected at most, given how far this one's was from `last`. `spread` is the
 * distance that was expected; 0: there was no last step. */
SID_HD uint32_t sid_spread(uint32_t spread, uint32_t last, uint32_t now) {
    const uint32_t least = SID_SPREAD_LEAST, most = SID_SPREAD_MOST, first = SID_SPREAD_FIRST;
    const uint64_t drift = 2ull * (now > last ? now - last : last - now), held = spread - spread / 8;
    if (!spread) return first;
    const uint64_t want = drift > held ? drift : held;
    return want < least ? least : want > most ? most : (uint32_t)want;
}
/* Two words of state->codec: the last key, and that spread. */
SID_HD void sid_learn_key(uint64_t *last, uint64_t *spread, uint32_t now) {
    *spread = sid_spread((uint32_t)*spread, (uint32_t)*last, now);
    *last = now;
}
/* The sound values of these words. A threshold may lie beyond float32. */
#define SID_KEY_BOUND {0, SID_KEY_INF, 0, 0}
#define SID_SPREAD_BOUND {SID_SPREAD_LEAST, SID_SPREAD_MOST, 0, 0}
/* From where on to capture; `none`: of the first step. */
SID_HD uint32_t sid_from_last(uint32_t last, uint32_t spread, uint32_t none) {
    return spread && last > spread ? last - spread : none;
}

/* If fewer elements pass a threshold, the k largest are sent: else a fit that nothing passes might send nothing for ever. */
SID_HD uint64_t sid_floor_count(double floor, uint64_t k) {
    const double least = ceil(floor * (double)k);
    return least > 1 ? (uint64_t)least : 1;
}

/* Whether float lanes hold a unit's sum of squares. 2^-90: elements that matter have squares that are no denormals. */
SID_HD int sid_held(float size, float squares) {
    return sid_key(size) < SID_KEY_INF && sid_key(squares) < SID_KEY_INF && (squares >= 0x1p-90f || !(size > 0));
}

/* dgc's L. */
SID_HD uint64_t sid_run_length(uint64_t n, uint64_t k, double sample, double hits) {
    const double all = (double)n, share = ceil(sample * all), least = k ? ceil(hits * all / (double)k) : 0;
    const double want = share > least ? share : least;
    return want < all ? n / (uint64_t)want : 1;
}

#endif
