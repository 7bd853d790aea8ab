// Who reads which keys: rows of a sequence, the tiles that they see, and the CTAs that share them out.
//
// Tiles lie at multiples of their size whatever the window, so a window that hides nothing changes no
// bit. An item is one sequence with one KV head (and one tile of heads); its tiles are consecutive in
// one order of all tiles, sequence by sequence. With num_splits 0 CTA k takes the tiles from
// k * share on, so every CTA reads as much, and an item may be cut wherever a share ends. With
// num_splits above 0 an item is cut by its own length alone.

#pragma once

#include <cuda_runtime.h>

#include "decode_problem.h"

// The arithmetic runs on the host too: tests/cuda_on_host tries it there.
#define TORCH_PAGEDKV_ANYWHERE __host__ __device__ inline

namespace torch_pagedkv {

struct KeyRange {
  int lower, upper;
};

TORCH_PAGEDKV_ANYWHERE KeyRange keys_seen(const DecodeProblem& problem, int position, int length) {
  int64_t lower = 0, upper = length;
  if (problem.window_left >= 0) lower = max(position - problem.window_left, int64_t{0});
  if (problem.window_right >= 0) upper = position + problem.window_right + 1;
  upper = min(max(upper, int64_t{0}), static_cast<int64_t>(length));
  return {static_cast<int>(min(lower, upper)), static_cast<int>(upper)};
}

struct Sequence {
  int start, query_length, length;
  int lowest, highest;                      // keys that any row sees
  int seen_by_all_from, seen_by_all_to;     // keys that every row sees
  int first_tile, tiles;                    // no tiles: nothing to do here

