/* Exactly k by magnitude (csrc/codec/topk.c and sparse.c are the law), without prediction: the walk counts the highest
 * 11 bits of every key, one more reading of acc captures what may be sent and counts the next 10 bits of it, and the
 * rest runs over those candidates. Counts are integers, so that no order of evaluation shows.
 *
 * Bytes per element at density d, float32 with a residual:
 *     walk     12           reads gradient and acc, writes acc: the floor of error feedback
 *     narrow    4 + 9 d     reads acc (from L2 while the group fits there), writes about 1.5 d candidates of 6 bytes
 *     refine, count, emit   9 d each, and emit writes 6 d of payload */
#include "codec.cuh"

namespace {

enum {
    LIST_PER_K = 2,
    LIST_SHARE = 64,
    LIST_UPTO = 8
};
enum {
    SPILLED = -1
};

float *acc_of(const sid_plan *p, sid_state *s, float *stored) {
    return p->memory->vectors ? sid_vectors_of(p, s).first : stored;
}

/* ---- work ------------------------------------------------------------------------------------------------------ */

struct encoding {
    uint32_t *digit1, *digit2, *digit3; /* counts of the elements by digit, zeroed */
    float *acc;                         /* where no memory keeps it */
    /* Candidates of a tile: `held` of them from place `at` of the list, or SPILLED: then all of the tile's elements. */
    int32_t *at;
    uint32_t *held;
    uint32_t *pairs;          /* a tile's elements above the key, and those equal to it << 16 */
    unsigned long long *upto; /* the same for all chunks before this one, equal in the lower half */
    float *value;
    uint16_t *index;
    uint32_t room;
};

/* *clear: bytes from scratch on that are to be zeroed. */
encoding carve_encoding(const sid_plan *p, sid_carver *c, uint64_t *clear) {
    const uint64_t start = c->at - sizeof(sid_scratch), chunks = sid_chunks(p->n), tiles = chunks * SID_WARPS;
    encoding e;
    e.digit1 = c->take<uint32_t>(SID_DIGIT1);
    e.digit2 = c->take<uint32_t>(SID_DIGIT2);
    e.digit3 = c->take<uint32_t>(SID_DIGIT3);
    *clear = c->at - start;
    /* At high densities, or where equal magnitudes crowd, reading acc again is as good as a list. */
    e.room = p->k < p->n / LIST_UPTO ? (uint32_t)(LIST_PER_K * p->k + p->n / LIST_SHARE) : 0;
    e.acc = c->take<float>(p->memory->vectors ? 0 : sid_round_up(p->n, SID_QUAD));
    e.at = c->take<int32_t>(tiles);
    e.held = c->take<uint32_t>(tiles);
    e.pairs = c->take<uint32_t>(tiles);
    e.upto = c->take<unsigned long long>(chunks + 1);
    e.value = c->take<float>(e.room);
    e.index = c->take<uint16_t>(e.room);
    return e;
}

struct checking {
    unsigned long long *sum, *weighted; /* a payload each, zeroed */
    uint32_t *bad;
};

checking carve_checking(sid_carver *c, uint64_t *clear) {
    const uint64_t start = c->at - sizeof(sid_scratch);
    checking k;
    k.sum = c->take<unsigned long long>(SID_MAX_COUNT);
    k.weighted = c->take<unsigned long long>(SID_MAX_COUNT);
    k.bad = c->take<uint32_t>(SID_MAX_COUNT);
    *clear = c->at - start;
    return k;
}

uint64_t work(const sid_plan *p) {
    uint64_t clear;
    sid_carver a = {nullptr, sizeof(sid_scratch)}, b = a;
    carve_encoding(p, &a, &clear);
    carve_checking(&b, &clear);
    return (a.at > b.at ? a.at : b.at) - sizeof(sid_scratch);
}

bool is_half(const sid_plan *p) { return p->codec_param[1] == 1; }

/* ---- the walk: acc, and the first digit ------------------------------------------------------------------------- */

/* Digit 0 of any round is not counted but inferred (pick_digit): the zeros of a gradient would all hit one address. */
struct first_digit {
    enum {
        REREADS = 1,
        RAW = 0
    };
    struct shared {
        uint32_t count[SID_DIGIT1];
    };
    uint32_t *digit1;

