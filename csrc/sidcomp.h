/* sidcomp: gradient compression with error feedback. Whoever calls it plans the groups and moves the bytes. This header is the
 * manual of the library; sidcomp_cuda.h and sidcomp_nccl.h have the same calls on GPUs, fusion.h plans the groups.
 *
 *     segments -> group -> encode (+ memory) -> payload -> [exchange] -> decode -> segments
 *
 * A *group* is a list of segments (pointer, length) that is seen as one vector of n elements of one dtype. A *codec* turns a
 * vector into a payload. A *memory* turns this step's gradient and what it kept of earlier ones into `acc`, the vector that the
 * codec reads. The two meet a tile at a time and do not know each other, so m memories and n codecs are m x n compressors.
 *
 * Steps.    Make a plan once, then encode and decode in each step:
 *             sid_plan_make(&config, NULL, &bytes, &err);      how large the plan is
 *             sid_plan_make(&config, plan, &bytes, &err);      makes it
 *             sid_sizes z = sid_plan_sizes(plan);              bytes of state (zeros at first), work and payload
 *             sid_encode(plan, segments, n, state, work, &step, payload, NULL);
 *             ... gather the payloads of all ranks, or all-reduce the bodies of a linear codec into one payload ...
 *             sid_decode(plan, payloads, z.payload, how many, 1.0f / world, segments, n, state, &step, &report, &err);
 *           An exchange (sid_exchange_make) does all of it in rounds of messages.
 * Memory.   Nothing here allocates, prints, exits or keeps a global. There are three blocks of memory, never mixed:
 *             plan   immutable; a pure function of sid_config
 *             state  survives steps and goes into checkpoints; all-zero bytes are its valid start. A damaged state cannot
 *                    make a call read out of bounds or run for ever: encode ignores statistics in its header that no
 *                    encode writes. Only the floats of its vectors must be finite
 *             work   garbage between calls
 *           Ask for the sizes first (sid_plan_make with mem == NULL, then sid_plan_sizes), and bring the bytes. plan, state,
 *           work and payload must start at a multiple of 64 bytes; segments may start at any element.
 * Errors.   Every function that can fail returns a sid_status and nothing else. Where it takes a sid_error, the text
 *           names the parameter or field at fault. A failed call leaves segments and state as they were, except that
 *           after SID_E_DEVICE and SID_E_PEER the device may have changed some of them.
 * Threads.  A call runs on the calling thread. In an optimized build it takes up to 192 KB of its stack, of which 64 KB are
 *           for memory_dtype bfloat16; decode takes 96 bytes more for each payload. Distinct groups may be encoded and
 *           decoded concurrently; one group's state and work belong to one call at a time.
 * Results.  The same input gives the same payload and output bytes on every instruction set, device and thread count, if
 *           the thread does not flush denormals to zero (no system does by default).
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
    SID_E_MISMATCH = -5,    /* the payload is sound, but of another plan, group or step */
    SID_E_UNSUPPORTED = -6, /* this build, device or combination cannot do it */
    SID_E_DEVICE = -7,      /* a CUDA call failed; the text quotes CUDA's own */
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

/* ---- plan ---------------------------------------------------------------------------------------------------- */

