/* deadzone: elements in few levels, and zero where they are small, entropy-coded to a given number of bits.
 *
 * For elements with a Laplace density the best scalar quantiser of a given entropy has a dead zone, steps of equal length, and the
 * centroids as levels (Sullivan 1996). So a share d of the elements is beyond the dead zone, and of those that reach a level a
 * share q is above it. The table has d and q for each number of bits.
 *
 * The steps are not lengths here, but ranks: the k = d n largest elements are sent, as topk has them, and the edges of
 * the levels are the ranks k q, k q^2, ... of these. So whatever the gradient looks like, the number of elements of each level is known
 * beforehand, and with it the size of their code, by a static model. What is equal to an edge belongs to the lower level, and zeros are
 * not sent, so that ties and sparse gradients take fewer bits, not more.
 *
 * The code is rANS (rans.h), in streams of 16384 to 65536 elements. A stream of zeros alone has no words. The budget is the
 * entropy and 1/512 of it; a state's rounding takes less. If all the same a stream finds no room, it and those
 * after it are not sent and stay in the memory. stats.count < stats.found says that it happened. */
#include "deadzone.h"

#include "../core/sound.h"
#include "sparse_form.h"

enum {
    DEADZONE_BITS
};

/* ---- plan ---------------------------------------------------------------------------------------------------- */

/* For every 1/20 bits from 1/10 to 2 the density, and the share: the least squared error of Laplace elements in as many bits, with
 * all that a payload has besides, but a share of 1/20 at least. Below that the error of Laplace elements hardly depends on it (by 0.4 %
 * at most), but that of elements with heavier tails does. tests/codecs/test_deadzone.py finds the table again. */
static const struct best {
    double density, share;
} best[] = {
    {0.01007, 0.05000}, {0.01671, 0.05000}, {0.02396, 0.05000}, {0.03173, 0.05000}, {0.03998, 0.05000},
    {0.04869, 0.05000}, {0.05785, 0.05000}, {0.06744, 0.05000}, {0.07662, 0.05000}, {0.08705, 0.05000},
    {0.09791, 0.05000}, {0.10922, 0.05000}, {0.12099, 0.05000}, {0.13295, 0.05176}, {0.14467, 0.05726},
    {0.15663, 0.06301}, {0.16881, 0.06902}, {0.18122, 0.07529}, {0.19148, 0.08088}, {0.20422, 0.08768},
    {0.21713, 0.09474}, {0.23020, 0.10207}, {0.24342, 0.10966}, {0.25676, 0.11751}, {0.27021, 0.12562},
    {0.28376, 0.13397}, {0.29739, 0.14257}, {0.31114, 0.15140}, {0.32493, 0.16045}, {0.33879, 0.16971},
    {0.35268, 0.17917}, {0.36664, 0.18880}, {0.38061, 0.19860}, {0.39463, 0.20853}, {0.40872, 0.21859},
    {0.42285, 0.22875}, {0.43705, 0.23898}, {0.45131, 0.24927}, {0.46567, 0.25960},
};
enum {
    NODES = sizeof best / sizeof *best
};

static struct best best_at(double bits) {
    const double at = bits * 20 - 2;
    const uint32_t i = at < 0 ? 0 : at < NODES - 1 ? (uint32_t)at : NODES - 2;
    const double t = at - i;
    return (struct best){best[i].density + t * (best[i + 1].density - best[i].density),
                         best[i].share + t * (best[i + 1].share - best[i].share)};
}

/* Frequencies near what the model expects of `count` elements of each level, none 0; returns the bits in units of 2^-16. */
static uint64_t set_model(deadzone_form *f, uint64_t n, const uint64_t *count) {
    uint32_t zero = SID_RANS_TOTAL, largest = 1;
    uint64_t sent = 0, bits = 0;
    for (uint32_t i = 0; i < f->levels; i++) {
        const uint64_t freq = (SID_RANS_TOTAL * count[i] + n) / (2 * n);
        f->freq[1 + i] = (uint16_t)(freq ? freq : 1);
        if (f->freq[1 + i] > f->freq[largest]) largest = 1 + i;
        zero -= 2u * f->freq[1 + i];
        sent += count[i];
    }
    while ((int32_t)zero < 1) { /* of groups of few elements */
        f->freq[largest]--;
        zero += 2;
    }
    f->freq[0] = (uint16_t)zero;
    for (uint32_t i = 0; i < f->levels; i++) bits += count[i] * sid_rans_cost(f->freq[1 + i]);
    return bits + (n - sent) * sid_rans_cost(zero);
}

