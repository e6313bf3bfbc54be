/* sidcomp_delta: lossless deltas between two versions of a vector of weights. sidcomp.h has the types of errors and segments.
 *
 *     segments (old), segments (new) -> encode -> body of each block -> check, apply -> segments (new)
 *
 * Elements are unsigned integers of 1, 2 or 4 bytes, and equality is of bits: NaN payloads and the sign of zero are kept. A *step*
 * is the difference of an element's two values, modulo 2^width. Of a float kind it is counted in units in the last place: the
 * bits of floats, which are a sign and a magnitude, are first put in order, so that -0 and 0 are neighbors.
 *
 * A vector is a list of segments, seen as one. It is coded in blocks of up to SID_DELTA_BLOCK elements, each of which is encoded and
 * decoded without the others, so several threads can share a vector, and a shard can take its part.
 *
 * Receive.  Two passes, so that a delta that is damaged, or was made from other weights, changes nothing:
 *             sid_delta_check   of every block: reads body and weights, and computes the checksum of what the result would be
 *             sid_delta_apply   of every block, once all of them were found sound: writes the elements that change
 *           The checksum is linear (wire.h): that of the weights, and a correction for each element that changes.
 * Memory.   Nothing here allocates. Work is garbage between calls, and one call's at a time. Work, bodies and out start at a
 *           multiple of 8 bytes. A body must be followed by SID_DELTA_SLACK readable bytes.
 * Errors.   As in sidcomp.h. Check trusts no byte of a body. It changes nothing.
 * Results.  The same vectors give the same bytes on every instruction set, and any block size the same elements.
 *
 * Positions are gaps with a Rice code whose parameter fits the block, and not Elias-Fano: of changes that are independent of one another
 * it takes 0.03 to 0.12 bits a change more than their entropy, where Elias-Fano takes 0.5 to 0.6 more (at 0.1, 1, 3 and 10 % changed
 * an entropy of 11.41, 8.08, 6.48 and 4.69 bits, Rice 11.49, 8.11, 6.59 and 4.76, Elias-Fano 11.95, 8.56, 7.04 and 5.25). Its random
 * access is not needed, because a block is read as a whole. */
#ifndef SIDCOMP_DELTA_H
#define SIDCOMP_DELTA_H

#include "sidcomp.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    SID_DELTA_BLOCK = 1 << 22, /* elements of a block, at most */
    SID_DELTA_SLACK = 16
};

/* The bytes of an element, and SID_DELTA_FLOATS where they are a sign and a magnitude. */
typedef enum sid_delta_kind {
    SID_DELTA_PLAIN8 = 1,
    SID_DELTA_PLAIN16 = 2,
    SID_DELTA_PLAIN32 = 4,
    SID_DELTA_FLOATS = 16,
    SID_DELTA_FLOAT8 = 17,  /* either format of 8 bits */
    SID_DELTA_FLOAT16 = 18, /* float16, bfloat16 */
    SID_DELTA_FLOAT32 = 20
} sid_delta_kind;

/* A block: `n` elements of a vector, 1 to SID_DELTA_BLOCK, from element `first` on. */
typedef struct sid_delta_block {
    sid_delta_kind kind;
    sid_isa isa; /* SID_ISA_AUTO: the best this processor has */
    const sid_segment *seg;
    uint32_t n_seg, n;
    uint64_t first;
} sid_delta_block;

/* Bytes of the body of a block of n elements that holds the elements themselves; of any body at most, a multiple of 8; and of work.
 * 0 where an argument is wrong. */
uint64_t sid_delta_bytes(sid_delta_kind kind, uint64_t n);
uint64_t sid_delta_bound(sid_delta_kind kind, uint64_t n);
uint64_t sid_delta_work(uint64_t n);

typedef struct sid_delta_entry { /* what a message says of a block beside its body */
    uint64_t checksum;           /* of the new elements, as words of a message that begins with the block (wire.h) */
    uint64_t bytes;              /* of the body: 0 where no element changes */
} sid_delta_entry;

/* Writes the body that leads from `old`, segments of the same lengths as the block's, to the block. old == NULL: a body that holds
 * the elements themselves. out: sid_delta_bound bytes; work: sid_delta_work bytes, none if old is NULL. The segments must not change
 * while it runs. */
sid_status sid_delta_encode(const sid_delta_block *b, const sid_segment *old, void *work, void *out,
                            sid_delta_entry *entry, sid_error *err);

/* Whether the body leads from the block's elements to elements of that checksum: SID_E_CORRUPT where its bytes are not what an encoder
 * writes, SID_E_MISMATCH where the result would have another checksum. */