    __device__ static float sent(float x) { /* as float16: saturating */
        const float max = 65504.0f;
        return sid_from_f16(sid_to_f16(x > max ? max : x < -max ? -max : x));
    }

    __device__ void begin(shared &s) const {
        for (uint32_t i = threadIdx.x; i < SID_DIGIT1; i += SID_BLOCK) s.count[i] = 0;
        __syncthreads();
    }

    __device__ float keep(const sid_rule &rule, float acc, uint64_t i) const {
        const uint32_t key = sid_key(acc);
        if (key < rule.key || (key == rule.key && i >= rule.cut)) return acc;
        return rule.flags & SID_FLAG_HALF ? acc - sent(acc) : 0.0f;
    }

    __device__ void quad(shared &s, const float (&x)[SID_QUAD], uint64_t, uint32_t count) const {
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const uint32_t d = sid_digit1(sid_key(x[c]));
            if (c < count && d) atomicAdd(&s.count[d], 1u);
        }
    }

    __device__ void end(shared &s) const {
        __syncthreads();
        for (uint32_t i = threadIdx.x; i < SID_DIGIT1; i += SID_BLOCK)
            if (s.count[i]) atomicAdd(&digit1[i], s.count[i]);
    }
};

/* ---- selection -------------------------------------------------------------------------------------------------- */

struct picked {
    uint32_t digit, rank; /* the digit of the rank-th largest, and its rank among those with that digit */
};

struct pick_shared {
    uint32_t part[SID_LANES + 1];
    picked result;
};

/* By the whole block. `rank` from 1; what no counted digit reaches has digit 0. */
template <uint32_t BINS> __device__ picked pick_digit(const uint32_t *count, uint32_t rank, pick_shared &s) {
    enum {
        EACH = BINS / SID_BLOCK
    };
    const uint32_t top = BINS - 1 - threadIdx.x * EACH; /* this thread's bins: EACH from top down */
    uint32_t own[EACH], mine = 0, total;
    for (uint32_t i = 0; i < EACH; i++) {
        own[i] = top - i ? count[top - i] : 0;
        mine += own[i];
    }
    uint32_t above = sid_block_scan(mine, s.part, &total) - mine;
    for (uint32_t i = 0; i < EACH; i++) {
        if (above < rank && rank <= above + own[i]) s.result = {top - i, rank - above};
        above += own[i];
    }
    if (threadIdx.x == 0 && total < rank) s.result = {0, rank - total};
    __syncthreads();
    return s.result;
}

/* On a multiprocessor, as SID_WALK_BLOCKS; LIST_BLOCKS are small enough for more on most. */
enum {
    NARROW_BLOCKS = 4,
    LIST_BLOCKS = 6
};

/* Words of scratch->codec. */
enum {
    DIGITS,
    RANK
};

/* Captures every element whose first digit is the picked one or above, in index order within each tile; counts the
 * second digit of those that have the picked one. */
