/* The dense codecs share this file: every element becomes a few bits, at a place that follows from its index, so that a pass
 * writes the payload as it goes. A warp holds a whole tile in registers, memory and codec meet there as in pass.cuh's
 * pass; and decoding sums the payloads tile by tile, in rank order, with one store.
 *
 * Bytes per float32 element, with b bits of payload and a residual: an encode 12 + b / 8, the floor of error feedback;
 * 4 more for each further pass over acc (a norm of the whole group), or for each pass over the gradient where no memory
 * keeps acc. A decode of W payloads W b / 8 + 4, and W b / 8 before it, since all is checked before anything is written. */
#ifndef SID_DENSE_CUH
#define SID_DENSE_CUH

#include <type_traits>

#include "../core/codec.cuh"

/* A thread's part of a tile: row r has elements 128 r + 4 l + c. */
typedef float sid_quads[SID_ROWS][SID_QUAD];

__device__ inline uint32_t sid_place(uint32_t row) { return row * SID_ROW + sid_lane() * SID_QUAD; }

/* ---- tiles ------------------------------------------------------------------------------------------------------- */

/* Tiles that are not full, lie in several segments or start anywhere go row by row, in a loop that is not unrolled: then
 * registers have to be chosen, for they have no index. What does not exist is 0. */
__device__ inline void sid_get_tile(const sid_group &g, const sid_span &s, sid_quads &x) {
    if (s.base) {
        sid_load_quads(s.base + sid_place(0) * sid_width(g.dtype), g.dtype, x);
        return;
    }
#pragma unroll 1
    for (uint32_t row = 0; row < SID_ROWS; row++) {
        float y[1][SID_QUAD];
        sid_get<false>(g, s, sid_place(row), sid_count4(s.len, sid_place(row)), y);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] = r == row ? y[0][c] : x[r][c];
    }
}
__device__ inline void sid_put_tile(const sid_group &g, const sid_span &s, const sid_quads &x) {
    if (s.base) {
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
            sid_store_quad(s.base + sid_place(r) * sid_width(g.dtype), g.dtype, x[r]);
        return;
    }
#pragma unroll 1
    for (uint32_t row = 0; row < SID_ROWS; row++) {
        float y[SID_QUAD] = {};
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = r == row ? x[r][c] : y[c];
        sid_put<false>(g, s, sid_place(row), sid_count4(s.len, sid_place(row)), y);
    }
}

/* Rows of it from `row` on, on their way to the L2, where nothing has to hold them yet. */
template <uint32_t ROWS> __device__ inline void sid_fetch_rows(const sid_group &g, const sid_span &s, uint32_t row) {
#ifndef SID_EMULATE
    if (!s.base) return;
#pragma unroll
    for (uint32_t r = 0; r < ROWS; r++)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(s.base + sid_place(row + r) * sid_width(g.dtype)));
#else
    (void)g, (void)s, (void)row;
#endif
}
__device__ inline void sid_fetch_tile(const sid_group &g, const sid_span &s) { sid_fetch_rows<SID_ROWS>(g, s, 0); }

/* Row r of a kept vector; as with sid_load_vectors a whole quad can be moved if its first element exists. */
__device__ inline void sid_get_row(const float *p, uint32_t r, uint32_t len, float (&x)[SID_QUAD]) {
    const uint32_t count = sid_count4(len, sid_place(r));
    float4 v = make_float4(0, 0, 0, 0);
    if (count) v = *(const float4 *)(p + sid_place(r));
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    if (len == SID_TILE) return;
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = c < count ? x[c] : 0.0f;
}

inline uint64_t sid_blocks_to_end(const sid_cuda_encoding &c) { return c.several.count ? c.several.count : 1; }

/* ---- the end of an encode ---------------------------------------------------------------------------------------- */

struct sid_ending {
    sid_scratch *scratch;
    sid_head head;
    sid_draw draw;
    uint8_t *payload;
    uint64_t bytes;
    sid_state *state;
    sid_stats *stats; /* or NULL */
    sid_several several;

    /* Moves to the slice of this block and returns its number: one block serves one slice. */
    __device__ uint32_t move() {
        const uint32_t slice = several.count ? blockIdx.x : 0;
        move(slice);
        return slice;
    }
    __device__ void move(uint32_t slice) {
        if (!several.count) return;
        scratch = sid_work_of(several, slice, scratch);
        payload = sid_payload_of(several, slice, payload);
        state = sid_state_of(several, slice, state);
        head.group += slice * several.group;
        sid_move(draw, several, slice);
    }
};

