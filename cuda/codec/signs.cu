/* Codecs of one bit per element (csrc/codec/signs.c defines the result). The pass reads gradient and memory, and writes acc
 * and the signs, 32 of them in a word. Bytes per float32 element with a residual, beside 1/8 of payload:
 *     signsgd, signum, marsit   12           the limit, which is error feedback
 *     efsignsgd, onebit         12 + 1/64    the means go into the header, after all bits are written
 *     ssdm                      16 + 1/128   a first pass finds the norm, by which the signs are drawn; without a memory 8
 *     decode                    W / 8        to check W payloads, then W / 8 + 4 to add them up */
#include "dense.cuh"

namespace {

/* ---- bits -------------------------------------------------------------------------------------------------------- */

/* Thread l has the signs of its quad in row r as bits 4 r .. 4 r + 3. Of eight threads these are 8 x 8 nibbles: transposed,
 * thread l has 32 elements in their natural order, those of row l % 8 from 32 (l / 8) on. Its own inverse. */
__device__ inline uint32_t transposed(uint32_t w) {
    const uint32_t masks[3] = {0x0000ffffu, 0x00ff00ffu, 0x0f0f0f0fu};
#pragma unroll
    for (uint32_t k = 0; k < 3; k++) {
        const uint32_t d = 4u >> k, shift = 4 * d, low = masks[k], other = __shfl_xor_sync(SID_FULL, w, d);
        w = sid_lane() & d ? (w & ~low) | (other >> shift & low) : (w & low) | (other & low) << shift;
    }
    return w;
}
/* Which of a tile's words that is. */
__device__ inline uint32_t word_of() { return sid_lane() % 8 * 4 + sid_lane() / 8; }

__device__ inline bool is_negative(float x) { return sid_f32_bits(x) > 0x80000000u; }

/* Bit 4 r + c: f of element (r, c). */
template <typename F> __device__ inline uint32_t bits_of(const F &f) {
    uint32_t w = 0;
#pragma unroll
    for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) w |= (uint32_t)f(r, c) << (SID_QUAD * r + c);
    return w;
}

/* ---- encode ------------------------------------------------------------------------------------------------------ */

struct coder {
    uint8_t *payload;
    double
        *sums; /* of the tiles: of their positive elements, then, `stride` further, of the negative ones; or squares */
    uint64_t stride;

    enum {
        LATE = 0,
        SEVERAL = 1
    };
    __device__ void move(const sid_several &k, uint32_t slice) {
        payload = sid_payload_of(k, slice, payload);
        sums = sid_work_of(k, slice, sums);
    }
    struct shared {
        sid_part_sum part[SID_WARPS];
    };
    struct own {
        sid_part_sum words;
        uint32_t negative;
        float norm;
    };

    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &, sid_quads &x, uint64_t, uint32_t) const {
        if (rule.scale == 0 && rule.inverse == 0) return;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] -= is_negative(x[r][c]) ? rule.inverse : rule.scale;
    }
    /* The bits of a tile, in their own order, go to the payload. */
    __device__ void write(own &o, uint32_t bits, uint64_t offset, uint32_t len) const {
        const uint32_t w = transposed(bits), i = word_of();
        if (32 * i >= len) return;
        const uint64_t place = SID_HEADER_BYTES + offset / 8 + 4 * i;
        *(uint32_t *)(void *)(payload + place) = w;
        o.words.add(place, w);
        o.negative += (uint32_t)__popc(w);
    }
    __device__ void end(shared &s, own &o, sid_scratch &scratch) const {
        sid_add_words(scratch, o.words, s.part);
        const uint32_t negative = sid_warp_sum(o.negative);
        if (sid_lane() == 0 && negative) atomicAdd(&scratch.taken, negative);
    }
};

template <bool MEANS> struct signs : coder {
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        write(o, bits_of([&](uint32_t r, uint32_t c) { return is_negative(x[r][c]); }), offset, len);
        if (!MEANS || !len) return;
        const double above = sid_tile_sum_held(x, [](float v) { return is_negative(v) ? 0.0f : v; });
        const double beneath = sid_tile_sum_held(x, [](float v) { return is_negative(v) ? v : 0.0f; });
        if (sid_lane()) return;
        sums[offset / SID_TILE] = above;
        sums[offset / SID_TILE + stride] = beneath;
    }
};

