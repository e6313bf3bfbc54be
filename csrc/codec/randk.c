/* Rand-K: k elements drawn at random, each with probability k/n (Stich et al. 2018; MergeComp's Rand-k).
 * Their indices follow from the payload's header, so that only values travel.
 *     randk      one draw for all ranks: the bodies are the same elements' values and are summed by all-reduce, divided
 *                by the world size as in linear.c
 *     randk-own  each rank draws its own: gathered, and up to world * k elements move in a step
 *
 * The group is cut into blocks of B = 4096 elements. With r drawn from [0, n), the block that begins at element a has the
 * body's entries from floor((k a + r) / n) on, up to those of the next one; which elements these are is a uniform choice
 * among all subsets of that size. So exactly k elements are drawn without replacement, and
 * each with probability exactly k/n, since the mean of floor((k a + r) / n) over r is k a / n. Mean, variance, and hence the
 * contraction 1 - k/n and the bound n/k - 1 of the unbiased form, are those of a uniform k-subset of the whole group. What
 * differs is the joint probability of two elements: (k/n)^2 to within 1/(k B/n) of it. In return a draw costs one random
 * word for each element sent and none for the others, nothing is sorted, and nothing leaves the cache on the way.
 *
 * Within a block the subset is Floyd's: for j = len - c .. len - 1 take t = a random one of 0 .. j, or j if t has been taken,
 * and the body has them in that order; the complement, ascending, where c is more than half of len. */
#include <string.h>

#include "linear.h"
#include "sparse.h"

enum {
    SCALING = SPARSE_INDICES
};
enum {
    BLOCK = SID_DECODE_TILE
};
_Static_assert((int)BLOCK == (int)SID_MAX_TILE, "encode and decode see the same blocks");
#define OFFSET_AT (1ull << 62) /* the block of random words that r comes from: beyond every element's */
__extension__ typedef unsigned __int128 wide;

static const char *const value_names[] = {"f32", "f16", NULL}, *const scaling_names[] = {"auto", "off", NULL};
static const sid_param params[] = {
    SPARSE_DENSITY_ROW,
    SID_CHOICE_ROW("values", value_names, SID_VALUES_F32, SID_VALUES_F16,
                   "Format of the values. The rounding error of float16 stays in the residual."),
    SID_CHOICE_ROW(
        "scaling", scaling_names, 0, 1,
        "auto: values are multiplied by n/k, which makes them unbiased, unless a memory keeps what is not sent. "
        "off: values are sent as they are."),
};

static int is_linear(const sid_plan *p) { return (p->codec->info.traits & SID_LINEAR) != 0; }
static int is_half(const sid_plan *p) { return p->codec_param[SPARSE_VALUES] == 1; }
static sid_dtype body_dtype(const sid_plan *p) { return is_half(p) ? SID_F16 : SID_F32; }

/* n/k or 1. A memory that subtracts what was sent, or what all ranks made of it, would be left with -(n/k - 1) times that,
 * and diverge: there it is never n/k. */
static float multiplier(const sid_plan *p) {
    const int keeps = p->memory->info.traits & SID_FEEDBACK || p->memory->received;
    return p->codec_param[SCALING] == 0 && !keeps && p->k ? (float)((double)p->n / (double)p->k) : 1.0f;
}

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)scratch, (void)err;
    sparse_k(p);
    p->cap = p->k;
    p->tile = BLOCK;
    p->ruling = (sid_ruling){.form = SID_RULES_BY_SHARE};
    if (is_linear(p)) {
        p->sizes.body_count = p->k;
        p->sizes.body_dtype = body_dtype(p);
    }
    p->sizes.payload = sid_linear_bytes(p->k, (unsigned)sid_dtype_size(body_dtype(p)));
    return SID_OK;
}

/* ---- which elements ----------------------------------------------------------------------------------------------- */

typedef struct block {
    uint64_t first; /* entry of the body */
    uint32_t count;
    uint16_t in[BLOCK + 64]; /* which of the block's elements, in the body's order */
} block;

