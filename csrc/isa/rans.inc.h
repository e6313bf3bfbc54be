/* simd.c: range asymmetric numeral systems (rans.h): the eight lanes of a stream in 256 bits, and several streams at once, whose
 * steps do not wait for one another: four in registers of 256 bits, eight in registers of 512.
 *
 * Integers only. A symbol is found by comparing its slot with where symbols start, and its numbers are looked up in registers:
 * a gather from a table of slots costs more. */

/* Element `first` and those after it, to before `n`, all of one turn. */
INLINE void encode_turn(const sid_rans *m, sid_rans_stream *s, uint32_t first, uint32_t n) {
    for (uint32_t j = n - first; j-- > 0;) {
        const uint32_t symbol = s->symbol[first + j];
        uint32_t x = s->state[j];
        if (sid_rans_full(m, symbol, x)) {
            *--s->words = (uint16_t)x;
            x >>= 16;
        }
        s->state[j] = sid_rans_put(m, symbol, x);
    }
}
INLINE void decode_turn(const sid_rans *m, sid_rans_stream *s, uint32_t first, uint32_t n) {
    for (uint32_t j = 0; j < n - first; j++) {
        const uint32_t symbol = sid_rans_symbol(m, s->state[j]);
        uint32_t x = sid_rans_without(m, symbol, s->state[j]);
        if (x < SID_RANS_LEAST) {
            x = x << 16 | s->words[s->at < s->room ? s->at : s->room];
            s->at++;
        }
        s->symbol[first + j] = (uint8_t)symbol;
        s->state[j] = x;
    }
}

#if BYTES >= 32
typedef __m256i eight;

/* Which of 8 lanes are set, in a byte each: the places of set bits, moved to the right; and for every lane, how many set bits
 * there are before it. */
#define BEFORE(m, j) ((uint64_t)__builtin_popcount((m) & ((1u << (j)) - 1u)))
#define RIGHT_LANE(m, j) /* & 63: of a lane that is not set, which a compiler would warn of */                         \
    ((m) >> (j) & 1u ? (uint64_t)(j) << (8 * (8 - __builtin_popcount((m) & 255u) + (int)BEFORE(m, j)) & 63) : 0)
#define RIGHT(m)                                                                                                       \
    (RIGHT_LANE(m, 0) | RIGHT_LANE(m, 1) | RIGHT_LANE(m, 2) | RIGHT_LANE(m, 3) | RIGHT_LANE(m, 4) | RIGHT_LANE(m, 5) | \
     RIGHT_LANE(m, 6) | RIGHT_LANE(m, 7))
#define RIGHT4(m) RIGHT(m), RIGHT((m) + 1u), RIGHT((m) + 2u), RIGHT((m) + 3u)
#define RIGHT16(m) RIGHT4(m), RIGHT4((m) + 4u), RIGHT4((m) + 8u), RIGHT4((m) + 12u)
#define RIGHT_64(m) RIGHT16(m), RIGHT16((m) + 16u), RIGHT16((m) + 32u), RIGHT16((m) + 48u)
static const uint64_t right_of[256] = {RIGHT_64(0u), RIGHT_64(64u), RIGHT_64(128u), RIGHT_64(192u)};
#define RANK(m)                                                                                                        \
    (BEFORE(m, 1) << 8 | BEFORE(m, 2) << 16 | BEFORE(m, 3) << 24 | BEFORE(m, 4) << 32 | BEFORE(m, 5) << 40 |           \
     BEFORE(m, 6) << 48 | BEFORE(m, 7) << 56)
#define RANK4(m) RANK(m), RANK((m) + 1u), RANK((m) + 2u), RANK((m) + 3u)
#define RANK16(m) RANK4(m), RANK4((m) + 4u), RANK4((m) + 8u), RANK4((m) + 12u)
#define RANK64(m) RANK16(m), RANK16((m) + 16u), RANK16((m) + 32u), RANK16((m) + 48u)
static const uint64_t rank_of[256] = {RANK64(0u), RANK64(64u), RANK64(128u), RANK64(192u)};

/* The second of two streams, or the first one again where there is but one. */
INLINE uint32_t in_half(uint32_t k, uint32_t count) { return k < count ? k : k - 1; }

