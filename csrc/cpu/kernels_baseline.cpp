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

#include "cpu/simd/arithmetic.h"

#include "cpu/simd/conversion.h"

#include "cpu/simd/elements.h"

#include "cpu/simd/tile_rows.h"

#include "cpu/simd/row_block.h"

#include "cpu/simd/few_rows.h"

#include "cpu/simd/many_rows.h"

#include "cpu/simd/table.h"

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    "baseline", load_run, store_run, quantise_run, stream_run, finish_streams, attend};

}  // namespace baseline
}  // namespace torch_pagedkv
