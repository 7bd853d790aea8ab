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

// Four adjacent elements as float32, but for a NaN's sign, and their signs in a word of bytes.
struct FourElements {
  float values[4];
  uint32_t signs;

  __device__ FourElements(const float* elements) {
    uint32_t bits[4];
    memcpy(bits, elements, sizeof bits);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = elements[i];
    signs = signs_of(__byte_perm(bits[0], bits[1], 0x7632), __byte_perm(bits[2], bits[3], 0x7632));
  }
  __device__ FourElements(const __half* elements) {
    uint32_t pairs[2];
    memcpy(pairs, elements, sizeof pairs);
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = __half2float(elements[i]);
    signs = signs_of(pairs[0], pairs[1]);
  }
  __device__ FourElements(const __nv_bfloat16* elements) {
    uint32_t pairs[2];
    memcpy(pairs, elements, sizeof pairs);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xFFFF0000);
    }
    signs = signs_of(pairs[0], pairs[1]);
  }

 private:
  // Of four numbers of 16 bits in two words.
  static __device__ uint32_t signs_of(uint32_t first, uint32_t second) {
    return __byte_perm(first, second, 0x7531) & 0x80808080;
  }
};

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
    uint32_t words[(N + 3) / 4];
    if (N == 1 || divisor.kind == Divisor::kAny) {
      convert(elements, words);
    } else if (divisor.kind == Divisor::kOne) {
      convert_fours<false>(elements, words);
    } else {
      convert_fours<true>(elements, words);
    }
    PackOf<N> stored;
    memcpy(&stored, words, sizeof stored);
    *reinterpret_cast<PackOf<N>*>(target) = stored;
  }

 private:
  __device__ void convert(const Source (&elements)[N], uint32_t (&words)[(N + 3) / 4]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const uint32_t byte = float_to_fp8<Format>(element_to_float(elements[i]), divisor.value);
      words[i / 4] = i % 4 == 0 ? byte : words[i / 4] | byte << (8 * (i % 4));
    }
  }

  template <bool IS_DIVIDED>
  __device__ void convert_fours(const Source (&elements)[N], uint32_t (&words)[(N + 3) / 4]) const {
#pragma unroll
    for (int word = 0; word < N / 4; ++word) {
      FourElements four(elements + 4 * word);
      words[word] = four_to_fp8<Format, IS_DIVIDED>(four.values, four.signs, divisor);
    }
  }
};

}  // namespace torch_pagedkv
