// Joins the parts of the items that were cut, in a launch of its own.
//
// Groups of 8 lanes join 32 columns of a row, each some of its parts; then one group joins those of the
// others. Always in the same order.

#pragma once

#include "decode_output.cuh"
#include "grid_dependency.cuh"

namespace torch_pagedkv {

// Where a sequence's tiles lie in the order of all: tiles of one item before it, and the share of a team.
struct TileOrder {
  int64_t before, share;

  // Called by the whole CTA.
  template <int TILE, bool LEAVES>
  __device__ static TileOrder of(const DecodeProblem& problem, int index) {
    struct Sums {
      int64_t before, total;
      PrefillLoad load;
    };
    __shared__ Sums of_warps[kMergeThreads / 32];
    Sums sums{};
#pragma unroll 1
    for (int other = threadIdx.x; other < problem.num_sequences; other += kMergeThreads) {
      const Sequence sequence = sequence_of<TILE>(problem, other);
      sums.total += sequence.tiles;
      if (other < index) sums.before += sequence.tiles;
      sums.load.add(prefill_load_of<LEAVES>(problem, other, sequence));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sums.before += __shfl_xor_sync(0xFFFFFFFF, sums.before, distance);
      sums.total += __shfl_xor_sync(0xFFFFFFFF, sums.total, distance);
    }
    if constexpr (LEAVES) sums.load = sums.load.of_warp();
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = sums;
    __syncthreads();
    sums = {};
#pragma unroll
    for (const Sums& of_warp : of_warps) {
      sums.before += of_warp.before, sums.total += of_warp.total;
      if constexpr (LEAVES) sums.load.add(of_warp.load);
    }
    return {sums.before, share_of_team(problem, sums.total, sums.load)};
  }
};

// The parts of an item, where they lie.
struct ItemParts {
  int count;
  // Partial rows (there are fewer than 2**31): of the first part, of the second, and from there on.
  int first, second, step;

  // The order is that of the sequence where all is shared out.
  __device__ static ItemParts of(
      const DecodeProblem& problem, int index, int item, int tiles, const TileOrder& order) {
    const int rows = problem.rows_of_slot;
    if (tiles == 0) return {1, 0, 0, 0};
    if (problem.parts > 0) {
      const int row = static_cast<int>(slot_of_part(problem, index, item, 0) * rows);
      return {parts_of_item(problem, tiles), row, row + rows, rows};
    }
    const int group = item / problem.team, member = item - group * problem.team;
    const int64_t tile = order.before * problem.groups + static_cast<int64_t>(group) * tiles;
    const int64_t team = quotient(tile, order.share);
    const int count = static_cast<int>(quotient(tile + tiles - 1, order.share) - team) + 1;
    const int64_t slot = slot_of(problem, team, index, group, member, true);
    const int64_t next = slot_of(problem, team + 1, index, group, member, false);
    return {
        count, static_cast<int>(slot * rows), static_cast<int>(next * rows),
        (problem.slots_by_group ? 1 : 2) * problem.team * rows};
  }

  __device__ int row_of(int part) const { return part == 0 ? first : second + (part - 1) * step; }
};

// Four columns of a row, and what they are relative to.
struct RowColumns {
  float maximum, total;
  float4 sums;

  __device__ void add(float weight, const float4& values) {
    sums.x += weight * values.x, sums.y += weight * values.y;
    sums.z += weight * values.z, sums.w += weight * values.w;
  }

  // Makes all relative to a maximum that is no smaller.
  __device__ void raise(float largest) {
    const float decay = weight_of(maximum, reference_of(largest));
    maximum = largest, total *= decay;
    sums.x *= decay, sums.y *= decay, sums.z *= decay, sums.w *= decay;
  }

  __device__ void join(const RowColumns& other) {
    raise(fmaxf(maximum, other.maximum));
    const float weight = weight_of(other.maximum, reference_of(maximum));
    total += weight * other.total;
    add(weight, other.sums);
  }

