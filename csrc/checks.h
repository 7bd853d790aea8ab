// What a kernel refuses, as std::invalid_argument, which arrives in Python as ValueError.
//
// The values of index tensors are checked here for good: nobody before did. Shapes, dtypes and
// devices were checked in Python; the checks of them here keep a direct call of a private op from
// leaving its tensors. Kernels check everything before they write anything.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "element_conversion.h"
#include "paged_layout.h"

namespace torch_pagedkv {

// Throws "<op>: <argument> must <expectation>, got <actual>".
template <class... Expectation>
[[noreturn, gnu::cold, gnu::noinline]] void refuse(
    const char* op,
    const char* argument,
    const std::string& actual,
    const Expectation&... expectation) {
  std::ostringstream sentence;
  sentence << op << ": " << argument << " must ";
  (sentence << ... << expectation);
  sentence << ", got " << actual;
  throw std::invalid_argument(sentence.str());
}

inline std::string at_index(int64_t value, int64_t index) {
  return std::to_string(value) + " at index " + std::to_string(index);
}

inline std::string shape_text(const Tensor& tensor) {
  std::string text = "[";
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    text += (dim ? ", " : "") + std::to_string(tensor.size(dim));
  }
  return text + "]";
}

inline constexpr int64_t kAnySize = -1;

// The device whose memory the library's kernels read; nvcc compiles those of CUDA.
#ifdef __CUDACC__
inline constexpr const char* kServedDevice = "cuda";
inline bool is_served(const Tensor& tensor) { return tensor.is_cuda(); }
#else
inline constexpr const char* kServedDevice = "cpu";
inline bool is_served(const Tensor& tensor) { return tensor.is_cpu(); }
#endif

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_shape(
    const char* op,
    const char* argument,
    const Tensor& tensor,
    std::initializer_list<int64_t> shape) {
  std::string expected;
  for (const int64_t size : shape) {
    expected += (expected.empty() ? "" : ", ") + (size == kAnySize ? "any" : std::to_string(size));
  }
  refuse(op, argument, shape_text(tensor), "have shape [", expected, "]");
}

inline void check_shape(
    const char* op,
    const char* argument,
    const Tensor& tensor,
    std::initializer_list<int64_t> shape) {
  if (!tensor.defined()) refuse(op, argument, "None", "be a tensor");
  if (!is_served(tensor)) refuse(op, argument, "another device", "be on ", kServedDevice);
  const auto sizes = tensor.sizes();
  bool matches = sizes.size() == shape.size();
  for (size_t dim = 0; matches && dim < sizes.size(); ++dim) {
    const int64_t size = shape.begin()[dim];
    matches = size == kAnySize || sizes[dim] == size;
  }
  if (!matches) refuse_shape(op, argument, tensor, shape);
}

// Shape, and adjacent elements in the last dimension.
inline void check_rows(
    const char* op,
    const char* argument,
    const Tensor& tensor,
    std::initializer_list<int64_t> shape) {
  check_shape(op, argument, tensor, shape);
  const int64_t last = tensor.dim() - 1;
  if (tensor.size(last) != 1 && tensor.stride(last) != 1) {
    const std::string actual = std::to_string(tensor.stride(last));
    refuse(op, argument, actual, "have stride 1 in its last dimension");
  }
}

// Shape, and one run of memory, for what a kernel fills from end to end.
inline void check_contiguous(
    const char* op,
    const char* argument,
    const Tensor& tensor,
    std::initializer_list<int64_t> shape) {
  check_shape(op, argument, tensor, shape);
  if (!tensor.is_contiguous()) refuse(op, argument, "other strides", "be contiguous");
}

inline std::string dtype_text(const Tensor& tensor) {
  return torch::headeronly::toString(tensor.scalar_type());
}

inline void check_dtype(
    const char* op, const char* argument, const Tensor& tensor, ScalarType expected) {
  if (tensor.scalar_type() != expected) {
    refuse(op, argument, dtype_text(tensor), "be ", torch::headeronly::toString(expected));
  }
}

inline void check_query_dtype(const char* op, const char* argument, const Tensor& tensor) {
  if (!is_query_dtype(tensor.scalar_type())) {
    refuse(op, argument, dtype_text(tensor), "be float32, bfloat16 or float16");
  }
}

