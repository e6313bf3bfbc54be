/* simd.c: packed indices (wire.h): reading the places of the ones of a word and the low bits beside them, and writing both.
 *
 * Integers only. Reads run over by up to 8 bytes and writes by more, as simd.h says. */

#ifdef SID_HAS_AVX512
/* Functions of the variant "avx512vbmi2" that compress lanes of 16 bits or permute bytes. The rest is that of "avx512".
 * Functions that serve both take a constant vbmi2, and call these only where it is 1. */
#define VBMI2 __attribute__((target("avx512vbmi,avx512vbmi2"))) static inline
static const uint8_t lanes8[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                   16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                   32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                   48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* One store of 32 places for most words: stores are what takes time here, not compressing. */
VBMI2 uint32_t places_vbmi2(uint64_t word, uint32_t base, uint16_t *at) {
    const uint32_t c = (uint32_t)__builtin_popcountll(word);
    const __m512i from = _mm512_set1_epi16((short)base);
    const __m512i left = _mm512_maskz_compress_epi8(word, _mm512_loadu_si512(lanes8));
    const __m256i half = _mm512_castsi512_si256(left);
    _mm512_storeu_si512(at, _mm512_add_epi16(from, _mm512_cvtepu8_epi16(half)));
    if (c > 32)
        _mm512_storeu_si512(at + 32, _mm512_add_epi16(from, _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(left, 1))));
    return c;
}
#endif

/* Appends base + the place of each one of a word; may write 16 more, places_vbmi2 64. */
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
        const unsigned m = word >> j & 0xff;
        _mm_storeu_si128((__m128i *)(void *)(at + c), _mm_add_epi16(_mm_cvtepu8_epi16(left_bytes(m)), here));
        here = _mm_add_epi16(here, _mm_set1_epi16(8));
        c += (uint32_t)__builtin_popcount(m);
    }
#elif defined(SID_HAS_NEON)
    /* byte j: how many ones there are in bytes 0 to j */
    const uint64_t ones = vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(word))), 0) * 0x0101010101010101u;
    uint16x8_t here = vdupq_n_u16((uint16_t)base);
    for (int j = 0; j < 64; j += 8) {
        vst1q_u16(at + c, vaddw_u8(here, vcreate_u8(left_of[word >> j & 0xff])));
        here = vaddq_u16(here, vdupq_n_u16(8));
        c = (uint32_t)(ones >> j & 0xff);
    }
#else
    for (; word; word &= word - 1) at[c++] = (uint16_t)(base + (uint32_t)__builtin_ctzll(word));
#endif
    return c;
}

INLINE uint32_t places_by(uint64_t word, uint32_t base, uint16_t *at, const int vbmi2) {
#ifdef SID_HAS_AVX512
    if (vbmi2) return places_vbmi2(word, base, at);
#else
    (void)vbmi2;
#endif
    return places_of(word, base, at);
}

/* n fields of b <= 12 bits from bit `offset` on, in 16 bits each, and up to 7 more. Loads up to 7 bytes past the last one. */
static void fields_of(const uint8_t *p, uint64_t offset, uint32_t b, uint32_t n, uint16_t *out) {
    const uint64_t mask = (1ull << b) - 1;
    const uint32_t off = (uint32_t)(offset % 8);
    uint32_t i = 0;
    p += offset / 8;
#ifdef SID_HAS_AVX2
    /* Eight fields are b bytes, so that in every round they lie alike in 8 bytes, each in two of them. */
    if (b && b < 8) {
        const __m128i count8 = _mm_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7);
        const __m128i at = _mm_add_epi16(_mm_set1_epi16((short)off), _mm_mullo_epi16(_mm_set1_epi16((short)b), count8));
        const __m128i byte = _mm_srli_epi16(at, 3), bit = _mm_and_si128(at, _mm_set1_epi16(7));
        const __m128i bytes = _mm_or_si128(byte, _mm_slli_epi16(_mm_add_epi16(byte, _mm_set1_epi16(1)), 8));
        /* what shifts a field to the top of its lane: 2^(16 - b - bit), from a table of 2^(7 - bit) */
        const __m128i powers = _mm_cvtsi64_si128(0x0102040810204080),
                      high = _mm_or_si128(_mm_slli_epi16(bit, 8), _mm_set1_epi16(0x80));
        const __m128i up = _mm_srl_epi16(_mm_shuffle_epi8(powers, high), _mm_cvtsi32_si128((int)b - 1)),
                      down = _mm_cvtsi32_si128(16 - (int)b);
        for (; i < n; i += 8, p += b) {
            const __m128i raw = _mm_loadl_epi64((const __m128i *)(const void *)p);
            const __m128i x = _mm_srl_epi16(_mm_mullo_epi16(_mm_shuffle_epi8(raw, bytes), up), down);
            _mm_storeu_si128((__m128i *)(void *)(out + i), x);
        }
    }
