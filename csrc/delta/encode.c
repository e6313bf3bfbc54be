/* Encode: one pass over both vectors finds what changes, and counts; a block in which more than a quarter changes is read again.
 *
 * Everything but the rANS words has a size that is known from the counts, so a body is written in place: the words grow downward
 * from the end of `out`, and are moved to where the rest ends. A body that may be longer than the elements themselves is raw.
 *
 * If elements change meanwhile, which they must not, the second pass may meet others than were counted. So it keeps within what the
 * counts gave it, and the body is raw, or one that the checksum refuses. */
#include "delta.h"

enum {
    SPARSE_SHARE =
        4, /* at most 1 / 4 of the elements of a sparse body change: beyond it, gaps cost more than symbols of all */
    LENGTHS = 32
};

/* What is found in the first pass: of a block that becomes sparse, every change in order. */
typedef struct found {
    uint32_t *gap, *step; /* elements before it that stay; 2 z + sign */
    uint8_t *symbol;
    uint32_t room, count; /* changes that there is room for, besides those of a tile; changes */
    uint32_t next;        /* the element after the last change */
    uint32_t lengths[2][LENGTHS];
} found;

uint64_t sid_delta_room(uint64_t n) { return n / SPARSE_SHARE; }
uint64_t sid_delta_work(uint64_t n) {
    if (n > SID_DELTA_BLOCK) return 0;
    return sid_round_up(9 * (n / SPARSE_SHARE + DELTA_TILE), 8);
}
static found found_in(void *work, uint32_t n) {
    const uint32_t room = (uint32_t)sid_delta_room(n), all = room + DELTA_TILE;
    uint32_t *gap = work;
    return (found){.gap = gap, .step = gap + all, .symbol = (uint8_t *)(gap + 2 * (size_t)all), .room = room};
}

/* The length of z in bits, from zz = 2 z + sign: the first bit of zz | 1 stands one higher than that of z. */
static inline uint32_t length_of(uint32_t zz) { return 31u - (uint32_t)__builtin_clz(zz | 1u); }

/* The changes of a tile, whose first element is `from`. */
static inline void take_as(found *f, const uint8_t *old, const uint8_t *now, const uint16_t *place, uint32_t count,
                           uint32_t from, const uint32_t width, uint32_t flip) {
    const uint32_t first = f->count <= f->room ? f->count : 0; /* else they are only counted */
    uint32_t *const gap = f->gap + first, *const step = f->step + first;
    uint32_t next = f->next, many[2][2][LENGTHS] = {{{0}}}; /* two, so that one need not wait for the other */
    for (uint32_t j = 0; j < count; j++) {
        const uint32_t i = place[j];
        const uint32_t zz =
            delta_step_of(delta_load(old + i * width, width), delta_load(now + i * width, width), width, flip);
        gap[j] = from + i - next;
        step[j] = zz;
        next = from + i + 1;
        many[j & 1][zz & 1][length_of(zz)]++;
    }
    for (uint32_t sign = 0; sign < 2 && count; sign++)
        for (uint32_t i = 0; i < LENGTHS; i++) f->lengths[sign][i] += many[0][sign][i] + many[1][sign][i];
    f->next = next;
    f->count += count;
}
static void take(found *f, const uint8_t *old, const uint8_t *now, const uint16_t *place, uint32_t count, uint32_t from,
                 uint32_t width, uint32_t flip) {
    if (width == 1) take_as(f, old, now, place, count, from, 1, flip);
    if (width == 2) take_as(f, old, now, place, count, from, 2, flip);
    if (width == 4) take_as(f, old, now, place, count, from, 4, flip);
}

static uint64_t find(const sid_simd *v, const sid_delta_block *b, const sid_segment *old, found *f) {
    _Alignas(64) uint8_t room[2][DELTA_TILE_BYTES];
    uint16_t place[DELTA_TILE + 64];
    uint64_t sum = 0;
    const uint32_t width = delta_width(b->kind), flip = delta_flip(b->kind);
    delta_cursor was = delta_from(old, b->first), is = delta_from(b->seg, b->first);
    for (uint32_t from = 0; from < b->n; from += DELTA_TILE) {
        const uint32_t len = delta_tile_length(b->n, from);
        const uint8_t *x = delta_tile(&was, len, width, room[0]), *y = delta_tile(&is, len, width, room[1]);
        const uint32_t count = v->changes(x, y, len, width, place);
        sum += delta_tile_sum(v, y, from, len, width);
        take(f, x, y, place, count, from, width, flip);
    }
    return sum;
}