__global__ void __launch_bounds__(SID_BLOCK, NARROW_BLOCKS)
    sid_narrow_kernel(sid_scratch *scratch, encoding e, const float *acc, uint64_t n, uint32_t k) {
    __shared__ pick_shared pick;
    __shared__ uint32_t second[SID_DIGIT2], held[SID_WARPS], place;
    if (!scratch->ready) return;
    for (uint32_t i = threadIdx.x; i < SID_DIGIT2; i += SID_BLOCK) second[i] = 0;
    const picked first = pick_digit<SID_DIGIT1>(e.digit1, k, pick);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        scratch->codec[DIGITS] = first.digit;
        scratch->codec[RANK] = first.rank;
    }
    const uint64_t chunks = sid_chunks(n);
    for (uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint64_t tile = chunk * SID_WARPS + sid_warp(), at = tile * SID_TILE;
        const uint32_t len = at < n ? sid_tile_len(n, at) : 0;
        float x[SID_ROWS][SID_QUAD];
        uint32_t hits = 0; /* bit 4 r + c */
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const uint32_t i = r * SID_ROW + sid_lane() * SID_QUAD;
            if (i < len) {
                const float4 v = *(const float4 *)(acc + at + i);
                x[r][0] = v.x, x[r][1] = v.y, x[r][2] = v.z, x[r][3] = v.w;
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const uint32_t count = sid_count4(len, r * SID_ROW + sid_lane() * SID_QUAD);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                if (c >= count) continue;
                const uint32_t key = sid_key(x[r][c]), d = sid_digit1(key);
                if (d >= first.digit) hits |= 1u << (SID_QUAD * r + c);
                if (d == first.digit && sid_digit2(key)) atomicAdd(&second[sid_digit2(key)], 1u);
            }
        }
        const uint32_t total = sid_warp_sum((uint32_t)__popc(hits));
        if (sid_lane() == 0) held[sid_warp()] = total;
        __syncthreads();
        if (threadIdx.x == 0) {
            uint32_t sum = 0;
            for (uint32_t w = 0; w < SID_WARPS; w++) sum += held[w];
            place = sum ? atomicAdd(&scratch->taken, sum) : 0;
        }
        __syncthreads();
        uint32_t to = place;
        for (uint32_t w = 0; w < sid_warp(); w++) to += held[w];
        const bool fits = to + total <= e.room;
        if (sid_lane() == 0) {
            e.at[tile] = fits ? (int32_t)to : (int32_t)SPILLED;
            e.held[tile] = fits ? total : len;
        }
        if (fits && total) {
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
                uint32_t row = 0, before = 0;
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    const uint32_t b = __ballot_sync(SID_FULL, hits >> (SID_QUAD * r + c) & 1u);
                    row += __popc(b);
                    before += __popc(b & sid_lanes_below());
                }
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    if (hits >> (SID_QUAD * r + c) & 1u) {
                        e.index[to + before] = (uint16_t)(r * SID_ROW + sid_lane() * SID_QUAD + c);
                        e.value[to + before] = x[r][c];
                        before++;
                    }
                to += row;
            }
        }
        __syncthreads(); /* before the next round writes held and place */
    }
    for (uint32_t i = threadIdx.x; i < SID_DIGIT2; i += SID_BLOCK)
        if (second[i]) atomicAdd(&e.digit2[i], second[i]);
}

/* Calls f(is one, index in the tile, value) for the candidates of a tile in index order, 32 at a time, by a whole warp. */
template <typename F> __device__ inline void candidates(const encoding &e, const float *acc, uint64_t tile, F f) {
    const int32_t at = e.at[tile];
    const uint32_t held = e.held[tile];
    for (uint32_t from = 0; from < held; from += SID_LANES) {
        const uint32_t i = from + sid_lane();
        const bool is = i < held;
        uint32_t index = i;
        float value = 0;
        if (is && at == SPILLED) value = acc[tile * SID_TILE + i];
        if (is && at != SPILLED) {
            index = e.index[at + i];
            value = e.value[at + i];
        }
        f(is, index, value);
    }
}

/* Counts the third digit of the candidates that share the first two with the k-th. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_refine_kernel(sid_scratch *scratch, encoding e, const float *acc, uint64_t n) {
    __shared__ pick_shared pick;
    __shared__ uint32_t third[SID_DIGIT3];
    if (!scratch->ready) return;
    for (uint32_t i = threadIdx.x; i < SID_DIGIT3; i += SID_BLOCK) third[i] = 0;
    const picked second = pick_digit<SID_DIGIT2>(e.digit2, scratch->codec[RANK], pick);
    const uint32_t digits = scratch->codec[DIGITS] << 10 | second.digit;
    const uint64_t tiles = sid_chunks(n) * SID_WARPS;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS)
        candidates(e, acc, tile, [&](bool is, uint32_t, float value) {
            const uint32_t key = sid_key(value);
            if (is && key >> 10 == digits) atomicAdd(&third[sid_digit3(key)], 1u);
        });
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < SID_DIGIT3; i += SID_BLOCK)
        if (third[i]) atomicAdd(&e.digit3[i], third[i]);
}

/* The key at last; how many candidates of each tile are above it and equal to it. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_count_kernel(sid_scratch *scratch, encoding e, const float *acc, uint64_t n) {
    __shared__ pick_shared pick;
    if (!scratch->ready) return;
    const picked second = pick_digit<SID_DIGIT2>(e.digit2, scratch->codec[RANK], pick);
    const picked third = pick_digit<SID_DIGIT3>(e.digit3, second.rank, pick);
    const uint32_t key = scratch->codec[DIGITS] << 20 | second.digit << 10 | third.digit;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        scratch->key = key;
        scratch->ties = third.rank;
    }
    const uint64_t tiles = sid_chunks(n) * SID_WARPS;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        uint32_t above = 0, equal = 0;
        candidates(e, acc, tile, [&](bool is, uint32_t, float value) {
            above += is && sid_key(value) > key;
            equal += is && sid_key(value) == key;
        });
        const uint32_t pair = sid_warp_sum(above | equal << 16); /* each at most SID_TILE */
        if (sid_lane() == 0) e.pairs[tile] = pair;
    }
}

