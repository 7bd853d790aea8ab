// The pieces that decode attention is made of: copies into shared memory, fragments of the matrix
// units (m16n8k16), and how rows of each pool become them.
//
// Up to 8 query rows are the columns of the right matrix, and keys and values the left ones, 16 keys or 16
// columns of values at a time: a group of 4 or 8 query heads wastes little of that. More rows are the left
// matrix, and keys and values the right ones, 8 at a time: the weights then lie as the next product takes
// them, and four lanes have a row, not eight. Either way an element is the same sum in the same order.
//
// Products sum over the head's elements, so their order is free: fp8 keys are taken four bytes a lane,
// and the query's elements to match. fp8 values are transposed in pairs of bytes, so rows g and g + 8
// of their tiles are even and odd columns.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "decode_problem.h"

namespace torch_pagedkv {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A number that the compiler keeps in a register: it would make an address anew wherever it is needed.
__device__ inline uint32_t kept(uint32_t number) {
  uint32_t result;
  asm volatile("mov.b32 %0, %1;" : "=r"(result) : "r"(number));
  return result;
}

// This lane's number where the compiler does not know it: what follows from it is made where it is needed,
// and takes no register before.
__device__ inline int lane_here() {
  int lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return lane;
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

// The address of what lies so many rows and bytes after another place, whose row and byte have none of
// their bits: each bit moves a place by itself. Of constants it is an exclusive or with one of few numbers,
// and an offset.
template <int ROW_BYTES>
__host__ __device__ inline uint32_t moved(uint32_t address, int rows, int bytes) {
  const uint32_t way = swizzled<ROW_BYTES>(rows, bytes);
  return (address ^ (way & 0x7F)) + (way & ~0x7Fu);
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

// The transpose of an 8 x 8 matrix of 16-bit elements that lies across the warp.
__device__ inline uint32_t transposed(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// What the matrix units multiply: pairs of 16-bit floats.
struct BFloat16Math {
  static constexpr uint32_t kExponent = 0x7F807F80;

  __device__ static uint32_t pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static float to_float(uint32_t bits) { return __uint_as_float(bits << 16); }
  __device__ static uint32_t add_times_zero(uint32_t sums, uint32_t pair) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(pair), "r"(0));
    return sums;
  }
  __device__ static void multiply(
      float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
  __device__ static uint32_t add_times_zero(uint32_t sums, uint32_t pair) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sums) : "r"(pair), "r"(0));
    return sums;
  }
  __device__ static void multiply(
      float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
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
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    // In one piece, so that the upper half needs no shift.
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}" : "=r"(first), "=r"(second) : "r"(bytes));
#else
    first = decode(bytes);
    second = decode(bytes >> 16);
#endif
  }
  // Bytes 0 and 2, and 1 and 3: even and odd columns of two rows.
  __device__ static void columns(uint32_t bytes, uint32_t& even, uint32_t& odd) {
    rows(__byte_perm(bytes, 0, 0x3120), even, odd);
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

// Zeros in place of NaN and infinities in a pair; whether there were any.
template <class MATH>
__device__ inline bool drop_nonfinite(uint32_t& pair) {
  const uint32_t exponents = pair & MATH::kExponent;
  const bool low = (exponents & 0xFFFF) == (MATH::kExponent & 0xFFFF);
  const bool high = exponents >> 16 == MATH::kExponent >> 16;
  pair &= (low ? 0u : 0x0000FFFFu) | (high ? 0u : 0xFFFF0000u);
  return low || high;
}

// A pool of 16-bit floats, multiplied as they are. One load of four matrices holds 16 rows x 16 elements.
template <class MATH>
struct FloatPool {
  using Math = MATH;
  using Bits = uint16_t;  // of an element
  static constexpr bool kIsFp8 = false;
  static constexpr int kElementBytes = 2;
  static constexpr int kTilesOfLoad = 1;  // of 16 elements of keys, or of 16 columns of values

  // The column of values that row g (half 0) or g + 8 (half 1) of tile `tile` is.
  __host__ __device__ static int column(int tile, int g, int half) { return tile * 16 + g + 8 * half; }
  // The first of the two adjacent elements of 16 that lane t of four multiplies first or second.
  __host__ __device__ static int query_element(int t, int half) { return 2 * t + 8 * half; }
  __device__ static float element(const char* row, int index) {
    return Math::to_float(reinterpret_cast<const uint16_t*>(row)[index]);
  }
  __device__ static bool has_nonfinite(uint32_t pair) { return drop_nonfinite<Math>(pair); }
};

// A pool of fp8, converted to float16. One load of four matrices holds 16 rows x 32 elements.
template <class BYTES>
struct Fp8Pool {
  using Math = HalfMath;
  using Bits = uint8_t;
  static constexpr bool kIsFp8 = true;
  static constexpr int kElementBytes = 1;
  static constexpr int kTilesOfLoad = 2;

  __device__ static void key_tiles(const uint32_t (&loaded)[4], uint32_t (&tiles)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      BYTES::rows(loaded[2 * tile], tiles[tile][0], tiles[tile][2]);
      BYTES::rows(loaded[2 * tile + 1], tiles[tile][1], tiles[tile][3]);
    }
  }
  __device__ static void value_tiles(const uint32_t (&loaded)[4], uint32_t (&tiles)[2][4]) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      BYTES::columns(loaded[tile], tiles[tile][0], tiles[tile][1]);
      BYTES::columns(loaded[2 + tile], tiles[tile][2], tiles[tile][3]);
    }
  }
  __host__ __device__ static int column(int tile, int g, int half) { return tile * 16 + 2 * g + half; }
  __host__ __device__ static int query_element(int t, int half) { return 4 * t + 2 * half; }
  __device__ static float element(const char* row, int index) {
    return Math::to_float(BYTES::decode(static_cast<uint8_t>(row[index])));
  }
  __device__ static bool has_nonfinite(uint32_t bytes) {
    uint32_t first, second;
    BYTES::rows(bytes, first, second);
    return drop_nonfinite<Math>(first) | drop_nonfinite<Math>(second);
  }
};

