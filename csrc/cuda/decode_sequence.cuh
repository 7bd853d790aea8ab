// The rows of a sequence, and the tiles of keys that they see.

#pragma once

#include "key_range.cuh"

namespace torch_pagedkv {

// What makes the scores of a query row, and the keys that it sees.
struct RowTerms {
  float scale, slope;
  int position;
  KeyRange seen;
};

struct Sequence {
  int start, query_length, length;
  int lowest, highest;                      // keys that any row sees
  int seen_by_all_from, seen_by_all_to;     // keys that every row sees
  int first_tile, tiles;                    // no tiles: nothing to do here

  TORCH_PAGEDKV_ANYWHERE_MEMBER int position_of(int token) const { return token + length - query_length; }

#if defined(__CUDACC__)
  // That of another lane of the warp.
  __device__ Sequence of_lane(int lane) const {
    const auto from = [lane](int number) { return __shfl_sync(0xFFFFFFFF, number, lane); };
    return {
        from(start), from(query_length), from(length), from(lowest), from(highest), from(seen_by_all_from),
        from(seen_by_all_to), from(first_tile), from(tiles)};
  }
#endif
};

// Sequences without rows, and those with more rows than a warp takes, have no tiles. All others have
// one at least, since rows that see no key are written too.
template <int TILE>
TORCH_PAGEDKV_ANYWHERE Sequence sequence_of(const DecodeProblem& problem, int index) {
  Sequence sequence{};
  int start = index, stop = index + 1;
  if (problem.starts.data) {
    start = problem.starts.clamped(index, 0, problem.num_tokens);
    stop = problem.starts.clamped(index + 1, start, problem.num_tokens);
  }
  sequence.start = start;
  sequence.query_length = stop - start;
  if (stop == start || stop - start > problem.most_tokens) return sequence;

  sequence.length = problem.lengths.clamped(index, 0, problem.max_positions);
  const KeyRange first = keys_seen(problem, sequence.position_of(0), sequence.length);
  const KeyRange last = keys_seen(
      problem, sequence.position_of(sequence.query_length - 1), sequence.length);
  sequence.lowest = first.lower;
  sequence.highest = last.upper;
  sequence.seen_by_all_from = last.lower;
  sequence.seen_by_all_to = first.upper;
  sequence.first_tile = sequence.lowest / TILE;
  const int stop_tile = (sequence.highest + TILE - 1) / TILE;
  sequence.tiles = max(1, stop_tile - sequence.first_tile);
  return sequence;
}

}  // namespace torch_pagedkv