#endif
    for (; i < n; i += 4) {
        const uint64_t bit = off + (uint64_t)i * b;
        uint64_t x;
        memcpy(&x, p + bit / 8, 8);
        x >>= bit % 8;
        x = (x & mask) | (x >> b & mask) << 16 | (x >> 2 * b & mask) << 32 | (x >> 3 * b & mask) << 48;
        memcpy(out + i, &x, 8);
    }
}

#ifdef SID_HAS_AVX512
/* n fields of 1 <= b < 8 bits from bit `offset` on, in a byte each, and up to 63 more. Eight fields are b bytes, so that 64 lie
 * alike in every round: each eight in a lane of 64 bits, from which each takes its own. */
VBMI2 void bytes_vbmi2(const uint8_t *p, uint64_t offset, uint32_t b, uint32_t n, uint8_t *out) {
    const uint64_t ones = 0x0101010101010101, count8 = 0x0706050403020100;
    const uint32_t off = (uint32_t)(offset % 8);
    const vu lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    const __m512i bytes = (__m512i)(lanes * (b * ones) + count8),
                  at = _mm512_set1_epi64((long long)(count8 * b + off * ones));
    const __m512i mask = _mm512_set1_epi8((char)((1u << b) - 1));
    p += offset / 8;
    for (uint32_t i = 0; i < n; i += 64, p += 8 * b) {
        const uint32_t left = n - i, hold = (off + (left < 64 ? left : 64) * b + 7) / 8; /* bytes */
        const __m512i raw = _mm512_permutexvar_epi8(bytes, _mm512_maskz_loadu_epi8(~0ull >> (64 - hold), p));
        _mm512_storeu_si512(out + i, _mm512_and_si512(_mm512_multishift_epi64_epi8(at, raw), mask));
    }
}
#endif

typedef uint16_t vs __attribute__((vector_size(BYTES)));

/* Unpacks some words at a time: places, then low bits, then both together, so that no load waits for stores half as wide. */
INLINE uint32_t unpack_by(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx, const int vbmi2) {
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
            c += places_by(word, base + 64 * q, idx + i + c, vbmi2);
            there = 64 * (w + 1) - first - i - c >= runs;
        }
        if (c > most - i) c = most - i; /* before the low bits are read: there may be none of what is beyond */
        fields_of(from->low, (from->pos + i) * bits, bits, c, low);
        vs entry = lanes;
        for (uint32_t j = 0; j < c; j += SIDE) {
            vs x, y;
            memcpy(&x, idx + i + j, sizeof x);
            memcpy(&y, low + j, sizeof y);
            x = (x - entry) * (uint16_t)(1u << bits) | y;
            memcpy(idx + i + j, &x, sizeof x);
            entry += SIDE;
        }
        for (i += c; c && idx[i - 1] >= end; c--, i--) there = 1;
    }
    return i;
}
static uint32_t unpack(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx) {
    return unpack_by(from, most, end, idx, 0);
}

/* 1 if a bit of from .. stop is set. */
INLINE int any_bit(const uint64_t *high, uint64_t from, uint64_t stop) {
    for (; from < stop && from % 64; from++)
        if (high[from / 64] >> from % 64 & 1) return 1;
    for (; from + 64 <= stop; from += 64)
        if (high[from / 64]) return 1;
    for (; from < stop; from++)
        if (high[from / 64] >> from % 64 & 1) return 1;
    return 0;
}

