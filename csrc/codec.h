/* Defines codecs and memories: the contract to which csrc/codec/ and csrc/memory/ are written (docs/adding-a-codec.md).
 *
 * Encode passes over a group once, a tile at a time:
 *     codec->keep    acc <- what the last step's rule left of it        (if the memory gives feedback; or sent_from, sent_levels)
 *     memory->tile   acc <- gradient + what is kept
 *     codec->tile    reads acc, gathers statistics and candidates
 * Then codec->finish settles the rule and writes the payload, or asks for another pass over the same acc. A plan of several
 * reductions passes over acc once more for each of them: begin, tile and finish then look at w->reduction, and at the
 * payload's earlier slices as the ranks have summed them. */
#ifndef SID_CODEC_H
#define SID_CODEC_H

#include "bits.h"
#include "core/plan.h"
#include "isa/simd.h"
#include "rans.h"
#include "rng.h"
#include "sums.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SID_MAX_PASSES = 64,
    SID_STATE_BYTES = 256,
    SID_DECODE_TILE = 4096,
    SID_PART_TILE = 2048, /* of each part in decode_parts: the tiles of all parts stay small enough for any stack */
    SID_DECODE_PARTS = 8
};

/* ---- rule: what was sent of acc --------------------------------------------------------------------------------
 * The codec writes it at the end of an encode, and its keep() reads it in the next one. All-zero is valid beside acc == 0.
 *   sparse         acc[i] was sent if key(acc[i]) > key, or if it is equal and i < cut; of SID_KEY_NONE: nothing was sent
 *   SID_FLAG_MEAN  of these, only the elements with the sign of `scale` were sent, each of them as `scale`; inverse 1:
 *                  what the mean leaves of them is dropped, 0: it is kept
 *   SID_FLAG_HALF, LOG8, LOG4, LOG2: how sparse values were rounded; base and step are the levels (bits.h)
 *   linear         body = round(acc * scale), and body * inverse is what was sent; scale 0: nothing was sent */
typedef struct sid_rule {
    uint32_t key, flags;
    uint64_t cut;
    float scale, inverse;
    uint32_t base, step;
} sid_rule;

/* ---- state -----------------------------------------------------------------------------------------------------
 * This header, then memory->vectors vectors of plan->stride bytes, then the codec's extra floats. The vectors' elements are
 * of dtype plan->kept: float32 or bfloat16. */
enum {
    SID_WORDS = 16
};
typedef struct sid_state {
    uint64_t steps; /* encodes so far */
    sid_rule rule;
    sid_draw draw; /* the random stream of the last encode */
    float factor;  /* what the memory multiplied the last gradient by before it took it in (clipping) */
    uint32_t salt; /* with vectors of bfloat16: of the random numbers of the last encode's rounding (vectors.h) */
    uint64_t codec[SID_WORDS]; /* bytes 64 to 191: the codec's own statistics */
} sid_state;

/* The values that an encode leaves in a word of state->codec: in each half 0, or a number from `least` to `most`. */
typedef struct sid_bound {
    uint32_t least, most;
    uint32_t upper_least, upper_most;
} sid_bound;

/* ---- a pass over the tiles ------------------------------------------------------------------------------------- */

/* Payload bytes whose share of the checksum is known; `from` is a multiple of 64, and so is `to`. */
typedef struct sid_summed {
    uint64_t from, to, sum;
} sid_summed;

typedef struct sid_pass {
    const sid_plan *plan;
    const sid_step *step;
    sid_state *state;
    uint8_t *payload; /* header and body; finish fills the body and header.{count, flags, scale} */
    sid_draw draw;    /* this step's random stream; begin may set it to the ranks' common one */
    uint32_t salt;    /* of this step's rounding to bfloat16 vectors */
    double norm;      /* of the finite part of the gradient; only where the memory asks for it */
    void *scratch;    /* the codec's part of work */
    uint64_t nonfinite;
    uint32_t passes;    /* so far, this one included */
    uint32_t reduction; /* 0 to sizes.reductions - 1 */
    sid_stats stats;
    sid_summed summed;
} sid_pass;
typedef enum sid_outcome {
    SID_DONE = 0,
    SID_AGAIN = 1 /* at most SID_MAX_PASSES - 1 times, whatever the data: the codec's parameters bound it */
} sid_outcome;

