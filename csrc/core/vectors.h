/* The memory's vectors as floats, some elements at a time, whether the state holds them in float32 or in bfloat16.
 *
 * In bfloat16 a vector is rounded at random, to the one of its two neighbors that is more often the closer one, so that its
 * expectation stays what it was: rounding to nearest would lose every change that is small beside the element (Gupta et al.
 * 2015, "Deep Learning with Limited Numerical Precision", section 3.1). What a rounding changes is kept by nobody: it is
 * the price of half the bytes. acc is rounded before the codec reads it, so that the codec sees what is stored. What the
 * codec's rule leaves of acc is rounded where it is computed, so that a checkpoint holds exactly what the next step reads.
 * The random bits depend on the seed, rank, group, encodes so far, vector and element, on nothing else. */
#ifndef SID_VECTORS_H
#define SID_VECTORS_H

#include "../codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Room for a tile of every vector. */
typedef struct sid_room {
    SID_LINE float tile[SID_MAX_VECTORS][SID_MAX_TILE];
} sid_room;

/* vec[v] <- elements [offset, offset + len) of each vector, len <= SID_MAX_TILE: in the state itself if it holds floats,
 * otherwise in `room`. */
void sid_vectors_load(const sid_plan *p, const sid_state *s, uint64_t offset, uint32_t len, sid_room *room,
                      float **vec);
/* The state's elements <- vec, which is what sid_vectors_load returned. To nearest, and not to Inf. */
void sid_vectors_store(const sid_plan *p, sid_state *s, uint64_t offset, uint32_t len, float *const *vec);

typedef enum sid_rounded { /* when it happens: each has random bits of its own */
    SID_ROUNDED_KEPT,
    SID_ROUNDED_ACC,
    SID_ROUNDED_RECEIVED
} sid_rounded;
/* Rounds `count` vectors at random to what the state can hold. With float32 it changes nothing. salt: of the step. */
void sid_vectors_round(const sid_plan *p, const sid_state *s, uint32_t salt, sid_rounded when, uint64_t offset,
                       uint32_t len, float *const *vec, uint32_t count);

/* The memory learns what the ranks made of elements [offset, offset + len) (sid_memory.received). */
void sid_receive(const sid_plan *p, sid_state *s, uint64_t offset, uint32_t len, const float *x);

/* The salt of a step. It differs from a codec's own (rng.h), with which it would be correlated. */
uint32_t sid_vectors_salt(const sid_plan *p, const sid_step *step);

#ifdef __cplusplus
}
#endif
#endif
