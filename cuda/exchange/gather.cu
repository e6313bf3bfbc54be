/* All-gather and all-reduce as messages, between them (csrc/exchange/gather.c defines the result). Only exchanges that
 * run one of them within need these, because process groups have both. All-gather is the codec's own encode and decode.
 * All-reduce cuts a body of b bytes in W slices, one for each rank to sum; frames carry the slices. Bandwidth is the
 * limit:
 *     out    reads the body and writes its slices as frames, b each
 *     sum    reads W copies of our slice, b, twice, once for the frames' checksums, and writes the sum, b / W
 *     out    writes the sum as a frame, b / W
 *     in     reads all sums and writes the body, b each */
#include "exchange.cuh"

namespace {

/* The slices that are summed, as a kernel sees them. The part of a frame's body beyond the slice is 0. */
struct pieces {
    sid_frames frames;
    sid_part_sum *sums; /* a frame each; zero between kernels */
    sid_sum_of_slices at;
    uint32_t world;
    __device__ uint64_t bytes(uint32_t s) const {
        const uint64_t from = s * at.each;
        if (from >= at.bytes) return 0;
        return at.bytes - from < at.each ? at.bytes - from : at.each;
    }
    __device__ uint64_t body(uint32_t s) const { return sid_round_up(bytes(s), 32); }
    __device__ uint8_t *slice(uint32_t s) const { return frames.wire + at.first + s * at.each; }
    __device__ sid_hop_side side(uint64_t where, uint32_t r, uint32_t s, uint32_t round) const {
        return {where + r * at.apart, body(s), 0, 0, round, r, 0};
    }
};

/* sums: of an all-reduce's frames, a world of them; or NULL. */
__global__ void __launch_bounds__(SID_LANES)
    sid_gather_begin_kernel(sid_exchange_head *head, sid_part_sum *sums, uint32_t world) {
    sid_follow();
    for (uint32_t r = threadIdx.x; sums && r < world; r += SID_LANES) sums[r] = {0};
    if (threadIdx.x == 0) sid_enter(*head, nullptr, 0);
}

/* After the encode, which leaves no header where the segment table is not the group's. */
__global__ void __launch_bounds__(SID_LANES)
    sid_gather_sent_kernel(sid_exchange_head *head, const uint8_t *payload, uint32_t rank) {
    sid_follow();
    if (threadIdx.x) return;
    if (((const sid_header *)(const void *)payload)->magic != SID_MAGIC)
        sid_blame_rank(head->fault, SID_E_ARG, rank);
    else
        head->fault.encoded |= SID_OWN;
}

/* ---- frames ------------------------------------------------------------------------------------------------------- */

/* The last bytes of a slice, fewer than 16 of them; what is beyond them is 0. */
__device__ inline uint4 load_some(const uint8_t *p, uint64_t count) {
    uint4 w = make_uint4(0, 0, 0, 0);
    for (uint32_t b = 0; b < count; b++) {
        const uint32_t y = (uint32_t)p[b] << (8 * (b % 4));
        if (b < 4)
            w.x |= y;
        else if (b < 8)
            w.y |= y;
        else if (b < 12)
            w.z |= y;
        else
            w.w |= y;
    }
    return w;
}
__device__ inline void store_some(uint8_t *p, uint64_t count, const uint4 &w) {
    for (uint32_t b = 0; b < count; b++)
        p[b] = (uint8_t)((b < 4 ? w.x : b < 8 ? w.y : b < 12 ? w.z : w.w) >> (8 * (b % 4)));
}

/* Blocks i * each to i * each + each - 1 copy slice first + i into a frame's body: zeros, after a fault. `all`: it is one of
 * all slices, and our own is left out. */
__global__ void __launch_bounds__(SID_BLOCK) sid_pieces_out_kernel(pieces k, uint32_t first, bool all, uint32_t each) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t s = first + blockIdx.x / each;
    if (all && s == k.frames.rank) return;
    const uint64_t bytes = k.frames.head->fault.status ? 0 : k.bytes(s), body = k.body(s);
    const uint8_t *const from = k.slice(s);
    uint4 *const to = (uint4 *)(void *)(k.frames.wire + k.at.out + s * k.at.apart + SID_FRAME_BYTES);
    sid_part_sum own = {0};
    for (uint64_t i = (uint64_t)(blockIdx.x % each) * SID_BLOCK + threadIdx.x; i < body / 16;
         i += (uint64_t)each * SID_BLOCK) {
        uint4 w = make_uint4(0, 0, 0, 0);
        if (16 * i + 16 <= bytes)
            w = ((const uint4 *)(const void *)from)[i];
        else if (16 * i < bytes)
            w = load_some(from + 16 * i, bytes - 16 * i);
        to[i] = w;
        own.add(SID_FRAME_BYTES + 16 * i, w);
    }
    sid_add_sums(k.sums[s], own, part);
}
__global__ void __launch_bounds__(SID_BLOCK)
    sid_pieces_close_kernel(pieces k, uint32_t first, uint32_t count, uint32_t round) {
    sid_follow();
    for (uint32_t s = first + threadIdx.x; s < first + count; s += SID_BLOCK) {
        if (k.bytes(s)) sid_close_frame(k.frames, k.side(k.at.out, s, s, round), k.sums[s]);
        k.sums[s] = {0};
    }
}

