/* topk with `block`: the largest elements of every block of the group, instead of the largest of the group.
 *
 * A block is a tile, so that one pass over memory does all: selection, body and rule. Every block sends a fixed number of elements,
 * and its share of the payload lies at a fixed place. Host and device share this file. */
#ifndef SID_BLOCKS_H
#define SID_BLOCKS_H

#include <string.h>

#include "fits.h"

enum {
    BLOCKS_LEAST = 256,
    BLOCKS_MOST = SID_MAX_TILE,
    BLOCKS_WORDS = 4 /* of the state, for a block */
};

/* In plan->derived. */
typedef struct blocks_form {
    uint32_t size;          /* elements of a block; 0: the group is not divided */
    uint32_t shift;         /* log2 of that, the bits of an index */
    uint32_t k, last_k;     /* sent of a block, and of the last one */
    uint64_t count;         /* blocks */
    uint64_t value_at;      /* bytes from the payload's start: values, or levels and then */
    uint64_t code_at;       /* codes */
    uint32_t width, packed; /* bits of a code, 0: values are floats; 1: indices are packed (packed.h) */
} blocks_form;
static inline blocks_form blocks_form_of(const sid_plan *p) {
    blocks_form f;
    memcpy(&f, p->derived, sizeof f);
    return f;
}

/* k for `len` elements. */
SID_HD uint32_t blocks_share(double density, uint32_t len) {
    const uint32_t k = (uint32_t)(density * (double)len + 0.5);
    return k < 1 ? 1 : k < len ? k : len;
}
SID_HD uint32_t blocks_k(const blocks_form *f, uint64_t b) { return b + 1 < f->count ? f->k : f->last_k; }
/* Bytes of `k` fields; every block's begin at a byte. */
SID_HD uint32_t blocks_bytes(uint32_t k, uint32_t bits) { return (k * bits + 7) / 8; }
SID_HD uint64_t blocks_index_at(const blocks_form *f, uint64_t b) {
    return SID_HEADER_BYTES + b * blocks_bytes(f->k, f->shift);
}
SID_HD uint32_t blocks_in_wire_tile(const blocks_form *f, uint64_t t) {
    const uint64_t each = SID_WIRE_TILE / f->size, first = t * each, left = f->count - first;
    return (uint32_t)(left > each ? each * f->k : (left - 1) * f->k + (first + left == f->count ? f->last_k : f->k));
}
SID_HD uint64_t blocks_code_at(const blocks_form *f, uint64_t b) {
    return f->code_at + b * blocks_bytes(f->k, f->width);
}

/* Levels as a payload has them: the upper 16 bits of the base, and above them the step in units, less one. */
SID_HD uint32_t blocks_unit(uint32_t width) { return width == 8 ? 1u << 4 : width == 4 ? 1u << 8 : 1u << 10; }
SID_HD uint32_t blocks_levels_word(const sid_levels *l, uint32_t width) {
    const uint32_t unit = blocks_unit(width), units = l->step < unit ? 1 : l->step / unit;
    const uint32_t last = SID_KEY_INF - 1 - l->top * units * unit; /* so that the highest level is finite */
    return (l->base < last ? l->base : last) >> 16 | (units - 1) << 16;
}
SID_HD uint32_t blocks_levels_base(uint32_t word) { return word << 16; }
SID_HD uint32_t blocks_levels_step(uint32_t word, uint32_t width) { return ((word >> 16) + 1) * blocks_unit(width); }
SID_HD sid_levels blocks_levels_from(uint32_t word, uint32_t width) {
    return sid_levels_from(blocks_levels_base(word), blocks_levels_step(word, width), width);
}
SID_HD int blocks_levels_sound(uint32_t word, uint32_t width) {
    return sid_levels_sound(blocks_levels_base(word), blocks_levels_step(word, width), width);
}

/* The codec's part of the state says which elements of a block were sent: those whose key is above `key`, and of those
 * with that very key the ones before `cut`. rule.cut is BLOCKS_CUT where this is in force. In force or not, `key`
 * predicts the next step's, which is expected within `spread` (fits.h); 0: there is no last one. */
typedef struct blocks_rule {
    uint32_t key, cut, levels, spread;
} blocks_rule;
/* Reads the prediction of a state that may be damaged. */
SID_HD void blocks_predict(const blocks_rule *r, uint32_t *key, uint32_t *spread) {
    const int sound = r->key < SID_KEY_INF && r->spread >= SID_SPREAD_LEAST && r->spread <= SID_SPREAD_MOST;
    *key = sound ? r->key : 0;
    *spread = sound ? r->spread : 0;
}
#define BLOCKS_CUT UINT64_MAX

#ifndef __CUDACC__
/* Parts of topk. */
sid_status blocks_plan(sid_plan *p, double size, uint64_t *scratch, sid_error *err);
static inline int blocks_on(const sid_plan *p) { return blocks_form_of(p).size != 0; }
void blocks_begin(sid_pass *w);
void blocks_tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len);
sid_outcome blocks_finish(sid_pass *w);
void blocks_keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len);
int blocks_sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key);
int blocks_sent_levels(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels);
sid_status blocks_check(const sid_plan *p, const uint8_t *payload, sid_error *err);
void blocks_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len);
#endif

#endif
