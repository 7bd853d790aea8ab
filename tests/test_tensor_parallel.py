"""Tensor parallelism: two ranks with half of the heads each compute what one computes with all."""

from __future__ import annotations

import pytest

from two_ranks import assert_passes, checks_of

MODULE = "ranks_tensor_parallel"


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_two_ranks(check, device):
    assert_passes(MODULE, check, device)
