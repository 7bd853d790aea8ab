"""How far a result may be from the float64 reference: a budget from the dtype's rounding, the same everywhere."""

from __future__ import annotations

import torch


def assert_close(actual: torch.Tensor, expected: torch.Tensor, *, largest: float, what: str = "out") -> None:
    """Compare attention outputs with float64 ones; ``largest`` bounds the magnitude of a visible value.

    An output is a weighted mean of values. Rounding it, and the weights before the second product, to
    the output's dtype moves it by about one unit in the last place of the largest value; float32
    accumulates a few hundred roundings of its own.
    """
    unit = torch.finfo(actual.dtype).eps
    budget = (64 if actual.dtype == torch.float32 else 1.5) * unit * max(largest, 1e-6)
    _compare(actual, expected, budget, what)


def assert_close_lse(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare log-sum-exps, natural logarithms in float32."""
    assert actual.dtype == torch.float32
    finite = expected[torch.isfinite(expected)]
    largest = finite.abs().max().item() if finite.numel() else 1.0
    _compare(actual, expected, 1e-5 * max(largest, 1.0), "lse")


def _compare(actual: torch.Tensor, expected: torch.Tensor, budget: float, what: str) -> None:
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)} is not {tuple(expected.shape)}"
    actual, expected = actual.double().cpu(), expected.double().cpu()
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = torch.where(same, 0.0, (actual - expected).abs())
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= budget, f"{what}: error {worst:.3g} is over the budget {budget:.3g}"
