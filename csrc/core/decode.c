/* Payloads -> segments. Everything is checked before anything is written. */
#include <string.h>

#include "checksum.h"
#include "core.h"
#include "vectors.h"

enum {
    STREAM_FROM = 1 << 20
}; /* elements: a group larger than the caches is stored past them */

static sid_status check_one(const sid_plan *p, const uint8_t *payload, const sid_step *step, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    if (h->magic != SID_MAGIC)
        return sid_fail(err, SID_E_CORRUPT, "this is no payload of sidcomp: it starts with %08x", h->magic);
    if (h->version != SID_WIRE_VERSION)
        return sid_fail(err, SID_E_MISMATCH,
                        "the payload has format %u, this build reads format %d: run the same sidcomp on all ranks",
                        h->version, SID_WIRE_VERSION);
    if (h->checksum != sid_payload_checksum(p, payload))
        return sid_fail(err, SID_E_CORRUPT, "the payload's checksum does not match its bytes");
    if (h->codec != p->codec->info.wire_id || h->dtype != (uint32_t)p->dtype || h->n != p->n)
        return sid_fail(
            err, SID_E_MISMATCH,
            "the payload has codec %u, dtype %u, n %llu, the plan %u, %u, %llu: give all ranks the same settings",
            h->codec, h->dtype, (unsigned long long)h->n, p->codec->info.wire_id, (unsigned)p->dtype,
            (unsigned long long)p->n);
    if (h->salt && !(p->codec->info.traits & SID_STOCHASTIC))
        return sid_fail(err, SID_E_CORRUPT, "salt is %08x; it must be 0, because this codec draws no random bits",
                        h->salt);
    if (step && (h->step != step->step || h->group != step->group))
        return sid_fail(err, SID_E_MISMATCH, "the payload is of step %llu, group %u; expected step %llu, group %u",
                        (unsigned long long)h->step, h->group, (unsigned long long)step->step, step->group);
    return p->codec->check(p, payload, err);
}

sid_status sid_check(const sid_plan *p, const void *payload, uint64_t bytes, const sid_step *step, sid_error *err) {
    if (err) err->text[0] = 0;
    if (!p || !payload) return sid_fail(err, SID_E_ARG, "plan or payload is NULL");
    if ((uintptr_t)payload % 8) return sid_fail(err, SID_E_ARG, "a payload must start at a multiple of 8 bytes");
    if (bytes != p->sizes.payload)
        return sid_fail(err, SID_E_CORRUPT, "the payload has %llu bytes; this plan's have %llu",
                        (unsigned long long)bytes, (unsigned long long)p->sizes.payload);
    return check_one(p, payload, step, err);
}

/* Some rank's gradient was not finite: a linear body shows it by itself, other payloads by their flag. */
static int nonfinite(sid_gather *g) {
    const sid_plan *p = g->plan;
    for (uint32_t i = 0; i < g->count; i++)
        if (((const sid_header *)(const void *)(sid_payload(g, i)))->flags & SID_FLAG_NONFINITE) return 1;
    if (!(p->codec->info.traits & SID_LINEAR)) return 0;
    if (p->sizes.body_dtype == SID_F32) { /* the body shows it, at less cost than what is made of it */
        for (uint32_t i = 0; i < g->count; i++) {
            const float *x = (const float *)(const void *)(sid_payload(g, i) + p->sizes.body_offset);
            for (uint64_t offset = 0; offset < p->sizes.body_count; offset += 1u << 16) {
                const uint64_t left = p->sizes.body_count - offset;
                if (!p->simd->finite(x + offset, left < 1u << 16 ? (uint32_t)left : 1u << 16)) return 1;
            }
        }
        if (g->count == 1) return 0; /* several may add up to Inf */
    }
    /* a body of whole numbers holds no NaN: all of it decodes to NaN, or nothing */
    const int alike = p->sizes.body_dtype == SID_I8 && g->count == 1;
    for (uint64_t offset = 0; offset < (alike && p->n ? 1 : p->n); offset += SID_DECODE_TILE) {
        SID_LINE float x[SID_DECODE_TILE] = {0};
        const uint32_t len = p->n - offset < SID_DECODE_TILE ? (uint32_t)(p->n - offset) : SID_DECODE_TILE;
        p->codec->decode(g, x, offset, len);
        if (!p->simd->finite(x, len)) return 1;
    }
    return 0;
}

