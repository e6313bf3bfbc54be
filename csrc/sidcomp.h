/* sidcomp: gradient compression with error feedback, planned and exchanged elsewhere. This header is the manual.
 *
 *     segments -> group -> encode (+ memory) -> payload -> [exchange] -> decode -> segments
 *
 * A *group* is a list of segments (pointer, length) seen as one vector of n elements of one dtype. A *codec* turns a
 * vector into a payload; a *memory* turns this step's gradient and what was kept into `acc`, the vector that the codec
 * reads. They meet a tile at a time and do not know each other, so m memories and n codecs are m x n compressors.
 *
 * Memory.   Nothing here allocates, prints, exits or keeps a global. Three memories, never mixed:
 *             plan   immutable; a pure function of sid_config
 *             state  survives steps and goes into checkpoints; all-zero bytes are its valid start. A damaged one cannot
 *                    make a call read out of bounds or never end: statistics in its header that no encode writes count
 *                    as absent. Only the floats of its vectors must be finite
 *             work   garbage between calls
 *           Ask the sizes first (sid_plan_make with mem == NULL, then sid_plan_sizes), bring the bytes.
 *           plan, state, work and payload must start at a multiple of 64 bytes; segments may start at any element.
 * Errors.   Every function that can fail returns a sid_status and nothing else. Where it takes a sid_error, the text
 *           names the parameter or field at fault. A failed call leaves segments and state as they were, except that
 *           SID_E_DEVICE and SID_E_PEER leave what the device had reached.
 * Threads.  A call runs on the calling thread. Distinct groups may be encoded and decoded concurrently; one group's
 *           state and work belong to one call at a time.
 * Results.  The same input gives the same payload and output bytes on every instruction set, device and thread count.
 */
#ifndef SIDCOMP_H
#define SIDCOMP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SID_VERSION 100u /* 0.1.0 */

/* ---- status -------------------------------------------------------------------------------------------------- */

typedef enum sid_status { /* pinned: the values never change meaning */
    SID_OK = 0,
    SID_E_ARG = -1,         /* an argument of the call is wrong (NULL, length, misaligned block) */
    SID_E_PARAM = -2,       /* unknown, missing or out-of-range codec or memory parameter; the text names it */
    SID_E_SPACE = -3,       /* a block is smaller than what was asked for */
    SID_E_CORRUPT = -4,     /* payload bytes are not what an encoder writes */
    SID_E_MISMATCH = -5,    /* a sound payload, but of another plan, group or step */
    SID_E_UNSUPPORTED = -6, /* this build, device or combination cannot do it */
    SID_E_DEVICE = -7,      /* a CUDA call failed; the text carries CUDA's own */
    SID_E_PEER = -8         /* another rank has ended, hangs, or cannot be reached */
} sid_status;

typedef struct sid_error {
    char text[256]; /* NUL-terminated; empty after SID_OK */
} sid_error;

/* One line of English for a status; never NULL, also for values that are none. */
const char *sid_status_text(int status);

/* ---- vectors ------------------------------------------------------------------------------------------------- */

typedef enum sid_dtype {
    SID_F32 = 0,
    SID_F16 = 1,
    SID_BF16 = 2,
    SID_I8 = 3 /* of a linear codec's body, not of vectors: sums are modulo 256 */
} sid_dtype;

/* `len` elements of the group's dtype at `ptr`; no alignment beyond the element's own. */
typedef struct sid_segment {
    void *ptr;
    uint64_t len;
} sid_segment;

/* ---- registry ------------------------------------------------------------------------------------------------ */

typedef enum sid_kind {
    SID_REAL = 0,
    SID_INT = 1,
    SID_CHOICE = 2
} sid_kind;

/* One row of a codec's or memory's parameter table. Values travel as double; a choice is the index into `choices`. */
typedef struct sid_param {
    const char *name;
    sid_kind kind;
    double dflt, min, max;
    const char *unit;           /* "" where there is none */
    const char *const *choices; /* NULL-terminated; NULL unless kind is SID_CHOICE */
    const char *doc;            /* one line */
} sid_param;

