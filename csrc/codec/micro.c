/* mxfp4, nvfp4: 4-bit floats (E2M1) in small blocks with scales of 8 bits.
 *
 *     l = acc / scale      code = round(l), |l| cut off at 6      sent = scale * code      kept = acc - sent
 *
 * mxfp4 (OCP Microscaling Formats Specification 1.0, MXFP4): blocks of 32 elements; the scale is a power of two, that of the
 * block's largest magnitude divided by 4, the power of two of E2M1's largest number, 6. So the largest element is within 4 to 8
 * scales, and what is above 6 is cut off, as the specification asks. A block of zeros has the smallest scale, 2^-127.
 *
 * nvfp4 (NVIDIA 2025, "Pretraining Large Language Models with NVFP4", appendix on quantisation): blocks of 16 elements; the scale
 * is an E4M3 times a float32 of the group, which brings the group's largest magnitude to 448 * 6. The group's scale takes a
 * pass of its own. A scale below 2^-126 is 0: nothing of such a block is sent, and no reciprocal overflows.
 *
 * keep() finds the scales again from acc and, of nvfp4, from the rule, which is the group's scale. */
#include "micro.h"

#include <string.h>

enum {
    MICRO_ROUNDING, /* parameter */
    MOST_BLOCKS = SID_TILE / 16
};

/* Between passes: the largest key, and the group's scale; then the largest scale of a block. */
typedef struct found {
    uint32_t key;
    float scale;
} found;

