/* Checksums of messages and payloads (wire.h defines the sum). */
#ifndef SID_CHECKSUM_H
#define SID_CHECKSUM_H

#include "../codec.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The checksum of a message of `bytes`, a multiple of 8. The message's own field for it is at byte `field`. */
uint64_t sid_message_checksum(const sid_simd *v, const void *message, uint64_t bytes, uint64_t field);
/* The checksum of a payload. It covers the header alone if the body is linear and is summed with others: then
 * header.scale, which is 1 / world, is not 1. */
uint64_t sid_payload_checksum(const sid_plan *p, const uint8_t *payload);
/* Takes the payload's bytes from known->to to before `end` into the sum, as far as they are whole blocks of SID_SUM_BYTES. */
void sid_payload_sum(const sid_plan *p, const uint8_t *payload, uint64_t end, sid_summed *known);
/* The checksum of a payload of which some bytes have been summed. */
uint64_t sid_payload_checksum_of(const sid_plan *p, const uint8_t *payload, const sid_summed *known);

#ifdef __cplusplus
}
#endif
#endif
