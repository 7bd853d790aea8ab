// How CTAs share out the tiles of decode attention, run on the host over random batches: every tile of
// every short sequence is taken once, the parts of an item are the ones that the merge looks for, by groups
// and by cuts, and their slots are their own; sequences about as long as each other are cut no more than
// they must; where prefill attention runs beside it, warps of some multiprocessors have nothing. Prints how
// many of these are wrong.

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/decode_parts.cuh"

using namespace torch_pagedkv;

constexpr int kTile = 64;
long wrong = 0;
long alignments = 0;

void expect(bool is_right) { wrong += !is_right; }

using Item = std::tuple<int, int>;

struct Batch {
  std::vector<int64_t> lengths, starts;
  DecodeProblem problem{};

  explicit Batch(std::mt19937& random) {
    const int sequences = random() % 4 ? random() % 12 : random() % 400;
    const bool is_packed = random() % 2, is_alike = random() % 3 == 0;
    const int about = 64 + random() % 2800, spread = 1 + random() % 2 * 90;
    starts.push_back(0);
    for (int i = 0; i < sequences; ++i) {
      const int length = random() % 5 ? random() % 3000 : random() % 3;
      lengths.push_back(is_alike ? about + static_cast<int>(random() % spread) : length);
      const int rows = random() % (random() % 6 ? 5 : 60);
      starts.push_back(starts.back() + (is_alike || !is_packed ? 1 : rows));
    }
    problem.num_sequences = sequences;
    problem.num_tokens = static_cast<int>(starts.back() + random() % 3);
    problem.max_positions = 2900;
    problem.num_kv_heads = 1 + random() % 5;
    problem.group = 1 + random() % 40;
    problem.cut_heads();
    for (int row = 0; row < kRows; ++row) expect(problem.token_of_row(row) == row / problem.heads_of_tile);
    problem.window_left = random() % 3 ? -1 : static_cast<int>(random() % 500);
    problem.window_right = random() % 3 ? 0 : static_cast<int>(random() % 40) - 1;
    problem.lengths.data = reinterpret_cast<const char*>(lengths.data());
    problem.lengths.stride = 8, problem.lengths.is_wide = true;
    if (is_packed) problem.starts.data = reinterpret_cast<const char*>(starts.data());
    problem.starts.stride = 8, problem.starts.is_wide = true;
    const int items = problem.items_of_sequence();
    problem.form_teams();
    expect(problem.team <= kMostOfTeam && problem.team * problem.groups == items);
    for (int64_t warp = 0; warp < 1 << 25; warp = 2 * warp + random() % 9) {
      expect(problem.team_of_warp(warp) == warp / problem.team);
    }
    problem.team = 1 + random() % 8;
    while (items % problem.team != 0) --problem.team;
    problem.groups = items / problem.team;
    problem.teams = 1 + random() % (random() % 2 ? 40 : 200);
    problem.least_tiles = 1 + random() % 3;
    problem.slots_by_group = random() % 2;
    problem.rows_of_slot = 1 + random() % kRows;
    problem.beside.tokens_of_tile = random() % 2 ? 1 + static_cast<int>(random() % 128) : 0;
    problem.beside.warps = 8 - static_cast<int>(random() % 2) * 4;
    problem.beside.multiprocessors = problem.teams * problem.team / problem.beside.warps + 1 + random() % 3;
    problem.beside.keys_of_tile = kTile;
  }
};

// What prefill attention has to do, summed up in any order.
PrefillLoad load_of(const DecodeProblem& problem, std::mt19937& random) {
  PrefillLoad parts[3] = {};
  for (int index = 0; index < problem.num_sequences; ++index) {
    parts[random() % 3].add(prefill_load_of<true>(problem, index, sequence_of<kTile>(problem, index)));
  }
  parts[0].add(parts[1]);
  parts[2].add(parts[0]);
  return parts[2];
}

// Multiprocessors are left where both have work, the fewer the less there is of prefill's.
void check_left(DecodeProblem problem, const PrefillLoad& load, const TileCounts& counts) {
  const int64_t tiles = counts.total;
  const int left = multiprocessors_left(problem, tiles, load);
  expect(left >= 0 && left <= problem.beside.multiprocessors / 2);
  expect(left == 0 || (load.items > 0 && tiles > 0));
  expect(multiprocessors_left(problem, tiles, {load.items / 2, load.largest}) <= left);
  const Shares shares = shares_of(problem, counts, load);
  const int64_t share = shares.of_team, places = shares.places(problem, counts) * problem.groups;
  const int64_t warps = (places + share - 1) / share * problem.team;
  const int64_t kept = (problem.beside.multiprocessors - left) * problem.beside.warps;
  expect(warps <= std::max<int64_t>(kept, problem.team));
  problem.beside.tokens_of_tile = 0;
  std::mt19937 random(0);
  expect(load_of(problem, random).items == 0);
  expect(left > 0 || share == shares_of(problem, counts, {0, 0}).of_team);
}

