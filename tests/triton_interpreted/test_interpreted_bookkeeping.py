"""Tests of the other ops, on the interpreted Triton kernels, without those of raised errors."""

from test_compute_slot_mapping import test_by_hand  # noqa: F401
from test_compute_slot_mapping import test_equals_reference as test_slots_equal_reference  # noqa: F401
from test_copy_blocks import (  # noqa: F401
    test_equals_indexing,
    test_nothing_to_copy,
    test_odd_sizes,
)
from test_gather_kv import test_equals_reference as test_gathered_equal_reference  # noqa: F401
from test_gather_kv import test_every_byte  # noqa: F401
from test_merge_attention_states import (  # noqa: F401
    test_any_strides,
    test_empty_parts,
    test_equals_float64_reference,
    test_large_logarithms_do_not_overflow,
    test_out_b_may_have_another_dtype,
)
from test_reshape_and_cache import (  # noqa: F401
    test_a_slot_given_twice,
    test_buffers_equal_reference,
    test_checkpoint_slot_36,
    test_copies_keep_every_bit,
    test_every_value_converts_as_torch_casts_saturated,
)
