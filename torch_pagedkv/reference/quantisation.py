"""fp8 pools: what a stored byte means, and which byte a value becomes."""

from __future__ import annotations

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def per_head(scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a scale shaped to broadcast over [..., num_kv_heads, head_dim]; None means 1."""
    if scale is None:
        return torch.ones((1, 1), dtype=torch.float32, device=device)
    return scale.reshape(-1, 1)


def quantise(values: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None) -> torch.Tensor:
    """Return saturate(values / scale) in ``dtype``, or the values themselves where no fp8 is involved.

    A finite overflow or an infinity becomes the largest finite value. NaN stays NaN and takes its
    sign from the value: hardware disagrees about the sign of a NaN that a division makes.
    """
    if values.dtype == dtype:
        return values
    quotient = values.float() / per_head(scale, values.device)
    limit = torch.finfo(dtype).max
    stored = quotient.clamp(-limit, limit).to(dtype).view(torch.uint8)
    not_a_number = torch.where(torch.signbit(values), 0xFF, 0x7F).to(torch.uint8)
    return torch.where(quotient.isnan(), not_a_number, stored).view(dtype)


def dequantise(stored: torch.Tensor, scale: torch.Tensor | None, precision: torch.dtype) -> torch.Tensor:
    """Return the values that stored elements [..., num_kv_heads, head_dim] stand for."""
    values = stored.to(precision)
    if stored.dtype in FP8_DTYPES:
        values = values * per_head(scale, stored.device).to(precision)
    return values


def take_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Gather whole blocks [len(blocks), block_size, num_kv_heads, head_dim] of a pool."""
    if cache.dtype in FP8_DTYPES:  # indexing is not implemented for fp8 on every device
        return cache.view(torch.uint8)[blocks.long()].view(cache.dtype)
    return cache[blocks.long()]
