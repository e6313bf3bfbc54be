/* The pass over a group, and what is kept of it. */
#include <math.h>
#include <string.h>

#include "checksum.h"
#include "core.h"
#include "sound.h"
#include "vectors.h"

/* Place in a list of segments. */
typedef struct place {
    const sid_segment *seg;
    uint64_t off;
} place;

static sid_status segments_hold(const sid_plan *p, const sid_segment *seg, uint32_t n_seg) {
    uint64_t sum = 0;
    if (n_seg && !seg) return SID_E_ARG;
    for (uint32_t i = 0; i < n_seg; i++) {
        if (seg[i].len > p->n - sum || (seg[i].len && !seg[i].ptr)) return SID_E_ARG;
        if ((uintptr_t)seg[i].ptr % sid_dtype_size(p->dtype)) return SID_E_ARG;
        sum += seg[i].len;
    }
    return sum == p->n ? SID_OK : SID_E_ARG;
}

/* A codec whose bodies are summed supports a limited number of ranks. */
static int fit(const sid_plan *p, const sid_step *step) { return !p->sizes.ranks || step->world <= p->sizes.ranks; }

static int aligned(const void *p) { return (uintptr_t)p % 64 == 0; }

/* The next `len` elements of the list as floats, at most to the end of a segment; *take says how many. */
static const float *next_piece(const sid_plan *p, place *from, uint32_t len, uint32_t *take, float *buf) {
    while (from->off == from->seg->len) {
        from->seg++;
        from->off = 0;
    }
    const uint64_t left = from->seg->len - from->off;
    *take = left < len ? (uint32_t)left : len;
    const float *g = sid_load(p->simd, p->dtype, from->seg->ptr, from->off, *take, buf);
    from->off += *take;
    return g;
}

/* NaN and Inf count as zero: copies g to buf (which may be g) without them and returns how many there were. */
static uint32_t without_nonfinite(const float *g, float *buf, uint32_t len) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < len; i++) {
        const int b = sid_key(g[i]) >= SID_KEY_INF;
        bad += (uint32_t)b;
        buf[i] = b ? 0.0f : g[i];
    }
    return bad;
}

/* Whether the codec's rule says what is kept. */
static int feedback(const sid_plan *p) { return (p->memory->info.traits & SID_FEEDBACK) != 0; }

/* Computes what the last step left of a tile: vec[0], and the vectors that depend on it. */
static void settle(const sid_plan *p, const sid_state *s, float *const *vec, uint64_t offset, uint32_t len) {
    SID_LINE float before[SID_MAX_TILE];
    if (!feedback(p)) return;
    const int tell = p->memory->sent && p->codec->info.traits & SID_SPARSE;
    if (tell) memcpy(before, vec[0], 4ull * len);
    p->codec->keep(p, s, vec[0], offset, len);
    if (tell) p->memory->sent(p, vec, before, len);
    sid_vectors_round(p, s, s->salt, SID_ROUNDED_KEPT, offset, len, vec, 1);
}

/* One tile of acc from state and gradient; what is returned is what the codec reads. vec: the tile of each of the memory's
 * vectors. clean: no NaN or Inf is in it, as a pass before has found. */