/* The changes of a run, that others have found. 0: they are not what a block has. */
static int take_run(found *f, const sid_delta_change *c, uint32_t count, const sid_delta_block *b) {
    const uint32_t most = ~0u >> (32 - 8 * delta_width(b->kind));
    for (uint32_t j = 0; j < count; j++) {
        if (c[j].at < f->next || c[j].at >= b->n || c[j].step > most) return 0;
        f->gap[f->count] = c[j].at - f->next;
        f->step[f->count++] = c[j].step;
        f->next = c[j].at + 1;
        f->lengths[c[j].step & 1][length_of(c[j].step)]++;
    }
    return 1;
}

/* ---- the model ----------------------------------------------------------------------------------------------------- */

/* A choice of symbols, and what it costs. */
typedef struct model {
    delta_alphabet a;
    uint32_t symbols, count[SID_RANS_SYMBOLS]; /* used symbols, and those below them, but 2 at least */
    uint16_t freq[SID_RANS_SYMBOLS];
    uint64_t extra, code; /* bits; those of the code as the model has them */
} model;

/* Frequencies near the counts' shares, none 0. */
static void set_frequencies(model *m) {
    uint64_t total = 0;
    uint32_t sum = 0, largest = 0;
    for (uint32_t s = 0; s < m->symbols; s++) {
        total += m->count[s];
        if (m->count[s] > m->count[largest]) largest = s;
    }
    for (uint32_t s = 0; s < m->symbols; s++) {
        const uint64_t f = (m->count[s] * (uint64_t)SID_RANS_TOTAL + total / 2) / total;
        m->freq[s] = (uint16_t)(f ? f : 1);
        sum += m->freq[s];
    }
    /* of 16 symbols the most frequent has a sixteenth, and all of them together are at most 16 off */
    m->freq[largest] = (uint16_t)(m->freq[largest] + SID_RANS_TOTAL - sum);
}

static model model_of(const found *f, uint32_t n, const delta_alphabet *a) {
    model m = {.a = *a, .symbols = 2};
    uint64_t code = 0;
    if (a->zero) m.count[0] = n - f->count;
    for (uint32_t sign = 0; sign < 2; sign++)
        for (uint32_t length = 0; length <= a->bits; length++)
            if (f->lengths[sign][length]) {
                uint32_t base;
                const uint32_t s = delta_symbol(a, length, sign), many = f->lengths[sign][length];
                m.count[s] += many;
                m.extra += (uint64_t)many * delta_extra(a, s, &base);
                if (s >= m.symbols) m.symbols = s + 1;
            }
    set_frequencies(&m);
    for (uint32_t s = 0; s < m.symbols; s++) code += (uint64_t)m.count[s] * sid_rans_cost(m.freq[s]);
    m.code = code >> 16;
    return m;
}

/* The best alphabet; where two are as good, the first. */
static model best_model(const found *f, uint32_t n, uint32_t mode, uint32_t width) {
    model best = {.extra = UINT64_MAX};
    uint32_t longest = 0;
    for (uint32_t length = 0; length < LENGTHS; length++)
        if (f->lengths[0][length] | f->lengths[1][length]) longest = length;
    for (uint32_t with_sign = 2; with_sign-- > 0;)
        for (uint32_t shift = 0; shift <= longest; shift++) {
            const delta_alphabet a = delta_alphabet_of(shift, with_sign, mode, width);
            const model m = model_of(f, n, &a);
            if (best.extra == UINT64_MAX || m.extra + m.code < best.extra + best.code) best = m;
        }
    return best;
}

/* ---- writing ------------------------------------------------------------------------------------------------------- */