/* Blocks r * each to r * each + each - 1 read the body that has come from rank r: what it has for our slice; or `theirs`, the
 * sum of its own, which goes to its place. Of a bad one nothing is used, since all ranks fail. */
__global__ void __launch_bounds__(SID_BLOCK) sid_pieces_in_kernel(pieces k, bool theirs, uint32_t each) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t r = blockIdx.x / each, s = theirs ? r : k.frames.rank;
    if (r == k.frames.rank) return;
    const uint64_t bytes = theirs ? k.bytes(s) : 0, body = k.body(s);
    uint8_t *const to = k.slice(s);
    const uint4 *const from = (const uint4 *)(const void *)(k.frames.wire + k.at.in + r * k.at.apart + SID_FRAME_BYTES);
    sid_part_sum own = {0};
    for (uint64_t i = (uint64_t)(blockIdx.x % each) * SID_BLOCK + threadIdx.x; i < body / 16;
         i += (uint64_t)each * SID_BLOCK) {
        const uint4 w = from[i];
        own.add(SID_FRAME_BYTES + 16 * i, w);
        if (16 * i + 16 <= bytes)
            ((uint4 *)(void *)to)[i] = w;
        else if (16 * i < bytes)
            store_some(to + 16 * i, bytes - 16 * i, w);
    }
    sid_add_sums(k.sums[r], own, part);
}
__global__ void __launch_bounds__(SID_LANES) sid_pieces_open_kernel(pieces k, bool theirs, uint32_t round) {
    sid_follow();
    if (threadIdx.x) return;
    for (uint32_t r = 0; r < k.world; r++) { /* in order: of several at fault the first is told */
        const uint32_t s = theirs ? r : k.frames.rank;
        if (r != k.frames.rank && k.bytes(s)) sid_open_frame(k.frames, k.side(k.at.in, r, s, round), k.sums[r]);
        k.sums[r] = {0};
    }
}

/* ---- sums --------------------------------------------------------------------------------------------------------- */

