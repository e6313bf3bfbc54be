/* Work and decode of the sparse codecs (csrc/codec/sparse.c is the law). */
#include "sparse.cuh"

enum {
    SLOTS = 4,        /* times what a tile holds where all are alike, */
    LEAST_SLOTS = 64, /* at least so many, */
    UPTO = 4          /* and no more where a quarter of the group or more are candidates: acc is as good to read */
};

sid_body sid_body_of(const sid_plan *p, bool mean) {
    const bool half = p->codec_param[SID_SPARSE_VALUES] == 1;
    const uint32_t form = mean ? (uint32_t)SID_FLAG_MEAN : half ? (uint32_t)SID_FLAG_HALF : 0u;
    return {sid_sparse_index_at(p->n), sid_sparse_value_at(p->n, p->cap), p->sizes.payload / 32, form};
}

static uint32_t slots_of(const sid_plan *p) {
    if (p->n < 1 << 21 && p->room == p->n) return SID_TILE;
    if (p->room > p->n / UPTO) return LEAST_SLOTS;
    const uint64_t want = sid_round_up(SLOTS * SID_TILE * p->room / p->n, LEAST_SLOTS);
    return want < LEAST_SLOTS ? (uint32_t)LEAST_SLOTS : want < SID_TILE ? (uint32_t)want : (uint32_t)SID_TILE;
}

/* *clear: bytes from scratch on that are to be zeroed. */
sid_list sid_carve_list(const sid_plan *p, sid_carver *c, uint64_t *clear, const sid_sparse_needs &needs) {
    const uint64_t start = c->at - sizeof(sid_scratch), tiles = sid_chunks(p->n) * SID_WARPS;
    sid_list l = {};
    l.bins = c->take<uint32_t>(3 * SID_BINS);
    *clear = c->at - start;
    l.slots = slots_of(p);
    l.n = p->n;
    l.stride = tiles;
    l.acc = c->take<float>(p->memory->vectors ? 0 : sid_round_up(p->n, SID_QUAD));
    l.held = c->take<uint32_t>(tiles);
    l.pairs = c->take<unsigned long long>(tiles);
    l.slot_value = c->take<float>(tiles * l.slots);
    l.slot_index = c->take<uint16_t>(tiles * l.slots);
    l.value = c->take<float>(p->room);
    l.index = c->take<uint32_t>(p->room);
    l.extra = c->take<float>(needs.extra);
    l.sums = c->take<double>(needs.sums * tiles);
    l.counts = c->take<uint32_t>(needs.counts * tiles);
    l.running = c->take<double>(2 * SID_AT_ONCE * SID_SUMS);
    l.part = c->take<unsigned long long>(2 * SID_FINISH_MOST);
    return l;
}

namespace {

struct checking {
    unsigned long long *sum, *weighted; /* a payload each, zeroed */
    uint32_t *bad;
};

checking carve_checking(sid_carver *c, uint64_t *clear) {
    const uint64_t start = c->at - sizeof(sid_scratch);
    checking k;
    k.sum = c->take<unsigned long long>(SID_MAX_COUNT);
    k.weighted = c->take<unsigned long long>(SID_MAX_COUNT);
    k.bad = c->take<uint32_t>(SID_MAX_COUNT);
    *clear = c->at - start;
    return k;
}

} // namespace

uint64_t sid_sparse_work(const sid_plan *p, const sid_sparse_needs &needs) {
    uint64_t clear;
    sid_carver a = {nullptr, sizeof(sid_scratch)}, b = a;
    sid_carve_list(p, &a, &clear, needs);
    carve_checking(&b, &clear);
    return (a.at > b.at ? a.at : b.at) - sizeof(sid_scratch);
}

