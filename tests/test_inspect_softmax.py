"""inspect.trace_softmax: every running state is the softmax of the keys so far, and its rules hold."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32, PAGED, PagedCase
from pools import assert_same_bits
from tolerances import assert_close, assert_close_lse
from torch_pagedkv import inspect, reference
from torch_pagedkv.__main__ import main
from torch_pagedkv.inspect import SoftmaxState

SMALL = PagedCase(name="small", kv_lens=[37, 5, 0, 64], head_dim=16)
CASES = [
    SMALL,
    SMALL.with_(name="chunk", query_lens=[7, 5, 0, 3], padding_rows=2),
    SMALL.with_(name="longer_than_keys", kv_lens=[3, 20], query_lens=[5, 2]),
    SMALL.with_(name="softcap", options={"softcap": 2.0}),
    SMALL.with_(name="own_scale", options={"softmax_scale": 0.7}, block_size=7),
    SMALL.with_(name="group", num_heads=6, num_kv_heads=2, layout="HND", head_dim=24, value_head_dim=20),
    SMALL.with_(name="bf16", dtype=BF16),
    SMALL.with_(name="e4m3", dtype=BF16, pool_dtype=E4M3, scales="per_head"),
    SMALL.with_(name="e5m2", dtype=FP16, pool_dtype=E5M2, scales="one"),
    SMALL.with_(name="empty", kv_lens=[0, 0]),
]
# This file runs as it is, and once more under Triton's interpreter.
KERNEL = "triton" if os.environ.get("TRITON_INTERPRET") == "1" else "torch"


@pytest.fixture
def kernel(device) -> str:
    return "triton" if device == "cuda" else KERNEL


def trace(batch, tile: int, kernel: str) -> list[SoftmaxState]:
    args, options = batch.attention
    return inspect.trace_softmax(*args, **options, tile=tile, kernel=kernel)


def prefix(batch, keys: int, compute, **changes):
    """(out, lse) over the keys before position ``keys``: lengths are cut, and the mask stays where it was."""
    (query, key_cache, value_cache, table, lengths, sums), options = batch.attention
    if sums is None:
        cut = {"causal": False}
        return compute(query, key_cache, value_cache, table, lengths.clamp(max=keys), None, **options, **cut, **changes)
    outs, lses = [], []
    starts = sums.tolist()
    for i, length in enumerate(lengths.tolist()):
        # A window to the right of so many keys is the causal mask of the whole length.
        cut = {"causal": False, "window_size": (-1, length - min(length, keys))}
        rows = query[starts[i] : starts[i + 1]]
        ends = torch.tensor([0, len(rows)], device=query.device)
        one = (rows, key_cache, value_cache, table[i : i + 1], lengths[i : i + 1].clamp(max=keys), ends)
        out, lse = compute(*one, **options, **cut, **changes)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("tile", [1, 16, 24])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_state_is_the_softmax_so_far(case, tile, device, kernel):
    """Against the dense float64 softmax and against the op, over the keys before each tile's end."""
    batch = case.build(device)
    states = trace(batch, tile, kernel)
    assert len(states) == -(-max(case.kv_lens) // tile)
    every = max(1, len(states) // 3)
    for index in {*range(0, len(states), every), len(states) - 1} if states else ():
        state = states[index]
        dense = functools.partial(reference.paged_attention, precision=torch.float64)
        out, lse = prefix(batch, (index + 1) * tile, dense)
        rows = len(out)
        assert_close(state.out[:rows], out, largest=8.0)
        assert_close_lse(state.lse[:, :rows].contiguous(), lse)
        out, lse = prefix(batch, (index + 1) * tile, torch_pagedkv.paged_attention, return_lse=True)
        assert_close(out, state.out[:rows].double(), largest=8.0)
        assert_close_lse(lse, state.lse[:, :rows].double())
        assert (state.denominator[rows:] == 0).all() and (state.out[rows:] == 0).all()


@pytest.mark.parametrize("case", [c for c in PAGED if c.name in ("decode", "chunk", "decode_bf16")], ids=str)
def test_the_last_state_is_the_op(case, device, kernel):
    batch = case.build(device)
    args, options = batch.attention
    out, lse = torch_pagedkv.paged_attention(*args, **options, return_lse=True)
    state = trace(batch, 32, kernel)[-1]
    assert_close(out, state.out.double(), largest=8.0)
    assert_close_lse(lse, state.lse.double())


def test_maximum_rises_and_the_lse_with_it(device, kernel):
    states = trace(SMALL.build(device), 8, kernel)
    for before, after in itertools.pairwise(states):
        assert (after.maximum >= before.maximum).all()
        assert (after.lse >= before.lse).all()
        # The largest key of all has weight 1, so no denominator falls below it.
        assert ((after.denominator >= 1) | (after.maximum == -torch.inf)).all()


def test_rescaling_leaves_out_and_lse(device, kernel):
    """A state relative to another maximum is the same state: only the three together mean something."""
    for state in trace(SMALL.build(device), 16, kernel):
        shift = 3.0
        scaled = SoftmaxState(
            state.maximum + shift,
            state.denominator * torch.exp(torch.tensor(-shift)),
            state.accumulator * torch.exp(torch.tensor(-shift)),
        )
        assert_close(scaled.out, state.out.double(), largest=8.0)
        assert_close_lse(scaled.lse, state.lse.double())


def tiles_alone(batch, tile: int) -> list[SoftmaxState]:
    """States of each tile on its own, of a decode batch of one sequence: the table is cut, not the length."""
    (query, *pools, table, lengths, _), options = batch.attention
    columns = tile // batch.case.block_size
    parts = []
    for first in range(0, int(lengths), tile):
        cut = table[:, first // batch.case.block_size :][:, :columns].contiguous()
        length = (lengths - first).clamp(max=tile)
        parts.append(inspect.trace_softmax(query, *pools, cut, length, tile=tile, kernel=KERNEL, **options)[-1])
    return parts


@pytest.mark.parametrize("seed", range(3))
def test_tiles_merge_in_any_order(seed):
    batch = SMALL.with_(kv_lens=[70], block_size=8).build("cpu", seed)
    whole = trace(batch, 16, KERNEL)[-1]
    parts = tiles_alone(batch, 16)
    order = torch.randperm(len(parts), generator=torch.Generator().manual_seed(seed)).tolist()
    merged = functools.reduce(SoftmaxState.merge, [parts[i] for i in order])
    assert_close(merged.out, whole.out.double(), largest=8.0)
    assert_close_lse(merged.lse, whole.lse.double())
    pairs = functools.reduce(
        lambda a, b: torch_pagedkv.merge_attention_states(*a, *b), [(parts[i].out, parts[i].lse) for i in order]
    )
    assert_close(pairs[0], whole.out.double(), largest=8.0)
    assert_close_lse(pairs[1], whole.lse.double())


def test_merging_with_nothing_changes_no_bit():
    batch = SMALL.with_(kv_lens=[37]).build("cpu")
    state = trace(batch, 16, KERNEL)[-1]
    nothing = SoftmaxState.of_nothing(4, torch.empty(0, 16))
    for merged in (state.merge(nothing), nothing.merge(state)):
        for field in ("maximum", "denominator", "accumulator"):
            assert_same_bits(getattr(merged, field), getattr(state, field))
    both = nothing.merge(nothing)
    assert (both.maximum == -torch.inf).all() and (both.out == 0).all() and (both.lse == -torch.inf).all()


def test_scores_too_large_for_exp_do_not_overflow(device, kernel):
    """Only differences are exponentiated: scores of thousands give what scores around 0 give."""
    cache = torch.tensor([0.0, 1.0, 2.0, 3.0], device=device).view(1, 4, 1, 1)
    arguments = (cache, torch.tensor([[0]], device=device), torch.tensor([4], device=device))
    query = torch.full((1, 1, 1), 1e4, device=device)
    states = inspect.trace_softmax(query, cache, *arguments, tile=1, softmax_scale=1.0, kernel=kernel)
    assert [s.maximum.item() for s in states] == [0.0, 1e4, 2e4, 3e4]
    assert [s.denominator.item() for s in states] == [1.0] * 4
    assert [s.out.item() for s in states] == [0.0, 1.0, 2.0, 3.0]


CALL = SMALL.with_(kv_lens=[20, 3])


@pytest.mark.parametrize(
    "error,sentence,changes",
    [
        (ValueError, "trace_softmax: tile must be in [1, 1024], got 0", {"tile": 0}),
        (ValueError, "trace_softmax: kernel must be 'torch' or 'triton', got 'cuda'", {"kernel": "cuda"}),
        (TypeError, "trace_softmax: query must be a tensor, got NoneType", {"query": None}),
        (ValueError, "trace_softmax: softcap must be >= 0 (0: off), got -1.0", {"softcap": -1.0}),
        (TypeError, "trace_softmax: softcap must be a number, got str", {"softcap": "x"}),
        (ValueError, "trace_softmax: seqused_k must", {"seqused_k": torch.tensor([20, 99])}),
        (ValueError, "trace_softmax: block_table must", {"block_table": torch.tensor([[0, 99], [1, 2]])}),
        (ValueError, "trace_softmax: k_scale must be None where", {"k_scale": torch.ones(1)}),
        (ValueError, "trace_softmax: query must have a multiple of 2 heads, got 3", {"query": torch.ones(2, 3, 16)}),
        (ValueError, "trace_softmax: key_cache must have query's head_dim", {"query": torch.ones(2, 4, 8)}),
    ],
)
def test_refusals(error, sentence, changes):
    args, _ = CALL.build("cpu").attention
    names = ("query", "key_cache", "value_cache", "block_table", "seqused_k", "cu_seqlens_q")
    with pytest.raises(error) as refusal:
        inspect.trace_softmax(**{**dict(zip(names, args)), **changes})
    assert str(refusal.value).startswith(sentence)


@pytest.mark.skipif(KERNEL == "triton", reason="the interpreter takes CPU tensors")
def test_the_triton_kernel_refuses_cpu_tensors():
    pytest.importorskip("triton")
    with pytest.raises(NotImplementedError, match="trace_softmax: kernel must be 'torch' on cpu, got 'triton'"):
        trace(CALL.build("cpu"), 16, "triton")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_two_versions_agree(case, device, kernel):
    if kernel == "torch":
        pytest.skip("runs in Triton's interpreter or on CUDA")
    batch = case.build(device)
    for mine, theirs in zip(trace(batch, 24, "triton"), trace(batch, 24, "torch"), strict=True):
        for field in dataclasses.fields(SoftmaxState):
            torch.testing.assert_close(getattr(mine, field.name), getattr(theirs, field.name), atol=1e-5, rtol=1e-5)


def test_float32_is_kept(device):
    states = trace(SMALL.with_(dtype=BF16).build(device), 16, "torch")
    assert {getattr(s, f.name).dtype for s in states for f in dataclasses.fields(s)} == {FP32}


def test_command_prints_the_states(capsys):
    assert main(["softmax", "--num-tokens", "40", "--tile", "16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "40 keys in 3 tiles of 16, one query"
    assert [line.split()[:4] for line in lines[2:5]] == [[str(i), *k.split()] for i, k in enumerate(
        ("0 to 15", "16 to 31", "32 to 39")
    )]  # fmt: skip
    assert lines[-1].endswith("the last state equals it to within 1e-5")


def test_command_draws(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert main(["softmax", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG") and f"drawn into {path}" in capsys.readouterr().out
    assert main(["softmax", "--plot", str(tmp_path / "nowhere" / "out.png")]) == 2
    assert "softmax: plot must name a file that can be drawn, got" in capsys.readouterr().err


def test_command_says_what_is_missing_to_draw(monkeypatch, capsys):
    import sys

    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["softmax", "--plot", "out.png"]) == 2
    assert capsys.readouterr().err.startswith("softmax: plot must be left out where matplotlib cannot be imported")


@pytest.mark.parametrize("options", ["--tile 0", "--num-tokens 0", "--seed -1", "--tile 2000"])
def test_command_refuses_with_a_sentence(options, capsys):
    assert main(["softmax", *options.split()]) == 2
    assert capsys.readouterr().err.startswith(f"softmax: {options.split()[0][2:].replace('-', '_')} must be in [")
