/* The payload, byte by byte (docs/wire.md). Shared by host and device; little-endian machines only, checked below. */
#ifndef SID_WIRE_H
#define SID_WIRE_H

#include <stdint.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "sidcomp's payloads are little-endian and are read in place: big-endian hosts are not supported"
#endif

#ifdef __CUDACC__
#define SID_HD static __host__ __device__ __inline__ __attribute__((unused))
#else
#define SID_HD static inline __attribute__((unused))
#endif

#define SID_MAGIC 0x43444953u /* "SIDC" */
enum {
    SID_WIRE_VERSION = 2,
    SID_HEADER_BYTES = 64
};

enum {                       /* header flags */
    SID_FLAG_NONFINITE = 1u, /* the gradient held NaN or Inf */
    SID_FLAG_RAISED = 2u,    /* the threshold was raised to fit the capacity */
    SID_FLAG_HALF = 4u,      /* sparse values are float16 */
    SID_FLAG_MEAN = 8u,      /* sparse, without values: scale is the value of each element */
    SID_FLAG_LOG8 = 16u,     /* sparse values are 8-bit levels, bits.h */
    SID_FLAG_LOG4 = 32u,     /* 4-bit ones */
    SID_FLAG_PACKED = 64u,   /* sparse indices are packed */
    SID_FLAG_LOG2 = 128u,    /* sparse values are 2-bit levels */
    SID_FLAG_LEVELS = 256u,  /* elements are sent as levels that the body has */
    SID_FLAG_BLOCKS = 512u   /* sparse, by blocks of a fixed number of elements each (codec/blocks.h) */
};

typedef struct sid_header {
    uint32_t magic;    /*  0 */
    uint16_t version;  /*  4 */
    uint16_t codec;    /*  6 sid_info.wire_id */
    uint32_t dtype;    /*  8 of the group's segments */
    uint32_t flags;    /* 12 */
    uint64_t n;        /* 16 elements of the group */
    uint64_t count;    /* 24 elements in the body */
    uint64_t step;     /* 32 */
    uint32_t group;    /* 40 */
    uint32_t rank;     /* 44 */
    float scale;       /* 48 threshold, or the factor that a linear body was multiplied with */
    uint32_t salt;     /* 52 of the random stream (rng.h); zero where the codec draws nothing */
    uint64_t checksum; /* 56 */
} sid_header;

/* Sparse body: u32 count[tiles], indices, values; each array starts at a multiple of 8 bytes, what is unused is zero. A
 * wire tile is 65536 elements of the group; indices count from its start and ascend. They are u16 index[cap], or packed
 * (Elias-Fano): the low bits of all entries in as many bits each, and bits of which (place in the group >> low) + i is set
 * for entry i, so that a tile's begin at what count tells of those before it. */
#define SID_WIRE_TILE 65536ull