#ifdef SID_HAS_AVX512
/* Two streams share a register of 512 bits, and four such registers take turns. If there is an odd number of streams, the last one
 * stands in both halves of its register. */
typedef __m512i sixteen;
enum {
    PAIRS = SID_RANS_TOGETHER / 2
};
/* Bytes of two streams, 8 of each. */
INLINE sixteen two_eights(uint64_t a, uint64_t b) {
    return _mm512_cvtepu8_epi32(_mm_set_epi64x((long long)b, (long long)a));
}
/* The places of the second one lie in the upper half. */
INLINE sixteen two_places(uint64_t a, uint64_t b) {
    return _mm512_add_epi32(two_eights(a, b), _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(8), 1));
}
INLINE sixteen two_states(const sid_rans_stream *s, uint32_t r, uint32_t count) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(load_32(s[2 * r].state)),
                              load_32(s[in_half(2 * r + 1, count)].state), 1);
}
INLINE eight half_of(sixteen x, uint32_t half) {
    return half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x);
}

INLINE void encode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n) {
    uint32_t full[SID_RANS_SYMBOLS], rest[SID_RANS_SYMBOLS];
    const uint32_t regs = (count + 1) / 2;
    sixteen x[PAIRS];
    uint16_t *words[2 * PAIRS];
    for (uint32_t i = 0; i < SID_RANS_SYMBOLS; i++) {
        full[i] = m->freq[i] << 20;
        rest[i] = SID_RANS_TOTAL - m->freq[i];
    }
    const sixteen fulls = _mm512_loadu_si512(full), rests = _mm512_loadu_si512(rest),
                  starts = _mm512_loadu_si512(m->start), inverses = _mm512_loadu_si512(m->inverse),
                  pluses = _mm512_loadu_si512(m->plus), shifts = _mm512_loadu_si512(m->shift);
    for (uint32_t k = 0; k < count; k++) words[k] = s[k].words;
    for (uint32_t r = 0; r < regs; r++) x[r] = two_states(s, r, count);
    for (uint32_t i = n; i > 0;) {
        i -= SID_RANS_LANES;
        for (uint32_t r = 0; r < regs; r++) {
            const uint32_t a = 2 * r, b = in_half(a + 1, count);
            uint64_t of_a, of_b;
            memcpy(&of_a, s[a].symbol + i, 8);
            memcpy(&of_b, s[b].symbol + i, 8);
            const sixteen symbol = two_eights(of_a, of_b);
            const uint32_t over = number(_mm512_cmpge_epu32_mask(x[r], _mm512_permutexvar_epi32(symbol, fulls)));
            const __m256i moved = _mm512_cvtepi32_epi16(
                _mm512_permutexvar_epi32(two_places(right_of[over & 255], right_of[over >> 8]), x[r]));
            _mm_storeu_si128((__m128i *)(void *)(words[a] - 8), _mm256_castsi256_si128(moved));
            words[a] -= __builtin_popcount(over & 255);
            if (b != a) {
                _mm_storeu_si128((__m128i *)(void *)(words[b] - 8), _mm256_extracti128_si256(moved, 1));
                words[b] -= __builtin_popcount(over >> 8);
            }
            sixteen v = _mm512_mask_srli_epi32(x[r], (__mmask16)over, x[r], 16);
            const sixteen plus = _mm512_add_epi32(v, _mm512_permutexvar_epi32(symbol, pluses)),
                          inverse = _mm512_permutexvar_epi32(symbol, inverses);
            const sixteen even = _mm512_srli_epi64(_mm512_mul_epu32(plus, inverse), 32);
            const sixteen odd = _mm512_mul_epu32(_mm512_srli_epi64(plus, 32), _mm512_srli_epi64(inverse, 32));
            const sixteen q =
                _mm512_srlv_epi32(_mm512_mask_blend_epi32(0xaaaa, even, odd), _mm512_permutexvar_epi32(symbol, shifts));
            v = _mm512_add_epi32(v, _mm512_permutexvar_epi32(symbol, starts));
            x[r] = _mm512_add_epi32(v, _mm512_mullo_epi32(q, _mm512_permutexvar_epi32(symbol, rests)));
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, half_of(x[k / 2], k % 2));
        s[k].words = words[k];
    }
}
static void encode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    if (count == 8) encode_as(m, s, 8, n);
    if (count == 7) encode_as(m, s, 7, n);
    if (count == 6) encode_as(m, s, 6, n);
    if (count == 5) encode_as(m, s, 5, n);
    if (count == 4) encode_as(m, s, 4, n);
    if (count == 3) encode_as(m, s, 3, n);
    if (count == 2) encode_as(m, s, 2, n);
    if (count == 1) encode_as(m, s, 1, n);
}

