"""cascade_attention: attend to blocks that sequences share once for all of them, and merge."""

from __future__ import annotations

import torch

from torch_pagedkv.ops.argument_checks import (
    check_batch,
    check_integers,
    check_optional_tensors,
    check_pools,
    check_rows,
    check_size,
    check_tensors,
)
from torch_pagedkv.ops.kernel_choice import CUDA_ROWS
from torch_pagedkv.ops.merge_attention_states import merge_attention_states
from torch_pagedkv.ops.paged_attention import paged_attention
from torch_pagedkv.ops.shared_prefix import split_shared_prefix_op

_OWNER = "cascade_attention"
_ROWS_OF_PROGRAM = 128  # query rows of a KV head that a kernel for long queries takes at once
_PROGRAMS = 128  # about as many as a large GPU has multiprocessors, each of which runs one of these
_LEAST_KEYS = 128  # of a part: a tile of those kernels


def cascade_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    num_prefix_blocks: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Do what paged_attention does, reading the blocks that sequences begin with only once.

    The first num_prefix_blocks entries of the block tables are taken as a prefix: the queries of
    all sequences attend to it together, as the queries of one sequence without a mask; each
    sequence attends to the rest of its keys, key j at
    ``key_cache[block_table[s, j // block_size], j % block_size]``; and both are merged by their
    LSE. A sequence takes part if its table begins as that of the first one that is long enough, and
    if all its queries see the whole prefix; every other sequence (a shorter one, another prefix, an
    empty one) is attended to as if there was no prefix. So the result is that of paged_attention
    within rounding, whatever the tables hold, and which sequences share is decided on the device.

    It pays where many queries share many blocks; num_prefix_blocks 0 is the plain call.

    Args:
        query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q: as ``paged_attention``.
        num_prefix_blocks: blocks that sequences are expected to share, from the first on, 0 to
            max_blocks. They count as full.
        softmax_scale, causal, softcap, k_scale, v_scale: as ``paged_attention``.
        window_size: must be (-1, -1): a window hides the prefix from some rows and not from others.
        alibi_slopes: must be None: the bias depends on each row's own position.
        sinks: as ``paged_attention``; counted once.
        num_splits: as ``paged_attention``, for both parts. With 1 too, a row's bits may depend on
            its batch, since that decides who shares.
        return_lse: also return the log-sum-exp.

    Returns:
        out, and with ``return_lse`` lse: as ``paged_attention``. Both parts are rounded to query's
        dtype before they are merged.

    Raises:
        ValueError, TypeError, NotImplementedError: as ``paged_attention``, in its words where it
            is the one to see it; also for a window, for slopes, and for num_prefix_blocks out of range.

    Not checked:
        As ``paged_attention``.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.randn(2, 10, 16, 2, 8).unbind(0)
        >>> block_table = torch.tensor([[7, 2, 9], [7, 2, 4]])  # two blocks in common
        >>> batch = (torch.randn(2, 4, 8), key_cache, value_cache, block_table, torch.tensor([40, 35]))
        >>> out = torch_pagedkv.cascade_attention(*batch, num_prefix_blocks=2)
        >>> torch.allclose(out, torch_pagedkv.paged_attention(*batch), atol=1e-6)
        True

    Source: cascade inference of FlashInfer, Hydragen (Juravsky et al. 2024).
    """
    batch = (query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q)
    _check(*batch, num_prefix_blocks, window_size, alibi_slopes)
    options = {
        "softmax_scale": softmax_scale, "softcap": softcap, "k_scale": k_scale, "v_scale": v_scale,
        "num_splits": num_splits, "return_lse": True,
    }  # fmt: skip
    num_tokens, num_sequences = query.shape[0], block_table.shape[0]
    if num_prefix_blocks == 0 or num_sequences == 0:
        out, lse = paged_attention(*batch, causal=causal, sinks=sinks, **options)
        return (out, lse) if return_lse else out

    prefix_table, prefix_length, prefix_range, rest_table, rest_lengths, shares = split_shared_prefix_op(
        block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, key_cache.shape[1], num_tokens, causal
    )
    rest_out, rest_lse = paged_attention(
        query, key_cache, value_cache, rest_table, rest_lengths, cu_seqlens_q, causal=causal, sinks=sinks, **options
    )
    if num_splits == 0:
        options["num_splits"] = _splits_of_prefix(query, key_cache, num_prefix_blocks)
    prefix_out, prefix_lse = paged_attention(
        query, key_cache, value_cache, prefix_table, prefix_length, prefix_range, causal=False, **options
    )
    sees_prefix = _of_rows(shares, cu_seqlens_q, num_tokens)
    prefix_lse = torch.where(sees_prefix, prefix_lse, -torch.inf)  # an empty part is never read into the result
    out, lse = merge_attention_states(prefix_out, prefix_lse, rest_out, rest_lse)
    return (out, lse) if return_lse else out


def _splits_of_prefix(query: torch.Tensor, key_cache: torch.Tensor, num_prefix_blocks: int) -> int:
    """Return how many parts to cut the prefix into, 0: the kernel chooses.

    All queries are one sequence, so a kernel that cuts sequences to fill the device has few to cut: it
    would count with as many more as there are tokens.
    """
    if not query.is_cuda:
        return 0
    rows = query.shape[0] * query.shape[1] // key_cache.shape[2]
    if rows <= CUDA_ROWS:
        return 0  # a decode kernel, which shares out tiles evenly
    programs = -(-rows // _ROWS_OF_PROGRAM) * key_cache.shape[2]
    splits = 1  # a power of two: another number of tokens seldom compiles a graph anew
    while splits * programs * 2 <= _PROGRAMS and splits * _LEAST_KEYS * 2 <= num_prefix_blocks * key_cache.shape[1]:
        splits *= 2
    return splits


def _check(
    query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, window_size, alibi_slopes
) -> None:
    check_tensors(
        _OWNER, query=query, key_cache=key_cache, value_cache=value_cache, block_table=block_table, seqused_k=seqused_k
    )
    check_optional_tensors(_OWNER, cu_seqlens_q=cu_seqlens_q, alibi_slopes=alibi_slopes)
    check_rows(_OWNER, "query", query, "[num_tokens, num_heads, head_dim]", "key_cache", key_cache)
    check_pools(_OWNER, key_cache, value_cache, written=False)
    check_batch(_OWNER, block_table, seqused_k, cu_seqlens_q, key_cache.shape[1], "query", query)
    if cu_seqlens_q is None:
        check_size(_OWNER, "block_table", block_table, 0, query.shape[0], "query's num_tokens")
    check_integers(_OWNER, num_prefix_blocks=num_prefix_blocks)
    max_blocks = block_table.shape[1]
    if not 0 <= num_prefix_blocks <= max_blocks:
        raise ValueError(f"{_OWNER}: num_prefix_blocks must be in [0, {max_blocks}], got {num_prefix_blocks}")
    if tuple(window_size) != (-1, -1):
        raise ValueError(
            f"{_OWNER}: window_size must be (-1, -1), because a window hides the prefix from some rows, "
            f"got {window_size}"
        )
    if alibi_slopes is not None:
        raise ValueError(
            f"{_OWNER}: alibi_slopes must be None, because all rows read the prefix as from one position, got a tensor"
        )


def _of_rows(shares, cu_seqlens_q, num_tokens):
    """Whether each query row is of a sequence that shares; padding rows are of none."""
    if cu_seqlens_q is None:
        return shares
    row = torch.arange(num_tokens, device=shares.device, dtype=cu_seqlens_q.dtype)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), row, right=True)
    return torch.cat((shares, shares.new_zeros(1)))[sequence]
