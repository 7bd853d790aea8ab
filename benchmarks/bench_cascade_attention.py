"""cascade_attention beside paged_attention on the same batch, a decode step of sequences that share a prefix.

    python benchmarks/bench_cascade_attention.py --threads 2 1
    python benchmarks/bench_cascade_attention.py --device cuda

The plain call reads the prefix once for each sequence, and the blocks come from caches where they fit.
Results are compared before anything is timed. On a GPU replays of captured graphs are timed, with a cold L2
cache; "floor" is what reading every key and value once would take at the speed of a plain read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import on_cuda
import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
# (sequences, tokens that they share, tokens of their own)
SHAPES = [(1, 2048, 128), (2, 2048, 128), (8, 2048, 128), (32, 2048, 128), (8, 512, 512), (8, 16384, 128), (32, 64, 64)]
CUDA_SHAPES = [
    (32, 8192, 512), (32, 32768, 512), (32, 512, 512), (32, 1024, 512), (32, 2048, 512), (32, 4096, 512),
    (8, 2048, 512), (8, 8192, 512), (8, 32768, 512), (2, 8192, 512), (2, 32768, 512), (128, 1024, 512),
    (128, 8192, 512), (32, 8192, 8192),
]  # fmt: skip


def make(sequences: int, shared: int, own: int, dtype: torch.dtype, device: str = "cpu") -> tuple[tuple, int]:
    """Return the arguments of a decode step and the number of shared blocks; blocks lie in random order."""
    prefix, rest = shared // BLOCK_SIZE, own // BLOCK_SIZE
    num_blocks = prefix + sequences * rest
    order = torch.randperm(num_blocks).int()
    table = torch.cat((order[:prefix].expand(sequences, -1), order[prefix:].view(sequences, rest)), 1)
    size = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM)
    pools = [torch.randn(size, device=device, dtype=dtype) for _ in range(2)]
    query = torch.randn(sequences, NUM_HEADS, HEAD_DIM).to(device, dtype)
    lengths = torch.full((sequences,), shared + own, dtype=torch.int32)
    return (query, *pools, table.to(device), lengths.to(device)), prefix


def calls_of(batch: tuple, prefix: int) -> dict[str, Callable[[], torch.Tensor]]:
    """Return both calls, once their results were compared."""
    calls = {
        "cascade": lambda: torch_pagedkv.cascade_attention(*batch, num_prefix_blocks=prefix),
        "plain": lambda: torch_pagedkv.paged_attention(*batch),
    }
    dtype = batch[0].dtype
    error = (calls["cascade"]().float() - calls["plain"]().float()).abs().max().item()
    assert error < (1e-5 if dtype == torch.float32 else 2e-2), f"error {error:.2g}"
    return calls


def on_gpu() -> None:
    print(f"\n{on_cuda.describe()}\n")
    speed, _ = on_cuda.bytes_per_microsecond()
    print_header(
        "sequences", "shared", "own", "cascade, us", "plain, us", "plain, times cascade", "floor, us",
        "cascade, host us", "plain, host us",
    )  # fmt: skip
    for sequences, shared, own in CUDA_SHAPES:
        calls = calls_of(*make(sequences, shared, own, torch.bfloat16, "cuda"))
        (cascade, cascade_host), (plain, plain_host) = (on_cuda.microseconds(call) for call in calls.values())
        floor = (shared + sequences * own) * NUM_KV_HEADS * HEAD_DIM * 2 * 2 / speed
        print_row(sequences, shared, own, cascade, plain, plain / cascade, floor, cascade_host, plain_host)


def main() -> None:
    device = {"choices": ("cpu", "cuda"), "default": "cpu"}
    arguments = parse(__doc__, seconds=1.0, device=device)
    torch.manual_seed(0)
    if arguments.device == "cuda":
        return on_gpu()
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header("sequences", "shared", "own", "dtype", "cascade, ms", "plain, ms", "plain, times cascade")
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                calls = calls_of(*make(*shape, dtype))
                taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
                ratio = taken["plain"] / taken["cascade"]
                name = str(dtype).removeprefix("torch.")
                print_row(*shape, name, taken["cascade"] * 1e3, taken["plain"] * 1e3, ratio)


if __name__ == "__main__":
    main()
