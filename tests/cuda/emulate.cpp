/* emulate.h's device: two multiprocessors, so that grids are small and every block has more than one piece to do. */
#include <dlfcn.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <map>
#include <string>
#include <vector>

#include "order.h"

dim3 threadIdx __attribute__((section("sid_dims"))), blockIdx __attribute__((section("sid_dims")));
dim3 blockDim __attribute__((section("sid_dims"))), gridDim __attribute__((section("sid_dims")));

namespace emulate {

runner now;
bool inside;

namespace {

enum {
    BLOCK = 1024,    /* threads, at most */
    TOGETHER = 2048, /* that are resident */
    STACK = 1 << 19, /* a translated kernel keeps all of its registers there */
    SHARED = 64 << 10,
    UNASKED = 48 << 10, /* of which a byte at least is static */
    STATIC = 48 << 10,  /* behind it: what a translated kernel declares; ptx/translate.py knows where */
    GUARD = 64,
    PATIENCE = 64 /* rounds in which nobody did anything but look at one place again and again */
};
enum condition {
    RUNNING,
    WAITING,
    DONE
};

/* A fiber runs one thread of a block, and then that thread of the next block. It starts once by setcontext; from then on
 * _setjmp and _longjmp switch, which unlike swapcontext make no system call. */
struct fiber {
    bool started = false, spins = false;
    jmp_buf place;
    condition is = DONE;
    meeting what;
    uint64_t value, result;
    uint32_t argument, mask;
    uint32_t mark, block_clock, grid_clock, warp_clock, seen[LANES];
};

fiber fibers[TOGETHER];
char *const stacks = (char *)mmap(nullptr, (size_t)TOGETHER *STACK, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
jmp_buf scheduler;
uint32_t current, per_block; /* the fiber that runs; threads of a block */
std::vector<uint32_t> blocks_begun;
kernel_call *body;
alignas(64) unsigned char shared[TOGETHER / LANES][SHARED + GUARD + STATIC]; /* dynamic, a block */
int device;
thread_local bool chosen; /* a device, by this thread */

int ptx_version() {
    const char *given = getenv("SID_EMULATED_PTX");
    return given ? atoi(given) : 90;
}

void pause(fiber &f) {
    if (!_setjmp(f.place)) _longjmp(scheduler, 1);
}

void run() {
    fiber &f = fibers[current];
    for (;;) {
        body->thread();
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
    start.uc_stack.ss_sp = stacks + (size_t)(&f - fibers) * STACK;
    start.uc_stack.ss_size = STACK;
    start.uc_link = nullptr;
    makecontext(&start, run, 0);
    setcontext(&start);
}

/* Runs the fiber until it waits, ends or gives way. */
void take_turn(uint32_t i) {
    fiber &f = fibers[i];
    current = i;
    threadIdx.x = i % per_block;
    blockIdx.x = blocks_begun[i / per_block];
    now = {blockIdx.x * per_block + threadIdx.x, per_block, f.block_clock, f.grid_clock, f.warp_clock, f.seen, f.mark};
    f.spins = false;
    inside = true;
    resume(f);
    inside = false;
    f.mark = now.mark;
}

enum {
    IN_WARP,
    IN_BLOCK,
    IN_GRID
};
int among(meeting what) { return what < BARRIER ? IN_WARP : what < GRID_BARRIER ? IN_BLOCK : IN_GRID; }
const char *name_of(meeting what) {
    static const char *const names[] = {"a shuffle", "a shuffle",  "a shuffle",
                                        "a vote",    "__syncwarp", "a barrier",
                                        "a barrier", "a barrier",  "the grid's barrier"};
    return names[what];
}

uint64_t grid_barriers; /* so far */

bool waits_in(const fiber &f, int whom) { return f.is == WAITING && among(f.what) == whom; }

/* A group of lanes that all wait for the same: give each its result. Only __syncwarp orders what they do to memory. */
void release_lanes(fiber *warp, uint32_t mask) {
    const meeting what = warp[__builtin_ctz(mask)].what;
    uint64_t all = 0;
    for (uint32_t l = 0; l < LANES; l++)
        if (mask >> l & 1) all |= warp[l].value << l;
    uint32_t seen[LANES] = {};
    for (uint32_t l = 0; what == SYNC_WARP && l < LANES; l++) {
        if (mask >> l & 1) seen[l] = warp[l].warp_clock;
        for (uint32_t k = 0; !(mask >> l & 1) && k < LANES; k++)
            if (mask >> k & 1 && warp[k].seen[l] > seen[l]) seen[l] = warp[k].seen[l];
    }
    for (uint32_t l = 0; l < LANES; l++) {
        if (!(mask >> l & 1)) continue;
        fiber &f = warp[l];
        uint32_t from = l;
        if (what == SHUFFLE_XOR) from = l ^ f.argument;
        if (what == SHUFFLE_UP) from = l < f.argument ? l : l - f.argument;
        if (what == SHUFFLE) from = f.argument;
        from %= LANES;
        if (what < BALLOT && !(mask >> from & 1)) {
            current = (uint32_t)(&f - fibers);
            stop("wrong lane mask: lane %u shuffles from lane %u, which the mask %08x leaves out", l, from, mask);
        }
        f.result = what < BALLOT ? warp[from].value : all;
        if (what == SYNC_WARP) {
            memcpy(f.seen, seen, sizeof seen);
            f.warp_clock++;
            f.mark = 0;
        }
    }
    for (uint32_t l = 0; l < LANES; l++)
        if (mask >> l & 1) warp[l].is = RUNNING;
}

bool release_warp(fiber *warp) {
    bool moved = false;
    for (uint32_t l = 0; l < LANES; l++) {
        if (!waits_in(warp[l], IN_WARP)) continue;
        const uint32_t mask = warp[l].mask;
        bool all = true;
        for (uint32_t k = 0; k < LANES && all; k++)
            all = !(mask >> k & 1) ||
                  (waits_in(warp[k], IN_WARP) && warp[k].what == warp[l].what && warp[k].mask == mask);
        if (all) release_lanes(warp, mask);
        moved |= all;
    }
    return moved;
}

/* The threads from first on, if all of them wait for the same. */
bool release(uint32_t first, uint32_t count, int whom) {
    const meeting what = fibers[first].what;
    uint64_t all = 0;
    for (uint32_t i = first; i < first + count; i++) {
        if (!waits_in(fibers[i], whom) || fibers[i].what != what) return false;
        if (what == BARRIER_COUNT) all += fibers[i].value;
        if (what == BARRIER_OR) all |= fibers[i].value;
    }
    for (uint32_t i = first; i < first + count; i++) {
        fiber &f = fibers[i];
        f.result = all;
        f.block_clock++;
        f.grid_clock += whom == IN_GRID;
        f.mark = 0;
        f.is = RUNNING;
    }
    grid_barriers += whom == IN_GRID;
    return true;
}

/* Nothing moves any more. */
[[noreturn]] void name_the_stuck(uint32_t threads, uint32_t left) {
    for (uint32_t i = 0; i < threads; i++) {
        fiber &f = fibers[i];
        if (!waits_in(f, IN_WARP)) continue;
        for (uint32_t l = 0; l < LANES; l++) {
            const fiber &other = fibers[i / LANES * LANES + l];
            if (!(f.mask >> l & 1) || (waits_in(other, IN_WARP) && other.what == f.what && other.mask == f.mask))
                continue;
            current = i;
            blockIdx.x = blocks_begun[i / per_block];
            if (other.is == WAITING)
                stop("lane %u waits in %s of mask %08x for lane %u, which waits in %s of mask %08x", i % LANES,
                     name_of(f.what), f.mask, l, name_of(other.what), other.mask);
            stop("lane %u waits in %s of mask %08x for lane %u, which has %s", i % LANES, name_of(f.what), f.mask, l,
                 other.is == DONE ? "ended" : "not come");
        }
    }
    for (uint32_t i = 0; i < threads; i++) {
        if (!fibers[i].spins) continue;
        current = i;
        blockIdx.x = blocks_begun[i / per_block];
        if (left)
            stop("a block waits for one that is not resident: it looks at one place again and again, nobody else can "
                 "do anything, and %u blocks of %u have not begun",
                 left, gridDim.x);
        stop("a thread looks at one place again and again, and nobody else can do anything");
    }
    for (uint32_t i = 0; i < threads; i++) {
        if (fibers[i].is != WAITING) continue;
        current = i;
        blockIdx.x = blocks_begun[i / per_block];
        stop("threads wait for one another at different places: this one in %s", name_of(fibers[i].what));
    }
    stop("nothing moves");
}

/* The blocks of blocks_begun, at the same time; `left` others come later. */
void run_blocks(size_t dynamic, uint32_t left) {
    const uint32_t blocks = (uint32_t)blocks_begun.size(), threads = blocks * per_block;
    std::vector<uint32_t> order(threads);
    new_shared_memory();
    for (uint32_t b = 0; b < blocks; b++) memset(shared[b], GARBAGE, sizeof shared[b]);
    for (uint32_t i = 0; i < threads; i++) {
        fiber &f = fibers[i];
        f.is = RUNNING;
        f.spins = false;
        f.mark = f.block_clock = f.grid_clock = 0;
        f.warp_clock = 1;
        memset(f.seen, 0, sizeof f.seen);
        order[i] = i;
    }
    uint64_t late = 0; /* warps that sit out until all others wait for them, or for some rounds */
    for (uint32_t done = 0, idle = 0; done < threads;) {
        bool moved = false, held = false;
        for (uint32_t i = threads - 1; i; i--) std::swap(order[i], order[next_random() % (i + 1)]);
        if (next_random() % 8 == 0) late = next_random() & next_random();
        if (++idle > 1) late = 0;
        for (const uint32_t i : order) {
            if (fibers[i].is != RUNNING) continue;
            if (late >> i / LANES % 64 & 1) {
                held = true;
                continue;
            }
            take_turn(i);
            done += fibers[i].is == DONE;
            moved |= !fibers[i].spins;
        }
        for (uint32_t i = 0; i < threads; i += LANES) moved |= release_warp(fibers + i);
        for (uint32_t i = 0; i < threads; i += per_block) moved |= release(i, per_block, IN_BLOCK);
        moved |= release(0, threads, IN_GRID);
        if (moved) idle = 0;
        bool spins = false;
        for (uint32_t i = 0; i < threads && !moved; i++) spins |= fibers[i].is == RUNNING;
        if (!held && idle > (spins ? PATIENCE : 1) && done < threads) name_the_stuck(threads, left);
    }
    for (uint32_t b = 0; b < blocks; b++)
        for (size_t i = dynamic; i < dynamic + GUARD; i++)
            if (shared[b][i] != GARBAGE) stop("write past the dynamic shared memory");
}

} // namespace

void give_way(bool spins) {
    fiber &f = fibers[current];
    f.spins = spins;
    inside = false;
    pause(f);
}

bool is_dynamic(const void *at) { return (size_t)((const unsigned char *)at - shared[0]) < sizeof shared; }
bool on_a_stack(const void *at) { return (size_t)((const char *)at - stacks) < (size_t)TOGETHER * STACK; }

void place_of_thread(char *text, size_t room) {
    text[0] = 0;
    if (body) snprintf(text, room, ", thread %u of block %u of %u", current % per_block, blockIdx.x, gridDim.x);
}

uint64_t meet(meeting what, uint64_t value, uint32_t argument, uint32_t mask) {
    fiber &f = fibers[current];
    if (among(what) == IN_WARP && !(mask >> current % LANES & 1))
        stop("wrong lane mask: lane %u is in %s whose mask %08x leaves it out", current % LANES, name_of(what), mask);
    f.what = what;
    f.value = value;
    f.argument = argument;
    f.mask = mask;
    f.is = WAITING;
    pause(f);
    return f.result;
}

uint64_t grid_barriers_so_far() { return grid_barriers; }

/* SID_PTX: a folder with map, a line for each kernel: its place in this library, and the library and name of its translation.
 * The launches of each are counted in SID_PTX_LOG, if that is given: a line for each, "-" for kernels that ran as C++. */
struct translations {
    std::map<uintptr_t, std::pair<std::string, translated>> known;
    std::map<std::string, unsigned> runs;
    uintptr_t start = 0;

    translations() {
        const char *folder = getenv("SID_PTX");
        if (!folder) return;
        Dl_info self;
        dladdr((const void *)translated_of, &self);
        start = (uintptr_t)self.dli_fbase;
        dlopen(self.dli_fname, RTLD_NOLOAD | RTLD_NOW | RTLD_GLOBAL); /* so that they find its functions */
        FILE *map = fopen((std::string(folder) + "/map").c_str(), "r");
        if (!map) stop("SID_PTX: no file map in %s", folder);
        char library[256], name[4096];
        unsigned long at;
        while (fscanf(map, "%lx %255s %4095s", &at, library, name) == 3) {
            void *const opened = dlopen((std::string(folder) + "/" + library).c_str(), RTLD_NOW);
            void *const entry = opened ? dlsym(opened, (std::string("k_") + name).c_str()) : nullptr;
            if (!entry) stop("SID_PTX: %s", dlerror());
            known[start + at] = {name, (translated)entry};
        }
        fclose(map);
    }
    ~translations() {
        const char *log = getenv("SID_PTX_LOG");
        FILE *f = log ? fopen(log, "a") : nullptr;
        if (!f) return;
        for (const auto &r : runs) fprintf(f, "%u %s\n", r.second, r.first.c_str());
        fclose(f);
    }
};
translated translated_of(const void *kernel) {
    static translations all;
    const auto found = all.known.find((uintptr_t)kernel);
    const bool is = found != all.known.end();
    char place[32];
    snprintf(place, sizeof place, "- %lx", (unsigned long)((uintptr_t)kernel - all.start));
    all.runs[is ? found->second.first : place]++;
    return is ? found->second.second : nullptr;
}

void *dynamic_shared() { return shared[current / per_block]; }

void check_shape(const cudaLaunchConfig_t &c, const place &from) {
    bool together = false;
    for (uint32_t i = 0; i < c.numAttrs; i++) {
        together |= c.attrs[i].id == cudaLaunchAttributeCooperative && c.attrs[i].val.cooperative;
        if (c.attrs[i].id == cudaLaunchAttributeProgrammaticStreamSerialization && ptx_version() < 90)
            stop("\"%s\" at %s:%d: launched early, by code that does not wait", from.what, from.file, from.line);
    }
    if (c.blockDim.x % LANES || !c.blockDim.x || c.blockDim.x > BLOCK || !c.gridDim.x || c.dynamicSmemBytes > SHARED)
        stop("\"%s\" at %s:%d: launch of a shape that no device takes", from.what, from.file, from.line);
    if (together && (uint64_t)c.gridDim.x * c.blockDim.x > TOGETHER)
        stop("\"%s\" at %s:%d: cooperative launch of %u blocks of %u threads, of which %u at most are resident at once",
             from.what, from.file, from.line, c.gridDim.x, c.blockDim.x, TOGETHER / c.blockDim.x);
}

void run_kernel(const cudaLaunchConfig_t &c, kernel_call &call) {
    const bool together = c.numAttrs && c.attrs->val.cooperative;
    body = &call;
    gridDim = c.gridDim;
    blockDim = c.blockDim;
    per_block = blockDim.x;
    std::vector<uint32_t> order(gridDim.x);
    for (uint32_t i = 0; i < gridDim.x; i++) order[i] = i;
    for (uint32_t i = gridDim.x - 1; i && !together; i--) std::swap(order[i], order[next_random() % (i + 1)]);
    const uint32_t blocks = together ? gridDim.x : 1;
    for (uint32_t first = 0; first < gridDim.x; first += blocks) {
        blocks_begun.assign(order.begin() + first, order.begin() + first + blocks);
        run_blocks(c.dynamicSmemBytes, gridDim.x - first - blocks);
    }
    body = nullptr;
}

} // namespace emulate

const char *cudaGetErrorString(cudaError_t e) {
    return e == cudaErrorInvalidDevice  ? "invalid device ordinal"
           : e == cudaErrorInvalidValue ? "invalid argument"
                                        : "no error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
static int devices() { /* SID_EMULATED_DEVICES, or 1 */
    const char *given = getenv("SID_EMULATED_DEVICES");
    return given ? atoi(given) : 1;
}
cudaError_t cudaGetDeviceCount(int *count) {
    *count = devices();
    return cudaSuccess;
}
cudaError_t cudaGetDevice(int *d) {
    *d = emulate::device;
    return cudaSuccess;
}
static int contexts; /* a bit for each device that has one */
int emulated_contexts() { return contexts; }
cudaError_t cudaSetDevice(int d) {
    if (d < 0 || d >= devices()) return cudaErrorInvalidDevice;
    emulate::device = d;
    contexts |= 1 << d;
    emulate::chosen = true;
    return cudaSuccess;
}
static std::map<const void *, uint64_t> shared_of; /* of kernels that asked for more */
cudaError_t emulated_shared(const void *kernel, int bytes) {
    if (bytes < 0 || bytes >= emulate::SHARED) return cudaErrorInvalidValue;
    shared_of[kernel] = (uint64_t)bytes;
    return cudaSuccess;
}
bool emulate::has_shared(const void *kernel, uint64_t bytes) {
    const auto asked = shared_of.find(kernel);
    return asked == shared_of.end() ? bytes < UNASKED : bytes <= asked->second;
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
    const char *processors = getenv("SID_EMULATED_PROCESSORS");
    *value = what != cudaDevAttrMultiProcessorCount ? 9 : processors ? atoi(processors) : 2;
    return d >= 0 && d < devices() ? cudaSuccess : cudaErrorInvalidDevice;
}
