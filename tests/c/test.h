/* A small harness: a test is a function in main.c's list, CHECK reports and goes on. */
#ifndef SID_TEST_H
#define SID_TEST_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "sidcomp.h"
#include "sidcomp_delta.h"
#include "wire.h"

void test_report(const char *file, int line, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
extern atomic_ulong test_checks, test_failures;
extern int test_all;         /* every combination, not some of each */
extern uint64_t test_digest; /* of payloads: every compiler, processor and sanitizer must come to the same */

/* CHECK(condition, "what was seen: %d", x) */
#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        atomic_fetch_add_explicit(&test_checks, 1, memory_order_relaxed);                                              \
        if (!(condition)) test_report(__FILE__, __LINE__, __VA_ARGS__);                                                \
    } while (0)

/* ---- the core allocates nothing ------------------------------------------------------------------------------- */

/* Every call of the core that returns a status is made between these two: while it lasts this thread gets no memory, and
 * core_left CHECKs that it did not ask for any (allocator.c). It passes the status on. */
extern _Thread_local int core_depth;
extern _Thread_local unsigned core_asked;
void core_entered(void);
int core_left(int status, const char *call);
#define IN_CORE(call, ...) (core_entered(), (sid_status)core_left((int)(call)(__VA_ARGS__), #call))
#define sid_plan_make(...) IN_CORE(sid_plan_make, __VA_ARGS__)
#define sid_encode(...) IN_CORE(sid_encode, __VA_ARGS__)
#define sid_next_reduction(...) IN_CORE(sid_next_reduction, __VA_ARGS__)
#define sid_decode(...) IN_CORE(sid_decode, __VA_ARGS__)
#define sid_decode_list(...) IN_CORE(sid_decode_list, __VA_ARGS__)
#define sid_learn(...) IN_CORE(sid_learn, __VA_ARGS__)
#define sid_check(...) IN_CORE(sid_check, __VA_ARGS__)
#define sid_residual_out(...) IN_CORE(sid_residual_out, __VA_ARGS__)
#define sid_residual_in(...) IN_CORE(sid_residual_in, __VA_ARGS__)
#define sid_unsend(...) IN_CORE(sid_unsend, __VA_ARGS__)
#define sid_forget(...) IN_CORE(sid_forget, __VA_ARGS__)
#define sid_rescale(...) IN_CORE(sid_rescale, __VA_ARGS__)
#define sid_scale(...) IN_CORE(sid_scale, __VA_ARGS__)
#define sid_exchange_make(...) IN_CORE(sid_exchange_make, __VA_ARGS__)
#define sid_exchange_advance(...) IN_CORE(sid_exchange_advance, __VA_ARGS__)
#define sid_exchange_meanwhile(...) IN_CORE(sid_exchange_meanwhile, __VA_ARGS__)
#define sid_exchange_abandon(...) IN_CORE(sid_exchange_abandon, __VA_ARGS__)
#define sid_exchange_residual_out(...) IN_CORE(sid_exchange_residual_out, __VA_ARGS__)
#define sid_exchange_residual_in(...) IN_CORE(sid_exchange_residual_in, __VA_ARGS__)
#define sid_exchange_unsend(...) IN_CORE(sid_exchange_unsend, __VA_ARGS__)
#define sid_exchange_forget(...) IN_CORE(sid_exchange_forget, __VA_ARGS__)
#define sid_exchange_rescale(...) IN_CORE(sid_exchange_rescale, __VA_ARGS__)
#define sid_delta_encode(...) IN_CORE(sid_delta_encode, __VA_ARGS__)
#define sid_delta_encode_found(...) IN_CORE(sid_delta_encode_found, __VA_ARGS__)
#define sid_delta_changes(...) IN_CORE(sid_delta_changes, __VA_ARGS__)
#define sid_delta_check(...) IN_CORE(sid_delta_check, __VA_ARGS__)
#define sid_delta_apply(...) IN_CORE(sid_delta_apply, __VA_ARGS__)
#define sid_loopback(...) IN_CORE(sid_loopback, __VA_ARGS__)

/* ---- random numbers ---------------------------------------------------------------------------------------------- */