inline sid_ending sid_ending_of(const sid_cuda_encoding &c) {
    return {c.scratch,
            sid_head_of(c.plan, c.step),
            sid_draw_of(c.plan, c.step),
            c.payload,
            c.plan->sizes.payload,
            c.state,
            c.stats,
            c.several};
}

/* Header, rule, statistics, by one thread; `own`: what it adds to the body's checksum; count: of the elements sent. */
__device__ inline void sid_end(const sid_ending &e, float scale, const sid_rule &rule, uint32_t passes,
                               const sid_part_sum &own, uint64_t count) {
    const uint32_t bad = sid_found(&e.scratch->nonfinite);
    sid_seal((sid_header *)e.payload, e.head, bad ? (uint32_t)SID_FLAG_NONFINITE : 0u, count, scale,
             sid_found(&e.scratch->sum) + own.sum);
    e.state->rule = rule;
    e.state->draw = e.draw;
    e.state->steps++;
    if (e.stats) *e.stats = {count, e.head.n, bad, scale, 0, passes};
}
__device__ inline void sid_end(const sid_ending &e, float scale, const sid_rule &rule, uint32_t passes,
                               const sid_part_sum &own) {
    sid_end(e, scale, rule, passes, own, e.head.n);
}

/* ---- the pass ---------------------------------------------------------------------------------------------------- */

/* A codec here is an object passed by value with
 *     enum { LATE }               keep() wants registers: the gradient waits in the L2 meanwhile
 *     enum { SEVERAL }            1: it heeds sid_several: move(k, slice) makes it that of another slice; 2: it is for
 *                                 several alone
 *     struct shared               its shared memory
 *     struct own                  each thread's, through the kernel; all zero at first
 *     begin(shared &, own &, scratch), end(shared &, own &, scratch)   by the whole block
 *     keep(shared &, rule, draw, acc, at, len)    in place: what the last step left of a tile
 *     tile(shared &, own &, x, at, len)           reads it; what does not exist is 0
 * The last two are called by all warps of a block together, with len 0 where there is no tile.
 * AGAIN: a further pass, over acc as the memory has stored it, or over the gradient.
 * The last block of a pass may end the encode, in place of a launch for that: by a Seal, an object that all of its threads call
 * with a sid_ending. What other blocks have found it reads by sid_found. */
struct sid_no_seal {};

enum {
    SID_TILE_BLOCKS = 2
}; /* on a multiprocessor: 128 registers a thread, of which a tile takes 64 while gradient and acc are on their way */