/* ssdm: bits are drawn where the norm is known. */
struct drawing : coder {
    sid_draw draw;
    __device__ void move(const sid_several &k, uint32_t slice) {
        coder::move(k, slice);
        sid_move(draw, k, slice);
    }

    __device__ uint32_t drawn(const sid_draw &d, const sid_quads &x, float norm, uint64_t offset) const {
        const bool small = norm < 0x1p-96f; /* the quotient would overflow */
        const float up = small ? 0x1p64f : 1.0f, chance = 0x1.000004p31f / (small ? norm * 0x1p64f : norm);
        uint32_t w = 0;
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            uint32_t u[SID_QUAD];
            sid_draws32(d, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                const float v = small ? x[r][c] * up : x[r][c], stays = sid_bits_f32(sid_key(v)) * chance;
                const float least = -0.5f - (stays < 0x1p31f ? stays : 0x1p31f);
                w |= (uint32_t)(is_negative(v) != ((int32_t)u[c] < (int32_t)least)) << (SID_QUAD * r + c);
            }
        }
        return w;
    }
    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &d, sid_quads &x, uint64_t offset,
                         uint32_t) const {
        const float scale = rule.scale;
        if (scale == 0) return;
        const uint32_t w = drawn(d, x, scale, offset);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) /* |acc| is not above the norm, but a difference may be too large */
                x[r][c] = sid_saturated(x[r][c] + (w >> (SID_QUAD * r + c) & 1 ? scale : -scale));
    }
};
struct measure : drawing { /* the first pass */
    __device__ void tile(shared &, own &, const sid_quads &x, uint64_t offset, uint32_t len) const {
        if (!len) return;
        const double squares = sid_tile_squares(x);
        if (sid_lane() == 0) sums[offset / SID_TILE] = squares;
    }
    __device__ void end(shared &, own &, sid_scratch &) const {}
};
struct draw_signs : drawing { /* the second */
    __device__ void begin(shared &, own &o, const sid_scratch &scratch) const { o.norm = sid_bits_f32(scratch.key); }
    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        const uint32_t exist = bits_of([&](uint32_t r, uint32_t c) { return sid_place(r) + c < len; });
        write(o, o.norm > 0 ? drawn(draw, x, o.norm, offset) & exist : 0u, offset, len);
    }
};

/* Between the passes: the norm. */
__global__ void __launch_bounds__(SID_SUMS)
    sid_sign_norm_kernel(sid_scratch *scratch, const double *sums, uint64_t n, sid_several k) {
    sid_follow();
    __shared__ double part[SID_SUMS];
    scratch = sid_work_of(k, blockIdx.x, scratch);
    sums = sid_work_of(k, blockIdx.x, sums);
    const float max = 3.402823466e38f;
    if (!scratch->ready) return;
    const double norm = sqrt(sid_total(sums, sid_tiles(n), part));
    if (threadIdx.x == 0) scratch->key = sid_f32_bits(norm < (double)max ? (float)norm : max);
}

enum value {
    FIXED,
    MEAN,  /* efsignsgd */
    MEANS, /* onebit */
    DRAWN  /* ssdm */
};
struct forms {
    value of;
    bool otherwise, draws; /* not the mean of the ranks' signs: their majority; or one that is drawn */
    float fixed;
};

