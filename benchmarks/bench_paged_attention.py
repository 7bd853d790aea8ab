"""paged_attention on a CPU or a GPU beside what people use instead, and beside the machine's limits.

    python benchmarks/bench_paged_attention.py --threads 2 1
    python benchmarks/bench_paged_attention.py --plot docs/decode_on_cpu.png
    python benchmarks/bench_paged_attention.py --device cuda --rows rows.json

Decode is compared with a sum over memory, prefill with a matrix product, both in the same rounds. "gather"
is indexing by the block table and scaled_dot_product_attention; "dense" is scaled_dot_product_attention on
keys and values that need no paging. Results are compared before anything is timed. On a GPU the peers are
those of peers_on_cuda.py that are installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F

import torch_pagedkv
from machine import (
    MANY_BYTES,
    describe,
    multiply,
    parse,
    print_header,
    print_row,
    read_everything,
    times_of,
)

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Timer = Callable[[dict[str, Callable[[], object]]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Shape:
    name: str
    sequences: int
    length: int
    query_length: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16


DECODE = [
    Shape("1 x 4k", 1, 4096),
    Shape("8 x 2k", 8, 2048),
    Shape("8 x 2k, blocks of 64", 8, 2048, block_size=64),
    Shape("32 x 512", 32, 512),
    Shape("8 x 2k, 32 KV heads", 8, 2048, num_kv_heads=32),
    Shape("8 x 2k, 9 on 3 heads of 64", 8, 2048, num_heads=9, num_kv_heads=3, head_dim=64),
]
PREFILL = [
    Shape("1 x 1k", 1, 1024, 1024),
    Shape("4 x 256", 4, 256, 256),
    Shape("1 x 1k, 9 on 3 heads of 64", 1, 1024, 1024, num_heads=9, num_kv_heads=3, head_dim=64),
]


class Case:
    """The tensors of a shape, blocks in random order, and the calls that compute it."""

    def __init__(self, shape: Shape, dtype: torch.dtype, pool: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        blocks = -(-shape.length // shape.block_size)
        num_blocks = shape.sequences * blocks + 8
        order = torch.randperm(num_blocks)[: shape.sequences * blocks]
        self.block_table = order.view(shape.sequences, blocks).int()
        size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self.key_cache, self.value_cache = (torch.randn(size).to(dtype).to(pool) for _ in range(2))
        self.seqused_k = torch.full((shape.sequences,), shape.length, dtype=torch.int32)
        sums = torch.arange(shape.sequences + 1, dtype=torch.int32) * shape.query_length
        self.cu_seqlens_q = None if shape.query_length == 1 else sums
        tokens = shape.sequences * shape.query_length
        self.query = torch.randn(tokens, shape.num_heads, shape.head_dim).to(dtype)

    @property
    def bytes(self) -> int:
        row = self.shape.num_kv_heads * self.shape.head_dim * self.key_cache.element_size()
        return 2 * self.shape.sequences * self.shape.length * row

    @property
    def operations(self) -> int:
        length, queries = self.shape.length, self.shape.query_length
        pairs = self.shape.sequences * (queries * length - queries * (queries - 1) // 2)
        return 4 * pairs * self.shape.num_heads * self.shape.head_dim

    def ours(self) -> torch.Tensor:
        batch = (self.block_table, self.seqused_k, self.cu_seqlens_q)
        return torch_pagedkv.paged_attention(self.query, self.key_cache, self.value_cache, *batch)

    def _gathered(self) -> list[torch.Tensor]:
        table = self.block_table.long()
        pools = (self.key_cache, self.value_cache)
        return [p[table].to(self.dtype).flatten(1, 2)[:, : self.shape.length].transpose(1, 2) for p in pools]

    def _attend(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        query = self.query.view(shape.sequences, shape.query_length, shape.num_heads, -1).transpose(1, 2)
        causal = shape.query_length > 1
        out = F.scaled_dot_product_attention(query, keys, values, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    def gather(self) -> torch.Tensor:
        return self._attend(*self._gathered())

    def dense(self) -> Callable[[], torch.Tensor]:
        keys, values = (gathered.contiguous() for gathered in self._gathered())
        return lambda: self._attend(keys, values)

    def calls(self, limit: Callable[[], object]) -> dict[str, Callable[[], object]]:
        """Return what is timed: ours, its peers, and what the machine allows; results are compared first."""
        check(self)
        return {"ours": self.ours, "gather": self.gather, "dense": self.dense(), "limit": limit}


def check(case: Case) -> None:
    error = (case.ours().float() - case.gather().float()).norm() / case.gather().float().norm()
    assert error < (1e-5 if case.dtype == FP32 else 2e-2), f"{case.shape.name}: error {error:.2g}"


def bench_decode(timer: Timer) -> None:
    print_header(
        "decode",
        "dtype",
        "ours, ms",
        "GB/s",
        "of reading",
        "gather, times ours",
        "dense, times ours",
    )
    for shape in DECODE:
        for dtype, pool in ((FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, E4M3), (BF16, E5M2)):
            case = Case(shape, dtype, pool)
            taken = timer(case.calls(read_everything))
            rate, limit = case.bytes / taken["ours"], MANY_BYTES / taken["limit"]
            times = [taken[peer] / taken["ours"] for peer in ("gather", "dense")]
            name = str(pool).removeprefix("torch.")
            print_row(shape.name, name, taken["ours"] * 1e3, rate / 1e9, rate / limit, *times)


def bench_prefill(timer: Timer) -> None:
    print_header(
        "prefill",
        "dtype",
        "ours, ms",
        "GFLOP/s",
        "of a matmul",
        "gather, times ours",
        "dense, times ours",
    )
    for shape in PREFILL:
        for dtype in (FP32, BF16, FP16):
            case = Case(shape, dtype, dtype)
            product, operations = multiply(dtype)
            taken = timer(case.calls(product))
            rate, limit = case.operations / taken["ours"], operations / taken["limit"]
            times = [taken[peer] / taken["ours"] for peer in ("gather", "dense")]
            name = str(dtype).removeprefix("torch.")
            print_row(shape.name, name, taken["ours"] * 1e3, rate / 1e9, rate / limit, *times)


def plot(path: str, timer: Timer) -> None:
    """Draw the time of one decode step against the context, with the time that reading takes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lengths = [256, 512, 1024, 2048, 4096, 8192]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for axis, dtype in zip(axes, (FP32, BF16), strict=True):
        lines: dict[str, list[float]] = {"gather": [], "dense": [], "ours": [], "reading alone": []}
        for length in lengths:
            case = Case(Shape(f"8 x {length}", 8, length), dtype, dtype)
            taken = timer(case.calls(read_everything))
            for name in ("gather", "dense", "ours"):
                lines[name].append(taken[name] * 1e3)
            lines["reading alone"].append(case.bytes / MANY_BYTES * taken["limit"] * 1e3)
        for name, times in lines.items():
            axis.loglog(lengths, times, "k--" if name == "reading alone" else "o-", label=name)
        axis.set(title=str(dtype).removeprefix("torch."), xlabel="tokens of each of 8 sequences")
        axis.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axis.minorticks_off()
        axis.legend()
    axes[0].set_ylabel("one decode step, ms")
    figure.suptitle(f"32 heads on 8 KV heads of 128, {torch.get_num_threads()} threads", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    arguments = parse(
        __doc__,
        seconds=1.0,
        device={"default": "cpu", "choices": ["cpu", "cuda"]},
        only={"default": "decode,prefill"},
        plot={"help": "draw the decode steps into this file instead"},
        rows={"help": "on a GPU: write the rows into this file too, for draw_roofline.py"},
    )
    if arguments.device == "cuda":
        import cuda_attention

        return cuda_attention.run(arguments.only, arguments.rows)
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")

        def timer(calls):
            return times_of(calls, arguments.seconds, disturbed=arguments.disturbed)

        if arguments.plot:
            return plot(arguments.plot, timer)
        if "decode" in arguments.only:
            bench_decode(timer)
            print()
        if "prefill" in arguments.only:
            bench_prefill(timer)


if __name__ == "__main__":
    main()
