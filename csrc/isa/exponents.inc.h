/* simd.c: elements taken apart into codes of their exponents, bit by bit in planes, bytes of sign and mantissa, and what else of
 * the mantissa there is; and put together again (bits.h, lossless.c).
 *
 * Nothing here rounds, except that join adds: one float32 sum an element. */

/* Bit k of each of 8 codes, one a byte, as a byte. */
INLINE uint32_t plane_of(uint64_t codes, uint32_t k) {
    return (uint32_t)(((codes >> k & 0x0101010101010101ull) * 0x0102040810204080ull) >> 56);
}
/* The reverse: bytes of 0 and 1. */
INLINE uint64_t bytes_of(uint32_t plane) {
    const uint64_t bit = (uint64_t)plane * 0x0101010101010101ull & 0x8040201008040201ull;
    return (bit + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}

/* Which of 8 codes have all of their bits. */
INLINE uint32_t far_of(uint64_t codes, uint32_t width) {
    const uint64_t three = codes & codes >> 1 & codes >> 2;
    return plane_of(width > 3 ? three & codes >> 3 : three, 0);
}

/* The code, and above it the bits of the mantissa that have no byte. */
INLINE void codes_of(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *code) {
    const uint32_t half = to->planes > to->bits, far = (1u << to->bits) - 1;
    for (uint32_t b = 0, i = 0; i < n; b++) {
        const uint32_t end = n - i < to->block ? n : i + to->block, top = to->top[b];
        for (; i < end; i++) {
            const uint32_t e = u[i] >> 23 & 255, c = sid_exponent_code(e, top, far);
            code[i] = (uint8_t)(half ? c | (u[i] >> 13 & 7) << to->bits : c);
        }
    }
}

INLINE uint32_t split_as(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *far, const uint32_t width) {
    const uint32_t stride = (n + 63) / 64 * 8;
    uint8_t code[SID_TILE + 64];
    uint32_t count = 0;
    codes_of(u, n, to, code);
    memset(code + n, 0, 64);
    for (uint32_t i = 0; i < n; i++) {
        to->high[i] = (uint8_t)((u[i] >> 16 & 0x7f) | (u[i] >> 24 & 0x80));
        if (to->low) {
            to->low[2 * i] = (uint8_t)u[i];
            to->low[2 * i + 1] = (uint8_t)(u[i] >> 8);
        }
    }
    for (uint32_t i = 0; i < 8 * stride; i += 8) {
        uint64_t eight;
        memcpy(&eight, code + i, 8);
        for (uint32_t k = 0; k < to->planes; k++) to->plane[k * stride + i / 8] = (uint8_t)plane_of(eight, k);
        for (uint32_t m = far_of(eight, width); m; m &= m - 1)
            far[count++] = (uint8_t)(u[i + (uint32_t)__builtin_ctz(m)] >> 23);
    }
    return count;
}

static uint32_t split(const uint32_t *u, uint32_t n, const sid_parts *to, uint8_t *far) {
    return to->bits > 3 ? split_as(u, n, to, far, 4) : split_as(u, n, to, far, 3);
}

/* The bits of elements i to i + n - 1, n up to 64, i a multiple of 64. */
INLINE uint32_t join_some(const sid_parts *from, uint32_t stride, uint32_t i, uint32_t n, const uint8_t *far,
                          uint32_t *u) {
    const uint32_t top = from->top[i / from->block] + 1, all = (1u << from->bits) - 1;
    uint8_t code[64], exponent[64];
    uint32_t count = 0;
    for (uint32_t j = 0; j < n; j += 8) {
        uint64_t eight = 0;
        for (uint32_t k = 0; k < from->planes; k++) eight |= bytes_of(from->plane[k * stride + (i + j) / 8]) << k;
        memcpy(code + j, &eight, 8);
    }
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t c = code[j] & all;
        exponent[j] = (uint8_t)(c ? top - c : 0);
    }
    for (uint32_t j = 0; j < n; j += 8) {
        uint64_t eight;
        memcpy(&eight, code + j, 8);
        for (uint32_t m = far_of(eight, from->bits); m; m &= m - 1)
            exponent[j + (uint32_t)__builtin_ctz(m)] = far[count++];
    }
    for (uint32_t j = 0; j < n; j++) {
        const uint32_t h = from->high[i + j];
        u[j] = (uint32_t)exponent[j] << 23 | (h & 0x7f) << 16 | (h & 0x80) << 24;
    }
    if (from->low)
        for (uint32_t j = 0; j < n; j++)
            u[j] |= (uint32_t)from->low[2 * (i + j)] | (uint32_t)from->low[2 * (i + j) + 1] << 8;
    if (from->planes > from->bits)
        for (uint32_t j = 0; j < n; j++) u[j] |= (uint32_t)(code[j] >> from->bits) << 13;
    return count;
}
INLINE void put_joined(const uint32_t *u, uint32_t n, int half, int add, float *out) {
    if (half)
        for (uint32_t j = 0; j < n; j++) {
            const float x = sid_f16_to_f32((uint16_t)((u[j] >> 16 & 0x8000) | (u[j] >> 13 & 0x7fff)));
            out[j] = add ? out[j] + x : x;
        }
    else
        for (uint32_t j = 0; j < n; j++) {
            const float x = sid_bits_f32(u[j]);
            out[j] = add ? out[j] + x : x;
        }
}
INLINE uint32_t join_as(const sid_parts *from, uint32_t n, const uint8_t *far, int add, float *out,
                        const uint32_t width) {
    const uint32_t stride = (n + 63) / 64 * 8;
    const int half = from->planes > width;
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i += 64) {
        uint32_t u[64];
        const uint32_t take = n - i < 64 ? n - i : 64;
        count += join_some(from, stride, i, take, far + count, u);
        put_joined(u, take, half, add, out + i);
    }
    return count;
}
static uint32_t join(const sid_parts *from, uint32_t n, const uint8_t *far, int add, float *out) {
    return from->bits > 3 ? join_as(from, n, far, add, out, 4) : join_as(from, n, far, add, out, 3);
}
