"""torch.compile: one graph, no recompile as batches change, no copy of a pool, the order of writes and reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import torch_pagedkv
from cases import BF16, E4M3, FP32, PAGED, WRITE, PagedCase
from pools import assert_same_bits
from torch_pagedkv import PagedAttention, PagedBatch, PagedKVCache

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def counted(function, backend="aot_eager", **options):
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, backend=counter, **options), counter


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_reads_equal_eager(case, device):
    args, options = case.build(device).attention
    expected = torch_pagedkv.paged_attention(*args, **options, return_lse=True)
    compiled, _ = counted(torch_pagedkv.paged_attention)
    for actual, wanted in zip(compiled(*args, **options, return_lse=True), expected):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("case", WRITE, ids=str)
def test_writes_equal_eager(case, device):
    args, scales, buffers = case.build(device)
    eager_args, eager_scales, expected = case.build(device)
    torch_pagedkv.reshape_and_cache(*eager_args, **eager_scales)
    compiled, _ = counted(torch_pagedkv.reshape_and_cache)
    compiled(*args, **scales)
    for actual, wanted in zip(buffers, expected):
        assert_same_bits(actual, wanted)


class Model(torch.nn.Module):
    """A few layers of projections around PagedAttention."""

    def __init__(self, layers: int, device: str) -> None:
        super().__init__()
        width = HEADS * DIM
        self.fused = torch.nn.ModuleList(
            torch.nn.Linear(width, width + 2 * KV_HEADS * DIM, device=device) for _ in range(layers)
        )
        self.attention = torch.nn.ModuleList(PagedAttention(HEADS, DIM, KV_HEADS) for _ in range(layers))

    def forward(self, hidden, pools, batch):
        for layer, (fused, attention) in enumerate(zip(self.fused, self.attention)):
            query, key, value = fused(hidden).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
            hidden = hidden + attention(query, key, value, pools[layer], batch)
        return hidden


def tables(num_sequences: int, blocks: int) -> list[list[int]]:
    return [[row * blocks + column for column in range(blocks)][::-1] for row in range(num_sequences)]


def decode_batch(lengths: list[int], device: str, blocks: int = 8) -> PagedBatch:
    return PagedBatch.from_sequences(tables(len(lengths), blocks), lengths, block_size=BLOCK, device=device)


def new_cache(layers: int, device: str, num_blocks: int = 64) -> PagedKVCache:
    cache = PagedKVCache(layers, KV_HEADS, DIM, block_size=BLOCK, num_blocks=num_blocks, dtype=FP32, device=device)
    cache.storage.zero_()
    return cache


@torch.no_grad()
def test_growing_lengths_compile_once(device):
    model, cache = Model(2, device), new_cache(2, device)
    compiled, counter = counted(model)
    for step in range(64):
        hidden = torch.randn(3, HEADS * DIM, device=device)
        batch = decode_batch([step + 1, step + 30, 2 * step + 1], device, blocks=9)
        copy = new_cache(2, device)
        copy.storage.copy_(cache.storage)
        actual = compiled(hidden, cache, batch)
        torch.testing.assert_close(actual, model(hidden, copy, batch))
        torch.testing.assert_close(cache.storage, copy.storage)
    assert counter.frame_count == 1


@torch.no_grad()
def test_batch_sizes_compile_once_for_each_class(device):
    """A batch of one is static, every other size shares one dynamic graph."""
    model, cache = Model(1, device), new_cache(1, device)
    compiled, counter = counted(model)
    for size in [1, 2, 3, 4, 5, 6, 7, 8, 1, 5]:
        compiled(torch.randn(size, HEADS * DIM, device=device), cache, decode_batch([9] * size, device))
    assert counter.frame_count <= 3
    before = counter.frame_count
    for size in (8, 1, 2, 6):
        compiled(torch.randn(size, HEADS * DIM, device=device), cache, decode_batch([17] * size, device))
    assert counter.frame_count == before


@torch.no_grad()
def test_token_counts_compile_once_for_each_class(device):
    model, cache = Model(1, device), new_cache(1, device)
    compiled, counter = counted(model)
    for tokens in [1, 2, 3, 17, 64, 65, 128, 300, 1, 200]:
        batch = PagedBatch.from_sequences(
            [list(range(20)), list(range(20, 24))], [tokens, 9], [tokens, 1], block_size=BLOCK, device=device
        )
        compiled(torch.randn(tokens + 1, HEADS * DIM, device=device), cache, batch)
    assert counter.frame_count <= 3


@torch.no_grad()
def test_order_of_writes_and_reads(device):
    """write, read, write, read in one graph: each read sees just the writes before it."""

    def steps(query, keys, pools, batches):
        outputs = []
        for key, batch in zip(keys, batches):
            torch_pagedkv.reshape_and_cache(key, key * 2, *pools, batch.slot_mapping)
            read = torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k)
            outputs.append(read)
        torch_pagedkv.copy_blocks(*pools, batches[0].block_table[0, :1], batches[0].block_table[0, 1:2])
        outputs.append(torch_pagedkv.gather_kv(*pools, batches[0].block_table, batches[0].seqused_k)[1])
        return outputs

    query = torch.randn(2, HEADS, DIM, device=device)
    keys = torch.randn(2, 2, KV_HEADS, DIM, device=device)
    batches = [decode_batch([n, n], device) for n in (1, 1)]
    results = []
    for function in (steps, torch.compile(steps, fullgraph=True)):
        pools = new_cache(1, device)
        outputs = function(query, keys, pools[0], batches)
        results.append([*outputs, pools.storage])
    for actual, wanted in zip(*results):
        assert_same_bits(actual, wanted)
    assert not torch.equal(results[0][0], results[0][1])


def pool_sized_buffers(code: str, pool_numel: int) -> list[str]:
    """Return the lines of generated code that allocate a pool or more."""
    found = []
    for line in code.splitlines():
        match = re.search(r"empty_strided_\w+\(\(([\d, ]*)\)", line)
        if match:
            sizes = [int(size) for size in match.group(1).replace(" ", "").split(",") if size]
            if torch.Size(sizes).numel() >= pool_numel:
                found.append(line.strip())
    return found


POOL_FORMS = {
    "one_pool_for_all_layers": (
        lambda device: torch.zeros(8, 2, 512, BLOCK, KV_HEADS, DIM, device=device),
        lambda pool, layer: (pool[layer, 0], pool[layer, 1]),
    ),
    "unbind": (
        lambda device: torch.zeros(2, 512, BLOCK, KV_HEADS, DIM, device=device),
        lambda pool, layer: pool.unbind(0),
    ),
    "split": (
        lambda device: torch.zeros(512, BLOCK, KV_HEADS, 2 * DIM, device=device),
        lambda pool, layer: pool.split(DIM, dim=-1),
    ),
    "hnd": (
        lambda device: torch.zeros(2, 512, KV_HEADS, BLOCK, DIM, device=device),
        lambda pool, layer: pool.transpose(2, 3).unbind(0),
    ),
    "paged_kv_cache": (
        lambda device: new_cache(8, device, 512),
        lambda pool, layer: pool[layer],
    ),
}


@pytest.mark.parametrize("owner", ["argument", "buffer"])
@pytest.mark.parametrize("form", POOL_FORMS)
@torch.no_grad()
def test_no_copy_of_a_pool(form, owner, device):
    """Eight layers write and read views of a pool: the generated code allocates nothing of its size."""
    make, view = POOL_FORMS[form]

    def layers(pool, query, key, batch):
        for layer in range(8):
            pools = view(pool, layer)
            torch_pagedkv.reshape_and_cache(key + layer, key - layer, *pools, batch.slot_mapping)
            query = query + torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k)
        return query

    class Owner(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            if isinstance(pool, torch.Tensor):
                self.register_buffer("pool", pool)
            else:
                self.pool = pool

        def forward(self, *args):
            return layers(self.pool, *args)

    pool, eager_pool = make(device), make(device)
    storage = pool if isinstance(pool, torch.Tensor) else pool.storage
    eager_storage = eager_pool if isinstance(eager_pool, torch.Tensor) else eager_pool.storage
    address = storage.data_ptr()
    query = torch.randn(3, HEADS, DIM, device=device)
    key = torch.randn(3, KV_HEADS, DIM, device=device)
    batch = decode_batch([5, 17, 33], device)
    expected = layers(eager_pool, query, key, batch)
    if owner == "argument":
        compiled = torch.compile(layers, fullgraph=True)
        actual, codes = run_and_get_code(compiled, pool, query, key, batch)
    else:
        compiled = torch.compile(Owner(pool), fullgraph=True)
        actual, codes = run_and_get_code(compiled, query, key, batch)
    torch.testing.assert_close(actual, expected)
    assert_same_bits(storage, eager_storage)
    assert storage.data_ptr() == address
    smallest_pool = 512 * BLOCK * KV_HEADS * DIM
    assert len(codes) == 1 and "torch_pagedkv.reshape_and_cache" in codes[0]
    assert pool_sized_buffers(codes[0], smallest_pool) == []


@pytest.mark.parametrize("dynamic", [None, True], ids=["default", "dynamic"])
@pytest.mark.parametrize("form", ["one_pool_for_all_layers", "unbind", "unbind_blocks", "split", "halves"])
@torch.no_grad()
def test_views_of_pools_of_any_size(form, dynamic, device):
    """Views taken inside the function start where they should, also when the pool's size is symbolic."""
    make, view = {
        "one_pool_for_all_layers": (lambda n: (3, 2, n, BLOCK, KV_HEADS, DIM), lambda pool: (pool[1, 0], pool[1, 1])),
        "unbind": (lambda n: (2, n, BLOCK, KV_HEADS, DIM), lambda pool: pool.unbind(0)),
        "unbind_blocks": (lambda n: (n, 2, BLOCK, KV_HEADS, DIM), lambda pool: pool.unbind(1)),
        "split": (lambda n: (n, BLOCK, KV_HEADS, 2 * DIM), lambda pool: pool.split(DIM, dim=-1)),
        "halves": (lambda n: (2 * n, BLOCK, KV_HEADS, DIM), lambda pool: pool.chunk(2)),
    }[form]

    def step(pool, query, key, batch, source):
        pools = view(pool)
        torch_pagedkv.reshape_and_cache(key, key * 2, *pools, batch.slot_mapping)
        torch_pagedkv.copy_blocks(*pools, source, source + 1)
        return torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k)

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    batch = PagedBatch.from_sequences([[3], [2]], [4, 9], block_size=BLOCK, device=device)
    query, key = torch.randn(2, HEADS, DIM, device=device), torch.randn(2, KV_HEADS, DIM, device=device)
    for num_blocks in (8, 12, 17):
        pools = [torch.zeros(make(num_blocks), device=device) for _ in range(2)]
        args = (query, key, batch, torch.tensor([3], device=device))
        assert_same_bits(compiled(pools[0], *args), step(pools[1], *args))
        assert_same_bits(pools[0], pools[1])


