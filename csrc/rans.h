/* Range asymmetric numeral systems (Duda 2013) with a static model of up to 16 symbols: what host and device share.
 *
 * SID_RANS_LANES coders take turns: element i belongs to lane i % 8. A lane's state is 32 bits, in [2^16, 2^32) between
 * symbols. The encoder goes through the elements backward, and the decoder, which ends where the encoder began, forward. A
 * state that would leave the range gives its low 16 bits to the stream, which all lanes share: forward, in the order of the
 * elements that need them. Each symbol takes 12 - log2(frequency) bits, and a lane 16 bits of its final state besides. */
#ifndef SID_RANS_H
#define SID_RANS_H

#include "wire.h"

enum {
    SID_RANS_LANES = 8,
    SID_RANS_TOGETHER = 8, /* streams that one call takes, at most */
    SID_RANS_SYMBOLS = 16,
    SID_RANS_BITS = 12,
    SID_RANS_TOTAL = 1 << SID_RANS_BITS /* of all frequencies */
};
#define SID_RANS_LEAST 0x10000u /* state */

/* Unused symbols have freq 1 and start SID_RANS_TOTAL. */
typedef struct sid_rans {
    uint32_t symbols;
    uint32_t freq[SID_RANS_SYMBOLS], start[SID_RANS_SYMBOLS];
    /* x / freq is (x + plus) * inverse >> 32 >> shift, for each state x that the symbol is put into. */
    uint32_t inverse[SID_RANS_SYMBOLS], plus[SID_RANS_SYMBOLS], shift[SID_RANS_SYMBOLS];
} sid_rans;

/* freq: of 2 to 16 symbols, each at least 1, SID_RANS_TOTAL in all. For decode alone this will do. */
SID_HD void sid_rans_starts(sid_rans *m, const uint16_t *freq, uint32_t symbols) {
    uint32_t start = 0;
    m->symbols = symbols;
    for (uint32_t s = 0; s < SID_RANS_SYMBOLS; s++) {
        m->freq[s] = s < symbols ? freq[s] : 1;
        m->start[s] = start;
        start += s < symbols ? freq[s] : 0;
    }
}
SID_HD void sid_rans_inverses(sid_rans *m) {
    for (uint32_t s = 0; s < SID_RANS_SYMBOLS; s++) {
        const uint32_t f = m->freq[s];
        uint32_t shift = 0;
        while (f >> (shift + 1)) shift++;
        /* 2^(32 + shift) / f rounded up will do if that adds at most 2^shift / f; else it does rounded down, for x + 1
         * (Robison 2005). */
        const uint64_t whole = 1ull << (32 + shift), up = (whole + f - 1) / f;
        const int rounds_up = up * f - whole <= 1ull << shift && up >> 32 == 0;
        m->inverse[s] = (uint32_t)(rounds_up ? up : (whole - 1) / f);
        m->plus[s] = !rounds_up;
        m->shift[s] = shift;
    }
}
SID_HD void sid_rans_model(sid_rans *m, const uint16_t *freq, uint32_t symbols) {
    sid_rans_starts(m, freq, symbols);
    sid_rans_inverses(m);
}

/* Before a symbol is put: 1 if the state's low 16 bits must go to the stream, and the state be shifted down by them. */
SID_HD int sid_rans_full(const sid_rans *m, uint32_t s, uint32_t x) { return x >> 20 >= m->freq[s]; }
SID_HD uint32_t sid_rans_put(const sid_rans *m, uint32_t s, uint32_t x) {
    const uint32_t q = (uint32_t)(((uint64_t)x + m->plus[s]) * m->inverse[s] >> 32) >> m->shift[s];
    return x + m->start[s] + q * (SID_RANS_TOTAL - m->freq[s]);
}
/* The symbol, and the state without it: below SID_RANS_LEAST, it takes the stream's next 16 bits. */
SID_HD uint32_t sid_rans_symbol(const sid_rans *m, uint32_t x) {
    const uint32_t slot = x & (SID_RANS_TOTAL - 1);
    uint32_t s = 0;
    for (uint32_t i = 1; i < m->symbols; i++) s += slot >= m->start[i];
    return s;
}
SID_HD uint32_t sid_rans_without(const sid_rans *m, uint32_t s, uint32_t x) {
    return m->freq[s] * (x >> SID_RANS_BITS) + (x & (SID_RANS_TOTAL - 1)) - m->start[s];
}

/* Bits of a symbol in units of 2^-16, rounded up: 12 - log2(freq), without a logarithm of the library's, so that every machine
 * has the same. */
SID_HD uint32_t sid_rans_cost(uint32_t freq) {
    uint32_t shift = 0, log = 0;
    while (freq >> (shift + 1)) shift++;
    uint64_t v = (uint64_t)freq << (31 - shift); /* in [2^31, 2^32) */
    for (uint32_t i = 0; i < 16; i++) {
        v = v * v >> 31;
        log = 2 * log + (uint32_t)(v >> 32);
        v >>= v >> 32;
    }
    return ((uint32_t)(SID_RANS_BITS - shift) << 16) - log;
}

#endif
