/* What the files of the core share: the plan's and the state's layout, the contract between memory and codec. */
#ifndef SID_INTERNAL_H
#define SID_INTERNAL_H

#include <math.h>
#include <stddef.h>

#include "bits.h"
#include "rng.h"
#include "sidcomp.h"
#include "special.h"
#include "wire.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SID_TILE = 1024,    /* elements of a tile: 4 KB of acc and 4 KB of gradient stay in L1 */
    SID_MAX_TILE = 4096 /* of a codec's whose blocks are longer: a tile is always a whole number of them */
};
enum {
    SID_MAX_PARAMS = 12,
    SID_MAX_VECTORS = 4,
    SID_DERIVED_WORDS = 8
};
/* A parameter table in a sid_info. A plan has room for SID_MAX_PARAMS values: a longer table does not compile. */
#define SID_PARAMETERS(rows)                                                                                           \
    .params = (rows),                                                                                                  \
    .n_params = sizeof(struct {                                                                                        \
        _Static_assert(sizeof(rows) / sizeof *(rows) <= SID_MAX_PARAMS, "more rows than SID_MAX_PARAMS");              \
        char row[sizeof(rows) / sizeof *(rows)];                                                                       \
    })
#define SID_MAX_N (1ull << 40)

/* Of a tile on the stack: no register's worth of it lies in two lines of a cache. */
#define SID_LINE _Alignas(64)

/* ---- sums -------------------------------------------------------------------------------------------------------
 * In one order everywhere, which a warp and a vector register both like. A unit is SID_TILE elements of a group or entries
 * of a list, or what is left at its end. Element i of a unit is added to lane i % 128, in the order of i; then the lanes in
 * halves, 64 .. 127 onto 0 .. 63 and so on, down to four, and these as (0 + 1) + (2 + 3). (Four lanes are a warp's thread:
 * the halves are its shuffles.) The sum of unit u is added, in float64, to running sum u % SID_SUMS, in the order of u, and
 * at the end these in halves, down to one. All start at 0, so that zeros may be added anywhere. */
enum {
    SID_UNIT_LANES = 128,
    SID_SUMS = 1024
};

/* Running sums of n elements: so many doubles, zero at first. */
static inline uint32_t sid_sums(uint64_t n) {
    const uint64_t units = (n + SID_TILE - 1) / SID_TILE;
    return units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
}
/* at: the first element of the unit whose sum is x. */
static inline void sid_sums_add(double *sums, uint64_t at, double x) { sums[at / SID_TILE % SID_SUMS] += x; }
/* Their total; they are consumed. */
static inline double sid_sums_total(double *sums, uint64_t n) {
    uint32_t count = sid_sums(n);
    if (!count) return 0;
    for (uint32_t w = SID_SUMS / 2; w; w /= 2) {
        for (uint32_t j = 0; j + w < count; j++) sums[j] += sums[j + w];
        count = count < w ? count : w;
    }
    return sums[0];
}
/* A unit's lanes together. */
static inline double sid_join(const double *lane) {
    double half[SID_UNIT_LANES / 2];
    for (int j = 0; j < SID_UNIT_LANES / 2; j++) half[j] = lane[j] + lane[j + SID_UNIT_LANES / 2];
    for (int w = SID_UNIT_LANES / 4; w >= 4; w /= 2)
        for (int j = 0; j < w; j++) half[j] += half[j + w];
    return (half[0] + half[1]) + (half[2] + half[3]);
}

/* Where a sum of finite float32 overflows: what it is times `scale`, which may be 1 / world rounded up. */
SID_HD float sid_mean(double sum, float scale) {
    const double mean = sum * (double)scale, largest = 3.4028234663852886e38, in_reach = 3.4028240e38;
    return mean > largest && mean < in_reach     ? (float)largest
           : mean < -largest && mean > -in_reach ? (float)-largest
                                                 : (float)mean;
}

/* ---- rule: what was sent of acc --------------------------------------------------------------------------------
 * Written by the codec at the end of an encode, read by its keep() at the next one. All-zero is valid beside acc == 0. */