@torch.no_grad()
def test_scales_changed_in_place_are_seen(device):
    case = PagedCase(name="scales", kv_lens=[40, 7], dtype=BF16, pool_dtype=E4M3, scales="one")
    batch = case.build(device)
    args, options = batch.attention
    compiled, counter = counted(torch_pagedkv.paged_attention)
    before = compiled(*args, **options)
    options["k_scale"].mul_(3.0)
    options["v_scale"].mul_(0.5)
    after = compiled(*args, **options)
    assert_same_bits(after, torch_pagedkv.paged_attention(*args, **options))
    assert not torch.equal(before, after) and counter.frame_count == 1


@torch.no_grad()
def test_inductor_equals_eager(device):
    for name in ("chunk", "decode_bf16", "e4m3_per_head_float16", "all_options", "empty_ranges", "no_tokens"):
        case = next(c for c in PAGED if c.name == name)
        args, options = case.build(device).attention
        expected = torch_pagedkv.paged_attention(*args, **options)
        assert_same_bits(torch.compile(torch_pagedkv.paged_attention, fullgraph=True)(*args, **options), expected)


@torch.no_grad()
def test_slots_computed_in_the_graph(device):
    """block_size and num_tokens may be symbolic."""

    def slots(hidden, table, lengths, sums, pool):
        return torch_pagedkv.compute_slot_mapping(table, lengths, sums, pool.shape[1], hidden.shape[0])

    compiled, counter = counted(slots, dynamic=True)
    for tokens, block_size in ((13, 16), (5, 16), (9, 32)):
        table = torch.tensor([[7, 2, 9], [4, 0, 1]], device=device)
        sums = torch.tensor([0, 2, tokens], device=device)
        args = (torch.empty(tokens, 4, device=device), table, torch.tensor([21, 20], device=device), sums)
        pool = torch.empty(10, block_size, 2, 8, device=device)
        assert torch.equal(compiled(*args, pool), slots(*args, pool))
    assert counter.frame_count == 1


def test_first_call_inside_a_compiled_function(device):
    """In a fresh process the op runs for the first time while a graph is traced."""
    program = f"""
        import torch, torch_pagedkv
        @torch.compile(fullgraph=True)
        def attend(query, pools, table, lengths, key, slots):
            torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
            return torch_pagedkv.paged_attention(query, *pools, table, lengths) + 1
        with torch.device("{device}"), torch.no_grad():
            pools = torch.zeros(2, 4, 16, 2, 8).unbind(0)
            out = attend(torch.ones(1, 4, 8), pools, torch.tensor([[2]]), torch.tensor([1]), torch.ones(1, 2, 8),
                         torch.tensor([32]))
        assert (out == 2).all(), out
        print("one graph", torch._dynamo.utils.counters["stats"]["unique_graphs"])
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=os.environ
    )
    assert result.returncode == 0 and "one graph 1" in result.stdout, result.stderr
