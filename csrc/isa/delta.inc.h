/* simd.c: which elements of two vectors differ, and the positions and steps of changes (csrc/delta). Integers only. */

/* 64 elements, a bit each. */
INLINE uint64_t differ(const uint8_t *a, const uint8_t *b, const uint32_t width) {
    uint64_t bits = 0;
#if BYTES == 64
    for (uint32_t i = 0; i < width; i++) {
        const __m512i x = _mm512_loadu_si512(a + 64 * i), y = _mm512_loadu_si512(b + 64 * i);
        if (width == 1) bits = _mm512_cmpneq_epi8_mask(x, y);
        if (width == 2) bits |= (uint64_t)_mm512_cmpneq_epi16_mask(x, y) << 32 * i;
        if (width == 4) bits |= (uint64_t)number(_mm512_cmpneq_epi32_mask(x, y)) << 16 * i;
    }
#elif BYTES == 32
    for (uint32_t i = 0; i < 2; i++) { /* 32 elements */
        __m256i same[4];
        for (uint32_t j = 0; j < width; j++) {
            const __m256i x = _mm256_loadu_si256((const __m256i *)(const void *)(a + 32 * (width * i + j))),
                          y = _mm256_loadu_si256((const __m256i *)(const void *)(b + 32 * (width * i + j)));
            same[j] = width == 1   ? _mm256_cmpeq_epi8(x, y)
                      : width == 2 ? _mm256_cmpeq_epi16(x, y)
                                   : _mm256_cmpeq_epi32(x, y);
        }
        if (width == 2) same[0] = _mm256_permute4x64_epi64(_mm256_packs_epi16(same[0], same[1]), 0xd8);
        if (width == 4) {
            const __m256i low = _mm256_packs_epi32(same[0], same[1]), high = _mm256_packs_epi32(same[2], same[3]);
            same[0] =
                _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        }
        bits |= (uint64_t)~(uint32_t)_mm256_movemask_epi8(same[0]) << 32 * i;
    }
#else
    const uint32_t each = 8 / width; /* elements of a long */
    const uint64_t element = ~0ull >> (64 - 8 * width);
    for (uint32_t i = 0; i < 8 * width; i++) {
        uint64_t x, y;
        memcpy(&x, a + 8 * i, 8);
        memcpy(&y, b + 8 * i, 8);
        x ^= y;
        if (!x) continue;
        for (uint32_t j = 0; j < each; j++) bits |= (uint64_t)((x >> 8 * width * j & element) != 0) << (each * i + j);
    }
#endif
    return bits;
}

INLINE uint32_t changes_of(const uint8_t *a, const uint8_t *b, uint32_t n, const uint32_t width, uint16_t *place,
                           const int vbmi2) {
    const uint32_t left = n % 64;
    uint32_t count = 0, i = 0;
    for (; i + 64 <= n; i += 64) {
        const uint64_t bits = differ(a + (size_t)i * width, b + (size_t)i * width, width);
        if (vbmi2 || bits) count += places_by(bits, i, place + count, vbmi2);
    }
    if (left) {
        uint8_t end[2][64 * 4] = {{0}};
        memcpy(end[0], a + (size_t)i * width, left * width);
        memcpy(end[1], b + (size_t)i * width, left * width);
        count += places_by(differ(end[0], end[1], width), i, place + count, vbmi2);
    }
    return count;
}
INLINE uint32_t changes_by(const void *a, const void *b, uint32_t n, uint32_t width, uint16_t *place, const int vbmi2) {
    if (width == 1) return changes_of(a, b, n, 1, place, vbmi2);
    if (width == 2) return changes_of(a, b, n, 2, place, vbmi2);
    return changes_of(a, b, n, 4, place, vbmi2);
}
static uint32_t changes(const void *a, const void *b, uint32_t n, uint32_t width, uint16_t *place) {
    return changes_by(a, b, n, width, place, 0);
}
#ifdef SID_HAS_AVX512
VBMI2 uint32_t changes_vbmi2(const void *a, const void *b, uint32_t n, uint32_t width, uint16_t *place) {
    return changes_by(a, b, n, width, place, 1);
}

/* Lane i: the sum of lanes 0 to i. */
INLINE __m512i sums_up(__m512i x) {
    const __m512i zero = _mm512_setzero_si512();
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 15));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 14));
    x = _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 12));
    return _mm512_add_epi32(x, _mm512_alignr_epi32(x, zero, 8));
}
/* 16 fields of up to 32 bits, from these bits after p on. */
INLINE __m512i fields_at(const uint8_t *p, __m512i at, __m512i bits) {
    const __m512i byte = _mm512_srli_epi32(at, 3), seven = _mm512_set1_epi32(7), ones = _mm512_set1_epi64(-1);
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
        const __m256i from = i ? _mm512_extracti64x4_epi64(byte, 1) : _mm512_castsi512_si256(byte);
        const __m512i in = _mm512_and_si512(at, seven);
        const __m256i down = i ? _mm512_extracti64x4_epi64(in, 1) : _mm512_castsi512_si256(in);
        const __m256i many = i ? _mm512_extracti64x4_epi64(bits, 1) : _mm512_castsi512_si256(bits);
        const __m512i word = _mm512_i32gather_epi64(from, p, 1);
        const __m512i field = _mm512_srlv_epi64(word, _mm512_cvtepu32_epi64(down));
        half[i] =
            _mm512_cvtepi64_epi32(_mm512_andnot_si512(_mm512_sllv_epi64(ones, _mm512_cvtepu32_epi64(many)), field));
    }
    return _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
}
#endif

