// What a warp multiplies: keys by the query rows, and values by the weights.

#pragma once

#include "decode_query.cuh"

namespace torch_pagedkv {

// Where this lane points at in a load of four matrices, from the start of a tile's keys or values: those of
// 8 keys or columns follow one another in registers if they are right matrices, else those of 16.
template <class TILE>
struct LanePlace {
  uint32_t key;    // of 16 keys
  uint32_t value;  // of 16 values, transposed

  __host__ __device__ explicit LanePlace(int lane) {
    constexpr bool kSwaps = TILE::kRowsAreLeft && !TILE::Pool::kIsFp8;
    const int row = lane % 8, first = lane / 8 % 2, second = lane / 16;
    const int low = kSwaps ? second : first, high = kSwaps ? first : second;
    key = swizzled<TILE::kRowBytes>(low * 8 + row, high * 16);
    value = swizzled<TILE::kRowBytes>(high * 8 + row, low * 16);
  }
};

// Left matrices out of what was loaded, as lanes hold them.
template <class TILE>
__device__ inline void take_key_tiles(
    const uint32_t (&loaded)[4], uint32_t (&tiles)[TILE::Pool::kTilesOfLoad][4]) {
  if constexpr (TILE::Pool::kIsFp8) {
    TILE::Pool::key_tiles(loaded, tiles);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) tiles[0][i] = loaded[TILE::place_in_load(i)];
  }
}
template <class TILE>
__device__ inline void take_value_tiles(
    const uint32_t (&loaded)[4], uint32_t (&tiles)[TILE::Pool::kTilesOfLoad][4]) {
  if constexpr (TILE::Pool::kIsFp8) {
    TILE::Pool::value_tiles(loaded, tiles);
  } else {
    take_key_tiles<TILE>(loaded, tiles);
  }
}

// sums += the product of 16 keys or columns of values with query rows or weights. A left matrix of 16 rows
// is two right ones of 8.
template <class TILE>
__device__ inline void multiply_tile(
    float (&sums)[TILE::kRights][4], const uint32_t (&tile)[4],
    const uint32_t (&rows)[2 * TILE::kRights]) {
  using Math = typename TILE::Pool::Math;
  if constexpr (TILE::kRowsAreLeft) {
    Math::multiply(sums[0], rows, {tile[0], tile[2]});
    Math::multiply(sums[1], rows, {tile[1], tile[3]});
  } else {
    Math::multiply(sums[0], tile, rows);
  }
}

// Products of 16 keys each with the query rows.
template <class TILE>
using Scores = float[TILE::kKeys / 16][TILE::kRights][4];

// Calls `take` with each number that this lane has of products, and with its place in them.
template <class NUMBER, int TILES, int RIGHTS, class TAKE>
__device__ inline void each_product(NUMBER (&products)[TILES][RIGHTS][4], const TAKE& take) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int right = 0; right < RIGHTS; ++right) {
#pragma unroll
      for (int i = 0; i < 4; ++i) take(products[tile][right][i], tile, right, i);
    }
  }
}

// `keys`: where this lane points at.
template <class TILE>
__device__ inline void multiply_keys(
    Scores<TILE>& scores, const WarpQuery<TILE>& query, uint32_t keys) {
  using Pool = typename TILE::Pool;
  constexpr int kOfLoad = Pool::kTilesOfLoad;
  // Even and odd steps are summed up apart: shorter chains of products.
  Scores<TILE> odd;
  each_product(odd, [&](float& other, int tile, int right, int i) { scores[tile][right][i] = other = 0.0f; });
#pragma unroll
  for (int step = 0; step < TILE::kDim / 16; step += kOfLoad) {
#pragma unroll
    for (int tile = 0; tile < TILE::kKeys / 16; ++tile) {
      uint32_t loaded[4], tiles[kOfLoad][4];
      load_matrices(
          loaded, moved<TILE::kRowBytes>(keys, tile * 16, step * 16 * Pool::kElementBytes));
      take_key_tiles<TILE>(loaded, tiles);
#pragma unroll
      for (int i = 0; i < kOfLoad; ++i) {
        multiply_tile<TILE>(
            (step + i) % 2 == 0 ? scores[tile] : odd[tile], tiles[i], query.pairs[step + i]);
      }
    }
  }
  each_product(odd, [&](float other, int tile, int right, int i) { scores[tile][right][i] += other; });
}

