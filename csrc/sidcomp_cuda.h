/* sidcomp on CUDA devices: the calls of sidcomp.h, enqueued on a stream. A build without nvcc has these functions too, but
 * those that need a device return SID_E_UNSUPPORTED. Only these functions call CUDA, never the loading of the library.
 *
 * Common to them: `stream` is a cudaStream_t of `device`; a call neither waits for the device nor allocates. segs_dev is the
 * table of segments in device memory. report_dev: 4 uint32 in device memory {nonfinite, culprit, status, 0}, which the caller
 * sets to zero once; a status stays until then, and the last word is 0 between decodes, which need it. stats_dev: NULL, or a sid_stats in device memory. */
#ifndef SIDCOMP_CUDA_H
#define SIDCOMP_CUDA_H

#include "sidcomp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- devices, and a step ---------------------------------------------------------------------------------------- */

int sid_cuda_built(void); /* 1 if the kernels are in this build */
/* The number of usable devices. If it is 0, err says why. */
sid_status sid_cuda_devices(int *count, sid_error *err);
/* Bytes of work on the device. The state is the same as on the CPU, so that a checkpoint moves between the two. */
sid_status sid_cuda_work(const sid_plan *p, uint64_t *bytes, sid_error *err);
/* A flag, OR-ed into `device`: a kernel may be launched while the one before it on the stream still runs (programmatic
 * dependent launch); it waits for the end of that one before it touches memory. It is not the default because it has not been
 * measured. Devices before sm_90 ignore it. */
#define SID_CUDA_EARLY (1 << 16)
/* As sid_encode, sid_next_reduction and sid_decode, on device memory. A next slice needs the ranks' sum of the one before, which
 * must have been enqueued; segments, state, work (as the call before left it), step and payload are those of sid_cuda_encode. */
sid_status sid_cuda_encode(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           const sid_step *step, void *payload, void *stats_dev, int device, void *stream,
                           sid_error *err);
sid_status sid_cuda_next_reduction(const sid_plan *p, uint32_t reduction, const sid_segment *segs_dev, uint32_t n_seg,
                                   void *state, void *work, const sid_step *step, void *payload, int device,
                                   void *stream, sid_error *err);
sid_status sid_cuda_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                           const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work, const sid_step *step,
                           void *report_dev, int device, void *stream, sid_error *err);
/* settle takes what the last step sent out of the memory, as sid_rescale by 1 does. The state's vectors, which follow its
 * header, then are what sid_residual_out writes, bit for bit, and the steps after it have the same bits as without it. (With
 * memory dgc a -0 may become 0.) It reads no segments, so the gradients may be written at the same time, and leaves garbage in
 * the plan's work and payload. unsend: as sid_unsend. */
sid_status sid_cuda_settle(const sid_plan *p, void *state, void *work, void *payload, int device, void *stream,
                           sid_error *err);
sid_status sid_cuda_unsend(const sid_plan *p, void *state, int device, void *stream, sid_error *err);
/* For comparing what ranks have decoded: writes 64 bits to *sum_dev that depend on the elements alone, however they are cut
 * into segments (not sid_checksum's value), or 0 if the report says that the step was not finite. */
sid_status sid_cuda_checksum(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                             const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err);

/* Copies what a decode has reported to entry `mark` % SID_CUDA_SHOWN of `shown`, host memory that the device can write
 * (pinned). An entry has 16 bytes: {nonfinite, culprit, status, mark}. A caller that does not want to wait looks there later, and
 * finds the reports of the last steps. */
#define SID_CUDA_SHOWN 4
sid_status sid_cuda_show(const void *report_dev, uint32_t mark, void *shown, int device, void *stream, sid_error *err);

/* Copies `bytes` of host memory, a multiple of 8, to the device, as arguments of kernels: the host does not wait, and may
 * change `from` when the call returns. For tables; dst_dev starts at a multiple of 8 bytes. */
