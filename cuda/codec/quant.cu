/* int8, int4, int2, ternary, fp8, qsgd, terngrad (csrc/codec/quant.c defines the result). Every element
 * becomes a number of b bits, times the scale of its block or of the group. Bytes per float32 element with a residual:
 *     a scale per block  12 + b / 8 + 4 / block   one pass, because a block's norm is known while its tile is in registers
 *     one for the group  16 + b / 8               a first pass for the norm; without a memory 8 + b / 8
 *     decode             W b / 8                  to check W payloads, then W b / 8 + 4 to add them up
 * The values that the last step sent are computed again from acc, with the same norm and the same random bits. The limit is
 * memory bandwidth. */
#include "codec/quant.h"
#include "dense.cuh"

namespace {

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

/* The kinds of codes: integers, 8-bit floats, a sign and one of two magnitudes, or trits. */
enum content {
    INTEGERS,
    FLOATS,
    FOUR,
    THREE
};
/* Whether they are of two magnitudes. */
template <content CODES> constexpr bool has_edge = CODES == FOUR || CODES == THREE;

/* The codes of l = x * inverse, and what they stand for. */
template <content CODES, sid_rounding ROUNDING> struct grid {
    uint32_t bits, mantissa;
    float top;

    __device__ uint32_t code(float l, uint32_t draw) const {
        const uint32_t k = sid_key(l), most = sid_f32_bits(top);
        const float a = sid_bits_f32(k < most ? k : most);
        if (CODES == FLOATS) {
            const float y = sid_bits_f32(sid_f32_bits(a) | (sid_f32_bits(l) & 0x80000000u));
            return ROUNDING == SID_ROUND_NEAREST ? sid_f32_to_f8_nearest(y, mantissa)
                                                 : sid_f32_to_f8_dithered(y, mantissa, draw);
        }
        if (ROUNDING == SID_ROUND_NEAREST) return (uint32_t)sid_nearest(l);
        const int32_t i = ROUNDING == SID_ROUND_DRAW16 ? sid_dither16(a, draw) : sid_dither32(a, draw);
        return (uint32_t)(k == sid_f32_bits(l) ? i : -i);
    }
    /* FOUR, THREE: where the magnitude becomes the high one stands in place of the inverse. */
    __device__ uint32_t code_of(float x, float inverse, uint32_t draw) const {
        if (CODES == THREE) return sid_three_code(x, sid_f32_bits(inverse));
        return CODES == FOUR ? sid_four_code(x, sid_f32_bits(inverse)) : code(x * inverse, draw);
    }
    __device__ float number(uint32_t code) const {
        if (CODES == FOUR) return sid_four_number(code);
        if (CODES == THREE) return sid_three_number(code);
        if (CODES == INTEGERS) return (float)(int32_t)code;
        const float y = finite_number(code << 24);
        const uint32_t k = code & 0x7fu, sign = (code & 0x80u) << 24;
        const bool none = mantissa == 3 ? k == 0x7fu : k >= 0x7cu;
        const uint32_t what = mantissa == 3 ? 0x7fc00000u : 0x7f800000u | (k & 3u) << 21;
        return none ? sid_bits_f32(what | sign) : y;
    }
    /* sid_f8_to_f32 of a code in the upper 8 bits, where there is no other, by a product that is exact, denormals and all:
     * nothing is flushed to zero here. */
    __device__ float finite_number(uint32_t top) const {
        const uint32_t y = (uint32_t)((int32_t)top >> (mantissa + 1)) & (0x80000000u | 0x7fu << (23 - mantissa));
        return sid_bits_f32(y) * (mantissa == 3 ? 0x1p120f : 0x1p112f);
    }
    /* The numbers for the codes in a word. BYTES: codes have 8 bits. */
    template <bool BYTES> __device__ void numbers(uint32_t w, float (&y)[SID_QUAD]) const {
        if constexpr (CODES == FLOATS) {
            const uint32_t none = (w & 0x7f7f7f7fu) + (mantissa == 3 ? 0x01010101u : 0x04040404u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = finite_number(w << (24 - 8 * c) & 0xff000000u);
            if (none & 0x80808080u) /* no encoder writes them */
                for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = number(w >> (8 * c) & 0xffu);
        } else if constexpr (CODES == FOUR) {
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = sid_four_number(w >> (2 * c));
        } else if constexpr (CODES == THREE) { /* a trit a byte */
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = sid_three_number(w >> (8 * c));
        } else {
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                y[c] = BYTES ? (float)(int8_t)(w >> (8 * c))
                             : (float)((int32_t)(w << (32 - bits * (c + 1))) >> (32 - bits));
        }
    }
    __device__ uint32_t field(uint32_t code) const { return code & ((1u << bits) - 1u); }
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

/* A block's length as rows of a tile. Whether a row is its block's last one in the tile has a bit for each row: tests of the
 * length itself would know of one another, and the compiler would write code for every way through eight of them. */
struct shape {
    uint32_t rows; /* of a block; 0: half a row */
    uint32_t ends;
    bool halves;
};

shape shape_of(uint32_t block) {
    shape s = {block / SID_ROW, 0, block && block < SID_ROW};
    for (uint32_t r = 0; r < SID_ROWS; r++)
        if (s.halves || r + 1 == SID_ROWS || (s.rows && (r + 1) % s.rows == 0)) s.ends |= 1u << r;
    return s;
}

struct scaling {          /* of a block */
    float scale, inverse; /* FOUR, THREE: the edge in place of the inverse */
};
enum {
    HALVES = 2
};

/* A kernel for each kind and rounding, and for scales of blocks and of the GROUP: what is not of its own kind would only be in
 * the way of instructions. */
template <content CODES, sid_rounding ROUNDING, bool GROUP> struct coder {
    quant_form f;
    grid<CODES, ROUNDING> g;
    sid_draw draw;
    uint8_t *payload;
    uint64_t codes_at;
    uint64_t n;
    uint32_t shift; /* of a block's length */
    shape blocks;
    double *sums; /* of the tiles, where the scale is the group's: squares, and `stride` further the elements */
    uint64_t stride;

    enum {
        LATE = 1,
        SEVERAL = 1,
        MOST_BITS = 8
    };
    __device__ void move(const sid_several &k, uint32_t slice) {
        payload = sid_payload_of(k, slice, payload);
        sums = sid_work_of(k, slice, sums);
        sid_move(draw, k, slice);
    }
    struct shared {
        sid_part_sum part[SID_WARPS];
        double squares[SID_WARPS];
        uint32_t key[SID_WARPS];
        scaling of[SID_WARPS][HALVES][SID_ROWS];           /* each row's, or of its halves */
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

    /* The largest key of a block that spans this tile and more, joined from the parts of two or four tiles. The whole CUDA
     * block calls it. */
    __device__ uint32_t across(shared &s, uint32_t key) const {
        const uint32_t tiles = blocks.rows / SID_ROWS, first = sid_warp() / tiles * tiles;
        if (sid_lane() == SID_ROWS - 1) s.key[sid_warp()] = key;
        __syncthreads();
        key = 0;
        for (uint32_t w = first; w < first + tiles; w++) key = s.key[w] > key ? s.key[w] : key;
        __syncthreads();
        return key;
    }
    __device__ double across(shared &s, double squares) const { /* in halves */
        const uint32_t tiles = blocks.rows / SID_ROWS, first = sid_warp() / tiles * tiles;
        if (sid_lane() == SID_ROWS - 1) s.squares[sid_warp()] = squares;
        __syncthreads();
        double all = s.squares[first] + s.squares[first + tiles / 2];
        if (tiles == 4) all += s.squares[first + 1] + s.squares[first + 3];
        __syncthreads();
        return all;
    }

    /* Sums f(element, row) over the block that ends in the tile with the row that is this lane modulo SID_ROWS, or over the
     * half of the row. */
    template <typename T, typename F> __device__ T sum_rows(const sid_quads &x, const F &f) const {
        const uint32_t own = sid_lane() % SID_ROWS;
        T lane[SID_QUAD] = {}, mine = 0;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += (T)f(x[r][c], r);
            if (!(blocks.ends >> r & 1)) continue;
            const T all = blocks.halves ? join_half(lane) : sid_join_lanes(lane);
            mine = r == own ? all : mine;
            lane[0] = lane[1] = lane[2] = lane[3] = 0;
        }
        return mine;
    }
    /* sid_join_lanes of the 64 lanes that 16 threads have. */
    template <typename T> __device__ static T join_half(T (&lane)[SID_QUAD]) {
#pragma unroll
        for (uint32_t d = SID_LANES / 4; d; d /= 2)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += __shfl_xor_sync(SID_FULL, lane[c], d);
        return (lane[0] + lane[1]) + (lane[2] + lane[3]);
    }
    /* The same in float64, which is rare: row by row, in a loop that is not unrolled. */
    template <typename F> __device__ double sum_wide(const sid_quads &x, const F &f) const {
        double lane[SID_QUAD] = {}, mine = 0;
#pragma unroll 1
        for (uint32_t row = 0; row < SID_ROWS; row++) {
            float y[SID_QUAD] = {};
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) y[c] = r == row ? x[r][c] : y[c];
            for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += (double)f(y[c], row);
            if (!(blocks.ends >> row & 1)) continue;
            const double all = blocks.halves ? join_half(lane) : sid_join_lanes(lane);
            mine = row == sid_lane() % SID_ROWS ? all : mine;
            lane[0] = lane[1] = lane[2] = lane[3] = 0;
        }
        return mine;
    }
    /* Sums magnitudes in float32, or in float64 if that overflows. */
    template <typename F> __device__ double sum_block(shared &s, const sid_quads &x, const F &f) const {
        const float sum = sum_rows<float>(x, f);
        double all = (double)sum;
        if (__ballot_sync(SID_FULL, sid_key(sum) >= SID_KEY_INF)) {
            const double wide = sum_wide(x, f);
            all = sid_key(sum) < SID_KEY_INF ? all : wide;
        }
        return blocks.rows > SID_ROWS ? across(s, all) : all;
    }
    /* Fits the scale of a grid with two magnitudes. */
    __device__ float fitted(shared &s, const sid_quads &x, uint64_t offset) const {
        const uint32_t own = sid_lane() % SID_ROWS, half = sid_lane() / 16;
        const int last = (int)((sid_lane() & 16) + own) + __ffs((int)(blocks.ends >> own)) - 1; /* lane of its block */
        const uint64_t at = offset + own * SID_ROW + (blocks.halves ? half * (SID_ROW / 2) : 0);
        const uint64_t first = at & ~(uint64_t)(f.block - 1), left = first < n ? n - first : 1;
        const uint32_t count = left < f.block ? (uint32_t)left : f.block; /* elements of its block */
        scaling(&of)[SID_ROWS] = s.of[sid_warp()][half];
        float edge = 0, scale = 0; /* at first all magnitudes are at or above the edge */
        double sum = 0, above = 0;
        /* Three sums by one copy of the code, which is long. A count is exact in float32, too. */
#pragma unroll 1
        for (uint32_t turn = 0; turn < 3; turn++) {
            if (sid_lane() % 16 < SID_ROWS) of[own] = {scale, edge};
            __syncwarp();
            const double found = sum_block(s, x, [&](float v, uint32_t r) {
                const float one = turn < 2 ? sid_bits_f32(sid_key(v)) : 1.0f;
                return sid_key(v) >= sid_f32_bits(of[r].inverse) ? one : 0.0f;
            });
            __syncwarp();
            if (turn == 0)
                edge = __shfl_sync(SID_FULL, quant_edge(f.kind, sum = found, count), last);
            else if (turn == 1)
                above = found;
            else
                scale = __shfl_sync(SID_FULL, quant_fit(f.kind, sum, above, count, (uint32_t)found), last);
        }
        if (sid_lane() % 16 < SID_ROWS) of[own].scale = scale;
        __syncwarp();
        return scale;
    }

    /* All to s.of; returns that of the row that is this lane modulo SID_ROWS, and of its half. */
    __device__ float scales(shared &s, const sid_quads &x, uint64_t offset) const {
        __syncwarp(); /* all lanes have read what is there: a shuffle orders no memory */
        if constexpr (has_edge<CODES>)
            return fitted(s, x, offset);
        else
            return measured(s, x);
    }
    __device__ float measured(shared &s, const sid_quads &x) const {
        const uint32_t own = sid_lane() % SID_ROWS;
        const int last = (int)((sid_lane() & 16) + own) + __ffs((int)(blocks.ends >> own)) - 1; /* lane of its block */
        scaling y;
        if (CODES == INTEGERS && ROUNDING != SID_ROUND_NEAREST && f.norm == NORM_L2) {
            double lane[SID_QUAD] = {}, mine = 0;
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) lane[c] += (double)x[r][c] * (double)x[r][c];
                if (!(blocks.ends >> r & 1)) continue;
                const double all = sid_join_lanes(lane);
                mine = r == own ? all : mine;
                lane[0] = lane[1] = lane[2] = lane[3] = 0;
            }
            if (blocks.rows > SID_ROWS) mine = across(s, mine);
            y.scale = quant_scale(sqrt(mine), f.top);
        } else {
            uint32_t key = 0, mine = 0;
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) key = sid_key(x[r][c]) > key ? sid_key(x[r][c]) : key;
                if (!(blocks.ends >> r & 1)) continue;
                if (blocks.halves)
                    for (uint32_t d = SID_LANES / 4; d; d /= 2) {
                        const uint32_t other = __shfl_xor_sync(SID_FULL, key, d);
                        key = other > key ? other : key;
                    }
                else
                    key = sid_warp_max(key);
                mine = r == own ? key : mine;
                key = 0;
            }
            if (blocks.rows > SID_ROWS) mine = across(s, mine);
            y.scale = quant_scale_of(sid_bits_f32(mine), f.top);
        }
        y.scale = __shfl_sync(SID_FULL, y.scale, last);
        y.inverse = inverse_of(y.scale);
        if (sid_lane() % 16 < SID_ROWS) s.of[sid_warp()][sid_lane() / 16][own] = y;
        __syncwarp();
        return y.scale;
    }
    __device__ scaling scaling_of(const shared &s, uint32_t row, const scaling &group) const {
        return GROUP ? group : s.of[sid_warp()][sid_lane() / 16][row];
    }

    __device__ void keep(shared &s, const sid_rule &rule, const sid_draw &d, sid_quads &x, uint64_t offset,
                         uint32_t) const {
        if (rule.scale == 0) return;
        const scaling group = {rule.scale, inverse_of(rule.scale)};
        if (!GROUP) scales(s, x, offset);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const scaling y = scaling_of(s, r, group);
            uint32_t u[SID_QUAD] = {};
            g.draws(d, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] -= y.scale * g.number(g.code_of(x[r][c], y.inverse, u[c]));
            /* The compiler would draw for more rows side by side than stay in registers. */
            if (GROUP && ROUNDING == SID_ROUND_DRAW32 && r % 2) __syncwarp();
        }
    }

    /* Writes the scales of the blocks that begin in the tile. */
    __device__ void put_scales(own &o, float scale, uint64_t offset, uint32_t len) const {
        const uint32_t row = sid_lane() % 16, in = row * SID_ROW + sid_lane() / 16 * (SID_ROW / 2);
        const uint64_t i = offset + in;
        if (row >= SID_ROWS || in >= len || (i & (f.block - 1)) || (sid_lane() >= 16 && !blocks.halves)) return;
        const uint64_t place = SID_HEADER_BYTES + 4 * (i >> shift);
        const uint32_t b = sid_f32_bits(scale);
        *(uint32_t *)(void *)(payload + place) = b;
        o.words.add(place, b);
        o.largest = b > o.largest ? b : o.largest;
    }

    __device__ void tile(shared &s, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        const scaling group = {o.scale, inverse_of(o.scale)};
        const float scale = GROUP ? 0 : scales(s, x, offset);
        uint32_t w[SID_ROWS];
        if (!len) return;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const float inverse = scaling_of(s, r, group).inverse;
            uint32_t u[SID_QUAD] = {};
            w[r] = 0;
            const uint32_t width = CODES == THREE ? 8 : f.bits; /* trits: a byte each, for now */
            g.draws(draw, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) w[r] |= g.field(g.code_of(x[r][c], inverse, u[c])) << (width * c);
        }
        if (!GROUP) put_scales(o, scale, offset, len);
        const uint64_t at = CODES == THREE ? quant_code_bytes(&f, offset) : offset / 8 * f.bits;
        const uint64_t place = codes_at + at + 4 * sid_lane();
        sid_word_run run = {place, 0, 0};
        if constexpr (CODES == THREE) {
            uint32_t *const trits = s.staged[sid_warp()];
            const uint32_t columns = sid_trit_columns(len) / 4; /* words */
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) trits[sid_place(r) / 4] = w[r];
            __syncwarp();
            for (uint32_t j = sid_lane(); j < columns; j += SID_LANES) {
                uint32_t word = 0;
#pragma unroll
                for (uint32_t k = SID_TRITS; k--;) {
                    const uint32_t i = k * columns + j;
                    word = 3 * word + (i < SID_TILE / 4 ? trits[i] : 0u);
                }
                *(uint32_t *)(void *)(payload + place + 4 * (j - sid_lane())) = word;
                run.add(j - sid_lane(), word);
            }
            run.add_to(o.words);
            __syncwarp(); /* before the next tile's codes */
            return;
        }
        if (f.bits == 8) {
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
                if (sid_place(r) < len) {
                    *(uint32_t *)(void *)(payload + place + SID_ROW * r) = w[r];
                    run.add(SID_ROW / 4 * r, w[r]);
                }
            run.add_to(o.words);
            return;
        }
        uint8_t *const staged = (uint8_t *)s.staged[sid_warp()];
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) { /* two threads' codes are a whole number of bytes */
            const uint32_t other = __shfl_xor_sync(SID_FULL, w[r], 1);
            const uint64_t eight = w[r] | (uint64_t)other << (SID_QUAD * f.bits);
            if (sid_lane() & 1) continue;
            for (uint32_t b = 0; b < f.bits; b++) staged[sid_place(r) / 8 * f.bits + b] = (uint8_t)(eight >> (8 * b));
        }
        __syncwarp();
        for (uint32_t j = sid_lane(); j < SID_LANES * f.bits && 32 * j < len * f.bits; j += SID_LANES) {
            const uint32_t word = s.staged[sid_warp()][j];
            *(uint32_t *)(void *)(payload + codes_at + offset / 8 * f.bits + 4 * j) = word;
            run.add(j - sid_lane(), word);
        }
        run.add_to(o.words);
        __syncwarp(); /* before the next tile's codes */
    }
};

