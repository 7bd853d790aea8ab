"""How the write kernel cuts a token's row, from shapes and strides alone. Imports no Triton."""

from typing import NamedTuple

import torch

from torch_pagedkv.triton_kernels.grid_sizes import next_power_of_2

# Elements that a program moves at once.
_TILE = 4096


class RowTile(NamedTuple):
    """A row as the kernel sees it: ``heads`` runs of ``head_dim`` elements, ``elements`` at a time."""

    heads: int
    head_dim: int
    elements: int


def row_tile(source: torch.Tensor, cache: torch.Tensor, scale_stride: int) -> RowTile:
    """Return the tile of the rows of ``source``: one head where heads touch on both sides."""
    num_heads, head_dim = cache.shape[2:]
    touching = source.stride(1) == cache.stride(2) == head_dim or num_heads == 1
    if touching and scale_stride == 0:
        num_heads, head_dim = 1, num_heads * head_dim
    return RowTile(num_heads, head_dim, min(_TILE, next_power_of_2(num_heads * head_dim)))


def warps_for(widest_bytes: int) -> int:
    """Return as many warps as carry 16 bytes a thread of the wider tile, within reason."""
    return max(1, min(8, widest_bytes // 512))
