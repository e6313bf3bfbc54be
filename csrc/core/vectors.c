#include "vectors.h"

const char *const sid_memory_dtypes[] = {"float32", "bfloat16", NULL}; /* SID_F32 or SID_BF16 */

static const float BF16_MAX = 0x1.fep127f;

static int halves(const sid_plan *p) { return p->kept == SID_BF16; }

static uint16_t *place_of(const sid_plan *p, const sid_state *s, uint32_t v, uint64_t offset) {
    return (uint16_t *)sid_vector(p, s, v) + offset;
}

void sid_vectors_load(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, sid_room *room,
                      float **vec) {
    for (uint32_t v = 0; v < p->memory->vectors; v++)
        if (halves(p)) {
            vec[v] = room->tile[v];
            p->simd->bf16_to_f32(place_of(p, s, v, offset), vec[v], len);
        } else {
            vec[v] = (float *)sid_vector(p, s, v) + offset;
        }
}

void sid_vectors_store(const sid_plan *p, sid_state *s, uint64_t offset, uint32_t len, float *const *vec) {
    for (uint32_t v = 0; v < p->memory->vectors && halves(p); v++) {
        p->simd->clamp(vec[v], vec[v], len, BF16_MAX);
        p->simd->f32_to_bf16(vec[v], place_of(p, s, v, offset), len);
    }
}

void sid_vectors_round(const sid_plan *p, const sid_state *s, uint32_t salt, sid_rounded when, uint64_t offset,
                       uint32_t len, float *const *vec, uint32_t count) {
    SID_LINE uint16_t bits[SID_MAX_TILE + 512];
    const uint32_t skew = (uint32_t)(offset % 8); /* a block has the bits of eight elements */
    for (uint32_t v = 0; v < count && halves(p); v++) {
        const sid_draw draw = {salt, (uint32_t)when * SID_MAX_VECTORS + v, s->steps};
        p->simd->draw16(&draw, offset - skew, len + skew, bits);
        p->simd->round_bf16(vec[v], bits + skew, len);
    }
}

void sid_receive(const sid_plan *p, sid_state *s, uint64_t offset, uint32_t len, const float *x) {
    sid_room room;
    float *vec[SID_MAX_VECTORS];
    sid_vectors_load(p, s, offset, len, &room, vec);
    p->memory->received(p, vec, x, len);
    sid_vectors_round(p, s, s->salt, SID_ROUNDED_RECEIVED, offset, len, vec, p->memory->vectors);
    sid_vectors_store(p, s, offset, len, vec);
}

uint32_t sid_vectors_salt(const sid_plan *p, const sid_step *step) {
    return halves(p) ? sid_salt(step->seed + 0x9e3779b97f4a7c15ull, step->rank) + step->group * 0x85ebca6bu : 0;
}
