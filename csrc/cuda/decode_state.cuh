// The softmax state of a warp.

#pragma once

#include "decode_products.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// A number of a lane's two rows of each column of 8.
template <class TILE>
using LaneRows = float[TILE::kColumns][2];

// Maxima, totals and values of all query rows; each lane has some of its rows' keys or columns.
template <class TILE>
struct WarpState {
  Sums<TILE> sums;
  LaneRows<TILE> maximum, total;  // totals are of this lane's keys until they are summed up

  __device__ void clear() {
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[tile][column][i] = 0.0f;
      }
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        maximum[column][row] = -INFINITY;
        total[column][row] = 0.0f;
      }
    }
  }

  // Turns scores into weights and makes the state relative to the new maxima. Of plain scores, which no
  // step before looked at, some may have overflowed.
  __device__ void take(Scores<TILE>& scores, bool is_plain) {
    LaneRows<TILE> largest;
    take_largest(scores, largest);
    bool is_extreme = false;
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) is_extreme |= !(fabsf(largest[column][row]) < FLT_MAX);
    }
    if (is_plain && __any_sync(0xFFFFFFFF, is_extreme)) {
#pragma unroll
      for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
        for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            scores[tile][column][i] = without_infinity(scores[tile][column][i]);
          }
        }
      }
      take_largest(scores, largest);
    }
    rescale(largest);
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
      const float reference[2] = {reference_of(largest[column][0]), reference_of(largest[column][1])};
#pragma unroll
      for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& score = scores[tile][column][i];
          score = weight_of(score, reference[i % 2]);
          total[column][i % 2] += score;
        }
      }
    }
  }

  // The total of one of this lane's rows, of all keys.
  __device__ float total_of(int column, int i) const {
    float sum = total[column][i];
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
      sum += __shfl_xor_sync(0xFFFFFFFF, sum, distance);
    }
    return sum;
  }

  // Puts the maxima, totals and values of the 8 rows of a column where all lanes can read them.
  __device__ void store(int column, float* maxima, float* totals, float* result) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * t + i;
      const float sum = total_of(column, i);
      if (g == 0) maxima[row] = maximum[column][i], totals[row] = sum;
#pragma unroll
      for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          result[TILE::result_place(row, TILE::Pool::column(tile, g, half))] =
              sums[tile][column][2 * half + i];
        }
      }
    }
  }

 private:
  // The maxima of all rows with these scores.
  __device__ void take_largest(const Scores<TILE>& scores, LaneRows<TILE>& largest) const {
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float most = maximum[column][row];
#pragma unroll
        for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
          most = fmaxf(most, fmaxf(scores[tile][column][row], scores[tile][column][2 + row]));
        }
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFF, most, distance));
        }
        largest[column][row] = most;
      }
    }
  }

  __device__ void rescale(const LaneRows<TILE>& largest) {
    bool has_moved = false;
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) has_moved |= largest[column][row] != maximum[column][row];
    }
    // Where no maximum moves all factors are 1, and multiplying by them changes no bit.
    if (!__any_sync(0xFFFFFFFF, has_moved)) return;
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float decay = weight_of(maximum[column][row], reference_of(largest[column][row]));
        total[column][row] *= decay;
        maximum[column][row] = largest[column][row];
#pragma unroll
        for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
          sums[tile][column][row] *= decay;
          sums[tile][column][2 + row] *= decay;
        }
      }
    }
  }
};

}  // namespace torch_pagedkv
