// paged_attention: softmax(query . keys) . values, keys and values read through the block table.
//
// This file checks the arguments and divides the rows into items; attention_item.h computes them.
//
// num_splits is ignored: a row's keys are never divided between threads here, so that its bits
// depend on nothing but its own inputs.

#include <torch/csrc/stable/library.h>

#include "attention_item.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

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

// Which rows each item has. It depends on the number of threads, but no row's result depends on it.
class Plan {
 public:
  explicit Plan(const Attention& attention)
      : attention_(attention), runs_(attention.table.num_sequences() + 1, 0) {
    const int64_t group = attention.group();
    tokens_per_item_ = std::max<int64_t>(1, kRowsPerItem / group);
    int64_t longest = 0, multiplications = 0;
    for (int64_t sequence = 0; sequence + 1 < static_cast<int64_t>(runs_.size()); ++sequence) {
      const int64_t tokens = attention.queries.length(sequence);
      runs_[sequence + 1] = runs_[sequence] + (tokens + tokens_per_item_ - 1) / tokens_per_item_;
      longest = std::max(longest, tokens);
      multiplications += tokens * attention.lengths[sequence] * attention.query.heads *
                         (attention.key_pool.dim + attention.value_pool.dim);
    }
    tokens_per_item_ = std::min(tokens_per_item_, std::max<int64_t>(1, longest));
    const int64_t whole_groups = runs_.back() * attention.key_pool.num_kv_heads;
    threads_ = useful_threads(whole_groups * group, multiplications);
    // Two items for each thread even out their costs; fewer heads than vectors hold are no gain.
    const int64_t wanted = whole_groups ? 2 * threads_ / whole_groups : 1;
    const int64_t shares = std::clamp<int64_t>(wanted, 1, (group + 3) / 4);
    heads_per_item_ = (group + shares - 1) / shares;
    shares_ = (group + heads_per_item_ - 1) / heads_per_item_;
  }

  int64_t threads() const { return threads_; }
  int64_t items() const { return runs_.back() * attention_.key_pool.num_kv_heads * shares_; }
  int64_t rows_per_item() const { return tokens_per_item_ * heads_per_item_; }

  ItemRows item(int64_t index) const {
    const int64_t group = attention_.group();
    const int64_t share = index % shares_;
    const int64_t kv_head = index / shares_ % attention_.key_pool.num_kv_heads;
    const int64_t run = index / shares_ / attention_.key_pool.num_kv_heads;
    const int64_t sequence = std::upper_bound(runs_.begin(), runs_.end(), run) - runs_.begin() - 1;
    const int64_t first_token =
        attention_.queries.start(sequence) + (run - runs_[sequence]) * tokens_per_item_;
    const int64_t first_in_group = share * heads_per_item_;
    return {
        sequence,
        first_token,
        std::min(tokens_per_item_, attention_.queries.stop(sequence) - first_token),
        kv_head,
        kv_head * group + first_in_group,
        std::min(heads_per_item_, group - first_in_group)};
  }

 private:
  const Attention& attention_;
  std::vector<int64_t> runs_;  // runs of query tokens before each sequence
  int64_t tokens_per_item_, threads_, heads_per_item_, shares_;
};

void attend(const Attention& attention) {
  const Plan plan(attention);
  std::vector<Scratch> scratch;
  scratch.reserve(plan.threads());
  for (int64_t thread = 0; thread < plan.threads() && plan.items() > 0; ++thread) {
    scratch.emplace_back(attention, plan.rows_per_item());
  }
  for_each_item(plan.threads(), plan.items(), [&](int64_t thread, int64_t index) {
    // Backwards: under a causal mask the last runs of a sequence are the longest.
    Item(attention, scratch[thread], plan.item(plan.items() - 1 - index)).run();
  });

  const int64_t num_sequences = attention.table.num_sequences();
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
    const std::string actual = shape_text(query);
    refuse(kOp, "query", actual, "have a multiple of num_kv_heads = ", num_kv_heads, " heads");
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
    const std::string actual = shape_text(query);
    refuse(
        kOp,
        "query",
        actual,
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
