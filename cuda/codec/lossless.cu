/* lossless (csrc/codec/lossless.c defines the result). Each element gets a short code for its exponent, below the largest of 128
 * elements. Exponents that have no code are exceptions, which follow in order, so that a tile's place depends on the tiles
 * before it. This takes two passes.
 *     first     reads gradient and memory, writes acc, counts the exceptions of each tile: 12 bytes per float32 element
 *     second    reads acc again and writes the payload: 4, and 3.4 to 3.5
 *     decode    checks W payloads, 3.5 W, for which the codes are read twice; then adds them up, 3.5 W + 4
 * The limit is memory bandwidth. */
#include "codec/lossless.h"
#include "dense.cuh"

namespace {

enum {
    MOST_BITS = 4,
    HALF_PLANES = 3,
    PLANES = MOST_BITS + HALF_PLANES, /* at most */
    BLOCK_ROWS = LOSSLESS_BLOCK / SID_ROW
};

__device__ inline uint32_t below_lane(uint32_t mask) { return mask & ((1u << sid_lane()) - 1); }

/* The exceptions of a row: for each element of the quad whether it is one, and the place of the quad's first one in the
 * order of the elements. All lanes compute it together. */
struct exceptions {
    uint32_t mine;   /* bit c: element c is one */
    uint32_t before; /* in the row, of the lanes below this one */
    uint32_t row;    /* in all */
    __device__ explicit exceptions(uint32_t far) : mine(far), before(0), row(0) {
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) {
            const uint32_t all = __ballot_sync(SID_FULL, far >> c & 1);
            before += (uint32_t)__popc(below_lane(all));
            row += (uint32_t)__popc(all);
        }
    }
    __device__ uint32_t rank(uint32_t c) const { return before + (uint32_t)__popc(mine & ((1u << c) - 1)); }
};

/* ---- encode ------------------------------------------------------------------------------------------------------ */

