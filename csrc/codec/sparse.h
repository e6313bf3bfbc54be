/* The sparsifying codecs share this file: candidates captured during the pass, exact selection by magnitude, the sparse body
 * and its decoding. A codec on top of it chooses a lower bound before the pass and a key after it. */
#ifndef SID_SPARSE_H
#define SID_SPARSE_H

#include "../codec.h"
#include "fits.h"

/* Parameters every sparse codec begins its table with; the last one where indices travel. */
enum {
    SPARSE_DENSITY,
    SPARSE_VALUES,
    SPARSE_INDICES,
    SPARSE_PARAMS
};
extern const char *const sparse_value_names[], *const sparse_index_names[];
#define SPARSE_DENSITY_ROW                                                                                             \
    SID_NUMBER_ROW("density", SID_REAL, .01, 1e-7, 1, "of n",                                                          \
                   "Fraction of the elements that is sent: k = max(1, round(density * n)).")
#define SPARSE_PARAM_ROWS                                                                                              \
    SPARSE_DENSITY_ROW,                                                                                                \
        SID_CHOICE_ROW(                                                                                                \
            "values", sparse_value_names, SID_VALUES_F32, SID_VALUES_LOG2,                                             \
            "Format of the values: log8 and log4 are 8 and 4 bits, levels from the smallest to the largest "           \
            "magnitude sent; log2 is 2 bits, the sign and one of two magnitudes, the means of the smaller and "        \
            "of the larger ones. What rounding takes away stays in the residual."),                                    \
        SID_CHOICE_ROW("indices", sparse_index_names, 0, 1,                                                            \
                       "u16: 16 bits each; packed: about 2 + log2(1 / density) bits, slower to read.")

#define SPARSE_FLOOR_ROW                                                                                               \
    SID_NUMBER_ROW("floor", SID_REAL, .1, 0, 1, "times k",                                                             \
                   "If fewer elements pass the threshold, or none, the k largest are sent instead.")

/* The codec's part of work. The candidates are all elements so far whose key reaches `low`, in index order; tile[t] counts
 * those of wire tile t. `low` only rises during a pass: if the candidates of the next tile may not fit, all but the `best`
 * largest are dropped. If that has happened in a pass, the candidates that sparse_settle leaves are the `best` largest, too. */
typedef struct sparse_work {
    uint64_t count, room; /* candidates held, and how many fit */
    uint32_t low;         /* keys from here on are captured */
    uint32_t last;        /* captured in the last tile */
    uint32_t compacted;   /* 1: candidates were dropped for lack of room, so `low` is not the one asked for */
    int32_t mean;         /* 1, -1: candidates are magnitudes of that sign, and only the mean of those sent travels */
    uint32_t drops;       /* 1: what the mean leaves of an element is dropped */
    uint64_t best;        /* how many of the largest are never dropped: the capacity, unless a codec wants more */
    uint32_t *tile, *keys;
    uint16_t *idx;
    float *val;
} sparse_work;
enum {
    SPARSE_OWN = 1024
}; /* bytes of work for the codec itself; they survive from one pass to the next */

/* ---- sparse.c: sizes, candidates, sums ---------------------------------------------------------------------------- */

/* p->k from the density. */
void sparse_k(sid_plan *p);
/* Sizes for a payload of p->cap entries and for `room` candidates or more. */
sid_status sparse_plan(sid_plan *p, uint64_t room, uint64_t *scratch);
/* The scratch that sparse_plan asks for, rounded up; a codec may ask for more and use what lies beyond. */
uint64_t sparse_bytes(const sid_plan *p);
/* Rows of running sums over the group, which a codec has asked for beyond it. */
double *sparse_sums_of(const sid_pass *w, uint32_t i);

static inline sparse_work *sparse_of(const sid_pass *w) { return (sparse_work *)w->scratch; }
void *sparse_own(const sid_pass *w);
/* Starts a pass that captures keys >= low. */
sparse_work *sparse_begin(sid_pass *w, uint32_t low);
void sparse_capture(sid_pass *w, const float *acc, uint64_t offset, uint32_t len);
/* The end of a pass, before anything is made of the candidates. */
sparse_work *sparse_settle(sid_pass *w);

/* Over a tile, in float32 and a fixed order, in float64 where that overflows. sparse_sum: of |x|. sparse_sums: sum[0] the same;
 * sum[1], count[0] of those with key(x) >= a; sum[2], count[1] with key(x) >= b. */
