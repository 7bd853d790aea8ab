"""The pool as blocks coloured by sequence: at one moment, and over the steps of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.inspect import svg

_COLUMNS = 64
_COLOURS = (31, 32, 33, 34, 35, 36, 91, 92, 93, 94, 95, 96)  # of ANSI terminals
_CELL = 12.0  # of SVG, in pixels
_MOST_ROWS = 400


def draw_pool(owners: Mapping[int, str], num_blocks: int, *, use_colour: bool = False) -> str:
    """Draw each block of the pool as the letter of the sequence that owns it; free ones as dots.

    Args:
        owners: block id -> name of its owner; the name's first letter is drawn. Blocks outside of
            the pool are left out.
        num_blocks: blocks of the pool.
        use_colour: colour the letters, for a terminal.

    Returns:
        A line of text for each 64 blocks, which starts with the first one's id.

    Raises:
        ValueError, TypeError: num_blocks is negative or no integer.

    Example:
        >>> from torch_pagedkv import inspect
        >>> print(inspect.draw_pool({7: "A", 2: "A", 9: "A", 4: "B"}, 10))
              0  ..A.B..A.A

    Source: ours.
    """
    num_blocks = check_integer("draw_pool", "num_blocks", num_blocks, 0)
    names = sorted(set(owners.values()))
    lines = []
    for start in range(0, num_blocks, _COLUMNS):
        cells = [
            _cell(owners.get(block), names, use_colour) for block in range(start, min(start + _COLUMNS, num_blocks))
        ]
        lines.append(f"  {start:5d}  {''.join(cells)}")
    return "\n".join(lines)


def draw_pool_history(history: Sequence[Mapping[int, str]], num_blocks: int, *, use_colour: bool = False) -> str:
    """Draw the pool after each step of a run, one line a step; steps that changed nothing are left out.

    Args:
        history: for each step who owns which block, as ``draw_pool`` takes it.
        num_blocks, use_colour: as ``draw_pool``.

    Returns:
        A line of text for each step at which the pool changed; it starts with the step, from 1.

    Raises:
        ValueError, TypeError: num_blocks is negative or no integer.

    Example:
        >>> from torch_pagedkv import inspect
        >>> print(inspect.draw_pool_history([{7: "A"}, {7: "A"}, {7: "A", 2: "B"}, {2: "B"}], 10))
        step     1  .......A..
        step     3  ..B....A..
        step     4  ..B.......

    Source: ours.
    """
    num_blocks = check_integer("draw_pool_history", "num_blocks", num_blocks, 0)
    names = _names(history)
    lines = []
    for step, owners in _changes(history):
        cells = (_cell(owners.get(block), names, use_colour) for block in range(num_blocks))
        lines.append(f"step {step:5d}  {''.join(cells)}")
    return "\n".join(lines)


def pool_history_svg(history: Sequence[Mapping[int, str]], num_blocks: int) -> str:
    """Draw the pool over the steps of a run: a column for each block, a row for each step, coloured by sequence.

    Args:
        history, num_blocks: as ``draw_pool_history``. Of more than 400 rows every second one is
            drawn, or every third, and so on.

    Returns:
        The text of an SVG file.

    Raises:
        ValueError, TypeError: num_blocks is negative or no integer.

    Example:
        >>> from torch_pagedkv import inspect
        >>> inspect.pool_history_svg([{7: "A"}, {7: "A", 2: "B"}], 10).count("<title>block 7, step")
        2

    Source: ours.
    """
    num_blocks = check_integer("pool_history_svg", "num_blocks", num_blocks, 0)
    names = _names(history)
    colours = {name: svg.PALETTE[i % len(svg.PALETTE)] for i, name in enumerate(names)}
    changes = list(_changes(history))
    changes = changes[:: -(-len(changes) // _MOST_ROWS) or 1]
    left, top = 60.0, 46.0
    shapes = [svg.text(left, 16, f"{num_blocks} blocks from left to right, steps from top to bottom")]
    for i, name in enumerate(names):
        shapes.append(svg.rectangle(left + 40 * i, 24, _CELL, _CELL, colours[name], f"sequence {name}"))
        shapes.append(svg.text(left + 40 * i + _CELL + 3, 34, name))
    for row, (step, owners) in enumerate(changes):
        y = top + row * _CELL
        if row % 5 == 0:
            shapes.append(svg.text(left - 6, y + _CELL - 2, str(step), anchor="end"))
        for block in range(num_blocks):
            owner = owners.get(block)
            what = "free" if owner is None else f"sequence {owner}"
            colour = colours.get(owner, svg.EMPTY)
            title = f"block {block}, step {step}: {what}"
            shapes.append(svg.rectangle(left + block * _CELL, y, _CELL, _CELL, colour, title))
    width = left + max(num_blocks * _CELL, 40.0 * len(names), 320) + 10
    return svg.picture(width, top + len(changes) * _CELL + 10, "the pool over time", shapes)


def _names(history: Iterable[Mapping[int, str]]) -> list[str]:
    return sorted({name for owners in history for name in owners.values()})


def _changes(history: Sequence[Mapping[int, str]]) -> Iterable[tuple[int, Mapping[int, str]]]:
    for i, owners in enumerate(history):
        if i == 0 or owners != history[i - 1]:
            yield i + 1, owners


def _cell(owner: str | None, names: list[str], use_colour: bool) -> str:
    if not owner:
        return "."
    if not use_colour:
        return owner[0]
    return f"\033[{_COLOURS[names.index(owner) % len(_COLOURS)]}m{owner[0]}\033[0m"