/* The first pass where the scale is the group's. */
template <sid_rounding ROUNDING> struct measure : coder<INTEGERS, ROUNDING, true> {
    using base = coder<INTEGERS, ROUNDING, true>;
    using typename base::own;
    using typename base::shared;
    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
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
        this->sums[offset / SID_TILE] = squares;
        this->sums[offset / SID_TILE + this->stride] = plain;
    }
    __device__ void end(shared &, own &o, sid_scratch &scratch) const { this->keep_largest(o, scratch); }
};

/* Between the passes: the scale. */
__global__ void __launch_bounds__(SID_SUMS)
    sid_quant_scale_kernel(sid_scratch *scratch, quant_form f, const double *sums, uint64_t n, double clip,
                           sid_several k) {
    sid_follow();
    __shared__ double part[SID_SUMS];
    scratch = sid_work_of(k, blockIdx.x, scratch);
    sums = sid_work_of(k, blockIdx.x, sums);
    if (!scratch->ready) return;
    const double squares = sid_total(sums, sid_tiles(n), part);
    __syncthreads();
    const double sum = sid_total(sums + sid_tiles(n), sid_tiles(n), part);
    if (threadIdx.x) return;
    scratch->key = sid_f32_bits(quant_group_scale(&f, scratch->codec[LARGEST], sum, squares, n, clip));
}

