"""check: find what does not fit together in a batch, and say each in a sentence."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from torch_pagedkv.cache.addressing import blocks_for
from torch_pagedkv.cache.allocator import BlockAllocator
from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.cache.batch import PagedBatch

_OWNER = "check"


class _Values(NamedTuple):
    """A batch's tensors as lists."""

    tables: list[list[int]]
    lengths: list[int]
    starts: list[int]  # first row of each sequence, and where the last one stops
    slots: list[int]


def check(
    batch: PagedBatch,
    allocator: BlockAllocator | None = None,
    *,
    block_size: int,
    num_blocks: int | None = None,
) -> list[str]:
    """Return what does not fit together in a batch, a sentence for each; an empty list is a sound batch.

    New token i of sequence s stands at position ``p = i + seqused_k[s] - query_len`` and belongs
    into the slot ``block_table[s, p // block_size] * block_size + p % block_size``. Told are:
    lengths and prefix sums that are no such; lengths past the table; table entries in use outside
    of the pool, named twice in one sequence, free, or named by more sequences than the allocator
    counts owners; new tokens in a block that another sequence names too; slots that disagree with
    the tables, lie outside of the pool, or repeat; rows past the last sequence that have a slot.

    Args:
        batch: the batch, on any device: reading it waits for the device. It is not changed.
        allocator: who owns which block, or None.
        block_size: tokens in a block.
        num_blocks: blocks of the pool; None: the allocator's, or unlimited without one.

    Returns:
        A list of sentences, in the order of sequences and then of tokens.

    Raises:
        ValueError: a number is out of range, or the batch's tensors do not fit each other's shapes.
        TypeError: an argument is of another kind.

    Not checked:
        What the pool holds.

    Example:
        >>> from torch_pagedkv import PagedBatch, inspect
        >>> batch = PagedBatch.from_sequences([[7, 2, 9]], seq_lens=[21], block_size=16)
        >>> inspect.check(batch, block_size=16, num_blocks=10)
        []
        >>> batch.slot_mapping[0] = 40
        >>> inspect.check(batch, block_size=16, num_blocks=10)
        ['slot 40 of token 0 disagrees with the table: position 20 of sequence 0 belongs into slot 36']

    Source: ours.
    """
    if not isinstance(batch, PagedBatch):
        raise TypeError(f"{_OWNER}: batch must be a PagedBatch, got {type(batch).__name__}")
    if allocator is not None and not isinstance(allocator, BlockAllocator):
        raise TypeError(f"{_OWNER}: allocator must be a BlockAllocator or None, got {type(allocator).__name__}")
    block_size = check_integer(_OWNER, "block_size", block_size, 1)
    if num_blocks is not None:
        num_blocks = check_integer(_OWNER, "num_blocks", num_blocks, 0)
    elif allocator is not None:
        num_blocks = allocator.num_blocks
    values = _read(batch)
    unsound = list(_lengths(values, block_size, len(values.slots)))
    if unsound:  # positions would mean nothing
        return unsound
    used = [table[: blocks_for(length, block_size)] for table, length in zip(values.tables, values.lengths)]
    return [
        *_entries(used, num_blocks),
        *_owners(values, used, block_size, allocator),
        *_slots(values, block_size, num_blocks),
    ]


def _read(batch: PagedBatch) -> _Values:
    table, lengths, sums, slots = batch.block_table, batch.seqused_k, batch.cu_seqlens_q, batch.slot_mapping
    shapes = {"block_table": (table, 2), "seqused_k": (lengths, 1), "slot_mapping": (slots, 1)}
    if sums is not None:
        shapes["cu_seqlens_q"] = (sums, 1)
    for name, (tensor, rank) in shapes.items():
        if tensor.dim() != rank or tensor.dtype.is_floating_point:
            raise ValueError(
                f"{_OWNER}: {name} must hold integers in {rank} dimensions, got {tensor.dtype} of {list(tensor.shape)}"
            )
    num_sequences = table.shape[0]
    sizes = {"seqused_k": (lengths, num_sequences)}
    if sums is None:
        sizes["slot_mapping"] = (slots, num_sequences)
    else:
        sizes["cu_seqlens_q"] = (sums, num_sequences + 1)
    for name, (tensor, size) in sizes.items():
        if tensor.shape[0] != size:
            raise ValueError(f"{_OWNER}: {name} must have {size} elements, got {tensor.shape[0]}")
    starts = list(range(num_sequences + 1)) if sums is None else sums.tolist()
    return _Values(table.tolist(), lengths.tolist(), starts, slots.tolist())


