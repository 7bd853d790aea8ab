"""Graphs that are captured by hand: one serves every length, and a step neither allocates nor waits."""

from __future__ import annotations

import pytest
import torch

from cases import BF16, E4M3
from devices import needs_cuda
from graph_launches import graph_launches
from pools import assert_same_bits
from torch_pagedkv import PagedAttention, PagedBatch, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK, SEQUENCES = 8, 2, 128, 16, 3
LONGEST = 40000
BLOCKS = -(-LONGEST // BLOCK)


class Step:
    """Two layers of attention over a batch of fixed shapes, whose tables are shuffled at every refill."""

    def __init__(self, query_lens: list[int] | None, pool: torch.dtype = BF16) -> None:
        scales = {} if pool == BF16 else {f"{name}_scale": torch.tensor([0.5], device="cuda") for name in "kv"}
        self.attention = PagedAttention(HEADS, DIM, KV_HEADS, **scales)
        num_tokens = None if query_lens is None else sum(query_lens) + 2  # two rows of padding
        self.query_lens = query_lens
        sizes = dict(block_size=BLOCK, num_blocks=SEQUENCES * BLOCKS + 5, dtype=pool, device="cuda")
        self.cache = PagedKVCache(2, KV_HEADS, DIM, **sizes)
        self.cache.storage.copy_(torch.randn(self.cache.storage.shape, device="cuda", dtype=BF16))
        self.batch = PagedBatch.fixed(SEQUENCES, BLOCKS, num_tokens, device="cuda")
        rows = self.batch.num_tokens
        self.query = torch.randn(rows, HEADS, DIM, device="cuda", dtype=BF16)
        self.key, self.value = (torch.randn(rows, KV_HEADS, DIM, device="cuda", dtype=BF16) for _ in "kv")

    def refill(self, lengths: list[int]) -> None:
        """Give the next step other lengths, tables, slots and inputs, in place."""
        ids = torch.randperm(self.cache.num_blocks).tolist()
        tables = [ids[i * BLOCKS : i * BLOCKS + -(-n // BLOCK)] for i, n in enumerate(lengths)]
        self.batch.update_(tables, lengths, self.query_lens, block_size=BLOCK)
        for tensor in (self.query, self.key, self.value):
            tensor.normal_()

    def __call__(self) -> torch.Tensor:
        out = self.attention(self.query, self.key, self.value, self.cache[0], self.batch)
        return self.attention(self.query + out, self.key, out[:, :KV_HEADS], self.cache[1], self.batch)


def capture(step: Step) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        out = step()
    return graph, out


FORMS = {
    "decode": (None, BF16),
    "decode_fp8": (None, E4M3),
    "chunks": ([1, 5, 3], BF16),
    "chunks_fp8": ([1, 5, 3], E4M3),
}


@pytest.fixture(params=FORMS)
def step(request: pytest.FixtureRequest) -> Step:
    torch.manual_seed(0)
    return Step(*FORMS[request.param])


@needs_cuda
@torch.no_grad()
def test_captured_at_length_7_it_serves_every_length(step):
    """On a side stream; with lengths, tables, slots and inputs changed in place a replay gives eager's bits."""
    step.refill([7] * SEQUENCES)
    graph, out = capture(step)
    for lengths in ([7, 7, 7], [8, 7, 9], [500, 8, 7], [7, 40000, 500], [40000, 40000, 40000]):
        step.refill(lengths)
        before = step.cache.storage.clone()
        graph.replay()
        replayed, written = out.clone(), step.cache.storage.clone()
        step.cache.storage.copy_(before)
        assert_same_bits(replayed, step())
        assert_same_bits(written, step.cache.storage)
        assert not torch.equal(written.view(torch.uint8), before.view(torch.uint8))


@needs_cuda
@torch.no_grad()
def test_a_replay_is_one_launch_and_allocates_nothing(step):
    step.refill([7] * SEQUENCES)
    graph, _ = capture(step)
    assert graph_launches(graph.replay) == 1
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
    assert after["segment.all.allocated"] == before["segment.all.allocated"]


@needs_cuda
@torch.no_grad()
def test_a_step_waits_for_nothing(step):
    """Eager too, the refill from the host included: the host runs ahead of the device."""
    step.refill([7] * SEQUENCES)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in (7, 500, LONGEST):
            step.refill([length] * SEQUENCES)
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
@torch.no_grad()
def test_a_step_takes_the_memory_of_its_shapes_only():
    """What eager allocates does not depend on lengths."""
    step, peaks = Step(None), set()
    for length in (7, 500, LONGEST):
        step.refill([length] * SEQUENCES)
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        peaks.add(torch.cuda.max_memory_allocated() - before)
    assert len(peaks) == 1 and peaks.pop() < 64 * 2**20


@needs_cuda
@torch.no_grad()
def test_the_batch_advances_inside_the_graph():
    """Lengths and slots of a decode step follow on the device; only new blocks come from the host."""
    step = Step(None)
    expected = Step(None)
    for name in ("query", "key", "value"):
        getattr(expected, name).copy_(getattr(step, name))
    expected.cache.storage.copy_(step.cache.storage)
    tables = [list(range(i * 4, i * 4 + 4)) for i in range(SEQUENCES)]
    step.batch.update_(tables, [14, 15, 31], block_size=BLOCK)

    def advance_and_attend():
        step.batch.advance_(block_size=BLOCK)
        return step()

    graph, out = capture(advance_and_attend)
    step.batch.update_(tables, [14, 15, 31], block_size=BLOCK)
    for number in range(1, 20):
        graph.replay()
        expected.batch.update_(tables, [14 + number, 15 + number, 31 + number], block_size=BLOCK)
        assert_same_bits(out, expected())
        assert torch.equal(step.batch.slot_mapping, expected.batch.slot_mapping)
    assert_same_bits(step.cache.storage, expected.cache.storage)
