/* All-gather and all-reduce as messages, between them (csrc/exchange/gather.c is the law): for exchanges that have one of
 * them within, since process groups have both themselves. The codec's own passes, and for the rank's slice of a sum of bodies
 * of b bytes among W ranks b / W read of each, b / W written. */
#include "exchange.cuh"

namespace {

/* After the encode, which leaves no header where the segment table is not the group's. Then a body to be summed becomes NaN,
 * so that the others fail too. */
struct summed_body {
    uint8_t *first; /* NULL: it is not summed */
    uint64_t count;
    sid_dtype dtype;
};

__global__ void __launch_bounds__(SID_LANES) sid_gather_begin_kernel(sid_exchange_head *head) {
    if (threadIdx.x == 0) sid_enter(*head, nullptr, 0);
}

__global__ void __launch_bounds__(SID_BLOCK)
    sid_gather_sent_kernel(sid_exchange_head *head, const uint8_t *payload, uint32_t rank, summed_body body) {
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
        sid_store1(body.first + i * sid_width(body.dtype), body.dtype, sid_bits_f32(0x7fc00000u));
}

/* Four elements of the slice a thread <- the sum over the ranks, in rank order, in float32, rounded once. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_sum_slices_kernel(uint8_t *wire, sid_sum_of_slices at, uint32_t rank, uint32_t world, sid_dtype dtype) {
    for (uint64_t i = SID_QUAD * ((uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x); i < at.len;
         i += SID_QUAD * (uint64_t)gridDim.x * SID_BLOCK) {
        const uint64_t place = i * sid_width(dtype);
        float sum[SID_QUAD] = {};
        for (uint32_t r = 0; r < world; r++) {
            const uint8_t *from = wire + (r == rank ? at.own : at.from + r * at.apart) + place;
            for (uint32_t c = 0; c < SID_QUAD; c++) {
                if (i + c >= at.len) break;
                const float y = sid_load1(from + c * sid_width(dtype), dtype);
                sum[c] = r ? sum[c] + y : y;
            }
        }
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (i + c < at.len) sid_store1(wire + at.own + place + c * sid_width(dtype), dtype, sum[c]);
    }
}

/* After the decode. `first`: whose payload it calls the first. */
__global__ void __launch_bounds__(SID_LANES)
    sid_gathered_kernel(sid_exchange_head *head, uint32_t first, sid_cuda_report *report) {
    if (threadIdx.x) return;
    const sid_cuda_report found = head->report;
    if (found.status) sid_blame_rank(head->fault, found.status, first + found.culprit);
    head->nonfinite = found.nonfinite;
    head->undo = head->fault.status ? head->fault.encoded & SID_OWN : 0;
    sid_tell(*head, report);
}

/* ---- a step -------------------------------------------------------------------------------------------------------- */

sid_status work(const sid_exchange *x, uint64_t *bytes, sid_error *err) { return sid_cuda_work(x->plan, bytes, err); }

sid_status reduce_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    if (x->plan->sizes.rounds == 1) return work(x, bytes, err);
    return sid_fail(err, SID_E_UNSUPPORTED, "codec '%s' takes %u sums; exchange '%s' on CUDA has one",
                    x->plan->codec->info.name, x->plan->sizes.rounds, x->kind->info.name);
}

sid_status encode(const sid_cuda_trip &t, uint8_t *payload, const summed_body &body) {
    sid_cuda_encoding c = sid_encoding_of(t, t.x->plan, t.at, t.state, payload);
    c.stats = t.stats;
    sid_status s = sid_launch(t.to, "begin", sid_gather_begin_kernel, 1, SID_LANES, 0, t.head);
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

sid_status reduce_advance(sid_cuda_trip &t, uint32_t round) {
    const sid_sizes &z = t.x->plan->sizes;
    if (!round) return encode(t, t.wire, {t.wire + z.body_offset, z.body_count, z.body_dtype});
    if (round != 1) return SID_OK;
    const sid_sum_of_slices at = sid_sum_of_slices_of(t.x);
    return sid_launch(t.to, "sum", sid_sum_slices_kernel, sid_blocks(t.to, (at.len + SID_CHUNK - 1) / SID_CHUNK, 8),
                      SID_BLOCK, 0, t.wire, at, t.x->rank, t.x->world, z.body_dtype);
}
sid_status reduce_finish(sid_cuda_trip &t) { return decode(t, t.x->plan->sizes.payload, 1, t.x->rank); }

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_allreduce, sid_cuda_exchange_allgather;
const sid_cuda_exchange sid_cuda_exchange_allreduce = {reduce_work, reduce_advance, reduce_finish};
const sid_cuda_exchange sid_cuda_exchange_allgather = {work, gather_advance, gather_finish};
}