/* Room for the words of a stream: at most one an element, and 16 bytes that rans_encode may write below them. */
static uint64_t words_of(const sid_plan *p, const deadzone_form *f) {
    return sid_round_up(p->n < f->stream ? p->n : f->stream, 8) + 8;
}

static sid_status plan(sid_plan *p, uint64_t *scratch, sid_error *err) {
    (void)err;
    const double bits = p->codec_param[DEADZONE_BITS];
    const struct best b = best_at(bits);
    const uint64_t n = p->n, k = (uint64_t)floor(b.density * (double)n + 0.5);
    uint64_t count[DEADZONE_LEVELS], from;
    deadzone_form f = {.share = b.share,
                       .levels = bits < 1 ? 4 : 5,
                       .stream = bits < .5  ? 65536
                                 : bits < 1 ? 32768
                                            : 16384};
    _Static_assert(sizeof f <= sizeof p->derived, "SID_DERIVED_WORDS is too small");
    p->k = p->cap = n && !k ? 1 : k;
    sparse_plan(p, 0, scratch);
    from = p->k;
    for (uint32_t i = 0; i < f.levels; i++) {
        const uint64_t above = i + 1 < f.levels ? deadzone_above(&f, p->k, i) : 0;
        count[i] = from - above;
        from = above;
    }
    const uint64_t streams = deadzone_streams(n, f.stream), code = set_model(&f, n ? n : 1, count);
    f.counts = SID_HEADER_BYTES + sid_round_up(4ull * f.levels, 8);
    f.words = f.counts + sid_round_up(2 * streams, 8);
    f.room = streams * DEADZONE_STATE_WORDS + (code + code / 512) / (16ull << 16) + 4;
    memcpy(p->derived, &f, sizeof f);
    p->sizes.payload = sid_round_up(f.words + 2 * f.room + 16, 64); /* 16: decode reads past the last word */
    *scratch = sparse_bytes(p) + DEADZONE_TOGETHER * (DEADZONE_BLOCK + 2 * words_of(p, &f));
    return SID_OK;
}

/* ---- encode -------------------------------------------------------------------------------------------------- */

/* In scratch, after what sparse.c has there: a block of symbols of each stream, and where its words end. */
static uint8_t *symbols_of(const sid_pass *w, uint32_t k) {
    return (uint8_t *)w->scratch + sparse_bytes(w->plan) + k * DEADZONE_BLOCK;
}
static uint16_t *end_of_words(const sid_pass *w, const deadzone_form *f, uint32_t k) {
    return (uint16_t *)(void *)symbols_of(w, DEADZONE_TOGETHER) + (k + 1) * words_of(w->plan, f);
}

static void begin(sid_pass *w) {
    const uint64_t *c = w->state->codec;
    sparse_begin(w, w->passes == 1 ? sid_from_last((uint32_t)c[DEADZONE_LAST], (uint32_t)c[DEADZONE_SPREAD], 1) : 1);
}

/* The candidates that a stream sends. */
typedef struct part {
    uint64_t first, end;
    uint32_t base, len; /* its first element in the wire tile; elements */
} part;

