/* NCCL, called from here: found at run time, declared here as far as it is called, joined without blocking.
 *
 * A communicator that does not block returns ncclInProgress from whatever takes long, does it in a thread of its own, and
 * says by ncclCommGetAsyncError when it is done. Until then nothing else may be asked of it, and nothing be enqueued
 * behind it, for it is not on the stream yet. So each call here ends when NCCL's part is done, or the time is up. */
#define _POSIX_C_SOURCE 200809L
#define _DARWIN_C_SOURCE /* RTLD_NOLOAD */
#include <dlfcn.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "../sidcomp_nccl.h"
#include "exchange.h"

/* ---- what NCCL's header has of it ------------------------------------------------------------------------------- */

enum { /* ncclResult_t */
    DONE = 0,
    CUDA_FAILED = 1,
    SYSTEM_FAILED = 2,
    WRONG_ARGUMENT = 4,
    WRONG_USAGE = 5,
    PEER_FAILED = 6,
    IN_PROGRESS = 7
};
enum { /* ncclDataType_t, ncclRedOp_t */
    BYTES = 1,
    HALF = 6,
    FLOAT = 7,
    BFLOAT = 9,
    SUM = 0,
    AVERAGE = 4 /* since 2.10 */
};

typedef struct nccl_id {
    char bytes[SID_NCCL_ID_BYTES];
} nccl_id;

/* ncclConfig_t of 2.17. Its size and version tell which fields are set, and a later NCCL takes its defaults for the others.
 * One before 2.17 is given the first form, of 2.14, alone: without the fields from `cluster` on. */
typedef struct nccl_config {
    size_t size;
    uint32_t magic, version;
    int blocking, cluster, least_blocks, most_blocks;
    const char *net;
} nccl_config;
#define CONFIG_MAGIC 0xcafebeefu
#define UNSET (-2147483647 - 1)
enum {
    CONFIG_WITH_BLOCKS = 21700,
    /* of a collective */
    LEAST_BLOCKS = 4,
    MOST_BLOCKS = 16,
    /* Collectives of two communicators leave two thirds of the device to a kernel whose blocks must all run at once, if it has
     * 24 multiprocessors or more: finish asks for two of the three blocks that fit on each (cuda/codec/sparse_form.cuh). */
    PROCESSORS_A_BLOCK = 6
};
_Static_assert(sizeof(nccl_config) == 40 && offsetof(nccl_config, most_blocks) == 28, "ncclConfig_t of 2.17");

typedef struct ncclComm *nccl_comm;

struct sid_nccl {
    void *handle;
    int version;
    int (*get_version)(int *);
    int (*get_id)(nccl_id *);
    int (*join)(nccl_comm *, int world, nccl_id, int rank, nccl_config *);
    int (*async_error)(nccl_comm, int *);
    int (*finalize)(nccl_comm);
    int (*destroy)(nccl_comm);
    int (*stop)(nccl_comm);
    int (*all_gather)(const void *, void *, size_t, int type, nccl_comm, void *stream);
    int (*all_reduce)(const void *, void *, size_t, int type, int op, nccl_comm, void *stream);
    int (*reduce_scatter)(const void *, void *, size_t, int type, int op, nccl_comm, void *stream);
    int (*send)(const void *, size_t, int type, int peer, nccl_comm, void *stream);
    int (*receive)(void *, size_t, int type, int peer, nccl_comm, void *stream);
    int (*group_start)(void);
    int (*group_end)(void);
    const char *(*error_string)(int);
    const char *(*last_error)(nccl_comm);
};

