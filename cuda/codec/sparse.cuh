/* What the sparse codecs share (csrc/codec/sparse.c is the law). An encode is two kernels after sid_begin:
 *     walk      acc from gradient and memory; candidates, all keys from a predicted `low` on, into their tile's slots;
 *               the sums of each tile that the codec asks for
 *     finish    one cooperative launch whose blocks wait for one another: candidates into one list in index order, the
 *               codec's finish() as it stands in csrc/codec/, the payload. Where the law reads again, acc is read again
 *               here; nothing is asked of the host.
 * Counts are integers and sums have the order of internal.h, so that payload and state are those of the CPU.
 *
 * Bytes per element, float32 with a residual, density d, 1.3 d candidates:
 *     walk      12 + 8 d      reads gradient and acc, writes acc: the floor of error feedback; and candidates of 6 bytes
 *     finish    8 d + 10 d    reads them, writes them as a list of 8 bytes; then, in L2 as a rule, 5 d a digit of a
 *               + 6 d         selection or a sum, 10 d twice to write a payload of 6 d; of packed indices and 4-bit values
 *                             each entry sets 2 to 4 bit fields of zeroed words, 4 bytes a field, in L2
 *     again     4 + 8 d       a reading of acc where the prediction failed, as in the first step */
#ifndef SID_SPARSE_CUH
#define SID_SPARSE_CUH

#include "../core/codec.cuh"

/* ---- work ------------------------------------------------------------------------------------------------------ */

struct sid_list {
    float *acc; /* the memory's first vector, or where none keeps it a place in work */
    uint64_t n;
    uint32_t *held;            /* of each tile, how many are candidates: where more than `slots`, acc has them */
    unsigned long long *pairs; /* of each tile, above a key << 32 | equal to it */
    uint32_t slots;            /* a tile's, up to SID_TILE */
    float *slot_value;         /* its candidates in index order */
    uint16_t *slot_index;      /* from the tile's start on */
    float *value;              /* all candidates in index order */
    uint32_t *index;           /* in the group */
    float *extra;              /* the codec's own; values that travel as their mean */
    double *sums;              /* of each tile: the codec's statistics, one array after the other */
    uint32_t *counts;          /* as well */
    uint64_t stride;           /* of those arrays */
    double *running;           /* SID_SUMS of each of SID_AT_ONCE sums, twice */
    unsigned long long *part;  /* a block's, twice */
    uint32_t *bins;            /* SID_BINS, three times, zeroed */
};

/* What a codec takes of work beside candidates. */
struct sid_sparse_needs {
    uint32_t sums, counts; /* of each tile */
    uint64_t extra;        /* floats */
    bool mean;             /* values travel as their mean, and `extra` has room for them */
};

/* Where a sparse body's arrays lie (csrc/wire.h), in bytes from the payload's start. `form`, `packed`: header flags, of the
 * values and of the indices. */
struct sid_body {
    uint64_t index_at, value_at, bytes;
    uint64_t high_at; /* of packed indices: the upper bits, up to value_at */
    uint32_t form, packed;
    uint32_t low;   /* of packed indices: so many bits lie apart from the upper ones */
    uint32_t width; /* of levels: bits; else 0 */
};

enum {
    SID_FINISH_BLOCKS = 3,      /* that fit on a multiprocessor */
    SID_FINISH_GRID = 2,        /* that are asked for: all must run at once, beside a collective's blocks, too */
    SID_FINISH_CHUNKS = 4,      /* for a block, or more */
    SID_FINISH_MOST = 4 * 1024, /* blocks in all */
    SID_FINISH_SHARED = 14
        << 10,      /* bytes of shared memory that a block takes, at most: benchmarks/sass.py counts on it */
    SID_AT_ONCE = 4 /* sums */
};

/* Of the codec's parameters, those every sparse codec begins its table with. */
enum {
    SID_SPARSE_DENSITY,
    SID_SPARSE_VALUES,
    SID_SPARSE_INDICES,
    SID_SPARSE_PARAMS
};

sid_list sid_carve_list(const sid_plan *p, sid_carver *c, uint64_t *clear, const sid_sparse_needs &needs);
sid_body sid_body_of(const sid_plan *p, bool mean);
uint64_t sid_sparse_work(const sid_plan *p, const sid_sparse_needs &needs);
sid_status sid_sparse_decode(sid_cuda_decoding &c, bool mean);

/* ---- elements --------------------------------------------------------------------------------------------------- */

__device__ inline float sid_sent_half(float x) { /* as float16: saturating */
    const float max = 65504.0f;
    return sid_from_f16(sid_to_f16(x > max ? max : x < -max ? -max : x));
}

__device__ inline float sid_sent_level(float x, const sid_levels &l) {
    const uint32_t level = sid_level_key(sid_level_of(sid_key(x), &l), &l);
    return sid_bits_f32(level | (sid_f32_bits(x) & 0x80000000u));
}

/* What the rule left of element i. */
__device__ inline float sid_sparse_keep(const sid_rule &rule, const sid_levels &levels, float acc, uint64_t i) {
    const uint32_t sign = rule.flags & SID_FLAG_MEAN ? sid_f32_bits(rule.scale) & 0x80000000u : 0;
    const uint32_t key = rule.flags & SID_FLAG_MEAN ? sid_f32_bits(acc) ^ sign : sid_key(acc);
    if (key >> 31 || key < rule.key || (key == rule.key && i >= rule.cut)) return acc;
    if (rule.flags & SID_FLAG_MEAN) return acc - rule.scale;
    if (rule.flags & (SID_FLAG_LOG8 | SID_FLAG_LOG4)) return acc - sid_sent_level(acc, levels);
    return rule.flags & SID_FLAG_HALF ? acc - sid_sent_half(acc) : 0.0f;
}