typedef struct sid_rule {
    uint32_t key; /* sparse: acc[i] was sent if key(acc[i]) > key, or == key and i < cut; SID_KEY_NONE: nothing */
    uint32_t
        flags; /* SID_FLAG_HALF, LOG8, LOG4: how values were rounded; SID_FLAG_MEAN: only elements with the sign of scale */
    uint64_t cut;
    float
        scale; /* linear: body = round(acc * scale); 0: nothing was sent. SID_FLAG_MEAN: what each element was sent as */
    float inverse;       /* linear: what was sent = body * inverse */
    uint32_t base, step; /* SID_FLAG_LOG8 and LOG4: the levels, bits.h */
} sid_rule;

/* State of a group: this header, then sid_memory_vectors() vectors of sid_state_stride(n) floats. */
typedef struct sid_state {
    uint64_t steps; /* encodes so far */
    sid_rule rule;
    sid_draw draw; /* the random stream of the last encode */
    float factor;  /* what the memory multiplied the last gradient with before it was taken in (clipping) */
    uint32_t spare;
    uint64_t codec[16]; /* bytes 64 to 191: the codec's own statistics, SID_WORDS of them */
} sid_state;
enum {
    SID_STATE_BYTES = 256
};

/* ---- a state from outside ----------------------------------------------------------------------------------------
 * A checkpoint brings a state that may hold any bytes. So each encode first looks at what it is going to rely on. What no
 * encode writes counts as absent: the codec starts anew, as from zeros, and nothing was sent. */

/* What an encode leaves in a word of state->codec: in each half 0, or a number from `least` to `most`. */
typedef struct sid_bound {
    uint32_t least, most;
    uint32_t upper_least, upper_most;
} sid_bound;
enum {
    SID_WORDS = 16
};

/* What it leaves in state->rule. */
typedef enum sid_ruling_form {
    SID_RULES_BY_KEY,   /* of sparse bodies */
    SID_RULES_BY_SHARE, /* inverse is a whole number, scale 1 / inverse; both 0: nothing was sent */
    SID_RULES_BY_SCALE  /* scale is 0, or within `scale`; inverse within `inverse` */
} sid_ruling_form;
typedef struct sid_ruling {
    sid_ruling_form form;
    uint32_t scale[2], inverse[2]; /* bits of the least and of the largest one */
} sid_ruling;

SID_HD int sid_words_sound(const sid_bound *bound, uint32_t count, const uint64_t *words) {
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t low = (uint32_t)words[i], high = (uint32_t)(words[i] >> 32);
        if (low && (low < bound[i].least || low > bound[i].most)) return 0;
        if (high && (high < bound[i].upper_least || high > bound[i].upper_most)) return 0;
    }
    return 1;
}

SID_HD int sid_levels_sound(uint32_t base, uint32_t step, uint32_t bits) {
    return step && step <= sid_level_longest(bits) && base >= SID_LEVEL_LEAST && base < SID_KEY_INF &&
           base + sid_level_top(bits) * step < SID_KEY_INF;
}

SID_HD int sid_rule_sound(const sid_ruling *r, const sid_rule *rule) {
    const uint32_t scale = sid_f32_bits(rule->scale), inverse = sid_f32_bits(rule->inverse);
    if (r->form == SID_RULES_BY_SHARE) {
        if (!scale) return !inverse;
        return rule->inverse >= 1 && rule->inverse <= 0x1p32f && floorf(rule->inverse) == rule->inverse &&
               1.0f / rule->inverse == rule->scale;
    }
    if (r->form == SID_RULES_BY_SCALE)
        return (!scale || (scale >= r->scale[0] && scale <= r->scale[1])) &&
               (!inverse || (inverse >= r->inverse[0] && inverse <= r->inverse[1]));
    if (rule->key == SID_KEY_NONE) return 1;
    if (rule->key > SID_KEY_INF) return 0;
    if (rule->flags == SID_FLAG_MEAN) return rule->key && sid_key(rule->scale) < SID_KEY_INF;
    if (rule->flags == SID_FLAG_LOG8) return sid_levels_sound(rule->base, rule->step, 8);
    if (rule->flags == SID_FLAG_LOG4) return sid_levels_sound(rule->base, rule->step, 4);
    return !rule->flags || rule->flags == SID_FLAG_HALF;
}

