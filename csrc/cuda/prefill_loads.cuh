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

// Copies tiles of keys, or of values. Called by a whole warp.
template <class SHAPE, bool IS_KEYS>
class TileCopier {
 public:
  __device__ TileCopier(
      const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
      PrefillControl<SHAPE>& control, char* stages)
      : problem_(problem),
        grid_(grid),
        map_(map),
        control_(control),
        stages_(stages) {}

  __device__ void copy_all(const PrefillWork& work) {
    const int kv_head = uniform(work.kv_head);
    look_up(work, work.first_tile);
    for (int tile = work.first_tile; tile < work.first_tile + work.tiles; ++tile) {
      const int stage = ring_.index;
      Barrier& is_empty = IS_KEYS ? control_.keys_empty[stage] : control_.values_empty[stage];
      Barrier& is_full = IS_KEYS ? control_.keys_full[stage]
                         : work.is_edge<SHAPE::kKeys>(tile) ? control_.values_raw[stage]
                                                            : control_.values_full[stage];
      is_empty.wait(ring_.parity ^ 1);
      if (IS_KEYS) mark_missing(stage);
      char* const target = stages_ + stage * SHAPE::kStageBytes;
      if (grid_.pools_are_aligned) {
        if (threadIdx.x % 32 == 0) is_full.arrive_and_expect(SHAPE::kStageBytes);
        __syncwarp();
        issue(shared_address(target), is_full, kv_head);
      } else {
        copy_pieces(work, tile, kv_head, target);
        if (threadIdx.x % 32 == 0) is_full.arrive();
      }
      look_up(work, tile + 1);
      ring_.advance();
    }
  }

 private:
  static constexpr int kOfLane = SHAPE::kKeys / 32;  // granules, at most

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

  __device__ int groups_of_block() const {
    return IS_KEYS ? grid_.groups_of_keys : grid_.groups_of_values;
  }

  __device__ bool is_in_pool(int64_t block) const { return block >= 0 && block < problem_.num_blocks; }

