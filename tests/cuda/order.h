/* Between emulate.cpp, which runs a kernel's threads, and order.cpp, which knows what comes before what. */
#ifndef SID_ORDER_H
#define SID_ORDER_H

#include "emulate.h"

namespace emulate {

enum {
    LANES = 32,
    GARBAGE = 0xa7 /* what a block's shared memory is full of */
};

/* The thread of a kernel that runs, or else the one that does a copy; and what it knows of others. An access by another
 * thread of the launch comes before if that thread has since passed a barrier with this one: its clock then was less than
 * what is known of it now. */
struct runner {
    uint32_t thread, per_block;       /* of the launch */
    uint32_t block_clock, grid_clock; /* barriers passed */
    uint32_t warp_clock;              /* __syncwarps passed, from 1 */
    const uint32_t *seen;             /* the lanes' warp clocks at the last one */
    uint32_t mark;                    /* order.cpp's name for all of this; 0: none yet */
};
extern runner now;
extern bool inside; /* a kernel runs */

/* Ends the program. Says where it was, if a kernel runs, and the seed. */
[[noreturn]] __attribute__((format(printf, 1, 2))) void stop(const char *format, ...);
uint64_t next_random();

/* emulate.cpp: all threads of a launch. */
void run_kernel(const cudaLaunchConfig_t &c, kernel_call &call);
void check_shape(const cudaLaunchConfig_t &c, const place &from);
uint64_t grid_barriers_so_far();
void give_way(bool spins); /* the thread that runs lets others run */
bool on_a_stack(const void *at);
bool is_dynamic(const void *at);               /* shared memory of a launch */
void place_of_thread(char *text, size_t room); /* "thread 3 of block 1 of 2"; or nothing */

/* order.cpp: what was in shared memory belongs to blocks that have ended. */
void new_shared_memory();

} // namespace emulate

#endif