/* WRITE: the pass that writes the payload; else the one that counts. SLICES: it writes several; apart, as registers are few. */
template <bool WRITE, bool SLICES> struct coder {
    lossless_form f;
    uint8_t *payload;
    uint64_t n;
    uint64_t *
        starts; /* of a tile: how many exceptions it has; then how many are before it, and behind the last one all of them */

    enum {
        LATE = 1,
        SEVERAL = !WRITE ? 1 : SLICES ? 2 : 0
    };
    __device__ void move(const sid_several &k, uint32_t slice) {
        payload = sid_payload_of(k, slice, payload);
        starts = sid_work_of(k, slice, starts);
    }
    struct shared {
        sid_part_sum part[SID_WARPS];
    };
    struct own {
        sid_part_sum words;
        uint64_t cut; /* 0, or 1 more than the first element that there is no room for */
    };

    __device__ void begin(shared &, own &, const sid_scratch &) const {}
    __device__ void end(shared &s, own &o, sid_scratch &scratch) const {
        if (!WRITE) return;
        sid_add_words(scratch, o.words, s.part);
        if (o.cut) scratch.cut = o.cut - 1; /* one thread of all has it */
    }

    __device__ void tops(const sid_quads &x, uint32_t (&top)[LOSSLESS_TOPS]) const {
#pragma unroll
        for (uint32_t b = 0; b < LOSSLESS_TOPS; b++) {
            uint32_t key = 0;
#pragma unroll
            for (uint32_t r = b * BLOCK_ROWS; r < (b + 1) * BLOCK_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    const uint32_t k = lossless_bits(x[r][c], f.dtype) & 0x7fffffffu;
                    key = k > key ? k : key;
                }
            top[b] = sid_warp_max(key) >> 23;
        }
    }
    __device__ uint32_t code_of(uint32_t u, uint32_t top) const {
        return sid_exponent_code(u >> 23 & 255u, top, lossless_far(&f));
    }

    __device__ void keep(shared &, const sid_rule &rule, const sid_draw &, sid_quads &x, uint64_t offset,
                         uint32_t) const {
        if (rule.key == SID_KEY_NONE) return;
        uint32_t top[LOSSLESS_TOPS];
        tops(x, top);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                const uint32_t u = lossless_bits(x[r][c], f.dtype);
                const bool left =
                    offset + sid_place(r) + c >= rule.cut && code_of(u, top[r / BLOCK_ROWS]) == lossless_far(&f);
                x[r][c] -= left ? 0.0f : lossless_number(u, f.dtype);
            }
    }

    __device__ void put(own &o, uint64_t place, uint32_t word) const {
        *(uint32_t *)(void *)(payload + place) = word;
        o.words.add(place, word);
    }
    __device__ void put_byte(own &o, uint64_t place, uint32_t byte) const {
        payload[place] = (uint8_t)byte;
        o.words.add(place & ~(uint64_t)3, byte << (8 * (place & 3)));
    }

    __device__ void tile(shared &, own &o, const sid_quads &x, uint64_t offset, uint32_t len) const {
        uint32_t top[LOSSLESS_TOPS];
        if (!len) return;
        tops(x, top);
        if constexpr (!WRITE) {
            uint32_t count = 0;
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    count += code_of(lossless_bits(x[r][c], f.dtype), top[r / BLOCK_ROWS]) == lossless_far(&f);
            count = sid_warp_sum(count);
            if (sid_lane() == 0) starts[offset / SID_TILE] = count;
        } else
            write(o, x, top, offset, len);
    }
    __device__ void write(own &o, const sid_quads &x, const uint32_t (&top)[LOSSLESS_TOPS], uint64_t offset,
                          uint32_t len) const {
        const uint32_t planes = lossless_planes(&f), stride = lossless_stride(len);
        uint64_t start = starts[offset / SID_TILE];
        if (sid_lane() == 0) put(o, f.starts + 4 * (offset / SID_TILE), (uint32_t)(start < f.cap ? start : f.cap));
#pragma unroll
        for (uint32_t b = 0; b < LOSSLESS_TOPS; b++)
            if (sid_lane() == b && b * LOSSLESS_BLOCK < len)
                put_byte(o, SID_HEADER_BYTES + offset / LOSSLESS_BLOCK + b, top[b]);
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++) {
            uint32_t u[SID_QUAD], code[SID_QUAD], far = 0, high = 0;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                u[c] = lossless_bits(x[r][c], f.dtype);
                code[c] = code_of(u[c], top[r / BLOCK_ROWS]);
                far |= (uint32_t)(code[c] == lossless_far(&f)) << c;
            }
            const exceptions those(far);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                const uint64_t rank = start + those.rank(c);
                if (!(far >> c & 1)) continue;
                if (rank < f.cap) {
                    put_byte(o, f.pool + rank, u[c] >> 23 & 255u);
                    continue;
                }
                if (rank == f.cap) o.cut = offset + sid_place(r) + c + 1;
                u[c] = code[c] = 0;
            }
            start += those.row;
#pragma unroll
            for (uint32_t k = 0; k < PLANES; k++) {
                if (k >= planes) continue;
                uint32_t w = 0;
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    w |= (k < f.bits ? code[c] >> k & 1u : u[c] >> (k - f.bits + 13) & 1u) << c;
                w <<= SID_QUAD * (sid_lane() % 8);
                for (uint32_t d = 1; d < 8; d *= 2) w |= __shfl_xor_sync(SID_FULL, w, d);
                const uint32_t in = r * (SID_ROW / 8) + sid_lane() / 8 * 4;
                if (sid_lane() % 8 == 0 && in < stride) put(o, f.planes + offset / 8 * planes + k * stride + in, w);
            }
            if (sid_place(r) >= len) continue; /* nothing below is done together */
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) high |= ((u[c] >> 16 & 0x7fu) | (u[c] >> 24 & 0x80u)) << (8 * c);
            put(o, f.high + offset + sid_place(r), high);
            if (f.dtype != SID_F32) continue;
            const uint64_t low = f.low + 2 * (offset + sid_place(r));
            put(o, low, (u[0] & 0xffffu) | u[1] << 16);
            if (sid_place(r) + 2 < len) put(o, low + 4, (u[2] & 0xffffu) | u[3] << 16);
        }
    }
};

