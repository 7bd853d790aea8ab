"""gather_kv in Triton: one program reads a few positions of one sequence."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import FORMATS, as_bytes, fp8_to_float
from torch_pagedkv.triton_kernels.grid_sizes import cdiv, next_power_of_2
from torch_pagedkv.triton_kernels.strides import per_head_stride, pool_strides

# Elements that a program moves at once, and positions that it reads one after the other.
_TILE = 4096
_POSITIONS = 4


@triton.jit
def _gather_row(
    gathered, cache, scale, scale_stride, strides, row, block, offset, visible,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = gathered.dtype.element_ty
    gathered += row * (NUM_HEADS * HEAD_DIM)
    cache += block * strides.block + offset.to(tl.int64) * strides.token
    for start in tl.static_range(0, NUM_HEADS * HEAD_DIM, TILE):
        element = start + tl.arange(0, TILE)
        in_row = element < NUM_HEADS * HEAD_DIM
        head = element // HEAD_DIM
        dim = element % HEAD_DIM
        place = head.to(tl.int64) * strides.head + dim
        stored = tl.load(cache + place, mask=in_row & visible, other=0)
        if FORMAT is not None:
            value = fp8_to_float(stored, FORMAT, tl.float32)
            if scale is not None:
                value *= tl.load(scale + head * scale_stride, mask=in_row, other=1.0)
                # A row past the end is 0 whatever the scale, an infinite one too.
                value = tl.where(visible, value, 0.0)
            gathered_value = value.to(dtype)
        else:
            gathered_value = stored.to(dtype)
        tl.store(gathered + element, gathered_value, mask=in_row)


@triton.jit(
    do_not_specialize=["table_stride", "max_positions", "num_blocks", "block_size"],
    do_not_specialize_on_alignment=["block_table", "seqused_k", "k_scale", "v_scale"],
)
def _gather_kv_kernel(
    keys, values, key_cache, value_cache, block_table, seqused_k, k_scale, v_scale,
    key_strides, value_strides, length_stride, k_scale_stride, v_scale_stride,
    table_stride, max_positions, num_blocks, block_size,
    NUM_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    FORMAT: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    programs_per_sequence = tl.cdiv(max_positions, POSITIONS)
    sequence = (tl.program_id(0) // programs_per_sequence).to(tl.int64)
    first = (tl.program_id(0) % programs_per_sequence) * POSITIONS
    length = tl.load(seqused_k + sequence * length_stride)
    for position in range(first, tl.minimum(first + POSITIONS, max_positions)):
        visible = position < length
        entry = block_table + sequence * table_stride + position // block_size
        block = tl.load(entry, mask=visible, other=-1).to(tl.int64)
        visible = (block >= 0) & (block < num_blocks)
        block = tl.where(visible, block, 0)
        offset = position % block_size
        row = sequence * max_positions + position
        if tl.program_id(1) == 0:
            _gather_row(
                keys, key_cache, k_scale, k_scale_stride, key_strides,
                row, block, offset, visible, NUM_HEADS, KEY_DIM, FORMAT, KEY_TILE,
            )  # fmt: skip
        else:
            _gather_row(
                values, value_cache, v_scale, v_scale_stride, value_strides,
                row, block, offset, visible, NUM_HEADS, VALUE_DIM, FORMAT, VALUE_TILE,
            )  # fmt: skip


def launch(keys, values, key_cache, value_cache, block_table, seqused_k, k_scale, v_scale) -> None:
    num_sequences, max_positions, num_heads, key_dim = keys.shape
    num_blocks, block_size = key_cache.shape[:2]
    value_dim = values.shape[3]
    if num_sequences * max_positions == 0:
        return
    if max_positions >= 2**31:
        raise NotImplementedError(
            "gather_kv: block_table must reach less than 2**31 positions on CUDA, "
            f"got max_blocks * block_size = {max_positions}"
        )
    dequantises = keys.dtype != key_cache.dtype and key_cache.dtype in FORMATS
    with device_of(keys):
        _gather_kv_kernel[(num_sequences * cdiv(max_positions, _POSITIONS), 2)](
            as_bytes(keys), as_bytes(values), as_bytes(key_cache), as_bytes(value_cache),
            block_table, seqused_k, k_scale, v_scale,
            pool_strides(key_cache), pool_strides(value_cache), seqused_k.stride(0),
            per_head_stride(k_scale), per_head_stride(v_scale),
            block_table.stride(0), max_positions, num_blocks, block_size,
            num_heads, key_dim, min(_TILE, next_power_of_2(num_heads * key_dim)),
            value_dim, min(_TILE, next_power_of_2(num_heads * value_dim)),
            FORMATS[key_cache.dtype] if dequantises else None, _POSITIONS,
        )  # fmt: skip
