"""gather_kv on a CPU beside indexing by the block table.

python benchmarks/bench_gather_kv.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import compare


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what is measured, with the calls that do the same; results are compared first."""
    blocks = torch.randperm(1024)[: 8 * 64].view(8, 64).int()
    lengths = torch.full((8,), 1024, dtype=torch.int32)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        pools = [torch.randn(1024, 16, 8, 128).to(dtype) for _ in range(2)]
        wide = torch.bfloat16 if dtype == torch.float8_e4m3fn else dtype

        def index(pools=pools, wide=wide):
            return [pool[blocks.long()].flatten(1, 2).to(wide) for pool in pools]

        def ours(pools=pools):
            return torch_pagedkv.gather_kv(*pools, blocks, lengths)

        for actual, expected in zip(ours(), index(), strict=True):
            assert torch.equal(actual, expected)
        yield f"8 x 1024 tokens, {dtype}", {"ours": ours, "indexing": index}


if __name__ == "__main__":
    compare("gather_kv", __doc__, cases)
