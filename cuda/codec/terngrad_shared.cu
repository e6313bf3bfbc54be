/* terngrad-shared (csrc/codec/terngrad_shared.c defines the result). All ranks
 * use the largest of their scalers, so an encode has two parts, with an all-reduce after each: the first finds the scaler, the
 * second draws the codes -1, 0 and 1, a byte each. Bytes per float32 element:
 *     slice 0    13 with a residual (12 of error feedback, and zeros in place of the codes), 5 without a memory
 *     slice 1    5: reads acc as the memory has stored it, or the gradient, and writes the codes
 *     decode     5 per sum; 1 more if a memory is to be corrected and there are several
 * The limit is memory bandwidth. */
#include "codec/terngrad_shared.h"
#include "dense.cuh"
#include "linear.cuh"

namespace {

/* In scratch.codec; scratch.key is the rank's own scaler. */
enum {
    LARGEST, /* key */
    SHARED   /* scaler; a NaN where a rank has none */
};

__device__ inline float no_number() { return sid_bits_f32(0x7fc00000u); }

/* -1, 0 or 1, and random bits to choose by. inverse: of the ranks' scaler; a grid that ends above `own` begins there. */
__device__ inline int32_t code_of(float x, float own, float shared, float inverse, uint32_t draw) {
    if (own < shared) x = x > own ? own : x < -own ? -own : x;
    const float l = x * inverse;
    const uint32_t k = sid_key(l), one = sid_f32_bits(1.0f);
    const int32_t i = sid_dither16(sid_bits_f32(k < one ? k : one), draw);
    return k == sid_f32_bits(l) ? i : -i;
}
__device__ inline float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

/* ---- encode ------------------------------------------------------------------------------------------------------ */

struct coder {
    enum {
        LATE = 1,
        SEVERAL = 0
    };
    struct shared {};
    struct own {
        uint32_t largest;
        float clip, scale;
    };
    sid_draw draw;
    uint8_t *codes;
    double *sums; /* of the tiles: squares, and `stride` further the elements */
    uint64_t stride;

    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &d, sid_quads &x, uint64_t offset,
                         uint32_t) const {
        if (rule.scale == 0) return;
        const float inverse = inverse_of(rule.scale);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            uint32_t u[SID_QUAD];
            sid_draws16(d, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                x[r][c] -= rule.scale * (float)code_of(x[r][c], rule.inverse, rule.scale, inverse, u[c]);
        }
    }

    __device__ void begin(shared &, own &o, const sid_scratch &scratch) const {
        o.clip = sid_bits_f32(scratch.key);
        o.scale = sid_bits_f32(scratch.codec[SHARED]);
    }
    __device__ void end(shared &, own &, sid_scratch &) const {}
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        const float inverse = inverse_of(o.scale);
        const bool none = o.scale != o.scale;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const uint32_t count = sid_count4(len, sid_place(r));
            uint8_t *const to = codes + offset + sid_place(r);
            uint32_t u[SID_QUAD], w = 0;
            sid_draws16(draw, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                w |= ((uint32_t)code_of(x[r][c], o.clip, o.scale, inverse, u[c]) & 0xffu) << (8 * c);
            if (none) w = SID_FULL;
            if (count == SID_QUAD)
                *(uint32_t *)(void *)to = w;
            else
                for (uint32_t c = 0; c < count; c++) to[c] = (uint8_t)(w >> (8 * c)); /* not the byte behind them */
        }
    }
};

/* Round 0. */
struct measure : coder {
    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        if (!len) return;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                o.largest = sid_key(x[r][c]) > o.largest ? sid_key(x[r][c]) : o.largest;
            if (sid_place(r) < len) *(uint32_t *)(void *)(codes + offset + sid_place(r)) = 0;
        }
        const double squares = sid_tile_squares(x), plain = sid_tile_sum<double>(x, [](float v) { return v; });
        if (sid_lane()) return;
        sums[offset / SID_TILE] = squares;
        sums[offset / SID_TILE + stride] = plain;
    }
    __device__ void end(shared &, own &o, sid_scratch &scratch) const {
        const uint32_t largest = sid_warp_max(o.largest);
        if (sid_lane() == 0 && largest) atomicMax(&scratch.codec[LARGEST], largest);
    }
};

