"""The writes of bench_reshape_and_cache.py on a GPU: every peer on the same tensors, checked, then timed."""

from __future__ import annotations

import sys

import torch

import on_cuda
import peers_on_cuda
import torch_pagedkv
from machine import print_header, print_row

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 16
CASES = [
    (tokens, is_hnd, pool)
    for tokens in (1, 128, 8192, 65536)
    for is_hnd in (False, True)
    for pool in (BF16, E4M3)
]  # fmt: skip


def _ours(key, value, key_cache, value_cache, slots, scale) -> None:
    torch_pagedkv.reshape_and_cache(key, value, key_cache, value_cache, slots, k_scale=scale, v_scale=scale)


def _pools(tokens: int, is_hnd: bool, pool: torch.dtype) -> list[torch.Tensor]:
    num_blocks = max(64, 2 * tokens // BLOCK_SIZE)
    middle = (HEADS, BLOCK_SIZE) if is_hnd else (BLOCK_SIZE, HEADS)
    pools = [torch.zeros(num_blocks, *middle, HEAD_DIM, device="cuda").to(pool) for _ in range(2)]
    return [p.transpose(1, 2) if is_hnd else p for p in pools]


def _check(name: str, pools: list[torch.Tensor], rows: tuple, slots: torch.Tensor, scale) -> None:
    for pool, source in zip(pools, rows, strict=True):
        expected = source.float() if scale is None else source.float() / scale
        expected = expected.to(pool.dtype)
        stored = pool[slots // BLOCK_SIZE, slots % BLOCK_SIZE]
        assert torch.equal(stored.float(), expected.float()), f"{name} stores other numbers"


def run() -> None:
    torch.manual_seed(0)
    print(f"\n{on_cuda.describe()}\n")
    writers = {"ours": _ours, **peers_on_cuda.load(peers_on_cuda.WRITERS)}
    _, copy_limit = on_cuda.bytes_per_microsecond()
    print(f"a plain copy moves {copy_limit / 1e6:.2f} TB/s\n")
    print_header("tokens", "layout", "pool", "who", "us", "GB/s", "of the copy limit", "host, us")
    for tokens, is_hnd, pool in CASES:
        packed = torch.randn(tokens, 48, HEAD_DIM, device="cuda", dtype=BF16)
        key, value = packed[:, 32:40], packed[:, 40:]  # slices of a fused projection
        scale = None if pool == BF16 else torch.ones(1, device="cuda")
        num_slots = max(64, 2 * tokens // BLOCK_SIZE) * BLOCK_SIZE
        slots = torch.randperm(num_slots, device="cuda")[:tokens].contiguous()
        moved = 2 * tokens * HEADS * HEAD_DIM * (BF16.itemsize + pool.itemsize)
        for name, write in writers.items():
            pools = _pools(tokens, is_hnd, pool)
            arguments = (key, value, *pools, slots, scale)
            try:
                write(*arguments)
                _check(name, pools, (key, value), slots, scale)
                on_device, host = on_cuda.microseconds(lambda: write(*arguments))  # noqa: B023
            except NotImplementedError as error:
                print(f"{name} does not take this case: {error}", file=sys.stderr)
                continue
            rate = moved / on_device
            names = ("HND" if is_hnd else "NHD", str(pool).removeprefix("torch."), name)
            print_row(tokens, *names, on_device, rate / 1e3, rate / copy_limit, host)
