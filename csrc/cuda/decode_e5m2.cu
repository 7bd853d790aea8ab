// Decode attention for pools of float8_e5m2.

#include "decode_variant.cuh"

namespace torch_pagedkv {

const DecodeVariant& decode_variant_e5m2(int dim, ItemRows rows) {
  return decode_variant_of<E5M2Pool>(dim, rows);
}

}  // namespace torch_pagedkv
