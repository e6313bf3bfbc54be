/* What the tests share: blocks with canaries, groups in segments, gradients. */
#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bits.h"
#include "test.h"

uint64_t rng_next(rng *r) { /* splitmix64 */
    uint64_t z = r->s += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
uint32_t rng_below(rng *r, uint32_t n) { return (uint32_t)(rng_next(r) % n); }
float rng_normal(rng *r) { /* sum of uniforms: close enough */
    double s = 0;
    for (int i = 0; i < 12; i++) s += (double)(rng_next(r) >> 40) / 16777216.0;
    return (float)(s - 6.0);
}

static void *must(void *p) {
    if (!p) {
        printf("out of memory\n");
        exit(2);
    }
    return p;
}

/* ---- blocks ------------------------------------------------------------------------------------------------------ */

enum {
    GUARD = 64,
    CANARY = 0xa5
};

block block_new(size_t bytes, size_t shift) {
    block b = {.bytes = bytes, .room = bytes + 3 * GUARD + shift};
    b.raw = must(malloc(b.room));
    memset(b.raw, CANARY, b.room);
    b.p = b.raw + GUARD + (GUARD - ((uintptr_t)b.raw) % GUARD) % GUARD + shift;
    memset(b.p, 0, bytes);
    return b;
}

static int all_are(const uint8_t *p, size_t len, uint8_t byte) {
    return !len || (*p == byte && !memcmp(p, p + 1, len - 1));
}

int block_intact(const block *b) {
    const uint8_t *end = b->p + b->bytes;
    return all_are(b->raw, (size_t)(b->p - b->raw), CANARY) && all_are(end, (size_t)(b->raw + b->room - end), CANARY);
}

void block_free(block *b) {
    free(b->raw);
    memset(b, 0, sizeof *b);
}

/* ---- vectors ----------------------------------------------------------------------------------------------------- */

size_t dtype_bytes(sid_dtype d) { return d == SID_F32 ? 4 : 2; }
const char *dtype_name(sid_dtype d) { return d == SID_F32 ? "f32" : d == SID_F16 ? "f16" : "bf16"; }

vec vec_new(sid_dtype dtype, uint64_t n, cut how) {
    vec v = {.dtype = dtype, .n = n};
    const size_t room = 4 + (how == CUT_TINY ? 3000 : 8);
    v.seg = must(calloc(room, sizeof *v.seg));
    v.blocks = must(calloc(room, sizeof *v.blocks));
    rng r = {n + (uint64_t)how};
    for (uint64_t at = 0; at < n || v.n_seg == 0;) {
        uint64_t len = n - at;
        if (how == CUT_ODD && v.n_seg < 6 && len > 1) len = 1 + rng_next(&r) % len;
        if (how == CUT_TINY && at < 2000) {
            len = rng_below(&r, 4);
            if (len > n - at) len = n - at;
        }
        const size_t odd = how == CUT_ONE ? 0 : dtype_bytes(dtype) * (1 + 2 * rng_below(&r, 16));
        v.blocks[v.n_seg] = block_new((size_t)len * dtype_bytes(dtype), odd);
        v.seg[v.n_seg] = (sid_segment){v.blocks[v.n_seg].p, len};
        v.n_seg++;
        at += len;
    }
    return v;
}

_Thread_local int core_depth;
_Thread_local unsigned core_asked;
void core_entered(void) { core_depth++; }
int core_left(int status, const char *call) {
    core_depth--;
    CHECK(!core_asked, "%s asked for memory %u times", call, core_asked);
    core_asked = 0;
    return status;
}

static uint16_t to_half(sid_dtype d, float x) { return d == SID_F16 ? sid_f32_to_f16(x) : sid_f32_to_bf16(x); }
static float of_half(sid_dtype d, uint16_t h) { return d == SID_F16 ? sid_f16_to_f32(h) : sid_bf16_to_f32(h); }

void vec_set(vec *v, const float *x) {
    for (uint32_t s = 0; s < v->n_seg; x += v->seg[s++].len)
        if (v->dtype == SID_F32)
            memcpy(v->seg[s].ptr, x, v->blocks[s].bytes);
        else
            for (uint64_t i = 0; i < v->seg[s].len; i++) ((uint16_t *)v->seg[s].ptr)[i] = to_half(v->dtype, x[i]);
}

void vec_get(const vec *v, float *x) {
    for (uint32_t s = 0; s < v->n_seg; x += v->seg[s++].len)
        if (v->dtype == SID_F32)
            memcpy(x, v->seg[s].ptr, v->blocks[s].bytes);
        else
            for (uint64_t i = 0; i < v->seg[s].len; i++) x[i] = of_half(v->dtype, ((const uint16_t *)v->seg[s].ptr)[i]);
}

void vec_fill(vec *v, uint8_t byte) {
    for (uint32_t s = 0; s < v->n_seg; s++) memset(v->blocks[s].p, byte, v->blocks[s].bytes);
}

int vec_filled(const vec *v, uint8_t byte) {
    for (uint32_t s = 0; s < v->n_seg; s++)
        if (!all_are(v->blocks[s].p, v->blocks[s].bytes, byte)) return 0;
    return 1;
}

static uint8_t *flat(const vec *v) {
    uint8_t *all = must(malloc((size_t)v->n * dtype_bytes(v->dtype) + 1)), *q = all;
    for (uint32_t s = 0; s < v->n_seg; q += v->blocks[s++].bytes) memcpy(q, v->blocks[s].p, v->blocks[s].bytes);
    return all;
}

int vec_equal(const vec *a, const vec *b) {
    uint8_t *x = flat(a), *y = flat(b);
    const int same = a->n == b->n && a->dtype == b->dtype && !memcmp(x, y, (size_t)a->n * dtype_bytes(a->dtype));
    free(x);
    free(y);
    return same;
}

int vec_intact(const vec *v) {
    for (uint32_t s = 0; s < v->n_seg; s++)
        if (!block_intact(&v->blocks[s])) return 0;
    return 1;
}

void vec_free(vec *v) {
    for (uint32_t s = 0; s < v->n_seg; s++) block_free(&v->blocks[s]);
    free(v->seg);
    free(v->blocks);
}

/* ---- groups ------------------------------------------------------------------------------------------------------ */

sid_config config_of(const sid_info *codec, const sid_info *memory, uint64_t n, sid_dtype dtype) {
    return (sid_config){.codec = codec->name, .memory = memory->name, .n = n, .dtype = dtype};
}

int go_together(const sid_info *codec, const sid_info *memory) {
    return !(codec->traits & SID_FEEDBACK) || memory->traits & SID_FEEDBACK;
}

const sid_info *home_of(const sid_info *codec) {
    uint32_t i = 0;
    while (!go_together(codec, sid_memory_at(i))) i++;
    return sid_memory_at(i);
}

int group_open(group *g, const sid_config *c) {
    sid_error err = {{0}};
    size_t bytes = 0;
    memset(g, 0, sizeof *g);
    snprintf(g->name, sizeof g->name, "%s + %s, n %llu, %s%s%s", c->codec, c->memory, (unsigned long long)c->n,
             dtype_name(c->dtype), c->n_settings ? ", " : "", c->n_settings ? c->settings[0].name : "");
    if (c->n_settings)
        snprintf(g->name + strlen(g->name), sizeof g->name - strlen(g->name), " %g", c->settings[0].value);
    sid_status s = sid_plan_make(c, NULL, &bytes, &err);
    if (s == SID_E_UNSUPPORTED) return 0;
    CHECK(s == SID_OK, "%s: %s", g->name, err.text);
    if (s) return 0;
    g->plan_mem = block_new(bytes, 0);
    s = sid_plan_make(c, g->plan_mem.p, &bytes, &err);
    CHECK(s == SID_OK && bytes == g->plan_mem.bytes, "%s: the size asked for was not enough: %s", g->name, err.text);
    g->plan = (const sid_plan *)(const void *)g->plan_mem.p;
    g->sizes = sid_plan_sizes(g->plan);
    g->state = block_new((size_t)g->sizes.state, 0);
    g->work = block_new((size_t)g->sizes.work, 0);
    g->payload = block_new((size_t)g->sizes.payload, 0);
    memset(g->work.p, 0x5a, g->work.bytes);       /* garbage is what work holds between calls */
    memset(g->payload.p, 0x5a, g->payload.bytes); /* every byte must be written */
    return 1;
}

int group_intact(const group *g) {
    return block_intact(&g->plan_mem) && block_intact(&g->state) && block_intact(&g->work) && block_intact(&g->payload);
}

void group_close(group *g) {
    block_free(&g->plan_mem);
    block_free(&g->state);
    block_free(&g->work);
    block_free(&g->payload);
}

int setting_at(const sid_info *codec, const sid_info *memory, uint32_t i, sid_setting *s, uint32_t *n) {
    const sid_info *const both[] = {codec, memory};
    *n = 0;
    if (i-- == 0) return 1;
    for (int b = 0; b < 2; b++)
        for (uint32_t k = 0; k < both[b]->n_params; k++) {
            const sid_param *p = &both[b]->params[k];
            const uint32_t steps = p->kind == SID_CHOICE ? (uint32_t)(p->max - p->min) + 1 : 2;
            if (i >= steps) {
                i -= steps;
                continue;
            }
            *s = (sid_setting){p->name, p->kind == SID_CHOICE ? p->min + i : i ? p->max : p->min};
            *n = 1;
            return 1;
        }
    return 0;
}

int conserves(const group *g, const sid_config *c) {
    const sid_info *m = sid_plan_memory(g->plan);
    if (!(m->traits & SID_FEEDBACK) || m->traits & SID_MOMENTUM || !sid_plan_conserves(g->plan)) return 0;
    for (uint32_t i = 0; i < c->n_settings; i++)
        for (uint32_t k = 0; k < m->n_params; k++)
            if (!strcmp(m->params[k].name, c->settings[i].name)) return 0; /* other weights than 1 */
    return 1;
}

static float three_uniforms(uint64_t bits) {
    const float a = (float)(bits & 0xfffff), b = (float)(bits >> 20 & 0xfffff), c = (float)(bits >> 40 & 0xfffff);
    return a * 0x1p-20f * (b * 0x1p-20f) * (c * 0x1p-20f) * (bits >> 63 ? -1.0f : 1.0f);
}

static void draw(float *x, uint64_t n, int kind, uint64_t seed) {
    rng r = {seed * 1000003u + (uint64_t)kind};
    for (uint64_t i = 0; i < n; i++) {
        const float z = kind == DATA_INTEGERS ? (float)rng_below(&r, 121) - 60.0f
                        : kind == DATA_TAILS  ? three_uniforms(rng_next(&r))
                                              : rng_normal(&r);
        switch (kind) {
            case DATA_HEAVY: x[i] = z * z * z * (rng_below(&r, 50) ? 0.01f : 10.0f); break;
            case DATA_EQUAL: x[i] = z < 0 ? -0.5f : 0.5f; break;
            case DATA_ZERO: x[i] = z < 0 ? -0.0f : 0.0f; break;
            case DATA_DENORMAL: x[i] = z * 1e-40f; break;
            case DATA_HUGE: x[i] = z * (FLT_MAX / 7); break;
            default: x[i] = z;
        }
    }
}

/* The first n of a longer vector are those of a shorter one, and the tests ask for the same ones again and again: making
 * them would take more time than the core does. */
void data_make(float *x, uint64_t n, int kind, uint64_t seed) {
    enum {
        KEPT = 64,
        LONGEST = 300000
    };
    static struct {
        float *x;
        uint64_t n, seed;
        int kind;
    } kept[KEPT];
    static unsigned next;
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    if (n > LONGEST) {
        draw(x, n, kind, seed);
        return;
    }
    pthread_mutex_lock(&lock);
    unsigned i = 0;
    while (i < KEPT && !(kept[i].x && kept[i].kind == kind && kept[i].seed == seed)) i++;
    if (i == KEPT) {
        i = next++ % KEPT;
        free(kept[i].x);
        kept[i].x = NULL;
    }
    if (!kept[i].x || kept[i].n < n) {
        kept[i].x = must(realloc(kept[i].x, 4 * (size_t)n + 4));
        kept[i].n = n, kept[i].kind = kind, kept[i].seed = seed;
        draw(kept[i].x, n, kind, seed);
    }
    memcpy(x, kept[i].x, 4 * (size_t)n);
    pthread_mutex_unlock(&lock);
}

void message_sign(uint8_t *message, uint64_t bytes, uint64_t field) {
    uint64_t sum = 0;
    memset(message + field, 0, 8);
    for (uint64_t i = 0; i < bytes / 4; i++) {
        uint32_t w;
        memcpy(&w, message + 4 * i, 4);
        sum += w * sid_sum_key(i);
    }
    memcpy(message + field, &sum, 8);
}

void payload_sign(uint8_t *payload, uint64_t bytes, int linear) {
    float scale;
    memcpy(&scale, payload + 48, 4);
    message_sign(payload, linear && scale != 1.0f ? SID_HEADER_BYTES : bytes, 56);
}