/* A slot's symbol, by a table of 32: y is how far a slot is from the end, SID_RANS_TOTAL - slot, and its place in the table is the
 * exponent and the first bit of the mantissa of y as a float. If symbols become rarer from the first to the last, no place
 * has more than two of them; by_place says whether that is so. An entry is such that the sum of it and -y is the symbol, times
 * SID_RANS_TOTAL, and less than that. */
INLINE int by_place(const sid_rans *m, uint32_t *entry) {
    memset(entry, 0, 32 * sizeof *entry);
    for (uint32_t e = 0, s = m->symbols - 1; e <= SID_RANS_BITS; e++)
        for (uint32_t half = 0; half < 2; half++) {
            const uint32_t unit = e ? 1u << (e - 1) : 0, least = e ? (2 + half) * unit : 1,
                           most = e ? least + unit - 1 : 1;
            if (half && (!e || e == SID_RANS_BITS)) continue;
            const uint32_t last = SID_RANS_TOTAL - least, first = most < SID_RANS_TOTAL ? SID_RANS_TOTAL - most : 0;
            while (m->start[s] > last) s--;
            const uint32_t high = s;
            while (m->start[s] > first) s--;
            if (s + 1 < high) return 0;
            const uint32_t edge = s < high ? m->start[high] : SID_RANS_TOTAL;
            entry[(2 * (127 + e) + half) % 32] = s * SID_RANS_TOTAL + 2 * SID_RANS_TOTAL - edge;
        }
    return 1;
}
/* Words of two streams, 8 of each. */
INLINE sixteen two_words(const uint16_t *a, const uint16_t *b) {
    const __m128i low = _mm_loadu_si128((const __m128i *)(const void *)a),
                  high = _mm_loadu_si128((const __m128i *)(const void *)b);
    return _mm512_cvtepu16_epi32(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1));
}

