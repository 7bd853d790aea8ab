"""reshape_and_cache beside index_copy_ and a plain copy of the same bytes, or on a GPU beside vLLM's.

    python benchmarks/bench_reshape_and_cache.py --threads 2 1
    python benchmarks/bench_reshape_and_cache.py --device cuda

Keys and values are slices of a fused projection. "blocks" are slots as an allocator gives them, block by
block; "tokens" are slots in random order. "native" is the C++ kernel without the checks in Python.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import torch_pagedkv
from machine import describe, parse, print_header, print_row, times_of

FP32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16


def calls_of(tokens: int, order: str, dtype: torch.dtype, pool: torch.dtype) -> dict[str, Callable[[], object]]:
    num_blocks = max(64, 2 * tokens // BLOCK_SIZE)
    caches = [torch.zeros(num_blocks, BLOCK_SIZE, HEADS, HEAD_DIM).to(pool) for _ in range(2)]
    packed = torch.randn(tokens, 48, HEAD_DIM).to(dtype)
    key, value = packed[:, 32:40], packed[:, 40:]
    slots = torch.randperm(num_blocks * BLOCK_SIZE)[:tokens]
    if order == "blocks":
        starts = torch.randperm(num_blocks)[:, None] * BLOCK_SIZE
        slots = (starts + torch.arange(BLOCK_SIZE)).flatten()[:tokens].clone()
    sources = [torch.randn(tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(2)]
    targets = [torch.empty_like(source) for source in sources]
    native = torch.ops.torch_pagedkv_native.reshape_and_cache.default

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def index_copy() -> None:
        for cache, rows in zip(caches, (key, value), strict=True):
            cache.view(-1, HEADS, HEAD_DIM).index_copy_(0, slots, rows)

    calls = {
        "ours": lambda: torch_pagedkv.reshape_and_cache(key, value, *caches, slots),
        "native": lambda: native(key, value, *caches, slots, None, None),
        "copy": copy,
    }
    if pool == dtype:
        calls["index_copy_"] = index_copy
        torch_pagedkv.reshape_and_cache(key, value, *caches, slots)
        for cache, rows in zip(caches, (key, value), strict=True):
            assert torch.equal(cache.view(-1, HEADS, HEAD_DIM)[slots], rows)
    return calls


def main() -> None:
    arguments = parse(__doc__, seconds=0.5, device={"default": "cpu", "choices": ["cpu", "cuda"]})
    if arguments.device == "cuda":
        import cuda_writes

        return cuda_writes.run()
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header(
            "write",
            "slots",
            "dtypes",
            "ours, us",
            "native, us",
            "copy, times ours",
            "index_copy_, times ours",
        )
        for dtype, pool in ((FP32, FP32), (BF16, BF16), (BF16, E4M3)):
            for tokens, order in (
                (1, "tokens"),
                (64, "blocks"),
                (4096, "blocks"),
                (4096, "tokens"),
            ):
                taken = times_of(
                    calls_of(tokens, order, dtype, pool),
                    arguments.seconds,
                    disturbed=arguments.disturbed,
                )
                times = [taken[n] / taken["ours"] if n in taken else "-" for n in ("copy", "index_copy_")]
                dtypes = " into ".join(str(d).removeprefix("torch.") for d in dict.fromkeys((dtype, pool)))
                print_row(
                    f"{tokens} tokens",
                    order,
                    dtypes,
                    taken["ours"] * 1e6,
                    taken["native"] * 1e6,
                    *times,
                )


if __name__ == "__main__":
    main()
