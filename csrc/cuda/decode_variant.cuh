// A variant of decode attention out of a tile, to be instantiated in a file for each pool dtype.

#pragma once

#include <atomic>

#include "decode_attention.cuh"
#include "decode_merge.cuh"

namespace torch_pagedkv {

template <class TILE, bool IS_MIXED>
cudaError_t launch_attend(
    const DecodeProblem& problem, int64_t ctas, int warps, cudaStream_t stream) {
  return launch_dependent(
      decode_attention<TILE, IS_MIXED>, dim3(static_cast<unsigned>(ctas)), 32 * warps, warps * TILE::kWarpBytes,
      false, stream, problem);
}

template <class TILE>
cudaError_t launch_merge(
    const DecodeProblem& problem, const dim3& grid, bool overlaps, cudaStream_t stream) {
  return launch_dependent(
      merge_parts<TILE::kKeys, TILE::kLeaves>, grid, kMergeThreads, 0, overlaps, stream, problem);
}

// More shared memory than 48 KiB is granted on request, on each device.
template <class TILE, bool IS_MIXED>
cudaError_t request_memory(int32_t device, int warps) {
  static std::atomic<uint64_t> granted{0};
  const uint64_t bit = device < 64 ? uint64_t{1} << device : 0;
  if (granted.load(std::memory_order_relaxed) & bit) return cudaSuccess;
  const cudaError_t status = cudaFuncSetAttribute(
      decode_attention<TILE, IS_MIXED>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      warps * TILE::kWarpBytes);
  if (status == cudaSuccess) granted.fetch_or(bit, std::memory_order_relaxed);
  return status;
}

template <class TILE, bool IS_MIXED>
inline constexpr DecodeVariant kDecodeVariant{
    TILE::kKeys, TILE::kWarps, TILE::kCtas, TILE::kLeaves, TILE::kWarpBytes,
    TILE::kWarps * static_cast<int>(sizeof(typename WarpReader<TILE, IS_MIXED>::Shared)) +
        static_cast<int>(sizeof(TeamPlaces<TILE::kThreads>)) + 1024,
    &request_memory<TILE, IS_MIXED>, &launch_attend<TILE, IS_MIXED>, &launch_merge<TILE>};

// As many warps and stages as registers and about 200 KiB of a multiprocessor's memory allow; two thirds
// of it are in flight. A GPU with less memory runs fewer warps.
template <class POOL, int ROWS, bool IS_MIXED>
const DecodeVariant& decode_variant_of_dim(int dim) {
  if constexpr (POOL::kIsFp8) {
    if (dim <= 64) return kDecodeVariant<DecodeTile<POOL, 64, ROWS, 32, 3, 8, 2>, IS_MIXED>;
    if (dim <= 128) return kDecodeVariant<DecodeTile<POOL, 128, ROWS, 16, 3, 8, ROWS == kFewRows ? 2 : 1>, IS_MIXED>;
    return kDecodeVariant<DecodeTile<POOL, 256, ROWS, 16, 3, 8, 1>, IS_MIXED>;
  } else {
    if (dim <= 64) return kDecodeVariant<DecodeTile<POOL, 64, ROWS, 16, 3, 8, 2>, IS_MIXED>;
    if (dim <= 128) return kDecodeVariant<DecodeTile<POOL, 128, ROWS, 16, 3, 8, 1>, IS_MIXED>;
    return kDecodeVariant<DecodeTile<POOL, 256, ROWS, 16, 3, 4, 1>, IS_MIXED>;
  }
}

template <class POOL>
const DecodeVariant& decode_variant_of(int dim, ItemRows rows) {
  switch (rows) {
    case ItemRows::kFew: return decode_variant_of_dim<POOL, kFewRows, false>(dim);
    case ItemRows::kMany: return decode_variant_of_dim<POOL, kRows, false>(dim);
    default: return decode_variant_of_dim<POOL, kRows, true>(dim);
  }
}

}  // namespace torch_pagedkv
