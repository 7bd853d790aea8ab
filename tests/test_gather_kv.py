"""gather_kv: bit for bit against the reference; zero past the end, whatever the pools hold there."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32, PAGED, PagedCase
from pools import assert_same_bits
from torch_pagedkv import reference

GATHER = [c for c in PAGED if "window_size" not in c.options]


def on_cpu(batch):
    args, scales = batch.gather
    return [a.cpu() for a in args], {k: v.cpu() for k, v in scales.items()}


@pytest.mark.parametrize("case", GATHER[::2], ids=str)
def test_equals_reference(case, device):
    batch = case.build(device)
    args, scales = batch.gather
    actual = torch_pagedkv.gather_kv(*args, **scales)
    expected_args, expected_scales = on_cpu(batch)
    expected = reference.gather_kv(*expected_args, **expected_scales)
    for got, wanted in zip(actual, expected):
        assert got.is_contiguous()
        assert_same_bits(got.cpu(), wanted)


@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2, BF16, FP16, FP32])
@pytest.mark.parametrize("dtype", [None, BF16, FP16, FP32])
def test_dtypes(dtype, pool_dtype, device):
    is_fp8 = pool_dtype in (E4M3, E5M2)
    case = PagedCase(
        name="gather", kv_lens=[20, 0, 33], pool_dtype=pool_dtype, dtype=BF16, scales="per_head" if is_fp8 else "none"
    )
    batch = case.build(device)
    args, scales = batch.gather
    actual = torch_pagedkv.gather_kv(*args, **scales, dtype=dtype)
    expected_args, expected_scales = on_cpu(batch)
    expected = reference.gather_kv(*expected_args, **expected_scales, dtype=dtype)
    for got, wanted in zip(actual, expected):
        assert got.dtype == (dtype or (BF16 if is_fp8 else pool_dtype))
        assert_same_bits(got.cpu(), wanted)


@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2])
def test_every_byte(pool_dtype, device):
    """All 256 bytes, converted, and kept where the result is asked for in fp8."""
    pool = torch.arange(256, dtype=torch.uint8).view(pool_dtype).view(1, 16, 2, 8).to(device)
    table, length = torch.tensor([[0]], device=device), torch.tensor([16], device=device)
    for dtype in (FP32, BF16, FP16):
        keys, values = torch_pagedkv.gather_kv(pool, pool, table, length, dtype=dtype)
        expected = pool.cpu().float().to(dtype)
        for got in (keys[0].cpu(), values[0].cpu()):
            same = (got == expected[0]) | (got.isnan() & expected[0].isnan())
            assert same.all()
    keys, _ = torch_pagedkv.gather_kv(pool, pool, table, length, dtype=pool_dtype)
    assert_same_bits(keys[0], pool[0])