/* Bits that are appended. Each call stores 8 bytes, so that it needs no branch; those past the end are not yet written. */
typedef struct bits {
    uint8_t *to;
    uint64_t word;
    uint32_t fill; /* below 8 */
} bits;
static inline void put_bits(bits *b, uint64_t x, uint32_t count) { /* x below 2^count, count at most 56 */
    b->word |= x << b->fill;
    memcpy(b->to, &b->word, 8);
    b->fill += count;
    b->to += b->fill / 8;
    b->word >>= b->fill & ~7u;
    b->fill %= 8;
}
/* What is left of the last word, of 64 bits. */
static void end_bits(const bits *b) { memcpy(b->to, &b->word, 8); }

static uint64_t words_of(uint64_t bit_count) { return (bit_count + 63) / 64; }

typedef struct coding { /* symbols and how many extra bits they have, by sign and length of z */
    uint8_t symbol[2][LENGTHS], bits[2][LENGTHS];
    uint32_t with_sign;
} coding;
static coding coding_of(const delta_alphabet *a) {
    coding c = {.with_sign = a->with_sign};
    for (uint32_t sign = 0; sign < 2; sign++)
        for (uint32_t length = 0; length <= a->bits; length++) {
            uint32_t base;
            c.symbol[sign][length] = (uint8_t)delta_symbol(a, length, sign);
            c.bits[sign][length] = (uint8_t)delta_extra(a, c.symbol[sign][length], &base);
        }
    return c;
}
/* The symbol of a step, whose extra bits go to `to`. */
static inline uint8_t put_step(const coding *c, uint32_t zz, bits *to) {
    const uint32_t length = length_of(zz), count = c->bits[zz & 1][length];
    put_bits(to, zz >> c->with_sign & ((1ull << count) - 1), count);
    return c->symbol[zz & 1][length];
}

/* States and words of `n` symbols to `at`; where they end. NULL: they do not fit before `end`. A symbol gives at most one word, and
 * `shorter` leaves room for a turn of the lanes more than the symbols of the model need. */
static uint8_t *put_code(const sid_simd *v, const model *m, uint8_t *symbol, uint32_t n, uint8_t *at, uint8_t *end) {
    sid_rans r;
    sid_rans_stream s = {.words = (uint16_t *)(void *)end};
    uint8_t *const to = at + sizeof s.state;
    sid_rans_model(&r, m->freq, m->symbols);
    for (uint32_t j = 0; j < SID_RANS_LANES; j++) s.state[j] = SID_RANS_LEAST;
    for (uint32_t left = n; left;) {
        const uint64_t room = (uint64_t)((uint8_t *)s.words - to - SID_DELTA_SLACK) / sizeof *s.words;
        const uint32_t rest = left < room ? 0 : (uint32_t)sid_round_up(left - room, SID_RANS_LANES);
        if (rest >= left) return NULL;
        s.symbol = symbol + rest;
        v->rans_encode(&r, &s, 1, left - rest);
        left = rest;
    }
    const size_t bytes = (size_t)(end - (uint8_t *)s.words);
    memcpy(at, s.state, sizeof s.state);
    memmove(to, s.words, bytes);
    return to + bytes;
}

/* Writes head and frequencies; where they end. */
static uint8_t *put_head(uint8_t *out, const delta_head *h, const model *m) {
    const uint64_t table = sid_round_up(2 * m->symbols, 8);
    memcpy(out, h, sizeof *h);
    memset(out + sizeof *h, 0, table);
    memcpy(out + sizeof *h, m->freq, 2 * m->symbols);
    return out + sizeof *h + table;
}
static delta_head head_of(uint8_t mode, const found *f, const model *m) {
    return (delta_head){.mode = mode,
                        .shift = (uint8_t)(m->a.shift | (m->a.with_sign ? DELTA_SIGNED : 0)),
                        .symbols = (uint8_t)m->symbols,
                        .count = f->count,
                        .extra = (uint32_t)words_of(m->extra)};
}
/* 1 if a body with `words` of 64 bits before the code is surely shorter than the elements. A state's rounding takes less than
 * 1/512 of the code. */
static int shorter(const sid_delta_block *b, const model *m, uint64_t words) {
    const uint64_t head = sizeof(delta_head) + 2 * SID_RANS_SYMBOLS + DELTA_STATE_BYTES + 2 * SID_DELTA_SLACK;
    return head + 8 * words + (m->code + m->code / 512) / 8 + 8 < sid_delta_bytes(b->kind, b->n);
}

