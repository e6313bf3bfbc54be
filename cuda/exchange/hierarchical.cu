/* Hierarchical between the messages (csrc/exchange/hierarchical.c defines the result). Each rank sums one slice of its
 * node's gradients, uncompressed; the ranks that have the same slice in all nodes run another exchange, the inner one,
 * over it; then each sends the result to its node. Bandwidth is the limit. Of n elements of b bytes, L ranks a node:
 *     scatter   reads the group and writes it as frames, n b each
 *     sum       reads n b twice, once for the frames' checksums, and writes our slice's mean as float32, 4 n / L
 *     within    the inner exchange of n / L elements, whose group is that mean
 *     gather    writes our slice as a frame, b n / L
 *     end       reads n b twice, writes the segments, n b
 * The inner exchange has a head of its own behind ours, and ends before the gather. What fails before that end is taken
 * out of the memory there. After what fails later, the gradient is gone, and the memory forgets its residual. */
#include "exchange.cuh"

namespace {

/* The slices, as a kernel sees them. */
struct slices {
    sid_frames frames;
    sid_part_sum *sums; /* a frame each; zero between kernels */
    uint64_t n, slice, message;
    sid_dtype dtype;
    uint32_t local, mine;
    __host__ __device__ uint64_t start(uint32_t s) const { return s * slice < n ? s * slice : n; }
    __host__ __device__ uint64_t len(uint32_t s) const { return start(s + 1) - start(s); }
    __host__ __device__ uint64_t body(uint32_t s) const { return sid_round_up(len(s) * sid_width(dtype), 32); }
    __device__ uint8_t *frame(uint64_t where, uint32_t s) const { return frames.wire + where + s * message; }
};

/* A quad of a frame's body. */
__device__ inline void load_quad(const void *p, sid_dtype d, float (&x)[SID_QUAD]) {
    float y[1][SID_QUAD];
    sid_load_quads(p, d, y);
    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = y[0][c];
}

/* ---- frames out -------------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(SID_BLOCK) sid_nodes_begin_kernel(slices k, float *sum, const sid_scratch *scratch) {
    sid_follow();
    for (uint32_t s = threadIdx.x; s < k.local; s += SID_BLOCK) k.sums[s] = {0};
    if (threadIdx.x) return;
    sid_enter(*k.frames.head, sum, k.len(k.mine));
    if (!scratch->ready) sid_blame_rank(k.frames.head->fault, SID_E_ARG, k.frames.rank);
}

/* A quad's bits to a frame's body, at element i of the slice; what does not exist is 0. */
struct body_writer {
    uint8_t *body;
    uint32_t width;
    sid_part_sum own;
    __device__ void put(uint64_t i, const uint32_t (&bits)[SID_QUAD]) {
        const uint64_t offset = i * width;
        if (width == 4) {
            const uint4 w = make_uint4(bits[0], bits[1], bits[2], bits[3]);
            *(uint4 *)(void *)(body + offset) = w;
            own.add(SID_FRAME_BYTES + offset, w);
            return;
        }
        const uint2 w = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
        *(uint2 *)(void *)(body + offset) = w;
        own.add(SID_FRAME_BYTES + offset, w.x);
        own.add(SID_FRAME_BYTES + offset + 4, w.y);
    }
};

/* Blocks s * each to s * each + each - 1 copy slice s of the group, as it is. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_scatter_kernel(sid_group g, const sid_scratch *scratch, slices k, uint64_t out, uint32_t each) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t s = blockIdx.x / each;
    if (s == k.mine) return;
    const bool ready = scratch->ready;
    const uint64_t body = k.body(s);
    body_writer to = {k.frame(out, s) + SID_FRAME_BYTES, sid_width(g.dtype), {0}};
    g.before += k.start(s);
    g.n = k.len(s);
    for (uint64_t tile = (uint64_t)(blockIdx.x % each) * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)each * SID_WARPS) {
        sid_span span = {};
        span.at = tile * SID_TILE;
        if (ready) span = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < SID_TILE && (span.at + i) * to.width < body; i += SID_ROW) {
            uint32_t bits[SID_QUAD] = {};
            if (span.base && to.width == 4) {
                const uint4 v = *(const uint4 *)(const void *)(span.base + 4 * i);
                bits[0] = v.x, bits[1] = v.y, bits[2] = v.z, bits[3] = v.w;
            } else if (span.base) {
                const uint2 v = *(const uint2 *)(const void *)(span.base + 2 * i);
                bits[0] = v.x & 0xffffu, bits[1] = v.x >> 16, bits[2] = v.y & 0xffffu, bits[3] = v.y >> 16;
            } else if (ready) {
                sid_each(g, span, i, sid_count4(span.len, i), [&](uint32_t c, const void *p) {
                    bits[c] = to.width == 4 ? *(const uint32_t *)p : *(const uint16_t *)p;
                });
            }
            to.put(span.at + i, bits);
        }
    }
    sid_add_sums(k.sums[s], to.own, part);
}

/* Our slice, as the nodes have made it. */
__global__ void __launch_bounds__(SID_BLOCK) sid_spread_kernel(slices k, uint64_t out, const float *sum) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint64_t len = k.len(k.mine), body = k.body(k.mine);
    body_writer to = {k.frame(out, k.mine) + SID_FRAME_BYTES, sid_width(k.dtype), {0}};
    for (uint64_t i = SID_QUAD * ((uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x); i * to.width < body;
         i += SID_QUAD * (uint64_t)gridDim.x * SID_BLOCK) {
        uint32_t bits[SID_QUAD] = {};
        float x[SID_QUAD] = {};
        if (i + SID_QUAD <= len)
            load_quad(sum + i, SID_F32, x);
        else
            for (uint32_t c = 0; c < SID_QUAD; c++)
                if (i + c < len) x[c] = sum[i + c];
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < len) bits[c] = k.dtype == SID_F32 ? sid_f32_bits(x[c]) : sid_encode_half(x[c], k.dtype);
        to.put(i, bits);
    }
    sid_add_sums(k.sums[k.mine], to.own, part);
}

