/* What every kernel shares: launches that report as status and text, loads and stores through the segment table, sums
 * over warps and blocks. Nothing here synchronises with the host or allocates. */
#ifndef SID_DEVICE_CUH
#define SID_DEVICE_CUH

#ifdef SID_EMULATE
#include "emulate.h" /* tests/cuda: blocks of fibers on the CPU */
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif

#include "map.h"

#define SID_FULL 0xffffffffu
#ifndef SID_EMULATE
#define SID_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

/* ---- launches ------------------------------------------------------------------------------------------------ */

/* One call of the API on its way to the device. */
struct sid_stream {
    cudaStream_t stream;
    uint32_t processors; /* of the device */
    sid_error *err;
};

/* A failed launch surfaces here; what fails while it runs surfaces at the caller's next synchronisation. */
template <typename... P, typename... A>
sid_status sid_launch(const sid_stream &to, const char *what, void (*kernel)(P...), uint64_t grid, uint32_t block,
                      uint32_t shared, const A &...args) {
    if (!grid) return SID_OK;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((uint32_t)grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared;
    config.stream = to.stream;
    const cudaError_t e = cudaLaunchKernelEx(&config, kernel, (P)args...);
    if (e == cudaSuccess) return SID_OK;
    (void)cudaGetLastError();
    return sid_fail(to.err, SID_E_DEVICE, "%s: %s", what, cudaGetErrorString(e));
}

/* Blocks for `pieces` of work: each once, but no more than fill the device (a block then takes every grid-th piece). */
inline uint64_t sid_grid(const sid_stream &to, uint64_t pieces, uint32_t per_processor) {
    const uint64_t most = (uint64_t)to.processors * per_processor;
    return pieces < most ? pieces : most;
}

/* ---- sums ---------------------------------------------------------------------------------------------------- */

__device__ inline uint32_t sid_lane() { return threadIdx.x % SID_LANES; }
__device__ inline uint32_t sid_warp() { return threadIdx.x / SID_LANES; }
__device__ inline uint32_t sid_lanes_below() { return (1u << sid_lane()) - 1u; }

template <typename T> __device__ inline T sid_warp_sum(T x) {
    for (uint32_t d = SID_LANES / 2; d; d /= 2) x += __shfl_xor_sync(SID_FULL, x, d);
    return x;
}

/* Sum over the lanes up to and including this one. */
template <typename T> __device__ inline T sid_warp_scan(T x) {
    for (uint32_t d = 1; d < SID_LANES; d *= 2) {
        const T y = __shfl_up_sync(SID_FULL, x, d);
        if (sid_lane() >= d) x += y;
    }
    return x;
}

/* The same over a block of up to 1024 threads; *total: over all. `part` is 33 words of shared memory, free again after
 * the next barrier. */
template <typename T> __device__ inline T sid_block_scan(T x, T *part, T *total) {
    const uint32_t warps = blockDim.x / SID_LANES;
    x = sid_warp_scan(x);
    if (sid_lane() == SID_LANES - 1) part[sid_warp()] = x;
    __syncthreads();
    if (sid_warp() == 0) {
        const T mine = sid_lane() < warps ? part[sid_lane()] : (T)0;
        const T upto = sid_warp_scan(mine);
        part[sid_lane()] = upto - mine;
        if (sid_lane() == SID_LANES - 1) part[SID_LANES] = upto;
    }
    __syncthreads();
    *total = part[SID_LANES];
    return x + part[sid_warp()];
}

/* ---- numbers ------------------------------------------------------------------------------------------------- */

/* bits.h in the processor's own instruction, which rounds the same way; only NaN keeps its payload in software. */
__device__ inline uint16_t sid_to_f16(float x) {
#ifndef SID_EMULATE
    if (sid_key(x) <= SID_KEY_INF) return __half_as_ushort(__float2half_rn(x));
#endif
    return sid_f32_to_f16(x);
}
__device__ inline float sid_from_f16(uint16_t h) {
#ifndef SID_EMULATE
    if ((h & 0x7fffu) <= 0x7c00u) return __half2float(__ushort_as_half(h));
#endif
    return sid_f16_to_f32(h);
}

__device__ inline float sid_decode_half(uint16_t h, sid_dtype d) {
    return d == SID_F16 ? sid_from_f16(h) : sid_bf16_to_f32(h);
}
__device__ inline uint16_t sid_encode_half(float x, sid_dtype d) {
    return d == SID_F16 ? sid_to_f16(x) : sid_f32_to_bf16(x);
}

/* ---- four elements ------------------------------------------------------------------------------------------- */

/* Four elements of dtype d at p, which is aligned to the element only; `count` of them exist, the rest read as zero. */
__device__ inline void sid_load4(const void *p, sid_dtype d, uint32_t count, float (&x)[SID_QUAD]) {
    const uintptr_t a = (uintptr_t)p;
    if (d == SID_F32) {
        if (count == SID_QUAD && a % 16 == 0) {
            const float4 v = *(const float4 *)p;
            x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
        } else
            for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = c < count ? ((const float *)p)[c] : 0.0f;
        return;
    }
    uint16_t h[SID_QUAD];
    if (count == SID_QUAD && a % 8 == 0) {
        const uint2 v = *(const uint2 *)p;
        h[0] = (uint16_t)v.x, h[1] = (uint16_t)(v.x >> 16), h[2] = (uint16_t)v.y, h[3] = (uint16_t)(v.y >> 16);
    } else
        for (uint32_t c = 0; c < SID_QUAD; c++) h[c] = c < count ? ((const uint16_t *)p)[c] : (uint16_t)0;
    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = sid_decode_half(h[c], d);
}

/* The reverse, rounded once. */
__device__ inline void sid_store4(void *p, sid_dtype d, uint32_t count, const float (&x)[SID_QUAD]) {
    const uintptr_t a = (uintptr_t)p;
    if (d == SID_F32) {
        if (count == SID_QUAD && a % 16 == 0)
            *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
        else
            for (uint32_t c = 0; c < SID_QUAD; c++)
                if (c < count) ((float *)p)[c] = x[c];
        return;
    }
    uint16_t h[SID_QUAD];
    for (uint32_t c = 0; c < SID_QUAD; c++) h[c] = sid_encode_half(x[c], d);
    if (count == SID_QUAD && a % 8 == 0)
        *(uint2 *)p = make_uint2(h[0] | (uint32_t)h[1] << 16, h[2] | (uint32_t)h[3] << 16);
    else
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (c < count) ((uint16_t *)p)[c] = h[c];
}

/* ---- segments ------------------------------------------------------------------------------------------------ */

/* The group as a kernel sees it. `start` lies in work, written by sid_begin. */
struct sid_group {
    const sid_segment *seg;
    const uint64_t *start;
    uint64_t n;
    uint32_t n_seg;
    sid_dtype dtype;
};

/* One tile of it. Most lie within one segment: then `base` is the address of their first element. */
struct sid_span {
    uint64_t at;
    uint32_t len, seg;
    char *base;
};

__host__ __device__ inline uint32_t sid_width(sid_dtype d) { return d == SID_F32 ? 4 : 2; }

__device__ inline sid_span sid_span_of(const sid_group &g, uint64_t tile) {
    sid_span s;
    s.at = tile * SID_TILE;
    s.len = sid_tile_len(g.n, s.at);
    s.seg = sid_find_segment(g.start, g.n_seg, s.at);
    const bool whole = s.at + s.len <= g.start[s.seg + 1];
    s.base = whole ? (char *)g.seg[s.seg].ptr + (s.at - g.start[s.seg]) * sid_width(g.dtype) : nullptr;
    return s;
}

/* Calls f(address, first, count) for the pieces of elements i .. i + count of the tile that lie side by side. */
template <typename F>
__device__ inline void sid_pieces(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count, F f) {
    const uint64_t end = s.at + i + count;
    uint64_t at = s.at + i;
    uint32_t seg = s.seg + sid_find_segment(g.start + s.seg, g.n_seg - s.seg, at);
    for (uint32_t first = 0; at < end;) {
        const uint64_t stop = g.start[seg + 1] < end ? g.start[seg + 1] : end;
        const uint32_t take = (uint32_t)(stop - at);
        if (take) f((char *)g.seg[seg].ptr + (at - g.start[seg]) * sid_width(g.dtype), first, take);
        first += take;
        at = stop;
        seg++;
    }
}

/* Elements i .. i + count of the tile, count <= 4. */
__device__ inline void sid_get4(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count,
                                float (&x)[SID_QUAD]) {
    if (s.base) {
        sid_load4(s.base + (uint64_t)i * sid_width(g.dtype), g.dtype, count, x);
        return;
    }
    for (uint32_t c = 0; c < SID_QUAD; c++) x[c] = 0;
    sid_pieces(g, s, i, count, [&](const char *p, uint32_t first, uint32_t take) {
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (c - first < take) {
                float one[SID_QUAD];
                sid_load4(p + (c - first) * sid_width(g.dtype), g.dtype, 1, one);
                x[c] = one[0];
            }
    });
}
__device__ inline void sid_put4(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count,
                                const float (&x)[SID_QUAD]) {
    if (s.base) {
        sid_store4(s.base + (uint64_t)i * sid_width(g.dtype), g.dtype, count, x);
        return;
    }
    sid_pieces(g, s, i, count, [&](char *p, uint32_t first, uint32_t take) {
        for (uint32_t c = 0; c < SID_QUAD; c++)
            if (c - first < take) {
                const float one[SID_QUAD] = {x[c], 0, 0, 0};
                sid_store4(p + (c - first) * sid_width(g.dtype), g.dtype, 1, one);
            }
    });
}

/* How many of the four elements from i on the tile has. */
__device__ inline uint32_t sid_count4(uint32_t len, uint32_t i) {
    return i >= len ? 0 : len - i < SID_QUAD ? len - i : (uint32_t)SID_QUAD;
}

#endif