typedef enum sid_isa {
    SID_ISA_AUTO = 0,
    SID_ISA_BASE = 1,
    SID_ISA_AVX2 = 2,
    SID_ISA_AVX512 = 3,
    SID_ISA_AVX512_VBMI2 = 4, /* with VBMI and VBMI2: Intel from Ice Lake, AMD from Zen 4 on */
    SID_ISA_LAST = SID_ISA_AVX512_VBMI2
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

/* With mem == NULL it checks the configuration and writes the size of the plan to *bytes. With mem != NULL (aligned to 64
 * bytes, *bytes as it was told) it also writes the plan there. A plan holds no pointer into `c`. Parameters that neither the
 * codec nor the memory has are refused (SID_E_PARAM). */
sid_status sid_plan_make(const sid_config *c, void *mem, size_t *bytes, sid_error *err);

typedef struct sid_sizes {
    uint64_t payload;     /* bytes that one rank sends: the same for every step and rank */
    uint64_t body_offset; /* where the body starts in a payload (64) */
    uint64_t body_count;  /* linear codecs: elements of the body, to be summed; else 0 */
    sid_dtype body_dtype; /* linear codecs: their dtype */
    uint64_t state, work; /* bytes */
    uint64_t k;           /* elements that are sent, or aimed at; n for dense codecs */
    uint32_t reductions;  /* sums over the ranks that a linear codec needs, one after the other; else 1 */
    uint32_t ranks;       /* linear codecs: the most whose bodies can be summed; 0: any number */
} sid_sizes;

/* The part of a payload that a reduction sums: `count` elements of the body's dtype from byte `offset` of the payload on. */
typedef struct sid_slice {
    uint64_t offset, count;
} sid_slice;

sid_sizes sid_plan_sizes(const sid_plan *p);
/* The slice of a reduction, 0 to sizes.reductions - 1, of a linear codec. Together the slices are the body. */
sid_slice sid_plan_slice(const sid_plan *p, uint32_t reduction);
typedef struct sid_info sid_info; /* below: registry */
const sid_info *sid_plan_codec(const sid_plan *p);
const sid_info *sid_plan_memory(const sid_plan *p);
/* The instruction set in use: "base", "avx2", "avx512" or "avx512vbmi2". */
const char *sid_plan_isa(const sid_plan *p);
/* Bytes at the end of a state that are the codec's own, a multiple of SID_EXTRA_UNIT; a checkpoint takes them along. */
uint64_t sid_plan_extra(const sid_plan *p);
/* 0 if the codec, with these parameters, drops a part of the gradient that it neither sends nor keeps. */
int sid_plan_conserves(const sid_plan *p);
enum {
    SID_EXTRA_UNIT = 64,
    SID_MAX_VECTORS = 4 /* that a memory keeps (sid_memory_vectors) */
};
/* Bytes of a state, from its start on, that do not depend on the residual and outlast a new one (sid_residual_in): the count of
 * steps (i == 0) and the codec's statistics (i == 1); first == end for any other i. */
typedef struct sid_byte_range {
    uint64_t first, end;
} sid_byte_range;
sid_byte_range sid_state_lasting(uint32_t i);

/* ---- step ---------------------------------------------------------------------------------------------------- */

typedef struct sid_step {
    uint64_t step, seed;
    uint32_t group, rank, world; /* world >= 1; linear codecs divide by it before they round */
    /* The residual of earlier steps is multiplied by carry before the gradient is added; velocities are not. 0 stands for 1.
     * With the learning rate of the last step divided by this one's, acc is p = rate g + e of EF-SGD (Karimireddy et al. 2019,
     * Algorithm 1): what is sent late moves the parameters as far as it would have moved them in time. */
    float carry;
    /* The place of the state that the step starts from, in bytes from `state`; a multiple of 64. 0: the step works in place.
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
    uint32_t passes;    /* passes over acc: 1 in the steady state */
} sid_stats;

/* Reads the segments once, updates `state`, and writes a payload of sizes.payload bytes (unused ones are zero). It does not
 * write the segments. NaN and Inf in the gradient count as 0 in the memory and raise a flag in the payload (a linear body
 * carries them instead), which makes the decoded step non-finite on every rank. stats may be NULL. */
sid_status sid_encode(const sid_plan *p, const sid_segment *seg, uint32_t n_seg, void *state, void *work,
                      const sid_step *step, void *payload, sid_stats *stats);

/* For plans of several reductions. sid_encode has written the slice of reduction 0, and the ranks have summed it in place;
 * this writes the slices of reductions 1 and up, one a call. Segments, state, work, step and payload are those of sid_encode.
 * Where step->world is 1, sid_encode has written all slices. A slice that is not finite makes the later ones so. A rank that
 * cannot write a slice sends bytes 0xff in its place, and in place of the later ones. They are NaN in any float, and codecs
 * whose bodies are whole numbers know them too, so that the step is not finite on the other ranks. */
sid_status sid_next_reduction(const sid_plan *p, uint32_t reduction, const sid_segment *seg, uint32_t n_seg,
                              void *state, void *work, const sid_step *step, void *payload);

enum {
    SID_MAX_COUNT = 4096
}; /* payloads of one decode */

typedef struct sid_report {
    uint32_t nonfinite; /* 1: some rank's gradient was not finite; the output is all NaN, or (linear codecs) the sum */
    uint32_t culprit;   /* on SID_E_CORRUPT and SID_E_MISMATCH: which payload, 0 to count - 1 */
} sid_report;

/* segments = scale * sum over `count` payloads, in payload order, in float32, rounded once to the dtype. (With codecs
 * that gather, and in two-shot, an element whose sum overflows float32, although scale times the sum does not, is summed in
 * float64.)
 * Payload i starts at payloads + i * stride bytes (stride a multiple of 8, count at most SID_MAX_COUNT). After an all-reduce
 * of a linear codec's bodies there is one payload (count == 1), whose header and scale are this rank's own.
 * Every byte is checked before anything is written: SID_E_CORRUPT and SID_E_MISMATCH leave the segments alone.
 * step: the step and group that the headers must name; NULL accepts any.
 * state: NULL, or this rank's own. With it, a non-finite step takes the gradient, which the segments still hold, out of the
 * memory again before it overwrites them (r' = acc - g, within one unit in the last place of acc of what it was). */
sid_status sid_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                      const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *step, sid_report *report,
                      sid_error *err);

