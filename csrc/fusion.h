/* Which tensors to compress and send together, and how: the planner, under a cost model in whole picoseconds.
 *
 *     instance (ready order, sizes, cost curves) -> algorithm -> plan (ends of the groups, method of each) + its time
 *
 * Model.    Tensors become ready in the order 0 .. n - 1. A group is a run of neighbours; it is ready when its last
 *           tensor is, is then encoded, exchanged in turn with the other groups, and decoded:
 *               backward  main + its tensors' backward_ps; slower by slowdown_permille while an exchange moves bytes
 *               encode    its backward + encode(bytes), on the main stream too, and slowed down in the same way
 *               exchange  max(its encode, or its backward where there is none, previous exchange) + exchange(bytes)
 *                         + delay(bytes), or what is left of the backward pass after its tensors where that is less
 *               decode    max(its exchange, previous decode) + decode(bytes); decode_main: not before the last backward
 *           An iteration is over when all of them are. `sid_fuse_evaluate` is this model; every planner asks it.
 * Pure.     No float, no clock, no allocation, no global: the same arguments give the same plan on every rank. Limits
 *           are counted in transitions (groups that were put behind a partial plan), never in seconds.
 * Errors.   A status by name; the text says which tensor, method or knot it is.
 */
#ifndef SIDCOMP_FUSION_H
#define SIDCOMP_FUSION_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sid_fuse_status { /* pinned */
    SID_FUSE_OK = 0,
    SID_FUSE_E_ARG = -1,            /* NULL where something is needed */
    SID_FUSE_E_TENSORS = -2,        /* n is 0 or above SID_FUSE_MAX_TENSORS */
    SID_FUSE_E_METHODS = -3,        /* no method, or more than SID_FUSE_MAX_METHODS */
    SID_FUSE_E_NEGATIVE_TIME = -4,  /* of a tensor, the forward pass or a knot */
    SID_FUSE_E_NEGATIVE_BYTES = -5, /* of a tensor or the cap */
    SID_FUSE_E_SHARE = -6,          /* slowdown_permille is above 999 */
    SID_FUSE_E_NO_EXCHANGE = -7,    /* a method without an exchange curve */
    SID_FUSE_E_FIRST_KNOT = -8,     /* a curve does not start at 0 bytes */
    SID_FUSE_E_KNOT_ORDER = -9,     /* a curve's bytes do not increase */
    SID_FUSE_E_FALLS = -10,         /* a curve's last slope leads below 0 before all tensors' bytes */
    SID_FUSE_E_SUM = -11,           /* bytes or times add up to more than 2^60 */
    SID_FUSE_E_ENDS = -12,          /* a plan's ends do not increase up to n */
    SID_FUSE_E_PLAN_METHOD = -13,   /* a plan names a method that is not there */
    SID_FUSE_E_SEED = -14,          /* the plan in use breaks a forced cut or the cap */
    SID_FUSE_E_ALGORITHM = -15,     /* no such algorithm */
    SID_FUSE_E_OPTION = -16,        /* unknown to the algorithm, or out of range */
    SID_FUSE_E_NO_DENSE = -17,      /* the algorithm needs a method without an encode */
    SID_FUSE_E_SPACE = -18          /* scratch is smaller than what was asked for, or misaligned */
} sid_fuse_status;

typedef struct sid_fuse_error {
    char text[256]; /* NUL-terminated; empty after SID_FUSE_OK */
} sid_fuse_error;

enum {
    SID_FUSE_MAX_TENSORS = 1 << 20,
    SID_FUSE_MAX_METHODS = 255
};

/* ---- instance -------------------------------------------------------------------------------------------------- */

typedef struct sid_knot {
    int64_t bytes, ps; /* bytes: of gradient, before any compression */
} sid_knot;

/* Linear between knots (rounded down), the last slope extends, one knot is a constant. The first knot is at 0 bytes:
 * the latency. Need not be monotone or convex. n == 0: there is no such stage. */
typedef struct sid_curve {
    const sid_knot *knots;
    uint32_t n;
} sid_curve;

typedef struct sid_method {
    sid_curve encode, exchange, decode; /* no encode: "dense", whose decode is a copy back */
    sid_curve delay; /* by which computing delays an exchange, whose threads wait for a processor; none: not at all */
} sid_method;

typedef struct sid_instance {
    uint32_t n;                          /* tensors */
    const int64_t *backward_ps;          /* n: each one's own share of the backward pass */
    const int64_t *bytes;                /* n */
    const uint8_t *cut_before;           /* n flags, or NULL: a group must start at this tensor */
    int64_t forward_ps, max_group_bytes; /* cap: 0 = none; a larger single tensor stays alone */
    uint32_t n_methods;
    const sid_method *methods;
    uint32_t
        slowdown_permille; /* of the main stream's speed, that a running exchange takes: processors that carry it */
    int decode_main;       /* 1: decodes run on the main stream, after the backward pass; 0: on one of their own */
} sid_instance;

/* Checks everything that the calls below would refuse in the instance. err may be NULL, here and below. */
sid_fuse_status sid_fuse_check(const sid_instance *in, sid_fuse_error *err);

/* ---- the model ------------------------------------------------------------------------------------------------- */

typedef struct sid_span {
    int64_t start, end; /* picoseconds since the iteration's start; -1, -1: no such stage */
} sid_span;

typedef struct sid_row {
    sid_span backward, encode, exchange, decode;
} sid_row;

/* Time of an iteration under any plan, also one that breaks the cap or a cut. ends: after the last tensor of each
 * group, increasing, the last is n. timeline: `groups` rows, or NULL. */
sid_fuse_status sid_fuse_evaluate(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods,
                                  int64_t *time_ps, sid_row *timeline, sid_fuse_error *err);

/* ---- algorithms ------------------------------------------------------------------------------------------------ */

typedef struct sid_fuse_option {
    const char *name;
    int64_t dflt, min, max;
    const char *doc; /* one line */
} sid_fuse_option;

typedef struct sid_algorithm {
    const char *name, *paper, *doc;
    const sid_fuse_option *options;
    uint32_t n_options;
    int takes_seed; /* 1: a plan in use may be given; the result is never slower than it */
} sid_algorithm;

const sid_algorithm *sid_algorithm_at(uint32_t i); /* NULL past the end */

typedef struct sid_fuse_setting {
    const char *name;
    int64_t value;
} sid_fuse_setting;

typedef struct sid_fuse_request {
    const char *algorithm;
    const sid_fuse_setting *settings; /* the rest take their defaults */
    uint32_t n_settings;
    uint32_t seed_groups; /* the plan in use; 0: none */
    const uint32_t *seed_ends;
    const uint8_t *seed_methods;
} sid_fuse_request;

typedef struct sid_fusion {
    uint32_t groups;
    uint32_t *ends;         /* room for n, brought by the caller */
    uint8_t *methods;       /* likewise */
    int64_t time_ps;        /* what sid_fuse_evaluate says of the plan */
    int64_t lower_bound_ps; /* no plan that keeps cap and cuts, whatever its methods, is faster */
    uint64_t work;          /* transitions */
    int exact;              /* 1: proven optimal, time_ps == lower_bound_ps */
} sid_fusion;

/* Two-phase: with scratch == NULL checks everything and writes the size to *bytes (out may be NULL); with scratch
 * (a multiple of 64, *bytes as told) plans. Forced cuts and the cap are kept by every algorithm. */
sid_fuse_status sid_fuse(const sid_instance *in, const sid_fuse_request *what, sid_fusion *out, void *scratch,
                         size_t *bytes, sid_fuse_error *err);

#ifdef __cplusplus
}
#endif
#endif
