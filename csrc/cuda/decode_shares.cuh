// How teams of warps share out all tiles, where num_splits is 0.
//
// All tiles have one order: sequence by sequence, group of items by group, tile by tile. Team k takes those from
// k * share on, so every warp reads as much, and an item may be cut wherever a share ends. Parts have to be joined,
// so where sequences are about as long as each other, and where it makes shares but little larger, a group is a
// whole number of shares, or a share a whole number of groups: each sequence then has as many places in the order
// as the longest, and the last ones may be empty. The last teams have none where multiprocessors are left to
// prefill attention.

#pragma once

#include "decode_sequence.cuh"
#include "mixed_batch.cuh"

namespace torch_pagedkv {

// Tiles of one item of some sequences.
struct TileCounts {
  static constexpr uint32_t kIdle = UINT32_MAX;  // such a sequence has no places that a walk could count

  int64_t total;
  uint32_t most;  // of a sequence; kIdle where one of them has none

  TORCH_PAGEDKV_ANYWHERE_MEMBER static TileCounts of(int tiles) {
    return {tiles, tiles > 0 ? static_cast<uint32_t>(tiles) : kIdle};
  }
  TORCH_PAGEDKV_ANYWHERE_MEMBER void add(const TileCounts& other) {
    total += other.total;
    most = max(most, other.most);
  }
};

struct Shares {
  int64_t of_team;  // places that a team takes, of each of its items
  int span;         // places of every sequence; 0: as many as it has tiles

