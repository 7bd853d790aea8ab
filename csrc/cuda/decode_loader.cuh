// How a warp gets its tiles of keys and values: copies into shared memory through the block table.

#pragma once

#include "decode_schedule.cuh"
#include "decode_tile.cuh"

namespace torch_pagedkv {

// A segment as a warp looks it up, for the time when it reads it.
struct Work {
  Sequence sequence;
  Segment segment;
};

// A warp's copies of keys and values into its stages of shared memory. They run ahead of their use,
// over all its segments.
template <class TILE>
class WarpLoader {
 public:
  static constexpr int kPacks = TILE::kRowBytes / 16;  // of a row, 16 bytes each
  static constexpr int kPasses = TILE::kKeys * kPacks / 32;
  static constexpr uint32_t kAllKeys = TILE::kKeys == 32 ? 0xFFFFFFFF : (1u << TILE::kKeys) - 1;
  static constexpr int kWorks = TILE::kStages + 1;  // of each tile on its way, and the one read

  // What other parts of the warp read.
  struct Shared {
    Work works[kWorks];
    uint32_t loaded[TILE::kStages];  // which keys of each stage were loaded
  };

  __device__ WarpLoader(
      const DecodeProblem& problem, const Walk<TILE::kKeys>& walk, char* stages, Shared& shared)
      : problem_(problem),
        walk_(walk),
        segment_{},
        index_(0),
        works_(0),
        entry_{-1, -1, 0},
        stage_(TILE::kStages - 1),
        byte_(static_cast<int>(threadIdx.x) % kPacks * 16),
        stages_(stages),
        shared_(shared) {}

  // Starts the copies of the tile that was looked up, and looks up the next one.
  __device__ void advance() {
    if (entry_.kv_head >= 0) issue();
    commit_copies();
    stage_ = stage_ == TILE::kStages - 1 ? 0 : stage_ + 1;
    look_up();
  }

  // How many segments were looked up.
  __device__ int works() const { return works_; }

 private:
  // The place of this lane's position of a tile.
  struct Entry {
    int kv_head;        // -1: there is no tile
    int block, offset;  // block -1: the position is not loaded
  };

  // Reads the table's entries of a tile. Those of positions that no row sees are not read.
  __device__ void look_up() {
    entry_ = {-1, -1, 0};
    if (index_ == segment_.count) {
      if (walk_.is_done()) return;
      segment_ = walk_.next(problem_);
      index_ = 0;
      if (threadIdx.x % 32 == 0) shared_.works[works_ % kWorks] = {walk_.sequence, segment_};
      ++works_;
    }
    const int tile = walk_.sequence.first_tile + segment_.first + index_++;
    const int position = tile * TILE::kKeys + static_cast<int>(threadIdx.x) % TILE::kKeys;
    entry_.kv_head = segment_.item / problem_.head_tiles;
    if (position < walk_.sequence.lowest || position >= walk_.sequence.highest) return;
    const int column = problem_.block_shift >= 0
                           ? position >> problem_.block_shift
                           : static_cast<int>(static_cast<uint32_t>(position) /
                                              static_cast<uint32_t>(problem_.block_size));
    const char* const row = problem_.table + segment_.sequence * problem_.table_stride;
    const int64_t block = problem_.table_is_wide ? reinterpret_cast<const int64_t*>(row)[column]
                                                 : reinterpret_cast<const int32_t*>(row)[column];
    if (block >= 0 && block < problem_.num_blocks) entry_.block = static_cast<int>(block);
    entry_.offset = position - column * problem_.block_size;
  }

  // Rows that are not loaded become zeros.
  __device__ void issue() {
    const uint32_t loaded = __ballot_sync(0xFFFFFFFF, entry_.block >= 0) & kAllKeys;
    if (threadIdx.x % 32 == 0) shared_.loaded[stage_] = loaded;
    char* const target = stages_ + stage_ * TILE::kStageBytes;
    const bool has_one_block = problem_.tiles_have_one_block && loaded == kAllKeys;
    if (__builtin_expect(has_one_block && problem_.rows_are_aligned, true)) {
      copy_rows_of_one_block(target, entry_);
    } else if (problem_.rows_are_aligned) {
      copy_rows(target, entry_, loaded);
    } else {
      copy_elements(target, entry_, loaded);
    }
  }

  __device__ static int64_t place_of(const PoolRows& rows, const Entry& entry) {
    return static_cast<int64_t>(entry.block) * rows.block_stride +
           static_cast<int64_t>(entry.offset) * rows.offset_stride;
  }

