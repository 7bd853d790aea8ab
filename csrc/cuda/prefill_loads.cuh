// The warpgroup that brings what the others attend with: one warp copies keys through the block table,
// one copies values, two copy query rows and clean values at the edges of what is seen; one of these
// finds the next work while the others attend to this.

#pragma once

#include "decode_fragments.cuh"
#include "prefill_schedule.cuh"

namespace torch_pagedkv {

inline constexpr int kHelperThreads = 64;
inline constexpr int kHelperBarrier = 15;

// Copies tiles of keys, or of values. Called by a whole warp.
template <class SHAPE, bool IS_KEYS>
class TileCopier {
 public:
  __device__ TileCopier(
      const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
      PrefillControl<SHAPE>& control, uint32_t stages)
      : problem_(problem),
        grid_(grid),
        map_(map),
        control_(control),
        stages_(stages),
        issues_(elect_one()) {}

  __device__ void copy_all(const PrefillWork& work) {
    look_up(work, work.first_tile);
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      const int stage = ring_.index;
      Barrier& is_empty = IS_KEYS ? control_.keys_empty[stage] : control_.values_empty[stage];
      Barrier& is_full = IS_KEYS ? control_.keys_full[stage]
                         : work.is_edge<SHAPE::kKeys>(tile) ? control_.values_raw[stage]
                                                            : control_.values_full[stage];
      is_empty.wait(ring_.parity ^ 1);
      if (IS_KEYS) mark_missing(stage);
      if (issues_) is_full.arrive_and_expect(SHAPE::kStageBytes);
      issue(stages_ + stage * SHAPE::kStageBytes, is_full, work.kv_head);
      look_up(work, tile + 1);
      ring_.advance();
    }
  }

 private:
  static constexpr int kOfLane = SHAPE::kKeys / 32;  // granules, at most

  // Finds the blocks of a tile's granules. Entries of positions that no row sees are not read, and
  // what is not to be loaded gets a block that the copy engine makes zeros of.
  __device__ void look_up(const PrefillWork& work, int tile) {
    const char* const table = problem_.table + work.sequence * problem_.table_stride;
    missing_ = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int within = (threadIdx.x % 32 + 32 * i) * grid_.granule;
      const int position = tile * SHAPE::kKeys + within;
      blocks_[i] = problem_.num_blocks, offsets_[i] = 0;
      if (within >= SHAPE::kKeys || position + grid_.granule <= work.lowest ||
          position >= work.highest) {
        continue;
      }
      const int column = problem_.block_shift >= 0
                             ? position >> problem_.block_shift
                             : static_cast<uint32_t>(position) /
                                   static_cast<uint32_t>(problem_.block_size);
      const int64_t block = problem_.table_is_wide
                                ? reinterpret_cast<const int64_t*>(table)[column]
                                : reinterpret_cast<const int32_t*>(table)[column];
      offsets_[i] = position - column * problem_.block_size;
      if (block >= 0 && block < problem_.num_blocks) {
        blocks_[i] = static_cast<int>(block);
      } else {
        missing_ |= 1u << i;
      }
    }
  }

  __device__ void mark_missing(int stage) {
    const bool any = __any_sync(0xFFFFFFFF, missing_ != 0);
    const int lane = threadIdx.x % 32;
    if (lane == 0) control_.is_missing[stage] = any;
    if (any) {
      if (lane < SHAPE::kKeys / 32) control_.missing[stage][lane] = 0;
      __syncwarp();
      for (int i = 0; i < kOfLane; ++i) {
        if ((missing_ >> i & 1) == 0) continue;
        const int within = (lane + 32 * i) * grid_.granule;
        for (int key = within; key < within + grid_.granule; ++key) {
          atomicOr(&control_.missing[stage][key / 32], 1u << key % 32);
        }
      }
    }
    __syncwarp();
  }

  __device__ void issue(uint32_t target, Barrier& barrier, int kv_head) {
    const int granules = SHAPE::kKeys / grid_.granule;
    const uint32_t granule_bytes = grid_.granule * kPanelRowBytes;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (32 * i >= granules) break;
      const int count = min(32, granules - 32 * i);
#pragma unroll 4
      for (int lane = 0; lane < count; ++lane) {
        const int block = __shfl_sync(0xFFFFFFFF, blocks_[i], lane);
        const int offset = __shfl_sync(0xFFFFFFFF, offsets_[i], lane);
        if (issues_) {
#pragma unroll
          for (int panel = 0; panel < SHAPE::kPanels; ++panel) {
            copy_rows(
                target + panel * SHAPE::kPanelBytes, map_, barrier, panel * kPanelElements, offset,
                kv_head, block);
          }
        }
        target += granule_bytes;
      }
    }
    __syncwarp();
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  const CUtensorMap& map_;
  PrefillControl<SHAPE>& control_;
  uint32_t stages_;
  bool issues_;  // this lane
  Ring<SHAPE::kStages> ring_;
  int blocks_[kOfLane], offsets_[kOfLane];
  uint32_t missing_ = 0;
};