  TORCH_PAGEDKV_ANYWHERE_MEMBER int places_of(int tiles) const { return span > 0 ? span : tiles; }
  // Of one item of all sequences.
  TORCH_PAGEDKV_ANYWHERE_MEMBER int64_t places(const DecodeProblem& problem, const TileCounts& counts) const {
    return span > 0 ? static_cast<int64_t>(span) * problem.num_sequences : counts.total;
  }
};

// `counts`: of all sequences. Groups of items are fewer than 2**31, and so are the tiles of a sequence.
TORCH_PAGEDKV_ANYWHERE Shares shares_of(
    const DecodeProblem& problem, const TileCounts& counts, const PrefillLoad& load) {
  const int64_t least = problem.least_tiles, total = counts.total * problem.groups;
  int64_t of_all = problem.teams;
  const int left = multiprocessors_left(problem, counts.total, load);
  if (left > 0) {
    const int kept = problem.beside.multiprocessors - left;
    of_all = min(of_all, max(quotient(kept * problem.beside.warps, problem.team), static_cast<int64_t>(1)));
  }
  const Shares equal{max(quotient(total + of_all - 1, of_all), least), 0};
  const uint32_t groups = static_cast<uint32_t>(problem.num_sequences) * problem.groups;
  if (groups <= 1 || left > 0 || counts.most == TileCounts::kIdle) return equal;
  const uint32_t most = counts.most, teams = problem.teams;
  uint32_t parts = 1, of_part = most;  // of an item, or
  int64_t whole = 1;                   // groups that a team takes
  if (groups <= teams) {
    parts = teams / groups;
    of_part = max((most + parts - 1) / parts, static_cast<uint32_t>(problem.least_tiles));
  } else {
    whole = (groups + teams - 1) / teams;
  }
  const Shares aligned{whole * of_part, static_cast<int>(parts * of_part)};
  const bool is_small = aligned.of_team * kSharesOfSlack <= equal.of_team * (kSharesOfSlack + 1);
  return is_small ? aligned : equal;
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

// A sequence's place in the order of all tiles.
struct Place {
  int sequence;
  int64_t before;  // places before it, of all groups
};

// Where a warp's team starts.
struct TeamPlace {
  Shares shares;
  int64_t places;  // of one item of all sequences
  Place place;     // of no meaning where the team has none
  Sequence sequence;
};

// What the warps of a CTA of up to so many threads find out together where sequences are more than a warp's lanes.
template <int THREADS>
struct TeamPlaces {
  TileCounts of_warps[THREADS / 32];  // of the sequences that the threads of a warp look at
  PrefillLoad loads[THREADS / 32];
  Place of_teams[THREADS / 32];       // of the CTA's teams
};

// What a thread finds out of a run of sequences.
template <int TILE, bool LEAVES>
struct SequenceRun {
  int first, stop;
  TileCounts counts;
  PrefillLoad load;
  Sequence last;

  __device__ SequenceRun(const DecodeProblem& problem, int first, int stop)
      : first(first), stop(stop), counts{0, 0}, load{0, 0}, last{} {
#pragma unroll 1
    for (int index = first; index < stop; ++index) {
      last = sequence_of<TILE>(problem, index);
      counts.add(TileCounts::of(last.tiles));
      load.add(prefill_load_of<LEAVES>(problem, index, last));
    }
  }
};

// Finds the sequence that place number `place` lies in, where each lane has one sequence at most; `before`: places
// before it, of one item. Called by the whole warp.
template <class Run>
__device__ inline void find_among_lanes(
    const DecodeProblem& problem, const Run& own, int64_t before, int64_t place, TeamPlace& found) {
  const int64_t start = before * problem.groups;
  const int64_t places = found.shares.places_of(static_cast<int>(own.counts.total));
  const bool is_here = own.first < own.stop && place >= start && place < start + places * problem.groups;
  const int source = max(__ffs(__ballot_sync(0xFFFFFFFF, is_here)) - 1, 0);
  found.place = {source, __shfl_sync(0xFFFFFFFF, start, source)};
  found.sequence = own.last.of_lane(source);
}

// Finds the sequences that teams `first_team` to `last_team` start in, where each thread has a run of sequences.
template <int TILE, class Run>
__device__ inline void find_among_threads(
    const DecodeProblem& problem, const Run& own, int64_t before, const Shares& shares, int64_t first_team,
    int64_t last_team, Place* of_teams) {
  const int sequences = own.stop - own.first;
  const int64_t places = shares.span > 0 ? static_cast<int64_t>(sequences) * shares.span : own.counts.total;
  // Most threads have no sequence that a team of this CTA starts in.
  const bool has_start = first_team * shares.of_team < (before + places) * problem.groups &&
                         last_team * shares.of_team >= before * problem.groups;
#pragma unroll 1
  for (int index = own.first; has_start && index < own.stop; ++index) {
    const int tiles = sequences == 1 ? static_cast<int>(own.counts.total) : sequence_of<TILE>(problem, index).tiles;
    const int64_t start = before * problem.groups;
    before += shares.places_of(tiles);
#pragma unroll 1
    for (int64_t team = first_team; team <= last_team; ++team) {
      const int64_t place = team * shares.of_team;
      if (place >= start && place < before * problem.groups) of_teams[team - first_team] = {index, start};
    }
  }
}

// Called by the whole CTA, whose teams are `first_team` to `last_team`; `team`: the warp's. Up to as many sequences
// as a warp has lanes are looked at by each warp: code that runs once takes longer to be fetched than to run.
template <int TILE, bool LEAVES, int THREADS>
__device__ inline TeamPlace place_of_team(
    const DecodeProblem& problem, TeamPlaces<THREADS>& shared, int64_t first_team, int64_t last_team, int64_t team) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int sequences = problem.num_sequences, threads = blockDim.x;
  const bool is_small = sequences <= 32;
  const int run = sequences <= threads ? 1 : (sequences + threads - 1) / threads;
  const int first = is_small ? min(lane, sequences) : min(static_cast<int>(threadIdx.x) * run, sequences);
  const SequenceRun<TILE, LEAVES> own(problem, first, min(first + run, sequences));
  int64_t before = own.counts.total;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int64_t other = __shfl_up_sync(0xFFFFFFFF, before, distance);
    if (lane >= distance) before += other;
  }
  TileCounts all{__shfl_sync(0xFFFFFFFF, before, 31), __reduce_max_sync(0xFFFFFFFF, own.counts.most)};
  PrefillLoad load = own.load;
  if constexpr (LEAVES) load = load.of_warp();
  before -= own.counts.total;
  if (!is_small) {
    if (lane == 0) shared.of_warps[warp] = all, shared.loads[warp] = load;
    __syncthreads();
    all = {0, 0};
    load = {0, 0};
#pragma unroll 1
    for (int other = 0; other < threads / 32; ++other) {
      if (other == warp) before += all.total;
      all.add(shared.of_warps[other]);
      if constexpr (LEAVES) load.add(shared.loads[other]);
    }
  }
  const Shares shares = shares_of(problem, all, load);
  TeamPlace found{shares, shares.places(problem, all), {}, {}};
  if (shares.span > 0) before = static_cast<int64_t>(first) * shares.span;
  if (is_small) {
    find_among_lanes(problem, own, before, team * shares.of_team, found);
    return found;
  }
  find_among_threads<TILE>(problem, own, before, shares, first_team, last_team, shared.of_teams);
  __syncthreads();
  if (team * shares.of_team < found.places * problem.groups) {
    found.place = shared.of_teams[team - first_team];
    found.sequence = sequence_of<TILE>(problem, found.place.sequence);
  }
  return found;
}

}  // namespace torch_pagedkv