template <class Memory, class Codec, bool AGAIN, class Seal>
__global__ void __launch_bounds__(SID_BLOCK, SID_TILE_BLOCKS)
    sid_tile_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, Memory memory,
                    Codec codec, sid_several several, sid_ending ending, Seal seal) {
    sid_follow();
    __shared__ typename Codec::shared shared;
    sid_portion share = {0, blockIdx.x, gridDim.x};
    if constexpr (Codec::SEVERAL && Memory::VECTORS <= SID_SEVERAL_VECTORS)
        if (several.count) {
            share = sid_portion_of(several);
            g.before += share.slice * g.n;
            scratch = sid_work_of(several, share.slice, scratch);
            state = sid_state_of(several, share.slice, state);
            vectors.first = sid_state_of(several, share.slice, vectors.first);
            codec.move(several, share.slice);
        }
    if (!scratch->ready) return;
    if (Memory::VECTORS) memory.begin(state);
    typename Codec::own own = {};
    codec.begin(shared, own, *scratch);
    const sid_rule rule = state->rule;
    const sid_draw drawn = state->draw;
    const uint64_t chunks = sid_chunks(g.n);
    uint32_t bad = 0;
#pragma unroll 1
    for (uint64_t chunk = share.block; chunk < chunks; chunk += share.blocks) {
        const uint64_t offset = (chunk * SID_WARPS + sid_warp()) * SID_TILE;
        const uint32_t len = offset < g.n ? sid_tile_len(g.n, offset) : 0;
        float *const first = vectors.first + offset;
        const float *const origin = first + vectors.origin;
        sid_quads x = {};
        if constexpr (AGAIN && Memory::VECTORS) {
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) sid_get_row(first, r, len, x[r]);
        } else {
            constexpr bool late = Memory::VECTORS > 1 || (Memory::VECTORS && Codec::LATE);
            sid_quads acc = {};
            sid_span s = {};
            if (len) s = sid_span_of(g, offset / SID_TILE);
            if (Memory::VECTORS)
#pragma unroll
                for (uint32_t r = 0; r < SID_ROWS; r++) sid_get_row(origin, r, len, acc[r]);
            if (late)
                sid_fetch_tile(g, s);
            else if (len)
                sid_get_tile(g, s, x);
            if (Memory::VECTORS && memory.keeps) codec.keep(shared, rule, drawn, acc, offset, len);
            if (late && len) sid_get_tile(g, s, x);
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
                float more[Memory::VECTORS + 1][SID_QUAD] = {};
                for (int m = 1; m < Memory::VECTORS; m++) sid_get_row(origin + m * vectors.stride, r, len, more[m]);
                /* Momentum factor masking asks which elements the rule changed: what it changed them from is read again. */
                float stored[SID_QUAD] = {};
                if (Memory::VECTORS > 1) sid_get_row(origin, r, len, stored);
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    float one[Memory::VECTORS + 1] = {Memory::VECTORS > 1 ? stored[c] : acc[r][c]};
                    for (int m = 1; m < Memory::VECTORS; m++) one[m] = more[m][c];
                    const bool finite = sid_key(x[r][c]) < SID_KEY_INF;
                    bad += !finite; /* what does not exist was read as zero */
                    x[r][c] = memory.tile(one, acc[r][c], finite ? x[r][c] : 0.0f);
                    for (int m = 1; m < Memory::VECTORS; m++) more[m][c] = one[m];
                }
                const uint32_t count = sid_count4(len, sid_place(r));
                if (Memory::VECTORS) sid_store_floats(first + sid_place(r), count, x[r]);
                for (int m = 1; m < Memory::VECTORS; m++)
                    sid_store_floats(first + m * vectors.stride + sid_place(r), count, more[m]);
                if (len < SID_TILE) /* keep() may have made something of nothing */
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] = c < count ? x[r][c] : 0.0f;
            }
        }
        codec.tile(shared, own, x, offset, len);
    }
    codec.end(shared, own, *scratch);
    bad = sid_warp_sum(bad);
    if (!AGAIN && bad && sid_lane() == 0) atomicAdd(&scratch->nonfinite, bad);
    if constexpr (!std::is_same_v<Seal, sid_no_seal>) {
        if (!ending.scratch || !sid_comes_last(scratch, share.blocks)) return;
        if constexpr (Codec::SEVERAL) ending.move(share.slice);
        seal(ending);
    }
}

/* The first pass of a call, and further ones; with e, that of c, the last one ends the encode, unless c.settles. */
inline uint64_t sid_tile_pieces(uint64_t n, const sid_ending &e) { return n || !e.scratch ? sid_chunks(n) : 1; }
template <class Codec, class Seal>
sid_status sid_pass_tiles(const sid_cuda_encoding &c, const Codec &codec, const sid_ending &e, const Seal &seal) {
    const uint64_t grid = sid_blocks(c.to, c.several, sid_tile_pieces(c.group.n, e), SID_TILE_BLOCKS);
    return sid_with_memory_of(c, [&](auto memory) {
        if constexpr ((uint32_t)Codec::SEVERAL == 2 && (uint32_t)decltype(memory)::VECTORS > SID_SEVERAL_VECTORS)
            return SID_OK; /* sid_several_at_once has refused */
        else
            return sid_launch(c.to, "pass", sid_tile_kernel<decltype(memory), Codec, false, Seal>, grid, SID_BLOCK, 0,
                              c.group, c.scratch, c.state, sid_vectors_of(c), memory, codec, c.several, e, seal);
    });
}
template <class Codec> sid_status sid_pass_tiles(const sid_cuda_encoding &c, const Codec &codec) {
    return sid_pass_tiles(c, codec, sid_ending(), sid_no_seal());
}
template <class Codec, class Seal>
sid_status sid_pass_again(const sid_cuda_encoding &c, const Codec &codec, const sid_ending &e, const Seal &seal) {
    const uint64_t grid = sid_blocks(c.to, c.several, sid_tile_pieces(c.plan->n, e), SID_TILE_BLOCKS);
    const auto run = [&](auto memory) {
        return sid_launch(c.to, "pass again", sid_tile_kernel<decltype(memory), Codec, true, Seal>, grid, SID_BLOCK, 0,
                          c.group, c.scratch, c.state, sid_vectors_of(c.plan, c.state), memory, codec, c.several, e,
                          seal);
    };
    return c.plan->memory->vectors ? run(sid_memory1()) : run(sid_memory0());
}
template <class Codec> sid_status sid_pass_again(const sid_cuda_encoding &c, const Codec &codec) {
    return sid_pass_again(c, codec, sid_ending(), sid_no_seal());
}