static const float *make_tile(sid_pass *w, place *from, float *const *vec, uint64_t offset, uint32_t len, int clean,
                              float *half, float *buf, float *raw) {
    const sid_plan *p = w->plan;
    const uint32_t vectors = p->memory->vectors;
    const int linear = (p->codec->info.traits & SID_LINEAR) != 0;
    uint32_t sent = SID_KEY_NONE;
    sid_levels levels;
    int bad = 0, left = 0;
    /* a rule that is one threshold is applied in the memory's own pass */
    const int apply = vectors && feedback(p);
    if (!(apply && p->codec->sent_from && p->codec->sent_from(p, w->state, offset, len, &sent))) {
        left = apply && p->memory->tile_left && p->kept == SID_F32 && p->codec->sent_levels &&
               p->codec->sent_levels(p, w->state, offset, len, &sent, &levels);
        if (!left) {
            settle(p, w->state, vec, offset, len);
            sent = SID_KEY_NONE;
        }
    }
    for (uint32_t pos = 0, take; pos < len; pos += take) {
        const float *g = next_piece(p, from, len - pos, &take, half);
        int ok;
        if (vectors) {
            float *piece[SID_MAX_VECTORS];
            for (uint32_t v = 0; v < vectors; v++) piece[v] = vec[v] + pos;
            ok = left ? p->memory->tile_left(w, piece, g, take, sent, &levels)
                      : p->memory->tile(w, piece, g, take, sent);
        } else {
            ok = clean || p->simd->finite(g, take);
            if (ok && take == len) return g; /* the gradient is acc: nothing to copy */
        }
        if (linear && (bad || !ok)) memcpy(raw + pos, g, 4ull * take);
        if (!ok) w->nonfinite += without_nonfinite(g, half, take);
        if (!vectors) memcpy(buf + pos, ok ? g : half, 4ull * take);
        if (!bad && !ok && linear && pos) memset(raw, 0, 4ull * pos);
        bad |= !ok;
    }
    sid_vectors_round(p, w->state, w->salt, SID_ROUNDED_ACC, offset, len, vec, vectors);
    const float *acc = vectors ? vec[0] : buf;
    if (!bad || !linear) return acc;
    for (uint32_t i = 0; i < len; i++) /* a linear body carries NaN and Inf as they are, to be summed */
        if (sid_key(raw[i]) < SID_KEY_INF) raw[i] = acc[i];
    return raw;
}

/* Euclidean norm of the gradient, NaN and Inf counted as 0; however it is cut into segments. */
static double norm_of(const sid_plan *p, const sid_segment *seg) {
    SID_LINE float half[SID_TILE], tile[SID_TILE];
    double sums[SID_SUMS];
    place from = {seg, 0};
    memset(sums, 0, sizeof(double) * sid_sums(p->n));
    for (uint64_t offset = 0; offset < p->n; offset += SID_TILE) {
        const uint32_t len = p->n - offset < SID_TILE ? (uint32_t)(p->n - offset) : SID_TILE;
        for (uint32_t pos = 0, take; pos < len; pos += take) {
            const float *g = next_piece(p, &from, len - pos, &take, half);
            without_nonfinite(g, tile + pos, take);
        }
        sid_sums_add(sums, offset, p->simd->sum_squares(tile, len));
    }
    return sqrt(sid_sums_total(sums, p->n));
}

static void copy_tile(const sid_plan *p, const sid_state *to, const sid_state *from, uint64_t offset, uint32_t len) {
    const size_t size = sid_dtype_size(p->kept);
    for (uint32_t v = 0; v < p->memory->vectors; v++)
        memcpy((uint8_t *)sid_vector(p, to, v) + offset * size, (const uint8_t *)sid_vector(p, from, v) + offset * size,
               len * size);
}

/* ---- ahead ---------------------------------------------------------------------------------------------------
 * While the codec's loops over a tile run in the first-level cache, the begin of the next tile comes from memory; the rest of
 * what is kept of it is asked for when that tile's turn has come, and of the gradient the processor's own prefetch. */
enum {
    AHEAD = 2048
}; /* bytes of each vector */
static void ask_for(const void *first, uint64_t bytes) {
    const char *const x = first;
    for (uint64_t i = 0; i < bytes && i < AHEAD; i += 64) __builtin_prefetch(x + i);
}
static void ask_for_kept(const sid_plan *p, const sid_state *s, uint64_t offset, uint64_t from) {
    const uint64_t size = sid_dtype_size(p->kept), bytes = (p->n - offset) * size;
    for (uint32_t v = 0; v < p->memory->vectors && from < bytes; v++)
        ask_for((const uint8_t *)sid_vector(p, s, v) + offset * size + from, bytes - from);
}
static void ask_for_gradient(const sid_plan *p, const place *here) {
    const uint64_t size = sid_dtype_size(p->dtype);
    ask_for((const uint8_t *)here->seg->ptr + here->off * size, (here->seg->len - here->off) * size);
}

/* Elements [from, to). stored: acc is in the state already; clean: as of make_tile; summed: what is written is added to the
 * checksum. room: for vectors that are not floats; else NULL. */
