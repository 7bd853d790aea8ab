"""compute_slot_mapping, one token after the other."""

from __future__ import annotations

import torch

from torch_pagedkv.reference.value_checks import check_batch


def compute_slot_mapping(
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    check_batch(
        "compute_slot_mapping",
        block_table,
        seqused_k,
        cu_seqlens_q,
        num_tokens=num_tokens,
        block_size=block_size,
        num_blocks=None,
        window_left=0,  # only the blocks of the new tokens are read
    )
    query_starts = range(num_tokens + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()

    slots = [-1] * num_tokens
    for sequence, length in enumerate(seqused_k.tolist()):
        start, stop = query_starts[sequence : sequence + 2]
        first_position = length - (stop - start)
        for token in range(start, stop):
            position = first_position + token - start
            if position >= 0:  # a padded sequence of length 0 has nowhere to put its token
                block = int(block_table[sequence, position // block_size])
                slots[token] = block * block_size + position % block_size
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)