typedef struct sid_cursor {
    uint64_t pos;  /* entries of the payload that have been read */
    uint32_t left; /* how many are left in the current wire tile; or what else open() remembers of a payload */
    uint32_t state[SID_RANS_LANES]; /* of the coders of an entropy-coded stream */
} sid_cursor;
typedef struct sid_gather { /* decode of `count` payloads */
    const sid_plan *plan;
    const uint8_t *payloads;
    uint64_t stride;
    const void *const *at; /* where each of them is; NULL: from payloads on, `stride` bytes apart */
    uint32_t count;
    float scale;
    sid_cursor *cursor; /* one a payload; in decode_parts, one of each payload for every part */
    uint64_t first;     /* where decode begins: 0, or with decode_parts a multiple of a part */
} sid_gather;
static inline const uint8_t *sid_payload(const sid_gather *g, uint32_t r) {
    return g->at ? (const uint8_t *)g->at[r] : g->payloads + r * g->stride;
}

/* ---- codec ---------------------------------------------------------------------------------------------------- */
typedef struct sid_codec {
    sid_info info;
    /* Resolves parameters: sets p->k, p->cap, p->ruling, sizes.payload, body_*, k; returns the scratch bytes of encode. */
    sid_status (*plan)(sid_plan *p, uint64_t *scratch, sid_error *err);
    void (*place)(const sid_plan *p, sid_matrix *m); /* with SID_SHAPED: fills in all n_shapes */
    void (*begin)(sid_pass *w);                      /* before each pass */
    void (*tile)(sid_pass *w, const float *acc, uint64_t offset, uint32_t len);
    sid_outcome (*finish)(sid_pass *w);
    /* Bytes written(w, 0) to before written(w, offset) of the payload are final once this pass has seen the elements before
     * `offset`, where a tile or the group ends: encode adds them to the checksum while a cache holds them. NULL: finish may
     * still change any byte. */
    uint64_t (*written)(const sid_pass *w, uint64_t offset);
    /* In place: acc -> what s->rule left of it (s->draw: what was drawn for it). Element i of acc is element offset + i of
     * the group; a whole tile, or the last one. */
    void (*keep)(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len);
    /* 1 if of these elements s->rule sent, whole, exactly those with key(acc) >= *key: a memory can then do keep's work in
     * its own loop. NULL: never. */
    int (*sent_from)(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key);
    /* The same where the rule sent exactly those, each as its level. NULL: never. */
    int (*sent_levels)(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels);
    void (*none)(sid_rule *rule); /* the rule that sent nothing */
    /* The bounds of the first `bounds` words of state->codec. All zeros are sound too. */
    const sid_bound *bound;
    uint32_t bounds;
    /* Multiplies the statistics in state->codec by a change of the gradient's scale; NULL if they do not depend on it. */
    void (*rescale)(const sid_plan *p, sid_state *s, float factor);
    /* Refuses a body that finish would not write; the header has been checked. */
    sid_status (*check)(const sid_plan *p, const uint8_t *payload, sid_error *err);
    void (*open)(sid_gather *g); /* payloads already checked; places cursors, and may correct g->scale */
    /* Sum of the payloads over elements offset .. offset + len, unscaled, into out, which holds zeros; called with
     * ascending offsets, SID_DECODE_TILE apart. */
    void (*decode)(sid_gather *g, float *out, uint64_t offset, uint32_t len);
    /* For codecs whose payloads have parts of equal length that are decoded faster side by side: elements of such a part, a
     * multiple of SID_DECODE_TILE, and in *parts how many parts of `count` payloads to take at once, up to SID_DECODE_PARTS. 1,
     * or NULL: decode takes them all. */
    uint64_t (*part)(const sid_plan *p, uint32_t count, uint32_t *parts);
    /* decode of SID_PART_TILE elements of each of `parts` parts, the first one at `offset`, to out[0] and so on. The offsets
     * ascend through the first part, then through the first one after the last. decode goes on where the parts end; in a
     * codec with parts it may be given SID_PART_TILE elements at a time as well. */
    void (*decode_parts)(sid_gather *g, float *const *out, uint64_t offset, uint32_t parts);
    /* With SID_SIGNS: x, sums of `count` ranks' signs, becomes what the ranks make of them. NULL: they are drawn. */
    void (*decide)(const sid_plan *p, float *x, uint32_t len, uint32_t count);
    /* The step is over, and finite: s->codec and the extra part of the state may learn from the summed payload. NULL:
     * nothing. */
    void (*learn)(const sid_plan *p, sid_state *s, const uint8_t *payload);
} sid_codec;