INLINE int ascending_by(const sid_packed *from, uint32_t count, uint32_t size, const int vbmi2) {
    enum {
        AT_A_TIME = 1024
    };
    sid_packed tile = *from;
    uint16_t idx[1 + AT_A_TIME + SID_UNPACK_SLACK];
    int ascend = 1;
    if (any_bit(tile.high, tile.stop - 1, tile.stop)) return 0; /* so no entry lies past the last run */
    for (uint32_t done = 0; done < count;) {
        const uint32_t most = count - done < AT_A_TIME ? count - done : AT_A_TIME;
        if (unpack_by(&tile, most, size, idx + 1, vbmi2) < most) return 0;
        for (uint32_t i = 1; i < most; i++) ascend &= idx[i] < idx[i + 1];
        ascend &= !done || idx[0] < idx[1];
        done += most;
        tile.pos += most;
        idx[0] = idx[most];
        tile.from = tile.runs + ((uint32_t)idx[0] >> tile.bits) + tile.pos; /* past the last one's bit */
    }
    return ascend && !any_bit(tile.high, tile.from, tile.stop);
}
static int ascending(const sid_packed *tile, uint32_t count, uint32_t size) {
    return ascending_by(tile, count, size, 0);
}

#ifdef SID_HAS_AVX512
enum {
    SOME_WORDS = 16 /* of the high bits, between two buffers */
};
/* unpack_vbmi2 computes this once. */
typedef struct low_fields {
    __m256i bytes, at; /* as in bytes_vbmi2 */
    __m512i mask;
    const uint8_t *low, *whole; /* from here on 32 bytes may be more than there are */
    uint32_t bits;
} low_fields;
/* Fields of 32 entries from `bit` on, of which n exist, in 16 bits each, and above them bits of others. */
VBMI2 __m512i low_of(const low_fields *f, uint64_t bit, uint32_t n) {
    const uint8_t *const p = f->low + bit / 8;
    const uint32_t off = (uint32_t)(bit % 8);
    const __m256i at = _mm256_add_epi8(f->at, _mm256_set1_epi8((char)off));
    __m256i raw;
    if (p < f->whole)
        raw = _mm256_loadu_si256((const __m256i *)(const void *)p);
    else
        raw = _mm256_maskz_loadu_epi8(_bzhi_u32(~0u, (off + (n < 32 ? n : 32) * f->bits + 7) / 8), p);
    return _mm512_cvtepu8_epi16(_mm256_multishift_epi64_epi8(at, _mm256_permutexvar_epi8(f->bytes, raw)));
}

