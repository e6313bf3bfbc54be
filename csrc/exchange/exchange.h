/* What an exchange is: the contract to which this folder is written (docs/exchanges.md). route.c makes one, step.c keeps a
 * step together, frames.c has the messages that are no payloads, kept.c what stays from step to step. */
#ifndef SID_EXCHANGE_H
#define SID_EXCHANGE_H

#include "../core.h"

enum {
    SID_MAX_PLANS = 3, /* of a cut group: whole slices, the short one, empty ones */
    SID_SUBGROUPS = 16 /* a slice is group (slice + 1) << 16 of the group: payloads and random streams of its own */
};

/* One step of one rank. */
typedef struct sid_exchange_step {
    const sid_exchange *x;
    const sid_segment *seg;
    sid_segment *cut; /* room for n_seg */
    uint32_t n_seg;
    uint8_t *state, *work, *wire;
    const sid_step *at;
    sid_report *report;
    sid_error *err;
} sid_exchange_step;

/* A part of a state: what `plan` keeps of the elements from `start` on. */
typedef struct sid_part {
    const sid_plan *plan;
    uint64_t state, start; /* state: offset in bytes */
    int common;            /* kept for all ranks, not of this rank's own vector */
} sid_part;

/* What a one-bit ring does in `round`, in places of its wire block: it takes in what the round before has brought, and
 * prepares what this one sends. The CPU's advance goes by it, and so do the kernels of a device. */
typedef struct sid_hop_side {
    uint64_t frame;       /* 0: there is no such side */
    uint64_t body;        /* bytes that follow the frame */
    uint64_t bits, bytes; /* of them, where the slice's own bits lie, in whole units of 32 bytes */
    uint32_t round, peer;
    uint32_t untold; /* flags that the frame does not carry yet */
} sid_hop_side;
typedef struct sid_hop {
    sid_hop_side in, out;
    uint64_t block; /* of 128 elements: the first of what comes in */
    uint32_t phase; /* of random bits */
    uint32_t votes; /* what comes in carries so many, own bits stand for one; 0: it replaces them */
} sid_hop;

typedef struct sid_exchange_kind {
    sid_info info;
    /* Sets plans, sizes but for the last round's, and own words; refuses what makes no sense. */
    sid_status (*plan)(sid_exchange *x, const sid_route *r, sid_error *err);
    uint32_t (*messages)(const sid_exchange *x, uint32_t round, int receive, sid_message *out);
    /* Rounds 0 to rounds - 1, and once more with `rounds`, where everything received must be checked. It goes on after a
     * failure: what cannot be had is replaced by what tells the others (sid_poison, an empty payload). */
    sid_status (*advance)(sid_exchange_step *t, uint32_t round);
    /* What may be done while the messages of `round` travel, before advance(round + 1), which else does it: it touches
     * none of them. NULL: nothing. */
    void (*meanwhile)(sid_exchange_step *t, uint32_t round);
    void (*finish)(sid_exchange_step *t); /* all is well on all ranks: writes the segments */
    void (*undo)(sid_exchange_step *t);   /* something went wrong: the step did not happen. NULL: sid_undo_parts */
    void (*hop)(const sid_exchange *x, uint32_t round, sid_hop *out); /* of a one-bit ring; else NULL */
    uint32_t (*parts)(const sid_exchange *x);
    sid_part (*part)(const sid_exchange *x, uint32_t i);
} sid_exchange_kind;

struct sid_exchange {
    const sid_exchange_kind *kind;
    uint32_t rank, world;
    uint32_t members; /* whose mean it is: the world; nodes, where it is one of nodes' means */
    uint64_t n;
    sid_dtype dtype;
    uint32_t confirms; /* a last round tells all ranks whether all went well */
    uint32_t rounds;   /* without it */
    sid_exchange_sizes sizes;
    double param[SID_MAX_PARAMS];
    uint64_t slice;   /* elements of a slice, if there is as much left */
    uint64_t message; /* bytes */
    uint64_t at[8];   /* places in work and wire, the exchange's own */
    uint32_t word[8]; /* own */
    sid_plan plan[SID_MAX_PLANS];
    sid_plan server[SID_MAX_PLANS];
    uint32_t within; /* 1: the exchange within this one lies behind it */
};
/* Room for it, while an exchange is made and ever after. */
static inline sid_exchange *sid_within(const sid_exchange *x) { return (sid_exchange *)(uintptr_t)(x + 1); }

/* ---- frames: messages that are no payloads ------------------------------------------------------------------------ */

#define SID_FRAME_MAGIC 0x46444953u /* "SIDF" */

typedef struct sid_frame {
    uint32_t magic, flags;
    uint64_t step;
    uint32_t group;
    uint16_t exchange, round;
    uint64_t checksum; /* wire.h's, of the frame and what follows, this field as zero */
} sid_frame;
enum {
    SID_FRAME_BYTES = 32,
    SID_FRAME_POISON = 1, /* something went wrong on the way */
    SID_FRAME_NONFINITE = 2,
    SID_FRAME_CULPRIT = 16 /* shift: of the rank at fault */
};