INLINE void decode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n, const uint32_t *entry,
                      const int placed) {
    const uint32_t regs = (count + 1) / 2;
    const sixteen above = _mm512_set1_epi32(-SID_RANS_TOTAL), least = _mm512_set1_epi32(SID_RANS_LEAST);
    const sixteen freqs = _mm512_loadu_si512(m->freq);
    const sixteen starts = _mm512_add_epi32(_mm512_loadu_si512(m->start), above); /* as -y is of a slot */
    const sixteen low_places = _mm512_loadu_si512(entry), high_places = _mm512_loadu_si512(entry + 16);
    /* packed, each 4 lanes have the bytes of four turns in turn: to those of one turn after the other */
    const sixteen order = _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
    sixteen x[PAIRS], four[4][PAIRS];
    const uint16_t *words[2 * PAIRS];
    uint32_t at[2 * PAIRS], room[2 * PAIRS];
    for (uint32_t k = 0; k < 2 * regs; k++) {
        const sid_rans_stream *from = s + in_half(k, count);
        words[k] = from->words;
        room[k] = from->room;
        at[k] = from->at;
    }
    for (uint32_t r = 0; r < regs; r++) x[r] = two_states(s, r, count);
    for (uint32_t i = 0; i < n; i += 4 * SID_RANS_LANES) {
        for (uint32_t turn = 0; turn < 4; turn++)
            for (uint32_t r = 0; r < regs; r++) {
                const uint32_t a = 2 * r, b = a + 1;
                const sixteen y = _mm512_or_si512(x[r], above);
                sixteen symbol;
                if (placed) {
                    const sixteen place = _mm512_srli_epi32(_mm512_castps_si512(_mm512_cvtepi32_ps(y)), 22);
                    symbol = _mm512_srli_epi32(
                        _mm512_add_epi32(_mm512_permutex2var_epi32(low_places, place, high_places), y), SID_RANS_BITS);
                } else {
                    symbol = _mm512_setzero_si512();
                    for (uint32_t j = 1; j < m->symbols; j++) {
                        const sixteen start = _mm512_set1_epi32((int32_t)m->start[j] - SID_RANS_TOTAL);
                        symbol = _mm512_mask_add_epi32(symbol, _mm512_cmpge_epi32_mask(y, start), symbol,
                                                       _mm512_set1_epi32(1));
                    }
                }
                const sixteen freq = _mm512_permutexvar_epi32(symbol, freqs),
                              start = _mm512_permutexvar_epi32(symbol, starts);
                four[turn][r] = symbol;
                const sixteen v = _mm512_add_epi32(_mm512_mullo_epi32(freq, _mm512_srli_epi32(x[r], SID_RANS_BITS)),
                                                   _mm512_sub_epi32(y, start));
                const sixteen next = two_words(words[a] + (at[a] < room[a] ? at[a] : room[a]),
                                               words[b] + (at[b] < room[b] ? at[b] : room[b]));
                const __mmask16 low = _mm512_cmplt_epu32_mask(v, least);
                const uint32_t of_a = number(low) & 255, of_b = number(low) >> 8;
                const sixteen own = _mm512_permutexvar_epi32(two_places(rank_of[of_a], rank_of[of_b]), next);
                x[r] = _mm512_mask_or_epi32(v, low, _mm512_slli_epi32(v, 16), own);
                at[a] += (uint32_t)__builtin_popcount(of_a);
                at[b] += (uint32_t)__builtin_popcount(of_b);
            }
        for (uint32_t r = 0; r < regs; r++) {
            const sixteen bytes = _mm512_packus_epi16(_mm512_packus_epi32(four[0][r], four[1][r]),
                                                      _mm512_packus_epi32(four[2][r], four[3][r]));
            const sixteen out = _mm512_permutexvar_epi32(order, bytes);
            store_32(s[2 * r].symbol + i, half_of(out, 0));
            if (2 * r + 1 < count) store_32(s[2 * r + 1].symbol + i, half_of(out, 1));
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, half_of(x[k / 2], k % 2));
        s[k].at = at[k];
    }
}
INLINE void decode_up_to(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n, const uint32_t *entry,
                         const int placed) {
    if (count == 8) decode_as(m, s, 8, n, entry, placed);
    if (count == 7) decode_as(m, s, 7, n, entry, placed);
    if (count == 6) decode_as(m, s, 6, n, entry, placed);
    if (count == 5) decode_as(m, s, 5, n, entry, placed);
    if (count == 4) decode_as(m, s, 4, n, entry, placed);
    if (count == 3) decode_as(m, s, 3, n, entry, placed);
    if (count == 2) decode_as(m, s, 2, n, entry, placed);
    if (count == 1) decode_as(m, s, 1, n, entry, placed);
}
static void decode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    uint32_t entry[32];
    if (by_place(m, entry))
        decode_up_to(m, s, count, n, entry, 1);
    else
        decode_up_to(m, s, count, n, entry, 0);
}
#else
INLINE eight eight_bytes(const uint64_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

/* A number of each symbol; many: more than 8 of them. */
typedef struct pairs {
    eight low, high;
} pairs;
INLINE pairs pairs_of(const uint32_t *x) { return (pairs){load_32(x), load_32(x + 8)}; }
INLINE eight look_up_8(const pairs *t, eight symbol, const int many) {
    const eight low = _mm256_permutevar8x32_epi32(t->low, symbol);
    if (!many) return low;
    const __m256 high = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(t->high, symbol));
    const __m256 is_high = _mm256_castsi256_ps(_mm256_slli_epi32(symbol, 28));
    return _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(low), high, is_high));
}

