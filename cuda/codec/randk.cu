/* randk, randk-own (csrc/codec/randk.c defines the result). k elements are drawn, the same number of each 4096 but for
 * rounding, and only their values travel, because a reader draws the same ones again. A block of threads takes 4096
 * elements at a time: it makes acc in registers, writes it to memory and to shared memory, draws, and writes the drawn
 * values. A decode draws for each payload, adds in shared memory in rank order, and writes the group once. Bandwidth is
 * the limit at low densities. Bytes per float32 element with a residual, density d, 4-byte values, W payloads:
 *     encode   12 + 4 d        reads gradient and acc, writes acc and values
 *     decode    4 + 4 W d      and 4 W d before it where payloads are gathered, to check them, or where a memory makes an
 *                              all-reduced one be looked at first */
#include "dense.cuh"
#include "linear.cuh"

namespace {

enum {
    PART = SID_DECODE_TILE,            /* elements that a block takes at a time: 4096 */
    ROWS = PART / SID_ROW / SID_WARPS, /* rows of 128 of them that a warp has, so quads that a thread has: 4 */
    PART_BLOCKS = 3,                   /* on a multiprocessor: 37 KB of shared memory each */
    VALUES = 1,                        /* places of parameters */
    SCALING
};
/* The block of the random stream that says how the remainder of k is spread; elements draw from block 0 on. */
#define OFFSET_AT (1ull << 62)

/* ---- which elements ---------------------------------------------------------------------------------------------- */

/* Floyd's algorithm draws `rounds` of `len` elements without repeats, with base = len - rounds: round i draws t from 0
 * to base + i, and takes it, unless an earlier round has taken t; then it falls back to base + i, which is new. Here
 * all rounds run side by side. An earlier round has taken t if it drew t, so drew[t] notes the first round that did; or
 * if it is round j = t - base and fell back to t. Whether j fell back is the same question again: a chain of ever
 * earlier rounds, two or three long at most as a rule, since each link has a probability of at most a half. */

/* A block's draw, in shared memory. `drew` and `taken` are left as `start` makes them, so that the next draw can
 * begin. */
struct choice {
    uint32_t drew[PART];       /* of each element: the first round that drew it; SID_FULL: none */
    uint16_t t[PART / 2];      /* what each round drew; there are at most half as many rounds as elements */
    uint32_t taken[PART / 32]; /* a bit for each element: it was drawn */
    uint32_t part[SID_LANES + 1];
};
__device__ inline void start(choice &s) {
    for (uint32_t i = threadIdx.x; i < PART; i += SID_BLOCK) s.drew[i] = SID_FULL;
    for (uint32_t i = threadIdx.x; i < PART / 32; i += SID_BLOCK) s.taken[i] = 0;
    __syncthreads();
}

/* Whether round i falls back to base + i, because an earlier round has taken what it drew. */
__device__ inline bool falls_back(const choice &s, uint32_t i, uint32_t base) {
    for (;;) {
        const uint32_t t = s.t[i];
        if (s.drew[t] < i) return true;
        if (t < base || t - base >= i) return false;
        i = t - base;
    }
}

/* Calls f(entry of the body, index in the part) for each element drawn of those from `offset` to offset + len - 1. n:
 * elements of the group, k of which are drawn; k * n is below 2^64. If more than half are drawn, the others are
 * (`rest`), and what remains is sent in index order. The whole block calls it. */
template <typename F>
__device__ inline void choose(choice &s, uint64_t n, uint64_t k, const sid_draw &d, uint64_t offset, uint32_t len,
                              const F &f) {
    uint32_t word[4];
    sid_draw_block(&d, OFFSET_AT, word);
    const uint64_t r = __umul64hi(word[0] | (uint64_t)word[1] << 32, n), first = (k * offset + r) / n;
    const uint32_t count = (uint32_t)((k * (offset + len) + r) / n - first);
    const bool rest = 2 * count > len;
    const uint32_t rounds = rest ? len - count : count, base = len - rounds;
    for (uint32_t q = threadIdx.x; 4 * q < rounds; q += SID_BLOCK) {
        sid_draw_block(&d, offset / 4 + q, word);
#pragma unroll
        for (uint32_t c = 0; c < 4; c++) {
            const uint32_t i = 4 * q + c, t = (uint32_t)((uint64_t)word[c] * (base + i + 1) >> 32);
            if (i >= rounds) continue;
            s.t[i] = (uint16_t)t;
            atomicMin(&s.drew[t], i);
        }
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rounds; i += SID_BLOCK) {
        const uint32_t one = falls_back(s, i, base) ? base + i : s.t[i];
        if (rest)
            atomicOr(&s.taken[one / 32], 1u << one % 32);
        else
            f(first + i, one);
    }
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < rounds; i += SID_BLOCK) s.drew[s.t[i]] = SID_FULL;
    if (rest) { /* what has not been taken, in its order */
        const uint32_t w = threadIdx.x, there = 32 * w >= len       ? 0
                                                : len - 32 * w < 32 ? (1u << (len - 32 * w)) - 1
                                                                    : SID_FULL;
        uint32_t left = w < PART / 32 ? ~s.taken[w] & there : 0, total;
        uint64_t entry = first + sid_block_scan((uint32_t)__popc(left), s.part, &total) - __popc(left);
        for (; left; left &= left - 1) f(entry++, 32 * w + (uint32_t)__ffs((int)left) - 1);
        if (w < PART / 32) s.taken[w] = 0;
    }
    __syncthreads();
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

struct values {
    bool half;   /* float16, else float32 */
    float times; /* n/k, which makes the draw unbiased, or 1 */

