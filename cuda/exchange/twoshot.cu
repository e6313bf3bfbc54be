/* Two-shot between the messages (csrc/exchange/twoshot.c defines the result). Nearly all work is the codec's own passes
 * over slices of n / W elements, for W ranks; the kernels here only pass faults on. So the limit is the codec's, and
 * bytes per element are those of an encode and a decode of n elements, and of n / W once more. P(m): bytes of a payload
 * of m elements.
 *     shot 1   encodes W slices, windows of the group's table, each with a state of its own: as many as the device has
 *              room for in the launches of one encode, if the codec has that (sid_several); the short slice by itself
 *     sum      decodes the W payloads of our slice, and writes their mean as float32 to work
 *     shot 2   encodes that mean
 *     end      reads W P(n / W) bytes to check them, before any rank writes; then W decodes write the segments
 *
 * A fault of this rank closes the gate of the second encode (exchange.cuh), so its payload is none, and the others fail
 * with it. One slice that is not finite makes all so: the check knows it, and the decodes are told. */
#include "exchange.cuh"

namespace {

const sid_plan *plan_of(const sid_exchange *x, const sid_plan *plan, uint32_t s) { return &plan[sid_slice_kind(x, s)]; }

/* work: the mean of our slice; the codec's. */
float *mean_of(const sid_cuda_exchange_step &t) { return (float *)(void *)t.work; }
uint8_t *codec_work(const sid_cuda_exchange_step &t) { return t.work + sid_round_up(4 * t.x->slice, 64); }

uint32_t whole_slices(const sid_exchange *x) {
    uint32_t s = 0;
    while (s < x->world && x->slice && sid_slice_kind(x, s) == 0) s++;
    return s;
}

sid_status work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    uint64_t most = 0;
    for (const sid_plan *plan : {x->plan, x->server})
        for (uint32_t i = 0; i < SID_MAX_PLANS; i++) {
            uint64_t own = 0;
            const sid_status s = sid_cuda_work(&plan[i], &own, err);
            if (s) return s;
            if (own > most) most = own;
        }
    const uint64_t several = sid_several_work(x->plan, whole_slices(x));
    if (several > most) most = several;
    *bytes = sid_round_up(4 * x->slice, 64) + most;
    return SID_OK;
}

/* ---- kernels --------------------------------------------------------------------------------------------------- */

__global__ void __launch_bounds__(SID_LANES)
    sid_shots_begin_kernel(sid_exchange_head *head, float *mean, uint64_t len) {
    sid_follow();
    if (threadIdx.x == 0) sid_enter(*head, mean, len);
}

/* After the first encodes, which leave no header where the segment table is not the group's. Payloads lie `apart` from one
 * another, that of slice `mine` elsewhere. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_first_shot_kernel(sid_exchange_head *head, const uint8_t *payloads, const uint8_t *own, uint64_t apart,
                          uint32_t slices, uint32_t mine) {
    sid_follow();
    int none = 0;
    for (uint32_t s = threadIdx.x; s < slices; s += SID_BLOCK) {
        const uint8_t *p = s == mine ? own : payloads + s * apart;
        none |= ((const sid_header *)(const void *)p)->magic != SID_MAGIC;
    }
    none = __syncthreads_or(none);
    if (threadIdx.x) return;
    if (none)
        sid_blame_rank(head->fault, SID_E_ARG, mine);
    else
        head->fault.encoded |= SID_OWN;
}

/* After the second encode, or where its gate was closed: what goes out is no payload. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_second_shot_kernel(sid_exchange_head *head, uint8_t *payload, uint64_t bytes) {
    sid_follow();
    if (head->fault.status == SID_OK) {
        if (blockIdx.x == 0 && threadIdx.x == 0) head->fault.encoded |= SID_FOR_ALL;
        return;
    }
    for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < bytes / 16;
         i += (uint64_t)gridDim.x * SID_BLOCK)
        ((uint4 *)(void *)payload)[i] = make_uint4(0, 0, 0, 0);
}

/* ---- a step -------------------------------------------------------------------------------------------------------- */

/* The means, which all ranks have. */
sid_cuda_slices means_of(const sid_cuda_exchange_step &t) {
    return {t.x->server,  t.wire + sid_shots_of(t.x).means, t.x->server->sizes.payload, SID_SECOND, -1, 1.0f,
            codec_work(t)};
}

