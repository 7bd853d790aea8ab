"""Strides in elements, as kernels take them. A last stride is always 1 and is not passed."""

from typing import NamedTuple

import torch


class RowStrides(NamedTuple):
    """Of [num_tokens, num_heads, head_dim] rows."""

    token: int
    head: int


class PoolStrides(NamedTuple):
    """Of a [num_blocks, block_size, num_kv_heads, head_dim] pool."""

    block: int
    token: int
    head: int


def row_strides(rows: torch.Tensor) -> RowStrides:
    return RowStrides(*rows.stride()[:2])


def pool_strides(cache: torch.Tensor) -> PoolStrides:
    return PoolStrides(*cache.stride()[:3])


def per_head_stride(values: torch.Tensor | None) -> int:
    """Return the stride that takes a head to its element of ``values``, 0 if one serves all."""
    return 0 if values is None or values.numel() == 1 else values.stride(0)
