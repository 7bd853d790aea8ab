"""Recompiles and graph breaks, in torch's own counts: what changes from step to step compiles nothing anew."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from decoder import BLOCK, WIDTH, Decoder, decode_batch, new_cache, prefill_batch
from torch_pagedkv import PagedBatch


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


def breaks_and_graphs() -> tuple[int, int]:
    """Return torch's counts of graph breaks and of graphs since the test began."""
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]


def run(model, cache, batch, device):
    return model(torch.randn(batch.num_tokens, WIDTH, device=device), cache, batch)


@torch.no_grad()
def test_growing_lengths_compile_once(device):
    """64 steps of three sequences: one graph, and what it computes is what eager computes."""
    model, cache = Decoder(2, device), new_cache(2, device)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(64):
        hidden = torch.randn(3, WIDTH, device=device)
        batch = decode_batch([step + 1, step + 30, 2 * step + 1], device, blocks=9)
        copy = new_cache(2, device)
        copy.storage.copy_(cache.storage)
        actual = compiled(hidden, cache, batch)
        torch.testing.assert_close(actual, model(hidden, copy, batch))
        torch.testing.assert_close(cache.storage, copy.storage)
    assert counter.frame_count == 1 and breaks_and_graphs() == (0, 1)


@torch.no_grad()
def test_batch_sizes_compile_once_for_each_class(device):
    """A batch of one is static, every other size shares one dynamic graph; nothing is forgotten in between."""
    model, cache = Decoder(1, device), new_cache(1, device)
    compiled = torch.compile(model, backend="aot_eager")  # breaks would be legal here, and are counted
    for size in range(1, 9):
        run(compiled, cache, decode_batch([9] * size, device), device)
    before = breaks_and_graphs()
    assert before <= (0, 2)  # one sequence, and all other numbers
    for size in (1, 8, 2, 1, 5):
        run(compiled, cache, decode_batch([17 + size] * size, device), device)
    assert breaks_and_graphs() == before


@torch.no_grad()
def test_a_batch_declared_dynamic_compiles_once(device):
    """mark_dynamic on the sizes that change spares the graph of the first size."""
    model, cache = Decoder(1, device), new_cache(1, device)
    compiled = torch.compile(model, backend="aot_eager")
    for size in range(2, 9):
        batch, hidden = decode_batch([9] * size, device), torch.randn(size, WIDTH, device=device)
        for tensor in (hidden, batch.block_table, batch.seqused_k, batch.slot_mapping):
            torch._dynamo.mark_dynamic(tensor, 0)
        compiled(hidden, cache, batch)
    assert breaks_and_graphs() == (0, 1)


@torch.no_grad()
def test_token_counts_compile_once_for_each_class(device):
    """Prefill of 1 to 300 tokens beside a decoding sequence; then the batches of one again."""
    model, cache = Decoder(1, device), new_cache(1, device)
    compiled = torch.compile(model, backend="aot_eager")
    for tokens in range(301):
        batch = PagedBatch.from_sequences(
            [list(range(20)), list(range(20, 24))], [tokens, 9], [tokens, 1], block_size=BLOCK, device=device
        )
        run(compiled, cache, batch, device)
    assert breaks_and_graphs() <= (0, 2)
    for batch in (prefill_batch([1], device), prefill_batch([40], device), decode_batch([1], device)):
        run(compiled, cache, batch, device)
    before = breaks_and_graphs()
    assert before <= (0, 5)  # one token, one sequence and the decode form are classes of their own
    for batch in (prefill_batch([7], device), decode_batch([9], device), prefill_batch([1], device)):
        run(compiled, cache, batch, device)
    assert breaks_and_graphs() == before


@torch.no_grad()
@pytest.mark.parametrize("what", ["tables", "slots", "lengths", "addresses"])
def test_other_values_and_addresses_compile_nothing(what, device):
    """Contents and addresses of every tensor are free to change between calls."""
    model, cache = Decoder(1, device), new_cache(1, device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = decode_batch([5, 9], device)
    run(compiled, cache, batch, device)
    if what == "tables":
        batch.block_table.copy_(batch.block_table.flip(0))
    elif what == "slots":
        batch.slot_mapping.fill_(-1)
    elif what == "lengths":
        batch.seqused_k.zero_()
    else:
        cache, batch = new_cache(1, device), decode_batch([1, 2], device)
    run(compiled, cache, batch, device)
    assert breaks_and_graphs() == (0, 1)
