// copy_blocks: whole blocks of both pools onto others, for copy-on-write.

#include <torch/csrc/stable/library.h>

#include "checks.h"
#include "work_items.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "copy_blocks";

void copy_block(const Pool& pool, int64_t source, int64_t target) {
  if (pool.block_is_one_run()) {
    std::memcpy(
        pool.at(target, 0, 0), pool.at(source, 0, 0), static_cast<size_t>(pool.block_bytes()));
    return;
  }
  for (int64_t offset = 0; offset < pool.block_size; ++offset) {
    copy_heads(
        pool.at(target, offset, 0),
        pool.head_stride,
        pool.at(source, offset, 0),
        pool.head_stride,
        pool.num_kv_heads,
        pool.row_bytes());
  }
}

void copy_blocks(
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& src_blocks,
    const Tensor& dst_blocks) {
  check_pools(kOp, key_cache, value_cache);
  check_index(kOp, "src_blocks", src_blocks, {kAnySize});
  check_index(kOp, "dst_blocks", dst_blocks, {src_blocks.size(0)});
  const IndexVector sources(src_blocks), targets(dst_blocks);
  const Pool pools[2] = {Pool(key_cache), Pool(value_cache)};
  check_block_ids(kOp, "src_blocks", sources, pools[0].num_blocks);
  check_block_ids(kOp, "dst_blocks", targets, pools[0].num_blocks);
  check_disjoint(kOp, sources, targets);

  const int64_t items = 2 * sources.size();
  const int64_t bytes = sources.size() * (pools[0].block_bytes() + pools[1].block_bytes());
  for_each_item(useful_threads(items, bytes), items, [&](int64_t, int64_t item) {
    copy_block(pools[item % 2], sources[item / 2], targets[item / 2]);
  });
}

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def(
      "copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor src_blocks, "
      "Tensor dst_blocks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CPU, library) {
  library.impl("copy_blocks", TORCH_BOX(&torch_pagedkv::copy_blocks));
}
