/* Packed indices of a sparse body (wire.h): the bits of an ascending sequence, split as Elias (1974) and Fano (1971) do. Of
 * each index the low bits stand side by side; the high ones are told by where its bit stands in a second array, in which every
 * entry sets one bit and every run of 2^low elements ends with a zero. A share d of the elements takes about
 * 2 + log2(1 / d) bits an entry, whatever they are, where u16 takes 16. */
#ifndef SID_PACKED_H
#define SID_PACKED_H

#include "../codec.h"

/* The `sent` offsets within their wire tiles, count[t] of tile t, into the payload, with the zeros after them. */
void packed_write(const sid_plan *p, const uint32_t *count, const uint16_t *idx, uint64_t sent, uint8_t *payload);
/* 1 if tile t, of `size` elements, has exactly `count` entries, which ascend within it; `before` are those of earlier tiles. */
int packed_sound(const sid_plan *p, const uint8_t *payload, uint64_t t, uint64_t before, uint64_t count, uint64_t size);
/* Reads the offsets of a sound payload from entry `pos` on: from the first of group index `offset` or beyond to the last
 * below `end` (an offset in at's wire tile) or the `left`-th. Returns how many. May write SID_UNPACK_SLACK past them. */
uint32_t packed_read(const sid_plan *p, const uint8_t *payload, uint64_t pos, uint64_t offset, uint32_t left,
                     uint32_t end, uint16_t *idx);

#endif