/* Closes a frame around `bytes` (a multiple of 32) that follow it. */
void sid_frame_close(const sid_exchange_step *t, sid_frame *f, uint32_t round, uint32_t flags, uint64_t bytes);
/* Opens one from `peer`: SID_OK and its flags, or why not. A poisoned one is SID_E_CORRUPT. */
sid_status sid_frame_open(sid_exchange_step *t, const sid_frame *f, uint32_t round, uint64_t bytes, uint32_t peer,
                          uint32_t *flags);

/* ---- places, for the kernels of a device ------------------------------------------------------------------------ */

/* Two-shot's. In wire, a payload's length apart each: from 0 on what goes to the other ranks; what all ranks have for our
 * slice; the means. In state: own slices' parts, from 0 on, and what is kept for all. */
typedef struct sid_shots {
    uint64_t theirs, means, apart, server;
} sid_shots;
sid_shots sid_shots_of(const sid_exchange *x);
/* All-reduce's, in wire: this rank's slice of what the codec's round `sum` sums, `len` elements of it, and what rank r has
 * for it. Slice s are `each` bytes from first + s * each on, or what there is of them before first + bytes; its frame goes
 * out from out + s * apart, and from rank r one comes in at in + r * apart. */
typedef struct sid_sum_of_slices {
    uint64_t own, len, from, apart; /* from + r * apart */
    uint64_t first, bytes, each, out, in;
} sid_sum_of_slices;
sid_sum_of_slices sid_sum_of_slices_of(const sid_exchange *x, uint32_t sum);
/* Hierarchical's, in wire: frames as they go out and come in, x->message apart; the inner exchange's. */
typedef struct sid_nodes {
    uint64_t out, in, wire;
    uint32_t local, mine; /* ranks of a node, and which of them this one is */
    uint32_t group;       /* what the inner exchange's has beside the group */
} sid_nodes;
sid_nodes sid_nodes_of(const sid_exchange *x);
#define SID_SECOND 0x8000u /* slices of shot 2 */

/* ---- helpers ------------------------------------------------------------------------------------------------- */

sid_status sid_refuse(sid_error *err, const sid_route *r, const char *why);
/* x->plan for a group of n elements; with which memory (NULL: the route's) and dtype. */
sid_status sid_sub_plan(const sid_route *r, uint64_t n, const char *memory, sid_dtype dtype, sid_plan *plan,
                        sid_error *err);
/* Elements [start, start + len) of slice s. */
static inline uint64_t sid_slice_start(const sid_exchange *x, uint32_t s) {
    const uint64_t at = s * x->slice;
    return at < x->n ? at : x->n;
}
static inline uint64_t sid_slice_len(const sid_exchange *x, uint32_t s) {
    const uint64_t left = x->n - sid_slice_start(x, s);
    return left < x->slice ? left : x->slice;
}
/* Which plan is that of slice s: 0 whole, 1 short, 2 empty. */
static inline uint32_t sid_slice_kind(const sid_exchange *x, uint32_t s) {
    const uint64_t len = sid_slice_len(x, s);
    return len == x->slice ? 0 : len ? 1 : 2;
}
/* The three plans of slices of x->slice elements. */
sid_status sid_slice_plans(const sid_exchange *x, const sid_route *r, const char *memory, sid_dtype dtype,
                           sid_plan plan[SID_MAX_PLANS], sid_error *err);
/* t->cut <- elements [start, start + len) of the segments; returns how many segments that are. */
uint32_t sid_cut(const sid_exchange_step *t, uint64_t start, uint64_t len);
/* Remembers the first failure of a step, and whose; returns it. */
sid_status sid_blame(sid_exchange_step *t, sid_status s, uint32_t culprit);
/* `step` for slice s, by a rank of `world`. */
static inline sid_step sid_slice_step(const sid_step *step, uint32_t s, uint32_t rank, uint32_t world) {
    sid_step at = *step;
    at.group += (s + 1u) << SID_SUBGROUPS;
    at.rank = rank;
    at.world = world;
    return at;
}
/* Encodes slice s of the segments, or on failure leaves a payload that nobody takes for one. */
sid_status sid_encode_part(sid_exchange_step *t, const sid_plan *p, const sid_segment *seg, uint32_t n_seg,
                           uint8_t *state, uint8_t *work, const sid_step *at, uint8_t *payload);
/* Takes the gradient out of all parts again that are not common. */
void sid_undo_parts(sid_exchange_step *t);

/* Of an exchange that keeps what its one plan keeps. */
uint32_t sid_one_part(const sid_exchange *x);
sid_part sid_whole_part(const sid_exchange *x, uint32_t i);

/* What a step remembers between its rounds, at the start of work. */
typedef struct sid_fault {
    int32_t status;
    uint32_t culprit;
    uint32_t flags;   /* of frames: what goes on with ours */
    uint32_t encoded; /* what there is to undo: SID_OWN, SID_FOR_ALL, SID_SPENT */
    char text[256];
} sid_fault;
static inline sid_fault *sid_fault_of(const sid_exchange_step *t) { return (sid_fault *)(void *)t->work; }
enum {
    SID_FAULT_BYTES = 320,
    SID_OWN = 1,
    SID_FOR_ALL = 2,
    SID_SPENT = 4 /* the vector that was encoded is gone: the residual can only be set to 0 */
};

const sid_exchange_kind *sid_kind_of(const sid_info *info); /* registry.c */
/* x from the route; x[1] is room for one within. */
sid_status sid_route_plan(const sid_route *r, sid_exchange *x, sid_error *err);

#endif