/* A place among the segments. */
typedef struct place {
    const sid_segment *seg;
    uint64_t off;
} place;
static void settle(place *at) {
    while (at->off >= at->seg->len) {
        at->off -= at->seg->len;
        at->seg++;
    }
}

/* The destination of the tiles of a decode. */
typedef struct sink {
    sid_gather *g;
    sid_dtype dtype; /* of the segments */
    void *state;     /* that is told, or NULL */
    sid_report *report;
    sid_cursor *again;       /* of mean_again: one a payload, */
    uint64_t next;           /* and the first element that they have not come to */
    uint32_t tile;           /* elements that are decoded at a time */
    int watch, summed, past; /* watch: a linear sum may be the first to show NaN or Inf */
} sink;

/* Near float32's largest number the sum of the payloads may overflow although their mean, which is asked for, does not:
 * plain DDP divides before it adds. So where an element of a tile is not finite although every gradient was, the mean is
 * taken again, in float64, and rounded once. The first time, the tiles from `start` to this one are decoded again.
 * all: of every element; else of those whose mean in `out` is not finite. */
static void mean_again(sink *s, uint64_t start, uint64_t from, uint32_t len, float *out, int all) {
    const sid_gather *const g = s->g;
    const sid_plan *p = g->plan;
    const int anew = s->next <= start || s->next > from;
    double sum[SID_DECODE_TILE];
    SID_LINE float y[SID_DECODE_TILE];
    memset(sum, 0, sizeof sum);
    for (uint32_t r = 0; r < g->count; r++) {
        sid_gather one = {.plan = p, .payloads = sid_payload(g, r), .count = 1, .scale = 1, .first = start};
        one.cursor = s->again + r;
        if (anew) p->codec->open(&one);
        for (uint64_t offset = anew ? start : s->next; offset <= from; offset += s->tile) {
            const uint32_t take = p->n - offset < s->tile ? (uint32_t)(p->n - offset) : s->tile;
            memset(y, 0, sizeof y);
            p->codec->decode(&one, y, offset, take);
        }
        for (uint32_t i = 0; i < len; i++) sum[i] += (double)y[i];
    }
    s->next = from + s->tile;
    for (uint32_t i = 0; i < len; i++)
        if (all || sid_key(out[i]) >= SID_KEY_INF) out[i] = sid_mean(sum[i], g->scale);
}

/* Replaces the values among the segments, from seg[0]'s element `off` on, that are not finite by those of x. */
static void mend(const sid_segment *seg, uint64_t off, const float *x, uint32_t len) {
    for (uint32_t i = 0; i < len; i++, off++) {
        while (off == seg->len) {
            seg++;
            off = 0;
        }
        float *y = (float *)seg->ptr + off;
        if (sid_key(*y) >= SID_KEY_INF) *y = x[i];
    }
}

/* Scales a tile and writes it at *at, which it moves on. x: zeros after it. start: as of mean_again. */
static void put_tile(sink *s, float *x, uint64_t start, uint64_t from, uint32_t len, place *at) {
    sid_gather *const g = s->g;
    const sid_plan *const p = g->plan;
    const int here = s->dtype != SID_F32 || s->state; /* scaled before it is stored */
    int bad = (s->watch || (here && s->summed)) && !p->simd->finite(x, len);
    if (here) {
        p->simd->scale(x, x, len, g->scale);
        if (bad && s->summed) {
            mean_again(s, start, from, len, x, 0);
            bad = !p->simd->finite(x, len);
        }
    }
    if (s->state) sid_receive(p, s->state, from, len, x);
    const place first = *at;
    int whole = 1;
    for (uint32_t pos = 0; pos < len;) {
        settle(at);
        const uint64_t left = at->seg->len - at->off;
        const uint32_t take = left < len - pos ? (uint32_t)left : len - pos;
        if (s->dtype == SID_F32)
            whole &=
                p->simd->drain(x + pos, (float *)at->seg->ptr + at->off, take, s->state ? 1.0f : g->scale, s->past);
        else
            sid_store(p->simd, s->dtype, at->seg->ptr, at->off, take, x + pos);
        at->off += take;
        pos += take;
    }
    if (!whole && s->summed && !here) { /* drain looks at what it stores anyway */
        mean_again(s, start, from, len, x, 1);
        bad = bad && !p->simd->finite(x, len);
        mend(first.seg, first.off, x, len);
    }
    if (s->watch && bad) s->report->nonfinite = 1;
    if (s->dtype != SID_F32 || !whole) memset(x, 0, 4ull * len);
}

