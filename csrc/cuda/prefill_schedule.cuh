// Which query rows a CTA takes, which keys they see, and the shared memory through which its warps
// hand each other work.

#pragma once

#include "decode_schedule.cuh"
#include "hopper_copies.cuh"
#include "hopper_products.cuh"
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
  static constexpr int kPanelBytes = KEYS * kPanelRowBytes;  // of keys or values
  static constexpr int kStageBytes = kPanels * kPanelBytes;
  static constexpr int kQueryPanelBytes = kRows * kPanelRowBytes;
  static constexpr int kQueryBytes = kPanels * kQueryPanelBytes;
  // Rows of the output wait to be written where the query lies, or beside it where there is room: the
  // next query can then come sooner.
  static constexpr bool kOutIsQuery = DIM > 128;
  static constexpr int kSharedBytes =
      (KEY_STAGES + VALUE_STAGES) * kStageBytes + (kOutIsQuery ? 1 : 2) * kQueryBytes + 1024;
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

// Finds an item's rows; false where it has none, or those of a sequence that decode attention takes.
// Sequence i's tiles begin at starts[i] / tokens_of_tile + i, which leaves every sequence at least the
// tiles it needs and takes no sum over lengths. Late tiles of a causal sequence see the most keys:
// they come first. Called by a whole warp.
template <int KEYS>
__device__ inline bool find_work(
    const DecodeProblem& problem, const PrefillGrid& grid, int64_t item, PrefillWork& work) {
  const int items = problem.items_of_sequence(), tokens = grid.tokens_of_tile;
  const int tile = static_cast<int>(grid.items / items - 1 - item / items);
  const int of_sequence = static_cast<int>(item % items);
  int begun = 0;
  for (int first = 0; first < problem.num_sequences; first += 32) {
    const int index = first + threadIdx.x % 32;
    const bool has_begun =
        index < problem.num_sequences && problem.starts[index] / tokens + index <= tile;
    begun += __popc(__ballot_sync(0xFFFFFFFF, has_begun));
  }
  if (begun == 0) return false;
  work.sequence = begun - 1;
  const int64_t all = problem.num_tokens;
  const int64_t start = min(max(problem.starts[work.sequence], int64_t{0}), all);
  const int64_t stop = min(max(problem.starts[work.sequence + 1], start), all);
  const int64_t first = (tile - start / tokens - work.sequence) * tokens;
  if ((stop - start) * problem.heads_of_tile <= kRows) return false;
  if (first < 0 || first >= stop - start) return false;
  work.start = static_cast<int>(start);
  work.query_length = static_cast<int>(stop - start);
  work.first = static_cast<int>(first);
  work.kv_head = of_sequence / problem.head_tiles;
  const int first_of_group = of_sequence % problem.head_tiles * problem.heads_of_tile;
  work.first_head = work.kv_head * problem.group + first_of_group;
  work.heads = min(problem.heads_of_tile, problem.group - first_of_group);
  work.length = static_cast<int>(
      min(max(problem.lengths[work.sequence], int64_t{0}), int64_t{problem.max_positions}));
  const int offset = work.length - work.query_length;
  const int last = min(work.first + tokens, work.query_length) - 1;
  const KeyRange of_first = keys_seen(problem, work.first + offset, work.length);
  const KeyRange of_last = keys_seen(problem, last + offset, work.length);
  work.lowest = of_first.lower, work.highest = of_last.upper;
  work.seen_by_all_from = of_last.lower, work.seen_by_all_to = of_first.upper;
  work.first_tile = work.lowest / KEYS;
  work.tiles = work.highest > work.lowest ? (work.highest + KEYS - 1) / KEYS - work.first_tile : 0;
  return true;
}

// Work is found so much ahead that no warp waits for it.
inline constexpr int kWorkSlots = 3;

// What warps tell each other.
template <class SHAPE>
struct PrefillControl {
  Barrier keys_full[SHAPE::kKeyStages], keys_empty[SHAPE::kKeyStages];
  Barrier values_full[SHAPE::kValueStages], values_empty[SHAPE::kValueStages];
  Barrier values_raw[SHAPE::kValueStages];  // values of an edge, before they were cleaned
  Barrier query_full, query_empty;
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
