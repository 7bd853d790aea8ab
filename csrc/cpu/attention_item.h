// A work item of paged_attention: a run of a sequence's query tokens with the query heads of one KV
// head (or, where that leaves threads idle, some of them), so that they share its keys and values.
//
// An item walks the KV positions in tiles: a tile looks its blocks up, brings keys and values to
// float32 (32-bit ones are read in place), and updates the running softmax of every row. A row
// touches no key but those it may see. Nothing is gathered, and no scratch grows with a length.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "checks.h"

namespace torch_pagedkv {

// Query rows that share a converted tile; few rows read 32-bit pools in place instead of copying.
inline constexpr int64_t kRowsPerItem = 64;
inline constexpr int64_t kRowsInPlace = 8;

struct KeyRange {
  int64_t low, high;
  bool is_empty() const { return low >= high; }
};

struct Visibility {
  bool causal;
  int64_t left, right;  // negative: unlimited

  // The keys that a query at `position` may see, of a sequence of `length`.
  KeyRange of(int64_t position, int64_t length) const {
    KeyRange range{0, length};
    // Compared before they are added: a window may be as wide as an int64.
    if (left >= 0 && left < position) range.low = position - left;
    if (causal) range.high = position + 1;
    if (right >= 0 && right < range.high - position) range.high = position + right + 1;
    return range;
  }
};

struct Attention {
  TokenRows query;
  Pool key_pool, value_pool;
  BlockTable table;
  IndexVector lengths;
  QueryRanges queries;
  Visibility visibility;
  double softmax_scale;
  float softcap;
  HeadValues slopes, sinks, k_scales, v_scales;
  char* out;
  float* lse;

  // Query heads that share a KV head.
  int64_t group() const { return query.heads / key_pool.num_kv_heads; }

  void finish_row(
      int64_t token, int64_t head, const RunningSoftmax& softmax, float* sums) const {
    const int64_t dim = value_pool.dim;
    const float v_scale = v_scales[head / group()];
    for (int64_t d = 0; d < dim; ++d) sums[d] = sums[d] / softmax.denominator * v_scale;
    store_from_float(query.dtype, sums, dim, 1.0f, out_row(token, head));
    lse[head * query.tokens + token] = softmax.maximum + std::log(softmax.denominator);
  }

  // A row that sees no key: output 0, and nothing but the sink in the logarithm.
  void finish_empty_row(int64_t token, int64_t head) const {
    std::memset(
        out_row(token, head), 0, static_cast<size_t>(value_pool.dim * query.element_size));
    lse[head * query.tokens + token] = sinks[head];
  }

 private:
  char* out_row(int64_t token, int64_t head) const {
    return out + (token * query.heads + head) * value_pool.dim * query.element_size;
  }
};

// A thread's memory, enough for any item.
struct Scratch {
  int64_t rows, key_dim, value_dim;
  std::vector<float> queries, sums, scores, keys, values;
  std::vector<const float*> key_rows, value_rows;
  std::vector<const char*> stored_keys, stored_values;
  std::vector<KeyRange> ranges;
  std::vector<RunningSoftmax> softmax;

  Scratch(const Attention& attention, int64_t rows_per_item)
      : rows(rows_per_item),
        key_dim(padded(attention.key_pool.dim)),
        value_dim(padded(attention.value_pool.dim)),
        queries(rows * key_dim),
        sums(rows * value_dim),
        scores(rows * kTile),
        keys(kTile * key_dim),
        values(kTile * value_dim),
        key_rows(kTile),
        value_rows(kTile),
        stored_keys(kTile),
        stored_values(kTile),
        ranges(rows),
        softmax(rows) {}
};

// The rows of an item: some tokens of one sequence, each with some heads of one KV head.
struct ItemRows {
  int64_t sequence, first_token, tokens, kv_head, first_head, heads;
};

class Item {
 public:
  Item(const Attention& attention, Scratch& scratch, const ItemRows& of)
      : attention_(attention),
        scratch_(scratch),
        blocks_(attention.table.row(of.sequence)),
        length_(attention.lengths[of.sequence]),
        first_position_(length_ - (attention.queries.stop(of.sequence) - of.first_token)),
        of_(of),
        rows_(of.tokens * of.heads) {}

