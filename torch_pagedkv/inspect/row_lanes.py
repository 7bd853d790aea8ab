"""Which lane of the Triton write kernel moves which elements of a token's row.

The kernel's own module says what a program moves at once; how its elements are dealt to threads is the
choice of Triton's compiler, by a rule that is restated here and compared with compiled kernels in the tests.
"""

from __future__ import annotations

import dataclasses

import torch

LANES_OF_WARP = 32
_ALIGNED = 16  # all that a launch tells the compiler of a stride is whether this divides it


@dataclasses.dataclass(frozen=True)
class RowLanes:
    """How the elements of a row are dealt to the threads of the program that stores it.

    Element e of the row is in tile ``e // tile``; in the tile, thread ``e % tile // pack % threads`` has it.
    """

    tile: int  # elements that the program moves at once
    pack: int  # consecutive elements of one thread
    warps: int
    elements: int  # of the row

    @property
    def threads(self) -> int:
        return self.warps * LANES_OF_WARP

    def thread_of(self, element: int) -> tuple[int, int]:
        """Return (warp, lane) of the thread that moves an element of the row."""
        return divmod(element % self.tile // self.pack % self.threads, LANES_OF_WARP)

    def pack_of(self, element: int) -> range:
        """Return the elements that the same thread moves in one piece with this one."""
        first = element // self.pack * self.pack
        return range(first, min(first + self.pack, self.elements))

    def heading(self, itemsize: int) -> list[str]:
        """Say how programs and their elements are dealt."""
        return [
            "written by reshape_and_cache on CUDA, in Triton: program (i, 0) stores the key of new token i, "
            "(i, 1) its value",
            f"  {self.elements} elements in tiles of {self.tile}; {self.warps} x 32 lanes, "
            f"of which each moves {self.pack} elements at a time ({self.pack * itemsize} bytes)",
        ]


def lanes_of_write(source: torch.Tensor, cache: torch.Tensor) -> RowLanes:
    """Return how a row of ``source`` goes into ``cache``: both may be meta tensors, nothing is read.

    The values' rows are taken to be as wide as the keys', and the pool to have no scale for each head.
    """
    # The module imports no Triton, so that a machine without it can be asked as well.
    from torch_pagedkv.triton_kernels.row_tiles import row_tile, warps_for

    tile = row_tile(source, cache, 0)
    warps = warps_for(tile.elements * source.element_size())
    num_heads, head_dim = cache.shape[2:]
    strides = [source.stride(0), *cache.stride()[:2]]
    if tile.heads > 1:
        strides += [source.stride(1), cache.stride(2)]
    # Neighbours of a head are neighbours in memory: as many as a power of two divides its size into.
    together = tile.head_dim & -tile.head_dim if all(s % _ALIGNED == 0 for s in strides) else 1
    # 16 bytes of whichever side has the narrower elements, and no more than what there is to deal.
    widest = 16 // min(source.element_size(), cache.element_size())
    pack = min(widest, together, max(1, tile.elements // (warps * LANES_OF_WARP)))
    return RowLanes(tile.elements, pack, warps, num_heads * head_dim)
