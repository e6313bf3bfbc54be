/* The core's own files and the exchanges share these functions, beside sidcomp.h. Codecs and memories do not see them. */
#ifndef SID_CORE_H
#define SID_CORE_H

#include "../codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- registry.c ------------------------------------------------------------------------------------------------ */
const sid_codec *sid_codec_of(const sid_info *i);
const sid_memory *sid_memory_of(const sid_info *i);

/* ---- core.c ------------------------------------------------------------------------------------------------------ */
/* 1 where encode is faster if it asks for the next tile's elements while it computes, and reads what it has written of a
 * payload at once, for the checksum. On Intel's Sapphire Rapids it is; on AMD's EPYC both were slower. */
int sid_prefetches(void);

/* ---- encode.c: the state a step starts from, and what it keeps --------------------------------------------------- */
static inline const sid_state *sid_origin(const void *state, const sid_step *step) {
    return (const sid_state *)(const void *)((const uint8_t *)state + step->origin);
}
/* Bytes of all vectors, slack included. */
static inline uint64_t sid_kept_bytes(const sid_plan *p) { return p->memory->vectors * p->stride; }
/* sid_residual_out and _in with the memory's vectors `stride` floats apart, and x finite. */
void sid_kept_out(const sid_plan *p, const sid_state *s, float *x, uint64_t stride);
void sid_kept_in(const sid_plan *p, sid_state *s, const float *x, uint64_t stride);
/* Takes this step's gradient, which the segments still hold, out of the memory again. */
void sid_take_back(const sid_plan *p, sid_state *s, const sid_segment *seg);

/* sid_encode in pieces, for a caller that sends some elements while it has yet to read others. The ranges together are the
 * group, in any order, each from a multiple of 256 on. The codec passes over acc once, and its tiles do not depend on each
 * other (SID_SIGNS). seg, state, work and payload stay as in sid_begin_ranges until the end. The bits of a range are in the
 * payload after sid_take_range; the header, without a checksum, after sid_end_ranges, which returns 1 if there were NaN or
 * Inf. */
typedef struct sid_ranges {
    sid_pass pass;
    sid_step step;
} sid_ranges;
sid_status sid_begin_ranges(sid_ranges *r, const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state,
                            void *work, const sid_step *step, void *payload);
void sid_take_range(sid_ranges *r, const sid_segment *seg, uint64_t from, uint64_t to);
int sid_end_ranges(sid_ranges *r);

/* ---- decode.c -------------------------------------------------------------------------------------------------- */
/* The second half of sid_decode, for payloads that it, or sid_check, has found sound. `dtype` is that of the segments,
 * whatever the plan's. A state must come with segments of the plan's dtype, which still hold the gradient. */
void sid_decode_sound(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, sid_dtype dtype, void *state, sid_report *report);

/* ---- a device: cuda/, or no_cuda.c ------------------------------------------------------------------------------ */
/* Makes `device` the thread's own; *before: what it was, to be put back. */
sid_status sid_device_enter(int device, int *before, sid_error *err);
void sid_device_leave(int before);
/* Multiprocessors; 0 if that cannot be known. */
int sid_device_processors(int device);

#ifdef __cplusplus
}
#endif
#endif