def _lengths(values: _Values, block_size: int, num_tokens: int) -> Iterable[str]:
    starts = values.starts
    if starts[0] != 0:
        yield f"cu_seqlens_q starts at {starts[0]}, not at 0"
    if starts[-1] > num_tokens:
        yield f"cu_seqlens_q ends at {starts[-1]}, past the batch's {num_tokens} tokens"
    is_decode = starts == list(range(len(starts)))
    for i, (table, length) in enumerate(zip(values.tables, values.lengths)):
        query_len = starts[i + 1] - starts[i]
        if query_len < 0:
            yield f"cu_seqlens_q falls from {starts[i]} to {starts[i + 1]} at sequence {i}"
        if length < 0:
            yield f"sequence {i} has a negative length, {length}"
        elif length > len(table) * block_size:
            yield f"sequence {i} has {length} tokens, past its table's {len(table)} blocks of {block_size}"
        elif query_len > length and not (is_decode and length == 0):
            yield f"sequence {i} has {query_len} new tokens, more than its length {length} that includes them"


def _entries(used: list[list[int]], num_blocks: int | None) -> Iterable[str]:
    for i, blocks in enumerate(used):
        for column, block in enumerate(blocks):
            if num_blocks is not None and block >= num_blocks:
                yield f"sequence {i} names block {block} at {column}, outside of the pool's {num_blocks} blocks"
        for block, times in Counter(block for block in blocks if block >= 0).items():
            if times > 1:
                yield f"sequence {i} names block {block} {times} times: its tokens would overwrite each other"


def _owners(values: _Values, used: list[list[int]], block_size: int, allocator: BlockAllocator | None) -> Iterable[str]:
    sharers = defaultdict(list)
    for i, blocks in enumerate(used):
        for block in dict.fromkeys(block for block in blocks if block >= 0):
            sharers[block].append(i)
    for block, sequences in sharers.items():
        if allocator is None or block >= allocator.num_blocks:
            continue
        owners, names = allocator.ref_count(block), _listed("sequence", sequences)
        if owners == 0:
            yield f"block {block} is free, and {names} {'names' if len(sequences) == 1 else 'name'} it"
        elif owners < len(sequences):
            yield f"block {block} is not shared by so many: {names} name it, and its owners are {owners}"
    for i, (blocks, length) in enumerate(zip(used, values.lengths)):
        query_len = min(values.starts[i + 1] - values.starts[i], length)
        first = (length - query_len) // block_size if query_len else len(blocks)
        for block in dict.fromkeys(block for block in blocks[first:] if block >= 0):
            others = [other for other in sharers[block] if other != i]
            counted = 1 if allocator is None or block >= allocator.num_blocks else allocator.ref_count(block)
            if others:
                yield (
                    f"sequence {i} writes into block {block}, which {_listed('sequence', others)} "
                    f"{'names' if len(others) == 1 else 'name'} too: copy it first"
                )
            elif counted > 1:
                yield f"sequence {i} writes into block {block}, which has {counted} owners: copy it first"


def _slots(values: _Values, block_size: int, num_blocks: int | None) -> Iterable[str]:
    first_with: dict[int, int] = {}
    sequence = 0
    for token, slot in enumerate(values.slots):
        while sequence < len(values.lengths) and token >= values.starts[sequence + 1]:
            sequence += 1
        if num_blocks is not None and slot >= num_blocks * block_size:
            yield f"slot {slot} of token {token} lies outside of the pool's {num_blocks * block_size} slots"
        elif sequence == len(values.lengths) or values.lengths[sequence] == 0:
            if slot >= 0:
                yield f"slot {slot} of token {token} is a padding row's, which should have none (-1)"
        else:
            position = values.lengths[sequence] - values.starts[sequence + 1] + token
            block = values.tables[sequence][position // block_size]
            where = f"position {position} of sequence {sequence}"
            if block < 0:
                yield f"{where} is new, and its table names no block there ({block})"
            elif slot < 0:
                yield f"slot {slot} of token {token} stores nothing: {where} would stay unwritten"
            elif slot != block * block_size + position % block_size:
                right = block * block_size + position % block_size
                yield f"slot {slot} of token {token} disagrees with the table: {where} belongs into slot {right}"
        if slot >= 0 and first_with.setdefault(slot, token) != token:
            yield f"slot {slot} is given twice, to tokens {first_with[slot]} and {token}"


def _listed(what: str, numbers: list[int]) -> str:
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
