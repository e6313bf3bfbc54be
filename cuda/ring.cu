/* One-bit rings between the messages (csrc/exchange/ring.c is the law): what sid_exchange_advance does, enqueued. A slice
 * of b bytes, n / (8 W) of them in a ring of W ranks, costs a hop
 *     merging    4 b    what came, own bits, and both places where the outcome goes
 *     copying    3 b
 * and where the torus turns from rows to columns, whose slices are others, b or 2 b more. At the end n / 8 bytes are read
 * for the payload's checksum, and decoded as any.
 *
 * A fault travels as on the CPU: in the flags of the frames. The host sees it in the report, when it looks there. Slices
 * are merged while their checksum is made: what was merged of a bad one is never used, since all ranks fail. */
#include "codec.cuh"

extern "C" {
#include "exchange/exchange.h"
}

namespace {

struct side_sums {
    unsigned long long sum, weighted;
};

/* The head of work: a sid_fault, as the CPU's, and the sums of a hop's two frames, zero between kernels. */
struct ring_state {
    sid_fault fault;
    side_sums in, out;
};
enum {
    STATE_BYTES = 384
};
static_assert(sizeof(ring_state) <= STATE_BYTES, "the codec's work begins behind it");

/* Everything that a kernel knows of the step. */
struct ring_step {
    uint8_t *wire;
    ring_state *state;
    sid_draw draw;
    uint32_t rank;
    uint16_t exchange;
};

/* ---- frames ------------------------------------------------------------------------------------------------------- */

enum {
    WORDS = SID_FRAME_BYTES / 4
};

/* The frame's checksum, with `body` the sums of what follows it. */
__device__ uint64_t frame_checksum(const sid_frame &f, side_sums body, uint64_t bytes) {
    uint32_t w[WORDS];
    const uint64_t rows = 1 + bytes / 32;
    memcpy(w, &f, sizeof f);
    for (uint32_t i = 0; i < WORDS - 2; i++) {
        body.sum += w[i];
        body.weighted += w[i] * sid_checksum_weight(i, rows);
    }
    return sid_checksum_mix(body.sum, body.weighted);
}

__device__ void blame(sid_fault &f, int32_t status, uint32_t culprit) {
    if (f.status) return;
    f.status = status;
    f.culprit = culprit;
    f.flags = (f.flags & 0xffffu) | SID_FRAME_POISON | culprit << SID_FRAME_CULPRIT;
}

/* What sid_frame_open finds. */
__device__ void open_frame(const ring_step &s, const sid_hop_side &h, const side_sums &body) {
    const sid_frame f = *(const sid_frame *)(const void *)(s.wire + h.frame);
    sid_fault &fault = s.state->fault;
    if (f.magic != SID_FRAME_MAGIC || f.checksum != frame_checksum(f, body, h.body))
        blame(fault, SID_E_CORRUPT, h.peer);
    else if (f.exchange != s.exchange || f.round != (uint16_t)h.round || f.step != s.draw.step ||
             f.group != s.draw.group)
        blame(fault, SID_E_MISMATCH, h.peer);
    else if (f.flags & SID_FRAME_POISON)
        blame(fault, SID_E_CORRUPT, f.flags >> SID_FRAME_CULPRIT);
    else
        fault.flags |= f.flags & SID_FRAME_NONFINITE;
}

__device__ void close_frame(const ring_step &s, const sid_hop_side &h, const side_sums &body) {
    sid_frame f;
    memset(&f, 0, sizeof f);
    f.magic = SID_FRAME_MAGIC;
    f.flags = s.state->fault.flags;
    f.step = s.draw.step;
    f.group = s.draw.group;
    f.exchange = s.exchange;
    f.round = (uint16_t)h.round;
    f.checksum = frame_checksum(f, body, h.body);
    *(sid_frame *)(void *)(s.wire + h.frame) = f;
}

/* ---- a hop -------------------------------------------------------------------------------------------------------- */

/* Bits set with probability votes / (votes + 1), for block `at` of 128 elements. */
__device__ uint4 mask_of(const sid_draw &d, uint64_t at, uint32_t phase, uint32_t votes) {
    uint32_t mask[4] = {}, open[4] = {~0u, ~0u, ~0u, ~0u};
    uint64_t rest = votes;
    for (uint64_t digit = 0; rest && (open[0] | open[1] | open[2] | open[3]) && digit < 63; digit++) {
        uint32_t u[4];
        rest *= 2;
        const bool one = rest > votes;
        if (one) rest -= votes + 1ull;
        sid_draw_block(&d, at + (digit << 40) + ((uint64_t)phase << 46), u);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            if (one) mask[i] |= open[i] & ~u[i];
            open[i] &= one ? u[i] : ~u[i];
        }
    }
    return make_uint4(mask[0], mask[1], mask[2], mask[3]);
}

