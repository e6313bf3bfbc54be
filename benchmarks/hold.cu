/* What gpu_kernels.py runs beside sidcomp's kernels: blocks that each take a whole multiprocessor for a while. Launched with as
 * much shared memory as a block may have, so that two of them never share one. */

/* nanoseconds: how long. started: the number of blocks that run, which the host reads before it goes on. */
extern "C" __global__ void __launch_bounds__(1024) hold(unsigned long long nanoseconds, unsigned *started) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begun));
    if (threadIdx.x == 0) atomicAdd(started, 1u);
    do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    while (now - begun < nanoseconds);
}
