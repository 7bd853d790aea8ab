// What a call of paged_attention computes, and the work items that it is divided into.
//
// An item is a run of a sequence's query tokens, some KV heads with all query heads that share them,
// and a chunk of the KV positions. Chunks depend on nothing but the sequence's own lengths and the
// call's options, so a row's bits never depend on the number of threads or on the other sequences.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "checks.h"
#include "kernels.h"

namespace torch_pagedkv {

// Positions in a tile. Tiles and chunks start at multiples of it, so that their borders never depend
// on what a row may see: a window as long as the sequence gives the bits of no window.
inline constexpr int kTile = 64;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// What the softmax of a row is so far: the largest score, and the sum of e^(score - largest).
struct SoftmaxState {
  float maximum, denominator;
};

// Rows of so many elements are taken token by token over all KV heads, as they lie in memory; of shorter
// ones, a head's are taken together.
inline constexpr int64_t kWideRow = 128;

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
  float score_scale(int64_t kv_head) const {
    return static_cast<float>(softmax_scale * k_scales[kv_head]);
  }
  // Whether the heads of a token are neighbours in both pools, in rows that are wide.
  bool goes_by_token() const {
    return goes_by_token(key_pool) && goes_by_token(value_pool);
  }
  // Floats of a row's partial result: its sums, its maximum and its denominator.
  int64_t partial_size() const { return value_pool.dim + 2; }

  // The sink is one more logit, and at first the only one.
  SoftmaxState first_state(int64_t head) const {
    const float sink = sinks[head];
    return {sink, sink == -kInfinity ? 0.0f : 1.0f};
  }

  void finish_row(int64_t token, int64_t head, const SoftmaxState& softmax, float* sums) const {
    const int64_t dim = value_pool.dim;
    const float v_scale = v_scales[head / group()];
    // Adding 0 makes one zero of both: which one a sum ends at may depend on keys that weigh 0.
    for (int64_t d = 0; d < dim; ++d) sums[d] = sums[d] / softmax.denominator * v_scale + 0.0f;
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
  static bool goes_by_token(const Pool& pool) {
    return pool.dim >= kWideRow && pool.num_kv_heads > 1 && pool.head_stride == pool.row_bytes();
  }
  char* out_row(int64_t token, int64_t head) const {
    return out + (token * query.heads + head) * value_pool.dim * query.element_size;
  }
};

// Up to so many query rows of a KV head, keys and values are used where they lie; more rows make
// it worth while to lay a tile out for a matrix product.
inline constexpr int64_t kFewRows = 16;

struct AttentionItem {
  int64_t sequence;
  int64_t first_token, tokens;
  int64_t first_kv_head, kv_heads;
  KeyRange chunk;       // of KV positions
  bool is_first_chunk;  // the one that counts the sink
  float* partials;      // of the item's chunk, [tokens, heads, partial_size]; null: the only chunk

  bool has_few_rows(const Attention& attention) const {
    return tokens * attention.group() <= kFewRows;
  }

  int64_t position(const Attention& attention, int64_t token) const {
    return attention.lengths[sequence] - (attention.queries.stop(sequence) - token);
  }

  // The keys of the item's chunk that a token sees.
  KeyRange visible_to(const Attention& attention, int64_t token) const {
    const int64_t length = attention.lengths[sequence];
    const KeyRange range = attention.visibility.of(position(attention, token), length);
    return {std::max(range.low, chunk.low), std::min(range.high, chunk.high)};
  }

  // The keys that any of its tokens sees.
  KeyRange visible(const Attention& attention) const {
    KeyRange all{attention.lengths[sequence], 0};
    for (int64_t token = first_token; token < first_token + tokens; ++token) {
      const KeyRange range = visible_to(attention, token);
      if (range.is_empty()) continue;
      all = {std::min(all.low, range.low), std::max(all.high, range.high)};
    }
    return all;
  }

  // A row's result: the final one, or its part of it.
  void finish_row(
      const Attention& attention,
      int64_t token,
      int64_t head,
      bool sees_no_key,
      const SoftmaxState& softmax,
      float* sums) const {
    if (partials == nullptr) {
      if (sees_no_key) return attention.finish_empty_row(token, head);
      return attention.finish_row(token, head, softmax, sums);
    }
    const int64_t dim = attention.value_pool.dim;
    const int64_t row = (token - first_token) * attention.query.heads + head;
    float* const partial = partials + row * attention.partial_size();
    std::memcpy(partial, sums, static_cast<size_t>(dim) * sizeof(float));
    partial[dim] = softmax.maximum;
    partial[dim + 1] = softmax.denominator;
  }
};

// Merges the partial results of a row, chunk after chunk, into those of the first.
inline SoftmaxState merge_partials(
    float* first, int64_t chunks, int64_t chunk_stride, int64_t dim) {
  float maximum = -kInfinity;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    maximum = std::max(maximum, first[chunk * chunk_stride + dim]);
  }
  float denominator = 0.0f;
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const float* const partial = first + chunk * chunk_stride;
    const bool is_empty = partial[dim] == -kInfinity && partial[dim + 1] == 0.0f;
    const float weight = is_empty ? 0.0f : std::exp(partial[dim] - maximum);
    denominator += weight * partial[dim + 1];
    for (int64_t d = 0; d < dim; ++d) {
      const float part = is_empty ? 0.0f : weight * partial[d];
      first[d] = chunk == 0 ? part : first[d] + part;
    }
  }
  return {maximum, denominator};
}

// Cuts a thread's memory into arrays that start at whole cache lines.
class Carver {
 public:
  explicit Carver(char* memory) : next_(memory) {}

  template <class T>
  T* take(int64_t count) {
    T* const taken = reinterpret_cast<T*>(next_);
    next_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }

 private:
  char* next_;
};

// Rows of keys and values are padded with zeros to a multiple of the longest step of any kernel.
inline int64_t padded(int64_t dim) { return (dim + 63) / 64 * 64; }

// Rows of all KV heads of an item of few rows.
inline constexpr int64_t kRowsOfFew = 64;

// Tokens whose rows share a laid out tile: as many as leave room for the rest of it in an L2 cache.
inline int64_t tokens_of_many_rows(const Attention& attention) {
  const int64_t dim = std::max(padded(attention.key_pool.dim), padded(attention.value_pool.dim));
  const int64_t rows = std::max<int64_t>(32, 256 * 128 / std::max<int64_t>(dim, 128));
  return std::max<int64_t>(1, rows / attention.group());
}

inline int64_t scratch_bytes(const Attention& attention, int64_t few_rows, int64_t many_rows) {
  const int64_t key_dim = padded(attention.key_pool.dim);
  const int64_t value_dim = padded(attention.value_pool.dim);
  const auto floats = [](int64_t count) { return (count + 16) * 4; };
  // Queries, sums, state and ranges of each row; rows are padded to whole vectors and tiles.
  const int64_t states = 64 * 4;
  const int64_t few =
      few_rows * (floats(key_dim) + floats(value_dim) + floats(kTile) + states) + kFewRows * 16;
  const int64_t many = (many_rows + 16) * (floats(key_dim) + floats(value_dim) + states) +
                       (many_rows + 16) * 2 * floats(kTile) +
                       kTile * (floats(key_dim) + 2 * floats(value_dim));
  // Padded copies of a tile's rows, and the addresses of rows.
  const int64_t rows = kTile * (floats(key_dim) + floats(value_dim)) + 16 * kTile * 8;
  return std::max(few_rows ? few : 0, many_rows ? many : 0) + rows + 64 * 64;
}

}  // namespace torch_pagedkv
