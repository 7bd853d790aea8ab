"""copy_blocks in Triton: one program copies one part of one block."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import as_bytes
from torch_pagedkv.triton_kernels.grid_sizes import cdiv

# Elements that a program copies.
_TILE = 4096


class BlockStrides(NamedTuple):
    """Of one block as [outer, inner, line] with contiguous lines, and from block to block."""

    block: int
    outer: int
    inner: int


@triton.jit
def _copy_tile(
    cache, strides, source, destination, tile,
    ELEMENTS: tl.constexpr, INNER: tl.constexpr, LINE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # 64-bit division is slow, and only a block of 2**31 elements needs it.
    if ELEMENTS + TILE >= 2**31:
        tile = tile.to(tl.int64)
    element = tile * TILE + tl.arange(0, TILE)
    line = element // LINE
    outer = (line // INNER).to(tl.int64)
    inner = (line % INNER).to(tl.int64)
    place = outer * strides.outer + inner * strides.inner + element % LINE
    mask = element < ELEMENTS
    copied = tl.load(cache + source * strides.block + place, mask=mask)
    tl.store(cache + destination * strides.block + place, copied, mask=mask)


@triton.jit(
    do_not_specialize=["tiles", "num_blocks"],
    do_not_specialize_on_alignment=["src_blocks", "dst_blocks"],
)
def _copy_blocks_kernel(
    key_cache, value_cache, src_blocks, dst_blocks, key_strides, value_strides,
    src_stride, dst_stride, tiles, num_blocks,
    KEY_ELEMENTS: tl.constexpr, KEY_INNER: tl.constexpr, KEY_LINE: tl.constexpr,
    VALUE_ELEMENTS: tl.constexpr, VALUE_INNER: tl.constexpr, VALUE_LINE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    pair = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    source = tl.load(src_blocks + pair * src_stride).to(tl.int64)
    destination = tl.load(dst_blocks + pair * dst_stride).to(tl.int64)
    if (source < 0) | (source >= num_blocks) | (destination < 0) | (destination >= num_blocks):
        return
    if tl.program_id(1) == 0:
        _copy_tile(
            key_cache, key_strides, source, destination, tile,
            KEY_ELEMENTS, KEY_INNER, KEY_LINE, TILE,
        )  # fmt: skip
    else:
        _copy_tile(
            value_cache, value_strides, source, destination, tile,
            VALUE_ELEMENTS, VALUE_INNER, VALUE_LINE, TILE,
        )  # fmt: skip


def _lines(cache: torch.Tensor) -> tuple[BlockStrides, int, int]:
    """(strides, inner, line) of a block, dimensions that touch merged into the longest lines."""
    token, head = (cache.shape[1], cache.stride(1)), (cache.shape[2], cache.stride(2))
    outer, inner = (token, head) if token[1] >= head[1] else (head, token)
    line = cache.shape[3]
    for _ in range(2):
        if inner[0] == 1 or inner[1] == line:
            line *= inner[0]
            outer, inner = (1, 0), outer
    return BlockStrides(cache.stride(0), outer[1], inner[1]), inner[0], line


def launch(key_cache, value_cache, src_blocks, dst_blocks) -> None:
    num_pairs, num_blocks = src_blocks.shape[0], key_cache.shape[0]
    if num_pairs == 0 or num_blocks == 0:
        return
    key_strides, key_inner, key_line = _lines(key_cache)
    value_strides, value_inner, value_line = _lines(value_cache)
    key_elements, value_elements = key_cache[0].numel(), value_cache[0].numel()
    tiles = cdiv(max(key_elements, value_elements), _TILE)
    with device_of(key_cache):
        _copy_blocks_kernel[(num_pairs * tiles, 2)](
            as_bytes(key_cache), as_bytes(value_cache), src_blocks, dst_blocks,
            key_strides, value_strides, src_blocks.stride(0), dst_blocks.stride(0),
            tiles, num_blocks,
            key_elements, key_inner, key_line, value_elements, value_inner, value_line, _TILE,
        )  # fmt: skip