    /* Returns what a body carries for x, before it is rounded to float16: x * s * times, clamped so that a sum over the
     * ranks does not overflow. s: 1 / world, or 1; ranks: 1 / s. */
    __device__ float scaled(float x, float s, float ranks) const {
        const bool one_rank = s == 1.0f;
        const float most = half                        ? linear_limit(SID_F16, ranks, 0) / times
                           : one_rank && times == 1.0f ? 3.402823466e38f
                                                       : sid_bits_f32(0x7f7c0000u) / times;
        return (x > most ? most : x < -most ? -most : x) * (s * times);
    }
    /* Returns what the last step sent of x. */
    __device__ float sent(float x, const sid_rule &rule) const {
        const float y = scaled(x, rule.scale, rule.inverse);
        return (half ? sid_from_f16(sid_to_f16(y)) : y) * rule.inverse;
    }
    __device__ uint32_t width() const { return half ? 2 : 4; }
    __device__ float load(const uint8_t *payload, uint64_t entry) const {
        return sid_load1(payload + SID_HEADER_BYTES + width() * entry, half ? SID_F16 : SID_F32);
    }
};

/* ---- encode ------------------------------------------------------------------------------------------------------ */

struct coder {
    values v;
    sid_draw draw;
    uint64_t k;
    float scale; /* 1 / world, or 1 */
    bool linear;
    uint8_t *payload;
};

/* Blocks of a multiprocessor that share its registers: all, or where shared memory holds fewer, those. */
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
#define PART_RESIDENT 2
#else
#define PART_RESIDENT PART_BLOCKS
#endif

/* The pass. With a residual it draws twice: the last step's elements, to subtract what was sent, then this step's.
 * SLICES: for each of several.count slices. */
template <class Memory, bool SLICES>
__global__ void __launch_bounds__(SID_BLOCK, PART_RESIDENT)
    sid_randk_kernel(sid_group g, sid_scratch *scratch, const sid_state *state, sid_vectors vectors, Memory memory,
                     coder o, sid_several several) {
    sid_follow();
    __shared__ choice s;
    __shared__ float4 held[PART / SID_QUAD];
    __shared__ sid_part_sum part[SID_WARPS];
    float *const x = (float *)held;
    sid_portion share = {0, blockIdx.x, gridDim.x};
    if constexpr (SLICES) {
        share = sid_portion_of(several);
        g.before += share.slice * g.n;
        scratch = sid_work_of(several, share.slice, scratch);
        state = sid_state_of(several, share.slice, state);
        vectors.first = sid_state_of(several, share.slice, vectors.first);
        o.payload = sid_payload_of(several, share.slice, o.payload);
        sid_move(o.draw, several, share.slice);
    }
    if (!scratch->ready) return;
    if (Memory::VECTORS) memory.begin(state);
    const sid_rule rule = state->rule;
    const uint64_t parts = (g.n + PART - 1) / PART;
    const uint32_t row = sid_warp() % 2 * ROWS, mine = (sid_warp() / 2 * SID_ROWS + row) * SID_LANES + sid_lane();
    sid_part_sum words = {0};
    uint32_t bad = 0;
    start(s);
#pragma unroll 1
    for (uint64_t p = share.block; p < parts; p += share.blocks) {
        const uint64_t offset = p * PART, tile = offset / SID_TILE + sid_warp() / 2;
        const uint32_t len = g.n - offset < PART ? (uint32_t)(g.n - offset) : (uint32_t)PART;
        const uint32_t here = tile * SID_TILE < g.n ? sid_tile_len(g.n, tile * SID_TILE) : 0;
        float *const first = vectors.first + tile * SID_TILE;
        const float *const origin = first + vectors.origin;
        float y[ROWS][SID_QUAD] = {}, acc[ROWS][SID_QUAD] = {}, kept[ROWS][SID_QUAD];
        if (Memory::VECTORS)
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++) sid_get_row(origin, row + r, here, acc[r]);
        constexpr bool late = Memory::VECTORS > 1; /* then registers are few, and the gradient waits in the L2 */
        const auto gradient = [&] {
            if (!here) return;
            const sid_span span = sid_span_of(g, tile);
            if (span.base)
                sid_load_quads(span.base + sid_place(row) * sid_width(g.dtype), g.dtype, y);
            else
#pragma unroll
                for (uint32_t r = 0; r < ROWS; r++) {
                    float one[1][SID_QUAD];
                    sid_get<false>(g, span, sid_place(row + r), sid_count4(here, sid_place(row + r)), one);
#pragma unroll
                    for (uint32_t c = 0; c < SID_QUAD; c++) y[r][c] = one[0][c];
                }
        };
        if (!late)
            gradient();
        else if (here)
            sid_fetch_rows<ROWS>(g, sid_span_of(g, tile), row);
        const bool keeps = Memory::VECTORS && memory.keeps && rule.scale != 0;
        if (keeps) {
#pragma unroll
            for (uint32_t r = 0; r < ROWS; r++)
                held[mine + r * SID_LANES] = make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
            __syncthreads();
            /* The last draw is read from the state here, because registers are few. */
            choose(s, g.n, o.k, state->draw, offset, len, [&](uint64_t, uint32_t e) { x[e] -= o.v.sent(x[e], rule); });
        }
        if (late) gradient();
#pragma unroll
        for (uint32_t r = 0; r < ROWS; r++) {
            const float4 v =
                keeps ? held[mine + r * SID_LANES] : make_float4(acc[r][0], acc[r][1], acc[r][2], acc[r][3]);
            kept[r][0] = v.x, kept[r][1] = v.y, kept[r][2] = v.z, kept[r][3] = v.w;
            float more[Memory::VECTORS + 1][SID_QUAD] = {};
            for (int m = 1; m < Memory::VECTORS; m++) sid_get_row(origin + m * vectors.stride, row + r, here, more[m]);
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                float one[Memory::VECTORS + 1] = {acc[r][c]};
                for (int m = 1; m < Memory::VECTORS; m++) one[m] = more[m][c];
                const bool finite = sid_key(y[r][c]) < SID_KEY_INF;
                bad += !finite;
                y[r][c] = memory.tile(one, kept[r][c], finite ? y[r][c] : 0.0f);
                for (int m = 1; m < Memory::VECTORS; m++) more[m][c] = one[m];
            }
            const uint32_t i = sid_place(row + r), count = sid_count4(here, i);
            if (Memory::VECTORS) sid_store_floats(first + i, count, y[r]);
            for (int m = 1; m < Memory::VECTORS; m++) sid_store_floats(first + m * vectors.stride + i, count, more[m]);
            held[mine + r * SID_LANES] = make_float4(y[r][0], y[r][1], y[r][2], y[r][3]);
        }
        __syncthreads();
        const float ranks = rintf(1.0f / o.scale);
        choose(s, g.n, o.k, o.draw, offset, len, [&](uint64_t entry, uint32_t e) {
            const float v = o.v.scaled(x[e], o.scale, ranks);
            const uint64_t place = SID_HEADER_BYTES + o.v.width() * entry;
            if (o.v.half) {
                const uint16_t h = sid_to_f16(v);
                *(uint16_t *)(void *)(o.payload + place) = h;
                words.add(place, sid_half_word(place, h));
            } else {
                *(float *)(void *)(o.payload + place) = v;
                words.add(place, sid_f32_bits(v));
            }
        });
    }
    if (!o.linear) sid_add_words(*scratch, words, part);
    bad = sid_warp_sum(bad);
    if (bad && sid_lane() == 0) atomicAdd(&scratch->nonfinite, bad);
}