struct sealing {
    quant_form f;
    __device__ void operator()(const sid_ending &e) const {
        const uint64_t n = e.head.n, codes = quant_codes_at(n, f.block);
        const uint64_t scales = SID_HEADER_BYTES + 4 * quant_blocks(n, f.block);
        const uint64_t used = codes + sid_round_up(quant_code_bytes(&f, n), 4);
        for (uint64_t i = scales + 4 * threadIdx.x; i < codes; i += 4 * SID_BLOCK)
            *(uint32_t *)(void *)(e.payload + i) = 0;
        for (uint64_t i = used + 4 * threadIdx.x; i < e.bytes; i += 4 * SID_BLOCK)
            *(uint32_t *)(void *)(e.payload + i) = 0;
        if (threadIdx.x) return;
        const float scale = sid_bits_f32(f.block ? sid_found(&e.scratch->codec[LARGEST]) : e.scratch->key);
        sid_rule rule = {};
        rule.scale = f.block ? 1.0f : scale;
        sid_end(e, scale, rule, f.block ? 1 : 2, {0});
    }
};

/* ---- decode ------------------------------------------------------------------------------------------------------ */

template <content CODES> struct body {
    quant_form f;
    grid<CODES, SID_ROUND_NEAREST> g; /* decoding rounds nothing */
    uint64_t n, codes_at, blocks;
    uint32_t shift, most_scale;

    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &most) const {
        const uint64_t scale = i - SID_HEADER_BYTES / 4, end = n * f.bits;
        if (scale < blocks) {
            most = w > most ? w : most;
            return !quant_sound(w, most_scale);
        }
        if (4 * i < codes_at) return w != 0;
        if constexpr (CODES == THREE) return wrong_trits(4 * i - codes_at, w);
        const uint64_t bit = 8 * (4 * i - codes_at);
        return bit + 32 <= end ? 0 : bit >= end ? w != 0 : w >> (end - bit) != 0;
    }
    __device__ uint64_t plain_from() const { return codes_at; }
    __device__ uint64_t plain_to() const { return CODES == THREE ? codes_at : codes_at + n * f.bits / 64 * 8; }
    /* 1 if one of the four bytes has a trit of an element that does not exist, or more than five. */
    __device__ uint32_t wrong_trits(uint64_t at, uint32_t w) const {
        if (at >= quant_code_bytes(&f, n)) return w != 0;
        const uint64_t full = n / SID_TILE, unit = at / SID_TRIT_BYTES < full ? at / SID_TRIT_BYTES : full;
        const uint32_t take = unit < full ? (uint32_t)SID_TILE : (uint32_t)(n % SID_TILE);
        const uint32_t columns = sid_trit_columns(take), j = (uint32_t)(at - unit * SID_TRIT_BYTES);
        uint32_t wrong = 0;
        for (uint32_t c = 0; c < 4; c++) {
            uint32_t most = 1;
            for (uint32_t k = 0; k < SID_TRITS; k++) most *= k * columns + j + c < take ? 3u : 1u;
            wrong |= (w >> (8 * c) & 0xffu) >= most;
        }
        return wrong;
    }
    __device__ bool counts(uint64_t count) const { return count == n; }
    __device__ uint32_t form() const { return 0; }
    __device__ bool gathered() const { return true; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &, uint32_t, uint32_t most) const {
        const uint32_t scale = sid_f32_bits(h.scale);
        if (h.salt && f.rounding == SID_ROUND_NEAREST) return SID_E_CORRUPT;
        return quant_sound(scale, most_scale) && ((n && !f.block) || scale == most) ? SID_OK : SID_E_CORRUPT;
    }
    /* The scale of this lane's row of a payload (coder::scales); of those that there are. */
    __device__ float scale_of(const sid_payloads &p, uint32_t r, uint64_t offset, uint32_t len) const {
        const uint32_t in = sid_lane() % SID_ROWS * SID_ROW + (sid_lane() & 16) * SID_QUAD;
        if (!f.block) return p.head(r).scale;
        const float *const scales = (const float *)(const void *)(p[r] + SID_HEADER_BYTES);
        return in < len ? scales[(offset + in) >> shift] : 0.0f;
    }
    template <bool BYTES> __device__ void add_row(float (&x)[SID_QUAD], float scale, uint32_t d, uint32_t w) const {
        const float s = __shfl_sync(SID_FULL, scale, (int)((sid_lane() & 16) + d));
        float y[SID_QUAD];
        g.template numbers<BYTES>(w, y);
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) x[c] += s * y[c];
    }

    __device__ void sum_bytes(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
#pragma unroll 1
        for (uint32_t r = 0; r < p.count; r++) {
            const uint32_t *const codes = (const uint32_t *)(const void *)(p[r] + codes_at + offset + sid_place(0));
            const float scale = scale_of(p, r, offset, len);
            sid_fetch_next(p, r, codes_at + offset, len);
            uint32_t w[SID_ROWS];
            if (len == SID_TILE)
#pragma unroll
                for (uint32_t d = 0; d < SID_ROWS; d++) w[d] = __ldcs(codes + SID_LANES * d);
            else
#pragma unroll
                for (uint32_t d = 0; d < SID_ROWS; d++) w[d] = sid_place(d) < len ? codes[SID_LANES * d] : 0u;
#pragma unroll
            for (uint32_t d = 0; d < SID_ROWS; d++) add_row<true>(x[d], scale, d, w[d]);
        }
    }
    /* Sums codes of any width. A row's codes take 4 * bits words, so a thread's codes begin at the same bit of a word
     * in each. `second`: the first of its four elements that reaches into the next word. */
    __device__ void sum_bits(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        const uint32_t bit = sid_place(0) * f.bits, off = bit % 32, room = 32 - off;
        const uint32_t second = room < f.bits       ? 0
                                : room < 2 * f.bits ? 1
                                : room < 3 * f.bits ? 2
                                : room < 4 * f.bits ? 3
                                                    : (uint32_t)SID_TILE;
        const uint64_t from = codes_at + offset / 8 * f.bits + bit / 32 * 4;
#pragma unroll 1
        for (uint32_t r = 0; r < p.count; r++) {
            const uint32_t *codes = (const uint32_t *)(const void *)(p[r] + from);
            const float scale = scale_of(p, r, offset, len);
            sid_fetch_next(p, r, codes_at + offset / 8 * f.bits, len * f.bits / 8);
#pragma unroll
            for (uint32_t first = 0; first < SID_ROWS; first += SID_ROWS / 2) {
                uint32_t low[SID_ROWS / 2], high[SID_ROWS / 2];
                if (len == SID_TILE)
#pragma unroll
                    for (uint32_t d = 0; d < SID_ROWS / 2; d++, codes += 4 * f.bits) {
                        low[d] = __ldcs(codes);
                        high[d] = second < SID_QUAD ? codes[1] : 0u; /* a neighbour's as well */
                    }
                else
#pragma unroll
                    for (uint32_t d = 0; d < SID_ROWS / 2; d++, codes += 4 * f.bits) {
                        low[d] = sid_place(first + d) < len ? codes[0] : 0u;
                        high[d] = sid_place(first + d) + second < len ? codes[1] : 0u;
                    }
#pragma unroll
                for (uint32_t d = 0; d < SID_ROWS / 2; d++)
                    add_row<false>(x[first + d], scale, first + d,
                                   (uint32_t)(((uint64_t)high[d] << 32 | low[d]) >> off));
            }
        }
    }
    /* Four neighbours have the same digit of four neighbouring bytes. */
    __device__ void sum_trits(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        const uint64_t from = codes_at + quant_code_bytes(&f, offset);
        /* elements over columns, a quotient that is right below 1024; as registers are few, it is computed for each payload */
        const uint32_t columns = sid_trit_columns(len), part = len ? (1u << 22) / columns + 1 : 0;
#pragma unroll 1
        for (uint32_t r = 0; r < p.count; r++) {
            const float scale = scale_of(p, r, offset, len);
            sid_fetch_next(p, r, from, columns);
#pragma unroll
            for (uint32_t d = 0; d < SID_ROWS; d++) {
                const uint32_t i = sid_place(d), k = i * part >> 22;
                const uint32_t w = i < len ? *(const uint32_t *)(const void *)(p[r] + from + (i - k * columns)) : 0u;
                /* 2^16 / 3^k, rounded up: the quotients of bytes are right. Four numbers of 16 bits, because the
                 * compiler made a jump table of a choice among five. Behind the tile's end w is 0. */
                const uint32_t by = k ? (uint16_t)(0x032a097c1c725556ull >> 16 * ((k - 1) & 3)) : 65536u;
                uint32_t trits = 0;
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    const uint32_t q = (w >> (8 * c) & 0xffu) * by >> 16;
                    trits |= (q - 3 * (q * 171 >> 9)) << (8 * c);
                }
                add_row<true>(x[d], scale, d, trits);
            }
        }
    }
    __device__ void sum(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        if constexpr (CODES == THREE)
            sum_trits(p, x, offset, len);
        else if constexpr (CODES == FLOATS)
            sum_bytes(p, x, offset, len);
        else if (f.bits == 8)
            sum_bytes(p, x, offset, len);
        else
            sum_bits(p, x, offset, len);
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

uint64_t several(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c, quant_form_of(p));
    return c.at;
}

