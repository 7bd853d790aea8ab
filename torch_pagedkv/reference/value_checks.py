"""What only the values of index tensors can show: each check raises ValueError naming the first offender.

Reading values of a CUDA tensor waits for the device.
"""

from __future__ import annotations

import torch


def _first(offends: torch.Tensor) -> int:
    return int(offends.reshape(-1).to(torch.uint8).argmax())


def check_slots(op: str, slot_mapping: torch.Tensor, num_slots: int) -> None:
    """Refuse a slot at or past the end of the pool; negative slots are legal and mean none."""
    offends = slot_mapping >= num_slots
    if offends.any():
        index = _first(offends)
        raise ValueError(
            f"{op}: slot_mapping must be below num_blocks * block_size = {num_slots}, "
            f"got {int(slot_mapping[index])} at index {index}"
        )


def check_lengths(op: str, seqused_k: torch.Tensor, capacity: int) -> None:
    """Refuse a length that is negative or longer than a row of the block table can address."""
    offends = (seqused_k < 0) | (seqused_k > capacity)
    if offends.any():
        index = _first(offends)
        raise ValueError(
            f"{op}: seqused_k must be in [0, max_blocks * block_size = {capacity}], "
            f"got {int(seqused_k[index])} at index {index}"
        )


def check_prefix_sums(op: str, cu_seqlens_q: torch.Tensor, num_tokens: int) -> None:
    """Refuse prefix sums that do not start at 0, that fall, or that pass the number of tokens."""
    sums = cu_seqlens_q.tolist()
    if sums[0] != 0:
        raise ValueError(f"{op}: cu_seqlens_q must start at 0, got {sums[0]} at index 0")
    for index in range(1, len(sums)):
        if sums[index] < sums[index - 1]:
            raise ValueError(
                f"{op}: cu_seqlens_q must not fall, "
                f"got {sums[index]} after {sums[index - 1]} at index {index}"
            )
    if sums[-1] > num_tokens:
        raise ValueError(
            f"{op}: cu_seqlens_q must end at or below the number of tokens {num_tokens}, "
            f"got {sums[-1]} at index {len(sums) - 1}"
        )


def check_table_row(
    op: str, block_table: torch.Tensor, row: int, first: int, stop: int, num_blocks: int | None
) -> None:
    """Refuse an id outside the pool in columns [first, stop) of a row; None: only negative ids."""
    used = block_table[row, first:stop]
    offends = used < 0 if num_blocks is None else (used < 0) | (used >= num_blocks)
    if offends.any():
        index = _first(offends)
        expectation = "not be negative" if num_blocks is None else f"be in [0, num_blocks = {num_blocks})"
        raise ValueError(
            f"{op}: block_table must {expectation} where it is used, "
            f"got {int(used[index])} at [{row}, {first + index}]"
        )


def check_block_copies(
    op: str, src_blocks: torch.Tensor, dst_blocks: torch.Tensor, num_blocks: int
) -> None:
    """Refuse ids outside the pool, a destination named twice, and a block on both sides."""
    for name, blocks in (("src_blocks", src_blocks), ("dst_blocks", dst_blocks)):
        offends = (blocks < 0) | (blocks >= num_blocks)
        if offends.any():
            index = _first(offends)
            raise ValueError(
                f"{op}: {name} must be in [0, num_blocks = {num_blocks}), "
                f"got {int(blocks[index])} at index {index}"
            )
    sources = set(src_blocks.tolist())
    seen: set[int] = set()
    for index, block in enumerate(dst_blocks.tolist()):
        if block in sources or block in seen:
            other = "src_blocks" if block in sources else "dst_blocks before"
            raise ValueError(
                f"{op}: dst_blocks must name each block once and none of src_blocks, "
                f"got {block} at index {index}, which is in {other}"
            )
        seen.add(block)