/* If any element is not finite, drawn or not, the body becomes NaN throughout, so that the sum of the bodies shows
 * it. */
__global__ void __launch_bounds__(SID_BLOCK) sid_randk_nonfinite_kernel(const sid_scratch *scratch, coder o) {
    sid_follow();
    if (!scratch->ready || !scratch->nonfinite) return;
    for (uint64_t i = blockIdx.x * (uint64_t)SID_BLOCK + threadIdx.x; i < o.k; i += (uint64_t)gridDim.x * SID_BLOCK)
        sid_store1(o.payload + SID_HEADER_BYTES + o.v.width() * i, o.v.half ? SID_F16 : SID_F32,
                   sid_bits_f32(0x7fc00000u));
}

enum {
    SEAL_BLOCK = 64
};
__global__ void __launch_bounds__(SEAL_BLOCK) sid_randk_seal_kernel(sid_ending e, coder o, float inverse) {
    sid_follow();
    e.move();
    if (!e.scratch->ready) return;
    for (uint64_t i = SID_HEADER_BYTES + o.v.width() * o.k + threadIdx.x; i < e.bytes; i += SEAL_BLOCK)
        e.payload[i] = 0;
    if (threadIdx.x) return;
    const uint32_t bad = e.scratch->nonfinite;
    sid_seal((sid_header *)e.payload, e.head,
             (o.v.half ? (uint32_t)SID_FLAG_HALF : 0u) | (bad ? (uint32_t)SID_FLAG_NONFINITE : 0u), o.k,
             o.linear ? o.scale : o.v.times, e.scratch->sum);
    sid_rule rule = {};
    rule.scale = o.scale;
    rule.inverse = inverse;
    e.state->rule = rule;
    e.state->draw = e.draw;
    e.state->steps++;
    if (e.stats) *e.stats = {o.k, o.k, bad, 0, 0, 1};
}