/* The same of payloads that lie anywhere, each at a multiple of 8 bytes (else SID_E_ARG); any of them may be given
 * several times. */
sid_status sid_decode_list(const sid_plan *p, const void *const *payloads, uint32_t count, float scale,
                           const sid_segment *seg, uint32_t n_seg, void *state, const sid_step *step,
                           sid_report *report, sid_error *err);

/* Stores what a codec takes from a summed payload for its next step (PowerSGD's start). sid_decode does so if it is given the
 * state. Call this if you decode without it, into vectors that do not hold the gradient. A payload that is not finite changes
 * nothing. */
sid_status sid_learn(const sid_plan *p, void *state, const void *payload);

/* Checks one payload against the plan without decoding it. */
sid_status sid_check(const sid_plan *p, const void *payload, uint64_t bytes, const sid_step *step, sid_error *err);

/* ---- what is kept -------------------------------------------------------------------------------------------- */

/* The residual is deferred: the state holds acc and the rule that was applied to it, and the residual is computed from
 * both when it is next read. These calls show it, set it and correct it; with memory "none" they do nothing (out: zeros).
 * x: n floats for each of the memory's vectors (sid_memory_vectors), one vector after the other. */
uint32_t sid_memory_vectors(const sid_plan *p);
sid_status sid_residual_out(const sid_plan *p, const void *state, float *x);
sid_status sid_residual_in(const sid_plan *p, void *state, const float *x);
/* Call it if the last step's payload was not used: all of acc then counts as kept. */
sid_status sid_unsend(const sid_plan *p, void *state);
/* Sets the residual and momenta to 0: for a step that worked in place and is thrown away, because the residual from before it
 * can no longer be told from the step's own gradient. */
sid_status sid_forget(const sid_plan *p, void *state);
/* Multiplies the residual, and the statistics that predict thresholds, by factor > 0 (a change of AMP's loss scale). */
sid_status sid_rescale(const sid_plan *p, void *state, float factor);

/* ---- exchange ------------------------------------------------------------------------------------------------ */

/* An exchange says how payloads travel: which messages the ranks send one another in each round, and what each rank makes of
 * them. It is a pure function of its sid_exchange_config. Its transport moves bytes between the ranks' wire blocks
 * (sid_loopback is one, for ranks that live in one process):
 *
 *     for round = 0 to rounds:  sid_exchange_advance(round);  if round < rounds: move the messages of `round`, and
 *                               while they travel sid_exchange_meanwhile(round)
 *
 * advance(0) encodes and prepares what round 0 sends. advance(i) takes in what round i - 1 brought and prepares round i.
 * advance(rounds) writes the mean over the ranks into the segments, or fails and writes nothing. If something goes wrong at a
 * rank before that, the rank goes on taking part: its messages say so, and all ranks fail at the end. Only if a message of the
 * last round is lost, its receiver fails alone. */
