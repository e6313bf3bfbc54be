/* none, fp16, bf16 (csrc/codec/linear.c is the law): the walk writes the body as it goes.
 * Bytes per float32 element: fp16 and bf16 with a residual 14 (12 of error feedback, 2 of body), without 6; none 8. */
#include "codec.cuh"

namespace {

struct linear {
    enum {
        REREADS = 0,
        RAW = 1
    };
    struct shared {};
    uint8_t *body;
    float scale;
    sid_dtype dtype; /* of the body */
    bool clamps;     /* a codec that rounds: what is finite stays so */

    __device__ float scaled(float x, float s) const {
        if (clamps && sid_key(x) < SID_KEY_INF) {
            const bool alone = s == 1.0f;
            const float max =
                dtype == SID_F16 ? (alone ? 65504.0f : 65376.0f) : sid_bits_f32(alone ? 0x7f7f0000u : 0x7f7c0000u);
            x = x > max ? max : x < -max ? -max : x;
        }
        return x * s;
    }

    __device__ void begin(shared &) const {}
    __device__ void end(shared &) const {}

    __device__ float keep(const sid_rule &rule, float acc, uint64_t) const {
        if (rule.scale == 0) return acc;
        float sent = scaled(acc, rule.scale);
        if (dtype != SID_F32) sent = sid_decode_half(sid_encode_half(sent, dtype), dtype);
        return acc - sent * rule.inverse;
    }

    __device__ void quad(shared &, float (&x)[SID_QUAD], uint64_t i, uint32_t count) const {
        for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = scaled(x[c], scale);
        sid_store4(body + i * sid_width(dtype), dtype, count, x);
    }
};

enum {
    SEAL_BLOCK = 64
};

/* Header, rule, statistics, and the bytes after the body. */
__global__ void __launch_bounds__(SEAL_BLOCK)
    seal_kernel(sid_scratch *scratch, sid_head head, float scale, float inverse, uint8_t *payload, uint64_t used,
                uint64_t bytes, sid_state *state, sid_stats *stats) {
    if (!scratch->ready) return;
    for (uint64_t i = used + threadIdx.x; i < bytes; i += SEAL_BLOCK) payload[i] = 0;
    if (threadIdx.x) return;
    const uint32_t flags = scratch->nonfinite ? (uint32_t)SID_FLAG_NONFINITE : 0u;
    sid_seal((sid_header *)payload, head, flags, head.n, scale, SID_HEADER_BYTES / 32, 0, 0);
    sid_rule rule = {};
    rule.scale = scale;
    rule.inverse = inverse;
    state->rule = rule;
    state->steps++;
    if (stats) *stats = {head.n, head.n, scratch->nonfinite, scale, 0, 1};
}

sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const float scale = 1.0f / (float)c.at.world;
    const bool lossless = p->codec->info.traits & SID_LOSSLESS;
    const linear codec = {c.payload + SID_HEADER_BYTES, scale, p->sizes.body_dtype,
                          p->sizes.body_dtype != SID_F32 && !lossless};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    sid_status s = sid_begin(c.to, c.group, c.scratch, sizeof *c.scratch, c.payload, SID_HEADER_BYTES);
    if (!s)
        s = sid_with_memory(p, c.to.err, [&](auto memory) {
            return sid_launch(c.to, "encode", sid_walk_kernel<decltype(memory), linear>,
                              sid_grid(c.to, sid_chunks(p->n), 8), SID_BLOCK, 0, c.group, c.scratch, c.state, vectors,
                              (float *)nullptr, codec);
        });
    if (!s)
        s = sid_launch(c.to, "seal", seal_kernel, 1, SEAL_BLOCK, 0, c.scratch, sid_head_of(p, c.at), scale,
                       (float)c.at.world, c.payload, SID_HEADER_BYTES + sid_width(codec.dtype) * p->n, p->sizes.payload,
                       c.state, c.stats);
    return s;
}

/* ---- decode ---------------------------------------------------------------------------------------------------- */

struct bodies {
    const uint8_t *payloads;
    uint64_t stride;
    uint32_t count;
    float scale;
    sid_dtype dtype;
};

__device__ inline float inverse_of(float scale) { return (float)floor(1.0 / (double)scale + 0.5); }

__device__ inline float factor_of(const bodies &b) {
    const float scale = ((const sid_header *)b.payloads)->scale;
    return b.scale == scale ? 1.0f : (float)((double)b.scale * (double)inverse_of(scale));
}

/* Elements i .. i + count of all bodies together. Payloads start at multiples of 8 bytes only. */
__device__ inline void sum4(const bodies &b, uint64_t i, uint32_t count, float (&x)[SID_QUAD]) {
    for (uint32_t r = 0; r < b.count; r++) {
        float y[SID_QUAD];
        sid_load4(b.payloads + r * b.stride + SID_HEADER_BYTES + i * sid_width(b.dtype), b.dtype, count, y);
        for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = r ? x[c] + y[c] : y[c]; /* 0 + x would lose the sign of -0 */
    }
}

