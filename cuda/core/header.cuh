/* Headers and checksums of payloads: how they are written, and what they must say. A checksum is a sum of words, each
 * times a weight that follows from its offset, modulo 2^64 (csrc/wire.h). So every thread adds up the words that it
 * writes or reads, in any order, and the shares are added by warp, block and atomicAdd. An encode so has its checksum
 * without reading the payload again; a check reads each payload once, and bandwidth is its limit. The last block of a
 * check to come checks the headers. */
#ifndef SID_HEADER_CUH
#define SID_HEADER_CUH

#include "call.cuh"

/* ---- checksums ----------------------------------------------------------------------------------------------- */

/* This thread's share of a message's checksum. */
struct sid_part_sum {
    unsigned long long sum;
    __device__ void add(uint64_t offset, uint64_t word) { /* `word` at byte `offset`, shifted to its place */
        sum += word * sid_sum_key(offset / 4);
    }
    __device__ void add(uint64_t offset, const uint4 &w) { /* offset: a multiple of 16 */
        const uint32_t q = (uint32_t)(offset % SID_SUM_BYTES) / 8;
        const uint64_t a = sid_sum_pair(q), b = sid_sum_pair(q + 1);
        sum += (w.x * a + w.z * b + (w.y * a + w.w * b) * SID_SUM_ODD) * sid_sum_block(offset / SID_SUM_BYTES);
    }
};

/* Words of a message, the first of them at byte `at`, the others less than a block of the checksum and an even number of
 * words after it. */
struct sid_word_run {
    uint64_t at;
    unsigned long long here, next; /* in its block and in the one behind it */
    __device__ void add(uint32_t after, uint32_t word) {
        const uint32_t q = (uint32_t)(at % SID_SUM_BYTES) / 8 + after / 2;
        const unsigned long long x = (unsigned long long)word * sid_sum_pair(q % SID_SUM_PAIRS);
        if (q < SID_SUM_PAIRS)
            here += x;
        else
            next += x;
    }
    __device__ void add_to(sid_part_sum &own) const {
        const uint64_t b = at / SID_SUM_BYTES, all = here * sid_sum_block(b) + next * sid_sum_block(b + 1);
        own.sum += at / 4 % 2 ? all * SID_SUM_ODD : all;
    }
};

/* Returns a thread's share of the checksum of a payload but for its header, if `each` blocks read it, and this one is
 * block `b` of them. Calls look(i, w) for the words that it reads, word i being w, but perhaps not for those in bytes
 * plain_from to plain_to. A block of threads reads as many bytes as a block of the checksum has, so that a thread's
 * words always have the same keys of pairs. */
template <typename F>
__device__ inline sid_part_sum sid_sum_words(const uint8_t *payload, uint64_t bytes, uint32_t b, uint32_t each,
                                             uint64_t plain_from, uint64_t plain_to, const F &look) {
    static_assert(16 * SID_BLOCK == SID_SUM_BYTES, "a thread's keys");
    uint64_t at = SID_HEADER_BYTES + 16 * (b * (uint64_t)SID_BLOCK + threadIdx.x), block = at / SID_SUM_BYTES;
    const uint32_t q = (uint32_t)(at % SID_SUM_BYTES) / 8;
    const uint64_t step = (uint64_t)SID_SUM_BYTES * each, one = sid_sum_pair(q), two = sid_sum_pair(q + 1);
    sid_part_sum own = {0};
    const auto add = [&](const uint4 &w) {
        own.sum += (w.x * one + w.z * two + (w.y * one + w.w * two) * SID_SUM_ODD) * sid_sum_block(block);
        at += step;
        block += each;
    };
    const auto pairs = [&] { /* a payload may begin at any multiple of 8 */
                             const uint2 *const w = (const uint2 *)(const void *)(payload + at);
                             return make_uint4(w[0].x, w[0].y, w[1].x, w[1].y);
    };
    const auto seen = [&](uint64_t end) {
#pragma unroll 1
        while (at < end) {
            const uint4 w = pairs();
            const uint64_t i = at / 4;
            add(w);
            look(i, w.x);
            look(i + 1, w.y);
            look(i + 2, w.z);
            look(i + 3, w.w);
        }
    };
    seen(plain_from < bytes ? sid_round_up(plain_from, 16) : bytes);
    if ((uintptr_t)payload % sizeof(uint4))
        while (at + 16 <= plain_to) add(pairs());
    else
#pragma unroll 4
        while (at + 16 <= plain_to) add(*(const uint4 *)(const void *)(payload + at));
    seen(bytes);
    return own;
}

