"""gather_kv on a CPU beside indexing by the block table.

python benchmarks/bench_gather_kv.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of


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


def main() -> None:
    arguments = parse(__doc__, seconds=0.3)
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header("gather_kv", "ours, us", "peer", "times ours")
        for name, calls in cases():
            taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
            peer = next(call for call in calls if call != "ours")
            print_row(name, taken["ours"] * 1e6, peer, taken[peer] / taken["ours"])


if __name__ == "__main__":
    main()
