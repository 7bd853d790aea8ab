// Joins the parts of the items that were cut, in a launch of its own.
//
// Groups of 8 lanes join 64 columns of a row, each some of its parts; then one group joins those of the
// others. Always in the same order.

#pragma once

#include "decode_output.cuh"
#include "decode_parts.cuh"
#include "grid_dependency.cuh"

namespace torch_pagedkv {

// The parts of a group by all lengths, of one sequence for each thread at most. Called by the whole CTA.
template <int TILE, bool LEAVES>
__device__ inline GroupParts parts_by_lengths(
    const DecodeProblem& problem, int index, int group, const Sequence& sequence) {
  struct Sums {
    int64_t before;  // tiles of one item of the sequences before
    TileCounts all;
    PrefillLoad load;
  };
  __shared__ Sums of_warps[kMergeThreads / 32];
  __shared__ GroupParts found;
  const int thread = threadIdx.x, sequences = problem.num_sequences;
  Sums sums{0, {0, 0}, {0, 0}};
  if (thread / 32 * 32 < sequences) {
    if (thread < sequences) {
      const Sequence another = sequence_of<TILE>(problem, thread);
      sums.all = TileCounts::of(another.tiles);
      if (thread < index) sums.before = another.tiles;
      sums.load = prefill_load_of<LEAVES>(problem, thread, another);
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sums.before += __shfl_xor_sync(0xFFFFFFFF, sums.before, distance);
      sums.all.total += __shfl_xor_sync(0xFFFFFFFF, sums.all.total, distance);
    }
    sums.all.most = __reduce_max_sync(0xFFFFFFFF, sums.all.most);
    if constexpr (LEAVES) sums.load = sums.load.of_warp();
  }
  if (thread % 32 == 0) of_warps[thread / 32] = sums;
  __syncthreads();
  if (thread < 32) {  // the other warps leave it the units for whole numbers
#pragma unroll
    for (int other = 1; other < kMergeThreads / 32; ++other) {
      sums.before += of_warps[other].before, sums.all.add(of_warps[other].all);
      if constexpr (LEAVES) sums.load.add(of_warps[other].load);
    }
    const Shares shares = shares_of(problem, sums.all, sums.load);
    const int64_t before = shares.span > 0 ? static_cast<int64_t>(index) * shares.span : sums.before;
    const GroupPlace place(index, group, before * problem.groups, sequence.tiles, shares);
    const GroupParts parts = GroupParts::by_shares(problem, place, quotient(place.first, place.share));
    if (thread == 0) found = parts;
  }
  __syncthreads();
  return found;
}

// A lane's columns of a row, four and four kDistance farther on, and what they are relative to.
struct RowColumns {
  static constexpr int kDistance = 4 * kLanesOfJoin;

  float maximum, total;
  float4 sums[2];

  __device__ void add(float weight, const float4 (&values)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums[half].x += weight * values[half].x, sums[half].y += weight * values[half].y;
      sums[half].z += weight * values[half].z, sums[half].w += weight * values[half].w;
    }
  }

  // Makes all relative to a maximum that is no smaller.
  __device__ void raise(float largest) {
    const float decay = weight_of(maximum, reference_of(largest));
    maximum = largest, total *= decay;
#pragma unroll
    for (float4& four : sums) four.x *= decay, four.y *= decay, four.z *= decay, four.w *= decay;
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
    RowColumns other;
    other.maximum = shuffle(maximum), other.total = shuffle(total);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4& four = sums[half];
      other.sums[half] = {shuffle(four.x), shuffle(four.y), shuffle(four.z), shuffle(four.w)};
    }
    return other;
  }
};

// Joins the parts from `first` on, every `step`-th one, of columns from `column` on. `row`: of the first item.
// Called by whole groups of lanes, eight parts at a time: a lane weighs one, and adds up its columns of all.
__device__ inline RowColumns join_parts(
    const DecodeProblem& problem, const GroupParts& parts, int row, int column, int first, int step) {
  const int lane = threadIdx.x % kLanesOfJoin;
  const uint32_t group = 0xFFu << (threadIdx.x % 32 - lane);
  const int64_t stride = static_cast<int64_t>(parts.step) * step * problem.value_dim;
  const float* values = PartialRow(problem, parts.row_of(first) + row).values + column;
  const float* later = PartialRow(problem, parts.row_of(first + step) + row).values + column;
  // Parts that have something in this lane's columns: past the last column none.
  const int width = column < problem.value_dim ? parts.count : 0;
  const int width_of_others = column + RowColumns::kDistance < problem.value_dim ? parts.count : 0;
  RowColumns joined{-INFINITY, 0.0f, {}};
#pragma unroll 1
  for (; first < parts.count; first += kLanesOfJoin * step) {
    float4 loaded[kLanesOfJoin][2];
#pragma unroll
    for (int i = 0; i < kLanesOfJoin; ++i) {
      const int part = first + i * step;
      loaded[i][0] = part < width ? *reinterpret_cast<const float4*>(values) : float4{};
      loaded[i][1] = part < width_of_others
                         ? *reinterpret_cast<const float4*>(values + RowColumns::kDistance) : float4{};
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
      // Most items have few parts.
      if (i % 2 == 0 && i > 0 && first + i * step >= parts.count) break;
      joined.total += __shfl_sync(group, total, i, kLanesOfJoin);
      joined.add(__shfl_sync(group, weight, i, kLanesOfJoin), loaded[i]);
    }
  }
  return joined;
}