enum {
    STARTS_BLOCK = 1024,
    STARTS_EACH = 4, /* tiles of a thread in a turn */
    SEAL_BLOCK = 256
};
/* Between the passes: where each tile's exceptions begin. By one block a slice, 4096 tiles a turn. */
__global__ void __launch_bounds__(STARTS_BLOCK)
    sid_lossless_starts_kernel(sid_scratch *scratch, uint64_t *starts, uint64_t n, sid_several k) {
    sid_follow();
    __shared__ unsigned long long part[SID_LANES + 1];
    scratch = sid_work_of(k, blockIdx.x, scratch);
    starts = sid_work_of(k, blockIdx.x, starts);
    if (!scratch->ready) return;
    const uint64_t tiles = lossless_tiles(n);
    unsigned long long before = 0;
    for (uint64_t from = 0; from < tiles; from += STARTS_BLOCK * STARTS_EACH) {
        const uint64_t at = from + STARTS_EACH * threadIdx.x;
        uint64_t count[STARTS_EACH];
        unsigned long long own = 0, all;
#pragma unroll
        for (uint32_t i = 0; i < STARTS_EACH; i++) {
            count[i] = at + i < tiles ? starts[at + i] : 0;
            own += count[i];
        }
        unsigned long long start = before + sid_block_scan(own, part, &all) - own;
#pragma unroll
        for (uint32_t i = 0; i < STARTS_EACH; i++) {
            if (at + i < tiles) starts[at + i] = start;
            start += count[i];
        }
        before += all;
        __syncthreads(); /* part is free again */
    }
    if (threadIdx.x) return;
    starts[tiles] = before;
    scratch->cut = n;
}

