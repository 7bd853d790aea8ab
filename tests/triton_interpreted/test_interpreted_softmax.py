"""Tests of the traced softmax, on its interpreted Triton kernel; its states are compared with the PyTorch ones."""

from test_inspect_softmax import (  # noqa: F401
    kernel,
    test_maximum_rises_and_the_lse_with_it,
    test_scores_too_large_for_exp_do_not_overflow,
    test_the_two_versions_agree,
)
