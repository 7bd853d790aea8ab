// What a launch of prefill attention knows besides the problem that it shares with decode attention.

#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "decode_problem.h"

namespace torch_pagedkv {

struct PrefillGrid {
  int tokens_of_tile;  // query tokens that a CTA takes at once, with all heads of a tile
  int granule;         // positions that are adjacent in memory wherever a tile of keys lies
  // What the copy engine can copy; the rest warps copy themselves.
  bool query_is_aligned, pools_are_aligned;
  // Groups of 8 positions from a block to the next, where all groups lie equally far apart in both pools,
  // so that a copy takes whole groups; otherwise 0.
  int groups_of_keys, groups_of_values;
};

// The tensors as the copy engine knows them.
struct PrefillMaps {
  CUtensorMap query, keys, values;
};

// The kernel for one dtype and width of heads; what a grid is made from.
struct PrefillVariant {
  int rows, keys;  // of a tile
  int dim;         // the widest heads
  // Whether the library holds this kernel's code for a device, the current one; asked before launches.
  bool (*is_there)(int device);
  cudaError_t (*attend)(
      const DecodeProblem& problem, const PrefillGrid& grid, const PrefillMaps& maps, int ctas,
      cudaStream_t stream);
};

// The variant for heads of up to kMostDecodeDim elements, the wider of keys and values.
const PrefillVariant& prefill_variant_bfloat16(int dim);
const PrefillVariant& prefill_variant_float16(int dim);

}  // namespace torch_pagedkv
