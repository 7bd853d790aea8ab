// paged_attention: softmax(query . keys) . values, keys and values read through the block table.
//
// A work item is a run of a sequence's query tokens with all the query heads of one KV head, so that
// they share its keys and values. It walks the KV positions in tiles: a tile looks its blocks up,
// brings keys and values to float32 (32-bit ones are read in place), and updates the running softmax
// of every row. A row touches no key but those it may see. Nothing is gathered, and no scratch grows
// with a length.
//
// num_splits is ignored: a row's keys are never divided between threads here, so that its bits depend
// on nothing but its own inputs.

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <utility>
#include <vector>

#include "attention_tile.h"
#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

// Query rows that share a converted tile; few rows read 32-bit pools in place instead of copying.
constexpr int64_t kRowsPerItem = 64;
constexpr int64_t kRowsInPlace = 8;

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

  int64_t group() const { return query.heads / key_pool.num_kv_heads; }
  int64_t tokens_per_item() const { return std::max<int64_t>(1, kRowsPerItem / group()); }

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

class Item {
 public:
  Item(const Attention& attention, Scratch& scratch, int64_t sequence, int64_t first_token, int64_t kv_head)
      : attention_(attention),
        scratch_(scratch),
        blocks_(attention.table.row(sequence)),
        length_(attention.lengths[sequence]),
        kv_head_(kv_head),
        group_(attention.group()),
        first_token_(first_token),
        rows_(std::min(attention.tokens_per_item(), attention.queries.stop(sequence) - first_token) *
              group_),
        first_position_(length_ - (attention.queries.stop(sequence) - first_token)) {}

  void run() {
    const KeyRange keys = begin_rows();
    int64_t tile = keys.low / kTile * kTile;
    if (!keys.is_empty()) look_up(tile, keys);
    for (; tile < keys.high; tile += kTile) {
      take_rows(attention_.key_pool, tile, keys, scratch_.stored_keys, scratch_.keys, scratch_.key_rows);
      score_rows(tile);
      for (int64_t row = 0; row < rows_; ++row) weigh(row, tile);
      take_rows(
          attention_.value_pool, tile, keys, scratch_.stored_values, scratch_.values, scratch_.value_rows);
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
  int64_t token_of(int64_t row) const { return first_token_ + row / group_; }
  int64_t head_of(int64_t row) const { return kv_head_ * group_ + row % group_; }
  int64_t position_of(int64_t row) const { return first_position_ + row / group_; }
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
      scratch_.stored_keys[n] = attention_.key_pool.at(block, offset, kv_head_);
      scratch_.stored_values[n] = attention_.value_pool.at(block, offset, kv_head_);
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
          // The first rows to go through the keys bring the values into the cache, and conversely.
          row == 0 ? Ahead{scratch_.stored_values.data(), attention_.value_pool.row_bytes()} : Ahead{});
    }
  }

  void weigh(int64_t row, int64_t tile) {
    const auto [first, last] = visible(row, tile);
    if (first >= last) return;
    const int64_t head = head_of(row);
    const ScoreRule rule{
        static_cast<float>(attention_.softmax_scale * attention_.k_scales[kv_head_]),
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
    add_visible_values<kRows>(
        sums_of(row),
        scratch_.value_dim,
        scratch_.value_rows.data(),
        first,
        last,
        scores_of(row),
        row == 0 ? Ahead{scratch_.stored_keys.data(), attention_.key_pool.row_bytes()} : Ahead{});
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
  const int64_t length_, kv_head_, group_, first_token_, rows_, first_position_;
};

void check_values(const Attention& attention) {
  const Pool& pool = attention.key_pool;
  check_lengths(kOp, attention.lengths, attention.table.max_blocks() * pool.block_size);
  check_prefix_sums(kOp, attention.queries, attention.query.tokens);
  for (int64_t sequence = 0; sequence < attention.table.num_sequences(); ++sequence) {
    const int64_t query_length = attention.queries.length(sequence);
    if (query_length == 0) continue;
    // Columns wholly before the window of the first row are never read.
    const int64_t length = attention.lengths[sequence];
    const int64_t low = attention.visibility.of(length - query_length, length).low;
    check_table_row(
        kOp,
        attention.table,
        sequence,
        low / pool.block_size,
        blocks_needed(length, pool.block_size),
        pool.num_blocks);
  }
}

void attend(const Attention& attention) {
  const int64_t num_sequences = attention.table.num_sequences();
  const int64_t tokens_per_item = attention.tokens_per_item();
  // Runs of query tokens before each sequence: which sequence an item belongs to.
  std::vector<int64_t> runs(num_sequences + 1, 0);
  int64_t longest = 0, multiplications = 0;
  for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t query_length = attention.queries.length(sequence);
    runs[sequence + 1] = runs[sequence] + (query_length + tokens_per_item - 1) / tokens_per_item;
    longest = std::max(longest, query_length);
    multiplications += query_length * attention.lengths[sequence] * attention.query.heads *
                       (attention.key_pool.dim + attention.value_pool.dim);
  }
  const int64_t num_kv_heads = attention.key_pool.num_kv_heads;
  const int64_t items = runs[num_sequences] * num_kv_heads;
  const int64_t threads = useful_threads(items, multiplications);
  const int64_t rows_per_item = std::min(tokens_per_item, longest) * attention.group();
  std::vector<Scratch> scratch(items ? threads : 0, Scratch(attention, rows_per_item));
  for_each_item(threads, items, [&](int64_t thread, int64_t item) {
    // Backwards: under a causal mask the last runs of a sequence are the longest.
    const int64_t run = (items - 1 - item) / num_kv_heads;
    const int64_t sequence = std::upper_bound(runs.begin(), runs.end(), run) - runs.begin() - 1;
    const int64_t first_token =
        attention.queries.start(sequence) + (run - runs[sequence]) * tokens_per_item;
    Item(attention, scratch[thread], sequence, first_token, item % num_kv_heads).run();
  });

  const int64_t first_padding = num_sequences ? attention.queries.stop(num_sequences - 1) : 0;
  for (int64_t token = first_padding; token < attention.query.tokens; ++token) {
    for (int64_t head = 0; head < attention.query.heads; ++head) {
      attention.finish_empty_row(token, head);
    }
  }
}

