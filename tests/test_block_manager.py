"""BlockManager: against a naive model over random histories, and call by call."""

from __future__ import annotations

import pickle
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from block_histories import History
from torch_pagedkv.cache import BlockManager, OutOfBlocks

TOKENS = st.lists(st.integers(0, 1), max_size=10)
NUMBERS = st.integers(-1, 12)


class ManagerAgainstModel(RuleBasedStateMachine):
    """Every call does what the naive model predicts, or raises and changes nothing."""

    @initialize(
        num_blocks=st.integers(0, 8),
        block_size=st.integers(1, 3),
        num_host_blocks=st.integers(0, 6),
        sliding_window=st.sampled_from([None, None, 1, 2, 4, 7]),
        prefix_caching=st.booleans(),
    )
    def start(self, **sizes):
        self.history = History(**sizes)

    @rule(tokens=TOKENS, extra_key=st.sampled_from([None, None, "adapter"]))
    def add(self, tokens, extra_key):
        self.history.add(tokens, extra_key)

    @rule(number=NUMBERS)
    def fork(self, number):
        self.history.fork(number)

    @rule(number=NUMBERS, num_tokens=st.integers(-1, 8))
    def reserve(self, number, num_tokens):
        self.history.reserve(number, num_tokens)

    @rule(number=NUMBERS, tokens=TOKENS)
    def commit(self, number, tokens):
        self.history.commit(number, tokens)

    @rule(number=NUMBERS, tokens=TOKENS)
    def store(self, number, tokens):
        """A whole step: random commits alone seldom name as many tokens as were reserved."""
        if self.history.reserve(number, len(tokens)) is None and number in self.history.live:
            self.history.commit(number, tokens[: self.history.live[number].reserved])

    @rule(number=NUMBERS)
    def free(self, number):
        self.history.free(number)

    @rule(number=NUMBERS)
    def swap_out(self, number):
        self.history.swap_out(number)

    @rule(number=NUMBERS)
    def swap_in(self, number):
        self.history.swap_in(number)

    @invariant()
    def holds(self):
        if hasattr(self, "history"):
            self.history.check()


TestManagerAgainstModel = ManagerAgainstModel.TestCase
TestManagerAgainstModel.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def random_call(history: History, choose: random.Random) -> None:
    """Make one call, mostly a sensible one, of a sequence that is alive, was alive or never was."""
    numbers = [*history.live, *list(history.dead)[-2:], -1, 10**9]
    number = choose.choice(numbers if choose.random() < 0.1 or not history.live else list(history.live))
    tokens = [int(choose.random() < 0.1) for _ in range(choose.randrange(7))]
    kind = choose.random()
    if not history.live or (kind < 0.12 and len(history.live) < 8):
        number = history.add(tokens * 3, choose.choice([None, None, "adapter"]))
    elif kind < 0.2 and len(history.live) < 8:
        history.fork(number)
    elif kind < 0.28 or len(history.live[number].tokens if number in history.live else ()) > 24:
        history.free(number)
    elif kind < 0.36:
        history.swap_out(number)
    elif kind < 0.5:
        history.swap_in(number)
    elif kind < 0.55:
        history.reserve(number, choose.randrange(-1, 9))
    elif number in history.live:
        history.reserve(number, len(tokens))
        history.commit(number, tokens[: history.live[number].reserved])
    else:
        history.commit(number, tokens)


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_nothing_leaks_over_100_000_random_calls(sliding_window):
    choose = random.Random(0)
    history = History(num_blocks=26, block_size=3, num_host_blocks=20, sliding_window=sliding_window)
    for i in range(50_000):
        random_call(history, choose)
        if i % 100 == 0:
            history.check()
            history.dead = set(sorted(history.dead)[-4:])
    assert min(history.num_hits, history.num_copies, history.num_refused, history.num_evicted) > 500
    for number in list(history.live):
        history.free(number)
    history.check()
    assert history.manager.num_available == 26 and history.manager.num_host_free == 20


