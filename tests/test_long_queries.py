"""paged_attention of long queries over many keys: KV tiles that all rows of a query tile see whole."""

from __future__ import annotations

import pytest
import torch

from cases import BF16, E4M3, FP16, PagedCase
from pools import assert_same_bits
from test_paged_attention import attend, expect, largest_value
from tolerances import assert_close, assert_close_lse

# 40 tokens of 2 heads for a KV head make more rows than a short tile has, and 300 keys whole KV tiles.
LONG = PagedCase(name="long", kv_lens=[300], query_lens=[40], dtype=BF16)
LARGEST = torch.finfo(torch.float32).max


def place(batch, position: int) -> tuple[int, int]:
    return batch.tables[0][position // batch.case.block_size], position % batch.case.block_size


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        LONG.with_(dtype=FP16, layout="HND", options={"num_splits": 2}),
        LONG.with_(block_size=48, sinks=[0.5, -1.0]),
        LONG.with_(block_size=1, options={"window_size": (200, 0)}),
        LONG.with_(block_size=256, value_head_dim=32, kv_lens=[600]),
        LONG.with_(head_dim=40, pool_dtype=E4M3, scales="per_head"),
    ],
    ids=repr,
)
def test_equals_float64_reference(case, device):
    batch = case.build(device)
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@pytest.mark.parametrize("value", [1e3, float("nan"), float("inf")])
def test_hidden_keys_change_no_bit_of_a_row(value, device):
    batch = LONG.build(device)
    expected, expected_lse = attend(batch)
    for position in range(281, 300):
        batch.key_cache[place(batch, position)] = value
        batch.value_cache[place(batch, position)] = value
    out, lse = attend(batch)
    assert_same_bits(out[:21], expected[:21])
    assert_same_bits(lse[:, :21].contiguous(), expected_lse[:, :21].contiguous())


@pytest.mark.parametrize("magnitude", [2.0**21, 1e12, 3e38, float("nan")])
def test_scores_of_any_size_are_weighed_and_change_no_bit_of_other_rows(magnitude, device):
    batch = LONG.build(device)
    batch.key_cache.abs_()  # no sum of products of both signs, which may overflow to NaN on the way
    expected, expected_lse = attend(batch)
    batch.query[7] = magnitude
    batch.query[30] = -magnitude
    out, lse = attend(batch)
    others = [i for i in range(40) if i not in (7, 30)]
    assert_same_bits(out[others], expected[others])
    assert_same_bits(lse[:, others].contiguous(), expected_lse[:, others].contiguous())
    if magnitude != magnitude:
        assert out[[7, 30]].isnan().all()
        return
    # The largest score takes all the weight, or shares it with those that overflow as it does.
    keys = torch.stack([batch.key_cache[place(batch, p)] for p in range(300)]).double().sum(-1)
    values = torch.stack([batch.value_cache[place(batch, p)] for p in range(300)]).double()
    for row in (7, 30):
        visible = 260 + row + 1
        scores = (batch.query[row, 0, 0].item() * 0.125 * keys[:visible]).clamp(-LARGEST, LARGEST)
        weights = (scores - scores.amax(0)).exp()
        wanted = torch.einsum("kh,khd->hd", weights / weights.sum(0), values[:visible])
        assert_close(out[row].reshape(2, 2, 64)[:, 1], wanted.to(out.device), largest=5.0)
        assert_close_lse(lse[:, row].reshape(2, 2)[:, 1], scores.amax(0).to(lse.device))


@pytest.mark.parametrize("scale", [-0.125, 0.0])
def test_a_scale_that_is_not_positive(scale, device):
    batch = LONG.build(device)
    batch.options["softmax_scale"] = scale
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))