  // Finds the blocks of a tile's granules. Entries of positions that no row sees are not read, and
  // what is not to be loaded gets a block that the copy engine makes zeros of.
  __device__ void look_up(const PrefillWork& work, int tile) {
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
      const Place place = find(work, position);
      offsets_[i] = place.offset;
      if (is_in_pool(place.block)) {
        blocks_[i] = static_cast<int>(place.block);
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

  // The copy engine's work by a warp, for pools whose rows do not all start at multiples of 16 bytes.
  // Positions that no row sees become zeros.
  __device__ void copy_pieces(const PrefillWork& work, int tile, int kv_head, char* target) const {
    const PoolRows& pool = IS_KEYS ? problem_.keys : problem_.values;
    constexpr int kPieces = SHAPE::kDim / 8;
#pragma unroll 2
    for (int index = threadIdx.x % 32; index < SHAPE::kKeys * kPieces; index += 32) {
      const int row = index / kPieces, piece = index % kPieces;
      const int position = tile * SHAPE::kKeys + row;
      uint32_t pairs[4] = {0, 0, 0, 0};
      if (position >= work.lowest && position < work.highest && piece * 16 < pool.row_bytes) {
        const Place place = find(work, position);
        if (is_in_pool(place.block)) {
          const char* const source = pool.data + place.block * pool.block_stride +
                                     place.offset * pool.offset_stride +
                                     kv_head * pool.head_stride + piece * 16;
#pragma unroll
          for (int i = 0; i < 4; ++i) pairs[i] = load_pair(source + i * 4, false);
        }
      }
      store_piece<SHAPE::kGroupBytes, kPieceBytes>(target, row, piece, pairs);
    }
    publish_to_products();
    __syncwarp();
  }

  // The largest of a warp's numbers, in a register that the copy engine can take.
  __device__ static int uniform(int number) { return __reduce_max_sync(0xFFFFFFFF, number); }

  __device__ void issue(uint32_t target, Barrier& barrier, int kv_head) {
    const int granules = SHAPE::kKeys / grid_.granule;
    if (groups_of_block() > 0) {  // of 8 positions: one lane has one granule at most
      const int group = blocks_[0] * groups_of_block() + offsets_[0] / 8;
#pragma unroll 2
      for (int lane = 0; lane < granules; ++lane) {
        const bool is_here = static_cast<int>(threadIdx.x) % 32 == lane;
        const int own = uniform(is_here ? group : 0);
        if (elect_one()) copy_groups(target, map_, barrier, kv_head, own);
        target += grid_.granule / 8 * SHAPE::kGroupBytes;
      }
      __syncwarp();
      return;
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int count = min(32, granules - 32 * i);
#pragma unroll 1
      for (int lane = 0; lane < count; ++lane) {
        const bool is_here = static_cast<int>(threadIdx.x) % 32 == lane;
        const int block = uniform(is_here ? blocks_[i] : 0);
        const int offset = uniform(is_here ? offsets_[i] : 0);
        const int row = (32 * i + lane) * grid_.granule;
        const uint32_t place = target + row / 8 * SHAPE::kGroupBytes + row % 8 * kPanelRowBytes;
        if (elect_one()) {
#pragma unroll
          for (int panel = 0; panel < SHAPE::kPanels; ++panel) {
            copy_rows(
                place + panel * kPieceBytes, map_, barrier, panel * kPanelElements, offset, kv_head,
                block);
          }
        }
      }
    }
    __syncwarp();
  }

  const DecodeProblem& problem_;
  const PrefillGrid& grid_;
  const CUtensorMap& map_;
  PrefillControl<SHAPE>& control_;
  char* stages_;
  Ring<IS_KEYS ? SHAPE::kKeyStages : SHAPE::kValueStages> ring_;
  int blocks_[kOfLane], offsets_[kOfLane];
  uint32_t missing_ = 0;
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
    const bool exists = work.first + token < work.query_length && head < work.heads;
    if (exists && piece * 8 < problem.key_dim) {
      const int64_t of_call = work.start + work.first + token;
      const char* const source = problem.query + of_call * problem.query_token_stride +
                                 (work.first_head + head) * problem.query_head_stride;
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = load_pair(source + piece * 16 + i * 4, false);
    }
    store_piece<kPieceBytes, SHAPE::kQueryPanelBytes>(target, row, piece, pairs);
  }
  publish_to_products();
  __syncwarp();
  if (lane == 0) control.query_full.arrive();
}

// Puts zeros in place of values that are not finite, which a weight of 0 would not hide, in rows
// [first, stop) of a tile; returns whether this thread found any.
template <class SHAPE>
__device__ inline bool clean_values(char* values, int first, int stop) {
  constexpr int kPieces = SHAPE::kDim / 8;
  constexpr uint32_t kExponent = SHAPE::Math::kExponent;
  constexpr uint32_t kCarry = kExponent ^ 0x7FFF7FFF;  // fills the mantissa's place
  const int lane = threadIdx.x % 32;
  bool found = false;
#pragma unroll 4
  for (int piece = first * kPieces + lane; piece < stop * kPieces; piece += 32) {
    const int row = piece / kPieces;
    uint4& place = *reinterpret_cast<uint4*>(
        values + row / 8 * SHAPE::kGroupBytes + piece % kPieces / 8 * kPieceBytes +
        row % 8 * kPanelRowBytes + piece % 8 * 16);
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

// A warp that finds work ahead of the others, and tells them. Whoever is ready first takes the next item,
// so that the order of items, from the most keys to the fewest in a sequence, leaves little to do at the
// end.
template <class SHAPE>
class WorkPublisher {
 public:
  __device__ WorkPublisher(
      const DecodeProblem& problem, const PrefillGrid& grid, PrefillControl<SHAPE>& control)
      : finder_(problem, grid), grid_(grid), control_(control), item_(blockIdx.x) {}

  __device__ void publish_next() {
    PrefillWork work{};
    if (!finder_.find(item_, work)) work.tiles = -1;
    control_.work_empty[slot_.index].wait(slot_.parity ^ 1);
    if (threadIdx.x % 32 == 0) {
      control_.work[slot_.index] = work;
      control_.work_full[slot_.index].arrive();
    }
    __syncwarp();
    slot_.advance();
    if (work.tiles < 0) return;
    await_dependency();  // the launch before set the counter to 0
    unsigned long long taken = 0;
    if (threadIdx.x % 32 == 0) taken = atomicAdd(grid_.taken, 1ull);
    item_ = gridDim.x + static_cast<int64_t>(__shfl_sync(0xFFFFFFFF, taken, 0));
  }

 private:
  WorkFinder<SHAPE::kKeys> finder_;
  const PrefillGrid& grid_;
  PrefillControl<SHAPE>& control_;
  int64_t item_;
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
  Ring<1> of_query;
  publisher.publish_next();
  take_work(control, [&](const PrefillWork& work) {
    control.query_empty.wait(of_query.parity ^ 1);
    __syncwarp();  // no lane is behind when one gives the barrier its next phase
    of_query.advance();
    copy_query<SHAPE>(problem, grid, map, work, control, target);
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
      bool found = false;
      char* const values = value_stages + stage * SHAPE::kStageBytes;
      found |= clean_values<SHAPE>(values, first, from);
      found |= clean_values<SHAPE>(values, to, stop);
      const bool any = __any_sync(0xFFFFFFFF, found);
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
template <class SHAPE, bool IS_KEYS>
__device__ inline void copy_tiles(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& map,
    PrefillControl<SHAPE>& control, char* stages) {
  TileCopier<SHAPE, IS_KEYS> copier(problem, grid, map, control, stages);
  take_work(control, [&](const PrefillWork& work) { copier.copy_all(work); });
}

}  // namespace torch_pagedkv
