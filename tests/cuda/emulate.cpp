/* emulate.h's device: two multiprocessors, so that grids are small and every block has more than one piece to do. */
#include "emulate.h"

#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#include <memory>
#include <mutex>
#include <vector>

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulate {
namespace {

enum {
    LANES = 32,
    BLOCK = 1024, /* threads, at most */
    TOGETHER = 2048,
    STACK = 1 << 17,
    SHARED = 48 << 10,
    GUARD = 64,
    GARBAGE = 0xa7
};
enum condition {
    RUNNING,
    WAITING,
    DONE
};

/* A fiber runs one thread of a block, and then that thread of the next block. It starts once by setcontext; from then on
 * _setjmp and _longjmp switch, which unlike swapcontext make no system call. */
struct fiber {
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool started = false;
    jmp_buf place;
    condition is = DONE;
    meeting what;
    uint64_t value, result;
    uint32_t argument;
};

fiber fibers[TOGETHER];
jmp_buf scheduler;
uint32_t current, per_block; /* the fiber that runs; threads of a block */
uint64_t shuffled = 88172645463325252ull;
const std::function<void()> *body;
alignas(64) unsigned char shared[TOGETHER / LANES][SHARED + GUARD]; /* dynamic, a block */
std::mutex one_launch;
int device;
thread_local bool chosen; /* a device, by this thread */

int ptx_version() {
    const char *given = getenv("SID_EMULATED_PTX");
    return given ? atoi(given) : 90;
}

void stop(const char *why) {
    fprintf(stderr, "emulated kernel: %s (block %u of %u, thread %u)\n", why, blockIdx.x, gridDim.x, current);
    abort();
}

uint64_t next_random() {
    shuffled ^= shuffled << 13;
    shuffled ^= shuffled >> 7;
    return shuffled ^= shuffled << 17;
}

void pause(fiber &f) {
    if (!_setjmp(f.place)) _longjmp(scheduler, 1);
}

void run() {
    fiber &f = fibers[current];
    for (;;) {
        (*body)();
        f.is = DONE;
        pause(f);
    }
}

__attribute__((noinline)) void resume(fiber &f) {
    if (_setjmp(scheduler)) return;
    if (f.started) _longjmp(f.place, 1);
    f.started = true;
    ucontext_t start;
    getcontext(&start);
    start.uc_stack.ss_sp = f.stack.get();
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, run, 0);
    setcontext(&start);
}

enum {
    IN_WARP,
    IN_BLOCK,
    IN_GRID
};
int among(meeting what) { return what < BARRIER ? IN_WARP : what < GRID_BARRIER ? IN_BLOCK : IN_GRID; }

/* The threads from first on, if all of them wait for the same: give each its result. */
bool release(uint32_t first, uint32_t count, int whom) {
    const meeting what = fibers[first].what;
    uint64_t all = 0;
    for (uint32_t i = first; i < first + count; i++) {
        if (fibers[i].is != WAITING || fibers[i].what != what || among(what) != whom) return false;
        if (what == BALLOT) all |= fibers[i].value << (i - first);
        if (what == BARRIER_COUNT) all += fibers[i].value;
        if (what == BARRIER_OR) all |= fibers[i].value;
    }
    for (uint32_t i = first; i < first + count; i++) {
        fiber &f = fibers[i];
        const uint32_t lane = i - first;
        f.result = all;
        if (what == SHUFFLE_XOR) f.result = fibers[first + (lane ^ f.argument)].value;
        if (what == SHUFFLE_UP) f.result = fibers[lane < f.argument ? i : i - f.argument].value;
        if (what == SHUFFLE) f.result = fibers[first + f.argument % LANES].value;
        f.is = RUNNING;
    }
    return true;
}

/* `blocks` of them from `first` on, at the same time. */
void run_blocks(uint32_t first, uint32_t blocks, size_t dynamic) {
    const uint32_t threads = blocks * per_block;
    std::vector<uint32_t> order(threads);
    for (uint32_t b = 0; b < blocks; b++) memset(shared[b], GARBAGE, sizeof shared[b]);
    for (uint32_t i = 0; i < threads; i++) {
        fibers[i].is = RUNNING;
        order[i] = i;
    }
    uint64_t late = 0; /* warps that sit out until all others wait for them, or for some rounds */
    for (uint32_t done = 0, idle = 0; done < threads;) {
        bool moved = false;
        for (uint32_t i = threads - 1; i; i--) std::swap(order[i], order[next_random() % (i + 1)]);
        if (next_random() % 16 == 0) late = next_random() & next_random();
        if (++idle > 1) late = 0;
        for (const uint32_t i : order) {
            if (fibers[i].is != RUNNING || late >> i / LANES & 1) continue;
            current = i;
            threadIdx.x = i % per_block;
            blockIdx.x = first + i / per_block;
            resume(fibers[i]);
            done += fibers[i].is == DONE;
            moved = true;
        }
        for (uint32_t i = 0; i < threads; i += LANES) moved |= release(i, LANES, IN_WARP);
        for (uint32_t i = 0; i < threads; i += per_block) moved |= release(i, per_block, IN_BLOCK);
        moved |= release(0, threads, IN_GRID);
        if (moved) idle = 0;
        if (idle > 1 && done < threads) stop("threads wait for one another at different places");
    }
    for (uint32_t b = 0; b < blocks; b++)
        for (size_t i = dynamic; i < dynamic + GUARD; i++)
            if (shared[b][i] != GARBAGE) stop("write past the dynamic shared memory");
}

} // namespace

