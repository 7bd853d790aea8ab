"""paged_attention on CUDA in one call of C++, which checks, allocates and launches.

Where C++ does not take a call, or refuses it, nothing is done and None is returned: then the call goes step by
step, and Python has the words of a refusal.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.attention_options import to_float32
from torch_pagedkv.ops.kernel_choice import cuda_attention


def attend_plainly(
    tensors: tuple[torch.Tensor, ...], softmax_scale: float | None, num_splits: int
) -> torch.Tensor | None:
    """Attend with a query, pools, table and lengths and no further option; return out."""
    query = tensors[0]
    kernels = cuda_attention(query.get_device())
    if kernels is None or not (softmax_scale is None or type(softmax_scale) is float):
        return None
    try:
        return kernels[0](*tensors, query.size(2) ** -0.5 if softmax_scale is None else softmax_scale, num_splits)
    except Exception:
        return None


def attend_at_once(query: torch.Tensor | None, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend with the arguments of the op, all by position; return (out, lse)."""
    kernels = None if value_checking.enabled or query is None else cuda_attention(query.get_device())
    if kernels is None:
        return None
    try:
        *batch, scale, causal, (left, right), softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits = arguments
        per_head = (to_float32(alibi_slopes), to_float32(sinks), k_scale, v_scale)
        out, lse = kernels[1](query, *batch, scale, causal, left, right, softcap, *per_head, num_splits)
    except Exception:
        return None
    return None if out is None else (out, lse)
