// paged_attention: softmax(query . keys) . values, keys and values read through the block table.
//
// This file checks the arguments and spreads the items of attention_plan.h over the threads; what
// an item computes is in simd/few_rows.h and simd/many_rows.h.
//
// num_splits bounds the chunks that a sequence's keys are cut into. Whatever it is, a row's bits
// depend on nothing but its own sequence.

#include <torch/csrc/stable/library.h>

#include "attention_checks.h"
#include "attention_plan.h"

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

// Whoever finishes the last chunk of some rows merges all of them.
void merge_chunks(
    const Attention& attention,
    const AttentionRun& run,
    const AttentionItem& item,
    float* partials) {
  const int64_t dim = attention.value_pool.dim, heads = attention.query.heads;
  const int64_t chunk_stride = run.tokens * heads * attention.partial_size();
  const int64_t length = attention.lengths[run.sequence];
  const int64_t stop = attention.queries.stop(run.sequence);
  for (int64_t token = run.first_token; token < run.first_token + run.tokens; ++token) {
    const bool sees_no_key =
        attention.visibility.of(length - (stop - token), length).is_empty();
    const int64_t first_head = item.first_kv_head * attention.group();
    for (int64_t head = first_head; head < first_head + item.kv_heads * attention.group(); ++head) {
      if (sees_no_key) {
        attention.finish_empty_row(token, head);
        continue;
      }
      const int64_t row = (token - run.first_token) * heads + head;
      float* const first = partials + run.first_partial + row * attention.partial_size();
      const SoftmaxState state = merge_partials(first, run.chunks, chunk_stride, dim);
      attention.finish_row(token, head, state, first);
    }
  }
}

void attend(const Attention& attention, int64_t num_splits) {
  const Kernels& with = kernels();
  const AttentionPlan plan(attention, num_splits);
  const AttentionMemory memory(attention, plan);
  const auto work = [&](int64_t thread, int64_t index, int64_t next) {
    const AttentionRun& run = plan.run_of(index);
    const AttentionItem item = plan.item(run, index, memory.partials());
    if (next < plan.items()) {
      const AttentionItem after = plan.item(plan.run_of(next), next, memory.partials());
      with.attend(attention, item, &after, memory.scratch(thread));
    } else {
      with.attend(attention, item, nullptr, memory.scratch(thread));
    }
    if (run.chunks == 1) return;
    const int64_t group = run.first_group + item.first_kv_head / run.kv_heads;
    if (memory.count(group) == run.chunks - 1) {
      merge_chunks(attention, run, item, memory.partials());
    }
  };
  for_each_item_and_next(plan.threads(), plan.items(), work);

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
    int64_t num_splits) {
  check_inputs(
      kOp, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, k_scale, v_scale);
  check_outputs(kOp, out, lse, query, value_cache);

  const int64_t heads = query.size(1), num_kv_heads = key_cache.size(2);
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
  attend(attention, num_splits);
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
