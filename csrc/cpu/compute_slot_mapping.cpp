// compute_slot_mapping: the slots of the last query_len positions of every sequence.

#include <torch/csrc/stable/library.h>

#include <limits>

#include "checks.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "compute_slot_mapping";

// The pool's size is unknown here: an id must not be negative, and its slots must fit in an int64.
void check_entries(
    const BlockTable& table, int64_t sequence, int64_t first, int64_t stop, int64_t block_size) {
  const IndexVector blocks = table.row(sequence);
  const int64_t num_blocks = std::numeric_limits<int64_t>::max() / block_size;
  for (int64_t column = first; column < stop; ++column) {
    const int64_t block = blocks[column];
    if (block < 0) {
      const std::string actual = at_table(block, sequence, column);
      refuse(kOp, "block_table", actual, "not be negative where it is used");
    }
    if (block >= num_blocks) {
      const std::string actual = at_table(block, sequence, column);
      refuse(kOp, "block_table", actual, "name blocks whose slots fit in int64");
    }
  }
}

void compute_slot_mapping(
    const Tensor& slot_mapping,
    const Tensor& block_table,
    const Tensor& seqused_k,
    const std::optional<Tensor>& cu_seqlens_q,
    int64_t block_size) {
  check_contiguous(kOp, "slot_mapping", slot_mapping, {kAnySize});
  check_dtype(kOp, "slot_mapping", slot_mapping, ScalarType::Long);
  check_index(kOp, "block_table", block_table, {kAnySize, kAnySize});
  check_index(kOp, "seqused_k", seqused_k, {block_table.size(0)});
  if (cu_seqlens_q) check_index(kOp, "cu_seqlens_q", *cu_seqlens_q, {block_table.size(0) + 1});
  if (block_size < 1) refuse(kOp, "block_size", std::to_string(block_size), "be at least 1");
  const BlockTable table(block_table);
  const IndexVector lengths(seqused_k);
  const QueryRanges queries(cu_seqlens_q);
  const int64_t num_tokens = slot_mapping.size(0);
  if (!cu_seqlens_q && num_tokens != table.num_sequences()) {
    refuse(
        kOp,
        "num_tokens",
        std::to_string(num_tokens),
        "be the number of sequences ",
        table.num_sequences(),
        " without cu_seqlens_q");
  }
  // The block size is a plain number here: nothing keeps it within what a pool could have.
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  const bool fits = table.max_blocks() == 0 || block_size <= kLargest / table.max_blocks();
  check_lengths(kOp, lengths, fits ? table.max_blocks() * block_size : kLargest);
  check_prefix_sums(kOp, queries, num_tokens);
  for (int64_t sequence = 0; sequence < table.num_sequences(); ++sequence) {
    const int64_t length = lengths[sequence];
    if (queries.length(sequence) == 0) continue;
    const int64_t first = std::max<int64_t>(0, length - queries.length(sequence));
    check_entries(
        table, sequence, first / block_size, blocks_needed(length, block_size), block_size);
  }

  int64_t* const slots = static_cast<int64_t*>(slot_mapping.data_ptr());
  int64_t token = 0;
  for (int64_t sequence = 0; sequence < table.num_sequences(); ++sequence) {
    const IndexVector blocks = table.row(sequence);
    int64_t position = lengths[sequence] - queries.length(sequence);
    for (; token < queries.stop(sequence); ++token, ++position) {
      // A padded sequence of length 0 has nowhere to put its token.
      slots[token] =
          position < 0 ? -1 : blocks[position / block_size] * block_size + position % block_size;
    }
  }
  std::fill(slots + token, slots + num_tokens, -1);
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "compute_slot_mapping(Tensor(a!) slot_mapping, Tensor block_table, Tensor seqused_k, "
      "Tensor? cu_seqlens_q, int block_size) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("compute_slot_mapping", TORCH_BOX(&torch_pagedkv::compute_slot_mapping));
}