typedef struct sid_exchange sid_exchange;

typedef struct sid_exchange_config {
    const char *exchange;    /* a name in the registry */
    const sid_config *group; /* codec, memory, n, dtype; the settings may hold the exchange's too */
    uint32_t rank, world;    /* world: 1 to SID_MAX_COUNT */
} sid_exchange_config;

/* As sid_plan_make. A configuration that makes no sense is refused (SID_E_UNSUPPORTED); the text says why, and what to use
 * instead. */
sid_status sid_exchange_make(const sid_exchange_config *c, void *mem, size_t *bytes, sid_error *err);

typedef struct sid_exchange_sizes {
    uint64_t state, work, wire; /* bytes; work and wire, which holds the messages, are garbage between steps */
    uint64_t sent;              /* bytes that the rank which sends most sends in a step */
    uint64_t control;           /* of these, bytes of the last round, which only tells whether all went well */
    uint32_t rounds, messages;  /* of a step; the most messages that a rank sends or receives in a round */
    uint32_t vectors;           /* of n floats each: the residual (sid_exchange_residual_out) */
    uint64_t k;                 /* as sid_sizes.k */
    /* For cost models: how many vectors of n elements a rank encodes, decodes and merges as packed signs in a step, how many
     * it sends, adds and gets back uncompressed inside its node, and how often a process group that does the exchange itself
     * sends a vector around a ring of the ranks; 0: it has none. */
    double encoded, decoded, merged, in_node;
    uint32_t ring_passes, spare;
} sid_exchange_sizes;

sid_exchange_sizes sid_exchange_sizes_of(const sid_exchange *x);

typedef struct sid_message {
    uint64_t offset, bytes; /* in this rank's wire block; offset is a multiple of 64 */
    uint32_t peer, spare;   /* the rank that it goes to or comes from */
} sid_message;

/* Lists what this rank sends (receive == 0) or receives in a round: writes up to sizes.messages of them, and returns how
 * many. A pair of ranks exchanges at most one message a round each way; both sides state the same bytes. The first message is
 * for the next rank that gets one, so that ranks that send in this order do not all send to the same rank at once. Post all
 * messages of a round before you wait for any. */
uint32_t sid_exchange_messages(const sid_exchange *x, uint32_t round, int receive, sid_message *out);

/* seg, state, work, wire and step stay the same through all rounds of a step. cut: room for n_seg segments. step->rank and
 * step->world are the configuration's. Once it has failed, it fails in every round until the end of the step. The memory is
 * then as before the step, except for step->carry (and hierarchical, once the nodes have their means, has set its residual to
 * 0). With step->origin, what a failed step has written to `state` may be unfinished: go on with the state that was read.
 * report.culprit is the rank at fault, as far as it is known. */
sid_status sid_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                sid_segment *cut, void *state, void *work, const sid_step *step, void *wire,
                                sid_report *report, sid_error *err);

/* Does the part of advance(round + 1) that needs none of the messages of `round`, while they travel (ring1, torus1: the
 * signs of the slice that is merged next). It may be left out; the outcome is the same bit for bit. */
sid_status sid_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *seg, uint32_t n_seg,
                                  sid_segment *cut, void *state, void *work, const sid_step *step, void *wire);
int sid_exchange_has_meanwhile(const sid_exchange *x); /* 1: there is something to do */

/* Ends a step that cannot go on because messages do not come: takes what it has put into the memory out again. Call it in
 * place of the advances that are left, with their arguments. After a step that has ended it does nothing. */
sid_status sid_exchange_abandon(const sid_exchange *x, const sid_segment *seg, uint32_t n_seg, sid_segment *cut,
                                void *state, void *work, const sid_step *step, void *wire);

