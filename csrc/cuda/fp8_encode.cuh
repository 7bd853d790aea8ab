// float32 to fp8 bytes on the device: the bytes of fp8.h, by conversion instructions where there are.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "fp8.h"

namespace torch_pagedkv {

// Divides many numbers by one, each rounded as a division rounds it, wherever that can change an
// fp8 byte: quotients that are not normal keep their sign and stay below half the smallest one.
struct Divisor {
  enum Kind : int { kOne, kNormal, kAny };
  float value, inverse;
  Kind kind;

  TORCH_PAGEDKV_HOST_DEVICE explicit Divisor(float divisor)
      : value(divisor), inverse(1.0f), kind(kAny) {
    const float size = divisor < 0 ? -divisor : divisor;
    if (divisor == 1.0f) {
      kind = kOne;
    } else if (size >= 0x1p-60f && size <= 0x1p60f) {
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

// N values as N bytes in 32-bit words, the first in the lowest byte.
template <class Format, int N>
__device__ inline void values_to_fp8(
    const float (&values)[N], const Divisor& divisor, uint32_t (&words)[(N + 3) / 4]) {
  if constexpr (N > 1) {
    // 0 times a number is NaN for NaN, whose sign the instructions lose, and for infinities.
    float zeros = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) zeros = fmaf(values[i], 0.0f, zeros);
    if (zeros == 0.0f && divisor.kind != Divisor::kAny) {
      float quotients[N];
      if (divisor.kind == Divisor::kOne) {
#pragma unroll
        for (int i = 0; i < N; ++i) quotients[i] = values[i];
      } else {
#pragma unroll
        for (int i = 0; i < N; ++i) quotients[i] = divisor.divide(values[i]);
      }
#pragma unroll
      for (int word = 0; word < N / 4; ++word) {
        const float* four = quotients + 4 * word;
        words[word] =
            two_to_fp8<Format>(four[0], four[1]) | two_to_fp8<Format>(four[2], four[3]) << 16;
      }
      return;
    }
  }
#pragma unroll
  for (int word = 0; word < (N + 3) / 4; ++word) words[word] = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t byte = float_to_fp8<Format>(values[i], divisor.value);
    words[i / 4] |= byte << (8 * (i % 4));
  }
}

}  // namespace torch_pagedkv