/* ---- sums of a tile ---------------------------------------------------------------------------------------------- */

/* The sum of f(x) over a tile in T, in every thread of the warp. */
template <typename T, typename F> __device__ inline T sid_tile_sum(const sid_quads &x, const F &f) {
    T lane[SID_QUAD] = {};
#pragma unroll
    for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += (T)f(x[r][c]);
    return sid_join_lanes(lane);
}
/* In float32, or where that overflows in float64. */
template <typename F> __device__ inline double sid_tile_sum_held(const sid_quads &x, const F &f) {
    const float sum = sid_tile_sum<float>(x, f);
    return sid_key(sum) < SID_KEY_INF ? (double)sum : sid_tile_sum<double>(x, f);
}
__device__ inline double sid_tile_squares(const sid_quads &x) {
    return sid_tile_sum<double>(x, [](float v) { return (double)v * (double)v; });
}

/* ---- the payload's checksum -------------------------------------------------------------------------------------- */

/* The block's share goes to scratch. */
__device__ inline void sid_add_words(sid_scratch &scratch, sid_part_sum own, sid_part_sum (&part)[SID_WARPS]) {
    own = sid_block_sums(own, part);
    if (threadIdx.x) return;
    atomicAdd(&scratch.sum, own.sum);
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

struct sid_payloads {
    const uint8_t *first;
    uint64_t stride, n, bytes;
    uint32_t count;
    float scale;
    bool means; /* sid_has_means */
    __device__ const uint8_t *operator[](uint32_t r) const { return first + r * stride; }
    __device__ const sid_header &head(uint32_t r) const {
        return *(const sid_header *)(const void *)(first + r * stride);
    }
};
inline sid_payloads sid_payloads_of(const sid_cuda_decoding &c) {
    return {c.payloads, c.stride, c.plan->n, c.plan->sizes.payload, c.count, c.scale, sid_has_means(c)};
}

/* The same `bytes` of the payload after the r-th, up to a KiB, on their way to the L2 while those of the r-th are added, where
 * no register has to hold them yet. By the whole warp. */
__device__ inline void sid_fetch_next(const sid_payloads &p, uint32_t r, uint64_t from, uint32_t bytes) {
#ifndef SID_EMULATE
    const uint32_t mine = sid_lane() * 32; /* a sector each */
    if (r + 1 < p.count && mine < bytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(p[r + 1] + from + mine));
#else
    (void)p, (void)r, (void)from, (void)bytes;
#endif
}

/* The findings about each payload. Launches before the check add to sum, bad and own, which start at zero. */
struct sid_findings {
    unsigned long long *sum;
    uint32_t *bad;
    uint32_t *own;        /* a codec's, so many a payload */
    sid_found_part *part; /* of the check's blocks */
};
inline sid_findings sid_carve_findings(sid_carver *c, uint64_t *clear, uint32_t own = 0) {
    const uint64_t start = c->at - sizeof(sid_scratch);
    sid_findings f;
    f.sum = c->take<unsigned long long>(SID_MAX_COUNT);
    f.bad = c->take<uint32_t>(SID_MAX_COUNT);
    f.own = c->take<uint32_t>(own * (uint64_t)SID_MAX_COUNT);
    *clear = c->at - start;
    f.part = c->take<sid_found_part>(SID_CHECKERS);
    return f;
}

/* Looks at all payloads, each by `each` blocks; the last block tells what was found. Reads all of them. A Body has
 *     word(i, w, most)     1: word i of a payload may not be w; may raise `most`
 *     plain_from(), plain_to()    bytes between which any word may be anything
 *     counts(count), form()       whether that can be a header's count; what its flags must be
 *     gathered()                  0: bodies are summed on the way
 *     header(h, p, r, most)       a status: what else it must say, or what payload r has beside codes
 *     sum(p, x, at, len)   the payloads together over a tile, scaled */
template <class Body>
__device__ inline void sid_dense_look(const sid_findings &f, const sid_payloads &p, const Body &body, uint32_t each) {
    __shared__ sid_part_sum part[SID_WARPS];
    __shared__ uint32_t bad, most;
    const uint32_t r = blockIdx.x / each, b = blockIdx.x % each;
    uint32_t wrong = 0, large = 0;
    if (threadIdx.x == 0) bad = most = 0;
    sid_part_sum own = {0};
    if (p.bytes > SID_HEADER_BYTES) /* else there is nothing to see */
        own = sid_sum_words(p[r], p.bytes, b, each, body.plain_from(), body.plain_to(),
                            [&](uint64_t i, uint32_t w) { wrong |= body.word(i, w, large); });
    own = sid_block_sums(own, part);
    if (wrong) atomicOr(&bad, 1u);
    if (large) atomicMax(&most, large);
    __syncthreads();
    if (threadIdx.x) return;
    f.part[blockIdx.x] = {own.sum, bad, most};
}

template <class Body>
__global__ void __launch_bounds__(SID_BLOCK)
    sid_dense_check_kernel(sid_group g, sid_scratch *scratch, sid_findings f, sid_payloads p, Body body, uint32_t each,
                           sid_expect expect, const int32_t *gate, sid_cuda_report *report, sid_state *state,
                           sid_rule none) {
    sid_follow();
    __shared__ uint32_t first, flagged;
    const bool begun = gridDim.x == each * p.count;
    if (blockIdx.x < each * p.count)
        sid_dense_look(f, p, body, each);
    else
        sid_begin_check(g, scratch, gate);
    if (!sid_comes_last(&report->arrived, gridDim.x)) return;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    sid_each_found(f.part, p.count, each, [&](uint32_t r, const sid_found_part &x) {
        const sid_header h = p.head(r);
        int32_t status = sid_check_header(h, expect, r, begun ? x.sum + f.sum[r] : x.sum);
        if (status == SID_OK && (x.bad || (begun && f.bad[r]) || !body.counts(h.count) ||
                                 (h.flags & ~(uint32_t)SID_FLAG_NONFINITE) != body.form()))
            status = SID_E_CORRUPT;
        if (status == SID_OK) status = body.header(h, p, r, x.most);
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    });
    __syncthreads();
    if (threadIdx.x) return;
    /* For bodies that are summed, the flag counts if a memory is corrected. Otherwise the outputs tell, as they are
     * written. */
    sid_end_check(report, scratch, first, (body.gathered() || state) && (flagged || scratch->nonfinite));
    if (scratch->go && scratch->nonfinite && state) state->rule = none;
}

enum {
    SID_DENSE_BLOCKS = 3
}; /* on a multiprocessor: 80 registers a thread */

/* The tiles of this warp in which a sum has overflowed, once more: what is not finite of them is averaged in float64, payload by
 * payload. Rare, so it adds up all payloads again for each row, which takes fewer registers, and is a call: in the kernel itself it
 * would make the decode's loop spill. By value, because an address would keep the arguments out of the constant bank. */
template <class Body>
__device__ __noinline__ void sid_dense_means(sid_group g, sid_vectors vectors, sid_payloads p, sid_kept memory,
                                             Body body) {
    const uint64_t tiles = sid_tiles(g.n);
#pragma unroll 1
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        {
            sid_quads x = {};
            body.sum(p, x, s.at, s.len);
            if (!__ballot_sync(SID_FULL, sid_overflows(x))) continue;
        }
#pragma unroll 1
        for (uint32_t row = 0; row < SID_ROWS; row++) {
            float x[SID_QUAD] = {};
            double sum[SID_QUAD] = {};
#pragma unroll 1
            for (uint32_t i = 0; i <= p.count; i++) { /* each payload, then all together */
                const bool all = i == p.count;
                sid_payloads of = p;
                if (!all) {
                    of.first = p[i];
                    of.count = 1;
                    of.scale = 1;
                }
                sid_quads y = {};
                body.sum(of, y, s.at, s.len);
#pragma unroll
                for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = r == row ? y[r][c] : x[c];
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) sum[c] += all ? 0 : (double)x[c];
            }
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                x[c] = sid_key(x[c]) < SID_KEY_INF ? x[c] : sid_mean(sum[c], p.scale);
            const uint32_t count = sid_count4(s.len, sid_place(row));
            if (memory.receives) sid_receive(memory, vectors, s.at + sid_place(row), count, x);
            sid_put<false>(g, s, sid_place(row), count, x);
        }
    }
}