/* As sid_residual_out and _in: vectors of n floats. If this rank keeps something for all ranks (two-shot), it is the last
 * vector. Elements of which this rank keeps nothing are 0. _in: the last vector may hold elements that this rank does not
 * keep for all. They go to the first vector, times the number of ranks (hierarchical: of nodes), so that the sum stays. */
sid_status sid_exchange_residual_out(const sid_exchange *x, const void *state, float *out);
sid_status sid_exchange_residual_in(const sid_exchange *x, void *state, const float *in);
sid_status sid_exchange_unsend(const sid_exchange *x, void *state);
sid_status sid_exchange_forget(const sid_exchange *x, void *state);
sid_status sid_exchange_rescale(const sid_exchange *x, void *state, float factor);

/* A part of the state: from its byte `state` on, the state of one plan, for elements [start, start + n). */
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
    uint64_t sent,
        control; /* out: bytes sent; control: those of the last round that only tells whether all went well */
} sid_rank;

/* One step of step->world ranks in one process; step->rank is not read. room: for 2 * sizes.messages sid_message. */
sid_status sid_loopback(sid_rank *ranks, sid_message *room, const sid_step *step, sid_report *report, sid_error *err);

/* ---- registry ------------------------------------------------------------------------------------------------ */

typedef enum sid_kind {
    SID_REAL = 0,
    SID_INT = 1,
    SID_CHOICE = 2
} sid_kind;

/* One row of the parameter table of a codec, memory or exchange. Values travel as double; a choice is an index of `choices`. */
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
    SID_STOCHASTIC = 4u, /* draws random bits, from a counter */
    SID_UNBIASED = 8u,   /* E[decode(encode(x))] == x */
    SID_SPARSE = 16u,    /* sends some elements and nothing of the others */
    SID_FEEDBACK = 32u,  /* of a memory: keeps what was not sent; of a codec: is not to be used without one that does */
    SID_MOMENTUM = 64u,  /* of a memory: holds the momentum, so that the optimizer must have none */
    SID_VOTE = 128u,     /* several payloads are not summed but vote (or one is drawn), whatever the scale */
    SID_SHAPED = 256u,   /* of a codec: looks at the tensors' shapes */
    SID_SIGNS = 512u,    /* of a codec: a bit an element for + or - a value of the plan's own, so that the bits of
                          * several ranks can be merged to such bits */
    SID_SEVERAL_REDUCTIONS = 1024u /* of a codec: may need several reductions a step, one after the other */
};

struct sid_info {
    const char *name, *family;
    const char *memory; /* of a codec: the memory that its paper has; NULL: "residual" */
    const char *paper;  /* source: paper, section, equation or algorithm */
    const char *doc;    /* one or two sentences */
    const sid_param *params;
    uint32_t n_params;
    uint32_t traits;
    uint16_t wire_id; /* in the payload header; never reused */
};

const sid_info *sid_codec_at(uint32_t i);         /* NULL past the end, as in those below */
const sid_info *sid_codec_find(const char *name); /* NULL: there is none of that name */
const sid_info *sid_memory_at(uint32_t i);
const sid_info *sid_memory_find(const char *name);
const sid_info *sid_exchange_at(uint32_t i);
const sid_info *sid_exchange_find(const char *name);
int sid_has_cuda(const sid_info *i); /* 1 where this build carries the CUDA kernels of the codec, memory or exchange */

/* ---- helpers ------------------------------------------------------------------------------------------------- */

/* 64-bit checksum of the segments' bytes: equal bytes, cut into segments of equal lengths, give equal values. It is not part
 * of any format. */
uint64_t sid_checksum(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype);

/* x *= factor over the segments, in float32, rounded once: what plain DDP does before it sums. */
sid_status sid_scale(const sid_segment *seg, uint32_t n_seg, sid_dtype dtype, float factor);

/* The best instruction set of this processor. */
sid_isa sid_isa_best(void);

#ifdef __cplusplus
}
#endif
#endif