/* Those of a stream, which come after the last one's; tile_end: of its wire tile. */
static part part_of(const sid_pass *w, const deadzone_form *f, uint64_t t, uint64_t first, uint64_t *tile_end) {
    const sparse_work *s = sparse_of(w);
    const uint64_t at = t * f->stream, left = w->plan->n - at;
    part q = {
        .first = first, .base = (uint32_t)(at % SID_WIRE_TILE), .len = left < f->stream ? (uint32_t)left : f->stream};
    if (!q.base) *tile_end = first + s->tile[at / SID_WIRE_TILE];
    uint64_t low = first, high = *tile_end;
    while (low < high) { /* idx ascends */
        const uint64_t mid = low + (high - low) / 2;
        if (s->idx[mid] < q.base + q.len)
            low = mid + 1;
        else
            high = mid;
    }
    q.end = low;
    return q;
}

/* Codes `count` streams, of equal length if there are several. */
static void code_streams(const sid_pass *w, const deadzone_form *f, const sid_rans *m, const uint8_t *code,
                         const part *q, uint32_t count, sid_rans_stream *to) {
    const sparse_work *s = sparse_of(w);
    uint64_t end[DEADZONE_TOGETHER];
    for (uint32_t k = 0; k < count; k++) {
        to[k] = (sid_rans_stream){.symbol = symbols_of(w, k), .words = end_of_words(w, f, k)};
        for (uint32_t j = 0; j < SID_RANS_LANES; j++) to[k].state[j] = SID_RANS_LEAST;
        end[k] = q[k].end;
    }
    for (uint32_t from = (q->len - 1) / DEADZONE_BLOCK * DEADZONE_BLOCK;; from -= DEADZONE_BLOCK) {
        const uint32_t len = q->len - from < DEADZONE_BLOCK ? q->len - from : DEADZONE_BLOCK;
        for (uint32_t k = 0; k < count; k++) {
            const uint32_t base = q[k].base + from;
            uint64_t i = end[k];
            memset(to[k].symbol, 0, len);
            for (; i > q[k].first && s->idx[i - 1] >= base; i--) to[k].symbol[s->idx[i - 1] - base] = code[i - 1];
            end[k] = i;
        }
        w->plan->simd->rans_encode(m, to, count, len);
        if (!from) return;
    }
}

/* Writes counts and words. Returns how many candidates are sent; *limit: the first element that is not. */
static uint64_t write_streams(sid_pass *w, const deadzone_form *f, const uint8_t *code, uint64_t *limit) {
    const sid_plan *p = w->plan;
    const uint64_t streams = deadzone_streams(p->n, f->stream);
    uint8_t *counts = w->payload + f->counts, *words = w->payload + f->words;
    uint64_t used = 0, sent = 0, tile_end = 0;
    sid_rans model;
    deadzone_model(f, &model);
    *limit = p->n;
    memset(counts, 0, f->words - f->counts);
    for (uint64_t t = 0; t < streams && *limit == p->n;) {
        part q[DEADZONE_TOGETHER];
        sid_rans_stream coded[DEADZONE_TOGETHER];
        uint32_t count = 0;
        uint64_t first = sent;
        do { /* the last one may be shorter, and then comes alone */
            q[count] = part_of(w, f, t + count, first, &tile_end);
            first = q[count].end;
        } while (q[count].len == q[0].len && ++count < DEADZONE_TOGETHER && t + count < streams);
        code_streams(w, f, &model, code, q, count, coded);
        for (uint32_t k = 0; k < count; k++, t++) {
            const uint64_t here = (uint64_t)(end_of_words(w, f, k) - coded[k].words), all = DEADZONE_STATE_WORDS + here;
            const uint16_t number = (uint16_t)all;
            if (q[k].first == q[k].end) continue;
            if (all > f->room - used) {
                *limit = t * f->stream;
                break;
            }
            memcpy(counts + 2 * t, &number, 2);
            memcpy(words + 2 * used, coded[k].state, sizeof coded[k].state);
            memcpy(words + 2 * (used + DEADZONE_STATE_WORDS), coded[k].words, 2 * here);
            used += all;
            sent = q[k].end;
        }
    }
    memset(words + 2 * used, 0, p->sizes.payload - f->words - 2 * used);
    return sent;
}

