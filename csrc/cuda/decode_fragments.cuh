// What a warp does with a slice of keys and values: copy it into shared memory through the block
// table, multiply the query rows by its keys, and the weights by its values.

#pragma once

#include "decode_schedule.cuh"
#include "decode_tile.cuh"

namespace torch_pagedkv {

// A warp's copies of keys and values into its stages of shared memory.
template <class TILE>
class WarpLoader {
 public:
  using Pool = typename TILE::Pool;
  static constexpr int kPacks = TILE::kRowBytes / 16;
  static constexpr int kPasses = TILE::kKeys * kPacks / 32;
  static constexpr uint32_t kAllKeys = TILE::kKeys == 32 ? 0xFFFFFFFF : (1u << TILE::kKeys) - 1;

  struct Entry {
    int block, offset;  // block -1: the position is not loaded
  };

  __device__ WarpLoader(
      const DecodeProblem& problem, const Sequence& sequence, int index, int kv_head,
      uint32_t stages, uint32_t* loaded)
      : problem_(problem),
        lowest_(sequence.lowest),
        highest_(sequence.highest),
        keys_(problem.keys.data + kv_head * problem.keys.head_stride),
        values_(problem.values.data + kv_head * problem.values.head_stride),
        table_(problem.table + index * problem.table_stride),
        stages_(stages),
        loaded_(loaded) {}

  // The table's entry for this lane's position of the slice from `start` on. Entries of positions
  // that no row sees are not read.
  __device__ Entry look_up(int start) const {
    const int position = start + static_cast<int>(threadIdx.x) % TILE::kKeys;
    Entry entry{-1, 0};
    if (position < lowest_ || position >= highest_) return entry;
    const uint32_t block_size = problem_.block_size;
    const int column = problem_.block_shift >= 0 ? position >> problem_.block_shift
                                                 : static_cast<uint32_t>(position) / block_size;
    const int64_t block = problem_.table_is_wide
                              ? reinterpret_cast<const int64_t*>(table_)[column]
                              : reinterpret_cast<const int32_t*>(table_)[column];
    if (block >= 0 && block < problem_.num_blocks) entry.block = static_cast<int>(block);
    entry.offset = position - column * problem_.block_size;
    return entry;
  }

  // Starts the copies of a slice. Rows that are not loaded become zeros.
  __device__ void issue(int stage, const Entry& entry) const {
    const int lane = threadIdx.x % 32;
    const int64_t block = entry.block, offset = entry.offset;
    const int64_t key_place =
        block * problem_.keys.block_stride + offset * problem_.keys.offset_stride;
    const int64_t value_place =
        block * problem_.values.block_stride + offset * problem_.values.offset_stride;
    const uint32_t loaded = __ballot_sync(0xFFFFFFFF, entry.block >= 0) & kAllKeys;
    if (lane == 0) loaded_[stage] = loaded;
    const uint32_t target = stages_ + stage * TILE::kStageBytes;
    const int byte = lane % kPacks * 16;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = (pass * 32 + lane) / kPacks;
      const int64_t key = __shfl_sync(0xFFFFFFFF, key_place, row);
      const int64_t value = __shfl_sync(0xFFFFFFFF, value_place, row);
      const bool exists = loaded >> row & 1;
      const bool reads_key = exists && byte < problem_.keys.row_bytes;
      const bool reads_value = exists && byte < problem_.values.row_bytes;
      const uint32_t place = swizzled<TILE::kRowBytes>(row, byte);
      copy_async(target + place, keys_ + (reads_key ? key + byte : 0), reads_key);
      copy_async(
          target + TILE::kKeys * TILE::kRowBytes + place,
          values_ + (reads_value ? value + byte : 0),
          reads_value);
    }
  }

  __device__ uint32_t loaded(int stage) const { return loaded_[stage]; }

 private:
  const DecodeProblem& problem_;
  int lowest_, highest_;
  const char *keys_, *values_, *table_;
  uint32_t stages_;
  uint32_t* loaded_;
};

// Eight 16-bit elements of the query, whatever its address is a multiple of.
__device__ inline void load_eight(const char* source, bool is_aligned, uint32_t (&pairs)[4]) {
  if (is_aligned) {
    const uint4 loaded = *reinterpret_cast<const uint4*>(source);
    pairs[0] = loaded.x, pairs[1] = loaded.y, pairs[2] = loaded.z, pairs[3] = loaded.w;
    return;
  }
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint16_t* const elements = reinterpret_cast<const uint16_t*>(source) + 2 * pair;
    pairs[pair] = elements[0] | static_cast<uint32_t>(elements[1]) << 16;
  }
}