void paged_attention(
    const Tensor& out,
    const Tensor& lse,
    const Tensor& query,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table,
    const Tensor& seqused_k,
    const std::optional<Tensor>& cu_seqlens_q,
    double softmax_scale,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale,
    int64_t /*num_splits*/) {
  check_pools(kOp, key_cache, value_cache);
  check_rows(kOp, "query", query, {kAnySize, kAnySize, key_cache.size(3)});
  check_query_dtype(kOp, "query", query);
  const int64_t tokens = query.size(0), heads = query.size(1), num_kv_heads = key_cache.size(2);
  if (heads % num_kv_heads != 0 || heads == 0) {
    refuse(kOp, "query", shape_text(query), "have a multiple of num_kv_heads = ", num_kv_heads, " heads");
  }
  if (!is_fp8(key_cache.scalar_type())) {
    check_dtype(kOp, "query", query, key_cache.scalar_type());
  }
  check_index(kOp, "block_table", block_table, {kAnySize, kAnySize});
  const int64_t num_sequences = block_table.size(0);
  check_index(kOp, "seqused_k", seqused_k, {num_sequences});
  if (cu_seqlens_q) {
    check_index(kOp, "cu_seqlens_q", *cu_seqlens_q, {num_sequences + 1});
  } else if (tokens != num_sequences) {
    refuse(
        kOp,
        "query",
        shape_text(query),
        "have one token for each of the ",
        num_sequences,
        " sequences without cu_seqlens_q");
  }
  check_contiguous(kOp, "out", out, {tokens, heads, value_cache.size(3)});
  check_dtype(kOp, "out", out, query.scalar_type());
  check_contiguous(kOp, "lse", lse, {heads, tokens});
  check_dtype(kOp, "lse", lse, ScalarType::Float);

  const Attention attention{
      TokenRows(query),
      Pool(key_cache),
      Pool(value_cache),
      BlockTable(block_table),
      IndexVector(seqused_k),
      QueryRanges(cu_seqlens_q),
      {causal, window_left, window_right},
      softmax_scale,
      static_cast<float>(softcap),
      HeadValues(kOp, "alibi_slopes", alibi_slopes, heads, 0.0f),
      HeadValues(kOp, "sinks", sinks, heads, -kInfinity),
      HeadValues(kOp, "k_scale", k_scale, num_kv_heads, 1.0f),
      HeadValues(kOp, "v_scale", v_scale, num_kv_heads, 1.0f),
      static_cast<char*>(out.data_ptr()),
      static_cast<float*>(lse.data_ptr())};
  check_values(attention);
  attend(attention);
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "paged_attention(Tensor(a!) out, Tensor(b!) lse, Tensor query, Tensor key_cache, "
      "Tensor value_cache, Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, "
      "float softmax_scale, bool causal, int window_left, int window_right, float softcap, "
      "Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int num_splits) "
      "-> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("paged_attention", TORCH_BOX(&torch_pagedkv::paged_attention));
}
