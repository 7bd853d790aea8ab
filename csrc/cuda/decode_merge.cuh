// Joins the parts of the items that were cut, in a launch of its own.

#pragma once

#include "decode_output.cuh"
#include "grid_dependency.cuh"

namespace torch_pagedkv {

// The parts of an item, where they lie. Known once the launch before has ended.
struct ItemParts {
  int sequence, item, count;
  int64_t first_team;  // of those that have a part, where all is shared out

  template <int TILE>
  __device__ static ItemParts of(const DecodeProblem& problem, int sequence, int item) {
    const int tiles = sequence_of<TILE>(problem, sequence).tiles;
    if (tiles == 0) return {sequence, item, 1, 0};
    if (problem.parts > 0) return {sequence, item, parts_of_item(problem, tiles), 0};
    const int64_t before = problem.tiles_before[sequence];
    const int64_t share = share_of_team(problem, problem.tiles_before[problem.num_sequences]);
    const int64_t group = item / problem.team;
    const int64_t first = before * problem.groups + group * tiles;
    const int64_t first_team = quotient(first, share);
    const int count = static_cast<int>(quotient(first + tiles - 1, share) - first_team) + 1;
    return {sequence, item, count, first_team};
  }

  __device__ int64_t slot(const DecodeProblem& problem, int part) const {
    if (problem.parts > 0) return slot_of_part(problem, sequence, item, part);
    const int group = item / problem.team, member = item % problem.team;
    return slot_of(problem, first_team + part, sequence, group, member, part == 0);
  }
};

__device__ inline float largest_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFF, value, distance));
  }
  return value;
}

__device__ inline float sum_of_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(0xFFFFFFFF, value, distance);
  }
  return value;
}

// A row's parts, joined by some warps: each knows the maximum and the total of all, and adds up the
// values of every `step`-th part, the columns shared out by its lanes.
template <int COLUMNS>
struct JoinedRow {
  float maximum, total;
  float4 sums[COLUMNS];  // of columns 4 * (32 * i + lane)

  __device__ JoinedRow(
      const DecodeProblem& problem, const ItemParts& parts, int row, int first_part, int step)
      : maximum(-INFINITY), total(0.0f), sums{} {
    const int lane = threadIdx.x % 32;
    for (int part = lane; part < parts.count; part += 32) {
      maximum = fmaxf(maximum, *PartialRow(problem, parts.slot(problem, part), row).maximum);
    }
    maximum = largest_of_warp(maximum);
    const float reference = reference_of(maximum);
    for (int first = 0; first < parts.count; first += 32) {
      float weight = 0.0f;
      const float* values = nullptr;
      if (first + lane < parts.count) {
        const PartialRow partial(problem, parts.slot(problem, first + lane), row);
        weight = weight_of(*partial.maximum, reference);
        total += weight * *partial.total;
        values = partial.values;
      }
      const int count = min(parts.count - first, 32);
#pragma unroll 8
      for (int part = first_part; part < count; part += step) {
        add(problem, __shfl_sync(0xFFFFFFFF, weight, part), address_of_lane(values, part));
      }
    }
    total = sum_of_warp(total);
  }

 private:
  __device__ static const float* address_of_lane(const float* values, int lane) {
    const long long address = reinterpret_cast<long long>(values);
    return reinterpret_cast<const float*>(__shfl_sync(0xFFFFFFFF, address, lane));
  }

  __device__ void add(const DecodeProblem& problem, float weight, const float* values) {
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const int column = 4 * (i * 32 + static_cast<int>(threadIdx.x) % 32);
      if (column >= problem.value_dim) continue;
      const float4 four = *reinterpret_cast<const float4*>(values + column);
      sums[i].x += weight * four.x;
      sums[i].y += weight * four.y;
      sums[i].z += weight * four.z;
      sums[i].w += weight * four.w;
    }
  }
};

// A CTA for each item and each `merged_rows` of its rows, the sink joined in once. Always in the same
// order.
template <class TILE>
__global__ void __launch_bounds__(kMergeThreads)
    merge_parts(const __grid_constant__ DecodeProblem problem) {
  constexpr int kColumns = TILE::kDim <= 128 ? 1 : 2;  // of four floats, of each lane
  __shared__ float4 sums[kMergeWarps][kColumns][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, items = problem.items_of_sequence();
  const int warps_of_row = kMergeWarps / problem.merged_rows;
  const int row = static_cast<int>(blockIdx.y) * problem.merged_rows + warp / warps_of_row;
  const int index = static_cast<int>(blockIdx.x) / items, item = static_cast<int>(blockIdx.x) % items;
  const Sequence sequence = sequence_of<TILE::kKeys>(problem, index);
  const ItemHeads heads(problem, item);
  const RowPlace place(problem, sequence, heads.first, heads.count, row);
  await_dependency();
  const ItemParts parts = ItemParts::of<TILE::kKeys>(problem, index, item);
  if (parts.count == 1) return;
  const bool is_row = place.exists && row < problem.rows_of_slot;
  const ItemParts own{index, item, is_row ? parts.count : 0, parts.first_team};
  const JoinedRow<kColumns> joined(
      problem, own, is_row ? row : 0, warp % warps_of_row, warps_of_row);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) sums[warp][i][lane] = joined.sums[i];
  __syncthreads();
  if (!is_row || warp % warps_of_row != 0) return;
  const RowEnd end = end_of_row(problem, place.head, heads.kv_head, joined.maximum, joined.total);
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    const int column = 4 * (i * 32 + lane);
    if (column >= problem.value_dim) continue;
    float values[4] = {};
    for (int other = 0; other < warps_of_row; ++other) {
      const float4 of_warp = sums[warp + other][i][lane];
      values[0] += of_warp.x, values[1] += of_warp.y;
      values[2] += of_warp.z, values[3] += of_warp.w;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) values[j] = end.value(values[j]);
    store_four(problem, place.out + column, values);
  }
  if (lane == 0) problem.lse[place.lse] = end.lse;
}

}  // namespace torch_pagedkv
