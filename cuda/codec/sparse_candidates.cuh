/* The candidates that a pass has captured (csrc/codec/sparse.h, sparse_work), and another pass, if they do not suffice:
 * the predicted key was too large, or there was none, as in the first step. It reads acc as it is stored, 4 bytes an
 * element, and writes candidates to the slots of their tiles, 6 bytes each, as the first pass did (sparse_pass.cuh). A
 * warp takes every eighth of its block's tiles. Bandwidth is the limit. */
#ifndef SID_SPARSE_CANDIDATES_CUH
#define SID_SPARSE_CANDIDATES_CUH

#include "sparse_pass.cuh"
#include "sparse_select.cuh"

struct sid_candidates : sid_selection {
    uint64_t count; /* of all blocks' candidates */
    uint32_t low;   /* keys from here on are candidates */
    bool compacted; /* the CPU had no room for all that were captured, and keeps the best */
    uint32_t passes;

    __device__ sid_candidates(const sid_finishing &of, sid_crew_shared &shared)
        : sid_selection(of, shared), count(0), low(0), compacted(false), passes(1) {}

    /* How many candidates a tile has. Tiles behind the group, up to a whole chunk, have none. */
    __device__ uint32_t held(uint64_t tile) const { return tile * SID_TILE < f.n ? f.list.held[tile] : 0; }

    /* Makes another pass, as the task r says. */
    template <class Codec> __device__ void pass_again(const Codec &codec, const typename Codec::task &r) {
        meet(); /* others may still read what it overwrites */
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
            sid_fill_quad(f.list, tile, held);
            codec.done(r, unit, f.list, tile);
        }
        passes++;
        __syncthreads();
    }
};

#endif
