/* none, fp16, bf16: every element travels, in the group's own dtype or in half. Bodies may be summed (all-reduce), so
 * an encoder divides by the world size before it rounds: the sum is the mean.
 *     body = round(clamp(acc) * s), s = 1/world in float32       sent = body * world       kept = acc - sent
 * fp16 and bf16 clamp at the format's largest value, with several ranks a little below it (linear_limit), so that the
 * roundings of the sum over the ranks do not carry a finite mean into Inf; what is cut off is kept.
 *
 * They round to nearest, or at random to one of the two neighbours of acc * s, by 16 bits an element (bits.h), so that a
 * body is right on average. Then it may be a whole step too large instead of half a step, so they clamp a step lower.
 * keep() draws the same bits again. */
#include "linear.h"

#include <string.h>

enum {
    LINEAR_ROUNDING /* parameter of fp16, bf16 */
};

static sid_dtype body_dtype(const sid_plan *p) { return p->sizes.body_dtype; }

static sid_status plan_as(sid_plan *p, sid_dtype body) {
    p->k = p->cap = p->n;
    p->ruling = (sid_ruling){.form = SID_RULES_BY_SHARE};
    p->sizes.body_dtype = body;
    p->sizes.body_count = p->n;
    p->sizes.payload = sid_linear_bytes(p->n, (unsigned)sid_dtype_size(body));
    return SID_OK;
}

static sid_status plan_none(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_as(p, p->dtype);
}
static sid_status plan_half(sid_plan *p, sid_dtype body) {
    const linear_form f = {p->codec_param[LINEAR_ROUNDING] > 0};
    _Static_assert(sizeof f <= sizeof p->derived, "SID_DERIVED_WORDS is too small");
    memcpy(p->derived, &f, sizeof f);
    return plan_as(p, body);
}
static sid_status plan_fp16(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_half(p, SID_F16);
}
static sid_status plan_bf16(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    return plan_half(p, SID_BF16);
}

static int rounds(const sid_plan *p) { return !(p->codec->info.traits & SID_LOSSLESS); }

static void begin(sid_pass *w) {
    if (!linear_form_of(w->plan).draws) w->draw = (sid_draw){0, 0, 0};
}

/* Random bits of a tile. */
typedef struct draws {
    SID_LINE uint16_t half[SID_TILE];
} draws;
static const uint16_t *draw(const sid_plan *p, const sid_draw *d, uint64_t offset, uint32_t len, draws *to) {
    p->simd->draw16(d, offset, len, to->half);
    return to->half;
}

static float limit(const sid_plan *p, float s) {
    return linear_limit(body_dtype(p), linear_inverse(s), linear_form_of(p).draws);
}

/* to = acc * s in the body's dtype, where nothing is rounded but by the product. */
static void scale_body(const sid_plan *p, const float *acc, float s, void *to, uint64_t offset, uint32_t len) {
    const sid_dtype d = body_dtype(p);
    SID_LINE float x[SID_TILE];
    if (d == SID_F32) {
        p->simd->scale(acc, (float *)to + offset, len, s);
    } else {
        p->simd->scale(acc, x, len, s);
        sid_store(p->simd, d, to, offset, len, x);
    }
}

/* The number of ranks whose bodies are summed; each body is divided by it first. */
static float together(const sid_pass *w) { return w->plan->alone ? 1.0f : (float)w->step->world; }