/* What is selected from: x, or (side 1, -1) its magnitude where it has that sign, else 0. */
__device__ inline float sid_side(float x, int32_t side) {
    const uint32_t v = sid_f32_bits(x) ^ (side < 0 ? 0x80000000u : 0u);
    return !side ? x : sid_bits_f32(v >> 31 ? 0 : v);
}

/* Calls f(c, x) for the elements of unit u of a list, by a whole warp: x goes to lane c of this thread. */
template <typename F>
__device__ inline void sid_each_in_unit(const float *val, uint64_t count, uint64_t u, const F &f) {
    const uint64_t end = (u + 1) * SID_TILE < count ? (u + 1) * SID_TILE : count;
    for (uint64_t i = u * SID_TILE + sid_lane() * SID_QUAD; i < end; i += SID_ROW)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < end) f(c, val[i + c]);
}

/* The sum of its magnitudes (sparse_sum). */
__device__ inline double sid_size_of(const float *val, uint64_t count, uint64_t u) {
    float lane[SID_QUAD] = {};
    sid_each_in_unit(val, count, u, [&](uint32_t c, float x) { lane[c] += sid_bits_f32(sid_key(x)); });
    const float sum = sid_join_lanes(lane);
    if (sid_key(sum) < SID_KEY_INF) return (double)sum;
    double wide[SID_QUAD] = {};
    sid_each_in_unit(val, count, u, [&](uint32_t c, float x) { wide[c] += (double)sid_bits_f32(sid_key(x)); });
    return sid_join_lanes(wide);
}

/* ---- a reading ------------------------------------------------------------------------------------------------- */

/* What a reading is to do; a codec's own adds to it what its statistics need. */
struct sid_reading {
    uint32_t low; /* keys from here on are captured */
    int32_t side; /* see sid_side */
};

/* Calls f(c, x) for the elements of a tile once acc is stored, by the same lanes that have shown them to the codec. */
template <typename F>
__device__ inline void sid_each_in_tile(const sid_list &l, int32_t side, uint64_t tile, const F &f) {
    const uint64_t at = tile * SID_TILE;
    const uint32_t len = sid_tile_len(l.n, at);
    for (uint32_t i = sid_lane() * SID_QUAD; i < len; i += SID_ROW)
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < len) f(c, sid_side(l.acc[at + i + c], side));
}

/* The sum of f(x) over them, in float64. */
template <typename F>
__device__ inline double sid_wide_sum(const sid_list &l, int32_t side, uint64_t tile, const F &f) {
    double lane[SID_QUAD] = {};
    sid_each_in_tile(l, side, tile, [&](uint32_t c, float x) { lane[c] += f(x); });
    return sid_join_lanes(lane);
}

/* sparse_probe: a reading that counts keys from `probe` on, into the first of list.counts. */
struct sid_probing : sid_reading {
    uint32_t on, probe;
};
struct sid_probe_unit {
    uint32_t count;
    __device__ void start() { count = 0; }
    __device__ void row(const sid_probing &r, const float (&x)[SID_QUAD], uint32_t exist) {
        if (!r.on) return;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) count += c < exist && sid_key(x[c]) >= r.probe;
    }
    __device__ void done(const sid_probing &r, const sid_list &l, uint64_t tile) {
        if (!r.on) return;
        const uint32_t sum = sid_warp_sum(count);
        if (sid_lane() == 0) l.counts[tile] = sum;
    }
};

/* The sum of a tile's magnitudes (sparse_sum). */
struct sid_size_unit {
    float lane[SID_QUAD];
    __device__ void start() { lane[0] = lane[1] = lane[2] = lane[3] = 0; }
    __device__ void row(const float (&x)[SID_QUAD]) {
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += sid_bits_f32(sid_key(x[c]));
    }
    __device__ double done(const sid_list &l, int32_t side, uint64_t tile) {
        const float sum = sid_join_lanes(lane);
        if (sid_key(sum) < SID_KEY_INF) return (double)sum;
        return sid_wide_sum(l, side, tile, [](float x) { return (double)sid_bits_f32(sid_key(x)); });
    }
};

/* A row of a tile: candidates go to its slots, in index order. By the whole warp. */
__device__ inline void sid_capture(const sid_list &list, uint64_t tile, uint32_t first, uint32_t low,
                                   const float (&x)[SID_QUAD], uint32_t count, uint32_t &held) {
    uint32_t row = 0, before = 0;
    bool hit[SID_QUAD];
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) {
        hit[c] = c < count && sid_key(x[c]) >= low;
        const uint32_t b = __ballot_sync(SID_FULL, hit[c]);
        row += __popc(b);
        before += __popc(b & sid_lanes_below());
    }
    uint32_t to = held + before;
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) {
        if (hit[c] && to < list.slots) {
            list.slot_value[tile * list.slots + to] = x[c];
            list.slot_index[tile * list.slots + to] = (uint16_t)(first + c);
        }
        to += hit[c];
    }
    held += row;
}

