// The host's side of prefill attention: which calls it takes, and what its copies have to know.

#include "prefill_launch.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "launch.h"
#include "prefill_problem.h"

namespace torch_pagedkv {
namespace {

constexpr const char* kOp = "paged_attention";

const PrefillVariant* variant_of(const Tensor& key_cache) {
  const int dim = static_cast<int>(key_cache.size(3));
  switch (key_cache.scalar_type()) {
    case ScalarType::BFloat16: return prefill_variant_bfloat16(dim);
    case ScalarType::Half: return prefill_variant_float16(dim);
    default: return nullptr;
  }
}

// The copy engine's strides are positive multiples of 16 bytes. Dimensions of one element have none.
bool takes_strides(const Tensor& cache) {
  const int64_t element = static_cast<int64_t>(cache.element_size());
  for (int64_t dim = 0; dim < 3; ++dim) {
    const int64_t stride = cache.stride(dim) * element;
    if (cache.size(dim) == 1) continue;
    if (stride <= 0 || stride % 16 != 0 || stride >= int64_t{1} << 40) return false;
  }
  return reinterpret_cast<intptr_t>(cache.data_ptr()) % 16 == 0;
}

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
// 64 elements. Strides are in bytes, without the innermost.
template <int RANK>
CUtensorMap encode(
    const char* argument, void* data, const cuuint64_t (&sizes)[RANK],
    const cuuint64_t (&strides)[RANK - 1], const cuuint32_t (&box)[RANK]) {
  cuuint32_t steps[RANK];
  std::fill(steps, steps + RANK, 1);
  CUtensorMap map;
  const CUresult status = encode_tiled()(
      &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, RANK, data, sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    refuse(kOp, argument, "error " + std::to_string(status), "have strides that CUDA can copy from");
  }
  return map;
}

// Query rows as (element, head, token), copied a tile's heads and tokens at a time.
CUtensorMap map_of_query(const DecodeProblem& problem, const PrefillGrid& grid) {
  const auto number = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const cuuint64_t sizes[3] = {
      number(problem.key_dim), number(problem.num_heads), number(problem.num_tokens)};
  const cuuint64_t strides[2] = {
      number(problem.num_heads == 1 ? 16 : problem.query_head_stride),
      number(problem.num_tokens == 1 ? 16 : problem.query_token_stride)};
  const cuuint32_t box[3] = {
      64, static_cast<cuuint32_t>(problem.heads_of_tile),
      static_cast<cuuint32_t>(grid.tokens_of_tile)};
  return encode("query", const_cast<char*>(problem.query), sizes, strides, box);
}

bool takes_query(const DecodeProblem& problem) {
  const auto fits = [](int64_t count, int64_t stride) {
    return count == 1 || (stride > 0 && stride % 16 == 0 && stride < int64_t{1} << 40);
  };
  return reinterpret_cast<intptr_t>(problem.query) % 16 == 0 &&
         fits(problem.num_heads, problem.query_head_stride) &&
         fits(problem.num_tokens, problem.query_token_stride);
}

// A pool as (element, offset, head, block), copied `granule` positions and 64 elements at a time.
CUtensorMap map_of_pool(const char* argument, const Tensor& cache, int granule) {
  const auto stride = [&](int64_t dim) {
    return static_cast<cuuint64_t>(cache.size(dim) == 1 ? 16 : cache.stride(dim) * 2);
  };
  const auto size = [&](int64_t dim) { return static_cast<cuuint64_t>(cache.size(dim)); };
  const cuuint64_t sizes[4] = {size(3), size(1), size(2), size(0)};
  const cuuint64_t strides[3] = {stride(1), stride(2), stride(0)};
  const cuuint32_t box[4] = {64, static_cast<cuuint32_t>(granule), 1, 1};
  return encode(argument, cache.data_ptr(), sizes, strides, box);
}

}  // namespace

bool takes_prefill(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache) {
  const PrefillVariant* const variant = variant_of(key_cache);
  if (variant == nullptr || value_cache.size(3) != key_cache.size(3)) return false;
  if (query.scalar_type() != key_cache.scalar_type()) return false;
  if (!takes_strides(key_cache) || !takes_strides(value_cache)) return false;
  const int32_t device = key_cache.get_device_index();
  const OnDevice on_device(device);
  return device_attribute(kOp, cudaDevAttrComputeCapabilityMajor, device) == 9 &&
         variant->is_there(device) && encode_tiled() != nullptr;
}

void attend_prefill(
    const DecodeProblem& problem, const Tensor& lse, const Tensor& key_cache,
    const Tensor& value_cache) {
  const PrefillVariant& variant = *variant_of(key_cache);
  const int32_t device = key_cache.get_device_index();
  PrefillGrid grid{};
  grid.tokens_of_tile = variant.rows / problem.heads_of_tile;
  grid.items = (static_cast<int64_t>(problem.num_tokens) / grid.tokens_of_tile +
                problem.num_sequences + 1) *
               problem.items_of_sequence();
  grid.granule = std::min(problem.block_size & -problem.block_size, variant.keys);
  grid.query_is_whole = takes_query(problem);
  const int64_t multiprocessors = device_attribute(kOp, cudaDevAttrMultiProcessorCount, device);
  const int ctas = static_cast<int>(std::min(grid.items, multiprocessors));
  const cudaStream_t stream = current_stream(device);
  std::optional<Tensor> counter;
  if (grid.items > ctas) {
    counter.emplace(torch::stable::new_empty(lse, {1}));
    grid.taken = static_cast<unsigned*>(counter->data_ptr());
    check_cuda(kOp, cudaMemsetAsync(grid.taken, 0, sizeof *grid.taken, stream));
  }
  PrefillMaps maps{};
  if (grid.query_is_whole) maps.query = map_of_query(problem, grid);
  maps.keys = map_of_pool("key_cache", key_cache, grid.granule);
  maps.values = map_of_pool("value_cache", value_cache, grid.granule);
  check_cuda(kOp, variant.attend(problem, grid, maps, ctas, stream));
}

}  // namespace torch_pagedkv
