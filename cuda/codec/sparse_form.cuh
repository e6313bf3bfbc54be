/* The layout of a sparse codec's work and body, and the arithmetic of one element (csrc/codec/sparse_form.h). No kernel
 * is here. An encode writes candidates to slots in the pass, reads them in the finish, and writes the body: the number
 * of entries of each wire tile (65536 elements), then indices, then values, in index order. */
#ifndef SID_SPARSE_FORM_CUH
#define SID_SPARSE_FORM_CUH

#include "../core/codec.cuh"
#include "codec/blocks.h"

/* ---- work ------------------------------------------------------------------------------------------------------ */

/* The pointers of an encode into work. */
struct sid_list {
    float *acc; /* n elements: the memory's first vector, or a place in work if no memory keeps it */
    uint64_t n;
    uint32_t *held;           /* the number of candidates of each tile; if it exceeds `slots`, they are read from acc */
    uint32_t slots;           /* of each tile: a multiple of 64, up to SID_TILE */
    float *slot_value;        /* the candidates of each tile in index order */
    uint16_t *slot_index;     /* their indices, from the tile's start */
    float *value;             /* plan->room floats: the candidates that select_counted sets aside, or line_up's list */
    float *extra;             /* values that wait for their means; else the codec's own */
    double *sums;             /* the codec's sums of each tile: needs.sums arrays, `stride` apart */
    uint32_t *counts;         /* the same for its counts */
    uint64_t stride;          /* tiles */
    double *running;          /* running sums: two buffers of SID_AT_ONCE times SID_SUMS */
    unsigned long long *part; /* each block's part of a sum of counts: two buffers */
    uint32_t *bins;           /* three buffers of SID_BINS, zero at first */
    uint32_t *counted;        /* SID_COUNTED counts of the first pass (sid_counting), zero at first */
    uint32_t *arrived;        /* the counter of sid_meet, zero at first */
    bool kept;                /* acc is the memory's */

    __device__ void move(const sid_several &k, uint32_t slice) {
        acc = kept ? sid_state_of(k, slice, acc) : sid_work_of(k, slice, acc);
        held = sid_work_of(k, slice, held);
        slot_value = sid_work_of(k, slice, slot_value);
        slot_index = sid_work_of(k, slice, slot_index);
        value = sid_work_of(k, slice, value);
        extra = sid_work_of(k, slice, extra);
        sums = sid_work_of(k, slice, sums);
        counts = sid_work_of(k, slice, counts);
        running = sid_work_of(k, slice, running);
        part = sid_work_of(k, slice, part);
        bins = sid_work_of(k, slice, bins);
        counted = sid_work_of(k, slice, counted);
        arrived = sid_work_of(k, slice, arrived);
    }
};

/* The work of a pass. A codec's own type adds what its statistics need. */
struct sid_pass_task {
    uint32_t low;   /* keys from here on are captured */
    int32_t side;   /* see sid_side */
    uint32_t shift; /* of a codec with RANGES: see sid_counting; 0: no ranges are counted */
};

/* The parts of work that a codec takes beside candidates. */
struct sid_sparse_needs {
    uint32_t sums, counts; /* of each tile */
    uint64_t extra;        /* floats */
    bool mean;             /* values travel as their mean, and `extra` has room for them */
    bool drops;            /* what the mean leaves is dropped */
    bool largest = false;  /* the codec asks for the largest candidate's key */
    bool often = false;    /* candidates are read so often that they have slots, however many they are */
};

/* The places of a sparse body's arrays (csrc/wire.h), in bytes from the payload's start. `form` and `packed` are header
 * flags, of the values and of the indices. */
struct sid_body {
    uint64_t index_at, value_at, bytes;
    uint64_t high_at; /* packed indices: where the upper bits begin, which end at value_at */
    uint32_t form, packed;
    uint32_t low;    /* packed indices: how many low bits of an index lie at index_at, up to 16 */
    uint32_t width;  /* bits of a value that is one of several levels; else 0 */
    uint32_t blocks; /* SID_FLAG_BLOCKS, or 0 */
    bool drops;      /* sid_sparse_needs */
};

enum {
    SID_FINISH_BLOCKS = 3,        /* blocks of a finish that a multiprocessor can hold */
    SID_FINISH_GRID = 2,          /* and that it gets: all must run at once, even beside a collective's blocks */
    SID_FINISH_CHUNKS = 4,        /* chunks of a block, at least */
    SID_FINISH_MOST = 4 * 1024,   /* blocks of a finish in all */
    SID_FINISH_SHARED = 14 << 10, /* bytes of shared memory that a block takes, at most */
    SID_AT_ONCE = 4,              /* sums that share a meeting of the blocks */
    SID_COUNTED = SID_BLOCK       /* ranges of keys that a pass counts; the last entry counts all candidates */
};

