// Which query rows a CTA takes, which keys they see, and the shared memory through which its warps
// hand each other work.

#pragma once

#include "hopper_copies.cuh"
#include "hopper_products.cuh"
#include "key_range.cuh"
#include "prefill_problem.h"

namespace torch_pagedkv {

// How a CTA is cut: GROUPS warpgroups of 64 query rows each, and one that brings them what they need.
template <class MATH, int DIM, int KEYS, int GROUPS, int KEY_STAGES, int VALUE_STAGES>
struct PrefillShape {
  using Math = MATH;
  static constexpr int kDim = DIM, kKeys = KEYS, kGroups = GROUPS;
  static constexpr int kKeyStages = KEY_STAGES, kValueStages = VALUE_STAGES;
  static constexpr int kRows = 64 * GROUPS;
  static constexpr int kThreads = 128 * (GROUPS + 1);
  static constexpr int kPanels = DIM / kPanelElements;
  // Keys and values lie in groups of 8 rows, panel after panel.
  static constexpr int kGroupBytes = kPanels * kPieceBytes;
  static constexpr int kStageBytes = KEYS / 8 * kGroupBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  static constexpr int kSharedBytes = (KEY_STAGES + VALUE_STAGES) * kStageBytes + kQueryBytes + 1024;
  static_assert(kSharedBytes <= 226 * 1024);
  // A multiprocessor's 64 Ki registers, in the numbers that can be asked for.
  static constexpr int kAttendRegisters = GROUPS == 2 ? 232 : 160;
  static constexpr int kLoadRegisters = GROUPS == 2 ? 40 : 32;
};

// A tile of query rows, (token, head) pairs of one sequence and one KV head, with its tiles of keys.
struct PrefillWork {
  int sequence, start, query_length, length;
  int first;                             // token of the sequence
  int kv_head, first_head, heads;
  int lowest, highest;                   // keys that any row sees
  int seen_by_all_from, seen_by_all_to;  // keys that every row sees
  int first_tile, tiles;                 // tiles -1: nothing left to do

  // Whether some row does not see some key of a tile.
  template <int KEYS>
  __device__ bool is_edge(int tile) const {
    return tile * KEYS < seen_by_all_from || (tile + 1) * KEYS > seen_by_all_to;
  }
};

// Query tiles of a sequence; none where decode attention takes it.
__device__ inline int tiles_of_sequence(
    const DecodeProblem& problem, const PrefillGrid& grid, int start, int stop) {
  if (stop - start <= problem.most_tokens) return 0;
  return (stop - start + grid.tokens_of_tile - 1) / grid.tokens_of_tile;
}

// Finds the rows of items, whose numbers must grow from call to call: the tiles of all sequences, with
// the tiles of all heads of each side by side. Late tiles of a causal sequence see the most keys: they
// come first. Called by a whole warp.
template <int KEYS>
class WorkFinder {
 public:
  __device__ WorkFinder(const DecodeProblem& problem, const PrefillGrid& grid)
      : problem_(problem), grid_(grid) {}

  // False: there are no more.
  __device__ bool find(int64_t item, PrefillWork& work) {
    const int items = problem_.items_of_sequence();
    const int64_t tile = quotient(item, items);
    const int lane = threadIdx.x % 32;
    while (first_ < problem_.num_sequences) {
      const int index = problem_.num_sequences - 1 - first_ - lane;
      int own = 0, start = 0, stop = 0;
      if (index >= 0) {
        start = problem_.starts.clamped(index, 0, problem_.num_tokens);
        stop = problem_.starts.clamped(index + 1, start, problem_.num_tokens);
        own = tiles_of_sequence(problem_, grid_, start, stop);
      }
      int up_to = own;
#pragma unroll
      for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, up_to, distance);
        if (lane >= distance) up_to += other;
      }
      const uint32_t later = __ballot_sync(0xFFFFFFFF, before_ + up_to > tile);
      if (later != 0) {
        const int found = __ffs(static_cast<int>(later)) - 1;
        work.sequence = __shfl_sync(0xFFFFFFFF, index, found);
        work.start = __shfl_sync(0xFFFFFFFF, start, found);
        work.query_length = __shfl_sync(0xFFFFFFFF, stop, found) - work.start;
        const int last = __shfl_sync(0xFFFFFFFF, up_to, found) - 1;
        work.first = static_cast<int>(before_ + last - tile) * grid_.tokens_of_tile;
        describe(work, static_cast<int>(item - tile * items));
        return true;
      }
      before_ += __shfl_sync(0xFFFFFFFF, up_to, 31);
      first_ += 32;
    }
    return false;
  }

 private:
  // Heads and keys.
  __device__ void describe(PrefillWork& work, int of_sequence) const {
    work.kv_head = of_sequence / problem_.head_tiles;
    const int first_of_group = of_sequence % problem_.head_tiles * problem_.heads_of_tile;
    work.first_head = work.kv_head * problem_.group + first_of_group;
    work.heads = min(problem_.heads_of_tile, problem_.group - first_of_group);
    work.length = problem_.lengths.clamped(work.sequence, 0, problem_.max_positions);
    const int offset = work.length - work.query_length;
    const int last = min(work.first + grid_.tokens_of_tile, work.query_length) - 1;
    const KeyRange of_first = keys_seen(problem_, work.first + offset, work.length);
    const KeyRange of_last = keys_seen(problem_, last + offset, work.length);
    work.lowest = of_first.lower, work.highest = of_last.upper;
    work.seen_by_all_from = of_last.lower, work.seen_by_all_to = of_first.upper;
    work.first_tile = work.lowest / KEYS;
    const int stop_tile = (work.highest + KEYS - 1) / KEYS;
    work.tiles = work.highest > work.lowest ? stop_tile - work.first_tile : 0;
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  int first_ = 0;       // sequences that were passed, the last ones first
  int64_t before_ = 0;  // their tiles
};

// Work is found ahead, so that no warp waits for it: when the copies of an item's last keys begin, not before,
// since others may come to an end earlier.
inline constexpr int kWorkSlots = 3;
inline constexpr int kTilesAhead = 4;

// What warps tell each other.
template <class SHAPE>
struct PrefillControl {
  Barrier keys_full[SHAPE::kKeyStages], keys_empty[SHAPE::kKeyStages];
  Barrier values_full[SHAPE::kValueStages], values_empty[SHAPE::kValueStages];
  Barrier values_raw[SHAPE::kValueStages];  // values of an edge, before they were cleaned
  Barrier query_full, query_empty;
  Barrier work_wanted;  // once for each item
  Barrier work_full[kWorkSlots], work_empty[kWorkSlots];
  PrefillWork work[kWorkSlots];
  uint32_t missing[SHAPE::kKeyStages][SHAPE::kKeys / 32];  // keys whose block is not in the pool
  bool is_missing[SHAPE::kKeyStages];                      // whether there are any
  bool was_cleaned[SHAPE::kValueStages];                   // whether values were not finite
};

// Counts stages or slots: which one is next, and the parity of its phase.
template <int COUNT>
struct Ring {
  int index = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++index == COUNT) index = 0, parity ^= 1;
  }
};

}  // namespace torch_pagedkv
