// Launches prefill attention, which writes the rows of sequences that decode attention leaves.

#pragma once

#include "decode_problem.h"
#include "paged_layout.h"

namespace torch_pagedkv {

// Whether the rows of long sequences are written here, of a call that decode attention takes.
bool takes_prefill(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache);

// Query tokens that a CTA takes at once, with all heads of a tile.
int tokens_of_prefill_tile(
    const DecodeProblem& problem, const Tensor& key_cache, const Tensor& value_cache);

// Launched behind decode attention, which sets the counter of the problem to 0.
void attend_prefill(
    const DecodeProblem& problem, const Tensor& key_cache, const Tensor& value_cache);

}  // namespace torch_pagedkv