/* The parameter of the Rice code, which takes count * (low + 1) + *high bits. */
static uint32_t best_low(const found *f, uint64_t *high) {
    uint64_t best = UINT64_MAX;
    uint32_t mean = 0, low = 0;
    while ((uint64_t)f->count << (mean + 1) <= f->next) mean++;
    for (uint32_t k = mean ? mean - 1 : 0; k <= mean + 1; k++) {
        uint64_t sum = 0;
        for (uint32_t i = 0; i < f->count; i++) sum += f->gap[i] >> k;
        if (sum + (uint64_t)f->count * k >= best) continue;
        best = sum + (uint64_t)f->count * k;
        *high = sum;
        low = k;
    }
    return low;
}

/* Writes the high part of each gap in unary: that many zeros, then a one. */
static void put_ones(const found *f, uint32_t low, uint8_t *to, uint32_t words) {
    uint64_t word = 0, first = 0, at = 0; /* bits; the place of the word's first one, and of the next one */
    memset(to, 0, 8ull * words);
    for (uint32_t i = 0; i < f->count; i++, at++) {
        at += f->gap[i] >> low;
        if (at - first >= 64) {
            memcpy(to + first / 8, &word, 8);
            first = at & ~63ull;
            word = 0;
        }
        word |= 1ull << at % 64;
    }
    memcpy(to + first / 8, &word, 8);
}

static uint64_t write_sparse(const sid_simd *v, const sid_delta_block *b, const found *f, uint8_t *out) {
    const model m = best_model(f, b->n, DELTA_SPARSE, delta_width(b->kind));
    const coding c = coding_of(&m.a);
    uint64_t high = 0;
    delta_head h = head_of(DELTA_SPARSE, f, &m);
    h.low = (uint8_t)best_low(f, &high);
    h.high = (uint32_t)words_of(f->count + high);
    const uint64_t lows = words_of((uint64_t)f->count * h.low);
    if (!shorter(b, &m, lows + h.high + h.extra)) return 0;
    uint8_t *low = put_head(out, &h, &m), *ones = low + 8 * lows, *extra = ones + 8ull * h.high;
    uint8_t *const symbol = f->symbol;
    const uint32_t *const gap = f->gap, *const step = f->step;
    bits to_low = {.to = low}, to_extra = {.to = extra};
    for (uint32_t i = 0; i < f->count && h.low; i++) put_bits(&to_low, gap[i] & ((1u << h.low) - 1), h.low);
    end_bits(&to_low);
    put_ones(f, h.low, ones, h.high);
    for (uint32_t i = 0; i < f->count; i++) symbol[i] = put_step(&c, step[i], &to_extra);
    end_bits(&to_extra);
    const uint8_t *const end =
        put_code(v, &m, symbol, f->count, extra + 8ull * h.extra, out + sid_delta_bound(b->kind, b->n));
    return end ? (uint64_t)(end - out) : 0;
}

/* The symbols of a tile, as long as their extra bits do not go past `end`: those of elements that the first pass saw do not. */
static inline void put_tile_as(const coding *c, const uint8_t *old, const uint8_t *now, const uint16_t *place,
                               uint32_t count, uint8_t *symbol, bits *to, const uint8_t *end, const uint32_t width,
                               uint32_t flip) {
    for (uint32_t j = 0; j < count && to->to <= end; j++) {
        const uint32_t i = place[j], x = delta_load(old + i * width, width), y = delta_load(now + i * width, width);
        symbol[i] = put_step(c, delta_step_of(x, y, width, flip), to);
    }
}

