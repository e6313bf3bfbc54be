/* One-bit rings between the messages (csrc/exchange/ring.c defines the result). The signs of a rank lie in wire, 1 bit
 * an element. A hop reads the slice that has come, merges it with own signs at random, and writes the result in their
 * place and into the frame that goes out; a thread has 16 bytes, for which it draws a block of the random stream. At
 * the end n / 8 bytes are read for the payload's checksum, and decoded as any. Bandwidth is the limit, or the launches,
 * two or three a round, if slices are small. A hop of a slice of b bytes, n / (8 W) in a ring of W ranks, costs
 *     merging    4 b    reads what came and own signs, writes both places
 *     copying    3 b    reads what came, writes both places
 * and b or 2 b more where the torus turns from rows to columns, which have other slices. */
#include "exchange.cuh"

namespace {

/* ---- a hop -------------------------------------------------------------------------------------------------------- */

/* Returns 128 bits, each set with probability votes / (votes + 1), for block `block` of 128 elements. It compares a
 * uniform number with that probability, digit by digit, until all bits are decided. */
__device__ uint4 mask_of(const sid_draw &d, uint64_t block, uint32_t phase, uint32_t votes) {
    uint32_t mask[4] = {}, open[4] = {~0u, ~0u, ~0u, ~0u};
    uint64_t rest = votes;
    for (uint64_t digit = 0; rest && (open[0] | open[1] | open[2] | open[3]) && digit < 63; digit++) {
        uint32_t u[4];
        rest *= 2;
        const bool one = rest > votes;
        if (one) rest -= votes + 1ull;
        sid_draw_block(&d, block + (digit << 40) + ((uint64_t)phase << 46), u);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            if (one) mask[i] |= open[i] & ~u[i];
            open[i] &= one ? u[i] : ~u[i];
        }
    }
    return make_uint4(mask[0], mask[1], mask[2], mask[3]);
}

enum {
    HOP_BLOCKS = 4 /* on a multiprocessor */
};

/* Merges or copies a slice. `one`: the slice that comes in is the one that goes out; else a launch does one of the two.
 * A slice is merged while its checksum is computed: if it was bad, nothing uses the result, because all ranks fail. A
 * fault travels in the flags of the frames, as on the CPU. */
__global__ void __launch_bounds__(SID_BLOCK, HOP_BLOCKS) sid_hop_kernel(sid_frames s, sid_hop h, bool one) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint64_t first = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x, step = (uint64_t)gridDim.x * SID_BLOCK;
    const uint64_t in = h.in.frame ? h.in.body / 16 : 0, out = h.out.frame ? h.out.body / 16 : 0;
    const uint4 *const came = (const uint4 *)(const void *)(s.wire + h.in.frame + SID_FRAME_BYTES);
    uint4 *const goes = (uint4 *)(void *)(s.wire + h.out.frame + SID_FRAME_BYTES);
    uint4 *const own = (uint4 *)(void *)(s.wire + (in ? h.in.bits : h.out.bits));
    const uint64_t units = (in ? h.in.bytes : h.out.bytes) / 16;
    sid_part_sum ins = {0}, outs = {0};
    for (uint64_t i = first; i < in || (i < out && (one || !in)); i += step) {
        uint4 x = make_uint4(0, 0, 0, 0);
        if (i < in) {
            x = came[i];
            ins.add(SID_FRAME_BYTES + 16 * i, x);
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
        outs.add(SID_FRAME_BYTES + 16 * i, x);
    }
    if (in) {
        ins = sid_block_sums(ins, part);
        if (threadIdx.x == 0) atomicAdd(&s.head->in.sum, ins.sum);
        __syncthreads(); /* part is used again */
    }
    outs = sid_block_sums(outs, part);
    if (threadIdx.x) return;
    atomicAdd(&s.head->out.sum, outs.sum);
}

sid_status hop(const sid_stream &to, const sid_frames &s, const sid_hop &h) {
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
    return status ? status : sid_end_hop(to, s, h);
}

/* ---- begin and end ------------------------------------------------------------------------------------------------ */

/* After the encode or its first range: from byte `used`, where the signs end, to `end` the wire block is zero. `all`: the
 * signs are all taken. */
__global__ void __launch_bounds__(SID_LANES)
    sid_ring_begin_kernel(sid_frames s, const sid_scratch *scratch, bool all, uint64_t used, uint64_t end) {
    sid_follow();
    for (uint64_t i = used + 4 * threadIdx.x; i < end; i += 4 * SID_LANES) *(uint32_t *)(void *)(s.wire + i) = 0;
    if (threadIdx.x) return;
    sid_enter(*s.head, nullptr, 0);
    sid_fault &f = s.head->fault;
    if (!scratch->ready) { /* the segment table is not the group's */
        sid_blame_rank(f, SID_E_ARG, s.rank);
        return;
    }
    f.encoded = SID_OWN;
    if (all && scratch->nonfinite) f.flags |= SID_FRAME_NONFINITE;
}
/* After the last range. */
__global__ void __launch_bounds__(SID_LANES)
    sid_ring_signed_kernel(sid_exchange_head *head, const sid_scratch *scratch) {
    sid_follow();
    if (threadIdx.x == 0 && scratch->ready && scratch->nonfinite) head->fault.flags |= SID_FRAME_NONFINITE;
}

