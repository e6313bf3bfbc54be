/* All blocks of a finish compute this together: exact selection by digits of the keys, counts, and sums in the CPU's
 * order. Each block reads its share of the candidates or tiles and writes a partial result to work; the blocks meet, so
 * that all of them are written; then every block reads all partial results and has the same answer. Counts are
 * integers, which may be added in any order; sums of floats keep the order of sums.h. Blocks wait for one another, so
 * all must be resident: the launch is a cooperative one. The limit is latency: the work between two meetings is
 * small. */
#ifndef SID_SPARSE_SELECT_CUH
#define SID_SPARSE_SELECT_CUH

#include "sparse_form.cuh"

/* Of a cooperative launch. */
#ifdef SID_EMULATE
inline void sid_grid_sync() { emulate::meet(emulate::GRID_BARRIER, 0, 0); }
#else
#define _CG_LIMIT_INCLUDED_DEPENDENCIES /* else it includes cuda::atomic, which takes longer to compile than this file */
#include <cooperative_groups.h>
__device__ inline void sid_grid_sync() { cooperative_groups::this_grid().sync(); }
#endif

/* The result of a selection (csrc/codec/sparse.h): the key of the rank-th largest, how many have a larger key, and how
 * many have this one. */
struct sid_pick {
    uint32_t key;
    uint64_t above, ties;
};

/* The elements that are sent: keys from `from` on, and the first `ties` of those with the key below it. */
struct sid_chosen {
    uint32_t from;
    uint64_t ties;
};

/* The arguments of a finish. k: elements to be sent; cap: that a payload holds; room: candidates that the CPU holds;
 * tiles: of n elements, up to whole chunks. */
struct sid_finishing {
    sid_scratch *scratch;
    sid_state *state;
    sid_stats *stats; /* or NULL */
    uint8_t *payload;
    const float *acc;
    uint64_t n, tiles, k, cap, room;
    bool largest; /* the largest candidate's key is wanted */
    sid_list list;
    sid_body body;
    sid_head head;
    sid_draw draw;

    __device__ void move(const sid_several &k, uint32_t slice) {
        scratch = sid_work_of(k, slice, scratch);
        state = sid_state_of(k, slice, state);
        payload = sid_payload_of(k, slice, payload);
        list.move(k, slice);
        acc = list.acc;
        head.group += slice * k.group;
        sid_move(draw, k, slice);
    }
};

struct sid_picked {
    uint32_t digit, rank, in; /* the digit of the rank-th largest, its rank among those with that digit, their number */
};

/* How many candidates have a key above another, << 32 | how many have that one: in all blocks, and in each warp of this
 * one. `known` says which of these are up to date. */
struct sid_tally {
    enum {
        NOTHING,
        WARPS, /* of this block's warps */
        ALL    /* and of all blocks together */
    };
    uint32_t key, known;
    unsigned long long before, total; /* in the blocks before this one; in all */
    unsigned long long warp[SID_WARPS];
};

/* A crew is the blocks that finish one slice. This says which block of its crew this one is. */
struct sid_member {
    uint32_t block, blocks;
    uint32_t *arrived; /* of sid_meet; NULL: the crew is the whole grid */
};

struct sid_crew_shared {
    sid_member member;
    uint32_t bins[SID_BINS];
    unsigned long long scan[SID_LANES + 1];
    double tree[SID_BLOCK];
    sid_part_sum sums[SID_WARPS];
    sid_picked picked;
    sid_tally tally[2];
    sid_pass_task passed; /* the last pass */
    sid_chosen kept;      /* of its candidates, where not all had room */
    bool lined_up;        /* list.value has all of them */
    uint64_t codec[16];   /* the state's words, in the making */
    sid_chosen chosen;    /* the end: what is sent, the rule, and what the header says */
    uint32_t key, flags;
    bool all; /* no tie is left out: then the rule needs no cut */
    sid_levels levels;
    uint64_t found, sent;
    float threshold;
    uint32_t stages;
    uint32_t most; /* the largest candidate's key */
};

/* One thread's view of a crew. All threads of all its blocks make each call, and every block computes the same. */
struct sid_selection {
    const sid_finishing &f;
    sid_crew_shared &s;
    /* Which of several buffers in work is next. Another block may still read the last one: two are enough where each is
     * written whole, three for bins, one of which is zeroed meanwhile. */
    uint32_t bins_turn, part_turn, running_turn;
    uint64_t first, last; /* this block's tiles, whole chunks */

    __device__ sid_selection(const sid_finishing &of, sid_crew_shared &shared)
        : f(of), s(shared), bins_turn(0), part_turn(0), running_turn(0) {
        const uint64_t chunks = f.tiles / SID_WARPS;
        first = chunks * block() / blocks() * SID_WARPS;
        last = chunks * (block() + 1) / blocks() * SID_WARPS;
    }

    __device__ uint32_t block() const { return s.member.block; }
    __device__ uint32_t blocks() const { return s.member.blocks; }
    /* Waits for the other blocks of the crew. Afterward each sees what all of them have written. */
    __device__ void meet() const {
        if (s.member.arrived)
            sid_meet(s.member.arrived, s.member.blocks);
        else
            sid_grid_sync();
    }

