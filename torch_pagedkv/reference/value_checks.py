"""What only values of index tensors can show: a check raises ValueError, naming the first offender.

A call's checks run together on the tensors' device, and one answer is read back: on CUDA that waits
for the device once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

INT64_MAX = torch.iinfo(torch.int64).max


class Check(NamedTuple):
    """Which elements offend, and the sentence about one of them, named by its flat index."""

    offends: torch.Tensor
    sentence: Callable[[int], str]


def raise_first(op: str, *checks: Check) -> None:
    """Raise the sentence of the first check that any element offends."""
    answers = torch.stack([check.offends.any() for check in checks]).tolist()
    for check, found in zip(checks, answers, strict=True):
        if found:
            first = int(check.offends.reshape(-1).to(torch.uint8).argmax())
            raise ValueError(f"{op}: {check.sentence(first)}")


def check_slots(op: str, slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Refuse a slot at or past the end of the pool; negative slots are legal and mean none."""

    def sentence(index: int) -> str:
        return (
            f"slot_mapping must be below num_blocks * block_size = {num_slots}, "
            f"got {int(slot_mapping[index])} at index {index}"
        )

    raise_first(op, Check(slot_mapping.long() >= num_slots, sentence))


def check_batch(
    op: str,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    *,
    num_tokens: int,
    block_size: int,
    num_blocks: int | None,
    window_left: int,
) -> None:
    """Refuse lengths and prefix sums out of range, and table entries in use that name nothing.

    In use are the columns of a sequence that has queries, up to its length, without those wholly
    before the window of its first query. num_blocks None: the pool's size is unknown.
    """
    max_blocks = block_table.shape[1]
    lengths = seqused_k.long()
    checks = [_lengths(lengths, max_blocks * block_size)]
    if cu_seqlens_q is None:
        query_lens = torch.ones_like(lengths)
    else:
        sums = cu_seqlens_q.long()
        checks += _prefix_sums(sums, num_tokens)
        query_lens = sums[1:] - sums[:-1]
    # With lengths that were refused above these are meaningless, and not asked for.
    first = torch.zeros_like(lengths)
    if window_left >= 0:
        reach = min(window_left, max_blocks * block_size + num_tokens)
        first = (lengths - query_lens - reach).clamp(min=0) // block_size
    stop = torch.where(query_lens > 0, -(-lengths // block_size), 0)
    checks.append(_entries(block_table, first, stop, block_size, num_blocks))
    raise_first(op, *checks)


def _lengths(lengths: torch.Tensor, capacity: int) -> Check:
    def sentence(index: int) -> str:
        return (
            f"seqused_k must be in [0, max_blocks * block_size = {capacity}], "
            f"got {int(lengths[index])} at index {index}"
        )

    return Check((lengths < 0) | (lengths > capacity), sentence)


def _prefix_sums(sums: torch.Tensor, num_tokens: int) -> list[Check]:
    last = sums.shape[0] - 1

    def start(_: int) -> str:
        return f"cu_seqlens_q must start at 0, got {int(sums[0])} at index 0"

    def fall(index: int) -> str:
        return f"cu_seqlens_q must not fall, got {int(sums[index + 1])} after {int(sums[index])} at index {index + 1}"

    def end(_: int) -> str:
        return (
            f"cu_seqlens_q must end at or below the number of tokens {num_tokens}, "
            f"got {int(sums[last])} at index {last}"
        )

    return [
        Check(sums[:1] != 0, start),
        Check(sums[1:] < sums[:-1], fall),
        Check(sums[last:] > num_tokens, end),
    ]


def _entries(
    block_table: torch.Tensor,
    first: torch.Tensor,
    stop: torch.Tensor,
    block_size: int,
    num_blocks: int | None,
) -> Check:
    """Check columns [first, stop) of each row."""
    max_blocks = block_table.shape[1]
    column = torch.arange(max_blocks, device=block_table.device)
    in_use = (column >= first[:, None]) & (column < stop[:, None])
    # Where the pool's size is unknown, slots must at least be numbers.
    limit = INT64_MAX // block_size if num_blocks is None else num_blocks
    table = block_table.long()

    def sentence(index: int) -> str:
        row, column = divmod(index, max_blocks)
        block = int(table[row, column])
        expectation = f"be in [0, num_blocks = {num_blocks}) where it is used"
        if num_blocks is None:
            expectation = "not be negative where it is used"
            if block >= 0:
                expectation = "name blocks whose slots fit in int64"
        return f"block_table must {expectation}, got {block} at [{row}, {column}]"

    return Check(in_use & ((table < 0) | (table >= limit)), sentence)


def check_block_copies(op: str, src_blocks: torch.Tensor, dst_blocks: torch.Tensor, num_blocks: int) -> None:
    """Refuse ids outside the pool, a destination named twice, and a block on both sides."""
    if src_blocks.shape[0] == 0:
        return
    sources, destinations = src_blocks.long(), dst_blocks.long()
    ids = [
        _block_ids(name, blocks, num_blocks) for name, blocks in (("src_blocks", sources), ("dst_blocks", destinations))
    ]
    ascending, order = destinations.sort(stable=True)
    repeated = torch.zeros_like(destinations, dtype=torch.bool)
    repeated[order[1:]] = ascending[1:] == ascending[:-1]
    known = sources.sort().values
    nearest = torch.searchsorted(known, destinations.contiguous()).clamp(max=known.shape[0] - 1)
    is_source = known[nearest] == destinations

    def sentence(index: int) -> str:
        other = "src_blocks" if is_source[index] else "dst_blocks before"
        return (
            "dst_blocks must name each block once and none of src_blocks, "
            f"got {int(destinations[index])} at index {index}, which is in {other}"
        )

    raise_first(op, *ids, Check(is_source | repeated, sentence))


def _block_ids(name: str, blocks: torch.Tensor, num_blocks: int) -> Check:
    def sentence(index: int) -> str:
        return f"{name} must be in [0, num_blocks = {num_blocks}), got {int(blocks[index])} at index {index}"

    return Check((blocks < 0) | (blocks >= num_blocks), sentence)