/* Closes the frames of `count` slices from `first` on. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_close_kernel(slices k, uint64_t out, uint32_t round, uint32_t first, uint32_t count) {
    sid_follow();
    for (uint32_t s = first + threadIdx.x; s < first + count; s += SID_BLOCK) {
        sid_close_frame(k.frames, {out + s * k.message, k.body(s), 0, 0, round, 0, 0}, k.sums[s]);
        k.sums[s] = {0};
    }
}

/* ---- frames in --------------------------------------------------------------------------------------------------- */

/* Blocks l * each to l * each + each - 1 read the body that has come from rank l. `own`: all are of our slice. */
__global__ void __launch_bounds__(SID_BLOCK) sid_look_frames_kernel(slices k, uint64_t in, bool own, uint32_t each) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t l = blockIdx.x / each;
    if (l == k.mine) return;
    const uint64_t body = k.body(own ? k.mine : l);
    const uint4 *const from = (const uint4 *)(const void *)(k.frame(in, l) + SID_FRAME_BYTES);
    sid_part_sum sum = {0};
    for (uint64_t i = (uint64_t)(blockIdx.x % each) * SID_BLOCK + threadIdx.x; i < body / 16;
         i += (uint64_t)each * SID_BLOCK)
        sum.add(SID_FRAME_BYTES + 16 * i, from[i]);
    sid_add_sums(k.sums[l], sum, part);
}
__global__ void __launch_bounds__(SID_LANES) sid_open_kernel(slices k, uint64_t in, bool own, uint32_t round) {
    sid_follow();
    if (threadIdx.x) return;
    for (uint32_t l = 0; l < k.local; l++) { /* in order: of several at fault the first is told */
        if (l == k.mine) continue;
        sid_open_frame(k.frames,
                       {in + l * k.message, k.body(own ? k.mine : l), 0, 0, round, k.frames.rank - k.mine + l},
                       k.sums[l]);
        k.sums[l] = {0};
    }
}

/* The node's mean of our slice, in the order of its ranks; g: our window of the group. No more blocks of a multiprocessor
 * are launched than the bounds say, so that nothing need be spilled. */
