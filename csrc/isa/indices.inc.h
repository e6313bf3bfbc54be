/* simd.c: packed indices (wire.h): reading the places of the ones of a word and the low bits beside them, and writing the low bits.
 *
 * Integers only. Reads run over by up to 8 bytes and writes by more, as simd.h says. */

/* Appends base + the place of each one of a word; may write 16 more. */
static uint32_t places_of(uint64_t word, uint32_t base, uint16_t *at) {
    uint32_t c = 0;
#if defined(SID_HAS_AVX512)
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i here = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)base));
    for (int j = 0; j < 64; j += 16) {
        const __mmask16 m = (__mmask16)(word >> j);
        _mm256_storeu_si256((__m256i *)(void *)(at + c), _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(m, here)));
        here = _mm512_add_epi32(here, _mm512_set1_epi32(16));
        c += (unsigned)__builtin_popcount(m);
    }
#elif defined(SID_HAS_AVX2)
    __m128i here = _mm_set1_epi16((short)base);
    for (int j = 0; j < 64; j += 8) {
        const uint64_t m = word >> j & 0xff;
        const uint64_t some = _pext_u64(0x0706050403020100ull, _pdep_u64(m, 0x0101010101010101ull) * 0xff);
        const __m128i places = _mm_cvtepu8_epi16(_mm_cvtsi64_si128((long long)some));
        _mm_storeu_si128((__m128i *)(void *)(at + c), _mm_add_epi16(places, here));
        here = _mm_add_epi16(here, _mm_set1_epi16(8));
        c += (uint32_t)__builtin_popcountll(m);
    }
#else
    for (; word; word &= word - 1) at[c++] = (uint16_t)(base + (uint32_t)__builtin_ctzll(word));
#endif
    return c;
}

/* Four fields of b <= 12 bits, from bit `offset` on, in 16 bits each. Loads 8 bytes. */
static uint64_t four_fields(const uint8_t *p, uint64_t offset, uint32_t b) {
    const uint64_t mask = (1ull << b) - 1;
    uint64_t x;
    memcpy(&x, p + offset / 8, 8);
    x >>= offset % 8;
#ifdef SID_HAS_AVX2
    return _pdep_u64(x, mask * 0x0001000100010001ull);
#else
    return (x & mask) | (x >> b & mask) << 16 | (x >> 2 * b & mask) << 32 | (x >> 3 * b & mask) << 48;
#endif
}

typedef uint16_t vs __attribute__((vector_size(BYTES)));

/* By some words at a time: places, then low bits, then both together, so that no load waits for stores half as wide. */
static uint32_t unpack(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx) {
    enum {
        WORDS = 16,
        SIDE = BYTES / 2
    };
    vs lanes;
    for (uint16_t j = 0; j < SIDE; j++) lanes[j] = j;
    const uint32_t bits = from->bits;
    const uint64_t first =
        from->pos + from->runs; /* what entry pos's bit would be at, were it in the tile's first run */
    const uint64_t runs = (end + (1ull << bits) - 1) >> bits; /* so many zeros later there is no entry below `end` */
    uint64_t w = from->from / 64, seen = ~0ull << from->from % 64;
    uint32_t i = 0;
    int there = from->from >= from->stop;
    while (!there && i < most && 64 * w < from->stop) {
        uint16_t low[64 * WORDS + SIDE];
        const uint32_t base = (uint32_t)(64 * w - first) - i;
        uint32_t c = 0;
        for (uint32_t q = 0; q < WORDS && !there && 64 * w < from->stop && i + c < most; q++, w++) {
            uint64_t word = from->high[w] & seen;
            seen = ~0ull;
            if (w == from->stop / 64) word &= (1ull << from->stop % 64) - 1;
            c += places_of(word, base + 64 * q, idx + i + c);
            there = 64 * (w + 1) - first - i - c >= runs;
        }
        for (uint32_t j = 0; j < c; j += 4) {
            const uint64_t four = four_fields(from->low, (from->pos + i + j) * bits, bits);
            memcpy(low + j, &four, 8);
        }
        vs entry = lanes;
        for (uint32_t j = 0; j < c; j += SIDE) {
            vs x, y;
            memcpy(&x, idx + i + j, sizeof x);
            memcpy(&y, low + j, sizeof y);
            x = (x - entry) * (uint16_t)(1u << bits) | y;
            memcpy(idx + i + j, &x, sizeof x);
            entry += SIDE;
        }
        if (c > most - i) c = most - i;
        for (i += c; c && idx[i - 1] >= end; c--, i--) there = 1;
    }
    return i;
}

/* The low bits of entries, one after the other. Stores run over by up to 8 bytes. */
static uint8_t *pack_low(const uint16_t *idx, uint64_t n, uint32_t bits, uint8_t *out) {
    const uint64_t mask = (1u << bits) - 1;
    uint64_t held = 0, i = 0;
    uint32_t have = 0;
    for (; i < n; i += 4) {
        const uint32_t some = n - i < 4 ? (uint32_t)(n - i) : 4;
        uint64_t four = 0;
        if (some == 4) {
#ifdef SID_HAS_AVX2
            memcpy(&four, idx + i, 8);
            four = _pext_u64(four, mask * 0x0001000100010001ull);
#else
            four = (idx[i] & mask) | (idx[i + 1] & mask) << bits | (idx[i + 2] & mask) << 2 * bits |
                   (idx[i + 3] & mask) << 3 * bits;
#endif
        } else
            for (uint32_t j = 0; j < some; j++) four |= (idx[i + j] & mask) << j * bits;
        held |= four << have; /* at most 7 + 4 * 12 bits */
        memcpy(out, &held, 8);
        have += some * bits;
        out += have / 8;
        held >>= have & ~7u;
        have &= 7;
    }
    return out + (have > 0);
}
