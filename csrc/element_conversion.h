// Runs of elements of any dtype a pool or a query may have, to float32 and back.
//
// The dtype is looked at once for a run, so kernels need no copy of themselves for each dtype.
// Elements are read and written with memcpy: a view of a pool may start at any byte.

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

template <class Stored, class Convert>
inline void load_run(const char* source, int64_t count, float* target, Convert convert) {
  for (int64_t i = 0; i < count; ++i) {
    Stored stored;
    std::memcpy(&stored, source + i * static_cast<int64_t>(sizeof stored), sizeof stored);
    target[i] = convert(stored);
  }
}

template <class Stored, class Convert>
inline void store_run(const float* source, int64_t count, char* target, Convert convert) {
  for (int64_t i = 0; i < count; ++i) {
    const Stored stored = convert(source[i]);
    std::memcpy(target + i * static_cast<int64_t>(sizeof stored), &stored, sizeof stored);
  }
}

inline void load_as_float(ScalarType dtype, const char* source, int64_t count, float* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return load_run<uint16_t>(source, count, target, bfloat16_to_float);
    case ScalarType::Half:
      return load_run<uint16_t>(source, count, target, half_to_float);
    case ScalarType::Float8_e4m3fn:
      return load_run<uint8_t>(source, count, target, fp8_to_float<Float8E4M3FN>);
    case ScalarType::Float8_e5m2:
      return load_run<uint8_t>(source, count, target, fp8_to_float<Float8E5M2>);
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
}

// `scale` divides what goes into an fp8 element and means nothing to the other dtypes.
inline void store_from_float(
    ScalarType dtype, const float* source, int64_t count, float scale, char* target) {
  switch (dtype) {
    case ScalarType::BFloat16:
      return store_run<uint16_t>(source, count, target, float_to_bfloat16);
    case ScalarType::Half:
      return store_run<uint16_t>(source, count, target, float_to_half);
    case ScalarType::Float8_e4m3fn:
      return store_run<uint8_t>(source, count, target, [scale](float value) {
        return float_to_fp8<Float8E4M3FN>(value, scale);
      });
    case ScalarType::Float8_e5m2:
      return store_run<uint8_t>(source, count, target, [scale](float value) {
        return float_to_fp8<Float8E5M2>(value, scale);
      });
    default:
      std::memcpy(target, source, static_cast<size_t>(count) * sizeof(float));
  }
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
