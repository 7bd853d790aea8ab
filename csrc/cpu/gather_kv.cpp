// gather_kv: the keys and values of every sequence, out of their blocks into one dense tensor.

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "gather_kv";

// The keys or the values; `gathered` is [sequences * capacity, heads, dim], contiguous.
struct Gather {
  Pool pool;
  HeadValues scales;
  char* gathered;
  ScalarType dtype;
  int64_t element_size;

  int64_t token_bytes() const { return pool.num_kv_heads * pool.dim * element_size; }

  void token(int64_t block, int64_t offset, char* target) const {
    const char* const source = pool.at(block, offset, 0);
    const int64_t row_bytes = pool.dim * element_size;
    if (dtype == pool.dtype) {
      copy_heads(
          target, row_bytes, source, pool.head_stride, pool.num_kv_heads, row_bytes);
      return;
    }
    float piece[kPiece];
    for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
      const float scale = scales[head];
      in_pieces(pool.dim, [&](int64_t first, int64_t length) {
        load_as_float(
            pool.dtype,
            source + head * pool.head_stride + first * pool.element_size,
            length,
            piece);
        for (int64_t i = 0; i < length; ++i) piece[i] *= scale;
        char* const row = target + head * row_bytes;
        store_from_float(dtype, piece, length, 1.0f, row + first * element_size);
      });
    }
  }

  // The positions of one logical block: those below `length` from the pool, zeros after them.
  void block(const IndexVector& blocks, int64_t column, int64_t length, char* target) const {
    const int64_t first = column * pool.block_size;
    const int64_t valid = std::clamp<int64_t>(length - first, 0, pool.block_size);
    for (int64_t offset = 0; offset < valid; ++offset) {
      token(blocks[column], offset, target + offset * token_bytes());
    }
    std::memset(
        target + valid * token_bytes(),
        0,
        static_cast<size_t>((pool.block_size - valid) * token_bytes()));
  }
};

Gather make_gather(
    const char* const names[2],
    const Tensor& gathered,
    const Tensor& cache,
    const std::optional<Tensor>& scale,
    const Tensor& block_table) {
  check_contiguous(
      kOp,
      names[0],
      gathered,
      {block_table.size(0), block_table.size(1) * cache.size(1), cache.size(2), cache.size(3)});
  if (gathered.scalar_type() != cache.scalar_type()) check_query_dtype(kOp, names[0], gathered);
  return {
      Pool(cache),
      HeadValues(kOp, names[1], scale, cache.size(2), 1.0f),
      static_cast<char*>(gathered.data_ptr()),
      gathered.scalar_type(),
      static_cast<int64_t>(gathered.element_size())};
}

void gather_kv(
    const Tensor& keys,
    const Tensor& values,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& block_table,
    const Tensor& seqused_k,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  check_pools(kOp, key_cache, value_cache);
  check_index(kOp, "block_table", block_table, {kAnySize, kAnySize});
  check_index(kOp, "seqused_k", seqused_k, {block_table.size(0)});
  const char* const key_names[2] = {"keys", "k_scale"};
  const char* const value_names[2] = {"values", "v_scale"};
  const Gather gathers[2] = {
      make_gather(key_names, keys, key_cache, k_scale, block_table),
      make_gather(value_names, values, value_cache, v_scale, block_table),
  };
  const BlockTable table(block_table);
  const IndexVector lengths(seqused_k);
  const Pool& pool = gathers[0].pool;
  check_lengths(kOp, lengths, table.max_blocks() * pool.block_size);
  for (int64_t sequence = 0; sequence < table.num_sequences(); ++sequence) {
    const int64_t used = blocks_needed(lengths[sequence], pool.block_size);
    check_table_row(kOp, table, sequence, 0, used, pool.num_blocks);
  }

  const int64_t items = 2 * table.num_sequences() * table.max_blocks();
  const int64_t bytes = table.num_sequences() * table.max_blocks() * pool.block_size *
                        (gathers[0].token_bytes() + gathers[1].token_bytes());
  for_each_item(useful_threads(items, bytes), items, [&](int64_t, int64_t item) {
    const Gather& gather = gathers[item % 2];
    const int64_t row = item / 2;
    const int64_t sequence = row / table.max_blocks();
    char* const target = gather.gathered + row * pool.block_size * gather.token_bytes();
    gather.block(table.row(sequence), row % table.max_blocks(), lengths[sequence], target);
  });
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "gather_kv(Tensor(a!) keys, Tensor(b!) values, Tensor key_cache, Tensor value_cache, "
      "Tensor block_table, Tensor seqused_k, Tensor? k_scale, Tensor? v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("gather_kv", TORCH_BOX(&torch_pagedkv::gather_kv));
}
