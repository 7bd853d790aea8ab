"""Finds and loads the C++ kernels, and says in a sentence why they are missing where they are.

The library is one shared object beside this file. It is no Python module: loading it registers the
ops of the private namespace ``torch_pagedkv_native``. Loading never touches CUDA.

``TORCH_PAGEDKV_DISABLE_NATIVE=1`` in the environment leaves it unloaded, as on a machine where it
could not be built.
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


def library_path() -> Path | None:
    """Return where the library is, or None where the package has none."""
    path = Path(__file__).with_name(LIBRARY_NAME)
    return path if path.is_file() else None


@functools.cache
def compiled_with() -> str | None:
    """Return the torch version whose headers the library was compiled with.

    It is read from the file's bytes, so that it can be told of a library that does not load.
    """
    path = library_path()
    if path is None:
        return None
    found = re.search(rb"torch_pagedkv compiled with torch ([0-9.]+)", path.read_bytes())
    return found.group(1).decode() if found else None


@functools.cache
def why_missing() -> str | None:
    """Load the library if that was not tried yet; return why it cannot be used, or None."""
    if os.environ.get(DISABLE_VARIABLE, "0") not in ("", "0"):
        return f"the C++ kernels are switched off by {DISABLE_VARIABLE}"
    path = library_path()
    if path is None:
        directory = Path(__file__).parent
        return f"the C++ kernels were not built: there is no {LIBRARY_NAME} in {directory}"
    kernels = (
        f"the C++ kernels, compiled with torch {compiled_with() or 'of an unknown version'}, "
        f"in torch {torch.__version__}"
    )
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as error:
        return f"{kernels}, did not load: {error}"
    absent = [stem for stem in STEMS if not hasattr(torch.ops.torch_pagedkv_native, stem)]
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
