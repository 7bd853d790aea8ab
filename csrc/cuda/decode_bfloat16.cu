// Decode attention for pools of bfloat16.

#include "decode_variant.cuh"

namespace torch_pagedkv {

const DecodeVariant& decode_variant_bfloat16(int dim, ItemRows rows) {
  return decode_variant_of<BFloat16Pool>(dim, rows);
}

}  // namespace torch_pagedkv