typedef struct rng {
    uint64_t s;
} rng;
uint64_t rng_next(rng *r);
uint32_t rng_below(rng *r, uint32_t n); /* n > 0 */
float rng_normal(rng *r);

/* ---- memory with canaries ---------------------------------------------------------------------------------------- */

/* `bytes` at a multiple of 64, plus `shift`; the bytes around them are watched. */
typedef struct block {
    uint8_t *raw, *p;
    size_t bytes, room;
} block;
block block_new(size_t bytes, size_t shift);
int block_intact(const block *b); /* 1: nothing was written around it */
void block_free(block *b);

/* ---- a group ----------------------------------------------------------------------------------------------------- */

/* How the elements of a group are cut into segments. */
typedef enum cut {
    CUT_ONE,  /* one segment, aligned */
    CUT_ODD,  /* some segments, each at an odd element */
    CUT_TINY, /* segments of 1 to 3 elements, empty ones between (the first 2000 elements; then one long segment) */
    CUTS
} cut;

typedef struct vec { /* n elements of a dtype in segments, each in a block of its own */
    sid_dtype dtype;
    uint64_t n;
    uint32_t n_seg;
    sid_segment *seg;
    block *blocks;
} vec;
vec vec_new(sid_dtype dtype, uint64_t n, cut how);
void vec_set(vec *v, const float *x); /* rounds to the dtype */
void vec_get(const vec *v, float *x);
void vec_fill(vec *v, uint8_t byte);        /* all bytes */
int vec_filled(const vec *v, uint8_t byte); /* are all bytes still so? */
int vec_equal(const vec *a, const vec *b);  /* same bytes in the same order, whatever the segments */
int vec_intact(const vec *v);
void vec_free(vec *v);

size_t dtype_bytes(sid_dtype d);
const char *dtype_name(sid_dtype d);

/* ---- a plan with its memories ------------------------------------------------------------------------------------ */

typedef struct group {
    block plan_mem, state, work, payload;
    const sid_plan *plan;
    sid_sizes sizes;
    char name[160]; /* for messages */
} group;

/* 0 if the configuration is one that this machine or codec does not have; a CHECK has failed for any other error. */
int group_open(group *g, const sid_config *c);
int group_intact(const group *g);
void group_close(group *g);

/* Whether they go together: some codecs need a memory that keeps what was not sent. */
int go_together(const sid_info *codec, const sid_info *memory);
/* The plainest memory that goes with the codec. */
const sid_info *home_of(const sid_info *codec);
sid_config config_of(const sid_info *codec, const sid_info *memory, uint64_t n, sid_dtype dtype);

/* The settings that a test walks: i == 0 the defaults, then every parameter at its smallest and largest value, every
 * choice. Returns 0 past the end; the setting is written to *s. */
int setting_at(const sid_info *codec, const sid_info *memory, uint32_t i, sid_setting *s, uint32_t *n);

/* 1: what was sent and what is kept make up gradient and what was kept before. */
int conserves(const group *g, const sid_config *c);

/* The gradients that a test walks. */
enum {
    DATA_INTEGERS, /* -60 to 60: sums of two steps are exact in every dtype */
    DATA_NORMAL,
    DATA_HEAVY, /* a few values carry the weight */
    DATA_EQUAL, /* one magnitude, both signs */
    DATA_ZERO,
    DATA_DENORMAL,
    DATA_HUGE,  /* up to the largest float */
    DATA_TAILS, /* products of three uniform numbers: quick to make, with a tail */
    DATAS
};
void data_make(float *x, uint64_t n, int kind, uint64_t seed);

/* Bytes that say which words of the state's header become what; own: and of the codec's own part at its end. */
void state_edit(group *g, const uint8_t *d, size_t size, int own);
/* All calls on a state that is edited again and again: CHECKs that they end, write to their blocks alone, send what sid_check
 * takes, and lose nothing. The first byte says how. */
void state_lives(group *g, const sid_config *c, const uint8_t *d, size_t size, int own);

/* Writes the checksum that the header should carry (by the page's formula, not by the core's code). */
void message_sign(uint8_t *message, uint64_t bytes, uint64_t field);
void payload_sign(uint8_t *payload, uint64_t bytes, int linear);

#endif