/* unpack, 1 <= bits < 8, a word of the high bits at a time: no load has to wait for stores. */
VBMI2 uint32_t unpack_vbmi2(const sid_packed *from, uint32_t most, uint32_t end, uint16_t *idx) {
    const uint32_t bits = from->bits;
    if (!bits || bits > 7) return unpack_by(from, most, end, idx, 1);
    const uint64_t ones8 = 0x0101010101010101, count8 = 0x0706050403020100;
    const vu octets = {0, 1, 2, 3, 4, 5, 6, 7};
    const __m512i lanes = _mm512_loadu_si512(lanes8);
    const low_fields f = {.bytes = _mm512_castsi512_si256((__m512i)(octets * (bits * ones8) + count8)),
                          .at = _mm256_set1_epi64x((long long)(count8 * bits)),
                          .mask = _mm512_set1_epi16((short)((1u << bits) - 1)),
                          .low = from->low,
                          .whole = (const uint8_t *)from->high - 32, /* which come after the low ones */
                          .bits = bits};
    const __m128i up = _mm_cvtsi32_si128((int)bits);
    const uint64_t *const high = from->high;
    const uint64_t runs = (end + (1ull << bits) - 1) >> bits, stop = from->stop; /* as in unpack_by */
    uint64_t w = from->from / 64, seen = ~0ull << from->from % 64, bit = from->pos * bits;
    uint64_t zeros = 64 * w - from->pos - from->runs; /* before this word */
    uint32_t i = 0;
    for (int there = from->from >= stop; !there && i < most && 64 * w < stop; w++) {
        uint64_t word = high[w] & seen;
        seen = ~0ull;
        if (64 * w + 63 >= stop) word &= (1ull << stop % 64) - 1;
        uint32_t ones = (uint32_t)__builtin_popcountll(word);
        there = zeros + 64 - ones >= runs;
        if (there) { /* what is before the last zero */
            word &= _pdep_u64(1ull << (runs - zeros - 1), ~word) - 1;
            ones = (uint32_t)__builtin_popcountll(word);
        }
        const __m512i run = _mm512_sub_epi8(_mm512_maskz_compress_epi8(word, lanes), lanes);
        const __m512i since = _mm512_set1_epi16((short)zeros);
        const __m512i first = _mm512_cvtepu8_epi16(_mm512_castsi512_si256(run));
        /* high | (low & mask) */
        _mm512_storeu_si512(idx + i, _mm512_ternarylogic_epi64(_mm512_sll_epi16(_mm512_add_epi16(since, first), up),
                                                               low_of(&f, bit, ones), f.mask, 0xf8));
        if (ones > 32) {
            const __m512i rest = _mm512_cvtepu8_epi16(_mm512_extracti64x4_epi64(run, 1));
            _mm512_storeu_si512(idx + i + 32,
                                _mm512_ternarylogic_epi64(_mm512_sll_epi16(_mm512_add_epi16(since, rest), up),
                                                          low_of(&f, bit + 32 * bits, ones - 32), f.mask, 0xf8));
        }
        bit += ones * bits;
        zeros += 64 - ones;
        i += ones;
    }
    if (i > most) i = most;
    for (; i && idx[i - 1] >= end; i--) continue;
    return i;
}

/* ascending, 1 <= bits < 8: where two ones are neighbours, the low bits of the second have to be more. */
VBMI2 int ascending_vbmi2(const sid_packed *tile, uint32_t count, uint32_t size) {
    const uint32_t bits = tile->bits;
    if (!bits || bits > 7) return ascending_by(tile, count, size, 1);
    uint64_t w = tile->from / 64, seen = ~0ull << tile->from % 64, last = 0, one = 0, wrong = 0;
    uint8_t buf[64 + 64 * SOME_WORDS + 64], *const low = buf + 64;
    low[-1] = 0;
    uint32_t i = 0;
    if (any_bit(tile->high, tile->stop - 1, tile->stop)) return 0; /* so no entry lies past the last run */
    while (64 * w < tile->stop) {
        uint64_t word[SOME_WORDS];
        uint32_t c = 0, words = 0;
        for (; words < SOME_WORDS && 64 * w < tile->stop; words++, w++) {
            uint64_t ones = tile->high[w] & seen;
            seen = ~0ull;
            if (w == tile->stop / 64) ones &= (1ull << tile->stop % 64) - 1;
            if (ones) last = 64 * w + 63 - (uint32_t)__builtin_clzll(ones);
            word[words] = ones;
            c += (uint32_t)__builtin_popcountll(ones);
        }
        if (c > count - i) return 0;
        bytes_vbmi2(tile->low, (tile->pos + i) * bits, bits, c, low);
        const uint8_t *l = low;
        for (uint32_t q = 0; q < words; q++) {
            const uint64_t more = _mm512_cmplt_epu8_mask(_mm512_loadu_si512(l - 1), _mm512_loadu_si512(l));
            wrong |= _pext_u64(word[q] & (word[q] << 1 | one), word[q]) & ~more;
            one = word[q] >> 63;
            l += __builtin_popcountll(word[q]);
        }
        if (c) low[-1] = l[-1];
        i += c;
    }
    if (wrong || i < count) return 0;
    return !i || (uint64_t)low[-1] + ((last - tile->pos - (i - 1) - tile->runs) << bits) < size;
}
#endif

/* The low bits of four entries, side by side: pairs, then both pairs. */
INLINE uint64_t four_low(const uint16_t *idx, uint32_t b) {
    const uint64_t one = ((1ull << b) - 1) * 0x0000000100000001ull, two = (1ull << 2 * b) - 1;
    uint64_t x;
    memcpy(&x, idx, 8);
    x = (x & one) | (x >> (16 - b) & one << b);
    return (x & two) | (x >> (32 - 2 * b) & two << 2 * b);
}

