// reshape_and_cache: every new token's key and value into its slot of the pools.

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "reshape_and_cache";

// Keys into the key pool, or values into the value pool.
struct Write {
  TokenRows rows;
  Pool pool;
  HeadValues scales;

  void token(int64_t token, int64_t slot) const {
    char* const target = pool.at_slot(slot, 0);
    if (rows.dtype == pool.dtype) {
      copy_heads(
          target,
          pool.head_stride,
          rows.at(token, 0),
          rows.head_stride,
          pool.num_kv_heads,
          pool.row_bytes());
      return;
    }
    float piece[kPiece];
    for (int64_t head = 0; head < pool.num_kv_heads; ++head) {
      in_pieces(pool.dim, [&](int64_t offset, int64_t length) {
        load_as_float(
            rows.dtype, rows.at(token, head) + offset * rows.element_size, length, piece);
        store_from_float(
            pool.dtype,
            piece,
            length,
            scales[head],
            target + head * pool.head_stride + offset * pool.element_size);
      });
    }
  }
};

// Spreads slots evenly however regular they are (equal lengths give equal offsets in blocks).
int64_t share_of_slot(int64_t slot, int64_t shares) {
  const uint64_t mixed = static_cast<uint64_t>(slot) * 0x9E3779B97F4A7C15u;
  return static_cast<int64_t>(((mixed >> 32) * static_cast<uint64_t>(shares)) >> 32);
}

void check_source(
    const char* argument, const Tensor& source, const Tensor& cache, int64_t num_tokens) {
  check_rows(kOp, argument, source, {num_tokens, cache.size(2), cache.size(3)});
  if (source.scalar_type() == cache.scalar_type()) return;
  if (!is_fp8(cache.scalar_type())) check_dtype(kOp, argument, source, cache.scalar_type());
  check_query_dtype(kOp, argument, source);
}

void reshape_and_cache(
    const Tensor& key,
    const Tensor& value,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& slot_mapping,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale) {
  check_pools(kOp, key_cache, value_cache);
  check_source("key", key, key_cache, kAnySize);
  check_source("value", value, value_cache, key.size(0));
  check_index(kOp, "slot_mapping", slot_mapping, {kAnySize});
  const IndexVector slots(slot_mapping);
  if (slots.size() > key.size(0)) {
    const std::string actual = std::to_string(slots.size());
    refuse(kOp, "slot_mapping", actual, "have at most ", key.size(0), " elements");
  }
  const int64_t num_kv_heads = key_cache.size(2);
  const HeadValues k_scales(kOp, "k_scale", k_scale, num_kv_heads, 1.0f);
  const HeadValues v_scales(kOp, "v_scale", v_scale, num_kv_heads, 1.0f);
  const Write writes[2] = {
      {TokenRows(key), Pool(key_cache), k_scales},
      {TokenRows(value), Pool(value_cache), v_scales},
  };
  check_slots(kOp, slots, writes[0].pool.num_slots());

  // A slot belongs to one share, and a share takes tokens in order: of two tokens with one slot
  // the last wins, whatever the number of threads.
  const int64_t row_bytes = writes[0].rows.row_bytes() + writes[1].rows.row_bytes();
  const int64_t bytes = slots.size() * num_kv_heads * row_bytes;
  const int64_t threads = useful_threads(2 * slots.size(), bytes);
  const int64_t shares = (threads + 1) / 2;
  for_each_item(threads, 2 * shares, [&](int64_t, int64_t item) {
    const Write& write = writes[item % 2];
    const int64_t share = item / 2;
    for (int64_t token = 0; token < slots.size(); ++token) {
      const int64_t slot = slots[token];
      if (slot < 0 || (shares > 1 && share_of_slot(slot, shares) != share)) continue;
      write.token(token, slot);
    }
  });
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("reshape_and_cache", TORCH_BOX(&torch_pagedkv::reshape_and_cache));
}