static sid_status settle(sid_plan *p, uint64_t *scratch, uint32_t shift, uint32_t two) {
    const micro_form f = {shift, two, p->codec_param[MICRO_ROUNDING] > 0};
    _Static_assert(sizeof f <= sizeof p->derived, "SID_DERIVED_WORDS is too small");
    memcpy(p->derived, &f, sizeof f);
    p->k = p->cap = p->n;
    p->ruling.form = SID_RULES_BY_SCALE;
    p->ruling.scale[0] = sid_f32_bits(two ? QUANT_SCALE_MIN : 1.0f);
    p->ruling.scale[1] = sid_f32_bits(two ? quant_scale(QUANT_M_MAX, MICRO_TOP) : 1.0f);
    p->sizes.payload = sid_round_up(micro_codes_at(&f, p->n) + (p->n + 1) / 2, 64);
    *scratch = sizeof(found);
    return SID_OK;
}
static sid_status plan_mxfp4(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    return settle(p, scratch, 5, 0);
}
static sid_status plan_nvfp4(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    return settle(p, scratch, 4, 1);
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

typedef struct tile_scales {
    uint32_t count;
    uint8_t code[MOST_BLOCKS];
    float scale[MOST_BLOCKS], inverse[MOST_BLOCKS];
} tile_scales;

/* The numbers of bytes of E4M3, times the group's scale. */
static void wide_scales(const sid_plan *p, const uint8_t *code, uint32_t count, float group, float *scale) {
    const sid_codes one = {code, (const uint8_t *)&group};
    memset(scale, 0, sizeof *scale * count);
    p->simd->add_codes(&one, 1, scale, count, 0, SID_GRID_E4M3, 8);
}

/* micro_nv of all blocks. */
static void measure_nv(const sid_plan *p, const uint32_t *key, float group, tile_scales *t) {
    const float sixth = micro_sixth(group);
    const sid_grid grid = {
        .kind = SID_GRID_E4M3, .rounding = SID_ROUND_NEAREST, .top = MICRO_E4M3_TOP, .inverse = &sixth};
    float top[MOST_BLOCKS];
    memcpy(top, key, sizeof *key * t->count);
    p->simd->quantise(top, t->count, &grid, NULL, t->code);
    wide_scales(p, t->code, t->count, group, t->scale);
    for (uint32_t b = 0; b < t->count; b++) {
        const int large = t->scale[b] >= QUANT_SCALE_MIN;
        const float inverse = 1.0f / (large ? t->scale[b] : 1.0f);
        t->code[b] = large ? t->code[b] : 0;
        t->scale[b] = large ? t->scale[b] : 0;
        t->inverse[b] = large ? inverse : 0;
    }
}

static void measure(const sid_plan *p, const micro_form *f, const float *x, uint32_t len, float group, tile_scales *t) {
    uint32_t key[MOST_BLOCKS];
    t->count = (uint32_t)micro_blocks(f, len);
    p->simd->small_keys(x, len, 1u << f->shift, key);
    if (f->two) {
        measure_nv(p, key, group, t);
        return;
    }
    for (uint32_t b = 0; b < t->count; b++) {
        const micro_scale s = micro_mx(key[b]);
        t->code[b] = (uint8_t)s.code;
        t->scale[b] = s.scale;
        t->inverse[b] = s.inverse;
    }
}

typedef struct draws {
    SID_LINE uint16_t half[SID_TILE];
} draws;
static const uint16_t *draw(const sid_plan *p, const micro_form *f, const sid_draw *d, uint64_t offset, uint32_t len,
                            draws *to) {
    if (!f->draws) return NULL;
    p->simd->draw16(d, offset, len, to->half);
    return to->half;
}

static void begin(sid_pass *w) {
    const micro_form f = micro_form_of(w->plan);
    if (!f.draws) w->draw = (sid_draw){0, 0, 0};
    if (w->passes == 1) memset(w->scratch, 0, sizeof(found));
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const micro_form f = micro_form_of(p);
    found *t = w->scratch;
    if (f.two && w->passes == 1) {
        const uint32_t key = p->simd->max_key(acc, len);
        t->key = key > t->key ? key : t->key;
        return;
    }
    draws room;
    tile_scales s;
    uint8_t code[SID_TILE];
    measure(p, &f, acc, len, t->scale, &s);
    memcpy(w->payload + SID_HEADER_BYTES + (offset >> f.shift), s.code, s.count);
    for (uint32_t b = 0; b < s.count && !f.two; b++) t->scale = s.scale[b] > t->scale ? s.scale[b] : t->scale;
    p->simd->fp4_codes(acc, len, f.shift, s.inverse, draw(p, &f, &w->draw, offset, len, &room), code);
    p->simd->pack(code, len, 4, w->payload + micro_codes_at(&f, p->n) + offset / 2);
}

static uint64_t written(const sid_pass *w, uint64_t offset) {
    const micro_form f = micro_form_of(w->plan);
    const int writes = !f.two || w->passes > 1;
    return micro_codes_at(&f, w->plan->n) + (writes ? (offset + 1) / 2 : 0);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const micro_form f = micro_form_of(p);
    found *t = w->scratch;
    if (f.two && w->passes == 1) {
        t->scale = quant_scale_of(sid_bits_f32(t->key), MICRO_TOP);
        return SID_AGAIN;
    }
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t scales = SID_HEADER_BYTES + micro_blocks(&f, p->n), codes = micro_codes_at(&f, p->n),
                   used = codes + (p->n + 1) / 2;
    memset(w->payload + scales, 0, codes - scales);
    memset(w->payload + used, 0, p->sizes.payload - used);
    h->count = p->n;
    h->flags = 0;
    h->scale = t->scale;
    w->state->rule = (sid_rule){.scale = f.two ? t->scale : 1.0f};
    w->stats.found = p->n;
    w->stats.threshold = t->scale;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const micro_form f = micro_form_of(p);
    draws room;
    tile_scales t;
    if (s->rule.scale == 0) return;
    measure(p, &f, acc, len, s->rule.scale, &t);
    p->simd->fp4_take(acc, len, f.shift, t.scale, t.inverse, draw(p, &f, &s->draw, offset, len, &room));
}

/* ---- decode -------------------------------------------------------------------------------------------------- */

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const micro_form f = micro_form_of(p);
    const uint64_t blocks = micro_blocks(&f, p->n), codes = micro_codes_at(&f, p->n), end = codes + (p->n + 1) / 2;
    const uint8_t *scale = payload + SID_HEADER_BYTES;
    uint32_t bad = 0;
    if (h->count != p->n || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE))
        return sid_fail(err, SID_E_CORRUPT, "count %llu and flags %08x do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags);
    if (h->salt && !f.draws)
        return sid_fail(err, SID_E_CORRUPT,
                        "salt is %08x; it must be 0, because rounding to nearest draws no random bits", h->salt);
    if (f.two && (!quant_sound(sid_f32_bits(h->scale), p->ruling.scale[1]) || (!p->n && sid_f32_bits(h->scale))))
        return sid_fail(err, SID_E_CORRUPT, "the group's scale is neither 0 nor a number from 2^-126 to %g",
                        (double)sid_bits_f32(p->ruling.scale[1]));
    /* Beside 0 the sound bytes are one run, because a byte stands for more than the one below. */
    uint32_t low = 1, high = 255;
    while (low < 255 && !micro_sound(&f, low, h->scale)) low++;
    while (high > low && !micro_sound(&f, high, h->scale)) high--;
    const uint8_t from = (uint8_t)low, span = (uint8_t)(high - low), any = (uint8_t)micro_sound(&f, low, h->scale);
    uint8_t most = 0, wrong = 0;
    for (uint64_t i = 0; i < blocks; i++) {
        const uint8_t c = scale[i], over = (uint8_t)(c - from);
        wrong |= (uint8_t)((c != 0) & ((over > span) | !any));
        most = c > most ? c : most;
    }
    if (wrong) return sid_fail(err, SID_E_CORRUPT, "a block has a scale that no encoder writes");
    if (!f.two && sid_f32_bits(h->scale) != (blocks ? sid_f32_bits(micro_power(most)) : 0))
        return sid_fail(err, SID_E_CORRUPT, "scale is %g; it must be the largest of the blocks' scales",
                        (double)h->scale);
    for (uint64_t i = SID_HEADER_BYTES + blocks; i < codes; i++) bad |= payload[i];
    for (uint64_t i = end; i < p->sizes.payload; i++) bad |= payload[i];
    if (p->n % 2) bad |= (uint32_t)payload[end - 1] >> 4;
    if (bad) return sid_fail(err, SID_E_CORRUPT, "bytes around the codes are set; they must be 0");
    return SID_OK;
}