inline void check_index(
    const char* op,
    const char* argument,
    const Tensor& tensor,
    std::initializer_list<int64_t> shape) {
  check_shape(op, argument, tensor, shape);
  const ScalarType dtype = tensor.scalar_type();
  if (dtype != ScalarType::Int && dtype != ScalarType::Long) {
    refuse(op, argument, dtype_text(tensor), "be int32 or int64");
  }
}

inline constexpr int64_t kMostHeadDim = 512;

inline void check_head_dim(const char* op, const char* argument, const Tensor& cache) {
  if (cache.size(3) < 1 || cache.size(3) > kMostHeadDim) {
    const std::string actual = std::to_string(cache.size(3));
    refuse(op, argument, actual, "have a head_dim in [1, ", kMostHeadDim, "]");
  }
}

// A pool that is written must not overlap itself.
inline void check_not_expanded(const char* op, const char* argument, const Tensor& cache) {
  for (int64_t dim = 0; dim < cache.dim(); ++dim) {
    if (cache.stride(dim) == 0 && cache.size(dim) > 1) {
      refuse(op, argument, "stride 0", "not be an expanded view");
    }
  }
}

inline void check_pools(const char* op, const Tensor& key_cache, const Tensor& value_cache) {
  check_rows(op, "key_cache", key_cache, {kAnySize, kAnySize, kAnySize, kAnySize});
  check_rows(
      op,
      "value_cache",
      value_cache,
      {key_cache.size(0), key_cache.size(1), key_cache.size(2), kAnySize});
  if (key_cache.size(1) < 1) refuse(op, "block_size", "0", "be at least 1");
  if (key_cache.size(2) < 1) refuse(op, "num_kv_heads", "0", "be at least 1");
  const ScalarType dtype = key_cache.scalar_type();
  if (!is_fp8(dtype) && !is_query_dtype(dtype)) {
    refuse(
        op,
        "key_cache",
        dtype_text(key_cache),
        "be float32, bfloat16, float16, float8_e4m3fn or float8_e5m2");
  }
  check_dtype(op, "value_cache", value_cache, dtype);
  check_head_dim(op, "key_cache", key_cache);
  check_head_dim(op, "value_cache", value_cache);
}

inline void check_no_scale(
    const char* op, const char* argument, const std::optional<Tensor>& scale) {
  if (scale) refuse(op, argument, "a tensor", "be None where nothing is converted");
}

// Positions that a table reaches are counted in 64 bits.
inline void check_table(const char* op, const Tensor& block_table, int64_t block_size) {
  check_index(op, "block_table", block_table, {kAnySize, kAnySize});
  if (block_table.size(1) > 1 && block_table.stride(1) != 1) {
    const std::string actual = std::to_string(block_table.stride(1));
    refuse(op, "block_table", actual, "have stride 1 in its last dimension");
  }
  if (block_table.size(1) > std::numeric_limits<int64_t>::max() / block_size) {
    const std::string actual = std::to_string(block_table.size(1)) + " blocks";
    refuse(op, "block_table", actual, "reach less than 2**63 positions");
  }
}

// A float32 for each head: one element for all of them, one for each, or a default for none given.
class HeadValues {
 public:
  HeadValues(
      const char* op,
      const char* argument,
      const std::optional<Tensor>& values,
      int64_t heads,
      float otherwise)
      : otherwise_(otherwise) {
    if (!values) return;
    if (!is_served(*values)) refuse(op, argument, "another device", "be on ", kServedDevice);
    check_dtype(op, argument, *values, ScalarType::Float);
    const bool is_one = values->numel() == 1;
    if (values->dim() > 1 || (!is_one && values->numel() != heads)) {
      refuse(op, argument, shape_text(*values), "have 1 or ", heads, " elements");
    }
    data_ = static_cast<const float*>(values->data_ptr());
    stride_ = is_one ? 0 : values->stride(0);
  }

  bool is_given() const { return data_ != nullptr; }
  bool is_one_for_all() const { return stride_ == 0; }
  float operator[](int64_t head) const { return data_ ? data_[head * stride_] : otherwise_; }
  const float* data() const { return data_; }
  int64_t stride() const { return stride_; }

 private:
  const float* data_ = nullptr;
  int64_t stride_ = 0;
  float otherwise_;
};