  __host__ __device__ int position_of(int token) const { return token + length - query_length; }
};

// Sequences without rows, and those with more rows than a CTA takes, have no tiles. All others have
// one at least, since rows that see no key are written too.
template <int TILE>
TORCH_PAGEDKV_ANYWHERE Sequence sequence_of(const DecodeProblem& problem, int index) {
  Sequence sequence{};
  int64_t start = index, stop = index + 1;
  if (problem.starts.data) {
    start = problem.starts[index];
    stop = problem.starts[index + 1];
  }
  const int64_t tokens = problem.num_tokens;
  start = min(max(start, int64_t{0}), tokens);
  stop = min(max(stop, start), tokens);
  sequence.start = static_cast<int>(start);
  sequence.query_length = static_cast<int>(stop - start);
  if (stop == start || (stop - start) * problem.heads_of_tile > kRows) return sequence;

  const int64_t length = min(
      max(problem.lengths[index], int64_t{0}), static_cast<int64_t>(problem.max_positions));
  sequence.length = static_cast<int>(length);
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

// A run of an item's tiles, counted from the item's first one.
struct Segment {
  int sequence, item;  // the item's number within its sequence
  int first, count;
  int part, parts;     // parts 1: the whole item
  int64_t slot;        // where a part's partial results go, with num_splits 0
};

// The tiles of all sequences, summed up by a CTA: each thread has a run of sequences.
struct TileSums {
  int run;                 // sequences of a thread
  int64_t before, own;     // tiles of one KV head: of the threads before, and of this one's run
  int64_t total;
};

template <int TILE>
__device__ inline TileSums sum_tiles(const DecodeProblem& problem) {
  __shared__ int64_t sums_of_warps[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  TileSums sums{};
  sums.run = (problem.num_sequences + kDecodeThreads - 1) / kDecodeThreads;
  const int64_t first = static_cast<int64_t>(threadIdx.x) * sums.run;
  const int64_t stop = min(first + sums.run, static_cast<int64_t>(problem.num_sequences));
  for (int64_t index = first; index < stop; ++index) {
    sums.own += sequence_of<TILE>(problem, static_cast<int>(index)).tiles;
  }
  int64_t up_to = sums.own;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFF, up_to, distance);
    if (lane >= distance) up_to += other;
  }
  if (lane == 31) sums_of_warps[warp] = up_to;
  __syncthreads();
  sums.before = up_to - sums.own;
#pragma unroll
  for (int other = 0; other < kWarps; ++other) {
    if (other < warp) sums.before += sums_of_warps[other];
    sums.total += sums_of_warps[other];
  }
  return sums;
}

// Tiles that a CTA takes where all are shared out.
TORCH_PAGEDKV_ANYWHERE int64_t share_of_cta(const DecodeProblem& problem, int64_t total_of_head) {
  const int64_t total = total_of_head * problem.items_of_sequence();
  return max((total + problem.ctas - 1) / problem.ctas, static_cast<int64_t>(problem.least_tiles));
}

// The place in the order of all tiles where a CTA or an item starts.
struct Place {
  int sequence;
  int64_t before;  // tiles of all sequences before, all heads
};

// Finds the sequence that holds tile number `tile`, which is below the total.
template <int TILE>
__device__ inline Place find_tile(
    const DecodeProblem& problem, const TileSums& sums, int64_t tile) {
  __shared__ Place found;
  const int items = problem.items_of_sequence();
  if (tile >= sums.before * items && tile < (sums.before + sums.own) * items) {
    int sequence = static_cast<int>(threadIdx.x) * sums.run;
    int64_t before = sums.before * items;
    while (true) {
      const int64_t tiles =
          static_cast<int64_t>(sequence_of<TILE>(problem, sequence).tiles) * items;
      if (tile < before + tiles) break;
      before += tiles;
      ++sequence;
    }
    found = {sequence, before};
  }
  __syncthreads();
  return found;
}

// Counts the tiles before a sequence.
template <int TILE>
__device__ inline int64_t tiles_before(
    const DecodeProblem& problem, const TileSums& sums, int sequence) {
  __shared__ int64_t counted;
  if (sequence / sums.run == static_cast<int>(threadIdx.x)) {
    int64_t before = sums.before;
    for (int index = sequence / sums.run * sums.run; index < sequence; ++index) {
      before += sequence_of<TILE>(problem, index).tiles;
    }
    counted = before * problem.items_of_sequence();
  }
  __syncthreads();
  return counted;
}

// Which parts an item is in, where all tiles are shared out: CTAs first_cta and those after it.
struct ItemParts {
  int64_t first_cta;
  int parts;
};

TORCH_PAGEDKV_ANYWHERE ItemParts parts_of_item(int64_t first_tile, int tiles, int64_t share) {
  const int64_t first_cta = first_tile / share;
  return {first_cta, static_cast<int>((first_tile + tiles - 1) / share - first_cta) + 1};
}

// A slot for each pair of a CTA and an item that it has tiles of. Either such pairs are numbered in
// their order, in which each step makes the CTA, the item or both larger; or a CTA has one slot for
// the item that it continues and one for an item that it starts. All other items of a CTA are whole.
TORCH_PAGEDKV_ANYWHERE int64_t slot_of(
    const DecodeProblem& problem, int64_t cta, int sequence, int item, bool starts) {
  if (!problem.slots_by_item) return 2 * cta + (starts ? 1 : 0);
  return cta + static_cast<int64_t>(sequence) * problem.items_of_sequence() + item;
}

// An item cut by its own length into at most num_splits parts.
TORCH_PAGEDKV_ANYWHERE Segment part_of_item(int tiles, int part, int num_splits) {
  Segment segment{};
  segment.parts = max(1, min(num_splits, tiles));
  segment.part = part;
  const int share = tiles / segment.parts, larger = tiles % segment.parts;
  segment.first = part * share + min(part, larger);
  segment.count = part < segment.parts ? share + (part < larger ? 1 : 0) : 0;
  return segment;
}

// A CTA's way through the order of all tiles, segment after segment.
template <int TILE>
struct Walk {
  int64_t tile, stop, share;
  int index;       // of the sequence
  int64_t before;  // tiles of all sequences before it, all heads
  Sequence sequence;

  // Starts at tile number `first`, at or after the start of sequence `from`.
  __host__ __device__ Walk(
      const DecodeProblem& problem, int64_t first, int64_t stop, int64_t share, Place from)
      : tile(first),
        stop(stop),
        share(share),
        index(from.sequence),
        before(from.before),
        sequence(sequence_of<TILE>(problem, from.sequence)) {}

  __host__ __device__ bool is_done() const { return tile >= stop; }

  __host__ __device__ Segment next(const DecodeProblem& problem, int64_t cta) {
    const int items = problem.items_of_sequence();
    while (tile >= before + static_cast<int64_t>(sequence.tiles) * items) {
      before += static_cast<int64_t>(sequence.tiles) * items;
      sequence = sequence_of<TILE>(problem, ++index);
    }
    const int item = static_cast<int>((tile - before) / sequence.tiles);
    const int64_t first_of_item = before + static_cast<int64_t>(item) * sequence.tiles;
    const ItemParts cut = parts_of_item(first_of_item, sequence.tiles, share);
    Segment segment{};
    segment.sequence = index;
    segment.item = item;
    segment.first = static_cast<int>(tile - first_of_item);
    segment.count =
        static_cast<int>(min(static_cast<int64_t>(sequence.tiles - segment.first), stop - tile));
    segment.part = static_cast<int>(cta - cut.first_cta);
    segment.parts = cut.parts;
    segment.slot = slot_of(problem, cta, index, item, segment.first == 0);
    tile += segment.count;
    return segment;
  }
};

}  // namespace torch_pagedkv
