"""cascade_attention: the result of the plain call, whoever shares, and shared blocks read once."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, PagedCase
from devices import needs_cuda
from pools import assert_same_bits
from test_paged_attention import attend, expect, largest_value
from tolerances import assert_close, assert_close_lse
from torch_pagedkv.nn import cascade_attention as module  # the function; its module is looked up below

PREFIX = 3  # blocks that sequences share
DECODE = PagedCase(name="decode", kv_lens=[70, 48, 53, 90, 300])
CHUNK = PagedCase(name="chunk", kv_lens=[70, 53, 90, 61], query_lens=[7, 5, 1, 13])
CASES = [
    DECODE,
    DECODE.with_(name="empty_suffix", kv_lens=[48, 48, 48]),
    DECODE.with_(name="shorter_and_empty", kv_lens=[20, 70, 0, 47, 90]),
    DECODE.with_(name="nobody_is_long_enough", kv_lens=[20, 0, 47]),
    DECODE.with_(name="all_empty", kv_lens=[0, 0], extra_columns=3),
    DECODE.with_(name="empty_batch", kv_lens=[], extra_columns=3),
    DECODE.with_(name="one_sequence", kv_lens=[70]),
    DECODE.with_(name="sinks", sinks=[0.0, 5.0, -torch.inf, 50.0], kv_lens=[70, 48, 20, 0]),
    DECODE.with_(name="softcap", options={"softcap": 2.0}),
    DECODE.with_(name="group", num_heads=14, num_kv_heads=2, head_dim=32),
    DECODE.with_(name="bf16", dtype=BF16),
    DECODE.with_(name="fp16_hnd", dtype=FP16, layout="HND"),
    DECODE.with_(name="e4m3", dtype=BF16, pool_dtype=E4M3, scales="per_head"),
    DECODE.with_(name="e5m2", pool_dtype=E5M2, scales="one", sinks=[1.0]),
    DECODE.with_(name="block_size_7", block_size=7),
    DECODE.with_(name="int64", table_dtype=torch.int64, length_dtype=torch.int64),
    DECODE.with_(name="splits", options={"num_splits": 4}, sinks=[0.5]),
    DECODE.with_(name="value_dim", head_dim=24, value_head_dim=40, options={"softmax_scale": 0.3}),
    CHUNK,
    CHUNK.with_(name="queries_in_the_prefix", kv_lens=[70, 53, 60], query_lens=[7, 5, 30]),
    CHUNK.with_(name="first_query_sees_it_just", kv_lens=[54, 53], query_lens=[7, 7]),
    CHUNK.with_(name="not_causal", kv_lens=[70, 53, 48, 20], query_lens=[7, 53, 5, 5], options={"causal": False}),
    CHUNK.with_(name="padding", kv_lens=[70, 0, 90, 3], query_lens=[7, 0, 0, 3], padding_rows=4, sinks=[2.0]),
    CHUNK.with_(name="no_tokens", kv_lens=[70, 53], query_lens=[0, 0]),
    CHUNK.with_(name="longer_than_keys", kv_lens=[3, 70], query_lens=[5, 2]),
    CHUNK.with_(name="all_together", dtype=BF16, pool_dtype=E4M3, scales="per_head", sinks=[1.0, 0.0],
                options={"softcap": 5.0}, num_heads=6, padding_rows=2, layout="packed"),
]  # fmt: skip
NAMED = {case.name: case for case in CASES}


def build(case, device, blocks: int = PREFIX, outsiders=()):
    """The case with tables that begin alike, where their sequences are that long; ``outsiders`` keep their own."""
    batch = case.build(device)
    full = [i for i, length in enumerate(case.kv_lens) if length >= blocks * case.block_size]
    for i in full:
        if i not in outsiders:
            batch.block_table[i, :blocks] = batch.block_table[full[0], :blocks].clone()
    return batch


def cascade(batch, blocks: int = PREFIX, **changes):
    args, options = batch.attention
    return torch_pagedkv.cascade_attention(
        *args, **{**options, "return_lse": True, "num_prefix_blocks": blocks, **changes}
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_float64_reference(case, device):
    """Within the budget of the plain call, also where the parts are rounded before they are merged."""
    batch = build(case, device)
    out, lse = cascade(batch)
    expected_out, expected_lse = expect(batch)
    assert out.dtype == case.dtype and out.is_contiguous() and lse.is_contiguous()
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@pytest.mark.parametrize("outsiders", [(1,), (0,), (0, 1, 2, 3, 4)], ids=str)
@pytest.mark.parametrize("case", [DECODE, CHUNK.with_(padding_rows=2, sinks=[1.0])], ids=str)
def test_sequences_with_another_prefix_are_served_too(case, outsiders, device):
    batch = build(case, device, outsiders=outsiders)
    out, lse = cascade(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@pytest.mark.parametrize("blocks", [0, 1, 2, 4])
def test_any_number_of_blocks_gives_the_same(blocks, device):
    batch = build(DECODE, device, max(blocks, 1))
    expected_out, expected_lse = expect(batch)
    out, lse = cascade(batch, blocks)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))
    if blocks == 0:
        for actual, wanted in zip((out, lse), attend(batch)):
            assert_same_bits(actual, wanted)


def test_returns_what_is_asked_for(device):
    batch = build(DECODE, device)
    for blocks in (0, PREFIX):
        both = cascade(batch, blocks)
        assert_same_bits(cascade(batch, blocks, return_lse=False), both[0])


@pytest.fixture
def calls(monkeypatch) -> list:
    """The arguments of the reads inside."""
    import sys

    seen, read = [], torch_pagedkv.paged_attention

    def paged_attention(*args, **options):
        seen.append((args, options))
        return read(*args, **options)

    monkeypatch.setattr(sys.modules[module.__module__], "paged_attention", paged_attention)
    return seen


def test_the_prefix_is_read_once_for_all(calls):
    """One call has all queries on the prefix; the other's tables and lengths go on behind it."""
    batch = build(DECODE, "cpu")
    cascade(batch)
    (_, rest), (_, prefix) = calls
    rest_args, prefix_args = calls[0][0], calls[1][0]
    assert rest_args[4].tolist() == [length - 48 for length in DECODE.kv_lens]
    assert rest_args[3][0, :2].tolist() == batch.block_table[0, 3:5].tolist()
    assert prefix_args[3].tolist() == batch.block_table[:1, :3].tolist()
    assert prefix_args[4].tolist() == [48] and prefix_args[5].tolist() == [0, 5]
    assert prefix["causal"] is False and rest["causal"] is True