__global__ void __launch_bounds__(SID_BLOCK, 4) sid_add_up_kernel(sid_group g, slices k, uint64_t in, float *sum) {
    sid_follow();
    const bool failed = k.frames.head->fault.status != SID_OK;
    const float share = 1.0f / (float)k.local;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        sid_span span = {};
        span.at = tile * SID_TILE;
        span.len = sid_tile_len(g.n, span.at);
        if (!failed) span = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < span.len; i += SID_ROW) {
            const uint32_t count = sid_count4(span.len, i);
            float x[SID_QUAD] = {};
            for (uint32_t l = 0; l < k.local && !failed; l++) {
                float y[1][SID_QUAD];
                if (l != k.mine)
                    load_quad(k.frame(in, l) + SID_FRAME_BYTES + (span.at + i) * sid_width(k.dtype), k.dtype, y[0]);
                else if (span.base)
                    sid_get<true>(g, span, i, count, y);
                else
                    sid_get<false>(g, span, i, count, y);
                for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = l ? x[c] + y[0][c] : y[0][c];
            }
            if (sid_overflows(x)) { /* the mean may not: it is taken again in float64 */
                double sum[SID_QUAD] = {};
#pragma unroll 1
                for (uint32_t l = 0; l < k.local; l++) {
                    float y[1][SID_QUAD] = {};
                    const uint8_t *const from = k.frame(in, l) + SID_FRAME_BYTES + (span.at + i) * sid_width(k.dtype);
                    if (l == k.mine)
                        sid_get<false>(g, span, i, count, y);
                    else
                        for (uint32_t c = 0; c < count; c++)
                            y[0][c] = sid_load1(from + c * sid_width(k.dtype), k.dtype);
                    for (uint32_t c = 0; c < SID_QUAD; c++) sum[c] += (double)y[0][c];
                }
                for (uint32_t c = 0; c < SID_QUAD; c++)
                    x[c] = sid_key(x[c]) < SID_KEY_INF ? x[c] * share : sid_mean(sum[c], share);
            } else
                for (uint32_t c = 0; c < SID_QUAD; c++) x[c] *= share;
            for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = failed ? sid_bits_f32(0x7fc00000u) : x[c];
            sid_store_floats(sum + span.at + i, count, x);
        }
    }
}

/* ---- the exchange within ----------------------------------------------------------------------------------------- */

/* Before its end: what has failed around it. */
__global__ void __launch_bounds__(SID_LANES) sid_go_in_kernel(const sid_exchange_head *head, sid_exchange_head *inner) {
    sid_follow();
    if (threadIdx.x == 0 && head->fault.status) sid_blame_rank(inner->fault, head->fault.status, 0);
}
/* After it: its rank r is ours r * local + mine. */
__global__ void __launch_bounds__(SID_LANES) sid_come_out_kernel(slices k, const sid_exchange_head *inner) {
    sid_follow();
    if (threadIdx.x) return;
    sid_exchange_head &head = *k.frames.head;
    if (inner->fault.status) sid_blame_rank(head.fault, inner->fault.status, inner->fault.culprit * k.local + k.mine);
    if (head.fault.status == SID_OK) {
        head.fault.encoded = head.report.nonfinite ? 0 : SID_SPENT;
        if (head.report.nonfinite) head.fault.flags |= SID_FRAME_NONFINITE;
    }
    head.report = {0, 0, SID_OK, 0};
}

/* ---- the end ------------------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(SID_LANES) sid_nodes_end_kernel(sid_exchange_head *head, sid_cuda_report *report) {
    sid_follow();
    if (threadIdx.x) return;
    head->nonfinite = (head->fault.flags & SID_FRAME_NONFINITE) != 0;
    if (head->fault.status || head->nonfinite) head->undo = head->fault.encoded & SID_SPENT;
    sid_tell(*head, report);
}

/* `count` states that lie `apart`, the last one's plan may be smaller. */
struct states {
    uint8_t *first;
    uint64_t apart, floats, of_last;
    uint32_t count;
    sid_rule none;
};
/* sid_exchange_forget: of what each rank keeps for itself, and of what it keeps for all. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_nodes_forget_kernel(const sid_exchange_head *head, states own, states for_all) {
    sid_follow();
    if (!head->undo) return;
    for (uint32_t i = 0; i < own.count; i++)
        sid_forget_all(own.first + i * own.apart, i + 1 < own.count ? own.floats : own.of_last, own.none);
    for (uint32_t i = 0; i < for_all.count; i++)
        sid_forget_all(for_all.first + i * for_all.apart, i + 1 < for_all.count ? for_all.floats : for_all.of_last,
                       for_all.none);
}

__global__ void __launch_bounds__(SID_BLOCK)
    sid_nodes_write_kernel(sid_group g, slices k, uint64_t in, const float *sum) {
    sid_follow();
    const sid_exchange_head &head = *k.frames.head;
    if (head.fault.status) return;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span span = sid_span_of(g, tile);
        uint32_t s = (uint32_t)(span.at / k.slice);
        uint64_t start = s * k.slice;
        for (uint32_t i = sid_lane() * SID_QUAD; i < span.len; i += SID_ROW) {
            const uint32_t count = sid_count4(span.len, i);
            for (; span.at + i >= start + k.slice; s++) start += k.slice; /* a quad lies in one slice */
            const uint64_t place = span.at + i - start;
            float x[SID_QUAD];
            if (s == k.mine)
                load_quad(sum + place, SID_F32, x);
            else
                load_quad(k.frame(in, s) + SID_FRAME_BYTES + place * sid_width(k.dtype), k.dtype, x);
            if (head.nonfinite) x[0] = x[1] = x[2] = x[3] = sid_bits_f32(0x7fc00000u);
            if (span.base)
                sid_put<true>(g, span, i, count, x);
            else
                sid_put<false>(g, span, i, count, x);
        }
    }
}