__device__ inline void clear(uint8_t *payload, uint64_t from, uint64_t to) {
    for (uint64_t i = from + threadIdx.x; i < to; i += SEAL_BLOCK) payload[i] = 0;
}
__global__ void __launch_bounds__(SEAL_BLOCK)
    sid_lossless_seal_kernel(sid_ending e, lossless_form f, const uint64_t *starts) {
    sid_follow();
    starts = sid_work_of(e.several, e.move(), starts);
    if (!e.scratch->ready) return;
    const uint64_t n = e.head.n, all = starts[lossless_tiles(n)], last = f.starts + 4 * lossless_tiles(n);
    const uint32_t used = (uint32_t)(all < f.cap ? all : f.cap);
    /* what lies before the planes was zero from the start; words of the pass are zero behind the last element */
    if (f.dtype == SID_F32) clear(e.payload, f.high + sid_round_up(n, 4), f.low);
    clear(e.payload, sid_round_up(f.end, 4), e.bytes);
    if (threadIdx.x) return;
    sid_part_sum own = {0};
    *(uint32_t *)(void *)(e.payload + last) = used;
    own.add(last, used);
    sid_rule rule = {};
    rule.cut = e.scratch->cut;
    rule.flags = f.dtype == SID_F32 ? 0u : (uint32_t)SID_FLAG_HALF;
    sid_end(e, 0.0f, rule, 1, own, n - (all - used));
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

__device__ inline const uint32_t *words(const uint8_t *payload, uint64_t at) {
    return (const uint32_t *)(const void *)(payload + at);
}

struct body {
    lossless_form f;
    uint64_t n, bytes;

    /* 1 if byte `at` has to be zero in any payload. */
    __device__ bool between(uint64_t at) const {
        return (at >= SID_HEADER_BYTES + lossless_blocks(n) && at < f.starts) ||
               (at >= f.starts + 4 * (lossless_tiles(n) + 1) && at < f.pool) ||
               (f.dtype == SID_F32 && at >= f.high + n && at < f.low) || at >= f.end;
    }
    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &) const {
        uint32_t wrong = 0;
        for (uint32_t c = 0; c < 4 && w; c++) wrong |= (w >> (8 * c) & 0xffu) && between(4 * i + c);
        return wrong;
    }
    __device__ uint64_t plain_from() const { return f.planes; }
    __device__ uint64_t plain_to() const { return f.high + n / 8 * 8; }
    __device__ bool counts(uint64_t count) const { return count <= n; }
    __device__ uint32_t form() const { return 0; }
    __device__ bool gathered() const { return true; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &p, uint32_t r, uint32_t) const {
        const uint32_t *const starts = words(p[r], f.starts);
        const bool sound = !sid_f32_bits(h.scale) && !starts[0] && (h.count == n || starts[lossless_tiles(n)] == f.cap);
        return sound ? SID_OK : SID_E_CORRUPT;
    }

    /* Finds what is wrong with a tile of a payload. Lane i looks at elements 32 i to 32 i + 31. */
    __device__ uint32_t wrong_tile(const uint8_t *payload, uint64_t tile) const {
        const uint64_t offset = tile * SID_TILE;
        const uint32_t len = sid_tile_len(n, offset), stride = lossless_stride(len), planes = lossless_planes(&f);
        const uint32_t start = words(payload, f.starts)[tile], next = words(payload, f.starts)[tile + 1];
        const uint32_t i = 32 * sid_lane(), block = i / LOSSLESS_BLOCK, in = 4 * sid_lane();
        const uint32_t there = i >= len ? 0u : len - i >= 32 ? 0xffffffffu : (1u << (len - i)) - 1;
        const uint32_t top = i < len ? payload[SID_HEADER_BYTES + offset / LOSSLESS_BLOCK + block] : 0u;
        uint32_t p[PLANES] = {}, wrong = next < start || next > f.cap || top > lossless_largest(f.dtype);
        if (in < stride)
#pragma unroll
            for (uint32_t k = 0; k < PLANES; k++)
                if (k < planes) p[k] = words(payload, f.planes + offset / 8 * planes + k * stride)[sid_lane()];
#pragma unroll
        for (uint32_t k = 0; k < PLANES; k++) wrong |= (p[k] & ~there) != 0;
        uint32_t far = there;
#pragma unroll
        for (uint32_t k = 0; k < MOST_BITS; k++) far &= k < f.bits ? p[k] : there;
        for (uint32_t c = top + 1; c < lossless_far(&f); c++) { /* exponents of 0 and less */
            uint32_t these = there;
#pragma unroll
            for (uint32_t k = 0; k < MOST_BITS; k++) these &= k >= f.bits ? there : c >> k & 1 ? p[k] : ~p[k];
            wrong |= these != 0;
        }
        uint32_t rank = (uint32_t)__popc(far);
        const uint32_t mine = rank;
        for (uint32_t d = 1; d < SID_LANES; d *= 2) {
            const uint32_t other = __shfl_up_sync(SID_FULL, rank, d);
            rank += sid_lane() >= d ? other : 0;
        }
        wrong |= __shfl_sync(SID_FULL, rank, SID_LANES - 1) != next - start;
        if (__ballot_sync(SID_FULL, wrong != 0)) return 1;
        for (uint32_t at = start + rank - mine; far; far &= far - 1, at++) {
            const uint32_t e = payload[f.pool + at];
            wrong |= !e || e + lossless_far(&f) - 1 > top;
        }
        return wrong;
    }

    /* Finds what is wrong with the pool behind its last exception: one of `threads` threads. */
    __device__ uint32_t wrong_rest(const uint8_t *payload, uint64_t thread, uint64_t threads) const {
        const uint32_t used = words(payload, f.starts)[lossless_tiles(n)];
        const uint64_t from = f.pool + (used < f.cap ? used : f.cap);
        uint32_t wrong = 0;
        for (uint64_t at = from / 4 * 4 + 4 * thread; at < f.planes; at += 4 * threads) {
            const uint32_t w = *words(payload, at);
            wrong |= at < from ? w >> 8 * (from - at) : w;
        }
        return wrong;
    }

    /* Each lane reads a word of 32 elements of every plane, all that a tile has, and row r takes its bits from lanes 4 r to
     * 4 r + 3. */
    __device__ void sum(const sid_payloads &p, sid_quads &x, uint64_t offset, uint32_t len) const {
        const uint32_t planes = lossless_planes(&f), stride = lossless_stride(len), shift = SID_QUAD * (sid_lane() % 8);
        const bool four = f.bits == MOST_BITS, half = f.dtype == SID_F16;
#pragma unroll 1
        for (uint32_t i = 0; i < p.count; i++) {
            if (!len) break;
            const uint8_t *const payload = p[i];
            sid_fetch_next(p, i, f.planes + offset / 8 * planes, planes * stride);
            sid_fetch_next(p, i, f.high + offset, len);
            if (f.dtype == SID_F32) { /* up to two KiB */
                sid_fetch_next(p, i, f.low + 2 * offset, 2 * len);
                sid_fetch_next(p, i, f.low + 2 * offset + SID_TILE, len > SID_TILE / 2 ? 2 * len - SID_TILE : 0);
            }
            const uint2 tops = *(const uint2 *)(const void *)(payload + SID_HEADER_BYTES + offset / LOSSLESS_BLOCK);
            const uint8_t *const high = payload + f.high + offset + sid_place(0);
            const uint8_t *const low = payload + f.low + 2 * (offset + sid_place(0));
            uint32_t code[MOST_BITS] = {}, mantissa[HALF_PLANES] = {};
            if (4 * sid_lane() < stride) {
                const uint8_t *plane = payload + f.planes + offset / 8 * planes + 4 * sid_lane();
#pragma unroll
                for (uint32_t k = 0; k < MOST_BITS; k++)
                    if (k < MOST_BITS - 1 || four) code[k] = *(const uint32_t *)(const void *)(plane + k * stride);
                plane += f.bits * stride;
                if (half)
#pragma unroll
                    for (uint32_t k = 0; k < HALF_PLANES; k++)
                        mantissa[k] = *(const uint32_t *)(const void *)(plane + k * stride);
            }
            const uint32_t far = code[0] & code[1] & code[2] & (four ? code[3] : SID_FULL);
            const uint32_t held = (uint32_t)__popc(far);
            const uint32_t before = words(payload, f.starts)[offset / SID_TILE] + sid_warp_scan(held) - held;
#pragma unroll
            for (uint32_t r = 0; r < SID_ROWS; r++) {
                const uint32_t from = r * (SID_ROW / 32) + sid_lane() / 8;
                const uint32_t beyond = __shfl_sync(SID_FULL, far, from);
                uint32_t rank = __shfl_sync(SID_FULL, before, from) + (uint32_t)__popc(beyond & ((1u << shift) - 1));
                uint32_t own[MOST_BITS], more[HALF_PLANES] = {};
#pragma unroll
                for (uint32_t k = 0; k < MOST_BITS; k++) own[k] = __shfl_sync(SID_FULL, code[k], from) >> shift;
                if (half)
#pragma unroll
                    for (uint32_t k = 0; k < HALF_PLANES; k++)
                        more[k] = __shfl_sync(SID_FULL, mantissa[k], from) >> shift;
                if (sid_place(r) < len) {
                    const uint32_t top = (r < 4 ? tops.x : tops.y) >> 8 * (r % 4) & 0xffu;
                    const uint32_t h4 = *(const uint32_t *)(const void *)(high + r * SID_ROW);
                    uint2 l4 = make_uint2(0, 0);
                    if (f.dtype == SID_F32) l4 = *(const uint2 *)(const void *)(low + 2 * r * SID_ROW);
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) {
                        uint32_t below = 0;
#pragma unroll
                        for (uint32_t k = 0; k < MOST_BITS; k++) below |= (own[k] >> c & 1u) << k;
                        const uint32_t h = h4 >> (8 * c), l = c < 2 ? l4.x : l4.y;
                        uint32_t e = below ? top + 1 - below : 0;
                        if (beyond >> shift >> c & 1) e = payload[f.pool + rank++];
                        const uint32_t u = (h & 0x80u) << 24 | e << 23 | (h & 0x7fu) << 16;
                        float y;
                        if (half) {
                            uint32_t m = 0;
#pragma unroll
                            for (uint32_t k = 0; k < HALF_PLANES; k++) m |= (more[k] >> c & 1u) << k;
                            y = sid_from_f16((uint16_t)((u >> 16 & 0x8000u) | (u >> 13 & 0x7fffu) | m));
                        } else
                            y = sid_bits_f32(u | (l >> (c % 2 * 16) & 0xffffu));
                        x[r][c] = i ? x[r][c] + y : y; /* not 0 + y, which would lose the sign of -0 */
                    }
                }
            }
        }
#pragma unroll
        for (uint32_t r = 0; r < SID_ROWS; r++)
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) x[r][c] *= p.scale;
    }
};

