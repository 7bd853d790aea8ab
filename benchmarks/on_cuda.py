"""The GPU that numbers are measured on: its limits, and medians of graph replays with a cold L2 cache."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

import torch_pagedkv
from machine import ROOT

_FLUSHED_BYTES = 256 * 2**20  # several times the L2 cache


def describe() -> str:
    """Return the facts that an entry of docs/measured.md needs besides its numbers."""
    if not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch must see a GPU, got none")
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    has_git = shutil.which("git") is not None
    commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() if has_git else ""
    facts = torch_pagedkv.build_info()
    kernels = ", ".join(f"{stem} {kernel}" for stem, kernel in facts["kernels"]["cuda"].items())
    return (
        f"{torch.cuda.get_device_name()}; torch {torch.__version__}, triton {facts['triton']}, CUDA "
        f"{torch.version.cuda}; torch_pagedkv {torch_pagedkv.__version__} at {commit or 'an unknown commit'} "
        f"({kernels}); {time.strftime('%Y-%m-%d')}"
    )


def microseconds(call: Callable[[], object], rounds: int = 30) -> tuple[float, float]:
    """Return (time on the device, time of the host for one eager call), medians in microseconds.

    The device's time is that of a captured graph, or of eager calls where a peer can not be captured;
    launch and events are in it, about 5 us. A device is up to a tenth slower in the milliseconds after
    much memory was given back to it, so the first half of the replays does not count.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    started = []
    for _ in range(rounds):
        before = time.perf_counter()
        call()
        started.append(time.perf_counter() - before)
    torch.cuda.synchronize()
    replay = _captured(call) or call
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device="cuda")
    events = []
    for _ in range(2 * rounds):
        flushed.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        replay()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    on_device = statistics.median(first.elapsed_time(last) * 1e3 for first, last in events[rounds:])
    return on_device, statistics.median(started) * 1e6


def _captured(call: Callable[[], object]) -> Callable[[], None] | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except Exception:
        torch.cuda.synchronize()
        return None
    return graph.replay


def bytes_per_microsecond() -> tuple[float, float]:
    """Return what a plain read and a plain copy of 2 GiB move; a copy's bytes count twice."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    size = source.numel() * source.element_size()
    read, _ = microseconds(lambda: torch.sum(source))
    copied, _ = microseconds(lambda: torch.mul(source, 1.0, out=target))
    return size / read, 2 * size / copied


def operations_per_microsecond() -> float:
    """Return what a matrix product of two bfloat16 matrices of 8192 x 8192 computes."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    taken, _ = microseconds(lambda: a @ b)
    return 2 * 8192**3 / taken
