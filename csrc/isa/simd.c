/* The primitives of simd.h. This file is compiled once per instruction set, with SID_ISA set to the name of the variant. It
 * is one translation unit of static functions, so that no AVX code can leak into another object. Each family of functions
 * has a fragment, whose head says what is in it and in what order it rounds. The plain loops define the bits. Intrinsics stand only where
 * compilers do not vectorise (compaction, half floats, stores past the caches). */
#include "simd.h"

#include <string.h>

#include "../special.h"

/* Each of them stands on those before it. */
/* clang-format off */
#include "vectors.inc.h"
#include "keys.inc.h"
#include "accumulate.inc.h"
#include "sums.inc.h"
#include "indices.inc.h"
#include "select.inc.h"
#include "blocks.inc.h"
#include "quantise.inc.h"
#include "pack.inc.h"
#include "micro.inc.h"
#include "exponents.inc.h"
#include "levels.inc.h"
#include "rans.inc.h"
#include "steps.inc.h"
#include "rows.inc.h"
#include "halves.inc.h"
#include "signs.inc.h"
#include "checksum.inc.h"
#include "delta.inc.h"
#include "random.inc.h"
/* clang-format on */

#define GLUE2(a, b) a##b
#define GLUE(a, b) GLUE2(a, b)
#define TEXT2(a) #a
#define TEXT(a) TEXT2(a)

/* All but those of which a variant may have its own. */
/* clang-format off */
#define PRIMITIVES \
    .finite = finite, \
    .max_key = max_key, \
    .block_keys = block_keys, \
    .add_kept = add_kept, \
    .add_weighted = add_weighted, \
    .add_velocity = add_velocity, \
    .zero_from = zero_from, \
    .one_side = one_side, \
    .subtract_from = subtract_from, \
    .clear_from = clear_from, \
    .sum_abs = sum_abs, \
    .tail_sums = tail_sums, \
    .sum_from = sum_from, \
    .sum_squares = sum_squares, \
    .moments = moments, \
    .two_moments = two_moments, \
    .square_sums = square_sums, \
    .probe_sums = probe_sums, \
    .sum_log2 = sum_log2, \
    .filter = filter, \
    .band = band, \
    .kth_key = kth_key, \
    .fields = fields, \
    .pack_low = pack_low, \
    .pack_high = pack_high, \
    .quantise = quantise, \
    .take_out = take_out, \
    .add_codes = add_codes, \
    .pack = pack, \
    .pack_trits = pack_trits, \
    .add_trits = add_trits, \
    .ternary = ternary, \
    .small_keys = small_keys, \
    .fp4_codes = fp4_codes, \
    .fp4_take = fp4_take, \
    .add_fp4 = add_fp4, \
    .split = split, \
    .join = join, \
    .to_levels = to_levels, \
    .take_levels = take_levels, \
    .add_left = add_left, \
    .add_levels = add_levels, \
    .step_codes = step_codes, \
    .take_steps = take_steps, \
    .add_steps = add_steps, \
    .count_levels = count_levels, \
    .sum_between = sum_between, \
    .rans_encode = rans_encode, \
    .rans_decode = rans_decode, \
    .dots = dots, \
    .add_rows = add_rows, \
    .add_outer = add_outer, \
    .products = products, \
    .take_columns = take_columns, \
    .clamp = clamp, \
    .f32_to_f16 = f32_to_f16, \
    .f32_to_bf16 = f32_to_bf16, \
    .f16_to_f32 = f16_to_f32, \
    .bf16_to_f32 = bf16_to_f32, \
    .round_bf16 = round_bf16, \
    .scale = scale, \
    .half_body = half_body, \
    .half_keep = half_keep, \
    .half_body_drawn = half_body_drawn, \
    .half_keep_drawn = half_keep_drawn, \
    .half_words = half_words, \
    .drain = drain, \
    .fence = fence, \
    .signs = signs, \
    .draw_signs = draw_signs, \
    .sign_sums = sign_sums, \
    .take_signs = take_signs, \
    .sum_signs = sum_signs, \
    .vote = vote, \
    .merge = merge, \
    .checksum = checksum, \
    .gaps = gaps, \
    .extras = extras, \
    .draw16 = draw16, \
    .draw32 = draw32,
/* clang-format on */

const sid_simd GLUE(sid_simd_, SID_ISA) = {
    PRIMITIVES.name = TEXT(SID_ISA), .capture = capture, .unpack = unpack, .ascending = ascending, .changes = changes,
};
#ifdef SID_HAS_AVX512
const sid_simd sid_simd_avx512vbmi2 = {
    PRIMITIVES.name = "avx512vbmi2", .capture = capture_vbmi2, .unpack = unpack_vbmi2,
    .ascending = ascending_vbmi2,    .changes = changes_vbmi2,
};
#endif
