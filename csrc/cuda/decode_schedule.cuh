// Which tiles a warp reads: its way through a share of them, or through a part of one item.
//
// Tiles lie at multiples of their size whatever the window, so a window that hides nothing changes no
// bit. An item is one sequence with one KV head (and one tile of heads). Items whose heads lie side by
// side in a block are walked side by side, by a team of warps that read the same blocks at about the
// same time. With num_splits 0 teams share out all tiles (decode_shares.cuh), with num_splits above 0 an item
// is cut by its own length alone.

#pragma once

#include "decode_shares.cuh"

namespace torch_pagedkv {

// A run of an item's tiles, counted from the item's first one.
struct Segment {
  int sequence, item;  // the item's number within its sequence
  int kv_head;
  int first, count;
  bool is_whole;  // all of the item's tiles
  int64_t slot;   // where the partial results of a part go
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
  int64_t left;      // places in the order of tiles
  int span;          // of each sequence there; 0: as many as its tiles
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

  // Through so many places of a team, from number `tile` on, in the sequence at `place`.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static Walk through_share(
      const DecodeProblem& problem, int64_t team, int member, const Place& place,
      const Sequence& sequence, const Shares& shares, int64_t tile, int64_t places) {
    Walk walk{};
    walk.left = places, walk.span = shares.span;
    walk.team = team, walk.member = member, walk.part = -1;
    walk.index = place.sequence;
    walk.sequence = sequence;
    const int64_t after = tile - place.before;
    const int of_group = shares.places_of(sequence.tiles);
    walk.group = problem.groups == 1 ? 0 : static_cast<int>(quotient(after, of_group));
    walk.first = static_cast<int>(after - static_cast<int64_t>(walk.group) * of_group);
    if (walk.first >= sequence.tiles) walk.left = 0;  // such a share has no tile
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
    if (span > 0 && first == sequence.tiles) left = max(left - (span - first), static_cast<int64_t>(0));
    return segment;
  }
};

}  // namespace torch_pagedkv
