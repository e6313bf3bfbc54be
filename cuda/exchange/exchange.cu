/* sidcomp.h's calls of exchanges on a device. A call checks its arguments, enters the device, and calls the exchange,
 * which only launches. The kernels here are what the exchanges share. All but undo have one block, and the latency of a
 * launch is their limit:
 *     end of a hop, found     turn checksums and a codec's findings into a fault of the step
 *     confirm, confirmed      are the last round, in which all ranks tell one another whether all went well
 *     end                     writes what the step has come to into the report
 *     undo                    takes the gradient out of the memory after a fault: reads it, 4 bytes an element, reads
 *                             and writes each vector. Bandwidth is its limit; without a fault it does nothing */
#include "exchange.cuh"

/* ---- those that have kernels --------------------------------------------------------------------------------------- */

#define CUDA_0(symbol)
#define CUDA_1(symbol)                                                                                                 \
    extern "C" const sid_exchange_kind sid_exchange_##symbol;                                                          \
    extern "C" const sid_cuda_exchange sid_cuda_exchange_##symbol;
#define SID_EXCHANGE(symbol, cuda, within) CUDA_##cuda(symbol)
#include "exchanges.def"
#undef CUDA_1

#define CUDA_1(symbol) {&sid_exchange_##symbol, &sid_cuda_exchange_##symbol},
static const struct {
    const sid_exchange_kind *kind;
    const sid_cuda_exchange *cuda;
} kinds[] = {
#include "exchanges.def"
};

const sid_cuda_exchange *sid_cuda_exchange_of(const sid_exchange_kind *k) {
    for (const auto &row : kinds)
        if (row.kind == k) return row.cuda;
    return nullptr;
}

namespace {

/* ---- undo ---------------------------------------------------------------------------------------------------------- */

enum {
    UNDO_BLOCKS = 4 /* on a multiprocessor */
};

__global__ void __launch_bounds__(SID_BLOCK) sid_undo_kernel(sid_group g, const sid_exchange_head *head, uint32_t what,
                                                             sid_own_parts parts, sid_rule none, sid_kept memory) {
    sid_follow();
    if (!(head->undo & what)) return;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span s = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < s.len; i += SID_ROW) { /* a quad lies in one slice */
            const uint64_t part = (s.at + i) / parts.slice, first = part * parts.slice;
            const uint64_t len = g.n - first < parts.slice ? g.n - first : parts.slice;
            sid_state *const state = (sid_state *)(void *)(parts.state + part * parts.apart);
            const sid_vectors v = {(float *)(void *)((uint8_t *)state + SID_STATE_BYTES) - first, sid_state_stride(len),
                                   0};
            memory.begin(state);
            sid_undo(memory, g, s, v, i, sid_count4(s.len, i));
        }
    }
    for (uint64_t part = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; part * parts.slice < g.n;
         part += (uint64_t)gridDim.x * SID_BLOCK) /* nobody here reads it */
        ((sid_state *)(void *)(parts.state + part * parts.apart))->rule = none;
}

/* ---- the last round ------------------------------------------------------------------------------------------------ */

/* A frame without a body to all ranks, that of rank r at `offset` + 64 (r + 1); own one at `offset`. */
__global__ void __launch_bounds__(SID_LANES) sid_confirm_kernel(sid_frames s, uint64_t offset, uint32_t round) {
    sid_follow();
    if (threadIdx.x == 0) sid_close_frame(s, {offset, 0, 0, 0, round, 0, 0}, {0});
}
__global__ void __launch_bounds__(SID_LANES)
    sid_confirmed_kernel(sid_frames s, uint64_t offset, uint32_t round, uint32_t world) {
    sid_follow();
    if (threadIdx.x) return;
    for (uint32_t r = 0; r < world; r++) /* in order: of several at fault the first is told */
        if (r != s.rank) sid_open_frame(s, {offset + (r + 1ull) * 64, 0, 0, 0, round, r}, {0});
}

