/* The part of NCCL that csrc/exchange/nccl.c calls, for ranks that are threads or processes of one machine and "device
 * memory" that is the host's. As the real one does for a communicator that does not block, each call returns
 * ncclInProgress and is worked off by a thread; whoever calls again before it is done, or leaves out a step of the
 * protocol, gets ncclInvalidUsage. Bytes go through a file that all ranks map.
 *
 * Faults, by environment variables read when a rank joins; those that name a call count this rank's calls from 0:
 *     FAKE_NCCL_RANK=r        only rank r has them; all if unset
 *     FAKE_NCCL_JOIN=hang     never joins;  =fail: cannot
 *     FAKE_NCCL_DIE=k         the process ends in the middle of call k
 *     FAKE_NCCL_HANG=k        call k is never begun
 *     FAKE_NCCL_ERROR=k       from the end of call k on the communicator reports ncclRemoteError
 *     FAKE_NCCL_LATER=k       a tenth of a second after the end of call k it reports it
 *     FAKE_NCCL_REFUSE=k      call k returns ncclInvalidArgument
 * and, read at once, FAKE_NCCL_VERSION: what ncclGetVersion says. FAKE_NCCL_LOG: a file that gets a line a call. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "bits.h"

enum {
    SUCCESS = 0,
    SYSTEM = 2,
    INVALID_ARGUMENT = 4,
    INVALID_USAGE = 5,
    REMOTE = 6,
    IN_PROGRESS = 7
};
enum {
    MOST = 8, /* ranks */
    ROOM = 1 << 16,
    PARTS = 2 * MOST
};

/* As of 2.28: what a caller that knows 2.14 alone leaves out must come to its default. */
typedef struct ncclConfig {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare, trafficClass;
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
} ncclConfig_t;
#define UNDEFINED (-2147483647 - 1)

typedef struct ncclUniqueId {
    char internal[128];
} ncclUniqueId;

/* ---- what the ranks share --------------------------------------------------------------------------------------- */

typedef struct box { /* bytes from one rank to another, in a ring */
    _Atomic uint64_t written, read;
    uint8_t bytes[ROOM];
} box;

typedef struct shared {
    _Atomic int joined, left;
    box boxes[MOST][MOST];
} shared;

typedef struct part {
    int peer, sends;
    uint8_t *at;
    uint64_t left;
} part;

typedef struct work {
    part parts[PARTS];
    int n;
    int sums;     /* 1: all-reduce, 2: reduce-scatter: `gathered` adds up to out */
    float factor; /* of each element, before it is added */
    uint8_t *gathered;
    void *out;
    const uint8_t *own;
    uint64_t count;
    int type;
} work;

struct ncclComm {
    shared *common;
    int file, rank, world;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t turn;
    work todo;
    int has_work, ends, calls, finalized;
    _Atomic int state, gives_up;
    int faulty, join_hangs, die, hang, error, later, refuse;
};
typedef struct ncclComm *ncclComm_t;

static void rest(void) { nanosleep(&(struct timespec){0, 50000}, NULL); }

static struct flock byte_of(int rank, short type) {
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = rank, .l_len = 1};
}
/* A rank that has joined holds a lock on its byte of the file, which goes with it, however it goes. */
static int gone(const struct ncclComm *c, int rank) {
    struct flock l = byte_of(rank, F_WRLCK);
    return fcntl(c->file, F_OFD_GETLK, &l) == 0 && l.l_type == F_UNLCK;
}

static float value(const uint8_t *p, uint64_t i, int type) {
    if (type == 7) return ((const float *)(const void *)p)[i];
    const uint16_t h = ((const uint16_t *)(const void *)p)[i];
    return type == 6 ? sid_f16_to_f32(h) : sid_bf16_to_f32(h);
}
static float rounded(float x, int type) {
    return type == 7 ? x : type == 6 ? sid_f16_to_f32(sid_f32_to_f16(x)) : sid_bf16_to_f32(sid_f32_to_bf16(x));
}
static uint64_t width(int type) { return type == 1 ? 1 : type == 7 ? 4 : 2; }

static void add_up(const struct ncclComm *c, const work *w) {
    for (uint64_t i = 0; i < w->count; i++) {
        if (w->type == 1) {
            uint8_t total = 0;
            for (int r = 0; r < c->world; r++)
                total = (uint8_t)(total + (r == c->rank ? w->own : w->gathered + (uint64_t)r * w->count)[i]);
            ((uint8_t *)w->out)[i] = total;
            continue;
        }
        float sum = 0;
        for (int r = 0; r < c->world; r++)
            sum +=
                rounded(w->factor * value(r == c->rank ? w->own : w->gathered + (uint64_t)r * w->count * width(w->type),
                                          i, w->type),
                        w->type);
        if (w->type == 7)
            ((float *)w->out)[i] = sum;
        else
            ((uint16_t *)w->out)[i] = w->type == 6 ? sid_f32_to_f16(sum) : sid_f32_to_bf16(sum);
    }
}