/* ---- a step -------------------------------------------------------------------------------------------------------- */

enum {
    BLOCKS = 4 /* on a multiprocessor */
};

uint64_t sum_bytes(const sid_exchange *x) { return sid_round_up(4 * x->slice, 64); }
uint64_t sums_bytes(const sid_nodes &at) { return sid_round_up(at.local * sizeof(sid_part_sum), 64); }

/* A step, as all of its parts see it. work: the sum, the frames' sums, the inner exchange's head and work. */
struct node_step {
    const sid_cuda_exchange_step &t;
    const sid_exchange *x, *in;
    const sid_cuda_exchange *kind; /* of `in` */
    sid_nodes at;
    float *sum;
    slices k;
    uint64_t len;
    sid_cuda_exchange_step inner;

    node_step(const sid_cuda_exchange_step &step)
        : t(step), x(step.x), in(sid_within(step.x)), kind(sid_cuda_exchange_of(in->kind)), at(sid_nodes_of(x)),
          sum((float *)(void *)t.work), inner(step) {
        k = {sid_frames_of(t),
             (sid_part_sum *)(void *)(t.work + sum_bytes(x)),
             x->n,
             x->slice,
             x->message,
             x->dtype,
             at.local,
             at.mine};
        len = k.len(at.mine);
        inner.x = in;
        inner.table = {&t.head->own, 1, SID_F32, 0, 0};
        inner.wire = t.wire + at.wire;
        inner.head = (sid_exchange_head *)(void *)(t.work + sum_bytes(x) + sums_bytes(at));
        inner.work = (uint8_t *)(void *)inner.head + SID_EXCHANGE_HEAD;
        inner.step.rank = in->rank;
        inner.step.world = in->world;
        inner.step.group += at.group;
        inner.stats = nullptr;
        inner.report = &t.head->report;
        inner.beside = t.beside && kind->meanwhile;
    }

    uint32_t each(uint64_t pieces) const { /* blocks of a frame */
        const uint64_t most = 1 + (uint64_t)t.to.processors * BLOCKS / at.local;
        return (uint32_t)(pieces < 1 ? 1 : pieces < most ? pieces : most);
    }
    uint64_t tiles(uint64_t n) const { return sid_blocks(t.to, sid_chunks(n), BLOCKS); }

    /* Tabulates where the group's segments start. The table lies in the inner exchange's work, before it begins or
     * after its end. */
    sid_status begin_table(sid_group *g, sid_scratch **scratch) const {
        return sid_begin_table(t.to, t.table, x->n, inner.work, g, scratch);
    }
    sid_status begin(sid_group *g, sid_scratch **scratch) const {
        sid_status s = begin_table(g, scratch);
        if (!s)
            s = sid_launch(t.to, "begin", sid_nodes_begin_kernel, 1, SID_BLOCK, 0, k, sum,
                           (const sid_scratch *)*scratch);
        return s;
    }

    sid_status scatter() const {
        const uint32_t blocks = each(sid_chunks(x->slice));
        sid_group g;
        sid_scratch *scratch;
        sid_status s = begin(&g, &scratch);
        if (!s)
            s = sid_launch(t.to, "scatter", sid_scatter_kernel, (uint64_t)blocks * at.local, SID_BLOCK, 0, g,
                           (const sid_scratch *)scratch, k, at.out, blocks);
        return s ? s : sid_launch(t.to, "close", sid_close_kernel, 1, SID_BLOCK, 0, k, at.out, 0u, 0u, at.local);
    }

    sid_status open(bool own, uint32_t round) const {
        const uint32_t blocks = each(x->message / (16 * SID_BLOCK));
        const sid_status s = sid_launch(t.to, "look", sid_look_frames_kernel, (uint64_t)blocks * at.local, SID_BLOCK, 0,
                                        k, at.in, own, blocks);
        return s ? s : sid_launch(t.to, "open", sid_open_kernel, 1, SID_LANES, 0, k, at.in, own, round);
    }

