"""What numbers are measured against: the machine, its limits, and medians of interleaved runs."""

from __future__ import annotations

import argparse
import functools
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import torch_pagedkv

ROOT = Path(__file__).resolve().parents[1]
MANY_BYTES = 256 * 2**20  # past every cache


def describe() -> str:
    """Return the facts that an entry of docs/measured.md needs besides its numbers."""
    model = platform.processor()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    commit = _output("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain", "csrc", "torch_pagedkv")
    capability = torch_pagedkv.native.cpu_capability()
    return (
        f"{model}, {torch.get_num_threads()} threads, {capability} kernels; torch {torch.__version__}; "
        f"torch_pagedkv {torch_pagedkv.__version__} at {commit}{' with changes' if changed else ''}; "
        f"{time.strftime('%Y-%m-%d')}"
    )


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def times_of(
    calls: dict[str, Callable[[], object]], seconds: float = 1.0, *, disturbed: bool = False
) -> dict[str, float]:
    """Time calls in turn, round after round, and return each one's median in seconds.

    What disturbs the machine then disturbs all of them, so their ratios hold where their times do not.
    ``disturbed``: the least CPU time of the calling thread instead, for one thread on a machine that
    others use too.
    """
    clock = time.thread_time if disturbed else time.perf_counter
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < stop or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            before = clock()
            call()
            times[name].append(clock() - before)
    return {name: (min if disturbed else statistics.median)(taken) for name, taken in times.items()}


def parse(description: str, *, seconds: float, **extra: dict) -> argparse.Namespace:
    """Read the options that every benchmark has, and ``extra`` ones."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=formatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads()])
    parser.add_argument("--seconds", type=float, default=seconds, help="for each call of each row")
    help = "least CPU time of one thread, for a machine that others use too, not median time"
    parser.add_argument("--disturbed", action="store_true", help=help)
    for name, options in extra.items():
        parser.add_argument(f"--{name}", **options)
    arguments = parser.parse_args()
    if arguments.disturbed and arguments.threads != [1]:
        parser.error("--disturbed goes with --threads 1: it sees the calling thread only")
    return arguments


@functools.cache
def _memory() -> torch.Tensor:
    return torch.ones(MANY_BYTES // 4)  # zeros would all be one page until they are written


def read_everything() -> torch.Tensor:
    """Read MANY_BYTES as fast as torch sums them, on torch's own threads.

    Threads of our own would find the cores taken: torch's wait for their next work in a loop.
    """
    return _memory().sum()


def multiply(dtype: torch.dtype, size: int = 2048) -> tuple[Callable[[], object], int]:
    """Return a matrix product and its floating-point operations."""
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return lambda: a @ b, 2 * size**3


def print_row(*cells: object) -> None:
    print(
        "| " + " | ".join(f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells) + " |",
        flush=True,
    )


def print_header(*cells: str) -> None:
    print_row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def compare(
    op: str, description: str, cases: Callable[[], Iterable[tuple[str, dict[str, Callable[[], object]]]]]
) -> None:
    """Time the calls of each case, "ours" and one peer, on each number of threads; print a table for each."""
    arguments = parse(description, seconds=0.3)
    torch.manual_seed(0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header(op, "ours, us", "peer", "times ours")
        for name, calls in cases():
            taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
            peer = next(call for call in calls if call != "ours")
            print_row(name, taken["ours"] * 1e6, peer, taken[peer] / taken["ours"])
