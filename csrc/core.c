/* Status texts, choice of instruction set, and the loads, stores and checksums that every path shares. */
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *sid_status_text(int status) {
    switch (status) {
        case SID_OK: return "ok";
        case SID_E_ARG: return "wrong argument";
        case SID_E_PARAM: return "wrong parameter";
        case SID_E_SPACE: return "block too small";
        case SID_E_CORRUPT: return "corrupt payload";
        case SID_E_MISMATCH: return "payload of another plan, group or step";
        case SID_E_UNSUPPORTED: return "not supported by this build or device";
        case SID_E_DEVICE: return "CUDA call failed";
        case SID_E_PEER: return "another rank has ended, hangs, or cannot be reached";
        default: return "unknown status";
    }
}

sid_status sid_fail(sid_error *err, sid_status s, const char *fmt, ...) {
    if (err) {
        va_list a;
        va_start(a, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, a);
        va_end(a);
    }
    return s;
}

sid_isa sid_isa_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd"))
        return SID_ISA_AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return SID_ISA_AVX2; /* every processor with these has F16C too */
#endif
    return SID_ISA_BASE;
}

const sid_simd *sid_simd_for(sid_isa isa) {
    const sid_isa best = sid_isa_best();
    if (isa == SID_ISA_AUTO) isa = best;
    if ((unsigned)isa > (unsigned)best) return NULL;
#if defined(__x86_64__)
    if (isa == SID_ISA_AVX512) return &sid_simd_avx512;
    if (isa == SID_ISA_AVX2) return &sid_simd_avx2;
#endif
    return &sid_simd_base;
}

size_t sid_dtype_size(sid_dtype d) { return d == SID_F32 ? 4u : d == SID_F16 || d == SID_BF16 ? 2u : 0u; }
size_t sid_body_size(sid_dtype d) { return d == SID_I8 ? 1u : sid_dtype_size(d); }

const float *sid_load(const sid_simd *v, sid_dtype d, const void *p, uint64_t from, uint32_t len, float *buf) {
    if (d == SID_F32) return (const float *)p + from;
    (d == SID_F16 ? v->f16_to_f32 : v->bf16_to_f32)((const uint16_t *)p + from, buf, len);
    return buf;
}

void sid_store(const sid_simd *v, sid_dtype d, void *p, uint64_t from, uint32_t len, const float *x) {
    if (d == SID_F32)
        memcpy((float *)p + from, x, 4ull * len);
    else
        (d == SID_F16 ? v->f32_to_f16 : v->f32_to_bf16)(x, (uint16_t *)p + from, len);
}

#define K1(q) 1u + (q) * (SID_SUM_PAIR_1 + SID_SUM_PAIR_2 * (q))
#define K8(q) K1(q), K1(q + 1), K1(q + 2), K1(q + 3), K1(q + 4), K1(q + 5), K1(q + 6), K1(q + 7)
#define K64(q) K8(q), K8(q + 8), K8(q + 16), K8(q + 24), K8(q + 32), K8(q + 40), K8(q + 48), K8(q + 56)
_Alignas(64) const uint64_t sid_sum_pairs[SID_SUM_PAIRS] = {K64(0u),   K64(64u),  K64(128u), K64(192u),
                                                            K64(256u), K64(320u), K64(384u), K64(448u)};

uint64_t sid_message_checksum(const sid_simd *v, const void *message, uint64_t bytes, uint64_t field) {
    const uint32_t *w = message;
    const uint64_t own = field / 4;
    return v->checksum(w, 0, bytes / 4) - w[own] * sid_sum_key(own) - w[own + 1] * sid_sum_key(own + 1);
}

uint64_t sid_payload_checksum(const sid_plan *p, const uint8_t *payload) {
    const sid_header *h = (const sid_header *)(const void *)payload;
    const int whole = !(p->codec->info.traits & SID_LINEAR) || h->scale == 1.0f;
    return sid_message_checksum(p->simd, payload, whole ? p->sizes.payload : SID_HEADER_BYTES,
                                offsetof(sid_header, checksum));
}

