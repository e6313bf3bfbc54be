/* The exchanges that Marsit is measured against, between the messages (csrc/exchange/baselines.c defines the result).
 * In both a slice goes around the ring and every rank adds to it. Bandwidth is the limit, or the launches, if slices
 * are small. Faults travel as on the CPU.
 *     cascade   A hop decodes a slice of n / W elements into float32 in work, by the codec; adds our part of the
 *               gradient, reading both and writing the sum; and encodes that. At the end W payloads are checked and
 *               decoded. A fault travels as a payload that is none, one slice at a time
 *     expand    A hop reads a slice's message, b bits an element, adds own signs, 1 bit an element, and writes the next
 *               message, in one pass; a thread has 32 elements. Counts, 1 byte an element, are written only when they
 *               are final; the end reads them and writes the segments. A fault travels in the frames */
#include "exchange.cuh"

namespace {

uint32_t slice_at(const sid_exchange *x, uint32_t round) {
    return (x->rank + 2 * x->world - round % x->world) % x->world;
}
uint32_t before(const sid_exchange *x) { return (x->rank + x->world - 1) % x->world; }

enum {
    BLOCKS = 4 /* on a multiprocessor */
};

/* ---- cascade ------------------------------------------------------------------------------------------------------- */

/* work: the sum of a slice; of the slice in hand, whether what came of it is bad; the codec's. */
struct cascade_work {
    float *sum;
    int32_t *closed;
    uint8_t *codec;
    static uint64_t before_codec(const sid_exchange *x) { return sid_round_up(4 * x->slice, 64) + 64; }
    cascade_work(const sid_exchange *x, uint8_t *work)
        : sum((float *)(void *)work), closed((int32_t *)(void *)(work + before_codec(x) - 64)),
          codec(work + before_codec(x)) {}
};

sid_status work_of_cascade(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    uint64_t most = 0;
    for (const sid_plan &plan : x->plan) {
        uint64_t own = 0;
        const sid_status s = sid_cuda_work(&plan, &own, err);
        if (s) return s;
        if (own > most) most = own;
    }
    *bytes = cascade_work::before_codec(x) + most;
    return SID_OK;
}

/* Before a slice; `enters`: before a step. */
__global__ void __launch_bounds__(SID_LANES)
    sid_cascade_begin_kernel(sid_exchange_head *head, bool enters, float *sum, uint64_t len, int32_t *closed) {
    sid_follow();
    if (threadIdx.x) return;
    if (enters) sid_enter(*head, sum, len);
    head->own.len = head->own_start[1] = len;
    *closed = SID_OK;
}

/* sum, or 0, + the slice of the group. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_cascade_add_kernel(sid_group g, const sid_scratch *scratch, float *sum, bool come, const int32_t *closed) {
    sid_follow();
    if (!scratch->ready || *closed) return;
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span span = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < span.len; i += SID_ROW) {
            const uint32_t count = sid_count4(span.len, i);
            float *const to = sum + span.at + i;
            float x[SID_QUAD] = {}, y[1][SID_QUAD];
            if (span.base)
                sid_get<true>(g, span, i, count, y);
            else
                sid_get<false>(g, span, i, count, y);
            for (uint32_t c = 0; c < count && come; c++) x[c] = to[c];
            for (uint32_t c = 0; c < SID_QUAD; c++) x[c] += y[0][c]; /* where nothing has come -0 becomes 0 */
            sid_store_floats(to, count, x);
        }
    }
}
/* After it: a segment table that is not the group's is a fault of our own. */
__global__ void __launch_bounds__(SID_LANES)
    sid_cascade_added_kernel(sid_exchange_head *head, const sid_scratch *scratch, int32_t *closed, uint32_t rank) {
    sid_follow();
    if (threadIdx.x || scratch->ready) return;
    sid_blame_rank(head->fault, SID_E_ARG, rank);
    *closed = SID_E_ARG;
}

/* After the encode, or where its gate was closed: what goes out is no payload. */
__global__ void __launch_bounds__(SID_BLOCK)
    sid_cascade_sent_kernel(sid_exchange_head *head, const int32_t *closed, uint8_t *payload, uint64_t bytes) {
    sid_follow();
    if (*closed == SID_OK) {
        if (blockIdx.x == 0 && threadIdx.x == 0) head->fault.encoded |= SID_OWN;
        return;
    }
    for (uint64_t i = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; i < bytes / 16;
         i += (uint64_t)gridDim.x * SID_BLOCK)
        ((uint4 *)(void *)payload)[i] = make_uint4(0, 0, 0, 0);
}

sid_cuda_slices sums_of(const sid_cuda_exchange_step &t) {
    return {t.x->plan, t.wire, t.x->message, 0, before(t.x), 1.0f / (float)t.x->world, cascade_work(t.x, t.work).codec};
}