static sid_outcome finish(sid_pass *w) {
    const sid_plan *p = w->plan;
    const deadzone_form f = deadzone_form_of(p);
    sparse_work *s = sparse_settle(w);
    uint64_t *c = w->state->codec, cut, limit;
    const uint32_t last = (uint32_t)c[DEADZONE_LAST], spread = (uint32_t)c[DEADZONE_SPREAD];
    if (s->count < p->k && s->low > 1) return SID_AGAIN;
    sparse_pick pick = {1, 0, 0};
    uint64_t ties = SPARSE_ALL;
    if (p->k && s->count >= p->k) {
        pick = sparse_select(w, p->k, last, spread);
        ties = p->k - pick.above;
        if (ties == pick.ties && !(s->compacted && pick.key < s->low)) ties = SPARSE_ALL; /* as sparse_emit */
    }
    if (p->k) sid_learn_key(c + DEADZONE_LAST, c + DEADZONE_SPREAD, pick.key);
    const uint64_t kept = sparse_keep_best(w, pick.key, ties, s->tile, s->idx, s->val, s->room, &cut);
    s->count = kept;

    sid_steps steps = {.count = f.levels};
    for (uint32_t i = 0; i + 1 < f.levels; i++) {
        const uint64_t above = deadzone_above(&f, kept, i);
        const uint32_t guess = (uint32_t)c[DEADZONE_STEPS + i];
        steps.edge[i] = above < kept ? sparse_select(w, above + 1, guess, spread).key : 0;
    }
    uint8_t *code = (uint8_t *)s->keys; /* of which nothing selects any more */
    p->simd->step_codes(s->val, kept, &steps, code);
    const uint64_t sent = write_streams(w, &f, code, &limit);

    memset(c + DEADZONE_LIMIT, 0, (1 + DEADZONE_LEVELS) * sizeof *c);
    c[DEADZONE_LIMIT] = limit;
    for (uint32_t i = 0; i < f.levels; i++) {
        const uint32_t low = i && steps.edge[i - 1] >= pick.key ? steps.edge[i - 1] + 1 : pick.key;
        const uint32_t high = i + 1 < f.levels ? steps.edge[i] : SID_KEY_INF - 1;
        uint64_t count = 0;
        const double sum = low <= high ? sparse_between(w, sent, low, high, &count) : 0;
        steps.level[i] = deadzone_level(sum, count, low, high);
        c[DEADZONE_STEPS + i] = (uint64_t)steps.level[i] << 32 | (i + 1 < f.levels ? steps.edge[i] : 0);
    }
    memset(w->payload + SID_HEADER_BYTES, 0, f.counts - SID_HEADER_BYTES);
    memcpy(w->payload + SID_HEADER_BYTES, steps.level, 4ull * f.levels);
    w->state->rule = (sid_rule){.key = pick.key, .cut = cut};
    w->stats.found = kept;
    w->stats.threshold = kept ? sid_bits_f32(pick.key) : 0;
    sid_header *h = (sid_header *)(void *)w->payload;
    h->count = sent;
    h->flags = SID_FLAG_LEVELS;
    h->scale = 0;
    return SID_DONE;
}

/* ---- what is kept -------------------------------------------------------------------------------------------- */

static const sid_bound bounds[] = {
    [DEADZONE_LAST] = SID_KEY_BOUND,
    [DEADZONE_SPREAD] = SID_SPREAD_BOUND,
    [DEADZONE_LIMIT] = {0, UINT32_MAX, 0, SID_MAX_N >> 32},
#define STEP_BOUND {0, SID_KEY_INF - 1, 0, SID_KEY_INF - 1}
    [DEADZONE_STEPS] = STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
    STEP_BOUND,
};
_Static_assert(sizeof bounds / sizeof *bounds == DEADZONE_STEPS + DEADZONE_LEVELS, "a word without a bound");

/* Elements before `end` of a vector that begins at `offset`. */
static uint32_t before(uint64_t end, uint64_t offset, uint32_t len) {
    return end <= offset ? 0 : end - offset < len ? (uint32_t)(end - offset) : len;
}

