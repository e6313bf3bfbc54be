/* What the planner's tests and its fuzzer share: small instances, a second model written from fusion.h's text alone, and
 * brute force over all plans. */
#ifndef SID_TEST_FUSION_H
#define SID_TEST_FUSION_H

#include "fusion.h"
#include "test.h"

#define sid_fuse(...) (core_entered(), (sid_fuse_status)core_left((int)(sid_fuse)(__VA_ARGS__), "sid_fuse"))

/* Numbers to make instances from: random, or (the fuzzer's) bytes, zeros after the last. */
typedef struct draws {
    rng r;
    const uint8_t *bytes;
    size_t left;
} draws;
uint32_t draw(draws *d, uint32_t below);

enum {
    TINY_N = 12,
    TINY_METHODS = 3,
    TINY_KNOTS = 5
};

typedef enum kind {
    AFFINE,   /* one method, whole slopes, no decode: the papers' model */
    FRACTION, /* the same, slopes of any fraction */
    GENERAL,  /* any curves, methods, decodes, overlap */
    KINDS
} kind;

typedef struct tiny {
    sid_instance in;
    int64_t backward[TINY_N], bytes[TINY_N];
    uint8_t cuts[TINY_N];
    sid_method methods[TINY_METHODS];
    sid_knot knots[4 * TINY_METHODS][TINY_KNOTS + 1];
} tiny;
/* Cuts, caps, and every degenerate family (zero bytes, times, latencies, slopes; equal tensors) turn up often. */
void tiny_make(tiny *t, draws *d, kind k, uint32_t n, uint32_t n_methods);

int64_t model_time(const sid_instance *in, uint32_t groups, const uint32_t *ends, const uint8_t *methods);
/* Plans of all groups, of those that are not compressed, of those among them that are not copied back either. */
typedef enum choice {
    ANY,
    DENSE,
    IN_PLACE
} choice;
/* The best over all such plans that keep cuts and cap (INT64_MAX: there are none). */
int64_t brute(const sid_instance *in, choice of);
/* 1 if the plan keeps cuts and cap. */
int legal(const sid_instance *in, uint32_t groups, const uint32_t *ends);

/* A plan, with canaries around everything that the planner writes. */
typedef struct planned {
    sid_fusion plan;
    sid_fuse_status status;
    sid_fuse_error error;
    int intact;
    uint32_t ends[TINY_N];
    uint8_t methods[TINY_N];
} planned;
/* seed: NULL, or the plan in use. */
planned plan_tiny(const sid_instance *in, const char *algorithm, const sid_fuse_setting *settings, uint32_t n_settings,
                  const planned *seed);

#endif
