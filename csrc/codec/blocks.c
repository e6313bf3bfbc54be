#include "blocks.h"

#include "packed.h"
#include "sparse_form.h"

enum {
    SLACK = SID_UNPACK_SLACK
};
/* In scratch; then the indices of what is sent, where they are to be packed. */
typedef struct blocks_work {
    uint64_t sent;
    uint32_t least;     /* the smallest key sent */
    uint32_t low, held; /* of the block that the pass is in: captured are `held` keys from `low` on, */
    uint32_t few;       /* so many of them in the last tile */
    SID_LINE float val[BLOCKS_MOST + SLACK];
    SID_LINE uint16_t idx[BLOCKS_MOST + SLACK]; /* in the block */
} blocks_work;
_Static_assert(sizeof(blocks_form) <= sizeof((sid_plan *)0)->derived, "SID_DERIVED_WORDS is too small");
_Static_assert(sizeof(blocks_rule) == BLOCKS_WORDS * sizeof(float), "as the plan asks for");
_Static_assert((int)SID_DECODE_TILE % (int)BLOCKS_MOST == 0, "decode sees whole blocks");

static uint16_t *indices_of(const sid_pass *w) { return (uint16_t *)(void *)((blocks_work *)w->scratch + 1); }
static blocks_rule *rules_of(const sid_plan *p, const sid_state *s) { return (blocks_rule *)(void *)sid_extra(p, s); }

static int stored(const sid_plan *p) { return p->memory->vectors && p->kept == SID_F32; }