// Shares of sequences about as long as each other: little more than equal ones, and cuts where they cost nothing.
void check_aligned(const DecodeProblem& problem, const TileCounts& counts, const Shares& shares) {
  const int64_t teams = problem.teams, groups = problem.groups_of_all();
  const int64_t equal = std::max<int64_t>((counts.total * problem.groups + teams - 1) / teams, problem.least_tiles);
  if (shares.span == 0) {
    expect(shares.of_team >= equal);
    return;
  }
  alignments += 1;
  expect(shares.of_team <= equal + equal / kSharesOfSlack);
  expect(shares.span >= static_cast<int64_t>(counts.most));
  expect(shares.span * groups <= shares.of_team * teams);  // nobody takes what the last team leaves
  expect(shares.span % shares.of_team == 0 || shares.of_team % shares.span == 0);
}

// The sequence that a place is in.
Place place_of(const DecodeProblem& problem, const Shares& shares, int64_t tile) {
  Place place{0, 0};
  while (true) {
    const int tiles = sequence_of<kTile>(problem, place.sequence).tiles;
    const int64_t here = static_cast<int64_t>(shares.places_of(tiles)) * problem.groups;
    if (tile < place.before + here) return place;
    place = {place.sequence + 1, place.before + here};
  }
}

// Adds the slots of the items of a group that has some to join, in their order; a group that was there already
// has them twice.
void add_parts(
    const DecodeProblem& problem, const CutGroup& cut, std::map<Item, std::vector<int64_t>>& slots_of_parts) {
  if (cut.parts.count <= 1) return;
  for (int member = 0; member < problem.team; ++member) {
    std::vector<int64_t>& slots = slots_of_parts[{cut.index, cut.group * problem.team + member}];
    for (int part = 0; part < cut.parts.count; ++part) {
      const int row = cut.parts.row_of(part) + member * cut.parts.step_of_item;
      expect(row % problem.rows_of_slot == 0);
      slots.push_back(row / problem.rows_of_slot);
    }
  }
}

void check_shares(const Batch& batch, std::mt19937& random) {
  const DecodeProblem& problem = batch.problem;
  const int items = problem.items_of_sequence();
  TileCounts counts{0, 0};
  for (int index = 0; index < problem.num_sequences; ++index) {
    counts.add(TileCounts::of(sequence_of<kTile>(problem, index).tiles));
  }
  const PrefillLoad load = load_of(problem, random);
  const PrefillLoad again = load_of(problem, random);
  expect(load.items == again.items && load.largest == again.largest);
  check_left(problem, load, counts);
  const Shares shares = shares_of(problem, counts, load);
  const int64_t share = shares.of_team, all = shares.places(problem, counts) * problem.groups;
  check_aligned(problem, counts, shares);
  std::map<Item, int> tiles, taken;
  std::map<Item, int64_t> first_tiles;
  int64_t before = 0;
  for (int index = 0; index < problem.num_sequences; ++index) {
    const Sequence sequence = sequence_of<kTile>(problem, index);
    const int places = shares.places_of(sequence.tiles);
    for (int item = 0; item < items && sequence.tiles > 0; ++item) {
      tiles[{index, item}] = sequence.tiles;
      first_tiles[{index, item}] =
          before * problem.groups + static_cast<int64_t>(item / problem.team) * places;
    }
    before += places;
  }
  const int64_t pairs = problem.slots_by_group
                            ? problem.teams + problem.groups_of_all() - 1
                            : 2 * static_cast<int64_t>(problem.teams);
  std::set<int64_t> used;
  std::map<Item, std::vector<int64_t>> slots_of_parts;
  std::vector<TeamStart> starts(problem.teams, TeamStart{});
  for (int64_t team = 0; team < problem.teams; ++team) {
    const int64_t first = team * share, count = std::min(share, all - first);
    if (count <= 0) continue;
    const Place start = place_of(problem, shares, first);
    const int tiles_of_start = sequence_of<kTile>(problem, start.sequence).tiles;
    starts[team] = {start.before, share, start.sequence, tiles_of_start, shares.span};
    for (int member = 0; member < problem.team; ++member) {
      const Sequence sequence = sequence_of<kTile>(problem, start.sequence);
      auto walk = Walk<kTile>::through_share(problem, team, member, start, sequence, shares, first, count);
      while (!walk.is_done()) {
        const Segment segment = walk.next(problem);
        const Item key{segment.sequence, segment.item};
        expect(segment.item % problem.team == member);
        expect(segment.count > 0 && segment.first == taken[key]);  // in order, without gaps
        taken[key] += segment.count;
        expect(segment.is_whole == (segment.count == tiles[key]));
        if (segment.is_whole) continue;
        expect(segment.slot >= 0 && segment.slot < pairs * problem.team && used.insert(segment.slot).second);
        slots_of_parts[key].push_back(segment.slot);
      }
    }
  }
  expect(taken == tiles);
  std::map<Item, std::vector<int64_t>> looked_for, found_by_cuts;
  for (const auto& [key, count] : tiles) {
    const auto [index, item] = key;
    if (item % problem.team != 0) continue;
    const int group = item / problem.team;
    const int64_t before = first_tiles[key] - static_cast<int64_t>(group) * shares.places_of(count);
    const GroupPlace place(index, group, before, count, shares);
    add_parts(problem, {index, group, GroupParts::by_shares(problem, place, place.first / share)}, looked_for);
  }
  for (int64_t cut = 0; cut + 1 < problem.teams; ++cut) {
    add_parts(problem, CutGroup::at(problem, cut, starts[cut + 1]), found_by_cuts);
  }
  expect(looked_for == slots_of_parts);
  expect(found_by_cuts == slots_of_parts);
}

