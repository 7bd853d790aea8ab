"""merge_attention_states: two softmaxes over disjoint keys become one."""

from __future__ import annotations

import torch


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    precision: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse). ``precision`` float64 computes and returns both in float64, unrounded."""
    compute = precision or torch.float32
    log_a, log_b = lse_a.to(compute), lse_b.to(compute)
    maximum = torch.maximum(log_a, log_b)
    weight_a, weight_b = torch.exp(log_a - maximum), torch.exp(log_b - maximum)
    total = weight_a + weight_b

    def of_rows(per_head: torch.Tensor) -> torch.Tensor:
        return per_head.T.unsqueeze(-1)

    summed = of_rows(weight_a) * out_a.to(compute) + of_rows(weight_b) * out_b.to(compute)
    out = summed / of_rows(total)
    lse = maximum + torch.log(total)
    # Selected: whatever stands in an empty part, NaN included, must not reach the result, and the
    # other part must stay as it is. Two empty parts make one more.
    a_empty, b_empty = log_a == -torch.inf, log_b == -torch.inf
    out = torch.where(of_rows(b_empty), out_a.to(compute), out)
    out = torch.where(of_rows(a_empty), out_b.to(compute), out)
    out = torch.where(of_rows(a_empty & b_empty), 0.0, out)
    lse = torch.where(b_empty, log_a, torch.where(a_empty, log_b, lse))
    # Copied into new tensors: an expression keeps odd strides that size-1 dimensions came with.
    merged = torch.empty(out_a.shape, dtype=precision or out_a.dtype, device=out_a.device)
    merged_lse = torch.empty(lse_a.shape, dtype=compute, device=out_a.device)
    return merged.copy_(out), merged_lse.copy_(lse)
