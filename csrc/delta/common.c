/* Sizes, arguments and checksums of deltas; and the CUDA calls of a build without CUDA. */
#include "delta.h"

uint64_t sid_delta_bytes(sid_delta_kind kind, uint64_t n) {
    if (!delta_known(kind) || n > SID_DELTA_BLOCK) return 0;
    return DELTA_RAW_AT + n * delta_width(kind);
}
uint64_t sid_delta_bound(sid_delta_kind kind, uint64_t n) { return sid_round_up(sid_delta_bytes(kind, n), 8); }

uint64_t sid_delta_runs(sid_delta_kind kind, uint64_t n) {
    if (!delta_known(kind) || n > SID_DELTA_BLOCK) return 0;
    return (n * delta_width(kind) + SID_DELTA_RUN - 1) / SID_DELTA_RUN;
}

const sid_simd *delta_fits(const sid_delta_block *b, sid_status *status, sid_error *err) {
    const sid_simd *v = b ? sid_simd_for(b->isa) : NULL;
    if (!b || !delta_known(b->kind))
        *status = sid_fail(err, SID_E_ARG, "there is no such kind of elements");
    else if (!b->n || b->n > SID_DELTA_BLOCK || b->first + b->n < b->n)
        *status = sid_fail(err, SID_E_ARG, "a block has 1 to %d elements, not %u", (int)SID_DELTA_BLOCK, b->n);
    else if (!v)
        *status = sid_fail(err, SID_E_UNSUPPORTED, "this processor has not the instruction set that was asked for");
    else
        return v;
    return NULL;
}

const sid_simd *delta_sound(const sid_delta_block *b, sid_status *status, sid_error *err) {
    const sid_simd *v = delta_fits(b, status, err);
    uint64_t left = v ? b->first + b->n : 0;
    for (uint32_t i = 0; v && i < b->n_seg && left; i++) left -= b->seg[i].len < left ? b->seg[i].len : left;
    if (!left) return v;
    *status = sid_fail(err, SID_E_ARG, "the block ends %llu elements after the vector", (unsigned long long)left);
    return NULL;
}

uint64_t delta_sum(const sid_simd *v, const sid_delta_block *b) {
    _Alignas(64) uint8_t room[DELTA_TILE_BYTES];
    const uint32_t width = delta_width(b->kind);
    delta_cursor c = delta_from(b->seg, b->first);
    uint64_t sum = 0;
    for (uint32_t from = 0; from < b->n; from += DELTA_TILE) {
        const uint32_t len = delta_tile_length(b->n, from);
        sum += delta_tile_sum(v, delta_tile(&c, len, width, room), from, len, width);
    }
    return sum;
}

uint64_t sid_delta_checksum(const void *data, uint64_t bytes) {
    const sid_segment seg = {(void *)(uintptr_t)data, bytes};
    const sid_simd *v = sid_simd_for(SID_ISA_AUTO);
    delta_cursor c = {&seg, 0};
    uint64_t sum = 0;
    for (uint64_t at = 0; at < bytes; at += DELTA_TILE) {
        _Alignas(64) uint8_t room[DELTA_TILE_BYTES];
        const uint32_t len = bytes - at < DELTA_TILE ? (uint32_t)(bytes - at) : DELTA_TILE;
        sum +=
            v->checksum((const uint32_t *)(const void *)delta_tile(&c, len, 1, room), at / 4, sid_round_up(len, 8) / 4);
    }
    return sum;
}

#ifndef SID_WITH_CUDA
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NO_CUDA(err) sid_fail(err, SID_E_UNSUPPORTED, "this build has no CUDA kernels")
sid_status sid_cuda_delta_find(const sid_cuda_weights *now, const uint64_t *old, uint32_t room, sid_delta_found *found,
                               sid_delta_run *runs, sid_delta_change *changes, int device, void *stream,
                               sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_delta_sum(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                              sid_delta_found *found, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_delta_change(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                                 int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
#endif