/* Running sums over the chunks, by one block: 32 bytes read and 8 written a chunk. */
enum {
    SCAN_BLOCK = 1024
};
__global__ void __launch_bounds__(SCAN_BLOCK) sid_scan_kernel(const sid_scratch *scratch, encoding e, uint64_t n) {
    __shared__ unsigned long long part[SID_LANES + 1];
    if (!scratch->ready) return;
    const uint64_t chunks = sid_chunks(n);
    unsigned long long carry = 0;
    for (uint64_t from = 0; from < chunks; from += SCAN_BLOCK) {
        const uint64_t chunk = from + threadIdx.x;
        unsigned long long mine = 0, total;
        if (chunk < chunks)
            for (uint32_t w = 0; w < SID_WARPS; w++) {
                const uint32_t pair = e.pairs[chunk * SID_WARPS + w];
                mine += (unsigned long long)(pair & 0xffffu) << 32 | pair >> 16;
            }
        const unsigned long long upto = sid_block_scan(mine, part, &total);
        if (chunk < chunks) e.upto[chunk] = carry + upto - mine;
        carry += total;
        __syncthreads();
    }
    if (threadIdx.x == 0) e.upto[chunks] = carry;
}

__device__ inline uint32_t above_of(unsigned long long upto) { return (uint32_t)(upto >> 32); }
__device__ inline uint32_t equal_of(unsigned long long upto) { return (uint32_t)upto; }

/* ---- the payload ------------------------------------------------------------------------------------------------ */

/* Where a sparse body's arrays lie (csrc/wire.h), in bytes from the payload's start. */
struct body {
    uint64_t index_at, value_at, rows;
    bool half;
};

body body_of(const sid_plan *p) {
    return {sid_sparse_index_at(p->n), sid_sparse_value_at(p->n, p->cap), p->sizes.payload / 32, is_half(p)};
}

/* This thread's share of the payload's checksum. */
struct sums {
    unsigned long long sum, weighted;
    __device__ void add(uint64_t at, uint64_t word, uint64_t rows) { /* `word` at byte `at`, shifted to its place */
        sum += word;
        weighted += word * sid_checksum_weight(at / 4, rows);
    }
};

/* The block's shares together, in every thread of warp 0. */
__device__ inline sums block_sums(sums x, sums (&part)[SID_WARPS]) {
    x.sum = sid_warp_sum(x.sum);
    x.weighted = sid_warp_sum(x.weighted);
    if (sid_lane() == 0) part[sid_warp()] = x;
    __syncthreads();
    x = {0, 0};
    if (sid_lane() < SID_WARPS) x = part[sid_lane()];
    x.sum = sid_warp_sum(x.sum);
    x.weighted = sid_warp_sum(x.weighted);
    return x;
}

