"""Finds and loads the C++ kernels, and says in a sentence why they are missing where they are.

The CPU's library is one shared object beside this file. It is no Python module: loading it registers
the ops of the private namespace ``torch_pagedkv_native``. CUDA's is another one, which few builds have;
it is loaded at the first call with CUDA tensors and registers ``torch_pagedkv_cuda``. Loading either
initialises no device.

``TORCH_PAGEDKV_DISABLE_NATIVE=1`` in the environment leaves both unloaded, as on a machine where they
could not be built; ``cpu`` or ``cuda`` leaves that one unloaded.
"""

from __future__ import annotations

import functools
import os
import re
import warnings
from pathlib import Path

import torch

DISABLE_VARIABLE = "TORCH_PAGEDKV_DISABLE_NATIVE"
LIBRARY_NAME = "_native.abi3.so"
STEMS = (
    "reshape_and_cache",
    "paged_attention",
    "merge_attention_states",
    "gather_kv",
    "copy_blocks",
    "compute_slot_mapping",
)
CUDA_LIBRARY_NAME = "_cuda.abi3.so"
CUDA_STEMS = ("reshape_and_cache", "paged_attention")
_CUDA_OPS = (*CUDA_STEMS, "paged_attention_plain", "paged_attention_new", "paged_attention_takes")


def library_path(name: str = LIBRARY_NAME) -> Path | None:
    """Return where the library is, or None where the package has none."""
    path = Path(__file__).with_name(name)
    return path if path.is_file() else None


@functools.cache
def compiled_with(name: str = LIBRARY_NAME) -> str | None:
    """Return the torch version whose headers the library was compiled with.

    It is read from the file's bytes, so that it can be told of a library that does not load.
    """
    path = library_path(name)
    if path is None:
        return None
    found = re.search(rb"torch_pagedkv compiled with torch ([0-9.]+)", path.read_bytes())
    return found.group(1).decode() if found else None


@functools.cache
def why_missing() -> str | None:
    """Load the CPU's library if that was not tried yet; return why it cannot be used, or None."""
    return _load("cpu", "the C++ kernels", LIBRARY_NAME, "torch_pagedkv_native", STEMS)


@functools.cache
def why_cuda_missing() -> str | None:
    """Load CUDA's library if that was not tried yet; return why it cannot be used, or None."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    return _load("cuda", "the CUDA C++ kernels", CUDA_LIBRARY_NAME, "torch_pagedkv_cuda", _CUDA_OPS)


def _load(device: str, kernels: str, name: str, namespace: str, stems: tuple[str, ...]) -> str | None:
    disabled = os.environ.get(DISABLE_VARIABLE, "0")
    if disabled == device or disabled not in ("", "0", "cpu", "cuda"):
        return f"{kernels} are switched off by {DISABLE_VARIABLE}"
    path = library_path(name)
    if path is None:
        return f"{kernels} were not built: there is no {name} in {Path(__file__).parent}"
    kernels = (
        f"{kernels}, compiled with torch {compiled_with(name) or 'of an unknown version'}, in torch {torch.__version__}"
    )
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        return f"{kernels}, did not load: {error}"
    absent = [stem for stem in stems if not hasattr(getattr(torch.ops, namespace), stem)]
    if absent:
        return f"{kernels}, are of another release: {', '.join(absent)} is missing"
    return None


def cpu_capability() -> str:
    """Return the instruction set whose kernels serve CPU tensors; raise where its variable names none."""
    return torch.ops.torch_pagedkv_native.cpu_capability()


def is_available() -> bool:
    """Return whether the C++ kernels serve CPU tensors in this process."""
    return why_missing() is None


def warn_if_missing() -> None:
    """Warn, once in a process, that CPU tensors are served by the reference."""
    reason = why_missing()
    if reason is not None and DISABLE_VARIABLE not in reason:
        warnings.warn(
            f"torch_pagedkv: {reason}. CPU tensors are running on the (slower) PyTorch reference; "
            "reinstall from the source directory with a C++ compiler: "
            "pip install --no-build-isolation --force-reinstall --no-deps .",
            RuntimeWarning,
            stacklevel=2,
        )


warn_if_missing()
