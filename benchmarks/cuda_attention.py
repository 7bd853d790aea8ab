"""The reads of bench_paged_attention.py on a GPU: every peer on the same tensors, checked, then timed."""

from __future__ import annotations

import dataclasses
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import on_cuda
import peers_on_cuda
import torch_pagedkv
from machine import print_header, print_row

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
_RANDOM = random.Random(0)
RAGGED = [_RANDOM.randint(100, 16000) for _ in range(64)]


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    lengths: Sequence[int]
    query_lengths: Sequence[int] | None = None
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    pool: torch.dtype = BF16
    is_hnd: bool = False
    window: int = -1
    has_sinks: bool = False
    has_prefix_sums: bool = False  # also where all sequences have one query


DECODE = [
    Shape("1 x 8k", [8192]),
    Shape("1 x 128k", [131072]),
    Shape("16 x 2k", [2048] * 16),
    Shape("64 x 8k", [8192] * 64),
    Shape("256 x 1k", [1024] * 256),
    Shape("64, ragged 100..16k", RAGGED),
    Shape("64 x 8k, 64 heads", [8192] * 64, num_heads=64),
    Shape("16 x 4k, 32 KV heads", [4096] * 16, num_kv_heads=32),
    Shape("64 x 8k, D 64", [8192] * 64, head_dim=64),
    Shape("64 x 8k, D 96", [8192] * 64, head_dim=96),
    Shape("32 x 8k, D 256", [8192] * 32, head_dim=256),
    Shape("64 x 8k, e4m3 pool", [8192] * 64, pool=E4M3),
    Shape("64 x 8k, block 1", [8192] * 64, block_size=1),
    Shape("64 x 8k, block 48", [8192] * 64, block_size=48),
    Shape("64 x 8k, block 256", [8192] * 64, block_size=256),
    Shape("64 x 8k, HND", [8192] * 64, is_hnd=True),
    Shape("64 x 8k, window 4096", [8192] * 64, window=4096),
    Shape("64 x 8k, sinks", [8192] * 64, has_sinks=True),
    Shape("64 x 8k, 40 heads", [8192] * 64, num_heads=40),
    Shape("64 x 8k, 128 heads", [8192] * 64, num_heads=128),
    Shape("32 x 4 queries on 8k", [8192] * 32, [4] * 32),
    Shape("32 x 4 queries on 8k, D 256", [8192] * 32, [4] * 32, head_dim=256),
    Shape("64 x 8k, prefix sums", [8192] * 64, has_prefix_sums=True),
    Shape("64 x 8k, e4m3 pool, prefix sums", [8192] * 64, pool=E4M3, has_prefix_sums=True),
    Shape("32 x 8k, D 256, prefix sums", [8192] * 32, head_dim=256, has_prefix_sums=True),
]
PREFILL = [
    Shape("512 on 4k + 31 decodes on 4k", [4096] * 32, [512] + [1] * 31),
    Shape("1 x 8k", [8192], [8192]),
    Shape("8 x 2k", [2048] * 8, [2048] * 8),
    Shape("1k on 16k", [16384], [1024]),
    Shape("1 x 8k, D 64", [8192], [8192], head_dim=64),
    Shape("1 x 4k, D 96", [4096], [4096], head_dim=96),
    Shape("1 x 4k, D 256", [4096], [4096], head_dim=256),
    Shape("1 x 4k, e4m3 pool", [4096], [4096], pool=E4M3),
    Shape("1 x 4k, block 1", [4096], [4096], block_size=1),
    Shape("1 x 4k, block 48", [4096], [4096], block_size=48),
    Shape("1 x 8k, block 128", [8192], [8192], block_size=128),
    Shape("1 x 4k, HND", [4096], [4096], is_hnd=True),
    Shape("1 x 8k, window 4096", [8192], [8192], window=4096),
    Shape("1 x 4k, sinks", [4096], [4096], has_sinks=True),
]