/* Writes indices and values in index order. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_emit_kernel(sid_scratch *scratch, encoding e, const float *acc, uint64_t n, uint8_t *payload, body b) {
    __shared__ sums part[SID_WARPS];
    if (!scratch->ready) return;
    const uint64_t chunks = sid_chunks(n);
    const uint32_t key = scratch->key, ties = scratch->ties;
    const bool all = equal_of(e.upto[chunks]) == ties; /* no tie is left out: then the rule needs no cut */
    sums own = {0, 0};
    if (all && blockIdx.x == 0 && threadIdx.x == 0) scratch->cut = n;
    for (uint64_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
        const uint64_t tile = chunk * SID_WARPS + sid_warp();
        const uint32_t pair = sid_lane() < SID_WARPS ? e.pairs[chunk * SID_WARPS + sid_lane()] : 0;
        if (!__shfl_sync(SID_FULL, pair, sid_warp())) continue;
        const uint32_t earlier = sid_warp_sum(sid_lane() < sid_warp() ? pair : 0);
        uint32_t above = above_of(e.upto[chunk]) + (earlier & 0xffffu),
                 equal = equal_of(e.upto[chunk]) + (earlier >> 16);
        candidates(e, acc, tile, [&](bool is, uint32_t index, float value) {
            const bool more = is && sid_key(value) > key, same = is && sid_key(value) == key;
            const uint32_t is_more = __ballot_sync(SID_FULL, more), is_same = __ballot_sync(SID_FULL, same);
            const uint32_t above_here = above + __popc(is_more & sid_lanes_below());
            const uint32_t equal_here = equal + __popc(is_same & sid_lanes_below());
            if (more || (same && equal_here < ties)) {
                const uint64_t slot = sid_slot(above_here, equal_here, ties);
                const uint64_t at = tile * SID_TILE + index, i = b.index_at + 2 * slot;
                const uint16_t short_index = (uint16_t)(at % SID_WIRE_TILE);
                *(uint16_t *)(payload + i) = short_index;
                own.add(i, sid_half_word(i, short_index), b.rows);
                if (b.half) {
                    const uint64_t v = b.value_at + 2 * slot;
                    const float max = 65504.0f;
                    const uint16_t h = sid_to_f16(value > max ? max : value < -max ? -max : value);
                    *(uint16_t *)(payload + v) = h;
                    own.add(v, sid_half_word(v, h), b.rows);
                } else {
                    const uint64_t v = b.value_at + 4 * slot;
                    *(float *)(payload + v) = value;
                    own.add(v, sid_f32_bits(value), b.rows);
                }
                if (same && !all && equal_here + 1 == ties) scratch->cut = at + 1;
            }
            above += __popc(is_more);
            equal += __popc(is_same);
        });
    }
    own = block_sums(own, part);
    if (threadIdx.x == 0) {
        atomicAdd(&scratch->sum, own.sum);
        atomicAdd(&scratch->weighted, own.weighted);
    }
}

