// How CTAs share out the tiles of decode attention, run on the host over random batches: every tile of
// every short sequence is taken once, the parts of an item are the ones that the merge looks for, and
// their slots are their own. Prints how many of these are wrong.

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "cuda/decode_schedule.cuh"

using namespace torch_pagedkv;

constexpr int kTile = 64;
long wrong = 0;

void expect(bool is_right) { wrong += !is_right; }

using Item = std::tuple<int, int>;

struct Batch {
  std::vector<int64_t> lengths, starts;
  DecodeProblem problem{};

  explicit Batch(std::mt19937& random) {
    const int sequences = random() % 4 ? random() % 12 : random() % 400;
    const bool is_packed = random() % 2;
    starts.push_back(0);
    for (int i = 0; i < sequences; ++i) {
      lengths.push_back(random() % 5 ? random() % 3000 : random() % 3);
      starts.push_back(starts.back() + (is_packed ? random() % (random() % 6 ? 5 : 60) : 1));
    }
    problem.num_sequences = sequences;
    problem.num_tokens = static_cast<int>(starts.back() + random() % 3);
    problem.max_positions = 2900;
    problem.num_kv_heads = 1 + random() % 5;
    problem.group = 1 + random() % 40;
    problem.head_tiles = (problem.group + kRows - 1) / kRows;
    problem.heads_of_tile = (problem.group + problem.head_tiles - 1) / problem.head_tiles;
    problem.window_left = random() % 3 ? -1 : static_cast<int>(random() % 500);
    problem.window_right = random() % 3 ? 0 : static_cast<int>(random() % 40) - 1;
    problem.lengths.data = reinterpret_cast<const char*>(lengths.data());
    problem.lengths.stride = 8, problem.lengths.is_wide = true;
    if (is_packed) problem.starts.data = reinterpret_cast<const char*>(starts.data());
    problem.starts.stride = 8, problem.starts.is_wide = true;
    problem.ctas = 1 + random() % 300;
    problem.least_tiles = 1 + random() % 3;
    problem.slots_by_item = random() % 2;
  }
};

void check_shares(const Batch& batch) {
  const DecodeProblem& problem = batch.problem;
  const int items = problem.items_of_sequence();
  int64_t total = 0;
  std::map<Item, int> tiles, taken;
  std::map<Item, int64_t> first_tiles;
  for (int index = 0; index < problem.num_sequences; ++index) {
    const Sequence sequence = sequence_of<kTile>(problem, index);
    for (int item = 0; item < items && sequence.tiles > 0; ++item) {
      tiles[{index, item}] = sequence.tiles;
      first_tiles[{index, item}] = total * items + static_cast<int64_t>(item) * sequence.tiles;
    }
    total += sequence.tiles;
  }
  const int64_t share = share_of_cta(problem, total);
  const int64_t slots =
      problem.slots_by_item ? problem.ctas + static_cast<int64_t>(problem.num_sequences) * items
                            : 2 * static_cast<int64_t>(problem.ctas);
  std::set<int64_t> used;
  std::map<Item, std::map<int, int64_t>> slots_of_parts;
  for (int64_t cta = 0; cta < problem.ctas; ++cta) {
    const int64_t first = cta * share, stop = std::min(first + share, total * items);
    if (first >= stop) continue;
    Place place{0, 0};
    while (true) {
      const int64_t here = static_cast<int64_t>(sequence_of<kTile>(problem, place.sequence).tiles) * items;
      if (first < place.before + here) break;
      place.before += here;
      ++place.sequence;
    }
    Walk<kTile> walk(problem, first, stop, share, place);
    while (!walk.is_done()) {
      const Segment segment = walk.next(problem, cta);
      const Item key{segment.sequence, segment.item};
      expect(segment.count > 0 && segment.first == taken[key]);  // in order, without gaps
      taken[key] += segment.count;
      if (segment.parts == 1) {
        expect(segment.count == tiles[key]);
        continue;
      }
      expect(segment.slot >= 0 && segment.slot < slots && used.insert(segment.slot).second);
      expect(segment.part == static_cast<int>(slots_of_parts[key].size()));
      slots_of_parts[key][segment.part] = segment.slot;
    }
  }
  expect(taken == tiles);
  for (const auto& [key, count] : tiles) {  // what the merge looks for
    const auto [index, item] = key;
    const ItemParts cut = parts_of_item(first_tiles[key], count, share);
    expect(cut.parts == 1 ? slots_of_parts.count(key) == 0
                          : cut.parts == static_cast<int>(slots_of_parts[key].size()));
    for (int part = 0; cut.parts > 1 && part < cut.parts; ++part) {
      expect(slots_of_parts[key][part] == slot_of(problem, cut.first_cta + part, index, item, part == 0));
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
    for (const int splits : {1, 2, 3, 8, 1000}) {
      int next = 0;
      const int parts = part_of_item(sequence.tiles, 0, splits).parts;
      expect(parts <= splits);
      for (int part = 0; part < splits; ++part) {
        const Segment segment = part_of_item(sequence.tiles, part, splits);
        expect((segment.count > 0) == (part < parts) && (part >= parts || segment.first == next));
        next += segment.count;
      }
      expect(next == sequence.tiles);
    }
  }
}

int main() {
  std::mt19937 random(0);
  for (int round = 0; round < 400; ++round) {
    const Batch batch(random);
    check_shares(batch);
    if (batch.problem.num_sequences < 12) check_sequences(batch);
  }
  std::printf("%ld\n", wrong);
}
