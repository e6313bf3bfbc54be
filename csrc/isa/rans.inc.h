/* simd.c: range asymmetric numeral systems (rans.h): eight lanes in a register of 256 bits, and up to four streams at once, whose
 * steps do not wait for one another.
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
INLINE eight eight_bytes(const uint64_t *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)p));
}

/* A number of each symbol; many: more than 8 of them. */
typedef struct pairs {
    eight low, high;
} pairs;
INLINE pairs pairs_of(const uint32_t *x) { return (pairs){load_32(x), load_32(x + 8)}; }
INLINE eight look_up_8(const pairs *t, eight symbol, const int many) {
#ifdef SID_HAS_AVX512
    if (many) return _mm256_permutex2var_epi32(t->low, symbol, t->high);
#else
    if (many) {
        const __m256 low = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(t->low, symbol)),
                     high = _mm256_castsi256_ps(_mm256_permutevar8x32_epi32(t->high, symbol));
        return _mm256_castps_si256(_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(symbol, 28))));
    }
#endif
    return _mm256_permutevar8x32_epi32(t->low, symbol);
}

INLINE void encode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n, const int many) {
    uint32_t full[SID_RANS_SYMBOLS], rest[SID_RANS_SYMBOLS];
    eight x[4];
    uint16_t *words[4];
    for (uint32_t i = 0; i < SID_RANS_SYMBOLS; i++) {
        full[i] = m->freq[i] << 20;
        rest[i] = SID_RANS_TOTAL - m->freq[i];
    }
    const pairs fulls = pairs_of(full), rests = pairs_of(rest), starts = pairs_of(m->start),
                inverses = pairs_of(m->inverse), pluses = pairs_of(m->plus), shifts = pairs_of(m->shift);
    for (uint32_t k = 0; k < count; k++) {
        x[k] = load_32(s[k].state);
        words[k] = s[k].words;
    }
    for (uint32_t i = n; i > 0;) {
        i -= SID_RANS_LANES;
        for (uint32_t k = 0; k < count; k++) {
            const eight symbol =
                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(const void *)(s[k].symbol + i)));
            const eight most = look_up_8(&fulls, symbol, many);
#ifdef SID_HAS_AVX512
            const uint32_t over = number(_mm256_cmpge_epu32_mask(x[k], most));
            const eight moved = _mm256_permutevar8x32_epi32(x[k], eight_bytes(right_of + over));
            _mm_storeu_si128((__m128i *)(void *)(words[k] - 8), _mm256_cvtepi32_epi16(moved));
            eight v = _mm256_mask_srli_epi32(x[k], (__mmask8)over, x[k], 16);
#else
            const eight is_over = _mm256_cmpeq_epi32(_mm256_max_epu32(x[k], most), x[k]);
            const uint32_t over = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_over));
            const eight low = _mm256_and_si256(x[k], _mm256_set1_epi32(0xffff));
            const eight moved = _mm256_permutevar8x32_epi32(low, eight_bytes(right_of + over));
            const eight halves = _mm256_permute4x64_epi64(_mm256_packus_epi32(moved, moved), 0x08);
            _mm_storeu_si128((__m128i *)(void *)(words[k] - 8), _mm256_castsi256_si128(halves));
            eight v = _mm256_blendv_epi8(x[k], _mm256_srli_epi32(x[k], 16), is_over);
#endif
            words[k] -= __builtin_popcount(over);
            const eight plus = _mm256_add_epi32(v, look_up_8(&pluses, symbol, many)),
                        inverse = look_up_8(&inverses, symbol, many);
            const eight even = _mm256_srli_epi64(_mm256_mul_epu32(plus, inverse), 32);
            const eight odd = _mm256_mul_epu32(_mm256_srli_epi64(plus, 32), _mm256_srli_epi64(inverse, 32));
            const eight q = _mm256_srlv_epi32(_mm256_blend_epi32(even, odd, 0xaa), look_up_8(&shifts, symbol, many));
            v = _mm256_add_epi32(v, look_up_8(&starts, symbol, many));
            x[k] = _mm256_add_epi32(v, _mm256_mullo_epi32(q, look_up_8(&rests, symbol, many)));
        }
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, x[k]);
        s[k].words = words[k];
    }
}

