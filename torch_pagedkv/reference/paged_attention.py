"""paged_attention, one query row after the other: every row takes just the keys it may see."""

from __future__ import annotations

import math

import torch

from torch_pagedkv.reference.quantisation import dequantise, take_blocks
from torch_pagedkv.reference.value_checks import check_batch


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    precision: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse). ``precision`` float64 computes and returns both in float64, unrounded.

    ``num_splits`` is a choice of kernels and changes nothing here.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, value_head_dim = value_cache.shape
    compute = precision or torch.float32
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    check_batch(
        "paged_attention",
        block_table,
        seqused_k,
        cu_seqlens_q,
        num_tokens=num_tokens,
        block_size=block_size,
        num_blocks=num_blocks,
        window_left=window_size[0],
    )
    query_starts = range(num_tokens + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()

    out = torch.zeros((num_tokens, num_heads, value_head_dim), dtype=compute, device=query.device)
    lse = torch.full((num_heads, num_tokens), -math.inf, dtype=compute, device=query.device)
    if sinks is not None:
        lse[:] = sinks.float().to(compute)[:, None]  # what a row that sees no key is left with

    ranges = []
    for sequence, length in enumerate(seqused_k.tolist()):
        start, stop = query_starts[sequence : sequence + 2]
        first_position = length - (stop - start)
        for token in range(start, stop):
            position = first_position + token - start
            ranges.append((sequence, token, position, visible_keys(position, length, causal, window_size)))

    for sequence, token, position, (low, high) in ranges:
        if low >= high:
            continue
        first, stop = low // block_size, -(-high // block_size)
        blocks = block_table[sequence, first:stop]
        rows = slice(low - first * block_size, high - first * block_size)
        keys = dequantise(take_blocks(key_cache, blocks).flatten(0, 1)[rows], k_scale, compute)
        values = dequantise(take_blocks(value_cache, blocks).flatten(0, 1)[rows], v_scale, compute)

        # Contiguous, because a product's rounding may follow its operands' strides.
        grouped_query = query[token].to(compute).contiguous().unflatten(0, (num_kv_heads, -1))
        scores = torch.einsum("hgd,nhd->hgn", grouped_query, keys).flatten(0, 1) * scale
        largest = torch.finfo(compute).max
        scores = scores.clamp(-largest, largest)  # an overflowed score is still a score
        if softcap > 0.0:
            scores = softcap * torch.tanh(scores / softcap)
        if alibi_slopes is not None:
            distance = torch.arange(low, high, device=query.device) - position
            scores = scores + alibi_slopes.float().to(compute)[:, None] * distance
            scores = scores.clamp(-largest, largest)
        maximum = scores.amax(-1, keepdim=True)
        if sinks is not None:
            maximum = torch.maximum(maximum, sinks.float().to(compute)[:, None])
        weights = torch.exp(scores - maximum)
        denominator = weights.sum(-1, keepdim=True)
        if sinks is not None:
            denominator = denominator + torch.exp(sinks.float().to(compute)[:, None] - maximum)
        grouped_weights = weights.unflatten(0, (num_kv_heads, -1))
        attended = torch.einsum("hgn,nhd->hgd", grouped_weights, values).flatten(0, 1)
        out[token] = attended / denominator
        lse[:, token] = (maximum + torch.log(denominator))[:, 0]
    return out if precision else out.to(query.dtype), lse


def visible_keys(position: int, length: int, causal: bool, window_size: tuple[int, int]) -> tuple[int, int]:
    """Return the range [low, high) of key positions that a query at ``position`` may see."""
    left, right = window_size
    low = max(0, position - left) if left >= 0 else 0
    high = length
    if causal:
        high = min(high, position + 1)
    if right >= 0:
        high = min(high, position + right + 1)
    return low, high
