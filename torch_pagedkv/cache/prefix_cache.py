"""Full blocks found again by the tokens they hold, and kept until their place is needed. No torch here."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from weakref import WeakValueDictionary

from torch_pagedkv.cache.allocator import BlockAllocator, OutOfBlocks


class Prefix:
    """All tokens from a sequence's start to the end of one full block; equal prefixes are one object.

    Attributes:
        parent: the prefix that ends one block earlier; None: this one is empty.
        block: the block that holds its last tokens' keys and values, or None.
        version: a number that no other registration of a block has; None without a block.
    """

    # The parent's slot outlives the index's key, so a long chain dies from its end, one at a time.
    __slots__ = ("__weakref__", "block", "parent", "version")

    def __init__(self, parent: Prefix | None) -> None:
        self.parent = parent
        self.block: int | None = None
        self.version: int | None = None


class PrefixCache:
    """Remember which full blocks hold which tokens, and lend them to sequences that start alike.

    A block is found by the chain of tokens up to its end: the index is a hash table with the key
    (prefix before the block, tokens of the block), and the chain starts with ``extra_key``, so that
    the same tokens under another adapter are another prefix. A hash only says where to look; the
    tokens are compared, and because equal prefixes are one object, comparing all that came before
    is comparing one pointer. Hashes that collide, by chance or by design, cost time and change
    nothing.

    Invariants, before and after every call:

    - a prefix has at most one registered block, a block is registered for at most one prefix;
    - the cache is one more owner of each registered block, so it counts in ``ref_count``;
    - a registered block without another owner is idle, and only idle blocks are evicted: first the
      one that was let go longest ago, and of a sequence its later blocks before its earlier ones;
    - registered blocks are full, and nobody writes to them.

    Owners let go of blocks through ``release``, or the cache would not learn that they are idle.

    Args:
        allocator: whose blocks these are.
        block_size: tokens in a block.

    Source: automatic prefix caching by block hashes as in vLLM, the tree of tokens as in SGLang's
    RadixAttention (Zheng et al. 2024).
    """

    def __init__(self, allocator: BlockAllocator, block_size: int) -> None:
        self._allocator = allocator
        self._block_size = block_size
        self._index: WeakValueDictionary[tuple, Prefix] = WeakValueDictionary()
        self._registered: dict[int, Prefix] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to be evicted first
        self._versions = itertools.count()

    @property
    def num_idle(self) -> int:
        """Blocks that hold a prefix which no sequence uses: found again until they are evicted."""
        return len(self._idle)

    def root(self, extra_key: Hashable) -> Prefix:
        """Return the empty prefix of an extra key."""
        return self.extend(None, (extra_key,))

    def extend(self, parent: Prefix | None, tokens: tuple) -> Prefix:
        """Return the prefix that continues a prefix by one block of tokens."""
        key = (parent, tokens)
        prefix = self._index.get(key)
        if prefix is None:
            self._index[key] = prefix = Prefix(parent)
        return prefix

    def match(self, root: Prefix, tokens: list[int], max_blocks: int, sliding_window: int | None) -> list[Prefix]:
        """Return the prefixes of the most leading blocks, at most max_blocks, that need no computing.

        Of these blocks only those must be there that the token after them can see.
        """
        size, chain, num_usable, run = self._block_size, [], 0, 0
        prefix = root
        for i in range(max_blocks):
            prefix = self._index.get((prefix, tuple(tokens[i * size : (i + 1) * size])))
            if prefix is None:
                break
            chain.append(prefix)
            run = 0 if prefix.block is None else run + 1
            if run >= i + 1 - num_out_of_sight((i + 1) * size, size, sliding_window):
                num_usable = i + 1
        return chain[:num_usable]

    def register(self, prefix: Prefix, block: int) -> None:
        """Let a full block be found by its prefix, unless another block is already."""
        if prefix.block is None:
            self._allocator.share([block])
            self._registered[block] = prefix
            prefix.block, prefix.version = block, next(self._versions)

    def hold(self, blocks: Sequence[int]) -> None:
        """Add an owner to blocks in use or idle."""
        self._allocator.share(blocks)
        for block in blocks:
            self._idle.pop(block, None)

    def release(self, blocks: Iterable[int]) -> None:
        """Take an owner away from the blocks of a sequence, given in the sequence's order."""
        blocks = list(blocks)
        self._allocator.free(blocks)
        for block in reversed(blocks):
            if block in self._registered and self._allocator.ref_count(block) == 1:
                self._idle[block] = None

    def allocate(self, n: int, owner: str, keep: Sequence[int] = ()) -> list[int]:
        """Take n blocks, evicting idle ones as far as free ones do not suffice, and hold those to keep.

        Raises:
            OutOfBlocks: n blocks can not be had beside those to keep; nothing has changed.
        """
        available = self._allocator.num_free + len(self._idle) - sum(block in self._idle for block in keep)
        if n > available:
            sentence = (
                f"{owner}: sequence must need <= {{free}} available blocks of num_blocks = {{total}}, got {{requested}}"
            )
            raise OutOfBlocks(n, available, self._allocator.num_blocks, sentence)
        self.hold(keep)
        while self._allocator.num_free < n:
            block, _ = self._idle.popitem(last=False)
            prefix = self._registered.pop(block)
            prefix.block = prefix.version = None
            self._allocator.free([block])
        return self._allocator.allocate(n)


def num_out_of_sight(position: int, block_size: int, sliding_window: int | None) -> int:
    """Return how many leading blocks the token at a position, and those after it, never see."""
    if sliding_window is None:
        return 0
    return max(position - sliding_window + 1, 0) // block_size