/* What the memory multiplied the last gradient with. */
SID_HD float sid_factor_of(const sid_state *s) { return s->factor >= 0 && s->factor <= 1 ? s->factor : 1.0f; }

SID_HD uint64_t sid_state_stride(uint64_t n) { return sid_round_up(n, 16) + 16; } /* slack: vector loads may run over */

/* ---- plan ----------------------------------------------------------------------------------------------------- */
struct sid_codec;
struct sid_memory;
struct sid_simd;

struct sid_plan {
    const struct sid_codec *codec;
    const struct sid_memory *memory;
    const struct sid_simd *simd;
    uint64_t n, k, cap; /* cap: elements that a sparse payload can hold */
    uint32_t tile;      /* elements of a tile: SID_TILE, unless the codec needs SID_TILE * 2 or * 4 */
    uint64_t room;      /* candidates that a sparse codec can hold during a walk; n or at least 2 * cap + 4096 */
    sid_dtype dtype;
    sid_sizes sizes;
    double codec_param[SID_MAX_PARAMS], memory_param[SID_MAX_PARAMS]; /* in the order of the tables */
    uint64_t derived[SID_DERIVED_WORDS]; /* what codec->plan made of the parameters: a struct of the codec's own */
    sid_ruling ruling;                   /* what an encode leaves in the rule */
    uint64_t first;                      /* of two rounds: elements of the body that round 0 exchanges */
    uint64_t extra;                      /* floats at the end of the state that are the codec's */
    const sid_shape *shapes;             /* while the plan is made; then n_shapes sid_matrix follow the plan */
    uint32_t n_shapes;
};

/* Where a tensor of a group lies, and its share of a shaped codec's body. */
typedef struct sid_matrix {
    uint64_t start, len;   /* elements of the group */
    uint64_t rows, cols;   /* cols 0: it is no matrix to the codec, and has `len` rows */
    uint64_t p, q, kept;   /* the codec's: places of its parts in the slices of rounds 0 and 1, and in the state */
    uint32_t rank, height; /* height: rows that are added up by themselves */
} sid_matrix;
SID_HD const sid_matrix *sid_matrices(const sid_plan *p) { return (const sid_matrix *)(const void *)(p + 1); }

/* ---- the tile contract ------------------------------------------------------------------------------------------
 * Encode walks a group once, a tile at a time:
 *     codec->keep    acc <- what the last step's rule left of it        (if the memory gives feedback; or sent_from)
 *     memory->tile   acc <- gradient + what is kept
 *     codec->tile    reads acc, gathers statistics and candidates
 * and codec->finish settles the rule and writes the payload, or asks for another reading of the same acc. A plan of
 * several rounds reads acc once more for each: begin, tile and finish see w->round, and the payload's earlier slices as
 * the ranks have summed them. */
typedef struct sid_walk {
    const sid_plan *plan;
    const sid_step *at;
    sid_state *state;
    uint8_t *payload; /* header and body; finish fills the body and header.{count, flags, scale} */
    sid_draw draw;    /* this step's random stream; begin may set it to the ranks' common one */
    double norm;      /* of the finite part of the gradient; only where the memory asks for it */
    void *scratch;    /* the codec's part of work */
    uint64_t nonfinite;
    uint32_t walks; /* readings so far, this one included */
    uint32_t round; /* of the exchange: 0 to sizes.rounds - 1 */
    sid_stats stats;
} sid_walk;

enum {
    SID_READINGS = 64
};
typedef enum sid_verdict {
    SID_DONE = 0,
    SID_AGAIN = 1 /* at most SID_READINGS - 1 times, whatever is read: the codec's parameters bound it */
} sid_verdict;

typedef struct sid_cursor {
    uint64_t pos;  /* entries of the payload consumed */
    uint32_t left; /* of them left in the current wire tile; or what else open() remembers of a payload */
} sid_cursor;