uint32_t shift_of(uint32_t block) {
    uint32_t shift = 0;
    while (block >> shift > 1) shift++;
    return shift;
}

template <class Coder>
Coder coder_of(const sid_cuda_encoding &c, const quant_form &f, const sid_ending &e, double *sums) {
    const uint64_t n = c.plan->n;
    return {f,
            grid_of<decltype(Coder::g)>(f),
            e.draw,
            c.payload,
            quant_codes_at(n, f.block),
            n,
            shift_of(f.block),
            shape_of(f.block),
            sums,
            sid_tiles(n)};
}

template <content CODES, sid_rounding ROUNDING>
sid_status pass(const sid_cuda_encoding &c, const quant_form &f, const sid_ending &e, double *sums) {
    if constexpr (ROUNDING != SID_ROUND_DRAW32)
        if (f.block)
            return sid_pass_tiles(c, coder_of<coder<CODES, ROUNDING, false>>(c, f, e, sums),
                                  c.settles ? sid_ending() : e, sealing{f});
    if constexpr (CODES == INTEGERS && ROUNDING != SID_ROUND_NEAREST) {
        const auto k = coder_of<coder<CODES, ROUNDING, true>>(c, f, e, sums);
        sid_status s = sid_pass_tiles(c, measure<ROUNDING>{k});
        if (s || c.settles) return s;
        s = sid_launch(c.to, "scale", sid_quant_scale_kernel, sid_blocks_to_end(c), SID_SUMS, 0, c.scratch, f,
                       (const double *)sums, c.plan->n, quant_derived_of(c.plan).clip, c.several);
        return s ? s : sid_pass_again(c, k, e, sealing{f});
    }
    return SID_E_UNSUPPORTED; /* no plan has it */
}

