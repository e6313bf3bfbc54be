/* A sparse codec's part of the pass over the group (core/pass.cuh), while acc is in registers. An element whose key
 * reaches `low`, which the last step has predicted, is a candidate, and goes to its tile's slots: 6 bytes written each.
 * A tile that has more candidates than slots only counts them, since acc holds them all. The codec's statistics of each
 * tile are summed up, and a codec with RANGES has candidates counted in ranges of keys. A warp has a tile, so
 * candidates find their slots by ballots, in index order, without atomics. Bandwidth is the limit.
 * sid_candidates::pass_again makes the pass once more. */
#ifndef SID_SPARSE_PASS_CUH
#define SID_SPARSE_PASS_CUH

#include "sparse_form.cuh"

/* Calls f(c, x) for the elements of a tile once acc is stored, by the same lanes that have shown them to the codec. */
template <typename F>
__device__ inline void sid_each_in_tile(const sid_list &l, int32_t side, uint64_t tile, const F &f) {
    const uint64_t offset = tile * SID_TILE;
    const uint32_t len = sid_tile_len(l.n, offset);
    for (uint32_t i = sid_lane() * SID_QUAD; i < len; i += SID_ROW)
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < len) f(c, sid_side(l.acc[offset + i + c], side));
}

/* The sum of f(x) over them, in float64. */
template <typename F>
__device__ inline double sid_wide_sum(const sid_list &l, int32_t side, uint64_t tile, const F &f) {
    double lane[SID_QUAD] = {};
    sid_each_in_tile(l, side, tile, [&](uint32_t c, float x) { lane[c] += f(x); });
    return sid_join_lanes(lane);
}

/* sparse_probe: a pass that counts keys from `probe` on, into the first of list.counts. */
struct sid_probing : sid_pass_task {
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

/* Captures the candidates in a row of a tile: writes them to its slots, in index order. x: elements first to first + 3
 * of the tile in this lane, `count` of which exist; `held`: candidates of the tile so far. The whole warp calls it. */
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

/* Fills a tile's last quad of slots with zeros, because candidates are read by quads. The whole warp calls it. */
__device__ inline void sid_fill_quad(const sid_list &list, uint64_t tile, uint32_t held) {
    const uint32_t to = held + sid_lane();
    if (held % SID_QUAD == 0 || held >= list.slots || to >= sid_round_up(held, SID_QUAD)) return;
    list.slot_value[tile * list.slots + to] = 0;
    list.slot_index[tile * list.slots + to] = 0;
}

/* Counts candidates by ranges of keys, in shared memory: bin i has those with (key - low) >> shift = i. The last bin
 * has all candidates, with those beyond every range. */
struct sid_counting {
    uint32_t bins[SID_COUNTED];
    __device__ void begin() { bins[threadIdx.x] = 0; }
    __device__ void quad(uint32_t low, uint32_t shift, const float (&x)[SID_QUAD], uint32_t count) {
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const uint32_t key = sid_key(x[c]), bin = (key - low) >> shift;
            if (c < count && key >= low && bin < SID_COUNTED - 1) atomicAdd(&bins[bin], 1u);
        }
    }
    __device__ void tile(uint32_t held) {
        if (sid_lane() == 0 && held) atomicAdd(&bins[SID_COUNTED - 1], held);
    }
    __device__ void end(uint32_t *counted) const {
        __syncthreads();
        const uint32_t mine = bins[threadIdx.x];
        if (mine) atomicAdd(&counted[threadIdx.x], mine);
    }
};

/* Computes what the rule of the last step left of an element of acc. Each crew has such a type, for its codec. */
struct sid_body_keeping {
    sid_levels levels;                                                                    /* of the last step */
    template <class Codec> __device__ void begin(const Codec &, const sid_state &state) { /* by one thread */
        const sid_rule &rule = state.rule;
        const uint32_t bits = sid_level_bits(rule.flags);
        if (bits) levels = sid_levels_from(rule.base, rule.step, bits);
    }
    __device__ float keep(const sid_rule &rule, float acc, uint64_t i) const {
        return sid_sparse_keep(rule, levels, acc, i);
    }
};

/* The pass (core/pass.cuh) takes this for its codec. Codec is a sparse one: see sid_finish_kernel. */
template <class Codec> struct sid_gathering {
    enum {
        REREADS = 1,
        RAW = 0
    };
    struct shared {
        typename Codec::task task;
        sid_counting counting;
        typename Codec::crew::keeping keeping;
    };
    struct unit {
        typename Codec::unit own;
        uint32_t held;
    };
    Codec codec;
    sid_list list;
    const sid_state *state;

    __device__ void move(const sid_several &k, uint32_t slice) {
        codec.move(k, slice);
        list.move(k, slice);
        state = sid_state_of(k, slice, state);
    }
    __device__ void begin(shared &s) const {
        if (threadIdx.x == 0) {
            codec.begin(s.task, state->codec, state->steps);
            s.keeping.begin(codec, *state);
        }
        s.counting.begin();
        __syncthreads();
    }
    __device__ void close(sid_scratch *) const {}
    __device__ void end(shared &s) const { s.counting.end(list.counted); }
    __device__ void draws(const shared &, uint64_t, uint32_t (&)[SID_QUAD]) const {}
    __device__ float keep(const shared &s, const sid_rule &rule, float acc, uint64_t i, uint32_t) const {
        return s.keeping.keep(rule, acc, i);
    }

    __device__ void start(shared &s, unit &u) const {
        u.held = 0;
        codec.start(s.task, u.own);
    }
    __device__ void quad(shared &s, unit &u, float (&x)[SID_QUAD], uint64_t i, uint32_t count) const {
        const uint64_t tile = i / SID_TILE;
        float y[SID_QUAD];
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = c < count ? sid_side(x[c], s.task.side) : 0.0f;
        codec.row(s.task, u.own, y, count);
        sid_capture(list, tile, (uint32_t)(i % SID_TILE), s.task.low, y, count, u.held);
        if constexpr (Codec::RANGES)
            if (s.task.shift) s.counting.quad(s.task.low, s.task.shift, y, count);
    }
    __device__ void done(shared &s, unit &u, uint64_t tile) const {
        if (sid_lane() == 0) list.held[tile] = u.held;
        sid_fill_quad(list, tile, u.held);
        s.counting.tile(u.held);
        codec.done(s.task, u.own, list, tile);
    }
};

template <class Codec> struct sid_pass_blocks<sid_gathering<Codec>> {
    enum {
        N = Codec::PASS_BLOCKS
    };
};

#endif
