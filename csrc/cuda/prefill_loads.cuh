// The warpgroup that brings what the others attend with: one warp copies keys through the block table,
// one copies values, one cleans values at the edges of what is seen, and one copies query rows and finds
// the next work while the others attend to this.

#pragma once

#include "decode_products.cuh"
#include "grid_dependency.cuh"
#include "prefill_schedule.cuh"

namespace torch_pagedkv {

// Puts 8 elements of a row where the copy engine would have put them.
template <int GROUP_BYTES, int PANEL_BYTES>
__device__ inline void store_piece(
    char* target, int row, int piece, const uint32_t (&pairs)[4]) {
  char* const place = target + row / 8 * GROUP_BYTES + piece / 8 * PANEL_BYTES +
                      swizzled<kPanelRowBytes>(row % 8, piece % 8 * 16);
  *reinterpret_cast<uint4*>(place) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// Copies tiles of keys, or of values: one code for both, since instruction caches are small. A lane knows
// where one granule of positions lies, so that the table is read once for several tiles. Called by a whole
// warp.
template <class SHAPE>
class TileCopier {
 public:
  __device__ TileCopier(
      const DecodeProblem& problem, const PrefillGrid& grid, const PrefillMaps& maps,
      PrefillControl<SHAPE>& control, char* stages, bool is_keys)
      : problem_(problem),
        grid_(grid),
        control_(control),
        is_keys_(is_keys),
        map_(is_keys ? maps.keys : maps.values),
        pool_(is_keys ? problem.keys : problem.values),
        full_(is_keys ? control.keys_full : control.values_full),
        empty_(is_keys ? control.keys_empty : control.values_empty),
        stages_(is_keys ? stages : stages + SHAPE::kKeyStages * SHAPE::kStageBytes),
        count_(is_keys ? SHAPE::kKeyStages : SHAPE::kValueStages),
        groups_of_block_(is_keys ? grid.groups_of_keys : grid.groups_of_values) {}

  __device__ void copy_all(const PrefillWork& work) {
    const int kv_head = work.kv_head;
    const int granules = SHAPE::kKeys / grid_.granule;
    const int stop = work.first_tile + work.tiles;
    if (work.tiles == 0) want_work();
    for (int tile = work.first_tile; tile < stop; ++tile) {
      if (stop - tile == min(work.tiles, kTilesAhead)) want_work();
      const int first = tile * granules % 32;
      if (tile == work.first_tile || first == 0) look_up(work, tile * granules - first);
      Barrier& is_full = !is_keys_ && work.is_edge<SHAPE::kKeys>(tile) ? control_.values_raw[stage_]
                                                                       : full_[stage_];
      empty_[stage_].wait(parity_ ^ 1);
      if (is_keys_) mark_missing(first, granules);
      char* const target = stages_ + stage_ * SHAPE::kStageBytes;
      if (grid_.pools_are_aligned) {
        if (threadIdx.x % 32 == 0) is_full.arrive_and_expect(SHAPE::kStageBytes);
        __syncwarp();
        issue(shared_address(target), is_full, kv_head, first, granules);
      } else {
        copy_pieces(work, tile, kv_head, target);
        if (threadIdx.x % 32 == 0) is_full.arrive();
      }
      if (++stage_ == count_) stage_ = 0, parity_ ^= 1;
    }
  }

 private:
  // Of two copiers one asks.
  __device__ void want_work() {
    if (is_keys_ && threadIdx.x % 32 == 0) control_.work_wanted.arrive();
  }

  // Where a position of a sequence lies.
  struct Place {
    int64_t block;
    int offset;
  };

  __device__ Place find(const PrefillWork& work, int position) const {
    const char* const table = problem_.table + work.sequence * problem_.table_stride;
    const int column =
        problem_.block_shift >= 0
            ? position >> problem_.block_shift
            : static_cast<uint32_t>(position) / static_cast<uint32_t>(problem_.block_size);
    const int64_t block = problem_.table_is_wide ? reinterpret_cast<const int64_t*>(table)[column]
                                                 : reinterpret_cast<const int32_t*>(table)[column];
    return {block, position - column * problem_.block_size};
  }

  __device__ bool is_in_pool(int64_t block) const { return block >= 0 && block < problem_.num_blocks; }

  // Finds the blocks of 32 granules from `granule` on. Entries of positions that no row sees are not
  // read, and what is not to be loaded gets a block that the copy engine makes zeros of.
  __device__ void look_up(const PrefillWork& work, int granule) {
    const int position = (granule + threadIdx.x % 32) * grid_.granule;
    bool is_missing = false;
    int block = problem_.num_blocks;
    offset_ = 0;
    if (position + grid_.granule > work.lowest && position < work.highest) {
      const Place place = find(work, position);
      offset_ = place.offset;
      is_missing = !is_in_pool(place.block);
      if (!is_missing) block = static_cast<int>(place.block);
    }
    missing_ = __ballot_sync(0xFFFFFFFF, is_missing);
    start_ = groups_of_block_ > 0 ? block * groups_of_block_ + offset_ / 8 : block;
  }

  __device__ void mark_missing(int first, int granules) {
    const uint32_t missing = missing_ >> first & ((1u << granules) - 1);
    const int lane = threadIdx.x % 32;
    if (lane == 0) control_.is_missing[stage_] = missing != 0;
    if (missing != 0) {
      if (lane < SHAPE::kKeys / 32) {
        uint32_t keys = 0;
#pragma unroll 1
        for (int i = 0; i < 32; ++i) keys |= (missing >> (lane * 32 + i) / grid_.granule & 1) << i;
        control_.missing[stage_][lane] = keys;
      }
    }
    __syncwarp();
  }

  // The copy engine's work by a warp, for pools whose rows do not all start at multiples of 16 bytes.
  // Positions that no row sees become zeros.
  __device__ void copy_pieces(const PrefillWork& work, int tile, int kv_head, char* target) const {
    constexpr int kPieces = SHAPE::kDim / 8;
#pragma unroll 1
    for (int index = threadIdx.x % 32; index < SHAPE::kKeys * kPieces; index += 32) {
      const int row = index / kPieces, piece = index % kPieces;
      const int position = tile * SHAPE::kKeys + row;
      uint32_t pairs[4] = {0, 0, 0, 0};
      if (position >= work.lowest && position < work.highest) {
        const Place place = find(work, position);
        if (is_in_pool(place.block)) {
          const char* const source = pool_.data + place.block * pool_.block_stride +
                                     place.offset * pool_.offset_stride +
                                     kv_head * pool_.head_stride + piece * 16;
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = load_pair(source + i * 4);
        }
      }
      store_piece<SHAPE::kGroupBytes, kPieceBytes>(target, row, piece, pairs);
    }
    publish_to_products();
    __syncwarp();
  }

  // Asks the copy engine for a tile's granules, which lanes from `first` on know.
  __device__ void issue(uint32_t target, Barrier& barrier, int kv_head, int first, int granules) {
    if (groups_of_block_ > 0) {
#pragma unroll 4
      for (int i = first; i < first + granules; ++i) {
        const int start = __shfl_sync(0xFFFFFFFF, start_, i);
        if (elect_one()) copy_groups(target, map_, barrier, kv_head, start);
        target += grid_.granule / 8 * SHAPE::kGroupBytes;
      }
    } else {  // granules of 8 positions, which may lie anywhere in a block
#pragma unroll 1
      for (int i = first; i < first + granules; ++i) {
        const int block = __shfl_sync(0xFFFFFFFF, start_, i);
        const int offset = __shfl_sync(0xFFFFFFFF, offset_, i);
        if (elect_one()) {
#pragma unroll
          for (int panel = 0; panel < SHAPE::kPanels; ++panel) {
            copy_rows(
                target + panel * kPieceBytes, map_, barrier, panel * kPanelElements, offset, kv_head,
                block);
          }
        }
        target += SHAPE::kGroupBytes;
      }
    }
    __syncwarp();
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  PrefillControl<SHAPE>& control_;
  const bool is_keys_;
  const CUtensorMap& map_;
  const PoolRows& pool_;
  Barrier* const full_;
  Barrier* const empty_;
  char* const stages_;
  const int count_, groups_of_block_;
  int stage_ = 0;
  uint32_t parity_ = 0;
  int start_, offset_;  // of this lane's granule: its group or block, and its offset in the block
  uint32_t missing_;    // lanes whose granule is not in the pool
};

// Copies a tile's query rows: where rows are aligned by the copy engine, which also brings rows of
// others where the tile has none, since nobody looks at what becomes of them. Called by a whole warp.
template <class SHAPE>
__device__ inline void copy_query(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
    const PrefillWork& work, PrefillControl<SHAPE>& control, char* target) {
  const int lane = threadIdx.x % 32, heads = problem.heads_of_tile;
  if (grid.query_is_aligned) {
    if (lane == 0) {
      const int bytes = grid.tokens_of_tile * heads * kPanelRowBytes;
      control.query_full.arrive_and_expect(SHAPE::kPanels * bytes);
#pragma unroll
      for (int panel = 0; panel < SHAPE::kPanels; ++panel) {
        copy_query_rows(
            shared_address(target) + panel * SHAPE::kQueryPanelBytes, map, control.query_full,
            panel * kPanelElements, work.first_head, work.start + work.first);
      }
    }
    __syncwarp();
    return;
  }
  constexpr int kPieces = SHAPE::kDim / 8;
  for (int index = lane; index < grid.tokens_of_tile * heads * kPieces; index += 32) {
    const int row = index / kPieces, piece = index % kPieces;
    const int token = row / heads, head = row % heads;
    uint32_t pairs[4] = {0, 0, 0, 0};
    if (work.first + token < work.query_length && head < work.heads) {
      const int64_t of_call = work.start + work.first + token;
      const char* const source = problem.query + of_call * problem.query_token_stride +
                                 (work.first_head + head) * problem.query_head_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = load_pair(source + piece * 16 + i * 4);
    }
    store_piece<kPieceBytes, SHAPE::kQueryPanelBytes>(target, row, piece, pairs);
  }
  publish_to_products();
  __syncwarp();
  if (lane == 0) control.query_full.arrive();
}

// Puts zeros in place of values that are not finite, which a weight of 0 would not hide, in rows
// [first, stop) of a tile; returns whether the warp found any.
template <class SHAPE>
__device__ inline bool clean_values(char* values, int first, int stop) {
  using Math = typename SHAPE::Math;
  constexpr int kPieces = SHAPE::kDim / 8;
  const int lane = threadIdx.x % 32;
  const auto place = [&](int piece) -> uint4& {
    const int row = piece / kPieces;
    return *reinterpret_cast<uint4*>(
        values + row / 8 * SHAPE::kGroupBytes + piece % kPieces / 8 * kPieceBytes +
        row % 8 * kPanelRowBytes + piece % 8 * 16);
  };
  // Most tiles have none, and a product with 0 tells it: NaN is all that such a sum does not lose.
  uint32_t sums[4] = {0, 0, 0, 0};
#pragma unroll 4
  for (int piece = first * kPieces + lane; piece < stop * kPieces; piece += 32) {
    const uint4 words = place(piece);
    sums[0] = Math::add_times_zero(sums[0], words.x), sums[1] = Math::add_times_zero(sums[1], words.y);
    sums[2] = Math::add_times_zero(sums[2], words.z), sums[3] = Math::add_times_zero(sums[3], words.w);
  }
  if (!__any_sync(0xFFFFFFFF, (sums[0] | sums[1] | sums[2] | sums[3]) != 0)) return false;
#pragma unroll 1
  for (int piece = first * kPieces + lane; piece < stop * kPieces; piece += 32) {
    uint4& words = place(piece);
    drop_nonfinite<Math>(words.x), drop_nonfinite<Math>(words.y);
    drop_nonfinite<Math>(words.z), drop_nonfinite<Math>(words.w);
  }
  return true;
}

// A warp that finds work ahead of the others, and tells them. Whoever is ready first takes the next item,
// so that the order of items, from the most keys to the fewest in a sequence, leaves little to do at the
// end.
template <class SHAPE>
class WorkPublisher {
 public:
  __device__ WorkPublisher(
      const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control)
      : finder_(problem, grid), problem_(problem), control_(control) {}

  // The counter was set before this launch started.
  __device__ void publish_next() {
    unsigned long long item = 0;
    if (threadIdx.x % 32 == 0) item = atomicAdd(problem_.prefill_counter, 1ull);
    item = __shfl_sync(0xFFFFFFFF, item, 0);
    PrefillWork work{};
    if (!finder_.find(static_cast<int64_t>(item), work)) work.tiles = -1;
    control_.work_empty[slot_.index].wait(slot_.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      control_.work[slot_.index] = work;
      control_.work_full[slot_.index].arrive();
    }
    __syncwarp();
    slot_.advance();
  }

 private:
  WorkFinder<SHAPE::kKeys> finder_;
  const DecodeProblem& problem_;
  PrefillControl<SHAPE>& control_;
  Ring<kWorkSlots> slot_;
};

// A warp's way through all work: `take` is called with each.
template <class SHAPE, class TAKE>
__device__ inline void take_work(PrefillControl<SHAPE>& control, const TAKE& take) {
  Ring<kWorkSlots> slot;
  while (true) {
    control.work_full[slot.index].wait(slot.parity);
    const PrefillWork& work = control.work[slot.index];
    if (work.tiles < 0) return;
    take(work);
    __syncwarp();
    if (threadIdx.x % 32 == 0) control.work_empty[slot.index].arrive();
    slot.advance();
  }
}

template <class SHAPE>
__device__ inline void bring_queries(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
    PrefillControl<SHAPE>& control, char* target) {
  WorkPublisher<SHAPE> publisher(problem, grid, control);
  Ring<1> of_query, of_wanted;
  publisher.publish_next();
  take_work(control, [&](const PrefillWork& work) {
    control.query_empty.wait(of_query.parity ^ 1);
    __syncwarp();  // no lane is behind when one gives the barrier its next phase
    of_query.advance();
    copy_query<SHAPE>(problem, grid, map, work, control, target);
    control.work_wanted.wait(of_wanted.parity);
    __syncwarp();
    of_wanted.advance();
    publisher.publish_next();
  });
}

template <class SHAPE>
__device__ inline void clean_edges(
    const PrefillGrid& grid, PrefillControl<SHAPE>& control, char* value_stages) {
  Ring<SHAPE::kValueStages> ring;
  uint32_t raw_parities = 0;  // a bit for each stage
  take_work(control, [&](const PrefillWork& work) {
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      const int stage = ring.index;
      ring.advance();
      if (!work.is_edge<SHAPE::kKeys>(tile)) continue;
      control.values_raw[stage].wait(raw_parities >> stage & 1);
      raw_parities ^= 1u << stage;
      // Values that all rows see may be what they are, and those of whole granules that no row sees are
      // zeros.
      const int start = tile * SHAPE::kKeys, least = -grid.granule;
      const auto within = [&](int position) { return min(max(position - start, 0), SHAPE::kKeys); };
      const int first = within(work.lowest & least), from = within(work.seen_by_all_from);
      const int to = max(within(work.seen_by_all_to), from);
      const int stop = within((work.highest + grid.granule - 1) & least);
      char* const values = value_stages + stage * SHAPE::kStageBytes;
      bool any = false;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        any |= clean_values<SHAPE>(values, part == 0 ? first : to, part == 0 ? from : stop);
      }
      publish_to_products();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        control.was_cleaned[stage] = any;
        control.values_full[stage].arrive();
      }
    }
  });
}

// Copies the keys, or the values, of all work.
template <class SHAPE>
__device__ inline void copy_tiles(
    const DecodeProblem& problem, const PrefillGrid& grid, const PrefillMaps& maps,
    PrefillControl<SHAPE>& control, char* stages, bool is_keys) {
  TileCopier<SHAPE> copier(problem, grid, maps, control, stages, is_keys);
  take_work(control, [&](const PrefillWork& work) { copier.copy_all(work); });
}

}  // namespace torch_pagedkv
