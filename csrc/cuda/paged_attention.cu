// paged_attention: softmax(query . keys) . values, keys and values read through the block table.
//
// This file checks the arguments, and says which calls these kernels take. Decode attention serves
// sequences with up to 16 query rows for each KV head (decode, speculation), prefill attention those with
// more, on Hopper. Where prefill attention does not take a call, rows of longer sequences are left as they
// are, for the kernel that the caller launches before this one.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <tuple>
#include <utility>

#include "attention_checks.h"
#include "checks.h"
#include "decode_launch.h"
#include "launch.h"
#include "prefill_launch.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

// Positions, counts and sums of four of them fit into int32, with room for a tile.
constexpr int64_t kMostCount = INT32_MAX / 4 - 4096;

// Pieces of 16 bytes of a row are whole, and 8 output elements are written at once.
bool takes_pool(const Tensor& cache) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  return cache.size(3) * element % 16 == 0 && cache.size(3) <= kMostDecodeDim;
}

bool has_aligned_rows(const Tensor& cache) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  bool is_aligned = reinterpret_cast<intptr_t>(cache.data_ptr()) % 16 == 0;
  for (int64_t dim = 0; dim < 3; ++dim) {
    is_aligned = is_aligned && (cache.size(dim) == 1 || cache.stride(dim) * element % 16 == 0);
  }
  return is_aligned;
}

// Whether these kernels take a call, as far as its sequences are short enough: the one place that
// says so. It depends on nothing that differs between the batches of a model.
bool takes(
    const Tensor& query,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table) {
  if (query.scalar_type() == ScalarType::Float) return false;  // exact products have no matrix unit
  if (!takes_pool(key_cache) || !takes_pool(value_cache)) return false;
  for (const int64_t count :
       {query.size(0), query.size(1), block_table.size(0), key_cache.size(0), key_cache.size(1)}) {
    if (count > kMostCount) return false;
  }
  if (key_cache.size(0) == 0) return false;
  if (block_table.size(1) > kMostCount / key_cache.size(1)) return false;
  return has_decode_kernel(key_cache, value_cache);
}

// 0: the call is left to another kernel; 1: it is taken, without the rows of long sequences; 2: it is
// taken.
int64_t check_and_take(
    const Tensor& query,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table) {
  check_pools(kOp, key_cache, value_cache);
  check_rows(kOp, "query", query, {kAnySize, kAnySize, key_cache.size(3)});
  check_table(kOp, block_table, key_cache.size(1));
  if (!takes(query, key_cache, value_cache, block_table)) return 0;
  return takes_prefill(query, key_cache, value_cache) ? 2 : 1;
}

int64_t paged_attention_takes(
    const torch::stable::Tensor& query,
    const torch::stable::Tensor& key_cache,
    const torch::stable::Tensor& value_cache,
    const torch::stable::Tensor& block_table) {
  return check_and_take(query, key_cache, value_cache, block_table);
}

PoolRows pool_rows(const Tensor& cache) {
  const Pool pool(cache);
  return {
      pool.data, pool.block_stride, pool.offset_stride, pool.head_stride,
      static_cast<int>(pool.row_bytes())};
}

HeadFloats floats_of(const HeadValues& values) { return {values.data(), values.stride()}; }

// The memory of a call's results: given, or made once it is known that the call is taken.
struct Outputs {
  std::optional<torch::stable::Tensor> out, lse;
  bool wants_lse = true;  // else nobody reads it, and it lies in the scratch

  void make(const Tensor& query, const Tensor& value_cache) {
    const int32_t device = query.get_device_index();
    const int64_t tokens = query.size(0), heads = query.size(1);
    const int32_t dtype = query.scalar_type() == ScalarType::Half ? aoti_torch_dtype_float16()
                                                                  : aoti_torch_dtype_bfloat16();
    out.emplace(new_tensor(dtype, device, {tokens, heads, value_cache.size(3)}));
    if (wants_lse) lse.emplace(new_tensor(aoti_torch_dtype_float32(), device, {heads, tokens}));
  }
};