/* Returns the sum of a block's shares, in every thread of warp 0; other threads must not use it. part: shared
 * memory. */
__device__ inline sid_part_sum sid_block_sums(sid_part_sum x, sid_part_sum (&part)[SID_WARPS]) {
    x.sum = sid_warp_sum(x.sum);
    if (sid_lane() == 0) part[sid_warp()] = x;
    __syncthreads();
    x = {0};
    if (sid_lane() < SID_WARPS) x = part[sid_lane()];
    x.sum = sid_warp_sum(x.sum);
    return x;
}
/* A header's share, its checksum field apart. */
__device__ inline uint64_t sid_sum_header(const sid_header &h) {
    uint32_t w[SID_HEADER_BYTES / 4];
    uint64_t sum = 0;
    memcpy(w, &h, sizeof h);
#pragma unroll
    for (uint32_t i = 0; i < SID_HEADER_BYTES / 4 - 2; i++) sum += w[i] * sid_sum_key(i);
    return sum;
}

/* ---- headers ------------------------------------------------------------------------------------------------- */

/* Everything of a header that is known before the pass. */
struct sid_head {
    uint64_t n, step;
    uint32_t group, rank, dtype;
    uint32_t salt; /* of the random stream; 0: the codec draws nothing */
    uint16_t codec;
};

inline bool sid_draws(const sid_plan *p) { return p->codec->info.traits & SID_STOCHASTIC; }
inline sid_head sid_head_of(const sid_plan *p, const sid_step &step) {
    const uint32_t salt = sid_draws(p) ? sid_salt(step.seed, step.rank) : 0;
    return {p->n, step.step, step.group, step.rank, (uint32_t)p->dtype, salt, p->codec->info.wire_id};
}
/* The random stream of this step. */
inline sid_draw sid_draw_of(const sid_plan *p, const sid_step &step) {
    if (!sid_draws(p)) return {};
    return {sid_salt(step.seed, step.rank), step.group, step.step};
}

/* Writes the header of one payload; `sum` is what the checksum covers of the body. */
__device__ inline void sid_seal(sid_header *h, const sid_head &head, uint32_t flags, uint64_t count, float scale,
                                uint64_t sum) {
    sid_header x;
    memset(&x, 0, sizeof x);
    x.magic = SID_MAGIC;
    x.version = SID_WIRE_VERSION;
    x.codec = head.codec;
    x.dtype = head.dtype;
    x.flags = flags;
    x.n = head.n;
    x.count = count;
    x.step = head.step;
    x.group = head.group;
    x.rank = head.rank;
    x.scale = scale;
    x.salt = head.salt;
    x.checksum = sum + sid_sum_header(x);
    *h = x;
}

/* The values that a payload's header must have, in the order in which csrc/core/decode.c checks them. `sum` covers
 * everything after the header that the checksum covers. The codec's own rules come after. */
struct sid_expect {
    sid_head head;
    uint32_t apart;
    bool any, draws;
};

inline sid_expect sid_expect_of(const sid_cuda_decoding &c) {
    const sid_plan *p = c.plan;
    return {{p->n, c.step, c.of_group, 0, (uint32_t)p->dtype, 0, p->codec->info.wire_id}, c.apart, c.any, sid_draws(p)};
}

__device__ inline int32_t sid_check_header(const sid_header &h, const sid_expect &e, uint32_t r, uint64_t sum) {
    if (h.magic != SID_MAGIC) return SID_E_CORRUPT;
    if (h.version != SID_WIRE_VERSION) return SID_E_MISMATCH;
    if (h.checksum != sum + sid_sum_header(h)) return SID_E_CORRUPT;
    if (h.codec != e.head.codec || h.dtype != e.head.dtype || h.n != e.head.n) return SID_E_MISMATCH;
    if (h.salt && !e.draws) return SID_E_CORRUPT;
    if (!e.any && (h.step != e.head.step || h.group != e.head.group + r * e.apart)) return SID_E_MISMATCH;
    return SID_OK;
}

