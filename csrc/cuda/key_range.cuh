// Which keys a query row sees, as arithmetic that runs on the host too: tests/cuda_on_host tries it there.

#pragma once

#include <cuda_runtime.h>

#include "decode_problem.h"

#define TORCH_PAGEDKV_ANYWHERE_MEMBER __host__ __device__
#define TORCH_PAGEDKV_ANYWHERE TORCH_PAGEDKV_ANYWHERE_MEMBER inline

namespace torch_pagedkv {

struct KeyRange {
  int lower, upper;
};

TORCH_PAGEDKV_ANYWHERE KeyRange keys_seen(const DecodeProblem& problem, int position, int length) {
  int lower = 0, upper = length;
  if (problem.window_left >= 0) lower = max(position - problem.window_left, 0);
  if (problem.window_right >= 0) upper = min(max(position + problem.window_right + 1, 0), length);
  return {min(lower, upper), upper};
}

// A rounded down quotient of numbers from 0 on; most are small, and 64-bit divisions are slow.
TORCH_PAGEDKV_ANYWHERE int64_t quotient(int64_t dividend, int64_t divisor) {
  if (((dividend | divisor) >> 32) != 0) return dividend / divisor;
  return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
}

}  // namespace torch_pagedkv
