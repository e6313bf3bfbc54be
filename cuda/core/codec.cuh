/* The contract to which the device side of a codec is written; csrc/codec.h has the one for the CPU.
 *     call.cuh      the functions that a codec provides, and what they are given
 *     memories.cuh  the memories: template parameters of an encode, an argument of a decode
 *     pass.cuh      the kernel into which a codec plugs its own arithmetic
 *     header.cuh    headers and checksums of payloads */
#ifndef SID_CODEC_CUH
#define SID_CODEC_CUH

#include "header.cuh"
#include "pass.cuh"

#endif