// How many groups of lanes, as a shift, share the parts of the same columns: no more than there are, but with num_splits,
// where the order in which parts are joined must not follow the batch.
__device__ inline int joining_shift(const DecodeProblem& problem, int parts, int pieces) {
  // A lane weighs a part at once. Two of them one behind the other are joined as soon as by two groups.
  if (parts <= 2 * kLanesOfJoin) return 0;
  int shift = min(32 - __clz((parts - 1) / kLanesOfJoin), kMostJoiningShift);
  const int lane_groups = static_cast<int>(gridDim.y) * kGroupsOfMerge;
#pragma unroll 1
  while (problem.parts == 0 && shift > 0 && pieces << shift > lane_groups) --shift;
  return shift;
}

// Each group of items, or each cut between teams where the launch before tells where these start, has some CTAs
// (blockIdx.x). They have a group of lanes for each piece of each row, or some where there are many parts, and join
// one piece behind the other where they are too few (blockIdx.y). The sink is joined in once.
template <int TILE, bool LEAVES>
__global__ void __launch_bounds__(kMergeThreads, kMergingCtasAtOnce)
    merge_parts(const __grid_constant__ DecodeProblem problem) {
  __shared__ RowColumns of_warps[kMergeThreads / 32][kLanesOfJoin];
  allow_dependents();
  const int number = static_cast<int>(blockIdx.x);
  CutGroup cut;
  Sequence sequence;
  if (problem.team_starts != nullptr) {
    await_dependency();
    cut = CutGroup::at(problem, number, problem.team_starts[number + 1]);
    if (cut.parts.count <= 1) return;
    sequence = sequence_of<TILE>(problem, cut.index);
  } else {
    cut.index = number / problem.groups, cut.group = number - cut.index * problem.groups;
    sequence = sequence_of<TILE>(problem, cut.index);
    cut.parts = problem.parts > 0
                    ? GroupParts::by_own_length(problem, cut.index, cut.group, sequence.tiles)
                    : parts_by_lengths<TILE, LEAVES>(problem, cut.index, cut.group, sequence);
  }
  const int rows = min(min(sequence.query_length, problem.most_tokens) * problem.heads_of_tile, problem.rows_of_slot);
  const int pieces = rows * problem.pieces_of_rows();
  const int shift = joining_shift(problem, cut.parts.count, pieces);
  const int groups = 1 << shift;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int stop = pieces << shift;
#pragma unroll 1
  for (int first = blockIdx.y * kGroupsOfMerge; first < stop; first += gridDim.y * kGroupsOfMerge) {
    const int own = first + static_cast<int>(threadIdx.x) / kLanesOfJoin;
    const int piece = own >> shift, group = own - (piece << shift);
    const int row = problem.by_pieces_of_rows.quotient(piece);
    const int piece_of_rows = piece - row * problem.pieces_of_rows();
    const int member = problem.by_pieces_of_row.quotient(piece_of_rows);
    const int piece_of_row = piece_of_rows - member * problem.pieces_of_row();
    const int column = piece_of_row * kColumnsOfJoin + lane % kLanesOfJoin * 4;
    const int item = cut.group * problem.team + member;
    const ItemHeads heads(problem, item, problem.head_tiles == 1 ? item : item / problem.head_tiles);
    const RowPlace place(problem, sequence, heads.first, heads.count, row);
    const bool is_row = place.exists && own < stop;
    await_dependency();  // late, so that all above is done by then
    if (cut.parts.count <= 1) return;
    RowColumns joined = join_parts(
        problem, cut.parts, member * cut.parts.step_of_item + row, column, is_row ? group : cut.parts.count,
        groups);
#pragma unroll 1
    for (int other = 1; other < min(groups, kGroupsOfWarp); other *= 2) {
      joined.join(joined.across(other * kLanesOfJoin));
    }
    if (groups > kGroupsOfWarp) {
      if (first >= static_cast<int>(gridDim.y) * kGroupsOfMerge) __syncthreads();  // all have read those before
      if (lane < kLanesOfJoin) of_warps[warp][lane] = joined;
      __syncthreads();
#pragma unroll 1
      for (int other = 1; group == 0 && other < groups / kGroupsOfWarp; ++other) {
        joined.join(of_warps[warp + other][lane % kLanesOfJoin]);
      }
    }
    if (!is_row || group != 0) continue;
    const RowEnd end = end_of_row(problem, place.head, heads.kv_head, joined.maximum, joined.total);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4& four = joined.sums[half];
      const float values[4] = {end.value(four.x), end.value(four.y), end.value(four.z), end.value(four.w)};
      const int first_column = column + half * RowColumns::kDistance;
      if (first_column < problem.value_dim) store_four(problem, place.out + first_column, values);
    }
    if (column == 0) problem.lse[place.lse] = end.lse;
  }
  await_dependency();  // this launch ends after the one before, also where it has nothing to join
}

}  // namespace torch_pagedkv
