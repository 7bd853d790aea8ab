// Prefill attention for queries and pools of bfloat16.

#include "prefill_variant.cuh"

namespace torch_pagedkv {

const PrefillVariant& prefill_variant_bfloat16(int dim) { return prefill_variant_of<BFloat16Math>(dim); }

}  // namespace torch_pagedkv
