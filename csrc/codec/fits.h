/* What sparse codecs make of their statistics: small arithmetic that is one and the same on host and device. */
#ifndef SID_FITS_H
#define SID_FITS_H

#include "../internal.h"

/* How far from `now` the next step's key may be expected, given how far this one's was from `last`; 0: no last one. */
SID_HD uint32_t sid_spread(uint32_t spread, uint32_t last, uint32_t now) {
    const uint32_t least = 1 << 17, most = 1 << 22, first = 1 << 20; /* 2^19 key units are a sixteenth of an octave */
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
/* From where on to capture; `none`: of the first step. */
SID_HD uint32_t sid_from_last(uint32_t last, uint32_t spread, uint32_t none) {
    return spread && last > spread ? last - spread : none;
}

#endif
