// Where a kernel is launched: the device of its tensors, and the current stream of that device.

#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <algorithm>
#include <atomic>
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

inline constexpr int32_t kRememberedDevices = 64;

// Attributes stay as they are while a process lives: each is asked for once on each device.
inline int device_attribute(const char* op, cudaDeviceAttr attribute, int32_t device) {
  static std::atomic<int64_t> known[kRememberedDevices][cudaDevAttrMax];  // one more than it is; 0: not yet
  const bool is_remembered = device >= 0 && device < kRememberedDevices && attribute < cudaDevAttrMax;
  if (is_remembered) {
    const int64_t value = known[device][attribute].load(std::memory_order_relaxed);
    if (value != 0) return static_cast<int>(value - 1);
  }
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, attribute, device));
  if (is_remembered) known[device][attribute].store(int64_t{value} + 1, std::memory_order_relaxed);
  return value;
}

// New memory on a device, contiguous, with nothing in it; `dtype` is torch's number of it.
inline torch::stable::Tensor new_tensor(
    int32_t dtype, int32_t device, std::initializer_list<int64_t> sizes) {
  int64_t strides[8];
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0;) {
    strides[dim] = stride;
    stride *= std::max<int64_t>(sizes.begin()[dim], 1);
  }
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
      aoti_torch_device_type_cuda(), device, &made));
  return torch::stable::Tensor(made);
}

}  // namespace torch_pagedkv
