/* The sparse body: how it is checked, and how payloads are added up. */
#include <string.h>

#include "packed.h"
#include "sparse_form.h"

/* Levels that an encoder may write: all of them finite, none denormal. */
static sid_status check_levels(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const uint64_t count = ((const sid_header *)(const void *)payload)->count;
    const uint32_t width = sparse_width_of(sparse_values_of(p));
    uint32_t v[2];
    memcpy(v, payload + sparse_value_at(p), 8);
    const int sound = count ? sid_levels_sound(v[0], v[1], width) : !v[0] && !v[1];
    if (sound) return SID_OK;
    return sid_fail(err, SID_E_CORRUPT, "levels start at key %08x in steps of %08x, which no encoder writes", v[0],
                    v[1]);
}

static sid_status check_form(const sid_plan *p, const uint8_t *payload, uint32_t form, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const uint32_t *count = (const uint32_t *)(const void *)(payload + SID_HEADER_BYTES);
    const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n));
    const uint64_t tiles = sid_wire_tiles(p->n);
    uint64_t from = 0;
    form |= sparse_packed(p) ? (uint32_t)SID_FLAG_PACKED : 0u;
    if (h->count > p->cap)
        return sid_fail(err, SID_E_CORRUPT, "count is %llu; the plan's capacity is %llu", (unsigned long long)h->count,
                        (unsigned long long)p->cap);
    if ((h->flags & ~(uint32_t)(SID_FLAG_NONFINITE | SID_FLAG_RAISED)) != form)
        return sid_fail(err, SID_E_CORRUPT, "flags are %08x, which this plan does not write", h->flags);
    for (uint64_t t = 0; t < tiles; t++) {
        const uint64_t c = count[t], size = t + 1 < tiles ? SID_WIRE_TILE : p->n - t * SID_WIRE_TILE;
        int ascending = 1;
        if (c > size || c > h->count - from)
            return sid_fail(err, SID_E_CORRUPT,
                            "tile %llu has %llu entries; it can hold %llu, and %llu are left of the header's count",
                            (unsigned long long)t, (unsigned long long)c, (unsigned long long)size,
                            (unsigned long long)(h->count - from));
        if (sparse_packed(p)) {
            ascending = packed_sound(p, payload, t, from, c, size);
        } else {
            for (uint64_t i = 1; i < c; i++) ascending &= idx[from + i - 1] < idx[from + i];
            ascending &= !c || idx[from + c - 1] < size;
        }
        if (!ascending)
            return sid_fail(err, SID_E_CORRUPT, "the indices of tile %llu do not ascend, or lie outside it",
                            (unsigned long long)t);
        from += c;
    }
    if (from != h->count)
        return sid_fail(err, SID_E_CORRUPT, "the tiles have %llu entries, the header has %llu",
                        (unsigned long long)from, (unsigned long long)h->count);
    return SID_OK;
}

sid_status sparse_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const uint32_t values = sparse_values_of(p);
    const sid_status s = check_form(p, payload, sparse_flag_of(values), err);
    return s || values < SID_VALUES_LOG8 ? s : check_levels(p, payload, err);
}

sid_status sparse_mean_check(const sid_plan *p, const uint8_t *payload, sid_error *err) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    if (sid_key(h->scale) >= SID_KEY_INF || (h->scale == 0) != (h->count == 0))
        return sid_fail(err, SID_E_CORRUPT,
                        "the mean of %llu elements is %g; it must be finite, and 0 only for no elements",
                        (unsigned long long)h->count, (double)h->scale);
    return check_form(p, payload, SID_FLAG_MEAN, err);
}

void sparse_open(sid_gather *g) { memset(g->cursor, 0, g->count * sizeof *g->cursor); }

