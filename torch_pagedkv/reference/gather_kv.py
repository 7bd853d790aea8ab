"""gather_kv, one sequence after the other."""

from __future__ import annotations

import torch

from torch_pagedkv.reference.quantisation import FP8_DTYPES, dequantise, take_blocks
from torch_pagedkv.reference.value_checks import check_batch


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    num_sequences, max_blocks = block_table.shape
    check_batch(
        "gather_kv",
        block_table,
        seqused_k,
        None,
        num_tokens=num_sequences,
        block_size=block_size,
        num_blocks=num_blocks,
        window_left=-1,
    )
    if dtype is None:
        dtype = torch.bfloat16 if key_cache.dtype in FP8_DTYPES else key_cache.dtype

    def gather(cache: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        shape = (num_sequences, max_blocks * block_size, num_kv_heads, cache.shape[-1])
        gathered = torch.zeros(shape, dtype=dtype, device=cache.device)
        for sequence, length in enumerate(seqused_k.tolist()):
            used = -(-length // block_size)
            stored = take_blocks(cache, block_table[sequence, :used]).flatten(0, 1)[:length]
            if stored.dtype != dtype:
                stored = dequantise(stored, scale, torch.float32).to(dtype)
            gathered[sequence, :length].copy_(stored)
        return gathered

    return gather(key_cache, k_scale), gather(value_cache, v_scale)