enum {
    TOGETHER = 8, /* payloads whose sum stays in registers */
    DECODE_BLOCKS = SID_DECODE_TILE / 16
};

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const micro_form f = micro_form_of(p);
    const uint32_t blocks = (uint32_t)micro_blocks(&f, len);
    const uint64_t codes = micro_codes_at(&f, p->n) + offset / 2;
    sid_codes from[TOGETHER];
    float scale[TOGETHER][DECODE_BLOCKS];
    for (uint32_t r = 0; r < g->count; r += TOGETHER) {
        const uint32_t count = g->count - r < TOGETHER ? g->count - r : TOGETHER;
        for (uint32_t i = 0; i < count; i++) {
            const uint8_t *payload = sid_payload(g, r + i), *code = payload + SID_HEADER_BYTES + (offset >> f.shift);
            const float group = ((const sid_header *)(const void *)payload)->scale;
            if (f.two)
                wide_scales(p, code, blocks, group, scale[i]);
            else
                for (uint32_t b = 0; b < blocks; b++) scale[i][b] = micro_power(code[b]);
            from[i] = (sid_codes){payload + codes, (const uint8_t *)scale[i]};
        }
        p->simd->add_fp4(from, count, out, len, f.shift);
    }
}

/* ---- registry ------------------------------------------------------------------------------------------------ */

static const char *const roundings[] = {"nearest", "stochastic", NULL};
static const sid_param params[] = {
    [MICRO_ROUNDING] =
        SID_CHOICE_ROW("rounding", roundings, 0, 1,
                       "nearest: to the nearest code, ties to even. stochastic: to one of the two neighbors at "
                       "random, so that the mean is right of what is not cut off."),
};

#define MICRO_CODEC(symbol, ...)                                                                                       \
    const sid_codec sid_codec_##symbol = {                                                                             \
        .info =                                                                                                        \
            {.name = #symbol, .family = "quantised", .traits = SID_STOCHASTIC, SID_PARAMETERS(params), __VA_ARGS__},   \
        SID_STAGES(plan_##symbol, begin, tile, finish, keep, sid_no_rule, check, sid_no_cursors, decode),              \
        .written = written}

MICRO_CODEC(mxfp4, .wire_id = 56, .paper = "OCP Microscaling Formats (MX) Specification 1.0, MXFP4",
            .doc = "4-bit floats (E2M1), and for each block of 32 elements a scale of 8 bits, a power of two.");
MICRO_CODEC(
    nvfp4, .wire_id = 57, .paper = "NVIDIA 2025 (Pretraining Large Language Models with NVFP4)",
    .doc = "4-bit floats (E2M1), for each block of 16 elements a scale in E4M3, and a float32 scale of the group.");
