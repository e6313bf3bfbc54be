#include "packed.h"

#include <string.h>

static uint32_t low_bits(const sid_plan *p) { return sid_packed_low(p->n, p->cap); }

void packed_write(const sid_plan *p, const uint32_t *count, const uint16_t *idx, uint64_t sent, uint8_t *payload) {
    const uint32_t bits = low_bits(p);
    const uint64_t high_at = sid_packed_high_at(p->n, p->cap), tiles = sid_wire_tiles(p->n);
    uint64_t *high = (uint64_t *)(void *)(payload + high_at), word = 0, held = 0, i = 0;
    /* may run over by 8 bytes: into the high bits, which are 8 bytes at least, and written afterwards */
    uint8_t *const low_end = p->simd->pack_low(idx, sent, bits, payload + sid_sparse_index_at(p->n));
    if (low_end < payload + high_at) memset(low_end, 0, (size_t)(payload + high_at - low_end));
    memset(high, 0, sid_packed_value_at(p->n, p->cap) - high_at);
    for (uint64_t t = 0; t < tiles; t++)
        for (const uint64_t end = i + count[t]; i < end; i++) {
            const uint64_t bit = ((t * SID_WIRE_TILE + idx[i]) >> bits) + i;
            if (bit / 64 != word) {
                high[word] = held;
                held = 0;
                word = bit / 64;
            }
            held |= 1ull << bit % 64;
        }
    if (sent) high[word] = held;
}

static sid_packed tile_of(const sid_plan *p, const uint8_t *payload, uint64_t offset) {
    const uint32_t bits = low_bits(p);
    return (sid_packed){.low = payload + sid_sparse_index_at(p->n),
                        .high = (const uint64_t *)(const void *)(payload + sid_packed_high_at(p->n, p->cap)),
                        .runs = offset / SID_WIRE_TILE * SID_WIRE_TILE >> bits,
                        .bits = bits};
}

/* 1 if a bit of from .. stop is set. */
static int any(const uint64_t *high, uint64_t from, uint64_t stop) {
    for (; from < stop && from % 64; from++)
        if (high[from / 64] >> from % 64 & 1) return 1;
    for (; from + 64 <= stop; from += 64)
        if (high[from / 64]) return 1;
    for (; from < stop; from++)
        if (high[from / 64] >> from % 64 & 1) return 1;
    return 0;
}

int packed_sound(const sid_plan *p, const uint8_t *payload, uint64_t t, uint64_t before, uint64_t count,
                 uint64_t size) {
    enum {
        SOME = 1024
    };
    sid_packed tile = tile_of(p, payload, t * SID_WIRE_TILE);
    uint16_t idx[1 + SOME + PACKED_SLACK];
    int ascend = 1;
    tile.from = tile.runs + before;
    tile.stop = tile.from + count + ((size - 1) >> tile.bits) + 1;
    if (any(tile.high, tile.stop - 1, tile.stop)) return 0; /* so no entry lies past the last run */
    for (uint64_t done = 0; done < count;) {
        const uint32_t most = count - done < SOME ? (uint32_t)(count - done) : SOME;
        tile.pos = before + done;
        if (p->simd->unpack(&tile, most, (uint32_t)size, idx + 1) < most) return 0;
        for (uint32_t i = 1; i < most; i++) ascend &= idx[i] < idx[i + 1];
        ascend &= !done || idx[0] < idx[1];
        done += most;
        idx[0] = idx[most];
        tile.from = tile.runs + ((uint32_t)idx[0] >> tile.bits) + before + done; /* past the last one's bit */
    }
    return ascend && !any(tile.high, tile.from, tile.stop);
}

uint32_t packed_read(const sid_plan *p, const uint8_t *payload, uint64_t pos, uint64_t offset, uint32_t left,
                     uint32_t end, uint16_t *idx) {
    sid_packed tile = tile_of(p, payload, offset);
    tile.pos = pos;
    tile.from =
        (offset >> tile.bits) + pos; /* entries before pos lie before `offset`, so their bits lie before this one */
    tile.stop = sid_packed_bits(p->n, p->cap);
    return p->simd->unpack(&tile, left, end, idx);
}
