/* lossless: every element as it is, in fewer bytes, because the exponents of a gradient's neighbours are close to one another.
 *
 * Frame of reference (Goldstein, Ramakrishnan and Shaft 1998) of exponents alone, with the exceptions of PFOR (Zukowski et al.
 * 2006): a block of 128 elements states its largest exponent, and each element in `bits` how far it is below that. Code 0 is an
 * exponent field of 0 (zeros, denormals), 1 the largest, 2 the next one below, and so on. The code of all ones says that the
 * exponent follows in the pool, a byte for each such element, in the order of the elements: those that are at least 2^6 (3
 * bits) or 2^14 (4 bits) smaller than their block's largest. Signs and mantissas travel as they are. Codes are stored bit by
 * bit, 1024 elements a plane, so that a warp's ballot is a word of them, and the number of a tile's exceptions is one of set bits.
 *
 * The pool has a fixed size, as every payload has. Where it is full, the rest of the exceptions is sent as zero and stays in
 * the memory: rule.cut is the first of them, so keep() knows what was sent. stats.count < stats.found says that it happened.
 * Only elements below 2^-5 or 2^-13 of their block's largest magnitude can be left over, never a large one.
 *
 * float16 and bfloat16 groups travel in their own dtype. What a memory has added is rounded to it, and the rest kept. */
#include "lossless.h"

#include <math.h>
#include <string.h>

enum {
    LOSSLESS_BITS,
    LOSSLESS_EXCEPTIONS
};

/* Between tiles. */
typedef struct progress {
    uint64_t used, left; /* exceptions in the pool; and those that it has no room for */
    uint64_t cut;
} progress;

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    const uint64_t n = p->n, tiles = lossless_tiles(n);
    const double share = p->codec_param[LOSSLESS_EXCEPTIONS] * (double)n;
    uint64_t cap = (uint64_t)ceil(share) + LOSSLESS_FLOOR;
    cap = cap < n ? cap : n;
    cap = cap < UINT32_MAX ? cap : UINT32_MAX; /* the tiles' places in the pool have 32 bits */
    lossless_form f = {.cap = (uint32_t)cap, .dtype = p->dtype, .bits = (uint32_t)p->codec_param[LOSSLESS_BITS]};
    _Static_assert(sizeof f <= sizeof p->derived, "SID_DERIVED_WORDS is too small");
    f.starts = SID_HEADER_BYTES + sid_round_up(lossless_blocks(n), 8);
    f.pool = f.starts + sid_round_up(4 * (tiles + 1), 8);
    f.planes = f.pool + sid_round_up(cap, 8);
    f.high = f.planes + lossless_plane_bytes(n, lossless_planes(&f));
    f.low = f.high + sid_round_up(n, 8);
    f.end = f.dtype == SID_F32 ? f.low + 2 * n : f.high + n;
    memcpy(p->derived, &f, sizeof f);
    p->k = p->cap = n;
    p->ruling.form = SID_RULES_BY_KEY;
    p->sizes.payload = sid_round_up(f.end, 64);
    *scratch = sizeof(progress);
    return SID_OK;
}

/* ---- a tile -------------------------------------------------------------------------------------------------- */

/* The largest number of a half dtype. */
static float largest(uint32_t dtype) { return dtype == SID_BF16 ? sid_bits_f32(0x7f7f0000u) : 65504.0f; }

