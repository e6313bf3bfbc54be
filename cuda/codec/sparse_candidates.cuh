/* The candidates that a pass has captured, in one list in index order (csrc/codec/sparse.h, sparse_work); and the next pass,
 * where they do not suffice. */
#ifndef SID_SPARSE_CANDIDATES_CUH
#define SID_SPARSE_CANDIDATES_CUH

#include "sparse_pass.cuh"
#include "sparse_select.cuh"

struct sid_candidates : sid_selection {
    uint64_t count;
    uint32_t low;   /* keys from here on were captured, */
    bool compacted; /* or of those the best alone, for want of room */
    uint32_t passes;

    __device__ sid_candidates(const sid_finishing &of, sid_crew_shared &shared)
        : sid_selection(of, shared), count(0), low(0), compacted(false), passes(1) {}

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

    /* ---- as the pass has left them: tile by tile */

    /* Calls f(is one, index in the tile, value) for those of a tile in index order, 32 at a time, by a whole warp. */
    template <typename F>
    __device__ void each_of(const sid_pass_task &r, uint64_t tile, uint32_t held, const F &f) const {
        const sid_list &l = this->f.list;
        const bool spilled = held > l.slots;
        const uint64_t offset = tile * SID_TILE;
        const uint32_t upto = spilled ? sid_tile_len(this->f.n, offset) : held;
        for (uint32_t from = 0; from < upto; from += SID_LANES) {
            const uint32_t i = from + sid_lane();
            bool is = i < upto;
            uint32_t index = i;
            float value = 0;
            if (is && spilled) {
                value = sid_side(this->f.acc[offset + i], r.side);
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
    __device__ unsigned long long count_pairs(const sid_pass_task &r, uint32_t from) {
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

    /* The end of a pass: candidates into the list. `best`: how many of the largest matter where not all have room; then
     * these are all that is left (sparse_settle). */
    __device__ void settle(const sid_pass_task &r, uint64_t best) {
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
    __device__ void gather(const sid_pass_task &r, const sid_chosen &what, unsigned long long at) {
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

    /* Another pass, over acc as it is stored. */
    template <class Codec> __device__ void pass_again(const Codec &codec, const typename Codec::task &r) {
        __syncthreads();
        for (uint64_t tile = first + sid_warp(); tile < last; tile += SID_WARPS) {
            const uint64_t offset = tile * SID_TILE;
            if (offset >= f.n) break;
            const uint32_t len = sid_tile_len(f.n, offset);
            typename Codec::unit unit;
            uint32_t held = 0;
            codec.start(r, unit);
#pragma unroll 2
            for (uint32_t i = sid_lane() * SID_QUAD; i < SID_TILE; i += SID_ROW) {
                const uint32_t count = sid_count4(len, i);
                float x[SID_QUAD] = {};
                if (count) {
                    const float4 v = *(const float4 *)(f.acc + offset + i);
                    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
                }
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = c < count ? sid_side(x[c], r.side) : 0.0f;
                codec.row(r, unit, x, count);
                sid_capture(f.list, tile, i, r.low, x, count, held);
            }
            if (sid_lane() == 0) f.list.held[tile] = held;
            if constexpr (Codec::crew::COUNTS) sid_fill_quad(f.list, tile, held);
            codec.done(r, unit, f.list, tile);
        }
        passes++;
        __syncthreads();
    }
};

#endif
