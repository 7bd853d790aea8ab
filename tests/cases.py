"""The one table of inputs: it feeds the tests of values, opcheck, compilation and the benchmarks.

A case knows how to build its arguments on a device. Pools come poisoned: slots that the case did not
fill hold NaN, table entries that nobody may read hold a block of nothing but NaN or ids outside the pool.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from pools import make_pools, poison_

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Row:
    """A row of the table, printed as it stands there: what differs from the defaults."""

    name: str

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):
            value, default = getattr(self, field.name), field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            if default is dataclasses.MISSING or value != default:
                shown.append(f"{field.name}={repr(value).replace('inf', 'torch.inf')}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # hypothesis asks for it
        printer.text(repr(self))

    def with_(self, **changes: Any) -> Any:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PagedCase(Row):
    """A batch of sequences in paged pools, and the options of paged_attention."""

    name: str
    kv_lens: Sequence[int]
    query_lens: Sequence[int] | None = None  # None: decode, without prefix sums
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_head_dim: int | None = None
    block_size: int = 16
    layout: str = "NHD"
    dtype: torch.dtype = FP32
    pool_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.int32
    length_dtype: torch.dtype = torch.int32
    extra_columns: int = 1  # of the table, never read
    padding_rows: int = 0  # query rows past the last prefix sum
    scales: str = "none"  # none, one, per_head
    alibi: bool = False
    sinks: Sequence[float] | None = None  # repeated over the heads
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pool(self) -> torch.dtype:
        return self.pool_dtype or self.dtype

    def build(self, device: str, seed: int = 0) -> Batch:
        return Batch(self, device, seed)


class Batch:
    """The tensors of a case."""

    def __init__(self, case: PagedCase, device: str, seed: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        value_dim = case.value_head_dim or case.head_dim
        counts = [-(-length // case.block_size) for length in case.kv_lens]
        num_blocks = sum(counts) + 3
        order = torch.randperm(num_blocks - 1, generator=generator).tolist()
        unwritten = num_blocks - 1  # a block of NaN that stale table entries name
        self.key_cache, self.value_cache, self.buffers = make_pools(
            case.layout, num_blocks, case.block_size, case.num_kv_heads, case.head_dim, value_dim, case.pool, device
        )

        width = max(counts, default=0) + case.extra_columns
        stale = itertools.cycle([-1, unwritten, 2**31 - 1, num_blocks])
        table = [[next(stale) for _ in range(width)] for _ in case.kv_lens]
        for row, count in zip(table, counts):
            row[:count] = [order.pop() for _ in range(count)]
        self.tables = [row[:count] for row, count in zip(table, counts)]
        self._hide_columns_before_window(table, stale)
        # A column slice of a wider table: its row stride is not its width.
        wide = torch.full((len(table), width + 2), -(2**31), dtype=case.table_dtype)
        if table:
            wide[:, 1 : width + 1] = torch.tensor(table, dtype=case.table_dtype).view(len(table), width)
        self.block_table = wide.to(device)[:, 1 : width + 1]
        self.seqused_k = torch.tensor(case.kv_lens, dtype=case.length_dtype, device=device)
        query_lens = case.query_lens
        self.cu_seqlens_q = None
        if query_lens is not None:
            sums = [0, *itertools.accumulate(query_lens)]
            self.cu_seqlens_q = torch.tensor(sums, dtype=case.length_dtype, device=device)
        num_tokens = (len(case.kv_lens) if query_lens is None else sum(query_lens)) + case.padding_rows

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        for length, blocks in zip(case.kv_lens, self.tables):
            slots = torch.tensor(
                [blocks[p // case.block_size] * case.block_size + p % case.block_size for p in range(length)],
                dtype=torch.long,
            )
            block, offset = slots // case.block_size, slots % case.block_size
            for cache in (self.key_cache, self.value_cache):
                rows = normal(length, case.num_kv_heads, cache.shape[-1]).to(cache.dtype)
                for b, o, row in zip(block.tolist(), offset.tolist(), rows.to(device)):
                    cache[b, o].copy_(row)

        # The query is a slice of a packed projection.
        packed = normal(num_tokens, case.num_heads + 1, case.head_dim + 8).to(case.dtype).to(device)
        self.query = packed[:, : case.num_heads, : case.head_dim]
        options = dict(case.options)
        if case.scales != "none":
            count = {"one": 1, "per_head": case.num_kv_heads}[case.scales]
            options["k_scale"] = (torch.rand(count, generator=generator) + 0.25).to(device)
            options["v_scale"] = (torch.rand(count, generator=generator) * 4 + 1).to(device)
        if case.alibi:
            options["alibi_slopes"] = (torch.rand(case.num_heads, generator=generator) / 8).to(device)
        if case.sinks is not None:
            values = itertools.islice(itertools.cycle(case.sinks), case.num_heads)
            options["sinks"] = torch.tensor(list(values), device=device)
        self.options = options

    def _hide_columns_before_window(self, table: list[list[int]], stale: Iterator[int]) -> None:
        left = self.case.options.get("window_size", (-1, -1))[0]
        if left < 0:
            return
        query_lens = self.case.query_lens or [1] * len(table)
        for row, length, query_len in zip(table, self.case.kv_lens, query_lens):
            first_visible = max(0, length - query_len - left)
            for column in range(first_visible // self.case.block_size):
                row[column] = next(stale)

    @property
    def attention(self) -> tuple[tuple, dict]:
        """Arguments of paged_attention."""
        batch = (self.key_cache, self.value_cache, self.block_table, self.seqused_k, self.cu_seqlens_q)
        return (self.query, *batch), self.options

    @property
    def gather(self) -> tuple[tuple, dict]:
        """Arguments of gather_kv."""
        scales = {k: v for k, v in self.options.items() if k in ("k_scale", "v_scale")}
        return (self.key_cache, self.value_cache, self.block_table, self.seqused_k), scales

    @property
    def slots(self) -> tuple[tuple, dict]:
        """Arguments of compute_slot_mapping."""
        sizes = (self.case.block_size, self.query.shape[0])
        return (self.block_table, self.seqused_k, self.cu_seqlens_q, *sizes), {}


def _matrix() -> list[PagedCase]:
    decode = PagedCase(name="decode", kv_lens=[1, 16, 17, 70])
    chunk = PagedCase(name="chunk", kv_lens=[40, 5, 33, 90], query_lens=[7, 5, 1, 20])
    long = PagedCase(name="long", kv_lens=[300, 650], block_size=16)
    cases = [
        decode,
        chunk,
        decode.with_(name="prefix_sums_of_one", query_lens=[1, 1, 1, 1]),
        chunk.with_(name="prefill", kv_lens=[70, 5, 33], query_lens=[70, 5, 33]),
        chunk.with_(name="not_causal", options={"causal": False}),
        chunk.with_(name="empty_ranges", kv_lens=[40, 0, 33, 9, 0], query_lens=[0, 3, 33, 0, 0], padding_rows=4),
        chunk.with_(name="first_query_alone", kv_lens=[0, 0, 0, 8], query_lens=[0, 0, 0, 1], num_heads=6),
        chunk.with_(name="repeated_prefix_sums", kv_lens=[9, 20, 0, 33], query_lens=[0, 1, 0, 1]),
        decode.with_(name="all_lengths_0", kv_lens=[0, 0, 0]),
        decode.with_(name="empty_batch", kv_lens=[]),
        chunk.with_(name="no_tokens", kv_lens=[5, 9], query_lens=[0, 0]),
        chunk.with_(name="only_padding", kv_lens=[], query_lens=[], padding_rows=3),
        decode.with_(name="exact_table", kv_lens=[64, 65, 128], extra_columns=0),
        decode.with_(name="query_longer_than_keys", kv_lens=[3, 0], query_lens=[5, 2]),
        decode.with_(name="int64_indices", table_dtype=torch.int64, length_dtype=torch.int64),
        decode.with_(name="mixed_indices", table_dtype=torch.int64),
        decode.with_(name="own_scale", options={"softmax_scale": 0.3}),
        long.with_(name="one_split", options={"num_splits": 1}),
        long.with_(name="two_splits", options={"num_splits": 2}),
        long.with_(name="eight_splits", kv_lens=[300, 650, 3, 0], options={"num_splits": 8}, sinks=[0.5, -1.0]),
        long.with_(name="long_chunks", query_lens=[100, 3], num_heads=6),
        long.with_(name="long_window", options={"window_size": (100, 0), "num_splits": 8}, sinks=[2.0]),
        long.with_(name="very_long", kv_lens=[2500, 1100, 3], sinks=[0.5, -torch.inf]),
        long.with_(
            name="very_long_window", kv_lens=[2300, 1500], query_lens=[40, 1], options={"window_size": (1400, 0)}
        ),
        long.with_(name="very_long_e4m3", kv_lens=[2500, 1100], dtype=BF16, pool_dtype=E4M3, scales="per_head"),
        chunk.with_(name="window_own_key", options={"window_size": (0, 0)}),
        chunk.with_(name="window", options={"window_size": (15, 0)}),
        decode.with_(name="window_decode", options={"window_size": (19, 0)}),
        chunk.with_(  # the last queries see nothing of the first query's first keys
            name="window_over_tiles", kv_lens=[130, 70], query_lens=[6, 6], options={"window_size": (62, 0)}
        ),
        chunk.with_(name="window_both", options={"window_size": (6, 3), "causal": False}),
        chunk.with_(name="window_right", options={"window_size": (-1, 2), "causal": False}),
        chunk.with_(name="softcap", options={"softcap": 2.0}),
        chunk.with_(name="alibi", alibi=True),
        chunk.with_(name="sinks", sinks=[0.0, 5.0, -torch.inf, 50.0]),
        chunk.with_(
            name="all_options",
            alibi=True,
            sinks=[1.0, 0.0],
            options={"window_size": (9, 0), "softcap": 5.0},
            dtype=BF16,
        ),
        chunk.with_(name="value_dim", head_dim=48, value_head_dim=24),
        decode.with_(name="value_dim_wider", head_dim=16, value_head_dim=40, dtype=BF16),
    ]
    for dtype, label in ((BF16, "bf16"), (FP16, "fp16")):
        cases += [c.with_(name=f"{c.name}_{label}", dtype=dtype) for c in (decode, chunk, long)]
    for pool, label in ((E4M3, "e4m3"), (E5M2, "e5m2")):
        for scales, dtype in (("none", FP32), ("one", BF16), ("per_head", FP16), ("per_head", FP32)):
            name = f"{label}_{scales}_{str(dtype)[6:]}"
            cases.append(chunk.with_(name=name, dtype=dtype, pool_dtype=pool, scales=scales))
            cases.append(decode.with_(name=f"decode_{name}", dtype=dtype, pool_dtype=pool, scales=scales))
    for layout in ("HND", "mixed", "unbind", "packed", "packed_hnd", "layers", "padded", "offset"):
        cases.append(chunk.with_(name=f"layout_{layout}", layout=layout))
        cases.append(decode.with_(name=f"layout_{layout}_bf16", layout=layout, dtype=BF16))
    for size in (1, 2, 3, 7, 48, 96, 256, 528, 784):
        cases.append(chunk.with_(name=f"block_size_{size}", block_size=size, kv_lens=[2 * size + 1, 5, 33, 90]))
    for dim in (8, 20, 40, 56, 72, 80, 96, 100, 112, 120, 128, 160, 192, 256, 512):
        cases.append(chunk.with_(name=f"head_dim_{dim}", head_dim=dim, dtype=BF16 if dim % 3 else FP16))
    for heads, kv_heads in ((3, 3), (3, 1), (5, 1), (6, 1), (14, 2), (12, 1), (16, 1), (64, 1), (71, 1)):
        ratio = heads // kv_heads
        cases.append(
            chunk.with_(name=f"ratio_{ratio}_of_{kv_heads}", num_heads=heads, num_kv_heads=kv_heads, head_dim=32)
        )
        cases.append(
            decode.with_(name=f"decode_ratio_{ratio}_of_{kv_heads}", num_heads=heads, num_kv_heads=kv_heads, dtype=BF16)
        )
    return cases


PAGED = _matrix()


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class WriteCase(Row):
    """New tokens and the slots that they go to."""

    name: str
    slots: Sequence[int] = (5, -1, 62, 7, -123, 0)
    num_blocks: int = 5
    block_size: int = 16
    num_kv_heads: int = 2
    head_dim: int = 64
    value_head_dim: int | None = None
    layout: str = "NHD"
    dtype: torch.dtype = FP32
    pool_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    padding_rows: int = 0  # tokens past the slots
    source: str = "packed"  # contiguous, packed (slices of a fused projection), expanded
    scales: str = "none"

    def build(self, device: str, seed: int = 0) -> tuple[tuple, dict, list[torch.Tensor]]:
        """Return arguments, keyword arguments, and the buffers behind the pools."""
        generator = torch.Generator().manual_seed(seed)
        value_dim = self.value_head_dim or self.head_dim
        key_cache, value_cache, buffers = make_pools(
            self.layout,
            self.num_blocks,
            self.block_size,
            self.num_kv_heads,
            self.head_dim,
            value_dim,
            self.pool_dtype or self.dtype,
            device,
        )
        num_tokens = len(self.slots) + self.padding_rows
        heads = self.num_kv_heads
        widths = (heads * self.head_dim, heads * value_dim)
        packed = torch.randn((num_tokens, 24 + sum(widths)), generator=generator) * 3
        packed = packed.to(self.dtype)
        key = packed[:, 24 : 24 + widths[0]].unflatten(1, (heads, self.head_dim))
        value = packed[:, 24 + widths[0] :].unflatten(1, (heads, value_dim))
        for token, slot in enumerate([*self.slots, *[-1] * self.padding_rows]):
            if slot < 0:  # what a padding row holds must not matter
                poison_(packed[token])
        packed = packed.to(device)
        key = packed[:, 24 : 24 + widths[0]].unflatten(1, (heads, self.head_dim))
        value = packed[:, 24 + widths[0] :].unflatten(1, (heads, value_dim))
        if self.source == "contiguous":
            key, value = key.contiguous(), value.contiguous()
        elif self.source == "expanded":
            value = value[:1].expand(num_tokens, -1, -1)
        slot_mapping = torch.tensor(list(self.slots), dtype=self.index_dtype, device=device)
        scales = {}
        if self.scales != "none":
            count = {"one": (1,), "scalar": (), "per_head": (heads,)}[self.scales]
            scales["k_scale"] = (torch.rand(count, generator=generator) + 0.25).to(device)
            scales["v_scale"] = (torch.rand(count, generator=generator) * 4 + 1).to(device)
        return (key, value, key_cache, value_cache, slot_mapping), scales, buffers


def _write_matrix() -> list[WriteCase]:
    base = WriteCase(name="float32")
    cases = [
        base,
        base.with_(name="contiguous", source="contiguous"),
        base.with_(name="expanded", source="expanded"),
        base.with_(name="int32_slots", index_dtype=torch.int32),
        base.with_(name="padding_rows", padding_rows=5),
        base.with_(name="no_tokens", slots=()),
        base.with_(name="no_slots_but_tokens", slots=(), padding_rows=3),
        base.with_(name="all_padding", slots=(-1, -2, -(2**40))),
        base.with_(name="value_dim", value_head_dim=24),
        base.with_(name="many", slots=tuple(range(79, -1, -1)), dtype=BF16),
        base.with_(name="bf16", dtype=BF16),
        base.with_(name="fp16", dtype=FP16),
        base.with_(name="fp8_bytes_e4m3", dtype=E4M3),
        base.with_(name="fp8_bytes_e5m2", dtype=E5M2, layout="HND"),
    ]
    for layout in ("HND", "mixed", "unbind", "packed", "packed_hnd", "layers", "padded", "offset"):
        cases.append(base.with_(name=f"layout_{layout}", layout=layout, dtype=BF16))
    for pool, label in ((E4M3, "e4m3"), (E5M2, "e5m2")):
        for dtype, scales in ((FP32, "none"), (BF16, "one"), (FP16, "scalar"), (BF16, "per_head")):
            name = f"{label}_{scales}_{str(dtype)[6:]}"
            cases.append(base.with_(name=name, dtype=dtype, pool_dtype=pool, scales=scales))
        cases.append(base.with_(name=f"{label}_hnd", pool_dtype=pool, layout="HND", scales="per_head", dtype=BF16))
        cases.append(base.with_(name=f"{label}_offset", pool_dtype=pool, layout="offset", scales="one", dtype=BF16))
    for dim in (1, 8, 20, 46, 63, 100, 128, 256, 512):
        cases.append(base.with_(name=f"head_dim_{dim}", head_dim=dim, dtype=BF16))
        cases.append(base.with_(name=f"head_dim_{dim}_e4m3", head_dim=dim, dtype=BF16, pool_dtype=E4M3, scales="one"))
    for size, blocks in ((1, 80), (3, 40), (7, 12), (528, 2)):
        cases.append(base.with_(name=f"block_size_{size}", block_size=size, num_blocks=blocks))
    for heads in (1, 3, 8):
        cases.append(base.with_(name=f"kv_heads_{heads}", num_kv_heads=heads, dtype=BF16))
    return cases


WRITE = _write_matrix()
