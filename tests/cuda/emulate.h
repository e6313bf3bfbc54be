/* Just enough of CUDA to run cuda/'s kernels on the CPU, so that their logic is tested where there is no GPU: blocks one
 * after the other (of a cooperative launch, all at once), their threads as fibers that take turns in a random order and
 * meet at barriers, shuffles and ballots. SID_EMULATED_SEED chooses the order. Work on a stream that was created here is
 * deferred until the host waits for it, and is then done in a random order among those that events allow; the default
 * stream works at once. What stops the program, with a text that names what is wrong and the seed: a barrier or shuffle
 * that not all of its threads reach, lanes that a mask leaves out, a block that waits for one that is not resident, and, of
 * kernels that are compiled with -fsanitize=thread, two accesses of which nothing says which one comes first (order.h), and
 * reads of shared memory that nothing has written. What it cannot show: memory order beyond that, speed. */
#ifndef SID_EMULATE_H
#define SID_EMULATE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <initializer_list>
#include <tuple>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)
#define __noinline__
#define __grid_constant__
#define __shared__                                                                                                     \
    static /* what a block leaves is the next one's garbage; not for cooperative launches: dynamic only */
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

/* What others than emulate.cpp may ask of a stream, such as a library that stands in for NCCL. */
struct emulated_stream {
    /* What is on the stream, and what that waits for, is done now. Then the caller reads or writes memory in its name. */
    void (*drain)(emulated_stream *);
    void (*touch)(emulated_stream *, const void *at, uint64_t bytes, int writes, const char *who);
    uint32_t number;
};
typedef struct emulated_stream *cudaStream_t;
typedef struct emulated_event *cudaEvent_t;
enum cudaMemcpyKind {
    cudaMemcpyDefault = 4
};
enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
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
enum cudaFuncAttribute {
    cudaFuncAttributeMaxDynamicSharedMemorySize = 8
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
cudaError_t emulated_shared(const void *kernel, int bytes);
template <typename... P> cudaError_t cudaFuncSetAttribute(void (*kernel)(P...), cudaFuncAttribute, int bytes) {
    return emulated_shared((const void *)kernel, bytes);
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, void *found);

/* ---- streams ------------------------------------------------------------------------------------------------- */

/* `file`, `line`: of the caller, who is named where something is wrong. C names, so that tests in Python call them. */
#define SID_CALLER const char *file = __builtin_FILE(), int line = __builtin_LINE()
extern "C" {
cudaError_t cudaStreamCreate(cudaStream_t *stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags = 0);
cudaError_t cudaEventCreate(cudaEvent_t *event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaMallocAsync(void **at, size_t bytes, cudaStream_t stream, SID_CALLER);
cudaError_t cudaFreeAsync(void *at, cudaStream_t stream, SID_CALLER);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream,
                            SID_CALLER);
cudaError_t cudaMemsetAsync(void *at, int value, size_t bytes, cudaStream_t stream, SID_CALLER);
/* Memory that the caller reads or writes now, as work of a stream, which is drained for it; that is given back, in the order
 * of the stream; or that was given to somebody else, so that what was done to it before does not matter. */
void emulated_touch(cudaStream_t stream, const void *at, uint64_t bytes, int writes, const char *who);
void emulated_give_back(cudaStream_t stream, const void *at, uint64_t bytes, const char *who);
void emulated_fresh(const void *at, uint64_t bytes);
/* The devices that a thread has chosen, which gives each a context: a bit for each. */
int emulated_contexts();
}

namespace emulate {
/* Where a launch stands in the source, and what it is called. Whoever makes one of a text names the launch that follows. */
struct place {
    const char *what, *file;
    int line;
    place(const char *w, SID_CALLER);
    place() : what(""), file(""), line(0) {}
    operator const char *() const { return what; }
};

enum meeting {
    SHUFFLE_XOR,
    SHUFFLE_UP,
    SHUFFLE,
    BALLOT,
    SYNC_WARP,
    BARRIER,
    BARRIER_COUNT,
    BARRIER_OR,
    GRID_BARRIER
};
/* Waits for the lanes of `mask`, for the block or the grid; returns what the others brought along. */
uint64_t meet(meeting what, uint64_t value, uint32_t argument, uint32_t mask = 0xffffffffu);
/* Before an atomic operation on it, by the thread that runs. */
void atomic(const void *at, uint64_t bytes);
void fence();
void *dynamic_shared();

/* A kernel with its arguments, which lie in the object itself. */
struct kernel_call {
    uint64_t bytes = 0;
    virtual void thread() = 0;
    virtual ~kernel_call() = default;
};
template <typename... P> struct kernel_of : kernel_call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
    kernel_of(void (*k)(P...), const P &...a) : kernel(k), arguments(a...) { bytes = sizeof *this; }
    void thread() override { std::apply(kernel, arguments); }
};
cudaError_t launch(const cudaLaunchConfig_t &c, kernel_call *call);
bool has_shared(const void *kernel, uint64_t bytes); /* dynamic */

/* A kernel that was translated from PTX (ptx/translate.py), of which SID_PTX names the folder, and its arguments as the launch
 * of a device lays them out; null: there is none, so the C++ runs. */
typedef void (*translated)(const unsigned char *arguments);
translated translated_of(const void *kernel);
struct translated_call : kernel_call {
    enum {
        ROOM = 4096 /* bytes of arguments that a launch takes */
    };
    translated kernel;
    alignas(64) unsigned char arguments[ROOM];
    size_t used = 0;
    template <typename T> void add(const T &x) {
        used = (used + alignof(T) - 1) / alignof(T) * alignof(T);
        memcpy(arguments + used, &x, sizeof x);
        used += sizeof x;
    }
    template <typename... P> explicit translated_call(translated k, const P &...all) : kernel(k) {
        static_assert((sizeof(P) + ... + 0) + sizeof...(P) * 16 <= ROOM, "");
        (add(all), ...);
        bytes = sizeof *this;
    }
    void thread() override { kernel(arguments); }
};

template <typename T> T shuffle(meeting what, T value, uint32_t argument, uint32_t mask) {
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    bits = meet(what, bits, argument, mask);
    memcpy(&value, &bits, sizeof value);
    return value;
}
} // namespace emulate