template <content CODES> sid_status encode(sid_cuda_encoding &c) {
    const quant_form f = quant_form_of(c.plan);
    sid_ending e = sid_ending_of(c);
    if (f.rounding == SID_ROUND_NEAREST) {
        e.draw = sid_draw();
        e.head.salt = 0;
    }
    double *sums = carve(c.plan, &c.work, f);
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s && f.rounding == SID_ROUND_NEAREST) s = pass<CODES, SID_ROUND_NEAREST>(c, f, e, sums);
    if constexpr (!has_edge<CODES>)
        if (!s && f.rounding == SID_ROUND_DRAW16) s = pass<CODES, SID_ROUND_DRAW16>(c, f, e, sums);
    if constexpr (CODES == INTEGERS)
        if (!s && f.rounding == SID_ROUND_DRAW32) s = pass<INTEGERS, SID_ROUND_DRAW32>(c, f, e, sums);
    return s;
}

template <content CODES> sid_status decode(sid_cuda_decoding &c) {
    const quant_form f = quant_form_of(c.plan);
    const uint64_t n = c.plan->n;
    return sid_dense_decode(c, body<CODES>{f, grid_of<grid<CODES, SID_ROUND_NEAREST>>(f), n, quant_codes_at(n, f.block),
                                           quant_blocks(n, f.block), shift_of(f.block),
                                           sid_f32_bits(quant_scale_max(&f))});
}

} // namespace

extern "C" {
#define QUANT(symbol, codes)                                                                                           \
    extern const sid_cuda_codec sid_cuda_codec_##symbol;                                                               \
    const sid_cuda_codec sid_cuda_codec_##symbol = {work, encode<codes>, decode<codes>, nullptr, several};
QUANT(int8, INTEGERS)
QUANT(int4, INTEGERS)
QUANT(int2, FOUR)
QUANT(ternary, THREE)
QUANT(fp8, FLOATS)
QUANT(qsgd, INTEGERS)
QUANT(terngrad, INTEGERS)
}