/* The codec of the walk (codec.cuh). Law is a sparse codec: see sid_finish_kernel. */
template <class Law> struct sid_gathering {
    enum {
        REREADS = 1,
        RAW = 0
    };
    struct shared {
        typename Law::reading reading;
        sid_levels levels; /* of the last step */
    };
    struct unit {
        typename Law::unit own;
        uint32_t held;
    };
    Law law;
    sid_list list;
    const sid_state *state;

    __device__ void begin(shared &s) const {
        if (threadIdx.x == 0) {
            const sid_rule &rule = state->rule;
            law.begin(s.reading, state->codec, state->steps);
            s.levels = sid_levels_from(rule.base, rule.step, rule.flags & SID_FLAG_LOG8 ? 8 : 4);
        }
        __syncthreads();
    }
    __device__ void end(shared &) const {}
    __device__ float keep(const shared &s, const sid_rule &rule, float acc, uint64_t i) const {
        return sid_sparse_keep(rule, s.levels, acc, i);
    }

    __device__ void start(shared &s, unit &u) const {
        u.held = 0;
        law.start(s.reading, u.own);
    }
    __device__ void quad(shared &s, unit &u, float (&x)[SID_QUAD], uint64_t i, uint32_t count) const {
        const uint64_t tile = i / SID_TILE;
        float y[SID_QUAD];
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = c < count ? sid_side(x[c], s.reading.side) : 0.0f;
        law.row(s.reading, u.own, y, count);
        sid_capture(list, tile, (uint32_t)(i % SID_TILE), s.reading.low, y, count, u.held);
    }
    __device__ void done(shared &s, unit &u, uint64_t tile) const {
        if (sid_lane() == 0) list.held[tile] = u.held;
        law.done(s.reading, u.own, list, tile);
    }
};

template <class Law> struct sid_walk_blocks<sid_gathering<Law>> {
    enum {
        N = Law::WALK_BLOCKS
    };
};

/* ---- the finish -------------------------------------------------------------------------------------------------- */

struct sid_pick { /* csrc/codec/sparse.h */
    uint32_t key;
    uint64_t above, ties;
};

/* What is sent: keys from `from` on, and the first `ties` of those with the key below it. */
struct sid_chosen {
    uint32_t from;
    uint64_t ties;
};

struct sid_finishing {
    sid_scratch *scratch;
    sid_state *state;
    sid_stats *stats; /* or NULL */
    uint8_t *payload;
    const float *acc;
    uint64_t n, tiles, k, cap, room;
    sid_list list;
    sid_body body;
    sid_head head;
    sid_draw draw;
};

struct sid_picked {
    uint32_t digit, rank, in; /* the digit of the rank-th largest, its rank among those with that digit, their number */
};

struct sid_crew_shared {
    uint32_t bins[SID_BINS];
    unsigned long long scan[SID_LANES + 1];
    double tree[SID_BLOCK];
    sid_part_sum sums[SID_WARPS];
    sid_picked picked;
    uint64_t codec[16]; /* the state's words, in the making */
    sid_chosen chosen;  /* the end: what is sent, the rule, and what the header says */
    uint32_t key, flags;
    bool all; /* no tie is left out: then the rule needs no cut */
    sid_levels levels;
    uint64_t found;
    float threshold;
    uint32_t stages;
};

/* All blocks of the finish, or one thread's view of it. What is computed here is the same in every block, each call is
 * made by all threads of all of them. */
struct sid_crew {
    const sid_finishing &f;
    sid_crew_shared &s;
    uint32_t bins_turn, part_turn,
        running_turn;     /* which of several buffers is next: others may still read the last one */
    uint64_t first, last; /* this block's tiles, whole chunks */
    /* The candidates, as sparse_work has them. */
    uint64_t count;
    uint32_t low;
    bool compacted;
    uint32_t walks;

    __device__ sid_crew(const sid_finishing &of, sid_crew_shared &shared)
        : f(of), s(shared), bins_turn(0), part_turn(0), running_turn(0), count(0), low(0), compacted(false), walks(1) {
        const uint64_t chunks = f.tiles / SID_WARPS;
        first = chunks * blockIdx.x / gridDim.x * SID_WARPS;
        last = chunks * (blockIdx.x + 1) / gridDim.x * SID_WARPS;
    }

    /* f by one thread of each block. */
    template <typename F> __device__ void lead(const F &f) {
        __syncthreads();
        if (threadIdx.x == 0) f();
        __syncthreads();
    }

    template <typename T> __device__ T block_sum(T x) {
        unsigned long long total;
        (void)sid_block_scan((unsigned long long)x, s.scan, &total);
        __syncthreads();
        return (T)total;
    }
    __device__ uint32_t block_max(uint32_t x) {
        x = sid_warp_max(x);
        if (sid_lane() == 0) s.scan[sid_warp()] = x;
        __syncthreads();
        for (uint32_t w = 0; w < SID_WARPS; w++) x = s.scan[w] > x ? (uint32_t)s.scan[w] : x;
        __syncthreads();
        return x;
    }

    /* x: a thread's. Over the blocks before this one, and over all; others see what was written before. */
    struct sums {
        unsigned long long before, total;
    };
    __device__ sums over_blocks(unsigned long long x) {
        unsigned long long *part = f.list.part + (part_turn ^= 1) * SID_FINISH_MOST;
        const unsigned long long mine = block_sum(x);
        if (threadIdx.x == 0) part[blockIdx.x] = mine;
        sid_grid_sync();
        unsigned long long before = 0, total = 0;
        for (uint32_t b = threadIdx.x; b < gridDim.x; b += SID_BLOCK) {
            total += part[b];
            before += b < blockIdx.x ? part[b] : 0;
        }
        before = block_sum(before);
        return {before, block_sum(total)};
    }

