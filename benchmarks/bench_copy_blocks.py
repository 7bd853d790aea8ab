"""copy_blocks on a CPU beside indexed assignment.

python benchmarks/bench_copy_blocks.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of


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


def main() -> None:
    arguments = parse(__doc__, seconds=0.3)
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header("copy_blocks", "ours, us", "peer", "times ours")
        for name, calls in cases():
            taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
            peer = next(call for call in calls if call != "ours")
            print_row(name, taken["ours"] * 1e6, peer, taken[peer] / taken["ours"])


if __name__ == "__main__":
    main()
