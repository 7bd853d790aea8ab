"""Addressing: from a token's position to its slot, and the sentences of what has none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_pagedkv.cache.addressing import Location, blocks_for, locate, slot_of, slots_between

TABLE = [7, 2, 9]


def test_checkpoint():
    assert locate(TABLE, 20, 16) == Location(logical_block=1, offset=4, physical_block=2, slot=36)
    assert locate(TABLE, 20, 16) == (1, 4, 2, 36)
    assert slot_of(TABLE, 20, 16) == 36


def test_keywords():
    arguments = {"position": 20, "block_size": 16, "block_table": TABLE}
    assert slot_of(**arguments) == 36
    assert locate(**arguments).slot == 36


@pytest.mark.parametrize(
    "table",
    [
        TABLE,
        tuple(TABLE),
        torch.tensor(TABLE),
        torch.tensor(TABLE, dtype=torch.int32),
        torch.tensor([[7, 0], [2, 0], [9, 0]])[:, 0],
    ],
    ids=["list", "tuple", "int64", "int32", "strided"],
)
def test_block_table_containers(table):
    location = locate(table, 20, 16)
    assert location == (1, 4, 2, 36)
    assert all(type(step) is int for step in location)


def test_position_may_be_an_element_of_a_tensor():
    assert slot_of(TABLE, torch.tensor(20), 16) == 36


@given(
    block_size=st.integers(1, 40),
    table=st.lists(st.integers(0, 2**40), min_size=1, max_size=6, unique=True),
)
def test_every_position_has_its_own_slot(block_size, table):
    limit = len(table) * block_size
    slots = [slot_of(table, position, block_size) for position in range(limit)]
    expected = [block * block_size + offset for block in table for offset in range(block_size)]
    assert slots == expected
    assert len(set(slots)) == limit


@given(data=st.data(), block_size=st.integers(1, 20))
def test_slots_between_is_slot_of_each_position(data, block_size):
    table = data.draw(st.lists(st.integers(0, 100), max_size=5))
    stop = data.draw(st.integers(0, len(table) * block_size))
    start = data.draw(st.integers(0, stop))
    expected = [slot_of(table, position, block_size) for position in range(start, stop)]
    assert slots_between(table, start, stop, block_size) == expected


@pytest.mark.parametrize("block_size", [1, 2, 16, 528])
def test_blocks_for_is_the_smallest_that_holds_the_tokens(block_size):
    for num_tokens in range(3 * block_size + 2):
        blocks = blocks_for(num_tokens, block_size)
        assert blocks * block_size >= num_tokens > (blocks - 1) * block_size


@pytest.mark.parametrize(
    "arguments,error,sentence",
    [
        ((TABLE, 48, 16), ValueError, "slot_of: position must be in [0, 48), got 48"),
        ((TABLE, -1, 16), ValueError, "slot_of: position must be in [0, 48), got -1"),
        (([], 0, 16), ValueError, "slot_of: position must be in [0, 0), got 0"),
        ((TABLE, 2.0, 16), TypeError, "slot_of: position must be an integer, got 2.0"),
        ((TABLE, True, 16), TypeError, "slot_of: position must be an integer, got True"),
        ((TABLE, 0, 0), ValueError, "slot_of: block_size must be >= 1, got 0"),
        ((TABLE, 0, None), TypeError, "slot_of: block_size must be an integer, got None"),
        (([7, -1], 20, 16), ValueError, "slot_of: block_table must hold an id >= 0 at 1, got -1"),
        (([7.0], 0, 16), TypeError, "slot_of: block_table must hold integers, got 7.0 at 0"),
        ((7, 0, 16), TypeError, "slot_of: block_table must be a sequence of block ids, got 7"),
        (("72", 0, 16), TypeError, "slot_of: block_table must be a sequence of block ids"),
        ((torch.tensor([TABLE]), 0, 16), ValueError, "block_table must have one dimension, got 2"),
        ((torch.tensor([7.0]), 0, 16), TypeError, "slot_of: block_table must hold integers"),
    ],
)
def test_refusals(arguments, error, sentence):
    with pytest.raises(error) as caught:
        slot_of(*arguments)
    assert sentence in str(caught.value)
    with pytest.raises(error) as caught:
        locate(*arguments)
    assert sentence.replace("slot_of", "locate") in str(caught.value)


def test_a_released_block_is_refused_only_where_it_is_asked_for():
    assert slot_of([-1, 2, 9], 20, 16) == 36


@pytest.mark.parametrize(
    "arguments,error,sentence",
    [
        ((-1, 16), ValueError, "blocks_for: num_tokens must be >= 0, got -1"),
        ((1, 0), ValueError, "blocks_for: block_size must be >= 1, got 0"),
        ((1.5, 16), TypeError, "blocks_for: num_tokens must be an integer, got 1.5"),
    ],
)
def test_blocks_for_refusals(arguments, error, sentence):
    with pytest.raises(error) as caught:
        blocks_for(*arguments)
    assert str(caught.value) == sentence
