"""torch.compile: one graph, the bits of eager, the order of writes and reads, views taken inside the function."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import fresh_cache
from torch.torch_version import TorchVersion

import torch_pagedkv
from cases import BF16, E4M3, PAGED, WRITE, PagedCase
from decoder import BLOCK, DIM, HEADS, KV_HEADS, decode_batch, new_cache
from pools import assert_same_bits
from torch_pagedkv import PagedBatch


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


@torch.no_grad()
@pytest.mark.parametrize("given", ["a cache", "unaliased", "views"])
def test_order_of_writes_and_reads(given, device, request):
    """write, read, write, read in one graph: each read sees just the writes before it."""
    if given == "views" and TorchVersion(torch.__version__) < "2.12":
        reason = "torch reads past views of one tensor that are given and mutated"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=False))

    def steps(query, keys, pools, batches):
        outputs = []
        if given == "a cache":
            pools = pools[0]
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
        cache = new_cache(1, device)
        pools = cache if given == "a cache" else cache.unaliased()[0] if given == "unaliased" else cache[0]
        with fresh_cache():  # its key does not know which inputs share memory: no form may meet another's code
            outputs = function(query, keys, pools, batches)
        results.append([*outputs, cache.storage])
    for actual, wanted in zip(*results):
        assert_same_bits(actual, wanted)
    assert not torch.equal(results[0][0], results[0][1])


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
