"""Devices: every test that takes ``device`` runs on CPU and on CUDA, and is skipped visibly without one."""

from __future__ import annotations

import os
from pathlib import Path

# Test processes share the cores: a thread that waits must give its core up, not spin on it. OpenMP
# reads this when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest

from devices import needs_cuda

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=needs_cuda),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is skipped for want of a GPU, by whichever of the marks that say so."""
    for item in items:
        if any(str(mark.kwargs.get("reason", "")).startswith("CUDA: ") for mark in item.iter_markers("skipif")):
            item.add_marker(pytest.mark.cuda)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test import the programs of docs/examples."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