typedef struct sid_gather { /* decode of W payloads */
    const sid_plan *plan;
    const uint8_t *payloads;
    uint64_t stride;
    uint32_t count;
    float scale;
    sid_cursor *cursor; /* one a payload */
} sid_gather;

typedef struct sid_codec {
    sid_info info;
    /* Resolves parameters: sets p->k, p->cap, p->ruling, sizes.payload, body_*, k; returns the scratch bytes of encode. */
    sid_status (*plan)(sid_plan *p, uint64_t *scratch, sid_error *err);
    void (*lay)(const sid_plan *p, sid_matrix *m); /* beside SID_SHAPED: fills in all n_shapes */
    void (*begin)(sid_walk *w);                    /* before each reading */
    void (*tile)(sid_walk *w, const float *acc, uint64_t at, uint32_t len);
    sid_verdict (*finish)(sid_walk *w);
    /* In place: acc -> what s->rule left of it (s->draw: what was drawn for it). Element i of acc is element at + i of
     * the group; a whole tile, or the last one. */
    void (*keep)(const sid_plan *p, const sid_state *s, float *acc, uint64_t at, uint32_t len);
    /* 1 if of these elements the rule sent whole just those with key(acc) >= *key: a memory can then do keep's work in
     * its own pass. NULL: never. */
    int (*sent_from)(const sid_rule *rule, uint64_t at, uint32_t len, uint32_t *key);
    void (*none)(sid_rule *rule); /* the rule that sent nothing */
    /* What is in the first `bounds` words of state->codec; all of them 0 is sound, too. */
    const sid_bound *bound;
    uint32_t bounds;
    /* A change of scale; NULL if the statistics in state->codec do not depend on it. */
    void (*rescale)(const sid_plan *p, sid_state *s, float factor);
    /* The body of one payload, header already checked. */
    sid_status (*check)(const sid_plan *p, const uint8_t *payload, sid_error *err);
    void (*open)(sid_gather *g); /* payloads already checked; places cursors, and may correct g->scale */
    /* Sum of the payloads over elements at .. at + len, unscaled, into out, which holds zeros; called with at ascending,
     * in steps of SID_DECODE_TILE. */
    void (*decode)(sid_gather *g, float *out, uint64_t at, uint32_t len);
    /* Beside SID_SIGNS: x, sums of `count` ranks' signs, becomes what the ranks make of them. NULL: they are drawn. */
    void (*tally)(const sid_plan *p, float *x, uint32_t len, uint32_t count);
    /* The step is over, and finite: s->codec and the extra part of the state may learn from the summed payload. NULL:
     * nothing. */
    void (*learn)(const sid_plan *p, sid_state *s, const uint8_t *payload);
} sid_codec;

enum {
    SID_DECODE_TILE = 4096
};

typedef struct sid_memory {
    sid_info info;
    uint32_t vectors; /* floats kept per element; vector 0 is acc */
    /* Refuses what the parameters' ranges cannot; NULL: nothing. */
    sid_status (*plan)(const sid_plan *p, sid_error *err);
    /* 1 where the plan's parameters make it read w->norm. NULL: never. */
    int (*wants_norm)(const sid_plan *p);
    /* Before the walk, w->norm known: may set w->state->factor and own words; NULL: nothing. */
    void (*begin)(sid_walk *w);
    /* vec[0][0..len) <- acc from g and what is kept. On entry vec[0] holds what is kept, but for elements with
     * key >= sent_from, of which nothing is. NaN and Inf in g count as 0; returns 1 if there were none. */
    int (*tile)(const sid_walk *w, float *const *vec, const float *g, uint32_t len, uint32_t sent_from);
    /* Beside a codec with SID_SPARSE, where sent_from does not tell: vec[0] has been through codec->keep, `before` is
     * what it was. NULL: the other vectors do not depend on what was sent. */
    void (*sent)(const sid_plan *p, float *const *vec, const float *before, uint32_t len);
    /* Takes g (finite) out of vec again: the step did not happen. */
    void (*undo)(const sid_plan *p, const sid_state *s, float *const *vec, const float *g, uint32_t len);
    /* x: what the ranks made of the step (decoded, scaled, finite): vec <- what is kept after it. NULL: unused. */
    void (*received)(const sid_plan *p, float *const *vec, const float *x, uint32_t len);
} sid_memory;

