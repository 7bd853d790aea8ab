// A variant of prefill attention out of a shape, to be instantiated in a file for each dtype.

#pragma once

#include "prefill_attention.cuh"

namespace torch_pagedkv {

template <class SHAPE>
bool prefill_is_there() {
  cudaFuncAttributes attributes;
  const bool is_there =
      cudaFuncGetAttributes(&attributes, prefill_attention<SHAPE, true>) == cudaSuccess &&
      attributes.sharedSizeBytes > 0;
  cudaGetLastError();  // what is missing here must not be blamed on the next launch
  return is_there;
}

template <class SHAPE, bool IS_PLAIN>
cudaError_t launch_prefill_as(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& keys,
    const CUtensorMap& values, int ctas, cudaStream_t stream) {
  const cudaError_t granted = cudaFuncSetAttribute(
      prefill_attention<SHAPE, IS_PLAIN>, cudaFuncAttributeMaxDynamicSharedMemorySize,
      SHAPE::kSharedBytes);
  if (granted != cudaSuccess) return granted;
  prefill_attention<SHAPE, IS_PLAIN>
      <<<ctas, SHAPE::kThreads, SHAPE::kSharedBytes, stream>>>(problem, grid, keys, values);
  return cudaGetLastError();
}

template <class SHAPE>
cudaError_t launch_prefill(
    const DecodeProblem& problem, const PrefillGrid& grid, const CUtensorMap& keys,
    const CUtensorMap& values, int ctas, cudaStream_t stream) {
  // With a scale of at most 1 what is finite stays finite; with a tiny one an overflowed product
  // could become an ordinary score.
  const bool is_plain = problem.softcap == 0.0f && problem.slopes.data == nullptr &&
                        problem.softmax_scale <= 1.0f && problem.softmax_scale >= 0x1p-24f;
  const auto launch = is_plain ? launch_prefill_as<SHAPE, true> : launch_prefill_as<SHAPE, false>;
  return launch(problem, grid, keys, values, ctas, stream);
}

template <class SHAPE>
inline constexpr PrefillVariant kPrefillVariant{
    SHAPE::kRows, SHAPE::kKeys, SHAPE::kSharedBytes + static_cast<int>(sizeof(PrefillControl<SHAPE>)),
    &prefill_is_there<SHAPE>, &launch_prefill<SHAPE>};

template <class MATH>
const PrefillVariant* prefill_variant_of(int dim) {
  if (dim == 64) return &kPrefillVariant<PrefillShape<MATH, 64, 128, 3, 3>>;
  if (dim == 128) return &kPrefillVariant<PrefillShape<MATH, 128, 128, 2, 2>>;
  return nullptr;
}

}  // namespace torch_pagedkv
