/* The selection of Deep Gradient Compression (Lin et al. 2018): sparsification, with the threshold from a sample.
 *     sample   one element, drawn uniformly, of each L consecutive ones; s elements in all
 *     T        the ceil(s k / n)-th largest magnitude of the sample
 *     sent     all |acc| >= T; where these are more than k, the k largest of them (the second, hierarchical selection)
 * The paper samples .1 to 1 %: L = floor(n / max(sample * n, hits * n / k)). The second bound, which the paper lacks, is
 * for small groups: without it the threshold of 10000 elements at density .001 would be the maximum of 100 of them. A
 * threshold that is too high is not corrected, there or here: fewer than k are sent and the rest is kept.
 *
 * The sample is gathered during the one pass. As the threshold is known only after it, candidates are captured from a
 * little below the last step's; where that was too high, acc is read again. The paper's momentum correction is a memory. */
#include <math.h>
#include <string.h>

#include "sparse.h"

enum {
    SAMPLE = SPARSE_PARAMS,
    HITS
};
enum {
    LAST,
    SPREAD
}; /* words of state->codec, as topk's: the last threshold, and how far from it the next may lie (0: no last one) */
static const sid_bound bounds[] = {[LAST] = SID_KEY_BOUND, [SPREAD] = SID_SPREAD_BOUND};
enum {
    SMALL = 1 << 20, /* elements: below, all candidates fit in work */
    DRAWS = 128      /* random words at a time */
};

static const sid_param params[] = {
    SPARSE_PARAM_ROWS,
    SID_NUMBER_ROW("sample", SID_REAL, .01, 1e-4, 1, "of n",
                   "Fraction of the elements that the threshold is estimated from (the paper: 0.1 % to 1 %)."),
    SID_NUMBER_ROW(
        "hits", SID_INT, 16, 1, 1e6, "",
        "The sample is at least so large that about this many of its elements pass (not in the paper; for small "
        "groups)."),
};

/* Persists over the passes of one encode. */
typedef struct dgc_work {
    sparse_probe probe;
    uint64_t run, taken;  /* runs that have been sampled from, and elements of the sample */
    uint32_t length, key; /* L; the threshold */
    uint32_t low;         /* captured from here on in the next pass */
    uint32_t *draw, *keys;
    float *sample;
} dgc_work;
_Static_assert(sizeof(dgc_work) <= SPARSE_OWN, "SPARSE_OWN is too small");

static dgc_work *own(const sid_pass *w) { return sparse_own(w); }

static uint64_t run_length(const sid_plan *p) {
    return sid_run_length(p->n, p->k, p->codec_param[SAMPLE], p->codec_param[HITS]);
}

static uint64_t sample_room(const sid_plan *p) { return p->n / run_length(p) + 1 + 16; } /* vector stores run over */

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    sparse_k(p);
    p->cap = p->k;
    sparse_plan(p, p->n < SMALL ? p->n : p->n / 8, scratch);
    *scratch = sparse_bytes(p) + 4 * (DRAWS + 2 * sample_room(p));
    return SID_OK;
}

static void begin(sid_pass *w) {
    dgc_work *o = own(w);
    if (w->passes == 1) {
        const uint64_t *c = w->state->codec;
        uint32_t *beyond = (uint32_t *)(void *)((uint8_t *)w->scratch + sparse_bytes(w->plan));
        *o = (dgc_work){.length = (uint32_t)run_length(w->plan), /* at most 1 / sample */
                        .low = sid_from_last((uint32_t)c[LAST], (uint32_t)c[SPREAD], 0),
                        .draw = beyond,
                        .keys = beyond + DRAWS,
                        .sample = (float *)(void *)(beyond + DRAWS + sample_room(w->plan))};
    }
    sparse_begin(w, o->low);
}

/* Each run's element: word `run` of the stream, scaled to the run's length. One that lies past the end of a last, shorter
 * run is none, so that all elements are as likely as one another. */
static void sample(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    dgc_work *o = own(w);
    const uint64_t length = o->length, end = offset + len;
    float *out = o->sample + o->taken;
    uint64_t run = o->run;
    if (length == 1) {
        memcpy(out, acc, 4ull * len);
        o->taken += len;
        return;
    }
    for (; run * length < end; run++) {
        if (run % DRAWS == 0) w->plan->simd->draw32(&w->draw, run, DRAWS, o->draw);
        const uint64_t i = run * length + (o->draw[run % DRAWS] * length >> 32);
        if (i >= end) break; /* in the next tile */
        *out++ = acc[i - offset];
    }
    o->run = run;
    o->taken = (uint64_t)(out - o->sample);
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    if (w->passes == 1) sample(w, acc, offset, len);
    sparse_probing(w, &own(w)->probe, acc, len);
    sparse_capture(w, acc, offset, len);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    dgc_work *o = own(w);
    uint64_t *c = w->state->codec, found;
    sparse_settle(w);
    if (p->n == 0) {
        sparse_emit_from(w, 0, 0);
        return SID_DONE;
    }
    if (w->passes == 1) {
        const double rank = ceil((double)o->taken * (double)p->k / (double)p->n);
        const uint64_t least = rank < (double)o->taken ? (uint64_t)rank : o->taken;
        o->key =
            sparse_select_of(p->simd, o->sample, o->taken, o->keys, least, (uint32_t)c[LAST], (uint32_t)c[SPREAD]).key;
    }
    if (!sparse_reach(w, &o->probe, o->key, &found)) {
        o->low = sparse_again(w, o->key);
        return SID_AGAIN;
    }
    w->stats.found = found;
    sid_learn_key(c + LAST, c + SPREAD, o->key);
    if (found > p->cap) {
        const sparse_pick pick = sparse_select(w, p->cap, o->key, (uint32_t)c[SPREAD]);
        sparse_emit(w, pick, p->cap - pick.above, SID_FLAG_RAISED);
    } else
        sparse_emit_from(w, o->key, 0);
    return SID_DONE;
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    s->codec[LAST] = sid_key(sid_bits_f32((uint32_t)s->codec[LAST]) * factor);
}

SPARSE_CODEC(dgc, params, plan, begin, tile, finish, sparse_check, sparse_decode, .name = "dgc", .memory = "dgc",
             .paper = "DGC (Lin et al. 2018), sparsification with hierarchical selection",
             .doc = "A threshold is estimated from a random sample, and the k largest of the elements that reach it "
                    "are sent. The momentum correction of the same paper is a memory.",
             .traits = SID_SPARSE | SID_STOCHASTIC, .wire_id = 21);
