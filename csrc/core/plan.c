/* Configuration -> plan: names resolved, parameters checked, sizes fixed. */
#include <math.h>
#include <string.h>

#include "core.h"

sid_status sid_set_param(const sid_info *info, double *value, const sid_setting *s, int *known, sid_error *err) {
    if (!s->name) return sid_fail(err, SID_E_ARG, "a setting's name is NULL");
    for (uint32_t i = 0; i < info->n_params; i++) {
        const sid_param *q = &info->params[i];
        if (strcmp(q->name, s->name)) continue;
        *known = 1;
        if (!(s->value >= q->min && s->value <= q->max))
            return sid_fail(err, SID_E_PARAM, "%s: %s = %g is out of range: it must lie between %g and %g%s%s",
                            info->name, q->name, s->value, q->min, q->max, *q->unit ? " " : "", q->unit);
        if (q->kind != SID_REAL && s->value != floor(s->value))
            return sid_fail(err, SID_E_PARAM, "%s: %s = %g must be a whole number", info->name, q->name, s->value);
        value[i] = s->value;
    }
    return SID_OK;
}

/* Columns of n elements without a shape. */
static uint64_t as_square(uint64_t n) {
    uint64_t c = (uint64_t)ceil(sqrt((double)n));
    return c ? c : 1;
}

static sid_dtype dtype_of_vectors(const sid_info *memory, const double *value) {
    for (uint32_t i = 0; i < memory->n_params; i++)
        if (!strcmp(memory->params[i].name, SID_MEMORY_DTYPE) && value[i] > 0) return SID_BF16;
    return SID_F32;
}

static sid_status shapes_hold(const sid_config *c, sid_error *err) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < c->n_shapes; i++) {
        if (c->shapes[i].len > c->n - sum)
            return sid_fail(err, SID_E_ARG, "the shapes hold more than the group's %llu elements",
                            (unsigned long long)c->n);
        sum += c->shapes[i].len;
    }
    if (sum == c->n) return SID_OK;
    return sid_fail(err, SID_E_ARG, "the shapes hold %llu elements, the group has %llu", (unsigned long long)sum,
                    (unsigned long long)c->n);
}

