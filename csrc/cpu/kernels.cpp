// The choice of an instruction set.

#include "kernels.h"

#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace torch_pagedkv {

namespace baseline { extern const Kernels kKernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
namespace avx512_vbmi { extern const Kernels kKernels; }
namespace avx512_bf16 { extern const Kernels kKernels; }
#endif

namespace {

constexpr const char* kVariable = "TORCH_PAGEDKV_CPU_CAPABILITY";

struct Choice {
  const Kernels* kernels;
  bool is_supported, is_fast;
};

// The last one that is supported and fast is taken.
struct Choices {
  Choice list[5];
  int count = 0;

  Choices() {
    add(baseline::kKernels, true);
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                            __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    add(avx2::kKernels, has_avx2);
    add(avx512::kKernels, has_avx512);
    const bool has_vbmi = has_avx512 && __builtin_cpu_supports("avx512vbmi");
    add(avx512_vbmi::kKernels, has_vbmi);
    // Intel's cores start a dot product of bfloat16 pairs every second cycle, but two multiply-adds of
    // float32 every cycle: twice as many products. AMD's Zen 4 starts one of either.
    add(avx512_bf16::kKernels,
        has_vbmi && __builtin_cpu_supports("avx512bf16"),
        !__builtin_cpu_is("intel"));
#endif
  }

  void add(const Kernels& kernels, bool is_supported, bool is_fast = true) {
    list[count++] = {&kernels, is_supported, is_fast};
  }
};

const Kernels& choose() {
  const Choices choices;
  const char* const named = std::getenv(kVariable);
  std::string supported;
  const Kernels* best = nullptr;
  for (int i = 0; i < choices.count; ++i) {
    const Choice& choice = choices.list[i];
    if (!choice.is_supported) continue;
    const std::string name = choice.kernels->name;
    if (named != nullptr && named == name) return *choice.kernels;
    supported += (supported.empty() ? "" : ", ") + name;
    if (choice.is_fast) best = choice.kernels;
  }
  if (named == nullptr || *named == '\0') return *best;
  throw std::invalid_argument(
      std::string(kVariable) + " must name kernels that this machine can run (" + supported +
      "), got " + named);
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

namespace {

std::string cpu_capability() { return kernels().name; }

}  // namespace
}  // namespace torch_pagedkv

STABLE_TORCH_LIBRARY_FRAGMENT(torch_pagedkv_native, library) {
  library.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(torch_pagedkv_native, CompositeExplicitAutograd, library) {
  library.impl("cpu_capability", TORCH_BOX(&torch_pagedkv::cpu_capability));
}
