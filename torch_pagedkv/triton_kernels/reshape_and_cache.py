"""reshape_and_cache in Triton: one program stores one token's keys or values."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import FORMATS, as_bytes, float32_to_fp8, sign_bit
from torch_pagedkv.triton_kernels.launches import Launch, remembered
from torch_pagedkv.triton_kernels.row_tiles import row_tile, warps_for
from torch_pagedkv.triton_kernels.strides import per_head_stride, pool_strides, row_strides

# Later slots that a program looks at at once.
_SCAN = 256
# Up to so many tokens a program looks through the later slots for its own, so that of two tokens
# with one slot one is stored whole. The search is quadratic; above, rows of both may mix.
_LONGEST_SCAN = 1024


@triton.jit
def _store_row(
    source, cache, scale, scale_stride, source_strides, pool_strides,
    token, slot, block_size, stored,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # A row is one line of NUM_HEADS * HEAD_DIM elements whose heads may lie apart on either side.
    # Dividing a running index wastes no lanes on head sizes that are no power of two, and keeps
    # 16-byte accesses wherever strides and sizes allow them.
    source += token.to(tl.int64) * source_strides.token
    cache += (slot // block_size) * pool_strides.block + (slot % block_size) * pool_strides.token
    for start in tl.static_range(0, NUM_HEADS * HEAD_DIM, TILE):
        element = start + tl.arange(0, TILE)
        mask = (element < NUM_HEADS * HEAD_DIM) & stored
        head, dim = tl.zeros_like(element), element
        if NUM_HEADS > 1:  # of a single run this would hide that it is one, and load 72 elements singly
            head, dim = element // HEAD_DIM, element % HEAD_DIM
        x = tl.load(source + head.to(tl.int64) * source_strides.head + dim, mask=mask)
        if FORMAT is not None:
            quotient = x.to(tl.float32)
            if scale is not None:
                divisor = tl.load(scale + head * scale_stride, mask=mask, other=1.0)
                quotient = tl.div_rn(quotient, divisor)
            x = float32_to_fp8(quotient, sign_bit(x), FORMAT)
        tl.store(cache + head.to(tl.int64) * pool_strides.head + dim, x, mask=mask)


@triton.jit(
    do_not_specialize=["num_slots", "block_size", "scan_end"],
    do_not_specialize_on_alignment=["slot_mapping", "k_scale", "v_scale"],
)
def _reshape_and_cache_kernel(
    key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
    key_strides, value_strides, key_pool_strides, value_pool_strides,
    slot_stride, k_scale_stride, v_scale_stride, num_slots, block_size, scan_end,
    KEY_HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_TILE: tl.constexpr,
    VALUE_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    FORMAT: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    slot = tl.load(slot_mapping + token.to(tl.int64) * slot_stride).to(tl.int64)
    repeated = tl.zeros([SCAN], tl.int32)
    for start in range(token + 1, scan_end, SCAN):
        later = start + tl.arange(0, SCAN)
        slots = tl.load(slot_mapping + later * slot_stride, mask=later < scan_end, other=-1)
        repeated |= (slots.to(tl.int64) == slot).to(tl.int32)
    stored = (slot >= 0) & (slot < num_slots) & (tl.max(repeated, 0) == 0)
    # A skipped token's addresses are formed and never used; slot 0 keeps them inside.
    slot = tl.where(stored, slot, 0)
    if tl.program_id(1) == 0:
        _store_row(
            key, key_cache, k_scale, k_scale_stride, key_strides, key_pool_strides,
            token, slot, block_size, stored, KEY_HEADS, KEY_DIM, FORMAT, KEY_TILE,
        )  # fmt: skip
    else:
        _store_row(
            value, value_cache, v_scale, v_scale_stride, value_strides, value_pool_strides,
            token, slot, block_size, stored, VALUE_HEADS, VALUE_DIM, FORMAT, VALUE_TILE,
        )  # fmt: skip


def _plan(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale) -> Launch | None:
    num_tokens = slot_mapping.shape[0]
    num_blocks, block_size = key_cache.shape[:2]
    if num_tokens == 0 or num_blocks == 0:
        return None
    k_scale_stride, v_scale_stride = per_head_stride(k_scale), per_head_stride(v_scale)
    key_tile = row_tile(key, key_cache, k_scale_stride)
    value_tile = row_tile(value, value_cache, v_scale_stride)
    widest_bytes = max(key_tile.elements, value_tile.elements) * key.element_size()
    quantises = key.dtype != key_cache.dtype
    return Launch(
        _reshape_and_cache_kernel, (num_tokens, 2, 1),
        row_strides(key), row_strides(value), pool_strides(key_cache), pool_strides(value_cache),
        slot_mapping.stride(0), k_scale_stride, v_scale_stride,
        num_blocks * block_size, block_size, num_tokens if num_tokens <= _LONGEST_SCAN else 0,
        *key_tile, *value_tile, FORMATS[key_cache.dtype] if quantises else None, _SCAN,
        num_warps=warps_for(widest_bytes),
    )  # fmt: skip


_plans = {}


def launch(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, looks=None) -> None:
    tensors = (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    store = remembered(_plans, looks, _plan, *tensors)
    if store is None:
        return
    with device_of(key_cache):
        store(
            as_bytes(key), as_bytes(value), as_bytes(key_cache), as_bytes(value_cache),
            slot_mapping, k_scale, v_scale,
        )  # fmt: skip
