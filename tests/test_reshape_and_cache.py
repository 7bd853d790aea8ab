"""reshape_and_cache: whole buffers compared bit for bit with a write by plain indexing."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32, WRITE, WriteCase
from pools import assert_same_bits, bits
from torch_pagedkv import reference


def write_both(case: WriteCase, device: str):
    """Write a case with the op and with the reference on CPU; return both lists of buffers."""
    args, scales, buffers = case.build(device)
    expected_args, expected_scales, expected = case.build("cpu")
    torch_pagedkv.reshape_and_cache(*args, **scales)
    reference.reshape_and_cache(*expected_args, **expected_scales)
    return buffers, expected


@pytest.mark.parametrize("case", WRITE, ids=str)
def test_buffers_equal_reference(case, device):
    """The reference writes slot by slot; nothing else in the buffers may change, padding included."""
    buffers, expected = write_both(case, device)
    for actual, wanted in zip(buffers, expected):
        assert_same_bits(actual.cpu(), wanted)


@pytest.mark.parametrize("case", WRITE[::2], ids=str)
def test_sources_are_not_altered(case, device):
    args, scales, _ = case.build(device)
    sources = [args[0], args[1], args[4], *scales.values()]
    copies = [t.clone() for t in sources]
    torch_pagedkv.reshape_and_cache(*args, **scales)
    for tensor, copy in zip(sources, copies):
        assert_same_bits(tensor, copy)


# Calls of different sizes are cut differently on CUDA, and what is not aligned is moved in smaller pieces.
@pytest.mark.parametrize("num_tokens", [1, 7, 1025, 20000])
@pytest.mark.parametrize("pools", [(BF16, BF16), (FP32, FP32), (BF16, E4M3), (FP32, E5M2), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("shift", [0, 1, 4])
def test_any_number_of_tokens_and_any_alignment(num_tokens, pools, shift, device):
    dtype, pool_dtype = pools
    heads, dim, block_size = 3, 40, 48
    num_blocks = num_tokens // block_size + 3
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_blocks * block_size, generator=generator)[:num_tokens].to(device)
    slots[::5] = -1
    rows = torch.randn((2, num_tokens, heads * dim + 8), generator=generator).to(dtype).to(device)
    key, value = rows[..., shift : shift + heads * dim].unflatten(-1, (heads, dim)).unbind(0)
    wide = torch.zeros((2, num_blocks, block_size, heads, dim + 2 * shift), device=device).to(pool_dtype)
    caches = wide[..., shift : shift + dim].unbind(0)
    scales = torch.tensor([0.5, 3.0, 1.0], device=device) if dtype != pool_dtype else None
    torch_pagedkv.reshape_and_cache(key, value, *caches, slots, k_scale=scales, v_scale=scales)
    kept = slots >= 0
    for source, cache in ((key, caches[0]), (value, caches[1])):
        source = source[kept]
        if dtype != pool_dtype:
            source = reference.quantisation.quantise(source, pool_dtype, scales)
        expected = torch.zeros((num_blocks * block_size, heads, dim), device=device).to(pool_dtype)
        bits(expected)[slots[kept]] = bits(source)
        assert_same_bits(cache.contiguous().view(-1, heads, dim), expected)
    assert bits(wide[..., :shift].contiguous()).count_nonzero() == 0
    assert bits(wide[..., shift + dim :].contiguous()).count_nonzero() == 0


# On CUDA a row of 40 heads of 256 takes more packs than a CTA has threads.
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("heads,dims", [(8, (128, 128)), (3, (192, 128)), (1, (256, 64)), (40, (256, 256))])
def test_many_long_rows(heads, dims, is_transposed, layout, device):
    num_tokens, num_blocks = 1027, 70
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(num_blocks * 16, generator=generator)[:num_tokens]
    slots[::5] = -1
    kept = slots >= 0
    expected_slots = slots[kept]
    if device == "cuda":
        slots[5::10] = num_blocks * 16 + 3  # some of the negative ones
    sources, pools, expected = [], [], []
    for dim in dims:
        shape = (heads, num_tokens, dim) if is_transposed else (num_tokens, heads, dim)
        rows = torch.randn(shape, generator=generator).to(BF16)
        rows = rows.transpose(0, 1) if is_transposed else rows
        sources.append(rows.to(device))
        if layout == "NHD":
            pools.append(torch.zeros((num_blocks, 16, heads, dim), dtype=BF16, device=device))
        else:
            pools.append(torch.zeros((num_blocks, heads, 16, dim), dtype=BF16, device=device).transpose(1, 2))
        expected.append(torch.zeros((num_blocks * 16, heads, dim), dtype=BF16))
        expected[-1][expected_slots] = rows[kept]
    torch_pagedkv.reshape_and_cache(*sources, *pools, slots.to(device))
    for pool, wanted in zip(pools, expected):
        assert_same_bits(pool.reshape(-1, *wanted.shape[1:]).cpu(), wanted)


def test_checkpoint_slot_36(device):
    """block_size 16, block_table [7, 2, 9], position 20: physical block 2, offset 4, slot 36."""
    key_cache, value_cache = torch.zeros((2, 10, 16, 1, 8), device=device).unbind(0)
    slots = torch_pagedkv.compute_slot_mapping(
        torch.tensor([[7, 2, 9]], device=device), torch.tensor([21], device=device), None, 16, 1
    )
    assert slots.tolist() == [36]
    key = torch.ones((1, 1, 8), device=device)
    torch_pagedkv.reshape_and_cache(key, 2 * key, key_cache, value_cache, slots)
    assert (key_cache[2, 4] == 1).all() and (value_cache[2, 4] == 2).all()
    assert key_cache.count_nonzero() == 8 and value_cache.count_nonzero() == 8


@pytest.mark.parametrize("pool_dtype", [FP32, E4M3])
def test_negative_slots_change_nothing(pool_dtype, device):
    """Not even -1, which Python would take for the last one; and NaN in such a token reaches no slot."""
    pools = torch.zeros((2, 2, 16, 2, 8), device=device).to(pool_dtype).unbind(0)
    key = torch.ones((5, 2, 8), device=device)
    key[[1, 2, 4]] = torch.nan
    slots = torch.tensor([5, -1, -1, 7, -123], device=device)
    torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
    for pool in pools:
        written = pool.float().view(32, -1)
        assert (written[[5, 7]] == 1).all() and written.count_nonzero() == 2 * 16


def test_copies_keep_every_bit(device):
    """Same-dtype writes are copies: NaN payloads and negative zeros included."""
    for dtype in (BF16, FP16):
        pattern = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).view(8, 64, 128).to(device)
        pools = [torch.zeros((2, 4, 64, 128), dtype=dtype, device=device) for _ in range(2)]
        slots = torch.arange(8, device=device)
        torch_pagedkv.reshape_and_cache(pattern, pattern, *pools, slots)
        for pool in pools:
            assert_same_bits(pool.view(8, 64, 128), pattern)


@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("scale", [None, 1.0, 0.37, 96.0, -2.0, 0.0, float("inf")])
def test_every_value_converts_as_torch_casts_saturated(scale, dtype, pool_dtype, device):
    """All 65536 values of a 16-bit dtype, and as many float32 bit patterns, against torch's own cast."""
    if dtype == FP32:
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randint(-(2**31), 2**31, (65536,), generator=generator).to(torch.int32)
        limit = torch.finfo(pool_dtype).max
        exact = torch.tensor([limit, limit * 1.03, limit * 1.04, 1e38, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
        patterns[: len(exact)] = exact.view(torch.int32)
        # Around every representable value and every tie between two of them.
        stored = torch.arange(256, dtype=torch.uint8).view(pool_dtype).float()
        stored = stored[stored.isfinite()].sort().values
        ties = (stored[1:] + stored[:-1]) / 2
        edges = torch.cat([stored, ties, *(t * f for t in (stored, ties) for f in (1 + 1e-6, 1 - 1e-6))])
        patterns[100 : 100 + len(edges)] = edges.view(torch.int32)
        values = patterns.view(FP32)
    else:
        values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    source = values.view(8, 64, 128).to(device)
    pools = [torch.zeros((2, 4, 64, 128), dtype=pool_dtype, device=device) for _ in range(2)]
    scales = None if scale is None else torch.tensor(scale, device=device)
    torch_pagedkv.reshape_and_cache(
        source, source, *pools, torch.arange(8, device=device), k_scale=scales, v_scale=scales
    )
    quotient = values.float() if scale is None else values.float() / torch.tensor(scale)
    limit = torch.finfo(pool_dtype).max
    expected = bits(quotient.clamp(-limit, limit).to(pool_dtype))
    not_a_number = torch.where(torch.signbit(values), 0xFF, 0x7F).to(torch.uint8)
    expected = torch.where(quotient.isnan(), not_a_number, expected)
    for pool in pools:
        assert torch.equal(bits(pool).flatten().cpu(), expected)


def test_a_slot_given_twice(device):
    """The last token wins on CPU; on CUDA it is one of them, whole, and nothing else changes."""
    num_tokens = 40
    key = torch.arange(1, num_tokens + 1, device=device).view(-1, 1, 1).expand(-1, 4, 128).to(BF16)
    pools = [torch.zeros((4, 16, 4, 128), dtype=BF16, device=device) for _ in range(2)]
    slots = torch.tensor([36, 5] * (num_tokens // 2), device=device)
    torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
    for pool in pools:
        for slot, candidates in ((36, range(1, num_tokens, 2)), (5, range(2, num_tokens + 1, 2))):
            row = pool.view(64, -1)[slot]
            assert (row == row[0]).all() and row[0].item() in candidates
            if device == "cpu":
                assert row[0].item() == candidates[-1]
        assert pool.count_nonzero() == 2 * 4 * 128


def test_large_slots_write_nothing_outside_the_pool(device):
    """Guard bands on both sides of a pool view; CPU raises and writes nothing, CUDA skips the token."""
    for slot in (48, 49, 2**31, 2**40, 2**62):
        buffers = [torch.zeros((5, 16, 2, 8), device=device) for _ in range(2)]
        pools = [buffer[1:4] for buffer in buffers]
        key = torch.ones((2, 2, 8), device=device)
        slots = torch.tensor([3, slot], device=device)
        if device == "cpu":
            with pytest.raises(ValueError, match=f"slot_mapping must be below .* = 48, got {slot} at index 1"):
                torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
            assert all(buffer.count_nonzero() == 0 for buffer in buffers)
        else:
            torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
            assert all(buffer.count_nonzero() == buffer[1, 3].numel() for buffer in buffers)


@pytest.mark.parametrize("layout", ["NHD", "packed_hnd"])
def test_offsets_past_2_to_the_31(layout, device):
    """A one-byte pool of over 2 GiB: the last slot is written and read, the wrapped address is not."""
    num_blocks, block_size, heads, dim = 131080, 16, 8, 128
    factor = 2 if layout == "packed_hnd" else 1
    num_blocks //= factor  # key_cache.numel() stays below 2**31, its largest offset does not
    shape = (num_blocks, heads, block_size, factor * dim) if factor == 2 else (num_blocks, block_size, heads, dim)
    buffers = [torch.empty(shape, dtype=torch.uint8, device=device).view(E4M3) for _ in range(3 - factor)]
    if factor == 2:
        pools = buffers[0].transpose(1, 2).split(dim, dim=-1)
    else:
        pools = buffers
    for pool in pools:
        for block in (0, 1, num_blocks // 2, num_blocks - 1):
            pool[block].view(torch.uint8).zero_()
    key = torch.randn((1, heads, dim), device=device, dtype=BF16)
    slots = torch.tensor([num_blocks * block_size - 1], device=device)
    torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
    for pool in pools:
        assert_same_bits(pool[-1, -1], reference.quantisation.quantise(key[0].cpu(), E4M3, None).to(device))
        for block in (0, 1, num_blocks // 2):
            assert not pool[block].view(torch.uint8).any()
    table = torch.tensor([[num_blocks - 1]], device=device)
    pools[0][-1, 0].copy_(pools[0][-1, -1])
    pools[1][-1, 0].copy_(pools[1][-1, -1])
    query = torch.randn((1, heads, dim), device=device, dtype=BF16)
    out = torch_pagedkv.paged_attention(query, *pools, table, torch.tensor([1], device=device))
    assert torch.equal(out[0], pools[1][-1, -1].float().to(BF16))  # a stored -0 may come out as 0
    keys, _ = torch_pagedkv.gather_kv(*pools, table, torch.tensor([16], device=device))
    assert_same_bits(keys[0, 15], pools[0][-1, -1].to(BF16))
