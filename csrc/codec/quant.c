/* int8, int4, int2, ternary, fp8, qsgd, terngrad: every element becomes the code of a number on a grid, times a scale.
 *
 *     scale = M / top      l = acc / scale      code = round(l)      sent = scale * code      kept = acc - sent
 *
 * M is the largest magnitude or the Euclidean norm of a block of elements or of the whole group, top the largest number
 * of the grid: 127, 7 or what `bits` hold for integers, 448 for E4M3, 57344 for E5M2. Rounding is to nearest or to one
 * of the neighbours with probabilities that make the mean l. In detail, the same in encode, keep and a reader's check:
 *   - M counts as at most 0x1.fffffcp127 (one step below the largest float), so that top * scale never is Inf;
 *   - a scale below 2^-126 is 0: nothing of such a block is sent, and no reciprocal overflows;
 *   - l = acc * inverse, inverse = 1 / scale rounded to float32, one division a block; |l| is cut off at top.
 * Where a block has a scale of its own, keep() finds it again from acc, and with it what was sent, so that nothing is
 * stored beside acc. A scale of the whole group takes a second pass: the first one gathers the norm.
 *
 * int2 has a sign and one of two magnitudes, the levels of the Lloyd-Max quantiser of a normal variable; ternary has -1, 0 and
 * 1, five of them in a byte (bits.h). Their scale is not derived from a norm: a block's mean magnitude says which elements
 * get the higher magnitude, and the scale is the one with the least squared error for these codes (quant.h). With int2's levels
 * and the root mean square as the scale, a block of one large element and zeros would end farther from what it was than
 * zero is, and error feedback could diverge. With the fitted scale what is kept of a block is always shorter than the
 * block, whatever it holds.
 *
 * QSGD (Alistarh et al. 2017): Q(v_i) = ||v||_2 sign(v_i) xi_i, xi_i one of the levels 0, 1/s .. 1 beside
 * |v_i| / ||v||_2 with E[xi_i] = |v_i| / ||v||_2. MergeComp's 8 bits: sign and s = 127. Fields have a fixed width here,
 * because a plan fixes the size of a payload and the length of the paper's Elias codes depends on the gradient.
 * TernGrad (Wen et al. 2017): scale = max |v|, P(|code| = 1) = |v_i| / scale, after clipping at c standard deviations,
 * c = 2.5. That is QSGD's rule with one level and the maximum for a norm. */
#include <math.h>
#include <string.h>

#include "quant.h"

/* Between passes: of the whole group. */
typedef struct totals {
    float scale; /* the group's, or the largest of a block */
    uint32_t key;
} totals;
/* Behind it, where the scale is the group's, running sums. */
enum {
    SQUARES,
    PLAIN
};
static double *sums_of(const sid_pass *w, int k) {
    return (double *)(void *)((totals *)w->scratch + 1) + (k ? sid_sums(w->plan->n) : 0);
}
static uint64_t totals_bytes(const sid_plan *p, uint32_t block) {
    return sizeof(totals) + (block ? 0 : 2 * sizeof(double) * sid_sums(p->n));
}

/* ---- plan ---------------------------------------------------------------------------------------------------- */

_Static_assert(sizeof(quant_derived) <= sizeof((sid_plan *)0)->derived, "SID_DERIVED_WORDS is too small");

static sid_status settle_clipped(sid_plan *p, uint64_t *scratch, quant_form f, double clip) {
    const quant_derived d = {f, clip};
    memcpy(p->derived, &d, sizeof d);
    if (f.block > SID_TILE) p->tile = f.block;
    p->k = p->cap = p->n;
    p->ruling.form = SID_RULES_BY_SCALE;
    p->ruling.scale[0] = sid_f32_bits(f.block ? 1.0f : QUANT_SCALE_MIN);
    p->ruling.scale[1] = sid_f32_bits(f.block ? 1.0f : quant_scale_max(&f));
    p->sizes.payload = sid_round_up(quant_codes_at(p->n, f.block) + quant_code_bytes(&f, p->n), 64);
    *scratch = totals_bytes(p, f.block);
    return SID_OK;
}
static sid_status settle(sid_plan *p, uint64_t *scratch, quant_form f) { return settle_clipped(p, scratch, f, 0); }

