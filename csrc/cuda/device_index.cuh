// Index tensors in device memory, and what is divided by a block size.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8.h"
#include "paged_layout.h"

namespace torch_pagedkv {

// An index as it was loaded. Widening an int32 waits for it, so it is put off until the value is wanted,
// and the loads that follow do not queue behind it.
struct LoadedIndex {
  uint32_t low, high;

  __device__ int64_t value(bool is_wide) const {
    const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(low) >> 31);
    return static_cast<int64_t>(static_cast<uint64_t>(is_wide ? high : sign) << 32 | low);
  }
};

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

  __device__ LoadedIndex load(int64_t index) const {
    LoadedIndex loaded{0, 0};
    asm volatile(
        "{\n.reg .pred wide;\n"
        "setp.ne.u32 wide, %3, 0;\n"
        "ld.global.nc.u32 %0, [%2];\n"
        "@wide ld.global.nc.u32 %1, [%2 + 4];\n}"
        : "=r"(loaded.low), "+r"(loaded.high)
        : "l"(data + index * stride), "r"(static_cast<uint32_t>(is_wide)));
    return loaded;
  }

  TORCH_PAGEDKV_HOST_DEVICE int64_t operator[](int64_t index) const {
#if defined(__CUDA_ARCH__)
    return load(index).value(is_wide);  // less code than a path for each width
#else
    const char* const address = data + index * stride;
    return is_wide ? *reinterpret_cast<const int64_t*>(address)
                   : *reinterpret_cast<const int32_t*>(address);
#endif
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

// A block size, and floor((2^64 - 1) / size) to divide by it: a division of 64 bits is a call on the device.
struct BlockSize {
  int64_t size;
  uint64_t inverse;

  explicit BlockSize(int64_t size) : size(size), inverse(~uint64_t{0} / static_cast<uint64_t>(size)) {}

  // slot / size, slot not negative. The product falls short by less than one, which one step mends.
  __device__ int64_t block_of(int64_t slot) const {
    const int64_t block = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(slot), inverse));
    return slot - block * size >= size ? block + 1 : block;
  }
};

}  // namespace torch_pagedkv