static const struct {
    const char *name;
    size_t place; /* in sid_nccl */
} calls[] = {
    {"ncclGetVersion", offsetof(sid_nccl, get_version)},
    {"ncclGetUniqueId", offsetof(sid_nccl, get_id)},
    {"ncclCommInitRankConfig", offsetof(sid_nccl, join)},
    {"ncclCommGetAsyncError", offsetof(sid_nccl, async_error)},
    {"ncclCommFinalize", offsetof(sid_nccl, finalize)},
    {"ncclCommDestroy", offsetof(sid_nccl, destroy)},
    {"ncclCommAbort", offsetof(sid_nccl, stop)},
    {"ncclAllGather", offsetof(sid_nccl, all_gather)},
    {"ncclAllReduce", offsetof(sid_nccl, all_reduce)},
    {"ncclReduceScatter", offsetof(sid_nccl, reduce_scatter)},
    {"ncclSend", offsetof(sid_nccl, send)},
    {"ncclRecv", offsetof(sid_nccl, receive)},
    {"ncclGroupStart", offsetof(sid_nccl, group_start)},
    {"ncclGroupEnd", offsetof(sid_nccl, group_end)},
    {"ncclGetErrorString", offsetof(sid_nccl, error_string)},
    {"ncclGetLastError", offsetof(sid_nccl, last_error)},
};
enum {
    N_CALLS = sizeof calls / sizeof *calls
};

/* ---- the library ------------------------------------------------------------------------------------------------ */

static sid_status room(size_t need, const void *mem, size_t *bytes, sid_error *err) {
    const size_t given = *bytes;
    *bytes = need;
    if (!mem) return SID_OK;
    if (given < need) return sid_fail(err, SID_E_SPACE, "%zu bytes are needed, but %zu were given", need, given);
    if ((uintptr_t)mem % 64) return sid_fail(err, SID_E_ARG, "the block must start at a multiple of 64 bytes");
    return SID_OK;
}

static sid_status find(sid_nccl *lib, const char *path, sid_error *err) {
    const char *file = path ? path : "libnccl.so.2";
    if (!path) lib->handle = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
    if (!lib->handle) lib->handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    if (!lib->handle) {
        const char *why = dlerror();
        return sid_fail(err, SID_E_UNSUPPORTED, "NCCL cannot be loaded: %s", why ? why : file);
    }
    for (uint32_t i = 0; i < N_CALLS; i++) {
        void *const f = dlsym(lib->handle, calls[i].name);
        memcpy((char *)lib + calls[i].place, &f, sizeof f); /* C has no cast from an object to a function */
        if (i == 0 && f && lib->get_version(&lib->version)) lib->version = 0;
        if (i == 0 && f && lib->version < SID_NCCL_LEAST)
            return sid_fail(err, SID_E_UNSUPPORTED, "%s is NCCL %d: 2.14 (%d) or later is needed", file, lib->version,
                            SID_NCCL_LEAST);
        if (!f)
            return sid_fail(err, SID_E_UNSUPPORTED, "%s has no function %s: give the path of NCCL's library", file,
                            calls[i].name);
    }
    return SID_OK;
}

sid_status sid_nccl_open(const char *path, void *mem, size_t *bytes, sid_error *err) {
    sid_nccl lib;
    if (err) err->text[0] = 0;
    if (!bytes) return sid_fail(err, SID_E_ARG, "bytes is NULL");
    memset(&lib, 0, sizeof lib);
    sid_status s = room(sizeof lib, mem, bytes, err);
    if (s || !mem) return s;
    s = find(&lib, path, err);
    if (!s) memcpy(mem, &lib, sizeof lib);
    return s; /* what was loaded stays loaded: it may have threads */
}

int sid_nccl_version(const sid_nccl *lib) { return lib->version; }

sid_status sid_nccl_unique_id(const sid_nccl *lib, void *id, sid_error *err) {
    nccl_id made;
    if (err) err->text[0] = 0;
    if (!lib || !id) return sid_fail(err, SID_E_ARG, "library or id is NULL");
    const int result = lib->get_id(&made);
    if (result) return sid_fail(err, SID_E_PEER, "NCCL: making an id: %s", lib->error_string(result));
    memcpy(id, &made, sizeof made);
    return SID_OK;
}

/* ---- a communicator --------------------------------------------------------------------------------------------- */