/* For a linear body, header.scale is 1 / world, and the same in all payloads (csrc/codec/linear.h). */
__device__ inline float sid_linear_inverse(float scale) { return (float)floor(1.0 / (double)scale + 0.5); }
__device__ inline int32_t sid_check_linear(const sid_header &h, const sid_header &first) {
    if (!(h.scale > 0 && h.scale <= 1) || 1.0f / sid_linear_inverse(h.scale) != h.scale) return SID_E_CORRUPT;
    return h.scale == first.scale ? SID_OK : SID_E_MISMATCH;
}
/* The caller's scale comes on top of the sender's, unless it is that one. */
__device__ inline float sid_linear_factor(const sid_header &first, float scale) {
    return scale == first.scale ? 1.0f : (float)((double)scale * (double)sid_linear_inverse(first.scale));
}

/* A block's finding over all payloads: the first one at fault, with its status. */
#define SID_SOUND 0xffffffffu
__device__ inline void sid_blame(uint32_t *first, uint32_t payload, int32_t status) {
    if (status != SID_OK) atomicMin(first, payload << 8 | (uint32_t)-status);
}

/* A block of a check has found this in its part of a payload: a share of the checksum, whether it is bad, and the
 * largest number that the codec asks for. */
struct sid_found_part {
    unsigned long long sum;
    uint32_t bad, most;
};
enum {
    SID_CHECKERS = SID_MAX_COUNT /* blocks at most */
};
/* Blocks for each of `count` payloads, of which one has `pieces` of work. */
inline uint32_t sid_checkers(uint64_t pieces, uint64_t most, uint32_t count) {
    const uint64_t share = most < SID_CHECKERS / count ? most : SID_CHECKERS / count;
    return (uint32_t)(pieces < 1 ? 1 : pieces < share ? pieces : share);
}
/* Joins what the blocks of a check have found, `each` of them in one of `count` payloads, and calls f(payload,
 * sid_found_part) in one thread for each. The last block of the check calls it. A payload has up to 32 lanes, which
 * read its parts side by side. */
template <typename F>
__device__ inline void sid_each_found(const sid_found_part *part, uint32_t count, uint32_t each, const F &f) {
    uint32_t lanes = 1;
    while (lanes < each && lanes < SID_LANES) lanes *= 2;
    for (uint32_t from = 0; from < count; from += SID_BLOCK / lanes) {
        const uint32_t r = from + threadIdx.x / lanes, first = threadIdx.x % lanes;
        sid_found_part all = {0, 0, 0};
        for (uint32_t i = first; i < each && r < count; i += lanes) {
            const sid_found_part x = part[r * each + i];
            all = {all.sum + x.sum, all.bad | x.bad, all.most > x.most ? all.most : x.most};
        }
        for (uint32_t d = lanes / 2; d; d /= 2) {
            all.sum += __shfl_xor_sync(SID_FULL, all.sum, d);
            all.bad |= __shfl_xor_sync(SID_FULL, all.bad, d);
            const uint32_t most = __shfl_xor_sync(SID_FULL, all.most, d);
            all.most = most > all.most ? most : all.most;
        }
        if (r < count && !first) f(r, all);
    }
}

/* Does what sid_begin does, in one more block of a check that has no launch before it. */
__device__ inline void sid_begin_check(const sid_group &g, sid_scratch *scratch, const int32_t *gate) {
    const bool ready = sid_sum_lengths(g, (uint64_t *)g.start, gate);
    if (threadIdx.x) return;
    scratch->ready = ready;
    scratch->nonfinite = 0;
}

/* The end of a check, by one thread. The report keeps the first fault that it is told of. */
__device__ inline void sid_end_check(sid_cuda_report *report, sid_scratch *scratch, uint32_t first, bool nonfinite) {
    if (!scratch->ready) first = (uint32_t)-SID_E_ARG; /* the segment table does not hold the group */
    const bool sound = first == SID_SOUND;
    report->nonfinite = sound && nonfinite;
    scratch->nonfinite = nonfinite;
    scratch->go = sound;
    if (!sound && report->status == SID_OK) {
        report->status = -(int32_t)(first & 0xff);
        report->culprit = first >> 8;
    }
}

#endif