sid_status blocks_plan(sid_plan *p, double size, uint64_t *scratch, sid_error *err) {
    const double density = p->codec_param[SPARSE_DENSITY];
    blocks_form f = {
        .size = (uint32_t)size, .width = sparse_width_of(sparse_values_of(p)), .packed = (uint32_t)sparse_packed(p)};
    if (!(size >= (double)BLOCKS_LEAST) || f.size & (f.size - 1))
        return sid_fail(err, SID_E_PARAM,
                        "%s: block = %g must be 0, for the whole group, or a power of two from %d to %d, such as 4096",
                        p->codec->info.name, size, BLOCKS_LEAST, BLOCKS_MOST);
    while (1u << f.shift < f.size) f.shift++;
    f.count = (p->n + f.size - 1) / f.size;
    f.k = blocks_share(density, f.size);
    f.last_k = f.count ? blocks_share(density, (uint32_t)(p->n - (f.count - 1) * f.size)) : 0;
    const uint64_t whole = f.count ? f.count - 1 : 0;
    p->k = p->cap = whole * f.k + f.last_k;
    f.value_at = f.packed ? sid_packed_value_at(p->n, p->cap)
                          : sid_round_up(blocks_index_at(&f, whole) + blocks_bytes(f.last_k, f.shift), 8);
    f.code_at = f.value_at + sid_round_up(4 * f.count, 8);
    const uint64_t end = f.width ? blocks_code_at(&f, whole) + blocks_bytes(f.last_k, f.width)
                                 : f.value_at + sid_sparse_value_bytes(p->cap, sparse_values_of(p));
    memcpy(p->derived, &f, sizeof f);
    p->ruling = (sid_ruling){.form = SID_RULES_BY_KEY};
    /* Tiles of the plain length, whose arithmetic and loads overlap. But where a block captured too little, it is read again, and only a
     * vector of floats in the state has it by then. */
    if (f.size > p->tile && !stored(p)) p->tile = f.size;
    p->extra = f.count * BLOCKS_WORDS;
    p->sizes.payload = sid_round_up(end, 64);
    *scratch = sizeof(blocks_work) + (f.packed ? 2 * p->cap + SLACK : 0);
    return SID_OK;
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

void blocks_begin(sid_pass *w) {
    blocks_work *own = w->scratch;
    own->sent = 0;
    own->least = SID_KEY_NONE;
    own->few = SID_TILE;
}

/* Captures candidates from elements that start at `inside` in their block. */
static void capture(const sid_simd *v, blocks_work *own, const float *acc, uint32_t inside, uint32_t len) {
    for (uint32_t i = 0; i < len; i += SID_TILE) {
        const uint32_t some = len - i < SID_TILE ? len - i : SID_TILE;
        own->few = v->capture(acc + i, some, own->low, (uint16_t)(inside + i), own->idx + own->held,
                              own->val + own->held, own->few);
        own->held += own->few;
    }
}

/* The k-th largest key of candidates from `low` on. Of many, first those near the last step's key are set apart. */
static uint32_t kth_of(const sid_simd *v, const float *val, uint32_t count, uint32_t k, uint32_t low, uint32_t high,
                       uint32_t *above) {
    enum {
        MANY = 256
    };
    SID_LINE union {
        uint32_t key[BLOCKS_MOST + SLACK];
        float size[BLOCKS_MOST + SLACK];
    } some;
    if (count >= MANY && high > low) {
        uint64_t over;
        const uint64_t n = v->band(val, count, low, high, some.key, &over);
        if (k > over && k <= over + n) {
            const uint32_t key = v->kth_key(some.size, (uint32_t)n, k - (uint32_t)over, low, above);
            *above += (uint32_t)over;
            return key;
        }
    }
    return v->kth_key(val, count, k, low, above);
}

/* The k largest, of equal ones the first; the rule is settled. */
static void select_block(const sid_simd *v, blocks_work *own, const float *acc, uint32_t len, uint32_t k,
                         blocks_rule *r) {
    uint32_t last, spread, above;
    blocks_predict(r, &last, &spread);
    for (uint32_t step = spread; own->held < k;) { /* the prediction was wrong; of all there are `len` */
        step += step < SID_KEY_INF ? step : 0;
        own->low = own->low > step ? own->low - step : 0;
        own->held = 0;
        capture(v, own, acc, 0, len);
    }
    const uint32_t key = kth_of(v, own->val, own->held, k, own->low, spread ? last + spread : 0, &above);
    uint32_t take = k - above, end = 0; /* ties; end: candidates before the last of them that is sent */
    *r = (blocks_rule){.key = key, .cut = len, .spread = sid_spread(spread, last, key)};
    const uint32_t c = (uint32_t)v->filter(own->idx, own->val, own->held, key, own->idx, own->val, own->held);
    if (c == k) return;
    while (take) take -= sid_key(own->val[end++]) == key;
    r->cut = (uint32_t)own->idx[end - 1] + 1;
    v->filter(own->idx + end, own->val + end, c - end, key + 1, own->idx + end, own->val + end, c - end);
}

static void write_block(sid_pass *w, const blocks_form *f, uint64_t b, uint32_t k, blocks_rule *r) {
    const sid_plan *p = w->plan;
    blocks_work *own = w->scratch;
    const uint16_t *const idx = own->idx;
    float *const val = own->val;
    const uint64_t first = b * f->k;
    if (f->packed) {
        const uint16_t at = (uint16_t)(b * f->size % SID_WIRE_TILE);
        uint16_t *const to = indices_of(w) + first;
        for (uint32_t i = 0; i < k; i++) to[i] = (uint16_t)(at + idx[i]);
    } else {
        uint8_t bytes[2 * BLOCKS_MOST + 8];
        p->simd->pack_low(idx, k, f->shift, bytes);
        memcpy(w->payload + blocks_index_at(f, b), bytes, blocks_bytes(k, f->shift));
    }
    if (f->width) {
        SID_LINE uint8_t code[BLOCKS_MOST];
        const sid_levels most = sparse_levels_of(w, val, k, r->key, f->width);
        r->levels = blocks_levels_word(&most, f->width);
        const sid_levels levels = blocks_levels_from(r->levels, f->width);
        uint8_t *const out = w->payload + blocks_code_at(f, b);
        memcpy(w->payload + f->value_at + 4 * b, &r->levels, 4);
        p->simd->to_levels(val, k, &levels, code);
        if (f->width < 8)
            p->simd->pack(code, k, f->width, out);
        else
            memcpy(out, code, k);
    } else if (sparse_values_of(p) == SID_VALUES_F16) {
        p->simd->clamp(val, val, k, SPARSE_HALF_MAX);
        p->simd->f32_to_f16(val, (uint16_t *)(void *)(w->payload + f->value_at) + first, k);
    } else
        memcpy(w->payload + f->value_at + 4 * first, val, 4ull * k);
    own->sent += k;
    own->least = r->key < own->least ? r->key : own->least;
}

void blocks_tile(sid_pass *w, const float *acc, uint64_t offset, uint32_t len) {
    const sid_plan *p = w->plan;
    const blocks_form f = blocks_form_of(p);
    blocks_work *own = w->scratch;
    for (uint32_t i = 0, some; i < len; i += some) {
        const uint64_t b = (offset + i) / f.size, start = b * f.size;
        const uint32_t inside = (uint32_t)(offset + i - start), k = blocks_k(&f, b);
        const uint32_t size = p->n - start < f.size ? (uint32_t)(p->n - start) : f.size;
        blocks_rule *r = rules_of(p, w->state) + b;
        some = size - inside < len - i ? size - inside : len - i;
        if (!inside) {
            uint32_t last, spread;
            blocks_predict(r, &last, &spread);
            own->low = sid_from_last(last, spread, 0);
            own->held = 0;
        }
        capture(p->simd, own, acc + i, inside, some);
        if (inside + some < size) continue;
        const float *whole = inside ? (const float *)sid_vector(p, w->state, 0) + start : acc + i;
        select_block(p->simd, own, whole, size, k, r);
        write_block(w, &f, b, k, r);
    }
}

static void clear(uint8_t *payload, uint64_t from, uint64_t to) { memset(payload + from, 0, to - from); }

sid_outcome blocks_finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const blocks_form f = blocks_form_of(p);
    const blocks_work *own = w->scratch;
    const uint64_t whole = f.count ? f.count - 1 : 0;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint32_t form = sparse_flag_of(sparse_values_of(p)), key = own->sent ? own->least : 0;
    if (f.packed) {
        uint32_t *count = (uint32_t *)(void *)(w->payload + SID_HEADER_BYTES);
        for (uint64_t t = 0; t < sid_wire_tiles(p->n); t++) count[t] = blocks_in_wire_tile(&f, t);
        clear(w->payload, SID_HEADER_BYTES + 4 * sid_wire_tiles(p->n), sid_sparse_index_at(p->n));
        packed_write(p, count, indices_of(w), own->sent, w->payload);
    } else
        clear(w->payload, blocks_index_at(&f, whole) + blocks_bytes(f.last_k, f.shift), f.value_at);
    if (f.width) {
        clear(w->payload, f.value_at + 4 * f.count, f.code_at);
        clear(w->payload, blocks_code_at(&f, whole) + blocks_bytes(f.last_k, f.width), p->sizes.payload);
    } else
        clear(w->payload, f.value_at + sid_sparse_value_bytes(own->sent, sparse_values_of(p)), p->sizes.payload);
    w->state->rule = (sid_rule){.key = key, .flags = form, .cut = BLOCKS_CUT};
    if (f.width) w->state->rule.base = SID_LEVEL_LEAST, w->state->rule.step = 1; /* any that are sound */
    w->stats.found = own->sent;
    w->stats.threshold = sid_bits_f32(key);
    h->count = own->sent;
    h->flags = form | SID_FLAG_BLOCKS | (f.packed ? (uint32_t)SID_FLAG_PACKED : 0u);
    h->scale = w->stats.threshold;
    return SID_DONE;
}

