/* Index arithmetic of the CUDA side, plain functions that the CPU tests run too (tests/c/test_map.c). */
#ifndef SID_MAP_H
#define SID_MAP_H

#include "internal.h"

/* A warp holds one tile of SID_TILE elements, a block of SID_WARPS warps one chunk. Lane l of row r holds the four
 * elements from 128 r + 4 l on, so that a row is one 16-byte access per lane. */
enum {
    SID_LANES = 32,
    SID_WARPS = 8,
    SID_BLOCK = SID_LANES * SID_WARPS
};
enum {
    SID_QUAD = 4,
    SID_ROW = SID_LANES * SID_QUAD,
    SID_ROWS = SID_TILE / SID_ROW
};
enum {
    SID_CHUNK = SID_TILE * SID_WARPS,
    SID_WIRE_CHUNKS = 8
};

enum {
    SID_CUDA_MAX_SEGMENTS = 16384
}; /* their starts take 128 KiB of work */
#define SID_CUDA_MAX_N 0xffffffffull /* counts are 32 bits wide */

SID_HD uint64_t sid_tiles(uint64_t n) { return (n + SID_TILE - 1) / SID_TILE; }
SID_HD uint64_t sid_chunks(uint64_t n) { return (n + SID_CHUNK - 1) / SID_CHUNK; }
SID_HD uint32_t sid_tile_len(uint64_t n, uint64_t offset) {
    return n - offset < SID_TILE ? (uint32_t)(n - offset) : (uint32_t)SID_TILE;
}

/* start[0 .. n_seg] are the running sums of the lengths. The segment that element `offset` < start[n_seg] lies in: the
 * last one that starts at or before it, which is never an empty one. */
SID_HD uint32_t sid_find_segment(const uint64_t *start, uint32_t n_seg, uint64_t offset) {
    uint32_t lo = 0, hi = n_seg;
    while (hi - lo > 1) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (start[mid] <= offset)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

/* Keys are selected by three digits, the highest first: 11, 10 and 10 bits. */
enum {
    SID_BINS = 1 << 11
};

/* Entries written before a place in index order, where `above` elements before it exceed the key, `equal` ones have it,
 * and the first `ties` of those with it are sent. */
SID_HD uint32_t sid_slot(uint32_t above, uint32_t equal, uint32_t ties) {
    return above + (equal < ties ? equal : ties);
}

/* The addend of the 16-bit value at byte `offset` of a payload to the checksum's weighted sum. u16s pair up in
 * little-endian words. (To the plain sum it adds value << 8 * (offset % 4).) */
SID_HD uint64_t sid_half_word(uint64_t offset, uint16_t value) { return (uint64_t)value << (8 * (offset & 2)); }

#endif