    sid_status add_up() const {
        sid_group g;
        sid_scratch *scratch;
        sid_status s = at.local > 1 ? begin_table(&g, &scratch) : begin(&g, &scratch);
        if (!s && at.local > 1) s = open(true, 0);
        g.before += k.start(at.mine);
        g.n = len;
        return s ? s : sid_launch(t.to, "add up", sid_add_up_kernel, tiles(len), SID_BLOCK, 0, g, k, at.in, sum);
    }

    sid_status come_out() {
        sid_status s =
            sid_launch(t.to, "go in", sid_go_in_kernel, 1, SID_LANES, 0, (const sid_exchange_head *)t.head, inner.head);
        if (!s) s = kind->finish(inner);
        if (!s)
            s = sid_launch(t.to, "come out", sid_come_out_kernel, 1, SID_LANES, 0, k,
                           (const sid_exchange_head *)inner.head);
        if (s || at.local == 1) return s;
        s = sid_launch(t.to, "spread", sid_spread_kernel, 1 + sid_blocks(t.to, x->message / (16 * SID_BLOCK), BLOCKS),
                       SID_BLOCK, 0, k, at.out, (const float *)sum);
        if (!s) s = sid_launch(t.to, "close", sid_close_kernel, 1, SID_BLOCK, 0, k, at.out, x->rounds - 1, at.mine, 1u);
        return s;
    }

    states states_of(int common) const {
        const uint32_t parts = in->kind->parts(in);
        states found = {};
        for (uint32_t i = 0; i < parts; i++) {
            const sid_part part = in->kind->part(in, i);
            uint8_t *const state = t.state + part.state;
            if (part.common != common) continue;
            if (found.count == 1) found.apart = (uint64_t)(state - found.first);
            if (!found.count) {
                found.first = state;
                found.floats = sid_kept_bytes(part.plan) / sizeof(float);
                part.plan->codec->none(&found.none);
            }
            found.of_last = sid_kept_bytes(part.plan) / sizeof(float);
            found.count++;
        }
        return found;
    }
    sid_status forget() const {
        return sid_launch(t.to, "forget", sid_nodes_forget_kernel, t.to.processors, SID_BLOCK, 0,
                          (const sid_exchange_head *)t.head, states_of(0), states_of(1));
    }
};

sid_status work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    const sid_exchange *in = sid_within(x);
    const sid_cuda_exchange *kind = sid_cuda_exchange_of(in->kind);
    uint64_t inner = 0;
    if (!kind)
        return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' within '%s' has no CUDA kernels: take another",
                        in->kind->info.name, x->kind->info.name);
    const sid_status s = kind->work(in, &inner, err);
    *bytes = sum_bytes(x) + sums_bytes(sid_nodes_of(x)) + SID_EXCHANGE_HEAD + inner;
    return s;
}

sid_status advance(sid_cuda_exchange_step &t, uint32_t round) {
    node_step a(t);
    const uint32_t first = a.at.local > 1, last = first + a.in->rounds;
    sid_status s = SID_OK;
    if (first && !round) return a.scatter();
    if (round >= first && round <= last) {
        if (round == first) s = a.add_up();
        if (!s) s = a.kind->advance(a.inner, round - first);
        if (!s && round == last) s = a.come_out();
    }
    if (!s && first && round == a.x->rounds) s = a.open(false, a.x->rounds - 1);
    return s;
}

sid_status meanwhile(sid_cuda_exchange_step &t, uint32_t round) {
    node_step a(t);
    const uint32_t first = a.at.local > 1;
    if (!a.inner.beside || round < first || round - first >= a.in->rounds) return SID_OK;
    return a.kind->meanwhile(a.inner, round - first);
}

sid_status finish(sid_cuda_exchange_step &t) {
    const node_step a(t);
    sid_group g;
    sid_scratch *scratch;
    sid_status s = sid_launch(t.to, "end", sid_nodes_end_kernel, 1, SID_LANES, 0, t.head, t.report);
    if (!s) s = a.forget();
    if (!s) s = a.begin_table(&g, &scratch);
    return s ? s
             : sid_launch(t.to, "write", sid_nodes_write_kernel, a.tiles(a.x->n), SID_BLOCK, 0, g, a.k, a.at.in,
                          (const float *)a.sum);
}

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_hierarchical;
const sid_cuda_exchange sid_cuda_exchange_hierarchical = {work, advance, finish, meanwhile};
}
