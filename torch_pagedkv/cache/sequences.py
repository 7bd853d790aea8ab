"""Sequences by their ids: what is kept of a live one, and sentences about those that are not. No torch here."""

from __future__ import annotations

import dataclasses

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.cache.prefix_cache import Prefix


@dataclasses.dataclass(slots=True, eq=False)
class Sequence:
    """The blocks of one sequence, and the tokens that they hold."""

    prefixes: list[Prefix]  # the empty one, then one for each full block
    table: list[int]  # blocks of the pool, or of the host where swapped out
    num_stored: int
    tail: list[int]  # the stored tokens after the last full block; replaced, never altered
    num_reserved: int = 0
    num_released: int = 0  # leading blocks that the window has left behind
    versions: list[int | None] | None = None  # swapped out: what prefix caching held of each full block

    def fork(self, num_blocks: int) -> Sequence:
        """Return a sequence that shares the first num_blocks blocks and nothing that changes."""
        return dataclasses.replace(self, prefixes=self.prefixes.copy(), table=self.table[:num_blocks])


class LiveSequences:
    """Give each sequence an id, count up, and refuse the ids of those that are not alive."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._alive: dict[int, Sequence] = {}
        self._next_id = 0

    def __len__(self) -> int:
        return len(self._alive)

    def start(self, sequence: Sequence) -> int:
        """Return the id of a new sequence."""
        self._alive[self._next_id] = sequence
        self._next_id += 1
        return self._next_id - 1

    def end(self, number: int) -> None:
        """Forget a live sequence."""
        del self._alive[number]

    def alive(self, method: str, number: int) -> Sequence:
        """Return a sequence in the pool or swapped out."""
        if type(number) is not int:
            number = check_integer(f"{self._owner}.{method}", "sequence", number)
        sequence = self._alive.get(number)
        if sequence is None:
            why = "freed" if 0 <= number < self._next_id else "never added"
            raise ValueError(f"{self._owner}.{method}: sequence must be alive, got {number}, which was {why}")
        return sequence

    def in_pool(self, method: str, number: int) -> Sequence:
        """Return a sequence that is not swapped out."""
        sequence = self.alive(method, number)
        if sequence.versions is not None:
            raise ValueError(
                f"{self._owner}.{method}: sequence must be in the pool, got {number}, which is swapped out"
            )
        return sequence
