"""mode="reduce-overhead": on CUDA a decode step is one launch of a graph that torch recorded, wherever pools are."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import torch_pagedkv
from decoder import BLOCK, DIM, HEADS, KV_HEADS, WIDTH, Decoder, tables
from graph_launches import graph_launches
from torch_pagedkv import PagedBatch, PagedKVCache

LAYERS, SEQUENCES, BLOCKS = 2, 3, 16
NUM_BLOCKS = 65536 if torch.cuda.is_available() else 512  # a pool is larger than all else on a GPU, cuBLAS's part too
SHAPE = (NUM_BLOCKS, BLOCK, KV_HEADS, DIM)
POOL_BYTES = torch.Size(SHAPE).numel() * 4  # of one layer's keys


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


class ViewsInside(torch.nn.Module):
    """A decoder that is given one tensor for the pools of all layers."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, hidden, pool, batch):
        return self.decoder(hidden, [pool[layer].unbind(0) for layer in range(LAYERS)], batch)


class WithBuffers(ViewsInside):
    """A decoder that owns that tensor."""

    def __init__(self, decoder: Decoder, device: str) -> None:
        super().__init__(decoder)
        self.register_buffer("pool", torch.zeros(LAYERS, 2, *SHAPE, device=device))

    def forward(self, hidden, batch):
        return super().forward(hidden, self.pool, batch)


def make_cache(device: str) -> PagedKVCache:
    sizes = dict(block_size=BLOCK, num_blocks=NUM_BLOCKS, dtype=torch.float32, device=device)
    cache = PagedKVCache(LAYERS, KV_HEADS, DIM, **sizes)
    cache.storage.zero_()
    return cache


# Each returns a module, and what it takes between the rows and the batch.
FORMS = {
    "buffers": lambda decoder, device: (WithBuffers(decoder, device), ()),
    "arguments": lambda decoder, device: (
        decoder,
        ([[torch.zeros(SHAPE, device=device) for _ in "kv"] for _ in range(LAYERS)],),
    ),
    "views_of_one": lambda decoder, device: (ViewsInside(decoder), (torch.zeros(LAYERS, 2, *SHAPE, device=device),)),
    "paged_kv_cache": lambda decoder, device: (decoder, (make_cache(device),)),
}


def declare_static(*trees) -> None:
    """Tell torch that tensors stay where they are: it records no graph of a function that writes other arguments."""
    for tensor in torch.utils._pytree.tree_leaves(trees):
        if isinstance(tensor, torch.Tensor):
            torch._dynamo.mark_static_address(tensor)


def peak_bytes(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_decode_step_is_one_launch(form, device):
    """64 steps of growing lengths in a fixed batch: no break, no recompile, no second copy of a pool."""
    torch.manual_seed(0)
    decoder = Decoder(LAYERS, device).requires_grad_(False)
    model, pools = FORMS[form](decoder, device)
    declare_static(pools)
    expected_pools = make_cache(device)
    batch = PagedBatch.fixed(SEQUENCES, BLOCKS, device=device)
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    hidden = torch.zeros(SEQUENCES, WIDTH, device=device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, launches = peak_bytes(device), []
    for number in range(1, 65):
        hidden.normal_()
        batch.update_(tables(SEQUENCES, BLOCKS), [number, 2 * number, 100 + number], block_size=BLOCK)
        found = []

        def step(found=found):
            torch.compiler.cudagraph_mark_step_begin()
            found.append(compiled(hidden, *pools, batch))

        launches.append(graph_launches(step) if number > 60 else step())
        torch.testing.assert_close(found[0], decoder(hidden, expected_pools, batch))
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    if device == "cuda":
        assert (counters["inductor"]["cudagraph_skips"], launches[60:]) == (0, [1] * 4)
        assert peak_bytes(device) - before < POOL_BYTES


@torch.no_grad()
def test_pools_that_are_not_declared(device):
    """Plain arguments are right too, and copy no pool; torch then runs the compiled code without a graph."""
    decoder = Decoder(LAYERS, device).requires_grad_(False)
    cache, copy, batch = make_cache(device), make_cache(device), PagedBatch.fixed(2, BLOCKS, device=device)
    compiled = torch.compile(decoder, fullgraph=True, mode="reduce-overhead")
    hidden = torch.randn(2, WIDTH, device=device)
    for number in range(1, 6):
        batch.update_(tables(2, BLOCKS), [number, 5], block_size=BLOCK)
        torch.testing.assert_close(compiled(hidden, cache, batch), decoder(hidden, copy, batch))
    torch.testing.assert_close(cache.storage, copy.storage)


@torch.no_grad()
def test_order_of_writes_and_reads(device):
    """Write, read, write, read in one recorded graph: each read sees the writes before it and none after."""

    def steps(query, keys, pools, batch):
        outs = []
        for key in keys:
            torch_pagedkv.reshape_and_cache(key, key, *pools, batch.slot_mapping)
            outs.append(torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k))
        return outs

    compiled = torch.compile(steps, fullgraph=True, mode="reduce-overhead")
    pools, copies = ([torch.zeros(SHAPE, device=device) for _ in "kv"] for _ in "ab")
    declare_static(pools)
    batch = PagedBatch.fixed(2, BLOCKS, device=device)
    query = torch.randn(2, HEADS, DIM, device=device)
    keys = torch.randn(3, 2, KV_HEADS, DIM, device=device)
    for number in range(1, 8):
        keys.normal_()
        batch.update_(tables(2, BLOCKS), [number, number], block_size=BLOCK)
        torch.compiler.cudagraph_mark_step_begin()
        actual = [out.clone() for out in compiled(query, keys, pools, batch)]
        for out, wanted in zip(actual, steps(query, keys, copies, batch), strict=True):
            assert torch.equal(out, wanted)
        assert not torch.equal(actual[0], actual[1])
    assert all(torch.equal(pool, copy) for pool, copy in zip(pools, copies, strict=True))
    assert device == "cpu" or counters["inductor"]["cudagraph_skips"] == 0


@torch.no_grad()
def test_the_example_decodes_in_one_launch(device, examples_on_path):
    """``decode_step`` of docs/examples/llama.py, fused and not: slots, model and choice are one graph."""
    import llama

    config = llama.Config(layers=2)
    torch.manual_seed(0)
    model = llama.Llama(config).to(device).requires_grad_(False)
    table = [[3, 9, 1, 4], [2, 7, 5, 6]]
    chosen = []
    for fused in (False, True):
        if fused:
            llama.fuse_projections(model)
        for run in (llama.decode_step, torch.compile(llama.decode_step, fullgraph=True, mode="reduce-overhead")):
            sizes = dict(block_size=16, num_blocks=64, dtype=torch.float32, device=device)
            cache = PagedKVCache(config.layers, config.kv_heads, config.head_dim, **sizes)
            cache.storage.zero_()
            batch = PagedBatch.from_sequences(table, [5, 14], block_size=16, device=device)
            tokens = torch.tensor([1, 2], device=device)
            declare_static(cache, batch, tokens)
            texts = []
            for _ in range(20):
                torch.compiler.cudagraph_mark_step_begin()
                run(model, tokens, cache, batch)
                texts.append(tokens.tolist())
            chosen.append(texts)
    assert chosen[1:] == chosen[:1] * 3
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 2
    if device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0
        assert graph_launches(lambda: run(model, tokens, cache, batch)) == 1