static void tiles_in(sid_pass *w, const sid_segment *seg, uint64_t from, uint64_t to, int stored, int clean, int summed,
                     sid_room *room) {
    const sid_plan *p = w->plan;
    const sid_state *const origin = sid_origin(w->state, w->step), *const source = stored ? w->state : origin;
    const int ahead = p->ahead && p->memory->vectors;
    SID_LINE float half[SID_MAX_TILE], buf[SID_MAX_TILE], raw[SID_MAX_TILE];
    place here = {seg, from};
    while (from < to && here.off >= here.seg->len) {
        here.off -= here.seg->len;
        here.seg++;
    }
    for (uint64_t offset = from; offset < to; offset += p->tile) {
        const uint32_t len = to - offset < p->tile ? (uint32_t)(to - offset) : p->tile;
        float *vec[SID_MAX_VECTORS];
        if (ahead) ask_for_kept(p, source, offset, AHEAD);
        if (origin != w->state && !stored) copy_tile(p, w->state, origin, offset, len);
        sid_vectors_load(p, w->state, offset, len, room, vec);
        const float *acc = stored ? vec[0] : make_tile(w, &here, vec, offset, len, clean, half, buf, raw);
        if (!stored) sid_vectors_store(p, w->state, offset, len, vec);
        if (ahead && offset + len < to) {
            ask_for_kept(p, source, offset + len, 0);
            if (!stored) ask_for_gradient(p, &here);
        }
        p->codec->tile(w, acc, offset, len);
        if (summed) sid_payload_sum(p, w->payload, p->codec->written(w, offset + len), &w->summed);
    }
}

/* The room takes 64 KB of stack, so only those have it who need it. */
static __attribute__((noinline)) void tiles_of_halves(sid_pass *w, const sid_segment *seg, uint64_t from, uint64_t to,
                                                      int stored, int clean, int summed) {
    sid_room room;
    tiles_in(w, seg, from, to, stored, clean, summed, &room);
}

static void tiles(sid_pass *w, const sid_segment *seg, uint64_t from, uint64_t to, int stored, int clean, int summed) {
    if (w->plan->kept == SID_F32)
        tiles_in(w, seg, from, to, stored, clean, summed, NULL);
    else
        tiles_of_halves(w, seg, from, to, stored, clean, summed);
}

static void make_pass(sid_pass *w, const sid_segment *seg) {
    const int again = w->passes > 1 || w->reduction, clean = again && !w->nonfinite;
    const int stored = w->plan->memory->vectors && again;
    w->nonfinite = stored ? w->nonfinite : 0;
    w->plan->codec->begin(w);
    const int summed = w->plan->sums_tiles && w->plan->codec->written != NULL;
    if (summed) {
        const uint64_t first = sid_round_up(w->plan->codec->written(w, 0), 64);
        w->summed = (sid_summed){first, first, 0};
    }
    tiles(w, seg, 0, w->plan->n, stored, clean, summed);
}

/* Clears words of the header that no encode can have written. */
static void mend(const sid_plan *p, sid_state *s) {
    if (!sid_words_sound(p->codec->bound, p->codec->bounds, s->codec)) memset(s->codec, 0, sizeof s->codec);
    if (!sid_rule_sound(&p->ruling, &s->rule)) p->codec->none(&s->rule);
}

/* Before the first pass. */
static sid_status enter(sid_pass *w, const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state, void *work,
                        const sid_step *step, void *payload) {
    if (!p || !state || !work || !step || !payload || !step->world || step->rank >= step->world) return SID_E_ARG;
    if (!(step->carry >= 0) || sid_key(step->carry) >= SID_KEY_INF) return SID_E_ARG;
    if (!aligned(state) || !aligned(work) || !aligned(payload) || step->origin % 64) return SID_E_ARG;
    if (segments_hold(p, seg, n_seg)) return SID_E_ARG;
    if (!fit(p, step)) return SID_E_UNSUPPORTED;
    if (step->origin) {
        const sid_state *const origin = sid_origin(state, step);
        memcpy(state, origin, SID_STATE_BYTES);
        memcpy(sid_extra(p, state), sid_extra(p, origin), sid_plan_extra(p));
    }
    *w = (sid_pass){.plan = p, .step = step, .state = state, .payload = payload, .scratch = work};
    mend(p, w->state);
    w->salt = sid_vectors_salt(p, step);
    if (p->codec->info.traits & SID_STOCHASTIC)
        w->draw = (sid_draw){sid_salt(step->seed, step->rank), step->group, step->step};
    if (p->memory->wants_norm && p->memory->wants_norm(p)) w->norm = norm_of(p, seg);
    if (p->memory->begin) p->memory->begin(w);
    return SID_OK;
}