/* ---- what is kept -------------------------------------------------------------------------------------------- */

/* Elements of a block, the first of which is number `inside` of it, that come before the cut. */
static uint32_t before_cut(const blocks_rule *r, uint32_t inside, uint32_t len) {
    return r->cut <= inside ? 0 : r->cut - inside < len ? r->cut - inside : len;
}

/* As sparse_keep, of a part of one block. */
static void keep_part(const sid_plan *p, const blocks_form *f, const sid_rule *rule, const blocks_rule *r, float *acc,
                      uint32_t inside, uint32_t len) {
    sid_rule own = {.flags = rule->flags};
    const uint32_t key = r->key < SID_KEY_INF ? r->key : SID_KEY_INF, before = before_cut(r, inside, len);
    if (f->width) {
        if (!blocks_levels_sound(r->levels, f->width)) return; /* of a damaged checkpoint */
        own.base = blocks_levels_base(r->levels);
        own.step = blocks_levels_step(r->levels, f->width);
    }
    if (before) sparse_keep_range(p, &own, acc, before, key);
    if (before < len) sparse_keep_range(p, &own, acc + before, len - before, key + 1);
}

void blocks_keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const blocks_form f = blocks_form_of(p);
    if (s->rule.cut != BLOCKS_CUT || s->rule.key == SID_KEY_NONE) { /* after a step of another plan, or none */
        sparse_keep(p, s, acc, offset, len);
        return;
    }
    for (uint32_t i = 0, some; i < len; i += some) {
        const uint64_t b = (offset + i) / f.size;
        const uint32_t inside = (uint32_t)(offset + i - b * f.size);
        some = f.size - inside < len - i ? f.size - inside : len - i;
        keep_part(p, &f, &s->rule, rules_of(p, s) + b, acc + i, inside, some);
    }
}