enum {                   /* traits */
    SID_LINEAR = 1u,     /* bodies may be summed element by element (all-reduce); else payloads are gathered */
    SID_LOSSLESS = 2u,   /* decode(encode(x)) == x: a memory would stay zero, so none is kept */
    SID_STOCHASTIC = 4u, /* draws counter-based random bits */
    SID_UNBIASED = 8u,   /* E[decode(encode(x))] == x */
    SID_SPARSE = 16u,    /* sends some elements and nothing of the others */
    SID_FEEDBACK = 32u,  /* of a memory: keeps what was not sent; of a codec: is not to be used without one that does */
    SID_MOMENTUM = 64u,  /* of a memory: holds the momentum, so that the optimizer must have none */
    SID_VOTE = 128u,     /* several payloads are not summed but vote (or one is drawn), whatever the scale */
    SID_SHAPED = 256u,   /* of a codec: looks at the tensors' shapes */
    SID_SIGNS = 512u,    /* of a codec: a bit an element for + or - a value of the plan's own, so that the bits of
                          * several ranks can be merged to such bits */
    SID_IN_ROUNDS = 1024u /* of a codec: may take several exchanges a step, one after the other */
};

typedef struct sid_info {
    const char *name, *family;
    const char *memory; /* of a codec: the memory that its paper has; NULL: "residual" */
    const char *paper;  /* source: paper, section, equation or algorithm */
    const char *doc;    /* one or two sentences */
    const sid_param *params;
    uint32_t n_params;
    uint32_t traits;
    uint16_t wire_id; /* in the payload header; never reused */
} sid_info;

const sid_info *sid_codec_at(uint32_t i); /* NULL past the end */
const sid_info *sid_codec_find(const char *name);
int sid_has_cuda(const sid_info *i); /* 1 where this build carries the CUDA kernels of the codec, memory or exchange */
const sid_info *sid_memory_at(uint32_t i);
const sid_info *sid_memory_find(const char *name);

/* ---- plan ---------------------------------------------------------------------------------------------------- */

typedef enum sid_isa {
    SID_ISA_AUTO = 0,
    SID_ISA_BASE = 1,
    SID_ISA_AVX2 = 2,
    SID_ISA_AVX512 = 3
} sid_isa;

typedef struct sid_setting {
    const char *name;
    double value;
} sid_setting;

/* A tensor as a matrix: `len` elements in rows of `cols`, of which the last row may be shorter; a vector where cols is 0
 * or 1. */
typedef struct sid_shape {
    uint64_t len, cols;
} sid_shape;

typedef struct sid_config {
    const char *codec, *memory;  /* names in the registry */
    uint64_t n;                  /* elements of the group, 0 to 2^40 */
    sid_dtype dtype;             /* of the segments */
    sid_isa isa;                 /* SID_ISA_AUTO: the best this processor has */
    const sid_setting *settings; /* parameters of codec and memory, by name; the rest take their defaults */
    uint32_t n_settings;
    const sid_shape *shapes; /* of the tensors that make up the group, in order; NULL: one, as square as it goes. Only
                              * codecs that factor matrices look at them */
    uint32_t n_shapes;
    int flush; /* 1: a lossless codec takes the memory too, to send what another codec has kept there; its residual is
                * then that of one rounding to the gradient's dtype, 0 for float32 and one rank */
} sid_config;

typedef struct sid_plan sid_plan;

/* Two-phase: with mem == NULL writes the size to *bytes and checks the configuration all the same; with
 * mem != NULL (64-byte aligned, *bytes as told) writes the plan there. A plan holds no pointer into `c`.
 * The names of parameters that neither codec nor memory knows are refused (SID_E_PARAM). */
sid_status sid_plan_make(const sid_config *c, void *mem, size_t *bytes, sid_error *err);

typedef struct sid_sizes {
    uint64_t payload;     /* bytes that one rank sends: the same for every step and rank */
    uint64_t body_offset; /* where the body starts in a payload (64) */
    uint64_t body_count;  /* linear codecs: elements of the body, to be summed; else 0 */
    sid_dtype body_dtype; /* linear codecs: their dtype */
    uint64_t state, work; /* bytes */
    uint64_t k;           /* elements that are sent, or aimed at; n for dense codecs */
    uint32_t rounds;      /* exchanges that make up a step: 1, or more (linear codecs) */
    uint32_t ranks;       /* linear codecs: the most whose bodies can be summed; 0: any number */
} sid_sizes;

