"""explain: follow one token to its bytes, once as the write goes and once as the read goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_pagedkv.cache.addressing import Location, locate_for
from torch_pagedkv.cache.argument_checks import check_integer, check_integers
from torch_pagedkv.inspect.cuda_kernels import (
    CudaKVTile,
    CudaRowLanes,
    lanes_of_cuda_write,
    tile_of_cuda_read,
    why_cuda_decode_refuses,
)
from torch_pagedkv.inspect.kv_tiles import KVTile, tile_of_read
from torch_pagedkv.inspect.row_lanes import RowLanes, lanes_of_write
from torch_pagedkv.ops.argument_checks import FP8_DTYPES, INT64_MAX, MAX_HEAD_DIM, POOL_DTYPES, name_dtypes

_OWNER = "explain"
_SHOWN_LANES = 4
_SHOWN_BLOCKS = 12
_MOST_KV_HEADS = 1024


def nhd_strides(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the (block, token, head) strides of a contiguous pool."""
    return block_size * num_kv_heads * head_dim, num_kv_heads * head_dim, head_dim


def hnd_strides(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the (block, token, head) strides where each block holds one head after the other."""
    return block_size * num_kv_heads * head_dim, head_dim, block_size * head_dim


@dataclasses.dataclass(frozen=True)
class TokenWalk:
    """Where one token's key lies, and who moves it; ``print`` it to read it.

    Attributes:
        block_table, block_size, position: what was asked.
        place: (logical_block, offset, physical_block, slot).
        layouts: name of a layout -> its (block, token, head) strides in elements; the first one is
            the pool's own.
        num_kv_heads, head_dim, dtype: what a row is made of.
        lanes: how the write kernel deals the row to its threads.
        tile: where the read kernel meets the key.
    """

    block_table: tuple[int, ...]
    block_size: int
    position: int
    place: Location
    layouts: dict[str, tuple[int, int, int]]
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    lanes: CudaRowLanes | RowLanes
    tile: CudaKVTile | KVTile

    def written_element(self, head: int, feature: int, layout: str | None = None) -> int:
        """Return where the write puts a feature, in elements from the pool's start: by the slot."""
        block, token, of_head = self._strides(layout)
        slot = self.place.slot
        return slot // self.block_size * block + slot % self.block_size * token + head * of_head + feature

    def read_element(self, head: int, feature: int, layout: str | None = None) -> int:
        """Return where the read takes a feature from, in elements: by tile and table, without a slot."""
        return self.tile.element(self.block_table, self._strides(layout), head, feature)

    @property
    def meets(self) -> bool:
        """Whether both sides use the same address for every feature, in every layout shown."""
        features = [(head, dim) for head in range(self.num_kv_heads) for dim in range(self.head_dim)]
        return all(
            self.written_element(*feature, layout) == self.read_element(*feature, layout)
            for layout in self.layouts
            for feature in features
        )

    def _strides(self, layout: str | None) -> tuple[int, int, int]:
        return self.layouts[next(iter(self.layouts)) if layout is None else layout]

    def __str__(self) -> str:
        return "\n\n".join("\n".join(part) for part in (self._lookup(), self._row(), self._write(), self._read()))

    def _lookup(self) -> list[str]:
        place, size = self.place, self.block_size
        return [
            f"token {self.position}, block_table {self._table()}, block_size {size}",
            f"  {self.position} // {size} = logical block {place.logical_block}, "
            f"{self.position} % {size} = offset {place.offset}",
            f"  block_table[{place.logical_block}] = physical block {place.physical_block}",
            f"  {place.physical_block} * {size} + {place.offset} = slot {place.slot}",
        ]

    def _table(self) -> str:
        """Return the table, of a long one the entries around the token's."""
        ids = [str(block) for block in self.block_table]
        if len(ids) > _SHOWN_BLOCKS:
            around = self.place.logical_block
            first, stop = max(0, around - 2), around + 3
            ids = ids[first:stop]
            ids = ["..."] * (first > 0) + ids + ["..."] * (stop < len(self.block_table))
        return f"[{', '.join(ids)}]"

    def _row(self) -> list[str]:
        width, (dtype,) = self.dtype.itemsize, (name_dtypes((self.dtype,)),)
        last = self.num_kv_heads - 1, self.head_dim - 1
        lines = [
            f"its key: {self.num_kv_heads} KV heads of {self.head_dim} {dtype}, "
            f"{self.num_kv_heads * self.head_dim * width} bytes",
            f"  {'layout':8}{'strides of block, token, head':34}{'first element':>15}{'byte':>10}"
            f"{'last element':>15}{'byte':>10}",
        ]
        for name, strides in self.layouts.items():
            first, end = self.written_element(0, 0, name), self.written_element(*last, name)
            lines.append(
                f"  {name:8}{', '.join(map(str, strides)):34}{first:15}{first * width:10}{end:15}{end * width:10}"
            )
        return lines

    def _write(self) -> list[str]:
        lanes = self.lanes
        layout = next(iter(self.layouts))
        lines = lanes.heading(self.dtype.itemsize)
        packs = [lanes.pack_of(element) for element in range(0, lanes.elements, lanes.pack)]
        shown = packs if len(packs) <= _SHOWN_LANES else [*packs[:2], None, packs[-1]]
        for pack in shown:
            lines.append("  ..." if pack is None else f"  {self._pack(pack, layout)}")
        warp, lane = lanes.thread_of(lanes.elements - 1)
        last = f"{self.head_dim - 1} of head {self.num_kv_heads - 1}"
        lines.append(f"  the last feature, {last}: warp {warp} lane {lane}")
        return lines

    def _pack(self, pack: range, layout: str) -> str:
        warp, lane = self.lanes.thread_of(pack[0])
        (head, first), (_, last) = divmod(pack[0], self.head_dim), divmod(pack[-1], self.head_dim)
        features = f"feature  {first}" if len(pack) == 1 else f"features {first} to {last}"
        element = self.written_element(head, first, layout)
        return (
            f"warp {warp} lane {lane:2}: head {head} {features:20} -> element {element}, "
            f"byte {element * self.dtype.itemsize} of {layout}"
        )

    def _read(self) -> list[str]:
        last = self.num_kv_heads - 1, self.head_dim - 1
        written, read = self.written_element(*last), self.read_element(*last)
        verdict = (
            f"write and read meet: the same address for all {self.lanes.elements} features, in every layout above"
            if self.meets
            else "WRITE AND READ DO NOT MEET"
        )
        return [
            *self.tile.lines(self.block_table),
            f"  last feature: element {read}, where the write put it: element {written}",
            verdict,
        ]


def explain(
    block_table: Sequence[int],
    block_size: int,
    position: int,
    *,
    layout: str = "NHD",
    strides: Sequence[int] | None = None,
    num_kv_heads: int = 2,
    num_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    length: int | None = None,
    token: int | None = None,
    kernels: str = "cuda",
) -> TokenWalk:
    """Follow one token to its bytes, as the write finds them and as the read finds them.

    The write goes by the slot, ``block_table[position // block_size] * block_size + position %
    block_size``; the read goes by KV tiles and the block table and knows no slot. Both ways are
    computed on their own, for every feature of the key, and compared. Threads, lanes and tiles are
    those of the CUDA C++ kernels, which serve a GPU where they were built, or those of the Triton
    kernels on compute capability 9.0; nothing is run and no device is needed.

    Args:
        block_table: the physical block of each logical block of the sequence: a list, a tuple or a
            1-D integer tensor.
        block_size: tokens in a block.
        position: the token's position in its sequence, from 0.
        layout: "NHD" or "HND", the layout of the pool.
        strides: (block, token, head) strides in elements of a pool that is neither; they take the
            place of the layout's.
        num_kv_heads: KV heads of the pool, at most 1024.
        num_heads: query heads; None: num_kv_heads.
        head_dim: size of a head, at most 512.
        dtype: of the pool: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2 (new keys are
            then bfloat16).
        length: tokens of the sequence when it is read; None: position + 1.
        token: the row of the token in the call that writes it; None: position, as in a prompt that is
            written whole. It is the number of the CTA of the CUDA C++ kernel that has it.
        kernels: "cuda" or "triton"; ``python -m torch_pagedkv info`` says which serve a GPU. A decode
            step that CUDA C++ does not take is told as Triton's in either case.

    Returns:
        A TokenWalk. ``print`` shows the walk, ``meets`` says whether both ways end at one address.

    Raises:
        ValueError: a number is out of range, or the table holds no block at the position.
        TypeError: an argument is no integer, or the dtype is none of a pool.

    Not checked:
        That strides are those of a pool without overlaps.

    Example:
        >>> from torch_pagedkv import inspect
        >>> walk = inspect.explain([7, 2, 9], 16, 20)
        >>> walk.place.slot, walk.meets
        (36, True)
        >>> walk.written_element(head=1, feature=63)  # slot * (2 * 64) + 1 * 64 + 63
        4735

    Source: ours.
    """
    place = locate_for(_OWNER, block_table, position, block_size)
    table = tuple(check_integers(_OWNER, "block_table", block_table))
    block_size, position = int(block_size), int(position)
    num_kv_heads = check_integer(_OWNER, "num_kv_heads", num_kv_heads, 1, _MOST_KV_HEADS)
    num_heads = check_integer(_OWNER, "num_heads", num_kv_heads if num_heads is None else num_heads, 1)
    if num_heads % num_kv_heads:
        raise ValueError(f"{_OWNER}: num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")
    head_dim = check_integer(_OWNER, "head_dim", head_dim, 1, MAX_HEAD_DIM)
    if dtype not in POOL_DTYPES:
        raise TypeError(f"{_OWNER}: dtype must be {name_dtypes(POOL_DTYPES)}, got {dtype}")
    limit = len(table) * block_size
    length = check_integer(_OWNER, "length", position + 1 if length is None else length)
    if not position < length <= limit:
        raise ValueError(f"{_OWNER}: length must be in [{position + 1}, {limit}], got {length}")
    token = check_integer(_OWNER, "token", position if token is None else token, 0)
    if kernels not in ("cuda", "triton"):
        raise ValueError(f"{_OWNER}: kernels must be 'cuda' or 'triton', got {kernels!r}")
    layouts = _layouts(layout, strides, (block_size, num_kv_heads, head_dim))
    own_strides = next(iter(layouts.values()))
    if sum(size * stride for size, stride in zip((1, block_size, num_kv_heads), own_strides)) >= INT64_MAX // 16:
        raise ValueError(f"{_OWNER}: strides must be of a block that memory can hold, got {own_strides}")
    source_dtype = torch.bfloat16 if dtype in FP8_DTYPES else dtype
    shape = (1, block_size, num_kv_heads, head_dim)
    cache = torch.empty_strided(shape, (*own_strides, 1), dtype=dtype, device="meta")
    source = torch.empty((1, num_kv_heads, head_dim), dtype=source_dtype, device="meta")
    tile = tile_of_read(
        position, length, len(table), block_size, num_heads, head_dim, num_kv_heads, source_dtype, dtype
    )
    if kernels == "triton":
        lanes = lanes_of_write(source, cache)
    else:
        lanes = lanes_of_cuda_write(source, cache, token)
        why = why_cuda_decode_refuses(cache, source_dtype)
        if why:
            tile = dataclasses.replace(tile, why=why)
        else:
            tile = tile_of_cuda_read(position, length, cache, num_heads, tile.prefill_keys)
    return TokenWalk(table, block_size, position, place, layouts, num_kv_heads, head_dim, dtype, lanes, tile)


def _layouts(layout: Any, strides: Any, sizes: tuple[int, int, int]) -> dict[str, tuple[int, int, int]]:
    """Return strides by name, the pool's own first."""
    both = {"NHD": nhd_strides(*sizes), "HND": hnd_strides(*sizes)}
    if layout not in both:
        raise ValueError(f"{_OWNER}: layout must be 'NHD' or 'HND', got {layout!r}")
    if strides is None:
        return {layout: both.pop(layout), **both}
    given = tuple(check_integers(_OWNER, "strides", strides, 0))
    if len(given) != 3:
        raise ValueError(f"{_OWNER}: strides must be the three of block, token and head, got {len(given)}")
    return {"given": given, **both}
