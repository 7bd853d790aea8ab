// The pieces that decode attention is made of: copies into shared memory, fragments of the matrix
// units (m16n8k16), and how rows of each pool become them.
//
// Products sum over the head's elements, so their order is free: fp8 keys are taken four bytes a lane,
// and the query lies permuted to match. fp8 values are transposed in pairs of bytes, so the lanes of
// two output tiles hold even and odd columns.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace torch_pagedkv {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes, or writes 16 zeros and reads nothing.
__device__ inline void copy_async(uint32_t target, const void* source, bool reads) {
  const int bytes = reads ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(target), "l"(source), "r"(bytes) : "memory");
}

__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

// Where a byte of a row lies: 16-byte pieces of one column fall into different banks in any 8 rows.
template <int ROW_BYTES>
__host__ __device__ inline uint32_t swizzled(int row, int byte) {
  constexpr int kShift = ROW_BYTES <= 128 ? 7 : ROW_BYTES == 256 ? 8 : 9;
  static_assert(ROW_BYTES == 64 || ROW_BYTES == 128 || ROW_BYTES == 256 || ROW_BYTES == 512);
  const uint32_t address = row * ROW_BYTES + byte;
  return address ^ (((address >> kShift) & 7) << 4);
}

__device__ inline void load_matrices(uint32_t (&tile)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(address) : "memory");
}

__device__ inline void load_transposed(uint32_t (&tile)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(tile[0]), "=r"(tile[1]), "=r"(tile[2]), "=r"(tile[3])
               : "r"(address) : "memory");
}

// What the matrix units multiply: pairs of 16-bit floats.
struct BFloat16Math {
  static constexpr uint32_t kExponent = 0x7F807F80;

