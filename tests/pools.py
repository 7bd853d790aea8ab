"""Pools in every layout that the contract allows, poisoned: what a test did not write is NaN."""

from __future__ import annotations

from collections.abc import Iterable

import torch

LAYOUTS = (
    "NHD",
    "HND",
    "mixed",  # keys NHD, values HND
    "unbind",  # views of one [num_blocks, 2, ...] buffer
    "packed",  # halves of one [..., head_dim + value_head_dim] buffer
    "packed_hnd",
    "layers",  # one layer's views of a pool for all layers
    "padded",  # every dimension followed by memory of somebody else
    "offset",  # rows that start at an odd element
)


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a tensor with NaN, whatever its float dtype."""
    if tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan"))
    return tensor


def make_pools(
    layout: str,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    value_head_dim: int,
    dtype: torch.dtype,
    device: str,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return poisoned (key_cache, value_cache) and the buffers that they are views of."""

    def empty(*shape: int) -> torch.Tensor:
        return poison_(torch.empty(shape, dtype=dtype, device=device))

    dims = (num_blocks, block_size, num_kv_heads)
    head_major = (num_blocks, num_kv_heads, block_size)
    widths = (head_dim, value_head_dim)
    if layout == "NHD":
        buffers = [empty(*dims, width) for width in widths]
        pools = buffers
    elif layout == "HND":
        buffers = [empty(*head_major, width) for width in widths]
        pools = [buffer.transpose(1, 2) for buffer in buffers]
    elif layout == "mixed":
        buffers = [empty(*dims, head_dim), empty(*head_major, value_head_dim)]
        pools = [buffers[0], buffers[1].transpose(1, 2)]
    elif layout == "unbind":
        buffers = [empty(num_blocks, 2, block_size, num_kv_heads, max(widths))]
        pools = [half[..., :width] for half, width in zip(buffers[0].unbind(1), widths)]
    elif layout == "packed":
        buffers = [empty(*dims, sum(widths))]
        pools = list(buffers[0].split(widths, dim=-1))
    elif layout == "packed_hnd":
        buffers = [empty(*head_major, sum(widths))]
        pools = list(buffers[0].transpose(1, 2).split(widths, dim=-1))
    elif layout == "layers":
        buffers = [empty(3, 2, *dims, max(widths))]
        pools = [half[..., :width] for half, width in zip(buffers[0][1], widths)]
    elif layout == "padded":
        buffers = [empty(*(d + 1 for d in dims), width + 3) for width in widths]
        pools = [b[:num_blocks, :block_size, :num_kv_heads, :w] for b, w in zip(buffers, widths)]
    elif layout == "offset":
        sizes = [num_blocks * block_size * num_kv_heads * width for width in widths]
        buffers = [empty(1 + size) for size in sizes]
        pools = [buffer[1:].view(*dims, width) for buffer, width in zip(buffers, widths)]
    else:
        raise ValueError(layout)
    return pools[0], pools[1], buffers


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers, so that NaNs compare by their bits."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integer[tensor.element_size()])


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    different = (bits(actual) != bits(expected.to(actual.device))).sum().item()
    assert different == 0, f"{different} of {actual.numel()} elements differ in their bits"


def assert_all_same_bits(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)
