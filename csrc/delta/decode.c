/* Check, apply, and the changes alone: all read a body in the same way, some changes at a time, and trust no byte of it. */
#include "delta.h"

enum {
    SOME = 1024, /* symbols that are decoded at a time */
    AHEAD = 32   /* changes: those of a sparse body lie in lines of their own */
};

/* A body that is being read: what there is, and how far it has been read. */
typedef struct reader {
    uint32_t n, count, mode;
    uint32_t seen, done; /* changes that have been read; of a dense body, elements */
    sid_gaps gaps;
    sid_extras extras;
    sid_rans model;
    sid_rans_stream stream;
    uint8_t symbol[SOME];
} reader;

/* Some changes: positions in the block, which ascend, and 2 z + sign. */
typedef struct changed {
    uint32_t count, at[SOME], step[SOME];
} changed;

static uint64_t load_64(const uint8_t *p) {
    uint64_t x;
    memcpy(&x, p, 8);
    return x;
}

/* Frequencies and symbols. */
static const char *open_model(reader *r, const delta_head *h, const uint8_t *table, uint32_t width) {
    const delta_alphabet a = delta_alphabet_of(h->shift % DELTA_SIGNED, h->shift / DELTA_SIGNED, h->mode, width);
    uint16_t freq[SID_RANS_SYMBOLS] = {0};
    uint32_t total = 0, bad = a.shift > a.bits || h->symbols > a.zero + a.classes * (1 + a.with_sign);
    memcpy(freq, table, 2u * h->symbols);
    for (uint32_t s = 0; s < h->symbols; s++) {
        bad |= !freq[s];
        total += freq[s];
    }
    if (bad || total != SID_RANS_TOTAL) return "its frequencies";
    for (uint64_t i = 2u * h->symbols; i % 8; i++) bad |= table[i];
    for (uint32_t s = a.zero; s < h->symbols; s++) {
        r->extras.bits[s] = delta_extra(&a, s, &r->extras.base[s]);
        bad |= r->extras.bits[s] > 32;
    }
    if (bad) return "its symbols";
    r->extras.up = a.with_sign;
    sid_rans_starts(&r->model, freq, h->symbols);
    return NULL;
}

/* Begins with a body that is sparse or dense. Returns what is wrong with it, or NULL. */
static const char *open_body(reader *r, const sid_delta_block *b, const uint8_t *body, uint64_t bytes) {
    delta_head h;
    if (bytes < sizeof h) return "its length";
    memcpy(&h, body, sizeof h);
    const int sparse = h.mode == DELTA_SPARSE;
    if ((!sparse && h.mode != DELTA_DENSE) || !h.count || h.count > b->n || h.symbols < 2 ||
        h.symbols > SID_RANS_SYMBOLS)
        return "its head";
    if (h.low > (sparse ? SID_GAP_LOW : 0) || (sparse ? !h.high : h.high)) return "its head";
    const uint64_t low_bits = (uint64_t)h.count * h.low, table = sizeof h,
                   lows = table + sid_round_up(2u * h.symbols, 8), high = lows + (low_bits + 63) / 64 * 8,
                   extra = high + 8ull * h.high, states = extra + 8ull * h.extra, words = states + DELTA_STATE_BYTES;
    if (words > bytes || bytes % 2 || bytes - words > 2ull * b->n) return "its length";
    if (sparse && 64ull * (h.high - 1) >= h.count + (uint64_t)(b->n >> h.low)) return "its high bits";
    *r = (reader){.n = b->n,
                  .count = h.count,
                  .mode = h.mode,
                  .gaps = {.lows = body + lows, .high = body + high, .words = h.high, .low = h.low},
                  .extras = {.from = body + extra, .end = 64ull * h.extra}};
    r->stream = (sid_rans_stream){
        .symbol = r->symbol, .words = (uint16_t *)(uintptr_t)(body + words), .room = (uint32_t)((bytes - words) / 2)};
    memcpy(r->stream.state, body + states, DELTA_STATE_BYTES);
    for (uint32_t j = 0; j < SID_RANS_LANES; j++)
        if (r->stream.state[j] < SID_RANS_LEAST) return "its states";
    if (low_bits % 64 && load_64(body + high - 8) >> low_bits % 64) return "its low bits";
    return open_model(r, &h, body + table, delta_width(b->kind));
}