    /* ---- selection by digits */

    /* `rank` from 1; what no counted digit reaches has digit 0, which is not counted: `all` are there with any. */
    __device__ sid_picked pick_digit(const uint32_t *bins, uint64_t rank, uint64_t all) {
        enum {
            EACH = SID_BINS / SID_BLOCK
        };
        const uint32_t top = SID_BINS - 1 - threadIdx.x * EACH; /* this thread's bins: EACH from top down */
        uint32_t own[EACH];
        unsigned long long mine = 0, total;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            own[i] = top - i ? bins[top - i] : 0;
            mine += own[i];
        }
        unsigned long long above = sid_block_scan(mine, s.scan, &total) - mine;
#pragma unroll
        for (uint32_t i = 0; i < EACH; i++) {
            if (above < rank && rank <= above + own[i]) s.picked = {top - i, (uint32_t)(rank - above), own[i]};
            above += own[i];
        }
        if (threadIdx.x == 0 && total < rank) s.picked = {0, (uint32_t)(rank - total), (uint32_t)(all - total)};
        __syncthreads();
        const sid_picked p = s.picked;
        __syncthreads();
        return p;
    }

    /* One digit, of `bits` from bit `shift` on: of the keys that `each` shows to its argument those whose higher digits are
     * `prefix`. */
    template <typename Each>
    __device__ sid_picked digit(const Each &each, uint32_t prefix, uint32_t shift, uint32_t bits, uint64_t rank,
                                uint64_t all) {
        uint32_t *bins = f.list.bins + bins_turn * SID_BINS;
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) s.bins[i] = 0;
        __syncthreads();
        each([&](uint32_t key) {
            const uint32_t d = key >> shift, b = d & ((1u << bits) - 1u);
            if (d >> bits == prefix && b) atomicAdd(&s.bins[b], 1u);
        });
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK)
            if (s.bins[i]) atomicAdd(&bins[i], s.bins[i]);
        sid_grid_sync();
        bins_turn = (bins_turn + 1) % 3;
        if (blockIdx.x == 0) { /* of the digit before: all have read it */
            uint32_t *old = f.list.bins + (bins_turn + 1) % 3 * SID_BINS;
            for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) old[i] = 0;
        }
        return pick_digit(bins, rank, all);
    }

    template <typename Each> __device__ sid_pick select_from(const Each &each, uint64_t all, uint64_t rank) {
        sid_picked p = digit(each, 0, 20, 11, rank, all);
        uint32_t key = p.digit;
#pragma unroll 1
        for (uint32_t shift = 20; shift;) {
            shift -= 10;
            p = digit(each, key, shift, 10, p.rank, p.in);
            key = key << 10 | p.digit;
        }
        return {key, rank - p.rank, p.in};
    }

    /* Calls f(x) for all values, each by one thread. */
    template <typename F> __device__ void each_value(const float *val, uint64_t n, const F &f) const {
        for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < n; i += (uint64_t)gridDim.x * SID_BLOCK)
            f(val[i]);
    }
    __device__ sid_pick select_of(const float *val, uint64_t n, uint64_t rank) {
        return select_from([&](const auto &show) { each_value(val, n, [&](float x) { show(sid_key(x)); }); }, n, rank);
    }
    __device__ sid_pick select(uint64_t rank) { return select_of(f.list.value, count, rank); }

    __device__ uint64_t above(uint32_t key) { /* candidates with key >= key */
        unsigned long long mine = 0;
        each_value(f.list.value, count, [&](float x) { mine += sid_key(x) >= key; });
        return over_blocks(mine).total;
    }
    __device__ uint32_t largest() { /* candidate's key; 0 of none */
        unsigned long long *part = f.list.part + (part_turn ^= 1) * SID_FINISH_MOST;
        uint32_t most = 0;
        const auto take = [&](uint32_t key) { most = key > most ? key : most; };
        each_value(f.list.value, count, [&](float x) { take(sid_key(x)); });
        most = block_max(most);
        if (threadIdx.x == 0) part[blockIdx.x] = most;
        sid_grid_sync();
        for (uint32_t b = threadIdx.x; b < gridDim.x; b += SID_BLOCK) take((uint32_t)part[b]);
        return block_max(most);
    }

    /* ---- sums in internal.h's order */

    template <uint32_t SUMS> __device__ double *next_running() {
        static_assert(SUMS <= SID_AT_ONCE, "sums at once");
        return f.list.running + (running_turn ^= 1) * SID_AT_ONCE * SID_SUMS;
    }

    /* Running sums of `units` units that unit(u, sum) computes, SUMS at a time, by a whole warp each; their totals. */
    template <uint32_t SUMS, typename Unit>
    __device__ void total(uint64_t units, const Unit &unit, double (&sum)[SUMS]) {
        double *running = next_running<SUMS>();
        const uint32_t used = units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
        for (uint32_t j = blockIdx.x * SID_WARPS + sid_warp(); j < used; j += gridDim.x * SID_WARPS) {
            double own[SUMS] = {};
            for (uint64_t u = j; u < units; u += SID_SUMS) {
                double x[SUMS];
                unit(u, x);
                for (uint32_t k = 0; k < SUMS; k++) own[k] += x[k];
            }
            if (sid_lane() == 0)
                for (uint32_t k = 0; k < SUMS; k++) running[k * SID_SUMS + j] = own[k];
        }
        sid_grid_sync();
        for (uint32_t k = 0; k < SUMS; k++) sum[k] = tree(running + k * SID_SUMS, used);
    }

    /* `used` running sums together. */
    __device__ double tree(const double *running, uint32_t used) {
        double mine[SID_SUMS / SID_BLOCK];
        for (uint32_t i = 0; i < SID_SUMS / SID_BLOCK; i++) {
            const uint32_t j = i * SID_BLOCK + threadIdx.x;
            mine[i] = j < used ? running[j] : 0.0;
        }
        static_assert(SID_SUMS == 4 * SID_BLOCK, "two halvings in a thread");
        s.tree[threadIdx.x] = (mine[0] + mine[2]) + (mine[1] + mine[3]);
        for (uint32_t w = SID_BLOCK / 2; w; w /= 2) {
            __syncthreads();
            if (threadIdx.x < w) s.tree[threadIdx.x] += s.tree[threadIdx.x + w];
        }
        __syncthreads();
        const double sum = s.tree[0];
        __syncthreads();
        return sum;
    }

    /* Sums over the tiles of value(k, tile), for k = 0 to rows - 1. */
    template <uint32_t SUMS, typename Value>
    __device__ void total_by(const Value &value, double (&sum)[SUMS], uint32_t rows = SUMS) {
        double *running = next_running<SUMS>();
        const uint64_t units = sid_tiles(f.n);
        const uint32_t used = units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
        for (uint32_t i = blockIdx.x * SID_BLOCK + threadIdx.x; i < rows * SID_SUMS; i += gridDim.x * SID_BLOCK) {
            const uint32_t k = i / SID_SUMS;
            double own = 0;
            for (uint64_t u = i % SID_SUMS; u < units; u += SID_SUMS) own += value(k, u);
            running[i] = own;
        }
        sid_grid_sync();
#pragma unroll
        for (uint32_t k = 0; k < SUMS; k++)
            if (k < rows) sum[k] = tree(running + k * SID_SUMS, used);
    }

    /* What a reading has left of each tile. */
    template <uint32_t SUMS> __device__ void total_of_tiles(uint32_t at, double (&sum)[SUMS], uint32_t rows = SUMS) {
        const sid_list &l = f.list;
        total_by([&](uint32_t k, uint64_t u) { return l.sums[(at + k) * l.stride + u]; }, sum, rows);
    }
    __device__ uint64_t count_of_tiles(uint32_t at) {
        unsigned long long mine = 0;
        for (uint64_t u = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; u < sid_tiles(f.n);
             u += (uint64_t)gridDim.x * SID_BLOCK)
            mine += f.list.counts[at * f.list.stride + u];
        return over_blocks(mine).total;
    }

    /* ---- candidates, as the reading has left them: tile by tile */

    /* Calls f(is one, index in the tile, value) for those of a tile in index order, 32 at a time, by a whole warp. */
    template <typename F>
    __device__ void each_of(const sid_reading &r, uint64_t tile, uint32_t held, const F &f) const {
        const sid_list &l = this->f.list;
        const bool spilled = held > l.slots;
        const uint64_t at = tile * SID_TILE;
        const uint32_t upto = spilled ? sid_tile_len(this->f.n, at) : held;
        for (uint32_t from = 0; from < upto; from += SID_LANES) {
            const uint32_t i = from + sid_lane();
            bool is = i < upto;
            uint32_t index = i;
            float value = 0;
            if (is && spilled) {
                value = sid_side(this->f.acc[at + i], r.side);
                is = sid_key(value) >= r.low;
            }
            if (is && !spilled) {
                index = l.slot_index[tile * l.slots + i];
                value = l.slot_value[tile * l.slots + i];
            }
            f(is, index, value);
        }
    }
    __device__ uint32_t held(uint64_t tile) const { return tile * SID_TILE < f.n ? f.list.held[tile] : 0; }

    /* Candidates of the tiles above and equal to a key. */
    __device__ unsigned long long count_pairs(const sid_reading &r, uint32_t from) {
        unsigned long long own = 0;
        for (uint64_t tile = first + sid_warp(); tile < last; tile += SID_WARPS) {
            unsigned long long pair = 0;
            each_of(r, tile, held(tile), [&](bool is, uint32_t, float x) {
                const uint32_t key = sid_key(x);
                if (is) pair += key >= from ? 1ull << 32 : key + 1 == from;
            });
            pair = sid_warp_sum(pair);
            if (sid_lane() == 0) {
                f.list.pairs[tile] = pair;
                own += pair;
            }
        }
        __syncthreads();
        return own;
    }

    /* The end of a reading: candidates into the list. `best`: how many of the largest matter where not all have room; then
     * these are all that is left (sparse_settle). */
    __device__ void settle(const sid_reading &r, uint64_t best) {
        const uint64_t real = sid_tiles(f.n);
        unsigned long long own = 0;
        for (uint64_t tile = first + threadIdx.x; tile < last; tile += SID_BLOCK) own += held(tile);
        sums at = over_blocks(own << 32);
        sid_chosen what = {r.low, 0};
        count = at.total >> 32;
        low = r.low;
        compacted = f.room < f.n && count - held(real - 1) + SID_TILE > f.room;
        if (compacted) {
            const sid_pick pick = select_from(
                [&](const auto &show) {
                    for (uint64_t tile = first + sid_warp(); tile < last; tile += SID_WARPS)
                        each_of(r, tile, held(tile), [&](bool is, uint32_t, float x) {
                            if (is) show(sid_key(x));
                        });
                },
                count, best);
            what = {pick.key + 1, best - pick.above};
            count = best;
            low = what.from;
            at = over_blocks(count_pairs(r, what.from));
        }
        gather(r, what, at.before);
        sid_grid_sync();
    }

    /* `at`: chosen ones above, and equal << 32, in the blocks before. */
    __device__ void gather(const sid_reading &r, const sid_chosen &what, unsigned long long at) {
        const sid_list &l = f.list;
        for (uint64_t group = first; group < last; group += SID_LANES) { /* so many tiles: their counts a lane each */
            const uint64_t mine = group + sid_lane();
            unsigned long long pair = 0;
            uint32_t own = 0;
            if (mine < last) {
                own = held(mine);
                pair = compacted ? l.pairs[mine] : (unsigned long long)own << 32;
            }
            const unsigned long long upto = sid_warp_scan(pair);
            for (uint32_t t = sid_warp(); t < SID_LANES; t += SID_WARPS) {
                const uint64_t tile = group + t;
                const uint32_t have = __shfl_sync(SID_FULL, own, t);
                const unsigned long long before = at + __shfl_sync(SID_FULL, upto - pair, t);
                uint32_t more = (uint32_t)(before >> 32), same = (uint32_t)before;
                each_of(r, tile, have, [&](bool is, uint32_t index, float x) {
                    const bool is_more = is && sid_key(x) >= what.from, is_same = is && sid_key(x) + 1 == what.from;
                    const uint32_t all_more = __ballot_sync(SID_FULL, is_more),
                                   all_same = __ballot_sync(SID_FULL, is_same);
                    const uint32_t more_here = more + __popc(all_more & sid_lanes_below());
                    const uint32_t same_here = same + __popc(all_same & sid_lanes_below());
                    if (is_more || (is_same && same_here < what.ties)) {
                        const uint32_t slot = sid_slot(more_here, same_here, (uint32_t)what.ties);
                        l.value[slot] = x;
                        l.index[slot] = (uint32_t)(tile * SID_TILE + index);
                    }
                    more += __popc(all_more);
                    same += __popc(all_same);
                });
            }
            at += __shfl_sync(SID_FULL, upto, SID_LANES - 1);
        }
    }

    /* Another reading, of acc as it is stored. */
    template <class Law> __device__ void reread(const Law &law, const typename Law::reading &r) {
        __syncthreads();
        for (uint64_t tile = first + sid_warp(); tile < last; tile += SID_WARPS) {
            const uint64_t at = tile * SID_TILE;
            if (at >= f.n) break;
            const uint32_t len = sid_tile_len(f.n, at);
            typename Law::unit unit;
            uint32_t held = 0;
            law.start(r, unit);
#pragma unroll 2
            for (uint32_t i = sid_lane() * SID_QUAD; i < SID_TILE; i += SID_ROW) {
                const uint32_t count = sid_count4(len, i);
                float x[SID_QUAD] = {};
                if (count) {
                    const float4 v = *(const float4 *)(f.acc + at + i);
                    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
                }
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = c < count ? sid_side(x[c], r.side) : 0.0f;
                law.row(r, unit, x, count);
                sid_capture(f.list, tile, i, r.low, x, count, held);
            }
            if (sid_lane() == 0) f.list.held[tile] = held;
            law.done(r, unit, f.list, tile);
        }
        walks++;
        __syncthreads();
    }

    /* ---- the end */

    /* sparse_emit_from and sparse_emit: settle what is sent, and the rule. */
    __device__ void send_from(uint32_t key, uint64_t found, uint32_t flags) {
        lead([&] {
            s.chosen = {key, 0};
            s.key = key;
            s.all = true;
            s.flags = flags;
            s.found = found;
            s.threshold = sid_bits_f32(key);
        });
    }
    __device__ void send(const sid_pick &pick, uint64_t take, uint64_t found, uint32_t flags) {
        const bool dropped = compacted && pick.key < low, all = take == pick.ties && !dropped;
        lead([&] {
            s.chosen = {pick.key + !all, all ? 0 : take};
            s.key = pick.key;
            s.all = all;
            s.flags = flags;
            s.found = found;
            s.threshold = sid_bits_f32(pick.key);
        });
    }

    /* All that reach the key, `found` of them; or the largest, where that is more than the capacity. */
    __device__ void send_capped(uint32_t key, uint64_t found) {
        if (found > f.cap) {
            const sid_pick pick = select(f.cap);
            send(pick, f.cap - pick.above, found, SID_FLAG_RAISED);
        } else
            send_from(key, found, 0);
    }

    /* sparse_reach: 0: read again, as r then says. */
    template <class Reading> __device__ bool reach(Reading &r, uint32_t key, uint64_t *found) {
        if (key >= low) {
            *found = above(key);
            return true;
        }
        if (r.on && r.probe == key) {
            *found = count_of_tiles(0);
            return true;
        }
        lead([&] {
            r.on = 1;
            r.probe = key;
            r.low = again(key);
        });
        return false;
    }
    __device__ uint32_t again(uint32_t key) const { return compacted ? low - 1 : key; }

    /* Candidates to the payload, in index order. */
    __device__ void write(int32_t side) {
        const sid_list &l = f.list;
        const sid_body &b = f.body;
        const sid_chosen what = s.chosen;
        const uint64_t from = count * blockIdx.x / gridDim.x, to = count * (blockIdx.x + 1) / gridDim.x;
        unsigned long long mine = 0;
        uint32_t most = 0;
        for (uint64_t i = from + threadIdx.x; i < to; i += SID_BLOCK) {
            const uint32_t key = sid_key(l.value[i]);
            mine += key >= what.from ? 1ull << 32 : key + 1 == what.from;
            most = key > most ? key : most;
        }
        if (b.width) {
            most = block_max(most);
            if (threadIdx.x == 0) atomicMax(&f.scratch->key, most);
        }
        const sums over = over_blocks(mine);
        const uint32_t sent = sid_slot((uint32_t)(over.total >> 32), (uint32_t)over.total, (uint32_t)what.ties);
        if (b.width) /* where any is sent, the largest candidate is */
            lead([&] { s.levels = sid_levels_between(s.key, sent ? f.scratch->key : 0, b.width); });
        unsigned long long at = over.before;
        sid_part_sum own = {0};
        for (uint64_t start = from; start < to; start += SID_BLOCK) {
            const uint64_t i = start + threadIdx.x;
            const float x = i < to ? l.value[i] : 0.0f;
            const uint32_t index = i < to ? l.index[i] : 0;
            const bool more = i < to && sid_key(x) >= what.from, same = i < to && sid_key(x) + 1 == what.from;
            const unsigned long long pair = more ? 1ull << 32 : same;
            unsigned long long all;
            const unsigned long long before = at + sid_block_scan(pair, s.scan, &all) - pair;
            const uint32_t more_here = (uint32_t)(before >> 32), same_here = (uint32_t)before;
            const bool goes = more || (same && same_here < what.ties);
            if (goes) {
                const uint64_t slot = sid_slot(more_here, same_here, (uint32_t)what.ties), p = b.index_at + 2 * slot;
                const uint16_t short_index = (uint16_t)(index % SID_WIRE_TILE);
                if (b.packed) {
                    set(b.index_at, slot * b.low, index & ((1u << b.low) - 1u), own);
                    set(b.high_at, (index >> b.low) + slot, 1, own);
                } else {
                    *(uint16_t *)(f.payload + p) = short_index;
                    own.add(p, sid_half_word(p, short_index));
                }
                if (b.form & SID_FLAG_MEAN) {
                    l.extra[slot] = x;
                } else if (b.width) {
                    const uint32_t sign = sid_f32_bits(x) >> 31 << (b.width - 1);
                    set(b.value_at + 8, slot * b.width, sid_level_of(sid_key(x), &s.levels) | sign, own);
                } else if (b.form & SID_FLAG_HALF) {
                    const uint64_t v = b.value_at + 2 * slot;
                    const float max = 65504.0f;
                    const uint16_t h = sid_to_f16(x > max ? max : x < -max ? -max : x);
                    *(uint16_t *)(f.payload + v) = h;
                    own.add(v, sid_half_word(v, h));
                } else {
                    const uint64_t v = b.value_at + 4 * slot;
                    *(float *)(f.payload + v) = x;
                    own.add(v, sid_f32_bits(x));
                }
                if (same && same_here + 1 == what.ties) f.scratch->cut = index + 1ull;
            }
            count_in_tile(goes, (uint32_t)(index / SID_WIRE_TILE));
            at += all;
            __syncthreads(); /* before the next round writes scan */
        }
        own = sid_block_sums(own, s.sums);
        if (threadIdx.x == 0) atomicAdd(&f.scratch->sum, own.sum);
        sid_grid_sync();
        seal(sent, side);
    }

    /* A field of less than 32 bits, from bit `bit` on of the array at byte `at`, where nothing was set: in whatever order
     * others set the rest of its words, they end up the same, and their checksum is that of the fields. */
    __device__ void set(uint64_t at, uint64_t bit, uint32_t field, sid_part_sum &own) const {
        const uint64_t both = (uint64_t)field << bit % 32, p = at + bit / 32 * 4;
        uint32_t *words = (uint32_t *)(f.payload + p);
        const uint32_t low = (uint32_t)both, high = (uint32_t)(both >> 32);
        if (low) atomicOr(words, low);
        own.add(p, low);
        if (!high) return;
        atomicOr(words + 1, high);
        own.add(p + 4, high);
    }

    /* Nearly always the whole warp is in one wire tile. */
    __device__ void count_in_tile(bool goes, uint32_t tile) {
        uint32_t *counts = (uint32_t *)(f.payload + SID_HEADER_BYTES);
        const uint32_t all = __ballot_sync(SID_FULL, goes), low_tile = __shfl_sync(SID_FULL, tile, 0);
        const uint32_t elsewhere = __ballot_sync(SID_FULL, goes && tile != low_tile);
        if (goes && tile != low_tile) atomicAdd(&counts[tile], 1u);
        const uint32_t here = (uint32_t)__popc(all & ~elsewhere);
        if (sid_lane() == 0 && here) atomicAdd(&counts[low_tile], here);
    }

    /* Header, rule, state, statistics. */
    __device__ void seal(uint64_t sent, int32_t side) {
        const sid_body &b = f.body;
        float scale = s.threshold, mean = 0;
        if (b.form & SID_FLAG_MEAN) {
            double sum[1];
            total(sid_tiles(sent), [&](uint64_t u, double (&x)[1]) { x[0] = sid_size_of(f.list.extra, sent, u); }, sum);
            mean = sent ? (float)(sum[0] / (double)sent) : 0.0f;
        }
        if (blockIdx.x) return;
        const uint32_t *counts = (const uint32_t *)(f.payload + SID_HEADER_BYTES);
        sid_part_sum own = {0};
        for (uint64_t t = threadIdx.x; t < sid_wire_tiles(f.n); t += SID_BLOCK)
            own.add(SID_HEADER_BYTES + 4 * t, counts[t]);
        own = sid_block_sums(own, s.sums);
        if (threadIdx.x) return;
        sid_rule rule = {};
        if (b.width) {
            rule.base = s.levels.base;
            rule.step = s.levels.step;
            if (sent) {
                *(uint2 *)(f.payload + b.value_at) = make_uint2(rule.base, rule.step);
                own.add(b.value_at, rule.base);
                own.add(b.value_at + 4, rule.step);
            }
        }
        rule.key = s.key;
        rule.flags = b.form;
        rule.cut = s.all ? f.n : f.scratch->cut;
        if (b.form & SID_FLAG_MEAN) rule.scale = scale = side < 0 && sent ? -mean : mean;
        sid_seal((sid_header *)f.payload, f.head,
                 s.flags | b.form | b.packed | (f.scratch->nonfinite ? (uint32_t)SID_FLAG_NONFINITE : 0u), sent, scale,
                 f.scratch->sum + own.sum);
        sid_state *state = f.state;
        state->rule = rule;
        state->draw = f.draw;
        state->steps++;
        for (uint32_t i = 0; i < 16; i++) state->codec[i] = s.codec[i];
        if (f.stats) *f.stats = {sent, s.found, f.scratch->nonfinite, s.threshold, s.stages, walks};
    }
};

