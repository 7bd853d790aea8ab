// What prefill attention does to scores between the two products: terms, masks, and the online softmax.
// A lane has rows g and g + 8 of a warp; elements 4i + 2h and 4i + 2h + 1 belong to row g + 8h.

#pragma once

#include "prefill_schedule.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// A row of a tile: which token and head of the call it is.
struct TileRow {
  bool exists;
  int of_sequence, token, head;  // of_sequence: the token's number there

  __device__ TileRow(
      const DecodeProblem& problem, const PrefillGrid& grid, const PrefillWork& work, int row) {
    const int of_tile = static_cast<uint32_t>(row) / static_cast<uint32_t>(problem.heads_of_tile);
    const int of_heads = row - of_tile * problem.heads_of_tile;
    of_sequence = work.first + of_tile;
    exists = of_tile < grid.tokens_of_tile && of_sequence < work.query_length &&
             of_heads < work.heads;
    token = work.start + of_sequence;
    head = work.first_head + of_heads;
  }
};

template <int COUNT>
__device__ inline void drop_infinities(float (&scores)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) scores[i] = without_infinity(scores[i]);
}

// The scores of a lane's two rows. Plain ones are products times a scale of a usual size: products are
// compared as they are, and only their differences are scaled.
template <bool IS_PLAIN>
struct LaneTerms {
  static constexpr bool kIsPlain = IS_PLAIN;
  KeyRange seen[2];
  float exponent_scale;

  __device__ LaneTerms(
      const DecodeProblem& problem, const PrefillGrid& grid, const PrefillWork& work, int warp)
      : exponent_scale(IS_PLAIN ? problem.softmax_scale * kLog2E : kLog2E), problem_(problem) {
    const int offset = work.length - work.query_length;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int of_warp = static_cast<int>(threadIdx.x) % 32 / 4 + 8 * half;
      const TileRow row(problem, grid, work, warp * 16 + of_warp);
      const int position = row.of_sequence + offset;
      seen[half] = row.exists ? keys_seen(problem, position, work.length) : KeyRange{0, 0};
      if constexpr (!IS_PLAIN) {
        slopes_[half] = row.exists ? problem.slopes.at(row.head, 0.0f) : 0.0f;
        positions_[half] = position;
      }
    }
  }

  // A product that overflowed is the largest score, whatever the scale.
  __device__ float as_score(float maximum) const {
    return IS_PLAIN && fabsf(maximum) < FLT_MAX ? maximum * problem_.softmax_scale : maximum;
  }

  // What the softmax compares, of all elements, whether seen or not. Plain scores are left as they
  // are, overflowed ones too.
  template <int COUNT>
  __device__ void score(float (&scores)[COUNT], int start) const {
    if constexpr (!IS_PLAIN) {
      const int first = start + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        scores[i] = score_of(scores[i], i / 2 % 2, first + i / 4 * 8 + i % 2);
      }
    }
  }

  // The same without infinities, and minus infinity where a row does not see a key.
  template <int COUNT>
  __device__ void mask(float (&scores)[COUNT], int start, const uint32_t* missing) const {
    if constexpr (IS_PLAIN) {
      drop_infinities(scores);
    } else {
      score(scores, start);
    }
    const int first = start + 2 * (threadIdx.x % 4);
    const int lower[2] = {seen[0].lower - first, seen[1].lower - first};
    const int upper[2] = {seen[0].upper - first, seen[1].upper - first};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int key = i / 4 * 8 + i % 2, half = i / 2 % 2;
      scores[i] = key >= lower[half] && key < upper[half] ? scores[i] : -INFINITY;
    }
    if (missing == nullptr) return;