static uint64_t entry_at(const sid_plan *p, uint64_t r, uint64_t offset) {
    return (uint64_t)(((wide)p->k * offset + r) / p->n);
}

static void choose(const sid_plan *p, const sid_draw *d, uint64_t offset, uint32_t len, block *b) {
    uint32_t word[BLOCK / 2], start[4];
    uint8_t taken[BLOCK] = {0}; /* bytes: of bits, one word's store would often hold up the next load */
    sid_draw_block(d, OFFSET_AT, start);
    const uint64_t r = (uint64_t)(((wide)(start[0] | (uint64_t)start[1] << 32) * p->n) >> 64);
    b->first = entry_at(p, r, offset);
    b->count = (uint32_t)(entry_at(p, r, offset + len) - b->first);
    const uint32_t rest = 2 * b->count > len, take = rest ? len - b->count : b->count;
    p->simd->draw32(d, offset, take, word);
    for (uint32_t i = 0; i < take; i++) {
        const uint32_t j = len - take + i, t = (uint32_t)((uint64_t)word[i] * (j + 1) >> 32);
        const uint32_t one = t ^ ((t ^ j) & (0u - taken[t])); /* no branch to guess */
        taken[one] = 1;
        b->in[i] = (uint16_t)one;
    }
    if (!rest) return;
    uint32_t c = 0;
    for (uint32_t i = 0; i < len; i++) {
        b->in[c] = (uint16_t)i;
        c += !taken[i];
    }
}

static void take(const block *b, const float *acc, float *x) {
    for (uint32_t i = 0; i < b->count; i++) x[i] = acc[b->in[i]];
}

/* ---- encode ------------------------------------------------------------------------------------------------------- */

static void begin(sid_pass *w) {
    if (is_linear(w->plan)) w->draw.salt = sid_salt(w->step->seed, SID_COMMON);
}

/* Largest magnitude that a body carries: as linear.c's, where bodies are summed or multiplied. */
static float limit(const sid_plan *p, float s, float times) {
    const int one_rank = s == 1.0f;
    if (is_half(p)) return linear_limit(SID_F16, linear_inverse(s), 0) / times;
    return one_rank && times == 1.0f ? 0x1.fffffep127f : sid_bits_f32(0x7f7c0000u) / times;
}

/* body = round(clamp(x) * s * times); x is changed */
static void write_body(const sid_plan *p, float *x, float s, void *body, uint64_t offset, uint32_t len) {
    const float times = multiplier(p);
    p->simd->clamp(x, x, len, limit(p, s, times));
    if (!is_half(p)) {
        p->simd->scale(x, (float *)body + offset, len, s * times);
        return;
    }
    p->simd->scale(x, x, len, s * times);
    sid_store(p->simd, SID_F16, body, offset, len, x);
}

static float divisor(const sid_pass *w) { return is_linear(w->plan) ? 1.0f / (float)w->step->world : 1.0f; }

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    block b;
    float x[BLOCK];
    choose(w->plan, &w->draw, offset, len, &b);
    take(&b, acc, x);
    write_body(w->plan, x, divisor(w), w->payload + SID_HEADER_BYTES, b.first, b.count);
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint64_t used = SID_HEADER_BYTES + sid_dtype_size(body_dtype(p)) * p->k;
    /* A value that is not finite may be at an element that is not drawn. A sum of bodies shows it by NaN throughout. */
    if (w->nonfinite && is_linear(p))
        for (uint64_t i = 0; i < p->k; i++) {
            const float nan = sid_bits_f32(0x7fc00000u);
            sid_store(p->simd, body_dtype(p), w->payload + SID_HEADER_BYTES, i, 1, &nan);
        }
    memset(w->payload + used, 0, p->sizes.payload - used);
    h->count = p->k;
    h->flags = is_half(p) ? (uint32_t)SID_FLAG_HALF : 0u;
    h->scale = is_linear(p) ? divisor(w) : multiplier(p);
    w->state->rule = (sid_rule){.scale = divisor(w), .inverse = is_linear(p) ? (float)w->step->world : 1.0f};
    w->stats.found = p->k;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &s->rule;
    block b;
    float x[BLOCK], body[BLOCK];
    if (rule->scale == 0) return;
    for (uint32_t i = 0; i < len; i += 16) __builtin_prefetch(acc + i, 1); /* in order, while elements are drawn */
    choose(p, &s->draw, offset, len, &b);
    take(&b, acc, x);
    write_body(p, x, rule->scale, body, 0, b.count);
    p->simd->scale(sid_load(p->simd, body_dtype(p), body, 0, b.count, x), x, b.count, rule->inverse);
    for (uint32_t i = 0; i < b.count; i++) acc[b.in[i]] -= x[i];
}