/* Computes the values for the signs, and ends the payload. One block runs it. */
__global__ void __launch_bounds__(SID_SUMS) sid_sign_seal_kernel(sid_ending e, coder k, forms f) {
    sid_follow();
    __shared__ double part[SID_SUMS];
    k.sums = sid_work_of(e.several, e.move(), k.sums);
    if (!e.scratch->ready) return;
    const uint64_t n = e.head.n, tiles = sid_tiles(n), used = SID_HEADER_BYTES + 4 * ((n + 31) / 32);
    float high = f.fixed, low;
    if (f.of == MEAN || f.of == MEANS) {
        const double above = sid_total(k.sums, tiles, part);
        __syncthreads();
        const double beneath = sid_total(k.sums + k.stride, tiles, part);
        const uint64_t negative = e.scratch->taken, positive = n - negative;
        high = n ? (float)((above - beneath) / (double)n) : 0.0f;
        if (f.of == MEANS) high = positive ? (float)(above / (double)positive) : 0.0f;
        low = negative ? (float)(beneath / (double)negative) : 0.0f;
    }
    if (f.of == DRAWN) high = sid_bits_f32(e.scratch->key);
    if (f.of != MEANS) low = -high;
    for (uint64_t i = used + 4 * threadIdx.x; i < e.bytes; i += 4 * SID_SUMS) *(uint32_t *)(void *)(e.payload + i) = 0;
    __syncthreads();
    if (threadIdx.x) return;
    sid_part_sum own = {0};
    if (f.of == MEANS) {
        const uint64_t offset = sid_sign_low_at(n);
        *(float *)(void *)(e.payload + offset) = low;
        own.add(offset, sid_f32_bits(low));
    }
    sid_rule rule = {};
    rule.scale = high;
    rule.inverse = low;
    sid_end(e, high, rule, f.of == DRAWN && high > 0 ? 2 : 1, own);
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

enum { /* of all that have parameters */
    AGGREGATE,
    VALUE
};

forms forms_of(const sid_plan *p, value of, bool draws) {
    if (of != FIXED) return {of, false, false, 0};
    return {of, p->codec_param[AGGREGATE] == 1, draws, (float)p->codec_param[VALUE]};
}

struct body {
    forms f;
    uint64_t n;

    __device__ bool pair() const { return f.of == MEANS; }
    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &) const {
        const uint64_t offset = 32 * (i - SID_HEADER_BYTES / 4);
        if (offset + 32 <= n) return 0;
        if (offset < n) return w >> (n - offset) != 0;
        return w != 0 && !(pair() && 4 * i == sid_sign_low_at(n));
    }
    __device__ uint64_t plain_from() const { return SID_HEADER_BYTES; }
    __device__ uint64_t plain_to() const { return SID_HEADER_BYTES + n / 64 * 8; }
    __device__ float low_of(const uint8_t *payload) const {
        return *(const float *)(const void *)(payload + sid_sign_low_at(n));
    }
    __device__ bool counts(uint64_t count) const { return count == n; }
    __device__ uint32_t form() const { return 0; }
    __device__ bool gathered() const { return true; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &p, uint32_t r, uint32_t) const {
        if (sid_f32_bits(h.scale) >= SID_KEY_INF || (f.of == FIXED && h.scale != f.fixed)) return SID_E_CORRUPT;
        const uint32_t low = pair() ? sid_f32_bits(low_of(p[r])) : 0;
        return !low || (low > 0x80000000u && low < 0x80000000u + SID_KEY_INF) ? SID_OK : SID_E_CORRUPT;
    }

    /* This thread's bits of payload r. */
    __device__ uint32_t load(const sid_payloads &p, uint32_t r, uint64_t offset, uint32_t len) const {
        const uint32_t i = word_of();
        return 32 * i < len ? __ldcs((const uint32_t *)(const void *)(p[r] + SID_HEADER_BYTES + offset / 8 + 4 * i))
                            : 0u;
    }

    /* Values, four payloads after another: these are added up first. */
    __device__ void add(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        enum {
            FOUR = 4
        };
#pragma unroll 1
        for (uint32_t first = 0; first < p.count; first += FOUR) {
            uint32_t w[FOUR];
            float high[FOUR], low[FOUR];
#pragma unroll
            for (uint32_t k = 0; k < FOUR; k++) {
                const bool there = first + k < p.count; /* else its signs stand for 0 */
                w[k] = there ? load(p, first + k, offset, len) : 0u;
                high[k] = there ? p.head(first + k).scale : 0.0f;
                low[k] = there && pair() ? low_of(p[first + k]) : -high[k];
            }
#pragma unroll
            for (uint32_t k = 0; k < FOUR; k++) w[k] = transposed(w[k]);
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    const uint32_t bit = 1u << (SID_QUAD * r + c);
                    float sum = w[0] & bit ? low[0] : high[0];
#pragma unroll
                    for (uint32_t k = 1; k < FOUR; k++) sum += w[k] & bit ? low[k] : high[k];
                    x[r][c] += sum;
                }
        }
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] *= p.scale;
    }

    /* How many signs of each element are negative: bit k of `plane[b]` is bit b of the count of the element in bit k. */
    __device__ void vote(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        enum {
            PLANES = 13 /* SID_MAX_COUNT */
        };
        uint32_t plane[PLANES] = {}, planes = 0;
        while (p.count >> planes) planes++;
        uint32_t next = load(p, 0, offset, len);
#pragma unroll 2
        for (uint32_t r = 0; r < p.count; r++) {
            uint32_t carry = next;
            if (r + 1 < p.count) next = load(p, r + 1, offset, len);
#pragma unroll
            for (uint32_t b = 0; b < PLANES; b++) {
                if (b >= planes) break;
                const uint32_t more = plane[b] & carry;
                plane[b] ^= carry;
                carry = more;
            }
        }
        uint32_t count[SID_ROWS][SID_QUAD] = {};
#pragma unroll
        for (uint32_t b = 0; b < PLANES; b++) {
            if (b >= planes) break;
            const uint32_t w = transposed(plane[b]);
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) count[r][c] |= (w >> (SID_QUAD * r + c) & 1) << b;
        }
        const sid_header &h = p.head(0);
        const sid_draw common = {h.salt, h.group, h.step};
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            uint32_t u[SID_QUAD] = {};
            if (f.draws) sid_draws16(common, offset + sid_place(r), u);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                const int32_t all = (int32_t)p.count, lead = all - 2 * (int32_t)count[r][c]; /* of the positive ones */
                const int32_t drawn = (int32_t)(u[c] * p.count >> 16);
                const float sign = f.draws ? (2 * drawn - all < lead ? 1.0f : -1.0f) : (float)((lead > 0) - (lead < 0));
                x[r][c] = sign * f.fixed;
            }
        }
    }
    __device__ void sum(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        if (f.otherwise)
            vote(p, x, offset, len);
        else
            add(p, x, offset, len);
    }
};

