"""Which threads of the CUDA C++ kernels move a token's row, and which warp reads its key in a decode step.

The kernels are compiled ahead of time and say nothing of themselves, so their constants and steps are
restated here, in this one place; the tests hold both against the sources in csrc/cuda.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from torch_pagedkv.inspect.row_lanes import LANES_OF_WARP

WRITE_THREADS = 256  # at most, of a CTA that writes
SEARCHED_TOKENS = 1024  # calls of up to so many have one token for each thread
WARPS_OF_DECODE = 4
WIDEST_HEAD = 256
# Whether the pool is float8 -> widest head of keys and values -> positions that a warp takes at a time.
KEYS_OF_WARP = {False: {64: 32, 128: 16, WIDEST_HEAD: 16}, True: {64: 32, 128: 32, WIDEST_HEAD: 16}}
_PACK_BYTES = 16


@dataclasses.dataclass(frozen=True)
class CudaRowLanes:
    """How the packs of a token's key are dealt to the threads of the CTA that writes them.

    Pack p of the key belongs to thread ``p % threads`` of the token's threads; those of the value follow.
    """

    pack: int  # consecutive elements of one access
    threads: int  # of a token
    rows: int  # tokens that a CTA has at once
    elements: int  # of the key
    token: int  # its row in the call's key

    def thread_of(self, element: int) -> tuple[int, int]:
        """Return (warp, lane) of the thread that moves an element of the key."""
        thread = self.token % self.rows * self.threads + element // self.pack % self.threads
        return divmod(thread, LANES_OF_WARP)

    def pack_of(self, element: int) -> range:
        """Return the elements that the same thread moves in one access with this one."""
        first = element // self.pack * self.pack
        return range(first, first + self.pack)

    def heading(self, itemsize: int) -> list[str]:
        """Say how a call's tokens and their packs are dealt."""
        packs, row = self.elements // self.pack, self.token % self.rows
        first = row * self.threads
        size = f"{self.pack} elements ({self.pack * itemsize} bytes)" if self.pack > 1 else f"1 element ({itemsize} B)"
        more = "" if 2 * packs <= self.threads else f", then x + {self.threads} and so on"
        return [
            f"written by reshape_and_cache on CUDA, in CUDA C++: CTAs of {self.threads} x {self.rows} threads, "
            f"{self.threads} for each of {self.rows} tokens",
            f"  {packs} packs of {size} of the key, then the value's; thread x of a token has pack x{more}",
            f"  token {self.token} of a call of up to {SEARCHED_TOKENS}: CTA {self.token // self.rows}, "
            f"threads {first} to {first + self.threads - 1}",
        ]