/* The merged bits are a payload again: their checksum; or, after a fault, they are none, and the report says why. */
__global__ void __launch_bounds__(SID_BLOCK, HOP_BLOCKS) sid_ring_sum_kernel(sid_frames s, uint64_t bytes) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    sid_part_sum own = {0};
    for (uint64_t i = SID_HEADER_BYTES / 16 + (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < bytes / 16;
         i += (uint64_t)gridDim.x * SID_BLOCK)
        own.add(16 * i, ((const uint4 *)(const void *)s.wire)[i]);
    own = sid_block_sums(own, part);
    if (threadIdx.x) return;
    atomicAdd(&s.head->in.sum, own.sum);
}
__global__ void __launch_bounds__(SID_LANES) sid_ring_seal_kernel(sid_frames s, sid_cuda_report *report) {
    sid_follow();
    if (threadIdx.x) return;
    sid_header &h = *(sid_header *)(void *)s.wire;
    sid_exchange_head &own = *s.head;
    sid_tell(own, report);
    if (own.fault.status) own.undo = own.fault.encoded & SID_OWN;
    if (own.fault.status) return;
    if (own.fault.flags & SID_FRAME_NONFINITE) h.flags |= SID_FLAG_NONFINITE;
    h.checksum = own.in.sum + sid_sum_header(h);
}

sid_status work(const sid_exchange *x, uint64_t *bytes, sid_error *err) { return sid_cuda_work(x->plan, bytes, err); }

/* i: which slice of the first ring, of SID_RANGE. */
sid_status encode_part(const sid_cuda_exchange_step &t, sid_encoding_part part, uint32_t i, sid_cuda_encoding *c) {
    *c = sid_encoding_of(t, t.x->plan, t.step, t.state, t.wire);
    c->stats = t.stats;
    c->part = part;
    if (part == SID_RANGE) sid_signs_of(t.x, i, &c->from, &c->until);
    return part == SID_RANGE && c->from == c->until && i ? SID_OK : sid_enqueue(*c, t.table, t.work);
}

/* Takes own signs of slice round + 1 while slice `round` of the first ring is on its way. The caller asks for it by
 * SID_CUDA_BESIDE, and has the messages on another stream; else all signs are taken before round 0. The bytes are the
 * same. */
sid_status meanwhile(sid_cuda_exchange_step &t, uint32_t round) {
    sid_cuda_encoding c;
    uint64_t from, to;
    const uint32_t slices = sid_signs_of(t.x, 0, &from, &to);
    if (round + 1 >= slices) return SID_OK;
    sid_status s = encode_part(t, SID_RANGE, round + 1, &c);
    if (s || round + 2 < slices) return s;
    s = encode_part(t, SID_CLOSE, 0, &c);
    return s ? s
             : sid_launch(t.to, "signed", sid_ring_signed_kernel, 1, SID_LANES, 0, t.head,
                          (const sid_scratch *)c.scratch);
}

sid_status advance(sid_cuda_exchange_step &t, uint32_t round) {
    const sid_plan *p = t.x->plan;
    const sid_frames s = sid_frames_of(t);
    sid_status status = SID_OK;
    sid_hop h = {};
    t.x->kind->hop(t.x, round, &h);
    if (!round) {
        sid_cuda_encoding c;
        uint64_t none[2];
        const bool all = !t.beside || sid_signs_of(t.x, 0, &none[0], &none[1]) < 2;
        status = encode_part(t, all ? SID_ENCODE : SID_OPEN, 0, &c);
        if (!status && !all) status = encode_part(t, SID_RANGE, 0, &c);
        if (!status)
            status =
                sid_launch(t.to, "begin a ring", sid_ring_begin_kernel, 1, SID_LANES, 0, s,
                           (const sid_scratch *)c.scratch, all, SID_HEADER_BYTES + 4 * ((p->n + 31) / 32), h.out.frame);
    }
    return status ? status : hop(t.to, s, h);
}

sid_status finish(sid_cuda_exchange_step &t) {
    const sid_plan *p = t.x->plan;
    const sid_frames s = sid_frames_of(t);
    const uint64_t bytes = p->sizes.payload;
    sid_status status = sid_launch(t.to, "sum", sid_ring_sum_kernel,
                                   sid_blocks(t.to, bytes / (16 * SID_BLOCK) + 1, HOP_BLOCKS), SID_BLOCK, 0, s, bytes);
    if (!status) status = sid_launch(t.to, "seal", sid_ring_seal_kernel, 1, SID_LANES, 0, s, t.report);
    if (status) return status;
    sid_cuda_decoding c = sid_decoding_of(t, p, t.step, t.wire, bytes, 1, 1.0f);
    c.state = p->memory->vectors ? (sid_state *)(void *)t.state : nullptr;
    c.report = t.report;
    status = sid_enqueue(c, t.table, t.work);
    if (status) return status;
    return sid_enqueue_undo(t, SID_OWN, p, sid_group_of(t.table, p->n, t.work), {t.state, 0, p->n});
}

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_ring1, sid_cuda_exchange_torus1;
const sid_cuda_exchange sid_cuda_exchange_ring1 = {work, advance, finish, meanwhile};
const sid_cuda_exchange sid_cuda_exchange_torus1 = {work, advance, finish, meanwhile};
}
