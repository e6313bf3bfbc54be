/* What encode.c and decode.c share: the bytes of a body (docs/wire.md), the symbols of steps, and vectors as runs of elements. */
#ifndef SID_DELTA_H
#define SID_DELTA_H

#include <string.h>

#include "../core/core.h"
#include "elements.h"

enum {
    DELTA_SPARSE = 1, /* gaps, and a symbol of each step */
    DELTA_DENSE = 2,  /* a symbol of each element */
    DELTA_RAW = 3,    /* the elements */
    DELTA_SIGNED = 128,
    DELTA_TILE = 4096, /* elements that are read at a time: whole blocks of a checksum's keys, whatever their width */
    DELTA_TILE_BYTES = 4 * DELTA_TILE,
    DELTA_STATE_BYTES = 4 * SID_RANS_LANES
};

/* A body's first bytes. Then: u16 frequencies of the symbols, filled up to a multiple of 8 bytes; the low bits of all gaps, `low`
 * bits each; `high` words of 64 bits, in which the high part of each gap is that many zeros and a one; `extra` words of 64 bits
 * with the steps' further bits; rANS states, and words to the end. Only sparse bodies have gaps. Raw: elements follow. */
typedef struct delta_head {
    uint8_t mode, low, shift, symbols; /* shift: of delta_alphabet, and DELTA_SIGNED */
    uint32_t count;                    /* elements that change */
    uint32_t high, extra;
} delta_head;
_Static_assert(sizeof(delta_head) == 16, "a body's head has 16 bytes");
enum {
    DELTA_RAW_AT = SID_DELTA_ELEMENTS /* the first byte of the elements: of its head a raw body has only half */
};

/* ---- symbols -----------------------------------------------------------------------------------------------------
 * A step d is a sign and z = |d| - 1, here 2 z + sign. z has class 0 if it is below 2^shift, then one class for each length of
 * z >> shift in bits, and the last of `classes` is for all z that are longer. A symbol is a class, or a class and the sign; in a
 * dense body, symbol 0 is an element that does not change. What a symbol leaves open are extra bits: the class's low ones of z, all
 * of z in the last class, and below these the sign if the symbol has none. */
typedef struct delta_alphabet {
    uint32_t shift, with_sign, zero, classes;
    uint32_t bits; /* of z, at most */
} delta_alphabet;

SID_HD delta_alphabet delta_alphabet_of(uint32_t shift, uint32_t with_sign, uint32_t mode, uint32_t width) {
    const uint32_t zero = mode == DELTA_DENSE;
    return (delta_alphabet){shift, with_sign, zero, (SID_RANS_SYMBOLS - zero) / (1 + with_sign), 8 * width - 1};
}
SID_HD uint32_t delta_class(const delta_alphabet *a, uint32_t length) {
    const uint32_t c = length > a->shift ? length - a->shift : 0;
    return c < a->classes ? c : a->classes - 1;
}
SID_HD uint32_t delta_symbol(const delta_alphabet *a, uint32_t length, uint32_t sign) {
    const uint32_t c = delta_class(a, length);
    return a->zero + (a->with_sign ? 2 * c + sign : c);
}
/* The number of extra bits of a symbol that is not zero; *base is 2 z + sign with those bits 0. More than 32 bits for a symbol
 * that no step has. */
SID_HD uint32_t delta_extra(const delta_alphabet *a, uint32_t symbol, uint32_t *base) {
    const uint32_t s = symbol - a->zero, c = a->with_sign ? s / 2 : s, sign = a->with_sign ? s % 2 : 0;
    const uint32_t more = !a->with_sign;
    *base = sign;
    if (c + 1 == a->classes) return a->bits + more;
    if (!c) return a->shift + more;
    if (a->shift + c > a->bits) return 64;
    *base = 2u << (a->shift + c - 1) | sign;
    return a->shift + c - 1 + more;
}

/* ---- elements ------------------------------------------------------------------------------------------------------ */

SID_HD uint32_t delta_load(const uint8_t *p, uint32_t width) {
    uint16_t h;
    uint32_t u;
    if (width == 1) return *p;
    if (width == 2) {
        memcpy(&h, p, 2);
        return h;
    }
    memcpy(&u, p, 4);
    return u;
}
SID_HD void delta_store(uint8_t *p, uint32_t x, uint32_t width) {
    const uint16_t h = (uint16_t)x;
    if (width == 1)
        *p = (uint8_t)x;
    else if (width == 2)
        memcpy(p, &h, 2);
    else
        memcpy(p, &x, 4);
}

/* Where reading or writing has come to: element `at` of *seg. */
typedef struct delta_cursor {
    const sid_segment *seg;
    uint64_t at;
} delta_cursor;

static inline delta_cursor delta_from(const sid_segment *seg, uint64_t first) {
    while (first >= seg->len) first -= seg++->len;
    return (delta_cursor){seg, first};
}
/* The next elements of one segment, at most `len`, which is not 0; *here: how many. */
static inline uint8_t *delta_some(delta_cursor *c, uint64_t len, uint32_t width, uint64_t *here) {
    while (c->at == c->seg->len) *c = (delta_cursor){c->seg + 1, 0};
    uint8_t *p = (uint8_t *)c->seg->ptr + c->at * width;
    *here = c->seg->len - c->at < len ? c->seg->len - c->at : len;
    c->at += *here;
    return p;
}
/* The next `len` elements, at most a tile, as whole words of 64 bits: where they are, or copied to `room`. */
static inline const uint8_t *delta_tile(delta_cursor *c, uint32_t len, uint32_t width, uint8_t *room) {
    const uint32_t bytes = len * width;
    uint64_t here;
    const uint8_t *p = delta_some(c, len, width, &here);
    if (here == len && bytes % 8 == 0 && (uintptr_t)p % 4 == 0) return p;
    memset(room + bytes, 0, (8 - bytes % 8) % 8);
    for (uint32_t done = 0;;) {
        memcpy(room + done * width, p, here * width);
        done += (uint32_t)here;
        if (done == len) return room;
        p = delta_some(c, len - done, width, &here);
    }
}
SID_HD uint32_t delta_tile_length(uint32_t n, uint32_t from) { return n - from < DELTA_TILE ? n - from : DELTA_TILE; }
static inline uint64_t delta_tile_sum(const sid_simd *v, const uint8_t *tile, uint32_t from, uint32_t len,
                                      uint32_t width) {
    const uint64_t words = ((uint64_t)len * width + 7) / 8 * 2;
    return v->checksum((const uint32_t *)(const void *)tile, (uint64_t)from * width / 4, words);
}

/* The block's arguments: the instruction set if they are sound, else NULL. fits: all but the segments. */
const sid_simd *delta_fits(const sid_delta_block *b, sid_status *status, sid_error *err);
const sid_simd *delta_sound(const sid_delta_block *b, sid_status *status, sid_error *err);
/* The sum of the block's elements. */
uint64_t delta_sum(const sid_simd *v, const sid_delta_block *b);

#endif