/* The elements as they travel. */
static void bits_of(const sid_plan *p, uint32_t dtype, const float *x, uint32_t len, uint32_t *u) {
    SID_LINE uint16_t h[SID_TILE];
    if (dtype == SID_F32) {
        memcpy(u, x, 4ull * len);
        return;
    }
    p->simd->half_body(x, h, len, 1, largest(dtype), dtype == SID_BF16);
    p->simd->half_words(h, u, len, dtype == SID_BF16);
}
static void numbers_of(const sid_plan *p, uint32_t dtype, const uint32_t *u, uint32_t len, float *x) {
    SID_LINE uint16_t h[SID_TILE];
    if (dtype != SID_F16) {
        memcpy(x, u, 4ull * len);
        return;
    }
    for (uint32_t i = 0; i < len; i++) h[i] = (uint16_t)((u[i] >> 16 & 0x8000u) | (u[i] >> 13 & 0x7fffu));
    p->simd->f16_to_f32(h, x, len);
}
/* The largest exponents of its blocks. */
static void tops_of(const sid_plan *p, const uint32_t *u, uint32_t len, uint8_t *top) {
    uint32_t key[LOSSLESS_TOPS];
    p->simd->block_keys((const float *)(const void *)u, len, LOSSLESS_BLOCK, key);
    for (uint32_t b = 0; b < lossless_blocks(len); b++) top[b] = (uint8_t)(key[b] >> 23);
}
/* Sets those exceptions to 0 that are not among the first `room`; returns how many, and where the first one is. */
static uint32_t leave_over(uint32_t *u, uint32_t len, const sid_parts *of, uint64_t room, uint32_t *first) {
    const uint32_t all = (1u << of->bits) - 1;
    uint32_t left = 0;
    for (uint32_t i = 0; i < len; i++) {
        if (sid_exponent_code(u[i] >> 23 & 255, of->top[i / LOSSLESS_BLOCK], all) < all || room-- > 0) continue;
        room = 0;
        if (!left++) *first = i;
        u[i] = 0;
    }
    return left;
}
static sid_parts parts_of(const lossless_form *f, uint8_t *payload, uint64_t offset) {
    const uint32_t planes = lossless_planes(f);
    return (sid_parts){.top = payload + SID_HEADER_BYTES + offset / LOSSLESS_BLOCK,
                       .plane = payload + f->planes + offset / 8 * planes,
                       .high = payload + f->high + offset,
                       .low = f->dtype == SID_F32 ? payload + f->low + 2 * offset : NULL,
                       .block = LOSSLESS_BLOCK,
                       .planes = planes,
                       .bits = f->bits};
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

static void begin(sid_pass *w) {
    progress *t = w->scratch;
    *t = (progress){.cut = w->plan->n};
}

static void tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const lossless_form f = lossless_form_of(p);
    progress *t = w->scratch;
    SID_LINE uint32_t u[SID_TILE];
    uint8_t far[SID_TILE + 16];
    const sid_parts to = parts_of(&f, w->payload, offset);
    const uint32_t start = (uint32_t)t->used;
    bits_of(p, f.dtype, acc, len, u);
    tops_of(p, u, len, to.top);
    uint32_t count = p->simd->split(u, len, &to, far);
    if (count > f.cap - t->used) {
        uint32_t first = 0;
        t->left += leave_over(u, len, &to, f.cap - t->used, &first);
        if (t->cut == p->n) t->cut = offset + first;
        count = p->simd->split(u, len, &to, far);
    }
    memcpy(w->payload + f.pool + t->used, far, count);
    memcpy(w->payload + f.starts + 4 * (offset / SID_TILE), &start, 4);
    t->used += count;
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const lossless_form f = lossless_form_of(p);
    const progress *t = w->scratch;
    const uint64_t tops = SID_HEADER_BYTES + lossless_blocks(p->n), starts = f.starts + 4 * lossless_tiles(p->n);
    const uint32_t used = (uint32_t)t->used;
    sid_header *h = (sid_header *)(void *)w->payload;
    memset(w->payload + tops, 0, f.starts - tops);
    memset(w->payload + starts, 0, f.pool - starts);
    memcpy(w->payload + starts, &used, 4);
    memset(w->payload + f.pool + used, 0, f.planes - f.pool - used);
    if (f.dtype == SID_F32) memset(w->payload + f.high + p->n, 0, f.low - f.high - p->n);
    memset(w->payload + f.end, 0, p->sizes.payload - f.end);
    h->count = p->n - t->left;
    h->flags = 0;
    h->scale = 0;
    w->state->rule = (sid_rule){.cut = t->cut, .flags = f.dtype == SID_F32 ? 0u : (uint32_t)SID_FLAG_HALF};
    w->stats.found = p->n;
    return SID_DONE;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const lossless_form f = lossless_form_of(p);
    SID_LINE uint32_t u[SID_TILE];
    SID_LINE float sent[SID_TILE];
    if (s->rule.key == SID_KEY_NONE) return;
    if (f.dtype != SID_F32 && s->rule.cut >= offset + len) { /* all of them were sent */
        p->simd->half_keep(acc, len, 0, 1, 1, largest(f.dtype), f.dtype == SID_BF16);
        return;
    }
    bits_of(p, f.dtype, acc, len, u);
    if (s->rule.cut < offset + len) {
        uint8_t top[LOSSLESS_TOPS];
        const uint32_t all = lossless_far(&f);
        const uint32_t from = s->rule.cut > offset ? (uint32_t)(s->rule.cut - offset) : 0;
        tops_of(p, u, len, top);
        for (uint32_t i = from; i < len; i++)
            if (sid_exponent_code(u[i] >> 23 & 255, top[i / LOSSLESS_BLOCK], all) == all) u[i] = 0;
    }
    numbers_of(p, f.dtype, u, len, sent);
    for (uint32_t i = 0; i < len; i++) acc[i] -= sent[i];
}

