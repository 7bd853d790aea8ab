// The host's side of prefill attention: which calls it takes, and what its copies have to know.

#include "prefill_launch.h"

#include <algorithm>

#include "hopper_products.cuh"
#include "launch.h"
#include "prefill_problem.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

const PrefillVariant& variant_of(const Tensor& key_cache, const Tensor& value_cache) {
  const int dim = static_cast<int>(std::max(key_cache.size(3), value_cache.size(3)));
  return key_cache.scalar_type() == ScalarType::BFloat16 ? prefill_variant_bfloat16(dim)
                                                         : prefill_variant_float16(dim);
}

// The copy engine's strides are positive multiples of 16 bytes. Dimensions of one element have none.
bool takes_stride(int64_t count, int64_t bytes) {
  return count == 1 || (bytes > 0 && bytes % 16 == 0 && bytes < int64_t{1} << 40);
}

bool takes_address(const void* data) { return reinterpret_cast<intptr_t>(data) % 16 == 0; }

// The driver's function that writes down a tensor for the copy engine.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t status = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
    cudaGetLastError();
    return status == cudaSuccess && result == cudaDriverEntryPointSuccess
               ? reinterpret_cast<EncodeTiled>(entry)
               : nullptr;
  }();
  return function;
}

// Encodes a tensor of 16-bit elements, innermost dimension first, copied a box at a time into panels of
// 64 elements; false where the copy engine does not take it. Strides are in bytes, without the innermost.
template <int RANK>
bool encode(
    CUtensorMap& map, const void* data, const int64_t (&sizes)[RANK],
    const int64_t (&strides)[RANK - 1], const int (&box)[RANK]) {
  cuuint64_t all_sizes[RANK], all_strides[RANK - 1];
  cuuint32_t box_sizes[RANK], steps[RANK];
  bool takes = takes_address(data);
  for (int dim = 0; dim < RANK; ++dim) {
    all_sizes[dim] = static_cast<cuuint64_t>(sizes[dim]);
    box_sizes[dim] = static_cast<cuuint32_t>(box[dim]);
    steps[dim] = 1;
    if (dim == 0) continue;
    takes = takes && takes_stride(sizes[dim], strides[dim - 1]);
    all_strides[dim - 1] = static_cast<cuuint64_t>(sizes[dim] == 1 ? 16 : strides[dim - 1]);
  }
  return takes &&
         encode_tiled()(
             &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, RANK, const_cast<void*>(data), all_sizes,
             all_strides, box_sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Query rows as (element, head, token), copied a tile's heads and tokens at a time.
bool map_query(CUtensorMap& map, const DecodeProblem& problem, const PrefillGrid& grid) {
  return encode<3>(
      map, problem.query, {problem.key_dim, problem.num_heads, problem.num_tokens},
      {problem.query_head_stride, problem.query_token_stride},
      {64, problem.heads_of_tile, grid.tokens_of_tile});
}

// How many groups of 8 positions it is from a block to the next, if all groups lie equally far apart and
// all panels of a row are whole; otherwise 0.
int groups_of_block(const Tensor& cache) {
  if (cache.size(1) % 8 != 0 || cache.size(3) % kPanelElements != 0) return 0;
  if (cache.size(0) == 1) return static_cast<int>(cache.size(1) / 8);
  const int64_t group = 8 * cache.stride(1);
  if (group <= 0 || cache.stride(0) % group != 0) return 0;
  const int64_t groups = cache.stride(0) / group;
  return groups * cache.size(0) > INT32_MAX || groups < cache.size(1) / 8 ? 0 : static_cast<int>(groups);
}

// A pool as (element, offset in a group, panel, head, group), copied `granule` positions at a time.
bool map_groups(CUtensorMap& map, const Tensor& cache, int granule, int groups, int dim) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  const int64_t row = cache.stride(1) * element;
  const int64_t last = (cache.size(0) - 1) * groups + cache.size(1) / 8;
  return encode<5>(
      map, cache.data_ptr(),
      {kPanelElements, 8, cache.size(3) / kPanelElements, cache.size(2), last},
      {row, kPanelRowBytes, cache.stride(2) * element, 8 * row},
      {kPanelElements, 8, dim / kPanelElements, 1, granule / 8});
}

// A pool as (element, offset, head, block), copied `granule` positions and 64 elements at a time.
bool map_pool(CUtensorMap& map, const Tensor& cache, int granule) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  return encode<4>(
      map, cache.data_ptr(), {cache.size(3), cache.size(1), cache.size(2), cache.size(0)},
      {cache.stride(1) * element, cache.stride(2) * element, cache.stride(0) * element},
      {64, granule, 1, 1});
}

}  // namespace

// The one place that says which long sequences these kernels take, of a call that decode attention takes:
// what others lost to Triton's is left to that. It depends on nothing that differs between the batches of a
// model, nor on strides or addresses.
bool takes_prefill(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache) {
  if (query.scalar_type() != key_cache.scalar_type()) return false;
  const int64_t dim = key_cache.size(3);
  if ((dim != 64 && dim != 128 && dim != 256) || value_cache.size(3) != dim) return false;
  if (key_cache.size(1) % 16 != 0) return false;
  const int32_t device = key_cache.get_device_index();
  const OnDevice on_device(device);
  return device_attribute(kOp, cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         variant_of(key_cache, value_cache).is_there(device) && encode_tiled() != nullptr;
}

int tokens_of_prefill_tile(
    const DecodeProblem& problem, const Tensor& key_cache, const Tensor& value_cache) {
  return variant_of(key_cache, value_cache).rows / problem.heads_of_tile;
}

// Overlaps with decode attention's launches before: it has other rows. Where no sequence is long it costs
// little behind them; before them all their CTAs would wait for its memory.
void attend_prefill(
    const DecodeProblem& problem, const Tensor& key_cache, const Tensor& value_cache) {
  const PrefillVariant& variant = variant_of(key_cache, value_cache);
  const int32_t device = key_cache.get_device_index();
  PrefillGrid grid{};
  grid.tokens_of_tile = tokens_of_prefill_tile(problem, key_cache, value_cache);
  // Every sequence has one tile that is not whole at most, and long sequences have several tokens.
  const int64_t least_tokens = problem.most_tokens + 1;
  const int64_t most_long = std::min<int64_t>(problem.num_sequences, problem.num_tokens / least_tokens);
  const int64_t most_items = (problem.num_tokens / grid.tokens_of_tile + most_long) *
                             problem.items_of_sequence();
  grid.granule = std::min(problem.block_size & -problem.block_size, variant.keys);
  const int64_t multiprocessors = device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  const int ctas = static_cast<int>(std::max<int64_t>(1, std::min(most_items, multiprocessors)));
  const cudaStream_t stream = current_stream(device);
  PrefillMaps maps{};
  grid.query_is_aligned = map_query(maps.query, problem, grid);
  const int of_keys = groups_of_block(key_cache), of_values = groups_of_block(value_cache);
  if (of_keys > 0 && of_values > 0 &&
      map_groups(maps.keys, key_cache, grid.granule, of_keys, variant.dim) &&
      map_groups(maps.values, value_cache, grid.granule, of_values, variant.dim)) {
    grid.groups_of_keys = of_keys, grid.groups_of_values = of_values;
    grid.pools_are_aligned = true;
  } else {
    grid.granule = std::min(grid.granule, 8);
    grid.pools_are_aligned = map_pool(maps.keys, key_cache, grid.granule) &&
                             map_pool(maps.values, value_cache, grid.granule);
  }
  check_cuda(kOp, variant.attend(problem, grid, maps, ctas, stream));
}

}  // namespace torch_pagedkv
