"""Tests of paged_attention, on the interpreted Triton kernels."""

from test_paged_attention import (  # noqa: F401
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