namespace {

/* ---- decode ----------------------------------------------------------------------------------------------------- */

struct payloads {
    const uint8_t *first;
    uint64_t stride, n, cap;
    uint32_t count;
    float scale;
    sid_body b;
    __device__ const uint8_t *operator[](uint32_t r) const { return first + r * stride; }
};

/* Entries of the wire tiles before `tile`, by one warp; wraps on a lying payload, which the check then refuses. */
__device__ inline uint64_t entries_before(const uint32_t *count, uint64_t tile) {
    unsigned long long sum = 0;
    for (uint64_t t = sid_lane(); t < tile; t += SID_LANES) sum += count[t];
    return sid_warp_sum(sum);
}

/* Blocks r * each to r * each + each - 1 check payload r: its checksum, and each a run of its wire tiles. Reads all of it. */
__global__ void __launch_bounds__(SID_BLOCK) sid_look_kernel(checking check, payloads p, uint32_t each) {
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t r = blockIdx.x / each, b = blockIdx.x % each;
    const uint8_t *payload = p[r];
    const uint32_t *count = (const uint32_t *)(payload + SID_HEADER_BYTES);
    const uint16_t *index = (const uint16_t *)(payload + p.b.index_at);
    const uint64_t claimed = ((const sid_header *)payload)->count, most = claimed < p.cap ? claimed : p.cap;
    const uint64_t tiles = sid_wire_tiles(p.n), first = tiles * b / each, last = tiles * (b + 1) / each;
    sid_part_sum own =
        sid_sum_words(payload, 32 * p.b.rows, b, each, SID_HEADER_BYTES, 32 * p.b.rows, [](uint64_t, uint32_t) {});
    own = sid_block_sums(own, part);
    if (threadIdx.x == 0) {
        atomicAdd(&check.sum[r], own.sum);
        atomicAdd(&check.weighted[r], own.weighted);
    }
    bool bad = claimed > p.cap;
    uint64_t from = entries_before(count, first); /* every warp for itself: no thread waits for another */
    for (uint64_t t = first; t < last && !bad; t++) {
        const uint64_t held = count[t], size = t + 1 < tiles ? SID_WIRE_TILE : p.n - t * SID_WIRE_TILE;
        if (held > size || from > most || held > most - from) {
            bad = true; /* and nothing is read there */
            break;
        }
        for (uint64_t i = threadIdx.x; i < held; i += SID_BLOCK)
            bad |= i + 1 < held ? index[from + i] >= index[from + i + 1] : index[from + i] >= size;
        from += held;
    }
    if (b == each - 1) bad |= from != claimed;
    if (bad) check.bad[r] = 1; /* every writer writes the same */
}

__global__ void __launch_bounds__(SID_BLOCK)
    sid_check_kernel(sid_scratch *scratch, checking check, payloads p, sid_expect expect, sid_cuda_report *report,
                     sid_state *state) {
    __shared__ uint32_t first, flagged;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < p.count; r += SID_BLOCK) {
        const sid_header h = *(const sid_header *)p[r];
        int32_t status = sid_check_header(h, expect, r, p.b.rows, check.sum[r], check.weighted[r]);
        const uint32_t form = h.flags & ~(uint32_t)(SID_FLAG_NONFINITE | SID_FLAG_RAISED);
        const bool no_mean = sid_key(h.scale) >= SID_KEY_INF || (h.scale == 0) != (h.count == 0);
        if (status == SID_OK && (check.bad[r] || form != p.b.form || (form & SID_FLAG_MEAN && no_mean)))
            status = SID_E_CORRUPT;
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    }
    __syncthreads();
    if (threadIdx.x) return;
    sid_verdict_of(report, scratch, first, flagged);
    if (scratch->go && flagged && state) {
        sid_rule none = {};
        none.key = SID_KEY_NONE;
        state->rule = none;
    }
}

/* A block sums one part of the group after another in shared memory: payload by payload, because floats add up in rank
 * order, the entries of one payload side by side, because their indices differ. Writes each element once: 4 + 6 W d bytes
 * an element, and W cursors of shared memory beside the part. */
enum {
    PART = SID_DECODE_TILE,
    PART_BLOCK = PART / SID_TILE * SID_LANES,
    WIRE_PARTS = SID_WIRE_TILE / PART,
    AHEAD = 4,
    PART_BLOCKS = 8
};

struct cursor {
    uint32_t at, end; /* entries of the payload: the next one, and where its wire tile ends */
};

