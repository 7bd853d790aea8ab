// Packs: so many adjacent elements of a row as one thread moves at once, and where they lie.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "fp8_encode.cuh"

namespace torch_pagedkv {

inline int64_t address_of(const void* data) { return reinterpret_cast<intptr_t>(data); }

inline bool is_multiple(int64_t size, std::initializer_list<int64_t> numbers) {
  for (const int64_t number : numbers) {
    if (number % size != 0) return false;
  }
  return true;
}

struct alignas(16) TwoPacks {
  uint4 first, second;
};

template <int BYTES>
using PackOf = std::conditional_t<
    BYTES == 32, TwoPacks,
    std::conditional_t<
        BYTES == 16, uint4,
        std::conditional_t<
            BYTES == 8, uint2,
            std::conditional_t<
                BYTES == 4, uint32_t,
                std::conditional_t<BYTES == 2, uint16_t, uint8_t>>>>>;

// Reads what this launch reads once and does not write.
template <int BYTES>
__device__ inline PackOf<BYTES> load_once(const char* address) {
  PackOf<BYTES> pack;
  if constexpr (BYTES == 32) {
    pack = {load_once<16>(address), load_once<16>(address + 16)};
  } else if constexpr (BYTES == 16) {
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
        : "l"(address));
  } else {
    pack = __ldg(reinterpret_cast<const PackOf<BYTES>*>(address));
  }
  return pack;
}

// Bits as they are.
template <int BYTES>
struct CopyPack {
  static constexpr int kSourceBytes = BYTES, kTargetBytes = BYTES;
  static constexpr bool kScales = false;
  using Pack = PackOf<BYTES>;

  __device__ explicit CopyPack(float) {}
  __device__ static Pack load(const char* source) { return load_once<BYTES>(source); }
  __device__ void store(char* target, const Pack& pack) const {
    *reinterpret_cast<Pack*>(target) = pack;
  }
};

__device__ inline float element_to_float(float element) { return element; }
// The instruction forgets a NaN's sign.
__device__ inline float element_to_float(__half element) {
  const uint32_t sign = static_cast<uint32_t>(__half_as_ushort(element)) << 16;
  return __uint_as_float((__float_as_uint(__half2float(element)) & 0x7FFFFFFF) | (sign & 0x80000000));
}
__device__ inline float element_to_float(__nv_bfloat16 element) {
  return __uint_as_float(static_cast<uint32_t>(__bfloat16_as_ushort(element)) << 16);
}

// N elements divided by a scale and rounded to fp8.
template <class Source, class Format, int N>
struct QuantisePack {
  static constexpr int kSourceBytes = N * sizeof(Source), kTargetBytes = N;
  static constexpr bool kScales = true;
  using Pack = PackOf<kSourceBytes>;

  Divisor divisor;

  __device__ explicit QuantisePack(float scale) : divisor(scale) {}
  __device__ static Pack load(const char* source) { return load_once<kSourceBytes>(source); }
  __device__ void store(char* target, const Pack& pack) const {
    Source elements[N];
    memcpy(elements, &pack, sizeof elements);
    float values[N];
#pragma unroll
    for (int i = 0; i < N; ++i) values[i] = element_to_float(elements[i]);
    uint32_t words[(N + 3) / 4];
    values_to_fp8<Format>(values, divisor, words);
    PackOf<N> stored;
    memcpy(&stored, words, sizeof stored);
    *reinterpret_cast<PackOf<N>*>(target) = stored;
  }
};

}  // namespace torch_pagedkv