values values_of(const sid_plan *p) {
    const bool keeps = p->memory->info.traits & SID_FEEDBACK || p->memory->received;
    const bool times = p->codec_param[SCALING] == 0 && !keeps && p->k;
    return {p->codec_param[VALUES] == SID_VALUES_F16, times ? (float)((double)p->n / (double)p->k) : 1.0f};
}
bool is_linear(const sid_plan *p) { return p->codec->info.traits & SID_LINEAR; }
/* The bytes of any payload that its reader checks. */
uint64_t seen(const sid_plan *p) { return is_linear(p) ? (uint64_t)SID_HEADER_BYTES : p->sizes.payload; }

sid_status encode(sid_cuda_encoding &c) {
    const sid_plan *p = c.plan;
    const bool linear = is_linear(p);
    sid_ending e = sid_ending_of(c);
    if (linear) e.draw.salt = e.head.salt = sid_salt(c.step.seed, SID_COMMON);
    const float world = linear ? (float)c.step.world : 1.0f;
    const coder o = {values_of(p), e.draw, p->k, 1.0f / world, linear, c.payload};
    const uint64_t grid = sid_blocks(c.to, c.several, (p->n + PART - 1) / PART, PART_BLOCKS);
    sid_status s = sid_begin_encode(c, sizeof *c.scratch, SID_HEADER_BYTES);
    if (!s)
        s = sid_with_memory_of(c, [&](auto memory) {
            const auto pass = [&](auto kernel) {
                return sid_launch(c.to, "pass", kernel, grid, SID_BLOCK, 0, c.group, c.scratch, c.state,
                                  sid_vectors_of(c), memory, o, c.several);
            };
            if constexpr ((uint32_t)decltype(memory)::VECTORS <= (uint32_t)SID_SEVERAL_VECTORS)
                if (c.several.count) return pass(sid_randk_kernel<decltype(memory), true>);
            return pass(sid_randk_kernel<decltype(memory), false>);
        });
    if (s || c.settles) return s;
    if (linear) s = sid_launch(c.to, "nonfinite", sid_randk_nonfinite_kernel, grid, SID_BLOCK, 0, c.scratch, o);
    if (!s) s = sid_launch(c.to, "seal", sid_randk_seal_kernel, sid_blocks_to_end(c), SEAL_BLOCK, 0, e, o, world);
    return s || !linear ? s : sid_linear_cover(c);
}

