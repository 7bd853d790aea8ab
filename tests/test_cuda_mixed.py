"""Chunks and decodes in one batch, which Hopper's kernels read beside each other."""

from __future__ import annotations

import pytest
import torch

from cases import BF16, FP16, PagedCase
from devices import needs_cuda
from pools import LAYOUTS, assert_all_same_bits
from test_paged_attention import attend, attend_as_reference, attend_to_sequences, refilled

# More tokens than if no sequence were long, so that multiprocessors may be left to the long ones.
LENGTHS = {"kv_lens": [900, 700, 33, 650, 1], "query_lens": [1, 300, 1, 40, 1]}
WIDE = {"dtype": BF16, "head_dim": 128, "num_heads": 16, "num_kv_heads": 4}
CASES = [
    PagedCase(name="one_long", kv_lens=[500] + [900] * 4, query_lens=[200] + [1] * 4, **WIDE),
    PagedCase(name="several_long", kv_lens=[900, 333, 64, 900, 500, 17], query_lens=[1, 333, 64, 1, 150, 1], **WIDE),
    PagedCase(name="long_last", kv_lens=[900, 80, 1, 700], query_lens=[1, 2, 1, 700], **WIDE),
    PagedCase(name="little_to_read", kv_lens=[1, 0, 1200], query_lens=[1, 1, 600], **WIDE),
    PagedCase(name="little_to_multiply", kv_lens=[900, 900, 20], query_lens=[1, 1, 17], **WIDE),
    PagedCase(name="speculative", kv_lens=[900, 900, 400], query_lens=[4, 3, 200], **WIDE),
    PagedCase(name="padding", padding_rows=30, **LENGTHS, **WIDE),
    PagedCase(name="heads_of_64", padding_rows=3, **LENGTHS, **{**WIDE, "head_dim": 64}),
    PagedCase(name="heads_of_256", **LENGTHS, **{**WIDE, "head_dim": 256}),
    PagedCase(name="fp16", **LENGTHS, **{**WIDE, "dtype": FP16}),
    PagedCase(name="5_kv_heads", **LENGTHS, **{**WIDE, "num_heads": 10, "num_kv_heads": 5}),
    PagedCase(name="window", options={"window_size": (150, 0)}, **LENGTHS, **WIDE),
    PagedCase(name="not_causal", options={"causal": False}, **LENGTHS, **WIDE),
    PagedCase(name="all_options", alibi=True, sinks=[1.0, 0.0], options={"softcap": 5.0}, **LENGTHS, **WIDE),
    # The launch that joins parts is told where teams start.
    PagedCase(name="many_sequences", kv_lens=[700] + [3 + 11 * (i % 7) for i in range(600)],
              query_lens=[700] + [1 + i % 2 for i in range(600)], dtype=BF16, head_dim=128),
    PagedCase(name="rows_without_keys", kv_lens=[0, 20, 300], query_lens=[40, 90, 1], padding_rows=40,
              sinks=[0.5, -torch.inf], **WIDE),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_mixed_batch_equals_float64_reference(case, device):
    """The same bits again, in other layouts, and with other bytes where nobody looks."""
    batch = case.build(device)
    out, lse = attend_as_reference(batch)
    if device == "cpu":
        return
    for layout in LAYOUTS if case in CASES[:2] else ("HND", "offset"):
        assert_all_same_bits(attend(case.with_(layout=layout).build(device)), (out, lse))
    for byte in (0x00, 0xFF):
        assert_all_same_bits(attend(refilled(batch, byte)), (out, lse))


@needs_cuda
@pytest.mark.parametrize("num_splits", [0, 1])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_one_graph_serves_chunks_decodes_and_both(head_dim, num_splits):
    """Every row is written at each replay, with the bits of an eager call, whatever the lengths are."""
    case = PagedCase(name="graph", padding_rows=5, **LENGTHS, **{**WIDE, "head_dim": head_dim})
    batch = case.with_(options={"num_splits": num_splits}).build("cuda")
    attend(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(batch)
    mixed = [1, 300, 1, 40, 1]
    for query_lens in (mixed, [1, 1, 1, 1, 1], [0, 300, 0, 40, 0], [4, 0, 2, 340, 1], [0] * 5, mixed):
        batch.cu_seqlens_q.copy_(torch.tensor([0, *query_lens]).cumsum(0))
        expected = attend(batch)
        for result in (out, lse):
            result.fill_(float("nan"))
        graph.replay()
        assert_all_same_bits((out, lse), expected)
        assert not out.isnan().any() and not lse.isnan().any()


@needs_cuda
def test_rows_of_a_mixed_batch_do_not_depend_on_it_without_splits():
    case = PagedCase(name="mates", options={"num_splits": 1}, **LENGTHS, **WIDE)
    batch = case.build("cuda")
    out, lse = attend(batch)
    for index in range(len(case.kv_lens)):
        alone, rows = attend_to_sequences(batch, index, index + 1)
        assert_all_same_bits(alone, (out[rows], lse[:, rows].contiguous()))


@needs_cuda
def test_calls_behind_each_other_change_no_bit_of_each_other():
    """Each begins with memory that the one before it has just given back."""
    batches = [case.build("cuda") for case in CASES[:4]]
    expected = [attend(batch) for batch in batches]
    torch.cuda.synchronize()
    for _ in range(30):
        results = [attend(batch) for batch in batches]
        for actual, wanted in zip(results, expected, strict=True):
            assert_all_same_bits(actual, wanted)