/* What a round exchanges: `count` elements of the body's dtype from byte `offset` of the payload on. */
typedef struct sid_slice {
    uint64_t offset, count;
} sid_slice;

sid_sizes sid_plan_sizes(const sid_plan *p);
/* Of a linear codec; round 0 to sizes.rounds - 1. Together the slices are the body. */
sid_slice sid_plan_round(const sid_plan *p, uint32_t round);
const sid_info *sid_plan_codec(const sid_plan *p);
const sid_info *sid_plan_memory(const sid_plan *p);
/* The instruction set in use: "base", "avx2" or "avx512". */
const char *sid_plan_isa(const sid_plan *p);
/* Bytes at the end of a state that the codec keeps beside the memory's vectors; a checkpoint takes them along. */
uint64_t sid_plan_extra(const sid_plan *p);

/* ---- step ---------------------------------------------------------------------------------------------------- */

typedef struct sid_step {
    uint64_t step, seed;
    uint32_t group, rank, world; /* world >= 1; linear codecs divide by it before they round */
    /* What is owed from earlier steps is multiplied by it before the gradient is added; velocities are not. 0 stands for 1.
     * The learning rate of the step before over this one's makes p = rate g + e of EF-SGD (Karimireddy et al. 2019,
     * Algorithm 1) of it: what is sent late then moves the parameters as far as when it was due. */
    float carry;
    /* Where the state that the step starts from lies: in bytes from `state`, a multiple of 64. 0: the step works in place.
     * Otherwise the step only reads that state, and writes the state after the step to `state`, whatever it held before. To
     * throw the step away, go on with the state that was read: no bit of it has changed. This takes a second state block
     * and, on a CPU, up to 8 bytes of memory traffic per element and vector (docs/how-it-works.md). */
    int64_t origin;
} sid_step;

typedef struct sid_stats {
    uint64_t count;     /* elements sent */
    uint64_t found;     /* elements that the codec's own rule chose before the capacity cut */
    uint64_t nonfinite; /* NaN and Inf seen in the gradient */
    float threshold;    /* smallest magnitude sent, or the scale; 0 where it has no meaning */
    uint32_t stages;    /* SIDCo: stages used in this step; RedSync: thresholds tried; else 0 */
    uint32_t walks;     /* times that acc was read: 1 in the steady state */
} sid_stats;

/* Reads the segments once, updates `state`, writes plan-fixed payload bytes (unused ones zero). Segments are not
 * written. Non-finite gradient elements count as 0 in the memory and raise a flag in the payload (a linear body
 * carries them instead), which makes the decoded step non-finite on every rank. stats may be NULL. */
sid_status sid_encode(const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state, void *work,
                      const sid_step *at, void *payload, sid_stats *stats);

/* For plans of several rounds. sid_encode has written the slice of round 0, the ranks have summed it in place; this writes
 * the slice of `round`, 1 and up, one after the other. Segments, state, work, at and payload as they were in sid_encode;
 * where at->world is 1, sid_encode has done all rounds. A slice that is not finite makes the next ones so. A rank that
 * cannot write a slice sends bytes 0xff in its place, in every round from there on: NaN in any float, and codecs whose
 * bodies are whole numbers know them too, so that the step is not finite on the other ranks. */
sid_status sid_next_round(const sid_plan *p, uint32_t round, const sid_segment *seg, uint32_t n_seg, void *state,
                          void *work, const sid_step *at, void *payload);

enum {
    SID_MAX_COUNT = 4096
}; /* payloads of one decode */

typedef struct sid_report {
    uint32_t nonfinite; /* 1: some rank's gradient was not finite; the output is, everywhere, NaN or its own sum */
    uint32_t culprit;   /* on SID_E_CORRUPT and SID_E_MISMATCH: which payload, 0 to count - 1 */
} sid_report;

