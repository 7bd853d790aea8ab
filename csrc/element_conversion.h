// Elements of the dtypes that a pool or a query may have, to float32 and back, one at a time.

#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "fp8.h"

namespace torch_pagedkv {

using torch::headeronly::ScalarType;

inline bool is_fp8(ScalarType dtype) {
  return dtype == ScalarType::Float8_e4m3fn || dtype == ScalarType::Float8_e5m2;
}

inline bool is_query_dtype(ScalarType dtype) {
  return dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
}

inline float bfloat16_to_float(uint16_t bits) {
  return float_from_bits(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t float_to_bfloat16(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : rounded);
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t shifted = static_cast<uint32_t>(half & 0x7FFF) << 13;
  const uint32_t rebias = 112u << 23;
  const bool is_special = shifted >= 0x0F800000;  // exponent 31: infinity or NaN
  const uint32_t normal = shifted + rebias + (is_special ? rebias : 0);
  // A subnormal is read as if it had the implicit bit, which is then taken off again.
  const float smallest_normal = float_from_bits(0x38800000);
  const uint32_t subnormal = float_bits(float_from_bits(shifted + 0x38800000) - smallest_normal);
  return float_from_bits(sign | (shifted < 0x00800000 ? subnormal : normal));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = float_bits(value);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  const uint32_t normal = ((magnitude + 0xFFF + ((magnitude >> 13) & 1)) >> 13) - (112u << 10);
  const uint32_t small = magnitude < 0x38800000 ? magnitude : 0;
  const uint32_t subnormal = float_bits(float_from_bits(small) + 0.5f) - float_bits(0.5f);
  uint32_t result = magnitude < 0x38800000 ? subnormal : normal;
  result = magnitude >= 0x477FF000 ? 0x7C00 : result;  // 65520 and beyond round to infinity
  result = magnitude > 0x7F800000 ? 0x7E00 : result;
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000));
}

// Passes pieces that fit the stack on to `body(offset, length)`.
inline constexpr int64_t kPiece = 256;

template <class Body>
inline void in_pieces(int64_t count, const Body& body) {
  for (int64_t offset = 0; offset < count; offset += kPiece) {
    body(offset, std::min(kPiece, count - offset));
  }
}

}  // namespace torch_pagedkv