/* 16 bytes at byte `at` of a frame's message. */
__device__ void add_words(sid_part_sum &sums, uint64_t at, const uint4 &w, uint64_t rows) {
    sums.add(at, w.x, rows);
    sums.add(at + 4, w.y, rows);
    sums.add(at + 8, w.z, rows);
    sums.add(at + 12, w.w, rows);
}

enum {
    HOP_BLOCKS = 4 /* on a multiprocessor */
};

/* A thread has 16 bytes, a block of the random stream. `one`: what comes in is what goes out. */
__global__ void __launch_bounds__(SID_BLOCK, HOP_BLOCKS) sid_hop_kernel(ring_step s, sid_hop h, bool one) {
    __shared__ sid_part_sum part[SID_WARPS];
    const uint64_t first = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x, step = (uint64_t)gridDim.x * SID_BLOCK;
    const uint64_t in_rows = 1 + h.in.body / 32, out_rows = 1 + h.out.body / 32;
    const uint64_t in = h.in.frame ? h.in.body / 16 : 0, out = h.out.frame ? h.out.body / 16 : 0;
    const uint4 *const came = (const uint4 *)(const void *)(s.wire + h.in.frame + SID_FRAME_BYTES);
    uint4 *const goes = (uint4 *)(void *)(s.wire + h.out.frame + SID_FRAME_BYTES);
    uint4 *const own = (uint4 *)(void *)(s.wire + (in ? h.in.bits : h.out.bits));
    const uint64_t units = (in ? h.in.bytes : h.out.bytes) / 16;
    sid_part_sum ins = {0, 0}, outs = {0, 0};
    for (uint64_t i = first; i < in || (i < out && (one || !in)); i += step) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (i < in) {
            x = came[i];
            add_words(ins, SID_FRAME_BYTES + 16 * i, x, in_rows);
            if (i < units && h.votes) {
                const uint4 m = mask_of(s.draw, h.block + i, h.phase, h.votes), y = own[i];
                x = make_uint4((x.x & m.x) | (y.x & ~m.x), (x.y & m.y) | (y.y & ~m.y), (x.z & m.z) | (y.z & ~m.z),
                               (x.w & m.w) | (y.w & ~m.w));
            }
            if (i < units) own[i] = x;
        } else if (i < units) {
            x = own[i];
        }
        if (i >= out || !(one || !in)) continue;
        if (i >= units) x = make_uint4(0, 0, 0, 0);
        goes[i] = x;
        add_words(outs, SID_FRAME_BYTES + 16 * i, x, out_rows);
    }
    if (in) {
        ins = sid_block_sums(ins, part);
        if (threadIdx.x == 0) {
            atomicAdd(&s.state->in.sum, ins.sum);
            atomicAdd(&s.state->in.weighted, ins.weighted);
        }
        __syncthreads(); /* part is used again */
    }
    outs = sid_block_sums(outs, part);
    if (threadIdx.x) return;
    atomicAdd(&s.state->out.sum, outs.sum);
    atomicAdd(&s.state->out.weighted, outs.weighted);
}

__global__ void __launch_bounds__(SID_LANES) sid_hop_end_kernel(ring_step s, sid_hop h) {
    if (threadIdx.x) return;
    if (h.in.frame) open_frame(s, h.in, s.state->in);
    if (h.out.frame) close_frame(s, h.out, s.state->out);
    s.state->in = s.state->out = {0, 0};
}

sid_status hop(const sid_stream &to, const ring_step &s, const sid_hop &h) {
    if (!h.in.frame && !h.out.frame) return SID_OK;
    const bool one = h.in.frame && h.out.frame && h.in.bits == h.out.bits && h.in.bytes == h.out.bytes;
    const auto launch = [&](const sid_hop &part, const char *what) {
        const uint64_t body = part.in.body > part.out.body ? part.in.body : part.out.body;
        const uint64_t blocks = sid_blocks(to, (body / 16 + SID_BLOCK - 1) / SID_BLOCK, HOP_BLOCKS);
        return sid_launch(to, what, sid_hop_kernel, blocks, SID_BLOCK, 0, s, part, one);
    };
    sid_status status;
    if (one || !h.in.frame || !h.out.frame) {
        status = launch(h, "hop");
    } else {
        sid_hop in = h, out = h;
        in.out = {};
        out.in = {};
        status = launch(in, "hop: in");
        if (!status) status = launch(out, "hop: out");
    }
    return status ? status : sid_launch(to, "end of a hop", sid_hop_end_kernel, 1, SID_LANES, 0, s, h);
}