template <typename... P> cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *c, void (*kernel)(P...), P... args) {
    if (!emulate::has_shared((const void *)kernel, c->dynamicSmemBytes)) return cudaErrorInvalidValue;
    if (const emulate::translated k = emulate::translated_of((const void *)kernel))
        return emulate::launch(*c, new emulate::translated_call(k, args...));
    return emulate::launch(*c, new emulate::kernel_of<P...>(kernel, args...));
}

inline void __syncthreads() { emulate::meet(emulate::BARRIER, 0, 0); }
inline int __syncthreads_count(int x) { return (int)emulate::meet(emulate::BARRIER_COUNT, x != 0, 0); }
inline int __syncthreads_or(int x) { return (int)emulate::meet(emulate::BARRIER_OR, x != 0, 0); }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { emulate::meet(emulate::SYNC_WARP, 0, 0, mask); }
inline uint32_t __ballot_sync(uint32_t mask, int x) {
    return (uint32_t)emulate::meet(emulate::BALLOT, x != 0, 0, mask);
}
template <typename T> T __shfl_xor_sync(uint32_t mask, T x, uint32_t d) {
    return emulate::shuffle(emulate::SHUFFLE_XOR, x, d, mask);
}
template <typename T> T __shfl_up_sync(uint32_t mask, T x, uint32_t d) {
    return emulate::shuffle(emulate::SHUFFLE_UP, x, d, mask);
}
template <typename T> T __shfl_sync(uint32_t mask, T x, uint32_t lane) {
    return emulate::shuffle(emulate::SHUFFLE, x, lane, mask);
}
template <typename T> T __ldcs(const T *p) { return *p; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz((uint32_t)x) : 32; }
inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
    __extension__ typedef unsigned __int128 wide;
    return (uint64_t)((wide)a * b >> 64);
}
inline void __threadfence() { emulate::fence(); }
inline uint32_t __popc(uint32_t x) { return (uint32_t)__builtin_popcount(x); }

#define SID_ATOMIC template <typename T> __attribute__((no_sanitize("thread"))) T
SID_ATOMIC atomicAdd(T *p, T x) {
    emulate::atomic(p, sizeof *p);
    const T old = *p;
    *p = (T)(old + x);
    return old;
}
SID_ATOMIC atomicMin(T *p, T x) {
    emulate::atomic(p, sizeof *p);
    const T old = *p;
    *p = x < old ? x : old;
    return old;
}
SID_ATOMIC atomicMax(T *p, T x) {
    emulate::atomic(p, sizeof *p);
    const T old = *p;
    *p = x > old ? x : old;
    return old;
}
SID_ATOMIC atomicOr(T *p, T x) {
    emulate::atomic(p, sizeof *p);
    const T old = *p;
    *p = old | x;
    return old;
}

#endif
