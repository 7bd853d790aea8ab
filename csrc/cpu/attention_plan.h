// How a call of paged_attention is divided into items.
//
// A sequence's query tokens are cut into runs, and its KV positions into chunks where it has few
// runs. Runs and chunks follow from the sequence's own lengths and the call's options alone. How many
// KV heads an item takes follows from the number of threads, too, but no bit depends on that.

#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "work_items.h"

namespace torch_pagedkv {

// A chunk of fewer positions is not worth its partial results.
inline constexpr int64_t kChunkOfFewRows = 1024;
inline constexpr int64_t kChunkOfManyRows = 1024;
inline constexpr int64_t kMostChunks = 64;
// Of many rows, so many runs and chunks together: partial results stay small.
inline constexpr int64_t kMostChunksOfManyRows = 16;
// Tiles of all KV heads of an item, the present one and the next, share an L2 cache, where KV heads
// are taken one after the other.
inline constexpr int64_t kTileBytes = 256 * 1024;

// Query tokens of a sequence, and the chunks of its KV positions that any of them sees.
struct AttentionRun {
  int64_t sequence, first_token, tokens;
  int64_t chunk_size, first_chunk, chunks;
  int64_t kv_heads;         // of an item
  int64_t first_item;       // the items of the runs before
  int64_t first_group;      // the groups of KV heads of the runs before
  int64_t first_partial;    // the floats of partial results of the runs before

  int64_t groups(int64_t num_kv_heads) const { return (num_kv_heads + kv_heads - 1) / kv_heads; }
};

class AttentionPlan {
 public:
  AttentionPlan(const Attention& attention, int64_t num_splits)
      : attention_(attention), num_splits_(num_splits) {
    const int64_t num_sequences = attention.table.num_sequences();
    // The long items first, so that short ones are left to even out the threads.
    for (const bool few : {false, true}) {
      for (int64_t sequence = 0; sequence < num_sequences; ++sequence) {
        const int64_t tokens = attention.queries.length(sequence);
        if (tokens > 0 && (tokens * attention.group() <= kFewRows) == few) add_runs(sequence, few);
      }
    }
    const Pool& keys = attention.key_pool;
    const int64_t row_bytes = keys.row_bytes() + attention.value_pool.row_bytes();
    int64_t work = 0, most_groups = 0;
    for (const AttentionRun& run : runs_) {
      const int64_t length = attention.lengths[run.sequence];
      const int64_t multiplications =
          run.tokens * length * attention.group() * (keys.dim + attention.value_pool.dim);
      work += keys.num_kv_heads * std::max(length * row_bytes, multiplications / 2);
      most_groups += run.chunks * keys.num_kv_heads;
    }
    threads_ = useful_threads(most_groups, work);
    divide_heads(row_bytes);
  }

  int64_t threads() const { return threads_; }
  int64_t items() const { return items_; }
  int64_t groups() const { return groups_; }
  int64_t partial_floats() const { return partials_; }

  // Rows of one item, at most: of those of few rows and of those of many.
  int64_t few_rows() const { return few_rows_; }
  int64_t many_rows() const { return many_rows_; }

  const AttentionRun& run_of(int64_t item) const {
    const auto after = std::upper_bound(
        runs_.begin(), runs_.end(), item, [](int64_t index, const AttentionRun& run) {
          return index < run.first_item;
        });
    return *(after - 1);
  }

  // Items of a group of KV heads stand chunk after chunk.
  AttentionItem item(const AttentionRun& run, int64_t index, float* partials) const {
    const int64_t num_kv_heads = attention_.key_pool.num_kv_heads;
    const int64_t groups = run.groups(num_kv_heads);
    const int64_t group = (index - run.first_item) % groups;
    const int64_t chunk = (index - run.first_item) / groups;
    const int64_t low = (run.first_chunk + chunk) * run.chunk_size;
    const int64_t partial = run.tokens * attention_.query.heads * attention_.partial_size();
    return {
        run.sequence,
        run.first_token,
        run.tokens,
        group * run.kv_heads,
        std::min(run.kv_heads, num_kv_heads - group * run.kv_heads),
        {low, low + run.chunk_size},
        chunk == 0,
        run.chunks == 1 ? nullptr : partials + run.first_partial + chunk * partial};
  }

