/* Exactly k elements of largest magnitude, of equal ones those of lowest index.
 * The last step's k-th key predicts where this one's lies: candidates from a little below it are captured in the one
 * pass over memory and the exact key is found among them. A wrong prediction costs a second pass, never a wrong k. */
#include "sparse.h"

enum {
    LAST,
    SPREAD
}; /* words of state->codec: the last key, and how far from it the next may lie (0: no last one) */

static const sid_bound bounds[] = {[LAST] = SID_KEY_BOUND, [SPREAD] = SID_SPREAD_BOUND};

static const sid_param params[] = {SPARSE_PARAM_ROWS};

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    sparse_k(p);
    p->cap = p->k;
    return sparse_plan(p, 0, scratch);
}

static void begin(sid_pass *w) {
    const uint64_t *c = w->state->codec;
    sparse_begin(w, w->passes == 1 ? sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0) : 0);
}

static sid_outcome finish(sid_pass *w) {
    const uint64_t k = w->plan->k;
    uint64_t *c = w->state->codec;
    if (sparse_settle(w)->count < k) return SID_AGAIN; /* the second pass captures from key 0 and holds k or more */
    sparse_pick pick = {0, 0, 0};
    if (k) {
        pick = sparse_select(w, k, (uint32_t)c[LAST], (uint32_t)c[SPREAD]);
        sid_learn_key(c + LAST, c + SPREAD, pick.key);
    }
    w->stats.found = k;
    sparse_emit(w, pick, k - pick.above, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    s->codec[LAST] = sid_key(sid_bits_f32((uint32_t)s->codec[LAST]) * factor);
}

SPARSE_CODEC(topk, params, plan, begin, sparse_capture, finish, sparse_check, sparse_decode, .name = "topk",
             .paper = "Aji and Heafield 2017 (as exact selection over the whole group)",
             .doc = "Exactly the k elements of largest magnitude; among equal ones those of lowest index.",
             .traits = SID_SPARSE, .wire_id = 16);