/* Decodes parts side by side, as long as there are two of them; returns where they end, and moves *at there. Not a part of
 * decode_sound, because its tiles take 64 KB of stack. */
static __attribute__((noinline)) uint64_t decode_parts(sink *s, uint64_t part, uint32_t parts, place *at) {
    const sid_plan *const p = s->g->plan;
    SID_LINE float x[SID_DECODE_PARTS][SID_PART_TILE];
    float *out[SID_DECODE_PARTS];
    uint64_t from = 0;
    memset(x, 0, sizeof x);
    s->tile = SID_PART_TILE;
    for (uint32_t i = 0; i < parts; i++) out[i] = x[i];
    for (; 2 * part <= p->n - from; from += parts * part) {
        place of[SID_DECODE_PARTS];
        const uint64_t left = (p->n - from) / part;
        if (left < parts) parts = (uint32_t)left;
        for (uint32_t i = 0; i < parts; i++) {
            of[i] = *at;
            at->off += part;
            if (from + (i + 1) * part < p->n) settle(at);
        }
        for (uint64_t here = from; here < from + part; here += SID_PART_TILE) {
            p->codec->decode_parts(s->g, out, here, parts);
            for (uint32_t i = 0; i < parts; i++)
                put_tile(s, x[i], from + i * part, here + i * part, SID_PART_TILE, &of[i]);
        }
    }
    s->tile = SID_DECODE_TILE;
    return from;
}

/* The second half of a decode. g: all but its cursors. */
static void decode_sound(sid_gather g, const sid_segment *seg, sid_dtype dtype, void *state, sid_report *report) {
    const sid_plan *const p = g.plan;
    const uint32_t count = g.count;
    /* No longer than there are payloads: for SID_MAX_COUNT of them they would take 384 KB of every thread's stack. */
    sid_cursor cursor[count < SID_DECODE_PARTS ? SID_DECODE_PARTS : count], again[count];
    const int linear = (p->codec->info.traits & SID_LINEAR) != 0;
    g.cursor = cursor;
    const int memory = state && p->memory->vectors;
    p->codec->open(&g);
    /* A linear sum is looked at beforehand only where a memory would have to be corrected before the write. */
    if (!linear || memory) report->nonfinite = (uint32_t)nonfinite(&g);
    if (report->nonfinite && memory) sid_take_back(p, state, seg);

    const int fill = report->nonfinite && !linear;
    const int told = memory && p->memory->received && !report->nonfinite;
    sink s = {.g = &g,
              .dtype = dtype,
              .state = told ? state : NULL,
              .report = report,
              .again = again,
              .tile = SID_DECODE_TILE};
    s.watch = linear && !memory;
    /* Linear bodies were divided before they were rounded, like plain DDP's gradients, but not where each is alone. */
    s.summed = count > 1 && !fill && (!linear || p->alone) && !(p->codec->info.traits & SID_VOTE);
    s.past = p->n >= STREAM_FROM;
    SID_LINE float x[SID_DECODE_TILE] = {0};
    place at = {seg, 0};
    uint32_t parts = 1;
    const uint64_t part = p->codec->part && !fill ? p->codec->part(p, count, &parts) : 0;
    uint64_t from = parts > 1 ? decode_parts(&s, part, parts, &at) : 0;
    for (; from < p->n; from += SID_DECODE_TILE) {
        const uint32_t len = p->n - from < SID_DECODE_TILE ? (uint32_t)(p->n - from) : SID_DECODE_TILE;
        if (fill)
            for (uint32_t i = 0; i < len; i++) x[i] = sid_bits_f32(0x7fc00000u);
        else
            p->codec->decode(&g, x, from, len);
        put_tile(&s, x, part ? from / part * part : 0, from, len, &at);
    }
    if (s.past && dtype == SID_F32) p->simd->fence();
    if (p->codec->learn && state && count == 1 && !report->nonfinite) p->codec->learn(p, state, sid_payload(&g, 0));
}

void sid_decode_sound(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, sid_dtype dtype, void *state, sid_report *report) {
    const sid_gather g = {.plan = p, .payloads = payloads, .stride = stride, .count = count, .scale = scale};
    decode_sound(g, seg, dtype, state, report);
}