/* Counts of the wire tiles, header, rule, statistics. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_seal_kernel(sid_scratch *scratch, encoding e, sid_head head, uint32_t k, uint8_t *payload, body b,
                    sid_state *state, sid_stats *stats) {
    __shared__ sums part[SID_WARPS];
    if (!scratch->ready) return;
    const uint64_t tiles = sid_wire_tiles(head.n), chunks = sid_chunks(head.n);
    const uint32_t ties = scratch->ties;
    sums own = {0, 0};
    for (uint64_t t = threadIdx.x; t < tiles; t += SID_BLOCK) {
        const uint64_t next = (t + 1) * SID_WIRE_CHUNKS;
        const unsigned long long from = e.upto[t * SID_WIRE_CHUNKS], to = e.upto[next < chunks ? next : chunks];
        const uint32_t count =
            sid_slot(above_of(to), equal_of(to), ties) - sid_slot(above_of(from), equal_of(from), ties);
        const uint64_t at = SID_HEADER_BYTES + 4 * t;
        *(uint32_t *)(payload + at) = count;
        own.add(at, count, b.rows);
    }
    own = block_sums(own, part);
    if (threadIdx.x) return;
    const uint32_t key = scratch->key, half = b.half ? (uint32_t)SID_FLAG_HALF : 0u;
    const float threshold = sid_bits_f32(key);
    sid_seal((sid_header *)payload, head, half | (scratch->nonfinite ? (uint32_t)SID_FLAG_NONFINITE : 0u), k, threshold,
             b.rows, scratch->sum + own.sum, scratch->weighted + own.weighted);
    sid_rule rule = {};
    rule.key = key;
    rule.flags = half;
    rule.cut = scratch->cut;
    state->rule = rule;
    state->steps++;
    if (stats) *stats = {k, k, scratch->nonfinite, threshold, 0, 2};
}

sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    uint64_t clear;
    const encoding e = carve_encoding(p, &c.work, &clear);
    const body b = body_of(p);
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const float *acc = acc_of(p, c.state, e.acc);
    const uint32_t k = (uint32_t)p->k;
    const uint64_t chunks = sid_chunks(p->n), grid = sid_blocks(c.to, chunks, LIST_BLOCKS);
    sid_status s = sid_begin(c.to, c.group, c.scratch, clear, c.payload, p->sizes.payload);
    if (!s)
        s = sid_with_memory(p, c.to.err, [&](auto memory) {
            return sid_launch(c.to, "walk", sid_walk_kernel<decltype(memory), first_digit>,
                              sid_blocks(c.to, chunks, SID_WALK_BLOCKS), SID_BLOCK, 0, c.group, c.scratch, c.state,
                              vectors, e.acc, first_digit{e.digit1});
        });
    if (!s)
        s = sid_launch(c.to, "narrow", sid_narrow_kernel, sid_blocks(c.to, chunks, NARROW_BLOCKS), SID_BLOCK, 0,
                       c.scratch, e, acc, p->n, k);
    if (!s) s = sid_launch(c.to, "refine", sid_refine_kernel, grid, SID_BLOCK, 0, c.scratch, e, acc, p->n);
    if (!s) s = sid_launch(c.to, "count", sid_count_kernel, grid, SID_BLOCK, 0, c.scratch, e, acc, p->n);
    if (!s) s = sid_launch(c.to, "scan", sid_scan_kernel, 1, SCAN_BLOCK, 0, c.scratch, e, p->n);
    if (!s) s = sid_launch(c.to, "emit", sid_emit_kernel, grid, SID_BLOCK, 0, c.scratch, e, acc, p->n, c.payload, b);
    if (!s)
        s = sid_launch(c.to, "seal", sid_seal_kernel, 1, SID_BLOCK, 0, c.scratch, e, sid_head_of(p, c.at), k, c.payload,
                       b, c.state, c.stats);
    return s;
}

/* ---- decode ----------------------------------------------------------------------------------------------------- */

struct payloads {
    const uint8_t *first;
    uint64_t stride, n, cap;
    uint32_t count;
    float scale;
    body b;
    __device__ const uint8_t *operator[](uint32_t r) const { return first + r * stride; }
};

/* Entries of the wire tiles before `tile`, by one warp; wraps on a lying payload, which the check then refuses. */
__device__ inline uint64_t entries_before(const uint32_t *count, uint64_t tile) {
    unsigned long long sum = 0;
    for (uint64_t t = sid_lane(); t < tile; t += SID_LANES) sum += count[t];
    return sid_warp_sum(sum);
}

/* Blocks r * each to r * each + each - 1 check payload r: its checksum, and each a run of its wire tiles. Reads all of it. */
__global__ void __launch_bounds__(SID_BLOCK) sid_look_kernel(checking check, payloads p, uint32_t each) {
    __shared__ sums part[SID_WARPS];
    const uint32_t r = blockIdx.x / each, b = blockIdx.x % each;
    const uint8_t *payload = p[r];
    const uint32_t *count = (const uint32_t *)(payload + SID_HEADER_BYTES);
    const uint16_t *index = (const uint16_t *)(payload + p.b.index_at);
    const uint64_t claimed = ((const sid_header *)payload)->count, most = claimed < p.cap ? claimed : p.cap;
    const uint64_t tiles = sid_wire_tiles(p.n), first = tiles * b / each, last = tiles * (b + 1) / each;
    sums own = {0, 0};
    for (uint64_t at = SID_HEADER_BYTES + 8 * (b * (uint64_t)SID_BLOCK + threadIdx.x); at < 32 * p.b.rows;
         at += 8ull * SID_BLOCK * each) {
        const uint2 w = *(const uint2 *)(payload + at);
        own.add(at, w.x, p.b.rows);
        own.add(at + 4, w.y, p.b.rows);
    }
    own = block_sums(own, part);
    if (threadIdx.x == 0) {
        atomicAdd(&check.sum[r], own.sum);
        atomicAdd(&check.weighted[r], own.weighted);
    }
    bool bad = claimed > p.cap;
    uint64_t from = entries_before(count, first); /* every warp for itself: no thread waits for another */
    for (uint64_t t = first; t < last && !bad; t++) {
        const uint64_t held = count[t], size = t + 1 < tiles ? SID_WIRE_TILE : p.n - t * SID_WIRE_TILE;
        if (held > size || from > most || held > most - from) {
            bad = true; /* and nothing is read there */
            break;
        }
        for (uint64_t i = threadIdx.x; i < held; i += SID_BLOCK)
            bad |= i + 1 < held ? index[from + i] >= index[from + i + 1] : index[from + i] >= size;
        from += held;
    }
    if (b == each - 1) bad |= from != claimed;
    if (bad) check.bad[r] = 1; /* every writer writes the same */
}

