// float32 to fp8 bytes on the device: the bytes of fp8.h, by conversion instructions where there are.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8.h"

namespace torch_pagedkv {

// Divides many numbers by one, each rounded as a division rounds it, wherever that can change an
// fp8 byte: quotients that are not normal keep their sign and stay below half the smallest one.
struct Divisor {
  enum Kind : int { kOne, kNormal, kAny };  // kNormal: positive, and far from both ends
  float value, inverse;
  Kind kind;

  TORCH_PAGEDKV_HOST_DEVICE explicit Divisor(float divisor)
      : value(divisor), inverse(1.0f), kind(kAny) {
    if (divisor == 1.0f) {
      kind = kOne;
    } else if (divisor >= 0x1p-60f && divisor <= 0x1p60f) {
      kind = kNormal;
      inverse = 1.0f / divisor;
    }
  }

  // By a divisor of kind kNormal. Two corrections by the exact remainder make a product with the rounded
  // inverse a rounded quotient (Markstein 1990). Where the remainder is not exact or not finite the
  // product stands: it is too small or too large for its last bits to matter.
  TORCH_PAGEDKV_HOST_DEVICE float divide(float x) const {
    const float product = x * inverse;
    float quotient = product;
    quotient = fmaf(fmaf(-quotient, value, x), inverse, quotient);
    quotient = fmaf(fmaf(-quotient, value, x), inverse, quotient);
    const float size = product < 0 ? -product : product;
    return size >= 0x1p-40f && size <= 0x1p100f ? quotient : product;
  }
};

// Two quotients that are no NaN as bytes, the first in the lower one.
template <class Format>
__device__ inline uint32_t two_to_fp8(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t bytes;
  if constexpr (Format::kHasInfinity) {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  } else {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bytes) : "f"(second), "f"(first));
  }
  return bytes;
#else
  return float_to_fp8<Format>(first, 1.0f) |
         static_cast<uint32_t>(float_to_fp8<Format>(second, 1.0f)) << 8;
#endif
}

// Four values as the bytes of a word, the first in the lowest; the divisor is of kind kOne or kNormal.
// `signs` are those of the values, in the bytes' highest bits: the instructions lose a NaN's, and the
// other bytes have them as they are.
template <class Format, bool IS_DIVIDED>
__device__ inline uint32_t four_to_fp8(float (&values)[4], uint32_t signs, const Divisor& divisor) {
  if (IS_DIVIDED) {
#pragma unroll
    for (float& value : values) value = divisor.divide(value);
  }
  return two_to_fp8<Format>(values[0], values[1]) | two_to_fp8<Format>(values[2], values[3]) << 16 |
         signs;
}

}  // namespace torch_pagedkv