sid_status first_shot(const sid_cuda_exchange_step &t) {
    const sid_exchange *x = t.x;
    const sid_shots at = sid_shots_of(x);
    const uint64_t apart = x->plan->sizes.payload;
    const uint32_t slices = sid_slices(x);
    uint8_t *const own = t.wire + at.theirs + x->rank * apart;
    sid_status status = sid_launch(t.to, "begin", sid_shots_begin_kernel, 1, SID_LANES, 0, t.head, mean_of(t),
                                   sid_slice_len(x, x->rank));
    const uint32_t whole = whole_slices(x), most = whole ? sid_several_at_once(x->plan, whole, t.to) : 0;
    uint32_t s = 0;
    while (most > 1 && whole - s > 1 &&
           !status) { /* the first of `count` is s; others than these have no slice x->rank */
        const uint32_t count = whole - s < most ? whole - s : most;
        sid_cuda_encoding c = sid_encoding_of(t, x->plan, sid_slice_step(&t.step, s, x->rank, x->world),
                                              t.state + s * at.apart, t.wire + s * apart);
        c.several = {count, 1u << SID_SUBGROUPS, at.apart, apart, 0, x->rank - s, (int64_t)at.theirs};
        status = sid_enqueue(c, sid_slice_table(t, s), codec_work(t));
        s += count;
    }
    for (; s < slices && !status; s++) {
        sid_cuda_encoding c = sid_encoding_of(t, plan_of(x, x->plan, s), sid_slice_step(&t.step, s, x->rank, x->world),
                                              t.state + s * at.apart, s == x->rank ? own : t.wire + s * apart);
        status = sid_enqueue(c, sid_slice_table(t, s), codec_work(t));
    }
    if (!status)
        status = sid_launch(t.to, "first shot", sid_first_shot_kernel, 1, SID_BLOCK, 0, t.head, t.wire, own, apart,
                            slices, x->rank);
    return status;
}

sid_status second_shot(const sid_cuda_exchange_step &t) {
    const sid_exchange *x = t.x;
    const uint32_t s = x->rank;
    const uint64_t len = sid_slice_len(x, s);
    if (!len) return SID_OK;
    const sid_shots at = sid_shots_of(x);
    const sid_table mean = {&t.head->own, 1, SID_F32, 0, 0};
    uint8_t *const payload = t.wire + at.means + s * x->server->sizes.payload;
    sid_cuda_decoding in =
        sid_decoding_of(t, plan_of(x, x->plan, s), sid_slice_step(&t.step, s, s, x->world), t.wire + at.theirs,
                        x->plan->sizes.payload, x->world, 1.0f / (float)x->world);
    sid_status status = sid_enqueue(in, mean, codec_work(t));
    if (!status) status = sid_enqueue_found(t, 0, false, nullptr);
    if (status) return status;
    const sid_plan *server = plan_of(x, x->server, s);
    sid_cuda_encoding out =
        sid_encoding_of(t, server, sid_slice_step(&t.step, s | SID_SECOND, s, x->world), t.state + at.server, payload);
    out.gate = t.gate();
    status = sid_enqueue(out, mean, codec_work(t));
    if (status) return status;
    const uint64_t bytes = x->server->sizes.payload;
    return sid_launch(t.to, "second shot", sid_second_shot_kernel,
                      sid_blocks(t.to, (bytes / 16 + SID_BLOCK - 1) / SID_BLOCK, 1), SID_BLOCK, 0, t.head, payload,
                      bytes);
}

sid_status advance(sid_cuda_exchange_step &t, uint32_t round) {
    sid_status status = SID_OK;
    if (!round) status = first_shot(t);
    if (!status && (round == 1 || !t.x->rounds)) status = second_shot(t);
    return status || round < t.x->rounds ? status : sid_check_slices(t, means_of(t));
}

sid_status finish(sid_cuda_exchange_step &t) {
    const sid_exchange *x = t.x;
    const sid_shots at = sid_shots_of(x);
    const uint32_t s = x->rank;
    const uint64_t len = sid_slice_len(x, s);
    const sid_cuda_slices means = means_of(t);
    sid_status status = sid_end_slices(t, means);
    if (!status && x->plan->memory->vectors) { /* while the segments hold the gradient */
        sid_group g;
        sid_scratch *scratch;
        status = sid_begin_table(t.to, t.table, x->n, codec_work(t), &g, &scratch);
        if (!status) status = sid_enqueue_undo(t, SID_OWN, x->plan, g, {t.state, at.apart, x->slice});
    }
    if (!status && len) {
        const sid_group mean = {&t.head->own, t.head->own_start, len, 1, SID_F32, 0, 0};
        status = sid_enqueue_undo(t, SID_FOR_ALL, plan_of(x, x->server, s), mean, {t.state + at.server, 0, len});
    }
    return status ? status : sid_write_slices(t, means);
}

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_twoshot;
const sid_cuda_exchange sid_cuda_exchange_twoshot = {work, advance, finish};
}
