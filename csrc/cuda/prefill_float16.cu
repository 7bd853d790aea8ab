// Prefill attention for queries and pools of float16.

#include "prefill_variant.cuh"

namespace torch_pagedkv {

const PrefillVariant& prefill_variant_float16(int dim) { return prefill_variant_of<HalfMath>(dim); }

}  // namespace torch_pagedkv
