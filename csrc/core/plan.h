/* The plan of a group: what is known before the first step. plan.c makes it from a sid_config; codecs fill in their part. */
#ifndef SID_PLAN_H
#define SID_PLAN_H

#include <stddef.h>

#include "../sidcomp.h"
#include "../wire.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SID_MAX_PARAMS = 16,
    SID_DERIVED_WORDS = 8
};
#define SID_MAX_N (1ull << 40)

/* The parameter table of a sid_info. A plan has room for SID_MAX_PARAMS values: a longer table does not compile. */
#define SID_PARAMETERS(rows)                                                                                           \
    .params = (rows),                                                                                                  \
    .n_params = sizeof(struct {                                                                                        \
        _Static_assert(sizeof(rows) / sizeof *(rows) <= SID_MAX_PARAMS, "more rows than SID_MAX_PARAMS");              \
        char row[sizeof(rows) / sizeof *(rows)];                                                                       \
    })

/* Rows of such a table. A choice is one of the names 0 .. last. */
#define SID_NUMBER_ROW(name_, kind_, dflt_, min_, max_, unit_, doc_)                                                   \
    {.name = name_, .kind = kind_, .dflt = dflt_, .min = min_, .max = max_, .unit = unit_, .doc = doc_}
#define SID_CHOICE_ROW(name_, choices_, dflt_, last_, doc_)                                                            \
    {.name = name_, .kind = SID_CHOICE, .dflt = dflt_, .max = last_, .unit = "", .choices = choices_, .doc = doc_}

/* The rules that a plan's encodes may leave. Encode treats any other rule, from a damaged checkpoint, as "nothing was sent". */
typedef enum sid_ruling_form {
    SID_RULES_BY_KEY,   /* of sparse bodies */
    SID_RULES_BY_SHARE, /* inverse is a whole number, scale 1 / inverse; both 0: nothing was sent */
    SID_RULES_BY_SCALE  /* scale is 0 or within `scale`; inverse is 0 or within `inverse` */
} sid_ruling_form;
typedef struct sid_ruling {
    sid_ruling_form form;
    uint32_t scale[2], inverse[2]; /* bits of the least and of the largest one */
} sid_ruling;

struct sid_codec;
struct sid_memory;
struct sid_simd;

struct sid_plan {
    const struct sid_codec *codec;
    const struct sid_memory *memory;
    const struct sid_simd *simd;
    int ahead;      /* 1: this processor gains from prefetch instructions in encode (core.c) */
    int sums_tiles; /* 1: encode adds up a payload's checksum while it writes the tiles, else when all are written */
    uint64_t n, k, cap; /* cap: elements that a sparse payload can hold */
    uint32_t tile;      /* elements of a tile: SID_TILE, unless the codec needs SID_TILE * 2 or * 4 */
    uint64_t room;      /* candidates that a sparse codec can hold during a pass; n, or at least 2 * cap + 4096 */
    sid_dtype dtype;
    sid_dtype kept;  /* of the memory's vectors in the state: SID_F32 or SID_BF16 */
    uint64_t stride; /* bytes of such a vector, a multiple of 64 */
    sid_sizes sizes;
    double codec_param[SID_MAX_PARAMS], memory_param[SID_MAX_PARAMS]; /* in the order of the tables */
    uint64_t derived[SID_DERIVED_WORDS]; /* what codec->plan made of the parameters: a struct of the codec's own */
    sid_ruling ruling;
    uint64_t first;          /* of two reductions: elements of the body that reduction 0 sums */
    uint64_t extra;          /* floats at the end of the state that are the codec's */
    const sid_shape *shapes; /* while the plan is made; then n_shapes sid_matrix follow the plan */
    uint32_t n_shapes;
    uint32_t drops; /* 1: the codec drops a part of acc that it neither sends nor keeps */
    uint32_t alone; /* 1: no body is summed on the way; a linear one is not divided, and its checksum covers it */
};
/* The place of a tensor in its group, and its share of a shaped codec's body. */
typedef struct sid_matrix {
    uint64_t start, len;   /* elements of the group */
    uint64_t rows, cols;   /* cols 0: the codec sends it as a vector, of `len` rows */
    uint64_t p, q, kept;   /* the codec's: where its parts lie in the slices of reductions 0 and 1, and in the state */
    uint32_t rank, height; /* height: rows that are added up by themselves */
} sid_matrix;
SID_HD const sid_matrix *sid_matrices(const sid_plan *p) { return (const sid_matrix *)(const void *)(p + 1); }

/* plan.c: value <- s, where `info` has a parameter of that name; *known says whether. */
sid_status sid_set_param(const sid_info *info, double *value, const sid_setting *s, int *known, sid_error *err);

#ifdef __cplusplus
}
#endif
#endif