/* The end of reduction 0: scaler, slots, header. */
__global__ void __launch_bounds__(SID_SUMS)
    sid_ternary_seal_kernel(sid_ending e, const double *sums, double clip, float scale, uint32_t passes) {
    sid_follow();
    __shared__ double part[SID_SUMS];
    if (!e.scratch->ready) return;
    const uint64_t n = e.head.n;
    uint32_t *const slots = (uint32_t *)(void *)(e.payload + SID_HEADER_BYTES);
    for (uint32_t i = threadIdx.x; i < TERN_SLOTS; i += SID_SUMS)
        if (i != e.head.rank) slots[i] = 0;
    for (uint64_t i = TERN_CODES_AT + n + threadIdx.x; i < e.bytes; i += SID_SUMS) e.payload[i] = 0;
    const double squares = sid_total(sums, sid_tiles(n), part);
    __syncthreads();
    const double sum = sid_total(sums + sid_tiles(n), sid_tiles(n), part);
    if (threadIdx.x) return;
    const quant_form form = ternary_form();
    const uint32_t bad = e.scratch->nonfinite;
    const float own = bad ? 0.0f : quant_group_scale(&form, e.scratch->codec[LARGEST], sum, squares, n, clip);
    slots[e.head.rank] = sid_f32_bits(bad ? no_number() : own);
    e.scratch->key = sid_f32_bits(own);
    sid_seal((sid_header *)e.payload, e.head, bad ? (uint32_t)SID_FLAG_NONFINITE : 0u, n, scale, 0);
    e.state->rule = sid_rule(); /* until the last reduction it may still be that nothing is sent */
    e.state->draw = e.draw;
    e.state->steps++;
    if (e.stats) *e.stats = {n, n, bad, own, 0, passes};
}

/* The largest scaler of a summed slice, or a NaN where one is none; by a warp, in every thread. */
__device__ inline float shared_of(const uint8_t *payload) {
    const quant_form form = ternary_form();
    const uint32_t *const slots = (const uint32_t *)(const void *)(payload + SID_HEADER_BYTES);
    const uint32_t most = sid_f32_bits(quant_scale_max(&form));
    uint32_t largest = 0, bad = 0;
    for (uint32_t i = sid_lane(); i < TERN_SLOTS; i += SID_LANES) {
        const uint32_t s = slots[i];
        largest = s > largest ? s : largest;
        bad |= (uint32_t)!quant_sound(s, most);
    }
    largest = sid_warp_max(largest);
    return sid_warp_max(bad) ? no_number() : sid_bits_f32(largest);
}

/* The start of reduction 1: what the ranks' scalers come to. */
__global__ void __launch_bounds__(SID_LANES)
    sid_ternary_shared_kernel(sid_scratch *scratch, uint8_t *payload, uint64_t n, sid_state *state) {
    sid_follow();
    if (!scratch->ready) return;
    const float shared = shared_of(payload);
    const bool sound = shared == shared;
    if (threadIdx.x) return;
    scratch->codec[SHARED] = sid_f32_bits(shared);
    payload[TERN_CODES_AT + n] = sound ? 1 : 0xff;
    if (!sound) return;
    sid_rule rule = {};
    rule.scale = shared;
    rule.inverse = sid_bits_f32(scratch->key);
    state->rule = rule;
}

coder coder_of(sid_cuda_encoding &c) {
    const uint64_t tiles = sid_tiles(c.plan->n);
    return {sid_draw_of(c.plan, c.step), c.payload + TERN_CODES_AT, c.work.take<double>(2 * tiles), tiles};
}

sid_status second(const sid_cuda_encoding &c, const coder &k) {
    const sid_status s = sid_launch(c.to, "shared", sid_ternary_shared_kernel, 1, SID_LANES, 0, c.scratch, c.payload,
                                    c.plan->n, c.state);
    return s ? s : sid_pass_again(c, k);
}

sid_status encode(sid_cuda_encoding &c) {
    const bool one_rank = c.step.world == 1;
    const coder k = coder_of(c);
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s) s = sid_pass_tiles(c, measure{k});
    if (s || c.settles) return s;
    s = sid_launch(c.to, "seal", sid_ternary_seal_kernel, 1, SID_SUMS, 0, sid_ending_of(c), (const double *)k.sums,
                   c.plan->codec_param[TERN_CLIP], 1.0f / (float)c.step.world, one_rank ? 2u : 1u);
    if (!s && one_rank) s = second(c, k);
    return s ? s : sid_linear_cover(c);
}

sid_status next(sid_cuda_encoding &c) { return second(c, coder_of(c)); }

/* ---- decode ------------------------------------------------------------------------------------------------------ */

/* Computes the value of a code of each payload in the mean. It is NaN, and so is the whole mean, if a rank had no scaler. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_ternary_units_kernel(sid_scratch *scratch, sid_payloads p, float *units) {
    sid_follow();
    if (!scratch->ready) return;
    for (uint32_t r = sid_warp(); r < p.count; r += SID_WARPS) {
        const float shared = shared_of(p[r]), world = sid_linear_inverse(p.head(r).scale);
        if (sid_lane()) continue;
        const bool whole = (float)(int8_t)p[r][TERN_CODES_AT + p.n] == world;
        const float unit = whole ? (float)((double)shared / (double)world) : no_number();
        units[r] = unit;
        if (unit != unit && p.n) scratch->nonfinite = 1; /* every writer writes the same */
    }
}