/* Four elements of the slice a thread <- the sum over the ranks, in rank order, in float32, rounded once. Slices start at
 * multiples of 64 bytes, what has come of them at multiples of 32. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_sum_slices_kernel(uint8_t *wire, sid_sum_of_slices at, uint32_t rank, uint32_t world, sid_dtype dtype) {
    sid_follow();
    const uint32_t width = sid_width(dtype);
    for (uint64_t i = SID_QUAD * ((uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x); i < at.len;
         i += SID_QUAD * (uint64_t)gridDim.x * SID_BLOCK) {
        const uint32_t count = at.len - i < SID_QUAD ? (uint32_t)(at.len - i) : (uint32_t)SID_QUAD;
        uint8_t *const own = wire + at.own + i * width;
        float sum[SID_QUAD] = {};
        for (uint32_t r = 0; r < world; r++) {
            const uint8_t *const from = r == rank ? own : wire + at.from + r * at.apart + i * width;
            float y[1][SID_QUAD] = {};
            if (count == SID_QUAD)
                sid_load_quads(from, dtype, y);
            else
                for (uint32_t c = 0; c < count; c++) y[0][c] = sid_load1(from + c * width, dtype);
            for (uint32_t c = 0; c < SID_QUAD; c++) sum[c] = r ? sum[c] + y[0][c] : y[0][c];
        }
        if (count == SID_QUAD)
            sid_store_quad(own, dtype, sum);
        else
            for (uint32_t c = 0; c < count; c++) sid_store1(own + c * width, dtype, sum[c]);
    }
}

/* The same of bytes, modulo 256; four of them are added at once. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_sum_bytes_kernel(uint8_t *wire, sid_sum_of_slices at, uint32_t rank, uint32_t world) {
    sid_follow();
    const uint32_t low = 0x7f7f7f7fu;
    for (uint64_t i = 4 * ((uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x); i < at.len;
         i += 4 * (uint64_t)gridDim.x * SID_BLOCK) {
        const uint32_t count = at.len - i < 4 ? (uint32_t)(at.len - i) : 4;
        uint8_t *const own = wire + at.own + i;
        uint32_t sum = 0;
        for (uint32_t r = 0; r < world; r++) {
            const uint8_t *const from = r == rank ? own : wire + at.from + r * at.apart + i;
            uint32_t y = 0;
            if (count == 4)
                y = *(const uint32_t *)(const void *)from;
            else
                for (uint32_t b = 0; b < count; b++) y |= (uint32_t)from[b] << (8 * b);
            sum = ((sum & low) + (y & low)) ^ ((sum ^ y) & ~low);
        }
        for (uint32_t b = 0; b < count; b++) own[b] = (uint8_t)(sum >> (8 * b));
    }
}

/* After the decode. `first`: whose payload it calls the first. */
__global__ void __launch_bounds__(SID_LANES)
    sid_gathered_kernel(sid_exchange_head *head, uint32_t first, sid_cuda_report *report) {
    sid_follow();
    if (threadIdx.x) return;
    const sid_cuda_report found = head->report;
    if (found.status) sid_blame_rank(head->fault, found.status, first + found.culprit);
    head->nonfinite = found.nonfinite;
    head->undo = head->fault.status ? head->fault.encoded & SID_OWN : 0;
    sid_tell(*head, report);
}

/* ---- a step -------------------------------------------------------------------------------------------------------- */

sid_status work(const sid_exchange *x, uint64_t *bytes, sid_error *err) { return sid_cuda_work(x->plan, bytes, err); }

/* Writes the slice of one of the codec's reductions. sums: of an all-reduce's frames. */
sid_status encode(const sid_cuda_exchange_step &t, uint8_t *payload, uint32_t reduction = 0,
                  sid_part_sum *sums = nullptr) {
    sid_cuda_encoding c = sid_encoding_of(t, t.x->plan, t.step, t.state, payload);
    sid_status s = SID_OK;
    c.reduction = reduction;
    c.stats = t.stats;
    if (!reduction) s = sid_launch(t.to, "begin", sid_gather_begin_kernel, 1, SID_LANES, 0, t.head, sums, t.x->world);
    if (!s) s = sid_enqueue(c, t.table, t.work);
    if (!s && !reduction)
        s = sid_launch(t.to, "sent", sid_gather_sent_kernel, 1, SID_LANES, 0, t.head, (const uint8_t *)payload,
                       t.step.rank);
    return s;
}

sid_status decode(const sid_cuda_exchange_step &t, uint64_t stride, uint32_t count, uint32_t first) {
    const sid_plan *p = t.x->plan;
    sid_cuda_decoding c = sid_decoding_of(t, p, t.step, t.wire, stride, count, 1.0f / (float)t.x->world);
    c.state = p->memory->vectors ? (sid_state *)(void *)t.state : nullptr;
    sid_status s = sid_enqueue(c, t.table, t.work);
    if (!s) s = sid_launch(t.to, "gathered", sid_gathered_kernel, 1, SID_LANES, 0, t.head, first, t.report);
    if (s) return s;
    return sid_enqueue_undo(t, SID_OWN, p, sid_group_of(t.table, p->n, t.work), {t.state, 0, p->n});
}