/* The tiles of all payloads, a warp each; then what is unused of their pools, a word for a thread. */
__global__ void __launch_bounds__(SID_BLOCK) sid_lossless_look_kernel(sid_findings found, sid_payloads p, body b) {
    sid_follow();
    const uint64_t tiles = lossless_tiles(p.n);
#pragma unroll 1
    for (uint64_t i = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); i < tiles * p.count;
         i += (uint64_t)gridDim.x * SID_WARPS) {
        const uint32_t r = (uint32_t)(i / tiles);
        if (b.wrong_tile(p[r], i % tiles)) atomicOr(&found.bad[r], 1u);
    }
    const uint64_t thread = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x;
#pragma unroll 1
    for (uint32_t r = 0; r < p.count; r++)
        if (b.wrong_rest(p[r], thread, (uint64_t)gridDim.x * SID_BLOCK)) atomicOr(&found.bad[r], 1u);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

uint64_t *carve(const sid_plan *p, sid_carver *c) { return c->take<uint64_t>(lossless_tiles(p->n) + 1); }

uint64_t work(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c);
    return c.at > sid_findings_work() ? c.at : sid_findings_work();
}

uint64_t several(const sid_plan *p) {
    sid_carver c = {nullptr, 0};
    carve(p, &c);
    return c.at;
}

