// Decode attention for pools of float8_e4m3fn.

#include "decode_variant.cuh"

namespace torch_pagedkv {

const DecodeVariant& decode_variant_e4m3(int dim, ItemRows rows) {
  return decode_variant_of<E4M3Pool>(dim, rows);
}

}  // namespace torch_pagedkv
