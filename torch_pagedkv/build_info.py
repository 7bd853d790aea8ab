"""What this installation is made of: versions, and which kernels serve which device.

Nothing here initialises CUDA; what is said of CUDA is what the build of torch says of itself.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from typing import Any

import torch

from torch_pagedkv import native

VERSION = "0.1.0"


def build_info() -> dict[str, Any]:
    """Describe the installation as a dictionary that ``json.dumps`` takes.

    ``kernels`` names, for each device and op, what serves it: ``"C++"`` or ``"reference"`` on CPU,
    ``"CUDA C++"``, ``"Triton"`` or None on CUDA (CUDA C++ leaves some calls to Triton). ``why`` has a
    sentence for each device that lacks its kernels.

    Returns:
        A new dictionary: version, python, torch, torch_cuda (the CUDA version torch was built for,
        or None), triton, native (library, compiled_with_torch, cpu_capability, reason_missing),
        cuda (library, compiled_with_torch, reason_missing), kernels, why. ``cpu_capability`` is the
        instruction set of the C++ kernels in use.

    Raises:
        Nothing.

    Not checked: whether a GPU is present; asking would initialise CUDA.

    Example:
        >>> import torch_pagedkv
        >>> torch_pagedkv.build_info()["kernels"]["cpu"]["paged_attention"] in ("C++", "reference")
        True
    """
    library = native.library_path()
    reason_missing = native.why_missing()
    why_no_triton = _why_no_triton()
    cpu_capability, why_no_capability = _cpu_capability()
    on_cpu = "reference" if reason_missing else "C++"
    on_cuda = {stem: None if why_no_triton else "Triton" for stem in native.STEMS}
    reason_no_cuda = native.why_cuda_missing()
    if reason_no_cuda is None:
        on_cuda.update((stem, "CUDA C++") for stem in native.CUDA_STEMS)
    cuda_library = native.library_path(native.CUDA_LIBRARY_NAME)
    why = {"cpu": reason_missing or why_no_capability, "cuda": why_no_triton}
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_cuda": torch.version.cuda,
        "triton": _installed_version("triton"),
        "native": {
            "library": str(library) if library else None,
            "compiled_with_torch": native.compiled_with(),
            "cpu_capability": cpu_capability,
            "reason_missing": reason_missing,
        },
        "cuda": {
            "library": str(cuda_library) if cuda_library else None,
            "compiled_with_torch": native.compiled_with(native.CUDA_LIBRARY_NAME),
            "reason_missing": reason_no_cuda,
        },
        "kernels": {
            "cpu": {stem: on_cpu for stem in native.STEMS},
            "cuda": on_cuda,
        },
        "why": {device: reason for device, reason in why.items() if reason},
    }


def _cpu_capability() -> tuple[str | None, str | None]:
    """Return (the instruction set in use, why there is none)."""
    if not native.is_available():
        return None, None
    try:
        return native.cpu_capability(), None
    except (RuntimeError, ValueError) as error:
        return None, str(error).splitlines()[0]


def _why_no_triton() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is not a CUDA build"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install triton"
    return None


def _installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