static sid_status is_power(const sid_plan *p, const char *name, double value, sid_error *err) {
    const uint32_t v = (uint32_t)value;
    if (!(v & (v - 1))) return SID_OK;
    return sid_fail(err, SID_E_PARAM, "%s: %s = %u must be a power of two, such as 256", p->codec->info.name, name, v);
}

enum { /* of int8, int4 */
    INT_BLOCK,
    INT_ROUNDING
};
static sid_status plan_int(sid_plan *p, uint64_t *scratch, sid_error *err, uint32_t bits) {
    const sid_rounding rounding = p->codec_param[INT_ROUNDING] > 0 ? SID_ROUND_DRAW16 : SID_ROUND_NEAREST;
    const sid_status s = is_power(p, "block", p->codec_param[INT_BLOCK], err);
    if (s) return s;
    return settle(p, scratch,
                  (quant_form){(uint32_t)p->codec_param[INT_BLOCK], bits, SID_GRID_INTEGERS, rounding, NORM_MAX,
                               bits == 8 ? 127.0f : 7.0f});
}
static sid_status plan_int8(sid_plan *p, uint64_t *scratch, sid_error *err) { return plan_int(p, scratch, err, 8); }
static sid_status plan_int4(sid_plan *p, uint64_t *scratch, sid_error *err) { return plan_int(p, scratch, err, 4); }

enum { /* of int2, ternary */
    FITTED_BLOCK
};
static sid_status plan_fitted(sid_plan *p, uint64_t *scratch, sid_error *err, sid_grid_kind kind, float top) {
    const uint32_t block = (uint32_t)p->codec_param[FITTED_BLOCK];
    const sid_status s = is_power(p, "block", block, err);
    if (s) return s;
    return settle(p, scratch, (quant_form){block, 2, kind, SID_ROUND_NEAREST, NORM_FITTED, top});
}
static sid_status plan_int2(sid_plan *p, uint64_t *scratch, sid_error *err) {
    return plan_fitted(p, scratch, err, SID_GRID_FOUR, SID_FOUR_HIGH);
}
static sid_status plan_ternary(sid_plan *p, uint64_t *scratch, sid_error *err) {
    return plan_fitted(p, scratch, err, SID_GRID_THREE, 1.0f);
}

enum {
    F8_BLOCK,
    F8_FORMAT,
    F8_ROUNDING
};
static sid_status plan_fp8(sid_plan *p, uint64_t *scratch, sid_error *err) {
    const int wide = p->codec_param[F8_FORMAT] > 0;
    const sid_rounding rounding = p->codec_param[F8_ROUNDING] > 0 ? SID_ROUND_DRAW16 : SID_ROUND_NEAREST;
    const sid_status s = is_power(p, "block", p->codec_param[F8_BLOCK], err);
    if (s) return s;
    return settle(p, scratch,
                  (quant_form){(uint32_t)p->codec_param[F8_BLOCK], 8, wide ? SID_GRID_E5M2 : SID_GRID_E4M3, rounding,
                               NORM_MAX, wide ? 57344.0f : 448.0f});
}

enum {
    QSGD_BITS,
    QSGD_NORM,
    QSGD_BUCKET
};
static sid_status plan_qsgd(sid_plan *p, uint64_t *scratch, sid_error *err) {
    const uint32_t bits = (uint32_t)p->codec_param[QSGD_BITS], bucket = (uint32_t)p->codec_param[QSGD_BUCKET];
    if (bucket && bucket < 128)
        return sid_fail(err, SID_E_PARAM, "qsgd: bucket = %u must be 0, for the whole group, or 128 to 4096", bucket);
    const sid_status s = is_power(p, "bucket", bucket, err);
    if (s) return s;
    /* A level is at most 64 times the root mean square of a bucket; of a large group's it is thousands of times that. */
    const sid_rounding rounding = bucket ? SID_ROUND_DRAW16 : SID_ROUND_DRAW32;
    return settle(p, scratch,
                  (quant_form){bucket, bits, SID_GRID_INTEGERS, rounding,
                               p->codec_param[QSGD_NORM] > 0 ? NORM_MAX : NORM_L2, (float)((1u << (bits - 1)) - 1)});
}

