/* Every kernel shares this file: launches that report as status and text, loads and stores through the segment table,
 * sums over warps and blocks, conversions. Nothing here synchronises with the host or allocates. A full, aligned tile
 * in one segment takes the quick path, four elements a lane and access; any other goes element by element. */
#ifndef SID_DEVICE_CUH
#define SID_DEVICE_CUH

#ifdef SID_EMULATE
#include "emulate.h" /* tests/cuda: blocks of fibers on the CPU */
#else
#include <cuda_runtime.h> /* and no other: with cuda_fp16.h and cooperative_groups.h a file is twice as long */
#endif

#include "map.h"

#define SID_FULL 0xffffffffu
#ifndef SID_EMULATE
#define SID_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

/* ---- launches ------------------------------------------------------------------------------------------------ */

/* The name of a launch in errors. */
#ifdef SID_EMULATE
typedef emulate::place sid_what; /* and where it is written */
#else
typedef const char *sid_what;
#endif

/* One call of the API on its way to the device. */
struct sid_stream {
    cudaStream_t stream;
    uint32_t processors; /* of the device */
    sid_error *err;
    bool early = false; /* SID_CUDA_EARLY, and the device can */
};

/* The first statement of every kernel: with SID_CUDA_EARLY it may run while the one before it still does, whose memory is
 * not to be touched before this returns. */
__device__ inline void sid_follow() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* ---- devices --------------------------------------------------------------------------------------------------- */

inline sid_status sid_device_failed(sid_error *err, const char *what, cudaError_t e) {
    (void)cudaGetLastError(); /* else the next call would report it again */
    return sid_fail(err, SID_E_DEVICE, "%s: %s", what, cudaGetErrorString(e));
}

/* A thread's current device; -1 for one that has no context yet, where putting back device 0 would make one there. */
sid_status sid_device_of_thread(int *device, sid_error *err);
/* 1 if the kernels wait for the one before them: only code that was compiled for 9.0 or later does, not what the driver has
 * made of PTX for an older one. Of the current device. */
bool sid_kernels_wait();

/* Makes `device` the thread's current one and puts the former back at the end. */
struct sid_device_scope {
    int before = -1;
    bool set = false;
    sid_status enter(int device, sid_stream *to) {
        int processors = 0;
        const bool early = (device & SID_CUDA_EARLY) != 0;
        device &= ~SID_CUDA_EARLY;
        const sid_status s = sid_device_of_thread(&before, to->err);
        if (s) return s;
        cudaError_t e = cudaSuccess;
        if (before != device) {
            e = cudaSetDevice(device);
            set = e == cudaSuccess && before >= 0;
        }
        if (e == cudaSuccess) e = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
        if (e != cudaSuccess) return sid_device_failed(to->err, "choosing the device", e);
        to->processors = (uint32_t)processors;
        to->early = early && sid_kernels_wait();
        return SID_OK;
    }
    ~sid_device_scope() {
        if (set) (void)cudaSetDevice(before);
    }
};