/* ---- decode ------------------------------------------------------------------------------------------------------ */

struct body {
    values v;
    uint64_t k;
    bool linear;

    __device__ uint32_t word(uint64_t i, uint32_t w, uint32_t &) const { /* nothing after the last value */
        const uint64_t used = SID_HEADER_BYTES + v.width() * k;
        return 4 * i + 4 <= used ? 0 : 4 * i >= used ? w != 0 : w >> 16 != 0;
    }
    __device__ uint64_t plain_from() const { return SID_HEADER_BYTES; }
    __device__ uint64_t plain_to() const { return SID_HEADER_BYTES + v.width() * k / 8 * 8; }
    __device__ bool counts(uint64_t count) const { return count == k; }
    __device__ bool gathered() const { return !linear; }
    __device__ uint32_t form() const { return v.half ? (uint32_t)SID_FLAG_HALF : 0u; }
    __device__ int32_t header(const sid_header &h, const sid_payloads &p, uint32_t, uint32_t) const {
        if (linear) return sid_check_linear(h, p.head(0));
        return h.scale == v.times ? SID_OK : SID_E_CORRUPT;
    }
};

/* Adds what the payloads have for the elements from `offset` to offset + len - 1 to `out` in shared memory, which is
 * zero. The whole block calls it. */
__device__ inline void add(choice &s, const sid_payloads &p, const body &b, uint64_t offset, uint32_t len, float *out) {
    for (uint32_t r = 0; r < p.count; r++) {
        const sid_header &h = p.head(r);
        const sid_draw d = {h.salt, h.group, h.step};
        if (b.linear && sid_key(b.v.load(p[r], 0)) > SID_KEY_INF) { /* some rank's gradient was not finite */
            for (uint32_t i = threadIdx.x; i < len; i += SID_BLOCK) out[i] = sid_bits_f32(0x7fc00000u);
            __syncthreads();
        }
        choose(s, p.n, b.k, d, offset, len, [&](uint64_t entry, uint32_t e) {
            const float v = b.v.load(p[r], entry);
            out[e] = r == 0 && b.linear ? v : out[e] + v; /* not 0 + v, which would lose the sign of -0 */
        });
    }
}