struct sid_nccl_comm {
    sid_nccl lib;
    atomic_flag busy; /* a thread asks NCCL something about it; what else is here changes only then */
    atomic_int quits; /* abort has been asked for: nobody goes on waiting */
    nccl_comm comm;   /* NULL: it has come to an end, and: */
    sid_status status;
    uint32_t rank, world;
    int device;
    uint32_t limit_ms;
    char why[200];
};

/* Waits at most for another's settle: nobody keeps it while a kernel of ours is launched, which blocks where the device
 * hangs and its queue is full. */
static void take(sid_nccl_comm *c) {
    const struct timespec pause = {0, 50000};
    for (uint32_t i = 0; atomic_flag_test_and_set_explicit(&c->busy, memory_order_acquire); i++)
        if (i < 100)
            sched_yield();
        else
            nanosleep(&pause, NULL);
}
static void give(sid_nccl_comm *c) { atomic_flag_clear_explicit(&c->busy, memory_order_release); }

static int64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

/* Waits for what NCCL has in progress: its result, or IN_PROGRESS where the time is up. Enqueueing takes it some tens of
 * microseconds, in which sleeping would miss the end; joining takes seconds. */
static int settle(const sid_nccl_comm *c, int result) {
    const int64_t start = now_us(), end = start + (int64_t)c->limit_ms * 1000;
    struct timespec pause = {0, 10000};
    while (result == IN_PROGRESS) {
        int state = DONE;
        const int asked = c->lib.async_error(c->comm, &state);
        result = asked ? asked : state;
        if (result != IN_PROGRESS) break;
        const int64_t now = now_us();
        if (now > end || atomic_load_explicit(&c->quits, memory_order_relaxed)) break;
        if (now - start < 200) {
            sched_yield();
        } else {
            nanosleep(&pause, NULL);
            if (pause.tv_nsec < 1000000) pause.tv_nsec *= 2;
        }
    }
    return result;
}

static sid_status ended(const sid_nccl_comm *c, sid_error *err) {
    return sid_fail(err, c->status, "NCCL, rank %u of %u: %s", c->rank, c->world, c->why);
}

__attribute__((format(printf, 2, 3))) static void explain(sid_nccl_comm *c, const char *fmt, ...) {
    va_list a;
    va_start(a, fmt);
    vsnprintf(c->why, sizeof c->why, fmt, a);
    va_end(a);
}

/* Any thread may come here. NCCL puts the current device back, and to do so in a thread that has none makes a context on device
 * 0, which takes some hundred megabytes there. */
static sid_status end(sid_nccl_comm *c, sid_status status, sid_error *err) {
    const nccl_comm comm = c->comm;
    int before;
    c->comm = NULL;
    c->status = status;
    if (!comm) return ended(c, err);
    const sid_status s = sid_device_enter(c->device, &before, NULL);
    (void)c->lib.stop(comm); /* how that ends changes nothing */
    if (!s) sid_device_leave(before);
    return ended(c, err);
}

static sid_status status_of(int result) {
    if (result == WRONG_ARGUMENT || result == WRONG_USAGE) return SID_E_ARG;
    return result == PEER_FAILED || result == SYSTEM_FAILED || result == IN_PROGRESS ? SID_E_PEER : SID_E_DEVICE;
}

/* The result of a call that has settled: if it is not good, the communicator's end. */
static sid_status judge(sid_nccl_comm *c, int result, const char *what, sid_error *err) {
    if (result == DONE) return SID_OK;
    if (atomic_load_explicit(&c->quits, memory_order_relaxed)) {
        explain(c, "%s: given up", what);
    } else if (result == IN_PROGRESS) {
        explain(c, "%s: not done within %u ms: a rank has ended, or hangs", what, c->limit_ms);
    } else {
        const char *more = c->lib.last_error(c->comm);
        explain(c, "%s: %s%s%s", what, c->lib.error_string(result), more && *more ? ": " : "", more ? more : "");
    }
    return end(c, status_of(result), err);
}