/* A sparse codec's Law, its file in csrc/codec/ over again:
 *     enum { WALK_BLOCKS }        on a multiprocessor: its registers
 *     struct reading : sid_reading; struct own
 *     begin(reading &, words, steps)   of the first reading, from the state's words, by one thread
 *     best()                      how many of the largest are never dropped
 *     struct unit; start(reading, unit &); row(reading, unit &, x[4], count); done(reading, unit &, list, tile)
 *                                 the statistics of a tile, by a warp, as for the walk; what does not exist is 0
 *     finish(crew, reading &, own &)   true: settled, by crew.send or send_from; false: read again, as `reading` says.
 *                                 `own`, all zero at first, and `reading` are shared: only lead() writes to them */
template <class Law> struct sid_finish_shared {
    sid_crew_shared crew;
    typename Law::reading reading;
    typename Law::own own;
};

template <class Law>
__global__ void __launch_bounds__(SID_BLOCK, SID_FINISH_BLOCKS) sid_finish_kernel(sid_finishing f, Law law) {
    sid_follow();
    static_assert(sizeof(sid_finish_shared<Law>) <= SID_FINISH_SHARED, "occupancy");
    SID_DYNAMIC_SHARED(uint4, memory);
    sid_finish_shared<Law> &s = *(sid_finish_shared<Law> *)(void *)memory;
    if (!f.scratch->ready) return;
    sid_crew crew(f, s.crew);
    if (threadIdx.x < 16) s.crew.codec[threadIdx.x] = f.state->codec[threadIdx.x];
    crew.lead([&] {
        s.crew.stages = 0;
        s.own = {};
        law.begin(s.reading, s.crew.codec, f.state->steps);
    });
    for (;;) {
        crew.settle(s.reading, law.best());
        if (law.finish(crew, s.reading, s.own)) break;
        crew.reread(law, s.reading);
    }
    crew.write(s.reading.side);
}

