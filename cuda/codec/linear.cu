/* none, fp16, bf16 (csrc/codec/linear.c defines the result). Every element is rounded to the body's type at its own place, so
 * one pass reads gradient and memory, and writes acc and the body. The bodies are summed on the way.
 * Rounding at random draws the bits of four elements at a time, those of the last step's again for what is kept.
 * Bytes per float32 element: fp16 and bf16 14 with a residual (12 of error feedback, 2 of body) and 6 without; none 8. The
 * limit is memory bandwidth. */
#include "linear.cuh"

namespace {

template <bool DRAWS> struct linear {
    enum {
        REREADS = 0,
        RAW = 1
    };
    struct shared {
        sid_draw last; /* of the last step */
    };
    struct unit {};
    uint8_t *body;
    float scale, ranks; /* 1 / ranks, and of how many ranks the body becomes a part of the sum */
    sid_dtype dtype;    /* of the body */
    bool clamps;        /* a codec that rounds: what is finite stays so */
    sid_draw draw;
    const sid_state *state;
    sid_linear_ending ending; /* without scratch: none */

    __device__ float scaled(float x, float s, float ranks) const {
        if (clamps && sid_key(x) < SID_KEY_INF) {
            const float max = linear_limit(dtype, ranks, DRAWS);
            x = x > max ? max : x < -max ? -max : x;
        }
        /* A product with a NaN is 0x7fffffff on a device; the wire keeps the NaN's own bits, quiet, as the CPU does. */
        return sid_key(x) > SID_KEY_INF ? sid_bits_f32(sid_f32_bits(x) | 0x400000u) : x * s;
    }

    __device__ float rounded(float x, uint32_t u) const {
        return !DRAWS ? x : dtype == SID_F16 ? sid_f16_dithered(x, u) : sid_bf16_dithered(x, u);
    }

    __device__ void begin(shared &s) const {
        if constexpr (DRAWS) {
            if (threadIdx.x == 0) s.last = state->draw;
            __syncthreads();
        }
    }
    __device__ void end(shared &) const {}
    __device__ void close(sid_scratch *scratch) const {
        if (ending.scratch && sid_comes_last(scratch, gridDim.x)) sid_linear_end(ending);
    }
    __device__ void start(shared &, unit &) const {}
    __device__ void done(shared &, unit &, uint64_t) const {}

    __device__ void draws(const shared &s, uint64_t i, uint32_t (&u)[SID_QUAD]) const {
        if (DRAWS) sid_draws16(s.last, i, u);
    }
    __device__ float keep(const shared &, const sid_rule &rule, float acc, uint64_t, uint32_t u) const {
        if (rule.scale == 0) return acc;
        float sent = rounded(scaled(acc, rule.scale, rule.inverse), u);
        if (dtype != SID_F32) sent = sid_decode_half(sid_encode_half(sent, dtype), dtype);
        return acc - sent * rule.inverse;
    }

    __device__ void quad(shared &, unit &, float (&x)[SID_QUAD], uint64_t i, uint32_t count) const {
        uint8_t *p = body + i * sid_width(dtype); /* payloads begin at 64 bytes: aligned to a quad */
        uint32_t u[SID_QUAD] = {};
        if (DRAWS) sid_draws16(draw, i, u);
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = rounded(scaled(x[c], scale, ranks), u[c]);
        if (count == SID_QUAD)
            sid_store_quad(p, dtype, x);
        else
            for (uint32_t c = 0; c < SID_QUAD; c++)
                if (c < count) sid_store1(p + c * sid_width(dtype), dtype, x[c]);
    }
};

template <bool DRAWS> sid_status encode_with(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const float ranks = (float)sid_linear_ranks(c);
    const bool lossless = p->codec->info.traits & SID_LOSSLESS;
    sid_linear_ending ending = sid_linear_ending_of(c, p->n, sid_linear_rule(c), 1);
    if (!DRAWS) {
        ending.head.salt = 0;
        ending.draw = sid_draw();
    }
    const linear<DRAWS> codec = {c.payload + SID_HEADER_BYTES,
                                 1.0f / ranks,
                                 ranks,
                                 p->sizes.body_dtype,
                                 p->sizes.body_dtype != SID_F32 && !lossless,
                                 sid_draw_of(p, c.step),
                                 c.state,
                                 c.settles ? sid_linear_ending() : ending};
    const uint64_t chunks = p->n ? sid_chunks(p->n) : 1;
    const sid_vectors vectors = sid_vectors_of(c);
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s)
        s = sid_with_memory_of(c, [&](auto memory) {
            return sid_launch(c.to, "encode", sid_pass_kernel<decltype(memory), linear<DRAWS>>,
                              sid_blocks(c.to, chunks, SID_PASS_BLOCKS), SID_BLOCK, 0, c.group, c.scratch, c.state,
                              vectors, (float *)nullptr, memory, codec);
        });
    return s || c.settles ? s : sid_linear_cover(c);
}
sid_status encode(sid_cuda_encoding &c) {
    return linear_form_of(c.plan).draws ? encode_with<true>(c) : encode_with<false>(c);
}