enum {
    TERN_CLIP
};
static sid_status plan_terngrad(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    /* a step is at most `clip` standard deviations: 16 bits are right to 2^-17 of that */
    return settle_clipped(p, scratch, (quant_form){0, 2, SID_GRID_INTEGERS, SID_ROUND_DRAW16, NORM_CLIPPED, 1.0f},
                          p->codec_param[TERN_CLIP]);
}

/* ---- scales -------------------------------------------------------------------------------------------------- */

enum {
    MOST_BLOCKS = SID_MAX_TILE / 64 /* of a tile */
};

/* The scales of a tile's blocks, or the one of the group. */
typedef struct scale_list {
    uint32_t count;
    float scale[MOST_BLOCKS], inverse[MOST_BLOCKS], edge[MOST_BLOCKS];
} scale_list;

static double wide_sum(const float *x, uint32_t len, uint32_t from) {
    double lane[SID_UNIT_LANES] = {0};
    for (uint32_t i = 0; i < len; i++) lane[i % SID_UNIT_LANES] += sid_key(x[i]) >= from ? fabs((double)x[i]) : 0;
    return sid_join(lane);
}
/* The sum of a unit's magnitudes from key `from` on, and how many they are: in float32, or where that overflows in float64. */
static double unit_sum(const sid_plan *p, const float *x, uint32_t len, uint32_t from, uint32_t *count) {
    const float sum = from ? p->simd->sum_from(x, len, from, count) : p->simd->sum_abs(x, len);
    return sid_key(sum) < SID_KEY_INF ? (double)sum : wide_sum(x, len, from);
}
static double block_sum(const sid_plan *p, const float *x, uint32_t len, uint32_t from, uint32_t *count) {
    if (len <= SID_TILE) return unit_sum(p, x, len, from, count);
    double sums[SID_MAX_TILE / SID_TILE] = {0};
    *count = 0;
    for (uint32_t i = 0; i < len; i += SID_TILE) {
        uint32_t some = 0;
        sid_sums_add(sums, i, unit_sum(p, x + i, len - i < SID_TILE ? len - i : SID_TILE, from, &some));
        *count += some;
    }
    return sid_sums_total(sums, len);
}
static void fit_blocks(const sid_plan *p, const quant_form *f, const float *x, uint32_t len, scale_list *s) {
    for (uint32_t b = 0; b < s->count; b++) {
        const uint32_t offset = b * f->block, take = len - offset < f->block ? len - offset : f->block;
        uint32_t count = 0;
        const double sum = block_sum(p, x + offset, take, 0, &count);
        s->edge[b] = quant_edge(f->kind, sum, take);
        const double above = block_sum(p, x + offset, take, sid_f32_bits(s->edge[b]), &count);
        s->scale[b] = quant_fit(f->kind, sum, above, take, count);
    }
}

static void block_scales(const sid_plan *p, const quant_form *f, const float *x, uint32_t len, float *scale) {
    const uint32_t blocks = (len + f->block - 1) / f->block;
    if (f->norm != NORM_L2) {
        uint32_t key[MOST_BLOCKS];
        p->simd->block_keys(x, len, f->block, key);
        for (uint32_t b = 0; b < blocks; b++) scale[b] = quant_scale_of(sid_bits_f32(key[b]), f->top);
        return;
    }
    for (uint32_t b = 0; b < blocks; b++) {
        const uint32_t offset = b * f->block, take = len - offset < f->block ? len - offset : f->block;
        double sums[SID_MAX_TILE / SID_TILE] = {0};
        for (uint32_t i = 0; i < take; i += SID_TILE)
            sid_sums_add(sums, i, p->simd->sum_squares(x + offset + i, take - i < SID_TILE ? take - i : SID_TILE));
        scale[b] = quant_scale(sqrt(sid_sums_total(sums, take)), f->top);
    }
}