static void keep(const sid_plan *p, const sid_state *s, float *acc, uint64_t offset, uint32_t len) {
    const sid_rule *rule = &s->rule;
    const uint64_t *c = s->codec;
    const deadzone_form f = deadzone_form_of(p);
    sid_steps steps = {.count = f.levels};
    /* an encode would take words that are none for zeros, and then nothing was sent */
    if (rule->key == SID_KEY_NONE || !sid_words_sound(bounds, sizeof bounds / sizeof *bounds, c)) return;
    for (uint32_t i = 0; i < f.levels; i++) {
        steps.edge[i] = (uint32_t)c[DEADZONE_STEPS + i];
        steps.level[i] = (uint32_t)(c[DEADZONE_STEPS + i] >> 32);
    }
    len = before(c[DEADZONE_LIMIT], offset, len);
    const uint32_t ties = before(rule->cut, offset, len);
    p->simd->take_steps(acc, ties, rule->key, &steps);
    p->simd->take_steps(acc + ties, len - ties, rule->key + 1, &steps);
}

static void rescale(const sid_plan *p, sid_state *s, float factor) {
    (void)p;
    const uint32_t key = sid_key(sid_bits_f32((uint32_t)s->codec[DEADZONE_LAST]) * factor);
    s->codec[DEADZONE_LAST] = key < SID_KEY_INF ? key : SID_KEY_INF - 1;
}

/* ---- decode -------------------------------------------------------------------------------------------------- */

static uint32_t count_of(const deadzone_form *f, const uint8_t *payload, uint64_t t) {
    uint16_t count;
    memcpy(&count, payload + f->counts + 2 * t, 2);
    return count;
}
static const uint8_t *word_at(const deadzone_form *f, const uint8_t *payload, uint64_t at) {
    return payload + f->words + 2 * at;
}

/* The counts that check has seen: elements of a level and those above it. */
typedef struct seen {
    uint64_t of[DEADZONE_LEVELS];
    uint32_t wrong;
} seen;

/* `count` streams of `len` elements, each of which has words. */
static void see_streams(const sid_plan *p, const sid_rans *m, sid_rans_stream *s, uint32_t count, uint32_t len,
                        seen *all) {
    const uint32_t levels = deadzone_form_of(p).levels;
    SID_LINE uint8_t symbol[DEADZONE_TOGETHER][DEADZONE_BLOCK];
    uint64_t of[DEADZONE_TOGETHER][DEADZONE_LEVELS] = {{0}};
    for (uint32_t k = 0; k < count; k++) {
        s[k].symbol = symbol[k];
        for (uint32_t j = 0; j < SID_RANS_LANES; j++) all->wrong |= s[k].state[j] < SID_RANS_LEAST;
    }
    for (uint32_t from = 0; from < len; from += DEADZONE_BLOCK) {
        const uint32_t take = len - from < DEADZONE_BLOCK ? len - from : DEADZONE_BLOCK;
        p->simd->rans_decode(m, s, count, take);
        for (uint32_t k = 0; k < count; k++) p->simd->count_levels(symbol[k], take, levels, of[k]);
    }
    for (uint32_t k = 0; k < count; k++) {
        all->wrong |= !of[k][0] || s[k].at != s[k].room;
        for (uint32_t i = 0; i < levels; i++) all->of[i] += of[k][i];
        for (uint32_t j = 0; j < SID_RANS_LANES; j++) all->wrong |= s[k].state[j] != SID_RANS_LEAST;
    }
}

