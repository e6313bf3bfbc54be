/* Defines an exchange: the contract to which this folder is written (docs/exchanges.md). make.c makes an exchange,
 * step.c keeps its steps together, frames.c has the messages that are no payloads, kept.c the state. */
#ifndef SID_EXCHANGE_H
#define SID_EXCHANGE_H

#include "../core/core.h"

/* ---- the contract ------------------------------------------------------------------------------------------------ */

enum {
    SID_MAX_PLANS = 3, /* of a group that is cut into slices: whole slices, the short one, empty ones */
    SID_SUBGROUPS = 16 /* a slice is group (slice + 1) << 16 of the group: payloads and random streams of its own */
};

/* One step of one rank. */
typedef struct sid_exchange_step {
    const sid_exchange *x;
    const sid_segment *seg;
    sid_segment *cut; /* room for n_seg */
    uint32_t n_seg;
    uint8_t *state, *work, *wire;
    const sid_step *step;
    sid_report *report;
    sid_error *err;
} sid_exchange_step;

/* A part of a state: what `plan` keeps of the elements from `start` on. */
typedef struct sid_part {
    const sid_plan *plan;
    uint64_t state, start; /* state: offset in bytes */
    int common;            /* kept for all ranks, not of this rank's own vector */
} sid_part;

struct sid_hop;

typedef struct sid_exchange_kind {
    sid_info info;
    /* Sets plans, sizes without those of the last, confirming round, and own words; refuses what makes no sense. */
    sid_status (*plan)(sid_exchange *x, const sid_exchange_config *config, sid_error *err);
    uint32_t (*messages)(const sid_exchange *x, uint32_t round, int receive, sid_message *out);
    /* Rounds 0 to rounds - 1, and once more with `rounds`; everything received must be checked. It goes on after a failure:
     * in place of what it cannot have, it sends what tells the other ranks (SID_FRAME_POISON, an empty payload). */
    sid_status (*advance)(sid_exchange_step *t, uint32_t round);
    /* The part of advance(round + 1) that touches none of the messages of `round`, which travel meanwhile. If it is not
     * called, advance does it. NULL: there is nothing to do. */
    void (*meanwhile)(sid_exchange_step *t, uint32_t round);
    void (*finish)(sid_exchange_step *t); /* all is well on all ranks: writes the segments */
    void (*undo)(sid_exchange_step *t);   /* something went wrong: the step did not happen. NULL: sid_undo_parts */
    void (*hop)(const sid_exchange *x, uint32_t round, struct sid_hop *out); /* of a one-bit ring; else NULL */
    uint32_t (*parts)(const sid_exchange *x);
    sid_part (*part)(const sid_exchange *x, uint32_t i);
} sid_exchange_kind;

/* The functions that every exchange has, in the order of their fields. */
#define SID_EXCHANGE_STAGES(plan_, messages_, advance_, finish_, parts_, part_)                                        \
    .plan = plan_, .messages = messages_, .advance = advance_, .finish = finish_, .parts = parts_, .part = part_

struct sid_exchange {
    const sid_exchange_kind *kind;
    const sid_simd *simd; /* sid_simd_for asks the processor, which takes microseconds in a virtual machine */
    uint32_t rank, world;
    uint32_t members; /* how many the mean is over: the ranks of the world, or nodes where each of them has a mean */
    uint64_t n;
    sid_dtype dtype;
    uint32_t confirms; /* 1: a last round tells all ranks whether all went well */
    uint32_t rounds;   /* without it */
    sid_exchange_sizes sizes;
    double param[SID_MAX_PARAMS];
    uint64_t slice;      /* elements of a slice, if there are as many left */
    uint64_t message;    /* bytes */
    uint64_t confirm_at; /* in wire: this rank's frame of the last round, then those of all ranks, 64 bytes apart */
    uint64_t place[8];   /* in work and wire: the exchange's own */
    uint32_t word[8];    /* the exchange's own */
    sid_plan plan[SID_MAX_PLANS];
    sid_plan server[SID_MAX_PLANS];
    uint32_t within; /* 1: the exchange within this one lies behind it */
};
/* The exchange within x. There is room for it from the start of making x. */
static inline sid_exchange *sid_within(const sid_exchange *x) { return (sid_exchange *)(uintptr_t)(x + 1); }

const sid_exchange_kind *sid_kind_of(const sid_info *info); /* registry.c */
/* "auto", and the names of the exchanges that another one may have within (exchanges.def); ends with NULL. registry.c */
extern const char *const sid_exchanges_within[];
enum {
#define SID_EXCHANGE(symbol, cuda, within) +within
    SID_EXCHANGES_WITHIN = 0
#include "../exchanges.def"
#undef SID_EXCHANGE
};
/* The exchange of a codec if nobody names one. gather.c */
const char *sid_usual_exchange(const sid_info *codec);

/* ---- make.c: making one ------------------------------------------------------------------------------------------ */

/* x from its configuration; x[1] is room for the exchange within. */
sid_status sid_exchange_plan(const sid_exchange_config *config, sid_exchange *x, sid_error *err);
sid_status sid_refuse(sid_error *err, const sid_exchange_config *config, const char *why);
/* For `plan`: what sid_exchange_sizes tells cost models. */
static inline void sid_exchange_costs(sid_exchange *x, double encoded, double decoded, double merged,
                                      uint32_t ring_passes) {
    x->sizes.encoded = encoded;
    x->sizes.decoded = decoded;
    x->sizes.merged = merged;
    x->sizes.ring_passes = ring_passes;
}
/* A plan for n elements of the configured group, with another memory (NULL: the configured one) and dtype. */
sid_status sid_sub_plan(const sid_exchange_config *config, uint64_t n, const char *memory, sid_dtype dtype,
                        sid_plan *plan, sid_error *err);