// The parts of items that are cut by their own length: none is empty, and no two have one slot.
void check_parts(DecodeProblem problem, int most_parts) {
  problem.parts = most_parts;
  std::set<int64_t> used;
  for (int index = 0; index < problem.num_sequences; ++index) {
    const Sequence sequence = sequence_of<kTile>(problem, index);
    const int parts = parts_of_item(problem, sequence.tiles);
    expect(parts >= 1 && parts <= most_parts);
    for (int item = 0; item < problem.items_of_sequence(); ++item) {
      int next = 0;
      for (int part = 0; part < most_parts; ++part) {
        auto walk = Walk<kTile>::through_part(problem, index, sequence, item, part);
        expect(walk.is_done() == (part >= parts || sequence.tiles == 0));
        if (walk.is_done()) continue;
        const Segment segment = walk.next(problem);
        expect(walk.is_done() && segment.sequence == index && segment.item == item && segment.first == next);
        expect(segment.is_whole == (parts == 1) && used.insert(segment.slot).second);
        next += segment.count;
      }
      expect(next == sequence.tiles);
    }
  }
}

void check_sequences(const Batch& batch) {
  const DecodeProblem& problem = batch.problem;
  for (int index = 0; index < problem.num_sequences; ++index) {
    const Sequence sequence = sequence_of<kTile>(problem, index);
    const int64_t query_length = problem.starts.data ? batch.starts[index + 1] - batch.starts[index] : 1;
    const bool is_served = query_length > 0 && query_length * problem.heads_of_tile <= kRows;
    expect((sequence.tiles > 0) == is_served);
    if (!is_served) continue;
    const int64_t length = std::min<int64_t>(batch.lengths[index], problem.max_positions);
    for (int64_t key = 0; key < length; ++key) {
      bool any = false, all = true;
      for (int64_t token = 0; token < query_length; ++token) {
        const int64_t position = token + length - query_length;
        const bool sees = (problem.window_left < 0 || key >= position - problem.window_left) &&
                          (problem.window_right < 0 || key <= position + problem.window_right);
        const KeyRange range = keys_seen(problem, static_cast<int>(position), static_cast<int>(length));
        expect(sees == (key >= range.lower && key < range.upper));
        any |= sees, all &= sees;
      }
      const int64_t tile = key / kTile - sequence.first_tile;
      if (any) expect(tile >= 0 && tile < sequence.tiles && key >= sequence.lowest && key < sequence.highest);
      if (!all) expect(key < sequence.seen_by_all_from || key >= sequence.seen_by_all_to);
    }
  }
}

// Small numbers by each other, as where a lane finds its piece of a row.
void check_small_divisor() {
  for (int divisor = 1; divisor <= 1024; ++divisor) {
    const SmallDivisor by(divisor);
    for (int number = 0; number <= 1024; ++number) expect(by.quotient(number) == number / divisor);
  }
}

int main() {
  check_small_divisor();
  std::mt19937 random(0);
  for (int round = 0; round < 400; ++round) {
    const Batch batch(random);
    check_shares(batch, random);
    if (batch.problem.num_sequences >= 12) continue;
    check_sequences(batch);
    for (const int parts : {1, 2, 3, 8, 100}) check_parts(batch.problem, parts);
  }
  expect(alignments > 20);
  std::printf("%ld\n", wrong);
}