static sid_status check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const deadzone_form f = deadzone_form_of(p);
    const uint64_t streams = deadzone_streams(p->n, f.stream);
    sid_rans model;
    sid_rans_stream waiting[DEADZONE_TOGETHER];
    uint32_t count = 0, below = 0, bad = 0;
    uint64_t used = 0;
    seen all = {.wrong = 0};
    if (h->count > p->k || (h->flags & ~(uint32_t)SID_FLAG_NONFINITE) != SID_FLAG_LEVELS || sid_f32_bits(h->scale))
        return sid_fail(err, SID_E_CORRUPT,
                        "count %llu, flags %08x and scale %g do not belong to a payload of this plan",
                        (unsigned long long)h->count, h->flags, (double)h->scale);
    deadzone_starts(&f, &model);
    for (uint64_t t = 0; t < streams; t++) {
        const uint32_t words = count_of(&f, payload, t);
        const int whole = (t + 1) * f.stream <= p->n;
        if (words && (words < DEADZONE_STATE_WORDS || words > f.room - used))
            return sid_fail(err, SID_E_CORRUPT, "stream %llu has %u words; %llu are left", (unsigned long long)t, words,
                            (unsigned long long)(f.room - used));
        if (count && (count == DEADZONE_TOGETHER || !whole)) {
            see_streams(p, &model, waiting, count, f.stream, &all);
            count = 0;
        }
        if (words) {
            sid_rans_stream *s = &waiting[count++];
            *s = (sid_rans_stream){.words = (uint16_t *)(uintptr_t)word_at(&f, payload, used + DEADZONE_STATE_WORDS),
                                   .room = words - DEADZONE_STATE_WORDS};
            memcpy(s->state, word_at(&f, payload, used), sizeof s->state);
        }
        used += words;
        if (count && t + 1 == streams)
            see_streams(p, &model, waiting, count, whole ? f.stream : (uint32_t)(p->n - t * f.stream), &all);
    }
    if (all.wrong)
        return sid_fail(err, SID_E_CORRUPT,
                        "a stream begins, ends or is as long as no encoder's is, or has zeros alone");
    /* no more elements above a level than their share of k */
    for (uint32_t i = 0; i < f.levels; i++) bad |= all.of[i] > (i ? deadzone_above(&f, p->k, i - 1) : p->k);
    if (bad || all.of[0] != h->count)
        return sid_fail(err, SID_E_CORRUPT, "there are %llu elements, or too many in a level; the header has %llu",
                        (unsigned long long)all.of[0], (unsigned long long)h->count);
    for (uint32_t i = 0; i < f.levels; i++) {
        uint32_t key;
        memcpy(&key, payload + SID_HEADER_BYTES + 4 * i, 4);
        if (all.of[i] > (i + 1 < f.levels ? all.of[i + 1] : 0)) {
            bad |= key <= below || key >= SID_KEY_INF;
            below = key;
        } else
            bad |= key;
    }
    if (bad) return sid_fail(err, SID_E_CORRUPT, "levels do not ascend, or one that occurs nowhere has a magnitude");
    for (uint64_t i = SID_HEADER_BYTES + 4 * f.levels; i < f.counts; i++) bad |= payload[i];
    for (uint64_t i = f.counts + 2 * streams; i < f.words; i++) bad |= payload[i];
    for (uint64_t i = f.words + 2 * used; i < p->sizes.payload; i++) bad |= payload[i];
    if (bad) return sid_fail(err, SID_E_CORRUPT, "bytes between the parts are set; they must be 0");
    return SID_OK;
}

static void open_all(sid_gather *g) {
    const deadzone_form f = deadzone_form_of(g->plan);
    for (uint32_t r = 0; r < g->count; r++) {
        uint64_t words = 0;
        for (uint64_t t = 0; t < g->first / f.stream; t++) words += count_of(&f, sid_payload(g, r), t);
        g->cursor[r] = (sid_cursor){.pos = words};
    }
}

static uint64_t stream_length(const sid_plan *p, uint32_t count, uint32_t *parts) {
    *parts = count < DEADZONE_TOGETHER ? DEADZONE_TOGETHER / count : 1;
    return deadzone_form_of(p).stream;
}

/* Up to SID_PART_TILE elements of each of `parts` streams, one after the other, of each payload. A cursor, of payload r and
 * stream i at place r + i * g->count: pos, the next word; left, 1 where the stream has words; state, the lanes' states. */
