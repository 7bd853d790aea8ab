"""Who owns which block of a pool: a free list and reference counts. Plain Python, no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch_pagedkv.cache.argument_checks import check_integer, check_integers


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for; nothing was allocated.

    Attributes:
        requested: blocks asked for.
        free: blocks that were free.
        total: blocks of the allocator.
    """

    _SENTENCE = "BlockAllocator.allocate: n must be <= num_free = {free} of num_blocks = {total}, got {requested}"

    def __init__(self, requested: int, free: int, total: int, sentence: str = _SENTENCE) -> None:
        super().__init__(requested, free, total, sentence)
        self.requested = requested
        self.free = free
        self.total = total
        self._sentence = sentence

    def __str__(self) -> str:
        return self._sentence.format(free=self.free, total=self.total, requested=self.requested)


class BlockAllocator:
    """Hand out the blocks of a pool and take them back when their last owner lets go.

    An owner is whatever holds a block in its block table: a sequence, a fork of it, a table of
    shared prefixes. ``allocate`` makes the caller a block's only owner, ``share`` adds an owner,
    ``free`` takes one away. One allocator serves all layers: block b of a sequence is block b of
    every layer's pools.

    Invariants, before and after every call, one that raises included:

    - a block is either free with reference count 0, or used with a count of at least 1;
    - ``num_free + num_used == num_blocks``;
    - a call does all of what it was asked for or, raising, nothing;
    - which blocks ``allocate`` returns depends on nothing but the calls before: those freed last
      come first, a new allocator counts up from 0.

    It knows ids only: no tensor, no contents. Blocks that it hands out hold what their last owner
    left, which the ops never let anyone see. It takes no lock: one thread at a time.

    Args:
        num_blocks: blocks of the pools, 0 or more.

    Raises:
        ValueError: num_blocks is negative.
        TypeError: num_blocks is not an integer.

    Example:
        >>> allocator = BlockAllocator(4)
        >>> prompt = allocator.allocate(3)
        >>> prompt
        [0, 1, 2]
        >>> allocator.share(prompt[:2])  # a second sequence starts with the same two blocks
        >>> allocator.free(prompt)       # the first one ends; its third block is free again
        >>> allocator.num_free, allocator.ref_count(0), allocator.ref_count(2)
        (2, 1, 0)
        >>> try:
        ...     allocator.allocate(3)
        ... except OutOfBlocks as error:
        ...     print(error)
        BlockAllocator.allocate: n must be <= num_free = 2 of num_blocks = 4, got 3

    Source: the block manager of PagedAttention (Kwon et al. 2023), section 4.
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = check_integer("BlockAllocator", "num_blocks", num_blocks, 0)
        self._ref_counts = [0] * num_blocks
        # A stack: the next block to hand out is at the end.
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks in total."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one owner."""
        return len(self._ref_counts) - len(self._free)

    def ref_count(self, block: int) -> int:
        """Return how many owners a block has; above 1 it must be copied before it is written."""
        if type(block) is not int or not 0 <= block < len(self._ref_counts):  # asked for every token
            (block,) = self._known("ref_count", "block", [block])
        return self._ref_counts[block]

    def allocate(self, n: int) -> list[int]:
        """Take n free blocks, each with reference count 1, or none of them.

        Args:
            n: number of blocks, 0 or more.

        Returns:
            The ids, a new list of n distinct ints.

        Raises:
            OutOfBlocks: fewer than n blocks are free.
            ValueError, TypeError: n is negative, or not an integer.
        """
        n = check_integer("BlockAllocator.allocate", "n", n, 0)
        if n > len(self._free):
            raise OutOfBlocks(n, len(self._free), len(self._ref_counts))
        blocks = [self._free.pop() for _ in range(n)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to blocks in use, one for each time that a block is named.

        Args:
            blocks: ids of used blocks.

        Raises:
            ValueError: an id is unknown or its block free; no count has changed.
            TypeError: an id is not an integer.
        """
        blocks = self._known("share", "blocks", blocks)
        for block in blocks:
            if self._ref_counts[block] == 0:
                raise ValueError(f"BlockAllocator.share: blocks must be in use, got block {block}, which is free")
        for block in blocks:
            self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Take an owner away from blocks in use, one for each time that a block is named.

        A block whose last owner left is free. ``allocate(len(blocks))`` right after gives blocks of
        reference count 1 back in the same order.

        Args:
            blocks: ids of used blocks.

        Raises:
            ValueError: an id is unknown, or named more often than its block has owners (a free
                block has none); no count has changed.
            TypeError: an id is not an integer.
        """
        blocks = self._known("free", "blocks", blocks)
        for block, times in Counter(blocks).items():
            owners = self._ref_counts[block]
            if times > owners:
                state = "is free already" if owners == 0 else f"has reference count {owners}"
                raise ValueError(
                    f"BlockAllocator.free: blocks must not name a block more often than owned, "
                    f"got block {block}, which {state}, named {times} times"
                )
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def __repr__(self) -> str:
        return f"BlockAllocator(num_blocks={self.num_blocks}, num_free={self.num_free})"

    def _known(self, method: str, name: str, blocks: Iterable[int]) -> list[int]:
        owner = f"BlockAllocator.{method}"
        blocks = check_integers(owner, name, blocks)
        for block in blocks:
            if not 0 <= block < len(self._ref_counts):
                raise ValueError(f"{owner}: {name} must be in [0, {len(self._ref_counts)}), got {block}")
        return blocks