/* Slice s: own, with what has come of it, encoded. All of a step's encodes share one state. */
sid_status encode_on(const sid_cuda_exchange_step &t, uint32_t round) {
    const sid_exchange *x = t.x;
    const uint32_t s = slice_at(x, round);
    const uint64_t len = sid_slice_len(x, s), bytes = sums_of(t).of(x, s)->sizes.payload;
    const cascade_work w(x, t.work);
    const sid_plan *const p = sums_of(t).of(x, s);
    const sid_table sum = {&t.head->own, 1, SID_F32, 0, 0};
    uint8_t *const payload = t.wire + s * x->message;
    sid_step step = sid_slice_step(&t.step, s, x->rank, x->world);
    sid_status status = SID_OK;
    if (!round || len)
        status =
            sid_launch(t.to, "begin", sid_cascade_begin_kernel, 1, SID_LANES, 0, t.head, !round, w.sum, len, w.closed);
    if (status || !len) return status;
    if (round) {
        sid_cuda_decoding in = sid_decoding_of(t, p, step, payload, bytes, 1, 1.0f);
        in.gate = nullptr; /* whatever has become of other slices */
        status = sid_enqueue(in, sum, w.codec);
        if (!status) status = sid_enqueue_found(t, before(x), true, w.closed);
    }
    sid_group g;
    sid_scratch *scratch;
    if (!status) status = sid_begin_table(t.to, sid_slice_table(t, s), len, w.codec, &g, &scratch);
    if (!status)
        status = sid_launch(t.to, "add", sid_cascade_add_kernel, sid_blocks(t.to, sid_chunks(len), BLOCKS), SID_BLOCK,
                            0, g, (const sid_scratch *)scratch, w.sum, round > 0, (const int32_t *)w.closed);
    if (!status)
        status = sid_launch(t.to, "added", sid_cascade_added_kernel, 1, SID_LANES, 0, t.head,
                            (const sid_scratch *)scratch, w.closed, x->rank);
    if (status) return status;
    for (uint32_t earlier = 0; earlier < round; earlier++) /* the first encode has made a new state */
        if (sid_slice_len(x, slice_at(x, earlier))) step.origin = 0;
    sid_cuda_encoding out = sid_encoding_of(t, p, step, t.state, payload);
    out.gate = w.closed;
    status = sid_enqueue(out, sum, w.codec);
    if (status) return status;
    return sid_launch(t.to, "sent", sid_cascade_sent_kernel,
                      sid_blocks(t.to, (bytes / 16 + SID_BLOCK - 1) / SID_BLOCK, 1), SID_BLOCK, 0, t.head,
                      (const int32_t *)w.closed, payload, bytes);
}

sid_status advance_cascade(sid_cuda_exchange_step &t, uint32_t round) {
    sid_status s = SID_OK;
    if (round < t.x->world) s = encode_on(t, round);
    return s || round < t.x->rounds ? s : sid_check_slices(t, sums_of(t));
}

sid_status finish_cascade(sid_cuda_exchange_step &t) {
    const sid_status s = sid_end_slices(t, sums_of(t));
    return s ? s : sid_write_slices(t, sums_of(t));
}

/* ---- expand -------------------------------------------------------------------------------------------------------- */

uint32_t most_at(const sid_exchange *x, uint32_t round) { /* the largest count of this round's messages */
    return round < x->world - 1 ? round + 1 : x->world;
}
uint32_t bits_at(const sid_exchange *x, uint32_t round) {
    uint32_t bits = 0;
    while (most_at(x, round) >> bits) bits++;
    return bits;
}

/* work: the codec's; a count of negative signs for each element of the slices. */
sid_status work_of_expand(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    const sid_status s = sid_cuda_work(x->plan, bytes, err);
    if (!s) *bytes = sid_round_up(*bytes, 64) + x->world * x->slice;
    return s;
}
sid_status counts_of(const sid_cuda_exchange_step &t, uint8_t **counts) {
    uint64_t own = 0;
    const sid_status s = sid_cuda_work(t.x->plan, &own, t.to.err);
    *counts = t.work + sid_round_up(own, 64);
    return s;
}

/* A hop of a slice of `len` elements, a multiple of 256. */
struct counting {
    sid_hop hop; /* in and out: of the same slice */
    uint32_t in_bits, out_bits, in_most;
    uint64_t first, len, n;
    uint8_t *counts; /* or NULL: they are not final */
    bool adds;       /* own signs, to what came in; else that replaces them */
};

