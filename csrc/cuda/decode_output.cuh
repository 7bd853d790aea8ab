// Where the rows of an item go.

#pragma once

#include "decode_schedule.cuh"
#include "decode_tile.cuh"
#include "softmax_state.cuh"

namespace torch_pagedkv {

// Where a row of an item goes.
struct RowPlace {
  bool exists;
  int token, head;   // of the call
  int64_t out, lse;  // in elements, of a row's first

  __device__ RowPlace(
      const DecodeProblem& problem, const Sequence& sequence, int first_head, int heads, int row) {
    const int token_of_sequence = problem.token_of_row(row);
    const int of_tile = row - token_of_sequence * problem.heads_of_tile;
    exists = token_of_sequence < sequence.query_length && of_tile < heads;
    token = sequence.start + token_of_sequence;
    head = first_head + of_tile;
    out = (static_cast<int64_t>(token) * problem.num_heads + head) * problem.value_dim;
    lse = static_cast<int64_t>(head) * problem.num_tokens + token;
  }
};

__device__ inline void store_four(
    const DecodeProblem& problem, int64_t place, const float (&values)[4]) {
  const uint2 pairs =
      problem.query_is_bfloat16
          ? uint2{BFloat16Math::pair(values[0], values[1]), BFloat16Math::pair(values[2], values[3])}
          : uint2{HalfMath::pair(values[0], values[1]), HalfMath::pair(values[2], values[3])};
  *reinterpret_cast<uint2*>(problem.out + place * 2) = pairs;
}

// Which heads an item has: [first, first + count) of the call, all of one KV head.
struct ItemHeads {
  int kv_head, first, count;

  __device__ ItemHeads(const DecodeProblem& problem, int item, int kv_head) : kv_head(kv_head) {
    const int first_of_group = (item - kv_head * problem.head_tiles) * problem.heads_of_tile;
    first = kv_head * problem.group + first_of_group;
    count = min(problem.heads_of_tile, problem.group - first_of_group);
  }
};

__device__ inline RowEnd end_of_row(
    const DecodeProblem& problem, int head, int kv_head, float maximum, float total) {
  const bool has_sink = problem.sinks.data != nullptr;
  const float sink = has_sink ? problem.sinks.at(head, 0.0f) : 0.0f;
  return RowEnd(maximum, total, has_sink, sink, problem.v_scales.at(kv_head, 1.0f));
}

// Partial results: [partial_rows, value_dim] sums of values, then the maximum and the total of each row.
struct PartialRow {
  float *values, *maximum, *total;

  __device__ PartialRow(const DecodeProblem& problem, int number) {
    values = problem.partials + static_cast<int64_t>(number) * problem.value_dim;
    maximum = problem.partials + problem.partial_rows * problem.value_dim + number;
    total = maximum + problem.partial_rows;
  }
};

}  // namespace torch_pagedkv
