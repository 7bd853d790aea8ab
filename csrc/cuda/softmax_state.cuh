// Scores, weights, and the state of an online softmax, with the same rules as everywhere: differences
// of scores are multiplied by log2(e), not scores, so the largest score has the weight 1 exactly. Prefill
// attention takes a shorter way to weights (prefill_softmax.cuh).

#pragma once

#include <cuda_runtime.h>

#include <cfloat>
#include <cstdint>

namespace torch_pagedkv {

inline constexpr float kLog2E = 1.4426950408889634f;

__device__ inline float power_of_two(float exponent) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent));
  return result;
}

// The weight of a score or a maximum relative to `reference`, which is finite.
__device__ inline float weight_of(float score, float reference) {
  return power_of_two((score - reference) * kLog2E);
}

// A maximum to subtract: minus infinity less itself would be NaN.
__device__ inline float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// An overflowed score is still a score: a row whose only key has one takes that key's value.
__device__ inline float without_infinity(float score) {
  return fabsf(score) == INFINITY ? copysignf(FLT_MAX, score) : score;
}

// With exponentials of negative numbers only, nothing overflows. Near 0 the quotient cancels, and the
// odd Taylor polynomial is exact to float32 there.
__device__ inline float safe_tanh(float x) {
  const float size = fabsf(x);
  const float decayed = power_of_two(size * (-2.0f * kLog2E));
  const float quotient = __fdividef(1.0f - decayed, 1.0f + decayed);
  const float square = x * x;
  const float series =
      1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315)));
  return size < 0.2f ? x * series : copysignf(quotient, x);
}

// A row's output and log-sum-exp are made of its maximum, total and accumulated values.
struct RowEnd {
  float lse;

  // The sink is one more logit without a value.
  __device__ RowEnd(float maximum, float total, bool has_sink, float sink, float value_scale) {
    sees_keys_ = total != 0.0f;
    float decay = 1.0f;
    value_scale_ = value_scale;
    if (has_sink) {
      const float joined = fmaxf(maximum, sink);
      const float reference = reference_of(joined);
      decay = weight_of(maximum, reference);
      total = total * decay + weight_of(sink, reference);
      maximum = joined;
    }
    const float divisor = total == 0.0f ? 1.0f : total;
    factor_ = decay / divisor;
    lse = total == 0.0f ? -INFINITY : maximum + logf(divisor);
  }

  // Selected, because a value scale that is not finite would make NaN of 0.
  __device__ float value(float accumulated) const {
    return sees_keys_ ? accumulated * factor_ * value_scale_ : 0.0f;
  }

 private:
  bool sees_keys_;
  float factor_, value_scale_;
};

}  // namespace torch_pagedkv
