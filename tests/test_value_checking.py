"""The checking mode: on CUDA values raise what they raise on CPU; off, nothing is read back."""

from __future__ import annotations

import subprocess
import sys
import warnings

import pytest
import torch

import torch_pagedkv
from devices import needs_cuda
from error_cases import CALLS, ERRORS
from pools import assert_same_bits
from torch_pagedkv.ops import value_checking

VALUES = [case for case in ERRORS if case.values]


def refusal(function, call) -> ValueError:
    with pytest.raises(ValueError) as caught:
        function(**call)
    return caught.value


def call_cuda_kernel(op: str, call: dict, monkeypatch) -> list[str]:
    """Give CPU tensors to the kernel that serves CUDA; return the launches that it asked for."""
    module, launches = sys.modules[f"torch_pagedkv.ops.{op}"], []
    monkeypatch.setattr(module, "triton_launcher", lambda stem: lambda *args, **options: launches.append(stem))
    kernel = module._checked(module._cuda) if op == "paged_attention" else module._cuda
    kernel(**call)
    return launches


@pytest.mark.parametrize("case", VALUES, ids=str)
def test_the_kernels_of_cuda_check_what_the_cpu_checks(case, monkeypatch):
    """The same sentence before anything is launched; with the mode off the kernel is launched."""
    expected = refusal(getattr(torch_pagedkv, case.op), case.build("cpu"))
    with torch_pagedkv.checks(True), pytest.raises(ValueError) as caught:
        call_cuda_kernel(case.op, case.build("cpu"), monkeypatch)
    assert str(caught.value) == str(expected)
    with torch_pagedkv.checks(False):
        assert call_cuda_kernel(case.op, case.build("cpu"), monkeypatch) == [case.op]


@pytest.mark.parametrize("op", CALLS)
def test_right_calls_pass(op, monkeypatch, device):
    with torch_pagedkv.checks(True):
        getattr(torch_pagedkv, op)(**CALLS[op](device))
        assert call_cuda_kernel(op, CALLS[op]("cpu"), monkeypatch) == [op]


def test_the_mode_is_restored():
    assert not value_checking.enabled
    with torch_pagedkv.checks(True):
        assert value_checking.enabled
        with torch_pagedkv.checks(False):
            assert not value_checking.enabled
        assert value_checking.enabled
        with pytest.raises(KeyError), torch_pagedkv.checks(False):
            raise KeyError
        assert value_checking.enabled
    assert not value_checking.enabled
    torch_pagedkv.checks(True)
    assert value_checking.enabled
    torch_pagedkv.checks(False)
    assert not value_checking.enabled
    with pytest.raises(TypeError, match="checks: enabled must be a bool, got int"):
        torch_pagedkv.checks(1)


@pytest.mark.parametrize("value,on", [("1", True), ("0", False), ("", False)])
def test_the_environment_switches_it_on(value, on):
    program = "import torch_pagedkv.ops.value_checking as v; print(v.enabled)"
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"TORCH_PAGEDKV_CHECKS": value},
    )
    assert result.stdout.strip() == str(on), result.stderr


@needs_cuda
@pytest.mark.parametrize("case", VALUES, ids=str)
def test_cuda_raises_what_the_cpu_raises(case):
    expected = refusal(getattr(torch_pagedkv, case.op), case.build("cpu"))
    call = case.build("cuda")
    pools = [call[name] for name in ("key_cache", "value_cache") if name in call]
    before = [pool.clone() for pool in pools]
    with torch_pagedkv.checks(True):
        actual = refusal(getattr(torch_pagedkv, case.op), call)
    assert str(actual) == str(expected)
    for pool, copy in zip(pools, before):
        assert_same_bits(pool, copy)
    getattr(torch_pagedkv, case.op)(**call)
    torch.cuda.synchronize()


@needs_cuda
def test_compiled_calls_are_checked():
    case = next(c for c in VALUES if c.name == "slot_past_end")
    compiled = torch.compile(torch_pagedkv.reshape_and_cache, fullgraph=True)
    compiled(**CALLS[case.op]("cuda"))
    with torch_pagedkv.checks(True):
        assert "slot_mapping must be below" in str(refusal(compiled, case.build("cuda")))


@needs_cuda
@pytest.mark.parametrize("op", [op for op in CALLS if op != "merge_attention_states"])
def test_a_capture_is_refused_and_not_spoiled(op):
    call = CALLS[op]("cuda")
    function = getattr(torch_pagedkv, op)
    function(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with (
            torch_pagedkv.checks(True),
            pytest.raises(NotImplementedError, match="checks must be off"),
        ):
            function(**call)
        function(**call)
    graph.replay()
    torch.cuda.synchronize()


@needs_cuda
def test_one_wait_for_the_device():
    """A right call reads back one answer, whatever it checks."""
    for op in [op for op in CALLS if op != "merge_attention_states"]:
        call = CALLS[op]("cuda")
        getattr(torch_pagedkv, op)(**call)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with torch_pagedkv.checks(True), warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                getattr(torch_pagedkv, op)(**call)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(waits) == 1, (op, [str(wait.message) for wait in waits])