  __device__ void copy_rows_of_one_block(char* target, Entry entry) const {
    constexpr int kRowsOfPass = 32 / kPacks;
    const int lane = threadIdx.x % 32, row = lane / kPacks;
    entry.offset += row - lane % TILE::kKeys;
    const char* key = problem_.keys.data + entry.kv_head * problem_.keys.head_stride +
                      place_of(problem_.keys, entry) + byte_;
    const char* value = problem_.values.data + entry.kv_head * problem_.values.head_stride +
                        place_of(problem_.values, entry) + byte_;
    const bool reads_key = byte_ < problem_.keys.row_bytes;
    const bool reads_value = byte_ < problem_.values.row_bytes;
    const uint32_t keys = shared_address(target), values = keys + TILE::kKeys * TILE::kRowBytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t place = swizzled<TILE::kRowBytes>(pass * kRowsOfPass + row, byte_);
      copy_async(keys + place, reads_key ? key : problem_.keys.data, reads_key);
      copy_async(values + place, reads_value ? value : problem_.values.data, reads_value);
      key += kRowsOfPass * problem_.keys.offset_stride;
      value += kRowsOfPass * problem_.values.offset_stride;
    }
  }

  // This lane's pieces of the rows of a pass, null where they are not loaded.
  struct Pieces {
    int row;
    const char *key, *value;
  };

  __device__ Pieces pieces_of(
      int pass, const Entry& entry, int64_t key_place, int64_t value_place, uint32_t loaded) const {
    const int row = (pass * 32 + static_cast<int>(threadIdx.x) % 32) / kPacks;
    const int64_t key = __shfl_sync(0xFFFFFFFF, key_place, row);
    const int64_t value = __shfl_sync(0xFFFFFFFF, value_place, row);
    const bool exists = loaded >> row & 1;
    const int64_t key_head = entry.kv_head * problem_.keys.head_stride + byte_;
    const int64_t value_head = entry.kv_head * problem_.values.head_stride + byte_;
    const bool has_key = exists && byte_ < problem_.keys.row_bytes;
    const bool has_value = exists && byte_ < problem_.values.row_bytes;
    return {
        row,
        has_key ? problem_.keys.data + key_head + key : nullptr,
        has_value ? problem_.values.data + value_head + value : nullptr};
  }

  __device__ void copy_rows(char* target, const Entry& entry, uint32_t loaded) const {
    const int64_t key_place = place_of(problem_.keys, entry);
    const int64_t value_place = place_of(problem_.values, entry);
    const uint32_t keys = shared_address(target), values = keys + TILE::kKeys * TILE::kRowBytes;
#pragma unroll 2
    for (int pass = 0; pass < kPasses; ++pass) {
      const Pieces pieces = pieces_of(pass, entry, key_place, value_place, loaded);
      const uint32_t place = swizzled<TILE::kRowBytes>(pieces.row, byte_);
      copy_async(keys + place, pieces.key ? pieces.key : problem_.keys.data, pieces.key != nullptr);
      copy_async(
          values + place, pieces.value ? pieces.value : problem_.values.data,
          pieces.value != nullptr);
    }
  }

  // Rows that lie at no multiple of 16 bytes come element by element, and are here at once.
  __device__ void copy_elements(char* target, const Entry& entry, uint32_t loaded) const {
    const int64_t key_place = place_of(problem_.keys, entry);
    const int64_t value_place = place_of(problem_.values, entry);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const Pieces pieces = pieces_of(pass, entry, key_place, value_place, loaded);
      char* const place = target + swizzled<TILE::kRowBytes>(pieces.row, byte_);
      copy_piece(place, pieces.key);
      copy_piece(place + TILE::kKeys * TILE::kRowBytes, pieces.value);
    }
  }

  __device__ static void copy_piece(char* target, const char* source) {
    using Bits = typename TILE::Pool::Bits;
    constexpr int kElements = 16 / sizeof(Bits);
    Bits elements[kElements] = {};
    if (source) {
#pragma unroll
      for (int i = 0; i < kElements; ++i) elements[i] = reinterpret_cast<const Bits*>(source)[i];
    }
    uint4 piece;
    memcpy(&piece, elements, sizeof piece);
    *reinterpret_cast<uint4*>(target) = piece;
  }

  const DecodeProblem& problem_;
  Walk<TILE::kKeys> walk_;
  Segment segment_;
  int index_;  // of the next tile of the segment
  int works_;
  Entry entry_;
  int stage_;  // where the tile of the entry goes
  int byte_;   // this lane's piece of a row
  char* stages_;
  Shared& shared_;
};

}  // namespace torch_pagedkv