class Case:
    """The tensors of a shape, blocks in random order, and our call."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.lengths = list(shape.lengths)
        self.query_lengths = list(shape.query_lengths or [1] * len(shape.lengths))
        self.block_size = shape.block_size
        counts = [-(-length // shape.block_size) for length in self.lengths]
        num_blocks = sum(counts) + 8
        order = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)
        self.block_table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device="cuda")
        first = 0
        for row, count in zip(self.block_table, counts, strict=True):
            row[:count] = order[first : first + count]
            first += count
        middle = (shape.num_kv_heads, shape.block_size) if shape.is_hnd else (shape.block_size, shape.num_kv_heads)
        pools = (torch.randn(num_blocks, *middle, shape.head_dim, device="cuda", dtype=BF16) for _ in range(2))
        pools = [pool.to(shape.pool) for pool in pools]
        self.key_cache, self.value_cache = (pool.transpose(1, 2) if shape.is_hnd else pool for pool in pools)
        self.seqused_k = torch.tensor(self.lengths, dtype=torch.int32, device="cuda")
        sums = [0, *torch.tensor(self.query_lengths).cumsum(0).tolist()]
        self.cu_seqlens_q = torch.tensor(sums, dtype=torch.int32, device="cuda")
        self.query = torch.randn(sums[-1], shape.num_heads, shape.head_dim, device="cuda", dtype=BF16)
        self.scale = shape.head_dim**-0.5
        self.sinks = torch.randn(shape.num_heads, device="cuda") if shape.has_sinks else None

    @property
    def bytes(self) -> int:
        window = self.shape.window
        read = sum(length if window < 0 else min(length, window) for length in self.lengths)
        rows = read * self.shape.num_kv_heads * self.shape.head_dim * 2 * self.key_cache.element_size()
        return rows + 2 * self.query.numel() * self.query.element_size()

    @property
    def operations(self) -> int:
        window = self.shape.window if self.shape.window > 0 else max(self.lengths)
        rows = zip(self.query_lengths, self.lengths, strict=True)
        pairs = sum(min(position + 1, window) for q, k in rows for position in range(k - q, k))
        return 4 * pairs * self.shape.num_heads * self.shape.head_dim

    def ours(self) -> torch.Tensor:
        needs_starts = self.shape.has_prefix_sums or max(self.query_lengths) > 1
        starts = self.cu_seqlens_q if needs_starts else None
        window = (self.shape.window - 1, 0) if self.shape.window > 0 else (-1, -1)
        batch = (self.block_table, self.seqused_k, starts)
        pools = (self.key_cache, self.value_cache)
        return torch_pagedkv.paged_attention(self.query, *pools, *batch, window_size=window, sinks=self.sinks)

    def error_of(self, out: torch.Tensor) -> float:
        """Return the relative error of some rows of the first and the last sequence, against float32."""
        worst = 0.0
        for index in {0, len(self.lengths) - 1}:
            length, queries = self.lengths[index], self.query_lengths[index]
            start = int(self.cu_seqlens_q[index])
            row = torch.arange(queries, device="cuda")[:: max(1, queries // 32)]
            pools = (self.key_cache, self.value_cache)
            table = self.block_table[index, : -(-length // self.block_size)].long()
            group = self.shape.num_heads // self.shape.num_kv_heads
            keys, values = (p[table].float().flatten(0, 1)[:length].repeat_interleave(group, 1) for p in pools)
            scores = torch.einsum("qhd,khd->hqk", self.query[start + row].float(), keys) * self.scale
            distance = torch.arange(length, device="cuda") - (row + length - queries)[:, None]
            hidden = distance > 0
            if self.shape.window > 0:
                hidden = hidden | (distance <= -self.shape.window)
            scores = scores.masked_fill(hidden, -torch.inf)
            if self.sinks is not None:
                sink = self.sinks[:, None, None].expand(-1, len(row), 1)
                scores = torch.cat([scores, sink], -1)
                values = torch.cat([values, torch.zeros_like(values[:1])])
            expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
            got = out[start + row].float()
            worst = max(worst, ((got - expected).norm() / expected.norm()).item())
        return worst


def _calls_of(case: Case, readers: dict) -> dict:
    calls = {"ours": case.ours}
    shape = case.shape
    if shape.window < 0 and not (shape.has_sinks or shape.is_hnd or shape.has_prefix_sums):
        for name, reader in readers.items():
            try:
                calls[name] = reader(case)
            except Exception as error:
                print(f"{name} does not take {shape.name}: {str(error).splitlines()[0][:100]}", file=sys.stderr)
    return calls


def run(only: str, rows: str | None = None) -> None:
    """Print the table; with ``rows`` also write what draw_roofline.py draws into that file."""
    torch.manual_seed(0)
    print(f"\n{on_cuda.describe()}\n")
    readers = peers_on_cuda.load(peers_on_cuda.READERS)
    read_limit, copy_limit = on_cuda.bytes_per_microsecond()
    print(f"a plain read moves {read_limit / 1e6:.2f} TB/s, a copy {copy_limit / 1e6:.2f} TB/s\n")
    points = []
    print_header("case", "who", "us", "GB/s", "of the read limit", "TFLOP/s", "host, us", "error")
    for kind, shapes in (("decode", DECODE), ("prefill", PREFILL)):
        for shape in shapes if kind in only else []:
            case = Case(shape)
            for name, call in _calls_of(case, readers).items():
                try:
                    error = case.error_of(call())
                    assert error < 2e-2, f"relative error {error:.2g}"
                    on_device, host = on_cuda.microseconds(call)
                except Exception as failure:
                    if name == "ours":
                        raise
                    print(f"{name} fails at {shape.name}: {str(failure).splitlines()[0][:100]}", file=sys.stderr)
                    torch.cuda.synchronize()
                    continue
                rate, speed = case.bytes / on_device, case.operations / on_device / 1e6
                print_row(shape.name, name, on_device, rate / 1e3, rate / read_limit, speed, host, error)
                points.append({"kind": kind, "case": shape.name, "who": name, "tflops": speed})
                points[-1]["operations_per_byte"] = case.operations / case.bytes
            del case
            torch.cuda.empty_cache()
    if rows:
        limits = {"device": torch.cuda.get_device_name(), "tb_per_s": read_limit / 1e6}
        limits["tflops"] = on_cuda.operations_per_microsecond() / 1e6
        Path(rows).write_text(json.dumps({"limits": limits, "points": points}, indent=1))
