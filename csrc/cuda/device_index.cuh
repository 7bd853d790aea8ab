// Index tensors in device memory, and what is divided by a block size.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8.h"
#include "paged_layout.h"

namespace torch_pagedkv {

// A 1-d tensor of int32 or int64.
struct DeviceIndices {
  const char* data = nullptr;
  int64_t stride = 0;  // in bytes
  bool is_wide = false;

  DeviceIndices() = default;
  explicit DeviceIndices(const Tensor& tensor)
      : data(static_cast<const char*>(tensor.data_ptr())),
        stride(tensor.stride(0) * static_cast<int64_t>(tensor.element_size())),
        is_wide(tensor.scalar_type() == ScalarType::Long) {}

  TORCH_PAGEDKV_HOST_DEVICE int64_t operator[](int64_t index) const {
    const char* const address = data + index * stride;
    return is_wide ? *reinterpret_cast<const int64_t*>(address)
                   : *reinterpret_cast<const int32_t*>(address);
  }

  TORCH_PAGEDKV_HOST_DEVICE int clamped(int64_t index, int least, int most) const {
    const int64_t value = (*this)[index];
    return value < least ? least : value > most ? most : static_cast<int>(value);
  }
};

// The exponent of a power of two, -1 for other numbers.
inline int shift_of(int64_t number) {
  if ((number & (number - 1)) != 0) return -1;
  int shift = 0;
  while ((int64_t{1} << shift) < number) ++shift;
  return shift;
}

// slot / block_size by the cheapest instructions that hold it.
__device__ inline int64_t block_of(
    int64_t slot, int64_t num_slots, int64_t block_size, int block_shift) {
  if (block_shift >= 0) return slot >> block_shift;
  if (num_slots <= INT32_MAX) {
    return static_cast<uint32_t>(slot) / static_cast<uint32_t>(block_size);
  }
  return slot / block_size;
}

}  // namespace torch_pagedkv