template <class Law> sid_status sid_sparse_encode(sid_cuda_encoding &c, const Law &law, const sid_sparse_needs &needs) {
    const sid_plan *p = c.plan;
    uint64_t clear;
    sid_finishing f = {};
    f.list = sid_carve_list(p, &c.work, &clear, needs);
    const sid_vectors vectors = sid_vectors_of(c);
    const uint64_t chunks = sid_chunks(p->n), pieces = (chunks + SID_FINISH_CHUNKS - 1) / SID_FINISH_CHUNKS;
    f.scratch = c.scratch;
    f.state = c.state;
    f.stats = c.stats;
    f.payload = c.payload;
    float *stored = f.list.acc;
    if (p->memory->vectors) f.list.acc = vectors.first;
    f.acc = f.list.acc;
    f.n = p->n;
    f.tiles = chunks * SID_WARPS;
    f.k = p->k;
    f.cap = p->cap;
    f.room = p->room;
    f.body = sid_body_of(p, needs.mean);
    f.head = sid_head_of(p, c.at);
    f.draw = sid_draw_of(p, c.at);
    const uint64_t grid = sid_blocks(c.to, pieces ? pieces : 1, SID_FINISH_GRID);
    sid_status s = sid_begin_encode(c, clear, p->sizes.payload);
    if (!s)
        s = sid_with_memory_of(c, [&](auto memory) {
            return sid_launch(c.to, "walk", sid_walk_kernel<decltype(memory), sid_gathering<Law>>,
                              sid_blocks(c.to, chunks, Law::WALK_BLOCKS), SID_BLOCK, 0, c.group, c.scratch, c.state,
                              vectors, stored, memory, sid_gathering<Law>{law, f.list, c.state});
        });
    if (!s && !c.settles)
        s = sid_launch_together(c.to, "finish", sid_finish_kernel<Law>,
                                grid < SID_FINISH_MOST ? grid : (uint64_t)SID_FINISH_MOST, SID_BLOCK,
                                (uint32_t)sizeof(sid_finish_shared<Law>), f, law);
    return s;
}

#endif
