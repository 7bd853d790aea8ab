"""Sequences that share blocks: prefixes, forks, copies on write, windows, preemption. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from torch_pagedkv.cache.addressing import NO_BLOCK, blocks_for
from torch_pagedkv.cache.allocator import BlockAllocator, OutOfBlocks
from torch_pagedkv.cache.argument_checks import check_integer, check_integers
from torch_pagedkv.cache.prefix_cache import PrefixCache, num_out_of_sight
from torch_pagedkv.cache.sequences import LiveSequences, Sequence


class BlockManager:
    """Keep the block tables of sequences that share blocks, and say which copies that takes.

    Token p of a sequence is at slot ``block_table(s)[p // block_size] * block_size + p % block_size``.
    A sequence lives from ``add`` or ``fork`` to ``free``, and a step of it has three parts:
    ``reserve`` makes room for its next tokens, the model writes their keys and values, ``commit``
    says which tokens they were. What ``reserve``, ``swap_out`` and ``swap_in`` return is to be
    copied, in that order, before anything else is written: by ``PagedKVCache.copy_blocks``,
    ``SwapSpace.swap_out`` and ``SwapSpace.swap_in``.

    - Prefix caching: full blocks are found again by their tokens (and ``extra_key``), also after
      their sequence has ended, until their place is needed: those unused for longest go first.
      ``add`` starts a sequence with every leading block that is there.
    - A fork shares all blocks. Who writes next into a last block that is shared and not full gets a
      copy of it.
    - A sliding window of W tokens releases blocks as soon as no later token can see them.
    - Preemption: ``swap_out`` and ``swap_in`` move a sequence to the host and back with the same
      bits; or ``free`` it and ``add`` its tokens again, which computes again what was evicted.

    Invariants, before and after every call, one that raises included:

    - a block's reference count is the number of tables that name it, one more if prefix caching
      can find it;
    - a block with room for a reserved token is in one table only;
    - what a sequence sees never changes: not by what others write, copy, free or evict;
    - ``num_free + num_cached`` blocks are in no table, and ``num_available`` is their sum;
    - a call does all of what it was asked for or, raising, nothing.

    It knows ids only: no tensor, no contents. It takes no lock: one thread at a time.

    Args:
        num_blocks: blocks of the pools, 0 or more.
        block_size: tokens in a block.
        num_host_blocks: blocks of the swap space; 0: nothing can be swapped out.
        sliding_window: tokens that a query sees, itself included, in the layer that sees most;
            None: all.
        prefix_caching: False: blocks are never found again; forks still share.

    Raises:
        ValueError: a size is out of range.
        TypeError: a size is not an integer.

    Example:
        >>> manager = BlockManager(num_blocks=8, block_size=4)
        >>> first = manager.add([1, 2, 3, 4, 5, 6])
        >>> manager.reserve(first, 6)  # nothing to copy
        []
        >>> manager.block_table(first)
        [0, 1]
        >>> manager.commit(first, [1, 2, 3, 4, 5, 6])  # after the model stored them
        >>> second = manager.add([1, 2, 3, 4, 9])  # starts with the same full block
        >>> manager.block_table(second), manager.num_stored(second)
        ([0], 4)
        >>> third = manager.fork(first)
        >>> manager.reserve(third, 1)  # block 1 is shared and half full: copy it to 2
        [(1, 2)]
        >>> manager.block_table(first), manager.block_table(third)
        ([0, 1], [0, 2])

    Source: the block manager of PagedAttention (Kwon et al. 2023), section 4; prefix caching as in
    vLLM.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_host_blocks: int = 0,
        sliding_window: int | None = None,
        prefix_caching: bool = True,
    ) -> None:
        owner = "BlockManager"
        self.block_size = check_integer(owner, "block_size", block_size, 1)
        self._window = None if sliding_window is None else check_integer(owner, "sliding_window", sliding_window, 1)
        self._prefix_caching = bool(prefix_caching)
        self.num_blocks = check_integer(owner, "num_blocks", num_blocks, 0)
        self._allocator = BlockAllocator(self.num_blocks)
        self._host = BlockAllocator(check_integer(owner, "num_host_blocks", num_host_blocks, 0))
        self._cache = PrefixCache(self._allocator, self.block_size)
        self._sequences = LiveSequences(owner)

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing of use."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that no sequence uses and prefix caching can find, until they are evicted."""
        return self._cache.num_idle

    @property
    def num_available(self) -> int:
        """Blocks that sequences can have: free ones and those that would be evicted."""
        return self._allocator.num_free + self._cache.num_idle

    @property
    def num_host_free(self) -> int:
        """Blocks of the swap space that hold nothing."""
        return self._host.num_free

    def ref_count(self, block: int) -> int:
        """Return the number of tables that name a block, one more if prefix caching can find it."""
        return self._allocator.ref_count(block)

    def block_table(self, sequence: int) -> list[int]:
        """Return a sequence's blocks, a new list; -1 where the window has released one."""
        return self._sequences.in_pool("block_table", sequence).table.copy()

    def num_stored(self, sequence: int) -> int:
        """Return how many tokens of a sequence are stored: committed, or found by ``add``."""
        return self._sequences.alive("num_stored", sequence).num_stored

    def is_swapped_out(self, sequence: int) -> bool:
        """Say whether a sequence is in the swap space."""
        return self._sequences.alive("is_swapped_out", sequence).versions is not None

    def add(self, token_ids: Iterable[int], extra_key: Hashable = None) -> int:
        """Start a sequence with the longest prefix of its tokens that is stored already.

        Only full blocks are found, and never the last token: what comes after it is only known once
        the model has seen it. The tokens after ``num_stored(sequence)`` are to be stored next.

        Args:
            token_ids: the tokens that are known. They serve to find blocks, and need not be what is
                committed later.
            extra_key: what else the keys and values depend on, such as an adapter's name; only
                prefixes with an equal one are found. An image can instead have ids of its own,
                taken from its digest, in place of its placeholders: then what stands before it is
                shared.

        Returns:
            The sequence's id, never given out before.

        Raises:
            TypeError: a token is not an integer, or extra_key can not be hashed.
        """
        tokens = check_integers("BlockManager.add", "token_ids", token_ids)
        try:
            hash(extra_key)
        except TypeError:
            raise TypeError(f"BlockManager.add: extra_key must be hashable, got {extra_key!r}") from None
        root, chain = self._cache.root(extra_key), []
        if self._prefix_caching:
            max_blocks = max(len(tokens) - 1, 0) // self.block_size
            chain = self._cache.match(root, tokens, max_blocks, self._window)
        num_stored = len(chain) * self.block_size
        unseen = num_out_of_sight(num_stored, self.block_size, self._window)
        table = [NO_BLOCK] * unseen + [prefix.block for prefix in chain[unseen:]]
        self._cache.hold(table[unseen:])
        return self._sequences.start(Sequence([root, *chain], table, num_stored, [], num_released=unseen))

    def fork(self, sequence: int) -> int:
        """Start a sequence with all that another one has stored, sharing its blocks.

        Returns:
            The new sequence's id.

        Raises:
            ValueError: the sequence was freed or never added, is swapped out or has a reservation.
            TypeError: sequence is not an integer.
        """
        parent = self._sequences.in_pool("fork", sequence)
        if parent.num_reserved:
            raise ValueError(
                f"BlockManager.fork: sequence must have no reserved tokens, got {sequence}, which has "
                f"{parent.num_reserved}: commit them before, or reserve 0"
            )
        child = parent.fork(blocks_for(parent.num_stored, self.block_size))
        self._cache.hold(child.table[child.num_released :])
        return self._sequences.start(child)

    def reserve(self, sequence: int, num_tokens: int) -> list[tuple[int, int]]:
        """Make room for the next num_tokens of a sequence, in blocks of its own.

        A new reservation takes the place of the one before; its blocks stay with the sequence.

        Args:
            sequence: a sequence in the pool.
            num_tokens: tokens that the next ``commit`` may name, 0 or more.

        Returns:
            Copies (source, destination) to make before the tokens are written: none, or the one of
            a last block that others use too.

        Raises:
            OutOfBlocks: it takes more than num_available blocks.
            ValueError, TypeError: as ``fork``, or num_tokens is negative or not an integer.
        """
        owner = "BlockManager.reserve"
        state = self._sequences.in_pool("reserve", sequence)
        num_tokens = check_integer(owner, "num_tokens", num_tokens, 0)
        needed = max(-(-(state.num_stored + num_tokens) // self.block_size) - len(state.table), 0)
        last, used = divmod(state.num_stored, self.block_size)
        is_shared = num_tokens > 0 and used > 0 and self._allocator.ref_count(state.table[last]) > 1
        copies = []
        if needed or is_shared:  # seldom in decoding
            blocks = self._cache.allocate(needed + is_shared, owner)
            if is_shared:
                copies.append((state.table[last], blocks.pop(0)))
                self._cache.release([state.table[last]])
                state.table[last] = copies[0][1]
            state.table += blocks
        state.num_reserved = num_tokens
        return copies

    def commit(self, sequence: int, token_ids: Iterable[int]) -> None:
        """Say which tokens were stored in the room that was reserved; the reservation ends.

        Blocks that are full now can be found by later sequences, and blocks that the window has
        left behind are released.

        Args:
            sequence: a sequence in the pool.
            token_ids: the tokens in their order, at most as many as were reserved. Fewer: what was
                written after them is not part of the sequence.

        Raises:
            ValueError: more tokens than reserved, or as ``fork``.
            TypeError: a token is not an integer.
        """
        owner = "BlockManager.commit"
        state = self._sequences.in_pool("commit", sequence)
        tokens = check_integers(owner, "token_ids", token_ids)
        if len(tokens) > state.num_reserved:
            raise ValueError(
                f"{owner}: token_ids must have at most the {state.num_reserved} tokens that were "
                f"reserved, got {len(tokens)}"
            )
        state.num_stored += len(tokens)
        state.num_reserved = 0
        if self._prefix_caching:
            self._register(state, tokens)
        unseen = num_out_of_sight(state.num_stored, self.block_size, self._window)
        if unseen > state.num_released:
            self._cache.release(state.table[state.num_released : unseen])
            state.table[state.num_released : unseen] = [NO_BLOCK] * (unseen - state.num_released)
            state.num_released = unseen

    def free(self, sequence: int) -> None:
        """End a sequence, in the pool or swapped out; blocks without another owner become available.

        Raises:
            ValueError: the sequence was freed already or never added.
            TypeError: sequence is not an integer.
        """
        state = self._sequences.alive("free", sequence)
        self._sequences.end(sequence)
        held = state.table[state.num_released :]
        if state.versions is None:
            self._cache.release(held)
        else:
            self._host.free(held)

    def swap_out(self, sequence: int) -> list[tuple[int, int]]:
        """Move a sequence's stored tokens to the swap space, and let go of its blocks.

        Blocks that others share are copied as well: nothing in the pool waits for a sequence that
        is swapped out. A reservation ends.

        Returns:
            Copies (block, host block) for ``SwapSpace.swap_out``, to make before anything is written.

        Raises:
            OutOfBlocks: more blocks than num_host_free.
            ValueError, TypeError: as ``fork``; a reservation is no obstacle.
        """
        state = self._sequences.in_pool("swap_out", sequence)
        kept = state.table[state.num_released : blocks_for(state.num_stored, self.block_size)]
        if len(kept) > self._host.num_free:
            sentence = (
                "BlockManager.swap_out: sequence must need <= {free} free host blocks "
                "of num_host_blocks = {total}, got {requested}"
            )
            raise OutOfBlocks(len(kept), self._host.num_free, self._host.num_blocks, sentence)
        full = state.prefixes[1 + state.num_released :]
        state.versions = [p.version if p.block == b else None for p, b in zip(full, kept)]
        host_blocks = self._host.allocate(len(kept))
        self._cache.release(state.table[state.num_released :])
        state.table[state.num_released :] = host_blocks
        state.num_reserved = 0
        return list(zip(kept, host_blocks))

    def swap_in(self, sequence: int) -> list[tuple[int, int]]:
        """Bring a sequence back into the pool.

        Blocks that prefix caching still holds, unchanged since ``swap_out``, are taken up again.

        Returns:
            Copies (host block, block) for ``SwapSpace.swap_in``, to make before anything is swapped
            out or written.

        Raises:
            OutOfBlocks: it takes more than num_available blocks.
            ValueError: the sequence was freed or never added, or is in the pool.
            TypeError: sequence is not an integer.
        """
        owner = "BlockManager.swap_in"
        state = self._sequences.alive("swap_in", sequence)
        if state.versions is None:
            raise ValueError(f"{owner}: sequence must be swapped out, got {sequence}, which is in the pool")
        first, host_blocks = state.num_released, state.table[state.num_released :]
        full = state.prefixes[1 + first :]
        kept = {
            i: prefix.block
            for i, (prefix, version) in enumerate(zip(full, state.versions))
            if version is not None and prefix.version == version
        }
        needed = len(host_blocks) - len(kept)
        new = iter(self._cache.allocate(needed, owner, keep=list(kept.values())))
        blocks = [kept[i] if i in kept else next(new) for i in range(len(host_blocks))]
        if self._prefix_caching:
            for prefix, block in zip(full, blocks):
                self._cache.register(prefix, block)
        self._host.free(host_blocks)
        state.table[first:] = blocks
        state.versions = None
        return [(host, block) for i, (host, block) in enumerate(zip(host_blocks, blocks)) if i not in kept]

    def __repr__(self) -> str:
        return (
            f"BlockManager(num_blocks={self.num_blocks}, block_size={self.block_size}, num_free={self.num_free}, "
            f"num_cached={self.num_cached}, num_sequences={len(self._sequences)})"
        )

    def _register(self, state: Sequence, tokens: list[int]) -> None:
        size, tail = self.block_size, state.tail + tokens  # a new list: forks have the old one
        for start in range(0, len(tail) - size + 1, size):
            prefix = self._cache.extend(state.prefixes[-1], tuple(tail[start : start + size]))
            self._cache.register(prefix, state.table[len(state.prefixes) - 1])
            state.prefixes.append(prefix)
        state.tail = tail[len(tail) // size * size :]
