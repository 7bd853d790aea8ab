"""Context parallelism: what two ranks compute together is what one computes alone."""

from __future__ import annotations

import pytest
import torch

from torch_pagedkv.integrations.context_parallel import local_length
from two_ranks import assert_passes, checks_of

MODULE = "ranks_context_parallel"


@pytest.mark.parametrize("check", checks_of(MODULE))
def test_two_ranks(check, device):
    assert_passes(MODULE, check, device)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("block_size", [1, 4])
def test_local_lengths_count_positions(block_size, num_ranks):
    """The rank of a position is that of its block, said position by position."""
    for rank in range(num_ranks):
        split = dict(block_size=block_size, rank=rank, num_ranks=num_ranks)
        held = [(position // block_size) % num_ranks == rank for position in range(40)]
        counted = [sum(held[:length]) for length in range(41)]
        assert [local_length(length, **split) for length in range(41)] == counted
        assert local_length(torch.arange(41), **split).tolist() == counted
