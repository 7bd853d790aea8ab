// Which groups of items were cut, and where their parts lie: what the launch that joins them looks for.

#pragma once

#include "decode_schedule.cuh"

namespace torch_pagedkv {

// A group of items in the order of all places.
struct GroupPlace {
  int index, group;      // its sequence, and its number there
  int64_t first, share;  // its first place, and the places of a team
  int tiles;             // of one of its items

  // `before`: places before the sequence, of all groups.
  TORCH_PAGEDKV_ANYWHERE_MEMBER GroupPlace(int index, int group, int64_t before, int tiles, const Shares& shares)
      : index(index),
        group(group),
        first(before + static_cast<int64_t>(group) * shares.places_of(tiles)),
        share(shares.of_team),
        tiles(tiles) {}
};

// The parts of a group of items, where they lie.
struct GroupParts {
  int count;  // of each item: one or none where there is nothing to join
  // Partial rows (there are fewer than 2**31): of the first part of the first item, of the second, and from there
  // on; and from item to item.
  int first, second, step, step_of_item;

  TORCH_PAGEDKV_ANYWHERE_MEMBER static GroupParts by_own_length(
      const DecodeProblem& problem, int index, int group, int tiles) {
    const int rows = problem.rows_of_slot;
    const int row = static_cast<int>(slot_of_part(problem, index, group * problem.team, 0) * rows);
    return {parts_of_item(problem, tiles), row, row + rows, rows, problem.parts * rows};
  }

  // `first_team`: which the first place is of.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static GroupParts by_shares(
      const DecodeProblem& problem, const GroupPlace& place, int64_t first_team) {
    const int rows = problem.rows_of_slot;
    const int count = static_cast<int>(quotient(place.first + place.tiles - 1, place.share) - first_team) + 1;
    const int64_t slot = slot_of(problem, first_team, place.index, place.group, 0, true);
    const int64_t next = slot_of(problem, first_team + 1, place.index, place.group, 0, false);
    return {
        count, static_cast<int>(slot * rows), static_cast<int>(next * rows),
        (problem.slots_by_group ? 1 : 2) * problem.team * rows, rows};
  }

  TORCH_PAGEDKV_ANYWHERE_MEMBER int row_of(int part) const {
    return part == 0 ? first : second + (part - 1) * step;
  }
};

// A group of items with its parts.
struct CutGroup {
  int index, group;
  GroupParts parts;

  // The group that the cut before team `cut` + 1 lies in. Of the cuts in one group the first one counts, others find
  // no part.
  TORCH_PAGEDKV_ANYWHERE_MEMBER static CutGroup at(
      const DecodeProblem& problem, int64_t cut, const TeamStart& start) {
    if (start.tiles == 0) return CutGroup{};
    const Shares shares{start.share, start.span};
    const int64_t after = (cut + 1) * start.share - start.before;
    const int group = problem.groups == 1 ? 0 : static_cast<int>(quotient(after, shares.places_of(start.tiles)));
    const GroupPlace place(start.sequence, group, start.before, start.tiles, shares);
    if (quotient(place.first, place.share) != cut) return CutGroup{};
    return {start.sequence, group, GroupParts::by_shares(problem, place, cut)};
  }
};

}  // namespace torch_pagedkv
