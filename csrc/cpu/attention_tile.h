// The arithmetic of attention on one tile of KV positions, in float32.
//
// Every function gives a row the same bits whatever rows it is handled with: a dot product runs
// over the lanes in one fixed order, and values are added position after position.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>

namespace torch_pagedkv {

// Positions in a tile. Tiles start at multiples of it, so that their borders never depend on what a
// row may see: a window as long as the sequence gives the bits of no window.
inline constexpr int kTile = 64;

// 128 bits: what every x86-64 and every aarch64 has.
inline constexpr int kLanes = 4;
typedef float FloatVector __attribute__((vector_size(kLanes * sizeof(float))));
typedef uint32_t BitVector __attribute__((vector_size(kLanes * sizeof(uint32_t))));

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of keys, values and queries are padded with zeros to whole vectors.
inline int64_t padded(int64_t dim) { return (dim + kLanes - 1) / kLanes * kLanes; }

inline FloatVector load(const float* address) {
  FloatVector vector;
  std::memcpy(&vector, address, sizeof vector);
  return vector;
}

inline void store(float* address, FloatVector vector) {
  std::memcpy(address, &vector, sizeof vector);
}

inline FloatVector broadcast(float value) { return value - FloatVector{}; }

inline float sum_lanes(FloatVector vector) {
  return (vector[0] + vector[2]) + (vector[1] + vector[3]);
}

// e^x for x <= 0: exactly 1 at 0, exactly 0 where the result would be subnormal, NaN for NaN.
inline FloatVector exp_of_nonpositive(FloatVector x) {
  // x = k * ln(2) + r with |r| <= ln(2) / 2. Adding 1.5 * 2^23 rounds to the integer k and leaves
  // it in the low bits; ln(2) in two parts keeps r exact.
  const FloatVector shifted = x * 1.44269504f + 12582912.0f;
  const FloatVector k = shifted - 12582912.0f;
  const FloatVector r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
  // A least-maximum fit of (e^r - 1 - r) / r^2: relative error of e^r below 4e-9 before rounding.
  FloatVector fit = r * 0.00138145347f + 0.00836874545f;
  fit = fit * r + 0.0416683927f;
  fit = fit * r + 0.166665211f;
  fit = fit * r + 0.499999940f;
  const FloatVector power = (fit * r * r + r) + 1.0f;
  BitVector exponent, bits;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  std::memcpy(&bits, &power, sizeof bits);
  bits += exponent << 23;
  FloatVector result;
  std::memcpy(&result, &bits, sizeof result);
  result = x < -87.3f ? FloatVector{} : result;
  return x == x ? result : x;
}

inline FloatVector magnitude(FloatVector x) { return x < 0.0f ? -x : x; }

inline FloatVector tanh_of(FloatVector x) {
  const FloatVector size = magnitude(x);
  const FloatVector square = x * x;
  // A least-maximum fit of (tanh(x) - x) / x^3 below 0.625, where the quotient would cancel.
  FloatVector fit = square * -0.00570496311f + 0.0206390638f;
  fit = fit * square - 0.0537397079f;
  fit = fit * square + 0.133314416f;
  fit = fit * square - 0.333332807f;
  const FloatVector near_zero = x + x * square * fit;
  const FloatVector decay = exp_of_nonpositive(size * -2.0f);
  const FloatVector quotient = (1.0f - decay) / (1.0f + decay);
  return size < 0.625f ? near_zero : (x < 0.0f ? -quotient : quotient);
}

// Rows of the pool that are needed next: one is fetched into the cache for each row in use.
struct Ahead {
  const char* const* rows = nullptr;
  int64_t row_bytes = 0;

  void fetch(int n) const {
    for (int64_t offset = 0; offset < row_bytes; offset += 64) __builtin_prefetch(rows[n] + offset);
  }
};

// scores[row][key] = dot(query row, key) for a block of rows and a run of keys.
template <int kRows, int kKeys>
inline void dot_block(
    const float* queries, int64_t dim, const float* const* keys, float* scores) {
  FloatVector sums[kRows][kKeys] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    FloatVector key[kKeys];
    for (int j = 0; j < kKeys; ++j) key[j] = load(keys[j] + d);
    for (int i = 0; i < kRows; ++i) {
      const FloatVector query = load(queries + i * dim + d);
      for (int j = 0; j < kKeys; ++j) sums[i][j] += query * key[j];
    }
  }
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKeys; ++j) scores[i * kTile + j] = sum_lanes(sums[i][j]);
  }
}