template <class Memory>
__global__ void __launch_bounds__(PART_BLOCK, PART_BLOCKS)
    sid_decode_kernel(sid_group g, const sid_scratch *scratch, payloads p, sid_vectors vectors, Memory own,
                      const sid_state *state) {
    SID_DYNAMIC_SHARED(float4, memory);
    float *out = (float *)memory;
    cursor *cursors = (cursor *)(out + PART);
    if (!scratch->go) return;
    if (Memory::VECTORS) own.begin(state);
    const bool fill = scratch->nonfinite;
    const uint64_t parts = (p.n + PART - 1) / PART;
    const uint64_t first = parts * blockIdx.x / gridDim.x, last = parts * (blockIdx.x + 1) / gridDim.x;
    for (uint32_t i = threadIdx.x; i < PART; i += PART_BLOCK) out[i] = 0;
    if (!fill && first < last)
        for (uint32_t r = sid_warp(); r < p.count; r += PART_BLOCK / SID_LANES) {
            const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES);
            const uint16_t *index = (const uint16_t *)(p[r] + p.b.index_at);
            const uint64_t tile = first / WIRE_PARTS;
            const uint32_t from = (uint32_t)entries_before(count, tile), end = from + count[tile];
            uint32_t lo = from, hi = end; /* the first entry that is not before the part */
            while (lo < hi) {
                const uint32_t mid = lo + (hi - lo) / 2;
                if (index[mid] < first % WIRE_PARTS * PART)
                    lo = mid + 1;
                else
                    hi = mid;
            }
            if (sid_lane() == 0) cursors[r] = {lo, end};
        }
    __syncthreads();
    for (uint64_t part = first; part < last; part++) {
        const uint32_t base = (uint32_t)(part % WIRE_PARTS) * PART;
        if (!fill && base == 0 && part != first) {
            for (uint32_t r = threadIdx.x; r < p.count; r += PART_BLOCK) {
                const uint32_t *count = (const uint32_t *)(p[r] + SID_HEADER_BYTES), at = cursors[r].end;
                cursors[r] = {at, at + count[part / WIRE_PARTS]};
            }
            __syncthreads();
        }
        for (uint32_t r = 0; r < p.count && !fill; r += AHEAD) {
            uint32_t index[AHEAD];
            float value[AHEAD];
            cursor c[AHEAD] = {};
            const auto fetch = [&](uint32_t a) { /* this thread's entry, or one that lies in no part */
                                                 const uint32_t i = c[a].at + threadIdx.x;
                                                 index[a] = SID_FULL;
                                                 value[a] = 0;
                                                 if (i >= c[a].end) return;
                                                 const uint8_t *values = p[r + a] + p.b.value_at;
                                                 index[a] = ((const uint16_t *)(p[r + a] + p.b.index_at))[i];
                                                 value[a] = p.b.form & SID_FLAG_MEAN
                                                                ? ((const sid_header *)p[r + a])->scale
                                                            : p.b.form & SID_FLAG_HALF
                                                                ? sid_from_f16(((const uint16_t *)values)[i])
                                                                : ((const float *)values)[i];
            };
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) /* of several payloads at once, to wait for memory once */
                if (r + a < p.count) {
                    c[a] = cursors[r + a];
                    fetch(a);
                }
#pragma unroll
            for (uint32_t a = 0; a < AHEAD; a++) {
                if (r + a >= p.count) break;
                for (;;) {
                    const bool in = index[a] - base < PART;
                    if (in) out[index[a] - base] += value[a];
                    const uint32_t taken =
                        (uint32_t)__syncthreads_count(in); /* entries ascend: the first `taken` threads */
                    c[a].at += taken;
                    if (taken < PART_BLOCK) break;
                    fetch(a);
                }
                if (threadIdx.x == 0) cursors[r + a].at = c[a].at;
            }
        }
        const uint64_t tile = part * (PART / SID_TILE) + sid_warp();
        if (tile * SID_TILE < p.n) {
            const sid_span s = sid_span_of(g, tile);
            for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) {
                const uint32_t count = sid_count4(s.len, i);
                float4 *mine = (float4 *)(out + sid_warp() * SID_TILE + i);
                float x[SID_QUAD] = {mine->x * p.scale, mine->y * p.scale, mine->z * p.scale, mine->w * p.scale};
                *mine = make_float4(0, 0, 0, 0);
                if (fill) {
                    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = sid_bits_f32(0x7fc00000u);
                    if (Memory::VECTORS) sid_undo(own, g, s, vectors, i, count);
                } else if (own.receives)
                    sid_receive(own, vectors, s.at + i, count, x);
                if (s.base)
                    sid_put<true>(g, s, i, count, x);
                else
                    sid_put<false>(g, s, i, count, x);
            }
        }
        __syncthreads(); /* before the next part adds up where this one was read */
    }
}

} // namespace

sid_status sid_sparse_decode(sid_cuda_decoding &c, bool mean) {
    const sid_plan *p = c.plan;
    uint64_t clear;
    const checking check = carve_checking(&c.work, &clear);
    const payloads all = {c.payloads, c.stride, p->n, p->cap, c.count, c.scale, sid_body_of(p, mean)};
    const sid_vectors vectors = sid_vectors_of(p, c.state);
    const uint64_t tiles = sid_wire_tiles(p->n), share = 1 + 4ull * c.to.processors / c.count;
    const uint32_t each = (uint32_t)(tiles < 1 ? 1 : tiles < share ? tiles : share);
    const uint32_t shared = (uint32_t)(PART * sizeof(float) + c.count * sizeof(cursor));
    sid_status s = sid_begin_decode(c, clear);
    if (!s && c.part != SID_WRITE)
        s = sid_launch(c.to, "look", sid_look_kernel, (uint64_t)each * c.count, SID_BLOCK, 0, check, all, each);
    if (!s && c.part != SID_WRITE)
        s = sid_launch(c.to, "check", sid_check_kernel, 1, SID_BLOCK, 0, c.scratch, check, all, sid_expect_of(c),
                       c.report, c.state);
    if (s || c.part == SID_CHECK) return s;
    return sid_with_memory_of(c, [&](auto memory) {
        return sid_launch(c.to, "decode", sid_decode_kernel<decltype(memory)>,
                          sid_blocks(c.to, (p->n + PART - 1) / PART, PART_BLOCKS), PART_BLOCK, shared, c.group,
                          c.scratch, all, vectors, memory, c.state);
    });
}
