"""The rules of docs/contract.md in their order: a rule and its test carry the same name.

Each test is the rule in its smallest form; the tests that the page names beside it try the rest.
"""

from __future__ import annotations

import math

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32, PagedCase
from pools import assert_same_bits, poison_
from test_paged_attention import attend, expect, largest_value
from tolerances import assert_close, assert_close_lse

# Two sequences in blocks of NaN and stale table entries: cases.py poisons whatever a case does not own.
DECODE = PagedCase(name="decode", kv_lens=[21, 40])
CHUNKS = PagedCase(name="chunks", kv_lens=[21, 40], query_lens=[5, 9], dtype=BF16)


def assert_attends(batch, **changes) -> None:
    batch.options = {**batch.options, **changes}
    expected_out, expected_lse = expect(batch)
    out, lse = attend(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


def pools(device: str, dtype: torch.dtype = FP32, num_blocks: int = 4, block_size: int = 4) -> tuple[torch.Tensor, ...]:
    """Return a key pool and a value pool of NaN, with 2 KV heads of 8."""
    shape = (num_blocks, block_size, 2, 8)
    return tuple(poison_(torch.empty(shape, dtype=dtype, device=device)) for _ in range(2))


def rows(device: str, count: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    return torch.arange(1.0, count * 16 + 1, device=device).view(count, 2, 8).to(dtype)


def attend_to_values(values: torch.Tensor, query: torch.Tensor, **options):
    """Attend to one sequence whose keys are zero, so that every visible key weighs the same."""
    keys = torch.zeros_like(values)
    table = torch.zeros((1, 1), dtype=torch.int32, device=values.device)
    used = torch.tensor([values.shape[0]], device=values.device)
    sums = torch.tensor([0, query.shape[0]], device=values.device)
    return torch_pagedkv.paged_attention(query, keys[None], values[None], table, used, sums, return_lse=True, **options)


def counted(device: str, length: int) -> torch.Tensor:
    """Return values whose one element is 1 in the first token, 2 in the second, 4 in the third, ..."""
    return (2.0 ** torch.arange(length, device=device)).view(length, 1, 1)


def seen_by(out: torch.Tensor, lse: torch.Tensor) -> list[set[int]]:
    """Return the positions that each row averaged, from the values of ``counted``."""
    sums = (out.flatten() * lse.flatten().exp()).round().long().tolist()
    return [{position for position in range(32) if total >> position & 1} for total in sums]


def test_slots_and_table_entries_that_name_nothing(device):
    key_cache, value_cache = pools(device)
    slots = torch.tensor([-1, 6, -(2**40)], device=device)
    torch_pagedkv.reshape_and_cache(rows(device, 3), rows(device, 3), key_cache, value_cache, slots)
    assert key_cache.isfinite().sum() == 16 and key_cache[1, 2].isfinite().all()
    before = value_cache.clone()
    past_the_end = torch.tensor([4 * 4, 3], device=device)
    arguments = (rows(device, 2), rows(device, 2), key_cache, value_cache, past_the_end)
    if device == "cpu":
        with pytest.raises(
            ValueError, match=r"slot_mapping must be below num_blocks . block_size = 16, got 16 at index 0"
        ):
            torch_pagedkv.reshape_and_cache(*arguments)
        assert_same_bits(value_cache, before)
    else:
        torch_pagedkv.reshape_and_cache(*arguments)
        before[0, 3] = rows(device, 2)[1]
        assert_same_bits(value_cache, before)
    for stale in (-1, 2**31 - 1):
        batch = CHUNKS.build(device)
        expected = attend(batch)
        batch.block_table[0, 2:] = stale  # 21 tokens are in the first two of blocks of 16
        for actual, wanted in zip(attend(batch), expected):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("leftover", [0.0, -3.0e38, math.inf, math.nan])
def test_slots_that_were_never_written(leftover, device):
    batch = CHUNKS.build(device)
    expected = attend(batch)
    assert expected[0].isfinite().all()
    for cache in (batch.key_cache, batch.value_cache):
        cache[cache.isnan()] = leftover
    for actual, wanted in zip(attend(batch), expected):
        assert_same_bits(actual, wanted)


def test_empty_things_are_legal(device):
    batch = DECODE.with_(kv_lens=[0, 3, 0], query_lens=[2, 0, 1], padding_rows=2, sinks=[2.5]).build(device)
    for changes, lse_of_nothing in (({"sinks": None}, -math.inf), ({}, 2.5)):
        out, lse = attend(batch, **changes)
        assert (out == 0).all() and (lse == lse_of_nothing).all()
    nothing = DECODE.with_(kv_lens=[]).build(device)
    assert attend(nothing)[0].shape == (0, 4, 64)
    no_tokens, no_blocks = torch.empty((0, 2, 8), device=device), torch.empty((0, 4, 2, 8), device=device)
    no_slots = torch.empty(0, dtype=torch.long, device=device)
    torch_pagedkv.reshape_and_cache(no_tokens, no_tokens, no_blocks, no_blocks.clone(), no_slots)


def test_causal_means_bottom_right(device):
    query = torch.zeros((3, 1, 1), device=device)
    assert seen_by(*attend_to_values(counted(device, 5), query)) == [{0, 1, 2}, {0, 1, 2, 3}, {0, 1, 2, 3, 4}]
    assert seen_by(*attend_to_values(counted(device, 5), query, causal=False)) == [{0, 1, 2, 3, 4}] * 3
    # Two more queries than keys: the first two see nothing.
    assert seen_by(*attend_to_values(counted(device, 1), query)) == [set(), set(), {0}]


def test_windows_include_both_ends(device):
    def seen(left: int, right: int, causal: bool = False) -> list[set[int]]:
        query = torch.zeros((2, 1, 1), device=device)  # at positions 4 and 5
        options = {"window_size": (left, right), "causal": causal}
        return seen_by(*attend_to_values(counted(device, 6), query, **options))

    assert seen(0, 0) == [{4}, {5}]
    assert seen(2, 0) == [{2, 3, 4}, {3, 4, 5}]
    assert seen(1, 1) == [{3, 4, 5}, {4, 5}]
    assert seen(-1, 0) == [{0, 1, 2, 3, 4}, {0, 1, 2, 3, 4, 5}]
    assert seen(1, -1) == [{3, 4, 5}, {4, 5}]
    assert seen(1, 1, causal=True) == [{3, 4}, {4, 5}]


def test_the_order_of_a_score(device):
    """scale, softcap, ALiBi, mask: by hand, for a query at position 2 and keys 3, 5 and 7."""
    key_cache = torch.tensor([3.0, 5.0, 7.0, math.nan], device=device).view(1, 4, 1, 1)
    table, used = torch.zeros((1, 1), dtype=torch.int32, device=device), torch.tensor([3], device=device)
    options = {"softmax_scale": 0.5, "softcap": 4.0, "alibi_slopes": torch.tensor([0.25], device=device)}
    query = torch.tensor([[[2.0]]], device=device)
    _, lse = torch_pagedkv.paged_attention(
        query, key_cache, key_cache.clone(), table, used, return_lse=True, window_size=(1, 0), **options
    )
    scores = [4.0 * math.tanh(2.0 * key * 0.5 / 4.0) + 0.25 * (j - 2) for j, key in ((1, 5.0), (2, 7.0))]
    assert lse.item() == pytest.approx(math.log(sum(map(math.exp, scores))), rel=1e-6)


def test_sinks(device):
    sinks = torch.tensor([1.5], dtype=BF16, device=device)
    for num_splits in (0, 1, 4):
        options = {"sinks": sinks, "softcap": 0.5, "softmax_scale": 9.0, "num_splits": num_splits}
        out, lse = attend_to_values(
            torch.ones((300, 1, 1), device=device), torch.zeros((1, 1, 1), device=device), **options
        )
        weight = 300 + math.exp(1.5)  # scores of 0 and one sink, neither scaled nor capped
        assert lse.item() == pytest.approx(math.log(weight), rel=1e-6)
        assert_close(out, torch.tensor([[[300 / weight]]]), largest=1.0)
    batch = DECODE.build(device)
    nothing = torch.full((4,), -math.inf, device=device)
    for actual, wanted in zip(attend(batch, sinks=nothing), attend(batch)):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_fp8_pools(dtype, device):
    key_cache, value_cache = pools(device, dtype)
    key = rows(device, 1, BF16)
    key[0, 0, :3] = torch.tensor([math.nan, math.inf, -1e30])
    k_scale, v_scale = torch.tensor([0.5, 3.0], device=device), torch.tensor(2.0, device=device)
    slot = torch.tensor([9], device=device)
    torch_pagedkv.reshape_and_cache(key, key, key_cache, value_cache, slot, k_scale=k_scale, v_scale=v_scale)
    largest = torch.finfo(dtype).max
    quotients = (key[0].float() / k_scale[:, None]).clamp(-largest, largest)
    stored = key_cache[2, 1].float()
    assert stored[0, 0].isnan() and stored[0, 1] == largest and stored[0, 2] == -largest
    assert torch.equal(stored[0, 1:], quotients.to(dtype).float()[0, 1:])
    assert torch.equal(stored[1], quotients.to(dtype).float()[1])
    keys, _ = torch_pagedkv.gather_kv(
        key_cache, value_cache, torch.tensor([[2]], device=device), torch.tensor([4], device=device),
        k_scale=k_scale, v_scale=v_scale, dtype=FP32,
    )  # fmt: skip
    assert torch.equal(keys[0, 1, 1], stored[1] * 3.0)
    batch = CHUNKS.with_(pool_dtype=dtype, scales="per_head").build(device)
    assert_attends(batch)
    batch.options["v_scale"].mul_(3)  # read on the device at run time
    assert_attends(batch)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32, E4M3, E5M2])
