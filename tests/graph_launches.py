"""Count the launches of CUDA graphs that a profiler sees."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.profiler import profile, supported_activities


def graph_launches(call: Callable[[], object]) -> int:
    """Return how many CUDA graphs a call launches, on this machine's CPU none."""
    if not torch.cuda.is_available():
        call()
        return 0
    torch.cuda.synchronize()
    with profile(activities=list(supported_activities())) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(event.count for event in recorded.key_averages() if event.key.startswith("cudaGraphLaunch"))
