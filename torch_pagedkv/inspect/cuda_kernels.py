"""Which threads of the CUDA C++ kernels move a token's row, and which lanes read its key in a decode step.

The kernels are compiled ahead of time and say nothing of themselves, so their constants and steps are
restated here, in this one place; the tests hold both against the sources in csrc/cuda.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from torch_pagedkv.inspect.row_lanes import LANES_OF_WARP

WRITE_THREADS = 256  # at most, of a CTA that writes
SEARCHED_TOKENS = 1024  # calls of up to so many have a CTA for each
WIDEST_HEAD = 256
# Whether the pool is float8 -> widest head of keys and values -> positions in a tile.
KEYS_OF_TILE = {False: {64: 16, 128: 16, WIDEST_HEAD: 16}, True: {64: 32, 128: 16, WIDEST_HEAD: 16}}
QUERY_ROWS = 16  # that a warp takes at once
MOST_OF_TEAM = 8  # warps that walk the heads of a sequence side by side
_PACK_BYTES = 16


@dataclasses.dataclass(frozen=True)
class CudaRowLanes:
    """How the packs of a token's key are dealt to the threads of its CTA, in a call of few tokens.

    Pack p of the key belongs to thread ``p % threads``; those of the value follow.
    """

    pack: int  # consecutive elements of one access
    threads: int  # of its CTA that have any
    elements: int  # of the key
    token: int  # its row in the call's key

    def thread_of(self, element: int) -> tuple[int, int]:
        """Return (warp, lane) of the thread that moves an element of the key."""
        return divmod(element // self.pack % self.threads, LANES_OF_WARP)

    def pack_of(self, element: int) -> range:
        """Return the elements that the same thread moves in one access with this one."""
        first = element // self.pack * self.pack
        return range(first, first + self.pack)

    def heading(self, itemsize: int) -> list[str]:
        """Say how a call's tokens and their packs are dealt."""
        packs = self.elements // self.pack
        size = f"{self.pack} elements ({self.pack * itemsize} bytes)" if self.pack > 1 else f"1 element ({itemsize} B)"
        more = "" if 2 * packs <= self.threads else f", then x + {self.threads} and so on"
        return [
            "written by reshape_and_cache on CUDA, in CUDA C++: a CTA for each token of a call of up to "
            f"{SEARCHED_TOKENS}",
            f"  {packs} packs of {size} of the key, then the value's; thread x has pack x{more}",
            f"  token {self.token}: CTA {self.token}, threads 0 to {self.threads - 1}",
        ]