/* ---- decode ------------------------------------------------------------------------------------------------------- */

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint64_t used = SID_HEADER_BYTES + sid_dtype_size(body_dtype(p)) * p->k;
    if (h->count != p->k)
        return sid_fail(err, SID_E_CORRUPT, "count is %llu; the plan's k is %llu", (unsigned long long)h->count,
                        (unsigned long long)p->k);
    if ((h->flags & ~(uint32_t)SID_FLAG_NONFINITE) != (is_half(p) ? (uint32_t)SID_FLAG_HALF : 0u))
        return sid_fail(err, SID_E_CORRUPT, "flags are %08x, which this plan does not write", h->flags);
    if (is_linear(p)) return linear_check_scale(h, err);
    if (h->scale != multiplier(p))
        return sid_fail(err, SID_E_CORRUPT, "scale is %g; the plan's is %g", (double)h->scale, (double)multiplier(p));
    for (uint64_t i = used; i < p->sizes.payload; i++)
        if (payload[i]) return sid_fail(err, SID_E_CORRUPT, "bytes after the last value are set; they must be 0");
    return SID_OK;
}

static void open_all(sid_gather *g) {
    if (is_linear(g->plan)) linear_open(g);
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const sid_dtype d = body_dtype(p);
    block b;
    float buf[BLOCK];
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *payload = sid_payload(g, r), *body = payload + SID_HEADER_BYTES;
        const sid_header *h = (const sid_header *)(const void *)payload;
        const sid_draw draw = {h->salt, h->group, h->step};
        if (is_linear(p)) {
            const float *first = sid_load(p->simd, d, body, 0, 1, buf);
            if (sid_key(*first) > SID_KEY_INF) /* some rank's gradient was not finite */
                for (uint32_t i = 0; i < len; i++) out[i] = sid_bits_f32(0x7fc00000u);
        }
        choose(p, &draw, offset, len, &b);
        const float *x = sid_load(p->simd, d, body, b.first, b.count, buf);
        if (r == 0 && is_linear(p)) /* not 0 + x, which would lose the sign of -0 */
            for (uint32_t i = 0; i < b.count; i++) out[b.in[i]] = x[i];
        else
            for (uint32_t i = 0; i < b.count; i++) out[b.in[i]] += x[i];
    }
}

#define RANDK_CODEC(symbol, ...)                                                                                       \
    const sid_codec sid_codec_##symbol = {                                                                             \
        .info = {.family = "sparse", SID_PARAMETERS(params), __VA_ARGS__},                                             \
        SID_STAGES(plan, begin, tile, finish, keep, sid_no_rule, check, open_all, decode)}

RANDK_CODEC(randk, .name = "randk", .wire_id = 22,
            .paper = "Stich et al. 2018 (rand_k), with the same draw on every rank",
            .traits = SID_LINEAR | SID_STOCHASTIC | SID_SPARSE | SID_UNBIASED,
            .doc = "k elements drawn at random, the same on every rank, averaged by all-reduce. No indices are sent.");
RANDK_CODEC(randk_own, .name = "randk-own", .wire_id = 23,
            .paper = "Stich et al. 2018 (rand_k), with a draw for each rank; MergeComp (Wang et al. 2022), Rand-k",
            .traits = SID_STOCHASTIC | SID_SPARSE | SID_UNBIASED,
            .doc = "k elements drawn at random, different ones on each rank, gathered. No indices are sent.");
