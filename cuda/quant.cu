/* int8, int4, fp8, qsgd, terngrad (csrc/codec/quant.c is the law). Bytes per float32 element with a residual, b bits:
 *     a scale a block    12 + b / 8 + 4 / block   one reading: a block's norm is known while its tile is in registers
 *     one for the group  16 + b / 8               the norm first; without a memory 8 + b / 8
 * What was sent last is found again from acc, by the same norm and the same random bits. Of W payloads W b / 8 to check
 * them, W b / 8 + 4 to decode. */
#include "codec/quant.h"
#include "dense.cuh"

namespace {

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* The codes of l = x * inverse, and what they stand for. */
template <bool FLOATS, sid_rounding ROUNDING> struct grid {
    uint32_t bits, mantissa;
    float top;

    __device__ uint32_t code(float l, uint32_t draw) const {
        const uint32_t k = sid_key(l), most = sid_f32_bits(top);
        const float a = sid_bits_f32(k < most ? k : most);
        if (FLOATS) {
            const float y = sid_bits_f32(sid_f32_bits(a) | (sid_f32_bits(l) & 0x80000000u));
            return ROUNDING == SID_ROUND_NEAREST ? sid_f32_to_f8_nearest(y, mantissa)
                                                 : sid_f32_to_f8_dithered(y, mantissa, draw);
        }
        if (ROUNDING == SID_ROUND_NEAREST) return (uint32_t)sid_nearest(l);
        const int32_t i = ROUNDING == SID_ROUND_DRAW16 ? sid_dither16(a, draw) : sid_dither32(a, draw);
        return (uint32_t)(k == sid_f32_bits(l) ? i : -i);
    }
    __device__ float number(uint32_t code) const {
        if (!FLOATS) return (float)(int32_t)code;
        /* sid_f8_to_f32, by a product that is exact, denormals and all: nothing is flushed to zero here */
        const uint32_t k = code & 0x7fu, sign = (code & 0x80u) << 24;
        const float y = sid_bits_f32(k << (23 - mantissa)) * (mantissa == 3 ? 0x1p120f : 0x1p112f);
        const bool none = mantissa == 3 ? k == 0x7fu : k >= 0x7cu;
        const uint32_t what = mantissa == 3 ? 0x7fc00000u : 0x7f800000u | (k & 3u) << 21;
        return sid_bits_f32((none ? what : sid_f32_bits(y)) | sign);
    }
    __device__ uint32_t field(uint32_t code) const { return code & ((1u << bits) - 1u); }
    __device__ uint32_t signed_field(uint32_t word) const { /* its lowest bits, as code() gives them */
        return FLOATS ? word & 0xffu : (uint32_t)((int32_t)(word << (32 - bits)) >> (32 - bits));
    }
    /* Random bits of the quad at i. */
    __device__ void draws(const sid_draw &d, uint64_t i, uint32_t (&u)[SID_QUAD]) const {
        if (ROUNDING == SID_ROUND_DRAW16) sid_draws16(d, i, u);
        if (ROUNDING == SID_ROUND_DRAW32) sid_draws32(d, i, u);
    }
};

template <class Grid> Grid grid_of(const quant_form &f) { return {f.bits, f.kind == SID_GRID_E4M3 ? 3u : 2u, f.top}; }

__device__ inline float inverse_of(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

/* ---- encode ------------------------------------------------------------------------------------------------------ */

enum {
    LARGEST /* scratch.codec: key, or scale of a block */
};

/* A kernel for each kind and rounding: what is not of its own kind would only be in the way of instructions. */
template <bool FLOATS, sid_rounding ROUNDING> struct coder {
    quant_form f;
    grid<FLOATS, ROUNDING> g;
    sid_draw draw;
    uint8_t *payload;
    uint64_t rows, codes_at;
    uint32_t shift; /* of a block's length */
    double *sums;   /* of the tiles, where the scale is the group's: squares, and `stride` further the elements */
    uint64_t stride;

    enum {
        LATE = 1,
        MOST_BITS = 8
    };
    struct shared {
        sid_part_sum part[SID_WARPS];
        double squares[SID_WARPS];
        uint32_t key[SID_WARPS];
        uint32_t staged[SID_WARPS][SID_LANES * MOST_BITS]; /* a tile's codes */
    };
    struct own {
        sid_part_sum words;
        uint32_t largest;
        float scale;
    };

    __device__ void begin(shared &, own &o, const sid_scratch &scratch) const { o.scale = sid_bits_f32(scratch.key); }
    __device__ void end(shared &s, own &o, sid_scratch &scratch) const {
        sid_add_words(scratch, o.words, s.part);
        keep_largest(o, scratch);
    }
    __device__ void keep_largest(const own &o, sid_scratch &scratch) const {
        const uint32_t largest = sid_warp_max(o.largest);
        if (sid_lane() == 0 && largest) atomicMax(&scratch.codec[LARGEST], largest);
    }

    /* Each row's scale: that of this thread's block. By the whole CUDA block, as blocks may be as long as four tiles. */
    __device__ void scales(shared &s, const sid_quads &x, float (&scale)[SID_ROWS]) const {
        const uint32_t each = f.block / SID_ROW; /* rows; 0: half a row */
        if (f.norm == NORM_L2) {
            double sum[SID_ROWS], lane[SID_QUAD];
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    if (!(r & (each - 1))) lane[c] = 0;
                    lane[c] += (double)x[r][c] * (double)x[r][c];
                }
                sum[r] = 0;
                if (!((r + 1) & (each - 1)) || r + 1 == SID_ROWS) sum[r] = sid_join_lanes(lane);
            }
#pragma unroll
            for (uint32_t r = SID_ROWS - 1; r; r--) /* what is no block's last row */
                if (r & (each - 1)) sum[r - 1] = sum[r];
            if (each > SID_ROWS) { /* two tiles, or four: their sums in halves */
                const uint32_t tiles = each / SID_ROWS, first = sid_warp() / tiles * tiles;
                if (sid_lane() == 0) s.squares[sid_warp()] = sum[0];
                __syncthreads();
                double all = s.squares[first] + s.squares[first + tiles / 2];
                if (tiles == 4) all += s.squares[first + 1] + s.squares[first + 3];
                __syncthreads();
#pragma unroll
                for (uint32_t r = 0; r < SID_ROWS; r++) sum[r] = all;
            }
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) scale[r] = quant_scale(sqrt(sum[r]), f.top);
            return;
        }
        uint32_t key[SID_ROWS];
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            key[r] = 0;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) key[r] = sid_key(x[r][c]) > key[r] ? sid_key(x[r][c]) : key[r];
        }