/* ---- grids: what quantisers round to ------------------------------------------------------------------------------
 * An element x becomes the code of x * inverse, which stands for scale times a number of the grid. */
typedef enum sid_grid_kind {
    SID_GRID_INTEGERS, /* -top .. top; the code is two's complement in as many bits as are kept of it */
    SID_GRID_E4M3,
    SID_GRID_E5M2
} sid_grid_kind;

typedef enum sid_rounding {
    SID_ROUND_NEAREST, /* ties to even; for integers |x * inverse| < top + 1/2 */
    SID_ROUND_DRAW16,  /* to one of both neighbours, x on average, by 16 random bits an element */
    SID_ROUND_DRAW32   /* by 32, where a step is thousands of times a usual element; integers only */
} sid_rounding;

typedef struct sid_grid {
    sid_grid_kind kind;
    sid_rounding rounding;
    float top;      /* the largest number; what lies beyond becomes it */
    uint32_t block; /* elements that share a scale, a multiple of 64; 0: all of them */
    const float *scale, *inverse;
} sid_grid;

typedef struct sid_codes {
    const uint8_t *code;  /* `width` bits each, from the lowest bit of the first byte on */
    const uint8_t *scale; /* float32 a block of elements (64 or more), little-endian; block 0: one for all of them */
} sid_codes;

/* Packed indices (wire.h) of one wire tile, from entry `pos` on, whose bits lie from bit `from` of high to before `stop`. */
typedef struct sid_packed {
    const uint8_t *low;
    const uint64_t *high;
    uint64_t pos, from, stop;
    uint64_t runs; /* of all tiles before this one */
    uint32_t bits; /* of the low part; a run is 2^bits elements */
} sid_packed;

/* What a step multiplies by what is owed. */
static inline float sid_carry(const sid_step *at) { return at->carry > 0 ? at->carry : 1.0f; }

/* The state that a step starts from. */
static inline const sid_state *sid_origin(const void *state, const sid_step *at) {
    return (const sid_state *)(const void *)((const uint8_t *)state + at->origin);
}

/* ---- primitives, once per instruction set (csrc/isa/simd.c); the base variant is the law -------------------------
 * Arrays may have any element alignment. Sums are of a unit, n at most SID_TILE, in the order that `sums` above has. */
typedef struct sid_velocity { /* of add_velocity */
    float momentum, factor;   /* of the old velocity; of the gradient */
    float of_u, of_g;         /* what acc takes of the new velocity, and of the gradient besides */
    float carry;              /* of what acc was */
} sid_velocity;