/* What goes through at once; how many bytes. */
static uint64_t move(struct ncclComm *c, part *p) {
    box *b = p->sends ? &c->common->boxes[c->rank][p->peer] : &c->common->boxes[p->peer][c->rank];
    uint64_t moved = 0;
    while (p->left) {
        const uint64_t written = b->written, read = b->read;
        const uint64_t at = (p->sends ? written : read) % ROOM;
        uint64_t take = p->sends ? ROOM - (written - read) : written - read;
        if (!take) break;
        if (take > ROOM - at) take = ROOM - at;
        if (take > p->left) take = p->left;
        memcpy(p->sends ? b->bytes + at : p->at, p->sends ? p->at : b->bytes + at, take);
        if (p->sends)
            b->written = written + take;
        else
            b->read = read + take;
        p->at += take;
        p->left -= take;
        moved += take;
    }
    return moved;
}

static int carry_out(struct ncclComm *c, work *w, int call) {
    const int hangs = c->faulty && c->hang == call;
    while (hangs && !c->gives_up) rest();
    if (hangs) return SYSTEM;
    if (c->faulty && c->die == call) {
        w->parts[0].left /= 2;
        if (w->n) move(c, &w->parts[0]);
        _exit(9);
    }
    for (;;) {
        uint64_t moved = 0, left = 0;
        int lost = 0;
        for (int i = 0; i < w->n; i++) lost |= w->parts[i].left && gone(c, w->parts[i].peer);
        for (int i = 0; i < w->n; i++) {
            moved += move(c, &w->parts[i]);
            left += w->parts[i].left;
        }
        if (!left) break;
        if (c->gives_up) return SYSTEM;
        if (!moved && lost) return REMOTE;
        if (!moved) rest();
    }
    if (w->sums) add_up(c, w);
    return c->faulty && c->error >= 0 && call >= c->error ? REMOTE : SUCCESS;
}

static int meet(struct ncclComm *c) {
    struct flock mine = byte_of(c->rank, F_WRLCK);
    while (c->join_hangs && !c->gives_up) rest();
    if (c->join_hangs) return SYSTEM;
    if (fcntl(c->file, F_OFD_SETLK, &mine)) return INVALID_USAGE; /* two ranks of one number */
    c->common->joined++;
    while (c->common->joined < c->world && !c->gives_up) rest();
    return c->gives_up ? SYSTEM : SUCCESS;
}

static void *run(void *of) {
    struct ncclComm *c = of;
    c->state = meet(c);
    pthread_mutex_lock(&c->lock);
    for (;;) {
        while (!c->has_work && !c->ends) pthread_cond_wait(&c->turn, &c->lock);
        if (!c->has_work) break;
        pthread_mutex_unlock(&c->lock);
        const int call = c->calls++, result = carry_out(c, &c->todo, call);
        free(c->todo.gathered);
        pthread_mutex_lock(&c->lock);
        c->has_work = 0;
        c->state = result;
        if (result || !c->faulty || c->later != call) continue;
        pthread_mutex_unlock(&c->lock);
        nanosleep(&(struct timespec){0, 100000000}, NULL);
        pthread_mutex_lock(&c->lock);
        if (!c->has_work) c->state = REMOTE;
    }
    pthread_mutex_unlock(&c->lock);
    return NULL;
}

/* ---- calls ------------------------------------------------------------------------------------------------------ */

static _Thread_local int grouped;
static _Thread_local work open_group;
static _Thread_local ncclComm_t group_of;

static void note(const char *call, const struct ncclComm *c, uint64_t bytes) {
    const char *name = getenv("FAKE_NCCL_LOG");
    FILE *f = name ? fopen(name, "a") : NULL;
    if (!f) return;
    fprintf(f, "%s rank %d %llu\n", call, c->rank, (unsigned long long)bytes);
    fclose(f);
}

/* The beginning of emulate.h's stream: what is on it is done before a call reads or writes in its name. */
typedef struct device_stream {
    void (*drain)(struct device_stream *);
    void (*touch)(struct device_stream *, const void *at, uint64_t bytes, int writes, const char *who);
} device_stream;
static void drain(void *on) {
    if (on) ((device_stream *)on)->drain(on);
}
static void touch(void *on, const void *at, uint64_t bytes, int writes, const char *who) {
    if (on && bytes) ((device_stream *)on)->touch(on, at, bytes, writes, who);
}

