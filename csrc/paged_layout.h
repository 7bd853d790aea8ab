// Where things are: slots, blocks and heads of a pool, entries of a block table, rows of tokens.
//
// slot = physical_block * block_size + offset. With block_size 16 and the block table [7, 2, 9],
// token position 20 is offset 4 of logical block 1, that is of physical block 2: slot 36.
//
// This is the only place that computes addresses. Strides are in bytes and 64 bits wide: layout is
// whatever the strides say, and a pool may be larger than 2 GiB.

#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <optional>

#ifdef __CUDACC__
#include "cuda/tensor_view.h"
#endif

namespace torch_pagedkv {

using torch::headeronly::ScalarType;
#ifdef __CUDACC__
using Tensor = TensorView;  // converted from torch's where an op is called
#else
using torch::stable::Tensor;
#endif

// Rows of tokens [tokens, heads, dim], elements of a head adjacent.
struct TokenRows {
  char* data;
  ScalarType dtype;
  int64_t element_size;
  int64_t tokens, heads, dim;
  int64_t token_stride, head_stride;

  explicit TokenRows(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        dtype(tensor.scalar_type()),
        element_size(static_cast<int64_t>(tensor.element_size())),
        tokens(tensor.size(0)),
        heads(tensor.size(1)),
        dim(tensor.size(2)),
        token_stride(tensor.stride(0) * element_size),
        head_stride(tensor.stride(1) * element_size) {}

  int64_t row_bytes() const { return dim * element_size; }
  char* at(int64_t token, int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// A pool [num_blocks, block_size, num_kv_heads, dim], elements of a head adjacent.
struct Pool {
  char* data;
  ScalarType dtype;
  int64_t element_size;
  int64_t num_blocks, block_size, num_kv_heads, dim;
  int64_t block_stride, offset_stride, head_stride;

  explicit Pool(const Tensor& tensor)
      : data(static_cast<char*>(tensor.data_ptr())),
        dtype(tensor.scalar_type()),
        element_size(static_cast<int64_t>(tensor.element_size())),
        num_blocks(tensor.size(0)),
        block_size(tensor.size(1)),
        num_kv_heads(tensor.size(2)),
        dim(tensor.size(3)),
        block_stride(tensor.stride(0) * element_size),
        offset_stride(tensor.stride(1) * element_size),
        head_stride(tensor.stride(2) * element_size) {}

  int64_t num_slots() const { return num_blocks * block_size; }
  int64_t row_bytes() const { return dim * element_size; }
  int64_t block_bytes() const { return block_size * num_kv_heads * row_bytes(); }
  char* at(int64_t block, int64_t offset, int64_t head) const {
    return data + block * block_stride + offset * offset_stride + head * head_stride;
  }
  char* at_slot(int64_t slot, int64_t head) const {
    return at(slot / block_size, slot % block_size, head);
  }
  // Whether a block is one run of bytes, token by token (NHD) or head by head (HND).
  bool block_is_one_run() const {
    const int64_t row = row_bytes();
    const bool nhd = (num_kv_heads == 1 || head_stride == row) &&
                     (block_size == 1 || offset_stride == num_kv_heads * row);
    const bool hnd = (block_size == 1 || offset_stride == row) &&
                     (num_kv_heads == 1 || head_stride == block_size * row);
    return nhd || hnd;
  }
};

// A 1-d tensor of int32 or int64, whatever its stride.
class IndexVector {
 public:
  explicit IndexVector(const Tensor& tensor)
      : data_(static_cast<const char*>(tensor.data_ptr())),
        size_(tensor.size(0)),
        is_wide_(tensor.scalar_type() == ScalarType::Long),
        stride_(tensor.stride(0) * (is_wide_ ? 8 : 4)) {}

  int64_t size() const { return size_; }
  int64_t operator[](int64_t index) const {
    const char* address = data_ + index * stride_;
    if (is_wide_) {
      int64_t value;
      std::memcpy(&value, address, sizeof value);
      return value;
    }
    int32_t value;
    std::memcpy(&value, address, sizeof value);
    return value;
  }

 private:
  friend class BlockTable;
  IndexVector(const char* data, int64_t size, bool is_wide, int64_t stride)
      : data_(data), size_(size), is_wide_(is_wide), stride_(stride) {}

  const char* data_;
  int64_t size_;
  bool is_wide_;
  int64_t stride_;
};

// A block table [num_sequences, max_blocks] of int32 or int64, whatever its strides.
class BlockTable {
 public:
  explicit BlockTable(const Tensor& tensor)
      : data_(static_cast<const char*>(tensor.data_ptr())),
        is_wide_(tensor.scalar_type() == ScalarType::Long),
        num_sequences_(tensor.size(0)),
        max_blocks_(tensor.size(1)),
        row_stride_(tensor.stride(0) * (is_wide_ ? 8 : 4)),
        column_stride_(tensor.stride(1) * (is_wide_ ? 8 : 4)) {}

  int64_t num_sequences() const { return num_sequences_; }
  int64_t max_blocks() const { return max_blocks_; }
  // The physical blocks of a sequence, one for each of its logical blocks.
  IndexVector row(int64_t sequence) const {
    return IndexVector(data_ + sequence * row_stride_, max_blocks_, is_wide_, column_stride_);
  }

 private:
  const char* data_;
  bool is_wide_;
  int64_t num_sequences_, max_blocks_;
  int64_t row_stride_, column_stride_;
};

// The packed query rows of each sequence: [start(b), stop(b)). No prefix sums: one row for each.
class QueryRanges {
 public:
  explicit QueryRanges(const std::optional<Tensor>& cu_seqlens_q) {
    if (cu_seqlens_q) sums_.emplace(*cu_seqlens_q);
  }

  int64_t start(int64_t sequence) const { return sums_ ? (*sums_)[sequence] : sequence; }
  int64_t stop(int64_t sequence) const { return sums_ ? (*sums_)[sequence + 1] : sequence + 1; }
  int64_t length(int64_t sequence) const { return stop(sequence) - start(sequence); }
  const std::optional<IndexVector>& sums() const { return sums_; }

 private:
  std::optional<IndexVector> sums_;
};

// Copies one row of `row_bytes` for each head, in a single run where the rows are adjacent.
inline void copy_heads(
    char* target,
    int64_t target_head_stride,
    const char* source,
    int64_t source_head_stride,
    int64_t heads,
    int64_t row_bytes) {
  if (heads == 1 || (target_head_stride == row_bytes && source_head_stride == row_bytes)) {
    std::memcpy(target, source, static_cast<size_t>(heads * row_bytes));
    return;
  }
  for (int64_t head = 0; head < heads; ++head) {
    std::memcpy(
        target + head * target_head_stride,
        source + head * source_head_stride,
        static_cast<size_t>(row_bytes));
  }
}

inline int64_t blocks_needed(int64_t length, int64_t block_size) {
  return length / block_size + (length % block_size != 0);
}

}  // namespace torch_pagedkv