static sid_status decode(const sid_gather *g, const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *step,
                         sid_report *report, sid_error *err) {
    const sid_plan *const p = g->plan;
    uint64_t sum = 0;
    for (uint32_t i = 0; i < n_seg; i++) {
        if ((seg[i].len && !seg[i].ptr) || (uintptr_t)seg[i].ptr % sid_dtype_size(p->dtype))
            return sid_fail(err, SID_E_ARG, "segment %u is NULL, or not aligned to its elements", i);
        if (seg[i].len > p->n - sum)
            return sid_fail(err, SID_E_ARG, "the segments hold more than the group's %llu elements",
                            (unsigned long long)p->n);
        sum += seg[i].len;
    }
    if (sum != p->n)
        return sid_fail(err, SID_E_ARG, "the segments hold %llu elements, the group has %llu", (unsigned long long)sum,
                        (unsigned long long)p->n);
    const int linear = (p->codec->info.traits & SID_LINEAR) != 0;
    const sid_header *const first = (const sid_header *)(const void *)sid_payload(g, 0);
    for (uint32_t i = 0; i < g->count; i++) {
        const uint8_t *const payload = sid_payload(g, i);
        sid_status s = check_one(p, payload, step, err);
        if (!s && linear && ((const sid_header *)(const void *)payload)->scale != first->scale)
            s = sid_fail(err, SID_E_MISMATCH,
                         "the payloads are of different world sizes: sum those of one step of one process group");
        if (s) {
            report->culprit = i;
            return s;
        }
    }
    decode_sound(*g, seg, p->dtype, state, report);
    return SID_OK;
}

static sid_status check_arguments(const sid_plan *p, const void *payloads, uint32_t count, const sid_segment *seg,
                                  uint32_t n_seg, const void *state, sid_error *err) {
    if (err) err->text[0] = 0;
    if ((uintptr_t)state % 64) return sid_fail(err, SID_E_ARG, "state must start at a multiple of 64 bytes");
    if (p && payloads && count && count <= SID_MAX_COUNT && (!n_seg || seg)) return SID_OK;
    return sid_fail(err, SID_E_ARG, "plan, payloads or segments is NULL, or count is %u: it must be 1 to %d", count,
                    SID_MAX_COUNT);
}

sid_status sid_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *step, sid_report *report,
                      sid_error *err) {
    sid_report none;
    if (!report) report = &none;
    *report = (sid_report){0, 0};
    const sid_status s = check_arguments(p, payloads, count, seg, n_seg, state, err);
    if (s) return s;
    if ((uintptr_t)payloads % 8 || stride % 8 || (count > 1 && stride < p->sizes.payload))
        return sid_fail(err, SID_E_ARG, "payloads must start at multiples of 8 bytes, and at least %llu bytes apart",
                        (unsigned long long)p->sizes.payload);
    const sid_gather g = {.plan = p, .payloads = payloads, .stride = stride, .count = count, .scale = scale};
    return decode(&g, seg, n_seg, state, step, report, err);
}

sid_status sid_decode_list(const sid_plan *p, const void *const *payloads, uint32_t count, float scale,
                           const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *step,
                           sid_report *report, sid_error *err) {
    sid_report none;
    if (!report) report = &none;
    *report = (sid_report){0, 0};
    const sid_status s = check_arguments(p, payloads, count, seg, n_seg, state, err);
    if (s) return s;
    for (uint32_t i = 0; i < count; i++)
        if (!payloads[i] || (uintptr_t)payloads[i] % 8)
            return sid_fail(err, SID_E_ARG, "payload %u is NULL, or does not start at a multiple of 8 bytes", i);
    const sid_gather g = {.plan = p, .at = payloads, .count = count, .scale = scale};
    return decode(&g, seg, n_seg, state, step, report, err);
}

sid_status sid_learn(const sid_plan *p, void *state, const void *payload) {
    if (!p || !state || !payload || (uintptr_t)payload % 8 || (uintptr_t)state % 64) return SID_E_ARG;
    sid_gather g = {.plan = p, .payloads = payload, .count = 1, .scale = 1};
    if (p->codec->learn && !nonfinite(&g)) p->codec->learn(p, state, payload);
    return SID_OK;
}
