// A variant of decode attention out of a tile, to be instantiated in a file for each pool dtype.

#pragma once

#include "decode_attention.cuh"

namespace torch_pagedkv {

template <class TILE>
cudaError_t launch_attend(const DecodeProblem& problem, int64_t ctas, cudaStream_t stream) {
  // More shared memory than 48 KiB is granted on request, for each device.
  const cudaError_t granted = cudaFuncSetAttribute(
      decode_attention<TILE>, cudaFuncAttributeMaxDynamicSharedMemorySize, TILE::kSharedBytes);
  if (granted != cudaSuccess) return granted;
  decode_attention<TILE>
      <<<static_cast<unsigned>(ctas), kDecodeThreads, TILE::kSharedBytes, stream>>>(problem);
  return cudaGetLastError();
}

template <class TILE>
cudaError_t launch_merge(const DecodeProblem& problem, int64_t ctas, cudaStream_t stream) {
  merge_parts<TILE><<<static_cast<unsigned>(ctas), kDecodeThreads, 0, stream>>>(problem);
  return cudaGetLastError();
}

template <class TILE>
inline constexpr DecodeVariant kDecodeVariant{
    TILE::kTile, TILE::kCtas, TILE::kSharedBytes + static_cast<int>(sizeof(WarpStates)) + 1024,
    &launch_attend<TILE>, &launch_merge<TILE>};

// Stages of about 8 KiB a warp: about 200 KiB of a multiprocessor's memory are then in flight, or half
// of that where accumulators leave room for one CTA only.
template <class POOL>
const DecodeVariant& decode_variant_of(int dim) {
  if constexpr (POOL::kIsFp8) {
    if (dim <= 64) return kDecodeVariant<DecodeTile<POOL, 64, 32, 6, 2>>;
    if (dim <= 128) return kDecodeVariant<DecodeTile<POOL, 128, 32, 3, 2>>;
    return kDecodeVariant<DecodeTile<POOL, 256, 16, 3, 2>>;
  } else {
    if (dim <= 64) return kDecodeVariant<DecodeTile<POOL, 64, 32, 3, 2>>;
    if (dim <= 128) return kDecodeVariant<DecodeTile<POOL, 128, 16, 3, 2>>;
    return kDecodeVariant<DecodeTile<POOL, 256, 16, 2, 1>>;
  }
}

}  // namespace torch_pagedkv