/* The rule of all of these elements, if they are of one block and on one side of its cut. */
static const blocks_rule *one_rule(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len,
                                   uint32_t *key) {
    const blocks_form f = blocks_form_of(p);
    const blocks_rule *r = rules_of(p, s) + offset / f.size;
    const uint32_t inside = (uint32_t)(offset % f.size);
    if (inside + len > f.size || r->key > SID_KEY_INF) return NULL;
    const uint32_t before = before_cut(r, inside, len);
    *key = r->key + !before;
    return before == 0 || before == len ? r : NULL;
}

int blocks_sent_from(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key) {
    if (s->rule.cut != BLOCKS_CUT || s->rule.key == SID_KEY_NONE) return sparse_sent_from(p, s, offset, len, key);
    return !s->rule.flags && one_rule(p, s, offset, len, key);
}

int blocks_sent_levels(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, uint32_t *key,
                       sid_levels *levels) {
    if (s->rule.cut != BLOCKS_CUT || s->rule.key == SID_KEY_NONE)
        return sparse_sent_levels(p, s, offset, len, key, levels);
    const uint32_t width = sid_level_bits(s->rule.flags);
    const blocks_rule *r = width ? one_rule(p, s, offset, len, key) : NULL;
    if (!r || !blocks_levels_sound(r->levels, width)) return 0;
    *levels = blocks_levels_from(r->levels, width);
    return 1;
}

/* ---- decode -------------------------------------------------------------------------------------------------- */

/* Offsets of block b's entries, in the block, or in its wire tile where they are packed. */
static uint32_t read_indices(const sid_plan *p, const blocks_form *f, const uint8_t *payload, uint64_t b, uint32_t k,
                             uint16_t *idx) {
    const uint64_t at = b * f->size;
    if (f->packed) return packed_read(p, payload, b * f->k, at, k, (uint32_t)(at % SID_WIRE_TILE) + f->size, idx);
    p->simd->fields(payload + blocks_index_at(f, b), f->shift, k, idx);
    return k;
}