/* segments = scale * sum over `count` payloads, in payload order, in float32, rounded once to the dtype. (With codecs
 * that gather, an element whose sum overflows float32, although scale times the sum does not, is summed in float64.)
 * Payload i starts at payloads + i * stride bytes (stride a multiple of 8, count at most SID_MAX_COUNT). A linear codec
 * that travelled by all-reduce gives one payload whose body was summed (count == 1); header and scale stay each rank's
 * own.
 * Every byte is checked before anything is written: SID_E_CORRUPT and SID_E_MISMATCH leave the segments alone.
 * at: step and group that are expected in the headers; NULL accepts any.
 * state: NULL, or this rank's own. Then, on a non-finite step, the gradient that the segments still hold is taken back
 * out of the memory (r' = acc - g: within one unit in the last place of acc of what it was),
 * before the segments are overwritten. */
sid_status sid_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *at, sid_report *report,
                      sid_error *err);

/* What a codec takes from a summed payload for its next step (PowerSGD's start). sid_decode does it where it is given the
 * state; this is for whoever decodes without it, into vectors that do not hold the gradient. A payload that is not finite
 * teaches nothing. */
sid_status sid_learn(const sid_plan *p, void *state, const void *payload);

/* Checks one payload against the plan without decoding it. */
sid_status sid_check(const sid_plan *p, const void *payload, uint64_t bytes, const sid_step *at, sid_error *err);

/* ---- what is kept -------------------------------------------------------------------------------------------- */

/* The residual is deferred: state holds acc and the rule that was applied to it, and what is kept is computed from
 * both when it is next read. These calls show it, set it and correct it; with memory "none" they do nothing (out: zeros).
 * x: n floats, one vector after the other where the memory keeps several (sid_memory_vectors). */
uint32_t sid_memory_vectors(const sid_plan *p);
sid_status sid_residual_out(const sid_plan *p, const void *state, float *x);
sid_status sid_residual_in(const sid_plan *p, void *state, const float *x);
/* The last step's payload was not used: all of acc counts as kept. */
sid_status sid_unsend(const sid_plan *p, void *state);
/* Forgets what is owed, and sets momenta to 0. For a step that worked in place and is thrown away: what was owed before it
 * can no longer be told from the step's own gradient. */
sid_status sid_forget(const sid_plan *p, void *state);
/* Multiplies what is kept, and the statistics that predict thresholds, by factor > 0 (a change of AMP's loss scale). */
sid_status sid_rescale(const sid_plan *p, void *state, float factor);

/* ---- exchange ------------------------------------------------------------------------------------------------ */

/* How payloads travel: rounds of messages between the ranks, and what each rank makes of them. An exchange is a pure
 * function of its route; whoever moves bytes between wire blocks is its transport (sid_loopback is one, for ranks that
 * live in one process):
 *
 *     for round = 0 to rounds:  sid_exchange_advance(round);  if round < rounds: move the messages of `round`, and
 *                               while they travel sid_exchange_meanwhile(round)
 *
 * advance(0) encodes and prepares what round 0 sends, advance(i) takes in what round i - 1 brought and prepares round i,
 * advance(rounds) writes the mean over the ranks into the segments, or fails and writes nothing. A rank at which something
 * goes wrong before that keeps its place: what it sends says so, and all ranks fail at the end. Only where a message of the
 * last round is lost itself, its receiver fails alone. */
typedef struct sid_exchange sid_exchange;

typedef struct sid_route {
    const char *exchange;    /* a name in the registry */
    const sid_config *group; /* codec, memory, n, dtype; the settings may hold the exchange's too */
    uint32_t rank, world;    /* world: 1 to SID_MAX_COUNT */
} sid_route;

const sid_info *sid_exchange_at(uint32_t i); /* NULL past the end */
const sid_info *sid_exchange_find(const char *name);

/* As sid_plan_make. A route that makes no sense is refused (SID_E_UNSUPPORTED), with the reason and what would. */
sid_status sid_exchange_make(const sid_route *r, void *mem, size_t *bytes, sid_error *err);

typedef struct sid_exchange_sizes {
    uint64_t state, work, wire; /* bytes: survives steps; of a step; of a step, where messages lie */
    uint64_t sent;              /* bytes that a rank sends in a step, the most that any does */
    uint64_t control;           /* of them in the last round, which only tells whether all went well */
    uint32_t rounds, messages;  /* of a step; the most that a round has of one rank, either way */
    uint32_t vectors;           /* of n floats each, of what is kept (sid_exchange_residual_out) */
    uint64_t k;                 /* as sid_sizes.k */
} sid_exchange_sizes;

sid_exchange_sizes sid_exchange_sizes_of(const sid_exchange *x);