static const char *read_sparse(const sid_simd *v, reader *r, changed *c) {
    const uint32_t left = r->count - r->seen;
    c->count = left < SOME ? left : SOME;
    v->rans_decode(&r->model, &r->stream, 1, c->count);
    if (!v->extras(&r->extras, r->symbol, c->count, c->step)) return "its extra bits";
    r->seen += c->count;
    return v->gaps(&r->gaps, c->count, r->n, c->at) ? NULL : "its gaps";
}

static const char *read_dense(const sid_simd *v, reader *r, changed *c) {
    const uint32_t left = r->n - r->done, count = left < SOME ? left : SOME;
    uint8_t symbol[SOME];
    c->count = 0;
    v->rans_decode(&r->model, &r->stream, 1, count);
    for (uint32_t i = 0; i < count; i++) {
        c->at[c->count] = r->done + i;
        symbol[c->count] = r->symbol[i];
        c->count += r->symbol[i] != 0;
    }
    r->done += count;
    r->seen += c->count;
    return v->extras(&r->extras, symbol, c->count, c->step) ? NULL : "its extra bits";
}

static int is_read(const reader *r) { return r->mode == DELTA_SPARSE ? r->seen == r->count : r->done == r->n; }
static const char *read_some(const sid_simd *v, reader *r, changed *c) {
    return r->mode == DELTA_SPARSE ? read_sparse(v, r, c) : read_dense(v, r, c);
}

/* What is wrong with a body that has been read to its end, or NULL. */
static const char *close_body(const reader *r) {
    if (r->stream.at != r->stream.room) return "its code";
    for (uint32_t j = 0; j < SID_RANS_LANES; j++)
        if (r->stream.state[j] != SID_RANS_LEAST) return "its code";
    if (r->seen != r->count) return "its count";
    if (r->gaps.word || r->gaps.word_at != r->gaps.words) return "its high bits";
    const sid_extras *e = &r->extras;
    if (e->end - e->at >= 64 || (e->at % 64 && load_64(e->from + e->end / 8 - 8) >> e->at % 64))
        return "its extra bits";
    return NULL;
}

/* ---- check --------------------------------------------------------------------------------------------------------- */

/* The checksum of the elements as they will be: up to `next` of those there are, and with corrections of those that change. */
typedef struct summing {
    const sid_simd *v;
    delta_cursor cursor;
    uint32_t n, first, next, width; /* first, next: of the tile */
    const uint8_t *tile;
    uint64_t sum;
    uint8_t *room;
} summing;

static void next_tile(summing *s) {
    const uint32_t len = delta_tile_length(s->n, s->next);
    s->tile = delta_tile(&s->cursor, len, s->width, s->room);
    s->sum += delta_tile_sum(s->v, s->tile, s->next, len, s->width);
    s->first = s->next;
    s->next += len;
}