/* A failed launch surfaces here; what fails while it runs surfaces at the caller's next synchronisation. */
template <typename... P, typename... A>
sid_status sid_launch_as(bool together, const sid_stream &to, sid_what what, void (*kernel)(P...), uint64_t grid,
                         uint32_t block, uint32_t shared, const A &...args) {
    if (!grid) return SID_OK;
    cudaLaunchAttribute how[2] = {};
    uint32_t count = 0;
    if (together) {
        how[count].id = cudaLaunchAttributeCooperative;
        how[count++].val.cooperative = 1;
    }
    if (to.early) {
        how[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        how[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((uint32_t)grid);
    config.blockDim = dim3(block);
    config.dynamicSmemBytes = shared;
    config.stream = to.stream;
    config.attrs = count ? how : nullptr;
    config.numAttrs = count;
    /* A kernel gets 48 KB unless it asks, of which its __shared__ variables take some; every device since 7.5 has 64. */
    cudaError_t e = cudaSuccess;
    if (shared > 40 << 10) e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 60 << 10);
    if (e == cudaSuccess) e = cudaLaunchKernelEx(&config, kernel, (P)args...);
    if (e == cudaSuccess) return SID_OK;
    (void)cudaGetLastError();
    return sid_fail(to.err, SID_E_DEVICE, "%s: %s", (const char *)what, cudaGetErrorString(e));
}
template <typename... P, typename... A>
sid_status sid_launch(const sid_stream &to, sid_what what, void (*kernel)(P...), uint64_t grid, uint32_t block,
                      uint32_t shared, const A &...args) {
    return sid_launch_as(false, to, what, kernel, grid, block, shared, args...);
}

/* All blocks at once, so that they can wait for one another: no more of them than the device holds. */
template <typename... P, typename... A>
sid_status sid_launch_together(const sid_stream &to, sid_what what, void (*kernel)(P...), uint64_t grid, uint32_t block,
                               uint32_t shared, const A &...args) {
    return sid_launch_as(true, to, what, kernel, grid, block, shared, args...);
}

/* Blocks for `pieces` of work: each once, but no more than fill the device (a block then takes every grid-th piece). */
inline uint64_t sid_blocks(const sid_stream &to, uint64_t pieces, uint32_t per_processor) {
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

__device__ inline uint32_t sid_warp_max(uint32_t x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(SID_FULL, x);
#else
    for (uint32_t d = SID_LANES / 2; d; d /= 2) {
        const uint32_t y = __shfl_xor_sync(SID_FULL, x, d);
        x = y > x ? y : x;
    }
    return x;
#endif
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

/* Adds up the 128 lanes of a unit in the order of sums.h, four of which are this thread's, and returns the sum in every
 * thread of the warp. In the first two halvings a thread passes on the sums that the other half goes on with, so that
 * each thread keeps two of its four, then one. */
template <typename T> __device__ inline T sid_join_lanes(const T (&lane)[SID_QUAD]) {
    const bool right = sid_lane() & 16, upper = sid_lane() & 8;
    T a = right ? lane[2] : lane[0], b = right ? lane[3] : lane[1];
    a += __shfl_xor_sync(SID_FULL, right ? lane[0] : lane[2], 16);
    b += __shfl_xor_sync(SID_FULL, right ? lane[1] : lane[3], 16);
    T x = upper ? b : a;
    x += __shfl_xor_sync(SID_FULL, upper ? a : b, 8);
    for (uint32_t d = 4; d; d /= 2) x += __shfl_xor_sync(SID_FULL, x, d);
    x += __shfl_xor_sync(SID_FULL, x, 8);
    return x + __shfl_xor_sync(SID_FULL, x, 16);
}

/* Adds up the sums of `units` units in the order of sums.h. A block of SID_SUMS threads calls it; thread 0 has the sum,
 * the others 0. `part` is shared memory, free again after the next barrier. */
__device__ inline double sid_total(const double *sums, uint64_t units, double (&part)[SID_SUMS]) {
    double sum = 0;
    for (uint64_t u = threadIdx.x; u < units; u += SID_SUMS) sum += sums[u];
    part[threadIdx.x] = sum;
    for (uint32_t w = SID_SUMS / 2; w; w /= 2) {
        __syncthreads();
        if (threadIdx.x < w) part[threadIdx.x] = sum += part[threadIdx.x + w];
    }
    return threadIdx.x ? 0 : sum; /* not part[0], which a compiler reads in all threads, before thread 0 writes it */
}

/* ---- waiting for others ---------------------------------------------------------------------------------------- */

/* Reads a word that others add to; afterward this thread sees all that they wrote before they added. It is a load,
 * because atomic operations of many blocks that wait would queue for one line. */
#ifdef SID_EMULATE
inline uint32_t sid_acquire(uint32_t *p) {
    const uint32_t x = atomicAdd(p, 0u);
    __threadfence();
    return x;
}
inline void sid_rest() {}
#else
__device__ inline uint32_t sid_acquire(uint32_t *p) {
    uint32_t x;
    asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
    return x;
}
__device__ inline void sid_rest() { __nanosleep(32); }
#endif

/* ---- numbers ------------------------------------------------------------------------------------------------- */

/* bits.h's conversions in the processor's own instructions, which round the same way; but they drop what a NaN carries. */
#ifdef SID_EMULATE
inline uint16_t sid_to_f16(float x) { return sid_f32_to_f16(x); }
inline float sid_from_f16(uint16_t h) { return sid_f16_to_f32(h); }
#else
__device__ inline uint16_t sid_to_f16(float x) {
    const uint32_t u = sid_f32_bits(x), nan = (u >> 16 & 0x8000u) | 0x7e00u | (u >> 13 & 0x1ffu);
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return sid_key(x) > SID_KEY_INF ? (uint16_t)nan : h;
}
__device__ inline float sid_from_f16(uint16_t h) {
    const uint32_t nan = (uint32_t)(h & 0x8000u) << 16 | 0x7fc00000u | (uint32_t)(h & 0x3ffu) << 13;
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return (h & 0x7fffu) > 0x7c00u ? sid_bits_f32(nan) : x;
}
#endif

/* Returns whether any of them is not finite: NaN or Inf times 0 is NaN, and NaN differs from 0. */
template <uint32_t N> __device__ inline bool sid_overflows(const float (&x)[N][SID_QUAD]) {
    float none = 0;
#pragma unroll
    for (uint32_t r = 0; r < N; r++)
#pragma unroll
        for (uint32_t c = 0; c < SID_QUAD; c++) none = fmaf(x[r][c], 0.0f, none);
    return none != 0;
}
__device__ inline bool sid_overflows(const float (&x)[SID_QUAD]) {
    float none = 0;
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) none = fmaf(x[c], 0.0f, none);
    return none != 0;
}

__device__ inline float sid_decode_half(uint16_t h, sid_dtype d) {
    return d == SID_F16 ? sid_from_f16(h) : sid_bf16_to_f32(h);
}
__device__ inline uint16_t sid_encode_half(float x, sid_dtype d) {
    return d == SID_F16 ? sid_to_f16(x) : sid_f32_to_bf16(x);
}

/* ---- elements -------------------------------------------------------------------------------------------------- */

__host__ __device__ inline uint32_t sid_width(sid_dtype d) { return d == SID_F32 ? 4 : 2; }
__device__ inline bool sid_aligned(const void *p, sid_dtype d) { return (uintptr_t)p % (SID_QUAD * sid_width(d)) == 0; }

__device__ inline float sid_load1(const void *p, sid_dtype d) {
    return d == SID_F32 ? *(const float *)p : sid_decode_half(*(const uint16_t *)p, d);
}
__device__ inline void sid_store1(void *p, sid_dtype d, float x) {
    if (d == SID_F32)
        *(float *)p = x;
    else
        *(uint16_t *)p = sid_encode_half(x, d);
}

/* N quads of dtype d from p on, a row apart, p aligned to a quad: all loads go out before the first is used. They are
 * read once, so they need not stay in the caches. */
template <uint32_t N> __device__ inline void sid_load_quads(const void *p, sid_dtype d, float (&x)[N][SID_QUAD]) {
    if (d == SID_F32) {
        float4 v[N];
#pragma unroll
        for (uint32_t r = 0; r < N; r++) v[r] = __ldcs((const float4 *)p + r * SID_LANES);
#pragma unroll
        for (uint32_t r = 0; r < N; r++) x[r][0] = v[r].x, x[r][1] = v[r].y, x[r][2] = v[r].z, x[r][3] = v[r].w;
        return;
    }
    uint2 v[N];
#pragma unroll
    for (uint32_t r = 0; r < N; r++) v[r] = __ldcs((const uint2 *)p + r * SID_LANES);
#pragma unroll
    for (uint32_t r = 0; r < N; r++) {
        x[r][0] = sid_decode_half((uint16_t)v[r].x, d);
        x[r][1] = sid_decode_half((uint16_t)(v[r].x >> 16), d);
        x[r][2] = sid_decode_half((uint16_t)v[r].y, d);
        x[r][3] = sid_decode_half((uint16_t)(v[r].y >> 16), d);
    }
}

/* One quad at p, aligned to it, rounded once. */
__device__ inline void sid_store_quad(void *p, sid_dtype d, const float (&x)[SID_QUAD]) {
    if (d == SID_F32) {
        *(float4 *)p = make_float4(x[0], x[1], x[2], x[3]);
        return;
    }
    uint32_t h[SID_QUAD];
    for (uint32_t c = 0; c < SID_QUAD; c++) h[c] = sid_encode_half(x[c], d);
    *(uint2 *)p = make_uint2(h[0] | h[1] << 16, h[2] | h[3] << 16);
}

/* ---- segments ------------------------------------------------------------------------------------------------ */

/* The group as a kernel sees it: n elements of a table, which may have others before and after them. `start` lies in work,
 * written by sid_begin. seg: NULL for n zeros, in one segment that nothing reads. */
struct sid_group {
    const sid_segment *seg;
    const uint64_t *start;
    uint64_t n;
    uint32_t n_seg;
    sid_dtype dtype;
    uint64_t before, after;
};

/* One tile of it. `base`: the address of its first element, where the tile is full, lies within one segment and is
 * aligned to a quad; nearly all are. Else NULL, and it goes element by element. */
struct sid_span {
    uint64_t at;
    uint32_t len, seg;
    char *base;
};

__device__ inline sid_span sid_span_of(const sid_group &g, uint64_t tile) {
    sid_span s;
    s.at = tile * SID_TILE;
    s.len = sid_tile_len(g.n, s.at);
    const uint64_t offset = g.before + s.at;
    s.seg = sid_find_segment(g.start, g.n_seg, offset);
    s.base = nullptr;
    if (g.seg && s.len == SID_TILE && offset + SID_TILE <= g.start[s.seg + 1]) {
        char *p = (char *)g.seg[s.seg].ptr + (offset - g.start[s.seg]) * sid_width(g.dtype);
        if (sid_aligned(p, g.dtype)) s.base = p;
    }
    return s;
}

/* Calls f(c, address) for the elements i + c of the tile, c from 0 to count - 1. */
template <typename F>
__device__ inline void sid_each(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count, F f) {
    const uint64_t offset = g.before + s.at + i;
    uint32_t seg = s.seg + sid_find_segment(g.start + s.seg, g.n_seg - s.seg, offset);
#pragma unroll
    for (uint32_t c = 0; c < SID_QUAD; c++) {
        if (c >= count) return;
        while (g.start[seg + 1] <= offset + c) seg++;
        f(c, (char *)g.seg[seg].ptr + (offset + c - g.start[seg]) * sid_width(g.dtype));
    }
}

/* Elements i .. i + count of the tile, the rest zero; QUICK: where base is set, N rows of them. */
template <bool QUICK, uint32_t N>
__device__ inline void sid_get(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count,
                               float (&x)[N][SID_QUAD]) {
    static_assert(QUICK || N == 1, "one row at a time");
    if constexpr (QUICK) {
        sid_load_quads(s.base + i * sid_width(g.dtype), g.dtype, x);
    } else {
        x[0][0] = x[0][1] = x[0][2] = x[0][3] = 0;
        if (!g.seg) return;
        sid_each(g, s, i, count, [&](uint32_t c, const void *p) { x[0][c] = sid_load1(p, g.dtype); });
    }
}
template <bool QUICK>
__device__ inline void sid_put(const sid_group &g, const sid_span &s, uint32_t i, uint32_t count,
                               const float (&x)[SID_QUAD]) {
    if (QUICK)
        sid_store_quad(s.base + i * sid_width(g.dtype), g.dtype, x);
    else
        sid_each(g, s, i, count, [&](uint32_t c, void *p) { sid_store1(p, g.dtype, x[c]); });
}

/* How many of the four elements from i on the tile has. */
__device__ inline uint32_t sid_count4(uint32_t len, uint32_t i) {
    return i >= len ? 0 : len - i < SID_QUAD ? len - i : (uint32_t)SID_QUAD;
}

#endif