def test_dtypes(dtype, device):
    pool = rows(device, 5, FP32).to(dtype)
    before = pool.clone()
    key_cache, value_cache = pools(device, dtype)
    slots = torch.tensor([2, 3, 5, 7, 11], device=device)
    torch_pagedkv.reshape_and_cache(pool, pool, key_cache, value_cache, slots)
    assert_same_bits(pool, before)
    assert_same_bits(key_cache.flatten(0, 1)[slots], pool)  # bits are copied
    query_dtype = BF16 if dtype in (E4M3, E5M2) else dtype
    batch = DECODE.with_(dtype=query_dtype, pool_dtype=dtype).build(device)
    assert attend(batch)[0].dtype == query_dtype
    assert_attends(batch)


def test_sizes(device):
    for head_dim, value_head_dim, block_size, num_heads in ((1, 512, 3, 14), (512, 1, 784, 2), (100, 72, 1, 142)):
        case = DECODE.with_(
            head_dim=head_dim, value_head_dim=value_head_dim, block_size=block_size, num_heads=num_heads
        )
        assert_attends(case.build(device))
    query = torch.zeros((1, 1, 513), device=device)
    with pytest.raises(ValueError, match=r"must have a head_dim in \[1, 512\], got 513"):
        attend_to_values(torch.zeros((1, 1, 513), device=device), query)


