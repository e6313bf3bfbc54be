/* The files of sparse.h share this, and codecs do not see it: the form that the parameters give a payload. */
#ifndef SID_SPARSE_FORM_H
#define SID_SPARSE_FORM_H

#include "sparse.h"

#define SPARSE_HALF_MAX 65504.0f
#define SPARSE_ALL UINT64_MAX /* ties */

static inline uint32_t sparse_values_of(const sid_plan *p) { return (uint32_t)p->codec_param[SPARSE_VALUES]; }
static inline int sparse_packed(const sid_plan *p) { return p->codec_param[SPARSE_INDICES] == 1; }

/* The header's flags of a form of values. */
static inline uint32_t sparse_flag_of(uint32_t values) {
    static const uint32_t flags[] = {0, SID_FLAG_HALF, SID_FLAG_LOG8, SID_FLAG_LOG4, SID_FLAG_LOG2};
    return flags[values];
}
static inline uint32_t sparse_width_of(uint32_t values) { return sid_level_bits(sparse_flag_of(values)); }

static inline uint64_t sparse_value_at(const sid_plan *p) {
    return sparse_packed(p) ? sid_packed_value_at(p->n, p->cap) : sid_sparse_value_at(p->n, p->cap);
}

/* sparse.c: keeps the candidates with key > `key` and the first `ties` with that very key (SPARSE_ALL: every one), in place or
 * into a payload; returns how many. *cut: one past the group index of the last tie taken, n for SPARSE_ALL. */
uint64_t sparse_keep_best(const sid_pass *w, uint32_t key, uint64_t ties, uint32_t *count, uint16_t *idx, float *val,
                          uint64_t room, uint64_t *cut);

/* sparse_emit.c: the levels of what is sent, of which `key` is that of the smallest; and as sparse_keep of elements on one side of
 * the cut, of which those with key(acc) >= key were sent. */
sid_levels sparse_levels_of(const sid_pass *w, const float *val, uint64_t sent, uint32_t key, uint32_t width);
void sparse_keep_range(const sid_plan *p, const sid_rule *rule, float *acc, uint32_t len, uint32_t key);

#endif
