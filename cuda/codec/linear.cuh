/* The linear codecs, whose bodies the ranks sum before anyone decodes, share the end of an encode and the check:
 *     seal     writes the header, the bytes after the body, the rule and the state, by one block
 *     cover    reads the payload for its checksum, in a world of one alone
 *     check    reads the headers, and those payloads whose checksum covers all of them
 * A sum of bodies has another checksum than any of them, so it covers the header alone, and a payload is not read for
 * it. Only if nothing is summed does it cover all bytes. The limit is the latency of a launch, or bandwidth where
 * payloads are read. */
#ifndef SID_LINEAR_CUH
#define SID_LINEAR_CUH

#include "../core/codec.cuh"
#include "codec/linear.h"

enum {
    SID_SEAL_BLOCK = 64
};

/* The arguments of the end of an encode. */
struct sid_linear_ending {
    sid_scratch *scratch;
    sid_head head;
    uint64_t count; /* elements of the body */
    float scale;    /* 1 / world */
    sid_rule rule;
    sid_draw draw;
    uint8_t *payload;
    uint64_t used, bytes; /* of the payload: where the body ends, and where the payload does; zeros lie between */
    sid_state *state;
    sid_stats *stats; /* or NULL */
    uint32_t passes;
};

/* The number of ranks whose bodies are summed; each body is divided by it first. */
inline uint32_t sid_linear_ranks(const sid_cuda_encoding &c) { return c.plan->alone ? 1 : c.step.world; }

inline sid_rule sid_linear_rule(const sid_cuda_encoding &c) {
    sid_rule rule = {};
    rule.inverse = (float)sid_linear_ranks(c);
    rule.scale = 1.0f / rule.inverse;
    return rule;
}

/* Ends an encode. One block calls it. */
__device__ inline void sid_linear_end(const sid_linear_ending &e) {
    for (uint64_t i = e.used + threadIdx.x; i < e.bytes; i += blockDim.x) e.payload[i] = 0;
    if (threadIdx.x) return;
    const uint32_t bad = sid_found(&e.scratch->nonfinite);
    sid_seal((sid_header *)e.payload, e.head, bad ? (uint32_t)SID_FLAG_NONFINITE : 0u, e.count, e.scale, 0);
    e.state->rule = e.rule;
    e.state->draw = e.draw;
    e.state->steps++;
    if (e.stats) *e.stats = {e.count, e.count, bad, e.scale, 0, e.passes};
}
static __global__ void __launch_bounds__(SID_SEAL_BLOCK) sid_linear_seal_kernel(sid_linear_ending e) {
    sid_follow();
    if (e.scratch->ready) sid_linear_end(e);
}

inline sid_linear_ending sid_linear_ending_of(const sid_cuda_encoding &c, uint64_t count, const sid_rule &rule,
                                              uint32_t passes) {
    const sid_plan *p = c.plan;
    return {c.scratch,
            sid_head_of(p, c.step),
            count,
            1.0f / (float)sid_linear_ranks(c),
            rule,
            sid_draw_of(p, c.step),
            c.payload,
            SID_HEADER_BYTES + sid_width(p->sizes.body_dtype) * p->sizes.body_count,
            p->sizes.payload,
            c.state,
            c.stats,
            passes};
}
inline sid_status sid_linear_seal(const sid_cuda_encoding &c, uint64_t count, const sid_rule &rule, uint32_t passes) {
    return sid_launch(c.to, "seal", sid_linear_seal_kernel, 1, SID_SEAL_BLOCK, 0,
                      sid_linear_ending_of(c, count, rule, passes));
}

/* Adds the body to the checksum of a payload that is alone. Reads it. */
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_cover_kernel(const sid_scratch *scratch, uint8_t *payload, uint64_t bytes) {
    sid_follow();
    __shared__ sid_part_sum part[SID_WARPS];
    if (!scratch->ready) return;
    sid_part_sum own =
        sid_sum_words(payload, bytes, blockIdx.x, gridDim.x, SID_HEADER_BYTES, bytes, [](uint64_t, uint32_t) {});
    own = sid_block_sums(own, part);
    if (threadIdx.x == 0) atomicAdd((unsigned long long *)(void *)&((sid_header *)(void *)payload)->checksum, own.sum);
}
inline uint64_t sid_cover_blocks(const sid_stream &to, uint64_t bytes) {
    return sid_blocks(to, bytes / SID_SUM_BYTES + 1, 4);
}
/* The end of an encode, all reductions included. */
inline sid_status sid_linear_cover(const sid_cuda_encoding &c) {
    const uint64_t bytes = c.plan->sizes.payload;
    if (sid_linear_ranks(c) != 1) return SID_OK;
    return sid_launch(c.to, "cover", sid_cover_kernel, sid_cover_blocks(c.to, bytes), SID_BLOCK, 0,
                      (const sid_scratch *)c.scratch, c.payload, bytes);
}