  __device__ static uint32_t pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static void multiply(
      float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

struct HalfMath {
  static constexpr uint32_t kExponent = 0x7C007C00;

  __device__ static uint32_t pair(float low, float high) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static float to_float(uint32_t bits) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
  __device__ static void multiply(
      float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// fp8 bytes as pairs of float16, which holds every value of both formats, NaN included.
struct E4M3Bytes {
  __device__ static uint32_t decode(uint32_t two_bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(two_bytes)));
    return pair;
#else
    // The exponent's field moves to the lower end of the wider one; the bias then differs by 8.
    const uint32_t high = __byte_perm(two_bytes, 0, 0x1404);
    const uint32_t moved = (high & 0x80008000) | ((high & 0x7F007F00) >> 1);
    const __half2 pair = __hmul2(*reinterpret_cast<const __half2*>(&moved), __float2half2_rn(256.0f));
    uint32_t bits = *reinterpret_cast<const uint32_t*>(&pair);
    if ((high & 0x00007F00) == 0x00007F00) bits |= 0x00007E00;
    if ((high & 0x7F000000) == 0x7F000000) bits |= 0x7E000000;
    return bits;
#endif
  }
  // Bytes 0 and 1, and 2 and 3: neighbours of a row.
  __device__ static void rows(uint32_t bytes, uint32_t& first, uint32_t& second) {
    first = decode(bytes);
    second = decode(bytes >> 16);
  }
  // Bytes 0 and 2, and 1 and 3: even and odd columns of two rows.
  __device__ static void columns(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    const uint32_t sorted = __byte_perm(bytes, 0, 0x3120);
    even = decode(sorted);
    odd = decode(sorted >> 16);
  }
};

struct E5M2Bytes {
  // The upper byte of a float16.
  __device__ static uint32_t decode(uint32_t two_bytes) {
    return __byte_perm(two_bytes, 0, 0x1404);
  }
  __device__ static void rows(uint32_t bytes, uint32_t& first, uint32_t& second) {
    first = __byte_perm(bytes, 0, 0x1404);
    second = __byte_perm(bytes, 0, 0x3424);
  }
  __device__ static void columns(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    even = __byte_perm(bytes, 0, 0x2404);
    odd = __byte_perm(bytes, 0, 0x3414);
  }
};

// A pool of 16-bit floats, multiplied as they are.
template <class MATH>
struct FloatPool {
  using Math = MATH;
  static constexpr bool kIsFp8 = false;
  static constexpr int kElementBytes = 2;

  // Four matrices [8 keys, 8 elements] are b0 and b1 of two tiles of keys, for one step of the sum.
  template <int STEPS>
  __device__ static void multiply_keys(
      float (&first)[4], float (&second)[4], const uint32_t (&query)[STEPS][4],
      const uint32_t (&keys)[4]) {
    static_assert(STEPS == 1);
    Math::multiply(first, query[0], keys[0], keys[1]);
    Math::multiply(second, query[0], keys[2], keys[3]);
  }
  static constexpr int kStepsOfLoad = 1;   // of 16 elements of a key, for one load of keys
  static constexpr int kTilesOfLoad = 2;   // of 8 columns of values, for one load of values

  // Four matrices [8 keys, 8 columns], transposed: b0 and b1 of two tiles of columns.
  __device__ static void value_tiles(
      const uint32_t (&values)[4], uint32_t (&low)[2], uint32_t (&high)[2]) {
    low[0] = values[0], high[0] = values[1];
    low[1] = values[2], high[1] = values[3];
  }
  // The column of element e of a lane in tile `tile`, the lane being number t of its four.
  __host__ __device__ static int column(int tile, int t, int e) { return tile * 8 + 2 * t + e; }
  // Where an element of the query lies within its 16.
  __host__ __device__ static int query_place(int element) { return element; }
  __device__ static float element(const char* row, int index) {
    return Math::to_float(reinterpret_cast<const uint16_t*>(row)[index]);
  }
};

template <class BYTES>
struct Fp8Pool {
  using Math = HalfMath;
  static constexpr bool kIsFp8 = true;
  static constexpr int kElementBytes = 1;
  static constexpr int kStepsOfLoad = 2;
  static constexpr int kTilesOfLoad = 4;

  template <int STEPS>
  __device__ static void multiply_keys(
      float (&first)[4], float (&second)[4], const uint32_t (&query)[STEPS][4],
      const uint32_t (&keys)[4]) {
    static_assert(STEPS == 2);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      uint32_t b0, b1;
      BYTES::rows(keys[step], b0, b1);
      Math::multiply(first, query[step], b0, b1);
      BYTES::rows(keys[2 + step], b0, b1);
      Math::multiply(second, query[step], b0, b1);
    }
  }
  __device__ static void value_tiles(
      const uint32_t (&values)[4], uint32_t (&low)[4], uint32_t (&high)[4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      BYTES::columns(values[2 * half], low[2 * half], low[2 * half + 1]);
      BYTES::columns(values[2 * half + 1], high[2 * half], high[2 * half + 1]);
    }
  }
  __host__ __device__ static int column(int tile, int t, int e) {
    return tile / 2 * 16 + 4 * t + 2 * e + tile % 2;
  }
  // A lane's elements 4t and 4t + 1 are the first pair of a product, 4t + 2 and 4t + 3 the second.
  __host__ __device__ static int query_place(int element) {
    return element / 4 * 2 + element % 2 + (element % 4) / 2 * 8;
  }
  __device__ static float element(const char* row, int index) {
    return Math::to_float(BYTES::decode(static_cast<uint8_t>(row[index])));
  }
};

using BFloat16Pool = FloatPool<BFloat16Math>;
using HalfPool = FloatPool<HalfMath>;
using E4M3Pool = Fp8Pool<E4M3Bytes>;
using E5M2Pool = Fp8Pool<E5M2Bytes>;

// How a CTA is cut. A warp takes KEYS positions at a time, and loads them itself: warps meet only at
// the end of a segment.
template <class POOL, int DIM, int KEYS, int STAGES, int CTAS>
struct DecodeTile {
  using Pool = POOL;
  static constexpr int kDim = DIM;
  static constexpr int kKeys = KEYS;      // of a warp
  static constexpr int kTile = 4 * KEYS;  // of the CTA
  static constexpr int kStages = STAGES;
  static constexpr int kCtas = CTAS;      // of a multiprocessor
  static constexpr int kRowBytes = DIM * POOL::kElementBytes;
  static constexpr int kStageBytes = 2 * KEYS * kRowBytes;  // keys, then values
  static constexpr int kWarpBytes = STAGES * kStageBytes;
  static constexpr int kQueryBytes = 16 * DIM * 2;
  static constexpr int kSharedBytes = kQueryBytes + 4 * kWarpBytes;
  // Rows of a warp's result lie so far apart, in floats, in the memory of its stages.
  static constexpr int kResultStride = DIM + 8;
  static_assert(16 * kResultStride * 4 <= kWarpBytes);
  static_assert(KEYS == 16 || KEYS == 32);
};

}  // namespace torch_pagedkv