/* Says whether all sums are finite, before anything is written, for a memory that would have to be corrected. */
__global__ void __launch_bounds__(SID_BLOCK, PART_BLOCKS)
    sid_randk_look_kernel(sid_scratch *scratch, sid_payloads p, body b) {
    sid_follow();
    __shared__ choice s;
    __shared__ float out[PART];
    const uint64_t parts = (p.n + PART - 1) / PART;
    bool bad = false;
    start(s);
    for (uint64_t offset = blockIdx.x * (uint64_t)PART; offset < parts * PART; offset += gridDim.x * (uint64_t)PART) {
        const uint32_t len = p.n - offset < PART ? (uint32_t)(p.n - offset) : (uint32_t)PART;
        for (uint32_t i = threadIdx.x; i < len; i += SID_BLOCK) out[i] = 0;
        __syncthreads();
        add(s, p, b, offset, len, out);
        for (uint32_t i = threadIdx.x; i < len; i += SID_BLOCK) bad |= sid_key(out[i]) >= SID_KEY_INF;
    }
    if (bad) scratch->nonfinite = 1; /* every writer writes the same */
}

/* Writes the quads of this block that the decode has left out because their sums overflow float32: averages them in
 * float64, payload by payload. This is rare, so it adds up all payloads again for each row, which takes no more
 * registers than the decode has. */
__device__ inline void sid_randk_means(choice &s, float4 (&held)[PART / SID_QUAD], const sid_group &g,
                                       const sid_vectors &vectors, const sid_payloads &p, const sid_kept &memory,
                                       const body &b) {
    const uint32_t from = sid_warp() % 2 * ROWS * SID_ROW + sid_lane() * SID_QUAD; /* of this thread in its tile */
    float4 *const mine = held + (sid_warp() / 2 * SID_TILE + from) / SID_QUAD;
    for (uint32_t r = 0; r < ROWS; r++) mine[r * SID_LANES] = make_float4(0, 0, 0, 0);
    __syncthreads();
#pragma unroll 1
    for (uint64_t offset = blockIdx.x * (uint64_t)PART; offset < g.n; offset += gridDim.x * (uint64_t)PART) {
        const uint64_t tile = offset / SID_TILE + sid_warp() / 2;
        const uint32_t len = g.n - offset < PART ? (uint32_t)(g.n - offset) : (uint32_t)PART;
        sid_span span = {};
        if (tile * SID_TILE < g.n) span = sid_span_of(g, tile);
#pragma unroll 1
        for (uint32_t row = 0; row < ROWS; row++) {
            float x[SID_QUAD] = {};
            double sum[SID_QUAD] = {};
            bool over = false;
#pragma unroll 1
            for (uint32_t i = 0; i <= p.count; i++) { /* all payloads together, then each */
                sid_payloads of = p;
                if (i) {
                    of.first = p[i - 1];
                    of.count = 1;
                }
                add(s, of, b, offset, len, (float *)held);
                __syncthreads();
                const float4 v = mine[row * SID_LANES];
                for (uint32_t r = 0; r < ROWS; r++) mine[r * SID_LANES] = make_float4(0, 0, 0, 0);
                __syncthreads();
                if (i) {
                    sum[0] += (double)v.x, sum[1] += (double)v.y, sum[2] += (double)v.z, sum[3] += (double)v.w;
                    continue;
                }
                x[0] = v.x * p.scale, x[1] = v.y * p.scale, x[2] = v.z * p.scale, x[3] = v.w * p.scale;
                over = sid_overflows(x);
                if (!__syncthreads_or(over)) break;
            }
            const uint32_t at = from + row * SID_ROW, count = sid_count4(span.len, at);
            if (!count || !over) continue;
#pragma unroll
            for (uint32_t c = 0; c < SID_QUAD; c++)
                x[c] = sid_key(x[c]) < SID_KEY_INF ? x[c] : sid_mean(sum[c], p.scale);
            if (memory.receives) sid_receive(memory, vectors, span.at + at, count, x);
            sid_put<false>(g, span, at, count, x);
        }
    }
}