/* A symbol's numbers in two words: the inverse, and start, frequency, plus and shift from the lowest bit on. */
INLINE void encode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n) {
    enum {
        FREQ_AT = SID_RANS_BITS + 1, /* a start may be SID_RANS_TOTAL */
        PLUS_AT = FREQ_AT + SID_RANS_BITS,
        SHIFT_AT = 28
    };
    _Static_assert(PLUS_AT < SHIFT_AT && SID_RANS_BITS <= 16, "the numbers of a symbol do not fit");
    const eight total = _mm256_set1_epi32(SID_RANS_TOTAL), one = _mm256_set1_epi32(1);
    const eight below = _mm256_set1_epi32(SID_RANS_TOTAL - 1), of_start = _mm256_set1_epi32((1 << FREQ_AT) - 1);
    uint32_t number_of[SID_RANS_SYMBOLS];
    eight x[4];
    uint16_t *words[4];
    for (uint32_t i = 0; i < SID_RANS_SYMBOLS; i++)
        number_of[i] = m->start[i] | m->freq[i] << FREQ_AT | m->plus[i] << PLUS_AT | m->shift[i] << SHIFT_AT;
    const pairs numbers = pairs_of(number_of), inverses = pairs_of(m->inverse);
    for (uint32_t k = 0; k < count; k++) {
        x[k] = load_32(s[k].state);
        words[k] = s[k].words;
    }
    for (uint32_t i = n; i > 0;) {
        i -= SID_RANS_LANES;
        for (uint32_t k = 0; k < count; k++) {
            const eight symbol =
                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(s[k].symbol + i)));
            const eight own = look_up_8(&numbers, symbol, 1), inverse = look_up_8(&inverses, symbol, 1);
            const eight freq = _mm256_and_si256(_mm256_srli_epi32(own, FREQ_AT), below);
            const eight fits = _mm256_cmpgt_epi32(freq, _mm256_srli_epi32(x[k], 20));
            const uint32_t over = 255u & ~(uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(fits));
            const eight low = _mm256_and_si256(x[k], _mm256_set1_epi32(0xffff));
            const eight moved = _mm256_permutevar8x32_epi32(low, eight_bytes(right_of + over));
            const eight halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(moved, moved), 0x08);
            _mm_storeu_si128((__m128i *)(void *)(words[k] - 8), _mm256_castsi256_si128(halves));
            words[k] -= __builtin_popcount(over);
            eight v = _mm256_blendv_epi8(_mm256_srli_epi32(x[k], 16), x[k], fits);
            const eight plus = _mm256_add_epi32(v, _mm256_and_si256(_mm256_srli_epi32(own, PLUS_AT), one));
            const eight even = _mm256_srli_epi64(_mm256_mul_epu32(plus, inverse), 32);
            const eight odd = _mm256_mul_epu32(_mm256_srli_epi64(plus, 32), _mm256_srli_epi64(inverse, 32));
            const eight q = _mm256_srlv_epi32(_mm256_blend_epi32(even, odd, 0xaa), _mm256_srli_epi32(own, SHIFT_AT));
            v = _mm256_add_epi32(v, _mm256_and_si256(own, of_start));
            x[k] = _mm256_add_epi32(v, _mm256_mullo_epi32(q, _mm256_sub_epi32(total, freq)));
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, x[k]);
        s[k].words = words[k];
    }
}

INLINE void encode_up_to(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    if (count == 4) encode_as(m, s, 4, n);
    if (count == 3) encode_as(m, s, 3, n);
    if (count == 2) encode_as(m, s, 2, n);
    if (count == 1) encode_as(m, s, 1, n);
}
static void encode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    for (uint32_t k = 0; k < count; k += 4) encode_up_to(m, s + k, count - k < 4 ? count - k : 4, n);
}