sid_status sid_nccl_join(const sid_nccl *lib, const void *id, uint32_t rank, uint32_t world, int device,
                         uint32_t limit_ms, void *mem, size_t *bytes, sid_error *err) {
    sid_nccl_comm *c = mem;
    nccl_config config = {24, CONFIG_MAGIC, SID_NCCL_LEAST, 0, UNSET, UNSET, UNSET, NULL};
    nccl_id given;
    int before;
    if (err) err->text[0] = 0;
    if (!lib || !id || !bytes) return sid_fail(err, SID_E_ARG, "library, id or bytes is NULL");
    if (!world || world > SID_MAX_COUNT || rank >= world)
        return sid_fail(err, SID_E_ARG, "rank is %u and world is %u: a world has 1 to %d ranks, counted from 0", rank,
                        world, SID_MAX_COUNT);
    if (!limit_ms) return sid_fail(err, SID_E_ARG, "the time limit is 0 ms: give at least 1");
    sid_status s = room(sizeof *c, mem, bytes, err);
    if (s || !mem) return s;
    s = sid_device_enter(device, &before, err);
    if (s) return s;
    memset(c, 0, sizeof *c);
    atomic_flag_clear(&c->busy);
    c->lib = *lib;
    c->rank = rank;
    c->world = world;
    c->device = device;
    c->limit_ms = limit_ms;
    memcpy(&given, id, sizeof given);
    if (lib->version >= CONFIG_WITH_BLOCKS) {
        config.size = sizeof config;
        config.version = CONFIG_WITH_BLOCKS;
        const int processors = sid_device_processors(device), share = processors / PROCESSORS_A_BLOCK;
        config.most_blocks = !processors || share > MOST_BLOCKS ? MOST_BLOCKS
                             : share < LEAST_BLOCKS             ? LEAST_BLOCKS
                                                                : share;
    }
    int result = lib->join(&c->comm, (int)world, given, (int)rank, &config);
    if (c->comm) result = settle(c, result);
    s = judge(c, result, "joining", err);
    sid_device_leave(before);
    return s;
}

sid_status sid_nccl_poll(sid_nccl_comm *c, sid_error *err) {
    int state = DONE;
    if (err) err->text[0] = 0;
    if (!c) return sid_fail(err, SID_E_ARG, "communicator is NULL");
    if (atomic_flag_test_and_set_explicit(&c->busy, memory_order_acquire)) return SID_OK; /* its user will see */
    sid_status s;
    if (c->comm) {
        const int asked = c->lib.async_error(c->comm, &state);
        s = asked == DONE && state == IN_PROGRESS ? SID_OK : judge(c, asked ? asked : state, "while exchanging", err);
    } else {
        s = ended(c, err);
    }
    give(c);
    return s;
}

void sid_nccl_abort(sid_nccl_comm *c, const char *why) {
    if (!c) return;
    atomic_store_explicit(&c->quits, 1, memory_order_relaxed);
    take(c);
    if (c->comm) {
        explain(c, "%s", why);
        end(c, SID_E_PEER, NULL);
    }
    give(c);
}

static sid_status leave(sid_nccl_comm *c, sid_error *err) {
    int before;
    if (!c->comm) return SID_OK;
    sid_status s = sid_device_enter(c->device, &before, err);
    if (s) return s;
    s = judge(c, settle(c, c->lib.finalize(c->comm)), "leaving", err);
    if (!s) {
        const int result = c->lib.destroy(c->comm);
        c->comm = NULL;
        c->status = SID_E_ARG;
        explain(c, "this rank has left");
        if (result != DONE && result != IN_PROGRESS)
            s = sid_fail(err, SID_E_DEVICE, "NCCL, rank %u of %u: leaving: %s", c->rank, c->world,
                         c->lib.error_string(result));
    }
    sid_device_leave(before);
    return s;
}

sid_status sid_nccl_leave(sid_nccl_comm *c, sid_error *err) {
    if (err) err->text[0] = 0;
    if (!c) return sid_fail(err, SID_E_ARG, "communicator is NULL");
    take(c);
    const sid_status s = leave(c, err);
    give(c);
    return s;
}

