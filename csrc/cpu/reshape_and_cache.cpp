// reshape_and_cache: every new token's key and value into its slot of the pools.

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "reshape_and_cache";

// So many bytes leave no cache to anybody else, and are written past the caches.
constexpr int64_t kBytesToStream = 4 << 20;
// Tokens are pages apart in a fused projection, which no hardware foresees.
constexpr int64_t kTokensAhead = 2;

// Keys into the key pool, or values into the value pool.
class Write {
 public:
  TokenRows rows;
  Pool pool;

  Write(const Tensor& source, const Tensor& cache, const HeadValues& scales, int64_t tokens)
      : rows(source), pool(cache), scales_(scales) {
    const bool is_one_run =
        heads_adjoin(rows.head_stride, rows.row_bytes()) &&
        heads_adjoin(pool.head_stride, pool.row_bytes());
    const bool is_copy = rows.dtype == pool.dtype;
    runs_ = is_one_run && (is_copy || scales.is_one_for_all()) ? 1 : pool.num_kv_heads;
    run_dim_ = pool.num_kv_heads * pool.dim / std::max<int64_t>(runs_, 1);
    streams_ = is_copy && is_one_run && tokens * source_bytes() >= kBytesToStream;
  }

  bool streams() const { return streams_; }

  void token(const Kernels& with, int64_t token, int64_t slot) const {
    char* const target = pool.at_slot(slot, 0);
    const char* const source = rows.at(token, 0);
    const char* const ahead = rows.at(std::min(token + kTokensAhead, rows.tokens - 1), 0);
    if (streams_) return with.stream(target, source, ahead, source_bytes());
    if (rows.dtype == pool.dtype) {
      return copy_heads(
          target,
          pool.head_stride,
          source,
          rows.head_stride,
          pool.num_kv_heads,
          pool.row_bytes());
    }
    for (int64_t run = 0; run < runs_; ++run) {
      const int64_t offset = run * rows.head_stride;
      fetch(ahead + offset, run_dim_ * rows.element_size);
      with.quantise(
          rows.dtype,
          pool.dtype,
          source + offset,
          run_dim_,
          scales_[run],
          target + run * pool.head_stride);
    }
  }

 private:
  int64_t source_bytes() const { return pool.num_kv_heads * rows.row_bytes(); }

  bool heads_adjoin(int64_t head_stride, int64_t row_bytes) const {
    return pool.num_kv_heads == 1 || head_stride == row_bytes;
  }

  static void fetch(const char* address, int64_t bytes) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(address + line);
  }

  const HeadValues& scales_;
  int64_t runs_, run_dim_;  // of a token's heads: one for all, or one for each
  bool streams_;
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
  check_dtype(kOp, "value", value, key.scalar_type());
  check_not_expanded(kOp, "key_cache", key_cache);
  check_not_expanded(kOp, "value_cache", value_cache);
  if (key.scalar_type() == key_cache.scalar_type()) {
    check_no_scale(kOp, "k_scale", k_scale);
    check_no_scale(kOp, "v_scale", v_scale);
  }
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
      Write(key, key_cache, k_scales, slots.size()),
      Write(value, value_cache, v_scales, slots.size()),
  };
  check_slots(kOp, slots, writes[0].pool.num_slots());

  const Kernels& with = kernels();
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
      write.token(with, token, slot);
    }
    if (write.streams()) with.finish_streams();
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
