"""Which KV tile of the Triton read kernel loads a key in a decode step, and from where.

It follows the kernel's own steps (splits, tiles, granules, table entries) and never looks at a slot.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from torch_pagedkv.cache.addressing import blocks_for


@dataclasses.dataclass(frozen=True)
class KVTile:
    """The place of one key in the read kernel's walk over a sequence of ``length`` tokens."""

    index: int  # tiles start at multiples of their size, whatever the sequence
    keys: int  # positions in the tile
    row: int  # of the key in the tile
    is_whole: bool  # whether the sequence fills it; a tile at the edge is cut finer
    split: int
    num_splits: int
    granule: int  # aligned positions that share one look into the table
    column: int  # of the table, that the key's granule looks into
    offset: int  # of the key in its block
    length: int
    prefill_keys: int  # positions in a tile of a long query
    position: int
    why: str = ""  # these steps and not CUDA C++'s, where those were asked for

    def element(self, block_table: Sequence[int], strides: Sequence[int], head: int, feature: int) -> int:
        """Return where the kernel loads a feature of the key from, in elements of the pool."""
        block, token, of_head = strides
        return int(block_table[self.column]) * block + self.offset * token + head * of_head + feature

    def lines(self, block_table: Sequence[int]) -> list[str]:
        """Say who reads the key."""
        kind = "whole" if self.is_whole else "at the edge, not filled by the sequence"
        pieces = f"{self.granule} keys share a look" if self.granule > 1 else "each key has its own look"
        why = f" ({self.why})" if self.why else ""
        return [
            f"read by paged_attention on CUDA, in Triton{why}, compute capability 9.0, one query after "
            f"{self.length} tokens",
            f"  split {self.split} of {self.num_splits}, KV tile {self.index} of {self.keys} keys, "
            f"row {self.row}: {kind}",
            f"  {pieces} into the table: block_table[{self.column}] = {block_table[self.column]}, offset {self.offset}",
            f"  in a prefill: KV tile {self.position // self.prefill_keys} of {self.prefill_keys} keys",
        ]


def tile_of_read(
    position: int, length: int, max_blocks: int, block_size: int, num_heads: int, head_dim: int,
    num_kv_heads: int, dtype: torch.dtype, pool_dtype: torch.dtype,
) -> KVTile:  # fmt: skip
    """Return the tile that holds ``position`` when the last of ``length`` tokens attends, alone in its batch."""
    # The module imports no Triton, so that a machine without it can be asked as well.
    from torch_pagedkv.triton_kernels import attention_tiles

    # Compute capability 9.0, as of an H100 or H200.
    limits = attention_tiles.DeviceLimits(132, 232448, warp_groups=True, converts_float8=True)
    group = num_heads // num_kv_heads
    short, long = attention_tiles.choose_tiles(dtype, pool_dtype, head_dim, head_dim, group, limits)
    heads_at_once = attention_tiles.heads_per_tile(group, head_dim, dtype)
    programs = num_kv_heads * blocks_for(group, heads_at_once)
    num_splits, least_tiles = attention_tiles.choose_splits(0, programs, 0, max_blocks * block_size, short.keys, limits)
    tiles = blocks_for(length, short.keys)
    parts = max(1, min(num_splits, blocks_for(tiles, least_tiles)))
    share, larger = divmod(tiles, parts)
    index = position // short.keys
    in_larger = larger * (share + 1)
    split = index // (share + 1) if index < in_larger else larger + (index - in_larger) // share
    is_whole = (index + 1) * short.keys <= length
    keys = short.keys if is_whole else short.edge_keys
    # The largest power of two that divides the block size, no larger than the tile; a tile of more than
    # 8 such pieces is looked up key by key.
    granule = min(block_size & -block_size, keys)
    granule = granule if keys // granule <= 8 else 1
    column, offset = divmod(position // granule * granule, block_size)
    return KVTile(
        index=position // keys, keys=keys, row=position % keys, is_whole=is_whole, split=split,
        num_splits=parts, granule=granule, column=column, offset=offset + position % granule,
        length=length, prefill_keys=long.keys, position=position,
    )  # fmt: skip
