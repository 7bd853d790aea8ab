"""BlockAllocator: against a naive model over random histories, and call by call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from torch_pagedkv.cache.allocator import BlockAllocator, OutOfBlocks

MAX_BLOCKS = 6
IDS = st.lists(st.integers(-1, MAX_BLOCKS), max_size=5)


class AllocatorAgainstModel(RuleBasedStateMachine):
    """The model is a list of owners for each block; every call either does all or raises."""

    @initialize(num_blocks=st.integers(0, MAX_BLOCKS))
    def start(self, num_blocks):
        self.owners = [0] * num_blocks
        self.allocator = BlockAllocator(num_blocks)

    @rule(n=st.integers(0, MAX_BLOCKS + 1))
    def allocate(self, n):
        free = self.owners.count(0)
        if n > free:
            with pytest.raises(OutOfBlocks) as caught:
                self.allocator.allocate(n)
            assert (caught.value.requested, caught.value.free) == (n, free)
            return
        blocks = self.allocator.allocate(n)
        assert len(set(blocks)) == len(blocks) == n
        for block in blocks:
            assert self.owners[block] == 0
            self.owners[block] = 1

    @rule(blocks=IDS)
    def share(self, blocks):
        if any(not 0 <= b < len(self.owners) or self.owners[b] == 0 for b in blocks):
            with pytest.raises(ValueError):
                self.allocator.share(blocks)
            return
        self.allocator.share(blocks)
        for block in blocks:
            self.owners[block] += 1

    @rule(blocks=IDS)
    def free(self, blocks):
        known = all(0 <= b < len(self.owners) for b in blocks)
        if not known or any(blocks.count(b) > self.owners[b] for b in blocks):
            with pytest.raises(ValueError):
                self.allocator.free(blocks)
            return
        self.allocator.free(blocks)
        for block in blocks:
            self.owners[block] -= 1

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "allocator"):
            return
        counts = [self.allocator.ref_count(b) for b in range(len(self.owners))]
        assert counts == self.owners
        assert self.allocator.num_free == self.owners.count(0)
        assert self.allocator.num_used == len(self.owners) - self.owners.count(0)
        assert self.allocator.num_blocks == len(self.owners)
        # What is said to be free can in fact be had.
        blocks = copy.deepcopy(self.allocator).allocate(self.owners.count(0))
        assert sorted(blocks) == [b for b, owners in enumerate(self.owners) if owners == 0]


TestAllocatorAgainstModel = AllocatorAgainstModel.TestCase
TestAllocatorAgainstModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def state(allocator):
    counts = [allocator.ref_count(b) for b in range(allocator.num_blocks)]
    return counts, copy.deepcopy(allocator).allocate(allocator.num_free)


def test_blocks_are_handed_out_from_zero_and_the_last_freed_come_first():
    allocator = BlockAllocator(5)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    allocator.free([1])
    allocator.free([3, 0])
    assert allocator.allocate(4) == [3, 0, 1, 4]


def test_allocate_is_all_or_nothing():
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(OutOfBlocks) as caught:
        allocator.allocate(2)
    assert state(allocator) == before
    error = caught.value
    assert isinstance(error, RuntimeError)
    assert (error.requested, error.free, error.total) == (2, 1, 4)
    sentence = "BlockAllocator.allocate: n must be <= num_free = 1 of num_blocks = 4, got 2"
    assert str(error) == sentence
    assert str(pickle.loads(pickle.dumps(error))) == sentence


def test_allocate_nothing():
    assert BlockAllocator(0).allocate(0) == []


def test_a_shared_block_is_free_when_its_last_owner_lets_go():
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    allocator.share(blocks)
    allocator.free(blocks)
    assert [allocator.ref_count(b) for b in blocks] == [1, 1]
    assert allocator.num_free == 1
    allocator.free(blocks)
    assert allocator.num_free == 3


def test_a_block_named_twice_has_two_owners_more_or_less():
    allocator = BlockAllocator(2)
    (block,) = allocator.allocate(1)
    allocator.share([block, block])
    assert allocator.ref_count(block) == 3
    allocator.free([block, block, block])
    assert allocator.num_free == 2
    assert allocator.allocate(2) == [0, 1]


@pytest.mark.parametrize("blocks", [(0, 1), iter([0, 1]), range(2), torch.tensor([0, 1]), {0: None, 1: None}.keys()])
def test_ids_come_in_any_iterable(blocks):
    allocator = BlockAllocator(2)
    allocator.allocate(2)
    allocator.free(blocks)
    assert allocator.num_free == 2


@pytest.mark.parametrize(
    "method,blocks,error,sentence",
    [
        ("free", [0, 3], ValueError, "got block 3, which is free already, named 1 times"),
        ("free", [0, 1, 0], ValueError, "got block 0, which has reference count 1, named 2 times"),
        ("free", [0, 4], ValueError, "BlockAllocator.free: blocks must be in [0, 4), got 4"),
        ("free", [0, -1], ValueError, "BlockAllocator.free: blocks must be in [0, 4), got -1"),
        ("free", [0, True], TypeError, "free: blocks[1] must be an integer, got True"),
        ("free", [0, 1.0], TypeError, "free: blocks[1] must be an integer, got 1.0"),
        ("free", 0, TypeError, "free: blocks must be a sequence of integers, got 0"),
        ("free", torch.tensor(0), TypeError, "free: blocks must be a sequence of integers"),
        ("free", "01", TypeError, "free: blocks must be a sequence of integers, got '01'"),
        ("share", [0, 3], ValueError, "share: blocks must be in use, got block 3, which is free"),
        ("share", [0, 4], ValueError, "BlockAllocator.share: blocks must be in [0, 4), got 4"),
        ("share", [0, -1], ValueError, "BlockAllocator.share: blocks must be in [0, 4), got -1"),
        ("share", [0, None], TypeError, "share: blocks[1] must be an integer, got None"),
        ("ref_count", 4, ValueError, "BlockAllocator.ref_count: block must be in [0, 4), got 4"),
        ("ref_count", -1, ValueError, "ref_count: block must be in [0, 4), got -1"),
        ("allocate", -1, ValueError, "BlockAllocator.allocate: n must be >= 0, got -1"),
        ("allocate", True, TypeError, "BlockAllocator.allocate: n must be an integer, got True"),
        ("allocate", 1.0, TypeError, "BlockAllocator.allocate: n must be an integer, got 1.0"),
    ],
)
def test_refusals_change_nothing(method, blocks, error, sentence):
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    before = state(allocator)
    with pytest.raises(error) as caught:
        getattr(allocator, method)(blocks)
    assert sentence in str(caught.value)
    assert state(allocator) == before


@pytest.mark.parametrize("num_blocks,error", [(-1, ValueError), (True, TypeError), (2.0, TypeError)])
def test_constructor_refusals(num_blocks, error):
    with pytest.raises(error, match="BlockAllocator: num_blocks must"):
        BlockAllocator(num_blocks)
