// float8_e4m3fn and float8_e5m2 to float32 and back.
//
// A byte is stored as saturate(value / scale), rounded to nearest, ties to even; infinities
// saturate too, in both formats. A NaN becomes 0x7F with the sign bit of the value: the quotient's
// own sign would not do, since machines disagree about the sign of a NaN that a division makes.

#pragma once

#include <array>
#include <cstdint>
#include <cstring>

// What CUDA kernels use as it stands.
#ifdef __CUDACC__
#define TORCH_PAGEDKV_HOST_DEVICE __host__ __device__
#else
#define TORCH_PAGEDKV_HOST_DEVICE
#endif

namespace torch_pagedkv {

TORCH_PAGEDKV_HOST_DEVICE inline uint32_t float_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

TORCH_PAGEDKV_HOST_DEVICE inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

struct Float8E4M3FN {
  static constexpr int kMantissaBits = 3;
  static constexpr int kBias = 7;
  static constexpr bool kHasInfinity = false;
  static constexpr uint32_t kLargest = 0x43E00000;         // 448
  static constexpr uint32_t kSmallestNormal = 0x3C800000;  // 2^-6
};

struct Float8E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kBias = 15;
  static constexpr bool kHasInfinity = true;
  static constexpr uint32_t kLargest = 0x47600000;         // 57344
  static constexpr uint32_t kSmallestNormal = 0x38800000;  // 2^-14
};

// How a float32 is rounded: by adding the power of two whose last bit is worth the format's there, which
// the FPU rounds. Subnormals are spaced as the smallest normals
// are, and what is left in the low bits may carry into the exponent. No step makes a subnormal float32,
// so that flushing them (torch.set_flush_denormal) changes nothing.
template <class Format>
struct Fp8Rounding {
  static constexpr int kShift = 23 - Format::kMantissaBits;
  static constexpr uint32_t kPower = static_cast<uint32_t>(kShift) << 23;
  static constexpr uint32_t kFirstExponent = static_cast<uint32_t>(128 - Format::kBias) << Format::kMantissaBits;
};

template <class Format>
TORCH_PAGEDKV_HOST_DEVICE inline uint8_t float_to_fp8(float value, float scale) {
  using Rounding = Fp8Rounding<Format>;
  const uint32_t quotient = float_bits(value / scale);
  const uint32_t magnitude = quotient & 0x7FFFFFFF;
  const bool is_nan = magnitude > 0x7F800000;
  const uint32_t clamped = magnitude < Format::kLargest ? magnitude : Format::kLargest;
  const uint32_t exponent =
      (clamped < Format::kSmallestNormal ? Format::kSmallestNormal : clamped) & 0x7F800000;
  const uint32_t power = exponent + Rounding::kPower;
  const uint32_t rounded = float_bits(float_from_bits(clamped) + float_from_bits(power)) - power;
  const uint32_t finite = rounded + (exponent >> Rounding::kShift) - Rounding::kFirstExponent;
  const uint32_t sign_source = is_nan ? float_bits(value) : quotient;
  return static_cast<uint8_t>((is_nan ? 0x7F : finite) | ((sign_source >> 24) & 0x80));
}

// The float32 bits of every byte: reading them from a table of 1 KiB needs no vector instructions.
template <class Format>
constexpr std::array<uint32_t, 256> fp8_table() {
  constexpr int kMantissaBits = Format::kMantissaBits;
  constexpr uint32_t kMantissaMask = (1u << kMantissaBits) - 1;
  constexpr uint32_t kLargestExponent = 0x7F >> kMantissaBits;
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const uint32_t sign = (byte & 0x80) << 24;
    uint32_t exponent = (byte & 0x7F) >> kMantissaBits;
    uint32_t mantissa = byte & kMantissaMask;
    uint32_t bits = 0;
    if (Format::kHasInfinity && exponent == kLargestExponent) {
      bits = mantissa == 0 ? 0x7F800000 : 0x7FC00000;
    } else if (!Format::kHasInfinity && (byte & 0x7F) == 0x7F) {
      bits = 0x7FC00000;
    } else if (exponent != 0 || mantissa != 0) {
      uint32_t rebiased = exponent + 127 - Format::kBias;
      if (exponent == 0) {
        rebiased += 1;
        while ((mantissa >> kMantissaBits) == 0) {
          mantissa <<= 1;
          --rebiased;
        }
        mantissa &= kMantissaMask;
      }
      bits = (rebiased << 23) | (mantissa << (23 - kMantissaBits));
    }
    table[byte] = sign | bits;
  }
  return table;
}

template <class Format>
inline constexpr std::array<uint32_t, 256> kFp8Table = fp8_table<Format>();

template <class Format>
inline float fp8_to_float(uint8_t byte) {
  return float_from_bits(kFp8Table<Format>[byte]);
}

}  // namespace torch_pagedkv