sid_status encode(sid_cuda_encoding &c) {
    const lossless_form f = lossless_form_of(c.plan);
    const sid_ending e = sid_ending_of(c);
    uint64_t *const starts = carve(c.plan, &c.work);
    const uint64_t zero = c.settles ? 0 : sid_round_up(f.planes, 16); /* mostly what no exception fills of the pool */
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, zero);
    if (!s) s = sid_pass_tiles(c, coder<false, false>{f, c.payload, c.plan->n, starts});
    if (s || c.settles) return s;
    s = sid_launch(c.to, "starts", sid_lossless_starts_kernel, sid_blocks_to_end(c), STARTS_BLOCK, 0, c.scratch, starts,
                   c.plan->n, c.several);
    if (!s)
        s = c.several.count ? sid_pass_again(c, coder<true, true>{f, c.payload, c.plan->n, starts})
                            : sid_pass_again(c, coder<true, false>{f, c.payload, c.plan->n, starts});
    if (!s)
        s = sid_launch(c.to, "seal", sid_lossless_seal_kernel, sid_blocks_to_end(c), SEAL_BLOCK, 0, e, f,
                       (const uint64_t *)starts);
    return s;
}

sid_status decode(sid_cuda_decoding &c) {
    const body b = {lossless_form_of(c.plan), c.plan->n, c.plan->sizes.payload};
    sid_carver same = c.work;
    uint64_t clear;
    const sid_findings found = sid_carve_findings(&same, &clear);
    const sid_payloads p = sid_payloads_of(c);
    return sid_dense_decode(c, b, [&] {
        if (!p.n) return SID_OK;
        return sid_launch(c.to, "exceptions", sid_lossless_look_kernel,
                          sid_blocks(c.to, sid_chunks(p.n) * p.count, SID_DENSE_BLOCKS), SID_BLOCK, 0, found, p, b);
    });
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_lossless;
const sid_cuda_codec sid_cuda_codec_lossless = {work, encode, decode, nullptr, several};
}