/* Four counts of a word each. */
__device__ inline uint32_t add_bytes(uint32_t a, uint32_t b) {
    const uint32_t low = 0x7f7f7f7fu;
    return ((a & low) + (b & low)) ^ ((a ^ b) & ~low);
}

/* A thread has 32 elements: a word of signs, as many words of a message as its counts have bits. */
__global__ void __launch_bounds__(SID_BLOCK, BLOCKS) sid_counting_kernel(sid_frames s, counting k) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t *const came = (const uint32_t *)(const void *)(s.wire + k.hop.in.frame + SID_FRAME_BYTES);
    uint32_t *const goes = (uint32_t *)(void *)(s.wire + k.hop.out.frame + SID_FRAME_BYTES);
    const uint32_t *const signs = (const uint32_t *)(const void *)(s.wire + SID_HEADER_BYTES);
    sid_part_sum ins = {0}, outs = {0};
    bool bad = false;
    for (uint64_t w = (uint64_t)blockIdx.x * SID_BLOCK + threadIdx.x; w < k.len / 32;
         w += (uint64_t)gridDim.x * SID_BLOCK) {
        uint32_t count[8] = {};
        if (k.hop.in.frame) {
            uint64_t word = w * k.in_bits, bits = 0;
            uint32_t held = 0;
#pragma unroll
            for (uint32_t i = 0; i < 32; i++) {
                if (held < k.in_bits) {
                    const uint32_t x = came[word];
                    ins.add(SID_FRAME_BYTES + 4 * word, x);
                    word++;
                    bits |= (uint64_t)x << held;
                    held += 32;
                }
                const uint32_t one = (uint32_t)bits & ((1u << k.in_bits) - 1);
                bad |= one > k.in_most;
                count[i / 4] |= one << (8 * (i % 4));
                bits >>= k.in_bits;
                held -= k.in_bits;
            }
        }
        if (k.adds) {
            const uint64_t at = k.first + 32 * w;
            const uint32_t own = at < k.n ? signs[at / 32] : 0u;
#pragma unroll
            for (uint32_t i = 0; i < 8; i++) /* bit b of four goes to byte b */
                count[i] = add_bytes(count[i], (own >> (4 * i) & 15u) * 0x00204081u & 0x01010101u);
        }
        if (k.counts) {
            uint4 *const to = (uint4 *)(void *)(k.counts + k.first + 32 * w);
            to[0] = make_uint4(count[0], count[1], count[2], count[3]);
            to[1] = make_uint4(count[4], count[5], count[6], count[7]);
        }
        if (!k.hop.out.frame) continue;
        uint64_t word = w * k.out_bits, bits = 0;
        uint32_t held = 0;
#pragma unroll
        for (uint32_t i = 0; i < 32; i++) {
            bits |= (uint64_t)(count[i / 4] >> (8 * (i % 4)) & ((1u << k.out_bits) - 1)) << held;
            held += k.out_bits;
            if (held < 32) continue;
            goes[word] = (uint32_t)bits;
            outs.add(SID_FRAME_BYTES + 4 * word, (uint32_t)bits);
            word++;
            bits >>= 32;
            held -= 32;
        }
    }
    if (bad) s.head->report.status = SID_E_CORRUPT; /* all who write it write the same */
    sid_add_sums(s.head->in, ins, part);
    __syncthreads(); /* part is used again */
    sid_add_sums(s.head->out, outs, part);
}

/* After the encode, which leaves no header where the segment table is not the group's. */
__global__ void __launch_bounds__(SID_LANES) sid_counting_begin_kernel(sid_frames s) {
    sid_follow();
    if (threadIdx.x) return;
    const sid_header h = *(const sid_header *)(const void *)s.wire;
    sid_enter(*s.head, nullptr, 0);
    sid_fault &f = s.head->fault;
    if (h.magic != SID_MAGIC) {
        sid_blame_rank(f, SID_E_ARG, s.rank);
        return;
    }
    f.encoded = SID_OWN;
    if (h.flags & SID_FLAG_NONFINITE) f.flags |= SID_FRAME_NONFINITE;
}

__global__ void __launch_bounds__(SID_LANES) sid_counting_end_kernel(sid_exchange_head *head, sid_cuda_report *report) {
    sid_follow();
    if (threadIdx.x) return;
    head->nonfinite = (head->fault.flags & SID_FRAME_NONFINITE) != 0;
    if (head->fault.status || head->nonfinite) head->undo = head->fault.encoded & SID_OWN;
    sid_tell(*head, report);
}

/* The value for each count. The codec decides it. */
struct meanings {
    float of[256];
};

