// Where a kernel is launched: the device of its tensors, and the current stream of that device.

#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "checks.h"

namespace torch_pagedkv {

using torch::stable::accelerator::DeviceGuard;

struct Argument {
  const char* name;
  const Tensor* tensor;  // null: not given

  Argument(const char* name, const Tensor& tensor) : name(name), tensor(&tensor) {}
  Argument(const char* name, const std::optional<Tensor>& tensor)
      : name(name), tensor(tensor ? &*tensor : nullptr) {}
};

// Shapes and dtypes say nothing of which GPU a tensor is on.
inline void check_one_device(
    const char* op, int32_t device, std::initializer_list<Argument> arguments) {
  for (const Argument& argument : arguments) {
    if (argument.tensor == nullptr) continue;
    const int32_t actual = argument.tensor->get_device_index();
    if (!argument.tensor->is_cuda() || actual != device) {
      refuse(op, argument.name, "another device", "be on cuda:", device);
    }
  }
}

// Makes a device current while it lives. Leaving it alone where it is current costs next to nothing.
class OnDevice {
 public:
  explicit OnDevice(int32_t device) {
    if (torch::stable::accelerator::getCurrentDeviceIndex() != device) guard_.emplace(device);
  }

 private:
  std::optional<DeviceGuard> guard_;
};

// torch's CUDA library is looked for at run time, not linked, so that these kernels load beside any
// torch. It is loaded already wherever a CUDA tensor exists.
inline cudaStream_t current_stream(int32_t device) {
  using Lookup = int32_t (*)(int32_t, void**);
  static const Lookup lookup = [] {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* const symbol =
        library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Lookup>(symbol);
  }();
  void* stream = nullptr;
  if (lookup == nullptr || lookup(device, &stream) != 0) {
    throw std::runtime_error("torch_pagedkv: the current CUDA stream is not known to this torch");
  }
  return static_cast<cudaStream_t>(stream);
}

inline void check_cuda(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(
      std::string(op) + ": CUDA must take a launch, got " + cudaGetErrorString(status));
}

inline void check_launch(const char* op) { check_cuda(op, cudaGetLastError()); }

inline int device_attribute(const char* op, cudaDeviceAttr attribute, int32_t device) {
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, attribute, device));
  return value;
}

}  // namespace torch_pagedkv