/* group: the scale where all elements share one. */
static sid_grid grid_of(const sid_plan *p, const quant_form *f, const float *x, uint32_t len, float group,
                        scale_list *s) {
    s->count = f->block ? (len + f->block - 1) / f->block : 1;
    if (f->norm == NORM_FITTED)
        fit_blocks(p, f, x, len, s);
    else if (f->block)
        block_scales(p, f, x, len, s->scale);
    else
        s->scale[0] = group;
    if (f->norm != NORM_FITTED)
        for (uint32_t b = 0; b < s->count; b++) s->inverse[b] = s->scale[b] > 0 ? 1.0f / s->scale[b] : 0.0f;
    return (sid_grid){f->kind, f->rounding, f->top, f->block, s->scale, s->inverse, s->edge};
}

static float group_scale(const sid_pass *w, const quant_form *f) {
    const sid_plan *p = w->plan;
    const double sum = sid_sums_total(sums_of(w, PLAIN), p->n), squares = sid_sums_total(sums_of(w, SQUARES), p->n);
    return quant_group_scale(f, ((const totals *)w->scratch)->key, sum, squares, p->n, quant_derived_of(p).clip);
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

typedef union draws {
    SID_LINE uint16_t half[SID_MAX_TILE];
    SID_LINE uint32_t word[SID_MAX_TILE];
} draws;

/* The tile's random bits. NULL where none are drawn. */
static const void *draw(const sid_plan *p, const quant_form *f, const sid_draw *d, uint64_t offset, uint32_t len,
                        draws *to) {
    if (f->rounding == SID_ROUND_NEAREST) return NULL;
    if (f->rounding == SID_ROUND_DRAW16)
        p->simd->draw16(d, offset, len, to->half);
    else
        p->simd->draw32(d, offset, len, to->word);
    return to;
}

static void begin(sid_pass *w) {
    const quant_form f = quant_form_of(w->plan);
    if (f.rounding == SID_ROUND_NEAREST) w->draw = (sid_draw){0, 0, 0};
    if (w->passes == 1) memset(w->scratch, 0, totals_bytes(w->plan, f.block));
}

static void gather(const sid_pass *w, const quant_form *f, const float *acc, uint64_t offset, uint32_t len) {
    const sid_simd *v = w->plan->simd;
    totals *t = w->scratch;
    const uint32_t key = f->norm == NORM_L2 ? 0 : v->max_key(acc, len);
    t->key = key > t->key ? key : t->key;
    if (f->norm == NORM_L2) sid_sums_add(sums_of(w, SQUARES), offset, v->sum_squares(acc, len));
    if (f->norm == NORM_CLIPPED) {
        double sum[2];
        v->two_moments(acc, len, sum);
        sid_sums_add(sums_of(w, SQUARES), offset, sum[0]);
        sid_sums_add(sums_of(w, PLAIN), offset, sum[1]);
    }
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const quant_form f = quant_form_of(p);
    totals *t = w->scratch;
    if (!f.block && w->passes == 1) {
        gather(w, &f, acc, offset, len);
        return;
    }
    draws room;
    const void *d = draw(p, &f, &w->draw, offset, len, &room);
    SID_LINE uint8_t *body = w->payload + quant_codes_at(p->n, f.block) + quant_code_bytes(&f, offset),
                     buf[SID_MAX_TILE];
    uint8_t *code = f.bits == 8 ? body : buf;
    scale_list s;
    const sid_grid g = grid_of(p, &f, acc, len, t->scale, &s);
    if (f.block) {
        memcpy(w->payload + SID_HEADER_BYTES + 4 * (offset / f.block), s.scale, 4ull * s.count);
        for (uint32_t b = 0; b < s.count; b++) t->scale = s.scale[b] > t->scale ? s.scale[b] : t->scale;
    }
    if (f.bits == 2 && !f.block && f.rounding == SID_ROUND_DRAW16) { /* top is 1 */
        p->simd->ternary(acc, len, *g.inverse, room.half, body);
        return;
    }
    p->simd->quantise(acc, len, &g, d, code);
    if (f.kind == SID_GRID_THREE)
        p->simd->pack_trits(code, len, body);
    else if (f.bits < 8)
        p->simd->pack(code, len, f.bits, body);
}

static uint64_t written(const sid_pass *w, uint64_t offset) {
    const quant_form f = quant_form_of(w->plan);
    const int writes = f.block || w->passes > 1;
    return quant_codes_at(w->plan->n, f.block) + (writes ? quant_code_bytes(&f, offset) : 0);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const quant_form f = quant_form_of(p);
    totals *t = w->scratch;
    if (!f.block && w->passes == 1) {
        t->scale = group_scale(w, &f);
        return SID_AGAIN;
    }
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t codes = quant_codes_at(p->n, f.block), used = codes + quant_code_bytes(&f, p->n);
    const uint64_t scales = SID_HEADER_BYTES + 4 * quant_blocks(p->n, f.block);
    memset(w->payload + scales, 0, codes - scales);
    memset(w->payload + used, 0, p->sizes.payload - used);
    h->count = p->n;
    h->flags = 0;
    h->scale = t->scale;
    w->state->rule = (sid_rule){.scale = f.block ? 1.0f : t->scale};
    w->stats.found = p->n;
    w->stats.threshold = t->scale;
    return SID_DONE;
}

/* ---- what is kept -------------------------------------------------------------------------------------------- */

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const quant_form f = quant_form_of(p);
    draws room;
    if (s->rule.scale == 0) return;
    const void *d = draw(p, &f, &s->draw, offset, len, &room);
    scale_list of;
    const sid_grid g = grid_of(p, &f, acc, len, s->rule.scale, &of);
    p->simd->take_out(acc, len, &g, d);
}