__global__ void __launch_bounds__(SID_BLOCK, BLOCKS)
    sid_counted_kernel(sid_group g, const sid_exchange_head *head, const uint8_t *counts, meanings all,
                       sid_vectors vectors, sid_kept memory) {
    sid_follow();
    __shared__ float meaning[256];
    if (head->fault.status) return;
    static_assert(SID_BLOCK == 256, "one each");
    meaning[threadIdx.x] = head->nonfinite ? sid_bits_f32(0x7fc00000u) : all.of[threadIdx.x];
    __syncthreads();
    for (uint64_t tile = (uint64_t)blockIdx.x * SID_WARPS + sid_warp(); tile < sid_tiles(g.n);
         tile += (uint64_t)gridDim.x * SID_WARPS) {
        const sid_span span = sid_span_of(g, tile);
        for (uint32_t i = sid_lane() * SID_QUAD; i < span.len; i += SID_ROW) {
            const uint32_t four = *(const uint32_t *)(const void *)(counts + span.at + i);
            const uint32_t count = sid_count4(span.len, i);
            float x[SID_QUAD];
            for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = meaning[four >> (8 * c) & 255u];
            if (memory.receives && !head->nonfinite) sid_receive(memory, vectors, span.at + i, count, x);
            if (span.base)
                sid_put<true>(g, span, i, count, x);
            else
                sid_put<false>(g, span, i, count, x);
        }
    }
}

sid_status advance_expand(sid_cuda_exchange_step &t, uint32_t round) {
    const sid_exchange *x = t.x;
    const sid_frames s = sid_frames_of(t);
    const uint32_t slice = slice_at(x, round), summed = x->world - 1;
    counting k = {};
    uint8_t *counts;
    sid_status status = counts_of(t, &counts);
    if (status) return status;
    if (!round) {
        sid_cuda_encoding c = sid_encoding_of(t, x->plan, t.step, t.state, t.wire);
        c.stats = t.stats;
        status = sid_enqueue(c, t.table, t.work);
        if (!status) status = sid_launch(t.to, "begin", sid_counting_begin_kernel, 1, SID_LANES, 0, s);
        if (status) return status;
    }
    sid_message m;
    if (round) {
        x->kind->messages(x, round - 1, 1, &m);
        k.in_bits = bits_at(x, round - 1);
        k.in_most = most_at(x, round - 1);
        k.hop.in = {m.offset, m.bytes - SID_FRAME_BYTES, 0, 0, round - 1, m.peer, 0};
    }
    if (round < x->rounds) {
        x->kind->messages(x, round, 0, &m);
        k.out_bits = bits_at(x, round);
        k.hop.out = {m.offset, m.bytes - SID_FRAME_BYTES, 0, 0, round, m.peer, 0};
    }
    k.first = slice * x->slice;
    k.len = x->slice;
    k.n = x->n;
    k.adds = round <= summed;
    k.counts = round >= summed ? counts : nullptr;
    status = sid_launch(t.to, "count", sid_counting_kernel,
                        sid_blocks(t.to, (k.len / 32 + SID_BLOCK - 1) / SID_BLOCK, BLOCKS), SID_BLOCK, 0, s, k);
    return status || !x->rounds ? status : sid_end_hop(t.to, s, k.hop);
}

sid_status finish_expand(sid_cuda_exchange_step &t) {
    const sid_plan *p = t.x->plan;
    const sid_group g = sid_group_of(t.table, p->n, t.work);
    alignas(64) meanings all = {};
    uint8_t *counts;
    sid_status s = counts_of(t, &counts);
    for (uint32_t c = 0; c <= t.x->world; c++) all.of[c] = (float)((int)t.x->world - 2 * (int)c);
    p->codec->decide(p, all.of, 256, t.x->world);
    if (!s) s = sid_launch(t.to, "end", sid_counting_end_kernel, 1, SID_LANES, 0, t.head, t.report);
    if (!s) s = sid_enqueue_undo(t, SID_OWN, p, g, {t.state, 0, p->n}); /* while the segments hold the gradient */
    sid_kept memory;
    if (!s) s = sid_kept_of(p, t.to.err, &memory);
    return s ? s
             : sid_launch(t.to, "counted", sid_counted_kernel, sid_blocks(t.to, sid_chunks(p->n), BLOCKS), SID_BLOCK, 0,
                          g, (const sid_exchange_head *)t.head, (const uint8_t *)counts, all,
                          sid_vectors_of(p, (sid_state *)(void *)t.state), memory);
}

} // namespace

extern "C" {
extern const sid_cuda_exchange sid_cuda_exchange_cascade, sid_cuda_exchange_expand;
const sid_cuda_exchange sid_cuda_exchange_cascade = {work_of_cascade, advance_cascade, finish_cascade};
const sid_cuda_exchange sid_cuda_exchange_expand = {work_of_expand, advance_expand, finish_expand};
}
