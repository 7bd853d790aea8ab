"""PEP 517 backend: setuptools, plus a torch whose headers the C++ kernels are compiled with.

The kernels use only LibTorch's stable ABI, so the headers of any torch from 2.10 on make a library
that every torch from 2.10 on loads. Hence the torch that the target environment already has is
good enough, also from inside an isolated build, and none is downloaded for the build. Only where no
torch is found does the build ask for one: ``TORCH_PAGEDKV_BUILD_TORCH`` names the requirement.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import (  # noqa: F401  the hooks that stay as setuptools has them
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

OLDEST_TORCH = (2, 10)


def torch_directory() -> Path | None:
    """Return the directory of a torch new enough to compile with, without importing it."""
    for directory in _candidates():
        version = directory / "version.py"
        if not (directory / "include/torch/csrc/stable/ops.h").is_file() or not version.is_file():
            continue
        found = re.search(r"__version__\s*=\s*['\"](\d+)\.(\d+)", version.read_text())
        if found and (int(found.group(1)), int(found.group(2))) >= OLDEST_TORCH:
            return directory
    return None


def is_cuda_build(torch: Path) -> bool:
    """Return whether a torch, given by its directory, was built for CUDA; it is not imported."""
    return re.search(r"^cuda\b[^=]*=\s*['\"]", (torch / "version.py").read_text(), re.MULTILINE) is not None


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("torch")
    for location in (spec.submodule_search_locations or []) if spec else []:
        yield Path(location)
    # pip's isolation hides the packages of the environment, but not where they are.
    for scheme in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(scheme)) / "torch"


def _torch_requirement() -> list[str]:
    if torch_directory() is not None:
        return []
    return [os.environ.get("TORCH_PAGEDKV_BUILD_TORCH", "torch>={}.{}".format(*OLDEST_TORCH))]


def get_requires_for_build_wheel(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_wheel(config_settings) + _torch_requirement()


def get_requires_for_build_editable(config_settings: dict | None = None) -> list[str]:
    return build_meta.get_requires_for_build_editable(config_settings) + _torch_requirement()