/* ---- decode -------------------------------------------------------------------------------------------------- */

/* 1 if a byte has a trit of an element that does not exist, or more than five. */
static uint32_t wrong_trits(const uint8_t *code, uint64_t n) {
    static const uint8_t most[SID_TRITS + 1] = {0, 2, 8, 26, 80, SID_TRIT_MOST};
    uint32_t wrong = 0;
    for (uint64_t at = 0; at < n; at += SID_TILE, code += SID_TRIT_BYTES) {
        const uint32_t take = n - at < SID_TILE ? (uint32_t)(n - at) : SID_TILE, columns = sid_trit_columns(take);
        for (uint32_t k = 0, first = 0; k <= SID_TRITS && first < columns; k++) { /* bytes of 5 - k trits */
            const uint32_t trits = SID_TRITS - k, before = trits ? (trits - 1) * columns : 0;
            const uint32_t end = !trits                    ? columns
                                 : take < before           ? 0
                                 : take - before < columns ? take - before
                                                           : columns;
            uint8_t over = 0;
            for (uint32_t j = first; j < end; j++) over = (uint8_t)(over | (code[j] > most[trits]));
            wrong |= over;
            first = end > first ? end : first;
        }
    }
    return wrong;
}

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const quant_form f = quant_form_of(p);
    const uint32_t most = sid_f32_bits(quant_scale_max(&f));
    const uint64_t blocks = quant_blocks(p->n, f.block), codes = quant_codes_at(p->n, f.block),
                   end = codes + quant_code_bytes(&f, p->n);
    uint32_t largest = 0, bad = 0;
    if (h->count != p->n || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE))
        return sid_fail(err, SID_E_CORRUPT, "count %llu and flags %08x do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags);
    if (h->salt && f.rounding == SID_ROUND_NEAREST)
        return sid_fail(err, SID_E_CORRUPT,
                        "salt is %08x; it must be 0, because rounding to nearest draws no random bits", h->salt);
    for (uint64_t i = 0; i < blocks; i++) {
        uint32_t s;
        memcpy(&s, payload + SID_HEADER_BYTES + 4 * i, 4);
        largest = s > largest ? s : largest;
        bad |= (uint32_t)!quant_sound(s, most);
    }
    if (bad || !quant_sound(sid_f32_bits(h->scale), most))
        return sid_fail(err, SID_E_CORRUPT, "a scale is neither 0 nor a number from 2^-126 to %g",
                        (double)quant_scale_max(&f));
    if ((f.block || !p->n) && sid_f32_bits(h->scale) != largest)
        return sid_fail(err, SID_E_CORRUPT, "scale is %g; it must be the largest of the blocks' scales",
                        (double)h->scale);
    for (uint64_t i = SID_HEADER_BYTES + 4 * blocks; i < codes; i++) bad |= payload[i];
    for (uint64_t i = end; i < p->sizes.payload; i++) bad |= payload[i];
    if (f.kind == SID_GRID_THREE) {
        if (wrong_trits(payload + codes, p->n))
            return sid_fail(err, SID_E_CORRUPT, "a byte of the codes has more than its elements' trits");
    } else if (p->n * f.bits % 8)
        bad |= (uint32_t)payload[end - 1] >> (p->n * f.bits % 8);
    if (bad) return sid_fail(err, SID_E_CORRUPT, "bytes around the codes are set; they must be 0");
    return SID_OK;
}