// Dots of `kRows` adjacent query rows with the keys at [first, last) of the tile.
template <int kRows>
inline void dot_rows(
    const float* queries,
    int64_t dim,
    const float* const* keys,
    int first,
    int last,
    float* scores,
    Ahead ahead) {
  int n = first;
  for (; n + 2 <= last; n += 2) {
    ahead.fetch(n);
    ahead.fetch(n + 1);
    dot_block<kRows, 2>(queries, dim, keys + n, scores + n);
  }
  if (n < last) dot_block<kRows, 1>(queries, dim, keys + n, scores + n);
}

// sums[row] += weight[row][n] * values[n], n ascending over a run of `kKeys` values.
template <int kRows, int kKeys>
inline void add_values(
    float* sums, int64_t dim, const float* const* values, const float* weights) {
  FloatVector weight[kRows][kKeys];
  for (int i = 0; i < kRows; ++i) {
    for (int j = 0; j < kKeys; ++j) weight[i][j] = broadcast(weights[i * kTile + j]);
  }
  for (int64_t d = 0; d < dim; d += kLanes) {
    FloatVector value[kKeys];
    for (int j = 0; j < kKeys; ++j) value[j] = load(values[j] + d);
    for (int i = 0; i < kRows; ++i) {
      FloatVector sum = load(sums + i * dim + d);
      for (int j = 0; j < kKeys; ++j) sum += weight[i][j] * value[j];
      store(sums + i * dim + d, sum);
    }
  }
}

// Values at [first, last) of the tile, all of them visible to all `kRows` rows.
template <int kRows>
inline void add_visible_values(
    float* sums,
    int64_t dim,
    const float* const* values,
    int first,
    int last,
    const float* weights,
    Ahead ahead) {
  int n = first;
  for (; n + 4 <= last; n += 4) {
    for (int j = 0; j < 4; ++j) ahead.fetch(n + j);
    add_values<kRows, 4>(sums, dim, values + n, weights + n);
  }
  for (; n < last; ++n) add_values<kRows, 1>(sums, dim, values + n, weights + n);
}

// How a dot product becomes a score.
struct ScoreRule {
  float scale;
  float softcap;  // 0: none
  float slope;    // 0: none
};

inline FloatVector clamp_to_finite(FloatVector x) {
  x = x > FLT_MAX ? broadcast(FLT_MAX) : x;
  return x < -FLT_MAX ? broadcast(-FLT_MAX) : x;
}

// `distance`: key position minus query position, of the first lane.
inline FloatVector score_of(FloatVector dot, const ScoreRule& rule, int64_t distance) {
  // An overflowed score is still a score: where it is the only one its value must come out exactly.
  FloatVector score = clamp_to_finite(dot * rule.scale);
  if (rule.softcap != 0.0f) score = rule.softcap * tanh_of(score / rule.softcap);
  if (rule.slope != 0.0f) {
    FloatVector distances;
    for (int lane = 0; lane < kLanes; ++lane) distances[lane] = static_cast<float>(distance + lane);
    score = clamp_to_finite(score + rule.slope * distances);
  }
  return score;
}

// One query row's softmax so far.
struct RunningSoftmax {
  float maximum;
  float denominator;
};

// Turns a row's dots at [first, last) of a tile into weights relative to the new maximum, and
// brings what was summed before to that maximum. `distance`: of the tile's first position.
inline void weigh_row(
    float* scores,
    int first,
    int last,
    const ScoreRule& rule,
    int64_t distance,
    RunningSoftmax& softmax,
    float* sums,
    int64_t dim) {
  const int begin = first / kLanes * kLanes;
  FloatVector largest = broadcast(-kInfinity);
  for (int n = begin; n < last; n += kLanes) {
    FloatVector score = score_of(load(scores + n), rule, distance + n);
    for (int lane = 0; lane < kLanes && (n < first || n + kLanes > last); ++lane) {
      if (n + lane < first || n + lane >= last) score[lane] = -kInfinity;
    }
    largest = score > largest ? score : largest;
    store(scores + n, score);
  }
  float maximum = softmax.maximum;
  for (int lane = 0; lane < kLanes; ++lane) {
    maximum = largest[lane] > maximum ? largest[lane] : maximum;
  }

  FloatVector total = {};
  for (int n = begin; n < last; n += kLanes) {
    const FloatVector weight = exp_of_nonpositive(load(scores + n) - maximum);
    total += weight;
    store(scores + n, weight);
  }
  if (maximum > softmax.maximum) {
    const float decay = exp_of_nonpositive(broadcast(softmax.maximum - maximum))[0];
    softmax.maximum = maximum;
    softmax.denominator *= decay;
    for (int64_t d = 0; d < dim; d += kLanes) store(sums + d, load(sums + d) * decay);
  }
  softmax.denominator += sum_lanes(total);
}

}  // namespace torch_pagedkv
