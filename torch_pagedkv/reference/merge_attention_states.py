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
    empty = maximum == -torch.inf
    # Subtracting -inf from -inf would be NaN; a row with nothing in it keeps weights of 0.
    reference_point = torch.where(empty, torch.zeros_like(maximum), maximum)
    weight_a = torch.exp(log_a - reference_point)
    weight_b = torch.exp(log_b - reference_point)
    total = weight_a + weight_b
    lse = torch.where(empty, maximum, reference_point + torch.log(total))

    def share(out: torch.Tensor, weight: torch.Tensor, log: torch.Tensor) -> torch.Tensor:
        per_token = weight.T.unsqueeze(-1)
        is_empty = (log == -torch.inf).T.unsqueeze(-1)
        # Whatever stands in an empty part, NaN included, must not reach the result.
        return torch.where(is_empty, torch.zeros_like(per_token), per_token * out.to(compute))

    summed = share(out_a, weight_a, log_a) + share(out_b, weight_b, log_b)
    divisor = torch.where(empty, torch.ones_like(total), total).T.unsqueeze(-1)
    out = summed / divisor
    return (out if precision else out.to(out_a.dtype)).contiguous(), lse.contiguous()