static uint64_t write_dense(const sid_simd *v, const sid_delta_block *b, const sid_segment *old, const found *f,
                            uint8_t *out) {
    _Alignas(64) uint8_t room[2][DELTA_TILE_BYTES];
    uint16_t place[DELTA_TILE + 64];
    const uint32_t width = delta_width(b->kind), flip = delta_flip(b->kind);
    const model m = best_model(f, b->n, DELTA_DENSE, width);
    const coding c = coding_of(&m.a);
    const delta_head h = head_of(DELTA_DENSE, f, &m);
    if (!shorter(b, &m, h.extra)) return 0;
    uint8_t *extra = put_head(out, &h, &m), *symbol = (uint8_t *)f->gap; /* of which there is no more need */
    uint8_t *const code = extra + 8ull * h.extra;
    bits to = {.to = extra};
    delta_cursor was = delta_from(old, b->first), is = delta_from(b->seg, b->first);
    memset(symbol, 0, b->n);
    for (uint32_t from = 0; from < b->n; from += DELTA_TILE) {
        const uint32_t len = delta_tile_length(b->n, from);
        const uint8_t *x = delta_tile(&was, len, width, room[0]), *y = delta_tile(&is, len, width, room[1]);
        const uint32_t count = v->changes(x, y, len, width, place);
        if (width == 1) put_tile_as(&c, x, y, place, count, symbol + from, &to, code, 1, flip);
        if (width == 2) put_tile_as(&c, x, y, place, count, symbol + from, &to, code, 2, flip);
        if (width == 4) put_tile_as(&c, x, y, place, count, symbol + from, &to, code, 4, flip);
    }
    end_bits(&to);
    const uint8_t *const end = put_code(v, &m, symbol, b->n, code, out + sid_delta_bound(b->kind, b->n));
    return end ? (uint64_t)(end - out) : 0;
}

static uint64_t write_raw(const sid_delta_block *b, uint8_t *out) {
    const uint32_t width = delta_width(b->kind);
    delta_cursor c = delta_from(b->seg, b->first);
    const delta_head h = {.mode = DELTA_RAW};
    memcpy(out, &h, DELTA_RAW_AT);
    for (uint64_t done = 0, here; done < b->n; done += here) {
        const uint8_t *p = delta_some(&c, b->n - done, width, &here);
        memcpy(out + DELTA_RAW_AT + done * width, p, here * width);
    }
    return sid_delta_bytes(b->kind, b->n);
}

sid_status sid_delta_encode(const sid_delta_block *b, const sid_segment *old, void *work, void *out,
                            sid_delta_entry *entry, sid_error *err) {
    sid_status status;
    const sid_simd *v = delta_sound(b, &status, err);
    if (!v) return status;
    if (!out || !entry || (old && !work) || (uintptr_t)out % 8 || (uintptr_t)work % 8)
        return sid_fail(err, SID_E_ARG, "work and out must start at a multiple of 8 bytes");
    if (err) err->text[0] = 0;
    entry->bytes = 0;
    if (!old)
        entry->checksum = delta_sum(v, b);
    else {
        found f = found_in(work, b->n);
        entry->checksum = find(v, b, old, &f);
        if (!f.count) return SID_OK;
        entry->bytes = f.count <= f.room ? write_sparse(v, b, &f, out) : write_dense(v, b, old, &f, out);
    }
    if (!entry->bytes) entry->bytes = write_raw(b, out);
    return SID_OK;
}

sid_status sid_delta_encode_found(const sid_delta_block *b, const sid_delta_change *changes, uint64_t count,
                                  const sid_delta_run *runs, void *work, void *out, sid_delta_entry *entry,
                                  sid_error *err) {
    sid_status status;
    const sid_simd *v = delta_fits(b, &status, err);
    if (!v) return status;
    if (!runs || !work || !out || !entry || (uintptr_t)out % 8 || (uintptr_t)work % 8)
        return sid_fail(err, SID_E_ARG, "work and out must start at a multiple of 8 bytes");
    if (err) err->text[0] = 0;
    found f = found_in(work, b->n);
    entry->bytes = UINT64_MAX;
    if (count > f.room) return SID_OK;
    if (count && !changes) return sid_fail(err, SID_E_ARG, "changes is NULL");
    for (uint64_t i = 0; i < sid_delta_runs(b->kind, b->n); i++)
        if ((uint64_t)runs[i].first + runs[i].count > count || runs[i].count > count - f.count ||
            !take_run(&f, changes + runs[i].first, runs[i].count, b))
            return sid_fail(err, SID_E_ARG, "these are no changes of such a block, in order");
    if (f.count != count) return sid_fail(err, SID_E_ARG, "the runs have %u of %u changes", f.count, (unsigned)count);
    const uint64_t bytes = count ? write_sparse(v, b, &f, out) : 0;
    if (bytes || !count) entry->bytes = bytes;
    return SID_OK;
}
