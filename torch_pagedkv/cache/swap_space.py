"""Room in CPU memory for the blocks of sequences that gave up their place in the pools."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

import torch

from torch_pagedkv.cache.argument_checks import check_integer, check_pairs
from torch_pagedkv.cache.storage import PagedKVCache

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # bits are moved, never numbers


class SwapSpace:
    """Keep blocks of a cache in CPU memory, and bring them back with the same bits.

    Host block h is a place for the keys and values of one block in all layers;
    ``BlockManager(num_host_blocks=...)`` says which are free. For a cache on CUDA the memory is
    pinned, and bytes cross the bus on a stream of their own:

    - ``swap_out`` first gathers blocks into a buffer on the current stream, which then goes on: what
      is enqueued there later may overwrite the blocks;
    - ``swap_in`` makes the current stream wait for its bytes, and what was enqueued there before
      still runs beside their transfer;
    - neither makes the host wait.

    For a cache on CPU both are plain copies.

    Args:
        cache: whose blocks are swapped.
        num_blocks: host blocks, 0 or more; their memory is taken at once.
        staging_blocks: blocks of each of two device buffers, for CUDA. A swap of more than two
            buffers' blocks makes the current stream wait for a part of its own transfer: half of
            what is swapped at once lets all of it run beside compute.

    Returns:
        ``nbytes`` is the size of the host memory, num_blocks and cache are attributes.

    Raises:
        ValueError: a size is out of range.
        TypeError: a size is not an integer, or cache not a PagedKVCache.

    Example:
        >>> cache = PagedKVCache(2, 1, 4, num_blocks=3, dtype=torch.float32, device="cpu")
        >>> swap_space = SwapSpace(cache, num_blocks=2)
        >>> _ = cache.storage.normal_()
        >>> kept = cache[1][0][2].clone()
        >>> swap_space.swap_out([(2, 0)])  # block 2 to host block 0
        >>> _ = cache.storage.zero_()
        >>> swap_space.swap_in([(0, 1)])  # and back, into block 1
        >>> torch.equal(cache[1][0][1], kept)
        True

    Source: swapping as in vLLM, after PagedAttention (Kwon et al. 2023), section 4.5.
    """

    def __init__(self, cache: PagedKVCache, num_blocks: int, *, staging_blocks: int = 16) -> None:
        owner = "SwapSpace"
        if not isinstance(cache, PagedKVCache):
            raise TypeError(f"{owner}: cache must be a PagedKVCache, got {type(cache).__name__}")
        self.cache = cache
        self.num_blocks = check_integer(owner, "num_blocks", num_blocks, 0)
        self._staging_blocks = check_integer(owner, "staging_blocks", staging_blocks, 1)
        self._stream = torch.cuda.Stream(cache.device) if cache.storage.is_cuda else None
        with torch.inference_mode(False):
            rows = (self.num_blocks, cache.bytes_per_block)
            self._memory = torch.empty(rows, dtype=torch.uint8, device="cpu", pin_memory=self._stream is not None)
            buffers = [] if self._stream is None else [self._make_buffer() for _ in range(2)]
        self._buffers = itertools.cycle(buffers)

    @property
    def nbytes(self) -> int:
        """Bytes of the host memory."""
        return self.num_blocks * self.cache.bytes_per_block

    def swap_out(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks of the cache into host blocks.

        Args:
            pairs: (block, host block) of each copy, as ``BlockManager.swap_out`` returns them.

        Raises:
            ValueError: an id is out of range or a host block named twice; nothing was copied.
            TypeError: an id is not an integer.
            RuntimeError: called inside a CUDA graph capture.
        """
        pairs = self._checked("SwapSpace.swap_out", pairs, (self.cache.num_blocks, self.num_blocks))
        if self._stream is None:
            _copy_rows(self._pools(), self._parts(self._memory), pairs)
            return
        pairs.sort(key=lambda pair: pair[1])  # host blocks in a row are one copy
        current = torch.cuda.current_stream(self.cache.device)
        for ids, host_blocks in self._steps([block for block, _ in pairs], [host_block for _, host_block in pairs]):
            buffer, is_idle = next(self._buffers)
            current.wait_event(is_idle)
            for pool, staging in zip(self._pools(), self._parts(buffer)):
                torch.index_select(pool, 0, ids, out=staging[: len(ids)])
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for start, stop, host_block in _runs(host_blocks):
                    target = self._memory[host_block : host_block + stop - start]
                    target.copy_(buffer[start:stop], non_blocking=True)
                is_idle.record()

    def swap_in(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy host blocks into blocks of the cache.

        Args:
            pairs: (host block, block) of each copy, as ``BlockManager.swap_in`` returns them.

        Raises:
            ValueError: an id is out of range or a block named twice; nothing was copied.
            TypeError, RuntimeError: as ``swap_out``.
        """
        pairs = self._checked("SwapSpace.swap_in", pairs, (self.num_blocks, self.cache.num_blocks))
        if self._stream is None:
            _copy_rows(self._parts(self._memory), self._pools(), pairs)
            return
        pairs.sort()
        current = torch.cuda.current_stream(self.cache.device)
        for ids, host_blocks in self._steps([block for _, block in pairs], [host_block for host_block, _ in pairs]):
            buffer, is_idle = next(self._buffers)
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(is_idle)
                for start, stop, host_block in _runs(host_blocks):
                    source = self._memory[host_block : host_block + stop - start]
                    buffer[start:stop].copy_(source, non_blocking=True)
            current.wait_stream(self._stream)
            for pool, staging in zip(self._pools(), self._parts(buffer)):
                pool.index_copy_(0, ids, staging[: len(ids)])
            is_idle.record(current)

    def _pools(self) -> list[torch.Tensor]:
        """Return views [num_blocks, num_layers, elements of a block] of the keys and of the values."""
        cache = self.cache
        storage = cache.storage.view(_SAME_SIZE[cache.storage.element_size()])
        tokens = cache.num_layers * cache.num_blocks * cache.block_size * cache.num_kv_heads
        parts = storage.split([tokens * cache.head_dim, tokens * cache.value_head_dim])
        sizes = [cache.block_size * cache.num_kv_heads * dim for dim in (cache.head_dim, cache.value_head_dim)]
        return [p.view(cache.num_layers, cache.num_blocks, size).transpose(0, 1) for p, size in zip(parts, sizes)]

    def _parts(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return views of rows [n, bytes of a block] that have the shapes of the pools' blocks."""
        parts, start = [], 0
        for pool in self._pools():
            stop = start + pool.shape[1:].numel() * pool.element_size()
            parts.append(rows[:, start:stop].view(pool.dtype).unflatten(1, pool.shape[1:]))
            start = stop
        return parts

    def _make_buffer(self) -> tuple[torch.Tensor, torch.cuda.Event]:
        rows = (self._staging_blocks, self.cache.bytes_per_block)
        return torch.empty(rows, dtype=torch.uint8, device=self.cache.device), torch.cuda.Event()

    def _checked(self, owner: str, pairs: Iterable, limits: tuple[int, int]) -> list[tuple[int, int]]:
        pairs = check_pairs(owner, pairs, limits)
        destinations = [destination for _, destination in pairs]
        if len(set(destinations)) < len(destinations):
            twice = next(block for block in destinations if destinations.count(block) > 1)
            raise ValueError(f"{owner}: pairs must name a destination once, got {twice} more often")
        if self._stream is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{owner}: must be called outside of a CUDA graph capture, got a call inside one")
        return list(pairs)

    def _steps(self, blocks: list[int], host_blocks: list[int]) -> Iterator[tuple[torch.Tensor, list[int]]]:
        """Cut a swap into buffers' worth: the ids of blocks, on the device, and the host blocks."""
        if not blocks:
            return
        size = self._staging_blocks
        ids = torch.tensor(blocks, dtype=torch.int64, device="cpu", pin_memory=True)
        ids = ids.to(self.cache.device, non_blocking=True)
        for start, part in zip(range(0, len(blocks), size), ids.split(size)):
            yield part, host_blocks[start : start + size]


def _runs(host_blocks: list[int]) -> Iterator[tuple[int, int, int]]:
    """Cut rows where host blocks are not in a row: (first row, row behind the last, host block of the first)."""
    start = 0
    for row in range(1, len(host_blocks) + 1):
        if row == len(host_blocks) or host_blocks[row] != host_blocks[row - 1] + 1:
            yield start, row, host_blocks[start]
            start = row


def _copy_rows(sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]) -> None:
    """Copy rows of each source into its target: a block is large, and an index op would go element by element."""
    for source, target in zip(sources, targets):
        for row, target_row in pairs:
            target[target_row].copy_(source[row])
