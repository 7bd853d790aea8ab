// A variant of prefill attention out of a shape, to be instantiated in a file for each dtype.

#pragma once

#include <atomic>

#include "prefill_attention.cuh"

namespace torch_pagedkv {

template <class SHAPE, bool IS_PLAIN>
bool prepare_prefill() {
  cudaFuncAttributes attributes;
  const auto kernel = prefill_attention<SHAPE, IS_PLAIN>;
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess &&
         attributes.sharedSizeBytes > 0 &&
         cudaFuncSetAttribute(
             kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SHAPE::kSharedBytes) == cudaSuccess;
}

// Asked once for each device, since the answer takes longer than a launch.
template <class SHAPE>
bool prefill_is_there(int device) {
  constexpr int kMostDevices = 64;
  static std::atomic<signed char> answers[kMostDevices];  // 0: not asked, -1: no, 1: yes
  if (device < 0 || device >= kMostDevices) return false;
  signed char answer = answers[device].load(std::memory_order_relaxed);
  if (answer == 0) {
    answer = prepare_prefill<SHAPE, true>() && prepare_prefill<SHAPE, false>() ? 1 : -1;
    cudaGetLastError();  // what is missing here must not be blamed on the next launch
    answers[device].store(answer, std::memory_order_relaxed);
  }
  return answer > 0;
}

template <class SHAPE>
cudaError_t launch_prefill(
    const DecodeProblem& problem, const PrefillGrid& grid, const PrefillMaps& maps, int ctas,
    cudaStream_t stream) {
  // With a scale of at most 1 what is finite stays finite; with a tiny one an overflowed product
  // could become an ordinary score.
  const bool is_plain = problem.softcap == 0.0f && problem.slopes.data == nullptr &&
                        problem.softmax_scale <= 1.0f && problem.softmax_scale >= 0x1p-24f;
  const auto kernel = is_plain ? prefill_attention<SHAPE, true> : prefill_attention<SHAPE, false>;
  return launch_dependent(
      kernel, dim3(static_cast<unsigned>(ctas)), SHAPE::kThreads, SHAPE::kSharedBytes, true, stream, problem,
      grid, maps);
}

template <class SHAPE>
inline constexpr PrefillVariant kPrefillVariant{
    SHAPE::kRows, SHAPE::kKeys, SHAPE::kDim, &prefill_is_there<SHAPE>, &launch_prefill<SHAPE>};

template <class MATH>
const PrefillVariant& prefill_variant_of(int dim) {
  if (dim <= 64) return kPrefillVariant<PrefillShape<MATH, 64, 128, 3, 5, 5>>;
  if (dim <= 128) return kPrefillVariant<PrefillShape<MATH, 128, 128, 2, 3, 3>>;
  return kPrefillVariant<PrefillShape<MATH, 256, 64, 2, 2, 3>>;
}

}  // namespace torch_pagedkv
