/* mxfp4, nvfp4 (csrc/codec/micro.c defines the result). Every element becomes a 4-bit float times the scale of its block. A
 * block of 32 or 16 elements lies in 8 or 4 neighbouring threads, so its scale is known while the tile is in registers.
 *     mxfp4     one pass reads gradient and memory, writes acc and the payload: 12.53 bytes per float32 element
 *     nvfp4     a first pass finds the scale of the group, a second one writes the payload: 16.56, or 8.56 without a memory
 *     decode    checks W payloads, 0.53 W or 0.56 W; then adds them up, as much and 4
 * The values that the last step sent are computed again from acc. The limit is memory bandwidth. */
#include "codec/micro.h"
#include "dense.cuh"

namespace {

enum {
    LARGEST /* scratch.codec: key of the group, or scale of a block */
};

template <bool DRAWS> __device__ inline uint32_t code_of(float l, uint32_t draw) {
    return DRAWS ? sid_f32_to_f4_dithered(l, draw) : sid_f32_to_f4_nearest(l);
}

template <bool TWO, bool DRAWS> struct coder {
    micro_form f;
    sid_draw draw;
    uint8_t *payload;
    uint64_t n, codes_at;

    enum {
        LATE = 1,
        SEVERAL = 1,
        SHIFT = TWO ? 4 : 5,
        PER_ROW = SID_ROW >> SHIFT, /* blocks */
        WORDS = PER_ROW / 4         /* of scales, of a row */
    };
    __device__ void move(const sid_several &k, uint32_t slice) {
        payload = sid_payload_of(k, slice, payload);
        sid_move(draw, k, slice);
    }
    struct shared {
        sid_part_sum part[SID_WARPS];
    };
    struct own {
        sid_part_sum words;
        uint32_t largest;
        float scale; /* the group's */
    };

    __device__ void begin(shared &, own &o, const sid_scratch &scratch) const { o.scale = sid_bits_f32(scratch.key); }
    __device__ void end(shared &s, own &o, sid_scratch &scratch) const {
        sid_add_words(scratch, o.words, s.part);
        if (!TWO) keep_largest(o, scratch);
    }
    __device__ void keep_largest(const own &o, sid_scratch &scratch) const {
        const uint32_t largest = sid_warp_max(o.largest);
        if (sid_lane() == 0 && largest) atomicMax(&scratch.codec[LARGEST], largest);
    }

    /* The scale of the block of which x is this thread's part. */
    __device__ micro_scale scaling_of(const float (&x)[SID_QUAD], float group, float sixth) const {
        uint32_t key = 0;
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) key = sid_key(x[c]) > key ? sid_key(x[c]) : key;
#pragma unroll
        for (uint32_t d = (1u << SHIFT) / SID_QUAD / 2; d; d /= 2) {
            const uint32_t other = __shfl_xor_sync(SID_FULL, key, d);
            key = other > key ? other : key;
        }
        return TWO ? micro_nv(key, group, sixth) : micro_mx(key);
    }
    __device__ void draws(const sid_draw &d, uint64_t i, uint32_t (&u)[SID_QUAD]) const {
        if (DRAWS) sid_draws16(d, i, u);
    }

    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &d, sid_quads &x, uint64_t offset,
                         uint32_t) const {
        if (rule.scale == 0) return;
        const float sixth = micro_sixth(rule.scale);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const micro_scale s = scaling_of(x[r], rule.scale, sixth);
            uint32_t u[SID_QUAD] = {};
            draws(d, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                x[r][c] -= s.scale * sid_f4_to_f32(code_of<DRAWS>(x[r][c] * s.inverse, u[c]));
        }
    }

    __device__ void put(own &o, uint64_t place, uint32_t word) const {
        *(uint32_t *)(void *)(payload + place) = word;
        o.words.add(place, word);
    }
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        if (!len) return;
        const float sixth = micro_sixth(o.scale);
        uint32_t scales = 0; /* lane i: the i-th word of the tile's */
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            const micro_scale s = scaling_of(x[r], o.scale, sixth);
            uint32_t u[SID_QUAD] = {}, w = 0;
            draws(draw, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) w |= code_of<DRAWS>(x[r][c] * s.inverse, u[c]) << (4 * c);
            if (!TWO && sid_place(r) < len)
                o.largest = sid_f32_bits(s.scale) > o.largest ? sid_f32_bits(s.scale) : o.largest;
