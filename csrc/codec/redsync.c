/* RedSync's communication sets: Fang et al. 2019, section 5.2, Algorithms 2, 3 and 5. With mean and max of |acc|, all in
 * float64 and rounded to float32 where a threshold is compared:
 *     trimmed   threshold = mean + ratio (max - mean), ratio = 1 - e, 1 - 2 e, ..., until k or more exceed it; of these
 *               the k largest are sent
 *     binary    the ratio is bisected in [0, 1] until k to 2 k exceed the threshold, or the interval is no longer than
 *               epsilon; all that exceed it are sent, at most 2 k. The threshold serves `interval` steps
 *     quantised of one sign only, positive and negative in turn: max(acc, 0) or max(-acc, 0) stands for |acc|, and only
 *               indices and the mean of the selected travel. The mean is subtracted from each of them, which keeps what
 *               it leaves; Algorithm 4 prints (lines 20 to 25) that all of them is cleared. Every step searches
 * What the print has, and what is meant (the text of the same section):
 *   - Algorithm 2 loops while nnz > k, and uses `threshold` before it is set; meant is: while too few exceed it. Its ratio
 *     starts at .8, the text's at .9. From the mean downwards (a ratio below 0) it may never find k; at -1 all of acc is
 *     taken here. Whatever it tries, the k largest are the k largest: this codec's choice is then topk's.
 *   - Algorithm 3 sets the bounds of the ratio to thresholds, and goes down where nnz < k/2: between k/2 and k it would go
 *     up, away from k. Meant are the ratio and k. Where no threshold above the mean has k elements beyond it, the search
 *     ends with fewer than k, as printed. Where fewer than `floor` of k pass, the k largest are sent instead.
 *   - Algorithm 5 never advances its counter of steps. Meant is a search in one step of five.
 *   - For the quantised form the listing has no formulas. Mean and max are of all elements, the other sign as 0.
 * The sizes that choose between methods (128 KB, 4 MB), and the output layer that is not quantised, are a policy.
 *
 * No pass counts anything: how many exceed a threshold is more than k exactly if the k-th largest does, so the trials are
 * made against one or two exact keys, found among candidates captured as topk captures them. */
#include <string.h>

#include "redsync.h"
#include "sparse.h"

_Static_assert((int)REDSYNC_METHOD == (int)SPARSE_PARAMS, "redsync.h has the parameters' places");

static const sid_bound bounds[] = {
    [REDSYNC_LAST] = SID_KEY_BOUND,
    [REDSYNC_SPREAD] = SID_SPREAD_BOUND,
    [REDSYNC_OTHER_LAST] = SID_KEY_BOUND,
    [REDSYNC_OTHER_SPREAD] = SID_SPREAD_BOUND,
    [REDSYNC_THRESHOLD] = {0, SID_KEY_INF - 1, 0, 0},
    [REDSYNC_AGE] = {0, REDSYNC_LONGEST, 0, 0},
};

static const char *const method_names[] = {"trimmed", "binary", NULL}, *const mean_names[] = {"off", "on", "printed",
                                                                                              NULL};
static const sid_param params[] = {
    SPARSE_PARAM_ROWS,
    SID_CHOICE_ROW(
        "method", method_names, REDSYNC_TRIMMED, 1,
        "trimmed: trimmed top-k (Algorithm 2, for 128 KB to 4 MB). binary: threshold binary search (Algorithm 3, "
        "for larger groups), which ends anywhere between k and 2k elements: its payload has room for 2k, twice the "
        "bytes. trimmed sends exactly k and takes as long here."),
    SID_CHOICE_ROW(
        "quantised", mean_names, REDSYNC_VALUES, REDSYNC_MEAN_AND_DROP,
        "on: elements of one sign in each step, and one mean instead of their values (section 5.2.3); not for "
        "output layers. What the mean leaves of an element stays in the memory. printed: it is dropped, as "
        "Algorithm 4 prints (lines 20 to 25)."),
    SID_NUMBER_ROW("trim", SID_REAL, .2, .01, 1, "",
                   "epsilon of Algorithm 2: the amount by which each trial lowers the ratio."),
    SID_NUMBER_ROW(
        "epsilon", SID_REAL, 1e-6, 1e-9, .5, "",
        "epsilon of Algorithm 3: the search for a ratio ends at this precision. The paper has no number for it."),
    SID_NUMBER_ROW("interval", SID_INT, 5, 1, REDSYNC_LONGEST, "steps",
                   "Number of steps for which a threshold of the binary search is used (section 5.2.2: 5)."),
    SPARSE_FLOOR_ROW,
};

