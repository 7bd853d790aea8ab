// Launches that overlap with the end of the one before (programmatic dependent launch), on GPUs that can.

#pragma once

#include <cuda_runtime.h>

namespace torch_pagedkv {

// Lets the next launch start while this one runs. It still awaits this one's end where it says so.
__device__ inline void allow_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all that the launch before wrote can be read.
__device__ inline void await_dependency() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Launches a kernel. One that `overlaps` calls await_dependency; it must be false on GPUs before Hopper.
template <class... Parameters, class... Arguments>
cudaError_t launch_dependent(
    void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, bool overlaps,
    cudaStream_t stream, const Arguments&... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace torch_pagedkv