def lanes_of_cuda_write(source: torch.Tensor, cache: torch.Tensor, token: int) -> CudaRowLanes:
    """Return how row ``token`` of ``source`` goes into ``cache``: both may be meta tensors, nothing is read.

    The values are taken to be as the keys, the memory of both to start at a multiple of 32 bytes, and the
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
    # Bits are copied in packs of 16, 8, 4, 2 or 1 bytes. What is converted goes by 16 bytes or by elements,
    # and, if its elements have 2 bytes, by 16 of them at best.
    sizes = [most >> i for i in range(most.bit_length())] if widths[0] == widths[1] else [most, 1]
    if widths == (2, 1):
        sizes.insert(0, 16)
    pack = next(size for size in sizes if takes(size))
    packs = 2 * (num_heads * head_dim // pack)
    passes = -(-packs // WRITE_THREADS)
    threads = -(-packs // passes)
    return CudaRowLanes(pack, threads, num_heads * head_dim, token)


@dataclasses.dataclass(frozen=True)
class CudaKVTile:
    """The tile of keys of one KV head that holds one of them, in a decode step: all of it is one warp's."""

    index: int  # tiles start at multiples of their size, whatever the sequence
    keys: int  # positions in the tile
    row: int  # of the key in the tile
    warps_of_head: int  # that have this tile of a KV head, each for some of its query heads
    team: int  # warps that walk heads of these positions side by side
    packs: int  # of 16 bytes, that a row takes in shared memory
    column: int  # of the table, that the key's lanes look into
    offset: int  # of the key in its block
    length: int
    prefill_keys: int  # positions in a tile of a long query, which is the Triton kernel's
    head_dim: int
    itemsize: int
    is_aligned: bool  # whether all rows of the pool start at multiples of 16 bytes

    @property
    def looking_lanes(self) -> range:
        """The lanes that look into the table for the key: two of them where a tile has 16."""
        return range(self.row, LANES_OF_WARP, self.keys)

    def lane_of(self, feature: int) -> int:
        """Return the lane that copies a feature of the key into shared memory."""
        return (self.row * self.packs + feature * self.itemsize // _PACK_BYTES) % LANES_OF_WARP

    def element(self, block_table: Sequence[int], strides: Sequence[int], head: int, feature: int) -> int:
        """Return where the kernel loads a feature of the key from, in elements of the pool."""
        block, token, of_head = strides
        return int(block_table[self.column]) * block + self.offset * token + head * of_head + feature

    def lines(self, block_table: Sequence[int]) -> list[str]:
        """Say who reads the key."""
        readers = "one warp" if self.warps_of_head == 1 else f"{self.warps_of_head} warps"
        team = f", {self.team} of them side by side" if self.team > 1 else ""
        looking = " and ".join(map(str, self.looking_lanes))
        look = f"lanes {looking} look" if len(self.looking_lanes) > 1 else f"lane {looking} looks"
        lanes = sorted({self.lane_of(0), self.lane_of(self.head_dim - 1)})
        named = f"lanes {lanes[0]} to {lanes[1]} copy" if len(lanes) == 2 else f"lane {lanes[0]} copies"
        slowly = "" if self.is_aligned else " (element by element, since rows start anywhere)"
        position = self.index * self.keys + self.row
        return [
            f"read by paged_attention on CUDA, in CUDA C++, one query after {self.length} tokens; "
            "a warp has tiles of its own",
            f"  KV tile {self.index} of {self.keys} keys, row {self.row}: {readers} for each KV head{team}",
            f"  {look} into the table: block_table[{self.column}] = {block_table[self.column]}, offset {self.offset}",
            f"  {named} a head of the key, {_PACK_BYTES} bytes each{slowly}; the last feature: lane {lanes[-1]}",
            f"  in a prefill, in Triton and for most heads on Hopper: KV tile {position // self.prefill_keys} of "
            f"{self.prefill_keys} keys",
        ]


def why_cuda_decode_refuses(cache: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Return why a decode step of queries of a dtype is Triton's and not CUDA C++'s, or None."""
    head_dim = cache.shape[3]
    if dtype == torch.float32:
        return "CUDA C++ takes no float32"
    if head_dim > WIDEST_HEAD:
        return f"CUDA C++ takes heads of up to {WIDEST_HEAD}"
    if head_dim * cache.element_size() % _PACK_BYTES:
        return f"CUDA C++ takes heads of multiples of {_PACK_BYTES} bytes"
    return None


def tile_of_cuda_read(position: int, length: int, cache: torch.Tensor, num_heads: int, prefill_keys: int) -> CudaKVTile:
    """Return the tile that holds ``position`` when the last of ``length`` tokens attends.

    The values are taken to be as the keys, the memory of both to start at a multiple of 16 bytes, and the
    pool to have more than one block.
    """
    block_size, num_kv_heads, head_dim = cache.shape[1:]
    width = cache.element_size()
    by_head = KEYS_OF_TILE[width == 1]
    dim = min(dim for dim in by_head if head_dim <= dim)
    keys = by_head[dim]
    index, row = divmod(position, keys)
    column, offset = divmod(position, block_size)
    warps_of_head = -(-(num_heads // num_kv_heads) // QUERY_ROWS)
    items = num_kv_heads * warps_of_head
    team = max(team for team in range(1, MOST_OF_TEAM + 1) if items % team == 0)
    steps = [stride for size, stride in zip((2, block_size, num_kv_heads), cache.stride()) if size > 1]
    is_aligned = all(step * width % _PACK_BYTES == 0 for step in steps)
    return CudaKVTile(
        index, keys, row, warps_of_head, team, dim * width // _PACK_BYTES, column, offset, length, prefill_keys,
        head_dim, width, is_aligned,
    )  # fmt: skip
