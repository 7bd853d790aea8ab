// The kernels for what every machine of the architecture runs.

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "cpu/kernel_headers.h"

namespace torch_pagedkv {
namespace baseline {
namespace {

#include "cpu/simd/portable.h"

#include "cpu/simd/bodies.h"

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    "baseline", load_run, store_run, quantise_run, stream_run, finish_streams, attend};

}  // namespace baseline
}  // namespace torch_pagedkv