static inline void correct_as(summing *s, const changed *c, const uint32_t width, uint32_t flip) {
    const uint32_t in_word = 4 / width, in_block = SID_SUM_BLOCK * in_word;
    for (uint32_t i = 0; i < c->count;) {
        const uint32_t block = c->at[i] / in_block, end = (block + 1) * in_block;
        uint64_t sum = 0;
        while (c->at[i] >= s->next) next_tile(s);
        const uint8_t *const tile = s->tile;
        const uint32_t first = s->first;
        for (; i < c->count && c->at[i] < end; i++) { /* a tile has whole blocks of keys */
            const uint32_t at = c->at[i], word = at / in_word;
            const uint64_t key = sid_sum_pairs[word % SID_SUM_BLOCK / 2] * (word % 2 ? SID_SUM_ODD : 1);
            const uint32_t x = delta_load(tile + (size_t)(at - first) * width, width);
            sum += (((uint64_t)delta_moved(x, c->step[i], width, flip) - x) << 8 * width * (at % in_word)) * key;
        }
        s->sum += sum * sid_sum_block(block);
    }
}
static void correct(summing *s, const changed *c, uint32_t flip) {
    if (s->width == 1) correct_as(s, c, 1, flip);
    if (s->width == 2) correct_as(s, c, 2, flip);
    if (s->width == 4) correct_as(s, c, 4, flip);
}

static const char *sum_of_result(const sid_simd *v, const sid_delta_block *b, const uint8_t *body, uint64_t bytes,
                                 uint64_t *sum) {
    _Alignas(64) uint8_t room[DELTA_TILE_BYTES];
    summing s = {
        .v = v, .cursor = delta_from(b->seg, b->first), .n = b->n, .width = delta_width(b->kind), .room = room};
    reader r;
    changed c;
    const char *wrong = open_body(&r, b, body, bytes);
    while (!wrong && !is_read(&r)) {
        wrong = read_some(v, &r, &c);
        if (!wrong) correct(&s, &c, delta_flip(b->kind));
    }
    if (wrong || (wrong = close_body(&r))) return wrong;
    while (s.next < s.n) next_tile(&s);
    *sum = s.sum;
    return NULL;
}

/* 1: a raw body, of the right length; 0: none. */
static int is_raw(const sid_delta_block *b, const uint8_t *body, uint64_t bytes) {
    static const delta_head head = {.mode = DELTA_RAW};
    return bytes == sid_delta_bytes(b->kind, b->n) && !memcmp(body, &head, DELTA_RAW_AT);
}

static uint64_t raw_sum(const sid_simd *v, const sid_delta_block *b, const uint8_t *body) {
    const sid_segment elements = {(uint8_t *)(uintptr_t)body + DELTA_RAW_AT, b->n};
    const sid_delta_block own = {.kind = b->kind, .isa = b->isa, .seg = &elements, .n_seg = 1, .n = b->n};
    return delta_sum(v, &own);
}

static sid_status end_call(const char *wrong, uint64_t sum, const sid_delta_entry *entry, sid_error *err) {
    if (wrong) return sid_fail(err, SID_E_CORRUPT, "the body of a delta is damaged: %s", wrong);
    if (sum != entry->checksum)
        return sid_fail(err, SID_E_MISMATCH, "the result would have another checksum than the sender's");
    return SID_OK;
}

/* seg: whether the segments matter. */
static sid_status open_call(int seg, const sid_delta_block *b, const void *body, const sid_delta_entry *entry,
                            const sid_simd **v, sid_error *err) {
    sid_status status;
    *v = seg ? delta_sound(b, &status, err) : delta_fits(b, &status, err);
    if (!*v) return status;
    if (!entry || (entry->bytes && !body) || (uintptr_t)body % 8)
        return sid_fail(err, SID_E_ARG, "a body must start at a multiple of 8 bytes");
    if (err) err->text[0] = 0;
    return SID_OK;
}

sid_status sid_delta_check(const sid_delta_block *b, const void *body, const sid_delta_entry *entry, sid_error *err) {
    const sid_simd *v;
    const char *wrong = NULL;
    uint64_t sum = 0;
    const sid_status status = open_call(1, b, body, entry, &v, err);
    if (status) return status;
    if (!entry->bytes)
        sum = delta_sum(v, b);
    else if (is_raw(b, body, entry->bytes))
        sum = raw_sum(v, b, body);
    else
        wrong = sum_of_result(v, b, body, entry->bytes, &sum);
    return end_call(wrong, sum, entry, err);
}

