"""Which sequences begin with the same blocks, and what they have after them, in PyTorch."""

from __future__ import annotations

import torch


def split_shared_prefix(
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    num_prefix_blocks: int,
    block_size: int,
    num_tokens: int,
    causal: bool,
) -> tuple[torch.Tensor, ...]:
    """Return the prefix as one sequence (table, length, prefix sums), the rest (table, lengths), and who shares.

    Done by kernels, without a copy from the host: a CUDA graph can be captured around it.
    """
    prefix_len = num_prefix_blocks * block_size
    query_lens = 1 if cu_seqlens_q is None else cu_seqlens_q.diff()
    # A sequence's first query sees the fewest keys: the whole prefix, or the sequence goes without.
    seen = seqused_k - query_lens + 1 if causal else seqused_k
    sees_all = seen >= prefix_len
    if cu_seqlens_q is not None:
        sees_all = sees_all & (query_lens > 0)
    leader = block_table.index_select(0, sees_all.int().argmax(0, keepdim=True))[:, :num_prefix_blocks]
    shares = sees_all & (block_table[:, :num_prefix_blocks] == leader).all(1)
    one_length = sees_all.any().to(seqused_k.dtype).view(1) * prefix_len
    one_range = torch.arange(2, device=block_table.device, dtype=torch.int32) * num_tokens

    max_blocks = block_table.shape[1]
    column = torch.arange(max_blocks, device=block_table.device) + shares[:, None] * num_prefix_blocks
    table = block_table.gather(1, column.clamp(max=max_blocks - 1))
    # Past the end there is no block: a length past the table is refused, or hidden, as ever.
    table = table.masked_fill(column >= max_blocks, -1)
    lengths = seqused_k - shares.to(seqused_k.dtype) * prefix_len
    return leader.contiguous(), one_length, one_range, table, lengths, shares
