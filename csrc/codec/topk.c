/* Exactly k elements of largest magnitude, of equal ones those of lowest index.
 * The last step's k-th key predicts where this one's lies: candidates from a little below it are captured in the one
 * pass over memory and the exact key is found among them. A wrong prediction costs a second pass, never a wrong k.
 * With `block`, the same of every block of so many elements (blocks.h). */
#include "blocks.h"
#include "sparse.h"

enum {
    LAST,
    SPREAD
}; /* words of state->codec: the last key, and how far from it the next may lie (0: no last one) */

static const sid_bound bounds[] = {[LAST] = SID_KEY_BOUND, [SPREAD] = SID_SPREAD_BOUND};

enum {
    TOPK_BLOCK = SPARSE_PARAMS
};
static const sid_param params[] = {
    SPARSE_PARAM_ROWS,
    [TOPK_BLOCK] =
        SID_NUMBER_ROW("block", SID_INT, 0, 0, BLOCKS_MOST, "elements, a power of two",
                       "0: the largest elements of the whole group are sent. From 256 on: the largest of each "
                       "block of so many elements, max(1, round(density * block)) of them, as SparseLoCo does "
                       "with 4096. The last block may be shorter and sends the same share. An index takes "
                       "log2(block) bits where it is not packed, and each block has levels of its own."),
};

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    if (p->codec_param[TOPK_BLOCK] > 0) return blocks_plan(p, p->codec_param[TOPK_BLOCK], scratch, err);
    sparse_k(p);
    p->cap = p->k;
    return sparse_plan(p, 0, scratch);
}

static void begin(sid_pass *w) {
    if (blocks_on(w->plan)) {
        blocks_begin(w);
        return;
    }
    const uint64_t *c = w->state->codec;
    sparse_begin(w, w->passes == 1 ? sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0) : 0);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    (blocks_on(w->plan) ? blocks_tile : sparse_capture)(w, acc, offset, len);
}

static sid_outcome finish(sid_pass *w) {
    if (blocks_on(w->plan)) return blocks_finish(w);
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

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    (blocks_on(p) ? blocks_keep : sparse_keep)(p, s, acc, offset, len);
}
static int sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key) {
    return (blocks_on(p) ? blocks_sent_from : sparse_sent_from)(p, s, offset, len, key);
}
static int sent_levels(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels) {
    return (blocks_on(p) ? blocks_sent_levels : sparse_sent_levels)(p, s, offset, len, key, levels);
}
static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return (blocks_on(p) ? blocks_check : sparse_check)(p, payload, err);
}
static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    (blocks_on(g->plan) ? blocks_decode : sparse_decode)(g, out, offset, len);
}

const sid_codec sid_codec_topk = {
    .info = {.name = "topk",
             .family = "sparse",
             .paper = "Aji and Heafield 2017 (as exact selection over the whole group)",
             .doc = "Exactly the k elements of largest magnitude; among equal ones those of lowest index.",
             SID_PARAMETERS(params),
             .traits = SID_SPARSE,
             .wire_id = 16},
    SID_STAGES(plan, begin, tile, finish, keep, sparse_none, check, sparse_open, decode),
    .sent_from = sent_from,
    .sent_levels = sent_levels,
    .rescale = rescale,
    .bound = bounds,
    .bounds = sizeof bounds / sizeof *bounds,
};