/* ---- calls ------------------------------------------------------------------------------------------------------- */

double *carve(const sid_plan *p, sid_carver *c, value of) {
    const uint32_t kinds = of == FIXED ? 0 : of == DRAWN ? 1 : 2;
    return c->take<double>(kinds * sid_tiles(p->n));
}

template <value OF> uint64_t work(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c, OF);
    return c.at > sid_findings_work() ? c.at : sid_findings_work();
}

template <value OF> uint64_t several(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c, OF);
    return c.at;
}

template <value OF, bool DRAWS> sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const forms f = forms_of(p, OF, DRAWS);
    sid_ending e = sid_ending_of(c);
    if (DRAWS) e.draw.salt = e.head.salt = sid_salt(c.step.seed, SID_COMMON);
    coder k = {c.payload + c.from / 8, carve(p, &c.work, OF), sid_tiles(p->n)};
    const bool all = c.part == SID_ENCODE;
    sid_status s = SID_OK;
    if (all || c.part == SID_OPEN) s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (s || c.part == SID_OPEN) return s;
    if constexpr (OF == FIXED) {
        if (c.part != SID_CLOSE) s = sid_pass_tiles(c, signs<false>{k});
        if (s || c.part == SID_RANGE) return s;
    } else if constexpr (OF == DRAWN) {
        s = sid_pass_tiles(c, measure{{k, e.draw}});
        if (s || c.settles) return s;
        s = sid_launch(c.to, "norm", sid_sign_norm_kernel, sid_blocks_to_end(c), SID_SUMS, 0, c.scratch,
                       (const double *)k.sums, p->n, c.several);
        if (!s) s = sid_pass_again(c, draw_signs{{k, e.draw}});
    } else
        s = sid_pass_tiles(c, signs<true>{k});
    if (!s && !c.settles)
        s = sid_launch(c.to, "seal", sid_sign_seal_kernel, sid_blocks_to_end(c), SID_SUMS, 0, e, k, f);
    return s;
}

template <value OF, bool DRAWS> sid_status decode(sid_cuda_decoding &c) {
    return sid_dense_decode(c, body{forms_of(c.plan, OF, DRAWS), c.plan->n});
}

} // namespace

extern "C" {
#define SIGNS(symbol, of, draws)                                                                                       \
    extern const sid_cuda_codec sid_cuda_codec_##symbol;                                                               \
    const sid_cuda_codec sid_cuda_codec_##symbol = {work<of>, encode<of, draws>, decode<of, draws>, nullptr,           \
                                                    several<of>};
SIGNS(signsgd, FIXED, false)
SIGNS(signum, FIXED, false)
SIGNS(marsit, FIXED, true)
SIGNS(efsignsgd, MEAN, false)
SIGNS(onebit, MEANS, false)
SIGNS(ssdm, DRAWN, false)
}