inline void check_slots(const char* op, const IndexVector& slot_mapping, int64_t num_slots) {
  for (int64_t index = 0; index < slot_mapping.size(); ++index) {
    if (slot_mapping[index] >= num_slots) {
      refuse(
          op,
          "slot_mapping",
          at_index(slot_mapping[index], index),
          "be below num_blocks * block_size = ",
          num_slots);
    }
  }
}

inline void check_lengths(const char* op, const IndexVector& seqused_k, int64_t capacity) {
  for (int64_t index = 0; index < seqused_k.size(); ++index) {
    if (seqused_k[index] < 0 || seqused_k[index] > capacity) {
      refuse(
          op,
          "seqused_k",
          at_index(seqused_k[index], index),
          "be in [0, max_blocks * block_size = ",
          capacity,
          "]");
    }
  }
}

inline void check_prefix_sums(const char* op, const QueryRanges& queries, int64_t num_tokens) {
  if (!queries.sums()) return;
  const IndexVector& sums = *queries.sums();
  if (sums[0] != 0) refuse(op, "cu_seqlens_q", at_index(sums[0], 0), "start at 0");
  for (int64_t index = 1; index < sums.size(); ++index) {
    if (sums[index] < sums[index - 1]) {
      const std::string actual =
          std::to_string(sums[index]) + " after " + at_index(sums[index - 1], index);
      refuse(op, "cu_seqlens_q", actual, "not fall");
    }
  }
  const int64_t last = sums.size() - 1;
  if (sums[last] > num_tokens) {
    refuse(
        op,
        "cu_seqlens_q",
        at_index(sums[last], last),
        "end at or below the number of tokens ",
        num_tokens);
  }
}

inline std::string at_table(int64_t block, int64_t sequence, int64_t column) {
  return std::to_string(block) + " at [" + std::to_string(sequence) + ", " +
         std::to_string(column) + "]";
}

// Columns [first, stop) of a sequence's row of the block table.
inline void check_table_row(
    const char* op,
    const BlockTable& block_table,
    int64_t sequence,
    int64_t first,
    int64_t stop,
    int64_t num_blocks) {
  const IndexVector blocks = block_table.row(sequence);
  for (int64_t column = first; column < stop; ++column) {
    if (blocks[column] < 0 || blocks[column] >= num_blocks) {
      refuse(
          op,
          "block_table",
          at_table(blocks[column], sequence, column),
          "be in [0, num_blocks = ",
          num_blocks,
          ") where it is used");
    }
  }
}

inline void check_block_ids(
    const char* op, const char* argument, const IndexVector& blocks, int64_t num_blocks) {
  for (int64_t index = 0; index < blocks.size(); ++index) {
    if (blocks[index] < 0 || blocks[index] >= num_blocks) {
      refuse(
          op, argument, at_index(blocks[index], index), "be in [0, num_blocks = ", num_blocks, ")");
    }
  }
}

// Copies may be made in any order only if no block is read and written, or written twice.
inline void check_disjoint(
    const char* op, const IndexVector& src_blocks, const IndexVector& dst_blocks) {
  std::vector<int64_t> sources, before;
  for (int64_t index = 0; index < src_blocks.size(); ++index) sources.push_back(src_blocks[index]);
  for (int64_t index = 0; index < dst_blocks.size(); ++index) before.push_back(dst_blocks[index]);
  std::sort(sources.begin(), sources.end());
  std::sort(before.begin(), before.end());
  const auto holds = [](const std::vector<int64_t>& blocks, int64_t block) {
    return std::binary_search(blocks.begin(), blocks.end(), block);
  };
  const bool named_twice = std::adjacent_find(before.begin(), before.end()) != before.end();
  for (int64_t index = 0; index < dst_blocks.size(); ++index) {
    const int64_t block = dst_blocks[index];
    const bool is_source = holds(sources, block);
    bool is_repeated = false;
    for (int64_t other = 0; named_twice && !is_repeated && other < index; ++other) {
      is_repeated = dst_blocks[other] == block;
    }
    if (is_source || is_repeated) {
      const std::string actual = at_index(block, index) + ", which is in " +
                                 (is_source ? "src_blocks" : "dst_blocks before");
      refuse(op, "dst_blocks", actual, "name each block once and none of src_blocks");
    }
  }
}

}  // namespace torch_pagedkv