// Returns false where the call is left to another kernel; nothing is done then.
bool attend(
    Outputs& outputs,
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
  const bool are_given = outputs.out.has_value();
  if (are_given) {
    const Tensor out(*outputs.out), lse(*outputs.lse);
    check_outputs(kOp, out, lse, query, value_cache);
    check_one_device(kOp, query.get_device_index(), {{"out", out}, {"lse", lse}});
  }
  const int64_t tokens = query.size(0), heads = query.size(1), num_kv_heads = key_cache.size(2);
  const HeadValues slopes(kOp, "alibi_slopes", alibi_slopes, heads, 0.0f);
  const HeadValues sink_values(kOp, "sinks", sinks, heads, 0.0f);
  const HeadValues k_scales(kOp, "k_scale", k_scale, num_kv_heads, 1.0f);
  const HeadValues v_scales(kOp, "v_scale", v_scale, num_kv_heads, 1.0f);
  const int32_t device = key_cache.get_device_index();
  check_one_device(
      kOp,
      device,
      {{"query", query},
       {"value_cache", value_cache},
       {"block_table", block_table},
       {"seqused_k", seqused_k},
       {"cu_seqlens_q", cu_seqlens_q},
       {"alibi_slopes", alibi_slopes},
       {"sinks", sinks},
       {"k_scale", k_scale},
       {"v_scale", v_scale}});
  if (!takes(query, key_cache, value_cache, block_table)) return false;
  const bool may_be_long = cu_seqlens_q && tokens * heads > kRows * num_kv_heads;
  const bool has_prefill = may_be_long && takes_prefill(query, key_cache, value_cache);
  if (!are_given) {
    // Here nobody else serves rows of sequences that may be too long.
    if (may_be_long && !has_prefill) return false;
    outputs.make(query, value_cache);
  }
  if (tokens == 0) return true;

  DecodeProblem problem{};
  problem.out = static_cast<char*>(outputs.out->data_ptr());
  problem.lse = outputs.lse ? static_cast<float*>(outputs.lse->data_ptr()) : nullptr;
  const TokenRows rows(query);
  problem.query = rows.data;
  problem.query_token_stride = rows.token_stride;
  problem.query_head_stride = rows.head_stride;
  problem.query_is_bfloat16 = rows.dtype == ScalarType::BFloat16;
  problem.query_is_aligned = reinterpret_cast<intptr_t>(rows.data) % 16 == 0 &&
                             rows.token_stride % 16 == 0 && rows.head_stride % 16 == 0;
  problem.keys = pool_rows(key_cache);
  problem.values = pool_rows(value_cache);
  problem.rows_are_aligned = has_aligned_rows(key_cache) && has_aligned_rows(value_cache);
  problem.table = static_cast<const char*>(block_table.data_ptr());
  problem.table_is_wide = block_table.scalar_type() == ScalarType::Long;
  problem.table_stride = block_table.stride(0) * static_cast<int64_t>(block_table.element_size());
  problem.lengths = DeviceIndices(seqused_k);
  if (cu_seqlens_q) problem.starts = DeviceIndices(*cu_seqlens_q);
  problem.slopes = floats_of(slopes);
  problem.sinks = floats_of(sink_values);
  problem.k_scales = floats_of(k_scales);
  problem.v_scales = floats_of(v_scales);
  problem.num_tokens = static_cast<int>(tokens);
  problem.num_sequences = static_cast<int>(block_table.size(0));
  problem.num_blocks = static_cast<int>(key_cache.size(0));
  problem.block_size = static_cast<int>(key_cache.size(1));
  problem.block_shift = shift_of(key_cache.size(1));
  problem.max_positions = static_cast<int>(block_table.size(1) * key_cache.size(1));
  problem.num_heads = static_cast<int>(heads);
  problem.num_kv_heads = static_cast<int>(num_kv_heads);
  problem.group = static_cast<int>(heads / num_kv_heads);
  problem.cut_heads();
  problem.key_dim = static_cast<int>(key_cache.size(3));
  problem.value_dim = static_cast<int>(value_cache.size(3));
  problem.softmax_scale = static_cast<float>(softmax_scale);
  problem.softcap = static_cast<float>(softcap);
  problem.inverse_softcap =
      softcap > 0 ? static_cast<float>(std::min(1.0 / softcap, static_cast<double>(FLT_MAX))) : 0.0f;
  // No key is farther than this from any row: a wider window has no limit.
  const int64_t farthest = problem.max_positions + tokens;
  problem.window_left = window_left >= farthest ? -1 : static_cast<int>(window_left);
  problem.window_right = causal ? 0 : window_right >= farthest ? -1 : static_cast<int>(window_right);

  const int64_t most_tokens = problem.starts.data ? tokens : 1;
  problem.rows_of_slot =
      static_cast<int>(std::min<int64_t>(kRows, problem.heads_of_tile * most_tokens));

  const OnDevice on_device(device);
  // Alive until all is launched: what runs side by side must not share memory.
  std::optional<torch::stable::Tensor> of_prefill;
  if (has_prefill) {
    of_prefill.emplace(new_tensor(aoti_torch_dtype_int64(), device, {1}));
    problem.prefill_counter = static_cast<unsigned long long*>(of_prefill->data_ptr());
  }
  attend_short_and_long(problem, key_cache, value_cache, device, num_splits);
  return true;
}