__global__ void __launch_bounds__(SID_BLOCK)
    sid_check_kernel(sid_scratch *scratch, checking check, payloads p, sid_expect expect, sid_cuda_report *report,
                     sid_state *state) {
    __shared__ uint32_t first, flagged;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < p.count; r += SID_BLOCK) {
        const sid_header h = *(const sid_header *)p[r];
        int32_t status = sid_check_header(h, expect, p.b.rows, check.sum[r], check.weighted[r]);
        const uint32_t half = p.b.half ? (uint32_t)SID_FLAG_HALF : 0u;
        if (status == SID_OK && (check.bad[r] || (h.flags & ~(uint32_t)(SID_FLAG_NONFINITE | SID_FLAG_RAISED)) != half))
            status = SID_E_CORRUPT;
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    }
    __syncthreads();
    if (threadIdx.x) return;
    sid_verdict_of(report, scratch, first, flagged);
    if (scratch->go && flagged && state) {
        sid_rule none = {};
        none.key = SID_KEY_NONE;
        state->rule = none;
    }
}

/* A block sums one part of the group after another in shared memory: payload by payload, because floats add up in rank
 * order, the entries of one payload side by side, because their indices differ. Writes each element once: 4 + 6 W d bytes
 * an element, and W cursors of shared memory beside the part. */
enum {
    PART = SID_DECODE_TILE,
    PART_BLOCK = PART / SID_TILE * SID_LANES,
    WIRE_PARTS = SID_WIRE_TILE / PART,
    AHEAD = 4,
    PART_BLOCKS = 8
};

struct cursor {
    uint32_t at, end; /* entries of the payload: the next one, and where its wire tile ends */
};