typedef struct sid_simd {
    const char *name;
    int (*finite)(const float *x, uint32_t n); /* 1: no NaN, no Inf */
    /* acc = (key(acc) < key ? acc : 0) + (g finite ? g : 0), saturating at +-FLT_MAX; 1: all of g was finite. */
    int (*add_kept)(float *acc, const float *g, uint32_t n, uint32_t key);
    /* The same, weighted: acc = beta * (...) + gamma * (...); beta at least 0, gamma within 0 to 1. */
    int (*add_weighted)(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma);
    /* x = factor * (g finite ? g : 0); u = momentum * (key(acc) < mask ? u : 0) + x, saturating;
     * acc = carry * (key(acc) < key ? acc : 0) + (of_u * u + of_g * x), saturating (of weights 1 and 0 just u);
     * 1: all of g was finite. No weight but carry beyond 1. */
    int (*add_velocity)(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                        const sid_velocity *c);
    void (*zero_from)(float *acc, uint32_t n, uint32_t key); /* acc = 0 where key(acc) >= key */
    /* y = |x| where x is positive (negative != 0: where it is negative), else 0. */
    void (*one_side)(const float *x, float *y, uint32_t n, int negative);
    /* acc -= value where acc has value's sign and key(acc) >= key > 0. */
    void (*subtract_from)(float *acc, uint32_t n, uint32_t key, float value);
    /* Appends index (base + i) and value of elements with key(x) >= key; may write up to 16 entries past the last.
     * expected: how many that may be in a tile, which only makes it faster. */
    uint32_t (*capture)(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                        uint32_t expected);
    /* The same from pairs to pairs, never writing past `room` entries; in place is allowed. */
    uint64_t (*filter)(const uint16_t *idx, const float *val, uint64_t n, uint32_t key, uint16_t *idx_out,
                       float *val_out, uint64_t room);
    /* Keys in [lo, hi), in order, to out (16 entries of slack); *above: how many are >= hi. */
    uint64_t (*band)(const float *val, uint64_t n, uint32_t lo, uint32_t hi, uint32_t *out, uint64_t *above);
    /* Offsets in the tile of its entries, at most `most`, and none from the first on that is not below `end`; how many. May
     * write up to 128 past them. */
    uint32_t (*unpack)(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx);
    float (*sum_abs)(const float *x, uint32_t n);
    /* sum[0]: as sum_abs; sum[1], count[0]: of those with key(x) >= a; sum[2], count[1]: >= b. a, b below 2^31. */
    void (*tail_sums)(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[3], uint32_t count[2]);
    double (*sum_squares)(const float *x, uint32_t n);              /* of exact squares, in float64 */
    void (*moments)(const float *x, uint32_t n, double sum[3]);     /* of |x|, x^2, x, in float64 */
    void (*two_moments)(const float *x, uint32_t n, double sum[2]); /* of x^2, x */
    void (*square_sums)(const float *x, uint32_t n, float sum[3]);  /* the same in float: may over- and underflow */
    /* In float: |x|, x^2; |x| - a over key(x) >= a, count[0] of them; |x| - b and its square over >= b, count[1].
     * a and b: keys below 2^31, and their magnitudes. */
    void (*probe_sums)(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[5], uint32_t count[2]);
    /* Sum of log2 |x| over the count elements that are not 0: products in the lanes; to 6e-8 * count. */
    double (*sum_log2)(const float *x, uint32_t n, uint32_t *count);
    uint32_t (*max_key)(const float *x, uint32_t n); /* the largest key; 0 of none */
    /* The same of each block. */
    void (*block_keys)(const float *x, uint32_t n, uint32_t block, uint32_t *key);
    /* draws: uint16_t or uint32_t, one an element, as grid->rounding says; NULL beside SID_ROUND_NEAREST. */
    void (*quantise)(const float *x, uint32_t n, const sid_grid *grid, const void *draws, uint8_t *code);
    /* x -= what quantise() would send of it. */
    void (*take_out)(float *x, uint32_t n, const sid_grid *grid, const void *draws);
    /* out += scale * what the codes stand for, for one of `count` payloads after the other. */
    void (*add_codes)(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block, sid_grid_kind kind,
                      uint32_t width);
    /* The low `width` bits of each code, 2 to 7, one after the other from the lowest bit of out[0] on; ceil(n * width / 8)
     * bytes, what is left of the last one zero. */
    void (*pack)(const uint8_t *code, uint32_t n, uint32_t width, uint8_t *out);
    /* Both of these at once, where the grid is -1, 0 and 1, by 16 bits, in fields of 2 bits. */
    void (*ternary)(const float *x, uint32_t n, float inverse, const uint16_t *draws, uint8_t *out);
    /* The level of |x|, and above it the sign; and x -= what level and sign stand for where key(x) >= key. */
    void (*to_levels)(const float *x, uint32_t n, const sid_levels *levels, uint8_t *code);
    void (*take_levels)(float *x, uint32_t n, uint32_t key, const sid_levels *levels);
    /* The low `bits` of each, up to 12, one after the other from the lowest bit of out[0] on; what is left of the last byte
     * zero. Returns what comes after it. May write 8 bytes past that. */
    uint8_t *(*pack_low)(const uint16_t *idx, uint64_t n, uint32_t bits, uint8_t *out);
    /* Matrices of r rows y_k, `stride` floats apart. dots: x_i times y_k,i is added to lane (from + i) % 16 of the k-th 16.
     * y_k += c[k] * x; out += sign * the sum of c[k] * y_k: each a product and a sum, in the order of k. */
    void (*dots)(const float *x, uint32_t n, const float *y, uint64_t stride, uint32_t r, uint32_t from, float *lane);
    void (*add_rows)(const float *x, uint32_t n, const float *c, uint32_t r, float *y, uint64_t stride);
    void (*add_outer)(const float *c, const float *y, uint64_t stride, uint32_t r, float *out, uint32_t n, float sign);
    /* In float64: x_i times y_i is added to lane i % 32; x -= the sum of c[k] * y_k, in the order of k, rounded once. */
    void (*products)(const float *x, const float *y, uint32_t n, double *lane);
    void (*take_columns)(float *x, uint64_t n, const float *y, uint64_t stride, uint32_t r, const double *c);
    void (*clamp)(const float *x, float *y, uint32_t n, float max); /* finite x to +-max; NaN and Inf as they are */
    void (*f32_to_f16)(const float *x, uint16_t *y, uint32_t n);
    void (*f32_to_bf16)(const float *x, uint16_t *y, uint32_t n);
    void (*f16_to_f32)(const uint16_t *x, float *y, uint32_t n);
    void (*bf16_to_f32)(const uint16_t *x, float *y, uint32_t n);
    void (*scale)(const float *x, float *y, uint32_t n, float s); /* y = x * s; may be in place */
    /* half(clamp(x, max) * s), NaN and Inf as they are; and finite x less inverse * what that became. Half: float16, or
     * bfloat16. */
    void (*half_body)(const float *x, uint16_t *y, uint32_t n, float s, float max, int bf16);
    void (*half_keep)(float *x, uint32_t n, uint32_t key, float s, float inverse, float max, int bf16);
    /* y = x * s, past the caches or not; x = 0. 1 if all of y is finite. */
    int (*drain)(float *x, float *y, uint32_t n, float s, int past);
    /* Random bits of elements at .. at + len of the stream; `at` a multiple of 8, room in out for 512 bytes from any
     * multiple of 512 that it reaches. draw16: 16 bits an element, half as costly. rng.h is the law. */
    void (*draw16)(const sid_draw *d, uint64_t at, uint32_t len, uint16_t *out);
    void (*draw32)(const sid_draw *d, uint64_t at, uint32_t len, uint32_t *out);
    /* Bit i % 8 of bits[i / 8], i < n: x[i] < 0 (-0 is not), the last byte filled up with zeros; how many are set. */
    uint32_t (*signs)(const float *x, uint32_t n, uint8_t *bits);
    /* The same of stochastic signs: another than x[i]'s with probability 1/2 - min(|x[i]| * chance, 2^31) / 2^32, as u[i]
     * falls out. */
    void (*draw_signs)(const float *x, const uint32_t *u, uint32_t n, float chance, uint8_t *bits);
    void (*sign_sums)(const float *x, uint32_t n, float sum[2]);     /* of the elements above 0 and of those below */
    void (*take_signs)(float *x, uint32_t n, float high, float low); /* x -= x < 0 ? low : high */
    /* out[i] += value[r][bit i of bits[r]], for r = 0 to count - 1; in blocks of four, each of which is added up first. */
    void (*sum_signs)(float *out, uint32_t n, const uint8_t *const *bits, const float (*value)[2], uint32_t count);
    void (*vote)(float *x, uint32_t n); /* x = 1, -1 or 0: its sign */
    /* x, a sum of `count` signs = +-1, becomes 1 as often as one of them drawn at random is, else -1. */
    void (*merge)(float *x, const uint16_t *u, uint32_t n, uint32_t count);
    void (*fence)(void); /* makes drained stores visible to other threads */
    /* What `count` words at w, an even number, add to a message's checksum (wire.h), being its words from `from` on, a
     * multiple of 16. */
    uint64_t (*checksum)(const uint32_t *w, uint64_t from, uint64_t count);
} sid_simd;