/* Ascending indices: how many of the first `left` lie below `end`. */
static uint32_t entries_below(const uint16_t *idx, uint32_t left, uint32_t end) {
    uint32_t lo = 0, step = 16;
    while (lo + step <= left && idx[lo + step - 1] < end) {
        lo += step;
        step *= 2;
    }
    uint32_t hi = lo + step < left ? lo + step : left;
    while (lo < hi) {
        const uint32_t mid = lo + (hi - lo) / 2;
        if (idx[mid] < end)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

/* Payload r's entries of elements offset .. offset + len, and the cursor past them. In `buf` where they are packed. */
static const uint16_t *take_indices(sid_gather *g, uint32_t r, uint64_t offset, uint32_t len, uint16_t *buf,
                                    uint64_t *first, uint32_t *here) {
    const sid_plan *p = g->plan;
    const uint8_t *payload = sid_payload(g, r);
    const uint32_t base = (uint32_t)(offset % SID_WIRE_TILE);
    sid_cursor *c = &g->cursor[r];
    if (base == 0) c->left = ((const uint32_t *)(const void *)(payload + SID_HEADER_BYTES))[offset / SID_WIRE_TILE];
    const uint16_t *idx = (const uint16_t *)(const void *)(payload + sid_sparse_index_at(p->n)) + c->pos;
    if (sparse_packed(p)) idx = buf;
    *here = sparse_packed(p) ? packed_read(p, payload, c->pos, offset, c->left, base + len, buf)
                             : entries_below(idx, c->left, base + len);
    *first = c->pos;
    c->pos += *here;
    c->left -= *here;
    /* The next tile's entries of this rank: many short bursts, which hardware does not see coming. */
    if (!sparse_packed(p))
        for (uint32_t i = 0; i < *here; i += 32) __builtin_prefetch(idx + *here + i);
    return idx;
}

/* An index is a place in the wire tile, where `out` begins at `base`. */
static void add_at(float *out, const uint16_t *idx, uint32_t base, const float *v, uint32_t n) {
    float *at = sid_places_from(out, base);
    for (; n >= 4; n -= 4, idx += 4, v += 4)
        for (uint32_t j = 0; j < 4; j++) at[idx[j]] += v[j];
    for (; n; n--) at[*idx++] += *v++;
}

void sparse_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const sid_plan *p = g->plan;
    const uint64_t at_val = sparse_value_at(p);
    const uint32_t base = (uint32_t)(offset % SID_WIRE_TILE), values = sparse_values_of(p);
    SID_LINE uint16_t buf[SID_DECODE_TILE + SID_UNPACK_SLACK];
    for (uint32_t r = 0; r < g->count; r++) {
        const uint8_t *val = sid_payload(g, r) + at_val;
        uint64_t first;
        uint32_t here;
        const uint16_t *idx = take_indices(g, r, offset, len, buf, &first, &here);
        if (values == SID_VALUES_F32)
            add_at(out, idx, base, (const float *)(const void *)val + first, here);
        else if (values == SID_VALUES_F16) {
            SID_LINE float wide[SID_DECODE_TILE];
            p->simd->f16_to_f32((const uint16_t *)(const void *)val + first, wide, here);
            add_at(out, idx, base, wide, here);
        } else {
            uint32_t v[2];
            memcpy(v, val, 8);
            const uint32_t width = sparse_width_of(values);
            const sid_levels l = sid_levels_from(v[0], v[1], width);
            p->simd->add_levels(out, idx, base, val + 8, first, here, &l);
        }
        const uint64_t next = sid_sparse_value_bytes(first + here, values), more = sid_sparse_value_bytes(here, values);
        for (uint64_t i = 0; i < more; i += 64) __builtin_prefetch(sid_payload(g, r) + at_val + next + i);
    }
}

void sparse_mean_decode(sid_gather *g, float *out, uint64_t offset, uint32_t len) {
    const uint32_t base = (uint32_t)(offset % SID_WIRE_TILE);
    SID_LINE uint16_t buf[SID_DECODE_TILE + SID_UNPACK_SLACK];
    for (uint32_t r = 0; r < g->count; r++) {
        const float mean = ((const sid_header *)(const void *)(sid_payload(g, r)))->scale;
        uint64_t first;
        uint32_t here;
        const uint16_t *idx = take_indices(g, r, offset, len, buf, &first, &here);
        float *at = sid_places_from(out, base);
        for (uint32_t i = 0; i < here; i++) at[idx[i]] += mean;
    }
}
