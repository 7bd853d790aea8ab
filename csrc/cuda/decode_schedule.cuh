// Who reads which keys: rows of a sequence, the tiles that they see, and the warps that share them out.
//
// Tiles lie at multiples of their size whatever the window, so a window that hides nothing changes no
// bit. An item is one sequence with one KV head (and one tile of heads). Items whose heads lie side by
// side in a block are walked side by side, by a team of warps that read the same blocks at about the
// same time. All tiles have one order: sequence by sequence, group of items by group, tile by tile. With
// num_splits 0 team k takes those from k * share on, so every warp reads as much, and an item may be cut
// wherever a share ends. The last teams have none where multiprocessors are left to prefill attention. With
// num_splits above 0 an item is cut by its own length alone.

#pragma once

#include "key_range.cuh"
#include "mixed_batch.cuh"

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

// A run of an item's tiles, counted from the item's first one.
struct Segment {
  int sequence, item;  // the item's number within its sequence
  int kv_head;
  int first, count;
  bool is_whole;  // all of the item's tiles
  int64_t slot;   // where the partial results of a part go
};

// A sequence's place in the order of all tiles.
struct Place {
  int sequence;
  int64_t before;  // tiles before it, of all groups
};

// Tiles of each of its items that a team takes where all are shared out.
TORCH_PAGEDKV_ANYWHERE int64_t share_of_team(
    const DecodeProblem& problem, int64_t total_of_item, const PrefillLoad& load) {
  const int64_t total = total_of_item * problem.groups;
  int64_t teams = problem.teams;
  const int left = multiprocessors_left(problem, total_of_item, load);
  if (left > 0) {
    const int kept = problem.beside.multiprocessors - left;
    teams = min(teams, max(quotient(kept * problem.beside.warps, problem.team), static_cast<int64_t>(1)));
  }
  return max(quotient(total + teams - 1, teams), static_cast<int64_t>(problem.least_tiles));
}

// What prefill attention has to do with a sequence, where that matters.
template <bool LEAVES>
TORCH_PAGEDKV_ANYWHERE PrefillLoad prefill_load_of(
    const DecodeProblem& problem, int index, const Sequence& sequence) {
  if constexpr (!LEAVES) return {0, 0};
  if (problem.beside.tokens_of_tile == 0 || sequence.query_length <= problem.most_tokens) return {0, 0};
  return PrefillLoad::of(
      problem, sequence.query_length, problem.lengths.clamped(index, 0, problem.max_positions));
}

// Where the teams of a CTA of up to so many threads start, found by all of them in shared memory.
template <int TILE, int THREADS, bool LEAVES>
struct TeamStarts {
  int64_t total;                    // tiles of one item of all sequences
  int64_t share;
  int64_t of_warps[THREADS / 32];   // the same, of the sequences that the threads of a warp look at
  PrefillLoad loads[THREADS / 32];
  Place places[THREADS / 32];       // of the CTA's teams that have tiles

  // Called by the whole CTA. The first one also writes the tiles before each sequence, then the share, for
  // the launch that joins parts.
  __device__ void find(const DecodeProblem& problem, int64_t first_team, int64_t last_team) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int run = problem.num_sequences <= static_cast<int>(blockDim.x)
                        ? 1
                        : (problem.num_sequences + blockDim.x - 1) / blockDim.x;
    const int first = min(static_cast<int>(threadIdx.x) * run, problem.num_sequences);
    const int stop = min(first + run, problem.num_sequences);
    int64_t own = 0;
    PrefillLoad load{0, 0};
#pragma unroll 1
    for (int index = first; index < stop; ++index) {
      const Sequence sequence = sequence_of<TILE>(problem, index);
      own += sequence.tiles;
      load.add(prefill_load_of<LEAVES>(problem, index, sequence));
    }
    int64_t before = own;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int64_t other = __shfl_up_sync(0xFFFFFFFF, before, distance);
      if (lane >= distance) before += other;
    }
    if constexpr (LEAVES) load = load.of_warp();
    if (lane == 31) of_warps[warp] = before, loads[warp] = load;
    __syncthreads();
    before -= own;
    int64_t of_all = 0;
    load = {0, 0};
#pragma unroll
    for (int other = 0; other < THREADS / 32; ++other) {
      if (other >= blockDim.x / 32) break;
      if (other == warp) before += of_all;
      of_all += of_warps[other];
      if constexpr (LEAVES) load.add(loads[other]);
    }
    const int64_t own_share = share_of_team(problem, of_all, load);
    if (threadIdx.x == 0) total = of_all, share = own_share;
    const bool writes = blockIdx.x == 0 && problem.tiles_before != nullptr;
    if (writes && threadIdx.x == 0) problem.tiles_before[problem.num_sequences] = own_share;
