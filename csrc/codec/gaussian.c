/* GaussianKSGD (Shi et al. 2019, "Understanding top-k sparsification in distributed deep learning"), SIDCo's
 * baseline: a normal distribution fitted to x, and a few corrections.
 *     t = mean + z * std      z: a standard normal variable exceeds it with probability delta / 2, delta = k/n
 *     up to `rounds` times: count |x| >= t; below 2k/3: t = t / 2; above 4k/3: t = 1.5 t; else done
 * The threshold of the last count is used, whatever it was; what does not fit the payload is kept. Where fewer than `floor`
 * of k pass, the k largest are sent: beside a residual a fit may let nothing pass for ever. The paper prints the
 * percentile 1 - delta of x, which on both sides of 0 would let pass twice as many; its published code has 1 - delta / 2,
 * as SIDCo's lemma 1, and three corrections. The standard deviation is that of n, not n - 1; a threshold below 0 is 0.
 *
 * One pass suffices in the steady state: mean and deviation are known after it, and of the counts that follow only
 * those up to 4k/3 must be exact, so that the 3k/2 largest of the last step say from where on to capture. */
#include <math.h>
#include <string.h>

#include "../special.h"
#include "sparse.h"

enum {
    ROUNDS = SPARSE_PARAMS,
    CAPACITY,
    FLOOR
};
enum {
    LAST,
    SPREAD
}; /* words of state->codec: the key from where on candidates were needed, and how far from it the next may lie */
static const sid_bound bounds[] = {[LAST] = SID_KEY_BOUND, [SPREAD] = SID_SPREAD_BOUND};

static const sid_param params[] = {
    SPARSE_PARAM_ROWS,
    SID_NUMBER_ROW("rounds", SID_INT, 3, 1, 10, "", "Number of thresholds that are tried, including the fitted one."),
    SID_NUMBER_ROW(
        "capacity", SID_REAL, 1.34, 1, 1e6, "times k",
        "Capacity of the payload. If more elements pass, the largest are sent and the rest stays in the memory."),
    SPARSE_FLOOR_ROW,
};

/* Rows of running sums. */
enum {
    SIZE,
    SQUARES,
    PLAIN,
    ROWS
};

/* Persists over the passes of one encode. */
typedef struct gauss_work {
    double threshold;
    uint64_t count;
    uint32_t fitted, corrections;
    uint32_t exactly;    /* sums in float64: those of float lanes leave too few digits */
    uint32_t probe, low; /* probe: keys from here on are counted, where not 0; low: captured from here on */
} gauss_work;
_Static_assert(sizeof(gauss_work) <= SPARSE_OWN, "SPARSE_OWN is too small");

static gauss_work *own(const sid_pass *w) { return sparse_own(w); }
/* The largest that say from where on the next step captures. */
static uint64_t wanted(const sid_plan *p) { return p->k + p->k / 2 + 1; }

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    sparse_k(p);
    const double cap = ceil(p->codec_param[CAPACITY] * (double)p->k);
    p->cap = cap < (double)p->n ? (uint64_t)cap : p->n;
    sparse_plan(p, p->n < 1 << 20 ? p->n : p->n / 8 > 2 * p->k ? p->n / 8 : 2 * p->k, scratch);
    *scratch = sparse_bytes(p) + ROWS * sizeof(double) * sid_sums(p->n);
    return SID_OK;
}