/* ---- hops and slices ----------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(SID_LANES) sid_hop_end_kernel(sid_frames s, sid_hop h) {
    sid_follow();
    if (threadIdx.x) return;
    if (h.in.frame) {
        sid_open_frame(s, h.in, s.head->in);
        if (s.head->report.status) sid_blame_rank(s.head->fault, s.head->report.status, h.in.peer);
        s.head->report = {0, 0, SID_OK, 0};
    }
    if (h.out.frame) sid_close_frame(s, h.out, s.head->out);
    s.head->in = s.head->out = {0};
}

__global__ void __launch_bounds__(SID_LANES)
    sid_found_kernel(sid_exchange_head *head, uint32_t first, bool alone, int32_t *closes) {
    sid_follow();
    if (threadIdx.x) return;
    const sid_cuda_report found = head->report;
    if (found.status) sid_blame_rank(head->fault, found.status, alone ? first : first + found.culprit);
    if (closes) *closes = found.status;
    head->report = {0, 0, SID_OK, 0};
}

/* All ranks have told: what the step has come to. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_slices_end_kernel(sid_exchange_head *head, const uint8_t *payloads, uint64_t apart, uint32_t slices,
                          sid_cuda_report *report) {
    sid_follow();
    int bad = 0;
    const bool sound = head->fault.status == SID_OK;
    for (uint32_t s = threadIdx.x; s < slices && sound; s += SID_BLOCK)
        bad |= ((const sid_header *)(const void *)(payloads + s * apart))->flags & SID_FLAG_NONFINITE;
    bad = __syncthreads_or(bad);
    if (threadIdx.x) return;
    head->nonfinite = bad != 0;
    if (bad || !sound) head->undo = head->fault.encoded & (SID_OWN | SID_FOR_ALL);
    sid_tell(*head, report);
}

sid_status kernels_of(const sid_exchange *x, const sid_cuda_exchange **kind, sid_error *err) {
    if (!x) return sid_fail(err, SID_E_ARG, "exchange is NULL");
    *kind = sid_cuda_exchange_of(x->kind);
    for (uint32_t i = 0; *kind && i < x->kind->parts(x); i++) {
        const sid_status s = sid_with_memory(x->kind->part(x, i).plan, err, [](auto) { return SID_OK; });
        if (s) return s;
    }
    if (*kind) return SID_OK;
    return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' has no CUDA kernels: leave it out on CUDA, or take another",
                    x->kind->info.name);
}

sid_status table_holds(const sid_segment *segs_dev, uint32_t n_seg, sid_error *err) {
    if (n_seg && !segs_dev) return sid_fail(err, SID_E_ARG, "the segment table is NULL");
    if (n_seg <= SID_CUDA_MAX_SEGMENTS) return SID_OK;
    return sid_fail(err, SID_E_UNSUPPORTED, "the group has %u segments: the CUDA kernels take at most %d", n_seg,
                    (int)SID_CUDA_MAX_SEGMENTS);
}

} // namespace

sid_status sid_end_hop(const sid_stream &to, const sid_frames &s, const sid_hop &h) {
    return sid_launch(to, "end of a hop", sid_hop_end_kernel, 1, SID_LANES, 0, s, h);
}

sid_status sid_enqueue_found(const sid_cuda_exchange_step &t, uint32_t first, bool alone, int32_t *closes) {
    return sid_launch(t.to, "found", sid_found_kernel, 1, SID_LANES, 0, t.head, first, alone, closes);
}

/* Those of whole slices at once, and that of the short one. */
sid_status sid_check_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k) {
    const sid_exchange *x = t.x;
    const uint32_t slices = sid_slices(x);
    for (uint32_t s = 0; s < slices;) {
        uint32_t count = 1;
        while (s + count < slices && sid_slice_kind(x, s + count) == sid_slice_kind(x, s)) count++;
        sid_cuda_decoding c = sid_decoding_of(t, k.of(x, s), sid_slice_step(&t.step, s | k.second, s, x->world),
                                              k.first + s * k.apart, k.apart, count, 1.0f);
        c.apart = 1u << SID_SUBGROUPS;
        c.part = SID_CHECK;
        sid_status status = sid_enqueue(c, sid_slice_table(t, s), k.work);
        if (!status) status = sid_enqueue_found(t, k.from < 0 ? s : (uint32_t)k.from, k.from >= 0, nullptr);
        if (status) return status;
        s += count;
    }
    return SID_OK;
}

sid_status sid_end_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k) {
    return sid_launch(t.to, "end", sid_slices_end_kernel, 1, SID_BLOCK, 0, t.head, k.first, k.apart, sid_slices(t.x),
                      t.report);
}