typedef struct sid_message {
    uint64_t offset, bytes; /* in this rank's wire block; offset is a multiple of 64 */
    uint32_t peer, spare;   /* the rank that it goes to or comes from */
} sid_message;

/* What this rank sends (receive == 0) or receives in a round: writes up to sizes.messages of them, returns how many. A
 * pair of ranks exchanges at most one message a round each way; both sides state the same bytes. */
uint32_t sid_exchange_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out);

/* seg, state, work, wire, at: the same through all rounds of a step. cut: room for n_seg segments. at->rank and at->world
 * are the route's. Once it has failed, it does so until the end of the step, where the memory is as before the step, but
 * for at->carry (hierarchical, once the nodes have their means: it has forgotten what it owed); report.culprit is the rank at
 * fault, as far as it is known. */
sid_status sid_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                sid_segment *cut, void *state, void *work, const sid_step *at, void *wire,
                                sid_report *report, sid_error *err);

/* What a rank may do while the messages of `round` travel: what of advance(round + 1) needs none of them (ring1, torus1:
 * the signs of the slice that is merged next). It may be left out; the outcome is the same bit for bit. */
sid_status sid_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                  sid_segment *cut, void *state, void *work, const sid_step *at, void *wire);
int sid_exchange_has_meanwhile(const sid_exchange *x); /* 1: there is something to do */

/* Of a step that cannot go on, because messages do not come: what it has put into the memory is taken out again. To be
 * called in place of the advances that are left, with what they would have got; after a step that has ended it does
 * nothing. */
sid_status sid_exchange_abandon(const sid_exchange *x, const sid_segment *seg, uint32_t n_seg, sid_segment *cut,
                                void *state, void *work, const sid_step *at, void *wire);

/* What is kept, as sid_residual_out: vectors of n floats; the last one what this rank keeps for all ranks, where it does
 * (two-shot). Elements that this rank keeps nothing of are 0. In: what the last vector has of elements that this rank does
 * not keep for all goes to the first, as many times as there are ranks (hierarchical: nodes), so that the sum stays. */
sid_status sid_exchange_residual_out(const sid_exchange *x, const void *state, float *out);
sid_status sid_exchange_residual_in(const sid_exchange *x, void *state, const float *in);
sid_status sid_exchange_unsend(const sid_exchange *x, void *state);
sid_status sid_exchange_forget(const sid_exchange *x, void *state);
sid_status sid_exchange_rescale(const sid_exchange *x, void *state, float factor);

/* A part of the state: at byte `state` of it a state of its own, as of a plan, of elements [start, start + n). */
typedef struct sid_share {
    uint64_t state, start, n;
    uint32_t valid, common; /* valid: 0 past the last part; common: kept for all ranks */
} sid_share;
sid_share sid_exchange_share(const sid_exchange *x, uint32_t i);

typedef struct sid_rank {
    const sid_exchange *exchange;
    const sid_segment *seg;
    sid_segment *cut;
    void *state, *work, *wire;
    uint32_t n_seg, spare;
    uint64_t sent, control; /* out: bytes, counted; control: those of the last round, where the exchange has one */
} sid_rank;

/* One step of at->world ranks in one process; at->rank is not read. room: for 2 * sizes.messages sid_message. */
sid_status sid_loopback(sid_rank *ranks, sid_message *room, const sid_step *at, sid_report *report, sid_error *err);

/* ---- helpers ------------------------------------------------------------------------------------------------- */

/* 64-bit checksum of the segments' bytes: equal bytes cut into segments of equal lengths give equal values. Not part of
 * any format. */
uint64_t sid_checksum(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype);

/* x *= factor over the segments, in float32, rounded once: what plain DDP does before it sums. */
sid_status sid_scale(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype, float factor);

/* Best instruction set of this processor. */
sid_isa sid_isa_best(void);

/* ---- CUDA (built with nvcc; without it every call returns SID_E_UNSUPPORTED) ------------------------------------ */

