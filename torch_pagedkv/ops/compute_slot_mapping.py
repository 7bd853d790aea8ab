"""compute_slot_mapping: where the new tokens of a batch go, computed where the batch lives."""

from __future__ import annotations

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    check_batch,
    check_integers,
    check_optional_tensors,
    check_tensors,
    differ,
    exceeds,
)
from torch_pagedkv.ops.kernel_choice import native_kernel, triton_launcher
from torch_pagedkv.ops.registration import register_op

_NAME = "compute_slot_mapping"


def compute_slot_mapping(
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    block_size: int,
    num_tokens: int,
) -> torch.Tensor:
    """Compute the slots of a batch's new tokens, the last query_len positions of each sequence.

    Token i of sequence s's query_len stands at ``p = i + seqused_k[s] - query_len`` and gets slot
    ``block_table[s, p // block_size] * block_size + p % block_size``. Nothing is read back to the
    host, so a captured graph follows lengths and tables that change in place.

    Args:
        block_table: [num_sequences, max_blocks], int32 or int64, last stride 1.
        seqused_k: [num_sequences], int32 or int64: tokens of the sequence, new ones included.
        cu_seqlens_q: [num_sequences + 1], int32 or int64: prefix sums of the query lengths, from 0.
            None: one token a sequence, and num_tokens is num_sequences.
        block_size: tokens in a block, at least 1.
        num_tokens: length of the result, at least ``cu_seqlens_q[-1]``.

    All tensors are on one device.

    Returns:
        slot_mapping: [num_tokens] int64, new; -1 past ``cu_seqlens_q[-1]`` and for tokens at
        negative positions (a padded sequence of length 0).

    Raises:
        ValueError: shapes, strides or devices do not fit; on CPU also a length, prefix sum or used
            table entry out of range.
        TypeError: a dtype does not fit.
        NotImplementedError: CUDA tensors without Triton.

    Not checked:
        Table entries at or past the pool's num_blocks, which this op does not know. On CUDA values
        of index tensors raise nothing (but see ``checks``): lengths are clamped to the table, and
        negative entries give -1.

    Example:
        >>> import torch, torch_pagedkv
        >>> block_table = torch.tensor([[7, 2, 9]])
        >>> torch_pagedkv.compute_slot_mapping(block_table, torch.tensor([21]), None, 16, 1)
        tensor([36])

    Source: vLLM's slot_mapping; here computed on the device.
    """
    check_tensors(_NAME, block_table=block_table, seqused_k=seqused_k)
    check_optional_tensors(_NAME, cu_seqlens_q=cu_seqlens_q)
    check_integers(_NAME, block_size=block_size, num_tokens=num_tokens)
    return _OP(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens)


def _check(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens) -> None:
    if exceeds(1, block_size):
        raise ValueError(f"{_NAME}: block_size must be >= 1, got {block_size}")
    batch = (block_table, seqused_k, cu_seqlens_q)
    check_batch(_NAME, *batch, block_size, "block_table", block_table)
    if exceeds(0, num_tokens):
        raise ValueError(f"{_NAME}: num_tokens must be >= 0, got {num_tokens}")
    if cu_seqlens_q is None and differ(num_tokens, block_table.shape[0]):
        raise ValueError(
            f"{_NAME}: num_tokens must be num_sequences = {block_table.shape[0]} "
            f"where cu_seqlens_q is None, got {num_tokens}"
        )


def _output(block_table, num_tokens) -> torch.Tensor:
    return block_table.new_empty((num_tokens,), dtype=torch.int64)


def _cpu(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens):
    _check(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens)
    kernel = native_kernel(_NAME)
    if kernel is None:
        return reference.compute_slot_mapping(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens)
    slot_mapping = _output(block_table, num_tokens)
    kernel(slot_mapping, block_table, seqused_k, cu_seqlens_q, block_size)
    return slot_mapping


def _cuda(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens):
    _check(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens)
    if value_checking.enabled:
        sizes = dict(num_tokens=num_tokens, block_size=block_size, num_blocks=None, window_left=0)
        value_checking.check_batch(_NAME, block_table, seqused_k, cu_seqlens_q, **sizes)
    slot_mapping = _output(block_table, num_tokens)
    triton_launcher(_NAME)(slot_mapping, block_table, seqused_k, cu_seqlens_q, block_size)
    return slot_mapping


def _fake(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens):
    _check(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens)
    return _output(block_table, num_tokens)


_OP = register_op(
    "compute_slot_mapping(Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, "
    "SymInt block_size, SymInt num_tokens) -> Tensor",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