#pragma unroll
    for (int word = 0; word < COUNT / 16; ++word) {
      const uint32_t hidden = missing[word] >> 2 * (threadIdx.x % 4);
#pragma unroll
      for (int i = 16 * word; i < 16 * word + 16; ++i) {
        if (hidden >> (i % 16 / 4 * 8 + i % 2) & 1) scores[i] = -INFINITY;
      }
    }
  }

  // Adds the NaN and infinite values of a tile to the rows that see them, from the pool itself. Any
  // weight leaves an infinity what it is, so it needs none.
  template <class SHAPE>
  __device__ void add_nonfinite(
      const PrefillWork& work, float (&acc)[SHAPE::kDim / 2], int start) const {
    const DecodeProblem& problem = problem_;
    const char* const table = problem.table + work.sequence * problem.table_stride;
    const int lower = max(start, work.lowest), upper = min(start + SHAPE::kKeys, work.highest);
    for (int position = lower; position < upper; ++position) {
      const int column = static_cast<uint32_t>(position) / static_cast<uint32_t>(problem.block_size);
      const int64_t block = problem.table_is_wide
                                ? reinterpret_cast<const int64_t*>(table)[column]
                                : reinterpret_cast<const int32_t*>(table)[column];
      if (block < 0 || block >= problem.num_blocks) continue;
      const int64_t offset = position - column * problem.block_size;
      const uint16_t* const value = reinterpret_cast<const uint16_t*>(
          problem.values.data + block * problem.values.block_stride +
          offset * problem.values.offset_stride + work.kv_head * problem.values.head_stride);
#pragma unroll
      for (int i = 0; i < SHAPE::kDim / 2; ++i) {
        const KeyRange& range = seen[i / 2 % 2];
        if (i / 4 * 8 >= problem.value_dim || position < range.lower || position >= range.upper) continue;
        const float element =
            SHAPE::Math::to_float(value[i / 4 * 8 + 2 * (threadIdx.x % 4) + i % 2]);
        if (!isfinite(element)) acc[i] += element;
      }
    }
  }

 private:
  __device__ float score_of(float product, int half, int position_of_key) const {
    float score = without_infinity(product * problem_.softmax_scale);
    if (problem_.softcap > 0.0f) score = problem_.softcap * safe_tanh(score * problem_.inverse_softcap);
    if (problem_.slopes.data == nullptr) return score;
    const int distance = position_of_key - positions_[half];
    return without_infinity(score + slopes_[half] * static_cast<float>(distance));
  }

  const DecodeProblem& problem_;
  float slopes_[IS_PLAIN ? 1 : 2];
  int positions_[IS_PLAIN ? 1 : 2];
};

// The online softmax of a lane's two rows.
//
// An exponent is one multiplication and addition: score * scale - maximum * scale, the latter rounded
// once for all weights of a row, so that it cancels out. Where a maximum is so large that this rounding
// would show, scores are taken relative to it first.
struct SoftmaxState {
  float maximum[2] = {-INFINITY, -INFINITY};
  float total[2] = {0.0f, 0.0f};  // of this lane's keys, until summed up

  // Turns scores into weights; the factors of all that was accumulated before, and whether any of
  // them in the warp is not 1.
  template <class TERMS, int COUNT>
  __device__ bool take(
      const TERMS& terms, float (&scores)[COUNT], bool is_masked, float (&decays)[2]) {
    const float scale = terms.exponent_scale;
    float most[2], offset[2];
    find_largest(scores, most);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      offset[half] = most[half] * scale;
      decays[half] = power_of_two(maximum[half] * scale - offset[half]);
    }
    if (__builtin_expect(__any_sync(0xFFFFFFFF, is_far(offset[0]) || is_far(offset[1])), false)) {
      // Products that overflowed are found here too.
      if (TERMS::kIsPlain && !is_masked) {
        drop_infinities(scores);
        find_largest(scores, most);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        offset[half] = most[half] * scale;
        decays[half] = power_of_two(maximum[half] * scale - offset[half]);
        if (!is_far(offset[half])) continue;
        const float reference = reference_of(most[half]);
        offset[half] = 0.0f;
        decays[half] = power_of_two((maximum[half] - reference) * scale);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
          if (i / 2 % 2 == half) scores[i] -= reference;
        }
      }
    }
    const bool moves = most[0] != maximum[0] || most[1] != maximum[1];
    float sums[4] = {};
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      scores[i] = power_of_two(fmaf(scores[i], scale, -offset[i / 2 % 2]));
      sums[i % 4] += scores[i];
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      maximum[half] = most[half];
      total[half] = total[half] * decays[half] + (sums[2 * half] + sums[2 * half + 1]);
    }
    return __any_sync(0xFFFFFFFF, moves);
  }

  __device__ float sum_up(int half) {
    total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 1);
    total[half] += __shfl_xor_sync(0xFFFFFFFF, total[half], 2);
    return total[half];
  }

 private:
  // A smaller one is rounded by 2**-13 at most: less than what tells 1 from its neighbours in 16 bits.
  __device__ static bool is_far(float exponent) { return !(fabsf(exponent) < 4096.0f); }

  // The largest scores so far. In two chains for each row, so that one does not wait for itself.
  template <int COUNT>
  __device__ void find_largest(const float (&scores)[COUNT], float (&most)[2]) const {
    float largest[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) largest[i] = scores[i];
#pragma unroll
    for (int i = 4; i < COUNT; ++i) largest[i % 4] = fmaxf(largest[i % 4], scores[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      most[half] = fmaxf(maximum[half], fmaxf(largest[2 * half], largest[2 * half + 1]));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xFFFFFFFF, most[half], 1));
      most[half] = fmaxf(most[half], __shfl_xor_sync(0xFFFFFFFF, most[half], 2));
    }
  }
};

}  // namespace torch_pagedkv