def lanes_of_cuda_write(source: torch.Tensor, cache: torch.Tensor, token: int) -> CudaRowLanes:
    """Return how row ``token`` of ``source`` goes into ``cache``: both may be meta tensors, nothing is read.

    The values are taken to be as the keys, the memory of both to start at a multiple of 16 bytes, and the
    pool to have no scale for each head.
    """
    num_heads, head_dim = cache.shape[2:]
    widths = source.element_size(), cache.element_size()
    is_one_head = num_heads == 1 or (source.stride(1) == head_dim and cache.stride(2) == head_dim)
    elements_of_head = num_heads * head_dim if is_one_head else head_dim
    strides = [source.stride(0)], [*cache.stride()[:2]]
    if not is_one_head:
        strides[0].append(source.stride(1))
        strides[1].append(cache.stride(2))

    def takes(pack: int) -> bool:
        sides = zip(strides, widths, strict=True)
        return elements_of_head % pack == 0 and all(
            stride * width % (pack * width) == 0 for side, width in sides for stride in side
        )

    most = _PACK_BYTES // widths[0]
    # Bits are copied in packs of 16, 8, 4, 2 or 1 bytes; what is converted goes by 16 bytes or by elements.
    sizes = [most >> i for i in range(most.bit_length())] if widths[0] == widths[1] else [most, 1]
    pack = next(size for size in sizes if takes(size))
    packs = 2 * (num_heads * head_dim // pack)
    passes = -(-packs // WRITE_THREADS)
    threads = -(-packs // passes)
    return CudaRowLanes(pack, threads, max(1, WRITE_THREADS // threads), num_heads * head_dim, token)


@dataclasses.dataclass(frozen=True)
class CudaKVTile:
    """The place of one key in the walk of a CTA over the keys of one KV head, in a decode step."""

    index: int  # tiles start at multiples of their size, whatever the sequence
    keys: int  # positions in the tile
    row: int  # of the key in the tile
    warp: int  # that has it
    keys_of_warp: int
    packs: int  # of 16 bytes, that a row takes in shared memory
    column: int  # of the table, that the key's lane looks into
    offset: int  # of the key in its block
    length: int
    prefill_keys: int  # positions in a tile of a long query, which is the Triton kernel's
    head_dim: int
    itemsize: int

    @property
    def key_of_warp(self) -> int:
        """Which of the warp's keys it is; the lane of this number looks it up."""
        return self.row % self.keys_of_warp

    def lane_of(self, feature: int) -> int:
        """Return the lane that copies a feature of the key into shared memory."""
        return (self.key_of_warp * self.packs + feature * self.itemsize // _PACK_BYTES) % LANES_OF_WARP

    def element(self, block_table: Sequence[int], strides: Sequence[int], head: int, feature: int) -> int:
        """Return where the kernel loads a feature of the key from, in elements of the pool."""
        block, token, of_head = strides
        return int(block_table[self.column]) * block + self.offset * token + head * of_head + feature

    def lines(self, block_table: Sequence[int]) -> list[str]:
        """Say who reads the key."""
        first = self.warp * self.keys_of_warp
        last_feature = self.head_dim - 1
        lanes = sorted({self.lane_of(0), self.lane_of(last_feature)})
        named = f"lanes {lanes[0]} to {lanes[1]} copy" if len(lanes) == 2 else f"lane {lanes[0]} copies"
        return [
            f"read by paged_attention on CUDA, in CUDA C++, one query after {self.length} tokens; "
            "a CTA has one KV head at a time",
            f"  KV tile {self.index} of {self.keys} keys, row {self.row}: warp {self.warp} of {WARPS_OF_DECODE} "
            f"has rows {first} to {first + self.keys_of_warp - 1}",
            f"  lane {self.key_of_warp} looks into the table: block_table[{self.column}] = {block_table[self.column]}, "
            f"offset {self.offset}",
            f"  {named} a head of the key, {_PACK_BYTES} bytes each; the last feature: lane {lanes[-1]}",
            f"  in a prefill, in Triton: KV tile {self.position // self.prefill_keys} of {self.prefill_keys} keys",
        ]

    @property
    def position(self) -> int:
        return self.index * self.keys + self.row


def why_cuda_decode_refuses(cache: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return why a decode step of queries of a dtype is Triton's and not CUDA C++'s, or None."""
    if dtype == torch.float32:
        return "CUDA C++ takes no float32"
    width, head_dim = cache.element_size(), cache.shape[3]
    if head_dim > WIDEST_HEAD:
        return f"CUDA C++ takes heads of up to {WIDEST_HEAD}"
    strides = [stride for size, stride in zip(cache.shape, cache.stride()) if size != 1]
    if head_dim * width % _PACK_BYTES or math.gcd(*strides[:-1], 0) * width % _PACK_BYTES:
        return f"CUDA C++ takes rows at multiples of {_PACK_BYTES} bytes"
    return None


def tile_of_cuda_read(position: int, length: int, cache: torch.Tensor, prefill_keys: int) -> CudaKVTile:
    """Return the tile that holds ``position`` when the last of ``length`` tokens attends."""
    block_size, _, head_dim = cache.shape[1:]
    width = cache.element_size()
    by_head = KEYS_OF_WARP[width == 1]
    dim = min(dim for dim in by_head if head_dim <= dim)
    keys_of_warp = by_head[dim]
    keys = WARPS_OF_DECODE * keys_of_warp
    index, row = divmod(position, keys)
    column, offset = divmod(position, block_size)
    packs = dim * width // _PACK_BYTES
    warp = row // keys_of_warp
    return CudaKVTile(
        index, keys, row, warp, keys_of_warp, packs, column, offset, length, prefill_keys, head_dim, width
    )
