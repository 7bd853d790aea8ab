// Decode attention for pools of float16.

#include "decode_variant.cuh"

namespace torch_pagedkv {

const DecodeVariant& decode_variant_float16(int dim, ItemRows rows) {
  return decode_variant_of<HalfPool>(dim, rows);
}

}  // namespace torch_pagedkv
