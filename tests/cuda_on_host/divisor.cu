// Divisor and float_to_fp8 on the host: the bytes that a real division gives, for every bfloat16 and
// float16, and many float32, over scales of every kind. Prints how many differ.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/fp8_encode.cuh"

using namespace torch_pagedkv;

float quotient_of(const Divisor& divisor, float value) {
  if (divisor.kind == Divisor::kOne) return value;
  return divisor.kind == Divisor::kNormal ? divisor.divide(value) : value / divisor.value;
}

template <class Format>
long count_differences(const std::vector<float>& values, float scale) {
  const Divisor divisor(scale);
  long different = 0;
  for (const float value : values) {
    const float quotient = quotient_of(divisor, value);
    const bool is_nan = quotient != quotient;
    if (is_nan != std::isnan(value / scale)) ++different;
    if (is_nan) continue;  // the byte is 0x7F and the sign of the value, whatever the divisor
    different += float_to_fp8<Format>(quotient, 1.0f) != float_to_fp8<Format>(value, scale);
  }
  return different;
}

int main(int count, char**) {
  std::mt19937 random(0);
  std::vector<float> halves, floats(1 << 16);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    halves.push_back(float_from_bits(bits << 16));
    halves.push_back(__half2float(__ushort_as_half(static_cast<unsigned short>(bits))));
  }
  std::vector<float> scales = {1.0f, -1.0f, 0.0f, -0.0f, INFINITY, NAN, 1e-45f, 1e-38f, 3e38f, 0x1p60f,
                               0x1p-60f, std::nextafter(1.0f, 2.0f), std::nextafter(2.0f, 1.0f), -2.0f, 448.0f};
  for (int i = 0; i < 200 * count; ++i) {
    scales.push_back(std::ldexp(1.0f + random() * 0x1p-32f, static_cast<int>(random() % 8) - 4));
    scales.push_back(std::ldexp(1.0f + random() * 0x1p-32f, static_cast<int>(random() % 140) - 70));
  }
  long different = 0;
  for (const float scale : scales) {
    for (float& value : floats) {
      // Half of them near the quotients at which rounding changes its mind.
      const uint32_t bits = random();
      const int tie = static_cast<int>(random() % 32) - 16;
      const float near = std::ldexp(1.0f + (2 * (bits % 8) + 1) / 16.0f, tie) * scale;
      value = bits & 0x80000000 ? float_from_bits(random()) : float_from_bits(float_bits(near) + bits / 8 % 5 - 2);
    }
    different += count_differences<Float8E4M3FN>(halves, scale) + count_differences<Float8E5M2>(halves, scale);
    different += count_differences<Float8E4M3FN>(floats, scale) + count_differences<Float8E5M2>(floats, scale);
  }
  std::printf("%ld\n", different);
  return different != 0;
}
