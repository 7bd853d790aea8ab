"""The walk of inspect.explain, beside the kernels' own steps."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from torch_pagedkv import inspect
from torch_pagedkv.triton_kernels.attention_tiles import DeviceLimits, choose_splits, choose_tiles
from torch_pagedkv.triton_kernels.online_softmax import _locate
from torch_pagedkv.triton_kernels.query_tiles import take_keys
from torch_pagedkv.triton_kernels.strides import PoolStrides

LIMITS = DeviceLimits(132, 232448, warp_groups=True, converts_float8=True)


@triton.jit
def _places_kernel(
    places, tile, table, length, num_blocks, block_size, strides,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, GRANULE: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    key_place, _, loaded = _locate(
        tile, table, 0, length, num_blocks, block_size, strides, strides,
        EDGE, BLOCK_N, GRANULE, POWER_BLOCK_SIZE, 1, 1,
    )  # fmt: skip
    tl.store(places + tl.arange(0, BLOCK_N), tl.where(loaded, key_place, -1))


@triton.jit
def _ranges_kernel(ranges, length, num_splits, least_tiles, BLOCK_N: tl.constexpr):
    token = tl.arange(0, 16)
    _, tiles = take_keys(token, token < 1, 0, 0, length - 1, length, -1, 0, num_splits, least_tiles, BLOCK_N)
    place = ranges + tl.program_id(1) * 3
    tl.store(place, tiles.first)
    tl.store(place + 1, tiles.stop)
    tl.store(place + 2, tiles.inner_to)


@pytest.mark.parametrize("block_size", [1, 7, 16, 48, 256])
def test_the_kernel_loads_a_key_from_where_the_walk_says(block_size):
    table = torch.randperm(2000)[: -(-700 // block_size)]
    row = table.tolist()
    for position, length in ((20, 21), (20, 700), (650, 651), (650, 700), (0, 1), (639, 700), (640, 700)):
        if length > len(row) * block_size:
            continue
        walk = inspect.explain(row, block_size, position, layout="HND", length=length, kernels="triton")
        tile, power = walk.tile, block_size & -block_size
        places = torch.zeros(tile.keys, dtype=torch.int64)
        _places_kernel[(1,)](
            places, tile.index, table, length, 2000, block_size, PoolStrides(*walk.layouts["HND"]),
            not tile.is_whole, tile.keys, min(power, tile.keys), power if power == block_size else 0,
        )  # fmt: skip
        assert places[tile.row] == walk.read_element(0, 0) == walk.written_element(0, 0)


@pytest.mark.parametrize("length", [1, 21, 64, 65, 1000, 6400])
def test_the_kernel_gives_a_key_to_the_split_and_tile_of_the_walk(length):
    table = list(range(400))
    short, _ = choose_tiles(torch.bfloat16, torch.bfloat16, 64, 64, 1, LIMITS)
    num_splits, least = choose_splits(0, 2, 0, 6400, short.keys, LIMITS)
    ranges = torch.zeros(num_splits, 3, dtype=torch.int32)
    _ranges_kernel[(1, num_splits)](ranges, length, num_splits, least, short.keys)
    for position in {0, length // 3, length // 2, max(0, length - 65), length - 1}:
        tile = inspect.explain(table, 16, position, length=length, kernels="triton").tile
        first, stop, inner_to = ranges[tile.split].tolist()
        whole = position // short.keys
        assert first <= whole < stop
        assert tile.is_whole == (whole < inner_to)
        assert tile.keys == (short.keys if tile.is_whole else short.edge_keys)
    assert (ranges[: tile.num_splits, 1] > ranges[: tile.num_splits, 0]).all()
    assert (ranges[tile.num_splits :, 1] == ranges[tile.num_splits :, 0]).all()
