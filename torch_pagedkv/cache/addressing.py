"""Where a token lives: position, block of the sequence, block of the pool, slot. No torch here."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from torch_pagedkv.cache.argument_checks import check_integer

# What a block table holds where a sequence has no block: past its last one, and where blocks were
# released. The ops never read it, and if a sequence outgrows its row all the same, a negative id
# costs that sequence its newest token where 0 would overwrite the owner of block 0.
NO_BLOCK = -1


class Location(NamedTuple):
    """The place of one token; ``slot == physical_block * block_size + offset``."""

    logical_block: int
    offset: int
    physical_block: int
    slot: int


def locate(block_table: Sequence[int], position: int, block_size: int) -> Location:
    """Return every step of the way from a token's position to its slot.

    ``logical_block = position // block_size``, ``offset = position % block_size``,
    ``physical_block = block_table[logical_block]`` and
    ``slot = physical_block * block_size + offset``.

    Args:
        block_table: the physical block of each logical block of one sequence: a list, a tuple or a
            1-D integer tensor (reading a CUDA tensor waits for the device).
        position: the token's position in its sequence, from 0.
        block_size: tokens in a block.

    Returns:
        A named tuple (logical_block, offset, physical_block, slot) of ints.

    Raises:
        ValueError: position is outside ``[0, len(block_table) * block_size)``, block_size is below
            1, or the table holds no block (a negative id) there.
        TypeError: an argument is not an integer, or block_table not a sequence.

    Not checked:
        That the block is inside a pool, or that a token was ever written there.

    Example:
        >>> locate([7, 2, 9], 20, block_size=16)
        Location(logical_block=1, offset=4, physical_block=2, slot=36)

    Source: PagedAttention (Kwon et al. 2023), section 4.
    """
    return locate_for("locate", block_table, position, block_size)


def slot_of(block_table: Sequence[int], position: int, block_size: int) -> int:
    """Return the slot of a token: its row in a pool that is seen as [num_blocks * block_size, ...].

    ``slot = block_table[position // block_size] * block_size + position % block_size``. Arguments,
    errors and limits are those of ``locate``, which shows the steps.

    Returns:
        The slot, an int.

    Raises:
        ValueError, TypeError: as ``locate``.

    Not checked:
        That the slot is inside a pool.

    Example:
        >>> slot_of([7, 2, 9], 20, block_size=16)
        36
        >>> slot_of([7, 2, 9], 48, block_size=16)
        Traceback (most recent call last):
        ValueError: slot_of: position must be in [0, 48), got 48

    Source: PagedAttention (Kwon et al. 2023); ``slot`` as in vLLM's slot_mapping.
    """
    return locate_for("slot_of", block_table, position, block_size).slot


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks a sequence of num_tokens occupies: ``ceil(num_tokens / block_size)``.

    Args:
        num_tokens: tokens of the sequence, 0 or more.
        block_size: tokens in a block.

    Returns:
        The number of blocks, an int.

    Raises:
        ValueError: num_tokens is negative or block_size below 1.
        TypeError: an argument is not an integer.

    Example:
        >>> [blocks_for(n, block_size=16) for n in (0, 1, 16, 17)]
        [0, 1, 1, 2]

    Source: PagedAttention (Kwon et al. 2023), section 4.
    """
    num_tokens = check_integer("blocks_for", "num_tokens", num_tokens, 0)
    return -(-num_tokens // check_integer("blocks_for", "block_size", block_size, 1))


def slots_between(block_table: Sequence[int], start: int, stop: int, block_size: int) -> list[int]:
    """Return the slots of positions [start, stop); the table must reach that far (not checked)."""
    slots: list[int] = []
    for logical_block in range(start // block_size, -(-stop // block_size)):
        first = logical_block * block_size
        base = block_table[logical_block] * block_size - first
        slots.extend(range(base + max(start, first), base + min(stop, first + block_size)))
    return slots


def locate_for(owner: str, block_table: Sequence[int], position: int, block_size: int) -> Location:
    block_size = check_integer(owner, "block_size", block_size, 1)
    if isinstance(block_table, (str, bytes)) or not hasattr(block_table, "__getitem__"):
        raise TypeError(f"{owner}: block_table must be a sequence of block ids, got {block_table!r}")
    if getattr(block_table, "ndim", 1) != 1:
        raise ValueError(f"{owner}: block_table must have one dimension, got {block_table.ndim}")
    limit = len(block_table) * block_size
    position = check_integer(owner, "position", position)
    if not 0 <= position < limit:
        raise ValueError(f"{owner}: position must be in [0, {limit}), got {position}")
    logical_block, offset = divmod(position, block_size)
    try:
        physical_block = operator.index(block_table[logical_block])
    except TypeError:
        raise TypeError(
            f"{owner}: block_table must hold integers, got {block_table[logical_block]!r} at {logical_block}"
        ) from None
    if physical_block < 0:
        raise ValueError(f"{owner}: block_table must hold an id >= 0 at {logical_block}, got {physical_block}")
    return Location(logical_block, offset, physical_block, physical_block * block_size + offset)