sid_status gather_advance(sid_cuda_exchange_step &t, uint32_t round) {
    return round ? SID_OK : encode(t, t.wire + t.x->rank * t.x->message);
}
sid_status gather_finish(sid_cuda_exchange_step &t) { return decode(t, t.x->message, t.x->world, 0); }

/* All-reduce's work: the codec's, and the frames' sums. */
sid_status reduce_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    const sid_status s = work(x, bytes, err);
    if (!s) *bytes = sid_round_up(*bytes, 64) + sid_round_up(x->world * sizeof(sid_part_sum), 64);
    return s;
}

enum {
    PIECE_BLOCKS = 4 /* on a multiprocessor */
};

/* The frames of a round of sum i. */
struct frames_of {
    const sid_cuda_exchange_step &t;
    pieces k;
    uint32_t each; /* blocks of a frame */
    frames_of(const sid_cuda_exchange_step &step, sid_part_sum *sums, uint32_t i)
        : t(step), k{sid_frames_of(step), sums, sid_sum_of_slices_of(step.x, i), step.x->world} {
        const uint64_t pieces = 1 + t.x->message / (16 * SID_BLOCK);
        const uint64_t most = 1 + (uint64_t)t.to.processors * PIECE_BLOCKS / t.x->world;
        each = (uint32_t)(pieces < most ? pieces : most);
    }
    sid_status send(uint32_t first, uint32_t count, uint32_t round) const {
        const sid_status s = sid_launch(t.to, "pieces out", sid_pieces_out_kernel, (uint64_t)each * count, SID_BLOCK, 0,
                                        k, first, count > 1, each);
        return s ? s : sid_launch(t.to, "close", sid_pieces_close_kernel, 1, SID_BLOCK, 0, k, first, count, round);
    }
    sid_status receive(bool theirs, uint32_t round) const {
        const sid_status s = sid_launch(t.to, "pieces in", sid_pieces_in_kernel, (uint64_t)each * k.world, SID_BLOCK, 0,
                                        k, theirs, each);
        return s ? s : sid_launch(t.to, "open", sid_pieces_open_kernel, 1, SID_LANES, 0, k, theirs, round);
    }
};

/* Sum i of the codec's: rounds 2 i and 2 i + 1. */
sid_status reduce_advance(sid_cuda_exchange_step &t, uint32_t round) {
    const uint32_t i = round / 2, rank = t.x->rank, world = t.x->world;
    const sid_dtype dtype = t.x->plan->sizes.body_dtype;
    uint64_t scratch;
    sid_status s = work(t.x, &scratch, t.to.err);
    if (s) return s;
    sid_part_sum *const sums = (sid_part_sum *)(void *)(t.work + sid_round_up(scratch, 64));
    if (round % 2 == 0) {
        if (round) s = frames_of(t, sums, i - 1).receive(true, round - 1);
        if (s || (round && round == t.x->rounds)) return s;
        s = encode(t, t.wire, i, sums);
        return s || world == 1 ? s : frames_of(t, sums, i).send(0, world, round);
    }
    const frames_of f(t, sums, i);
    const sid_sum_of_slices &at = f.k.at;
    const uint64_t grid = sid_blocks(t.to, (at.len + SID_CHUNK - 1) / SID_CHUNK, 8);
    s = f.receive(false, round - 1);
    if (s) return s;
    if (dtype == SID_I8)
        s = sid_launch(t.to, "sum", sid_sum_bytes_kernel, grid, SID_BLOCK, 0, t.wire, at, rank, world);
    else
        s = sid_launch(t.to, "sum", sid_sum_slices_kernel, grid, SID_BLOCK, 0, t.wire, at, rank, world, dtype);
    return s ? s : f.send(rank, 1, round);
}
sid_status reduce_finish(sid_cuda_exchange_step &t) { return decode(t, t.x->plan->sizes.payload, 1, t.x->rank); }

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_allreduce, sid_cuda_exchange_allgather;
const sid_cuda_exchange sid_cuda_exchange_allreduce = {reduce_work, reduce_advance, reduce_finish};
const sid_cuda_exchange sid_cuda_exchange_allgather = {work, gather_advance, gather_finish};
}
