// The kernels for AVX2, FMA and F16C.
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
#pragma GCC target("avx2,fma,f16c")

namespace torch_pagedkv {
namespace avx2 {
namespace {

#include "cpu/simd/avx2.h"

#include "cpu/simd/bodies.h"

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    "avx2", load_run, store_run, quantise_run, stream_run, finish_streams, attend};

}  // namespace avx2
}  // namespace torch_pagedkv

#pragma GCC pop_options

#endif