/* ---- begin and end ------------------------------------------------------------------------------------------------ */

/* After the encode, which leaves no header where the segment table is not the group's: to byte `end` the wire block is the
 * payload, and zero. */
__global__ void __launch_bounds__(SID_LANES) sid_ring_begin_kernel(ring_step s, uint64_t payload, uint64_t end) {
    for (uint64_t i = payload + 4 * threadIdx.x; i < end; i += 4 * SID_LANES) *(uint32_t *)(void *)(s.wire + i) = 0;
    if (threadIdx.x) return;
    const sid_header h = *(const sid_header *)(const void *)s.wire;
    ring_state &r = *s.state;
    r.fault.status = SID_OK;
    r.fault.culprit = r.fault.flags = r.fault.encoded = 0;
    r.in = r.out = {0, 0};
    if (h.magic != SID_MAGIC) {
        blame(r.fault, SID_E_ARG, s.rank);
        return;
    }
    r.fault.encoded = SID_OWN;
    if (h.flags & SID_FLAG_NONFINITE) r.fault.flags |= SID_FRAME_NONFINITE;
}

/* The last round: a frame without a body to all ranks, that of rank r at `at` + 64 (r + 1); own one at `at`. */
__global__ void __launch_bounds__(SID_LANES) sid_confirm_kernel(ring_step s, uint64_t at, uint32_t round) {
    if (threadIdx.x == 0) close_frame(s, {at, 0, 0, 0, round, 0}, {0, 0});
}
__global__ void __launch_bounds__(SID_LANES)
    sid_confirmed_kernel(ring_step s, uint64_t at, uint32_t round, uint32_t world) {
    if (threadIdx.x) return;
    for (uint32_t r = 0; r < world; r++) /* in order: of several at fault the first is told */
        if (r != s.rank) open_frame(s, {at + (r + 1ull) * 64, 0, 0, 0, round, r}, {0, 0});
}

/* The merged bits are a payload again: their checksum; or, after a fault, they are none, and the report says why. */
__global__ void __launch_bounds__(SID_BLOCK, HOP_BLOCKS) sid_ring_sum_kernel(ring_step s, uint64_t bytes) {
    __shared__ sid_part_sum part[SID_WARPS];
    sid_part_sum own = {0, 0};
    for (uint64_t i = SID_HEADER_BYTES / 16 + (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < bytes / 16;
         i += (uint64_t)gridDim.x * SID_BLOCK)
        add_words(own, 16 * i, ((const uint4 *)(const void *)s.wire)[i], bytes / 32);
    own = sid_block_sums(own, part);
    if (threadIdx.x) return;
    atomicAdd(&s.state->in.sum, own.sum);
    atomicAdd(&s.state->in.weighted, own.weighted);
}
__global__ void __launch_bounds__(SID_LANES)
    sid_ring_seal_kernel(ring_step s, uint64_t bytes, sid_cuda_report *report) {
    if (threadIdx.x) return;
    sid_header &h = *(sid_header *)(void *)s.wire;
    const sid_fault &f = s.state->fault;
    if (f.status) {
        h.magic = 0; /* so the decode leaves the segments alone */
        if (report->status == SID_OK) {
            report->status = f.status;
            report->culprit = f.culprit;
        }
        return;
    }
    if (f.flags & SID_FRAME_NONFINITE) h.flags |= SID_FLAG_NONFINITE;
    uint32_t w[SID_HEADER_BYTES / 4];
    side_sums all = s.state->in;
    memcpy(w, &h, sizeof h);
    for (uint32_t i = 0; i < 14; i++) {
        all.sum += w[i];
        all.weighted += w[i] * sid_checksum_weight(i, bytes / 32);
    }
    h.checksum = sid_checksum_mix(all.sum, all.weighted);
}

/* After a fault the step did not happen: what it put into the memory is taken out again. Reads and writes what the memory
 * keeps, and reads the gradient, only then. */
template <class Memory>
__global__ void __launch_bounds__(SID_BLOCK)
    sid_ring_undo_kernel(sid_group g, const sid_fault *f, const sid_state *state, sid_vectors v, Memory memory) {
    if (f->status == SID_OK || !(f->encoded & SID_OWN)) return;
    memory.begin(state);
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW)
            sid_undo(memory, g, s, v, i, sid_count4(s.len, i));
    }
}
__global__ void __launch_bounds__(SID_LANES) sid_ring_undone_kernel(sid_fault *f, sid_state *state) {
    if (threadIdx.x) return;
    if (f->status != SID_OK && f->encoded & SID_OWN) state->rule = sid_rule();
    f->encoded = 0;
}