static int idle(const struct ncclComm *c) { return c && c->state == SUCCESS && !c->finalized; }

static int start(ncclComm_t c, const work *w) {
    if (!idle(c)) return INVALID_USAGE;
    if (c->faulty && c->refuse == c->calls) return INVALID_ARGUMENT;
    pthread_mutex_lock(&c->lock);
    c->state = IN_PROGRESS;
    c->todo = *w;
    c->has_work = 1;
    pthread_cond_signal(&c->turn);
    pthread_mutex_unlock(&c->lock);
    return IN_PROGRESS;
}

static int number(const char *name) {
    const char *s = getenv(name);
    return s ? atoi(s) : -1;
}

int ncclGetVersion(int *version) {
    const int said = number("FAKE_NCCL_VERSION");
    *version = said < 0 ? 22809 : said;
    return SUCCESS;
}

int ncclGetUniqueId(ncclUniqueId *id) {
    const char *folder = getenv("TMPDIR");
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "%s/fake_nccl.XXXXXX", folder ? folder : "/tmp");
    const int file = mkstemp(id->internal);
    if (file < 0) return SYSTEM;
    const int bad = ftruncate(file, sizeof(shared));
    close(file);
    return bad ? SYSTEM : SUCCESS;
}

int ncclCommInitRankConfig(ncclComm_t *comm, int world, ncclUniqueId id, int rank, ncclConfig_t *given) {
    ncclConfig_t config;
    *comm = NULL;
    const size_t size = given->size < sizeof config ? given->size : sizeof config;
    memset(&config, 0x5a, sizeof config);
    memcpy(&config, given, size);
    if (config.magic != 0xcafebeef || config.version < 21400 || world > MOST || rank >= world) return INVALID_ARGUMENT;
    if (config.version < 21700) config.cgaClusterSize = config.minCTAs = config.maxCTAs = UNDEFINED;
    if (config.blocking || config.cgaClusterSize != UNDEFINED || config.minCTAs != UNDEFINED)
        return INVALID_ARGUMENT;
    int version;
    ncclGetVersion(&version);
    if (version >= 21700
            ? config.maxCTAs < 4 || (number("FAKE_NCCL_BLOCKS") >= 0 && config.maxCTAs != number("FAKE_NCCL_BLOCKS")) ||
                  config.maxCTAs > 16
            : given->size > 24)
        return INVALID_ARGUMENT;
    const int only = number("FAKE_NCCL_RANK");
    const char *joins = getenv("FAKE_NCCL_JOIN");
    const int faulty = only < 0 || only == rank;
    if (faulty && joins && !strcmp(joins, "fail")) return SYSTEM;
    const int file = open(id.internal, O_RDWR | O_CLOEXEC);
    if (file < 0) return SYSTEM;
    ncclComm_t c = calloc(1, sizeof *c);
    c->common = mmap(NULL, sizeof(shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    c->file = file;
    c->rank = rank;
    c->world = world;
    c->faulty = faulty;
    c->join_hangs = faulty && joins && !strcmp(joins, "hang");
    c->die = number("FAKE_NCCL_DIE");
    c->hang = number("FAKE_NCCL_HANG");
    c->error = number("FAKE_NCCL_ERROR");
    c->later = number("FAKE_NCCL_LATER");
    c->refuse = number("FAKE_NCCL_REFUSE");
    c->state = IN_PROGRESS;
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->turn, NULL);
    if (c->common == MAP_FAILED || pthread_create(&c->thread, NULL, run, c)) return SYSTEM;
    if (++c->common->left == world) unlink(id.internal); /* all have it open */
    *comm = c;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(ncclComm_t c, int *state) {
    *state = c->state;
    return SUCCESS;
}

int ncclCommFinalize(ncclComm_t c) {
    if (!idle(c)) return INVALID_USAGE;
    note("finalize", c, 0);
    c->finalized = 1;
    return SUCCESS;
}

static int release(ncclComm_t c) {
    pthread_mutex_lock(&c->lock);
    c->ends = 1;
    pthread_cond_signal(&c->turn);
    pthread_mutex_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    munmap(c->common, sizeof(shared));
    close(c->file);
    free(c);
    return SUCCESS;
}

int ncclCommDestroy(ncclComm_t c) { return c->finalized ? release(c) : INVALID_USAGE; }

int ncclCommAbort(ncclComm_t c) {
    note("abort", c, 0);
    c->gives_up = 1;
    return release(c);
}

int ncclAllGather(const void *in, void *out, size_t count, int type, ncclComm_t c, void *stream) {
    work w = {0};
    const uint64_t bytes = count * width(type);
    drain(stream);
    touch(stream, in, bytes, 0, "ncclAllGather");
    touch(stream, out, c ? (uint64_t)c->world * bytes : 0, 1, "ncclAllGather");
    for (int r = 0; c && r < c->world; r++) {
        if (r == c->rank) continue;
        w.parts[w.n++] = (part){r, 1, (uint8_t *)(uintptr_t)in, bytes};
        w.parts[w.n++] = (part){r, 0, (uint8_t *)out + (uint64_t)r * bytes, bytes};
    }
    const int result = start(c, &w);
    if (result != IN_PROGRESS) return result;
    memmove((uint8_t *)out + (uint64_t)c->rank * bytes, in, bytes);
    note("all-gather", c, bytes);
    return result;
}

static int reduce(int which, const void *in, void *out, size_t count, int type, ncclComm_t c) {
    work w = {.sums = which == 2 ? 2 : 1,
              .factor = which == 3 && c ? 1 / (float)c->world : 1,
              .count = count,
              .type = type,
              .out = out};
    if (!c) return INVALID_ARGUMENT;
    const uint64_t bytes = count * width(type);
    w.gathered = malloc((uint64_t)c->world * bytes + 1);
    w.own = (const uint8_t *)in + (which == 2 ? (uint64_t)c->rank * bytes : 0);
    for (int r = 0; r < c->world; r++) {
        if (r == c->rank) continue;
        w.parts[w.n++] = (part){r, 1, (uint8_t *)(uintptr_t)in + (which == 2 ? (uint64_t)r * bytes : 0), bytes};
        w.parts[w.n++] = (part){r, 0, w.gathered + (uint64_t)r * bytes, bytes};
    }
    const int result = start(c, &w);
    if (result != IN_PROGRESS) free(w.gathered);
    if (result == IN_PROGRESS) note(which == 2 ? "reduce-scatter" : which == 3 ? "average" : "all-reduce", c, bytes);
    return result;
}

int ncclAllReduce(const void *in, void *out, size_t count, int type, int op, ncclComm_t c, void *stream) {
    drain(stream);
    touch(stream, in, count * width(type), 0, "ncclAllReduce");
    touch(stream, out, count * width(type), 1, "ncclAllReduce");
    if (op && (op != 4 || type == 1)) return INVALID_ARGUMENT; /* a sum, or an average of floats */
    return reduce(op ? 3 : 1, in, out, count, type, c);
}
int ncclReduceScatter(const void *in, void *out, size_t count, int type, int op, ncclComm_t c, void *stream) {
    drain(stream);
    touch(stream, in, c ? (uint64_t)c->world * count * width(type) : 0, 0, "ncclReduceScatter");
    touch(stream, out, count * width(type), 1, "ncclReduceScatter");
    return op ? INVALID_ARGUMENT : reduce(2, in, out, count, type, c);
}

static int add(int sends, void *at, size_t count, int type, int peer, ncclComm_t c) {
    if (!grouped || !c || peer < 0 || peer >= c->world || open_group.n == PARTS) return INVALID_ARGUMENT;
    if (group_of && group_of != c) return INVALID_USAGE;
    group_of = c;
    open_group.parts[open_group.n++] = (part){peer, sends, at, count * width(type)};
    return SUCCESS;
}
int ncclSend(const void *at, size_t count, int type, int peer, ncclComm_t c, void *stream) {
    drain(stream);
    touch(stream, at, count * width(type), 0, "ncclSend");
    if (c) note("send", c, count * width(type));
    return add(1, (void *)(uintptr_t)at, count, type, peer, c);
}
int ncclRecv(void *at, size_t count, int type, int peer, ncclComm_t c, void *stream) {
    drain(stream);
    touch(stream, at, count * width(type), 1, "ncclRecv");
    return add(0, at, count, type, peer, c);
}

int ncclGroupStart(void) {
    if (grouped++) return INVALID_USAGE;
    open_group.n = 0;
    group_of = NULL;
    return SUCCESS;
}
int ncclGroupEnd(void) {
    if (grouped-- != 1) return INVALID_USAGE;
    return group_of ? start(group_of, &open_group) : SUCCESS;
}

const char *ncclGetErrorString(int result) {
    static const char *const text[] = {"no error",         "CUDA failed",   "system error", "internal error",
                                       "invalid argument", "invalid usage", "remote error", "in progress"};
    return result >= 0 && result <= IN_PROGRESS ? text[result] : "?";
}
const char *ncclGetLastError(ncclComm_t c) {
    (void)c;
    return "so says the fake";
}