/* The payloads together over a tile, not scaled; whether all of it is finite. */
__device__ inline bool sum(const sid_payloads &p, const float *units, sid_quads &x, uint64_t offset, uint32_t len) {
#pragma unroll 1
    for (uint32_t r = 0; r < p.count; r++) {
        const uint32_t *const codes = (const uint32_t *)(const void *)(p[r] + TERN_CODES_AT + offset + sid_place(0));
        const float unit = units[r];
        sid_fetch_next(p, r, TERN_CODES_AT + offset, len);
        uint32_t w[SID_ROWS];
#pragma unroll
        for (uint32_t d = 0; d < SID_ROWS; d++) w[d] = sid_place(d) < len ? __ldcs(codes + SID_LANES * d) : 0u;
#pragma unroll
        for (uint32_t d = 0; d < SID_ROWS; d++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] += unit * (float)(int8_t)(w[d] >> (8 * c));
    }
    bool finite = true;
#pragma unroll
    for (uint32_t d = 0; d < SID_ROWS; d++)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++)
            finite &= c >= sid_count4(len, sid_place(d)) || sid_key(x[d][c]) < SID_KEY_INF;
    return finite;
}

/* Finds the largest sums of several payloads. It runs before the check, so that it need not wait for the result. */
__global__ void __launch_bounds__(SID_BLOCK, SID_DENSE_BLOCKS)
    sid_ternary_look_kernel(sid_scratch *scratch, sid_payloads p, const float *units) {
    sid_follow();
    if (!scratch->ready) return;
    bool finite = true;
#pragma unroll 1
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(p.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const uint64_t offset = tile * SID_TILE;
        sid_quads x = {};
        finite &= sum(p, units, x, offset, sid_tile_len(p.n, offset));
    }
    if (!finite) scratch->nonfinite = 1; /* every writer writes the same */
}

__global__ void __launch_bounds__(SID_BLOCK, SID_DENSE_BLOCKS)
    sid_ternary_decode_kernel(sid_group g, const sid_scratch *scratch, const sid_state *state, sid_vectors vectors,
                              sid_payloads p, const float *units, sid_kept memory, sid_cuda_report *report) {
    sid_follow();
    if (!scratch->go) return;
    memory.begin(state);
    const float factor = sid_linear_factor(p.head(0), p.scale);
    const bool undo = memory.vectors && scratch->nonfinite;
    bool finite = true;
#pragma unroll 1
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        if (undo)
#pragma unroll 1
            for (uint32_t i = sid_place(0); i < s.len; i += SID_ROW)
                sid_undo(memory, g, s, vectors, i, sid_count4(s.len, i));
        sid_quads x = {};
        finite &= sum(p, units, x, s.at, s.len);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] *= factor;
        if (memory.receives && !undo)
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
                sid_receive(memory, vectors, s.at + sid_place(r), sid_count4(s.len, sid_place(r)), x[r]);
        sid_put_tile(g, s, x);
    }
    if (!finite && !memory.vectors) report->nonfinite = 1; /* every writer writes the same */
}

sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    const sid_payloads from = sid_payloads_of(c);
    sid_found_part *const found = sid_carve_covered(&c.work);
    float *const units = c.work.take<float>(SID_MAX_COUNT);
    const uint64_t grid = sid_blocks(c.to, sid_chunks(p->n), SID_DENSE_BLOCKS);
    sid_status s = sid_begin_decode(c, sizeof *c.scratch);
    if (!s) s = sid_launch(c.to, "units", sid_ternary_units_kernel, 1, SID_BLOCK, 0, c.scratch, from, units);
    if (!s && c.state && c.count > 1)
        s = sid_launch(c.to, "look", sid_ternary_look_kernel, grid, SID_BLOCK, 0, c.scratch, from,
                       (const float *)units);
    if (!s) s = sid_linear_check(c, p->n, found, true);
    if (s || c.part == SID_CHECK) return s;
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    return s ? s
             : sid_launch(c.to, "decode", sid_ternary_decode_kernel, grid, SID_BLOCK, 0, c.group, c.scratch, c.state,
                          sid_vectors_of(p, c.state), from, (const float *)units, memory, c.report);
}

uint64_t work(const sid_plan *p) {
    sid_carver encodes = {nullptr, 0}, decodes = {nullptr, 0};
    encodes.take<double>(2 * sid_tiles(p->n));
    decodes.at += sid_covered_work();
    decodes.take<float>(SID_MAX_COUNT);
    return encodes.at > decodes.at ? encodes.at : decodes.at;
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_terngrad_shared;
const sid_cuda_codec sid_cuda_codec_terngrad_shared = {work, encode, decode, next};
}