#pragma unroll 1
    for (int index = first; index < stop; ++index) {
      const int64_t tiles = run == 1 ? own : sequence_of<TILE>(problem, index).tiles;
      if (writes) problem.tiles_before[index] = before;
      const int64_t start_tile = before * problem.groups;
      before += tiles;
#pragma unroll 1
      for (int64_t team = first_team; team <= last_team; ++team) {
        const int64_t tile = team * own_share;
        const bool is_here = tile >= start_tile && tile < before * problem.groups;
        if (is_here) places[team - first_team] = {index, start_tile};
      }
    }
    __syncthreads();
  }
};

// Slots of partial results, `team` of each: one for each pair of a team and a group that it has tiles
// of. Either such pairs are numbered in their order, in which each step makes the team, the group or
// both larger; or a team has one slot for the group that it continues and one for a group that it
// starts. All other groups of a team are whole.
TORCH_PAGEDKV_ANYWHERE int64_t slot_of(
    const DecodeProblem& problem, int64_t team, int sequence, int group, int member, bool starts) {
  const int64_t pair = problem.slots_by_group
                           ? team + static_cast<int64_t>(sequence) * problem.groups + group
                           : 2 * team + (starts ? 1 : 0);
  return pair * problem.team + member;
}

// The slot of a part of an item that is cut by its own length.
TORCH_PAGEDKV_ANYWHERE int64_t slot_of_part(
    const DecodeProblem& problem, int sequence, int item, int part) {
  const int64_t items = problem.items_of_sequence();
  return (sequence * items + item) * problem.parts + part;
}

// How many parts an item is cut into by its own length.
TORCH_PAGEDKV_ANYWHERE int parts_of_item(const DecodeProblem& problem, int tiles) {
  return max(1, min(problem.parts, (tiles + problem.least_tiles - 1) / problem.least_tiles));
}

struct PartOfItem {
  int first, count;  // tiles
};

TORCH_PAGEDKV_ANYWHERE PartOfItem part_of_item(const DecodeProblem& problem, int tiles, int part) {
  const int parts = parts_of_item(problem, tiles);
  const int share = tiles / parts, larger = tiles % parts;
  return {
      part * share + min(part, larger), part < parts ? share + (part < larger ? 1 : 0) : 0};
}

// A warp's way through its tiles, segment after segment.
template <int TILE>
struct Walk {
  int64_t left;      // tiles
  int64_t team;
  int member, part;  // part: -1 where all is shared out
  int index, group, first;  // where the next segment starts
  Sequence sequence;        // of the last segment

  // Through one part of an item, which may be empty. `index`: the sequence's number.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static Walk through_part(
      const DecodeProblem& problem, int index, const Sequence& sequence, int item, int part) {
    Walk walk{};
    walk.sequence = sequence;
    const PartOfItem own = part_of_item(problem, walk.sequence.tiles, part);
    walk.left = own.count, walk.first = own.first;
    walk.member = item % problem.team, walk.group = item / problem.team;
    walk.index = index, walk.part = part;
    return walk;
  }

  // Through so many tiles of a team, from number `tile` on, in the sequence at `place`.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static Walk through_share(
      const DecodeProblem& problem, int64_t team, int member, const Place& place,
      const Sequence& sequence, int64_t tile, int64_t tiles) {
    Walk walk{};
    walk.left = tiles;
    walk.team = team, walk.member = member, walk.part = -1;
    walk.index = place.sequence;
    walk.sequence = sequence;
    const int64_t after = tile - place.before;
    walk.group = problem.groups == 1 ? 0 : static_cast<int>(quotient(after, walk.sequence.tiles));
    walk.first = static_cast<int>(after - static_cast<int64_t>(walk.group) * walk.sequence.tiles);
    return walk;
  }

  TORCH_PAGEDKV_ANYWHERE_MEMBER bool is_done() const { return left == 0; }

  // The next segment; its sequence is in `sequence` then. Not called where all is done.
  TORCH_PAGEDKV_ANYWHERE_MEMBER Segment next(const DecodeProblem& problem) {
    if (first == sequence.tiles) {
      first = 0;
      if (++group == problem.groups) {
        group = 0;
        do sequence = sequence_of<TILE>(problem, ++index); while (sequence.tiles == 0);
      }
    }
    Segment segment{};
    segment.sequence = index;
    segment.item = group * problem.team + member;
    segment.kv_head = problem.head_tiles == 1 ? segment.item : segment.item / problem.head_tiles;
    segment.first = first;
    segment.count = static_cast<int>(min(static_cast<int64_t>(sequence.tiles - first), left));
    segment.is_whole = segment.count == sequence.tiles;
    segment.slot = part >= 0 ? slot_of_part(problem, index, segment.item, part)
                             : slot_of(problem, team, index, group, member, first == 0);
    first += segment.count;
    left -= segment.count;
    return segment;
  }
};

}  // namespace torch_pagedkv
