// The query rows of an item, as left or right matrices in registers.

#pragma once

#include "decode_sequence.cuh"
#include "decode_tile.cuh"

namespace torch_pagedkv {

// Two adjacent 16-bit elements, which may lie at any multiple of their size.
__device__ inline uint32_t load_pair(const char* source) {
  const uint16_t* const elements = reinterpret_cast<const uint16_t*>(source);
  return elements[0] | static_cast<uint32_t>(elements[1]) << 16;
}

// Brings the second of some numbers, or arrays of them, to the first place, and so on, and the first one to the
// last. Registers have no index: a loop that turns them needs code for the first place alone, where all of them
// unrolled are long.
template <class NUMBER>
__device__ inline void put(NUMBER& target, const NUMBER& source) {
  target = source;
}
template <class PART, int COUNT>
__device__ inline void put(PART (&target)[COUNT], const PART (&source)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) put(target[i], source[i]);
}
template <class PART, int COUNT>
__device__ inline void turn(PART (&parts)[COUNT]) {
  PART first;
  put(first, parts[0]);
#pragma unroll
  for (int i = 1; i < COUNT; ++i) put(parts[i - 1], parts[i]);
  put(parts[COUNT - 1], first);
}

template <class TILE>
struct WarpQuery {
  static constexpr int kSteps = TILE::kDim / 16;
  static constexpr int kColumns = TILE::kRights;  // of 8 rows
  uint32_t pairs[kSteps][2 * kColumns];  // each half of 16 elements, of each column

  __device__ void clear() {
#pragma unroll
    for (auto& of_step : pairs) {
#pragma unroll
      for (uint32_t& pair : of_step) pair = 0;
    }
  }

  // Loads the rows that exist, zeros for others; leaves in terms[row].scale what a row was divided by.
  __device__ void load(
      const DecodeProblem& problem, const Sequence& sequence, int first_head, int heads,
      RowTerms* terms) {
    const int lane = lane_here(), g = lane / 4, t = lane % 4;
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      const int token = problem.token_of_row(column * 8 + g);
      const int head = column * 8 + g - token * problem.heads_of_tile;
      const bool is_row = token < sequence.query_length && head < heads;
      const int64_t token_place = (sequence.start + token) * problem.query_token_stride;
      const int64_t head_place = (first_head + head) * problem.query_head_stride;
      const char* const source = problem.query + (is_row ? token_place + head_place : 0);
      const int elements = is_row ? problem.key_dim : 0;
      if (__builtin_expect(problem.query_is_aligned, true)) {
        load_row(column, source, elements, t);
      } else {
        load_unaligned_row(column, source, elements, t);
      }
    }
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      float scale = 1.0f;
      if (TILE::Pool::kIsFp8 && problem.query_is_bfloat16) scale = make_halves(column);
      if (t == 0) terms[column * 8 + g].scale = scale;
    }
  }

 private:
  __device__ void load_row(int column, const char* source, int elements, int t) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = step * 16 + TILE::Pool::query_element(t, half);
        pairs[step][half * kColumns + column] =
            element < elements ? *reinterpret_cast<const uint32_t*>(source + element * 2) : 0;
      }
    }
  }

  // Its elements may lie at any multiple of their size.
  __device__ void load_unaligned_row(int column, const char* source, int elements, int t) {
#pragma unroll 1
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int element = step * 16 + TILE::Pool::query_element(t, half);
        pairs[0][half * kColumns + column] = element < elements ? load_pair(source + element * 2) : 0;
      }
      turn(pairs);
    }
  }

  // Makes float16 of bfloat16. A power of two brings a row's largest element close to float16's largest;
  // what then gets lost of the smallest ones is below float32's rounding of the products of the largest.
  __device__ float make_halves(int column) {
    uint32_t largest = 0;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = pairs[step][half * kColumns + column];
        largest = max(largest, max(pair & 0x7FFF, pair >> 16 & 0x7FFF));
      }
    }
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 1));
    largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, 2));
    int power = 14 - (static_cast<int>(largest >> 7) - 127);
    power = largest == 0 || largest >= 0x7F80 ? 0 : min(power, 126);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 + power) << 23);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t& pair = pairs[step][half * kColumns + column];
        const float low = BFloat16Math::to_float(pair & 0xFFFF);
        const float high = BFloat16Math::to_float(pair >> 16);
        pair = HalfMath::pair(low * factor, high * factor);
      }
    }
    return __uint_as_float(static_cast<uint32_t>(127 - power) << 23);
  }
};

}  // namespace torch_pagedkv