/* Persists over the passes of one encode. */
typedef struct redsync_work {
    redsync_rule rule;
    sparse_probe probe;
    double total; /* sum of magnitudes, after a pass that added them up */
    uint32_t low; /* captured from here on */
    uint32_t key; /* of the threshold, once `settled` */
    uint32_t settled;
} redsync_work;
_Static_assert(sizeof(redsync_work) <= SPARSE_OWN, "SPARSE_OWN is too small");

static redsync_work *own(const sid_pass *w) { return sparse_own(w); }
static int quantised(const sid_plan *p) { return (int)p->codec_param[REDSYNC_QUANTISED] != REDSYNC_VALUES; }
static int binary(const sid_plan *p) { return (int)p->codec_param[REDSYNC_METHOD] == REDSYNC_BINARY; }
static int negative(const sid_pass *w) { return quantised(w->plan) && w->state->steps % 2; }
static uint64_t *statistics(const sid_pass *w) { return redsync_statistics(w->state->codec, negative(w)); }

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    sparse_k(p);
    p->drops = (int)p->codec_param[REDSYNC_QUANTISED] == REDSYNC_MEAN_AND_DROP;
    p->cap = !binary(p) ? p->k : 2 * p->k < p->n ? 2 * p->k : p->n;
    sparse_plan(p, 0, scratch);
    *scratch = sparse_bytes(p) + sizeof(double) * sid_sums(p->n);
    if (quantised(p)) p->sizes.payload = sparse_mean_bytes(p);
    return SID_OK;
}

static void begin(sid_pass *w) {
    redsync_work *o = own(w);
    const uint64_t *words = w->state->codec, *c = statistics(w);
    if (w->passes == 1) {
        *o = (redsync_work){.rule = redsync_rule_of(w->plan)};
        o->low = sid_from_last((uint32_t)c[REDSYNC_LAST], (uint32_t)c[REDSYNC_SPREAD], redsync_least(&o->rule));
        if (redsync_reuses(&o->rule, words)) {
            o->low = o->key = redsync_beyond(sid_bits_f32((uint32_t)words[REDSYNC_THRESHOLD]));
            o->settled = 1;
        }
    }
    sparse_work *s = sparse_begin(w, o->low);
    if (quantised(w->plan)) s->mean = negative(w) ? -1 : 1;
    s->drops = w->plan->drops;
    if (binary(w->plan)) s->best = w->plan->cap + 1; /* one more: whether there are too many */
    if (!o->settled) memset(sparse_sums_of(w, 0), 0, sizeof(double) * sid_sums(w->plan->n));
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    redsync_work *o = own(w);
    SID_LINE float side[SID_TILE];
    if (quantised(w->plan)) {
        w->plan->simd->one_side(acc, side, len, negative(w));
        acc = side;
    }
    if (!o->settled) sid_sums_add(sparse_sums_of(w, 0), offset, sparse_sum(w, acc, len));
    sparse_probing(w, &o->probe, acc, len);
    sparse_capture(w, acc, offset, len);
}

static sid_outcome again(sid_pass *w, uint32_t low) {
    own(w)->low = low;
    return SID_AGAIN;
}

static uint32_t largest(const sparse_work *s) { /* key */
    uint32_t most = 0;
    for (uint64_t i = 0; i < s->count; i++) most = sid_key(s->val[i]) > most ? sid_key(s->val[i]) : most;
    return most;
}