// Copies a tile's query rows, zeros where it has none. Called by the helpers, of number `thread`.
template <class SHAPE>
__device__ inline void copy_query(
    const DecodeProblem& problem, const PrefillGrid& grid, const PrefillWork& work, char* target,
    int thread) {
  constexpr int kPieces = SHAPE::kDim / 8;
  static_assert(kHelperThreads % kPieces == 0);
  const int piece = thread % kPieces;
  char* const panel = target + piece / 8 * SHAPE::kQueryPanelBytes;
  const int heads = problem.heads_of_tile;
  int token = thread / kPieces / heads, head = thread / kPieces % heads;
  for (int row = thread / kPieces; row < SHAPE::kRows; row += kHelperThreads / kPieces) {
    const bool is_row = token < grid.tokens_of_tile && work.first + token < work.query_length &&
                        head < work.heads;
    const int64_t of_call = work.start + work.first + token;
    const char* const source =
        problem.query + (is_row ? of_call * problem.query_token_stride +
                                      (work.first_head + head) * problem.query_head_stride + piece * 16
                                : 0);
    char* const place = panel + swizzled<kPanelRowBytes>(row, piece % 8 * 16);
    if (grid.query_is_whole) {
      copy_async(shared_address(place), source, is_row);
    } else {
      uint32_t pairs[4] = {0, 0, 0, 0};
      if (is_row) load_eight(source, false, pairs);
      *reinterpret_cast<uint4*>(place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    for (head += kHelperThreads / kPieces; head >= heads; head -= heads) ++token;
  }
  commit_copies();
  wait_copies<0>();
  publish_to_products();
}

// Puts zeros in place of values that are not finite, which a weight of 0 would not hide; returns
// whether this thread found any.
template <class SHAPE>
__device__ inline bool clean_values(char* stage, int thread) {
  constexpr uint32_t kExponent = SHAPE::Math::kExponent;
  constexpr uint32_t kCarry = kExponent ^ 0x7FFF7FFF;  // fills the mantissa's place
  bool found = false;
#pragma unroll 4
  for (int byte = thread * 16; byte < SHAPE::kStageBytes; byte += kHelperThreads * 16) {
    uint4& place = *reinterpret_cast<uint4*>(stage + byte);
    uint32_t words[4] = {place.x, place.y, place.z, place.w};
    uint32_t carried = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) carried |= (words[i] & kExponent) + kCarry + 0x00010001;
    if ((carried & 0x80008000) == 0) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) found |= drop_nonfinite<typename SHAPE::Math>(words[i]);
    place = make_uint4(words[0], words[1], words[2], words[3]);
  }
  return found;
}

// The item after those that CTAs have taken so far: whoever is ready first takes the next, so that the
// order of items, from the most keys to the fewest in a sequence, leaves little to do at the end.
__device__ inline int64_t next_item(const PrefillGrid& grid) {
  if (grid.taken == nullptr) return grid.items;
  unsigned taken = 0;
  if (threadIdx.x % 32 == 0) taken = atomicAdd(grid.taken, 1u);
  return static_cast<int64_t>(gridDim.x) + __shfl_sync(0xFFFFFFFF, taken, 0);
}

// Finds the first work from an item on, and tells all warps. Called by a whole warp.
template <class SHAPE>
__device__ inline void publish_work(
    const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control,
    Ring<kWorkSlots>& slot, int64_t item) {
  PrefillWork work{};
  while (item < grid.items && !find_work<SHAPE::kKeys>(problem, grid, item, work)) {
    item = next_item(grid);
  }
  if (item >= grid.items) work.tiles = -1;
  control.work_empty[slot.index].wait(slot.parity ^ 1);
  if (threadIdx.x % 32 == 0) {
    control.work[slot.index] = work;
    control.work_full[slot.index].arrive();
  }
  __syncwarp();
  slot.advance();
}

template <class SHAPE>
__device__ inline void help(
    const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control,
    char* query, char* value_stages) {
  const int thread = static_cast<int>(threadIdx.x) - 64;
  const bool publishes = thread < 32;
  Ring<kWorkSlots> slot, next_slot;
  Ring<1> of_query;
  int stage = 0;
  uint32_t raw_parities = 0;
  if (publishes) publish_work<SHAPE>(problem, grid, control, next_slot, blockIdx.x);
  while (true) {
    control.work_full[slot.index].wait(slot.parity);
    const PrefillWork& work = control.work[slot.index];
    if (work.tiles < 0) return;
    control.query_empty.wait(of_query.parity ^ 1);
    copy_query<SHAPE>(problem, grid, work, query, thread);
    control.query_full.arrive();
    of_query.advance();
    if (publishes) publish_work<SHAPE>(problem, grid, control, next_slot, next_item(grid));
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      if (work.is_edge<SHAPE::kKeys>(tile)) {
        control.values_raw[stage].wait(raw_parities >> stage & 1);
        raw_parities ^= 1u << stage;
        if (thread == 0) control.was_cleaned[stage] = false;
        meet(kHelperBarrier, kHelperThreads);
        if (clean_values<SHAPE>(value_stages + stage * SHAPE::kStageBytes, thread)) {
          control.was_cleaned[stage] = true;
        }
        publish_to_products();
        meet(kHelperBarrier, kHelperThreads);
        if (thread == 0) control.values_full[stage].arrive();
      }
      stage = stage == SHAPE::kStages - 1 ? 0 : stage + 1;
    }
    __syncwarp();
    if (thread % 32 == 0) control.work_empty[slot.index].arrive();
    slot.advance();
  }
}

// Copies the keys, or the values, of all work.
template <class SHAPE, bool IS_KEYS>
__device__ inline void copy_tiles(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
    PrefillControl<SHAPE>& control, uint32_t stages) {
  TileCopier<SHAPE, IS_KEYS> copier(problem, grid, map, control, stages);
  Ring<kWorkSlots> slot;
  while (true) {
    control.work_full[slot.index].wait(slot.parity);
    const PrefillWork& work = control.work[slot.index];
    if (work.tiles < 0) return;
    copier.copy_all(work);
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.work_empty[slot.index].arrive();
    slot.advance();
  }
}

}  // namespace torch_pagedkv