def test_large_pools(device):
    """Token strides of more than 2^31 elements; only the pages that are touched take memory."""
    stride = 2**31 + 8
    if device == "cuda" and torch.cuda.mem_get_info()[0] < 3 * stride:
        pytest.skip("CUDA: too little memory")
    buffer = torch.empty(2 * stride, dtype=E4M3, device=device)
    pool = buffer.as_strided((1, 2, 1, 8), (16, stride, 8, 1))
    key = torch.full((1, 1, 8), 3.0, dtype=E4M3, device=device)
    torch_pagedkv.reshape_and_cache(key, key, pool, pool, torch.tensor([1], device=device))
    assert (buffer[stride : stride + 8].float() == 3).all()
    table, used = torch.zeros((1, 1), dtype=torch.int32, device=device), torch.tensor([2], device=device)
    query = torch.zeros((1, 1, 8), dtype=BF16, device=device)
    out = torch_pagedkv.paged_attention(query, pool, pool, table, used, window_size=(0, 0))
    assert (out == 3).all()


@pytest.mark.parametrize("case", [DECODE, CHUNKS.with_(kv_lens=[700, 40])], ids=str)
def test_splits_and_the_same_bits_twice(case, device):
    batch = case.build(device)
    for num_splits in (0, 1, 5):
        for first, second in zip(attend(batch, num_splits=num_splits), attend(batch, num_splits=num_splits)):
            assert_same_bits(first, second)
    together = attend(batch, num_splits=1)[0]
    batch.seqused_k[1:] = 0  # the other sequences of the batch
    alone = attend(batch, num_splits=1)[0]
    count = case.query_lens[0] if case.query_lens else 1
    assert_same_bits(together[:count], alone[:count])


@pytest.mark.parametrize("layout", ["HND", "packed", "layers", "padded"])
def test_what_never_changes_a_bit(layout, device):
    """Layout, strides and the order of blocks; the same random tokens fill both pools."""
    expected = attend(CHUNKS.build(device))
    batch = CHUNKS.with_(layout=layout).build(device)
    for actual, wanted in zip(attend(batch), expected):
        assert_same_bits(actual, wanted)
    used, free = batch.tables[0][0], batch.tables[1][0]
    for cache in (batch.key_cache, batch.value_cache):
        swapped = cache[[used, free]].clone()
        cache[free], cache[used] = swapped[0], swapped[1]
    batch.block_table[0, 0], batch.block_table[1, 0] = free, used
    for actual, wanted in zip(attend(batch), expected):
        assert_same_bits(actual, wanted)