static void decode_streams(sid_gather *g, float *const *out, uint64_t offset, uint32_t parts, uint32_t len) {
    const sid_plan *p = g->plan;
    const deadzone_form f = deadzone_form_of(p);
    sid_rans model;
    SID_LINE uint8_t symbol[DEADZONE_TOGETHER][SID_PART_TILE];
    deadzone_starts(&f, &model);
    if (offset % f.stream == 0)
        for (uint32_t r = 0; r < g->count; r++) {
            const uint8_t *payload = sid_payload(g, r);
            uint64_t pos = g->cursor[r].pos;
            for (uint32_t i = 0; i < parts; i++) {
                sid_cursor *c = &g->cursor[r + i * g->count];
                const uint32_t words = count_of(&f, payload, offset / f.stream + i);
                *c = (sid_cursor){.pos = pos, .left = words > 0};
                if (words) {
                    memcpy(c->state, word_at(&f, payload, pos), sizeof c->state);
                    c->pos += DEADZONE_STATE_WORDS;
                }
                pos += words;
            }
        }
    for (uint32_t at = 0; at < parts * g->count;) {
        sid_rans_stream s[DEADZONE_TOGETHER];
        uint32_t from[DEADZONE_TOGETHER], count = 0;
        for (; at < parts * g->count && count < DEADZONE_TOGETHER; at++) {
            sid_cursor *c = &g->cursor[at];
            if (!c->left) continue;
            s[count] =
                (sid_rans_stream){.symbol = symbol[count],
                                  .words = (uint16_t *)(uintptr_t)word_at(&f, sid_payload(g, at % g->count), c->pos),
                                  .room = UINT32_MAX};
            memcpy(s[count].state, c->state, sizeof c->state);
            from[count++] = at;
        }
        if (count) p->simd->rans_decode(&model, s, count, len);
        for (uint32_t k = 0; k < count; k++) {
            sid_cursor *c = &g->cursor[from[k]];
            sid_steps steps = {.count = f.levels};
            memcpy(steps.level, sid_payload(g, from[k] % g->count) + SID_HEADER_BYTES, 4ull * f.levels);
            p->simd->add_steps(out[from[k] / g->count], symbol[k], len, &steps);
            memcpy(c->state, s[k].state, sizeof c->state);
            c->pos += s[k].at;
        }
    }
    if ((offset + len) % f.stream == 0)
        for (uint32_t r = 0; r < g->count; r++) g->cursor[r].pos = g->cursor[r + (parts - 1) * g->count].pos;
}
static void decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    for (uint32_t at = 0; at < len; at += SID_PART_TILE) {
        float *const to = out + at;
        decode_streams(g, &to, offset + at, 1, len - at < SID_PART_TILE ? len - at : SID_PART_TILE);
    }
}
static void decode_parts(sid_gather *g, float *const *out, uint64_t offset, uint32_t parts) {
    decode_streams(g, out, offset, parts, SID_PART_TILE);
}

/* ---- registry ------------------------------------------------------------------------------------------------ */

static const sid_param params[] = {
    [DEADZONE_BITS] = SID_NUMBER_ROW("bits", SID_REAL, .8, .1, 2, "bits an element",
                                     "Size of a payload in bits for each element. Groups of few elements take more."),
};

const sid_codec sid_codec_deadzone = {
    .info = {.name = "deadzone",
             .family = "sparse",
             .paper = "Sullivan 1996 (quantizer with a dead zone, for Laplace elements) and Duda 2013 (rANS)",
             .doc =
                 "The largest elements, each as a sign and one of 4 or 5 magnitudes, entropy-coded to the given number "
                 "of bits. If elements have similar scales, its error is smaller than that of topk or int2 in as many "
                 "bytes, but the loss in training is not always lower. Decode is slow.",
             SID_PARAMETERS(params),
             .traits = SID_SPARSE,
             .wire_id = 25},
    SID_STAGES(plan, begin, sparse_capture, finish, keep, sparse_none, check, open_all, decode),
    .bound = bounds,
    .bounds = sizeof bounds / sizeof *bounds,
    .rescale = rescale,
    .part = stream_length,
    .decode_parts = decode_parts,
};