/* The three plans for slices of x->slice elements. */
sid_status sid_slice_plans(const sid_exchange *x, const sid_exchange_config *config, const char *memory,
                           sid_dtype dtype, sid_plan plan[SID_MAX_PLANS], sid_error *err);

/* Elements [start, start + len) of slice s. */
static inline uint64_t sid_slice_start(const sid_exchange *x, uint32_t s) {
    const uint64_t offset = s * x->slice;
    return offset < x->n ? offset : x->n;
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

/* ---- frames.c: messages that are no payloads, and failures ------------------------------------------------------------ */

/* A step keeps this between its rounds, at the start of work. */
typedef struct sid_fault {
    int32_t status;
    uint32_t culprit;
    uint32_t flags;   /* that this rank's frames carry on */
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
/* Remembers the first failure of a step, and which rank is at fault; returns s. */
sid_status sid_blame(sid_exchange_step *t, sid_status s, uint32_t culprit);

#define SID_FRAME_MAGIC 0x46444953u /* "SIDF" */
typedef struct sid_frame {
    uint32_t magic, flags;
    uint64_t step;
    uint32_t group;
    uint16_t exchange, round;
    uint64_t checksum; /* wire.h's, of the frame and what follows it, this field as zero */
} sid_frame;
enum {
    SID_FRAME_BYTES = 32,
    SID_FRAME_POISON = 1, /* something went wrong on the way */
    SID_FRAME_NONFINITE = 2,
    SID_FRAME_CULPRIT = 16 /* shift: of the rank at fault */
};
/* Closes a frame around `bytes` (a multiple of 32) that follow it. */
void sid_frame_close(const sid_exchange_step *t, sid_frame *f, uint32_t round, uint32_t flags, uint64_t bytes);
/* Opens a frame from `peer`: SID_OK and its flags, or why not. A poisoned frame is SID_E_CORRUPT. */
sid_status sid_frame_open(sid_exchange_step *t, const sid_frame *f, uint32_t round, uint64_t bytes, uint32_t peer,
                          uint32_t *flags);

/* ---- step.c ------------------------------------------------------------------------------------------------------ */

/* t->cut <- elements [start, start + len) of the segments; returns how many segments these are. */
uint32_t sid_cut(const sid_exchange_step *t, uint64_t start, uint64_t len);
/* `step` for slice s, by a rank of `world`. */
static inline sid_step sid_slice_step(const sid_step *step, uint32_t s, uint32_t rank, uint32_t world) {
    sid_step part = *step;
    part.group += (s + 1u) << SID_SUBGROUPS;
    part.rank = rank;
    part.world = world;
    return part;
}
/* Encodes the segments of a slice. If that fails, it leaves a payload that no rank takes for one. */
sid_status sid_encode_part(sid_exchange_step *t, const sid_plan *p, const sid_segment *seg, uint32_t n_seg,
                           uint8_t *state, uint8_t *work, const sid_step *step, uint8_t *payload);
/* Takes the gradient out of all parts again that are not common. */
void sid_undo_parts(sid_exchange_step *t);

/* ---- kept.c ------------------------------------------------------------------------------------------------------ */

/* parts and part of an exchange whose state is that of its one plan. */
uint32_t sid_one_part(const sid_exchange *x);
sid_part sid_whole_part(const sid_exchange *x, uint32_t i);

/* ---- places in wire and state, for the kernels of a device ---------------------------------------------------------- */

/* A one-bit ring: what it does in a round, in places of its wire block. It takes in what the round before has brought, and
 * prepares what this one sends. The CPU's advance goes by it, too. */
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
/* The local signs that round i of the first ring is the first to need: elements [from, to). Returns how many such rounds
 * there are. */
uint32_t sid_signs_of(const sid_exchange *x, uint32_t i, uint64_t *from, uint64_t *to);

/* Two-shot. In wire, each a payload's length apart: from 0 on, what goes to the other ranks; what all ranks have for our
 * slice; the means. In state: from 0 on, the parts of our own slices; then what is kept for all ranks. */
typedef struct sid_shots {
    uint64_t theirs, means, apart, server;
} sid_shots;
sid_shots sid_shots_of(const sid_exchange *x);
/* All-reduce, in wire: this rank's slice of what the codec's reduction `sum` sums, `len` elements of it, and what rank r has
 * for it. Slice s is `each` bytes from first + s * each on, or as many as there are before first + bytes. Its frame goes
 * out from out + s * apart, and the frame from rank r comes in at in + r * apart. */
typedef struct sid_sum_of_slices {
    uint64_t own, len, from, apart; /* from + r * apart */
    uint64_t first, bytes, each, out, in;
} sid_sum_of_slices;
sid_sum_of_slices sid_sum_of_slices_of(const sid_exchange *x, uint32_t sum);
/* Hierarchical, in wire: frames as they go out and come in, x->message apart; and the wire of the exchange within. */
typedef struct sid_nodes {
    uint64_t out, in, wire;
    uint32_t local, mine; /* ranks of a node, and which of them this one is */
    uint32_t group;       /* what the exchange within adds to the group */
} sid_nodes;
sid_nodes sid_nodes_of(const sid_exchange *x);
#define SID_SECOND 0x8000u /* slices of shot 2 */

#endif
