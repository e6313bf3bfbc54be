/* The order of every sum of floats, which is the same on every processor and device; and the tile, which it counts in.
 *
 * A unit is SID_TILE elements of a group or entries of a list, or what is left at its end. Element i of a unit is added to
 * lane i % 128, in the order of i. Then the lanes are added in halves: 64 .. 127 onto 0 .. 63 and so on, down to four, and
 * these as (0 + 1) + (2 + 3). (Four lanes belong to one thread of a warp, so that the halves are the warp's shuffles.) The
 * sum of unit u is added, in float64, to running sum u % SID_SUMS, in the order of u. At the end the running sums are added
 * in halves, down to one. All of them start at 0, so that zeros may be added anywhere. */
#ifndef SID_SUMS_H
#define SID_SUMS_H

#include "wire.h"

enum {
    SID_TILE = 1024,     /* elements of a tile: 4 KB of acc and 4 KB of gradient stay in the first cache */
    SID_MAX_TILE = 4096, /* for codecs whose blocks are longer: a tile is always a whole number of blocks */
    SID_UNIT_LANES = 128,
    SID_SUMS = 1024
};

/* For a tile on the stack: no vector register's load of it crosses a cache line. */
#define SID_LINE _Alignas(64)

/* How many running sums n elements have: so many doubles, zero at first. */
static inline uint32_t sid_sums(uint64_t n) {
    const uint64_t units = (n + SID_TILE - 1) / SID_TILE;
    return units < SID_SUMS ? (uint32_t)units : (uint32_t)SID_SUMS;
}
/* Adds x, the sum of the unit that begins with element `offset`. */
static inline void sid_sums_add(double *sums, uint64_t offset, double x) { sums[offset / SID_TILE % SID_SUMS] += x; }
/* The total of the running sums, which are overwritten. */
static inline double sid_sums_total(double *sums, uint64_t n) {
    uint32_t count = sid_sums(n);
    if (!count) return 0;
    for (uint32_t w = SID_SUMS / 2; w; w /= 2) {
        for (uint32_t j = 0; j + w < count; j++) sums[j] += sums[j + w];
        count = count < w ? count : w;
    }
    return sums[0];
}
/* The sum of a unit's 128 lanes. */
static inline double sid_join(const double *lane) {
    double half[SID_UNIT_LANES / 2];
    for (int j = 0; j < SID_UNIT_LANES / 2; j++) half[j] = lane[j] + lane[j + SID_UNIT_LANES / 2];
    for (int w = SID_UNIT_LANES / 4; w >= 4; w /= 2)
        for (int j = 0; j < w; j++) half[j] += half[j + w];
    return (half[0] + half[1]) + (half[2] + half[3]);
}

/* The mean from a float64 sum, where the float32 sum of finite numbers overflowed: sum times `scale`, which may be 1 / world
 * rounded up. */
SID_HD float sid_mean(double sum, float scale) {
    const double mean = sum * (double)scale, largest = 3.4028234663852886e38, in_reach = 3.4028240e38;
    return mean > largest && mean < in_reach     ? (float)largest
           : mean < -largest && mean > -in_reach ? (float)-largest
                                                 : (float)mean;
}

#endif