static int sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key) {
    const sid_rule *rule = &s->rule;
    (void)p;
    *key = rule->key;
    return rule->key == SID_KEY_NONE || (!rule->flags && rule->cut >= offset + len);
}

static void rule_none(sid_rule *rule) { *rule = (sid_rule){.key = SID_KEY_NONE}; }

/* ---- decode -------------------------------------------------------------------------------------------------- */

/* The exceptions of a tile are as many as its codes say, and each of them is below what codes reach. */
static uint32_t wrong_tile(const lossless_form *f, const sid_parts *t, uint32_t len, const uint8_t *far,
                           uint32_t count) {
    const uint32_t stride = lossless_stride(len), all = lossless_far(f);
    uint32_t wrong = 0, seen = 0;
    for (uint32_t k = 0; len % 64 && k < t->planes; k++) { /* bits of elements that do not exist */
        uint64_t last;
        memcpy(&last, t->plane + k * stride + stride - 8, 8);
        wrong |= last >> (len % 64) != 0;
    }
    for (uint32_t b = 0; b < lossless_blocks(len); b++) {
        const uint32_t to = (b + 1) * LOSSLESS_BLOCK / 8 < stride ? (b + 1) * LOSSLESS_BLOCK / 8 : stride;
        const uint32_t top = t->top[b], before = seen;
        uint32_t low = 0;
        wrong |= top > lossless_largest(f->dtype);
        for (uint32_t i = b * LOSSLESS_BLOCK / 8; i < to; i += 8) {
            uint64_t p[4] = {0}, far_ones = ~0ull;
            for (uint32_t k = 0; k < f->bits; k++) {
                memcpy(&p[k], t->plane + k * stride + i, 8);
                far_ones &= p[k];
            }
            seen += (uint32_t)__builtin_popcountll(far_ones);
            /* codes above `top` would be exponents of 0 and less */
            for (uint32_t c = top + 1; c < all; c++) {
                uint64_t these = ~0ull;
                for (uint32_t k = 0; k < f->bits; k++) these &= c >> k & 1 ? p[k] : ~p[k];
                low |= these != 0;
            }
        }
        wrong |= low;
        for (uint32_t j = before; j < seen && j < count; j++) wrong |= !far[j] || far[j] + all - 1 > top;
    }
    return wrong | (seen != count);
}

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const lossless_form f = lossless_form_of(p);
    const uint64_t tops = SID_HEADER_BYTES + lossless_blocks(p->n), starts = f.starts + 4 * (lossless_tiles(p->n) + 1);
    uint32_t bad = 0, start = 0, next;
    if (h->count > p->n || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE) || sid_f32_bits(h->scale))
        return sid_fail(err, SID_E_CORRUPT,
                        "count %llu, flags %08x and scale %g do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags, (double)h->scale);
    memcpy(&next, payload + f.starts, 4);
    bad |= next;
    for (uint64_t offset = 0; offset < p->n && !bad; offset += SID_TILE, start = next) {
        const uint32_t len = p->n - offset < SID_TILE ? (uint32_t)(p->n - offset) : SID_TILE;
        const sid_parts t = parts_of(&f, (uint8_t *)(uintptr_t)payload, offset);
        memcpy(&next, payload + f.starts + 4 * (offset / SID_TILE + 1), 4);
        bad |= next < start || next > f.cap;
        if (!bad) bad |= wrong_tile(&f, &t, len, payload + f.pool + start, next - start);
    }
    if (bad) return sid_fail(err, SID_E_CORRUPT, "exponents or their number are such as no encoder writes");
    if (h->count < p->n && start < f.cap)
        return sid_fail(err, SID_E_CORRUPT, "count is %llu of %llu, although there was room for %u exceptions more",
                        (unsigned long long)h->count, (unsigned long long)p->n, f.cap - start);
    for (uint64_t i = tops; i < f.starts; i++) bad |= payload[i];
    for (uint64_t i = starts; i < f.pool; i++) bad |= payload[i];
    for (uint64_t i = f.pool + start; i < f.planes; i++) bad |= payload[i];
    for (uint64_t i = f.high + p->n; i < f.low && f.dtype == SID_F32; i++) bad |= payload[i];
    for (uint64_t i = f.end; i < p->sizes.payload; i++) bad |= payload[i];
    if (bad) return sid_fail(err, SID_E_CORRUPT, "bytes between the parts are set; they must be 0");
    return SID_OK;
}

