"""_split_shared_prefix: the bookkeeping of cascade_attention, on the tensors' device.

A private op: on CUDA it is one kernel where torch's own ops are about thirty, of which each costs as much
as what cascade_attention saves on thousands of tokens.
"""

from __future__ import annotations

import torch

from torch_pagedkv.ops.argument_checks import check_batch, exceeds
from torch_pagedkv.ops.kernel_choice import triton_launcher
from torch_pagedkv.ops.registration import register_op
from torch_pagedkv.reference.shared_prefix import split_shared_prefix

_OWNER = "cascade_attention"


def _check(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens) -> None:
    check_batch(_OWNER, block_table, seqused_k, cu_seqlens_q, block_size, "block_table", block_table)
    num_sequences, max_blocks = block_table.shape
    if exceeds(1, num_sequences):
        raise ValueError(f"{_OWNER}: block_table must have a row, got {num_sequences}")
    if exceeds(0, num_prefix_blocks) or exceeds(num_prefix_blocks, max_blocks):
        raise ValueError(f"{_OWNER}: num_prefix_blocks must be in [0, {max_blocks}], got {num_prefix_blocks}")
    if exceeds(num_tokens, 2**31 - 1):
        raise ValueError(f"{_OWNER}: query must have less than 2**31 tokens, got {num_tokens}")


def _outputs(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal):
    _check(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens)
    return (
        block_table.new_empty((1, num_prefix_blocks)),
        seqused_k.new_empty((1,)),
        block_table.new_empty((2,), dtype=torch.int32),
        block_table.new_empty(block_table.shape),
        seqused_k.new_empty(seqused_k.shape),
        block_table.new_empty(seqused_k.shape, dtype=torch.bool),
    )


def _cpu(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal):
    _check(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens)
    return split_shared_prefix(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal)


def _cuda(block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal):
    arguments = (block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal)
    outputs = _outputs(*arguments)
    triton_launcher("shared_prefix")(*outputs, *arguments)
    return outputs


split_shared_prefix_op = register_op(
    "_split_shared_prefix(Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, SymInt num_prefix_blocks, "
    "SymInt block_size, SymInt num_tokens, bool causal) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_outputs,
)
