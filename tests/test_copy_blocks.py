"""copy_blocks: whole buffers bit for bit, in every layout and dtype."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32
from pools import LAYOUTS, assert_same_bits, bits, make_pools


def filled(layout, dtype, device, block_size=16, heads=3, dims=(64, 24)):
    key_cache, value_cache, buffers = make_pools(layout, 9, block_size, heads, *dims, dtype, device)
    for number, buffer in enumerate(buffers):
        integers = bits(buffer)
        generator = torch.Generator().manual_seed(number)
        info = torch.iinfo(integers.dtype)
        noise = torch.randint(info.min, info.max + 1, integers.shape, generator=generator, dtype=torch.int64)
        integers.copy_(noise.to(integers.dtype))
    return key_cache, value_cache, buffers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_equals_indexing(index_dtype, dtype, layout, device):
    src, dst = [3, 3, 0], [1, 8, 5]
    key_cache, value_cache, buffers = filled(layout, dtype, device)
    wanted_key, wanted_value, expected = filled(layout, dtype, "cpu")
    for source, destination in zip(src, dst):
        for cache in (wanted_key, wanted_value):
            cache[destination].copy_(cache[source].clone())
    blocks = [torch.tensor(ids, dtype=index_dtype, device=device) for ids in (src, dst)]
    torch_pagedkv.copy_blocks(key_cache, value_cache, *blocks)
    for actual, wanted in zip(buffers, expected):
        assert_same_bits(actual.cpu(), wanted)


@pytest.mark.parametrize("block_size,heads,dims", [(1, 1, (1, 1)), (7, 5, (46, 63)), (528, 2, (128, 128))])
def test_odd_sizes(block_size, heads, dims, device):
    pools = filled("NHD", BF16, device, block_size, heads, dims)[:2]
    wanted = [pool.clone() for pool in pools]
    for pool in wanted:
        pool[8] = pool[2]
    torch_pagedkv.copy_blocks(*pools, torch.tensor([2], device=device), torch.tensor([8], device=device))
    for actual, expected in zip(pools, wanted):
        assert_same_bits(actual, expected)


def test_nothing_to_copy(device):
    pools = filled("NHD", FP32, device)[:2]
    copies = [pool.clone() for pool in pools]
    none = torch.empty(0, dtype=torch.int64, device=device)
    torch_pagedkv.copy_blocks(*pools, none, none)
    for actual, wanted in zip(pools, copies):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize(
    "src,dst,sentence",
    [
        ([9], [1], r"src_blocks must be in \[0, num_blocks = 9\), got 9 at index 0"),
        ([0, -1], [1, 2], r"src_blocks must be in \[0, num_blocks = 9\), got -1 at index 1"),
        ([0], [2**40], r"dst_blocks must be in \[0, num_blocks = 9\), got 1099511627776 at index 0"),
        ([0, 1], [2, 2], "dst_blocks must name each block once and none of src_blocks, got 2 at index 1"),
        ([0, 1], [2, 0], "dst_blocks must name each block once and none of src_blocks, got 0 at index 1"),
    ],
)
def test_ids_that_cannot_be_copied(src, dst, sentence, device):
    """CPU raises and writes nothing; CUDA leaves out ids outside the pool and stays inside it."""
    pools = filled("NHD", FP32, device)[:2]
    copies = [pool.clone() for pool in pools]
    blocks = [torch.tensor(ids, device=device) for ids in (src, dst)]
    if device == "cpu":
        with pytest.raises(ValueError, match=sentence):
            torch_pagedkv.copy_blocks(*pools, *blocks)
    else:
        torch_pagedkv.copy_blocks(*pools, *blocks)
        torch.cuda.synchronize()
    named = set(dst) if device == "cuda" else set()
    for actual, before in zip(pools, copies):
        for block in set(range(9)) - named:
            assert_same_bits(actual[block], before[block])