/* After the last one: the header, but for its checksum. */
static void leave(sid_pass *w) {
    const sid_plan *p = w->plan;
    sid_header *h = (sid_header *)(void *)w->payload;
    const uint32_t flags = h->flags | (w->nonfinite ? (uint32_t)SID_FLAG_NONFINITE : 0u);
    *h = (sid_header){.magic = SID_MAGIC,
                      .version = SID_WIRE_VERSION,
                      .codec = p->codec->info.wire_id,
                      .dtype = (uint32_t)p->dtype,
                      .flags = flags,
                      .n = p->n,
                      .count = h->count,
                      .step = w->step->step,
                      .group = w->step->group,
                      .rank = w->step->rank,
                      .scale = h->scale,
                      .salt = w->draw.salt};
    w->state->draw = w->draw;
    if (p->kept != SID_F32) w->state->salt = w->salt;
    w->state->steps++;
    w->stats.count = h->count;
    w->stats.nonfinite = w->nonfinite;
    w->stats.passes = w->passes;
}

sid_status sid_encode(const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state, void *work,
                      const sid_step *step, void *payload, sid_stats *stats) {
    sid_pass w;
    const sid_status s = enter(&w, p, seg, n_seg, state, work, step, payload);
    if (s) return s;
    do {
        w.passes++;
        make_pass(&w, seg);
    } while (p->codec->finish(&w) == SID_AGAIN);
    if (step->world == 1)
        for (w.reduction = 1; w.reduction < p->sizes.reductions; w.reduction++) {
            w.passes++;
            make_pass(&w, seg);
            p->codec->finish(&w);
        }
    leave(&w);
    ((sid_header *)payload)->checksum = sid_payload_checksum_of(p, payload, &w.summed);
    if (stats) *stats = w.stats;
    return SID_OK;
}

sid_status sid_begin_ranges(sid_ranges *r, const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state,
                            void *work, const sid_step *step, void *payload) {
    const sid_status s = enter(&r->pass, p, seg, n_seg, state, work, step, payload);
    if (s) return s;
    r->step = *step;
    r->pass.step = &r->step;
    r->pass.passes = 1;
    p->codec->begin(&r->pass);
    return SID_OK;
}

void sid_take_range(sid_ranges *r, const sid_segment *seg, uint64_t from, uint64_t to) {
    tiles(&r->pass, seg, from, to, 0, 0, 0);
}

int sid_end_ranges(sid_ranges *r) {
    r->pass.plan->codec->finish(&r->pass);
    leave(&r->pass);
    return r->pass.nonfinite != 0;
}

sid_status sid_next_reduction(const sid_plan *p, uint32_t reduction, const sid_segment *seg, uint32_t n_seg,
                              void *state, void *work, const sid_step *step, void *payload) {
    if (!p || !state || !work || !step || !payload || !step->world || step->rank >= step->world) return SID_E_ARG;
    if (!aligned(state) || !aligned(work) || !aligned(payload) || !reduction || reduction >= p->sizes.reductions)
        return SID_E_ARG;
    if (segments_hold(p, seg, n_seg)) return SID_E_ARG;
    if (!fit(p, step)) return SID_E_UNSUPPORTED;
    sid_pass w = {.plan = p, .step = step, .state = state, .payload = payload, .scratch = work, .reduction = reduction};
    w.draw = w.state->draw; /* sid_encode's, as is what it has seen */
    w.nonfinite = ((const sid_header *)payload)->flags & SID_FLAG_NONFINITE;
    if (step->world == 1) return SID_OK;
    make_pass(&w, seg);
    p->codec->finish(&w);
    return SID_OK;
}

/* ---- what is kept -------------------------------------------------------------------------------------------- */

/* Elements of the tile that begins at `offset`. */
static uint32_t tile_len(const sid_plan *p, uint64_t offset) {
    return p->n - offset < p->tile ? (uint32_t)(p->n - offset) : p->tile;
}

