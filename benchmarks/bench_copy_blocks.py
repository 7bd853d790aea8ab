"""copy_blocks on a CPU beside indexed assignment.

python benchmarks/bench_copy_blocks.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import compare


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what is measured, with the calls that do the same; results are compared first."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 256):
            pools = [torch.randn(1024, 16, 8, 128).to(dtype) for _ in range(2)]
            order = torch.randperm(1024)
            sources, targets = order[:count], order[count : 2 * count]

            def index(pools=pools, sources=sources, targets=targets):
                for pool in pools:
                    pool[targets] = pool[sources]

            def ours(pools=pools, sources=sources, targets=targets):
                torch_pagedkv.copy_blocks(*pools, sources, targets)

            ours()
            assert all(torch.equal(pool[targets], pool[sources]) for pool in pools)
            yield f"{count} blocks, {dtype}", {"ours": ours, "indexing": index}


if __name__ == "__main__":
    compare("copy_blocks", __doc__, cases)