def store(manager: BlockManager, number: int, tokens: list[int]) -> list[tuple[int, int]]:
    copies = manager.reserve(number, len(tokens))
    manager.commit(number, tokens)
    return copies


def stored(manager: BlockManager, tokens: list[int], extra_key=None) -> int:
    number = manager.add(tokens, extra_key)
    store(manager, number, tokens[manager.num_stored(number) :])
    return number


def test_a_prefix_is_found_after_its_sequence_has_ended():
    manager = BlockManager(8, 4)
    first = stored(manager, list(range(10)))
    table = manager.block_table(first)
    manager.free(first)
    assert (manager.num_free, manager.num_cached, manager.num_available) == (6, 2, 8)
    second = manager.add([*range(8), 99])
    assert manager.block_table(second) == table[:2] and manager.num_stored(second) == 8
    assert [manager.ref_count(block) for block in table] == [2, 2, 0]
    assert manager.num_cached == 0


@pytest.mark.parametrize("length,found", [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_the_last_token_is_never_found(length, found):
    """Its logits are wanted, and only the model can give them."""
    manager = BlockManager(8, 4)
    stored(manager, [7] * 8)
    assert manager.num_stored(manager.add([7] * length)) == found


def test_the_block_that_was_let_go_longest_ago_is_evicted_first():
    manager = BlockManager(4, 2)
    first, second = stored(manager, [1, 1, 2, 2]), stored(manager, [3, 3, 4, 4])
    manager.free(second)
    manager.free(first)
    manager.free(manager.add([3, 3, 9]))  # a use: its first block is now the newest
    found = []
    for _ in range(4):
        new = manager.add([])
        store(manager, new, [0])
        chains = ([1, 1, 2, 2, 9], [3, 3, 4, 4, 9])
        # Found by a copy of the manager's own books, lest looking were using.
        lengths = [len(manager._cache.match(manager._cache.root(None), c, 2, None)) for c in chains]
        found.append(lengths)
    assert found == [[2, 1], [1, 1], [0, 1], [0, 0]]


def test_equal_hashes_are_not_equal_tokens():
    """hash(-1) == hash(-2) and hash(0) == hash(2**61 - 1) in CPython, and so for tuples of them."""
    for one, other in ((-1, -2), (0, 2**61 - 1)):
        assert hash((one, one)) == hash((other, other))
        manager = BlockManager(8, 2)
        stored(manager, [one, one, 5])
        assert manager.num_stored(manager.add([other, other, 5])) == 0
        assert manager.num_stored(manager.add([one, one, 5])) == 2
        both = stored(manager, [5, 5, one, one, 5])
        assert manager.num_stored(manager.add([5, 5, other, other, 5])) == 2
        assert manager.num_stored(manager.add([5, 5, one, one, 5])) == 4
        manager.free(both)


def test_tokens_after_another_prefix_are_another_block():
    manager = BlockManager(8, 2)
    stored(manager, [1, 1, 2, 2])
    assert manager.num_stored(manager.add([3, 3, 2, 2, 9])) == 0
    assert manager.num_stored(manager.add([2, 2, 9])) == 0


def test_another_extra_key_is_another_prefix():
    manager = BlockManager(8, 2)
    stored(manager, [1, 1, 2], extra_key=("adapter", 3))
    assert manager.num_stored(manager.add([1, 1, 2])) == 0
    assert manager.num_stored(manager.add([1, 1, 2], ("adapter", 4))) == 0
    assert manager.num_stored(manager.add([1, 1, 2], ("adapter", 3))) == 2


def test_blocks_computed_twice_are_found_once():
    manager = BlockManager(8, 2)
    first, second = manager.add([1, 1, 2]), manager.add([1, 1, 2])
    for number in (first, second):
        store(manager, number, [1, 1, 2])
    tables = manager.block_table(first), manager.block_table(second)
    assert not set(tables[0]) & set(tables[1])
    manager.free(second)
    assert manager.num_free == 8 - 2  # nothing of the second is kept
    assert manager.block_table(manager.add([1, 1, 2])) == tables[0][:1]


def test_forks_share_until_one_of_them_writes():
    manager = BlockManager(8, 4)
    parent = stored(manager, [1, 2, 3, 4, 5, 6])
    children = [manager.fork(parent) for _ in range(2)]
    assert [manager.block_table(c) for c in children] == [[0, 1]] * 2
    assert manager.ref_count(1) == 3 and manager.num_free == 6
    copies = [store(manager, number, [7]) for number in (parent, *children)]
    assert copies == [[(1, 2)], [(1, 3)], []]  # the last one keeps the block
    assert [manager.block_table(n) for n in (parent, *children)] == [[0, 2], [0, 3], [0, 1]]


def test_a_full_last_block_needs_no_copy():
    manager = BlockManager(4, 2)
    parent = stored(manager, [1, 2])
    child = manager.fork(parent)
    assert store(manager, child, [3]) == [] and manager.block_table(child) == [0, 1]


def test_rejected_tokens_are_not_part_of_the_sequence():
    manager = BlockManager(8, 2)
    number = manager.add([])
    manager.reserve(number, 5)
    manager.commit(number, [1, 2, 3])
    assert manager.num_stored(number) == 3 and len(manager.block_table(number)) == 3
    assert manager.reserve(number, 3) == [] and len(manager.block_table(number)) == 3
    assert manager.num_stored(manager.add([1, 2, 3, 4, 5])) == 2


def test_a_window_releases_what_no_later_token_sees():
    manager = BlockManager(8, 2, sliding_window=3)
    number = manager.add([])
    tables = []
    for token in range(8):
        store(manager, number, [token])
        tables.append(manager.block_table(number))
    # After 4 tokens the next one, at position 4, sees positions 2, 3 and itself.
    assert tables[2:5] == [[0, 1], [-1, 1], [-1, 1, 2]]
    assert tables[7].count(-1) == 3
    # The released blocks can still be found; of a prefix only what the window sees must be there.
    assert manager.num_cached == 3
    other = manager.add([*range(6), 9])
    assert manager.block_table(other)[:2] == [-1, -1] and manager.num_stored(other) == 6


def test_without_prefix_caching_nothing_is_kept():
    manager = BlockManager(8, 2, prefix_caching=False)
    manager.free(stored(manager, [1, 1, 2]))
    assert (manager.num_free, manager.num_cached) == (8, 0)
    assert manager.num_stored(manager.add([1, 1, 2])) == 0


def test_swapping_takes_up_blocks_that_are_still_there():
    manager = BlockManager(4, 2, num_host_blocks=3)
    number = stored(manager, [1, 1, 2, 2, 3])
    assert manager.swap_out(number) == [(0, 0), (1, 1), (2, 2)]
    assert (manager.num_free, manager.num_cached, manager.num_host_free) == (2, 2, 0)
    taken = stored(manager, [8, 8, 9, 9, 0])  # evicts the later of the two full blocks
    manager.free(taken)
    copies = manager.swap_in(number)
    assert [host for host, _ in copies] == [1, 2]
    assert manager.block_table(number)[0] == 0 and manager.num_host_free == 3
    assert store(manager, number, [3, 4]) == []


def test_a_block_computed_again_does_not_stand_for_the_one_swapped_out():
    """It holds the same tokens, and bits that another batch may have rounded otherwise."""
    manager = BlockManager(3, 2, num_host_blocks=2)
    number = stored(manager, [1, 1, 2])
    manager.swap_out(number)
    manager.free(stored(manager, [5, 5, 6, 6, 7]))  # evicts
    manager.free(stored(manager, [1, 1]))  # computes it again
    assert [host for host, _ in manager.swap_in(number)] == [0, 1]


def test_preemption_by_recompute_finds_what_was_not_evicted():
    manager = BlockManager(8, 2)
    number = stored(manager, [1, 1, 2, 2, 3])
    manager.free(number)
    again = manager.add([1, 1, 2, 2, 3])
    assert again != number and manager.num_stored(again) == 4


def test_a_long_chain_can_be_dropped():
    manager = BlockManager(100_000, 1)
    manager.free(stored(manager, [0] * 100_000))
    for _ in range(2):  # evicts it from its end to its start
        number = manager.add([])
        manager.reserve(number, 100_000)
        assert manager.num_cached == 0
        manager.free(number)
    assert len(manager._cache._index) <= 1


def refused(manager, sentence, error, method, *arguments):
    before = repr(manager), manager.num_host_free
    with pytest.raises(error) as caught:
        getattr(manager, method)(*arguments)
    assert str(caught.value) == f"BlockManager.{method}: {sentence}"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert (repr(manager), manager.num_host_free) == before


def test_sentences():
    manager = BlockManager(3, 2, num_host_blocks=1)
    alive, dead, away, big = stored(manager, [1, 1, 2]), manager.add([]), stored(manager, [3]), manager.add([])
    manager.free(dead)
    manager.swap_out(away)
    methods = [("fork",), ("free",), ("block_table",), ("swap_out",), ("swap_in",), ("reserve", 1), ("commit", [])]
    for method, *rest in methods:
        refused(manager, "sequence must be alive, got 1, which was freed", ValueError, method, dead, *rest)
        refused(manager, "sequence must be alive, got 9, which was never added", ValueError, method, 9, *rest)
        refused(manager, "sequence must be alive, got -1, which was never added", ValueError, method, -1, *rest)
        refused(manager, "sequence must be an integer, got True", TypeError, method, True, *rest)
        refused(manager, "sequence must be an integer, got 'a'", TypeError, method, "a", *rest)
        if method not in ("free", "swap_in"):
            sentence = "sequence must be in the pool, got 2, which is swapped out"
            refused(manager, sentence, ValueError, method, away, *rest)
    sentence = "sequence must be swapped out, got 0, which is in the pool"
    refused(manager, sentence, ValueError, "swap_in", alive)
    sentence = "sequence must need <= 1 available blocks of num_blocks = 3, got 2"
    refused(manager, sentence, OutOfBlocks, "reserve", big, 3)
    sentence = "sequence must need <= 0 free host blocks of num_host_blocks = 1, got 2"
    refused(manager, sentence, OutOfBlocks, "swap_out", alive)
    refused(manager, "num_tokens must be >= 0, got -1", ValueError, "reserve", alive, -1)
    manager.reserve(alive, 1)
    sentence = "token_ids must have at most the 1 tokens that were reserved, got 2"
    refused(manager, sentence, ValueError, "commit", alive, [1, 2])
    refused(manager, "token_ids[0] must be an integer, got 1.5", TypeError, "commit", alive, [1.5])
    sentence = "sequence must have no reserved tokens, got 0, which has 1: commit them before, or reserve 0"
    refused(manager, sentence, ValueError, "fork", alive)
    refused(manager, "extra_key must be hashable, got []", TypeError, "add", [1], [])
    refused(manager, "token_ids must be a sequence of integers, got 7", TypeError, "add", 7)


@pytest.mark.parametrize(
    "name,value,error",
    [
        ("num_blocks", -1, ValueError),
        ("block_size", 0, ValueError),
        ("num_host_blocks", -1, ValueError),
        ("sliding_window", 0, ValueError),
        ("block_size", 1.0, TypeError),
        ("sliding_window", True, TypeError),
    ],
)
def test_constructor_refusals(name, value, error):
    with pytest.raises(error, match=f"BlockManager: {name} must"):
        BlockManager(**{"num_blocks": 1, "block_size": 1, name: value})