#pragma unroll
        for (uint32_t k = 1; k < SID_ROWS; k *= 2)
            if (each > k)
#pragma unroll
                for (uint32_t r = 0; r < SID_ROWS; r++)
                    if (!(r & k)) key[r] = key[r + k] = key[r] > key[r + k] ? key[r] : key[r + k];
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            if (each && r & (each - 1))
                key[r] = key[r ? r - 1 : 0];
            else if (each)
                key[r] = sid_warp_max(key[r]);
            else
                for (uint32_t d = SID_LANES / 4; d; d /= 2) {
                    const uint32_t other = __shfl_xor_sync(SID_FULL, key[r], d);
                    key[r] = other > key[r] ? other : key[r];
                }
        }
        if (each > SID_ROWS) {
            const uint32_t tiles = each / SID_ROWS, first = sid_warp() / tiles * tiles;
            if (sid_lane() == 0) s.key[sid_warp()] = key[0];
            __syncthreads();
            uint32_t all = 0;
            for (uint32_t w = first; w < first + tiles; w++) all = s.key[w] > all ? s.key[w] : all;
            __syncthreads();
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) key[r] = all;
        }
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) scale[r] = quant_scale_of(sid_bits_f32(key[r]), f.top);
    }

    __device__ void keep(shared &s, const sid_rule &rule, const sid_draw &d, sid_quads &x, uint64_t at,
                         uint32_t) const {
        float scale[SID_ROWS];
        if (rule.scale == 0) return;
        if (f.block)
            scales(s, x, scale);
        else
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) scale[r] = rule.scale;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const float inverse = inverse_of(scale[r]);
            uint32_t u[SID_QUAD] = {};
            g.draws(d, at + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] -= scale[r] * g.number(g.code(x[r][c] * inverse, u[c]));
        }
    }

    __device__ void put(own &o, uint64_t at, uint32_t word) const {
        *(uint32_t *)(void *)(payload + at) = word;
        o.words.add(at, word, rows);
    }
    __device__ void tile(shared &s, own &o, const sid_quads &x, uint64_t at, uint32_t len) const {
        float scale[SID_ROWS];
        if (f.block)
            scales(s, x, scale);
        else
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) scale[r] = o.scale;
        if (!len) return;
        uint8_t *const staged = (uint8_t *)s.staged[sid_warp()];
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const float inverse = inverse_of(scale[r]);
            const uint64_t i = at + sid_place(r);
            uint32_t u[SID_QUAD] = {}, w = 0;
            g.draws(draw, i, u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) w |= g.field(g.code(x[r][c] * inverse, u[c])) << (f.bits * c);
            if (f.block && !(i & (f.block - 1)) && sid_place(r) < len) {
                const uint32_t b = sid_f32_bits(scale[r]);
                put(o, SID_HEADER_BYTES + 4 * (i >> shift), b);
                o.largest = b > o.largest ? b : o.largest;
            }
            if (f.bits == 8) {
                if (sid_place(r) < len) put(o, codes_at + i, w);
                continue;
            }
            /* two threads' codes are a whole number of bytes */
            const uint32_t other = __shfl_xor_sync(SID_FULL, w, 1);
            const uint64_t eight = w | (uint64_t)other << (SID_QUAD * f.bits);
            uint8_t *const p = staged + sid_place(r) / 8 * f.bits;
            if (sid_lane() & 1) continue;
            if (f.bits == 4)
                *(uint32_t *)(void *)p = (uint32_t)eight;
            else if (f.bits == 2)
                *(uint16_t *)(void *)p = (uint16_t)eight;
            else
                for (uint32_t b = 0; b < f.bits; b++) p[b] = (uint8_t)(eight >> (8 * b));
        }
        if (f.bits == 8) return;
        __syncwarp();
        for (uint32_t j = sid_lane(); j < SID_LANES * f.bits && 32 * j < len * f.bits; j += SID_LANES)
            put(o, codes_at + at / 8 * f.bits + 4 * j, s.staged[sid_warp()][j]);
        __syncwarp(); /* before the next tile's codes */
    }
};