/* ---- collectives ------------------------------------------------------------------------------------------------ */

/* Begins every call. If it returns SID_OK, finish must follow. *before: see sid_device_enter. */
static sid_status begin(sid_nccl_comm *c, int there, int *before, sid_error *err) {
    if (err) err->text[0] = 0;
    if (!c || !there) return sid_fail(err, SID_E_ARG, "communicator or buffer is NULL, or the dtype is unknown");
    take(c);
    const sid_status s = c->comm ? sid_device_enter(c->device, before, err) : ended(c, err);
    if (s) give(c);
    return s;
}

static sid_status finish(sid_nccl_comm *c, int result, const char *what, int before, sid_error *err) {
    const sid_status s = judge(c, settle(c, result), what, err);
    sid_device_leave(before);
    give(c);
    return s;
}

/* Sums of whole numbers are modulo 256, so that their sign is nothing to NCCL. */
static int type_of(sid_dtype d) {
    return d == SID_F32 ? FLOAT : d == SID_F16 ? HALF : d == SID_BF16 ? BFLOAT : d == SID_I8 ? BYTES : -1;
}

sid_status sid_nccl_all_gather(sid_nccl_comm *c, const void *in, void *out, uint64_t bytes, void *stream,
                               sid_error *err) {
    int before;
    const sid_status s = begin(c, !bytes || (in && out), &before, err);
    return s ? s : finish(c, c->lib.all_gather(in, out, bytes, BYTES, c->comm, stream), "all-gather", before, err);
}

static sid_status reduce(sid_nccl_comm *c, const void *in, void *out, uint64_t count, int type, int op, void *stream,
                         sid_error *err) {
    int before;
    const sid_status s = begin(c, type >= 0 && (!count || (in && out)), &before, err);
    return s ? s : finish(c, c->lib.all_reduce(in, out, count, type, op, c->comm, stream), "all-reduce", before, err);
}

sid_status sid_nccl_all_reduce(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                               void *stream, sid_error *err) {
    return reduce(c, in, out, count, type_of(dtype), SUM, stream, err);
}

sid_status sid_nccl_average(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype, void *stream,
                            sid_error *err) {
    return reduce(c, in, out, count, dtype == SID_I8 ? -1 : type_of(dtype), AVERAGE, stream, err);
}

sid_status sid_nccl_reduce_scatter(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                                   void *stream, sid_error *err) {
    int before;
    const int type = type_of(dtype);
    const sid_status s = begin(c, type >= 0 && (!count || (in && out)), &before, err);
    return s ? s
             : finish(c, c->lib.reduce_scatter(in, out, count, type, SUM, c->comm, stream), "reduce-scatter", before,
                      err);
}

sid_status sid_nccl_messages(sid_nccl_comm *c, void *wire, const sid_message *sends, uint32_t n_sends,
                             const sid_message *receives, uint32_t n_receives, void *stream, sid_error *err) {
    int before;
    sid_status s = begin(c, wire && (!n_sends || sends) && (!n_receives || receives), &before, err);
    if (s) return s;
    int result = c->lib.group_start(), first = result;
    for (uint32_t i = 0; i < n_sends && !result; i++) {
        const sid_message *m = &sends[i];
        result = c->lib.send((const char *)wire + m->offset, m->bytes, BYTES, (int)m->peer, c->comm, stream);
        if (result == IN_PROGRESS) result = DONE; /* the group's end says it for all */
    }
    for (uint32_t i = 0; i < n_receives && !result; i++) {
        const sid_message *m = &receives[i];
        result = c->lib.receive((char *)wire + m->offset, m->bytes, BYTES, (int)m->peer, c->comm, stream);
        if (result == IN_PROGRESS) result = DONE;
    }
    if (!first) first = c->lib.group_end(); /* also after a failure: what was started must be ended */
    return finish(c, result ? result : first, "sending and receiving", before, err);
}

/* ---- a group's step --------------------------------------------------------------------------------------------- */

