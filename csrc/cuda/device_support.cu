// Which GPUs the library holds code for: it may have been compiled for others than the one at hand.

#include <torch/csrc/stable/library.h>

#include "launch.h"

namespace torch_pagedkv {
namespace {

__global__ void nothing() {}

bool runs_on(int64_t device) {
  const OnDevice on_device(static_cast<int32_t>(device));
  cudaFuncAttributes attributes;
  const bool is_there = cudaFuncGetAttributes(&attributes, nothing) == cudaSuccess;
  cudaGetLastError();  // what is missing here must not be blamed on the next launch
  return is_there;
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_cuda, library) {
  library.def("runs_on(int device) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_cuda, CompositeExplicitAutograd, library) {
  library.impl("runs_on", TORCH_BOX(&torch_pagedkv::runs_on));
}