enum {
    TOGETHER = 16
}; /* payloads whose sum stays in registers */

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const quant_form f = quant_form_of(p);
    sid_codes from[TOGETHER];
    for (uint32_t r = 0; r < g->count; r += TOGETHER) {
        const uint32_t count = g->count - r < TOGETHER ? g->count - r : TOGETHER;
        for (uint32_t i = 0; i < count; i++) {
            const uint8_t *payload = sid_payload(g, r + i);
            from[i].code = payload + quant_codes_at(p->n, f.block) + quant_code_bytes(&f, offset);
            from[i].scale =
                f.block ? payload + SID_HEADER_BYTES + 4 * (offset / f.block) : payload + offsetof(sid_header, scale);
        }
        if (f.kind == SID_GRID_THREE)
            p->simd->add_trits(from, count, out, len, f.block);
        else
            p->simd->add_codes(from, count, out, len, f.block, f.kind, f.bits);
    }
}

/* ---- registry ------------------------------------------------------------------------------------------------ */

static const char *const roundings[] = {"nearest", "stochastic", NULL};
static const char *const formats[] = {"e4m3", "e5m2", NULL};
static const char *const norms[] = {"l2", "max", NULL};

#define BLOCK_ROW                                                                                                      \
    SID_NUMBER_ROW("block", SID_INT, 256, 64, SID_MAX_TILE, "elements, a power of two",                                \
                   "Number of elements that share a scale. A scale is a float32.")
#define ROUNDING_ROW                                                                                                   \
    SID_CHOICE_ROW(                                                                                                    \
        "rounding", roundings, 0, 1,                                                                                   \
        "nearest: to the nearest code, ties to even. stochastic: to one of the two neighbors at random, so that "      \
        "the mean is right.")

