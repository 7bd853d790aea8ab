"""The choice of tiles and splits for paged attention, from shapes and device properties alone."""

import functools
from typing import NamedTuple

import torch
import triton


class DeviceLimits(NamedTuple):
    multiprocessors: int
    shared_memory: int  # bytes that one program may have


class Tile(NamedTuple):
    """How a program is cut: query rows, KV positions a step, warps, steps in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":  # the interpreter
        return DeviceLimits(multiprocessors=4, shared_memory=166912)
    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", 65536)
    return DeviceLimits(properties.multi_processor_count, shared_memory)


def block_dim(head_dim: int) -> int:
    """Return the lanes that a head takes: matrix units want powers of two from 16 on."""
    return max(16, triton.next_power_of_2(head_dim))


def heads_per_tile(group: int, head_dim: int) -> int:
    """Return how many of the query heads that share a KV head go into one tile."""
    most = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    return triton.cdiv(group, triton.cdiv(group, most))


def _fit(tile: Tile, bytes_of_row: int, bytes_of_key: int, limits: DeviceLimits) -> Tile:
    """Take stages, then keys away until query rows and KV positions fit into shared memory."""
    while tile.rows * bytes_of_row + tile.stages * tile.keys * bytes_of_key > limits.shared_memory:
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = tile._replace(keys=tile.keys // 2)
        else:
            break
    return tile


@functools.cache
def choose_tiles(
    dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int, value_head_dim: int, group: int,
    limits: DeviceLimits,
) -> tuple[Tile, Tile]:  # fmt: skip
    """Return the (short, long) tile of a model's shape."""
    block_d, block_dv = block_dim(head_dim), block_dim(value_head_dim)
    widest = max(block_d, block_dv)
    rows = max(16, triton.next_power_of_2(heads_per_tile(group, head_dim)))
    bytes_of_row = block_d * dtype.itemsize
    bytes_of_key = (block_d + block_dv) * max(dtype.itemsize, pool_dtype.itemsize)
    if dtype == torch.float32:  # no matrix units: every product stands in the code
        short = Tile(rows, 32 if widest <= 128 else 16, 4, 2)
        long = Tile(max(rows, 64 if widest <= 128 else 32), 32 if widest <= 128 else 16, 8, 1)
    else:
        short = Tile(rows, 64, 4, 3)
        if widest <= 128:
            long = Tile(128, 64, 8 if widest > 64 else 4, 3)
        elif widest <= 256:
            long = Tile(max(rows, 64), 64, 8, 2)
        else:
            long = Tile(max(rows, 32), 32, 8, 1)
    return (
        _fit(short, bytes_of_row, bytes_of_key, limits),
        _fit(long, bytes_of_row, bytes_of_key, limits),
    )


# Splits of a sequence shorter than this would cost more to merge than they save.
_LEAST_KEYS_OF_SPLIT = 256
_MOST_SPLITS = 64


def choose_splits(
    requested: int, programs: int, max_positions: int, keys: int, limits: DeviceLimits
) -> tuple[int, int]:
    """Return (num_splits, fewest KV tiles of a split) for ``programs`` that would run unsplit.

    A sequence is cut by its own length, into at most num_splits parts: a wider table changes
    nothing for it.
    """
    max_tiles = max(1, triton.cdiv(max_positions, keys))
    if requested > 0:
        return min(requested, max_tiles), 1
    least_tiles = max(1, _LEAST_KEYS_OF_SPLIT // keys)
    # Two programs fit on a multiprocessor; more splits than that only wait for each other.
    wanted = 2 * limits.multiprocessors // max(1, programs)
    return max(1, min(wanted, _MOST_SPLITS, triton.cdiv(max_tiles, least_tiles))), least_tiles