  // Those of another lane.
  __device__ RowColumns across(int distance) const {
    const auto shuffle = [distance](float x) { return __shfl_xor_sync(0xFFFFFFFF, x, distance); };
    return {
        shuffle(maximum), shuffle(total),
        {shuffle(sums.x), shuffle(sums.y), shuffle(sums.z), shuffle(sums.w)}};
  }
};

// Joins the parts from `first` on, every `step`-th one, of a column and the three after it. Called by
// whole groups, eight parts at a time: a lane weighs one, and adds up its columns of all.
__device__ inline RowColumns join_parts(
    const DecodeProblem& problem, const ItemParts& parts, int row, int column, int first, int step) {
  const int lane = threadIdx.x % kLanesOfJoin;
  const uint32_t group = 0xFFu << (threadIdx.x % 32 - lane);
  const int64_t stride = static_cast<int64_t>(parts.step) * step * problem.value_dim;
  const int width = column < problem.value_dim ? parts.count : 0;
  const float* values = PartialRow(problem, parts.row_of(first) + row).values + column;
  const float* later = PartialRow(problem, parts.row_of(first + step) + row).values + column;
  RowColumns joined{-INFINITY, 0.0f, {}};
#pragma unroll 1
  for (; first < parts.count; first += kLanesOfJoin * step) {
    float4 loaded[kLanesOfJoin];
#pragma unroll
    for (int i = 0; i < kLanesOfJoin; ++i) {
      const bool is_read = first + i * step < width;
      loaded[i] = is_read ? *reinterpret_cast<const float4*>(values) : float4{};
      values = later;
      later += stride;
    }
    float maximum = -INFINITY, total = 0.0f;
    if (first + lane * step < parts.count) {
      const PartialRow partial(problem, parts.row_of(first + lane * step) + row);
      maximum = *partial.maximum, total = *partial.total;
    }
    float largest = fmaxf(joined.maximum, maximum);
#pragma unroll
    for (int distance = 1; distance < kLanesOfJoin; distance *= 2) {
      largest = fmaxf(largest, __shfl_xor_sync(group, largest, distance));
    }
    joined.raise(largest);
    const float weight = weight_of(maximum, reference_of(largest));
    total *= weight;
#pragma unroll
    for (int i = 0; i < kLanesOfJoin; ++i) {
      joined.total += __shfl_sync(group, total, i, kLanesOfJoin);
      joined.add(__shfl_sync(group, weight, i, kLanesOfJoin), loaded[i]);
    }
  }
  return joined;
}

// The CTAs (blockIdx.y) of an item (blockIdx.x) have `joining_groups` groups for each 32 columns of each of
// its rows. The sink is joined in once.
template <int TILE, bool LEAVES>
__global__ void __launch_bounds__(kMergeThreads, 6)
    merge_parts(const __grid_constant__ DecodeProblem problem) {
  __shared__ RowColumns of_warps[kMergeThreads / 32][kLanesOfJoin];
  allow_dependents();
  const int items = problem.items_of_sequence(), groups = problem.joining_groups;
  const int index = static_cast<int>(blockIdx.x) / items;
  const int item = static_cast<int>(blockIdx.x) - index * items;
  const int number = (blockIdx.y * kMergeThreads + threadIdx.x) / kLanesOfJoin;
  const int piece = number / groups, group = number - piece * groups;
  const int pieces = (problem.value_dim + kColumnsOfJoin - 1) / kColumnsOfJoin;  // of a row
  const int row = piece / pieces, piece_of_row = piece - row * pieces;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int column = piece_of_row * kColumnsOfJoin + lane % kLanesOfJoin * 4;
  const Sequence sequence = sequence_of<TILE>(problem, index);
  const ItemHeads heads(problem, item, item / problem.head_tiles);
  const RowPlace place(problem, sequence, heads.first, heads.count, row);
  const bool is_row = place.exists && row < problem.rows_of_slot;
  TileOrder order{0, 0};
  if (problem.tiles_before != nullptr) {
    await_dependency();
    order = {problem.tiles_before[index], problem.tiles_before[problem.num_sequences]};
  } else if (problem.parts == 0) {
    order = TileOrder::of<TILE, LEAVES>(problem, index);
  }
  const ItemParts parts = ItemParts::of(problem, index, item, sequence.tiles, order);
  await_dependency();  // at once where it was awaited before
  if (parts.count == 1) return;
  RowColumns joined =
      join_parts(problem, parts, row, column, is_row ? group : parts.count, groups);
#pragma unroll 1
  for (int other = 1; other < min(groups, kGroupsOfWarp); other *= 2) {
    joined.join(joined.across(other * kLanesOfJoin));
  }
  if (groups > kGroupsOfWarp) {
    if (lane < kLanesOfJoin) of_warps[warp][lane] = joined;
    __syncthreads();
    if (group != 0) return;
#pragma unroll 1
    for (int other = 1; other < groups / kGroupsOfWarp; ++other) {
      joined.join(of_warps[warp + other][lane]);
    }
  }
  if (!is_row || group != 0) return;
  const RowEnd end = end_of_row(problem, place.head, heads.kv_head, joined.maximum, joined.total);
  const float values[4] = {
      end.value(joined.sums.x), end.value(joined.sums.y), end.value(joined.sums.z),
      end.value(joined.sums.w)};
  if (column < problem.value_dim) store_four(problem, place.out + column, values);
  if (column == 0) problem.lse[place.lse] = end.lse;
}

}  // namespace torch_pagedkv
