/* All of the core's headers at once, for cuda/ and tests/c. The core's own files include what they need. */
#ifndef SID_INTERNAL_H
#define SID_INTERNAL_H

#include <math.h>
#include <stddef.h>

#include "codec.h"
#include "core/checksum.h"
#include "core/core.h"
#include "core/sound.h"
#include "sidcomp_cuda.h"
#include "sidcomp_nccl.h"
#include "special.h"

#endif