/* The first reading where the scale is the group's. */
template <sid_rounding ROUNDING> struct measure : coder<false, ROUNDING> {
    using base = coder<false, ROUNDING>;
    using typename base::own;
    using typename base::shared;
    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t at, uint32_t len) const {
        if (!len) return;
        if (this->f.norm != NORM_L2)
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    o.largest = sid_key(x[r][c]) > o.largest ? sid_key(x[r][c]) : o.largest;
        const double squares = this->f.norm == NORM_MAX ? 0 : sid_tile_squares(x);
        const double plain = this->f.norm == NORM_CLIPPED ? sid_tile_sum<double>(x, [](float v) { return v; }) : 0;
        if (sid_lane()) return;
        this->sums[at / SID_TILE] = squares;
        this->sums[at / SID_TILE + this->stride] = plain;
    }
    __device__ void end(shared &, own &o, sid_scratch &scratch) const { this->keep_largest(o, scratch); }
};

/* Between the readings: the scale. */
__global__ void __launch_bounds__(SID_SUMS)
    sid_quant_scale_kernel(sid_scratch *scratch, quant_form f, const double *sums, uint64_t n, double clip) {
    __shared__ double part[SID_SUMS];
    if (!scratch->ready) return;
    const double squares = sid_total(sums, sid_tiles(n), part);
    __syncthreads();
    const double sum = sid_total(sums + sid_tiles(n), sid_tiles(n), part);
    if (threadIdx.x) return;
    scratch->key = sid_f32_bits(quant_group_scale(&f, scratch->codec[LARGEST], sum, squares, n, clip));
}

