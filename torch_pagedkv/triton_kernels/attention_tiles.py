"""The choice of tiles and splits for paged attention, from shapes and device properties alone."""

import functools
from typing import NamedTuple

import torch

from torch_pagedkv.triton_kernels.grid_sizes import cdiv, next_power_of_2

# A split of fewer keys than this costs more to merge than it saves.
_LEAST_KEYS_OF_SPLIT = 256
_MOST_SPLITS = 128
# Programs with short tiles that a multiprocessor runs at once.
_RESIDENT = 3


class DeviceLimits(NamedTuple):
    multiprocessors: int
    shared_memory: int  # bytes that one program may have
    warp_groups: bool  # matrix units that read shared memory and leave registers to softmax
    converts_float8: bool
    registers: int = 0  # of a multiprocessor; 0: the compiler takes no limit


class Tile(NamedTuple):
    """How a program is cut."""

    rows: int  # query rows
    keys: int  # KV positions of a step that all rows see
    edge_keys: int  # KV positions of a step that some rows do not see
    warps: int
    stages: int  # of the software pipeline
    is_long: bool = False
    resident: int = 1  # programs that registers leave a multiprocessor room for


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    if device.type != "cuda":  # the interpreter
        return DeviceLimits(4, 166912, warp_groups=False, converts_float8=False)
    properties = torch.cuda.get_device_properties(device)
    capability = (0, 0) if torch.version.hip else (properties.major, properties.minor)
    return DeviceLimits(
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", 65536),
        warp_groups=capability in ((9, 0), (10, 0), (10, 3)),
        converts_float8=capability >= (8, 9),
        registers=0 if torch.version.hip else getattr(properties, "regs_per_multiprocessor", 0),
    )


def compiler_options(tile: Tile, limits: DeviceLimits) -> dict[str, int]:
    """Return the options to compile a tile with."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if tile.resident > 1 and limits.registers:
        options["maxnreg"] = limits.registers // (tile.resident * 32 * tile.warps)
    return options


@functools.cache
def block_dim(head_dim: int) -> int:
    """Return the lanes that a head takes: matrix units want powers of two from 16 on."""
    return max(16, next_power_of_2(head_dim))


@functools.cache
def heads_per_tile(group: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many of the query heads that share a KV head go into one tile."""
    most = 128 if head_dim <= 128 else 64 if head_dim <= 256 else 32
    most = 16 if dtype == torch.float32 else most
    return cdiv(group, cdiv(group, most))


def _fit(tile: Tile, row_bytes: int, key_bytes: int, copied_bytes: int, shared_memory: int) -> Tile:
    """Take stages, then keys away until a tile fits into shared memory."""

    def needed(tile: Tile) -> int:
        # Weights pass through shared memory unless the tile is high enough for warp groups.
        weights = 2 * tile.rows * tile.keys if tile.rows < 64 else 0
        keys = tile.keys * (tile.stages * key_bytes + copied_bytes)
        return tile.rows * row_bytes + weights + keys + 1024

    while needed(tile) > shared_memory and (tile.stages > 1 or tile.keys > 16):
        if tile.stages > 1:
            tile = tile._replace(stages=tile.stages - 1)
        else:
            tile = tile._replace(keys=tile.keys // 2, edge_keys=min(tile.edge_keys, tile.keys // 2))
    return tile


@functools.cache
def choose_tiles(
    dtype: torch.dtype, pool_dtype: torch.dtype, head_dim: int, value_head_dim: int, group: int,
    limits: DeviceLimits,
) -> tuple[Tile, Tile]:  # fmt: skip
    """Return the (short, long) tile of a model's shape.

    A long tile is high, so that keys that were loaded serve many rows, and as wide as registers
    allow; up to 128 elements a head, one that leaves room for a second program: of two, one
    multiplies while the other takes powers. A short one has just the rows of a few tokens: what counts there is how
    many bytes are in flight on a multiprocessor that runs several of them.
    """
    block_d, block_dv = block_dim(head_dim), block_dim(value_head_dim)
    widest = max(block_d, block_dv)
    heads = heads_per_tile(group, max(head_dim, value_head_dim), dtype)
    rows = max(16, next_power_of_2(heads))
    warps = 4 if rows <= 32 and widest <= 256 else 8
    if dtype == torch.float32:
        # Exact products have no matrix unit: each is an instruction of its own, its operands in
        # registers, which larger tiles would spill.
        keys = 32 if widest <= 128 else 16
        short = Tile(rows, keys, 16, 8, 2)
        long = Tile(max(rows, 64), 16, 16, 8, 1) if widest <= 64 else short._replace(stages=1)
    elif widest <= 64:
        short, long = Tile(rows, 64, 32, warps, 4), Tile(128, 128, 32, 8, 2, resident=2)
        if not limits.warp_groups:
            long = Tile(128, 64, 32, 8, 3)
    elif widest <= 128:
        short, long = Tile(rows, 64, 64, warps, 3), Tile(128, 64, 32, 8, 2, resident=2)
        if not limits.warp_groups:
            long = Tile(max(rows, 64), 64, 32, 4 if rows <= 64 else 8, 3)
    elif widest <= 256:
        short, long = Tile(rows, 32, 32, warps, 3), Tile(128, 32, 16, 8, 2)
        if not limits.warp_groups:
            long = Tile(max(rows, 64), 64, 16, 8, 2)
    else:
        short, long = Tile(rows, 32, 16, warps, 2), Tile(max(rows, 32), 32, 16, 8, 2)
    width = block_d + block_dv
    # float8 rows are held once more, decoded, for the matrix units.
    copied_bytes = width * dtype.itemsize if pool_dtype.itemsize < dtype.itemsize else 0
    cost = (block_d * dtype.itemsize, width * pool_dtype.itemsize, copied_bytes)
    fitted = _fit(short, *cost, limits.shared_memory), _fit(long, *cost, limits.shared_memory)
    return fitted[0], fitted[1]._replace(is_long=True)


@functools.cache
def _splits_that_fill(programs: int, slots: int, most: int) -> int:
    """Return the fewest splits whose programs keep the last round of slots nearly full."""
    for splits in range(1, most):
        rounds = programs * splits / slots
        if rounds >= 0.85 * -(-programs * splits // slots):
            return splits
    return most


def choose_splits(
    requested: int, short_programs: int, long_programs: int, max_positions: int, keys: int,
    limits: DeviceLimits,
) -> tuple[int, int]:  # fmt: skip
    """Return (num_splits, fewest KV tiles of a split) for grids of so many programs without splits.

    A sequence is cut by its own length, into at most num_splits parts: a wider table changes
    nothing for it.
    """
    max_tiles = max(1, cdiv(max_positions, keys))
    if requested > 0:
        return min(requested, max_tiles), 1
    least_tiles = max(1, _LEAST_KEYS_OF_SPLIT // keys)
    most = min(_MOST_SPLITS, cdiv(max_tiles, least_tiles))
    if long_programs:  # each of them fills a multiprocessor
        return max(1, min(most, limits.multiprocessors // long_programs)), least_tiles
    slots = _RESIDENT * limits.multiprocessors
    return _splits_that_fill(short_programs, slots, most), least_tiles
