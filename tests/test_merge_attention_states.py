"""merge_attention_states: two parts become the whole, and empty parts are never read."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, FP16, FP32, PagedCase
from pools import assert_same_bits
from test_paged_attention import attend, expect
from tolerances import assert_close, assert_close_lse
from torch_pagedkv import reference


def parts(dtype, device, num_tokens=70, num_heads=3, dim=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn((2, num_tokens, num_heads, dim), generator=generator).to(dtype).to(device)
    lse = (torch.randn((2, num_heads, num_tokens), generator=generator) * 5).to(device)
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("shape", [(70, 3, 40), (1, 1, 1), (0, 4, 64), (5, 64, 256)])
def test_equals_float64_reference(shape, dtype, device):
    args = parts(dtype, device, *shape)
    out, lse = torch_pagedkv.merge_attention_states(*args)
    expected_out, expected_lse = reference.merge_attention_states(*(a.cpu() for a in args), precision=torch.float64)
    assert out.dtype == dtype and out.is_contiguous() and lse.is_contiguous()
    assert_close(out, expected_out, largest=4.0)
    assert_close_lse(lse, expected_lse)


def test_any_strides(device):
    args = parts(FP32, device, 20, 6, 16)
    expected = torch_pagedkv.merge_attention_states(*args)
    wide = [torch.stack([a, a], dim=1)[:, 1] for a in args]
    for actual, wanted in zip(torch_pagedkv.merge_attention_states(*wide), expected):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_empty_parts(dtype, device):
    """The other part stays as it is, bit for bit; what stands in the empty one does not matter."""
    out_a, lse_a, out_b, lse_b = parts(dtype, device)
    out_a[2::4, :, 0] = -0.0  # which adding a zero would make positive
    lse_b[:, ::2] = -torch.inf
    lse_a[:, ::4] = -torch.inf
    out_b[::2] = torch.nan
    out_a[::4] = torch.nan
    out, lse = torch_pagedkv.merge_attention_states(out_a, lse_a, out_b, lse_b)
    assert_same_bits(out[2::4], out_a[2::4])
    assert_same_bits(lse[:, 2::4].contiguous(), lse_a[:, 2::4].contiguous())
    assert out[::4].count_nonzero() == 0 and (lse[:, ::4] == -torch.inf).all()
    assert out.isfinite().all()
    swapped, _ = torch_pagedkv.merge_attention_states(out_b, lse_b, out_a, lse_a)
    assert_same_bits(swapped[2::4], out_a[2::4])


def test_large_logarithms_do_not_overflow(device):
    out_a, lse_a, out_b, lse_b = parts(FP32, device)
    for shift in (1e4, -1e4, 1e30):
        out, lse = torch_pagedkv.merge_attention_states(out_a, lse_a + shift, out_b, lse_b + shift)
        assert out.isfinite().all() and lse.isfinite().all()


def test_out_b_may_have_another_dtype(device):
    out_a, lse_a, out_b, lse_b = parts(FP32, device)
    out, _ = torch_pagedkv.merge_attention_states(out_a.to(BF16), lse_a, out_b, lse_b)
    expected, _ = reference.merge_attention_states(
        *(t.cpu() for t in (out_a.to(BF16), lse_a, out_b, lse_b)), precision=torch.float64
    )
    assert out.dtype == BF16
    assert_close(out, expected, largest=4.0)


def test_a_sequence_in_two_tables(device):
    """Attention over a prefix and over the rest, merged, equals attention over the whole."""
    whole = PagedCase(name="whole", kv_lens=[80, 80], query_lens=[5, 3], options={"causal": False}).build(device)
    expected_out, expected_lse = expect(whole)
    args, options = whole.attention
    query, key_cache, value_cache, table, lengths, sums = args
    prefix = torch_pagedkv.paged_attention(
        query, key_cache, value_cache, table[:, :3], torch.full_like(lengths, 48), sums, **options, return_lse=True
    )
    rest = torch_pagedkv.paged_attention(
        query, key_cache, value_cache, table[:, 3:], lengths - 48, sums, **options, return_lse=True
    )
    out, lse = torch_pagedkv.merge_attention_states(*prefix, *rest)
    assert_close(out, expected_out, largest=5.0)
    assert_close_lse(lse, expected_lse)
    assert_close(attend(whole)[0], expected_out, largest=5.0)
