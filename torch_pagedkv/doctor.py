"""What ``torch.compile`` makes of the ops in this environment, and what a call costs: a small examination.

Each op, and ``PagedAttention``, runs eager and compiled while lengths grow. Counted are torch's own graph
breaks and recompiles, the buffers of a pool's size in the code that was generated, and on CUDA the launches
of CUDA graphs in a call that ``mode="reduce-overhead"`` recorded. Times are host microseconds of a call with
little work in it, the least of a few rounds: what the op costs before it does anything.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

import torch_pagedkv
from torch_pagedkv.cache import PagedBatch

_NUM_BLOCKS, _BLOCK_SIZE, _HEADS, _KV_HEADS, _HEAD_DIM = 512, 16, 8, 2, 64
_POOL_NUMEL = _NUM_BLOCKS * _BLOCK_SIZE * _KV_HEADS * _HEAD_DIM
_STEPS, _ROUNDS, _CALLS = 8, 5, 200


@dataclasses.dataclass(frozen=True)
class Finding:
    """What was found of one op; a number is None where the op did not compile, and ``failure`` says why."""

    name: str
    graph_breaks: int | None = None
    recompiles: int | None = None
    pool_copies: int | None = None
    graph_launches: int | None = None  # on CUDA only
    eager_us: float | None = None
    compiled_us: float | None = None
    failure: str | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether it compiled to one graph that serves every step, copies no pool, and is launched as one on CUDA."""
        is_amiss = self.graph_breaks or self.recompiles or self.pool_copies or self.graph_launches not in (None, 1)
        return self.failure is None and not is_amiss


def examine(device: str, progress: Callable[[str], None] = lambda text: None) -> Iterator[Finding]:
    """Examine the ops one after the other.

    Args:
        device: "cpu" or "cuda".
        progress: called with a line whenever something new begins.

    Returns:
        A generator of a ``Finding`` for each op and for ``PagedAttention``.
    """
    calls = _calls(device)
    for number, (name, call) in enumerate(calls.items(), start=1):
        progress(f"{name} ({number} of {len(calls)}): compiling")
        yield _examine(name, call, device, progress)


def _examine(name: str, call: Callable[[PagedBatch], Any], device: str, progress: Callable[[str], None]) -> Finding:
    from torch._dynamo.utils import counters
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(call)  # not fullgraph: a break is to be counted, not raised
    try:
        with torch.no_grad():
            _, codes = run_and_get_code(compiled, _batch(1, device))
            for step in range(2, _STEPS + 1):
                compiled(_batch(step, device))
            found = {
                "graph_breaks": sum(counters["graph_break"].values()),
                "recompiles": counters["stats"]["unique_graphs"] - 1,
                "pool_copies": sum(map(_count_pool_copies, codes)),
            }
            progress(f"{name}: timing")
            batch = _batch(_STEPS, device)
            found["eager_us"] = _host_us(call, batch, device)
            found["compiled_us"] = _host_us(compiled, batch, device)
            if device == "cuda":
                progress(f"{name}: recording a CUDA graph")
                found["graph_launches"] = _count_graph_launches(call, device)
    except Exception as error:  # whatever is wrong with this environment is what there is to report
        return Finding(name, failure=f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return Finding(name, **found)


def _batch(step: int, device: str) -> PagedBatch:
    lengths = [step, step + _BLOCK_SIZE]
    return PagedBatch.from_sequences([[7, 2], [4, 9, 5]], lengths, block_size=_BLOCK_SIZE, device=device)


def _calls(device: str) -> dict[str, Callable[[PagedBatch], Any]]:
    pools = [torch.zeros(_NUM_BLOCKS, _BLOCK_SIZE, _KV_HEADS, _HEAD_DIM, device=device) for _ in range(2)]
    for pool in pools:  # torch records no CUDA graph of what writes to tensors that may move
        torch._dynamo.mark_static_address(pool)
    query = torch.zeros(2, _HEADS, _HEAD_DIM, device=device)
    key = torch.zeros(2, _KV_HEADS, _HEAD_DIM, device=device)
    lse = torch.zeros(_HEADS, 2, device=device)
    source, target = (torch.tensor([block], device=device) for block in (0, 1))
    attention = torch_pagedkv.PagedAttention(_HEADS, _HEAD_DIM, _KV_HEADS)

    def write(batch: PagedBatch) -> None:
        torch_pagedkv.reshape_and_cache(key, key, *pools, batch.slot_mapping)

    def read(batch: PagedBatch) -> torch.Tensor:
        return torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k)

    def merge(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_pagedkv.merge_attention_states(query, lse, query, lse)

    def gather(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return torch_pagedkv.gather_kv(*pools, batch.block_table, batch.seqused_k)

    def copy(batch: PagedBatch) -> None:
        torch_pagedkv.copy_blocks(*pools, source, target)

    def slots(batch: PagedBatch) -> torch.Tensor:
        return torch_pagedkv.compute_slot_mapping(batch.block_table, batch.seqused_k, None, _BLOCK_SIZE, 2)

    def layer(batch: PagedBatch) -> torch.Tensor:
        return attention(query, key, key, pools, batch)

    return {
        "reshape_and_cache": write,
        "paged_attention": read,
        "merge_attention_states": merge,
        "gather_kv": gather,
        "copy_blocks": copy,
        "compute_slot_mapping": slots,
        "PagedAttention": layer,
    }


def _count_pool_copies(code: str) -> int:
    """Count the buffers of a pool's size or more that generated code allocates."""
    shapes = re.findall(r"= empty_strided_\w+\(\(([\d, ]*)\)", code)
    sizes = (torch.Size(int(size) for size in re.findall(r"\d+", shape)).numel() for shape in shapes)
    return sum(size >= _POOL_NUMEL for size in sizes)


def _count_graph_launches(call: Callable[[PagedBatch], Any], device: str) -> int:
    """Count the CUDA graphs that a call launches once ``reduce-overhead`` has recorded it."""
    torch._dynamo.reset()
    recorded = torch.compile(call, mode="reduce-overhead")

    def step(number: int) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        recorded(_batch(number, device))

    for number in range(1, _STEPS):  # the first ones run eagerly, compile and record
        step(number)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        step(_STEPS)
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key.startswith("cudaGraphLaunch"))


def _host_us(call: Callable[[PagedBatch], Any], batch: PagedBatch, device: str) -> float:
    """Return the least mean time of a call in microseconds; the device is waited for between rounds alone."""
    best = float("inf")
    for _ in range(_ROUNDS):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(_CALLS):
            call(batch)
        best = min(best, time.perf_counter() - start)
    return best / _CALLS * 1e6