// Copies the query rows of an item into shared memory, as the matrix units take them, and keeps the
// factor that each row was divided by. Called by the whole CTA.
template <class TILE>
__device__ inline void stage_query(
    const DecodeProblem& problem, const Sequence& sequence, int first_head, int heads,
    char* target, float* factors) {
  using Pool = typename TILE::Pool;
  constexpr int kPacks = TILE::kDim / 64;  // of 8 elements, of each of a row's 8 threads
  const int row = threadIdx.x / 8, part = threadIdx.x % 8;
  const int token = row / problem.heads_of_tile, head = row % problem.heads_of_tile;
  const bool is_row = token < sequence.query_length && head < heads;
  const char* const source =
      problem.query + (is_row ? (sequence.start + token) * problem.query_token_stride +
                                    (first_head + head) * problem.query_head_stride
                              : 0);
  uint32_t pairs[kPacks][4];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int element = (part + 8 * i) * 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) pairs[i][pair] = 0;
    if (is_row && element < problem.key_dim) {
      load_eight(source + element * 2, problem.query_is_aligned, pairs[i]);
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      largest = max(largest, max(pairs[i][pair] & 0x7FFF, pairs[i][pair] >> 16 & 0x7FFF));
    }
  }
  if (Pool::kIsFp8 && problem.query_is_bfloat16) {
#pragma unroll
    for (int distance = 1; distance < 8; distance *= 2) {
      largest = max(largest, __shfl_xor_sync(0xFFFFFFFF, largest, distance));
    }
    // A power of two brings the largest element close to float16's largest; what then gets lost of
    // the smallest ones is below float32's rounding of the products of the largest.
    int power = 14 - (static_cast<int>(largest >> 7) - 127);
    power = largest == 0 || largest >= 0x7F80 ? 0 : min(power, 126);
    const float factor = __uint_as_float(static_cast<uint32_t>(127 + power) << 23);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        const float low = BFloat16Math::to_float(pairs[i][pair] & 0xFFFF);
        const float high = BFloat16Math::to_float(pairs[i][pair] >> 16);
        pairs[i][pair] = HalfMath::pair(low * factor, high * factor);
      }
    }
    if (part == 0) factors[row] = __uint_as_float(static_cast<uint32_t>(127 - power) << 23);
  } else if (part == 0) {
    factors[row] = 1.0f;
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int element = (part + 8 * i) * 8;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const int within = element % 16 + 2 * pair;
      const int place = element / 16 * 16 + Pool::query_place(within);
      char* const word = target + swizzled<TILE::kDim * 2>(row, place * 2);
      *reinterpret_cast<uint32_t*>(word) = pairs[i][pair];
    }
  }
}

// The 16 keys and columns of a load of four matrices: which row and byte this lane points at.
struct LanePlace {
  int key_row, key_byte;      // of keys and of the query
  int value_row, value_byte;  // of values, transposed

  __host__ __device__ explicit LanePlace(int lane) {
    const int matrix = lane / 8, row = lane % 8;
    key_row = matrix / 2 * 8 + row, key_byte = matrix % 2 * 16;
    value_row = matrix % 2 * 8 + row, value_byte = matrix / 2 * 16;
  }
};

template <class TILE>
__device__ inline void load_query_step(
    uint32_t (&fragment)[4], uint32_t query, const LanePlace& lane, int step) {
  // Rows 0-7 and 8-15 alternate faster than elements in a fragment of the left matrix.
  const uint32_t place =
      swizzled<TILE::kDim * 2>(lane.value_row, step * 32 + lane.value_byte);
  load_matrices(fragment, query + place);
}