bool paged_attention(
    const torch::stable::Tensor& out,
    const torch::stable::Tensor& lse,
    const torch::stable::Tensor& query,
    const torch::stable::Tensor& key_cache,
    const torch::stable::Tensor& value_cache,
    const torch::stable::Tensor& block_table,
    const torch::stable::Tensor& seqused_k,
    const std::optional<torch::stable::Tensor>& cu_seqlens_q,
    double softmax_scale,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    const std::optional<torch::stable::Tensor>& alibi_slopes,
    const std::optional<torch::stable::Tensor>& sinks,
    const std::optional<torch::stable::Tensor>& k_scale,
    const std::optional<torch::stable::Tensor>& v_scale,
    int64_t num_splits) {
  Outputs outputs{out, lse};
  return attend(
      outputs, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
      causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale,
      num_splits);
}

// Checks and outputs too, for callers who did nothing before. Returns false where the call is left to
// another kernel; nothing is done then.
bool attend_anew(
    Outputs& outputs,
    const Tensor& query,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table,
    const Tensor& seqused_k,
    const std::optional<Tensor>& cu_seqlens_q,
    std::optional<double> softmax_scale,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale,
    int64_t num_splits) {
  check_rows(kOp, "query", query, {kAnySize, kAnySize, kAnySize});
  const double head_dim = static_cast<double>(std::max<int64_t>(query.size(2), 1));
  const double scale = softmax_scale ? *softmax_scale : std::pow(head_dim, -0.5);
  check_options(
      kOp, query, {scale, softcap, window_left, window_right, num_splits}, alibi_slopes, sinks);
  return attend(
      outputs, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, scale, causal,
      window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits);
}

// Undefined tensors, which are None in Python, say that the call is left to others.
std::tuple<torch::stable::Tensor, torch::stable::Tensor> paged_attention_new(
    const torch::stable::Tensor& query,
    const torch::stable::Tensor& key_cache,
    const torch::stable::Tensor& value_cache,
    const torch::stable::Tensor& block_table,
    const torch::stable::Tensor& seqused_k,
    const std::optional<torch::stable::Tensor>& cu_seqlens_q,
    std::optional<double> softmax_scale,
    bool causal,
    int64_t window_left,
    int64_t window_right,
    double softcap,
    const std::optional<torch::stable::Tensor>& alibi_slopes,
    const std::optional<torch::stable::Tensor>& sinks,
    const std::optional<torch::stable::Tensor>& k_scale,
    const std::optional<torch::stable::Tensor>& v_scale,
    int64_t num_splits) {
  Outputs outputs;
  const bool is_done = attend_anew(
      outputs, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
      causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale,
      num_splits);
  if (!is_done) return {torch::stable::Tensor(), torch::stable::Tensor()};
  return {std::move(*outputs.out), std::move(*outputs.lse)};
}

// The output alone, with the options that most calls have: to hand over each costs as much as a tensor.
torch::stable::Tensor paged_attention_plain(
    const torch::stable::Tensor& query,
    const torch::stable::Tensor& key_cache,
    const torch::stable::Tensor& value_cache,
    const torch::stable::Tensor& block_table,
    const torch::stable::Tensor& seqused_k,
    double softmax_scale,
    int64_t num_splits) {
  Outputs outputs;
  outputs.wants_lse = false;
  const bool is_done = attend_anew(
      outputs, query, key_cache, value_cache, block_table, seqused_k, std::nullopt, softmax_scale,
      true, -1, -1, 0.0, std::nullopt, std::nullopt, std::nullopt, std::nullopt, num_splits);
  if (!is_done) return torch::stable::Tensor();
  return std::move(*outputs.out);
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_cuda, library) {
  library.def(
      "paged_attention(Tensor(a!) out, Tensor(b!) lse, Tensor query, Tensor key_cache, "
      "Tensor value_cache, Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, "
      "float softmax_scale, bool causal, int window_left, int window_right, float softcap, "
      "Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, int num_splits) "
      "-> bool");
  library.def(
      "paged_attention_new(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor seqused_k, Tensor? cu_seqlens_q, float? softmax_scale, bool causal, int window_left, "
      "int window_right, float softcap, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, "
      "Tensor? v_scale, int num_splits) -> (Tensor, Tensor)");
  library.def(
      "paged_attention_plain(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
      "Tensor seqused_k, float softmax_scale, int num_splits) -> Tensor");
  library.def(
      "paged_attention_takes(Tensor query, Tensor key_cache, Tensor value_cache, "
      "Tensor block_table) -> int");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_cuda, CUDA, library) {
  library.impl("paged_attention", TORCH_BOX(&torch_pagedkv::paged_attention));
  library.impl("paged_attention_new", TORCH_BOX(&torch_pagedkv::paged_attention_new));
  library.impl("paged_attention_plain", TORCH_BOX(&torch_pagedkv::paged_attention_plain));
  library.impl("paged_attention_takes", TORCH_BOX(&torch_pagedkv::paged_attention_takes));
}