enum {
    SEAL_BLOCK = 64
};
__global__ void __launch_bounds__(SEAL_BLOCK) sid_quant_seal_kernel(sid_ending e, quant_form f) {
    if (!e.scratch->ready) return;
    const uint64_t n = e.head.n, codes = quant_codes_at(n, f.block);
    const uint64_t scales = SID_HEADER_BYTES + 4 * quant_blocks(n, f.block);
    const uint64_t used = codes + sid_round_up(quant_code_bytes(n, f.bits), 4);
    for (uint64_t i = scales + 4 * threadIdx.x; i < codes; i += 4 * SEAL_BLOCK)
        *(uint32_t *)(void *)(e.payload + i) = 0;
    for (uint64_t i = used + 4 * threadIdx.x; i < e.bytes; i += 4 * SEAL_BLOCK)
        *(uint32_t *)(void *)(e.payload + i) = 0;
    if (threadIdx.x) return;
    const float scale = sid_bits_f32(f.block ? e.scratch->codec[LARGEST] : e.scratch->key);
    sid_rule rule = {};
    rule.scale = f.block ? 1.0f : scale;
    sid_end(e, scale, rule, f.block ? 1 : 2, {0, 0});
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

template <bool FLOATS> struct body {
    quant_form f;
    grid<FLOATS, SID_ROUND_NEAREST> g; /* decoding rounds nothing */
    uint64_t n, codes_at, blocks;
    uint32_t shift, most_scale;

    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &most) const {
        const uint64_t scale = i - SID_HEADER_BYTES / 4, end = n * f.bits;
        if (scale < blocks) {
            most = w > most ? w : most;
            return !quant_sound(w, most_scale);
        }
        if (4 * i < codes_at) return w != 0;
        const uint64_t bit = 8 * (4 * i - codes_at);
        return bit + 32 <= end ? 0 : bit >= end ? w != 0 : w >> (end - bit) != 0;
    }
    __device__ uint64_t count() const { return n; }
    __device__ uint32_t form() const { return 0; }
    __device__ bool gathered() const { return true; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &, uint32_t, uint32_t most) const {
        const uint32_t scale = sid_f32_bits(h.scale);
        if (h.salt && f.rounding == SID_ROUND_NEAREST) return SID_E_CORRUPT;
        return quant_sound(scale, most_scale) && ((n && !f.block) || scale == most) ? SID_OK : SID_E_CORRUPT;
    }
    __device__ void sum(const sid_payloads &p, sid_quads &x, uint64_t at, uint32_t len) const {
        const uint64_t from = codes_at + at / 8 * f.bits; /* a multiple of 8 */
#pragma unroll 1
        for (uint32_t r = 0; r < p.count; r++) {
            const uint32_t *const codes = (const uint32_t *)(const void *)(p[r] + from);
            const float *const scales = (const float *)(const void *)(p[r] + SID_HEADER_BYTES);
            uint32_t w[SID_ROWS];
            float scale[SID_ROWS];
#pragma unroll
            for (uint32_t d = 0; d < SID_ROWS; d++) {
                const uint32_t bit = sid_place(d) * f.bits, off = bit % 32, count = sid_count4(len, sid_place(d));
                w[d] = 0;
                scale[d] = 0;
                if (!count) continue;
                w[d] = __ldcs(codes + bit / 32) >> off;
                if (off + count * f.bits > 32) w[d] |= __ldcs(codes + bit / 32 + 1) << (32 - off);
                scale[d] = f.block ? scales[(at + sid_place(d)) >> shift] : p.head(r).scale;
            }
#pragma unroll
            for (uint32_t d = 0; d < SID_ROWS; d++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    x[d][c] += scale[d] * g.number(g.signed_field(w[d] >> (f.bits * c)));
        }
#pragma unroll
        for (uint32_t d = 0; d < SID_ROWS; d++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] *= p.scale;
    }
};

/* ---- calls ------------------------------------------------------------------------------------------------------- */

double *carve(const sid_plan *p, sid_carver *c, const quant_form &f) {
    return c->take<double>(f.block ? 0 : 2 * sid_tiles(p->n));
}

uint64_t work(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c, quant_form_of(p));
    return c.at > sid_findings_work() ? c.at : sid_findings_work();
}