template <class Memory>
__global__ void __launch_bounds__(PART_BLOCK, PART_BLOCKS)
    sid_decode_kernel(sid_group g, const sid_scratch *scratch, payloads p, sid_vectors vectors) {
    SID_DYNAMIC_SHARED(float4, memory);
    float *out = (float *)memory;
    cursor *cursors = (cursor *)(out + PART);
    if (!scratch->go) return;
    const bool fill = scratch->nonfinite;
    const uint64_t parts = (p.n + PART - 1) / PART;
    const uint64_t first = parts * blockIdx.x / gridDim.x, last = parts * (blockIdx.x + 1) / gridDim.x;
    for (uint32_t i = threadIdx.x; i < PART; i += PART_BLOCK) out[i] = 0;
    if (!fill && first < last)
        for (uint32_t r = sid_warp(); r < p.count; r += PART_BLOCK / SID_LANES) {
            const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES);
            const uint16_t *index = (const uint16_t *)(p[r] + p.b.index_at);
            const uint64_t tile = first / WIRE_PARTS;
            const uint32_t from = (uint32_t)entries_before(count, tile), end = from + count[tile];
            uint32_t lo = from, hi = end; /* the first entry that is not before the part */
            while (lo < hi) {
                const uint32_t mid = lo + (hi - lo) / 2;
                if (index[mid] < first % WIRE_PARTS * PART)
                    lo = mid + 1;
                else
                    hi = mid;
            }
            if (sid_lane() == 0) cursors[r] = {lo, end};
        }
    __syncthreads();
    for (uint64_t part = first; part < last; part++) {
        const uint32_t base = (uint32_t)(part % WIRE_PARTS) * PART;
        if (!fill && base == 0 && part != first) {
            for (uint32_t r = threadIdx.x; r < p.count; r += PART_BLOCK) {
                const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES), at = cursors[r].end;
                cursors[r] = {at, at + count[part / WIRE_PARTS]};
            }
            __syncthreads();
        }
        for (uint32_t r = 0; r < p.count && !fill; r += AHEAD) {
            uint32_t index[AHEAD];
            float value[AHEAD];
            cursor c[AHEAD] = {};
            const auto fetch = [&](uint32_t a) { /* this thread's entry, or one that lies in no part */
                                                 const uint32_t i = c[a].at + threadIdx.x;
                                                 index[a] = SID_FULL;
                                                 value[a] = 0;
                                                 if (i >= c[a].end) return;
                                                 const uint8_t *values = p[r + a] + p.b.value_at;
                                                 index[a] = ((const uint16_t *)(p[r + a] + p.b.index_at))[i];
                                                 value[a] = p.b.half ? sid_from_f16(((const uint16_t *)values)[i])
                                                                     : ((const float *)values)[i];
            };
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) /* of several payloads at once, to wait for memory once */
                if (r + a < p.count) {
                    c[a] = cursors[r + a];
                    fetch(a);
                }
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) {
                if (r + a >= p.count) break;
                for (;;) {
                    const bool in = index[a] - base < PART;
                    if (in) out[index[a] - base] += value[a];
                    const uint32_t taken =
                        (uint32_t)__syncthreads_count(in); /* entries ascend: the first `taken` threads */
                    c[a].at += taken;
                    if (taken < PART_BLOCK) break;
                    fetch(a);
                }
                if (threadIdx.x == 0) cursors[r + a].at = c[a].at;
            }
        }
        const uint64_t tile = part * (PART / SID_TILE) + sid_warp();
        if (tile * SID_TILE < p.n) {
            const sid_span s = sid_span_of(g, tile);
            for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
                const uint32_t count = sid_count4(s.len, i);
                float4 *mine = (float4 *)(out + sid_warp() * SID_TILE + i);
                float x[SID_QUAD] = {mine->x * p.scale, mine->y * p.scale, mine->z * p.scale, mine->w * p.scale};
                *mine = make_float4(0, 0, 0, 0);
                if (fill) {
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = sid_bits_f32(0x7fc00000u);
                    if (Memory::VECTORS) sid_undo<Memory>(g, s, vectors, i, count);
                }
                if (s.base)
                    sid_put<true>(g, s, i, count, x);
                else
                    sid_put<false>(g, s, i, count, x);
            }
        }
        __syncthreads(); /* before the next part adds up where this one was read */
    }
}

sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    uint64_t clear;
    const checking check = carve_checking(&c.work, &clear);
    const payloads all = {c.payloads, c.stride, p->n, p->cap, c.count, c.scale, body_of(p)};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint64_t tiles = sid_wire_tiles(p->n), share = 1 + 4ull * c.to.processors / c.count;
    const uint32_t each = (uint32_t)(tiles < 1 ? 1 : tiles < share ? tiles : share);
    const uint32_t shared = (uint32_t)(PART * sizeof(float) + c.count * sizeof(cursor));
    sid_status s = sid_begin(c.to, c.group, c.scratch, clear, nullptr, 0);
    if (!s) s = sid_launch(c.to, "look", sid_look_kernel, (uint64_t)each * c.count, SID_BLOCK, 0, check, all, each);
    if (!s)
        s = sid_launch(c.to, "check", sid_check_kernel, 1, SID_BLOCK, 0, c.scratch, check, all, sid_expect_of(c),
                       c.report, c.state);
    if (s) return s;
    const auto run = [&](auto memory) {
        return sid_launch(c.to, "decode", sid_decode_kernel<decltype(memory)>,
                          sid_blocks(c.to, (p->n + PART - 1) / PART, PART_BLOCKS), PART_BLOCK, shared, c.group,
                          c.scratch, all, vectors);
    };
    return c.state ? sid_with_memory(p, c.to.err, run) : run(sid_cuda_memory_none());
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_topk;
const sid_cuda_codec sid_cuda_codec_topk = {work, encode, decode};
}
