/* Exchanges of messages share this file on a device (csrc/exchange/ defines the result): the head of their work,
 * frames, and the end of a step. Between the messages everything is enqueued: a fault stays on the device, travels to
 * the other ranks as on the CPU, in frames or in payloads that are none, and closes the gate of what would follow. The
 * host sees it in the report. */
#ifndef SID_EXCHANGE_CUH
#define SID_EXCHANGE_CUH

#include "../core/codec.cuh"

extern "C" {
#include "exchange/exchange.h"
}

struct sid_exchange_head {
    sid_fault fault;        /* as the CPU's, but for the text */
    sid_part_sum in, out;   /* of a round's frames; zero between kernels */
    sid_cuda_report report; /* what a codec's call has found, until it is taken for a fault */
    sid_segment own;        /* a table of one segment: a vector in work, */
    uint64_t own_start[2];  /* and its starts */
    uint32_t nonfinite;     /* the step's outcome is not finite */
    uint32_t undo;          /* what is to be taken out of the memory again: SID_OWN, SID_FOR_ALL */
};
enum {
    SID_EXCHANGE_HEAD = 384
};
static_assert(sizeof(sid_exchange_head) <= SID_EXCHANGE_HEAD, "what is the exchange's own begins behind it");

/* One step of one rank, as of sid_exchange_step. */
struct sid_cuda_exchange_step {
    const sid_exchange *x;
    sid_table table;              /* of the group */
    uint8_t *state, *wire, *work; /* work: what lies behind the head */
    sid_exchange_head *head;
    sid_step step;
    sid_stats *stats;        /* or NULL */
    sid_cuda_report *report; /* the caller's */
    sid_stream to;
    bool beside; /* `meanwhile` is called in every round */
    const int32_t *gate() const { return &head->fault.status; }
};

/* All functions run on the host and only launch. */
struct sid_cuda_exchange {
    sid_status (*work)(const sid_exchange *x, uint64_t *bytes, sid_error *err); /* beyond the head */
    sid_status (*advance)(sid_cuda_exchange_step &t, uint32_t round);           /* as of sid_exchange_kind */
    /* Writes the segments; or, after a fault, takes out of the memory what the step has put in. Tells the report. */
    sid_status (*finish)(sid_cuda_exchange_step &t);
    /* As of sid_exchange_kind, where t.beside; else advance enqueues it all. */
    sid_status (*meanwhile)(sid_cuda_exchange_step &t, uint32_t round) = nullptr;
};
const sid_cuda_exchange *sid_cuda_exchange_of(const sid_exchange_kind *k); /* exchange.cu; NULL: no kernels */

/* The codec's calls within a step. */
inline sid_cuda_encoding sid_encoding_of(const sid_cuda_exchange_step &t, const sid_plan *p, const sid_step &step,
                                         uint8_t *state, uint8_t *payload) {
    sid_cuda_encoding c = {};
    c.plan = p;
    c.step = step;
    c.state = (sid_state *)(void *)state;
    c.payload = payload;
    c.to = t.to;
    return c;
}
/* Gated, without a memory. */
inline sid_cuda_decoding sid_decoding_of(const sid_cuda_exchange_step &t, const sid_plan *p, const sid_step &step,
                                         const uint8_t *payloads, uint64_t stride, uint32_t count, float scale) {
    sid_cuda_decoding c = {};
    c.plan = p;
    c.payloads = payloads;
    c.stride = stride;
    c.count = count;
    c.scale = scale;
    c.step = step.step;
    c.of_group = step.group;
    c.gate = t.gate();
    c.report = &t.head->report;
    c.to = t.to;
    return c;
}

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* The start of a step, by one thread; `own` and its length: of the vector in work, if there is one. */
__device__ inline void sid_enter(sid_exchange_head &h, float *own, uint64_t len) {
    h.fault.status = SID_OK;
    h.fault.culprit = h.fault.flags = h.fault.encoded = 0;
    h.in = h.out = {0};
    h.report = {0, 0, SID_OK, 0};
    h.own = {own, len};
    h.own_start[0] = 0;
    h.own_start[1] = len;
    h.nonfinite = h.undo = 0;
}

__device__ inline void sid_blame_rank(sid_fault &f, int32_t status, uint32_t culprit) {
    if (f.status) return;
    f.status = status;
    f.culprit = culprit;
    f.flags = (f.flags & 0xffffu) | SID_FRAME_POISON | culprit << SID_FRAME_CULPRIT;
}

/* Tells the host the outcome of the step. The host keeps the first fault that it is told of. */
__device__ inline void sid_tell(const sid_exchange_head &h, sid_cuda_report *report) {
    report->nonfinite = h.fault.status == SID_OK && h.nonfinite;
    if (h.fault.status == SID_OK || report->status != SID_OK) return;
    report->status = h.fault.status;
    report->culprit = h.fault.culprit;
}

/* ---- frames ------------------------------------------------------------------------------------------------------ */

/* A block's share of a body's sum. */
__device__ inline void sid_add_sums(sid_part_sum &to, sid_part_sum own, sid_part_sum (&part)[SID_WARPS]) {
    own = sid_block_sums(own, part);
    if (threadIdx.x) return;
    atomicAdd(&to.sum, own.sum);
}

