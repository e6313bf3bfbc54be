/* Just enough of CUDA to run cuda/'s kernels on the CPU, so that their logic is tested where there is no GPU: blocks one
 * after the other (of a cooperative launch, all at once), their threads as fibers that take turns in a shuffled order and
 * meet at barriers, shuffles and ballots. A barrier or shuffle that not all of its threads reach stops the program. What
 * it cannot show: races between blocks, memory order, speed. */
#ifndef SID_EMULATE_H
#define SID_EMULATE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <functional>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __noinline__
#define __shared__ static /* what a block leaves is the next one's garbage; not for cooperative launches: dynamic only */
#define SID_DYNAMIC_SHARED(type, name) type *name = (type *)emulate::dynamic_shared()

struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct dim3 {
    uint32_t x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(uint32_t n) : x(n) {}
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

typedef struct emulated_stream *cudaStream_t;
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101
};
enum cudaDeviceAttr {
    cudaDevAttrMultiProcessorCount,
    cudaDevAttrComputeCapabilityMajor
};
#define CUDART_VERSION 13000
struct cudaFuncAttributes {
    int ptxVersion;
};
enum {
    cudaEnableDefault = 0
};
enum cudaLaunchAttributeID {
    cudaLaunchAttributeCooperative = 2,
    cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    struct {
        int cooperative, programmaticStreamSerializationAllowed;
    } val;
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    uint32_t numAttrs;
};

const char *cudaGetErrorString(cudaError_t e);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int device);
/* SID_EMULATED_PTX, or 90. */
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, const void *kernel);
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, void *found);

namespace emulate {
enum meeting {
    SHUFFLE_XOR,
    SHUFFLE_UP,
    SHUFFLE,
    BALLOT,
    BARRIER,
    BARRIER_COUNT,
    BARRIER_OR,
    GRID_BARRIER
};
/* Waits for the warp, block or grid; returns what the others brought along. */
uint64_t meet(meeting what, uint64_t value, uint32_t argument);
void *dynamic_shared();
void launch(const cudaLaunchConfig_t &c, const std::function<void()> &thread);

template <typename T> T shuffle(meeting what, T value, uint32_t argument) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(what, bits, argument);
    memcpy(&value, &bits, sizeof value);
    return value;
}
} // namespace emulate

template <typename... P> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...), P... args) {
    emulate::launch(*c, [&] { kernel(args...); });
    return cudaSuccess;
}

inline void __syncthreads() { emulate::meet(emulate::BARRIER, 0, 0); }
inline int __syncthreads_count(int x) { return (int)emulate::meet(emulate::BARRIER_COUNT, x != 0, 0); }
inline int __syncthreads_or(int x) { return (int)emulate::meet(emulate::BARRIER_OR, x != 0, 0); }
inline void __syncwarp() { emulate::meet(emulate::BALLOT, 0, 0); }
inline uint32_t __ballot_sync(uint32_t, int x) { return (uint32_t)emulate::meet(emulate::BALLOT, x != 0, 0); }
template <typename T> T __shfl_xor_sync(uint32_t, T x, uint32_t d) {
    return emulate::shuffle(emulate::SHUFFLE_XOR, x, d);
}
template <typename T> T __shfl_up_sync(uint32_t, T x, uint32_t d) {
    return emulate::shuffle(emulate::SHUFFLE_UP, x, d);
}
template <typename T> T __shfl_sync(uint32_t, T x, uint32_t lane) {
    return emulate::shuffle(emulate::SHUFFLE, x, lane);
}
template <typename T> T __ldcs(const T *p) { return *p; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((uint32_t)x) : 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    return (uint64_t)((wide)a * b >> 64);
}
inline uint32_t __popc(uint32_t x) { return (uint32_t)__builtin_popcount(x); }

template <typename T> T atomicAdd(T *p, T x) {
    const T old = *p;
    *p = (T)(old + x);
    return old;
}
template <typename T> T atomicMin(T *p, T x) {
    const T old = *p;
    *p = x < old ? x : old;
    return old;
}
template <typename T> T atomicMax(T *p, T x) {
    const T old = *p;
    *p = x > old ? x : old;
    return old;
}
template <typename T> T atomicOr(T *p, T x) {
    const T old = *p;
    *p = old | x;
    return old;
}

#endif