static sid_outcome trimmed(sid_pass *w) {
    const sparse_work *s = sparse_of(w);
    const redsync_rule *r = &own(w)->rule;
    const uint64_t k = s->count < r->k ? s->count : r->k; /* one sign may have fewer */
    uint64_t *c = statistics(w);
    if (k < r->k && s->low > redsync_least(r)) return again(w, redsync_least(r));
    if (!k) {
        sparse_emit_from(w, SID_KEY_INF, 0);
        w->stats.threshold = 0;
        return SID_DONE;
    }
    const sparse_pick pick = sparse_select(w, k, (uint32_t)c[REDSYNC_LAST], (uint32_t)c[REDSYNC_SPREAD]);
    sid_learn_key(c + REDSYNC_LAST, c + REDSYNC_SPREAD, pick.key);
    w->stats.found = k;
    w->stats.stages = redsync_trials(r, own(w)->total, largest(s), pick.key);
    sparse_emit(w, pick, k - pick.above, 0);
    return SID_DONE;
}

/* Algorithm 3; 0: a trial's answer lies below what was captured. */
static int search(sid_pass *w) {
    const sparse_work *s = sparse_of(w);
    redsync_work *o = own(w);
    const uint64_t k = o->rule.k, held = s->count, *c = statistics(w);
    const uint32_t guess = (uint32_t)c[REDSYNC_LAST], spread = (uint32_t)c[REDSYNC_SPREAD];
    /* the k-th and the (2 k + 1)-th largest magnitude, where they are candidates; else no trial within them passes */
    const uint32_t kth = held >= k ? sparse_select(w, k, guess, spread).key : 0;
    const uint32_t next = held > 2 * k ? sparse_select(w, 2 * k + 1, guess, spread).key : 0;
    const redsync_found found = redsync_search(&o->rule, o->total, largest(s), held, s->low, kth, next);
    if (!found.tries) return 0;
    o->key = redsync_learn(&o->rule, w->state->codec, negative(w), &found, held, next);
    o->settled = 1;
    w->stats.stages = found.tries;
    return 1;
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    redsync_work *o = own(w);
    uint64_t found;
    sparse_settle(w);
    if (p->n == 0) {
        sparse_emit_from(w, 0, 0);
        return SID_DONE;
    }
    if (!o->settled) o->total = sid_sums_total(sparse_sums_of(w, 0), p->n);
    if (!binary(p)) return trimmed(w);
    if (!o->settled && !search(w)) return again(w, redsync_least(&o->rule));
    if (!sparse_reach(w, &o->probe, o->key, &found)) return again(w, sparse_again(w, o->key));
    const sparse_work *s = sparse_of(w);
    const uint64_t some = s->count < o->rule.k ? s->count : o->rule.k; /* one sign may have fewer */
    const int few = found < o->rule.floor;
    if (few && some < o->rule.k && s->low > redsync_least(&o->rule)) return again(w, redsync_least(&o->rule));
    w->stats.found = found;
    redsync_age(&o->rule, w->state->codec);
    if (few && found < some) {
        const sparse_pick pick = sparse_select(w, some, o->key, 0);
        redsync_lowered(w->state->codec, negative(w), pick.key);
        sparse_emit(w, pick, some - pick.above, 0);
    } else if (found > p->cap) {
        const sparse_pick pick = sparse_select(w, p->cap, o->key, 0);
        sparse_emit(w, pick, p->cap - pick.above, SID_FLAG_RAISED);
    } else
        sparse_emit_from(w, o->key, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    static const int words[] = {REDSYNC_LAST, REDSYNC_OTHER_LAST, REDSYNC_THRESHOLD};
    (void)p;
    for (int i = 0; i < 3; i++) {
        uint64_t *c = &s->codec[words[i]];
        const uint32_t key = sid_key(sid_bits_f32((uint32_t)*c) * factor);
        *c = key < SID_KEY_INF ? key : SID_KEY_INF - 1;
    }
}

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    return quantised(p) ? sparse_mean_check(p, payload, err) : sparse_check(p, payload, err);
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    if (quantised(g->plan))
        sparse_mean_decode(g, out, offset, len);
    else
        sparse_decode(g, out, offset, len);
}

SPARSE_CODEC(redsync, params, plan, begin, tile, finish, check, decode, .name = "redsync", .memory = "dgc",
             .paper = "RedSync (Fang et al. 2019), section 5.2, Algorithms 2, 3 and 5",
             .doc = "The k elements of largest magnitude, found by trimming the rest, or k to 2k elements above a "
                    "threshold that is searched for and reused. Optionally only elements of one sign in each step, "
                    "with their mean instead of the values.",
             .traits = SID_SPARSE, .wire_id = 24);