sid_status sid_plan_make(const sid_config *c, void *mem, size_t *bytes, sid_error *err) {
    sid_plan p;
    uint64_t scratch = 0;
    if (err) err->text[0] = 0;
    if (!c || !bytes) return sid_fail(err, SID_E_ARG, "config or bytes is NULL: give both");
    memset(&p, 0, sizeof p);
    p.sizes.reductions = 1;
    const sid_info *ci = sid_codec_find(c->codec), *mi = sid_memory_find(c->memory);
    if (!ci) return sid_fail(err, SID_E_PARAM, "no codec is named '%s'", c->codec ? c->codec : "");
    if (!mi) return sid_fail(err, SID_E_PARAM, "no memory is named '%s'", c->memory ? c->memory : "");
    if (c->n > SID_MAX_N)
        return sid_fail(err, SID_E_ARG, "n = %llu: a group holds at most 2^40 elements", (unsigned long long)c->n);
    if (!sid_dtype_size(c->dtype))
        return sid_fail(err, SID_E_ARG, "dtype is %d; it must be float32, float16 or bfloat16", (int)c->dtype);
    if (c->n_settings && !c->settings)
        return sid_fail(err, SID_E_ARG, "settings is NULL, but n_settings is %u", c->n_settings);
    p.codec = sid_codec_of(ci);
    if (ci->traits & SID_FEEDBACK && !(mi->traits & SID_FEEDBACK))
        return sid_fail(
            err, SID_E_PARAM,
            "codec '%s' diverges without error feedback: choose a memory that keeps what was not sent, such "
            "as 'residual', not '%s'",
            ci->name, mi->name);
    const int idle = ci->traits & SID_LOSSLESS && !c->flush && !(mi->traits & SID_MOMENTUM);
    p.memory = sid_memory_of(idle ? sid_memory_find("none") : mi);
    p.tile = SID_TILE;
    p.n = c->n;
    p.dtype = c->dtype;
    p.simd = sid_simd_for(c->isa);
    p.ahead = sid_prefetches();
    p.sums_tiles = p.ahead || p.simd == sid_simd_for(SID_ISA_BASE); /* base: so that tests see it on any processor */
    if (!p.simd)
        return sid_fail(err, SID_E_UNSUPPORTED,
                        "this build or this processor lacks instruction set %d: take SID_ISA_AUTO", (int)c->isa);
    for (uint32_t i = 0; i < ci->n_params; i++) p.codec_param[i] = ci->params[i].dflt;
    for (uint32_t i = 0; i < mi->n_params; i++) p.memory_param[i] = mi->params[i].dflt;
    for (uint32_t i = 0; i < c->n_settings; i++) {
        int known = 0;
        sid_status s = sid_set_param(ci, p.codec_param, &c->settings[i], &known, err);
        if (!s) s = sid_set_param(mi, p.memory_param, &c->settings[i], &known, err);
        if (s) return s;
        if (!known)
            return sid_fail(err, SID_E_PARAM, "neither codec '%s' nor memory '%s' has a parameter '%s'", ci->name,
                            mi->name, c->settings[i].name);
    }
    p.kept = dtype_of_vectors(mi, p.memory_param);
    p.stride = sid_round_up(sid_state_stride(p.n) * sid_dtype_size(p.kept), 64);
    const sid_shape whole = {p.n, as_square(p.n)};
    size_t need = sizeof p;
    if (ci->traits & SID_SHAPED) {
        const sid_status wrong = c->shapes ? shapes_hold(c, err) : SID_OK;
        if (wrong) return wrong;
        p.shapes = c->shapes ? c->shapes : &whole;
        p.n_shapes = c->shapes ? c->n_shapes : 1;
        need += p.n_shapes * sizeof(sid_matrix);
    }
    const size_t room = *bytes;
    *bytes = need;
    if (mem && room < need)
        return sid_fail(err, SID_E_SPACE, "the plan needs %zu bytes, but %zu were given", need, room);
    p.sizes.body_offset = SID_HEADER_BYTES;
    sid_status s = p.codec->plan(&p, &scratch, err);
    if (!s && p.memory->plan) s = p.memory->plan(&p, err);
    if (s) return s;
    p.sizes.k = p.k;
    p.sizes.state = SID_STATE_BYTES + sid_kept_bytes(&p) + sid_plan_extra(&p);
    p.sizes.work = sid_round_up(scratch, 64) + 64;
    if (mem) {
        if ((uintptr_t)mem % 64)
            return sid_fail(err, SID_E_ARG, "the plan's block must start at a multiple of 64 bytes");
        if (p.codec->place) p.codec->place(&p, (sid_matrix *)(void *)((uint8_t *)mem + sizeof p));
        p.shapes = NULL; /* they are the caller's */
        memcpy(mem, &p, sizeof p);
    }
    return SID_OK;
}

sid_sizes sid_plan_sizes(const sid_plan *p) { return p->sizes; }
const sid_info *sid_plan_codec(const sid_plan *p) { return &p->codec->info; }
const sid_info *sid_plan_memory(const sid_plan *p) { return &p->memory->info; }
const char *sid_plan_isa(const sid_plan *p) { return p->simd->name; }
uint32_t sid_memory_vectors(const sid_plan *p) { return p->memory->vectors; }
int sid_plan_conserves(const sid_plan *p) { return !p->drops; }
uint64_t sid_plan_extra(const sid_plan *p) { return sid_round_up(p->extra * sizeof(float), SID_EXTRA_UNIT); }
_Static_assert(SID_EXTRA_UNIT == 16 * sizeof(float), "as sizes.state rounds");

sid_byte_range sid_state_lasting(uint32_t i) {
    static const sid_byte_range parts[] = {
        {offsetof(sid_state, steps), offsetof(sid_state, steps) + sizeof(uint64_t)},
        {offsetof(sid_state, codec), offsetof(sid_state, codec) + SID_WORDS * sizeof(uint64_t)},
    };
    return i < sizeof parts / sizeof *parts ? parts[i] : (sid_byte_range){0, 0};
}

sid_slice sid_plan_slice(const sid_plan *p, uint32_t reduction) {
    const uint64_t size = sid_body_size(p->sizes.body_dtype);
    if (p->sizes.reductions == 1) return (sid_slice){p->sizes.body_offset, reduction ? 0 : p->sizes.body_count};
    const uint64_t first = p->first; /* elements of reduction 0; no codec has more than two */
    return reduction == 0   ? (sid_slice){p->sizes.body_offset, first}
           : reduction == 1 ? (sid_slice){p->sizes.body_offset + first * size, p->sizes.body_count - first}
                            : (sid_slice){0, 0};
}
