/* The checksums of messages and payloads, and the table of keys that the vector code reads. */
#include "checksum.h"

#include <string.h>

#define K1(q) 1u + (q) * (SID_SUM_PAIR_1 + SID_SUM_PAIR_2 * (q))
#define K8(q) K1(q), K1(q + 1), K1(q + 2), K1(q + 3), K1(q + 4), K1(q + 5), K1(q + 6), K1(q + 7)
#define K64(q) K8(q), K8(q + 8), K8(q + 16), K8(q + 24), K8(q + 32), K8(q + 40), K8(q + 48), K8(q + 56)
_Alignas(64) const uint64_t sid_sum_pairs[SID_SUM_PAIRS] = {K64(0u),   K64(64u),  K64(128u), K64(192u),
                                                            K64(256u), K64(320u), K64(384u), K64(448u)};

uint64_t sid_message_checksum(const sid_simd *v, const void *message, uint64_t bytes, uint64_t field) {
    const uint32_t *w = message;
    const uint64_t own = field / 4;
    return v->checksum(w, 0, bytes / 4) - w[own] * sid_sum_key(own) - w[own + 1] * sid_sum_key(own + 1);
}

uint64_t sid_payload_checksum(const sid_plan *p, const uint8_t *payload) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const int whole = !(p->codec->info.traits & SID_LINEAR) || h->scale == 1.0f;
    return sid_message_checksum(p->simd, payload, whole ? p->sizes.payload : SID_HEADER_BYTES,
                                offsetof(sid_header, checksum));
}

void sid_payload_sum(const sid_plan *p, const uint8_t *payload, uint64_t end, sid_summed *known) {
    const uint64_t to = end / SID_SUM_BYTES * SID_SUM_BYTES;
    const uint32_t *w = (const uint32_t *)(const void *)payload;
    if (to <= known->to) return;
    known->sum += p->simd->checksum(w + known->to / 4, known->to / 4, (to - known->to) / 4);
    known->to = to;
}

uint64_t sid_payload_checksum_of(const sid_plan *p, const uint8_t *payload, const sid_summed *known) {
    const uint32_t *w = (const uint32_t *)(const void *)payload;
    if (known->to == known->from) return sid_payload_checksum(p, payload);
    return sid_message_checksum(p->simd, payload, known->from, offsetof(sid_header, checksum)) + known->sum +
           p->simd->checksum(w + known->to / 4, known->to / 4, (p->sizes.payload - known->to) / 4);
}

uint64_t sid_checksum(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype) {
    const sid_simd *v = sid_simd_for(SID_ISA_AUTO);
    const size_t size = sid_dtype_size(dtype);
    uint64_t h = 0;
    for (uint32_t s = 0; s < n_seg; s++) { /* a segment may start anywhere: go through aligned blocks */
        const uint8_t *p = seg[s].ptr;
        uint64_t left = seg[s].len * size;
        while (left) {
            uint32_t block[SID_SUM_BLOCK];
            const uint64_t take = left < sizeof block ? left : sizeof block, full = sid_round_up(take, 8);
            memcpy(block, p, take);
            memset((uint8_t *)block + take, 0, full - take);
            h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull + v->checksum(block, 0, full / 4) + take;
            p += take;
            left -= take;
        }
    }
    return h ^ h >> 32;
}