 private:
  void add_runs(int64_t sequence, bool few) {
    const int64_t length = attention_.lengths[sequence];
    const int64_t start = attention_.queries.start(sequence);
    const int64_t stop = attention_.queries.stop(sequence);
    const int64_t tokens_per_run = few ? stop - start : tokens_of_many_rows(attention_);
    const int64_t runs = (stop - start + tokens_per_run - 1) / tokens_per_run;
    const int64_t chunk_size = size_of_chunks(length, stop - start, runs, few);
    // Under a causal mask the last runs of a sequence are the longest.
    for (int64_t index = runs - 1; index >= 0; --index) {
      AttentionRun run{};
      run.sequence = sequence;
      run.first_token = start + index * tokens_per_run;
      run.tokens = std::min(tokens_per_run, stop - run.first_token);
      const int64_t position = length - (stop - run.first_token);
      const KeyRange first = attention_.visibility.of(position, length);
      const KeyRange last = attention_.visibility.of(position + run.tokens - 1, length);
      const KeyRange seen{std::min(first.low, last.low), std::max(first.high, last.high)};
      run.chunk_size = chunk_size;
      run.first_chunk = seen.is_empty() ? 0 : seen.low / chunk_size;
      run.chunks = seen.is_empty() ? 1 : (seen.high - 1) / chunk_size - run.first_chunk + 1;
      run.kv_heads = 1;
      runs_.push_back(run);
    }
  }

  // A multiple of the tile; chunks start at multiples of it, whatever a window leaves of them.
  int64_t size_of_chunks(int64_t length, int64_t query_length, int64_t runs, bool few) const {
    int64_t chunks = few ? kMostChunks : std::max<int64_t>(1, kMostChunksOfManyRows / runs);
    if (num_splits_ > 0) chunks = std::min(chunks, num_splits_);
    if (chunks <= 1) return whole(length);
    int64_t seen = length;
    const int64_t left = attention_.visibility.left;
    if (left >= 0 && left < length - query_length) {
      seen = left + query_length;
      --chunks;  // the window may begin in the middle of one more
    }
    const int64_t least = few ? kChunkOfFewRows : kChunkOfManyRows;
    return std::max(least, whole((seen + chunks - 1) / chunks));
  }

  static int64_t whole(int64_t length) { return (std::max<int64_t>(length, 1) + kTile - 1) / kTile * kTile; }

  // As many KV heads as the cache holds, but no fewer items than keep all threads busy.
  void divide_heads(int64_t row_bytes) {
    const int64_t num_kv_heads = attention_.key_pool.num_kv_heads, group = attention_.group();
    const int64_t most = attention_.goes_by_token()
                             ? num_kv_heads
                             : std::max<int64_t>(1, kTileBytes / (kTile * row_bytes));
    for (int64_t kv_heads = std::min(most, num_kv_heads);; kv_heads = (kv_heads + 1) / 2) {
      items_ = groups_ = partials_ = few_rows_ = many_rows_ = 0;
      for (AttentionRun& run : runs_) {
        const int64_t rows = run.tokens * group;
        const bool few = rows <= kFewRows;
        const int64_t padded_rows = (rows + 3) / 4 * 4;
        if (few) run.kv_heads = std::min(kv_heads, std::max<int64_t>(1, kRowsOfFew / padded_rows));
        run.first_item = items_;
        run.first_group = groups_;
        run.first_partial = partials_;
        items_ += run.groups(num_kv_heads) * run.chunks;
        groups_ += run.groups(num_kv_heads);
        if (run.chunks > 1) {
          partials_ += run.chunks * run.tokens * attention_.query.heads * attention_.partial_size();
        }
        int64_t& largest = few ? few_rows_ : many_rows_;
        largest = std::max(largest, few ? run.kv_heads * padded_rows : rows);
      }
      if (kv_heads == 1 || items_ >= 4 * threads_ || threads_ == 1) return;
    }
  }

  const Attention& attention_;
  const int64_t num_splits_;
  std::vector<AttentionRun> runs_;
  int64_t threads_ = 1, items_ = 0, groups_ = 0, partials_ = 0, few_rows_ = 0, many_rows_ = 0;
};

// The memory of a call: scratch of each thread, partial results, and what is left of each group.
class AttentionMemory {
 public:
  explicit AttentionMemory(const Attention& attention, const AttentionPlan& plan)
      : bytes_((scratch_bytes(attention, plan.few_rows(), plan.many_rows()) + 63) / 64 * 64),
        scratch_(new char[plan.items() ? bytes_ * plan.threads() + 64 : 64]),
        partials_(new float[plan.partial_floats()]),
        done_(new std::atomic<int64_t>[plan.partial_floats() ? plan.groups() : 0]()) {}

  char* scratch(int64_t thread) const {
    const auto address = reinterpret_cast<uintptr_t>(scratch_.get());
    return scratch_.get() + (64 - address % 64) % 64 + thread * bytes_;
  }
  float* partials() const { return partials_.get(); }

  // Counts a chunk of a group of KV heads and returns how many were done before.
  int64_t count(int64_t group) const { return done_[group].fetch_add(1, std::memory_order_acq_rel); }

 private:
  int64_t bytes_;
  std::unique_ptr<char[]> scratch_;
  std::unique_ptr<float[]> partials_;
  std::unique_ptr<std::atomic<int64_t>[]> done_;
};

}  // namespace torch_pagedkv