/* The step, as a kernel sees it. */
struct sid_frames {
    uint8_t *wire;
    sid_exchange_head *head;
    sid_draw draw; /* this rank's random stream, and by it step and group */
    uint32_t rank, world;
    uint16_t exchange;
};
inline sid_frames sid_frames_of(const sid_cuda_exchange_step &t) {
    return {t.wire,      t.head,     {sid_salt(t.step.seed, t.step.rank), t.step.group, t.step.step},
            t.step.rank, t.x->world, t.x->kind->info.wire_id};
}

/* The frame's checksum, with `body` the share of what follows it. */
__device__ inline uint64_t sid_frame_checksum(const sid_frame &f, sid_part_sum body) {
    uint32_t w[SID_FRAME_BYTES / 4];
    memcpy(w, &f, sizeof f);
    for (uint32_t i = 0; i < SID_FRAME_BYTES / 4 - 2; i++) body.sum += w[i] * sid_sum_key(i);
    return body.sum;
}

/* Checks a frame as sid_frame_open does. */
__device__ inline void sid_open_frame(const sid_frames &s, const sid_hop_side &h, const sid_part_sum &body) {
    const sid_frame f = *(const sid_frame *)(const void *)(s.wire + h.frame);
    sid_fault &fault = s.head->fault;
    if (f.magic != SID_FRAME_MAGIC || f.checksum != sid_frame_checksum(f, body))
        sid_blame_rank(fault, SID_E_CORRUPT, h.peer);
    else if (f.exchange != s.exchange || f.round != (uint16_t)h.round || f.step != s.draw.step ||
             f.group != s.draw.group)
        sid_blame_rank(fault, SID_E_MISMATCH, h.peer);
    else if (f.flags & SID_FRAME_POISON)
        sid_blame_rank(fault, SID_E_CORRUPT,
                       f.flags >> SID_FRAME_CULPRIT < s.world ? f.flags >> SID_FRAME_CULPRIT : h.peer);
    else
        fault.flags |= f.flags & SID_FRAME_NONFINITE;
}

__device__ inline void sid_close_frame(const sid_frames &s, const sid_hop_side &h, const sid_part_sum &body) {
    sid_frame f;
    memset(&f, 0, sizeof f);
    f.magic = SID_FRAME_MAGIC;
    f.flags = s.head->fault.flags & ~h.untold;
    f.step = s.draw.step;
    f.group = s.draw.group;
    f.exchange = s.exchange;
    f.round = (uint16_t)h.round;
    f.checksum = sid_frame_checksum(f, body);
    *(sid_frame *)(void *)(s.wire + h.frame) = f;
}

/* After a kernel that has read the body of h.in and written that of h.out, whose sums are in the head: opens the one frame
 * and closes the other. head->report: what the kernel has found wrong with the body. */
sid_status sid_end_hop(const sid_stream &to, const sid_frames &s, const sid_hop &h);

/* ---- slices that all ranks have as payloads --------------------------------------------------------------------------- */

struct sid_cuda_slices {
    const sid_plan *plan; /* three, of sid_slice_kind */
    const uint8_t *first; /* the payload of slice 0, `apart` bytes from the next */
    uint64_t apart;
    uint32_t second; /* of a payload's group: SID_SECOND, or 0 */
    int64_t from;    /* the rank that a bad one is told of; less than 0: that of the slice */
    float scale;
    uint8_t *work; /* the codec's */
    const sid_plan *of(const sid_exchange *x, uint32_t s) const { return &plan[sid_slice_kind(x, s)]; }
};
/* How many slices are not empty, and slice s of the table. */
inline uint32_t sid_slices(const sid_exchange *x) {
    uint32_t s = 0;
    while (s < x->world && sid_slice_len(x, s)) s++;
    return s;
}
inline sid_table sid_slice_table(const sid_cuda_exchange_step &t, uint32_t s) {
    const uint64_t offset = sid_slice_start(t.x, s), end = offset + sid_slice_len(t.x, s);
    return {t.table.segs, t.table.n_seg, t.table.dtype, t.table.before + offset, t.table.after + t.x->n - end};
}
/* Turns the findings of a codec's call, in head->report, into a fault: of rank first + its culprit, or of `first` alone.
 * If `closes` is not NULL, it receives the status. */
sid_status sid_enqueue_found(const sid_cuda_exchange_step &t, uint32_t first, bool alone, int32_t *closes);
/* Checks all of them; then tells the report what the step has come to (one that is not finite makes all so); then writes
 * them to the segments. */
sid_status sid_check_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k);
sid_status sid_end_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k);
sid_status sid_write_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k);

/* ---- the end of a step ------------------------------------------------------------------------------------------- */

/* Parts of a state that lie `apart` bytes from one another, one for each slice of `slice` elements. */
struct sid_own_parts {
    uint8_t *state;
    uint64_t apart, slice;
};

/* If head->undo has `what`, takes the gradient, which g still holds, out of the parts again, and nothing counts as sent.
 * Only then does it read and write the memory, and read the gradient. */
sid_status sid_enqueue_undo(const sid_cuda_exchange_step &t, uint32_t what, const sid_plan *p, const sid_group &g,
                            const sid_own_parts &parts);

#endif