static sid_status check_block(const sid_plan *p, const blocks_form *f, const uint8_t *payload, uint64_t b,
                              sid_error *err) {
    SID_LINE uint16_t idx[BLOCKS_MOST + SLACK];
    const uint64_t at = b * f->size, left = p->n - at;
    const uint32_t k = blocks_k(f, b), size = left < f->size ? (uint32_t)left : f->size;
    const uint32_t base = f->packed ? (uint32_t)(at % SID_WIRE_TILE) : 0;
    int sound = read_indices(p, f, payload, b, k, idx) == k && idx[0] >= base && idx[k - 1] < base + size;
    for (uint32_t i = 1; i < k && sound; i++) sound = idx[i - 1] < idx[i];
    if (!sound)
        return sid_fail(err, SID_E_CORRUPT, "the %u indices of block %llu do not ascend, or lie outside it", k,
                        (unsigned long long)b);
    if (!f->width) return SID_OK;
    uint32_t word;
    memcpy(&word, payload + f->value_at + 4 * b, 4);
    if (blocks_levels_sound(word, f->width)) return SID_OK;
    return sid_fail(err, SID_E_CORRUPT, "block %llu has the levels %08x, which no encoder writes",
                    (unsigned long long)b, word);
}

sid_status blocks_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint32_t *count = (const uint32_t *)(const void *)(payload + SID_HEADER_BYTES);
    const blocks_form f = blocks_form_of(p);
    const uint32_t form =
        sparse_flag_of(sparse_values_of(p)) | SID_FLAG_BLOCKS | (f.packed ? (uint32_t)SID_FLAG_PACKED : 0u);
    if (h->count != p->cap)
        return sid_fail(err, SID_E_CORRUPT, "count is %llu; the plan's blocks send %llu", (unsigned long long)h->count,
                        (unsigned long long)p->cap);
    if ((h->flags & ~(uint32_t)SID_FLAG_NONFINITE) != form)
        return sid_fail(err, SID_E_CORRUPT, "flags are %08x, which this plan does not write", h->flags);
    for (uint64_t t = 0, before = 0; f.packed && t < sid_wire_tiles(p->n); before += count[t++]) {
        const uint64_t rest = p->n - t * SID_WIRE_TILE;
        if (count[t] != blocks_in_wire_tile(&f, t) ||
            !packed_sound(p, payload, t, before, count[t], rest < SID_WIRE_TILE ? rest : SID_WIRE_TILE))
            return sid_fail(err, SID_E_CORRUPT, "tile %llu does not have %u entries that ascend within it",
                            (unsigned long long)t, blocks_in_wire_tile(&f, t));
    }
    for (uint64_t b = 0; b < f.count; b++) {
        const sid_status s = check_block(p, &f, payload, b, err);
        if (s) return s;
    }
    return SID_OK;
}

static void add_block(const sid_plan *p, const blocks_form *f, const uint8_t *payload, uint64_t b, const uint16_t *idx,
                      uint32_t base, float *out) {
    const uint32_t k = blocks_k(f, b), values = sparse_values_of(p);
    const uint8_t *const val = payload + f->value_at;
    const uint64_t first = b * f->k;
    if (f->width) {
        uint32_t word;
        memcpy(&word, val + 4 * b, 4);
        const sid_levels levels = blocks_levels_from(word, f->width);
        p->simd->add_levels(out, idx, base, payload + blocks_code_at(f, b), 0, k, &levels);
        return;
    }
    SID_LINE float wide[BLOCKS_MOST];
    const float *v = (const float *)(const void *)val + first;
    if (values == SID_VALUES_F16) {
        p->simd->f16_to_f32((const uint16_t *)(const void *)val + first, wide, k);
        v = wide;
    }
    float *at = sid_places_from(out, base);
    for (uint32_t i = 0; i < k; i++) at[idx[i]] += v[i];
}

void blocks_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const blocks_form f = blocks_form_of(p);
    SID_LINE uint16_t idx[BLOCKS_MOST + SLACK];
    for (uint32_t r = 0; r < g->count; r++)
        for (uint32_t i = 0; i < len; i += f.size) {
            const uint64_t b = (offset + i) / f.size;
            const uint8_t *payload = sid_payload(g, r);
            read_indices(p, &f, payload, b, blocks_k(&f, b), idx);
            add_block(p, &f, payload, b, idx, f.packed ? (uint32_t)(b * f.size % SID_WIRE_TILE) : 0, out + i);
        }
}
