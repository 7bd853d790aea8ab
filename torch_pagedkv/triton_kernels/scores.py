"""Scores of attention: the product of query and key, scaled, capped and biased."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
FLOAT32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


class ScoreTerms(NamedTuple):
    """What makes a score of a product of query and key."""

    scale: tl.tensor
    softcap: tl.tensor
    inverse_softcap: tl.tensor
    slope: tl.tensor
    position: tl.tensor


@triton.jit
def tanh(x):
    # With exponentials of negative numbers only, nothing overflows. Near 0 the quotient cancels,
    # and the odd Taylor polynomial is exact to float32 there.
    size = tl.abs(x)
    decayed = tl.exp2(size * (-2.0 * LOG2E))
    quotient = (1.0 - decayed) / (1.0 + decayed)
    square = x * x
    series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0)))
    return tl.where(size < 0.2, x * series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def scores_of(
    query, key, position, terms, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """Scaled, capped and biased products; finite unless query or key holds a NaN."""
    scores = terms.scale * tl.dot(query, tl.trans(key), input_precision="ieee")
    # An overflowed score is still a score: a row whose only key has one takes that key's value.
    scores = tl.clamp(scores, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    if HAS_SOFTCAP:
        scores = terms.softcap * tanh(scores * terms.inverse_softcap)
    if HAS_SLOPES:
        distance = position[None, :] - terms.position[:, None]
        scores += terms.slope[:, None] * distance.to(tl.float32)
        scores = tl.clamp(scores, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scores