__device__ inline bool nonfinite4(const float (&x)[SID_QUAD], uint32_t count) {
    bool bad = false;
    for (uint32_t c = 0; c < SID_QUAD; c++) bad |= c < count && sid_key(x[c]) >= SID_KEY_INF;
    return bad;
}

/* Looks for NaN and Inf before anything is written: only where a memory would have to be corrected. Reads the bodies. */
__global__ void __launch_bounds__(SID_BLOCK) look_kernel(sid_scratch *scratch, bodies b, uint64_t n) {
    bool bad = false;
    for (uint64_t i = SID_QUAD * ((uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x); i < n;
         i += (uint64_t)SID_QUAD * gridDim.x * SID_BLOCK) {
        const uint32_t count = n - i < SID_QUAD ? (uint32_t)(n - i) : (uint32_t)SID_QUAD;
        float x[SID_QUAD];
        sum4(b, i, count, x);
        bad |= nonfinite4(x, count);
    }
    if (bad) scratch->nonfinite = 1; /* every writer writes the same */
}

__global__ void __launch_bounds__(SID_BLOCK)
    check_kernel(sid_scratch *scratch, bodies b, sid_expect expect, sid_cuda_report *report, sid_state *state) {
    __shared__ uint32_t first, flagged;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < b.count; r += SID_BLOCK) {
        const sid_header h = *(const sid_header *)(b.payloads + r * b.stride);
        int32_t status = sid_check_header(h, expect, SID_HEADER_BYTES / 32, 0, 0);
        if (status == SID_OK && (h.count != expect.head.n || (h.flags & ~(uint32_t)SID_FLAG_NONFINITE) ||
                                 !(h.scale > 0 && h.scale <= 1) || 1.0f / inverse_of(h.scale) != h.scale))
            status = SID_E_CORRUPT;
        if (status == SID_OK && h.scale != ((const sid_header *)b.payloads)->scale) /* of another world size */
            status = SID_E_MISMATCH;
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    }
    __syncthreads();
    if (threadIdx.x) return;
    /* The flag counts where a memory is corrected; else the outputs tell, while they are written. */
    sid_verdict_of(report, scratch, first, state && (flagged || scratch->nonfinite));
    if (scratch->go && scratch->nonfinite) state->rule = sid_rule();
}

template <class Memory>
__global__ void __launch_bounds__(SID_BLOCK)
    decode_kernel(sid_group g, const sid_scratch *scratch, bodies b, sid_vectors vectors, sid_cuda_report *report) {
    if (!scratch->go) return;
    const float factor = factor_of(b);
    const bool undo = Memory::VECTORS && scratch->nonfinite;
    const uint64_t tiles = sid_tiles(g.n);
    bool bad = false;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < tiles;
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
            const uint32_t count = sid_count4(s.len, i);
            float x[SID_QUAD];
            sum4(b, s.at + i, count, x);
            bad |= nonfinite4(x, count);
            for (uint32_t c = 0; c < SID_QUAD; c++) x[c] *= factor;
            if (undo) sid_undo4<Memory>(g, s, vectors, i, count);
            sid_put4(g, s, i, count, x);
        }
    }
    if (bad) report->nonfinite = 1; /* every writer writes the same */
}

/* Bytes per float32 element: fp16 and bf16 6; 8 where a memory makes it look first. none 8. */
sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    const bodies b = {c.payloads, c.stride, c.count, c.scale, p->sizes.body_dtype};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint64_t grid = sid_grid(c.to, sid_chunks(p->n), 8);
    sid_status s = sid_begin(c.to, c.group, c.scratch, sizeof *c.scratch, nullptr, 0);
    if (!s && c.state) s = sid_launch(c.to, "look", look_kernel, grid, SID_BLOCK, 0, c.scratch, b, p->n);
    if (!s)
        s = sid_launch(c.to, "check", check_kernel, 1, SID_BLOCK, 0, c.scratch, b, sid_expect_of(c), c.report, c.state);
    if (s) return s;
    const auto run = [&](auto memory) {
        return sid_launch(c.to, "decode", decode_kernel<decltype(memory)>, grid, SID_BLOCK, 0, c.group, c.scratch, b,
                          vectors, c.report);
    };
    return c.state ? sid_with_memory(p, c.to.err, run) : run(sid_cuda_memory_none());
}

uint64_t work(const sid_plan *) { return 0; }

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_none, sid_cuda_codec_fp16, sid_cuda_codec_bf16;
const sid_cuda_codec sid_cuda_codec_none = {work, encode, decode};
const sid_cuda_codec sid_cuda_codec_fp16 = {work, encode, decode};
const sid_cuda_codec sid_cuda_codec_bf16 = {work, encode, decode};
}