/* The findings of the blocks of a check. A decode carves them first. */
inline sid_found_part *sid_carve_covered(sid_carver *c) { return c->take<sid_found_part>(SID_CHECKERS); }
inline uint64_t sid_covered_work() { return SID_CHECKERS * sizeof(sid_found_part); }

/* Payloads of which blocks r * each to r * each + each - 1 read the r-th, if its checksum covers all of it. */
struct sid_covered {
    const uint8_t *payloads;
    uint64_t stride, bytes;
    uint32_t count, each;
};
inline sid_covered sid_covered_of(const sid_cuda_decoding &c) {
    const uint64_t bytes = c.plan->sizes.payload, most = sid_cover_blocks(c.to, bytes) / c.count;
    return {c.payloads, c.stride, bytes, c.count, sid_checkers(most, most, c.count)};
}
__device__ inline unsigned long long sid_cover(const sid_covered &k) { /* the block's share, in thread 0 */
    __shared__ sid_part_sum part[SID_WARPS];
    const uint32_t r = blockIdx.x / k.each;
    const uint8_t *payload = k.payloads + r * k.stride;
    if (((const sid_header *)(const void *)payload)->scale != 1.0f) return 0;
    sid_part_sum own = sid_sum_words(payload, k.bytes, blockIdx.x % k.each, k.each, SID_HEADER_BYTES, k.bytes,
                                     [](uint64_t, uint32_t) {});
    return sid_block_sums(own, part).sum;
}
static __global__ void __launch_bounds__(SID_BLOCK) sid_covered_kernel(sid_covered k, unsigned long long *sums) {
    sid_follow();
    const unsigned long long sum = sid_cover(k);
    if (threadIdx.x == 0) atomicAdd(&sums[blockIdx.x / k.each], sum);
}
inline sid_status sid_linear_covered(const sid_cuda_decoding &c, unsigned long long *sums) {
    const sid_covered k = sid_covered_of(c);
    return sid_launch(c.to, "cover", sid_covered_kernel, (uint64_t)k.each * k.count, SID_BLOCK, 0, k, sums);
}

/* Checks the payloads; the last block reports the first one at fault. Elements that are not finite have been found
 * before, if a memory is to be corrected; else the output finds them while it writes. */
static __global__ void __launch_bounds__(SID_BLOCK)
    sid_linear_check_kernel(sid_group g, sid_scratch *scratch, sid_covered k, sid_found_part *found, uint64_t count,
                            sid_expect expect, const int32_t *gate, sid_cuda_report *report, sid_state *state) {
    sid_follow();
    __shared__ uint32_t first, flagged;
    if (blockIdx.x < k.each * k.count) {
        const unsigned long long sum = sid_cover(k);
        if (threadIdx.x == 0) found[blockIdx.x] = {sum, 0, 0};
    } else
        sid_begin_check(g, scratch, gate);
    if (!sid_comes_last(&report->arrived, gridDim.x)) return;
    if (threadIdx.x == 0) {
        first = SID_SOUND;
        flagged = 0;
    }
    __syncthreads();
    sid_each_found(found, k.count, k.each, [&](uint32_t r, const sid_found_part &x) {
        const sid_header h = *(const sid_header *)(k.payloads + r * k.stride);
        int32_t status = sid_check_header(h, expect, r, x.sum);
        if (status == SID_OK && (h.count != count || (h.flags & ~(uint32_t)SID_FLAG_NONFINITE))) status = SID_E_CORRUPT;
        if (status == SID_OK) status = sid_check_linear(h, *(const sid_header *)k.payloads);
        sid_blame(&first, r, status);
        if (h.flags & SID_FLAG_NONFINITE) atomicOr(&flagged, 1u);
    });
    __syncthreads();
    if (threadIdx.x) return;
    sid_end_check(report, scratch, first, state && (flagged || scratch->nonfinite));
    if (scratch->go && scratch->nonfinite) state->rule = sid_rule();
}

/* begun: sid_begin_decode has been called, because the codec has looked at the payloads before. Else the check does the
 * same in one more block. draws: of a codec that may, whether this plan's payloads have a salt. */
inline sid_status sid_linear_check(const sid_cuda_decoding &c, uint64_t count, sid_found_part *found, bool begun,
                                   bool draws = true) {
    const sid_covered k = sid_covered_of(c);
    sid_expect expect = sid_expect_of(c);
    expect.draws &= draws;
    return sid_launch(c.to, "check", sid_linear_check_kernel, (uint64_t)k.each * k.count + !begun, SID_BLOCK, 0,
                      c.group, c.scratch, k, found, count, expect, c.gate, c.report, c.state);
}

#endif
