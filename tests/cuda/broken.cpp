/* Kernels and streams that are broken on purpose, each beside the same mended, for the emulation to find: test_order.py.
 * `broken CASE broken|mended` ends with 0 if the result is right, with 3 if it is wrong, and with a text if it is stopped. */
#include <stdio.h>
#include <stdlib.h>

#include "emulate.h"

namespace {

enum {
    N = 256,
    WARP = 32
};

bool mended;

template <typename... P, typename... A>
void launch(emulate::place, bool together, cudaStream_t stream, uint32_t blocks, uint32_t threads, void (*kernel)(P...),
            A... args) {
    cudaLaunchAttribute how = {};
    how.id = cudaLaunchAttributeCooperative;
    how.val.cooperative = 1;
    cudaLaunchConfig_t c = {};
    c.gridDim = dim3(blocks);
    c.blockDim = dim3(threads);
    c.stream = stream;
    c.attrs = together ? &how : nullptr;
    c.numAttrs = together;
    cudaLaunchKernelEx(&c, kernel, (P)args...);
}

uint32_t *buffer(uint32_t words, cudaStream_t stream) {
    void *p = nullptr;
    cudaMallocAsync(&p, words * sizeof(uint32_t), stream);
    cudaMemsetAsync(p, 0, words * sizeof(uint32_t), stream);
    return (uint32_t *)p;
}
cudaStream_t a_stream() {
    cudaStream_t s;
    cudaStreamCreate(&s);
    return s;
}
void waits_for(cudaStream_t later, cudaStream_t earlier) {
    cudaEvent_t e;
    cudaEventCreate(&e);
    cudaEventRecord(e, earlier);
    cudaStreamWaitEvent(later, e);
}

bool every(const uint32_t *x, uint32_t n, uint32_t (*is)(uint32_t)) {
    cudaDeviceSynchronize();
    for (uint32_t i = 0; i < n; i++)
        if (x[i] != is(i)) return false;
    return true;
}

/* ---- kernels ------------------------------------------------------------------------------------------------- */

void fill(uint32_t *x, uint32_t value) { x[blockIdx.x * blockDim.x + threadIdx.x] = value; }
void copy(uint32_t *to, const uint32_t *from) {
    const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;
    to[i] = from[i];
}

void swap_neighbours(uint32_t *x, bool sync) {
    __shared__ uint32_t held[WARP];
    held[threadIdx.x] = threadIdx.x;
    if (sync) __syncwarp();
    x[threadIdx.x] = held[threadIdx.x ^ 1];
}

/* Half of the warp is not there. */
void half_sum(uint32_t *x, uint32_t mask, uint32_t apart) {
    uint32_t sum = threadIdx.x;
    if (threadIdx.x < WARP / 2) sum += __shfl_xor_sync(mask, sum, apart);
    x[threadIdx.x] = sum;
}

/* Each block waits for the flag of the one beside it. */
void pass_on(uint32_t *flags, uint32_t *x) {
    const uint32_t beside = (blockIdx.x + 1) % gridDim.x;
    if (threadIdx.x == 0) {
        atomicAdd(flags + blockIdx.x, 1u);
        while (!atomicAdd(flags + beside, 0u)) {
        }
    }
    __syncthreads();
    x[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}

void reverse(uint32_t *x, bool sync) {
    __shared__ uint32_t held[N];
    held[threadIdx.x] = threadIdx.x;
    if (sync) __syncthreads();
    x[threadIdx.x] = held[N - 1 - threadIdx.x];
}

void unwritten(uint32_t *x, bool write) {
    __shared__ uint32_t held[WARP];
    if (write || threadIdx.x) held[threadIdx.x] = 1;
    x[blockIdx.x * WARP + threadIdx.x] = held[threadIdx.x];
}

void count(uint32_t *x, bool atomics) {
    if (atomics)
        atomicAdd(x, 1u);
    else
        *x += 1;
}

/* The last block to come adds up what all have written. */
void add_up(uint32_t *x, uint32_t *come, uint32_t *sum, bool fence) {
    __shared__ bool last;
    x[blockIdx.x * blockDim.x + threadIdx.x] = 1;
    __syncthreads();
    if (threadIdx.x == 0) {
        if (fence) __threadfence();
        last = atomicAdd(come, 1u) + 1 == gridDim.x;
        if (fence) __threadfence();
    }
    __syncthreads();
    if (!last || threadIdx.x) return;
    for (uint32_t i = 0; i < gridDim.x * blockDim.x; i++) *sum += x[i];
}

/* ---- cases --------------------------------------------------------------------------------------------------- */

uint32_t one(uint32_t) { return 1; }

bool missing_syncwarp() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(WARP, s);
    launch("swap", false, s, 1, WARP, swap_neighbours, x, mended);
    return every(x, WARP, [](uint32_t i) { return i ^ 1; });
}

bool missing_event() {
    const cudaStream_t a = a_stream(), b = a_stream();
    uint32_t *x = buffer(N, a), *y = buffer(N, a);
    waits_for(b, a);
    launch("fill late", false, a, N / 64, 64, fill, x, 1u);
    if (mended) waits_for(b, a);
    launch("copy early", false, b, N / 64, 64, copy, y, x);
    return every(y, N, one);
}

bool missing_event_to_overwrite() { /* the other way round: what is still read is written */
    const cudaStream_t a = a_stream(), b = a_stream();
    uint32_t *x = buffer(N, a), *y = buffer(N, a);
    launch("fill", false, a, N / 64, 64, fill, x, 1u);
    waits_for(b, a);
    launch("copy late", false, a, N / 64, 64, copy, y, x);
    if (mended) waits_for(b, a);
    cudaMemsetAsync(x, 0, N * sizeof *x, b);
    return every(y, N, one);
}

bool freed_in_use() {
    const cudaStream_t a = a_stream(), b = a_stream();
    uint32_t *x = buffer(N, a), *y = buffer(N, a);
    launch("fill", false, a, N / 64, 64, fill, x, 1u);
    waits_for(b, a);
    launch("copy from what goes", false, b, N / 64, 64, copy, y, x);
    if (mended) waits_for(a, b);
    cudaFreeAsync(x, a);
    return every(y, N, one);
}

bool wrong_mask() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(WARP, s);
    launch("half with all lanes", false, s, 1, WARP, half_sum, x, mended ? 0xffffu : 0xffffffffu, 1u);
    return every(x, WARP, [](uint32_t i) { return i < WARP / 2 ? i + (i ^ 1) : i; });
}
bool mask_without_the_source() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(WARP, s);
    launch("half from the other half", false, s, 1, WARP, half_sum, x, 0xffffu, mended ? 1u : 16u);
    return every(x, WARP, [](uint32_t i) { return i < WARP / 2 ? i + (i ^ 1) : i; });
}
bool mask_without_oneself() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(WARP, s);
    launch("half without one", false, s, 1, WARP, half_sum, x, mended ? 0xffffu : 0xfffeu, 1u);
    return every(x, WARP, [](uint32_t i) { return i < WARP / 2 ? i + (i ^ 1) : i; });
}