SID_HD uint64_t sid_round_up(uint64_t x, uint64_t to) { return (x + to - 1) / to * to; }
SID_HD uint64_t sid_wire_tiles(uint64_t n) { return (n + SID_WIRE_TILE - 1) / SID_WIRE_TILE; }
SID_HD uint64_t sid_sparse_index_at(uint64_t n) { return SID_HEADER_BYTES + sid_round_up(4 * sid_wire_tiles(n), 8); }
SID_HD uint64_t sid_sparse_value_at(uint64_t n, uint64_t cap) {
    return sid_sparse_index_at(n) + sid_round_up(2 * cap, 8);
}
SID_HD uint32_t sid_packed_low(uint64_t n, uint64_t cap) { /* at most 12: a multiple of a tile of decode begins a run */
    uint32_t low = 0;
    while (low < 12 && cap << (low + 1) <= n) low++;
    return low;
}
SID_HD uint64_t sid_packed_bits(uint64_t n, uint64_t cap) {
    return cap + ((n + (1ull << sid_packed_low(n, cap)) - 1) >> sid_packed_low(n, cap));
}
SID_HD uint64_t sid_packed_high_at(uint64_t n, uint64_t cap) {
    return sid_sparse_index_at(n) + sid_round_up(cap * sid_packed_low(n, cap), 64) / 8;
}
SID_HD uint64_t sid_packed_value_at(uint64_t n, uint64_t cap) {
    return sid_packed_high_at(n, cap) + sid_round_up(sid_packed_bits(n, cap), 64) / 8;
}
/* Sparse values: float32, float16, or u32 base, u32 step and codes of 8, 4 or 2 bits. */
enum {
    SID_VALUES_F32,
    SID_VALUES_F16,
    SID_VALUES_LOG8,
    SID_VALUES_LOG4,
    SID_VALUES_LOG2
};
SID_HD uint64_t sid_sparse_value_bytes(uint64_t count, uint32_t values) {
    return values == SID_VALUES_LOG8   ? 8 + count
           : values == SID_VALUES_LOG4 ? 8 + (count + 1) / 2
           : values == SID_VALUES_LOG2 ? 8 + (count + 3) / 4
                                       : (values == SID_VALUES_F16 ? 2 : 4) * count;
}
/* The bits of a code of levels, if these are the flags and no others are set; else 0. */
SID_HD uint32_t sid_level_bits(uint32_t flags) {
    return flags == SID_FLAG_LOG8 ? 8 : flags == SID_FLAG_LOG4 ? 4 : flags == SID_FLAG_LOG2 ? 2 : 0;
}
/* Sign body: a bit an element, set where it is negative, in u64 words; then, where the two reconstructed values are not
 * +-header.scale, f32 low, the one of the negative elements, and 4 zero bytes. */
SID_HD uint64_t sid_sign_low_at(uint64_t n) { return SID_HEADER_BYTES + 8 * ((n + 63) / 64); }
SID_HD uint64_t sid_sign_bytes(uint64_t n, unsigned pair) {
    return sid_round_up(sid_sign_low_at(n) + (pair ? 8 : 0), 64);
}
/* Linear body: n elements of the body's dtype from byte 64 on. Every payload is a multiple of 64 bytes long. */
SID_HD uint64_t sid_linear_bytes(uint64_t n, unsigned size) { return sid_round_up(SID_HEADER_BYTES + size * n, 64); }

/* The checksum of a message: the sum over its little-endian u32 words of word times key, modulo 2^64, so that any order and
 * any partition give the same value; its own field counts as zero. All keys are 1 modulo 4, and up to 8 GiB no two are equal
 * modulo 2^33, nor is one of them 1: no one or two changed bits, no burst of 32 and no swap of two words goes unseen
 * (docs/wire.md has the proof). Key of word i, the block having 1024 words: pair i/2 of the block, block i/1024, and for odd
 * i another factor. A pair's is 32 bits long, so that a word takes one product. */
#define SID_SUM_ODD 0x22edc4b0fa431b6dull
#define SID_SUM_PAIR_1 0x05e9bf98u
#define SID_SUM_PAIR_2 0xc7f7f460u
enum {
    SID_SUM_BLOCK = 1024,              /* words */
    SID_SUM_PAIRS = SID_SUM_BLOCK / 2, /* in a block */
    SID_SUM_BYTES = 4 * SID_SUM_BLOCK
};
SID_HD uint32_t sid_sum_pair(uint32_t q) { return 1 + q * (SID_SUM_PAIR_1 + SID_SUM_PAIR_2 * q); }
SID_HD uint64_t sid_sum_block(uint64_t b) {
    return 1 + (b + 1) * (0x2ec4e27be3115000ull + 0x2b458b95144c4000ull * (b + 1));
}
SID_HD uint64_t sid_sum_key(uint64_t i) {
    const uint64_t key = sid_sum_pair((uint32_t)(i % SID_SUM_BLOCK) / 2) * sid_sum_block(i / SID_SUM_BLOCK);
    return i % 2 ? key * SID_SUM_ODD : key;
}

#endif
