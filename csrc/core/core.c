/* Status texts, the choice of an instruction set, and the loads and stores that every path shares. */
#include "core.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

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

#if defined(__x86_64__)
/* Checks the rest of x86-64-v3, for which not every compiler can ask. Every processor with AVX2 has it, but a virtual
 * machine may hide it. */
static int has_rest_of_v3(void) {
    unsigned a, b, c, d;
    const unsigned movbe = 1u << 22, f16c = 1u << 29, lzcnt = 1u << 5;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & (movbe | f16c)) != (movbe | f16c)) return 0;
    return __get_cpuid(0x80000001u, &a, &b, &c, &d) && c & lzcnt;
}
#endif

sid_isa sid_isa_best(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!has_rest_of_v3()) return SID_ISA_BASE;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd")) {
        const int vbmi2 = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
        return vbmi2 ? SID_ISA_AVX512_VBMI2 : SID_ISA_AVX512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        return SID_ISA_AVX2;
#endif
    return SID_ISA_BASE;
}

int sid_prefetches(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") != 0;
#else
    return 0;
#endif
}

const sid_simd *sid_simd_for(sid_isa isa) {
    const sid_isa best = sid_isa_best();
    if (isa == SID_ISA_AUTO) isa = best;
    if ((unsigned)isa > (unsigned)best) return NULL;
#if defined(__x86_64__)
    if (isa == SID_ISA_AVX512_VBMI2) return &sid_simd_avx512vbmi2;
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

sid_status sid_scale(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype, float factor) {
    const sid_simd *v = sid_simd_for(SID_ISA_AUTO);
    if (!sid_dtype_size(dtype) || (n_seg && !seg)) return SID_E_ARG;
    for (uint32_t s = 0; s < n_seg; s++)
        for (uint64_t offset = 0; offset < seg[s].len;) {
            float buf[SID_TILE];
            const uint32_t len = seg[s].len - offset < SID_TILE ? (uint32_t)(seg[s].len - offset) : SID_TILE;
            if (dtype == SID_F32) {
                float *x = (float *)seg[s].ptr + offset;
                v->scale(x, x, len, factor);
            } else {
                sid_load(v, dtype, seg[s].ptr, offset, len, buf);
                v->scale(buf, buf, len, factor);
                sid_store(v, dtype, seg[s].ptr, offset, len, buf);
            }
            offset += len;
        }
    return SID_OK;
}