static void begin(sid_pass *w) {
    gauss_work *o = own(w);
    if (w->passes == 1) {
        const uint64_t *c = w->state->codec;
        *o = (gauss_work){.low = sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0)};
    }
    o->count = 0;
    if (!o->fitted) memset(sparse_sums_of(w, 0), 0, ROWS * sizeof(double) * sid_sums(w->plan->n));
    sparse_work *s = sparse_begin(w, o->low);
    s->best = w->plan->cap > wanted(w->plan) ? w->plan->cap : wanted(w->plan);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    gauss_work *o = own(w);
    if (!o->fitted) {
        double sum[3];
        sparse_moments(w, acc, len, o->exactly, sum);
        for (uint32_t i = 0; i < ROWS; i++) sid_sums_add(sparse_sums_of(w, i), offset, sum[i]);
    }
    if (o->probe) {
        double sum[3];
        uint32_t count[2];
        sparse_sums(w, acc, len, o->probe, o->probe, sum, count);
        o->count += count[0];
    }
    sparse_capture(w, acc, offset, len);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const sparse_work *s = sparse_settle(w);
    gauss_work *o = own(w);
    uint64_t *c = w->state->codec;
    if (p->n == 0) {
        sparse_emit_from(w, 0, 0);
        return SID_DONE;
    }
    if (!o->fitted) {
        double sum[ROWS];
        for (uint32_t i = 0; i < ROWS; i++) sum[i] = sid_sums_total(sparse_sums_of(w, i), p->n);
        const double n = (double)p->n, mean = sum[PLAIN] / n, variance = sum[SQUARES] / n - mean * mean;
        const double t = mean + sid_normal_tail((double)p->k / n / 2) * (variance > 0 ? sqrt(variance) : 0);
        if (!o->exactly && (variance < 0x1p-7 * sum[SQUARES] / n || t < 0x1p-6 * sum[SIZE] / n)) {
            o->exactly = 1;
            return SID_AGAIN;
        }
        o->threshold = t > 0 ? t : 0;
        o->fitted = 1;
    }
    uint32_t key;
    uint64_t found;
    for (;; o->corrections++) {
        double sum;
        const int last = o->corrections + 1 >= (uint32_t)p->codec_param[ROUNDS];
        key = sid_key((float)o->threshold); /* beyond float32: Inf, and nothing passes */
        if (key >= s->low)
            found = sparse_above(w, key, &sum);
        else if (s->compacted && (key == 0 || key == o->probe))
            found = key ? o->count : p->n; /* candidates were dropped, but the capacity's worth of them is here */
        else if (!last && 3 * s->count > 4 * p->k)
            found = s->count; /* and more: too many, however many they are */
        else {
            o->probe = key;
            o->low = s->compacted ? s->low - 1 : key;
            return SID_AGAIN;
        }
        if (last || (3 * found >= 2 * p->k && 3 * found <= 4 * p->k)) break;
        o->threshold *= 3 * found < 2 * p->k ? 0.5 : 1.5;
    }
    const int few = found < sid_floor_count(p->codec_param[FLOOR], p->k);
    if (few && s->count < p->k) {
        o->probe = key;
        o->low = 0;
        return SID_AGAIN;
    }
    w->stats.found = found;

    const uint64_t rank = wanted(p) < s->count ? wanted(p) : s->count;
    uint32_t from = key;
    if (rank) {
        const sparse_pick pick = sparse_select(w, rank, (uint32_t)c[LAST], (uint32_t)c[SPREAD]);
        from = pick.key < key ? pick.key : key;
    }
    sid_learn_key(c + LAST, c + SPREAD, from);
    if (few) {
        const sparse_pick pick = sparse_select(w, p->k, 0, 0);
        sparse_emit(w, pick, p->k - pick.above, 0);
    } else if (found > p->cap) {
        const sparse_pick pick = sparse_select(w, p->cap, 0, 0);
        sparse_emit(w, pick, p->cap - pick.above, SID_FLAG_RAISED);
    } else
        sparse_emit_from(w, key, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    s->codec[LAST] = sid_key(sid_bits_f32((uint32_t)s->codec[LAST]) * factor);
}

SPARSE_CODEC(gaussiank, params, plan, begin, tile, finish, sparse_check, sparse_decode, .name = "gaussiank",
             .paper = "GaussianKSGD (Shi et al. 2019); a baseline of SIDCo",
             .doc = "A threshold from a normal distribution fitted to the vector. It is halved or raised by half until "
                    "roughly k elements pass or all tries are used.",
             .traits = SID_SPARSE, .wire_id = 20);