/* edges: how many starts a slot is compared with. The slots of two streams are compared at once, in halves of words. */
INLINE void decode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n, const uint32_t edges) {
    const int many = edges > 7;
    const eight slots = _mm256_set1_epi32(SID_RANS_TOTAL - 1), half = _mm256_set1_epi32(0xffff);
    /* the bytes of four turns, a lane's in a word, to those of one turn after the other */
    const eight turns = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13,
                                         2, 6, 10, 14, 3, 7, 11, 15);
    const eight order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    uint32_t number_of[SID_RANS_SYMBOLS], at[4];
    eight edge[SID_RANS_SYMBOLS], x[4], four[4];
    for (uint32_t j = 0; j < SID_RANS_SYMBOLS; j++) number_of[j] = m->start[j] << 16 | m->freq[j];
    const pairs numbers = pairs_of(number_of);
    for (uint32_t j = 0; j < edges; j++) edge[j] = _mm256_set1_epi16((int16_t)(m->start[j + 1] - 1));
    for (uint32_t k = 0; k < count; k++) {
        x[k] = load_32(s[k].state);
        at[k] = s[k].at;
    }
    for (uint32_t i = 0; i < n; i += 4 * SID_RANS_LANES) {
        for (uint32_t k = 0; k < count; k++) four[k] = _mm256_setzero_si256();
        for (uint32_t turn = 0; turn < 4; turn++)
            for (uint32_t first = 0; first < count; first += 2) {
                const eight second = _mm256_and_si256(x[in_half(first + 1, count)], slots);
                const eight two = _mm256_or_si256(_mm256_and_si256(x[first], slots), _mm256_slli_epi32(second, 16));
                eight a = _mm256_setzero_si256(), b = a;
                for (uint32_t j = 0; j < edges; j += 2) a = _mm256_sub_epi16(a, _mm256_cmpgt_epi16(two, edge[j]));
                for (uint32_t j = 1; j < edges; j += 2) b = _mm256_sub_epi16(b, _mm256_cmpgt_epi16(two, edge[j]));
                const eight symbols = _mm256_add_epi16(a, b);
                for (uint32_t k = first; k < count && k < first + 2; k++) {
                    const eight slot = _mm256_and_si256(x[k], slots);
                    const eight symbol = k == first ? _mm256_and_si256(symbols, half) : _mm256_srli_epi32(symbols, 16);
                    const eight own = look_up_8(&numbers, symbol, many);
                    const eight freq = _mm256_and_si256(own, half), start = _mm256_srli_epi32(own, 16);
                    four[k] = _mm256_or_si256(_mm256_srli_epi32(four[k], 8), _mm256_slli_epi32(symbol, 24));
                    const eight v = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(x[k], SID_RANS_BITS)),
                                                     _mm256_sub_epi32(slot, start));
                    const uint16_t *from = s[k].words + (at[k] < s[k].room ? at[k] : s[k].room);
                    const eight words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
                    const eight is_low = _mm256_cmpeq_epi32(_mm256_srli_epi32(v, 16), _mm256_setzero_si256());
                    const uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_low));
                    const eight next = _mm256_permutevar8x32_epi32(words, eight_bytes(rank_of + low));
                    x[k] = _mm256_blendv_epi8(v, _mm256_or_si256(_mm256_slli_epi32(v, 16), next), is_low);
                    at[k] += (uint32_t)__builtin_popcount(low);
                }
            }
        for (uint32_t k = 0; k < count; k++)
            store_32(s[k].symbol + i, _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(four[k], turns), order));
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, x[k]);
        s[k].at = at[k];
    }
}
INLINE void decode_up_to(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n, const uint32_t edges) {
    if (count == 4) decode_as(m, s, 4, n, edges);
    if (count == 3) decode_as(m, s, 3, n, edges);
    if (count == 2) decode_as(m, s, 2, n, edges);
    if (count == 1) decode_as(m, s, 1, n, edges);
}
static void decode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    for (uint32_t k = 0; k < count; k += 4) {
        const uint32_t some = count - k < 4 ? count - k : 4;
        if (m->symbols > 11)
            decode_up_to(m, s + k, some, n, 15);
        else if (m->symbols > 9)
            decode_up_to(m, s + k, some, n, 10);
        else if (m->symbols > 7)
            decode_up_to(m, s + k, some, n, 8);
        else
            decode_up_to(m, s + k, some, n, 6);
    }
}
#endif
#endif

static void rans_encode(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    const uint32_t whole = n / SID_RANS_LANES * SID_RANS_LANES;
    for (uint32_t k = 0; k < count; k++)
        if (whole < n) encode_turn(m, s + k, whole, n);
#if BYTES >= 32
    encode_some(m, s, count, whole);
#else
    for (uint32_t i = whole; i > 0; i -= SID_RANS_LANES)
        for (uint32_t k = 0; k < count; k++) encode_turn(m, s + k, i - SID_RANS_LANES, i);
#endif
}

static void rans_decode(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    uint32_t i = 0;
#if BYTES >= 32
    i = n / (4 * SID_RANS_LANES) * (4 * SID_RANS_LANES);
    decode_some(m, s, count, i);
#endif
    for (; i < n; i += SID_RANS_LANES)
        for (uint32_t k = 0; k < count; k++) decode_turn(m, s + k, i, n - i < SID_RANS_LANES ? n : i + SID_RANS_LANES);
}