int sid_cuda_built(void); /* 1 if the kernels are in this build */
/* Number of usable devices; a reason in err where it is 0. Calls CUDA only here and below, never at load. */
sid_status sid_cuda_devices(int *count, sid_error *err);
/* Sizes on the device: state is the same as on the CPU (a checkpoint moves between them), work differs. */
sid_status sid_cuda_work(const sid_plan *p, uint64_t *bytes, sid_error *err);
/* Or'ed to `device` below: a kernel may be launched while the one before it on the stream still runs (programmatic
 * dependent launch), and waits for its end before it touches memory. Not measured yet, hence not the default; devices
 * before sm_90 ignore it. */
#define SID_CUDA_EARLY (1 << 16)
/* As sid_encode and sid_decode, on device memory, enqueued on `stream` (a cudaStream_t) of `device`: no host
 * synchronisation, no allocation. segs is a table in device memory. report_dev: 4 uint32 in device memory
 * {nonfinite, culprit, status, 0}, zeroed by the caller once; status is sticky. stats_dev: NULL or a sid_stats. */
sid_status sid_cuda_encode(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           const sid_step *at, void *payload, void *stats_dev, int device, void *stream,
                           sid_error *err);
/* As sid_next_round, enqueued: the ranks' sum of the round before must have been enqueued, or be there. Segments, state,
 * work, at and payload as they were in sid_cuda_encode: work too, as the call before has left it. */
sid_status sid_cuda_next_round(const sid_plan *p, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                               void *state, void *work, const sid_step *at, void *payload, int device, void *stream,
                               sid_error *err);
sid_status sid_cuda_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                           const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work, const sid_step *at,
                           void *report_dev, int device, void *stream, sid_error *err);
/* As sid_rescale by 1 and sid_unsend. settle: but that a -0 may become 0. It reads the segments, whatever is in them, and leaves
 * garbage in work and payload; the plan's own, both. */
sid_status sid_cuda_settle(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           void *payload, int device, void *stream, sid_error *err);
sid_status sid_cuda_unsend(const sid_plan *p, void *state, int device, void *stream, sid_error *err);
/* To compare what ranks have decoded: 64 bits at *sum_dev that follow from the elements alone, however they are cut into
 * segments (not sid_checksum's value), or 0 where the report says that the step was not finite. Enqueued as the others are. */
sid_status sid_cuda_checksum(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                             const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err);

/* Enqueues: what a decode has reported shows in host memory that the device can write (pinned) and that is 16 bytes long,
 * {nonfinite, culprit, status, mark}. Who waits for nothing looks there, a step late. */
sid_status sid_cuda_show(const void *report_dev, uint32_t mark, void *seen, int device, void *stream, sid_error *err);

/* An exchange of messages on a device, for those that sid_has_cuda knows: work is the device's, state and wire are as on
 * the CPU, and so is every bit that goes out or is kept. As sid_exchange_advance and sid_cuda_decode: enqueued; what fails
 * on the way tells the other ranks, is in the report after the last round, and the memory is as before the step. */
sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err);
sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *at, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err);
/* As sid_cuda_settle, _unsend and _checksum, between its steps. The first two are for exchanges whose state is that of one
 * plan (sid_exchange_share: a single part, of all elements). */
sid_status sid_cuda_exchange_settle(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *state,
                                    void *work, void *wire, int device, void *stream, sid_error *err);
sid_status sid_cuda_exchange_unsend(const sid_exchange *x, void *state, int device, void *stream, sid_error *err);
sid_status sid_cuda_exchange_checksum(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                                      const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err);

/* ---- NCCL (found at run time; neither headers nor library are needed to build) ---------------------------------- */

/* Collectives on device memory, enqueued on a CUDA stream. NCCL allocates, starts threads and opens connections; what is
 * ours in it lies in the caller's blocks, which are made in two phases as a plan is, and must stay where they are.
 *
 * Nothing waits for ever. Joining, and every call that NCCL works off in a thread of its own, is waited for as long as
 * the communicator's time limit. What fails, or takes longer, ends the communicator: its kernels on the device are told to
 * leave, the error is SID_E_PEER, and all later calls return it again. What has been enqueued fails without a call: ask
 * sid_nccl_poll for that now and then, and abort where the device makes no progress: from any thread, also while another
 * one is in a call. */
typedef struct sid_nccl sid_nccl;           /* the library */
typedef struct sid_nccl_comm sid_nccl_comm; /* this rank's end of a communicator */