sid_status sid_cuda_upload(void *dst_dev, const void *from, uint64_t bytes, int device, void *stream, sid_error *err);

/* ---- exchanges -------------------------------------------------------------------------------------------------- */

/* As sid_exchange_advance, on device memory, for the exchanges that sid_has_cuda knows. Work is the device's own; state and
 * wire are as on the CPU, to the bit. If something fails, the messages tell the other ranks, the report has it after the last
 * round, and the memory is as before the step. */
sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err);
sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *step, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err);
/* Or'ed to the device of sid_cuda_exchange_advance, in every round of a step: the caller also calls the next function. */
#define SID_CUDA_BESIDE (1 << 17)
/* As sid_exchange_meanwhile: enqueues, after advance(round), what can be done while the messages of `round` travel; everything
 * else is as for advance. Without SID_CUDA_BESIDE, advance(0) enqueues all of it. For an exchange that has nothing to do
 * meanwhile (sid_exchange_has_meanwhile) it enqueues nothing. */
sid_status sid_cuda_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev,
                                       uint32_t n_seg, void *state, void *work, const sid_step *step, void *wire,
                                       void *stats_dev, void *report_dev, int device, void *stream, sid_error *err);
/* As sid_cuda_settle, _unsend and _checksum, between the steps of an exchange. settle: every part of the state
 * (sid_exchange_share). unsend is for exchanges whose state is that of one plan: a single part, of all elements. */
sid_status sid_cuda_exchange_settle(const sid_exchange *x, void *state, void *work, void *wire, int device,
                                    void *stream, sid_error *err);
sid_status sid_cuda_exchange_unsend(const sid_exchange *x, void *state, int device, void *stream, sid_error *err);
sid_status sid_cuda_exchange_checksum(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                                      const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err);

/* ---- a group, and the end of a step of several groups ------------------------------------------------------------ */

/* A group on the device: the arguments of sid_cuda_encode and sid_cuda_decode. incoming: room for the payloads of all ranks;
 * unused by linear plans, whose bodies are summed in place. shown: NULL, or as in sid_cuda_show. With plan NULL it is the group
 * of an exchange: payload is the wire block, and room (host memory) is for 2 * sizes.messages messages. in_place: 1 for a
 * plan of the codec none without a memory whose gradient is one run of memory; payload is then the gradient itself, which
 * sid_nccl_step averages where it is, without a pass of its own. Otherwise 0. */
typedef struct sid_cuda_group {
    const sid_plan *plan;
    const sid_exchange *exchange;
    sid_message *room;
    const sid_segment *segs_dev;
    void *state, *work, *payload, *incoming, *stats_dev, *report_dev, *shown;
    uint32_t n_seg, in_place;
} sid_cuda_group;

/* An entry of the table that sid_cuda_cancel reads. */
typedef struct sid_cuda_kept {
    void *state;        /* on the device, of one plan; NULL: nothing is kept */
    const void *report; /* of the group's decode, on the device */
    uint64_t none[4];   /* the rule of a step that sent nothing */
    uint64_t floats;    /* how many the memory's vectors have together */
} sid_cuda_kept;

/* Writes the entries of a group, at least one: one for each of its plans, with state NULL if the plan keeps nothing. Returns
 * how many there are; it writes at most `room` of them. */
uint32_t sid_cuda_kept_by(const sid_cuda_group *g, sid_cuda_kept *kept, uint32_t room);
/* Enqueue it after the decodes of all groups of a step that worked in place. If the report of any of `count` entries (in
 * device memory, at a multiple of 8 bytes; else SID_E_ARG) says that the step was not finite or failed, or if always != 0,
 * the groups forget (sid_forget), because such a step is thrown away as a whole. A group that was not finite has already
 * taken its own gradient out again, and stays as it is. */
sid_status sid_cuda_cancel(const sid_cuda_kept *kept_dev, uint32_t count, int always, int device, void *stream,
                           sid_error *err);

#ifdef __cplusplus
}
#endif
#endif
