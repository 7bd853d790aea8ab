"""Starts the tests of tests/triton_interpreted in the process of their own that they need."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton_interpreted"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton: not installed")
@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_interpreted(path):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-W", "ignore", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    environment.pop("PYTEST_ADDOPTS", None)
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