static sid_status collective(sid_nccl_comm *c, const sid_cuda_group *g, const sid_step *step, void *stream,
                             sid_error *err) {
    const sid_plan *p = g->plan;
    const int linear = (p->codec->info.traits & SID_LINEAR) != 0;
    if (g->in_place) {
        if (!linear || !(p->codec->info.traits & SID_LOSSLESS) || p->memory->vectors || g->n_seg != 1)
            return sid_fail(err, SID_E_ARG,
                            "in_place is for codec none without a memory, and for a gradient in one run of memory");
        return sid_nccl_average(c, g->payload, g->payload, p->n, p->dtype, stream, err);
    }
    if (!linear && !g->incoming)
        return sid_fail(err, SID_E_ARG,
                        "incoming is NULL: a gathered plan needs room there for the payloads of all ranks");
    sid_status s = sid_cuda_encode(p, g->segs_dev, g->n_seg, g->state, g->work, step, g->payload, g->stats_dev,
                                   c->device, stream, err);
    if (s) return s;
    if (!linear) s = sid_nccl_all_gather(c, g->payload, g->incoming, p->sizes.payload, stream, err);
    for (uint32_t i = 0; !s && linear && i < p->sizes.reductions; i++) {
        const sid_slice part = sid_plan_slice(p, i);
        void *const body = (uint8_t *)g->payload + part.offset;
        if (i)
            s = sid_cuda_next_reduction(p, i, g->segs_dev, g->n_seg, g->state, g->work, step, g->payload, c->device,
                                        stream, err);
        if (!s) s = sid_nccl_all_reduce(c, body, body, part.count, p->sizes.body_dtype, stream, err);
    }
    if (s) return s;
    return sid_cuda_decode(p, linear ? g->payload : g->incoming, p->sizes.payload, linear ? 1 : c->world,
                           1.0f / (float)c->world, g->segs_dev, g->n_seg, g->state, g->work, step, g->report_dev,
                           c->device, stream, err);
}

static sid_status by_messages(sid_nccl_comm *c, const sid_cuda_group *g, const sid_step *step, void *stream,
                              sid_error *err) {
    const sid_exchange *x = g->exchange;
    const uint32_t rounds = x->sizes.rounds;
    sid_message *out = g->room, *in = g->room + x->sizes.messages;
    if (rounds && !g->room)
        return sid_fail(err, SID_E_ARG, "room is NULL: an exchange needs room there for its messages");
    for (uint32_t i = 0;; i++) {
        sid_status s = sid_cuda_exchange_advance(x, i, g->segs_dev, g->n_seg, g->state, g->work, step, g->payload,
                                                 g->stats_dev, g->report_dev, c->device, stream, err);
        if (s || i == rounds) return s;
        const uint32_t sends = sid_exchange_messages(x, i, 0, out), receives = sid_exchange_messages(x, i, 1, in);
        s = sid_nccl_messages(c, g->payload, out, sends, in, receives, stream, err);
        if (s) return s;
    }
}

sid_status sid_nccl_step(sid_nccl_comm *c, const sid_cuda_group *g, const sid_step *step, void *stream,
                         sid_error *err) {
    if (err) err->text[0] = 0;
    if (!c || !g || !g->plan == !g->exchange || !step)
        return sid_fail(err, SID_E_ARG,
                        "communicator, group or step is NULL, or the group has both plan and exchange, or neither");
    if (step->rank != c->rank || step->world != c->world)
        return sid_fail(err, SID_E_ARG, "the step is of rank %u of %u, the communicator of rank %u of %u", step->rank,
                        step->world, c->rank, c->world);
    sid_status s = sid_nccl_poll(c, err); /* after its end nothing goes into the memory */
    if (!s) s = (g->plan ? collective : by_messages)(c, g, step, stream, err);
    if (!s && g->shown) s = sid_cuda_show(g->report_dev, (uint32_t)(step->step + 1), g->shown, c->device, stream, err);
    return s;
}