def test_inference_only(device):
    batch = DECODE.build(device)
    batch.query = batch.query.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=r"paged_attention: .* no gradient"):
        attend(batch)[0].sum().backward()
    key, caches = rows(device, 1).requires_grad_(), pools(device)
    slot = torch.tensor([0], device=device)
    torch_pagedkv.reshape_and_cache(key, key, *caches, slot)
    assert torch.equal(caches[0].detach()[0, 0], key[0])
    wants_grad = pools(device)[0].requires_grad_()
    with pytest.raises(ValueError, match="key_cache must not require grad"):
        torch_pagedkv.reshape_and_cache(key.detach(), key.detach(), wants_grad, caches[1].detach(), slot)


def test_two_writes_to_one_place(device):
    caches, values = pools(device), rows(device, 3)
    torch_pagedkv.reshape_and_cache(values, values, *caches, torch.tensor([5, 5, 5], device=device))
    for cache in caches:
        stored = cache[1, 1]
        assert torch.equal(stored, values[2]) or (device == "cuda" and any(torch.equal(stored, v) for v in values))
        assert cache.isfinite().sum() == stored.numel()
    if device == "cpu":
        for sources, destinations in (([1, 2], [2, 3]), ([0, 1], [3, 3])):
            before = caches[0].clone()
            with pytest.raises(ValueError, match="copy_blocks: "):
                torch_pagedkv.copy_blocks(*caches, torch.tensor(sources), torch.tensor(destinations))
            assert_same_bits(caches[0], before)


def test_memory(device):
    """A pool of which 2 of 4 million blocks are used: nothing that grows with it may be taken."""
    num_blocks = 4_000_000
    cache = torch.ones((num_blocks, 1, 1, 1), device=device)
    table = torch.tensor([[num_blocks - 1, 0]], device=device)
    query, used = torch.zeros((1, 1, 1), device=device), torch.tensor([2], device=device)
    torch_pagedkv.paged_attention(query, cache, cache, table, used)  # compiled, where it has to be
    with torch.profiler.profile(profile_memory=True) as profile:
        torch_pagedkv.paged_attention(query, cache, cache, table, used)
    taken = [(event.self_cpu_memory_usage, event.self_device_memory_usage) for event in profile.key_averages()]
    assert 0 < sum(max(size, 0) for sizes in taken for size in sizes) < 100_000


def test_index_tensors_and_options(device):
    batch = CHUNKS.build(device)
    expected = attend(batch)
    for name in ("block_table", "seqused_k", "cu_seqlens_q"):
        setattr(batch, name, getattr(batch, name).long())
        for actual, wanted in zip(attend(batch), expected):
            assert_same_bits(actual, wanted)
    scale = torch.ones(1, device=device)
    with pytest.raises(ValueError, match="k_scale must be None"):
        attend(batch, k_scale=scale)
    with pytest.raises(ValueError, match="window_size must be"):
        attend(batch, window_size=(-2, 0))
    batch.value_cache = batch.value_cache.half()
    with pytest.raises(TypeError, match="value_cache must have dtype bfloat16"):
        attend(batch)
    batch = CHUNKS.build(device)
    batch.seqused_k[0] = 10_000  # more than the table has
    if device == "cpu":
        with pytest.raises(ValueError, match="seqused_k must"):
            attend(batch)
    else:
        attend(batch)
        torch.cuda.synchronize()


def test_errors(device):
    """One sentence through all doors, and nothing is written."""
    caches, key = pools(device), rows(device, 2)
    slots = torch.tensor([0.0, 1.0], device=device)
    before = caches[0].clone()
    sentence = "reshape_and_cache: slot_mapping must have dtype int32 or int64, got float32"
    doors = [torch_pagedkv.reshape_and_cache, torch.ops.torch_pagedkv.reshape_and_cache]
    for door in doors:
        with pytest.raises(TypeError) as raised:
            door(key, key, *caches, slots)
        assert str(raised.value) == sentence
    with pytest.raises(Exception, match=sentence):
        torch.compile(torch_pagedkv.reshape_and_cache, backend="eager", fullgraph=True)(key, key, *caches, slots)
    assert_same_bits(caches[0], before)


def test_lengths_stay_on_the_device(device):
    """One graph of one shape serves every length."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    step = torch.compile(torch_pagedkv.paged_attention, backend=backend, fullgraph=True)
    batch = DECODE.build(device)
    arguments, _ = batch.attention
    for first, second in ((1, 1), (7, 40), (21, 0), (0, 33)):
        batch.seqused_k.copy_(torch.tensor([first, second]))
        assert_same_bits(step(*arguments), torch_pagedkv.paged_attention(*arguments))
    assert len(graphs) == 1