bool not_resident() {
    const cudaStream_t s = a_stream();
    uint32_t *flags = buffer(4, s), *x = buffer(4 * WARP, s);
    launch("pass on", mended, s, 4, WARP, pass_on, flags, x);
    return every(x, 4 * WARP, one);
}
bool too_many_together() {
    const cudaStream_t s = a_stream();
    uint32_t *flags = buffer(9, s), *x = buffer(9 * N, s);
    launch("pass on together", true, s, mended ? 8 : 9, N, pass_on, flags, x);
    return every(x, 8 * N, one);
}

bool missing_barrier() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(N, s);
    launch("reverse", false, s, 1, N, reverse, x, mended);
    return every(x, N, [](uint32_t i) { return N - 1 - i; });
}
bool unwritten_shared_memory() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(2 * WARP, s);
    launch("unwritten", false, s, 2, WARP, unwritten, x, mended);
    return every(x, 2 * WARP, one);
}
bool missing_atomic() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(1, s);
    launch("count", false, s, 4, WARP, count, x, mended);
    return every(x, 1, [](uint32_t) { return 4u * WARP; });
}
bool missing_fence() {
    const cudaStream_t s = a_stream();
    uint32_t *x = buffer(4 * WARP, s), *come = buffer(1, s), *sum = buffer(1, s);
    launch("add up", false, s, 4, WARP, add_up, x, come, sum, mended);
    return every(sum, 1, [](uint32_t) { return 4u * WARP; });
}

const struct {
    const char *name;
    bool (*run)();
} cases[] = {
#define CASE(name) {#name, name}
    CASE(missing_syncwarp),  CASE(missing_event),           CASE(missing_event_to_overwrite), CASE(freed_in_use),
    CASE(wrong_mask),        CASE(mask_without_the_source), CASE(mask_without_oneself),       CASE(not_resident),
    CASE(too_many_together), CASE(missing_barrier),         CASE(unwritten_shared_memory),    CASE(missing_atomic),
    CASE(missing_fence),
};

} // namespace

int main(int argc, char **argv) {
    for (const auto &c : cases) {
        if (argc != 3) {
            puts(c.name);
            continue;
        }
        if (strcmp(c.name, argv[1])) continue;
        mended = !strcmp(argv[2], "mended");
        return c.run() ? 0 : 3;
    }
    return argc == 1 ? 0 : 2;
}
