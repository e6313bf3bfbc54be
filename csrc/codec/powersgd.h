/* The order in which powersgd adds up, on host and device: many threads can each take a piece, and the pieces are joined in one
 * order.
 *
 * P: a row's products with a column of Q, in float32, CHUNK columns at a time: column j is added to lane j % LANES of the
 * chunk, in the order of j, and the lanes in halves, the upper half onto the lower one, down to one. The chunks' sums are
 * parts.
 * Q: the rows' products, `height` rows at a time, in the order of the rows. The blocks' sums are parts.
 * Parts, in float32: GROUP of them in turn, then the groups in turn.
 * A column of P or Q times another, in float64: unit u of UNIT elements belongs to strand u % STRANDS, element i of it is
 * added to the strand's lane i % STRANDS, in the order of i; a strand's lanes in halves, then the strands.
 * All start at 0. */
#ifndef SID_POWERSGD_H
#define SID_POWERSGD_H

#include "../codec.h"

enum {
    POWER_RANK = 64, /* the most */
    POWER_LANES = 16,
    POWER_CHUNK = 512,
    POWER_GROUP = 32,
    POWER_UNIT = 256,
    POWER_STRANDS = 32
};

/* Rows of a block of Q's sums: a power of two, at least 64. There are enough of them that each of the `rank` columns has at most
 * 128 Ki parts, and that all parts together are at most a sixteenth of the matrix. */
SID_HD uint32_t sid_power_height(uint64_t len, uint32_t rank) {
    uint32_t height = 64;
    while (height < 16 * rank || (uint64_t)height << 17 < len) height *= 2;
    return height;
}

/* Elements of a matrix are clamped to 2^96; elements of a vector, which is sent as it is, are clamped as in linear.c. */
#define POWER_LARGEST 0x1p96f
/* No column of finite elements is as long as this. */
#define POWER_LONGEST 0x1p200
SID_HD int sid_power_starts(double length) { return length > 0 && length < POWER_LONGEST; }
SID_HD float sid_power_limit(float s) { return sid_bits_f32(s == 1.0f ? 0x7f7fffffu : 0x7f7c0000u); }

#endif