/* edges: how many starts a slot is compared with. */
INLINE void decode_as(const sid_rans *m, sid_rans_stream *s, const uint32_t count, uint32_t n, const uint32_t edges) {
    const int many = edges > 7;
    const eight slots = _mm256_set1_epi32(SID_RANS_TOTAL - 1);
    /* the bytes of four turns, a lane's in a word, to those of one turn after the other */
    const eight turns = _mm256_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15, 0, 4, 8, 12, 1, 5, 9, 13,
                                         2, 6, 10, 14, 3, 7, 11, 15);
    const eight order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const pairs freqs = pairs_of(m->freq), starts = pairs_of(m->start);
    eight edge[SID_RANS_SYMBOLS], x[4], four[4];
    uint32_t at[4];
    for (uint32_t j = 0; j < edges; j++) edge[j] = _mm256_set1_epi32((int32_t)m->start[j + 1] - 1);
    for (uint32_t k = 0; k < count; k++) {
        x[k] = load_32(s[k].state);
        at[k] = s[k].at;
    }
    for (uint32_t i = 0; i < n; i += 4 * SID_RANS_LANES) {
        for (uint32_t k = 0; k < count; k++) four[k] = _mm256_setzero_si256();
        for (uint32_t turn = 0; turn < 4; turn++)
            for (uint32_t k = 0; k < count; k++) {
                const eight slot = _mm256_and_si256(x[k], slots);
                eight a = _mm256_setzero_si256(), b = a;
                for (uint32_t j = 0; j < edges; j += 2) a = _mm256_sub_epi32(a, _mm256_cmpgt_epi32(slot, edge[j]));
                for (uint32_t j = 1; j < edges; j += 2) b = _mm256_sub_epi32(b, _mm256_cmpgt_epi32(slot, edge[j]));
                const eight symbol = _mm256_add_epi32(a, b);
                const eight freq = look_up_8(&freqs, symbol, many), start = look_up_8(&starts, symbol, many);
                four[k] = _mm256_or_si256(_mm256_srli_epi32(four[k], 8), _mm256_slli_epi32(symbol, 24));
                const eight v = _mm256_add_epi32(_mm256_mullo_epi32(freq, _mm256_srli_epi32(x[k], SID_RANS_BITS)),
                                                 _mm256_sub_epi32(slot, start));
                const uint16_t *from = s[k].words + (at[k] < s[k].room ? at[k] : s[k].room);
                const eight words = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)from));
                const eight up = _mm256_slli_epi32(v, 16);
#ifdef SID_HAS_AVX512
                const __mmask8 low = _mm256_cmplt_epu32_mask(v, _mm256_set1_epi32(SID_RANS_LEAST));
                x[k] = _mm256_mask_or_epi32(v, low, up, _mm256_maskz_expand_epi32(low, words));
                at[k] += (uint32_t)__builtin_popcount(number(low));
#else
                const eight is_low = _mm256_cmpeq_epi32(_mm256_srli_epi32(v, 16), _mm256_setzero_si256());
                const uint32_t low = (uint32_t)_mm256_movemask_ps(_mm256_castsi256_ps(is_low));
                const eight own = _mm256_permutevar8x32_epi32(words, eight_bytes(rank_of + low));
                x[k] = _mm256_blendv_epi8(v, _mm256_or_si256(up, own), is_low);
                at[k] += (uint32_t)__builtin_popcount(low);
#endif
            }
        for (uint32_t k = 0; k < count; k++)
            store_32(s[k].symbol + i, _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(four[k], turns), order));
    }
    for (uint32_t k = 0; k < count; k++) {
        store_32(s[k].state, x[k]);
        s[k].at = at[k];
    }
}

INLINE void encode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n, const int many) {
    if (count == 4) encode_as(m, s, 4, n, many);
    if (count == 3) encode_as(m, s, 3, n, many);
    if (count == 2) encode_as(m, s, 2, n, many);
    if (count == 1) encode_as(m, s, 1, n, many);
}
INLINE void decode_some(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n, const uint32_t edges) {
    if (count == 4) decode_as(m, s, 4, n, edges);
    if (count == 3) decode_as(m, s, 3, n, edges);
    if (count == 2) decode_as(m, s, 2, n, edges);
    if (count == 1) decode_as(m, s, 1, n, edges);
}
#endif

static void rans_encode(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    const uint32_t whole = n / SID_RANS_LANES * SID_RANS_LANES;
    for (uint32_t k = 0; k < count; k++)
        if (whole < n) encode_turn(m, s + k, whole, n);
#if BYTES >= 32
    if (m->symbols > 8)
        encode_some(m, s, count, whole, 1);
    else
        encode_some(m, s, count, whole, 0);
#else
    for (uint32_t i = whole; i > 0; i -= SID_RANS_LANES)
        for (uint32_t k = 0; k < count; k++) encode_turn(m, s + k, i - SID_RANS_LANES, i);
#endif
}

static void rans_decode(const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t n) {
    uint32_t i = 0;
#if BYTES >= 32
    i = n / (4 * SID_RANS_LANES) * (4 * SID_RANS_LANES);
    if (m->symbols > 11)
        decode_some(m, s, count, i, 15);
    else if (m->symbols > 9)
        decode_some(m, s, count, i, 10);
    else if (m->symbols > 7)
        decode_some(m, s, count, i, 8);
    else
        decode_some(m, s, count, i, 6);
#endif
    for (; i < n; i += SID_RANS_LANES)
        for (uint32_t k = 0; k < count; k++) decode_turn(m, s + k, i, n - i < SID_RANS_LANES ? n : i + SID_RANS_LANES);
}
