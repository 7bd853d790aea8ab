"""compute_slot_mapping, one token after the other."""

from __future__ import annotations

import torch

from torch_pagedkv.reference.value_checks import check_lengths, check_prefix_sums, check_table_row


def compute_slot_mapping(
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    num_sequences, max_blocks = block_table.shape
    check_lengths("compute_slot_mapping", seqused_k, max_blocks * block_size)
    if cu_seqlens_q is None:
        query_starts = list(range(num_sequences + 1))
    else:
        check_prefix_sums("compute_slot_mapping", cu_seqlens_q, num_tokens)
        query_starts = cu_seqlens_q.tolist()

    slots = [-1] * num_tokens
    for sequence, length in enumerate(seqused_k.tolist()):
        start, stop = query_starts[sequence : sequence + 2]
        first_position = length - (stop - start)
        first_column = max(first_position, 0) // block_size
        if stop > start:
            used = -(-length // block_size)
            check_table_row("compute_slot_mapping", block_table, sequence, first_column, used, None)
        for token in range(start, stop):
            position = first_position + token - start
            if position >= 0:  # a padded sequence of length 0 has nowhere to put its token
                block = int(block_table[sequence, position // block_size])
                slots[token] = block * block_size + position % block_size
    return torch.tensor(slots, dtype=torch.int64, device=block_table.device)