/* The parameters with which every sparse codec begins its table. */
enum {
    SID_SPARSE_DENSITY,
    SID_SPARSE_VALUES,
    SID_SPARSE_INDICES,
    SID_SPARSE_PARAMS
};

sid_list sid_carve_list(const sid_plan *p, sid_carver *c, uint64_t *clear, const sid_sparse_needs &needs);
/* blocks: of topk, where it has them. */
sid_body sid_body_of(const sid_plan *p, bool mean, const blocks_form &blocks = {});
uint64_t sid_sparse_work(const sid_plan *p, const sid_sparse_needs &needs);
uint64_t sid_sparse_encode_work(const sid_plan *p, const sid_sparse_needs &needs); /* bytes beyond scratch */
uint64_t sid_sparse_decode_work();                                                 /* bytes beyond scratch */
sid_status sid_sparse_decode(sid_cuda_decoding &c, bool mean, const blocks_form &blocks = {});

/* ---- elements --------------------------------------------------------------------------------------------------- */

__device__ inline float sid_sent_half(float x) { /* as float16: saturating */
    const float max = 65504.0f;
    return sid_from_f16(sid_to_f16(x > max ? max : x < -max ? -max : x));
}

__device__ inline float sid_sent_level(float x, const sid_levels &l) {
    const uint32_t level = sid_level_key(sid_level_of(sid_key(x), &l), &l);
    return sid_bits_f32(level | (sid_f32_bits(x) & 0x80000000u));
}

/* Returns what the rule left of element i. */
__device__ inline float sid_sparse_keep(const sid_rule &rule, const sid_levels &levels, float acc, uint64_t i) {
    const uint32_t sign = rule.flags & SID_FLAG_MEAN ? sid_f32_bits(rule.scale) & 0x80000000u : 0;
    const uint32_t key = rule.flags & SID_FLAG_MEAN ? sid_f32_bits(acc) ^ sign : sid_key(acc);
    if (key >> 31 || key < rule.key || (key == rule.key && i >= rule.cut)) return acc;
    if (rule.flags & SID_FLAG_MEAN) return rule.inverse > 0 ? 0.0f : acc - rule.scale;
    if (rule.flags & (SID_FLAG_LOG8 | SID_FLAG_LOG4 | SID_FLAG_LOG2)) return acc - sid_sent_level(acc, levels);
    return rule.flags & SID_FLAG_HALF ? acc - sid_sent_half(acc) : 0.0f;
}

/* Returns the value to select by: x, or for side 1 or -1 its magnitude if it has that sign, else 0. */
__device__ inline float sid_side(float x, int32_t side) {
    const uint32_t v = sid_f32_bits(x) ^ (side < 0 ? 0x80000000u : 0u);
    return !side ? x : sid_bits_f32(v >> 31 ? 0 : v);
}

/* Calls f(c, x) for the elements of unit u of a list of `count` values, by a whole warp. c, 0 to 3, says to which of
 * the thread's four sums x belongs (sums.h). */
template <typename F>
__device__ inline void sid_each_in_unit(const float *val, uint64_t count, uint64_t u, const F &f) {
    const uint64_t end = (u + 1) * SID_TILE < count ? (u + 1) * SID_TILE : count;
    for (uint64_t i = u * SID_TILE + sid_lane() * SID_QUAD; i < end; i += SID_ROW)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < end) f(c, val[i + c]);
}

/* The sum of its magnitudes with key >= from (sparse_sum); *many: so many they are. */
__device__ inline double sid_size_of(const float *val, uint64_t count, uint64_t u, uint32_t from, double *many) {
    float lane[SID_QUAD] = {};
    uint32_t mine = 0;
    sid_each_in_unit(val, count, u, [&](uint32_t c, float x) {
        const bool in = sid_key(x) >= from;
        lane[c] += in ? sid_bits_f32(sid_key(x)) : 0.0f;
        mine += in;
    });
    *many = (double)sid_warp_sum(mine);
    const float sum = sid_join_lanes(lane);
    if (sid_key(sum) < SID_KEY_INF) return (double)sum;
    double wide[SID_QUAD] = {};
    sid_each_in_unit(val, count, u, [&](uint32_t c, float x) {
        wide[c] += sid_key(x) >= from ? (double)sid_bits_f32(sid_key(x)) : 0.0;
    });
    return sid_join_lanes(wide);
}

#endif
