// Hopper's warpgroup products (wgmma): 64 rows of four warps times columns that lie in shared memory.
//
// Shared matrices lie in panels of 64 elements: rows of 128 bytes, 16-byte pieces exchanged within 8
// rows as the copy engine does it (128-byte swizzle). A panel starts at a multiple of 1024 bytes.
// The accumulator of a lane: elements 4i and 4i + 1 of row g, columns 8i + 2t and 8i + 2t + 1, then the
// same of row g + 8, where g is the lane's number of four lanes and t its number in them.

#pragma once

#include "decode_tile.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TORCH_PAGEDKV_HOPPER 1
#endif

namespace torch_pagedkv {

inline constexpr int kPanelRowBytes = 128;
inline constexpr int kPanelElements = 64;
inline constexpr int kPieceBytes = 8 * kPanelRowBytes;  // 8 rows of a panel

// What tells the matrix unit where a matrix lies: the distances between groups of 8 rows, and between
// panels, where those lie along the columns of the product (values).
__device__ inline uint64_t describe_matrix(
    uint32_t address, uint32_t group_stride, uint32_t panel_stride) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return kSwizzle128 | static_cast<uint64_t>(group_stride >> 4) << 32 |
         static_cast<uint64_t>(panel_stride >> 4) << 16 | (address & 0x3FFFF) >> 4;
}

// The same matrix `bytes` farther on in memory.
__device__ inline uint64_t farther(uint64_t matrix, int bytes) { return matrix + (bytes >> 4); }

// Registers were written that products read.
__device__ inline void begin_products() {
#if defined(TORCH_PAGEDKV_HOPPER)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ inline void commit_products() {
#if defined(TORCH_PAGEDKV_HOPPER)
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int PENDING>
__device__ inline void wait_products() {
#if defined(TORCH_PAGEDKV_HOPPER)
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
#endif
}

// Keeps the compiler from moving uses of registers across a product's start or wait.
template <int COUNT>
__device__ inline void pin(float (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int COUNT>
__device__ inline void pin(uint32_t (&registers)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

// Products of one step of 16 elements of the sum, started and not waited for.
template <class MATH, int COLUMNS>
struct WarpgroupProduct;

#define TORCH_PAGEDKV_EIGHT(d, i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TORCH_PAGEDKV_32(d, i) \
  TORCH_PAGEDKV_EIGHT(d, i), TORCH_PAGEDKV_EIGHT(d, i + 8), TORCH_PAGEDKV_EIGHT(d, i + 16), \
      TORCH_PAGEDKV_EIGHT(d, i + 24)
#define TORCH_PAGEDKV_64(d, i) TORCH_PAGEDKV_32(d, i), TORCH_PAGEDKV_32(d, i + 32)
#define TORCH_PAGEDKV_128(d, i) TORCH_PAGEDKV_64(d, i), TORCH_PAGEDKV_64(d, i + 64)
#define TORCH_PAGEDKV_PLACES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15" \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define TORCH_PAGEDKV_PLACES_64 \
  TORCH_PAGEDKV_PLACES_32 \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define TORCH_PAGEDKV_PLACES_128 \
  TORCH_PAGEDKV_PLACES_64 \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95" \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// of_shared: both matrices in shared memory, with the sum's elements adjacent in both.
// of_registers: the left matrix in registers; the right one has columns adjacent in memory.
#define TORCH_PAGEDKV_PRODUCT(MATH, TYPE, COLUMNS, PLACES, OPERANDS, P0, P1, P2, P3, P4, P5)           \
  template <>                                                                                         \
  struct WarpgroupProduct<MATH, COLUMNS> {                                                            \
    __device__ static void of_shared(                                                                 \
        float (&d)[COLUMNS / 2], uint64_t left, uint64_t right, bool adds) {                          \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" P2 ", 0;\n"                             \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PLACES  \
                   "}, %" P0 ", %" P1 ", adds, 1, 1, 0, 0;\n}"                                        \
                   : OPERANDS(d, 0)                                                                   \
                   : "l"(left), "l"(right), "r"(static_cast<int>(adds)));                             \
    }                                                                                                 \
    __device__ static void of_registers(                                                              \
        float (&d)[COLUMNS / 2], const uint32_t* left, uint64_t right) {                              \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, %" P5 ", 0;\n"                             \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." TYPE "." TYPE " {" PLACES  \
                   "}, {%" P0 ", %" P1 ", %" P2 ", %" P3 "}, %" P4 ", adds, 1, 1, 1;\n}"              \
                   : OPERANDS(d, 0)                                                                   \
                   : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(right), "r"(1));     \
    }                                                                                                 \
  }
#define TORCH_PAGEDKV_PRODUCTS(MATH, TYPE)                                                             \
  TORCH_PAGEDKV_PRODUCT(MATH, TYPE, 64, TORCH_PAGEDKV_PLACES_32, TORCH_PAGEDKV_32, "32", "33", "34",  \
                        "35", "36", "37");                                                            \
  TORCH_PAGEDKV_PRODUCT(MATH, TYPE, 128, TORCH_PAGEDKV_PLACES_64, TORCH_PAGEDKV_64, "64", "65", "66", \
                        "67", "68", "69");                                                            \
  TORCH_PAGEDKV_PRODUCT(MATH, TYPE, 256, TORCH_PAGEDKV_PLACES_128, TORCH_PAGEDKV_128, "128", "129",   \
                        "130", "131", "132", "133")

TORCH_PAGEDKV_PRODUCTS(BFloat16Math, "bf16");
TORCH_PAGEDKV_PRODUCTS(HalfMath, "f16");

#undef TORCH_PAGEDKV_PRODUCTS
#undef TORCH_PAGEDKV_PRODUCT
#undef TORCH_PAGEDKV_PLACES_128
#undef TORCH_PAGEDKV_PLACES_64
#undef TORCH_PAGEDKV_PLACES_32
#undef TORCH_PAGEDKV_128
#undef TORCH_PAGEDKV_64
#undef TORCH_PAGEDKV_32
#undef TORCH_PAGEDKV_EIGHT

}  // namespace torch_pagedkv