/* Elements from `offset` on of clamp(acc) * s, rounded to the body's dtype; what is finite stays finite. */
static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const float s = 1.0f / together(w);
    const int bf16 = body_dtype(p) == SID_BF16;
    uint16_t *const half = (uint16_t *)(void *)(w->payload + SID_HEADER_BYTES) + offset;
    draws room;
    if (!rounds(p))
        scale_body(p, acc, s, w->payload + SID_HEADER_BYTES, offset, len);
    else if (linear_form_of(p).draws)
        p->simd->half_body_drawn(acc, half, draw(p, &w->draw, offset, len, &room), len, s, limit(p, s), bf16);
    else
        p->simd->half_body(acc, half, len, s, limit(p, s), bf16);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t used = SID_HEADER_BYTES + sid_dtype_size(body_dtype(p)) * p->n;
    memset(w->payload + used, 0, p->sizes.payload - used);
    h->count = p->n;
    h->flags = 0;
    h->scale = 1.0f / together(w);
    w->state->rule = (sid_rule){.scale = h->scale, .inverse = together(w)};
    w->stats.found = p->n;
    w->stats.threshold = h->scale;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *state, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &state->rule;
    const float s = rule->scale, inverse = rule->inverse;
    const int bf16 = body_dtype(p) == SID_BF16;
    SID_LINE float sent[SID_TILE], body[SID_TILE];
    draws room;
    if (s == 0) return;
    if (rounds(p)) {
        if (linear_form_of(p).draws)
            p->simd->half_keep_drawn(acc, draw(p, &state->draw, offset, len, &room), len, s, inverse, limit(p, s),
                                     bf16);
        else
            p->simd->half_keep(acc, len, 0, s, inverse, limit(p, s), bf16);
        return;
    }
    scale_body(p, acc, s, body, 0, len);
    p->simd->scale(sid_load(p->simd, body_dtype(p), body, 0, len, sent), sent, len, inverse);
    for (uint32_t i = 0; i < len; i++) acc[i] -= sent[i];
}

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    if (h->salt && !linear_form_of(p).draws)
        return sid_fail(err, SID_E_CORRUPT,
                        "salt is %08x; it must be 0, because rounding to nearest draws no random bits", h->salt);
    return linear_check(h, p->n, err);
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    SID_LINE float buf[SID_DECODE_TILE];
    for (uint32_t r = 0; r < g->count; r++) {
        const float *x = sid_load(p->simd, body_dtype(p), sid_payload(g, r) + SID_HEADER_BYTES, offset, len, buf);
        if (r == 0)
            memcpy(out, x, 4ull * len); /* not 0 + x, which would lose the sign of -0 */
        else
            for (uint32_t i = 0; i < len; i++) out[i] += x[i];
    }
}

static const char *const roundings[] = {"nearest", "stochastic", NULL};
static const sid_param params[] = {
    [LINEAR_ROUNDING] = SID_CHOICE_ROW(
        "rounding", roundings, 0, 1,
        "nearest: to the nearest number, ties to even. stochastic: to one of the two neighbors at random, so that what "
        "a "
        "rank sends is right on average. An all-reduce adds up in 16 bits, rounding to nearest; two-shot adds up in "
        "float32, and its mean is right, too.")};

#define LINEAR_CODEC(symbol, ...)                                                                                      \
    const sid_codec sid_codec_##symbol = {                                                                             \
        .info = {.family = "dense", __VA_ARGS__},                                                                      \
        SID_STAGES(plan_##symbol, begin, tile, finish, keep, sid_no_rule, check, linear_open, decode)}

LINEAR_CODEC(
    none, .name = "none", .memory = "none", .paper = "", .wire_id = 1,
    .traits = SID_LINEAR | SID_LOSSLESS | SID_UNBIASED,
    .doc = "Uncompressed: every element in the gradient's own dtype, averaged by all-reduce as plain DDP does.");
LINEAR_CODEC(
    fp16, .name = "fp16", .paper = "", .wire_id = 2, .traits = SID_LINEAR | SID_STOCHASTIC, SID_PARAMETERS(params),
    .doc = "Every element as IEEE half, averaged by all-reduce: half the bytes. Magnitudes above 65504 saturate.");
LINEAR_CODEC(
    bf16, .name = "bf16", .paper = "", .wire_id = 3, .traits = SID_LINEAR | SID_STOCHASTIC, SID_PARAMETERS(params),
    .doc = "Every element as bfloat16, averaged by all-reduce: half the bytes, float32's range, 8 bits of precision.");