def test_sinks_go_into_one_part(calls):
    cascade(build(NAMED["sinks"], "cpu"))
    assert [options.get("sinks") is not None for _, options in calls] == [True, False]


def test_values_out_of_range_are_refused_as_ever():
    for change in ("long", "negative", "block"):
        batch = build(DECODE.with_(extra_columns=0), "cpu")
        if change == "long":  # of the sequence that fills its table: no stale entry would be met
            batch.seqused_k[4] = batch.block_table.shape[1] * 16 + 1
        elif change == "negative":
            batch.seqused_k[0] = -1
        else:
            batch.block_table[0, 4] = 10**6
        with pytest.raises(ValueError, match=r"paged_attention: (seqused_k|block_table) must"):
            cascade(batch)


def test_the_prefix_is_never_that_of_a_sequence_without_queries(device):
    """Nothing is promised of its table."""
    batch = build(CHUNK.with_(query_lens=[0, 5, 1, 13], sinks=[1.0]), device)
    expected_out, expected_lse = expect(batch)
    batch.block_table[0] = 10**6
    out, lse = cascade(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@pytest.mark.parametrize(
    "error,sentence,changes",
    [
        (ValueError, "window_size must be (-1, -1), because a window hides", {"window_size": (15, 0)}),
        (ValueError, "alibi_slopes must be None, because all rows read", {"alibi_slopes": torch.ones(4)}),
        (TypeError, "alibi_slopes must be a tensor or None, got float", {"alibi_slopes": 0.5}),
        (ValueError, "num_prefix_blocks must be in [0, 20], got 21", {"num_prefix_blocks": 21}),
        (ValueError, "num_prefix_blocks must be in [0, 20], got -1", {"num_prefix_blocks": -1}),
        (TypeError, "num_prefix_blocks must be an integer, got float", {"num_prefix_blocks": 1.5}),
        (TypeError, "query must be a tensor, got NoneType", {"query": None}),
        (ValueError, "query must have shape [num_tokens, num_heads, head_dim]", {"query": torch.ones(5, 64)}),
        (ValueError, "block_table must have shape [num_sequences, max_blocks]", {"block_table": torch.zeros(5).int()}),
        (ValueError, "block_table must have query's num_tokens = 5", {"block_table": torch.zeros(3, 20).int()}),
        (TypeError, "seqused_k must have dtype int32 or int64", {"seqused_k": torch.ones(5)}),
        (ValueError, "key_cache must have shape [num_blocks,", {"key_cache": torch.ones(4, 4, 4)}),
    ],
)
def test_refusals(error, sentence, changes):
    batch = build(DECODE, "cpu")
    names = ("query", "key_cache", "value_cache", "block_table", "seqused_k", "cu_seqlens_q")
    call = {**dict(zip(names, batch.attention[0])), "num_prefix_blocks": PREFIX, **changes}
    with pytest.raises(error) as refusal:
        torch_pagedkv.cascade_attention(**call)
    if "block_table" in changes and sentence.endswith("= 5"):
        sentence = "seqused_k must"  # whichever of the two that disagree is seen first
    assert str(refusal.value).startswith(f"cascade_attention: {sentence}")


def test_traces_whole_and_serves_every_length(device):
    """One graph for all lengths and tables; another number of shared blocks compiles once more, not each time."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor" if device == "cpu" else "aot_eager")
    compiled = torch.compile(torch_pagedkv.cascade_attention, fullgraph=True, backend=counter)
    batch = build(CHUNK, device)
    args, options = batch.attention
    for lengths, starts in ((CHUNK.kv_lens, [0, 7, 12, 13, 26]), ([54, 20, 60, 0], [0, 13, 20, 26, 26])):
        batch.seqused_k.copy_(torch.tensor(lengths))
        batch.cu_seqlens_q.copy_(torch.tensor(starts))
        expected = torch_pagedkv.cascade_attention(*args, num_prefix_blocks=PREFIX, return_lse=True, **options)
        actual = compiled(*args, num_prefix_blocks=PREFIX, return_lse=True, **options)
        for one, other in zip(actual, expected):
            assert_same_bits(one, other)
    assert counter.frame_count == 1
    for blocks in (1, 2, 4):
        compiled(*args, num_prefix_blocks=blocks, return_lse=True, **options)
    assert counter.frame_count <= 3


@pytest.mark.parametrize(
    "tokens,heads,kv_heads,prefix_len,splits",
    [
        (32, 32, 8, 32768, 16),  # 128 rows of a KV head: a program each, of 16 parts
        (32, 32, 8, 8192, 16),
        (32, 32, 8, 2048, 16),
        (32, 32, 8, 1000, 4),  # no part of less than 128 keys
        (32, 32, 8, 128, 1),
        (33, 32, 8, 32768, 8),
        (128, 32, 8, 32768, 4),
        (4096, 32, 8, 32768, 1),
        (4, 32, 8, 32768, 0),  # a decode kernel takes it, and shares it out by itself
        (32, 8, 1, 2**20, 64),
    ],
)
def test_parts_of_the_prefix_fill_a_gpu(tokens, heads, kv_heads, prefix_len, splits):
    import sys
    from types import SimpleNamespace

    choose = sys.modules[module.__module__]._splits_of_prefix
    key_cache = torch.empty(1, 8, kv_heads, 64)
    query = SimpleNamespace(shape=(tokens, heads, 64), is_cuda=True)
    assert choose(query, key_cache, prefix_len // 8) == splits
    assert choose(SimpleNamespace(shape=query.shape, is_cuda=False), key_cache, prefix_len // 8) == 0


@needs_cuda
def test_cuda_memory_is_that_of_two_parts():
    """Each part has an output and an LSE, the tables are copied once, and splits have their states; no more."""
    tokens, heads, dim, columns, blocks = 32, 32, 64, 64, 40
    key_cache, value_cache = torch.randn(2, 2048, 16, 8, dim, device="cuda", dtype=BF16).unbind(0)
    table = torch.randperm(2048, device="cuda", dtype=torch.int32).view(tokens, columns)
    table[:, :blocks] = table[0, :blocks].clone()
    query = torch.randn(tokens, heads, dim, device="cuda", dtype=BF16)
    rows, splits = tokens * heads, 64  # at most so many parts of a decode step
    taken = []
    for length in (700, 1024):
        lengths = torch.full((tokens,), length, device="cuda", dtype=torch.int32)
        for _ in range(2):  # the first call compiles
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            out = torch_pagedkv.cascade_attention(
                query, key_cache, value_cache, table, lengths, num_prefix_blocks=blocks
            )
            taken.append(torch.cuda.max_memory_allocated() - before)
            del out
    assert taken[1] == taken[3]
    results = rows * (3 * dim * 2 + 4 * 4) + 2 * table.nbytes
    assert taken[1] <= results + splits * rows * (dim + 2) * 4 + 20 * 512


@needs_cuda
def test_cuda_captures_and_never_waits():
    batch = build(CHUNK, "cuda")
    expected = cascade(batch)  # compiles
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        cascade(batch)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cascade(batch)
    graph.replay()
    for one, other in zip(captured, expected):
        assert_same_bits(one, other)