static const sid_param int_params[] = {
    [INT_BLOCK] = BLOCK_ROW,
    [INT_ROUNDING] = ROUNDING_ROW,
};
static const sid_param fitted_params[] = {[FITTED_BLOCK] = BLOCK_ROW};
static const sid_param fp8_params[] = {
    [F8_BLOCK] = BLOCK_ROW,
    [F8_FORMAT] =
        SID_CHOICE_ROW("format", formats, 0, 1, "e4m3: 3 bits of mantissa, 2^-9 to 448. e5m2: 2 bits, 2^-16 to 57344."),
    [F8_ROUNDING] = ROUNDING_ROW,
};
static const sid_param qsgd_params[] = {
    [QSGD_BITS] = SID_NUMBER_ROW(
        "bits", SID_INT, 8, 2, 8, "bits",
        "Bits of the sign and level of an element; there are s = 2^(bits - 1) - 1 levels (MergeComp: 8 bits)."),
    [QSGD_NORM] = SID_CHOICE_ROW(
        "norm", norms, 0, 1,
        "The number that the levels divide: the Euclidean norm, as in the paper, or the largest magnitude."),
    [QSGD_BUCKET] =
        SID_NUMBER_ROW("bucket", SID_INT, 512, 0, SID_MAX_TILE, "elements, a power of two",
                       "Number of elements that share a norm, 128 or more. 0: the whole group, as in the paper's "
                       "theorem, which takes a second pass."),
};
static const sid_param terngrad_params[] = {
    [TERN_CLIP] = SID_NUMBER_ROW("clip", SID_REAL, 2.5, 0.1, 1e6, "standard deviations",
                                 "c: magnitudes above c * sigma become c * sigma (2.5)."),
};

#define QUANT_CODEC(symbol, rows, ...)                                                                                 \
    const sid_codec sid_codec_##symbol = {                                                                             \
        .info = {.family = "quantised", SID_PARAMETERS(rows), __VA_ARGS__},                                            \
        SID_STAGES(plan_##symbol, begin, tile, finish, keep, sid_no_rule, check, sid_no_cursors, decode),              \
        .written = written}

QUANT_CODEC(int8, int_params, .name = "int8", .wire_id = 48, .traits = SID_STOCHASTIC,
            .paper = "Dettmers et al. 2022 (block-wise quantisation), with even steps",
            .doc = "8-bit integers, -127 to 127, and a scale for each block of elements: the largest magnitude / 127.");
QUANT_CODEC(int4, int_params, .name = "int4", .wire_id = 49, .traits = SID_STOCHASTIC,
            .paper = "Dettmers et al. 2022 (block-wise quantisation), with even steps",
            .doc = "4-bit integers, -7 to 7, and a scale for each block of elements: the largest magnitude / 7.");
QUANT_CODEC(int2, fitted_params, .name = "int2", .wire_id = 54,
            .paper = "Max 1960, table I, and Lloyd 1982: the four levels for normally distributed elements",
            .doc =
                "2 bits: a sign and one of two magnitudes, and a scale for each block of elements: the one that makes "
                "the block's squared error smallest.");
QUANT_CODEC(
    ternary, fitted_params, .name = "ternary", .wire_id = 55,
    .paper = "Max 1960, table I: the three levels for normally distributed elements; Li and Liu 2016 (ternary weights)",
    .doc = "-1, 0 or 1, five of them in a byte, and a scale for each block of elements: the one that makes the "
           "block's squared error smallest.");
QUANT_CODEC(fp8, fp8_params, .name = "fp8", .wire_id = 50, .traits = SID_STOCHASTIC,
            .paper = "OCP 8-bit Floating Point Specification 1.0; Micikevicius et al. 2022",
            .doc = "8-bit floats and a scale for each block, which brings its largest magnitude to the format's.");
QUANT_CODEC(qsgd, qsgd_params, .name = "qsgd", .memory = "none", .wire_id = 51, .traits = SID_STOCHASTIC | SID_UNBIASED,
            .paper = "QSGD (Alistarh et al. 2017), stochastic quantisation, without its Elias code",
            .doc = "Levels of the norm. Each element is rounded at random to one of the two neighboring levels, so "
                   "that the mean is right.");
QUANT_CODEC(terngrad, terngrad_params, .name = "terngrad", .memory = "none", .wire_id = 52, .traits = SID_STOCHASTIC,
            .paper = "TernGrad (Wen et al. 2017), stochastic ternarizing and gradient clipping",
            .doc = "-1, 0 or 1 times the largest magnitude, in 2 bits, drawn at random so that the mean is right "
                   "except for clipped elements.");