void sid_kept_out(const sid_plan *p, const sid_state *s, float *x, uint64_t stride) {
    const int sent = sid_rule_sound(&p->ruling, &s->rule);
    sid_room room;
    for (uint64_t offset = 0; offset < p->n && p->memory->vectors; offset += p->tile) {
        const uint32_t len = tile_len(p, offset);
        float *vec[SID_MAX_VECTORS];
        sid_vectors_load(p, s, offset, len, &room, vec);
        for (uint32_t v = 0; v < p->memory->vectors; v++) {
            memcpy(x + v * stride + offset, vec[v], 4ull * len);
            vec[v] = x + v * stride + offset;
        }
        if (sent) settle(p, s, vec, offset, len);
    }
}

void sid_kept_in(const sid_plan *p, sid_state *s, const float *x, uint64_t stride) {
    sid_room room;
    for (uint64_t offset = 0; offset < p->n && p->memory->vectors; offset += p->tile) {
        const uint32_t len = tile_len(p, offset);
        float *vec[SID_MAX_VECTORS];
        sid_vectors_load(p, s, offset, len, &room, vec);
        for (uint32_t v = 0; v < p->memory->vectors; v++) memcpy(vec[v], x + v * stride + offset, 4ull * len);
        sid_vectors_store(p, s, offset, len, vec);
    }
    p->codec->none(&s->rule);
}

sid_status sid_residual_out(const sid_plan *p, const void *state, float *x) {
    if (!p || !state || (p->n && !x)) return SID_E_ARG;
    if (!p->memory->vectors && p->n) memset(x, 0, 4 * p->n);
    sid_kept_out(p, state, x, p->n);
    return SID_OK;
}

sid_status sid_residual_in(const sid_plan *p, void *state, const float *x) {
    if (!p || !state || (p->n && !x)) return SID_E_ARG;
    for (uint64_t i = 0; i < p->n * p->memory->vectors; i++)
        if (sid_key(x[i]) >= SID_KEY_INF) return SID_E_ARG;
    sid_kept_in(p, state, x, p->n);
    return SID_OK;
}

sid_status sid_unsend(const sid_plan *p, void *state) {
    if (!p || !state) return SID_E_ARG;
    p->codec->none(&((sid_state *)state)->rule);
    return SID_OK;
}

sid_status sid_forget(const sid_plan *p, void *state) {
    if (!p || !state) return SID_E_ARG;
    memset(sid_vector(p, state, 0), 0, sid_kept_bytes(p));
    return sid_unsend(p, state);
}

sid_status sid_rescale(const sid_plan *p, void *state, float factor) {
    if (!p || !state || !(factor > 0) || sid_key(factor) >= SID_KEY_INF) return SID_E_ARG;
    sid_state *s = state;
    mend(p, s);
    sid_room room;
    for (uint64_t offset = 0; offset < p->n && p->memory->vectors; offset += p->tile) {
        const uint32_t len = tile_len(p, offset);
        float *vec[SID_MAX_VECTORS];
        sid_vectors_load(p, s, offset, len, &room, vec);
        settle(p, s, vec, offset, len);
        for (uint32_t v = 0; v < p->memory->vectors; v++)
            for (uint32_t i = 0; i < len; i++) vec[v][i] = sid_saturated(vec[v][i] * factor);
        sid_vectors_store(p, s, offset, len, vec);
    }
    p->codec->none(&s->rule);
    if (p->codec->rescale) p->codec->rescale(p, s, factor);
    return SID_OK;
}

void sid_take_back(const sid_plan *p, sid_state *s, const sid_segment *seg) {
    place from = {seg, 0};
    sid_room room;
    if (!p->memory->vectors) return;
    for (uint64_t offset = 0; offset < p->n;) {
        SID_LINE float half[SID_TILE], *vec[SID_MAX_VECTORS];
        uint32_t take;
        const uint64_t left = p->n - offset;
        const float *g = next_piece(p, &from, left < SID_TILE ? (uint32_t)left : SID_TILE, &take, half);
        sid_vectors_load(p, s, offset, take, &room, vec);
        without_nonfinite(g, half, take);
        p->memory->undo(p, s, vec, half, take);
        sid_vectors_store(p, s, offset, take, vec);
        offset += take;
    }
    p->codec->none(&s->rule);
}