/* The low bits of entries, one after the other. Stores run over by up to 8 bytes. */
static uint8_t *pack_low(const uint16_t *idx, uint64_t n, uint32_t bits, uint8_t *out) {
    uint64_t held = 0, i = 0;
    uint32_t have = 0;
    for (; bits < 8 && i + 8 <= n; i += 8, out += bits) { /* whole bytes */
        const uint64_t eight = four_low(idx + i, bits) | four_low(idx + i + 4, bits) << 4 * bits;
        memcpy(out, &eight, 8);
    }
    for (; i < n; i += 4) {
        const uint32_t some = n - i < 4 ? (uint32_t)(n - i) : 4;
        uint16_t last[4] = {0};
        if (some < 4) memcpy(last, idx + i, 2 * some);
        held |= four_low(some < 4 ? last : idx + i, bits) << have; /* at most 7 + 4 * 12 bits */
        memcpy(out, &held, 8);
        have += some * bits;
        out += have / 8;
        held >>= have & ~7u;
        have &= 7;
    }
    return out + (have > 0);
}

#ifdef SID_HAS_AVX512
/* 16 entries, whose bits lie in two words: from `low` on, each in a lane of 64 bits, then all lanes together. */
INLINE void set_16(const uint16_t *idx, uint32_t bits, uint64_t low, uint64_t *first, uint64_t *second) {
    const __m256i count16 = _mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m256i run =
        _mm256_srl_epi16(_mm256_loadu_si256((const __m256i *)(const void *)idx), _mm_cvtsi32_si128((int)bits));
    const __m256i at = _mm256_add_epi16(_mm256_add_epi16(run, count16), _mm256_set1_epi16((short)low));
    const __m512i a = _mm512_cvtepu16_epi64(_mm256_castsi256_si128(at)),
                  b = _mm512_cvtepu16_epi64(_mm256_extracti128_si256(at, 1));
    const __m512i one = _mm512_set1_epi64(1), word = _mm512_set1_epi64(64); /* shifts from 64 on give 0 */
    const __m512i here = _mm512_or_si512(_mm512_sllv_epi64(one, a), _mm512_sllv_epi64(one, b));
    const __m512i next = _mm512_or_si512(_mm512_sllv_epi64(one, _mm512_sub_epi64(a, word)),
                                         _mm512_sllv_epi64(one, _mm512_sub_epi64(b, word)));
    const __m512i both = _mm512_or_si512(_mm512_unpacklo_epi64(here, next), _mm512_unpackhi_epi64(here, next));
    const __m256i half = _mm256_or_si256(_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1));
    const __m128i all = _mm_or_si128(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    *first |= (uint64_t)_mm_cvtsi128_si64(all);
    *second |= (uint64_t)_mm_extract_epi64(all, 1);
}
#endif

/* Sets bit at + (idx[i] >> bits) + i for each of n entries that ascend. */
static void pack_high(const uint16_t *idx, uint64_t n, uint32_t bits, uint64_t at, uint64_t *high) {
    uint64_t i = 0, word = at / 64, held = 0;
#ifdef SID_HAS_AVX512
    for (; i + 16 <= n; i += 16) {
        const uint64_t from = at + i, first = (from + (idx[i] >> bits)) / 64,
                       last = (from + 15 + (idx[i + 15] >> bits)) / 64;
        if (last - first < 2)
            set_16(idx + i, bits, from - 64 * first, high + first, high + last);
        else
            for (uint64_t j = i; j < i + 16; j++) {
                const uint64_t bit = at + (idx[j] >> bits) + j;
                high[bit / 64] |= 1ull << bit % 64;
            }
    }
#endif
    for (; i < n; i++) {
        const uint64_t bit = at + (idx[i] >> bits) + i;
        if (bit / 64 != word) {
            high[word] |= held;
            held = 0;
            word = bit / 64;
        }
        held |= 1ull << bit % 64;
    }
    if (held) high[word] |= held;
}