#pragma unroll
            for (uint32_t b = 0; b < PER_ROW; b++) {
                const uint32_t code = __shfl_sync(SID_FULL, s.code, b * (SID_LANES / PER_ROW));
                if (sid_lane() == r * WORDS + b / 4) scales |= code << (8 * (b % 4));
            }
            w |= __shfl_xor_sync(SID_FULL, w, 1) << 16; /* of an even lane */
            if (!(sid_lane() & 1) && sid_place(r) < len) put(o, codes_at + (offset + sid_place(r)) / 2, w);
        }
        if (sid_lane() < SID_ROWS * WORDS && sid_lane() << (SHIFT + 2) < len)
            put(o, SID_HEADER_BYTES + (offset >> SHIFT) + 4 * sid_lane(), scales);
    }
};

/* The first pass where the group has a scale. */
template <bool DRAWS> struct largest : coder<true, DRAWS> {
    using base = coder<true, DRAWS>;
    using typename base::own;
    using typename base::shared;
    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t, uint32_t) const {
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                o.largest = sid_key(x[r][c]) > o.largest ? sid_key(x[r][c]) : o.largest;
    }
    __device__ void end(shared &, own &o, sid_scratch &scratch) const { this->keep_largest(o, scratch); }
};

__global__ void __launch_bounds__(SID_LANES) sid_micro_scale_kernel(sid_scratch *scratch, sid_several k) {
    sid_follow();
    scratch = sid_work_of(k, blockIdx.x, scratch);
    if (!scratch->ready || threadIdx.x) return;
    scratch->key = sid_f32_bits(quant_scale_of(sid_bits_f32(scratch->codec[LARGEST]), MICRO_TOP));
}

struct sealing {
    micro_form f;
    __device__ void operator()(const sid_ending &e) const {
        const uint64_t n = e.head.n, codes = micro_codes_at(&f, n);
        const uint64_t scales = SID_HEADER_BYTES + sid_round_up(micro_blocks(&f, n), 4);
        const uint64_t used = codes + sid_round_up((n + 1) / 2, 4);
        for (uint64_t i = scales + 4 * threadIdx.x; i < codes; i += 4 * SID_BLOCK)
            *(uint32_t *)(void *)(e.payload + i) = 0;
        for (uint64_t i = used + 4 * threadIdx.x; i < e.bytes; i += 4 * SID_BLOCK)
            *(uint32_t *)(void *)(e.payload + i) = 0;
        if (threadIdx.x) return;
        const float scale = sid_bits_f32(f.two ? e.scratch->key : sid_found(&e.scratch->codec[LARGEST]));
        sid_rule rule = {};
        rule.scale = f.two ? scale : 1.0f;
        sid_end(e, scale, rule, f.two ? 2 : 1, {0});
    }
};

/* ---- decode ------------------------------------------------------------------------------------------------------ */

struct body {
    micro_form f;
    uint64_t n, codes_at, blocks;
    uint32_t most_scale;

