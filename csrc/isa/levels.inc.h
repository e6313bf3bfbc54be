/* simd.c: levels of sparse values in 8, 4 or 2 bits (bits.h).
 *
 * The level is bits.h's sid_level_of, in float32 with a product and a sum, each rounded. The difference of a value and its level
 * is exact, but for 2 bits. What levels stand for is looked up, and added without a product. */

static void to_levels(const float *x, uint32_t n, const sid_levels *levels, uint8_t *code) {
    const sid_levels l = *levels;
    for (uint32_t i = 0; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]);
        code[i] = (uint8_t)(sid_level_of(u & 0x7fffffffu, &l) + (u >> 31) * (l.top + 1));
    }
}

#if BYTES >= 32 || defined(SID_HAS_NEON)
enum {
    HELD = WIDE < 8 ? 8 : WIDE, /* levels: NEON looks up in two registers */
    HOLDING = HELD / WIDE
};
/* Levels whose keys fit into registers, one a lane. */
typedef struct few_levels {
    vi what[HOLDING], base, top, low;
    float inverse;
} few_levels;
INLINE few_levels few_levels_of(const sid_levels *l, int32_t from) {
    few_levels f = {.base = (vi){0} + (int32_t)l->origin,
                    .top = (vi){0} + (int32_t)l->top,
                    .low = (vi){0} + from,
                    .inverse = l->inverse};
    for (uint32_t c = 0; c < HELD; c++) f.what[c / WIDE][c % WIDE] = (int32_t)sid_level_key(c, l);
    return f;
}
/* v less what was sent of it. above: no key from `low` on lies below level 0. */
INLINE vf left_of_levels(vf v, const few_levels *f, const int above) {
    const vi k = keys(v), sign = bits(v) ^ k;
    const vf steps = to_float(k - f->base) * f->inverse + 0.5f;
#if BYTES == 64
    const vi rounded = (vi)_mm512_cvttps_epi32((__m512)steps);
#elif BYTES == 16
    const vi rounded = to_int(steps);
#else
    const vi rounded = (vi)_mm256_cvttps_epi32((__m256)steps);
#endif
    const vi c = lower(above ? rounded : higher(rounded, (vi){0}), f->top);
#if BYTES == 64
    const vf sent = (vf)((vi)_mm512_permutexvar_epi32((__m512i)c, (__m512i)f->what[0]) | sign);
    return (vf)_mm512_mask_sub_ps((__m512)v, from(k, f->low), (__m512)v, (__m512)sent);
#else
#if BYTES == 32
    const vi sent = (vi)_mm256_permutevar8x32_epi32((__m256i)f->what[0], (__m256i)c) | sign;
#else
    const uint8x16x2_t what = {{(uint8x16_t)f->what[0], (uint8x16_t)f->what[1]}};
    const vi sent = (vi)vqtbl2q_u8(what, (uint8x16_t)(c * 0x04040404 + 0x03020100)) | sign;
#endif
    return v - (vf)(sent & ~(f->low > k));
#endif
}
INLINE uint32_t take_few(float *x, uint32_t n, const few_levels *f, const int above) {
    uint32_t i = 0;
    for (; i + WIDE <= n; i += WIDE) store(x + i, left_of_levels(load(x + i), f, above));
    return i;
}
INLINE uint32_t add_few(float *acc, const float *g, uint32_t n, const few_levels *f, int *ok, const int above) {
    uint32_t i = 0;
    for (; i + FOUR <= n; i += FOUR) {
        vf left[4], sum[4];
        vi top = {0};
        for (uint32_t q = 0; q < 4; q++) {
            left[q] = left_of_levels(load(acc + i + q * WIDE), f, above);
            sum[q] = left[q] + load(g + i + q * WIDE);
            top = higher(top, keys(sum[q]));
        }
        const int beyond = any_beyond(top);
        for (uint32_t q = 0; q < 4; q++) store(acc + i + q * WIDE, beyond ? left[q] : sum[q]);
        if (beyond) *ok &= weighted_each(acc + i, g + i, FOUR, SID_KEY_NONE, 1, 1);
    }
    return i;
}
#endif

static void take_levels(float *x, uint32_t n, uint32_t key, const sid_levels *levels) {
    const sid_levels l = *levels;
    const int32_t low = signed_key(key);
    uint32_t i = 0;
#if BYTES >= 32 || defined(SID_HAS_NEON)
    if (l.top < HELD) {
        const few_levels f = few_levels_of(&l, low);
        i = low >= (int32_t)l.origin ? take_few(x, n, &f, 1) : take_few(x, n, &f, 0);
    }
#endif
    for (; i < n; i++) {
        const uint32_t u = sid_f32_bits(x[i]), k = u & 0x7fffffffu;
        const uint32_t sent = sid_level_key(sid_level_of(k, &l), &l) | (u & 0x80000000u);
        x[i] -= sid_bits_f32((int32_t)k >= low ? sent : 0u);
    }
}

static int add_left(float *acc, const float *g, uint32_t n, uint32_t key, const sid_levels *levels) {
    uint32_t i = 0;
    int ok = 1;
#if BYTES >= 32 || defined(SID_HAS_NEON)
    if (levels->top < HELD) {
        const int32_t low = signed_key(key);
        const few_levels f = few_levels_of(levels, low);
        i = low >= (int32_t)levels->origin ? add_few(acc, g, n, &f, &ok, 1) : add_few(acc, g, n, &f, &ok, 0);
    }
#endif
    take_levels(acc + i, n - i, key, levels);
    return ok & add_kept(acc + i, g + i, n - i, SID_KEY_NONE);
}

enum {
    A_BYTE = 256 /* codes of 8 bits: fewer entries are decoded one by one */
};
static float level_of(uint32_t code, const sid_levels *l) {
    return sid_bits_f32(sid_level_key(code & l->top, l) | (code > l->top ? 0x80000000u : 0));
}
/* n entries, from entry `first` on. */
static void add_levels(float *out, const uint16_t *idx, uint32_t base, const uint8_t *code, uint64_t first, uint32_t n,
                       const sid_levels *levels) {
    const sid_levels l = *levels;
    float *at = sid_places_from(out, base), value[A_BYTE];
    uint32_t i = 0;
    if (l.top == sid_level_top(8) && n < A_BYTE) {
        for (; i < n; i++) at[idx[i]] += level_of(code[first + i], &l);
        return;
    }
    for (uint32_t c = 0; c <= 2 * l.top + 1; c++) value[c] = level_of(c, &l);
    if (l.top == sid_level_top(8)) {
        for (; i < n; i++) at[idx[i]] += value[code[first + i]];
        return;
    }
    if (l.top == sid_level_top(2)) {
        for (; i < n; i++) at[idx[i]] += value[code[(first + i) / 4] >> 2 * ((first + i) % 4) & 3];
        return;
    }
    code += first / 2;
    if (n && first % 2) {
        at[*idx++] += value[*code++ >> 4];
        n--;
    }
#if BYTES == 64
    const vf table = load(value);
    const spread s = lookup_spread(4);
    for (; n >= WIDE; n -= WIDE, idx += WIDE, code += WIDE / 2) {
        float v[WIDE];
        store(v, look_up(code, 0, 4, &s, table));
        for (uint32_t j = 0; j < WIDE; j++) at[idx[j]] += v[j];
    }
#endif
    for (; n >= 2; n -= 2, idx += 2, code++) {
        at[idx[0]] += value[*code & 15];
        at[idx[1]] += value[*code >> 4];
    }
    if (n) at[*idx] += value[*code & 15];
}