enum {
    SID_NCCL_LEAST = 21400, /* 2.14: the first that joins without blocking */
    SID_NCCL_ID_BYTES = 128
};

/* path: of the library; NULL: the one of this name that is loaded already, else the one that the loader finds. Is never
 * unloaded. */
sid_status sid_nccl_open(const char *path, void *mem, size_t *bytes, sid_error *err);
int sid_nccl_version(const sid_nccl *lib); /* 22809 is 2.28.9 */

/* One rank makes an id, all join with it. Each with its own device, unless NCCL is told otherwise. */
sid_status sid_nccl_unique_id(const sid_nccl *lib, void *id, sid_error *err);
sid_status sid_nccl_join(const sid_nccl *lib, const void *id, uint32_t rank, uint32_t world, int device,
                         uint32_t limit_ms, void *mem, size_t *bytes, sid_error *err);
/* SID_OK, or why the communicator has come to an end. */
sid_status sid_nccl_poll(sid_nccl_comm *c, sid_error *err);
/* Ends it: leave, which all ranks do, after what is enqueued; abort at once, with `why`, for the calls to come. */
sid_status sid_nccl_leave(sid_nccl_comm *c, sid_error *err);
void sid_nccl_abort(sid_nccl_comm *c, const char *why);

/* bytes of every rank, in rank order; in may be its place in out. */
sid_status sid_nccl_all_gather(sid_nccl_comm *c, const void *in, void *out, uint64_t bytes, void *stream,
                               sid_error *err);
/* Sums of count elements; in may be out. */
sid_status sid_nccl_all_reduce(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                               void *stream, sid_error *err);
/* The rank's own count elements of the sum of world * count. */
sid_status sid_nccl_reduce_scatter(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                                   void *stream, sid_error *err);
/* A round of messages, within a wire block: all go out and come in at the same time. */
sid_status sid_nccl_messages(sid_nccl_comm *c, void *wire, const sid_message *sends, uint32_t n_sends,
                             const sid_message *receives, uint32_t n_receives, void *stream, sid_error *err);

/* A group on the device: what sid_cuda_encode and sid_cuda_decode take. incoming: world payloads; of linear plans, whose
 * bodies are summed where they lie, unused. seen: NULL, or as sid_cuda_show has it. Or, with plan NULL, an exchange of
 * messages: payload is its wire block, and room (the host's) is for 2 * sizes.messages of them. */
typedef struct sid_cuda_group {
    const sid_plan *plan;
    const sid_exchange *exchange;
    sid_message *room;
    const sid_segment *segs_dev;
    void *state, *work, *payload, *incoming, *stats_dev, *report_dev, *seen;
    uint32_t n_seg, spare;
} sid_cuda_group;

/* Enqueues a group's step: encode, all-gather or all-reduce (one a round), decode to the mean over the ranks; or the
 * exchange's advances and messages in turn; and show, with the low bits of step + 1 for a mark. */
sid_status sid_nccl_step(sid_nccl_comm *c, const sid_cuda_group *g, const sid_step *at, void *stream, sid_error *err);

/* An entry of the table that sid_cuda_cancel reads. */
typedef struct sid_cuda_kept {
    void *state;        /* on the device, of one plan; NULL: nothing is kept */
    const void *report; /* of the group's decode, on the device */
    uint64_t none[4];   /* the rule of a step that sent nothing */
    uint64_t floats;    /* how many the memory's vectors have together */
} sid_cuda_kept;

/* Writes the entries of a group, at least one: one for each of its plans, with state NULL if the plan keeps nothing. Returns
 * how many there are, of which it has written at most `room`. */
uint32_t sid_cuda_kept_by(const sid_cuda_group *g, sid_cuda_kept *kept, uint32_t room);
/* To be enqueued after the decodes of all groups of a step that worked in place. If the report of any of `count` entries (in
 * device memory, at a multiple of 8 bytes; else SID_E_ARG) says that the step was not finite or failed, or if always != 0,
 * the groups forget (sid_forget), because such a step is thrown away as a whole. A group that was not finite has already
 * taken its own gradient out again, and stays as it is. */
sid_status sid_cuda_cancel(const sid_cuda_kept *kept_dev, uint32_t count, int always, int device, void *stream,
                           sid_error *err);

#ifdef __cplusplus
}
#endif
#endif
