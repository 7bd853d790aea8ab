// Decode attention for pools of float16.

#include "decode_variant.cuh"

namespace torch_pagedkv {

const DecodeVariant& decode_variant_float16(int dim) { return decode_variant_of<HalfPool>(dim); }

}  // namespace torch_pagedkv
