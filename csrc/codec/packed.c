#include "packed.h"

#include <string.h>

static uint32_t low_bits(const sid_plan *p) { return sid_packed_low(p->n, p->cap); }

void packed_write(const sid_plan *p, const uint32_t *count, const uint16_t *idx, uint64_t sent, uint8_t *payload) {
    const uint32_t bits = low_bits(p);
    const uint64_t high_at = sid_packed_high_at(p->n, p->cap), tiles = sid_wire_tiles(p->n);
    uint64_t *high = (uint64_t *)(void *)(payload + high_at), i = 0;
    /* may run over by 8 bytes: into the high bits, which are 8 bytes at least, and written afterwards */
    uint8_t *const low_end = p->simd->pack_low(idx, sent, bits, payload + sid_sparse_index_at(p->n));
    if (low_end < payload + high_at) memset(low_end, 0, (size_t)(payload + high_at - low_end));
    memset(high, 0, sid_packed_value_at(p->n, p->cap) - high_at);
    for (uint64_t t = 0; t < tiles; i += count[t++])
        p->simd->pack_high(idx + i, count[t], bits, (t * SID_WIRE_TILE >> bits) + i, high);
}

static sid_packed tile_of(const sid_plan *p, const uint8_t *payload, uint64_t offset) {
    const uint32_t bits = low_bits(p);
    return (sid_packed){.low = payload + sid_sparse_index_at(p->n),
                        .high = (const uint64_t *)(const void *)(payload + sid_packed_high_at(p->n, p->cap)),
                        .runs = offset / SID_WIRE_TILE * SID_WIRE_TILE >> bits,
                        .bits = bits};
}

int packed_sound(const sid_plan *p, const uint8_t *payload, uint64_t t, uint64_t before, uint64_t count,
                 uint64_t size) {
    sid_packed tile = tile_of(p, payload, t * SID_WIRE_TILE);
    tile.pos = before;
    tile.from = tile.runs + before;
    tile.stop = tile.from + count + ((size - 1) >> tile.bits) + 1;
    return p->simd->ascending(&tile, (uint32_t)count, (uint32_t)size);
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
