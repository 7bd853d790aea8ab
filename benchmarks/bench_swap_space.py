"""SwapSpace beside a plain copy of as many bytes, and on a GPU beside compute on the main stream.

    python benchmarks/bench_swap_space.py --threads 1
    python benchmarks/bench_swap_space.py --device cuda

Blocks lie in random order, host blocks in a row or not. What comes back is compared with what went, to the
bit, before anything is timed. On a GPU the copy is one between pinned memory and the device, and the time
is that until both streams are done; "compute" is a row of matrix products on the main stream that takes about
as long, "both" is both enqueued in one go, and "hidden" the share of the shorter one that the other one covers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import on_cuda
from machine import describe, parse, print_header, print_row, times_of
from torch_pagedkv import PagedKVCache, SwapSpace

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
ROUNDS = 7


def make(
    blocks: int, device: str, staging_blocks: int = 16, *, in_a_row: bool = False
) -> tuple[PagedKVCache, SwapSpace, list, list]:
    """Return a cache, room for its blocks, and the pairs of a swap out and of the swap back in."""
    host_blocks = torch.arange(blocks) if in_a_row else torch.randperm(blocks)
    sizes = {"num_blocks": blocks, "block_size": BLOCK_SIZE, "dtype": torch.bfloat16}
    cache = PagedKVCache(NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM, **sizes, device=device)
    cache.storage.normal_()
    out = list(zip(torch.randperm(blocks).tolist(), host_blocks.tolist(), strict=True))
    return cache, SwapSpace(cache, blocks, staging_blocks=staging_blocks), out, [(host, block) for block, host in out]


def check(cache: PagedKVCache, swap_space: SwapSpace, out: list, back: list) -> None:
    before = cache.storage.clone()
    swap_space.swap_out(out)
    cache.storage.zero_()
    swap_space.swap_in(back)
    assert torch.equal(cache.storage, before), "other numbers came back"


def on_cpu(arguments) -> None:
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header("blocks", "MB", "out, GB/s", "in, GB/s", "copy, GB/s")
        for blocks in (16, 128):
            cache, swap_space, out, back = make(blocks, "cpu")
            check(cache, swap_space, out, back)
            copied = torch.empty_like(cache.storage)
            calls = {
                "out": partial(swap_space.swap_out, out),
                "in": partial(swap_space.swap_in, back),
                "copy": partial(copied.copy_, cache.storage),
            }
            taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
            print_row(blocks, cache.nbytes / 1e6, *(cache.nbytes / taken[name] / 1e9 for name in calls))


def milliseconds(call: Callable[[], object]) -> tuple[float, float]:
    """Return medians of (time until all streams are done, time of the host until the call returns)."""
    call()
    whole, host = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        call()
        host.append(time.perf_counter() - before)
        torch.cuda.synchronize()
        whole.append(time.perf_counter() - before)
    return statistics.median(whole) * 1e3, statistics.median(host) * 1e3


def on_gpu() -> None:
    print(f"\n{on_cuda.describe()}\n")
    pinned = torch.empty(2**28, dtype=torch.int8, pin_memory=True)
    on_device = torch.empty(2**28, dtype=torch.int8, device="cuda")
    limits = {
        "out": milliseconds(lambda: pinned.copy_(on_device, non_blocking=True))[0],
        "in": milliseconds(lambda: on_device.copy_(pinned, non_blocking=True))[0],
    }
    compute = Products()
    print_header(
        "blocks", "MB", "staging_blocks", "host blocks", "way", "GB/s", "of a plain copy", "host, ms",
        "compute, ms", "both, ms", "hidden",
    )  # fmt: skip
    cases = [(16, 16, False), (128, 16, False), (128, 16, True), (128, 64, False), (512, 16, False), (512, 256, True)]
    for blocks, staging_blocks, in_a_row in cases:
        cache, swap_space, out, back = make(blocks, "cuda", staging_blocks, in_a_row=in_a_row)
        check(cache, swap_space, out, back)
        for way, swap in (("out", partial(swap_space.swap_out, out)), ("in", partial(swap_space.swap_in, back))):
            whole, host = milliseconds(swap)
            products = compute.as_long_as(whole)
            alone, _ = milliseconds(products)
            # Out: the blocks are free at once, and compute goes on. In: compute was enqueued before.
            both, _ = milliseconds(
                partial(one_after_the_other, *((swap, products) if way == "out" else (products, swap)))
            )
            rate, hidden = cache.nbytes / whole / 1e6, (whole + alone - both) / min(whole, alone)
            limit = pinned.nbytes / limits[way] / 1e6
            order = "in a row" if in_a_row else "in any order"
            named = (blocks, cache.nbytes / 1e6, staging_blocks, order, way)
            print_row(*named, rate, rate / limit, host, alone, both, hidden)


class Products:
    """Matrix products on the main stream."""

    def __init__(self) -> None:
        self.square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
        self.result = torch.empty_like(self.square)
        self.taken = milliseconds(partial(self.run, 10))[0] / 10

    def run(self, number: int) -> None:
        for _ in range(number):
            torch.mm(self.square, self.square, out=self.result)

    def as_long_as(self, milliseconds: float) -> Callable[[], None]:
        """Return as many products as take about so long."""
        return partial(self.run, max(1, round(milliseconds / self.taken)))


def one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def main() -> None:
    device = {"choices": ("cpu", "cuda"), "default": "cpu"}
    arguments = parse(__doc__, seconds=0.5, device=device)
    torch.manual_seed(0)
    if arguments.device == "cuda":
        on_gpu()
    else:
        on_cpu(arguments)


if __name__ == "__main__":
    main()