sid_status sid_delta_check(const sid_delta_block *b, const void *body, const sid_delta_entry *entry, sid_error *err);

/* Changes the block's elements. For a body that sid_delta_check has found sound, with the elements it was given. With any other
 * bytes it still writes to no other memory, and fails where it finds them at fault. */
sid_status sid_delta_apply(const sid_delta_block *b, const void *body, const sid_delta_entry *entry, sid_error *err);

/* The checksum of any bytes, filled up with zeros to a multiple of 8. */
uint64_t sid_delta_checksum(const void *data, uint64_t bytes);

/* ---- changes alone ----------------------------------------------------------------------------------------------
 * Where somebody else has the weights, such as a device, only changes pass: what it finds is encoded, and what a body holds is
 * decoded for it. These calls read kind, n and isa of a block, and no segments. */

typedef struct sid_delta_change {
    uint32_t at, step; /* position in the block; 2 z + sign (docs/wire.md) */
} sid_delta_change;

/* The changes of SID_DELTA_RUN bytes of elements lie side by side, in order: from anywhere on among those of their block. */
enum {
    SID_DELTA_RUN = 16384
};
typedef struct sid_delta_run {
    uint32_t first, count;
} sid_delta_run;

/* Runs of a block of n elements; changes that a sparse body has at most. */
uint64_t sid_delta_runs(sid_delta_kind kind, uint64_t n);
uint64_t sid_delta_room(uint64_t n);

/* Writes the body of sid_delta_encode to out, and entry->bytes, from `count` changes in sid_delta_runs runs. entry->bytes is UINT64_MAX
 * if the body takes the elements themselves: there are more changes than sid_delta_room, of which nothing is read, or the elements are
 * shorter. Then copy the block's elements, old and new, to the host, and call sid_delta_encode. */
sid_status sid_delta_encode_found(const sid_delta_block *b, const sid_delta_change *changes, uint64_t count,
                                  const sid_delta_run *runs, void *work, void *out, sid_delta_entry *entry,
                                  sid_error *err);

/* The changes of a body, whose positions ascend, to `changes`, which has room for n; *count: how many. SID_E_CORRUPT as from
 * sid_delta_check. The checksum of the result is for the caller to compare, but of a body that holds the elements, from byte
 * SID_DELTA_ELEMENTS on: then *count is n + 1, and SID_E_MISMATCH as from sid_delta_check. */
enum {
    SID_DELTA_ELEMENTS = 8
};
sid_status sid_delta_changes(const sid_delta_block *b, const void *body, const sid_delta_entry *entry,
                             sid_delta_change *changes, uint32_t *count, sid_error *err);

/* ---- on CUDA devices --------------------------------------------------------------------------------------------
 * A call is enqueued on a cudaStream_t of `device`. It neither waits nor allocates, and can fail only for its arguments or the launch. A
 * build without CUDA returns SID_E_UNSUPPORTED. All pointers are to memory of the device; structures start at a multiple of 8 bytes. */

/* Elements `first` to `first + n` of a vector, as blocks of `block` elements, of which the last may be shorter. */
typedef struct sid_cuda_weights {
    sid_delta_kind kind;
    uint32_t n_seg, block;
    const uint64_t
        *table; /* n_seg + 1 numbers of elements before each segment, and in all; then n_seg addresses of segments */
    uint64_t first, n;
} sid_cuda_weights;

typedef struct sid_delta_found { /* in a block */
    uint64_t checksum, count;    /* of its elements; of changes */
} sid_delta_found;

/* Finds what has changed since `old`, a table of segments of the same lengths. Block i gets found[i], from run i * sid_delta_runs of a
 * block on its runs, and from change i * room on its changes: all of them, or some that mean nothing if there are more than room.
 * Reads the elements of both vectors once. */
sid_status sid_cuda_delta_find(const sid_cuda_weights *now, const uint64_t *old, uint32_t room, sid_delta_found *found,
                               sid_delta_run *runs, sid_delta_change *changes, int device, void *stream,
                               sid_error *err);
/* The checksums that the blocks' elements would have after changes, of which block i has upto[i] to upto[i + 1]: as sid_delta_changes
 * gave them, so that they lie in the block. Reads the elements once. */
sid_status sid_cuda_delta_sum(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                              sid_delta_found *found, int device, void *stream, sid_error *err);
/* Changes the elements. */
sid_status sid_cuda_delta_change(const sid_cuda_weights *w, const sid_delta_change *changes, const uint64_t *upto,
                                 int device, void *stream, sid_error *err);

#ifdef __cplusplus
}
#endif
#endif
