"""Tests of paged_attention, on the interpreted Triton kernels."""

import torch

from cases import BF16, PagedCase
from pools import assert_same_bits
from test_long_queries import (  # noqa: F401
    LONG,
    test_a_scale_that_is_not_positive,
    test_scores_of_any_size_are_weighed_and_change_no_bit_of_other_rows,
)
from test_long_queries import test_equals_float64_reference as test_long_queries_equal_reference  # noqa: F401
from test_long_queries import test_hidden_keys_change_no_bit_of_a_row as test_hidden_keys_of_long_queries  # noqa: F401
from test_paged_attention import (  # noqa: F401
    attend,
    test_a_window_as_long_as_the_sequence_is_no_window,
    test_chunk_equals_single_steps,
    test_decode_needs_no_causal_mask,
    test_equals_float64_reference,
    test_hidden_keys_change_no_bit_of_a_row,
    test_no_sink_and_a_sink_of_minus_infinity_agree,
    test_num_splits_1_is_batch_invariant,
    test_one_visible_key_gives_its_value_whatever_its_score,
    test_rows_without_keys_overwrite_what_stood_there,
    test_sinks_do_not_depend_on_splits,
    test_unwritten_slots_change_no_bit,
    test_visible_values_that_are_not_finite_reach_the_output,
    test_window_of_one_token_returns_its_own_value,
)
from torch_pagedkv.triton_kernels import paged_attention
from torch_pagedkv.triton_kernels.paged_attention import launch


def test_long_only_leaves_short_sequences_alone():
    """Short are those of at most 16 rows for each KV head: 8 tokens of 2 heads."""
    case = PagedCase(name="long", kv_lens=[60, 30, 9, 20], query_lens=[20, 1, 8, 9], dtype=BF16)
    batch = case.with_(options={"num_splits": 1}).build("cpu")
    expected, expected_lse = attend(batch)
    out, lse = torch.full_like(expected, torch.nan), torch.full_like(expected_lse, torch.nan)
    scale, options = batch.query.shape[2] ** -0.5, (True, -1, -1, 0.0, None, None, None, None, 1)
    launch(out, lse, *batch.attention[0], scale, *options, long_only=True)
    is_long = torch.tensor([True] * 20 + [False] * 9 + [True] * 9)
    assert_same_bits(out[is_long], expected[is_long])
    assert_same_bits(lse[:, is_long], expected_lse[:, is_long])
    assert out[~is_long].isnan().all() and lse[:, ~is_long].isnan().all()


def test_offsets_of_64_bits_change_no_bit(monkeypatch):
    batch = LONG.with_(block_size=48, layout="HND").build("cpu")
    expected = attend(batch)
    monkeypatch.setattr(paged_attention, "_reach", lambda cache: 2**31)
    for actual, wanted in zip(attend(batch), expected, strict=True):
        assert_same_bits(actual, wanted)
