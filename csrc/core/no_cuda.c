/* The CUDA calls of a build without CUDA: each of them says how to get one with it. */
#include "../sidcomp_cuda.h"
#include "core.h"

#ifndef SID_WITH_CUDA
#pragma GCC diagnostic ignored "-Wunused-parameter"
#define NO_CUDA(err)                                                                                                   \
    sid_fail(err, SID_E_UNSUPPORTED, "this build has no CUDA kernels: install nvcc and build again with SIDCOMP_CUDA=1")
int sid_cuda_built(void) { return 0; }
sid_status sid_cuda_devices(int *count, sid_error *err) {
    *count = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_work(const sid_plan *p, uint64_t *bytes, sid_error *err) {
    *bytes = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_encode(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work,
                           const sid_step *step, void *payload, void *stats_dev, int device, void *stream,
                           sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_next_reduction(const sid_plan *p, uint32_t reduction, const sid_segment *segs_dev, uint32_t n_seg,
                                   void *state, void *work, const sid_step *step, void *payload, int device,
                                   void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_decode(const sid_plan *p, const void *payloads, uint64_t stride, uint32_t count, float scale,
                           const sid_segment *segs_dev, uint32_t n_seg, void *state, void *work, const sid_step *step,
                           void *report_dev, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_show(const void *report_dev, uint32_t mark, void *shown, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_upload(void *dst_dev, const void *from, uint64_t bytes, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_cancel(const sid_cuda_kept *kept_dev, uint32_t count, int always, int device, void *stream,
                           sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_work(const sid_exchange *x, uint64_t *bytes, sid_error *err) {
    *bytes = 0;
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_advance(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev, uint32_t n_seg,
                                     void *state, void *work, const sid_step *step, void *wire, void *stats_dev,
                                     void *report_dev, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_meanwhile(const sid_exchange *x, uint32_t round, const sid_segment *segs_dev,
                                       uint32_t n_seg, void *state, void *work, const sid_step *step, void *wire,
                                       void *stats_dev, void *report_dev, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_settle(const sid_exchange *x, void *state, void *work, void *wire, int device,
                                    void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_unsend(const sid_exchange *x, void *state, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_exchange_checksum(const sid_exchange *x, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                                      const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_device_enter(int device, int *before, sid_error *err) { return NO_CUDA(err); }
void sid_device_leave(int before) {}
int sid_device_processors(int device) { return 0; }
sid_status sid_cuda_settle(const sid_plan *p, void *state, void *work, void *payload, int device, void *stream,
                           sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_unsend(const sid_plan *p, void *state, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
sid_status sid_cuda_checksum(const sid_plan *p, const sid_segment *segs_dev, uint32_t n_seg, void *work,
                             const void *report_dev, void *sum_dev, int device, void *stream, sid_error *err) {
    return NO_CUDA(err);
}
#endif