  void run() {
    const KeyRange keys = begin_rows();
    int64_t tile = keys.low / kTile * kTile;
    if (!keys.is_empty()) look_up(tile, keys);
    for (; tile < keys.high; tile += kTile) {
      take_rows(
          attention_.key_pool, tile, keys, scratch_.stored_keys, scratch_.keys, scratch_.key_rows);
      score_rows(tile);
      for (int64_t row = 0; row < rows_; ++row) weigh(row, tile);
      take_rows(
          attention_.value_pool,
          tile,
          keys,
          scratch_.stored_values,
          scratch_.values,
          scratch_.value_rows);
      if (tile + kTile < keys.high) look_up(tile + kTile, keys);
      add_values_to_rows(tile);
    }
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t token = token_of(row);
      if (scratch_.ranges[row].is_empty()) {
        attention_.finish_empty_row(token, head_of(row));
      } else {
        attention_.finish_row(token, head_of(row), scratch_.softmax[row], sums_of(row));
      }
    }
  }

 private:
  int64_t token_of(int64_t row) const { return of_.first_token + row / of_.heads; }
  int64_t head_of(int64_t row) const { return of_.first_head + row % of_.heads; }
  int64_t position_of(int64_t row) const { return first_position_ + row / of_.heads; }
  float* scores_of(int64_t row) const { return scratch_.scores.data() + row * kTile; }
  float* sums_of(int64_t row) const { return scratch_.sums.data() + row * scratch_.value_dim; }

  // The part of a tile that a range covers, as offsets in the tile.
  static std::pair<int, int> part_of_tile(const KeyRange& range, int64_t tile) {
    return {
        static_cast<int>(std::clamp<int64_t>(range.low - tile, 0, kTile)),
        static_cast<int>(std::clamp<int64_t>(range.high - tile, 0, kTile))};
  }

  std::pair<int, int> visible(int64_t row, int64_t tile) const {
    return part_of_tile(scratch_.ranges[row], tile);
  }

  // Loads the query rows and returns the keys that any of them sees.
  KeyRange begin_rows() {
    KeyRange keys{length_, 0};
    for (int64_t row = 0; row < rows_; ++row) {
      const KeyRange range = attention_.visibility.of(position_of(row), length_);
      scratch_.ranges[row] = range;
      if (!range.is_empty()) {
        keys.low = std::min(keys.low, range.low);
        keys.high = std::max(keys.high, range.high);
      }
      // The sink is one more logit, and so far the only one.
      const float sink = attention_.sinks[head_of(row)];
      scratch_.softmax[row] = {sink, sink == -kInfinity ? 0.0f : 1.0f};
      load_as_float(
          attention_.query.dtype,
          attention_.query.at(token_of(row), head_of(row)),
          attention_.query.dim,
          scratch_.queries.data() + row * scratch_.key_dim);
    }
    std::fill_n(scratch_.sums.data(), rows_ * scratch_.value_dim, 0.0f);
    return keys;
  }

  // Finds where the pools hold the tile's positions.
  void look_up(int64_t tile, const KeyRange& keys) {
    const auto [first, last] = part_of_tile(keys, tile);
    const int64_t block_size = attention_.key_pool.block_size;
    int64_t column = (tile + first) / block_size;
    int64_t offset = (tile + first) % block_size;
    int64_t block = blocks_[column];
    for (int n = first; n < last; ++n, ++offset) {
      if (offset == block_size) {
        offset = 0;
        block = blocks_[++column];
      }
      scratch_.stored_keys[n] = attention_.key_pool.at(block, offset, of_.kv_head);
      scratch_.stored_values[n] = attention_.value_pool.at(block, offset, of_.kv_head);
    }
  }