double sparse_sum(const sid_pass *w, const float *x, uint32_t len);
void sparse_sums(const sid_pass *w, const float *x, uint32_t len, uint32_t a, uint32_t b, double sum[3],
                 uint32_t count[2]);
/* Sums of |x|, x^2 and x: in float64 if `exact`, else from float lanes where these hold them, to about 1e-7. */
void sparse_moments(const sid_pass *w, const float *x, uint32_t len, uint32_t exact, double sum[3]);
/* Sums of |x|, x^2; of |x| over key(x) >= a, count[0] of them; of |x|, x^2 over >= b, count[1]. As above; and as the sums
 * over >= b are made from those of |x| - b, the variance there too is good to 1e-7. */
void sparse_tails(const sid_pass *w, const float *x, uint32_t len, uint32_t a, uint32_t b, uint32_t exact,
                  double sum[5], uint32_t count[2]);
/* How many candidates have key >= key, and the sum of their magnitudes in a fixed order. */
uint64_t sparse_above(const sid_pass *w, uint32_t key, double *sum);
/* The sum of the magnitudes of those of the first n candidates with low <= key <= high, *count of them, in the same order. */
double sparse_between(const sid_pass *w, uint64_t n, uint32_t low, uint32_t high, uint64_t *count);

/* How many elements reach a key that is settled after the pass. The candidates tell, if it is not below `low`; else
 * another pass counts, for which sparse_again says what to capture. All-zero before the first pass. */
typedef struct sparse_probe {
    uint32_t key, on;
    uint64_t count;
} sparse_probe;
void sparse_probing(const sid_pass *w, sparse_probe *probe, const float *x, uint32_t len); /* each tile */
int sparse_reach(const sid_pass *w, sparse_probe *probe, uint32_t key, uint64_t *found);   /* 0: make another pass */
uint32_t sparse_again(const sid_pass *w, uint32_t key);

/* ---- sparse_select.c: the rank-th largest, exactly ---------------------------------------------------------------- */

typedef struct sparse_pick {
    uint32_t key;         /* of the rank-th largest candidate */
    uint64_t above, ties; /* candidates beyond that key, and with that very key */
} sparse_pick;

/* rank 1 to count. The key is expected within guess +- spread, which only makes it faster; spread 0: no idea. */
sparse_pick sparse_select(const sid_pass *w, uint64_t rank, uint32_t guess, uint32_t spread);
/* The same of any values; keys: room for their keys and 16 more. */
sparse_pick sparse_select_of(const sid_simd *v, const float *val, uint64_t count, uint32_t *keys, uint64_t rank,
                             uint32_t guess, uint32_t spread);

/* ---- sparse_emit.c: the body, and the rule ------------------------------------------------------------------------ */

/* Settles the rule "all from key on", and writes the payload. */
void sparse_emit_from(sid_pass *w, uint32_t key, uint32_t flags);
/* Settles the rule "key > pick.key, and the first `take` of the ties", and writes the payload. */
void sparse_emit(sid_pass *w, sparse_pick pick, uint64_t take, uint32_t flags);
/* Bytes of a payload without values, SID_FLAG_MEAN. */
uint64_t sparse_mean_bytes(const sid_plan *p);
/* For a sid_codec: by the rule, which also says whether values were sent. */
void sparse_keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len);
int sparse_sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key);
int sparse_sent_levels(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels);
void sparse_none(sid_rule *rule);

/* ---- sparse_decode.c: for a sid_codec, too; `mean`: of payloads without values ------------------------------------ */

sid_status sparse_check(const sid_plan *p, const uint8_t *payload, sid_error *err);
void sparse_open(sid_gather *g);
void sparse_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len);
sid_status sparse_mean_check(const sid_plan *p, const uint8_t *payload, sid_error *err);
void sparse_mean_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len);

/* All of a sparse codec, whose file has `rescale` and `bounds`. */
#define SPARSE_CODEC(symbol, rows, plan_, begin_, tile_, finish_, check_, decode_, ...)                                \
    const sid_codec sid_codec_##symbol = {                                                                             \
        .info = {.family = "sparse", SID_PARAMETERS(rows), __VA_ARGS__},                                               \
        SID_STAGES(plan_, begin_, tile_, finish_, sparse_keep, sparse_none, check_, sparse_open, decode_),             \
        .sent_from = sparse_sent_from,                                                                                 \
        .sent_levels = sparse_sent_levels,                                                                             \
        .rescale = rescale,                                                                                            \
        .bound = bounds,                                                                                               \
        .bounds = sizeof bounds / sizeof *bounds}

#endif