sid_status sid_delta_changes(const sid_delta_block *b, const void *body, const sid_delta_entry *entry,
                             sid_delta_change *changes, uint32_t *count, sid_error *err) {
    const sid_simd *v;
    reader r;
    changed c;
    const sid_status status = open_call(0, b, body, entry, &v, err);
    if (status) return status;
    if (!changes || !count) return sid_fail(err, SID_E_ARG, "changes or count is NULL");
    *count = 0;
    if (!entry->bytes) return SID_OK;
    if (is_raw(b, body, entry->bytes)) {
        *count = b->n + 1;
        return end_call(NULL, raw_sum(v, b, body), entry, err);
    }
    const char *wrong = open_body(&r, b, body, entry->bytes);
    while (!wrong && !is_read(&r)) {
        wrong = read_some(v, &r, &c);
        for (uint32_t i = 0; i < c.count && !wrong; i++) *changes++ = (sid_delta_change){c.at[i], c.step[i]};
    }
    if (!wrong) wrong = close_body(&r);
    if (!wrong) *count = r.seen;
    return end_call(wrong, entry->checksum, entry, err);
}

/* ---- apply --------------------------------------------------------------------------------------------------------- */

static inline void change_as(delta_cursor *cursor, uint64_t *first, const changed *c, const uint32_t width,
                             uint32_t flip) {
    for (uint32_t i = 0; i < c->count;) {
        while (c->at[i] - *first >= cursor->seg->len - cursor->at) {
            *first += cursor->seg->len - cursor->at;
            *cursor = (delta_cursor){cursor->seg + 1, 0};
        }
        const uint64_t end = *first + cursor->seg->len - cursor->at;
        uint8_t *const from = (uint8_t *)cursor->seg->ptr + cursor->at * width;
        const uint64_t begin = *first;
        for (; i < c->count && c->at[i] < end; i++) {
            const uint32_t ahead = c->at[i + AHEAD < c->count ? i + AHEAD : i];
            if (ahead < end) __builtin_prefetch(from + (ahead - begin) * width, 1);
            uint8_t *p = from + (c->at[i] - begin) * width;
            delta_store(p, delta_moved(delta_load(p, width), c->step[i], width, flip), width);
        }
    }
}

static const char *change(const sid_simd *v, const sid_delta_block *b, const uint8_t *body, uint64_t bytes) {
    const uint32_t width = delta_width(b->kind), flip = delta_flip(b->kind);
    delta_cursor cursor = delta_from(b->seg, b->first);
    uint64_t first = 0; /* which element of the block is the cursor's */
    reader r;
    changed c;
    const char *wrong = open_body(&r, b, body, bytes);
    while (!wrong && !is_read(&r)) {
        wrong = read_some(v, &r, &c);
        if (wrong) break;
        if (width == 1) change_as(&cursor, &first, &c, 1, flip);
        if (width == 2) change_as(&cursor, &first, &c, 2, flip);
        if (width == 4) change_as(&cursor, &first, &c, 4, flip);
    }
    return wrong ? wrong : close_body(&r);
}

sid_status sid_delta_apply(const sid_delta_block *b, const void *body, const sid_delta_entry *entry, sid_error *err) {
    const sid_simd *v;
    const uint8_t *from = body;
    const char *wrong = NULL;
    const sid_status status = open_call(1, b, body, entry, &v, err);
    if (status || !entry->bytes) return status;
    if (is_raw(b, body, entry->bytes)) {
        const uint32_t width = delta_width(b->kind);
        delta_cursor cursor = delta_from(b->seg, b->first);
        for (uint64_t done = 0, here; done < b->n; done += here) {
            uint8_t *p = delta_some(&cursor, b->n - done, width, &here);
            memcpy(p, from + DELTA_RAW_AT + done * width, here * width);
        }
    } else
        wrong = change(v, b, body, entry->bytes);
    return end_call(wrong, entry->checksum, entry, err);
}