static int gaps(sid_gaps *g, uint32_t count, uint32_t n, uint32_t *at) {
    const uint32_t low = g->low;
    const uint64_t begin = 64 * g->word_at - (g->word ? 64 : 0);
    uint64_t word = g->word, word_at = g->word_at, sum = g->sum, bit = (uint64_t)g->seen * low;
    uint32_t i = 0;
    for (uint32_t j = 0; j < count; j++) { /* the place of each one, from `begin` on */
        while (!word) {
            if (word_at == g->words) return 0;
            memcpy(&word, g->high + 8 * word_at++, 8);
        }
        at[j] = (uint32_t)(64 * (word_at - 1) - begin) + (uint32_t)__builtin_ctzll(word);
        word &= word - 1;
    }
    g->word = word;
    g->word_at = word_at;
    /* With zeros at most n >> low and fields below 2^SID_GAP_LOW no sum of 16 is 2^32 or more. */
    const uint32_t offset = (uint32_t)begin - g->seen;
#ifdef SID_HAS_AVX512
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i lows = _mm512_set1_epi32((int)low), step = _mm512_mullo_epi32(lanes, lows);
    for (; i + 16 <= count; i += 16, bit += 16 * low) {
        const __m512i from = _mm512_add_epi32(step, _mm512_set1_epi32((int)(bit % 8)));
        const __m512i part = low ? sums_up(fields_at(g->lows + bit / 8, from, lows)) : _mm512_setzero_si512();
        const __m512i zeros =
            _mm512_sub_epi32(_mm512_add_epi32(_mm512_loadu_si512(at + i), _mm512_set1_epi32((int)(offset - i))), lanes);
        const __m512i before = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)((uint32_t)sum + g->seen + i)));
        const __m512i place = _mm512_add_epi32(_mm512_add_epi32(_mm512_sllv_epi32(zeros, lows), part), before);
        if (_mm512_cmpgt_epu32_mask(zeros, _mm512_set1_epi32((int)(n >> low))) |
            _mm512_cmpge_epu32_mask(place, _mm512_set1_epi32((int)n)))
            return 0;
        _mm512_storeu_si512(at + i, place);
        sum += (uint32_t)_mm_extract_epi32(_mm512_extracti32x4_epi32(part, 3), 3);
    }
#endif
    for (; i < count; i++, bit += low) {
        uint64_t field;
        memcpy(&field, g->lows + bit / 8, 8);
        sum += field >> bit % 8 & ((1ull << low) - 1);
        const uint64_t place = ((uint64_t)(at[i] + offset - i) << low) + sum + g->seen + i;
        if (place >= n) return 0;
        at[i] = (uint32_t)place;
    }
    g->sum = sum;
    g->seen += count;
    return 1;
}

static int extras(sid_extras *e, const uint8_t *symbol, uint32_t count, uint32_t *step) {
    uint64_t at = e->at;
    uint32_t i = 0;
#ifdef SID_HAS_AVX512
    const __m512i bits = _mm512_loadu_si512(e->bits), base = _mm512_loadu_si512(e->base);
    const __m128i up = _mm_cvtsi32_si128((int)e->up);
    for (; i + 16 <= count; i += 16) {
        const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(const void *)(symbol + i)));
        const __m512i many = _mm512_permutexvar_epi32(s, bits), ends = sums_up(many);
        const uint32_t all = (uint32_t)_mm_extract_epi32(_mm512_extracti32x4_epi32(ends, 3), 3);
        __m512i x = _mm512_permutexvar_epi32(s, base);
        if (all) {
            if (all > e->end - at) return 0;
            const __m512i from = _mm512_add_epi32(_mm512_sub_epi32(ends, many), _mm512_set1_epi32((int)(at % 8)));
            x = _mm512_add_epi32(x, _mm512_sll_epi32(fields_at(e->from + at / 8, from, many), up));
            at += all;
        }
        _mm512_storeu_si512(step + i, x);
    }
#endif
    for (; i < count; i++) {
        const uint32_t s = symbol[i], many = e->bits[s];
        uint64_t field;
        if (many > e->end - at) return 0;
        memcpy(&field, e->from + at / 8, 8);
        step[i] = e->base[s] + (uint32_t)((field >> at % 8 & ((1ull << many) - 1)) << e->up);
        at += many;
    }
    e->at = at;
    return 1;
}
