// What attention refuses of its arguments.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "checks.h"

namespace torch_pagedkv {

inline void check_inputs(
    const char* op,
    const Tensor& query,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table,
    const Tensor& seqused_k,
    const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  check_pools(op, key_cache, value_cache);
  check_rows(op, "query", query, {kAnySize, kAnySize, key_cache.size(3)});
  check_query_dtype(op, "query", query);
  const int64_t tokens = query.size(0), heads = query.size(1), num_kv_heads = key_cache.size(2);
  if (heads % num_kv_heads != 0 || heads == 0) {
    const std::string actual = shape_text(query);
    refuse(op, "query", actual, "have a multiple of num_kv_heads = ", num_kv_heads, " heads");
  }
  if (!is_fp8(key_cache.scalar_type())) {
    check_dtype(op, "query", query, key_cache.scalar_type());
    check_no_scale(op, "k_scale", k_scale);
    check_no_scale(op, "v_scale", v_scale);
  }
  check_table(op, block_table, key_cache.size(1));
  const int64_t num_sequences = block_table.size(0);
  check_index(op, "seqused_k", seqused_k, {num_sequences});
  if (cu_seqlens_q) {
    check_index(op, "cu_seqlens_q", *cu_seqlens_q, {num_sequences + 1});
  } else if (tokens != num_sequences) {
    const std::string actual = shape_text(query);
    refuse(
        op,
        "query",
        actual,
        "have one token for each of the ",
        num_sequences,
        " sequences without cu_seqlens_q");
  }
}

inline void check_outputs(
    const char* op,
    const Tensor& out,
    const Tensor& lse,
    const Tensor& query,
    const Tensor& value_cache) {
  const int64_t tokens = query.size(0), heads = query.size(1);
  check_contiguous(op, "out", out, {tokens, heads, value_cache.size(3)});
  check_dtype(op, "out", out, query.scalar_type());
  check_contiguous(op, "lse", lse, {heads, tokens});
  check_dtype(op, "lse", lse, ScalarType::Float);
}

struct AttentionNumbers {
  double softmax_scale, softcap;
  int64_t window_left, window_right, num_splits;
};

// Of options that nobody looked at before.
inline void check_options(
    const char* op,
    const Tensor& query,
    const AttentionNumbers& numbers,
    const std::optional<Tensor>& alibi_slopes,
    const std::optional<Tensor>& sinks) {
  const auto check_finite = [op](const char* argument, double number) {
    const bool is_finite = std::abs(number) <= FLT_MAX;
    if (!is_finite) refuse(op, argument, std::to_string(number), "be finite in float32");
  };
  check_finite("softmax_scale", numbers.softmax_scale);
  check_finite("softcap", numbers.softcap);
  if (numbers.softcap < 0 || (numbers.softcap > 0 && numbers.softcap < FLT_MIN)) {
    refuse(op, "softcap", std::to_string(numbers.softcap), "be 0 or normal in float32");
  }
  const int64_t window = std::min(numbers.window_left, numbers.window_right);
  if (window < -1) refuse(op, "window_size", std::to_string(window), "be at least -1");
  if (numbers.num_splits < 0) {
    refuse(op, "num_splits", std::to_string(numbers.num_splits), "be at least 0");
  }
  if (alibi_slopes) check_shape(op, "alibi_slopes", *alibi_slopes, {query.size(1)});
  if (sinks) check_shape(op, "sinks", *sinks, {query.size(1)});
}

}  // namespace torch_pagedkv
