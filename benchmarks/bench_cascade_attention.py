"""cascade_attention beside paged_attention on the same batch, a decode step of sequences that share a prefix.

    python benchmarks/bench_cascade_attention.py --threads 2 1
    python benchmarks/bench_cascade_attention.py --device cuda
    python benchmarks/bench_cascade_attention.py --device cuda --steps

The plain call reads the prefix once for each sequence, and the blocks come from caches where they fit.
Results are compared before anything is timed. On a GPU replays of captured graphs are timed, with a cold L2
cache; "floor" is what reading every key and value once would take at the speed of a plain read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

import on_cuda
import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of
from torch_pagedkv.ops.shared_prefix import split_shared_prefix_op

BLOCK_SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 32, 8, 128
# (sequences, tokens that they share, tokens of their own)
SHAPES = [(1, 2048, 128), (2, 2048, 128), (8, 2048, 128), (32, 2048, 128), (8, 512, 512), (8, 16384, 128), (32, 64, 64)]
CUDA_SHAPES = [
    (32, 8192, 512), (32, 32768, 512), (32, 512, 512), (32, 1024, 512), (32, 2048, 512), (32, 4096, 512),
    (8, 2048, 512), (8, 8192, 512), (8, 32768, 512), (2, 8192, 512), (2, 32768, 512), (128, 1024, 512),
    (128, 8192, 512), (32, 8192, 8192),
]  # fmt: skip
PARTS = (0, 2, 4, 8, 16, 32)  # 0: the kernel's own choice


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


def steps_on_gpu() -> None:
    """Time the steps of a call apart, the read of the prefix with several numbers of parts."""
    print(f"\n{on_cuda.describe()}\n")
    print_header("shared", "who shares, us", "rest, us", *(f"prefix in {n or 'any'}, us" for n in PARTS), "merge, us")
    for shared in (1024, 8192, 32768):
        (query, key_cache, value_cache, table, lengths), prefix = make(32, shared, 512, torch.bfloat16, "cuda")
        batch = (table, lengths, None, prefix, BLOCK_SIZE, len(query), True)
        *one, rest_table, rest_lengths, _ = split_shared_prefix_op(*batch)
        read = partial(torch_pagedkv.paged_attention, query, key_cache, value_cache, return_lse=True)
        rest = read(rest_table, rest_lengths)
        calls = [partial(split_shared_prefix_op, *batch), partial(read, rest_table, rest_lengths)]
        calls += [partial(read, *one, causal=False, num_splits=n) for n in PARTS]
        calls.append(partial(torch_pagedkv.merge_attention_states, *rest, *rest))
        print_row(shared, *(on_cuda.microseconds(call)[0] for call in calls))


def main() -> None:
    device = {"choices": ("cpu", "cuda"), "default": "cpu"}
    arguments = parse(__doc__, seconds=1.0, device=device, steps={"action": "store_true"})
    torch.manual_seed(0)
    if arguments.device == "cuda":
        return steps_on_gpu() if arguments.steps else on_gpu()
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