// scores = query . keys of a slice.
template <class TILE, int KEPT>
__device__ inline void multiply_keys(
    float (&scores)[TILE::kKeys / 8][4], const uint32_t (&kept)[KEPT][4], uint32_t query,
    uint32_t keys, const LanePlace& lane) {
  using Pool = typename TILE::Pool;
  constexpr int kSteps = TILE::kDim / 16, kOfLoad = Pool::kStepsOfLoad;
#pragma unroll
  for (int tile = 0; tile < TILE::kKeys / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[tile][i] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < kSteps; step += kOfLoad) {
    uint32_t fragments[kOfLoad][4];
#pragma unroll
    for (int i = 0; i < kOfLoad; ++i) {
      if constexpr (KEPT == kSteps) {
#pragma unroll
        for (int j = 0; j < 4; ++j) fragments[i][j] = kept[step + i][j];
      } else {
        load_query_step<TILE>(fragments[i], query, lane, step + i);
      }
    }
#pragma unroll
    for (int pair = 0; pair < TILE::kKeys / 16; ++pair) {
      uint32_t loaded[4];
      const uint32_t place = swizzled<TILE::kRowBytes>(
          pair * 16 + lane.key_row, step / kOfLoad * 32 + lane.key_byte);
      load_matrices(loaded, keys + place);
      Pool::multiply_keys(scores[2 * pair], scores[2 * pair + 1], fragments, loaded);
    }
  }
}

// Zeros in place of NaN and infinities in a pair; whether there were any.
template <class MATH>
__device__ inline bool drop_nonfinite(uint32_t& pair) {
  const uint32_t exponents = pair & MATH::kExponent;
  const bool low = (exponents & 0xFFFF) == (MATH::kExponent & 0xFFFF);
  const bool high = exponents >> 16 == MATH::kExponent >> 16;
  pair &= (low ? 0u : 0x0000FFFFu) | (high ? 0u : 0xFFFF0000u);
  return low || high;
}

// acc += weights . values of a slice. Where rows see different keys, values that are not finite are
// left out, and it is told whether there were any: a weight of 0 would not hide them.
template <class TILE>
__device__ inline bool multiply_values(
    float (&acc)[TILE::kDim / 8][4], const float (&weights)[TILE::kKeys / 8][4], uint32_t values,
    const LanePlace& lane, bool is_partial) {
  using Pool = typename TILE::Pool;
  using Math = typename Pool::Math;
  constexpr int kOfLoad = Pool::kTilesOfLoad;
  bool dropped = false;
#pragma unroll
  for (int step = 0; step < TILE::kKeys / 16; ++step) {
    const float(&first)[4] = weights[2 * step];
    const float(&second)[4] = weights[2 * step + 1];
    const uint32_t fragment[4] = {
        Math::pair(first[0], first[1]), Math::pair(first[2], first[3]),
        Math::pair(second[0], second[1]), Math::pair(second[2], second[3])};
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 8; tile += kOfLoad) {
      uint32_t loaded[4], low[kOfLoad], high[kOfLoad];
      const uint32_t place = swizzled<TILE::kRowBytes>(
          step * 16 + lane.value_row, tile / kOfLoad * 32 + lane.value_byte);
      load_transposed(loaded, values + place);
      Pool::value_tiles(loaded, low, high);
      if (is_partial) {
#pragma unroll
        for (int i = 0; i < kOfLoad; ++i) {
          dropped |= drop_nonfinite<Math>(low[i]);
          dropped |= drop_nonfinite<Math>(high[i]);
        }
      }
#pragma unroll
      for (int i = 0; i < kOfLoad; ++i) Math::multiply(acc[tile + i], fragment, low[i], high[i]);
    }
  }
  return dropped;
}

// Adds the NaN and infinite values of a slice to the rows that see them only. Any weight leaves an
// infinity what it is, so it needs none.
template <class TILE>
__device__ inline void add_nonfinite_values(
    float (&acc)[TILE::kDim / 8][4], const char* values, uint32_t seen_by_first,
    uint32_t seen_by_second) {
  const int t = threadIdx.x % 4;
  for (int key = 0; key < TILE::kKeys; ++key) {
    const bool first = seen_by_first >> key & 1, second = seen_by_second >> key & 1;
#pragma unroll
    for (int tile = 0; tile < TILE::kDim / 8; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int byte = TILE::Pool::column(tile, t, e) * TILE::Pool::kElementBytes;
        // Elements of a 16-byte piece stay together wherever it lies.
        const char* const piece = values + swizzled<TILE::kRowBytes>(key, byte / 16 * 16);
        const float value =
            TILE::Pool::element(piece, byte % 16 / TILE::Pool::kElementBytes);
        if (!isfinite(value)) {
          if (first) acc[tile][e] += value;
          if (second) acc[tile][2 + e] += value;
        }
      }
    }
  }
}

}  // namespace torch_pagedkv