template <class Body>
__global__ void __launch_bounds__(SID_BLOCK, SID_DENSE_BLOCKS)
    sid_dense_decode_kernel(sid_group g, const sid_scratch *scratch, const sid_state *state, sid_vectors vectors,
                            sid_payloads p, sid_kept memory, Body body) {
    sid_follow();
    __shared__ bool over[SID_WARPS]; /* the warp has left a tile whose sum overflows */
    if (!scratch->go) return;
    memory.begin(state);
    if (sid_lane() == 0) over[sid_warp()] = false;
    const bool fill = scratch->nonfinite;
    const uint64_t tiles = sid_tiles(g.n);
#pragma unroll 1
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        sid_quads x = {};
        if (!fill) {
            body.sum(p, x, s.at, s.len);
            if (p.means && __ballot_sync(SID_FULL, sid_overflows(x))) {
                if (sid_lane() == 0) over[sid_warp()] = true;
                continue;
            }
        } else
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) x[r][0] = x[r][1] = x[r][2] = x[r][3] = sid_bits_f32(0x7fc00000u);
        if (memory.vectors && fill)
#pragma unroll 1
            for (uint32_t i = sid_place(0); i < s.len; i += SID_ROW)
                sid_undo(memory, g, s, vectors, i, sid_count4(s.len, i));
        else if (memory.receives)
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
                sid_receive(memory, vectors, s.at + sid_place(r), sid_count4(s.len, sid_place(r)), x[r]);
        sid_put_tile(g, s, x);
    }
    __syncwarp();
    if (over[sid_warp()]) sid_dense_means(g, vectors, p, memory, body);
}

