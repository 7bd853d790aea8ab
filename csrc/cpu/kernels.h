// The kernels that exist once for each instruction set, and which of them this process uses.
//
// One library holds all of them. The fastest set that the machine has is taken, once; the environment
// variable TORCH_PAGEDKV_CPU_CAPABILITY names another one, as for a test of it: baseline, avx2,
// avx512, avx512_vbmi or avx512_bf16.

#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace torch_pagedkv {

using torch::headeronly::ScalarType;

struct Attention;
struct AttentionItem;

struct Kernels {
  const char* name;
  // Reads elements of any dtype as float32.
  void (*load_as_float)(ScalarType dtype, const char* source, int64_t count, float* target);
  // Writes float32 as elements of any dtype; `scale` divides what goes into an fp8 element and
  // means nothing to the other dtypes.
  void (*store_from_float)(
      ScalarType dtype, const float* source, int64_t count, float scale, char* target);
  // Converts elements of another dtype into fp8 elements.
  void (*quantise)(
      ScalarType from, ScalarType to, const char* source, int64_t count, float scale, char* target);
  // Copies bytes that nobody will read soon, and fetches as many at `ahead`; finish_streams follows
  // before another thread may read them.
  void (*stream)(char* target, const char* source, const char* ahead, int64_t bytes);
  void (*finish_streams)();
  // Computes an item, and fetches what the item after it will read first; null: no such item.
  void (*attend)(
      const Attention& attention,
      const AttentionItem& item,
      const AttentionItem* next,
      char* scratch);
};

// Throws std::invalid_argument where the variable names no set or one that the machine lacks.
const Kernels& kernels();

inline void load_as_float(ScalarType dtype, const char* source, int64_t count, float* target) {
  kernels().load_as_float(dtype, source, count, target);
}

inline void store_from_float(
    ScalarType dtype, const float* source, int64_t count, float scale, char* target) {
  kernels().store_from_float(dtype, source, count, scale, target);
}

}  // namespace torch_pagedkv
