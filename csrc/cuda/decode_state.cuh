// The softmax state of a warp.

#pragma once

#include "decode_products.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// Writes adjacent numbers at once, to an address that is a multiple of their size.
__device__ inline void store_run(float* target, const float (&run)[1]) { *target = run[0]; }
__device__ inline void store_run(float* target, const float (&run)[2]) {
  *reinterpret_cast<float2*>(target) = float2{run[0], run[1]};
}
__device__ inline void store_run(float* target, const float (&run)[4]) {
  *reinterpret_cast<float4*>(target) = float4{run[0], run[1], run[2], run[3]};
}

// A number of each of a lane's two rows.
using LaneRows = float[2];

// Maxima, totals and values of all query rows; each lane has some of its rows' keys or columns.
template <class TILE>
struct WarpState {
  Sums<TILE> sums;
  LaneRows maximum;
  // Of this lane's keys until they are summed up: of each row, and of rows that are left also of even and
  // of odd keys, so that keys are added in one order however many rows there are.
  float total[2 * TILE::kRights];

  __device__ void clear() {
    each_product(sums, [](float& sum, int, int, int) { sum = 0.0f; });
    maximum[0] = maximum[1] = -INFINITY;
#pragma unroll
    for (float& sum : total) sum = 0.0f;
  }

  // Turns scores into weights and makes the state relative to the new maxima. Of plain scores, which no
  // step before looked at, some may have overflowed.
  __device__ void take(Scores<TILE>& scores, bool is_plain) {
    LaneRows largest;
    take_largest(scores, largest);
    const bool is_extreme = !(fabsf(largest[0]) < FLT_MAX) || !(fabsf(largest[1]) < FLT_MAX);
    if (is_plain && __any_sync(0xFFFFFFFF, is_extreme)) {
      each_product(scores, [](float& score, int, int, int) { score = without_infinity(score); });
      take_largest(scores, largest);
    }
    rescale(largest);
    const float reference[2] = {reference_of(largest[0]), reference_of(largest[1])};
    each_product(scores, [&](float& score, int, int, int i) {
      score = weight_of(score, reference[TILE::row_of_element(i)]);
      total[i % (2 * TILE::kRights)] += score;
    });
  }

  // The total of one of this lane's rows, of all keys.
  __device__ float total_of(int row) const {
    float sum = total[row];
    if constexpr (TILE::kRowsAreLeft) sum = total[2 * row] + total[2 * row + 1];
#pragma unroll
    for (int distance = TILE::kFirstOfSameRows; distance < TILE::kPastSameRows; distance *= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    }
    return sum;
  }

  // Calls `take` with each run of adjacent columns that this lane has of one of its rows: with the first
  // column and the values.
  template <class TAKE>
  __device__ void each_run(int lane, int row, const TAKE& take) const {
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
      if constexpr (TILE::kRowsAreLeft && TILE::Pool::kIsFp8) {
        const float run[4] = {
            sums[tile][0][2 * row], sums[tile][1][2 * row], sums[tile][0][2 * row + 1],
            sums[tile][1][2 * row + 1]};
        take(TILE::column_of_element(lane, tile, 0, 0), run);
      } else if constexpr (TILE::kRowsAreLeft) {
#pragma unroll
        for (int right = 0; right < 2; ++right) {
          const float run[2] = {sums[tile][right][2 * row], sums[tile][right][2 * row + 1]};
          take(TILE::column_of_element(lane, tile, right, 0), run);
        }
      } else if constexpr (TILE::Pool::kIsFp8) {
        const float run[2] = {sums[tile][0][row], sums[tile][0][2 + row]};
        take(TILE::column_of_element(lane, tile, 0, 0), run);
      } else {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float run[1] = {sums[tile][0][2 * half + row]};
          take(TILE::column_of_element(lane, tile, 0, 2 * half), run);
        }
      }
    }
  }

  // Puts the maxima, totals and values of the 8 rows of a column where all lanes can read them.
  __device__ void store(int column, float* maxima, float* totals, float* result) const {
    const int lane = lane_here();
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      if (TILE::kRowsAreLeft && row != column) continue;
      const int place = TILE::row_of_lane(lane, row) % 8;
      const float sum = total_of(row);
      if (TILE::is_first_of_same_rows(lane)) maxima[place] = maximum[row], totals[place] = sum;
      each_run(lane, row, [&](int first, const auto& run) {
        store_run(result + TILE::result_place(place, first), run);
      });
    }
  }

 private:
  // The maxima of all rows with these scores.
  __device__ void take_largest(const Scores<TILE>& scores, LaneRows& largest) const {
    largest[0] = maximum[0], largest[1] = maximum[1];
    each_product(scores, [&](float score, int, int, int i) {
      float& most = largest[TILE::row_of_element(i)];
      most = fmaxf(most, score);
    });
#pragma unroll
    for (int distance = TILE::kFirstOfSameRows; distance < TILE::kPastSameRows; distance *= 2) {
#pragma unroll
      for (float& most : largest) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, distance));
    }
  }

  __device__ void rescale(const LaneRows& largest) {
    const bool has_moved = largest[0] != maximum[0] || largest[1] != maximum[1];
    // Where no maximum moves all factors are 1, and multiplying by them changes no bit.
    if (!__any_sync(0xFFFFFFFF, has_moved)) return;
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float decay = weight_of(maximum[row], reference_of(largest[row]));
      maximum[row] = largest[row];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (TILE::row_of_element(i) != row) continue;
        if (i < 2 * TILE::kRights) total[i] *= decay;
#pragma unroll
        for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
#pragma unroll
          for (int right = 0; right < TILE::kRights; ++right) sums[tile][right][i] *= decay;
        }
      }
    }
  }
};

}  // namespace torch_pagedkv
