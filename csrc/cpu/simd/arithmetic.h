// What is the same for vectors of every length: loads and stores, e^x, tanh, conversions.
//
// A body, not a header: a file of kernels includes it inside of its own namespace.

inline Float load(const float* address) {
  Float vector;
  std::memcpy(&vector, address, sizeof vector);
  return vector;
}

inline void store(float* address, Float vector) { std::memcpy(address, &vector, sizeof vector); }

inline Bits load_bits(const void* address) {
  Bits vector;
  std::memcpy(&vector, address, sizeof vector);
  return vector;
}

inline void store_bits(void* address, Bits vector) {
  std::memcpy(address, &vector, sizeof vector);
}

inline Float broadcast(float value) { return value - Float{}; }
inline Bits broadcast_bits(uint32_t value) { return value - Bits{}; }

// 0, 1, 2, ...
inline Int lane_numbers() {
  Int numbers = {};
  for (int lane = 0; lane < kLanes; ++lane) numbers[lane] = lane;
  return numbers;
}

// e^x for x <= 0: exactly 1 at 0, exactly 0 where the result would be subnormal, NaN for NaN.
inline Float exp_of_nonpositive(Float x) {
  // x = k * ln(2) + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to the integer k and leaves
  // it in the low bits; ln(2) in two parts keeps r exact.
  const Float shifted = multiply_add(x, broadcast(1.44269504f), broadcast(12582912.0f));
  const Float k = shifted - 12582912.0f;
  Float r = multiply_add(k, broadcast(-0.693359375f), x);
  r = multiply_add(k, broadcast(2.12194440e-4f), r);
  // A least-maximum fit of (e^r - 1 - r) / r^2: relative error of e^r below 4e-9 before rounding.
  Float fit = multiply_add(r, broadcast(0.00138145347f), broadcast(0.00836874545f));
  fit = multiply_add(fit, r, broadcast(0.0416683927f));
  fit = multiply_add(fit, r, broadcast(0.166665211f));
  fit = multiply_add(fit, r, broadcast(0.499999940f));
  const Float power = multiply_add(fit * r, r, r) + 1.0f;
  const Float result = (Float)((Bits)power + ((Bits)shifted << 23));
  // Not the other way round: a NaN is not below, and its power is a NaN whatever its exponent.
  return x < -87.3f ? Float{} : (x == x ? result : x);
}

inline Float magnitude(Float x) { return (Float)((Bits)x & 0x7FFFFFFFu); }

inline Float tanh_of(Float x) {
  const Float size = magnitude(x);
  const Float square = x * x;
  // A least-maximum fit of (tanh(x) - x) / x^3 below 0.625, where the quotient would cancel.
  Float fit = multiply_add(square, broadcast(-0.00570496311f), broadcast(0.0206390638f));
  fit = multiply_add(fit, square, broadcast(-0.0537397079f));
  fit = multiply_add(fit, square, broadcast(0.133314416f));
  fit = multiply_add(fit, square, broadcast(-0.333332807f));
  const Float near_zero = multiply_add(x * square, fit, x);
  const Float decay = exp_of_nonpositive(size * -2.0f);
  const Float quotient = (1.0f - decay) / (1.0f + decay);
  return size < 0.625f ? near_zero : (x < 0.0f ? -quotient : quotient);
}

inline Bits bfloat16_bits(Float x) {
  const Bits bits = (Bits)x;
  const Bits rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  return x == x ? rounded : ((bits >> 16) | 0x40u);
}

// The arithmetic of float_to_fp8, lane by lane; `scaled`: the value divided by its scale.
template <class Format>
inline Bits fp8_bits(Float value, Float scaled) {
  using Rounding = Fp8Rounding<Format>;
  const Bits magnitude = (Bits)scaled & 0x7FFFFFFFu;
  const Int is_nan = (Int)magnitude > 0x7F800000;
  const Float clamped = smaller((Float)magnitude, (Float)broadcast_bits(Format::kLargest));
  const Float at_least_normal = larger(clamped, (Float)broadcast_bits(Format::kSmallestNormal));
  const Bits exponent = (Bits)at_least_normal & 0x7F800000u;
  const Bits power = exponent + Rounding::kPower;
  const Bits rounded = (Bits)(clamped + (Float)power) - power;
  const Bits finite = rounded + (exponent >> Rounding::kShift) - Rounding::kFirstExponent;
  const Bits sign = (is_nan ? (Bits)value : (Bits)scaled) >> 24 & 0x80u;
  return (is_nan ? broadcast_bits(0x7F) : finite) | sign;
}