const sid_simd *sid_simd_for(sid_isa isa); /* NULL: this build or processor has it not */
extern const sid_simd sid_simd_base, sid_simd_avx2, sid_simd_avx512;

const sid_codec *sid_codec_of(const sid_info *i); /* registry.c */
const sid_memory *sid_memory_of(const sid_info *i);

/* plan.c: value <- s, where `info` has a parameter of that name; *known says whether. */
sid_status sid_set_param(const sid_info *info, double *value, const sid_setting *s, int *known, sid_error *err);
sid_status sid_fail(sid_error *err, sid_status s, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
/* Vector i of a state: n floats. */
static inline float *sid_vector(const sid_plan *p, const sid_state *s, uint32_t i) {
    return (float *)(void *)((uint8_t *)(uintptr_t)s + SID_STATE_BYTES) + i * sid_state_stride(p->n);
}

/* Floats of all vectors, slack included. */
static inline uint64_t sid_kept_floats(const sid_plan *p) { return p->memory->vectors * sid_state_stride(p->n); }

/* The part of a state that is the codec's own. */
static inline float *sid_extra(const sid_plan *p, const sid_state *s) { return sid_vector(p, s, p->memory->vectors); }

/* decode.c: sid_decode's second half, for payloads that it, or sid_check, has found sound; `dtype` is that of the segments,
 * whatever the plan's. A state must come with segments of the plan's dtype, which still hold the gradient. */
void sid_decode_sound(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, sid_dtype dtype, void *state, sid_report *report);
/* encode.c: sid_encode in pieces, for who sends some elements while others are still to be read: ranges that together are
 * the group, in any order, each from a multiple of 256 on, of a codec that reads once and whose tiles have nothing to do
 * with each other (SID_SIGNS). seg, state, work and payload as in sid_begin_ranges, to the end; the bits of a range are in
 * the payload after sid_take_range, the header, without a checksum, after sid_end_ranges, which returns 1 if there were NaN
 * or Inf. */
typedef struct sid_ranges {
    sid_walk walk;
    sid_step at;
} sid_ranges;
sid_status sid_begin_ranges(sid_ranges *r, const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state,
                            void *work, const sid_step *at, void *payload);
void sid_take_range(sid_ranges *r, const sid_segment *seg, uint64_t from, uint64_t to);
int sid_end_ranges(sid_ranges *r);
/* encode.c: sid_residual_out and _in with the memory's vectors `stride` floats apart, and x finite. */
void sid_kept_out(const sid_plan *p, const sid_state *s, float *x, uint64_t stride);
void sid_kept_in(const sid_plan *p, sid_state *s, const float *x, uint64_t stride);
/* encode.c: takes this step's gradient, which the segments still hold, out of the memory again. */
void sid_take_back(const sid_plan *p, sid_state *s, const sid_segment *seg);
int sid_exchange_has_cuda(const sid_info *info); /* exchange.c */
/* api.cu: makes `device` the thread's own; *before: what it was, to be put back. */
sid_status sid_device_enter(int device, int *before, sid_error *err);
void sid_device_leave(int before);
/* wire.h's checksum of a message of `bytes`, a multiple of 8, whose own field for it is at byte `field`. */
uint64_t sid_message_checksum(const sid_simd *v, const void *message, uint64_t bytes, uint64_t field);
/* Of a payload; of the header alone where the body is linear and there are others to be summed with: header.scale, which is
 * 1 / world, is not 1. */
uint64_t sid_payload_checksum(const sid_plan *p, const uint8_t *payload);
extern const uint64_t sid_sum_pairs[SID_SUM_PAIRS]; /* wire.h's keys */
size_t sid_dtype_size(sid_dtype d);                 /* of a vector's element; 0: no such dtype */
size_t sid_body_size(sid_dtype d);                  /* of a linear body's */
/* len elements of dtype d at p, from element `from` on, as floats: p itself where it is float32, else converted to buf. */
const float *sid_load(const sid_simd *v, sid_dtype d, const void *p, uint64_t from, uint32_t len, float *buf);
/* The reverse, rounded once. */
void sid_store(const sid_simd *v, sid_dtype d, void *p, uint64_t from, uint32_t len, const float *x);

#ifdef __cplusplus
}
#endif
#endif
