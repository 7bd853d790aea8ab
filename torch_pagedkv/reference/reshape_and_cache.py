"""reshape_and_cache, one token after the other."""

from __future__ import annotations

import torch

from torch_pagedkv.reference.quantisation import quantise
from torch_pagedkv.reference.value_checks import check_slots


# Values are stored: a key that wants a gradient gives the pool none.
@torch.inference_mode()
def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    num_blocks, block_size = key_cache.shape[:2]
    check_slots("reshape_and_cache", slot_mapping, num_blocks * block_size)
    num_tokens = slot_mapping.shape[0]
    stored_key = quantise(key[:num_tokens], key_cache.dtype, k_scale)
    stored_value = quantise(value[:num_tokens], value_cache.dtype, v_scale)
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        block, offset = divmod(slot, block_size)
        key_cache[block, offset].copy_(stored_key[token])
        value_cache[block, offset].copy_(stored_value[token])