uint64_t sid_checksum(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype) {
    const sid_simd *v = sid_simd_for(SID_ISA_AUTO);
    const size_t size = sid_dtype_size(dtype);
    uint64_t h = 0;
    for (uint32_t s = 0; s < n_seg; s++) { /* a segment may start anywhere: go through aligned blocks */
        const uint8_t *p = seg[s].ptr;
        uint64_t left = seg[s].len * size;
        while (left) {
            uint32_t block[SID_SUM_BLOCK];
            const uint64_t take = left < sizeof block ? left : sizeof block, full = sid_round_up(take, 8);
            memcpy(block, p, take);
            memset((uint8_t *)block + take, 0, full - take);
            h = (h ^ h >> 29) * 0xbf58476d1ce4e5b9ull + v->checksum(block, 0, full / 4) + take;
            p += take;
            left -= take;
        }
    }
    return h ^ h >> 32;
}

sid_status sid_scale(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype, float factor) {
    const sid_simd *v = sid_simd_for(SID_ISA_AUTO);
    if (!sid_dtype_size(dtype) || (n_seg && !seg)) return SID_E_ARG;
    for (uint32_t s = 0; s < n_seg; s++)
        for (uint64_t at = 0; at < seg[s].len;) {
            float buf[SID_TILE];
            const uint32_t len = seg[s].len - at < SID_TILE ? (uint32_t)(seg[s].len - at) : SID_TILE;
            if (dtype == SID_F32) {
                float *x = (float *)seg[s].ptr + at;
                v->scale(x, x, len, factor);
            } else {
                sid_load(v, dtype, seg[s].ptr, at, len, buf);
                v->scale(buf, buf, len, factor);
                sid_store(v, dtype, seg[s].ptr, at, len, buf);
            }
            at += len;
        }
    return SID_OK;
}

#ifndef SID_WITH_CUDA
#define NO_CUDA(err)                                                                                                   \
    sid_fail(err, SID_E_UNSUPPORTED, "built without CUDA; install nvcc and build again with SIDCOMP_CUDA=1")
int sid_cuda_built(void) { return 0; }
sid_status sid_cuda_devices(int *count, sid_error *err) {
    *count = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_work(const sid_plan *p, uint64_t *bytes, sid_error *err) {
    (void)p;
    *bytes = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_encode(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           const sid_step *at, void *payload, void *stats_dev, int device, void *stream,
                           sid_error *err) {
    (void)p, (void)segs_dev, (void)n_seg, (void)state, (void)work, (void)at, (void)payload, (void)stats_dev;
    (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_next_round(const sid_plan *p, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                               void *state, void *work, const sid_step *at, void *payload, int device, void *stream,
                               sid_error *err) {
    (void)p, (void)round, (void)segs_dev, (void)n_seg, (void)state, (void)work, (void)at, (void)payload;
    (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                           const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work, const sid_step *at,
                           void *report_dev, int device, void *stream, sid_error *err) {
    (void)p, (void)payloads, (void)stride, (void)count, (void)scale, (void)segs_dev, (void)n_seg, (void)state;
    (void)work, (void)at, (void)report_dev, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_show(const void *report_dev, uint32_t mark, void *seen, int device, void *stream, sid_error *err) {
    (void)report_dev, (void)mark, (void)seen, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_cancel(const sid_cuda_kept *kept_dev, uint32_t count, int always, int device, void *stream,
                           sid_error *err) {
    (void)kept_dev, (void)count, (void)always, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    (void)x;
    *bytes = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *at, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err) {
    (void)x, (void)round, (void)segs_dev, (void)n_seg, (void)state, (void)work, (void)at, (void)wire, (void)stats_dev;
    (void)report_dev, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_settle(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *state,
                                    void *work, void *wire, int device, void *stream, sid_error *err) {
    (void)x, (void)segs_dev, (void)n_seg, (void)state, (void)work, (void)wire, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_unsend(const sid_exchange *x, void *state, int device, void *stream, sid_error *err) {
    (void)x, (void)state, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_checksum(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                                      const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    (void)x, (void)segs_dev, (void)n_seg, (void)work, (void)report_dev, (void)sum_dev, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_device_enter(int device, int *before, sid_error *err) {
    (void)device, (void)before;
    return NO_CUDA(err);
}
void sid_device_leave(int before) { (void)before; }
sid_status sid_cuda_settle(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           void *payload, int device, void *stream, sid_error *err) {
    (void)p, (void)segs_dev, (void)n_seg, (void)state, (void)work, (void)payload, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_unsend(const sid_plan *p, void *state, int device, void *stream, sid_error *err) {
    (void)p, (void)state, (void)device, (void)stream;
    return NO_CUDA(err);
}
sid_status sid_cuda_checksum(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                             const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    (void)p, (void)segs_dev, (void)n_seg, (void)work, (void)report_dev, (void)sum_dev, (void)device, (void)stream;
    return NO_CUDA(err);
}
#endif