static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const lossless_form f = lossless_form_of(p);
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *payload = sid_payload(g, r);
        for (uint32_t at = 0; at < len; at += SID_TILE) {
            const uint32_t take = len - at < SID_TILE ? len - at : SID_TILE;
            const sid_parts t = parts_of(&f, (uint8_t *)(uintptr_t)payload, offset + at);
            uint32_t start;
            memcpy(&start, payload + f.starts + 4 * ((offset + at) / SID_TILE), 4);
            p->simd->join(&t, take, payload + f.pool + start, r > 0, out + at); /* not 0 + x, which would lose -0 */
        }
    }
}

/* ---- registry ------------------------------------------------------------------------------------------------ */

static const sid_param params[] = {
    [LOSSLESS_BITS] =
        SID_NUMBER_ROW("bits", SID_INT, 4, 3, 4, "bits",
                       "For an exponent. The codes have zero, and exponents from the largest of each 128 elements "
                       "down to 2^-5 (3 bits) or 2^-13 (4) of it. 3 is "
                       "smaller where neighbors are of similar size, as in recurrent networks."),
    [LOSSLESS_EXCEPTIONS] = SID_NUMBER_ROW(
        "exceptions", SID_REAL, .05, 0, 1, "of n",
        "Room for the exponents of smaller elements, a byte each, and for 64 more. What has no "
        "room, always below 2^-5 (3 bits) or 2^-13 (4) of the largest of its 128, stays in the memory for "
        "later steps. With the default a payload is at most 254 bytes larger than its elements, and from "
        "480 elements on (float16: 3616) no larger."),
};

const sid_codec sid_codec_lossless = {
    .info =
        {.name = "lossless",
         .family = "dense",
         .paper = "Goldstein et al. 1998 (frame of reference) and Zukowski et al. 2006 (PFOR), of exponents alone",
         .doc = "Every element exactly: sign, mantissa, and in 4 bits how far its exponent is below the largest of 128 "
                "elements. Elements too small for these bits may arrive some steps late. 89 % of the bytes of float32, "
                "78 % of bfloat16.",
         SID_PARAMETERS(params),
         .wire_id = 4},
    SID_STAGES(plan, begin, tile, finish, keep, rule_none, check, sid_no_cursors, decode),
    .sent_from = sent_from,
};