sid_status sid_write_slices(const sid_cuda_exchange_step &t, const sid_cuda_slices &k) {
    const sid_exchange *x = t.x;
    const uint32_t slices = sid_slices(x);
    sid_status status = SID_OK;
    for (uint32_t s = 0; s < slices && !status; s++) {
        sid_cuda_decoding c = sid_decoding_of(t, k.of(x, s), sid_slice_step(&t.step, s | k.second, s, x->world),
                                              k.first + s * k.apart, k.apart, 1, k.scale);
        c.part = SID_WRITE;
        c.nonfinite = &t.head->nonfinite;
        status = sid_enqueue(c, sid_slice_table(t, s), k.work);
    }
    return status;
}

sid_status sid_enqueue_undo(const sid_cuda_exchange_step &t, uint32_t what, const sid_plan *p, const sid_group &g,
                            const sid_own_parts &parts) {
    sid_rule none = {};
    sid_kept memory;
    if (!p->memory->vectors || !g.n) return SID_OK;
    p->codec->none(&none);
    const sid_status s = sid_kept_of(p, t.to.err, &memory);
    return s ? s
             : sid_launch(t.to, "undo", sid_undo_kernel, sid_blocks(t.to, sid_chunks(g.n), UNDO_BLOCKS), SID_BLOCK, 0,
                          g, (const sid_exchange_head *)t.head, what, parts, none, memory);
}

sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    const sid_cuda_exchange *kind;
    uint64_t own = 0;
    if (err) err->text[0] = 0;
    if (!bytes) return sid_fail(err, SID_E_ARG, "bytes is NULL");
    *bytes = 0;
    sid_status s = kernels_of(x, &kind, err);
    if (!s) s = kind->work(x, &own, err);
    if (!s) *bytes = SID_EXCHANGE_HEAD + own;
    return s;
}

/* A step from the arguments of a call, which are checked; the device is entered. */
static sid_status step_of(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                          void *state, void *work, const sid_step *step, void *wire, void *stats_dev, void *report_dev,
                          int device, void *stream, sid_device_scope *scope, const sid_cuda_exchange **kind,
                          sid_cuda_exchange_step *t, sid_error *err) {
    if (err) err->text[0] = 0;
    sid_status status = kernels_of(x, kind, err);
    if (status) return status;
    status = sid_check_step(step, err);
    if (status) return status;
    if (round > x->sizes.rounds || step->rank != x->rank || step->world != x->world || step->group >> SID_SUBGROUPS)
        return sid_fail(err, SID_E_ARG, "the step is of another rank than the exchange, or there is no round %u",
                        round);
    status = table_holds(segs_dev, n_seg, err);
    if (status) return status;
    for (const void *p : {(const void *)state, (const void *)work, (const void *)wire})
        if (!p || (uintptr_t)p % 64)
            return sid_fail(err, SID_E_ARG, "state, work and wire must start at multiples of 64 bytes");
    if (!report_dev || (uintptr_t)report_dev % 4)
        return sid_fail(err, SID_E_ARG, "report is NULL, or does not start at a multiple of 4 bytes");
    if ((uintptr_t)stats_dev % 8) return sid_fail(err, SID_E_ARG, "stats must start at a multiple of 8 bytes");
    if (device < 0) return sid_fail(err, SID_E_ARG, "device is %d: give the number of a GPU, from 0 on", device);
    *t = {x,
          {segs_dev, n_seg, x->dtype, 0, 0},
          (uint8_t *)state,
          (uint8_t *)wire,
          (uint8_t *)work + SID_EXCHANGE_HEAD,
          (sid_exchange_head *)work,
          *step,
          (sid_stats *)stats_dev,
          (sid_cuda_report *)report_dev,
          {(cudaStream_t)stream, 0, err},
          (device & SID_CUDA_BESIDE) != 0 && (*kind)->meanwhile};
    return scope->enter(device & ~SID_CUDA_BESIDE, &t->to);
}

sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *step, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err) {
    const sid_cuda_exchange *kind;
    sid_device_scope scope;
    sid_cuda_exchange_step t;
    sid_status status = step_of(x, round, segs_dev, n_seg, state, work, step, wire, stats_dev, report_dev, device,
                                stream, &scope, &kind, &t, err);
    if (status) return status;
    const uint64_t confirms = x->confirm_at;
    if (round <= x->rounds) status = kind->advance(t, round);
    if (!status && x->confirms && round == x->rounds)
        status = sid_launch(t.to, "confirm", sid_confirm_kernel, 1, SID_LANES, 0, sid_frames_of(t), confirms, round);
    if (!status && x->confirms && round > x->rounds)
        status = sid_launch(t.to, "confirmed", sid_confirmed_kernel, 1, SID_LANES, 0, sid_frames_of(t), confirms,
                            x->rounds, x->world);
    return status || round < x->sizes.rounds ? status : kind->finish(t);
}

