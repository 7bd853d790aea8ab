"""Context parallelism: the blocks of every sequence dealt out to the ranks of a mesh.

Logical block b of a sequence lives on rank ``b % n``, where it is the rank's own logical block
``b // n``. Each rank has a pool and an allocator of its own, keeps its own block tables, writes the
tokens that fall into its blocks, and attends to these alone; outputs and their log-sum-exps are then
gathered in one collective and merged. Ranks fill evenly as sequences grow, and a sequence may be n times
as long as one pool holds.

Every query row sees the keys up to its own position. On a rank these are a prefix of what it holds of
the sequence, so each row has a length of its own there, and that is all that the masks need.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torch_pagedkv.cache import PagedBatch
from torch_pagedkv.cache.host_layout import NO_BLOCK, NO_SLOT
from torch_pagedkv.ops import merge_attention_states, paged_attention


def local_length(length: int | torch.Tensor, *, block_size: int, rank: int, num_ranks: int) -> int | torch.Tensor:
    """Return how many of a sequence's first ``length`` tokens live on a rank.

    Block b lives on rank ``b % num_ranks``: the rank holds its share of the full blocks, and the last
    block so far as it is filled. A rank has to own ``blocks_for(local_length(...), block_size)`` blocks.

    Args:
        length: tokens of the sequence, an integer or a tensor of integers.
        block_size: tokens in a block, the same on every rank.
        rank, num_ranks: the rank asked about, and how many there are.

    Returns:
        An integer, or a tensor shaped as length is.

    Example:
        >>> [local_length(37, block_size=16, rank=rank, num_ranks=2) for rank in (0, 1)]
        [21, 16]

    Source: the round-robin split of blocks as in ring attention's striped form (Brandon et al. 2023).
    """
    rounds = block_size * num_ranks
    rest = length % rounds - rank * block_size
    rest = rest.clamp(0, block_size) if isinstance(rest, torch.Tensor) else min(max(rest, 0), block_size)
    return length // rounds * block_size + rest


def local_batch(batch: PagedBatch, *, block_size: int, mesh: DeviceMesh) -> PagedBatch:
    """Turn the batch of whole sequences, with this rank's block tables, into what the rank writes and reads.

    Args:
        batch: seqused_k and cu_seqlens_q of the whole sequences, the same on every rank; block_table
            [num_sequences, local_blocks] with this rank's blocks. Its slot_mapping gives the number of
            tokens, and nothing of it is read.
        block_size: tokens in a block.
        mesh: a mesh of one dimension.

    Returns:
        A new batch in the decode form with a row for each token: its table, the number of keys that
        it sees on this rank, and its slot, or -1 where its block lives elsewhere. Computed on the
        device without waiting for it, and traced by the compiler.

    Raises:
        ValueError: the mesh has several dimensions.

    Not checked:
        That lengths are in range; ``paged_attention`` says so on CPU.

    Example:
        See ``context_parallel_attention``.
    """
    _check_mesh("local_batch", mesh)
    rank, num_ranks = mesh.get_local_rank(), mesh.size()
    table, lengths = batch.block_table, batch.seqused_k.long()
    if table.numel() == 0:  # no sequence, or no block on this rank yet
        lengths = lengths if batch.num_sequences else lengths.new_zeros(1)
        table = table.new_full((lengths.shape[0], 1), NO_BLOCK)
    rows = torch.arange(batch.num_tokens, device=table.device)
    if batch.cu_seqlens_q is None:
        sequence, position = rows, lengths - 1
    else:
        starts = batch.cu_seqlens_q.long()
        # Rows past the last sequence are padding; they get length 0, as positions before the first do.
        sequence = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
        is_padding = sequence >= batch.num_sequences
        sequence = sequence.clamp(max=lengths.shape[0] - 1)
        position = lengths[sequence] + rows - starts[(sequence + 1).clamp(max=batch.num_sequences)]
        position = position.masked_fill(is_padding, -1)
    table, seen = table[sequence], (position + 1).clamp(min=0)
    seen_here = local_length(seen, block_size=block_size, rank=rank, num_ranks=num_ranks)
    block = position // block_size
    is_here = (position >= 0) & (block % num_ranks == rank)
    column = (block // num_ranks).clamp(0, table.shape[1] - 1)
    slots = table.long().gather(1, column[:, None])[:, 0] * block_size + position % block_size
    return PagedBatch(table, seen_here.to(batch.seqused_k.dtype), None, slots.where(is_here, NO_SLOT))


def context_parallel_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: PagedBatch,
    *,
    mesh: DeviceMesh,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to keys that are spread over the ranks of a mesh: causal, every rank with the same queries.

    This rank attends to its own blocks, out and lse of all ranks are gathered in one ``all_gather``
    (float32, ``(value_head_dim + 1) * num_heads`` numbers for each token and rank), and merged in the
    order of ranks with ``merge_attention_states``. Every rank returns the same bits.

    Args:
        query: [T, num_heads, head_dim], the same on every rank.
        key_cache, value_cache: this rank's pools.
        batch: what ``local_batch`` made of the step's batch.
        mesh: a mesh of one dimension, over which the blocks are spread.
        softmax_scale, softcap, k_scale, v_scale: as in ``paged_attention``.
        sinks: as there, the same on every rank; counted once.

    There are no windows and no ALiBi: a rank's keys do not stand at their own positions.

    Returns:
        [T, num_heads, value_head_dim] in query's dtype.

    Raises:
        ValueError, TypeError: as ``paged_attention``; the mesh has several dimensions.

    Not checked:
        That queries and lengths agree between ranks.

    Example:
        >>> # On each of n ranks, with the whole sequences' lengths and the rank's own tables:
        >>> # local = local_batch(batch, block_size=16, mesh=mesh)
        >>> # reshape_and_cache(key, value, key_cache, value_cache, local.slot_mapping)
        >>> # out = context_parallel_attention(query, key_cache, value_cache, local, mesh=mesh)

    Source: merging partial attentions by their log-sum-exps, as in ring attention (Liu et al. 2023) and
    in FlashInfer's cascade; all ranks at once as in Llama 3's context parallelism.
    """
    _check_mesh("context_parallel_attention", mesh)
    out, lse = paged_attention(
        query,
        key_cache,
        value_cache,
        batch.block_table,
        batch.seqused_k,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks if mesh.get_local_rank() == 0 else None,
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
    )
    part = torch.cat([out.float(), lse.T[:, :, None]], dim=2).contiguous()
    parts = part.new_empty((mesh.size() * part.shape[0], *part.shape[1:]))
    dist.all_gather_into_tensor(parts, part, group=mesh.get_group())
    outs, lses = parts[:, :, :-1], parts[:, :, -1].T
    merged = None
    for state in zip(outs.chunk(mesh.size()), lses.chunk(mesh.size(), dim=1), strict=True):
        state = (state[0], state[1].contiguous())
        merged = state if merged is None else merge_attention_states(*merged, *state)
    return merged[0].to(query.dtype)


def _check_mesh(name: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"{name}: mesh must have one dimension (take the one of the context out of a larger mesh by its "
            f"name), got {mesh.ndim}"
        )
