"""Which kernel serves a device: C++ where a library was built; else the reference on CPU, Triton on CUDA."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from torch_pagedkv import native


@functools.cache
def native_kernel(stem: str) -> Callable[..., None] | None:
    """Return the C++ kernel of an op for CPU tensors, or None where the library is missing."""
    if not native.is_available():
        return None
    return _callable(torch.ops.torch_pagedkv_native, stem)


@functools.cache
def cuda_kernel(stem: str, device: int) -> Callable[..., None] | None:
    """Return an op's CUDA C++ kernel, or None where the library is missing or has no code for that GPU."""
    if device < 0 or stem not in native.CUDA_STEMS or native.why_cuda_missing() is not None:
        return None
    if not torch.ops.torch_pagedkv_cuda.runs_on(device):
        return None
    return _callable(torch.ops.torch_pagedkv_cuda, stem)


def _callable(namespace: Any, name: str) -> Callable[..., Any]:
    overload = getattr(namespace, name).default
    return getattr(overload, "_op", overload)  # what it calls, without the call of itself


# Query rows of a sequence for each KV head that CUDA C++ attention takes on every GPU that it serves.
CUDA_ROWS = 16
# What it may take of a call with sequences of more rows: nothing, those of fewer rows, or all.
TAKES_NOTHING, TAKES_SHORT, TAKES_ALL = range(3)


@functools.cache
def cuda_attention_takes() -> Callable[..., int]:
    """Return the function that says what CUDA C++ attention takes of a call of (query, pools, block_table)."""
    return torch.ops.torch_pagedkv_cuda.paged_attention_takes.default


@functools.cache
def cuda_attention(device: int) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the CUDA C++ attention that checks everything and makes its outputs: without options, and with all.

    The first returns out, the second (out, lse); None stands for them in calls that are left to other kernels.
    """
    if cuda_kernel("paged_attention", device) is None:
        return None
    namespace = torch.ops.torch_pagedkv_cuda
    return _callable(namespace, "paged_attention_plain"), _callable(namespace, "paged_attention_new")


@functools.cache
def triton_launcher(stem: str) -> Callable[..., None]:
    """Return the function that launches an op's Triton kernels; Triton is imported only now."""
    try:
        return importlib.import_module(f"torch_pagedkv.triton_kernels.{stem}").launch
    except ImportError as error:
        raise NotImplementedError(
            f"{stem}: device must be cpu where Triton cannot be imported, got cuda; "
            f"installing triton gives CUDA tensors their kernels ({error})"
        ) from error