sid_status sid_cuda_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev,
                                       uint32_t n_seg, void *state, void *work, const sid_step *step, void *wire,
                                       void *stats_dev, void *report_dev, int device, void *stream, sid_error *err) {
    const sid_cuda_exchange *kind;
    sid_device_scope scope;
    sid_cuda_exchange_step t;
    const sid_status status = step_of(x, round, segs_dev, n_seg, state, work, step, wire, stats_dev, report_dev,
                                      device < 0 ? device : device | SID_CUDA_BESIDE, stream, &scope, &kind, &t, err);
    return status || !t.beside || round >= x->rounds ? status : kind->meanwhile(t, round);
}

/* ---- between steps ------------------------------------------------------------------------------------------------- */

/* The plan whose state the exchange's is. */
static sid_status whole_of(const sid_exchange *x, const sid_plan **p, sid_error *err) {
    const sid_cuda_exchange *kind;
    const sid_status s = kernels_of(x, &kind, err);
    if (s) return s;
    const sid_part part = x->kind->part(x, 0);
    *p = part.plan;
    if (x->kind->parts(x) == 1 && !part.state && !part.start && part.plan->n == x->n) return SID_OK;
    return sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' keeps its state in slices, which a device cannot unsend",
                    x->kind->info.name);
}

sid_status sid_cuda_exchange_settle(const sid_exchange *x, void *state, void *work, void *wire, int device,
                                    void *stream, sid_error *err) {
    const sid_cuda_exchange *kind;
    uint64_t room = 0;
    if (err) err->text[0] = 0;
    sid_status s = kernels_of(x, &kind, err);
    if (!s) s = kind->work(x, &room, err);
    if (!s && (!state || !work || !wire)) s = sid_fail(err, SID_E_ARG, "state, work or wire is NULL");
    for (uint32_t i = 0; !s && i < x->kind->parts(x); i++) {
        const sid_part part = x->kind->part(x, i);
        uint64_t needed = 0;
        s = sid_cuda_work(part.plan, &needed, err);
        if (!s && (needed > room || part.plan->sizes.payload > x->sizes.wire))
            s = sid_fail(err, SID_E_UNSUPPORTED, "exchange '%s' has no room to settle its state on a device",
                         x->kind->info.name);
        if (!s)
            s = sid_cuda_settle(part.plan, (uint8_t *)state + part.state, (uint8_t *)work + SID_EXCHANGE_HEAD, wire,
                                device, stream, err);
    }
    return s;
}

sid_status sid_cuda_exchange_unsend(const sid_exchange *x, void *state, int device, void *stream, sid_error *err) {
    const sid_plan *p;
    if (err) err->text[0] = 0;
    const sid_status s = whole_of(x, &p, err);
    return s ? s : sid_cuda_unsend(p, state, device, stream, err);
}

sid_status sid_cuda_exchange_checksum(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                                      const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    const sid_cuda_exchange *kind;
    sid_device_scope scope;
    if (err) err->text[0] = 0;
    sid_status s = kernels_of(x, &kind, err);
    if (!s) s = table_holds(segs_dev, n_seg, err);
    if (s) return s;
    if (!work || (uintptr_t)work % 64) return sid_fail(err, SID_E_ARG, "work must start at a multiple of 64 bytes");
    if (!report_dev || (uintptr_t)report_dev % 4 || !sum_dev || (uintptr_t)sum_dev % 8 || device < 0)
        return sid_fail(err, SID_E_ARG, "report or sum is NULL or misaligned, or device %d is negative", device);
    sid_stream to = {(cudaStream_t)stream, 0, err};
    s = scope.enter(device, &to);
    if (s) return s;
    return sid_enqueue_checksum(to, {segs_dev, n_seg, x->dtype, 0, 0}, x->n, (uint8_t *)work + SID_EXCHANGE_HEAD,
                                (const sid_cuda_report *)report_dev, (uint64_t *)sum_dev);
}
