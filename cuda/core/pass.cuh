/* The pass over a group, in which memory and codec meet. A warp takes a tile of 1024 elements, row by row: it reads the
 * gradient and the memory's vectors into registers, asks the codec what the last step left of acc, the memory makes the
 * new acc of it, the warp writes that, and the codec reads it from the registers. So the gradient is read once and acc
 * read and written once, 12 bytes an element; bandwidth is the limit. A second part is what a decode does to a memory,
 * four elements at a time. */
#ifndef SID_PASS_CUH
#define SID_PASS_CUH

#include "memories.cuh"

/* Random numbers for the four elements from i on; i is a multiple of 4. */
__device__ inline void sid_draws32(const sid_draw &d, uint64_t i, uint32_t (&u)[SID_QUAD]) {
    sid_draw_block(&d, i / 4, u);
}
__device__ inline void sid_draws16(const sid_draw &d, uint64_t i, uint32_t (&u)[SID_QUAD]) {
    uint32_t w[4];
    sid_draw_block(&d, i / 8, w);
    const bool upper = i % 8 != 0;
    const uint32_t a = upper ? w[2] : w[0], b = upper ? w[3] : w[1];
    u[0] = a & 0xffffu, u[1] = a >> 16, u[2] = b & 0xffffu, u[3] = b >> 16;
}

struct sid_vectors { /* where acc and the memory's other vectors lie */
    float *first;
    uint64_t stride;
    int64_t origin; /* floats from there to where a first pass reads them: 0, or those of sid_step.origin */
};

inline sid_vectors sid_vectors_of(const sid_plan *p, sid_state *s) {
    if (!s) return {nullptr, 0, 0};
    return {(float *)(void *)((char *)s + SID_STATE_BYTES), sid_state_stride(p->n), 0};
}
/* For the first pass of an encode. */
inline sid_vectors sid_vectors_of(const sid_cuda_encoding &c) {
    sid_vectors v = sid_vectors_of(c.plan, c.state);
    if (v.first) v.first += c.from;
    v.origin = c.step.origin / (int64_t)sizeof(float);
    return v;
}

/* sid_forget, by all blocks of a grid. floats: of all vectors together. */
__device__ inline void sid_forget_all(uint8_t *state, uint64_t floats, const sid_rule &none) {
    float4 *const vectors = (float4 *)(void *)(state + SID_STATE_BYTES);
    for (uint64_t k = (uint64_t)blockIdx.x * blockDim.x + threadIdx.x; k < floats / SID_QUAD;
         k += (uint64_t)gridDim.x * blockDim.x)
        vectors[k] = make_float4(0, 0, 0, 0);
    if (!blockIdx.x && !threadIdx.x) ((sid_state *)(void *)state)->rule = none;
}

/* The kept vectors' four elements from i on. State begins at 64 bytes and tiles at multiples of 4 KiB, and the stride
 * has slack: a whole quad can always be moved, if its first element exists. */
__device__ inline void sid_load_vector(const sid_vectors &v, uint32_t m, uint64_t i, float (&x)[SID_QUAD]) {
    const float4 y = *(const float4 *)(v.first + v.origin + m * v.stride + i);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
template <class Memory>
__device__ inline void sid_load_vectors(const sid_vectors &v, uint64_t i, float (&x)[Memory::VECTORS + 1][SID_QUAD]) {
    for (int m = 0; m < Memory::VECTORS; m++) sid_load_vector(v, m, i, x[m]);
}
__device__ inline void sid_store_floats(float *p, uint32_t count, const float (&x)[SID_QUAD]) {
    if (count == SID_QUAD)
#ifdef SID_EMULATE
        sid_store_quad(p, SID_F32, x);
#else /* the compiler would take a plain store apart, to share code with the single ones below */
        asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                     : "memory");
#endif
    else
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (c < count) p[c] = x[c];
}

