/* sidcomp on NCCL: collectives on device memory, enqueued on a CUDA stream, and whole steps. NCCL is found at run time: a build
 * needs neither its headers nor its library.
 *
 * NCCL allocates, starts threads and opens connections. Our part lies in the caller's blocks, which are made in two phases as
 * a plan is, and must stay where they are.
 *
 * Nothing waits for ever. Joining, and every call that NCCL finishes in a thread of its own, waits at most for the time limit
 * of the communicator. If a call fails or takes longer, the communicator ends: its kernels on the device are told to leave, the
 * error is SID_E_PEER, and all later calls return it again. What has been enqueued can fail without a call: ask sid_nccl_poll
 * now and then, and abort if the device makes no progress. Both may be called from any thread, also while another one is in a
 * call. */
#ifndef SIDCOMP_NCCL_H
#define SIDCOMP_NCCL_H

#include "sidcomp_cuda.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sid_nccl sid_nccl;           /* the library */
typedef struct sid_nccl_comm sid_nccl_comm; /* this rank's end of a communicator */

enum {
    SID_NCCL_LEAST = 21400, /* 2.14: the first that joins without blocking */
    SID_NCCL_ID_BYTES = 128
};

/* path: of the library; NULL: the one of this name that is loaded already, else the one that the loader finds. It is never
 * unloaded. */
sid_status sid_nccl_open(const char *path, void *mem, size_t *bytes, sid_error *err);
int sid_nccl_version(const sid_nccl *lib); /* 22809 is 2.28.9 */

/* One rank makes an id, and all join with it, each with its own device unless NCCL is told otherwise. */
sid_status sid_nccl_unique_id(const sid_nccl *lib, void *id, sid_error *err);
sid_status sid_nccl_join(const sid_nccl *lib, const void *id, uint32_t rank, uint32_t world, int device,
                         uint32_t limit_ms, void *mem, size_t *bytes, sid_error *err);
/* SID_OK, or why the communicator has ended. */
sid_status sid_nccl_poll(sid_nccl_comm *c, sid_error *err);
/* Both end the communicator. leave: after what is enqueued; all ranks must call it. abort: at once; later calls fail with
 * `why`. */
sid_status sid_nccl_leave(sid_nccl_comm *c, sid_error *err);
void sid_nccl_abort(sid_nccl_comm *c, const char *why);

/* Gathers `bytes` of every rank, in rank order; `in` may be its own place in `out`. */
sid_status sid_nccl_all_gather(sid_nccl_comm *c, const void *in, void *out, uint64_t bytes, void *stream,
                               sid_error *err);
/* Sums count elements over the ranks; `in` may be `out`. */
sid_status sid_nccl_all_reduce(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                               void *stream, sid_error *err);
/* Averages count floating-point elements over the ranks: each is divided by the number of ranks, then they are summed. */
sid_status sid_nccl_average(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype, void *stream,
                            sid_error *err);
/* Sums world * count elements over the ranks, and writes this rank's count of them. */
sid_status sid_nccl_reduce_scatter(sid_nccl_comm *c, const void *in, void *out, uint64_t count, sid_dtype dtype,
                                   void *stream, sid_error *err);
/* Moves a round of messages, to and from a wire block: all go out and come in at the same time. */
sid_status sid_nccl_messages(sid_nccl_comm *c, void *wire, const sid_message *sends, uint32_t n_sends,
                             const sid_message *receives, uint32_t n_receives, void *stream, sid_error *err);

/* Enqueues a group's step: encode, all-gather or all-reduce (one a reduction), and decode to the mean over the ranks; or the
 * exchange's advances and messages in turn; or, for a group with in_place, the average alone. Then sid_cuda_show, with the low
 * bits of step + 1 as the mark. */
sid_status sid_nccl_step(sid_nccl_comm *c, const sid_cuda_group *g, const sid_step *step, void *stream, sid_error *err);

#ifdef __cplusplus
}
#endif
#endif
