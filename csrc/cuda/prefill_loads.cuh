// The warpgroup that brings what the others attend with: one warp finds work and copies keys and
// values through the block table, three copy query rows and clean values at the edges of what is seen.

#pragma once

#include "decode_fragments.cuh"
#include "prefill_schedule.cuh"

namespace torch_pagedkv {

inline constexpr int kHelperThreads = 96;
inline constexpr int kHelperBarrier = 15;

// Copies tiles of keys and values. Called by a whole warp.
template <class SHAPE>
class TileCopier {
 public:
  __device__ TileCopier(
      const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& keys,
      const CUtensorMap& values, PrefillControl<SHAPE>& control, uint32_t key_stages,
      uint32_t value_stages)
      : problem_(problem),
        grid_(grid),
        keys_(keys),
        values_(values),
        control_(control),
        key_stages_(key_stages),
        value_stages_(value_stages) {}

  __device__ void copy_all(const PrefillWork& work) {
    look_up(work, work.first_tile);
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      const int stage = ring_.index, lane = threadIdx.x % 32;
      control_.keys_empty[stage].wait(ring_.parity ^ 1);
      mark_missing(stage);
      if (lane == 0) control_.keys_full[stage].arrive_and_expect(SHAPE::kStageBytes);
      __syncwarp();
      issue(key_stages_ + stage * SHAPE::kStageBytes, keys_, control_.keys_full[stage], work.kv_head);
      control_.values_empty[stage].wait(ring_.parity ^ 1);
      Barrier& target = work.is_edge<SHAPE::kKeys>(tile) ? control_.values_raw[stage]
                                                         : control_.values_full[stage];
      if (lane == 0) target.arrive_and_expect(SHAPE::kStageBytes);
      __syncwarp();
      issue(value_stages_ + stage * SHAPE::kStageBytes, values_, target, work.kv_head);
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

  __device__ void issue(uint32_t target, const CUtensorMap& map, Barrier& barrier, int kv_head) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int within = (threadIdx.x % 32 + 32 * i) * grid_.granule;
      if (within >= SHAPE::kKeys) break;
#pragma unroll
      for (int panel = 0; panel < SHAPE::kPanels; ++panel) {
        copy_rows(
            target + panel * SHAPE::kPanelBytes + within * kPanelRowBytes, map, barrier,
            panel * kPanelElements, offsets_[i], kv_head, blocks_[i]);
      }
    }
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  const CUtensorMap &keys_, &values_;
  PrefillControl<SHAPE>& control_;
  uint32_t key_stages_, value_stages_;
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
  for (int row = thread / kPieces; row < SHAPE::kRows; row += kHelperThreads / kPieces) {
    const int token = row / problem.heads_of_tile, head = row % problem.heads_of_tile;
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

template <class SHAPE>
__device__ inline void help(
    const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control,
    char* query, char* value_stages) {
  const int thread = static_cast<int>(threadIdx.x) - 32;
  Ring<2> slot;
  Ring<1> of_query;
  int stage = 0;
  uint32_t raw_parities = 0;
  while (true) {
    control.work_full[slot.index].wait(slot.parity);
    const PrefillWork work = control.work[slot.index];
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.work_empty[slot.index].arrive();
    slot.advance();
    if (work.tiles < 0) return;
    control.query_empty.wait(of_query.parity ^ 1);
    copy_query<SHAPE>(problem, grid, work, query, thread);
    control.query_full.arrive();
    of_query.advance();
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
  }
}

template <class SHAPE>
__device__ inline void copy_tiles(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& keys,
    const CUtensorMap& values, PrefillControl<SHAPE>& control, uint32_t key_stages,
    uint32_t value_stages) {
  TileCopier<SHAPE> copier(problem, grid, keys, values, control, key_stages, value_stages);
  Ring<2> slot;
  // Items come from the most keys to the fewest: CTAs that had the larger share of one round get the
  // smaller share of the next.
  int64_t round = 0;
  while (true) {
    PrefillWork work{};
    bool is_found = false;
    for (; round * gridDim.x < grid.items && !is_found; ++round) {
      const unsigned place = round % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
      const int64_t item = round * gridDim.x + place;
      is_found = item < grid.items && find_work<SHAPE::kKeys>(problem, grid, item, work);
    }
    if (!is_found) work.tiles = -1;
    control.work_empty[slot.index].wait(slot.parity ^ 1);
    if (threadIdx.x == 0) {
      control.work[slot.index] = work;
      control.work_full[slot.index].arrive();
    }
    __syncwarp();
    slot.advance();
    if (!is_found) return;
    copier.copy_all(work);
  }
}

}  // namespace torch_pagedkv
