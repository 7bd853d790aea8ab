"""Fresh processes in which Triton, or both Triton and the C++ part, cannot be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

BLOCK_TRITON = "import sys; sys.modules['triton'] = None"


def run(program: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", BLOCK_TRITON + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("blocked", ["", "1"], ids=["with_native", "without_native"])
def test_cpu_works_without_triton(blocked):
    program = """
        import torch, torch_pagedkv
        pools = torch.zeros(2, 4, 16, 2, 8).unbind(0)
        key = torch.ones(1, 2, 8)
        torch_pagedkv.reshape_and_cache(key, key, *pools, torch.tensor([35]))
        out = torch_pagedkv.paged_attention(
            torch.ones(1, 4, 8), *pools, torch.tensor([[2]]), torch.tensor([4]), window_size=(0, 0)
        )
        assert (out == 1).all()
        kernels = torch_pagedkv.build_info()["kernels"]
        print(kernels["cpu"]["paged_attention"], kernels["cuda"]["paged_attention"])
    """
    kernel = "reference" if blocked else "C++"
    assert run(program, TORCH_PAGEDKV_DISABLE_NATIVE=blocked).split() == [kernel, "None"]


def test_inspect_needs_no_triton():
    """Lanes and tiles come from shapes; only the traced kernel has to be there."""
    program = """
        import torch
        from torch_pagedkv import inspect
        print(inspect.explain([7, 2, 9], 16, 20).meets)
        cache = torch.zeros(1, 4, 1, 8)
        batch = (torch.zeros(1, 1, 8), cache, cache, torch.tensor([[0]]), torch.tensor([4]))
        print(len(inspect.trace_softmax(*batch)))
        try:
            inspect.trace_softmax(*batch, kernel="triton")
        except NotImplementedError as error:
            print(error)
    """
    lines = run(program).splitlines()
    assert lines[:2] == ["True", "1"]
    assert lines[2].startswith("trace_softmax: kernel must be 'torch' where Triton cannot be imported, got 'triton'")


def test_cuda_without_triton_names_what_is_missing():
    program = """
        from torch_pagedkv.ops.kernel_choice import triton_launcher
        try:
            triton_launcher("paged_attention")
        except NotImplementedError as error:
            print(error)
    """
    assert run(program).startswith(
        "paged_attention: device must be cpu where Triton cannot be imported, got cuda; installing triton"
    )
