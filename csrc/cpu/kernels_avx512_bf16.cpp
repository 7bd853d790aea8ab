// The kernels for AVX-512 F, BW, VL and DQ with BF16 and VBMI.
//
// The instruction set is switched on behind every header that others include too: an inline function
// of theirs that was compiled with it could replace the one that a lesser machine calls.

#if defined(__x86_64__)

#include <immintrin.h>

#include "cpu/kernel_headers.h"

// Undefined vectors in the compiler's own intrinsics.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vbmi")

#define TORCH_PAGEDKV_AVX512_VBMI
#define TORCH_PAGEDKV_AVX512_BF16

namespace torch_pagedkv {
namespace avx512_bf16 {
namespace {

#include "cpu/simd/avx512.h"

#include "cpu/simd/bodies.h"

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    "avx512_bf16", load_run, store_run, quantise_run, stream_run, finish_streams, attend};

}  // namespace avx512_bf16
}  // namespace torch_pagedkv

#pragma GCC pop_options

#endif
