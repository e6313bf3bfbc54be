/* The primitives that codecs and memories are made of: one table of functions for each instruction set (simd.c). The base
 * variant defines the bits, and the others write the same ones.
 *
 * Arrays may start at any element. n is at most SID_TILE where a sum is taken, which has the order of sums.h. */
#ifndef SID_SIMD_H
#define SID_SIMD_H

#include "../bits.h"
#include "../rans.h"
#include "../rng.h"
#include "../sidcomp.h"
#include "../sums.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the address `at` for which at[base] is *out. It is computed as a number, because a pointer must not leave its
 * array. */
static inline float *sid_places_from(float *out, uint32_t base) {
    return (float *)((uintptr_t)out - (uintptr_t)base * sizeof *out);
}

typedef struct sid_velocity { /* of add_velocity */
    float momentum, factor;   /* of the old velocity; of the gradient */
    float of_u, of_g;         /* what acc takes of the new velocity, and of the gradient besides */
    float carry;              /* of what acc was */
} sid_velocity;

/* The grids that quantisers round to. An element x becomes the code of x * inverse, which stands for scale times a
 * number of the grid. Where a grid has two magnitudes, x becomes the code of its sign and of the high one if |x| >=
 * edge. */
typedef enum sid_grid_kind {
    SID_GRID_INTEGERS, /* -top .. top; the code is two's complement in as many bits as are kept of it */
    SID_GRID_E4M3,
    SID_GRID_E5M2,
    SID_GRID_FOUR, /* of two magnitudes (bits.h) */
    SID_GRID_THREE /* of 0 and 1, with a sign */
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
    const float *edge; /* in place of inverse, where the grid has two magnitudes; above 0 */
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
enum {
    SID_UNPACK_SLACK = 128
};

/* A unit of elements taken apart (lossless.c): the largest exponent of each `block`, a multiple of 64; `planes` planes of a bit
 * an element, each of whole words of 64 bits: the `bits` of the code, 3 or 4, and if there are more, bits 13 to 15 of the element; sign and
 * the 7 highest bits of the mantissa; and if low is not NULL, its 16 lowest bits. */
typedef struct sid_parts {
    uint8_t *top, *plane, *high, *low;
    uint32_t block, planes, bits;
} sid_parts;

/* Magnitudes in 1 to 8 levels: x is of level i if i of the edges are below key(x). level: keys of what elements are sent as. */
typedef struct sid_steps {
    uint32_t count; /* levels */
    uint32_t edge[8], level[8];
} sid_steps;

/* One stream of rANS (rans.h). */
typedef struct sid_rans_stream {
    uint32_t state[SID_RANS_LANES];
    uint8_t *symbol;
    uint16_t *words; /* encode: they end here, and are written downward; decode: their begin */
    uint32_t at,
        room; /* decode: how many have been read, and how many there are: `at` is larger if there were too few */
} sid_rans_stream;

/* Where reading the gaps of a delta has come to: `low` bits of each, and high bits, words of 64, of which `word` is what is left of the
 * last one that was read. */
typedef struct sid_gaps {
    const uint8_t *lows, *high;
    uint64_t word, word_at, words, sum; /* sum: of the low bits so far */
    uint32_t low, seen;                 /* changes so far */
} sid_gaps;
enum {
    SID_GAP_LOW = 23 /* the most */
};
/* The same of the steps' extra bits, from bit `at` to before `end`. A symbol has bits[symbol] of them, up to 32, and its step is base[symbol] and
 * these, shifted up. */
typedef struct sid_extras {
    const uint8_t *from;
    uint64_t at, end;
    uint32_t up, bits[SID_RANS_SYMBOLS], base[SID_RANS_SYMBOLS];
} sid_extras;

typedef struct sid_simd {
    const char *name;

    /* keys.inc.h: the largest magnitude */
    int (*finite)(const float *x, uint32_t n);                                     /* 1: no NaN, no Inf */
    uint32_t (*max_key)(const float *x, uint32_t n);                               /* the largest key; 0 where n is 0 */
    void (*block_keys)(const float *x, uint32_t n, uint32_t block, uint32_t *key); /* the largest key of each block */

    /* accumulate.inc.h: what memories do
     * add_kept: acc = (key(acc) < key ? acc : 0) + (g finite ? g : 0), saturating at +-FLT_MAX; 1: all of g was finite.
     * add_weighted: the same with weights, acc = beta * (...) + gamma * (...); beta at least 0, gamma within 0 to 1.
     * add_velocity: x = factor * (g finite ? g : 0); u = momentum * (key(acc) < mask ? u : 0) + x, saturating;
     *     acc = carry * (key(acc) < key ? acc : 0) + (of_u * u + of_g * x), saturating (of weights 1 and 0 just u);
     *     1: all of g was finite. No weight but carry is above 1. */
    int (*add_kept)(float *acc, const float *g, uint32_t n, uint32_t key);
    int (*add_weighted)(float *acc, const float *g, uint32_t n, uint32_t key, float beta, float gamma);
    int (*add_velocity)(float *acc, float *u, const float *g, uint32_t n, uint32_t key, uint32_t mask,
                        const sid_velocity *c);
    void (*zero_from)(float *acc, uint32_t n, uint32_t key); /* acc = 0 where key(acc) >= key */
    /* y = |x| where x is positive (negative != 0: where it is negative), else 0. */
    void (*one_side)(const float *x, float *y, uint32_t n, int negative);
    /* acc -= value where acc has value's sign and key(acc) >= key > 0. */
    void (*subtract_from)(float *acc, uint32_t n, uint32_t key, float value);
    void (*clear_from)(float *acc, uint32_t n, uint32_t key, float value); /* of the same elements, acc = 0 */

    /* sums.inc.h: sums over a unit */
    float (*sum_abs)(const float *x, uint32_t n);
    /* sum[0]: as sum_abs; sum[1], count[0]: of those with key(x) >= a; sum[2], count[1]: >= b. a, b below 2^31. */
    void (*tail_sums)(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[3], uint32_t count[2]);
    double (*sum_squares)(const float *x, uint32_t n);              /* of exact squares, in float64 */
    void (*moments)(const float *x, uint32_t n, double sum[3]);     /* of |x|, x^2, x, in float64 */
    void (*two_moments)(const float *x, uint32_t n, double sum[2]); /* of x^2, x, in float64 */
    void (*square_sums)(const float *x, uint32_t n,
                        float sum[3]); /* of |x|, x^2, x, in float: may over- and underflow */
    /* The sum of |x| over the elements with key(x) >= key, which is below 2^31. *count: how many they are. */
    float (*sum_from)(const float *x, uint32_t n, uint32_t key, uint32_t *count);
    /* In float: |x|, x^2; |x| - a over key(x) >= a, count[0] of them; |x| - b and its square over >= b, count[1].
     * a and b: keys below 2^31, and their magnitudes. */
    void (*probe_sums)(const float *x, uint32_t n, uint32_t a, uint32_t b, float sum[5], uint32_t count[2]);
    /* Sum of log2 |x| over the elements that are not 0, *count of them: products in the lanes; to 6e-8 * count. */
    double (*sum_log2)(const float *x, uint32_t n, uint32_t *count);

    /* select.inc.h: what is at least as large as a key
     * capture appends index (base + i) and value of elements with key(x) >= key, and may write up to 16 entries past the
     * last. expected: how many there may be in a tile, which only makes it faster. filter does the same from pairs to pairs,
     * never writes past `room` entries, and may work in place. band appends the keys in [lo, hi), in order (16 entries of
     * slack); *above: how many are >= hi. */
    uint32_t (*capture)(const float *x, uint32_t n, uint32_t key, uint16_t base, uint16_t *idx, float *val,
                        uint32_t expected);
    uint64_t (*filter)(const uint16_t *idx, const float *val, uint64_t n, uint32_t key, uint16_t *idx_out,
                       float *val_out, uint64_t room);
    uint64_t (*band)(const float *val, uint64_t n, uint32_t lo, uint32_t hi, uint32_t *out, uint64_t *above);

    /* blocks.inc.h: kth_key: the rank-th largest key of n values, at most SID_MAX_TILE of them, rank or more of which have
     * key >= low; *above: how many are larger. fields: n fields of 8 to 12 bits from the lowest bit of p[0] on, and up to 7 more; reads up to 7 bytes past the last one. */
    uint32_t (*kth_key)(const float *val, uint32_t n, uint32_t rank, uint32_t low, uint32_t *above);
    void (*fields)(const uint8_t *p, uint32_t bits, uint32_t n, uint16_t *out);

    /* indices.inc.h: packed indices
     * unpack: offsets in the tile of its entries, at most `most`, and none from the first on that is not below `end`;
     * returns how many. May write up to SID_UNPACK_SLACK past them. ascending: 1 if there are `count` entries from there to the
     * tile's last run, whose zero is before bit `stop`, and they ascend and lie below `size`. pack_low: the low `bits` of each, up to 12, one after the other from
     * the lowest bit of out[0] on, the rest of the last byte zero. Returns what comes after it; may write 8 bytes past that.
     * pack_high: sets bit at + (idx[i] >> bits) + i of high for each of n entries that ascend. */
    uint32_t (*unpack)(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx);
    int (*ascending)(const sid_packed *tile, uint32_t count, uint32_t size);
    uint8_t *(*pack_low)(const uint16_t *idx, uint64_t n, uint32_t bits, uint8_t *out);
    void (*pack_high)(const uint16_t *idx, uint64_t n, uint32_t bits, uint64_t at, uint64_t *high);

    /* quantise.inc.h: draws are uint16_t or uint32_t, one an element, as grid->rounding says; NULL for SID_ROUND_NEAREST.
     * take_out: x -= what quantise would send of it. */
    void (*quantise)(const float *x, uint32_t n, const sid_grid *grid, const void *draws, uint8_t *code);
    void (*take_out)(float *x, uint32_t n, const sid_grid *grid, const void *draws);

    /* pack.inc.h: fields of some bits
     * add_codes: out += scale * what the codes stand for, for one of `count` payloads after the other. pack: the low `width`
     * bits of each code, 2 to 7, one after the other from the lowest bit of out[0] on; ceil(n * width / 8) bytes, the rest of
     * the last one zero. ternary: quantise and pack at once, where the grid is -1, 0 and 1, by 16 bits, in fields of 2 bits. */
    void (*add_codes)(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block, sid_grid_kind kind,
                      uint32_t width);
    void (*pack)(const uint8_t *code, uint32_t n, uint32_t width, uint8_t *out);
    void (*pack_trits)(const uint8_t *code, uint32_t n, uint8_t *out); /* codes of SID_GRID_THREE (bits.h) */
    /* add_codes of these, whose first one begins a unit; block: a power of two. */
    void (*add_trits)(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t block);
    void (*ternary)(const float *x, uint32_t n, float inverse, const uint16_t *draws, uint8_t *out);

    /* micro.inc.h: 4-bit floats in blocks of 2^shift elements, 16 or 32, with a scale each; draws: 16 bits an element, or NULL:
     * to nearest. codes: one a byte; take: x -= what codes would send of it; add: out += scale * number of 4-bit codes, for
     * one of `count` payloads after the other. small_keys: the largest key of each block. */
    void (*small_keys)(const float *x, uint32_t n, uint32_t block, uint32_t *key);
    void (*fp4_codes)(const float *x, uint32_t n, uint32_t shift, const float *inverse, const uint16_t *draws,
                      uint8_t *code);
    void (*fp4_take)(float *x, uint32_t n, uint32_t shift, const float *scale, const float *inverse,
                     const uint16_t *draws);
    void (*add_fp4)(const sid_codes *from, uint32_t count, float *out, uint32_t n, uint32_t shift);

    /* exponents.inc.h: a unit taken apart, whose `top` is given, and the exponents that have no code, in order, to
     * far; returns how many. join is the reverse, stored or added to out. block: a multiple of 64. */
    uint32_t (*split)(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *far);
    uint32_t (*join)(const sid_parts *from, uint32_t n, const uint8_t *far, int add, float *out);

    /* levels.inc.h: the level of |x|, and above it the sign; x -= what level and sign stand for where key(x) >= key; and this,
     * then add_kept of all that is left. add_levels: to out[idx[i] - base] comes what code number first + i stands for. */
    void (*to_levels)(const float *x, uint32_t n, const sid_levels *levels, uint8_t *code);
    void (*take_levels)(float *x, uint32_t n, uint32_t key, const sid_levels *levels);
    int (*add_left)(float *acc, const float *g, uint32_t n, uint32_t key, const sid_levels *levels);
    void (*add_levels)(float *out, const uint16_t *idx, uint32_t base, const uint8_t *code, uint64_t first, uint32_t n,
                       const sid_levels *levels);

    /* steps.inc.h: symbol 2 i + 1 for level i, 2 i + 2 where x is negative; and 0 for nothing
     * take_steps: x -= what level and sign stand for where key(x) >= key. add_steps: out += what symbols stand for.
     * count_levels: count[i] += how many are of level i or above it, for each of `levels`, 1 to 8.
     * sum_between: of |x| where low <= key(x) <= high < 2^31, *count of them, in the order of sums.h. */
    void (*step_codes)(const float *x, uint64_t n, const sid_steps *steps, uint8_t *symbol);
    void (*take_steps)(float *x, uint32_t n, uint32_t key, const sid_steps *steps);
    void (*add_steps)(float *out, const uint8_t *symbol, uint32_t n, const sid_steps *steps);
    void (*count_levels)(const uint8_t *symbol, uint32_t n, uint32_t levels, uint64_t *count);
    float (*sum_between)(const float *x, uint32_t n, uint32_t low, uint32_t high, uint32_t *count);

    /* rans.inc.h: n symbols of each of 1 to SID_RANS_TOGETHER streams; each symbol is below m->symbols. Encode may write 16
     * bytes below the words. Decode may read 16 bytes from any word on and from the end of the words, and its symbols are
     * always such. n: a multiple of SID_RANS_LANES, except in the last call of decode and in the first of encode. */
    void (*rans_encode)(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n);
    void (*rans_decode)(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n);

    /* rows.inc.h: matrices of r rows y_k, `stride` floats apart
     * dots: x_i times y_k,i is added to lane (from + i) % 16 of the k-th 16. add_rows: y_k += c[k] * x. add_outer: out +=
     * sign * the sum of c[k] * y_k. Each is a product and a sum, in the order of k. In float64: products adds x_i times y_i
     * to lane i % 32; take_columns: x -= the sum of c[k] * y_k, in the order of k, rounded once. */
    void (*dots)(const float *x, uint32_t n, const float *y, uint64_t stride, uint32_t r, uint32_t from, float *lane);
    void (*add_rows)(const float *x, uint32_t n, const float *c, uint32_t r, float *y, uint64_t stride);
    void (*add_outer)(const float *c, const float *y, uint64_t stride, uint32_t r, float *out, uint32_t n, float sign);
    void (*products)(const float *x, const float *y, uint32_t n, double *lane);
    void (*take_columns)(float *x, uint64_t n, const float *y, uint64_t stride, uint32_t r, const double *c);

    /* halves.inc.h: half floats, scaling, storing */
    void (*clamp)(const float *x, float *y, uint32_t n, float max); /* finite x to +-max; NaN and Inf as they are */
    void (*f32_to_f16)(const float *x, uint16_t *y, uint32_t n);
    void (*f32_to_bf16)(const float *x, uint16_t *y, uint32_t n);
    void (*f16_to_f32)(const uint16_t *x, float *y, uint32_t n);
    void (*bf16_to_f32)(const uint16_t *x, float *y, uint32_t n);
    /* x, finite, is rounded to a bfloat16, but not to Inf: away from zero as often as u, 16 random bits an element, says. */
    void (*round_bf16)(float *x, const uint16_t *u, uint32_t n);
    void (*scale)(const float *x, float *y, uint32_t n, float s); /* y = x * s; may be in place */
    /* half_body: half(clamp(x, max) * s), NaN and Inf as they are. half_keep: x, finite, less inverse * what that became, where
     * key(x) >= key. Half: float16, or bfloat16. */
    void (*half_body)(const float *x, uint16_t *y, uint32_t n, float s, float max, int bf16);
    void (*half_keep)(float *x, uint32_t n, uint32_t key, float s, float inverse, float max, int bf16);
    /* The same at random, by 16 bits an element (bits.h); every element was sent. max: a number of the half format. */
    void (*half_body_drawn)(const float *x, uint16_t *y, const uint16_t *u, uint32_t n, float s, float max, int bf16);
    void (*half_keep_drawn)(float *x, const uint16_t *u, uint32_t n, float s, float inverse, float max, int bf16);
    /* Moves the fields of halves to where float32 has them: the sign to bit 31, the exponent field, as it is, to 23 and up. */
    void (*half_words)(const uint16_t *x, uint32_t *u, uint32_t n, int bf16);
    /* y = x * s, past the caches or not; x = 0. 1: all of y is finite. fence makes such stores visible to other threads. */
    int (*drain)(float *x, float *y, uint32_t n, float s, int past);
    void (*fence)(void);

    /* signs.inc.h: a bit an element
     * signs: bit i % 8 of bits[i / 8], i < n: x[i] < 0 (-0 is not), the last byte filled up with zeros; returns how many are
     * set. draw_signs: the same of stochastic signs, which differ from x[i]'s with probability
     * 1/2 - min(|x[i]| * chance, 2^31) / 2^32, as the random u[i] falls out. */
    uint32_t (*signs)(const float *x, uint32_t n, uint8_t *bits);
    void (*draw_signs)(const float *x, const uint32_t *u, uint32_t n, float chance, uint8_t *bits);
    void (*sign_sums)(const float *x, uint32_t n, float sum[2]);     /* of the elements above 0, and of those below */
    void (*take_signs)(float *x, uint32_t n, float high, float low); /* x -= x < 0 ? low : high */
    /* out[i] += value[r][bit i of bits[r]], for r = 0 to count - 1; in blocks of four, each of which is added up first. */
    void (*sum_signs)(float *out, uint32_t n, const uint8_t *const *bits, const float (*value)[2], uint32_t count);
    void (*vote)(float *x, uint32_t n); /* x = 1, -1 or 0: its sign */
    /* x, a sum of `count` signs = +-1, becomes 1 as often as one of them drawn at random is, else -1. */
    void (*merge)(float *x, const uint16_t *u, uint32_t n, uint32_t count);

    /* checksum.inc.h: what `count` words at w, an even number, add to a message's checksum (wire.h); they are its words from
     * `from` on, a multiple of 16. */
    uint64_t (*checksum)(const uint32_t *w, uint64_t from, uint64_t count);

    /* delta.inc.h: changes: the places where elements of 1, 2 or 4 bytes of a and b differ, n at most 65536; returns how many. May
     * write up to 64 past them. gaps: the positions of the next changes; 0 if one is not below n. extras: the steps of symbols, 0 if
     * there are not enough bits. Both may read 8 bytes past the last bit. */
    uint32_t (*changes)(const void *a, const void *b, uint32_t n, uint32_t width, uint16_t *place);
    int (*gaps)(sid_gaps *g, uint32_t count, uint32_t n, uint32_t *at);
    int (*extras)(sid_extras *e, const uint8_t *symbol, uint32_t count, uint32_t *step);

    /* random.inc.h: random bits (rng.h) of elements offset .. offset + len of the stream; `offset` a multiple of 8, room in
     * out for 512 bytes from any multiple of 512 that it reaches. draw16: 16 bits an element, at half the cost. */
    void (*draw16)(const sid_draw *d, uint64_t offset, uint32_t len, uint16_t *out);
    void (*draw32)(const sid_draw *d, uint64_t offset, uint32_t len, uint32_t *out);
} sid_simd;

const sid_simd *sid_simd_for(sid_isa isa); /* NULL: this build or processor has it not */
extern const sid_simd sid_simd_base, sid_simd_avx2, sid_simd_avx512, sid_simd_avx512vbmi2;
extern const uint64_t sid_sum_pairs[SID_SUM_PAIRS]; /* checksum.c: wire.h's keys of pairs of words */

#ifdef __cplusplus
}
#endif
#endif