// Sums of values.
template <class TILE>
using Sums = float[TILE::kDim / 16][TILE::kRights][4];

// sums += weights . values of a slice. `values`: where this lane points at.
template <class TILE>
__device__ inline void multiply_values(
    Sums<TILE>& sums, const Scores<TILE>& weights, uint32_t values) {
  using Pool = typename TILE::Pool;
  using Math = typename Pool::Math;
  constexpr int kOfLoad = Pool::kTilesOfLoad;
#pragma unroll
  for (int step = 0; step < TILE::kKeys / 16; ++step) {
    uint32_t rows[2 * TILE::kRights];
    if constexpr (TILE::kRowsAreLeft) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&weight)[4] = weights[step][i / 2];
        rows[i] = Math::pair(weight[i % 2 * 2], weight[i % 2 * 2 + 1]);
      }
    } else {  // keys along the lanes become keys within a lane
      const float(&weight)[4] = weights[step][0];
      rows[0] = transposed(Math::pair(weight[0], weight[1]));
      rows[1] = transposed(Math::pair(weight[2], weight[3]));
    }
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 16; tile += kOfLoad) {
      uint32_t loaded[4], tiles[kOfLoad][4];
      load_transposed(
          loaded, moved<TILE::kRowBytes>(values, step * 16, tile * 16 * Pool::kElementBytes));
      take_value_tiles<TILE>(loaded, tiles);
#pragma unroll
      for (int i = 0; i < kOfLoad; ++i) multiply_tile<TILE>(sums[tile + i], tiles[i], rows);
    }
  }
}

// Whether this lane's pieces of a slice of values hold NaN or infinities.
template <class TILE>
__device__ inline bool finds_nonfinite(const char* values) {
  using Pool = typename TILE::Pool;
  bool found = false;
#pragma unroll 1
  for (int byte = lane_here() * 16; byte < TILE::kKeys * TILE::kRowBytes; byte += 32 * 16) {
    const uint4 piece = *reinterpret_cast<const uint4*>(values + byte);
    found |= Pool::has_nonfinite(piece.x) | Pool::has_nonfinite(piece.y) |
             Pool::has_nonfinite(piece.z) | Pool::has_nonfinite(piece.w);
  }
  return found;
}

// Puts zeros in place of NaN and infinities in this lane's pieces of a slice of values.
template <class TILE>
__device__ inline void drop_nonfinite_values(char* values) {
  using Bits = typename TILE::Pool::Bits;
#pragma unroll 1
  for (int byte = lane_here() * 16; byte < TILE::kKeys * TILE::kRowBytes; byte += 32 * 16) {
#pragma unroll 1
    for (int i = 0; i < 16 / static_cast<int>(sizeof(Bits)); ++i) {
      if (!isfinite(TILE::Pool::element(values + byte, i))) reinterpret_cast<Bits*>(values + byte)[i] = 0;
    }
  }
}

// Adds the NaN and infinite values of a slice to the rows that see them only. Any weight leaves an
// infinity what it is, so it needs none. `seen`: the keys that this lane's rows see.
template <class TILE>
__device__ inline void add_nonfinite_values(
    Sums<TILE>& sums, const char* values, const uint32_t (&seen)[2]) {
  const int lane = lane_here();
#pragma unroll 1
  for (int tile = 0; tile < TILE::kDim / 16; ++tile) {
#pragma unroll 1
    for (int key = 0; key < TILE::kKeys; ++key) {
#pragma unroll
      for (int right = 0; right < TILE::kRights; ++right) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int byte = TILE::column_of_element(lane, tile, right, i) * TILE::Pool::kElementBytes;
          // Elements of a 16-byte piece stay together wherever it lies.
          const char* const piece = values + swizzled<TILE::kRowBytes>(key, byte / 16 * 16);
          const float value = TILE::Pool::element(piece, byte % 16 / TILE::Pool::kElementBytes);
          const bool is_seen = seen[TILE::row_of_element(i)] >> key & 1;
          if (is_seen && !isfinite(value)) sums[0][right][i] += value;
        }
      }
    }
    turn(sums);
  }
}

}  // namespace torch_pagedkv