uint32_t shift_of(uint32_t block) {
    uint32_t shift = 0;
    while (block >> shift > 1) shift++;
    return shift;
}

template <bool FLOATS, sid_rounding ROUNDING>
sid_status walk(const sid_cuda_encoding &c, const quant_form &f, const sid_ending &e, double *sums) {
    using own = coder<FLOATS, ROUNDING>;
    const uint64_t n = c.plan->n, tiles = sid_tiles(n);
    const own k = {f,
                   grid_of<grid<FLOATS, ROUNDING>>(f),
                   e.draw,
                   c.payload,
                   e.bytes / 32,
                   quant_codes_at(n, f.block),
                   shift_of(f.block),
                   sums,
                   tiles};
    if constexpr (ROUNDING != SID_ROUND_DRAW32)
        if (f.block) return sid_walk_tiles(c, k);
    if constexpr (!FLOATS && ROUNDING != SID_ROUND_NEAREST) {
        sid_status s = sid_walk_tiles(c, measure<ROUNDING>{k});
        if (!s)
            s = sid_launch(c.to, "scale", sid_quant_scale_kernel, 1, SID_SUMS, 0, c.scratch, f, (const double *)sums, n,
                           c.plan->codec_param[CLIP]);
        return s ? s : sid_walk_again(c, k);
    }
    return SID_E_UNSUPPORTED; /* no plan has it */
}

template <bool FLOATS> sid_status encode(sid_cuda_encoding &c) {
    const quant_form f = quant_form_of(c.plan);
    sid_ending e = sid_ending_of(c);
    if (f.rounding == SID_ROUND_NEAREST) {
        e.draw = sid_draw();
        e.head.salt = 0;
    }
    double *sums = carve(c.plan, &c.work, f);
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s && f.rounding == SID_ROUND_NEAREST) s = walk<FLOATS, SID_ROUND_NEAREST>(c, f, e, sums);
    if (!s && f.rounding == SID_ROUND_DRAW16) s = walk<FLOATS, SID_ROUND_DRAW16>(c, f, e, sums);
    if constexpr (!FLOATS)
        if (!s && f.rounding == SID_ROUND_DRAW32) s = walk<false, SID_ROUND_DRAW32>(c, f, e, sums);
    if (!s) s = sid_launch(c.to, "seal", sid_quant_seal_kernel, 1, SEAL_BLOCK, 0, e, f);
    return s;
}

template <bool FLOATS> sid_status decode(sid_cuda_decoding &c) {
    const quant_form f = quant_form_of(c.plan);
    const uint64_t n = c.plan->n;
    return sid_dense_decode(c, body<FLOATS>{f, grid_of<grid<FLOATS, SID_ROUND_NEAREST>>(f), n,
                                            quant_codes_at(n, f.block), quant_blocks(n, f.block), shift_of(f.block),
                                            sid_f32_bits(quant_scale_max(&f))});
}

} // namespace

extern "C" {
#define QUANT(symbol, floats)                                                                                          \
    extern const sid_cuda_codec sid_cuda_codec_##symbol;                                                               \
    const sid_cuda_codec sid_cuda_codec_##symbol = {work, encode<floats>, decode<floats>};
QUANT(int8, false)
QUANT(int4, false)
QUANT(fp8, true)
QUANT(qsgd, false)
QUANT(terngrad, false)
}