using BFloat16Pool = FloatPool<BFloat16Math>;
using HalfPool = FloatPool<HalfMath>;
using E4M3Pool = Fp8Pool<E4M3Bytes>;
using E5M2Pool = Fp8Pool<E5M2Bytes>;

// How much a warp takes at a time: KEYS positions, with STAGES of them on their way. ROWS changes no bit
// of a row.
template <class POOL, int DIM, int ROWS, int KEYS, int STAGES, int WARPS, int CTAS>
struct DecodeTile {
  using Pool = POOL;
  template <int OTHER>
  using WithRows = DecodeTile<POOL, DIM, OTHER, KEYS, STAGES, WARPS, CTAS>;  // of the same memory
  static constexpr int kDim = DIM;
  static constexpr int kRows = ROWS;         // of queries
  // 8 query rows are the right matrix of a product, 16 the left one.
  static constexpr bool kRowsAreLeft = ROWS == 16;
  static constexpr int kRights = ROWS / 8;  // right matrices of 16 keys, or 16 columns of values, with all rows
  static constexpr int kKeys = KEYS;
  static constexpr int kStages = STAGES;
  static constexpr int kWarps = WARPS;  // of a CTA at most, each with tiles of its own
  static constexpr int kThreads = 32 * WARPS;
  static constexpr int kCtas = CTAS;  // of a multiprocessor
  // Prefill attention may run beside it, on multiprocessors that CTAs leave as a whole. Wider heads need all of
  // them.
  static constexpr bool kLeaves = CTAS == 1 && !POOL::kIsFp8 && DIM == 128;
  static constexpr int kRowBytes = DIM * POOL::kElementBytes;
  static constexpr int kStageBytes = 2 * KEYS * kRowBytes;  // keys, then values
  static constexpr int kWarpBytes = STAGES * kStageBytes;
  static_assert(ROWS == 8 || ROWS == 16);
  static_assert(KEYS == 16 || KEYS == 32);

  // Of a product a lane holds four elements of each right matrix, of two query rows. Which of the two:
  __host__ __device__ static constexpr int row_of_element(int i) { return kRowsAreLeft ? i / 2 : i % 2; }
  // Their numbers, the key of an element, and the column of values.
  __host__ __device__ static int row_of_lane(int lane, int row) {
    return kRowsAreLeft ? lane / 4 + 8 * row : 2 * (lane % 4) + row;
  }
  __host__ __device__ static int key_of_element(int lane, int right, int i) {
    return kRowsAreLeft ? 8 * right + 2 * (lane % 4) + i % 2 : lane / 4 + 8 * (i / 2);
  }
  __host__ __device__ static int column_of_element(int lane, int tile, int right, int i) {
    return kRowsAreLeft ? POOL::column(tile, 2 * (lane % 4) + i % 2, right)
                        : POOL::column(tile, lane / 4, i / 2);
  }
  // Where matrix i of a left one lies in a load of 16-bit elements: right matrices lie side by side.
  __host__ __device__ static constexpr int place_in_load(int i) {
    return kRowsAreLeft ? i / 2 + i % 2 * 2 : i;
  }
  // Lanes with the same rows differ in these bits of their number.
  static constexpr int kFirstOfSameRows = kRowsAreLeft ? 1 : 4;
  static constexpr int kPastSameRows = kRowsAreLeft ? 4 : 32;
  __host__ __device__ static bool is_first_of_same_rows(int lane) {
    return lane % kPastSameRows / kFirstOfSameRows == 0;
  }

  // The results of 8 rows at a time take the memory of the stage that the warp read last.
  static_assert(8 * DIM * 4 <= kStageBytes);
  // Where an element of them lies, in floats: rows that are written at once fall into different banks.
  __host__ __device__ static int result_place(int row, int column) {
    return row * DIM + (column ^ ((row >> 1 & 3) * 8));
  }
};

}  // namespace torch_pagedkv