  // Makes float32 rows of stored ones, in place where they are that already.
  void take_rows(
      const Pool& pool,
      int64_t tile,
      const KeyRange& keys,
      const std::vector<const char*>& stored,
      std::vector<float>& copies,
      std::vector<const float*>& rows) const {
    const auto [first, last] = part_of_tile(keys, tile);
    const bool in_place = pool.dtype == ScalarType::Float && rows_ <= kRowsInPlace &&
                          pool.dim % kLanes == 0 &&
                          reinterpret_cast<uintptr_t>(pool.data) % alignof(float) == 0;
    for (int n = first; n < last; ++n) {
      if (in_place) {
        rows[n] = reinterpret_cast<const float*>(stored[n]);
      } else {
        float* const copy = copies.data() + n * padded(pool.dim);
        load_as_float(pool.dtype, stored[n], pool.dim, copy);
        rows[n] = copy;
      }
    }
  }

  void score_rows(int64_t tile) {
    // The first rows to go through the keys fetch the values ahead, and conversely.
    const Ahead values{scratch_.stored_values.data(), attention_.value_pool.row_bytes()};
    for (int64_t row = 0; row < rows_; row += 4) {
      const int count = static_cast<int>(std::min<int64_t>(4, rows_ - row));
      int first = kTile, last = 0;
      for (int i = 0; i < count; ++i) {
        const auto [low, high] = visible(row + i, tile);
        if (low < high) {
          first = std::min(first, low);
          last = std::max(last, high);
        }
      }
      const auto dots = count == 4   ? dot_rows<4>
                        : count == 3 ? dot_rows<3>
                        : count == 2 ? dot_rows<2>
                                     : dot_rows<1>;
      dots(
          scratch_.queries.data() + row * scratch_.key_dim,
          scratch_.key_dim,
          scratch_.key_rows.data(),
          first,
          last,
          scores_of(row),
          row == 0 ? values : Ahead{});
    }
  }

  void weigh(int64_t row, int64_t tile) {
    const auto [first, last] = visible(row, tile);
    if (first >= last) return;
    const int64_t head = head_of(row);
    const ScoreRule rule{
        static_cast<float>(attention_.softmax_scale * attention_.k_scales[of_.kv_head]),
        attention_.softcap,
        attention_.slopes[head]};
    weigh_row(
        scores_of(row),
        first,
        last,
        rule,
        tile - position_of(row),
        scratch_.softmax[row],
        sums_of(row),
        scratch_.value_dim);
  }

  template <int kRows>
  void add_values_to(int64_t row, int first, int last) {
    const Ahead keys{scratch_.stored_keys.data(), attention_.key_pool.row_bytes()};
    add_visible_values<kRows>(
        sums_of(row),
        scratch_.value_dim,
        scratch_.value_rows.data(),
        first,
        last,
        scores_of(row),
        row == 0 ? keys : Ahead{});
  }

  // Pairs of rows share the values that both see; what only one sees it adds alone, in its place.
  void add_values_to_rows(int64_t tile) {
    int64_t row = 0;
    for (; row + 2 <= rows_; row += 2) {
      const auto [low, high] = visible(row, tile);
      const auto [next_low, next_high] = visible(row + 1, tile);
      const int first = std::max(low, next_low), last = std::min(high, next_high);
      if (first >= last) {
        add_values_to<1>(row, low, high);
        add_values_to<1>(row + 1, next_low, next_high);
        continue;
      }
      add_values_to<1>(row, low, first);
      add_values_to<1>(row + 1, next_low, first);
      add_values_to<2>(row, first, last);
      add_values_to<1>(row, last, high);
      add_values_to<1>(row + 1, last, next_high);
    }
    if (row < rows_) {
      const auto [low, high] = visible(row, tile);
      add_values_to<1>(row, low, high);
    }
  }

  const Attention& attention_;
  Scratch& scratch_;
  const IndexVector blocks_;
  const int64_t length_, first_position_;
  const ItemRows of_;
  const int64_t rows_;
};

}  // namespace torch_pagedkv