uint64_t meet(meeting what, uint64_t value, uint32_t argument) {
    fiber &f = fibers[current];
    f.what = what;
    f.value = value;
    f.argument = argument;
    f.is = WAITING;
    pause(f);
    return f.result;
}

void *dynamic_shared() { return shared[current / per_block]; }

void launch(const cudaLaunchConfig_t &c, const std::function<void()> &thread) {
    const std::lock_guard<std::mutex> lock(one_launch);
    const bool together = c.numAttrs && c.attrs->val.cooperative;
    for (uint32_t i = 0; i < c.numAttrs; i++)
        if (c.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization && ptx_version() < 90)
            stop("launched early, by code that does not wait");
    if (c.blockDim.x % LANES || c.blockDim.x > BLOCK || !c.gridDim.x || c.dynamicSmemBytes > SHARED ||
        (together && (uint64_t)c.gridDim.x * c.blockDim.x > TOGETHER))
        stop("launch of a shape that no device takes");
    body = &thread;
    gridDim = c.gridDim;
    blockDim = c.blockDim;
    per_block = blockDim.x;
    const uint32_t blocks = together ? gridDim.x : 1;
    for (uint32_t first = 0; first < gridDim.x; first += blocks) run_blocks(first, blocks, c.dynamicSmemBytes);
}

} // namespace emulate

const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorInvalidDevice ? "invalid device ordinal" : "no error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) {
    *count = 1;
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) {
    *d = emulate::device;
    return cudaSuccess;
}
cudaError_t cudaSetDevice(int d) {
    if (d != 0) return cudaErrorInvalidDevice;
    emulate::device = d;
    emulate::chosen = true;
    return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *of, const void *) {
    of->ptxVersion = emulate::ptx_version();
    return cudaSuccess;
}
/* cuCtxGetCurrent: no thread has a context before its first cudaSetDevice. */
static int context_of_thread(void **context) {
    *context = emulate::chosen ? &emulate::chosen : nullptr;
    return 0;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **function, unsigned, unsigned long long, void *) {
    *function = (void *)context_of_thread;
    return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int d) {
    *value = what == cudaDevAttrMultiProcessorCount ? 2 : 9;
    return d == 0 ? cudaSuccess : cudaErrorInvalidDevice;
}