sid_status finish(const sid_exchange *x, const ring_step &s, const sid_segment *segs, uint32_t n_seg, void *state,
                  void *codec_work, const sid_step *at, void *report, int device, const sid_stream &to) {
    const sid_plan *p = &x->plan[0];
    const uint64_t bytes = p->sizes.payload;
    void *const kept = p->memory->vectors ? state : nullptr;
    sid_status status = sid_launch(to, "sum", sid_ring_sum_kernel,
                                   sid_blocks(to, bytes / (16 * SID_BLOCK) + 1, HOP_BLOCKS), SID_BLOCK, 0, s, bytes);
    if (!status)
        status = sid_launch(to, "seal", sid_ring_seal_kernel, 1, SID_LANES, 0, s, bytes, (sid_cuda_report *)report);
    if (!status)
        status = sid_cuda_decode(p, s.wire, bytes, 1, 1.0f, segs, n_seg, kept, codec_work, at, report, device,
                                 to.stream, to.err);
    if (status || !kept) return status;
    const sid_group g = sid_group_of(p, segs, n_seg, codec_work);
    sid_state *const own = (sid_state *)state;
    status = sid_with_memory(p, to.err, [&](auto memory) {
        return sid_launch(to, "undo", sid_ring_undo_kernel<decltype(memory)>,
                          sid_blocks(to, sid_chunks(p->n), HOP_BLOCKS), SID_BLOCK, 0, g,
                          (const sid_fault *)&s.state->fault, (const sid_state *)own, sid_vectors_of(p, own), memory);
    });
    return status ? status : sid_launch(to, "undone", sid_ring_undone_kernel, 1, SID_LANES, 0, &s.state->fault, own);
}

sid_status check(const sid_exchange *x, sid_error *err) {
    if (!x) return sid_fail(err, SID_E_ARG, "exchange is NULL");
    if (x->kind->hop) return SID_OK;
    return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' has no CUDA kernels: leave it out on CUDA, or take another",
                    x->kind->info.name);
}

} // namespace

sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    uint64_t codec = 0;
    if (err) err->text[0] = 0;
    if (!bytes) return sid_fail(err, SID_E_ARG, "bytes is NULL");
    *bytes = 0;
    sid_status s = check(x, err);
    if (!s) s = sid_cuda_work(&x->plan[0], &codec, err);
    if (!s) *bytes = STATE_BYTES + codec;
    return s;
}

sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *at, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err) {
    sid_device_scope scope;
    if (err) err->text[0] = 0;
    sid_status status = check(x, err);
    if (status) return status;
    if (!at || round > x->sizes.rounds || at->rank != x->rank || at->world != x->world || at->group >> SID_SUBGROUPS)
        return sid_fail(err, SID_E_ARG, "step is NULL, or not the exchange's, or there is no round %u", round);
    for (const void *p : {(const void *)state, (const void *)work, (const void *)wire})
        if (!p || (uintptr_t)p % 64)
            return sid_fail(err, SID_E_ARG, "state, work and wire must start at multiples of 64 bytes");
    if (!report_dev || (uintptr_t)report_dev % 4) return sid_fail(err, SID_E_ARG, "the report is NULL or misaligned");
    if (device < 0) return sid_fail(err, SID_E_ARG, "device %d", device);
    sid_stream to = {(cudaStream_t)stream, 0, err};
    status = scope.enter(device, &to);
    if (status) return status;
    const ring_step s = {(uint8_t *)wire,
                         (ring_state *)work,
                         {sid_salt(at->seed, at->rank), at->group, at->step},
                         at->rank,
                         x->kind->info.wire_id};
    void *const codec_work = (char *)work + STATE_BYTES;
    const uint64_t confirms = x->at[7];
    sid_hop h = {};
    if (round <= x->rounds) x->kind->hop(x, round, &h);
    if (!round) {
        const sid_plan *p = &x->plan[0];
        status = sid_cuda_encode(p, segs_dev, n_seg, state, codec_work, at, wire, stats_dev, device, stream, err);
        if (!status)
            status = sid_launch(to, "begin a ring", sid_ring_begin_kernel, 1, SID_LANES, 0, s, p->sizes.payload,
                                h.out.frame);
    }
    if (!status) status = hop(to, s, h);
    if (!status && x->confirms && round == x->rounds)
        status = sid_launch(to, "confirm", sid_confirm_kernel, 1, SID_LANES, 0, s, confirms, round);
    if (!status && x->confirms && round > x->rounds)
        status = sid_launch(to, "confirmed", sid_confirmed_kernel, 1, SID_LANES, 0, s, confirms, x->rounds, x->world);
    if (status || round < x->sizes.rounds) return status;
    return finish(x, s, segs_dev, n_seg, state, codec_work, at, report_dev, device, to);
}