    /* Whether E4M3 scales are sound depends on the header; here `most` becomes the largest, and 256 less the smallest above 0. */
    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &most) const {
        const uint64_t at = 4 * i - SID_HEADER_BYTES;
        uint32_t wrong = 0;
        if (4 * i < codes_at) {
            for (uint32_t c = 0; c < 4; c++) {
                const uint32_t code = w >> (8 * c) & 0xffu;
                if (at + c >= blocks)
                    wrong |= code != 0;
                else if (f.two) {
                    wrong |= code > MICRO_E4M3_MOST;
                    most = code && 256 - code > most ? 256 - code : most;
                } else {
                    wrong |= code > MICRO_MX_MOST;
                    most = code + 1 > most ? code + 1 : most;
                }
            }
            return wrong;
        }
        const uint64_t bit = 8 * (4 * i - codes_at), end = 4 * n;
        return bit + 32 <= end ? 0 : bit >= end ? w != 0 : w >> (end - bit) != 0;
    }
    __device__ uint64_t plain_from() const { return codes_at; }
    __device__ uint64_t plain_to() const { return codes_at + n / 16 * 8; }
    __device__ bool counts(uint64_t count) const { return count == n; }
    __device__ uint32_t form() const { return 0; }
    __device__ bool gathered() const { return true; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &, uint32_t, uint32_t most) const {
        const uint32_t scale = sid_f32_bits(h.scale);
        if (h.salt && !f.draws) return SID_E_CORRUPT;
        if (!f.two) return scale == (most ? sid_f32_bits(micro_power(most - 1)) : 0u) ? SID_OK : SID_E_CORRUPT;
        if (!quant_sound(scale, most_scale) || (!n && scale)) return SID_E_CORRUPT;
        return !most || micro_sound(&f, 256 - most, h.scale) ? SID_OK : SID_E_CORRUPT;
    }
    __device__ void sum(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
#pragma unroll 1
        for (uint32_t r = 0; r < p.count; r++) {
            /* this thread's in row 0: that of row d lies a constant further, which takes no register */
            const uint64_t first = offset + sid_place(0);
            const uint8_t *const scales = p[r] + SID_HEADER_BYTES + (first >> f.shift);
            const uint16_t *const codes = (const uint16_t *)(const void *)(p[r] + codes_at) + first / SID_QUAD;
            const float group = f.two ? p.head(r).scale : 0.0f;
            sid_fetch_next(p, r, codes_at + offset / 2, len / 2);
#pragma unroll
            for (uint32_t d = 0; d < SID_ROWS; d++) {
                if (sid_place(d) >= len) continue;
                const uint32_t w = codes[d * SID_LANES];
                const float scale = micro_number(&f, scales[d * (SID_ROW >> f.shift)], group);
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] += scale * sid_f4_to_f32(w >> (4 * c));
            }
        }
#pragma unroll
        for (uint32_t d = 0; d < SID_ROWS; d++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[d][c] *= p.scale;
    }
};

/* ---- calls ------------------------------------------------------------------------------------------------------- */

uint64_t work(const sid_plan *) { return sid_findings_work(); }
uint64_t several(const sid_plan *) { return 0; }

template <bool TWO, bool DRAWS>
sid_status passes(const sid_cuda_encoding &c, const micro_form &f, const sid_ending &e) {
    const coder<TWO, DRAWS> k = {f, e.draw, c.payload, c.plan->n, micro_codes_at(&f, c.plan->n)};
    if constexpr (!TWO)
        return sid_pass_tiles(c, k, c.settles ? sid_ending() : e, sealing{f});
    else {
        sid_status s = sid_pass_tiles(c, largest<DRAWS>{k});
        if (s || c.settles) return s;
        s = sid_launch(c.to, "scale", sid_micro_scale_kernel, sid_blocks_to_end(c), SID_LANES, 0, c.scratch, c.several);
        return s ? s : sid_pass_again(c, k, e, sealing{f});
    }
}

template <bool TWO> sid_status encode(sid_cuda_encoding &c) {
    const micro_form f = micro_form_of(c.plan);
    sid_ending e = sid_ending_of(c);
    if (!f.draws) {
        e.draw = sid_draw();
        e.head.salt = 0;
    }
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s) s = f.draws ? passes<TWO, true>(c, f, e) : passes<TWO, false>(c, f, e);
    return s;
}

sid_status decode(sid_cuda_decoding &c) {
    const micro_form f = micro_form_of(c.plan);
    const uint64_t n = c.plan->n;
    return sid_dense_decode(
        c, body{f, n, micro_codes_at(&f, n), micro_blocks(&f, n), sid_f32_bits(quant_scale(QUANT_M_MAX, MICRO_TOP))});
}

} // namespace

extern "C" {
#define MICRO(symbol, two)                                                                                             \
    extern const sid_cuda_codec sid_cuda_codec_##symbol;                                                               \
    const sid_cuda_codec sid_cuda_codec_##symbol = {work, encode<two>, decode, nullptr, several};
MICRO(mxfp4, false)
MICRO(nvfp4, true)
}