/* ---- decode ---------------------------------------------------------------------------------------------------- */

enum {
    DECODE_BLOCKS = 4
}; /* on a multiprocessor, as SID_PASS_BLOCKS */

struct bodies {
    const uint8_t *payloads;
    uint64_t stride;
    uint32_t count;
    float scale;
    sid_dtype dtype;
    bool means; /* the sum may overflow although the mean is finite, and no memory is there */
};

/* Elements i .. i + count of a body; QUICK: N rows, where bodies are aligned to a quad. */
template <bool QUICK, uint32_t N>
__device__ inline void load(const bodies &b, uint32_t r, uint64_t i, uint32_t count, float (&x)[N][SID_QUAD]) {
    const uint8_t *p = b.payloads + r * b.stride + SID_HEADER_BYTES + i * sid_width(b.dtype);
    if constexpr (QUICK)
        sid_load_quads(p, b.dtype, x);
    else
        for (uint32_t c = 0; c < SID_QUAD; c++)
            x[0][c] = c < count ? sid_load1(p + c * sid_width(b.dtype), b.dtype) : 0.0f;
}

/* The bodies together. The first is not added: 0 + x would lose the sign of -0. */
template <bool QUICK, uint32_t N>
__device__ inline void sum(const bodies &b, uint64_t i, uint32_t count, float (&x)[N][SID_QUAD]) {
    load<QUICK>(b, 0, i, count, x);
    for (uint32_t r = 1; r < b.count; r++) {
        float y[N][SID_QUAD];
        load<QUICK>(b, r, i, count, y);
#pragma unroll
        for (uint32_t d = 0; d < N; d++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] += y[d][c];
    }
}

template <uint32_t N> __device__ inline bool nonfinite(const float (&x)[N][SID_QUAD]) {
    bool bad = false;
    for (uint32_t d = 0; d < N; d++)
        for (uint32_t c = 0; c < SID_QUAD; c++) bad |= sid_key(x[d][c]) >= SID_KEY_INF;
    return bad;
}

__device__ inline bool quick(const bodies &b) {
    return sid_aligned(b.payloads + SID_HEADER_BYTES, b.dtype) && b.stride % 16 == 0;
}

/* Calls f(tile) for every tile of n elements, a warp each. */
template <typename F> __device__ inline void each_tile(uint64_t n, const F &f) {
    const uint64_t tiles = sid_tiles(n);
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS)
        f(tile);
}

/* Looks for NaN and Inf before anything is written: only where a memory would have to be corrected. Reads the bodies. */
struct looker {
    const bodies &b;
    bool bad;
    template <bool QUICK> __device__ void tile(uint64_t offset, uint32_t len) {
        enum {
            DEEP = QUICK ? 4 : 1
        };
        for (uint32_t i = sid_lane() * SID_QUAD; i < len; i += DEEP * SID_ROW) {
            float x[DEEP][SID_QUAD];
            sum<QUICK>(b, offset + i, sid_count4(len, i), x);
            bad |= nonfinite(x);
        }
    }
};

__global__ void __launch_bounds__(SID_BLOCK, DECODE_BLOCKS)
    sid_look_kernel(sid_scratch *scratch, bodies b, uint64_t n) {
    sid_follow();
    const bool aligned = quick(b);
    looker look = {b, false};
    const auto one = [&](uint64_t tile) {
        const uint64_t offset = tile * SID_TILE;
        const uint32_t len = sid_tile_len(n, offset);
        if (aligned && len == SID_TILE)
            look.tile<true>(offset, len);
        else
            look.tile<false>(offset, len);
    };
    each_tile(n, one);
    if (look.bad) scratch->nonfinite = 1; /* every writer writes the same */
}

