/* All-gather and all-reduce as messages, between them (csrc/exchange/gather.c is the law): for exchanges that have one of
 * them within, since process groups have both themselves. The codec's own passes, and for the rank's slice of a sum of bodies
 * of b bytes among W ranks b / W read of each, b / W written. */
#include "exchange.cuh"

namespace {

/* After the encode, which leaves no header where the segment table is not the group's. Then what is to be summed becomes NaN,
 * or 0xff where it is of bytes, so that the others fail too. */
struct summed_body {
    uint8_t *first; /* NULL: it is not summed */
    uint64_t count;
    sid_dtype dtype;
};

__global__ void __launch_bounds__(SID_LANES) sid_gather_begin_kernel(sid_exchange_head *head) {
    sid_follow();
    if (threadIdx.x == 0) sid_enter(*head, nullptr, 0);
}

__global__ void __launch_bounds__(SID_BLOCK)
    sid_gather_sent_kernel(sid_exchange_head *head, const uint8_t *payload, uint32_t rank, summed_body body) {
    sid_follow();
    const bool none = ((const sid_header *)(const void *)payload)->magic != SID_MAGIC;
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        if (none)
            sid_blame_rank(head->fault, SID_E_ARG, rank);
        else
            head->fault.encoded |= SID_OWN;
    }
    if (!none || !body.first) return;
    for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < body.count;
         i += (uint64_t)gridDim.x * SID_BLOCK)
        if (body.dtype == SID_I8)
            body.first[i] = 0xff;
        else
            sid_store1(body.first + i * sid_width(body.dtype), body.dtype, sid_bits_f32(0x7fc00000u));
}

/* Four elements of the slice a thread <- the sum over the ranks, in rank order, in float32, rounded once. Slices start at
 * multiples of 64 bytes. */
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

/* The same of bytes, modulo 256; four of them are added at once. Slices start at multiples of 64. */
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

/* Or of a codec of several rounds the slice of one. */
sid_status encode(const sid_cuda_trip &t, uint8_t *payload, const summed_body &body, uint32_t round = 0) {
    sid_cuda_encoding c = sid_encoding_of(t, t.x->plan, t.at, t.state, payload);
    sid_status s = SID_OK;
    c.round = round;
    c.stats = t.stats;
    if (!round) s = sid_launch(t.to, "begin", sid_gather_begin_kernel, 1, SID_LANES, 0, t.head);
    if (!s) s = sid_enqueue(c, t.table, t.work);
    const uint64_t pieces = 1 + (body.first ? body.count / SID_BLOCK : 0);
    if (!s)
        s = sid_launch(t.to, "sent", sid_gather_sent_kernel, sid_blocks(t.to, pieces, 2), SID_BLOCK, 0, t.head, payload,
                       t.at.rank, body);
    return s;
}

sid_status decode(const sid_cuda_trip &t, uint64_t stride, uint32_t count, uint32_t first) {
    const sid_plan *p = t.x->plan;
    sid_cuda_decoding c = sid_decoding_of(t, p, t.at, t.wire, stride, count, 1.0f / (float)t.x->world);
    c.state = p->memory->vectors ? (sid_state *)(void *)t.state : nullptr;
    sid_status s = sid_enqueue(c, t.table, t.work);
    if (!s) s = sid_launch(t.to, "gathered", sid_gathered_kernel, 1, SID_LANES, 0, t.head, first, t.report);
    if (s) return s;
    return sid_enqueue_undo(t, SID_OWN, p, sid_group_of(t.table, p->n, t.work), {t.state, 0, p->n});
}

sid_status gather_advance(sid_cuda_trip &t, uint32_t round) {
    return round ? SID_OK : encode(t, t.wire + t.x->rank * t.x->message, {});
}
sid_status gather_finish(sid_cuda_trip &t) { return decode(t, t.x->message, t.x->world, 0); }

/* Sum i of the codec's: rounds 2 i and 2 i + 1. */
sid_status reduce_advance(sid_cuda_trip &t, uint32_t round) {
    const uint32_t i = round / 2, rank = t.x->rank, world = t.x->world;
    const sid_dtype dtype = t.x->plan->sizes.body_dtype;
    if (round % 2 == 0) {
        if (round && round == t.x->rounds) return SID_OK;
        const sid_slice of = sid_plan_round(t.x->plan, i);
        return encode(t, t.wire, {t.wire + of.offset, of.count, dtype}, i);
    }
    const sid_sum_of_slices at = sid_sum_of_slices_of(t.x, i);
    const uint64_t grid = sid_blocks(t.to, (at.len + SID_CHUNK - 1) / SID_CHUNK, 8);
    if (dtype == SID_I8)
        return sid_launch(t.to, "sum", sid_sum_bytes_kernel, grid, SID_BLOCK, 0, t.wire, at, rank, world);
    return sid_launch(t.to, "sum", sid_sum_slices_kernel, grid, SID_BLOCK, 0, t.wire, at, rank, world, dtype);
}
sid_status reduce_finish(sid_cuda_trip &t) { return decode(t, t.x->plan->sizes.payload, 1, t.x->rank); }

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_allreduce, sid_cuda_exchange_allgather;
const sid_cuda_exchange sid_cuda_exchange_allreduce = {work, reduce_advance, reduce_finish};
const sid_cuda_exchange sid_cuda_exchange_allgather = {work, gather_advance, gather_finish};
}
