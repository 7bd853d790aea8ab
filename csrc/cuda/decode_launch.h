// Launches decode attention, and prefill attention with it.

#pragma once

#include "decode_problem.h"
#include "paged_layout.h"

namespace torch_pagedkv {

// Whether the device of the pools runs decode attention of heads as wide as theirs.
bool has_decode_kernel(const Tensor& key_cache, const Tensor& value_cache);

// Launches all that a problem needs: prefill attention too where it has a counter for it.
void attend_short_and_long(
    DecodeProblem problem, const Tensor& key_cache, const Tensor& value_cache, int32_t device,
    int64_t num_splits);

}  // namespace torch_pagedkv