    /* Calls f by one thread of each block, between two barriers: f may write shared memory that all read. */
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

    /* Sums x, one of each thread, over the blocks before this one and over all. post and posted are its two parts, for
     * a caller whose blocks meet between them anyway. */
    struct sums {
        unsigned long long before, total;
    };
    __device__ sums over_blocks(unsigned long long x) {
        post(x);
        meet();
        return posted();
    }
    __device__ void post(unsigned long long x) {
        unsigned long long *part = f.list.part + (part_turn ^= 1) * SID_FINISH_MOST;
        const unsigned long long mine = block_sum(x);
        if (threadIdx.x == 0) part[block()] = mine;
    }
    __device__ sums posted() {
        const unsigned long long *part = f.list.part + part_turn * SID_FINISH_MOST;
        unsigned long long before = 0, total = 0;
        for (uint32_t b = threadIdx.x; b < blocks(); b += SID_BLOCK) {
            total += part[b];
            before += b < block() ? part[b] : 0;
        }
        before = block_sum(before);
        return {before, block_sum(total)};
    }

    /* ---- selection by digits */

    /* Returns the digit of the rank-th largest of `all` values, rank from 1. bins[d] counts those with digit d. Digit 0
     * is not counted, so it is what remains if the other digits do not reach the rank. */
    template <uint32_t BINS> __device__ sid_picked pick_digit(const uint32_t *bins, uint64_t rank, uint64_t all) {
        enum {
            EACH = BINS / SID_BLOCK
        };
        const uint32_t top = BINS - 1 - threadIdx.x * EACH; /* this thread's bins: EACH from top down */
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

    /* Counts how often `each` shows each bin to its argument, in all blocks. The result stays until the call after the
     * next. Blocks count in shared memory first. */
    template <typename Each> __device__ const uint32_t *count_bins(const Each &each) {
        uint32_t *bins = f.list.bins + bins_turn * SID_BINS;
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) s.bins[i] = 0;
        __syncthreads();
        each([&](uint32_t bin) { atomicAdd(&s.bins[bin], 1u); });
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK)
            if (s.bins[i]) atomicAdd(&bins[i], s.bins[i]);
        meet();
        bins_turn = (bins_turn + 1) % 3;
        if (block() == 0) { /* of the digit before: all have read it */
            uint32_t *old = f.list.bins + (bins_turn + 1) % 3 * SID_BINS;
            for (uint32_t i = threadIdx.x; i < SID_BINS; i += SID_BLOCK) old[i] = 0;
        }
        return bins;
    }

    /* Finds one digit of the key that is wanted, `bits` bits from bit `shift` on. Among the keys that `each` shows to
     * its argument, only those whose higher bits are `prefix` count. */
    template <typename Each>
    __device__ sid_picked digit(const Each &each, uint32_t prefix, uint32_t shift, uint32_t bits, uint64_t rank,
                                uint64_t all) {
        const uint32_t *bins = count_bins([&](const auto &add) {
            each([&](uint32_t key) {
                const uint32_t d = key >> shift, b = d & ((1u << bits) - 1u);
                if (d >> bits == prefix && b) add(b);
            });
        });
        return pick_digit<SID_BINS>(bins, rank, all);
    }

    /* Selects the rank-th largest of `all` keys, which `each` shows to its argument, three times: 11, 10 and 10
     * bits. */
    template <typename Each> __device__ sid_pick select_from(const Each &each, uint64_t all, uint64_t rank) {
        sid_picked p = {0, (uint32_t)rank, (uint32_t)all};
        uint32_t key = 0;
#pragma unroll 1
        for (uint32_t shift = 31; shift;) { /* one copy of `each`, which may be long */
            const uint32_t bits = shift == 31 ? 11 : 10;
            shift -= bits;
            p = digit(each, key, shift, bits, p.rank, p.in);
            key = key << bits | p.digit;
        }
        return {key, rank - p.rank, p.in};
    }

    /* Selects several ranks by four digits, of 11, 8, 8 and 4 bits. The first counts all keys for every rank; in the
     * others each rank has 256 bins of its own. */
    template <uint32_t MANY, typename Each>
    __device__ void select_from(const Each &each, uint64_t all, const uint64_t (&rank)[MANY], sid_pick (&pick)[MANY]) {
        static_assert(MANY * SID_BLOCK <= SID_BINS, "bins for all");
        sid_picked p[MANY];
        uint32_t key[MANY];
        const uint32_t *bins = count_bins([&](const auto &add) {
            each([&](uint32_t of) {
                if (of >> 20) add(of >> 20);
            });
        });
#pragma unroll
        for (uint32_t i = 0; i < MANY; i++) {
            p[i] = pick_digit<SID_BINS>(bins, rank[i], all);
            key[i] = p[i].digit;
        }
#pragma unroll 1
        for (uint32_t shift = 20; shift;) {
            const uint32_t bits = shift > 4 ? 8 : 4, mask = (1u << bits) - 1u;
            shift -= bits;
            bins = count_bins([&](const auto &add) {
                each([&](uint32_t of) {
                    const uint32_t d = of >> shift;
#pragma unroll
                    for (uint32_t i = 0; i < MANY; i++)
                        if (d >> bits == key[i] && d & mask) add(i * SID_BLOCK + (d & mask));
                });
            });
#pragma unroll
            for (uint32_t i = 0; i < MANY; i++) {
                p[i] = pick_digit<SID_BLOCK>(bins + i * SID_BLOCK, p[i].rank, p[i].in);
                key[i] = key[i] << bits | p[i].digit;
            }
        }
#pragma unroll
        for (uint32_t i = 0; i < MANY; i++) pick[i] = {key[i], rank[i] - p[i].rank, p[i].in};
    }

    /* Calls f(x) for all n values, each in one thread. Four loads go out before the first is used. */
    template <typename F> __device__ void each_value(const float *val, uint64_t n, const F &f) const {
        enum {
            DEEP = 4
        };
        const uint64_t step = (uint64_t)blocks() * SID_BLOCK;
#pragma unroll 1
        for (uint64_t i = (uint64_t)block() * SID_BLOCK + threadIdx.x; i < n; i += DEEP * step) {
            float x[DEEP];
#pragma unroll
            for (uint32_t k = 0; k < DEEP; k++) x[k] = i + k * step < n ? val[i + k * step] : 0.0f;
#pragma unroll
            for (uint32_t k = 0; k < DEEP; k++)
                if (i + k * step < n) f(x[k]);
        }
    }
    __device__ sid_pick select_of(const float *val, uint64_t n, uint64_t rank) {
        return select_from([&](const auto &show) { each_value(val, n, [&](float x) { show(sid_key(x)); }); }, n, rank);
    }

    /* ---- sums in the order of sums.h */

    template <uint32_t SUMS> __device__ double *next_running() {
        static_assert(SUMS <= SID_AT_ONCE, "sums at once");
        return f.list.running + (running_turn ^= 1) * SID_AT_ONCE * SID_SUMS;
    }

    /* Computes SUMS totals over `units` units. unit(u, sum) computes the sums of unit u, by a whole warp. Running sum j
     * has the units j, j + SID_SUMS, ..., in this order, whichever block adds them. */
    template <uint32_t SUMS, typename Unit>
    __device__ void total(uint64_t units, const Unit &unit, double (&sum)[SUMS]) {
        double *running = next_running<SUMS>();
        const uint32_t used = units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
        for (uint32_t j = block() * SID_WARPS + sid_warp(); j < used; j += blocks() * SID_WARPS) {
            double own[SUMS] = {};
            for (uint64_t u = j; u < units; u += SID_SUMS) {
                double x[SUMS];
                unit(u, x);
                for (uint32_t k = 0; k < SUMS; k++) own[k] += x[k];
            }
            if (sid_lane() == 0)
                for (uint32_t k = 0; k < SUMS; k++) running[k * SID_SUMS + j] = own[k];
        }
        meet();
        for (uint32_t k = 0; k < SUMS; k++) sum[k] = tree(running + k * SID_SUMS, used);
    }

    /* Adds up `used` running sums in halves. */
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

    /* Sums value(k, tile) over the tiles, for k = 0 to rows - 1: the same order, with a thread for each running sum. */
    template <uint32_t SUMS, typename Value>
    __device__ void total_by(const Value &value, double (&sum)[SUMS], uint32_t rows = SUMS) {
        double *running = next_running<SUMS>();
        const uint64_t units = sid_tiles(f.n);
        const uint32_t used = units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
        for (uint32_t i = block() * SID_BLOCK + threadIdx.x; i < rows * SID_SUMS; i += blocks() * SID_BLOCK) {
            const uint32_t k = i / SID_SUMS;
            double own = 0;
            for (uint64_t u = i % SID_SUMS; u < units; u += SID_SUMS) own += value(k, u);
            running[i] = own;
        }
        meet();
#pragma unroll
        for (uint32_t k = 0; k < SUMS; k++)
            if (k < rows) sum[k] = tree(running + k * SID_SUMS, used);
    }

    /* Adds up the sums that a pass has left for each tile. */
    template <uint32_t SUMS> __device__ void total_of_tiles(uint32_t at, double (&sum)[SUMS], uint32_t rows = SUMS) {
        const sid_list &l = f.list;
        total_by([&](uint32_t k, uint64_t u) { return l.sums[(at + k) * l.stride + u]; }, sum, rows);
    }
    __device__ unsigned long long own_count_of_tiles(uint32_t at) const { /* this thread's share of it */
        unsigned long long mine = 0;
        for (uint64_t u = (uint64_t)block() * SID_BLOCK + threadIdx.x; u < sid_tiles(f.n);
             u += (uint64_t)blocks() * SID_BLOCK)
            mine += f.list.counts[at * f.list.stride + u];
        return mine;
    }
    __device__ uint64_t count_of_tiles(uint32_t at) { return over_blocks(own_count_of_tiles(at)).total; }
};

#endif
