/* What the kernels share (cuda/core/device.cuh), alone and watched: test_order.py. Ends with 0 if all is right. */
#include <stdio.h>
#include <stdlib.h>

#include "core/device.cuh"

namespace {

void total(double *out, const double *sums, uint64_t units) {
    __shared__ double part[SID_SUMS];
    const double sum = sid_total(sums, units, part);
    __syncthreads();
    const double again = sid_total(sums, units, part);
    if (threadIdx.x == 0) *out = sum + again;
}
void scan(uint32_t *out, uint32_t *last) {
    __shared__ uint32_t part[SID_LANES + 1];
    uint32_t sum;
    for (uint32_t i = 0; i < 2; i++) {
        out[threadIdx.x] = sid_block_scan(threadIdx.x, part, &sum);
        __syncthreads();
    }
    if (threadIdx.x == 0) *last = sum;
}

} // namespace

sid_status sid_fail(sid_error *, sid_status s, const char *text, ...) {
    puts(text);
    return s;
}

int main() {
    enum {
        UNITS = 1000
    };
    const sid_stream to = {nullptr, 2, nullptr};
    double *const sums = (double *)malloc((UNITS + 1) * sizeof(double)), *const sum = sums + UNITS;
    uint32_t *const upto = (uint32_t *)malloc((SID_BLOCK + 1) * sizeof(uint32_t)), *const last = upto + SID_BLOCK;
    for (uint32_t i = 0; i < UNITS; i++) sums[i] = i;
    if (sid_launch(to, "total", total, 1, SID_SUMS, 0, sum, sums, (uint64_t)UNITS)) return 2;
    if (sid_launch(to, "scan", scan, 1, SID_BLOCK, 0, upto, last)) return 2;
    bool right = *sum == (UNITS - 1.0) * UNITS && *last == SID_BLOCK * (SID_BLOCK - 1) / 2;
    for (uint32_t i = 0; i < SID_BLOCK; i++) right &= upto[i] == i * (i + 1) / 2;
    return right ? 0 : 3;
}
