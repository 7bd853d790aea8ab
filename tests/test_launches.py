"""Calls that look alike: checked once, and launched with the kernel that was compiled for the first."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, PagedCase
from pools import assert_same_bits
from torch_pagedkv.ops.checked_once import checked_once


def test_a_check_runs_again_for_whatever_looks_different():
    seen = []
    check = checked_once(lambda *arguments: seen.append(arguments))
    rows = torch.zeros(4, 8, 16)
    twice = torch.zeros(4, 8, 16)
    assert check(rows, None, 1.0) == check(twice, None, 1.0)
    assert len(seen) == 1
    unaligned = torch.zeros(4 * 8 * 16 + 1)[1:].view(4, 8, 16)
    others = (
        rows[:3], rows.transpose(0, 1).contiguous().transpose(0, 1), rows.double(), unaligned,
        torch.zeros(4, 8, 16, requires_grad=True), torch.zeros(4, 8, 16, device="meta"), None,
    )  # fmt: skip
    looks = {check(rows, None, 1.0), check(rows, None, 2.0), check(rows, rows, 1.0)}
    looks |= {check(other, None, 1.0) for other in others[:-1] if other.device.type != "meta"}
    looks.add(check(None, None, 1.0))
    assert len(looks) == len(seen) == 9


def test_what_was_refused_is_refused_again():
    def refuse(argument):
        raise ValueError("no")

    check = checked_once(refuse)
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            check(1)


def test_a_launch_keeps_what_was_compiled_for_it(monkeypatch):
    launches = pytest.importorskip("torch_pagedkv.triton_kernels.launches")
    calls = []

    class Compiled:
        def __getitem__(self, grid):
            return lambda *arguments: calls.append(("compiled", grid, arguments))

    class Kernel:
        def __getitem__(self, grid):
            def run(*arguments, **options):
                calls.append(("kernel", grid, arguments, options))
                return Compiled()

            return run

    monkeypatch.setattr(launches, "CompiledKernel", Compiled)
    launch = launches.Launch(Kernel(), (2, 1, 1), "stride", num_warps=4)
    launch("tensor")
    launch("another")
    assert calls == [
        ("kernel", (2, 1, 1), ("tensor", "stride"), {"num_warps": 4}),
        ("compiled", (2, 1, 1), ("another", "stride")),
    ]


def test_plans_are_remembered_by_looks():
    remembered = pytest.importorskip("torch_pagedkv.triton_kernels.launches").remembered
    plans, made = {}, []

    def plan(argument):
        made.append(argument)
        return argument

    assert remembered(plans, ("a",), plan, 1) == remembered(plans, ("a",), plan, 2) == 1
    assert remembered(plans, None, plan, 3) == 3 and remembered(plans, ("b",), plan, 4) == 4
    assert made == [1, 3, 4]


@pytest.mark.parametrize("query_lens", [None, [9, 40]], ids=["decode", "chunk"])
def test_calls_that_look_alike_and_others_give_the_bits_of_first_calls(query_lens, device):
    """Tensors of other contents, then of another alignment, then the first ones again."""
    case = PagedCase(name="again", kv_lens=[70, 300], query_lens=query_lens, dtype=BF16)
    results = []
    for seed in (0, 1, 0, 1):
        batch = case.build(device, seed)
        (query, *rest), options = batch.attention
        shifted = torch.empty(query.numel() + 1, dtype=BF16, device=device)[1:].view(query.shape)
        shifted.copy_(query)
        for rows in (query, query.contiguous(), shifted):
            results.append(torch_pagedkv.paged_attention(rows, *rest, **options))
    for first, second in zip(results[:6], results[6:], strict=True):
        assert_same_bits(first, second)
    for of_seed in (results[:3], results[3:6]):
        assert_same_bits(of_seed[0], of_seed[1])
        assert_same_bits(of_seed[0], of_seed[2])