inline uint64_t sid_findings_work(uint32_t own = 0) {
    uint64_t clear;
    sid_carver c = {nullptr, sizeof(sid_scratch)};
    sid_carve_findings(&c, &clear, own);
    return c.at - sizeof(sid_scratch);
}

struct sid_no_more {};

/* Checks all of the payloads that has not been checked; `more`, if it is anything, launches what else there is to see, before the
 * check. own: of sid_findings. */
template <class Body, typename F>
sid_status sid_dense_check(sid_cuda_decoding &c, const sid_payloads &p, const Body &body, const F &more,
                           uint32_t own = 0) {
    uint64_t clear;
    const sid_findings f = sid_carve_findings(&c.work, &clear, own);
    const uint32_t each = sid_checkers(p.bytes / (32 * SID_BLOCK), 1 + 8ull * c.to.processors / p.count, p.count);
    constexpr bool begins = !std::is_same_v<F, sid_no_more>;
    sid_status s = SID_OK;
    if (begins || c.part == SID_WRITE) s = sid_begin_decode(c, clear);
    if (c.part == SID_WRITE) return s;
    if constexpr (begins)
        if (!s) s = more();
    sid_rule none;
    c.plan->codec->none(&none);
    if (!s)
        s = sid_launch(c.to, "check", sid_dense_check_kernel<Body>, (uint64_t)each * p.count + !begins, SID_BLOCK, 0,
                       c.group, c.scratch, f, p, body, each, sid_expect_of(c), c.gate, c.report, c.state, none);
    return s;
}

template <class Body, typename F> sid_status sid_dense_decode(sid_cuda_decoding &c, const Body &body, const F &more) {
    const sid_payloads p = sid_payloads_of(c);
    const sid_vectors vectors = sid_vectors_of(c.plan, c.state);
    sid_status s = sid_dense_check(c, p, body, more);
    if (s || c.part == SID_CHECK) return s;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    return s ? s
             : sid_launch(c.to, "decode", sid_dense_decode_kernel<Body>,
                          sid_blocks(c.to, sid_chunks(p.n), SID_DENSE_BLOCKS), SID_BLOCK, 0, c.group, c.scratch,
                          c.state, vectors, p, memory, body);
}

template <class Body> sid_status sid_dense_decode(sid_cuda_decoding &c, const Body &body) {
    return sid_dense_decode(c, body, sid_no_more());
}

#endif