/* Reads the gradient and what is kept, stores acc, shows it to the codec. Per element, float32 with one kept vector:
 * reads 4 + 4, writes 4 bytes, the floor of error feedback; plus what the codec writes.
 *
 * A codec here is an object passed by value with
 *     enum { REREADS }            it reads acc again later: acc is stored in work where no memory keeps it
 *     enum { RAW }                it is shown NaN and Inf as they came, not as the 0 that the memory takes them for
 *     struct shared               its shared memory
 *     struct unit                 a thread's own, for one tile
 *     begin(shared &), end(shared &)   by the whole block
 *     close(scratch)              the same, after all else, `nonfinite` included: for sid_comes_last
 *     draws(shared &, i, u)       u[4]: what the last step drew for the elements from i on, where keep asks for it
 *     keep(shared &, rule, acc, i, u)  what the rule of the last step left of element i, for which u was drawn
 *     start(shared &, unit &)     before a tile, and
 *     done(shared &, unit &, tile)     after it, by the whole warp
 *     quad(shared &, unit &, acc[4], i, count) four elements from i on, of which count exist; acc may be changed. By the
 *                                 whole warp, row by row: count may be 0. What does not exist is garbage */
template <class Memory, class Codec> struct sid_tile_pass {
    const sid_group &g;
    const sid_vectors &vectors;
    const Memory &memory;
    float *acc;
    const Codec &codec;
    typename Codec::shared &shared;
    const sid_rule rule;
    uint32_t bad;

    /* Two rows in flight on the quick path: both rows' loads go out before the first is used. */
    template <bool QUICK> __device__ void tile(const sid_span &s, typename Codec::unit &unit) {
        enum {
            DEEP = QUICK ? 2 : 1
        };
#pragma unroll 1
        for (uint32_t r = 0; r < SID_ROWS; r += DEEP) {
            const uint32_t first = r * SID_ROW + sid_lane() * SID_QUAD;
            const uint32_t count = QUICK ? (uint32_t)SID_QUAD : sid_count4(s.len, first);
            if (!QUICK && r * SID_ROW >= s.len) break;
            float x[DEEP][SID_QUAD], vec[DEEP][Memory::VECTORS + 1][SID_QUAD] = {};
            sid_get<QUICK>(g, s, first, count, x);
            if (QUICK || count)
#pragma unroll
                for (uint32_t d = 0; d < DEEP; d++)
                    sid_load_vectors<Memory>(vectors, s.at + first + d * SID_ROW, vec[d]);
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) quad(unit, x[d], vec[d], s.at + first + d * SID_ROW, count);
        }
    }

    __device__ void quad(typename Codec::unit &unit, float (&x)[SID_QUAD], float (&vec)[Memory::VECTORS + 1][SID_QUAD],
                         uint64_t i, uint32_t count) {
        uint32_t u[SID_QUAD] = {};
        if (Memory::VECTORS && memory.keeps) codec.draws(shared, i, u);
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            float one[Memory::VECTORS + 1];
            for (int m = 0; m < Memory::VECTORS; m++) one[m] = vec[m][c];
            float kept = 0;
            if (Memory::VECTORS) kept = memory.keeps ? codec.keep(shared, rule, one[0], i + c, u[c]) : one[0];
            const float raw = x[c];
            const bool finite = sid_key(raw) < SID_KEY_INF;
            bad += !finite; /* what does not exist was read as zero */
            x[c] = memory.tile(one, kept, finite ? raw : 0.0f);
            for (int m = 0; m < Memory::VECTORS; m++) vec[m][c] = one[m];
            if (Codec::RAW && !finite) x[c] = raw;
        }
        for (int m = 0; m < Memory::VECTORS; m++)
            sid_store_floats(vectors.first + m * vectors.stride + i, count, vec[m]);
        if (Codec::REREADS && !Memory::VECTORS) sid_store_floats(acc + i, count, x);
        codec.quad(shared, unit, x, i, count);
    }
};

/* Blocks that every multiprocessor holds at once (1024 threads are the most that sm_75 has): a grid of as many has no
 * second, half empty wave. */
enum {
    SID_PASS_BLOCKS = 4
};
/* Fewer, for a codec that needs more registers. */
template <class Codec> struct sid_pass_blocks {
    enum {
        N = SID_PASS_BLOCKS
    };
};