struct decoder {
    const sid_kept &memory;
    const sid_group &g;
    const bodies &b;
    const sid_vectors &vectors;
    const float factor;
    const bool undo;
    bool bad; /* something is not finite; with b.means perhaps only before sid_linear_means */
    template <bool QUICK> __device__ void tile(const sid_span &s) {
        enum {
            DEEP = QUICK ? 4 : 1
        };
#pragma unroll 1
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += DEEP * SID_ROW) {
            const uint32_t count = QUICK ? (uint32_t)SID_QUAD : sid_count4(s.len, i);
            float x[DEEP][SID_QUAD];
            sum<QUICK>(b, s.at + i, count, x);
            bad |= nonfinite(x);
#pragma unroll
            for (uint32_t d = 0; d < DEEP; d++) {
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] *= factor;
                if (!QUICK && undo) sid_undo(memory, g, s, vectors, i, count);
                if (memory.receives && !undo) sid_receive(memory, vectors, s.at + i + d * SID_ROW, count, x[d]);
                sid_put<QUICK>(g, s, i + d * SID_ROW, count, x[d]);
            }
        }
    }
};

/* The tiles of this warp, in which a sum has overflowed, once more: what is not finite of them is averaged in float64 (as in
 * csrc/core/decode.c). It is a call, and by value, for the reasons of sid_dense_means. Returns whether a mean is not finite. */
__device__ __noinline__ bool sid_linear_means(sid_group g, bodies b, float factor) {
    bool bad = false;
    each_tile(g.n, [&](uint64_t tile) {
        const sid_span s = sid_span_of(g, tile);
#pragma unroll 1
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
            const uint32_t count = sid_count4(s.len, i);
            float x[1][SID_QUAD];
            double total[SID_QUAD] = {};
            sum<false>(b, s.at + i, count, x);
            for (uint32_t c = 0; c < SID_QUAD; c++) x[0][c] *= factor;
            if (!nonfinite(x)) continue;
#pragma unroll 1
            for (uint32_t r = 0; r < b.count; r++) {
                float y[1][SID_QUAD];
                load<false>(b, r, s.at + i, count, y);
                for (uint32_t c = 0; c < SID_QUAD; c++) total[c] += (double)y[0][c];
            }
            for (uint32_t c = 0; c < SID_QUAD; c++)
                if (sid_key(x[0][c]) >= SID_KEY_INF) x[0][c] = sid_mean(total[c], factor);
            bad |= nonfinite(x);
            sid_put<false>(g, s, i, count, x[0]);
        }
    });
    return bad;
}

__global__ void __launch_bounds__(SID_BLOCK, DECODE_BLOCKS)
    sid_decode_kernel(sid_group g, const sid_scratch *scratch, bodies b, sid_vectors vectors, sid_kept memory,
                      const sid_state *state, sid_cuda_report *report) {
    sid_follow();
    if (!scratch->go) return;
    memory.begin(state);
    const bool aligned = quick(b), undo = memory.vectors && scratch->nonfinite;
    decoder decode = {memory, g, b, vectors, sid_linear_factor(*(const sid_header *)b.payloads, b.scale), undo, false};
    const auto one = [&](uint64_t tile) {
        const sid_span s = sid_span_of(g, tile);
        if (aligned && s.base && !undo)
            decode.template tile<true>(s);
        else
            decode.template tile<false>(s);
    };
    each_tile(g.n, one);
    bool bad = decode.bad;
    if (b.means && __ballot_sync(SID_FULL, bad)) bad = sid_linear_means(g, b, decode.factor);
    if (bad) report->nonfinite = 1; /* every writer writes the same */
}

/* Bytes per float32 element: fp16 and bf16 6; 8 where a memory makes it look first. none 8. */
sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    const bool means = p->alone && c.count > 1 && !c.state; /* elsewhere bodies were divided before they were rounded */
    const bodies b = {c.payloads, c.stride, c.count, c.scale, p->sizes.body_dtype, means};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint64_t grid = sid_blocks(c.to, sid_chunks(p->n), DECODE_BLOCKS);
    sid_found_part *const found = sid_carve_covered(&c.work);
    const bool looks = c.state;
    sid_status s = looks ? sid_begin_decode(c, sizeof *c.scratch) : SID_OK;
    if (!s && looks) s = sid_launch(c.to, "look", sid_look_kernel, grid, SID_BLOCK, 0, c.scratch, b, p->n);
    if (!s) s = sid_linear_check(c, p->n, found, looks, linear_form_of(p).draws);
    if (s || c.part == SID_CHECK) return s;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    return s ? s
             : sid_launch(c.to, "decode", sid_decode_kernel, grid, SID_BLOCK, 0, c.group, c.scratch, b, vectors, memory,
                          c.state, c.report);
}

uint64_t work(const sid_plan *) { return sid_covered_work(); }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_none, sid_cuda_codec_fp16, sid_cuda_codec_bf16;
const sid_cuda_codec sid_cuda_codec_none = {work, encode, decode};
const sid_cuda_codec sid_cuda_codec_fp16 = {work, encode, decode};
const sid_cuda_codec sid_cuda_codec_bf16 = {work, encode, decode};
}
