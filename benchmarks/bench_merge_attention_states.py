"""merge_attention_states on a CPU beside the formula in PyTorch.

python benchmarks/bench_merge_attention_states.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import compare


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what is measured, with the calls that do the same; results are compared first."""
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (1, 1024):
            outs = [torch.randn(tokens, 32, 128).to(dtype) for _ in range(2)]
            lses = [torch.randn(32, tokens) for _ in range(2)]

            def formula(outs=outs, lses=lses):
                lse = torch.logaddexp(*lses)
                weights = [(part - lse).exp().t().unsqueeze(-1) for part in lses]
                sums = [weight * out.float() for weight, out in zip(weights, outs, strict=True)]
                return (sums[0] + sums[1]).to(outs[0].dtype), lse

            def ours(outs=outs, lses=lses):
                return torch_pagedkv.merge_attention_states(outs[0], lses[0], outs[1], lses[1])

            torch.testing.assert_close(ours()[0], formula()[0])
            yield f"{tokens} tokens, {dtype}", {"ours": ours, "formula": formula}


if __name__ == "__main__":
    compare("merge_attention_states", __doc__, cases)