/* Does the share of block `block` of `blocks` in the pass: a warp takes every (8 * blocks)-th tile. */
template <class Memory, class Codec>
__device__ inline void sid_pass_over(const sid_group &g, sid_scratch *scratch, const sid_state *state,
                                     const sid_vectors &vectors, float *acc, Memory memory, const Codec &codec,
                                     uint32_t block, uint32_t blocks) {
    __shared__ typename Codec::shared shared;
    if (!scratch->ready) return;
    memory.begin(state);
    codec.begin(shared);
    sid_tile_pass<Memory, Codec> pass = {g, vectors, memory, acc, codec, shared, state->rule, 0};
    const uint64_t tiles = sid_tiles(g.n);
    for (uint64_t tile = (uint64_t)block * SID_WARPS + sid_warp(); tile < tiles; tile += (uint64_t)blocks * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        typename Codec::unit unit;
        codec.start(shared, unit);
        if (s.base)
            pass.template tile<true>(s, unit);
        else
            pass.template tile<false>(s, unit);
        codec.done(shared, unit, tile);
    }
    codec.end(shared);
    const uint32_t bad = sid_warp_sum(pass.bad);
    if (bad && sid_lane() == 0) atomicAdd(&scratch->nonfinite, bad);
    codec.close(scratch);
}

template <class Memory, class Codec>
__global__ void __launch_bounds__(SID_BLOCK, sid_pass_blocks<Codec>::N)
    sid_pass_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, float *acc,
                    Memory memory, Codec codec) {
    sid_follow();
    sid_pass_over(g, scratch, state, vectors, acc, memory, codec, blockIdx.x, gridDim.x);
}

/* The pass over several slices. acc lies in work, as scratch. move(k, slice) moves the codec to another slice. */
template <class Memory, class Codec>
__global__ void __launch_bounds__(SID_BLOCK, sid_pass_blocks<Codec>::N)
    sid_several_pass_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, float *acc,
                            Memory memory, Codec codec, sid_several several) {
    sid_follow();
    const sid_portion mine = sid_portion_of(several);
    g.before += mine.slice * g.n;
    vectors.first = sid_state_of(several, mine.slice, vectors.first);
    codec.move(several, mine.slice);
    sid_pass_over(g, sid_work_of(several, mine.slice, scratch), sid_state_of(several, mine.slice, state), vectors,
                  sid_work_of(several, mine.slice, acc), memory, codec, mine.block, mine.blocks);
}

/* Takes the gradient of elements i to i + count - 1 of a tile out of the memory again. A decoder calls it before it
 * overwrites them, if the step did not happen. */
__device__ inline void sid_undo(const sid_kept &memory, const sid_group &g, const sid_span &s, const sid_vectors &v,
                                uint32_t i, uint32_t count) {
    float x[1][SID_QUAD], vec[sid_kept::MOST][SID_QUAD] = {};
    if (!count) return; /* the vectors may end here */
    sid_get<false>(g, s, i, count, x);
#pragma unroll
    for (uint32_t m = 0; m < sid_kept::MOST; m++)
        if (m < memory.vectors) sid_load_vector(v, m, s.at + i, vec[m]);
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) {
        float one[sid_kept::MOST] = {vec[0][c], vec[1][c]};
        memory.undo(one, sid_key(x[0][c]) < SID_KEY_INF ? x[0][c] : 0.0f);
        vec[0][c] = one[0], vec[1][c] = one[1];
    }
#pragma unroll
    for (uint32_t m = 0; m < sid_kept::MOST; m++)
        if (m < memory.vectors) sid_store_floats(v.first + m * v.stride + s.at + i, count, vec[m]);
}

/* Shows a memory that learns from it (`memory.receives`) what the ranks made of elements i to i + count - 1: x,
 * scaled. */
__device__ inline void sid_receive(const sid_kept &memory, const sid_vectors &v, uint64_t i, uint32_t count,
                                   const float (&x)[SID_QUAD]) {
    float vec[SID_QUAD];
    if (!count) return;
    sid_load_vector(v, 0, i, vec);
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) memory.received(&vec[c], x[c]);
    sid_store_floats(v.first + i, count, vec);
}

/* Says whether a sum of payloads may overflow although the mean is finite. The decode itself then takes the mean in
 * float64, once it has written the rest (csrc/core/decode.c). Linear bodies that are not divided: cuda/codec/linear.cu. */
inline bool sid_has_means(const sid_cuda_decoding &c) {
    return c.count > 1 && !(c.plan->codec->info.traits & (SID_LINEAR | SID_VOTE));
}
#endif
