"""cascade_attention on a CPU beside paged_attention on the same batch, a decode step of sequences that share a prefix.

    python benchmarks/bench_cascade_attention.py --threads 2 1

The plain call reads the prefix once for each sequence, and the blocks come from caches where they fit.
Results are compared before anything is timed.
"""

from __future__ import annotations

import torch

import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
# (sequences, tokens that they share, tokens of their own)
SHAPES = [(1, 2048, 128), (2, 2048, 128), (8, 2048, 128), (32, 2048, 128), (8, 512, 512), (8, 16384, 128), (32, 64, 64)]


def make(sequences: int, shared: int, own: int, dtype: torch.dtype) -> tuple[tuple, int]:
    """Return the arguments of a decode step and the number of shared blocks; blocks lie in random order."""
    prefix, rest = shared // BLOCK_SIZE, own // BLOCK_SIZE
    num_blocks = prefix + sequences * rest
    order = torch.randperm(num_blocks).int()
    table = torch.cat((order[:prefix].expand(sequences, -1), order[prefix:].view(sequences, rest)), 1)
    size = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [torch.randn(size).to(dtype) for _ in range(2)]
    query = torch.randn(sequences, NUM_HEADS, HEAD_DIM).to(dtype)
    return (query, *pools, table, torch.full((sequences,), shared + own, dtype=torch.int32)), prefix


def main() -> None:
    arguments = parse(__doc__, seconds=1.0)
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header("sequences", "shared", "own", "dtype", "cascade, ms", "plain, ms", "plain, times cascade")
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                batch, prefix = make(*shape, dtype)
                calls = {
                    "cascade": lambda batch=batch, prefix=prefix: torch_pagedkv.cascade_attention(
                        *batch, num_prefix_blocks=prefix
                    ),
                    "plain": lambda batch=batch: torch_pagedkv.paged_attention(*batch),
                }
                error = (calls["cascade"]().float() - calls["plain"]().float()).abs().max().item()
                assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"{shape}, {dtype}: error {error:.2g}"
                taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
                ratio = taken["plain"] / taken["cascade"]
                name = str(dtype).removeprefix("torch.")
                print_row(*shape, name, taken["cascade"] * 1e3, taken["plain"] * 1e3, ratio)


if __name__ == "__main__":
    main()