__global__ void __launch_bounds__(SID_BLOCK, PART_BLOCKS)
    sid_randk_decode_kernel(sid_group g, const sid_scratch *scratch, const sid_state *state, sid_vectors vectors,
                            sid_payloads p, sid_kept memory, body b, sid_cuda_report *report) {
    sid_follow();
    __shared__ choice s;
    __shared__ bool over; /* a quad is left whose sum overflows */
    __shared__ float4 held[PART / SID_QUAD];
    float *const out = (float *)held;
    if (!scratch->go) return;
    memory.begin(state);
    const bool undo = memory.vectors && scratch->nonfinite, fill = scratch->nonfinite && !b.linear;
    const float scale = b.linear ? sid_linear_factor(p.head(0), p.scale) : p.scale;
    const uint64_t parts = (g.n + PART - 1) / PART;
    bool bad = false;
    start(s);
    if (threadIdx.x == 0) over = false;
#pragma unroll 1
    for (uint64_t part = blockIdx.x; part < parts; part += gridDim.x) {
        const uint64_t offset = part * PART, tile = offset / SID_TILE + sid_warp() / 2;
        const uint32_t len = g.n - offset < PART ? (uint32_t)(g.n - offset) : (uint32_t)PART;
        for (uint32_t i = threadIdx.x; i < PART; i += SID_BLOCK) out[i] = fill ? sid_bits_f32(0x7fc00000u) : 0.0f;
        __syncthreads();
        if (!fill) add(s, p, b, offset, len, out);
        if (tile * SID_TILE < g.n) {
            const sid_span span = sid_span_of(g, tile);
#pragma unroll 1
            for (uint32_t r = 0; r < ROWS; r++) {
                const uint32_t i = sid_place(sid_warp() % 2 * ROWS + r), count = sid_count4(span.len, i);
                const float4 v = held[(sid_warp() / 2 * SID_TILE + i) / SID_QUAD];
                float y[SID_QUAD] = {v.x, v.y, v.z, v.w};
#pragma unroll
                for (uint32_t c = 0; c < SID_QUAD; c++) {
                    bad |= sid_key(y[c]) >= SID_KEY_INF;
                    y[c] *= scale;
                }
                if (!fill && p.means && sid_overflows(y)) {
                    over = true; /* every writer writes the same */
                    continue;
                }
                if (undo)
                    sid_undo(memory, g, span, vectors, i, count);
                else if (memory.receives)
                    sid_receive(memory, vectors, span.at + i, count, y);
                if (span.base)
                    sid_put<true>(g, span, i, count, y);
                else
                    sid_put<false>(g, span, i, count, y);
            }
        }
        __syncthreads(); /* before the next part takes the place of this one */
    }
    if (b.linear && bad) report->nonfinite = 1; /* every writer writes the same */
    if (p.means && over) sid_randk_means(s, held, g, vectors, p, memory, b);
}

uint64_t work(const sid_plan *) { return sid_findings_work(); }
uint64_t several(const sid_plan *) { return 0; } /* beyond scratch */

sid_status decode(sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    const body b = {values_of(p), p->k, is_linear(p)};
    const uint64_t grid = sid_blocks(c.to, (p->n + PART - 1) / PART, PART_BLOCKS);
    sid_payloads all = sid_payloads_of(c);
    all.bytes = seen(p);
    sid_carver work = c.work;
    uint64_t clear;
    unsigned long long *const sums = sid_carve_findings(&work, &clear).sum;
    sid_status s = sid_dense_check(c, all, b, [&] {
        sid_status bad = b.linear ? sid_linear_covered(c, sums) : SID_OK;
        if (bad || !b.linear || !c.state) return bad;
        return sid_launch(c.to, "look", sid_randk_look_kernel, grid, SID_BLOCK, 0, c.scratch, all, b);
    });
    if (s || c.part == SID_CHECK) return s;
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    sid_kept memory;
    s = sid_kept_of(c, &memory);
    return s ? s
             : sid_launch(c.to, "decode", sid_randk_decode_kernel, grid, SID_BLOCK, 0, c.group, c.scratch, c.state,
                          vectors, all, memory, b, c.report);
}

} // namespace

extern "C" {
extern const sid_cuda_codec sid_cuda_codec_randk, sid_cuda_codec_randk_own;
const sid_cuda_codec sid_cuda_codec_randk = {work, encode, decode};
const sid_cuda_codec sid_cuda_codec_randk_own = {work, encode, decode, nullptr, several};
}
