// merge_attention_states: two softmaxes over disjoint keys become one.

#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>

#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "merge_attention_states";
constexpr float kEmpty = -std::numeric_limits<float>::infinity();

// One of the two parts: outputs [tokens, heads, dim] and logarithms [heads, tokens].
struct Part {
  TokenRows out;
  const float* lse;
  int64_t lse_head_stride, lse_token_stride;

  Part(const Tensor& out_tensor, const Tensor& lse_tensor)
      : out(out_tensor),
        lse(static_cast<const float*>(lse_tensor.data_ptr())),
        lse_head_stride(lse_tensor.stride(0)),
        lse_token_stride(lse_tensor.stride(1)) {}

  float log_at(int64_t token, int64_t head) const {
    return lse[head * lse_head_stride + token * lse_token_stride];
  }
};

// The row of one part, unchanged but for its dtype.
void take_row(const Part& part, int64_t token, int64_t head, ScalarType dtype, char* target) {
  const char* const source = part.out.at(token, head);
  if (part.out.dtype == dtype) {
    std::memcpy(target, source, static_cast<size_t>(part.out.row_bytes()));
    return;
  }
  const int64_t element_size = dtype == ScalarType::Float ? 4 : 2;
  float piece[kPiece];
  in_pieces(part.out.dim, [&](int64_t offset, int64_t length) {
    load_as_float(part.out.dtype, source + offset * part.out.element_size, length, piece);
    store_from_float(dtype, piece, length, 1.0f, target + offset * element_size);
  });
}

// Writes a merged row and returns its logarithm. An empty part's output is never multiplied: what
// stands in it, NaN included, must not reach the result.
float merge_row(const Part& a, const Part& b, int64_t token, int64_t head, char* target) {
  const ScalarType dtype = a.out.dtype;
  const float log_a = a.log_at(token, head);
  const float log_b = b.log_at(token, head);
  if (log_a == kEmpty && log_b == kEmpty) {
    std::memset(target, 0, static_cast<size_t>(a.out.row_bytes()));
    return kEmpty;
  }
  if (log_b == kEmpty) {
    take_row(a, token, head, dtype, target);
    return log_a;
  }
  if (log_a == kEmpty) {
    take_row(b, token, head, dtype, target);
    return log_b;
  }
  const float maximum = std::max(log_a, log_b);
  const float weight_a = std::exp(log_a - maximum);
  const float weight_b = std::exp(log_b - maximum);
  const float total = weight_a + weight_b;
  float piece_a[kPiece], piece_b[kPiece];
  in_pieces(a.out.dim, [&](int64_t offset, int64_t length) {
    load_as_float(
        dtype, a.out.at(token, head) + offset * a.out.element_size, length, piece_a);
    load_as_float(
        b.out.dtype, b.out.at(token, head) + offset * b.out.element_size, length, piece_b);
    for (int64_t i = 0; i < length; ++i) {
      piece_a[i] = (weight_a * piece_a[i] + weight_b * piece_b[i]) / total;
    }
    store_from_float(dtype, piece_a, length, 1.0f, target + offset * a.out.element_size);
  });
  return maximum + std::log(total);
}

void merge_attention_states(
    const Tensor& out,
    const Tensor& lse,
    const Tensor& out_a,
    const Tensor& lse_a,
    const Tensor& out_b,
    const Tensor& lse_b) {
  check_rows(kOp, "out_a", out_a, {kAnySize, kAnySize, kAnySize});
  const int64_t tokens = out_a.size(0), heads = out_a.size(1), dim = out_a.size(2);
  check_rows(kOp, "out_b", out_b, {tokens, heads, dim});
  check_rows(kOp, "out", out, {tokens, heads, dim});
  check_query_dtype(kOp, "out_a", out_a);
  check_query_dtype(kOp, "out_b", out_b);
  check_dtype(kOp, "out", out, out_a.scalar_type());
  check_shape(kOp, "lse_a", lse_a, {heads, tokens});
  check_shape(kOp, "lse_b", lse_b, {heads, tokens});
  check_contiguous(kOp, "lse", lse, {heads, tokens});
  check_dtype(kOp, "lse_a", lse_a, ScalarType::Float);
  check_dtype(kOp, "lse_b", lse_b, ScalarType::Float);
  check_dtype(kOp, "lse", lse, ScalarType::Float);

  const Part a(out_a, lse_a), b(out_b, lse_b);
  const TokenRows merged(out);
  float* const merged_lse = static_cast<float*>(lse.data_ptr());
  const int64_t bytes = tokens * heads * 3 * merged.row_bytes();
  for_each_item(useful_threads(tokens, bytes), tokens, [&](int64_t, int64_t token) {
    for (int64_t head = 0; head < heads; ++head) {
      merged_lse[head * tokens + token] = merge_row(a, b, token, head, merged.at(token, head));
    }
  });
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "merge_attention_states(Tensor(a!) out, Tensor(b!) lse, Tensor out_a, Tensor lse_a, "
      "Tensor out_b, Tensor lse_b) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("merge_attention_states", TORCH_BOX(&torch_pagedkv::merge_attention_states));
}
