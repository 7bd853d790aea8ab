// How a warp gets its tiles of keys and values: copies into shared memory through the block table.

#pragma once

#include "decode_output.cuh"
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

  // What other parts of the warp read, and its way, which its first lane goes.
  struct Shared {
    Walk<TILE::kKeys> walk;
    Work works[kWorks];
    uint32_t loaded[TILE::kStages];  // which keys of each stage were loaded
  };

  __device__ WarpLoader(
      const DecodeProblem& problem, const Walk<TILE::kKeys>& walk, char* stages, Shared& shared)
      : problem_(problem),
        has_more_(!walk.is_done()),
        has_tile_(false),
        works_(0),
        left_(0),
        position_(0),
        lowest_(0),
        highest_(0),
        row_(nullptr),
        key_(nullptr),
        value_(nullptr),
        entry_{-1, 0, 0},
        stage_(TILE::kStages - 1),
        whole_(0),
        byte_(static_cast<int>(threadIdx.x) % kPacks * 16),
        place_(kept(
            shared_address(stages) +
            swizzled<TILE::kRowBytes>(static_cast<int>(threadIdx.x) % 32 / kPacks, byte_))),
        stages_(stages),
        shared_(shared) {
    if (threadIdx.x % 32 == 0) shared.walk = walk;
  }

  // Starts the copies of the tile that was looked up, and looks up the next one.
  __device__ void advance() {
    whole_ <<= 1;
    if (has_tile_) issue();
    commit_copies();
    stage_ = stage_ == TILE::kStages - 1 ? 0 : stage_ + 1;
    look_up();
  }

  // How many segments were looked up.
  __device__ int works() const { return works_; }
  // Whether all keys of the tile that is read now were loaded.
  __device__ bool is_whole() const { return whole_ >> (TILE::kStages - 1) & 1; }

 private:
  // The place of this lane's position of a tile. What the table says is not looked at before it is used:
  // it need not be here yet.
  struct Entry {
    int32_t block, upper;  // the words of the table's entry; all of a valid one's upper bits are 0
    int offset;

    __device__ bool is_in(int num_blocks) const {
      return upper == 0 && static_cast<uint32_t>(block) < static_cast<uint32_t>(num_blocks);
    }
  };

  // Reads the table's entries of a tile. Those of positions that no row sees are not read.
  __device__ void look_up() {
    if (left_ == 0) {
      has_tile_ = has_more_;
      if (!has_tile_) return;
      begin_segment();
    }
    --left_;
    const int position = position_;
    position_ += TILE::kKeys;
    entry_ = {-1, 0, 0};
    if (position < lowest_ || position >= highest_) return;
    const int column = problem_.block_shift >= 0
                           ? position >> problem_.block_shift
                           : static_cast<int>(static_cast<uint32_t>(position) /
                                              static_cast<uint32_t>(problem_.block_size));
    const int64_t word = static_cast<int64_t>(column) * (problem_.table_is_wide ? 2 : 1);
    entry_.block = row_[word];
    if (problem_.table_is_wide) entry_.upper = row_[word + 1];
    entry_.offset = position - column * problem_.block_size;
  }

  __device__ void begin_segment() {
    Work& work = shared_.works[works_ % kWorks];
    if (threadIdx.x % 32 == 0) {
      work.segment = shared_.walk.next(problem_);
      work.sequence = shared_.walk.sequence;
    }
    __syncwarp();
    ++works_;
    has_more_ = !shared_.walk.is_done();
    const Segment& segment = work.segment;
    left_ = segment.count;
    const int tile = work.sequence.first_tile + segment.first;
    position_ = tile * TILE::kKeys + static_cast<int>(threadIdx.x) % TILE::kKeys;
    lowest_ = work.sequence.lowest, highest_ = work.sequence.highest;
    row_ = reinterpret_cast<const int32_t*>(
        problem_.table + segment.sequence * problem_.table_stride);
    key_ = problem_.keys.data + segment.kv_head * problem_.keys.head_stride + byte_;
    value_ = problem_.values.data + segment.kv_head * problem_.values.head_stride + byte_;
    fetch_query(work);
  }

  // Brings the segment's query rows nearer, two lanes for each.
  __device__ void fetch_query(const Work& work) const {
    const int lane = lane_here();
    const ItemHeads heads(problem_, work.segment.item, work.segment.kv_head);
    const RowPlace place(problem_, work.sequence, heads.first, heads.count, lane / 2);
    if (!place.exists) return;
    const char* const row = problem_.query + place.token * problem_.query_token_stride +
                            place.head * problem_.query_head_stride;
    for (int byte = lane % 2 * 128; byte < problem_.key_dim * 2; byte += 256) {
      asm volatile("prefetch.global.L2 [%0];" :: "l"(row + byte));
    }
  }

  // Rows that are not loaded become zeros.
  __device__ void issue() {
    const uint32_t loaded =
        __ballot_sync(0xFFFFFFFF, entry_.is_in(problem_.num_blocks)) & kAllKeys;
    if (threadIdx.x % 32 == 0) shared_.loaded[stage_] = loaded;
    whole_ |= loaded == kAllKeys ? 1 : 0;
    if (__builtin_expect(problem_.tiles_have_one_block && loaded == kAllKeys, true)) {
      copy_rows_of_one_block(place_ + stage_ * TILE::kStageBytes);
      return;
    }
    char* const target = stages_ + stage_ * TILE::kStageBytes;
    if (problem_.rows_are_aligned) {
      copy_rows(target, loaded);
    } else {
      copy_elements(target, loaded);
    }
  }

  __device__ static int64_t place_of(const PoolRows& rows, int block, int offset) {
    return block * rows.block_stride + offset * rows.offset_stride;
  }

  // To this lane's place in the first row. All its rows are a few multiplications away from their block.
  __device__ void copy_rows_of_one_block(uint32_t target) const {
    constexpr int kRowsOfPass = 32 / kPacks;
    const int lane = threadIdx.x % 32;
    const uint32_t offset = entry_.offset + lane / kPacks - lane % TILE::kKeys;
    const char* const key = key_ + near_place_of(problem_.keys, entry_.block, offset);
    const char* const value = value_ + near_place_of(problem_.values, entry_.block, offset);
    const bool reads_key = byte_ < problem_.keys.row_bytes;
    const bool reads_value = byte_ < problem_.values.row_bytes;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32_t place = moved<TILE::kRowBytes>(target, pass * kRowsOfPass, 0);
      copy_async(place, key + near_place_of(problem_.keys, 0, pass * kRowsOfPass), reads_key);
      copy_async(
          place + TILE::kKeys * TILE::kRowBytes,
          value + near_place_of(problem_.values, 0, pass * kRowsOfPass), reads_value);
    }
  }

  // The same as place_of with strides of 32 bits.
  __device__ static uint64_t near_place_of(const PoolRows& rows, uint32_t block, uint32_t offset) {
    return static_cast<uint64_t>(block) * static_cast<uint32_t>(rows.block_stride) +
           static_cast<uint64_t>(offset) * static_cast<uint32_t>(rows.offset_stride);
  }

  // This lane's pieces of the rows of a pass, null where they are not loaded.
  struct Pieces {
    int row;
    const char *key, *value;
  };

  __device__ Pieces pieces_of(
      int pass, int64_t key_place, int64_t value_place, uint32_t loaded) const {
    const int row = (pass * 32 + static_cast<int>(threadIdx.x) % 32) / kPacks;
    const int64_t key = __shfl_sync(0xFFFFFFFF, key_place, row);
    const int64_t value = __shfl_sync(0xFFFFFFFF, value_place, row);
    const bool exists = loaded >> row & 1;
    const bool has_key = exists && byte_ < problem_.keys.row_bytes;
    const bool has_value = exists && byte_ < problem_.values.row_bytes;
    return {row, has_key ? key_ + key : nullptr, has_value ? value_ + value : nullptr};
  }

  __device__ void copy_rows(char* target, uint32_t loaded) const {
    const int64_t key_place = place_of(problem_.keys, entry_.block, entry_.offset);
    const int64_t value_place = place_of(problem_.values, entry_.block, entry_.offset);
    const uint32_t keys = shared_address(target), values = keys + TILE::kKeys * TILE::kRowBytes;
#pragma unroll 2
    for (int pass = 0; pass < kPasses; ++pass) {
      const Pieces pieces = pieces_of(pass, key_place, value_place, loaded);
      const uint32_t place = swizzled<TILE::kRowBytes>(pieces.row, byte_);
      copy_async(keys + place, pieces.key ? pieces.key : problem_.keys.data, pieces.key != nullptr);
      copy_async(
          values + place, pieces.value ? pieces.value : problem_.values.data,
          pieces.value != nullptr);
    }
  }

  // Rows that lie at no multiple of 16 bytes come element by element, and are here at once.
  __device__ void copy_elements(char* target, uint32_t loaded) const {
    const int64_t key_place = place_of(problem_.keys, entry_.block, entry_.offset);
    const int64_t value_place = place_of(problem_.values, entry_.block, entry_.offset);
#pragma unroll 1
    for (int pass = 0; pass < kPasses; ++pass) {
      const Pieces pieces = pieces_of(pass, key_place, value_place, loaded);
      char* const place = target + swizzled<TILE::kRowBytes>(pieces.row, byte_);
      copy_piece(place, pieces.key);
      copy_piece(place + TILE::kKeys * TILE::kRowBytes, pieces.value);
    }
  }

  __device__ static void copy_piece(char* target, const char* source) {
    using Bits = typename TILE::Pool::Bits;
    constexpr int kElements = 16 / sizeof(Bits);
#pragma unroll 4
    for (int i = 0; i < kElements; ++i) {
      reinterpret_cast<Bits*>(target)[i] = source ? reinterpret_cast<const Bits*>(source)[i] : Bits{0};
    }
  }

  const DecodeProblem& problem_;
  bool has_more_;  // segments to look up
  bool has_tile_;  // that the entry is of
  int works_;
  int left_;                  // tiles of the segment to look up
  int position_;              // of this lane in the next one
  int lowest_, highest_;      // that any row sees
  const int32_t* row_;        // of the table
  const char *key_, *value_;  // this lane's piece of the segment's head, in the first block
  Entry entry_;
  int stage_;       // where the tile of the entry goes
  uint32_t whole_;  // a bit for each of the last tiles: all its keys were loaded
  int byte_;        // this lane's piece of a row
  uint32_t place_;  // of this lane's first piece in the first stage
  char* stages_;
  Shared& shared_;
};

}  // namespace torch_pagedkv
