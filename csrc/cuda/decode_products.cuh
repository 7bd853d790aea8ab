// What a warp multiplies: keys by the query rows, and values by the weights.

#pragma once

#include "decode_query.cuh"

namespace torch_pagedkv {

// Which row and byte this lane points at in a load of four matrices.
struct LanePlace {
  int key_row, key_byte;      // of 16 keys
  int value_row, value_byte;  // of 16 values, transposed

  __host__ __device__ explicit LanePlace(int lane) {
    const int matrix = lane / 8, row = lane % 8;
    key_row = matrix % 2 * 8 + row, key_byte = matrix / 2 * 16;
    value_row = matrix / 2 * 8 + row, value_byte = matrix % 2 * 16;
  }
};

// Products of 16 keys each with 8 query rows each. A lane holds those of keys g (elements 0 and 1) and
// g + 8 (2 and 3) with rows 2t and 2t + 1.
template <class TILE>
using Scores = float[TILE::kKeys / 16][TILE::kColumns][4];

template <class TILE>
__device__ inline void multiply_keys(
    Scores<TILE>& scores, const WarpQuery<TILE>& query, uint32_t keys, const LanePlace& lane) {
  using Pool = typename TILE::Pool;
  using Math = typename Pool::Math;
  // Even and odd steps are summed up apart: shorter chains of products.
  Scores<TILE> odd;
#pragma unroll
  for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][column][i] = odd[tile][column][i] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < TILE::kDim / 16; step += 2) {
#pragma unroll
    for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
      uint32_t tiles[2][4];
#pragma unroll
      for (int load = 0; load < 2 / Pool::kTilesOfLoad; ++load) {
        uint32_t loaded[4];
        const int byte = (step + load) * 16 * Pool::kElementBytes + lane.key_byte;
        load_matrices(
            loaded, keys + swizzled<TILE::kRowBytes>(tile * 16 + lane.key_row, byte));
        if constexpr (Pool::kTilesOfLoad == 2) {
          Pool::key_tiles(loaded, tiles);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) tiles[load][i] = loaded[i];
        }
      }
#pragma unroll
      for (int column = 0; column < TILE::kColumns; ++column) {
        Math::multiply(scores[tile][column], tiles[0], query.pairs[step][column]);
        Math::multiply(odd[tile][column], tiles[1], query.pairs[step + 1][column]);
      }
    }
  }
#pragma unroll
  for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[tile][column][i] += odd[tile][column][i];
    }
  }
}

// Sums of values. A lane holds columns `column(tile, g, 0)` (elements 0 and 1) and `column(tile, g, 1)`
// (2 and 3) of rows 2t and 2t + 1.
template <class TILE>
using Sums = float[TILE::kDim / 16][TILE::kColumns][4];

// Zeros in place of NaN and infinities in a pair; whether there were any.
template <class MATH>
__device__ inline bool drop_nonfinite(uint32_t& pair) {
  const uint32_t exponents = pair & MATH::kExponent;
  const bool low = (exponents & 0xFFFF) == (MATH::kExponent & 0xFFFF);
  const bool high = exponents >> 16 == MATH::kExponent >> 16;
  pair &= (low ? 0u : 0x0000FFFFu) | (high ? 0u : 0xFFFF0000u);
  return low || high;
}

// sums += weights . values of a slice. Where rows see different keys (PARTIAL), values that are not
// finite are left out, and it is told whether there were any: a weight of 0 would not hide them.
template <class TILE, bool PARTIAL>
__device__ inline bool multiply_values(
    Sums<TILE>& sums, const Scores<TILE>& weights, uint32_t values, const LanePlace& lane) {
  using Pool = typename TILE::Pool;
  using Math = typename Pool::Math;
  constexpr int kOfLoad = Pool::kTilesOfLoad;
  bool dropped = false;
#pragma unroll
  for (int step = 0; step < TILE::kKeys / 16; ++step) {
    uint32_t rows[TILE::kColumns][2];  // keys along the lanes become keys within a lane
#pragma unroll
    for (int column = 0; column < TILE::kColumns; ++column) {
      const float(&weight)[4] = weights[step][column];
      rows[column][0] = transposed(Math::pair(weight[0], weight[1]));
      rows[column][1] = transposed(Math::pair(weight[2], weight[3]));
    }
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 16; tile += kOfLoad) {
      uint32_t loaded[4], tiles[kOfLoad][4];
      const int byte = tile * 16 * Pool::kElementBytes + lane.value_byte;
      load_transposed(
          loaded, values + swizzled<TILE::kRowBytes>(step * 16 + lane.value_row, byte));
      Pool::value_tiles(loaded, tiles);
      if constexpr (PARTIAL) {
#pragma unroll
        for (int i = 0; i < kOfLoad; ++i) {
#pragma unroll
          for (int j = 0; j < 4; ++j) dropped |= drop_nonfinite<Math>(tiles[i][j]);
        }
      }
#pragma unroll
      for (int i = 0; i < kOfLoad; ++i) {
#pragma unroll
        for (int column = 0; column < TILE::kColumns; ++column) {
          Math::multiply(sums[tile + i][column], tiles[i], rows[column]);
        }
      }
    }
  }
  return dropped;
}

// Adds the NaN and infinite values of a slice to the rows that see them only. Any weight leaves an
// infinity what it is, so it needs none. `seen`: the keys that rows 2t and 2t + 1 of each column see.
template <class TILE>
__device__ inline void add_nonfinite_values(
    Sums<TILE>& sums, const char* values, const uint32_t (&seen)[TILE::kColumns][2]) {
  const int g = threadIdx.x % 32 / 4;
#pragma unroll 1
  for (int key = 0; key < TILE::kKeys; ++key) {
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int byte = TILE::Pool::column(tile, g, half) * TILE::Pool::kElementBytes;
        // Elements of a 16-byte piece stay together wherever it lies.
        const char* const piece = values + swizzled<TILE::kRowBytes>(key, byte / 16 * 16);
        const float value = TILE::Pool::element(piece, byte % 16 / TILE::Pool::kElementBytes);
        if (isfinite(value)) continue;
#pragma unroll
        for (int column = 0; column < TILE::kColumns; ++column) {
#pragma unroll
          for (int row = 0; row < 2; ++row) {
            if (seen[column][row] >> key & 1) sums[tile][column][2 * half + row] += value;
          }
        }
      }
    }
  }
}

}  // namespace torch_pagedkv
