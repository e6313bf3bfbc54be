/* The index arithmetic that cuda/ shares with the host, where it can be tried without a device. */
#include <string.h>

#include "../../cuda/core/map.h"
#include "test.h"

static void find_segments(rng *r) {
    for (int round = 0; round < 200; round++) {
        uint64_t start[65] = {0};
        const uint32_t n_seg = 1 + rng_below(r, 64);
        for (uint32_t s = 0; s < n_seg; s++)
            start[s + 1] = start[s] + (rng_below(r, 3) ? rng_below(r, round % 2 ? 5 : 5000) : 0);
        for (uint64_t at = 0; at < start[n_seg]; at += 1 + start[n_seg] / 997) {
            const uint32_t s = sid_find_segment(start, n_seg, at);
            CHECK(s < n_seg && start[s] <= at && at < start[s + 1], "element %llu of %u segments: segment %u",
                  (unsigned long long)at, n_seg, s);
        }
    }
}

/* Groups of more than 2^31 elements: no memory is needed to ask where their segments' edges lie. */
static void find_segments_of_large_groups(rng *r) {
    for (int round = 0; round < 200; round++) {
        uint64_t start[65] = {0};
        const uint32_t n_seg = 1 + rng_below(r, 64);
        for (uint32_t s = 0; s < n_seg; s++) {
            const uint64_t room = SID_CUDA_MAX_N - start[s];
            start[s + 1] =
                s + 1 == n_seg ? SID_CUDA_MAX_N : start[s] + (rng_below(r, 3) ? rng_next(r) % (room + 1) : 0);
        }
        for (uint32_t s = 0; s <= n_seg; s++)
            for (int64_t by = -1; by <= 1; by++) {
                const uint64_t at = start[s] + (uint64_t)by;
                if (at >= SID_CUDA_MAX_N) continue; /* before the first element, or behind the last one */
                const uint32_t found = sid_find_segment(start, n_seg, at);
                CHECK(found < n_seg && start[found] <= at && at < start[found + 1], "element %llu: segment %u of %u",
                      (unsigned long long)at, found, n_seg);
            }
    }
}

/* Slots of a group of 2^32 - 1 elements that are all above the key, or all equal to it: the last one is not lost. */
static void slots_of_large_groups(void) {
    const uint32_t last = (uint32_t)(SID_CUDA_MAX_N - 1);
    CHECK(sid_slot(last, 0, 0) == last, "slot %u of the last element above the key", sid_slot(last, 0, 0));
    CHECK(sid_slot(0, last, (uint32_t)SID_CUDA_MAX_N) == last, "slot of the last element that equals the key");
    CHECK(sid_slot(1u << 31, 1u << 31, (1u << 31) - 1) == (uint32_t)SID_CUDA_MAX_N, "slot behind all ties");
}

static void tiles_cover(void) {
    static const uint64_t sizes[] = {
        0,     1,     1023,  1024,          1025,          8191,          8192,          8193,
        65535, 65536, 65537, 0x7fffffffull, 0x80000000ull, 0x80000001ull, 0xfffffc01ull, SID_CUDA_MAX_N};
    CHECK((uint64_t)SID_CHUNK * SID_WIRE_CHUNKS == SID_WIRE_TILE, "chunks do not fill a wire tile");
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        const uint64_t n = sizes[i], tiles = sid_tiles(n), chunks = sid_chunks(n);
        const uint64_t last = tiles ? (tiles - 1) * SID_TILE : 0;
        CHECK(tiles ? last + sid_tile_len(n, last) == n : n == 0, "tiles of %llu elements", (unsigned long long)n);
        CHECK(chunks * SID_WARPS >= tiles && (chunks == 0 || (chunks - 1) * SID_WARPS < tiles), "chunks of %llu",
              (unsigned long long)n);
        CHECK(chunks <= sid_wire_tiles(n) * SID_WIRE_CHUNKS, "wire tiles of %llu", (unsigned long long)n);
    }
}

/* Elements are above a key (2), equal to it (1) or neither: the slots of those sent count up by one. */
static void slots_count_up(rng *r) {
    for (int round = 0; round < 200; round++) {
        const uint32_t ties = rng_below(r, 40);
        uint32_t above = 0, equal = 0, sent = 0;
        for (int i = 0; i < 300; i++) {
            const uint32_t kind = rng_below(r, 5);
            if (kind == 2 || (kind == 1 && equal < ties)) {
                CHECK(sid_slot(above, equal, ties) == sent, "slot %u, not %u", sid_slot(above, equal, ties), sent);
                sent++;
            }
            above += kind == 2;
            equal += kind == 1;
        }
        CHECK(sid_slot(above, equal, ties) == sent, "%u slots at the end, not %u", sid_slot(above, equal, ties), sent);
    }
}

/* A payload's checksum put together from 16-bit pieces, as the writers of indices and float16 values do. */
static void checksum_in_pieces(rng *r) {
    uint64_t words[2000], sum = 0;
    uint16_t piece[sizeof words / 2];
    for (size_t i = 0; i < sizeof words / sizeof *words; i++) words[i] = rng_next(r);
    words[7] = 0; /* the checksum's own place */
    memcpy(piece, words, sizeof words);
    for (uint64_t at = 0; at < sizeof words; at += 2) sum += sid_half_word(at, piece[at / 2]) * sid_sum_key(at / 4);
    CHECK(sum == sid_message_checksum(sid_simd_for(SID_ISA_BASE), words, sizeof words, 56),
          "checksum in pieces differs");
}

void test_map(void);
void test_map(void) {
    rng r = {20};
    find_segments(&r);
    find_segments_of_large_groups(&r);
    tiles_cover();
    slots_count_up(&r);
    slots_of_large_groups();
    checksum_in_pieces(&r);
}