/* The functions that every codec has, in the order of their fields. */
#define SID_STAGES(plan_, begin_, tile_, finish_, keep_, none_, check_, open_, decode_)                                \
    .plan = plan_, .begin = begin_, .tile = tile_, .finish = finish_, .keep = keep_, .none = none_, .check = check_,   \
    .open = open_, .decode = decode_
static inline void sid_no_rule(sid_rule *rule) { memset(rule, 0, sizeof *rule); } /* none */
static inline void sid_no_cursors(sid_gather *g) { (void)g; }                     /* open */

/* ---- memory --------------------------------------------------------------------------------------------------- */
typedef struct sid_memory {
    sid_info info;
    uint32_t vectors; /* floats kept per element; vector 0 is acc */
    /* Refuses what the parameters' ranges cannot; NULL: nothing. */
    sid_status (*plan)(const sid_plan *p, sid_error *err);
    /* 1 where the plan's parameters make it read w->norm. NULL: never. */
    int (*wants_norm)(const sid_plan *p);
    /* Before the first pass, w->norm known: may set w->state->factor and own words; NULL: nothing. */
    void (*begin)(sid_pass *w);
    /* vec[0][0..len) <- acc from g and what is kept. On entry vec[0] holds what is kept, except that elements with
     * key >= sent_from count as 0. NaN and Inf in g count as 0; returns 1 if there were none. */
    int (*tile)(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from);
    /* tile, where of vec[0] the elements with key >= sent_from were sent as levels. NULL: codec->keep comes before tile. */
    int (*tile_left)(const sid_pass *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from,
                     const sid_levels *levels);
    /* With a SID_SPARSE codec, where sent_from does not tell: vec[0] has been through codec->keep, `before` is
     * what it was. NULL: the other vectors do not depend on what was sent. */
    void (*sent)(const sid_plan *p, float *const *vec, const float *before, uint32_t len);
    /* Takes g (finite) out of vec again: the step did not happen. */
    void (*undo)(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len);
    /* x: what the ranks made of the step (decoded, scaled, finite): vec <- what is kept after it. NULL: unused. */
    void (*received)(const sid_plan *p, float *const *vec, const float *x, uint32_t len);
} sid_memory;

/* The row of a memory's parameter table that says whether the state holds its vectors in float32 or bfloat16 (vectors.h); the
 * same in all memories. plan.c reads it. */
#define SID_MEMORY_DTYPE "memory_dtype"
extern const char *const sid_memory_dtypes[];
#define SID_MEMORY_DTYPE_ROW                                                                                           \
    SID_CHOICE_ROW(SID_MEMORY_DTYPE, sid_memory_dtypes, 0, 1,                                                          \
                   "What the memory is stored in. bfloat16 takes half the bytes and is rounded at random; CPU only.")

/* ---- helpers --------------------------------------------------------------------------------------------------- */
/* Writes err->text; returns s. */
sid_status sid_fail(sid_error *err, sid_status s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* The factor by which a step multiplies the residual of earlier ones. */
static inline float sid_carry(const sid_step *step) { return step->carry > 0 ? step->carry : 1.0f; }
/* The factor by which the memory multiplied the last gradient. */
SID_HD float sid_factor_of(const sid_state *s) { return s->factor >= 0 && s->factor <= 1 ? s->factor : 1.0f; }
SID_HD uint64_t sid_state_stride(uint64_t n) { return sid_round_up(n, 16) + 16; } /* slack: vector loads may run over */
/* Vector i of a state: n elements of dtype p->kept. */
static inline void *sid_vector(const sid_plan *p, const sid_state *s, uint32_t i) {
    return (uint8_t *)(uintptr_t)s + SID_STATE_BYTES + i * p->stride;
}
/* The extra part of a state, which is the codec's own. */
static inline float *sid_extra(const sid_plan *p, const sid_state *s) {
    return (float *)sid_vector(p, s, p->memory->vectors);
}
size_t sid_dtype_size(sid_dtype d); /* of a vector's element; 0: no such dtype */
size_t sid_body_size(sid_dtype d);  /* of a linear body's element */
/* len elements of dtype d at p, from element `from` on, as floats: p itself where it is float32, else converted to buf. */
const float *sid_load(const sid_simd *v, sid_dtype d, const void *p, uint64_t from, uint32_t len, float *buf);
/* The reverse, rounded once. */
void sid_store(const sid_simd *v, sid_dtype d, void *p, uint64_t from, uint32_t len, const float *x);

#ifdef __cplusplus
}
#endif
#endif
