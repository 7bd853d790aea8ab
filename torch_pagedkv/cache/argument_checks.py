"""Checks of plain Python arguments: ``<owner>: <argument> must <expectation>, got <actual>``."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any


def check_integer(owner: str, name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return value as an int; TypeError where it is none (a bool), ValueError out of bounds."""
    if isinstance(value, bool):
        raise TypeError(f"{owner}: {name} must be an integer, got {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{owner}: {name} must be an integer, got {value!r}") from None
    if maximum is not None and not minimum <= number <= maximum:
        raise ValueError(f"{owner}: {name} must be in [{minimum}, {maximum}], got {number}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{owner}: {name} must be >= {minimum}, got {number}")
    return number


def check_integers(owner: str, name: str, values: Iterable[Any], minimum: int | None = None) -> list[int]:
    """Return values as a list of ints, each checked as ``check_integer`` does."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise TypeError(f"{owner}: {name} must be a sequence of integers, got {values!r}")
    # tolist reads a tensor at once, where iterating would make a tensor of each element.
    items = values.tolist() if hasattr(values, "tolist") else list(values)
    if not isinstance(items, list):
        raise TypeError(f"{owner}: {name} must be a sequence of integers, got {values!r}")
    are_ints = all(type(item) is int for item in items)
    if are_ints and (minimum is None or all(item >= minimum for item in items)):
        return items  # thousands of ids a step: name each only where one has to be named
    return [check_integer(owner, f"{name}[{i}]", item, minimum) for i, item in enumerate(items)]


def check_pairs(owner: str, pairs: Iterable[Any], limits: tuple[int, int]) -> list[tuple[int, int]]:
    """Return (source, destination) pairs of block ids as ints, each id in [0, its limit)."""
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise TypeError(f"{owner}: pairs must be a sequence of (source, destination), got {pairs!r}")
    checked = []
    for i, pair in enumerate(pairs):
        ids = check_integers(owner, f"pairs[{i}]", pair)
        if len(ids) != 2:
            raise ValueError(f"{owner}: pairs[{i}] must be a (source, destination), got {pair!r}")
        for name, block, limit in zip(("source", "destination"), ids, limits):
            if not 0 <= block < limit:
                raise ValueError(f"{owner}: pairs[{i}] must have a {name} in [0, {limit}), got {block}")
        checked.append((ids[0], ids[1]))
    return checked
