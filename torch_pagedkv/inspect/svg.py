"""A few shapes of SVG, as text: pictures that need no library and can be read in a diff."""

from __future__ import annotations

import html
from collections.abc import Iterable

# Told apart in print and by most colour-blind eyes.
PALETTE = (
    "#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377",
    "#994455", "#6699cc", "#997700", "#ee99aa", "#004488", "#bbbbbb",
)  # fmt: skip
EMPTY = "#f4f4f4"


def rectangle(x: float, y: float, width: float, height: float, colour: str, title: str, *, bold: bool = False) -> str:
    """Return a box that tells its title when pointed at."""
    edge = ' stroke="black" stroke-width="2"' if bold else ' stroke="white" stroke-width="1"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}"{edge}>'
        f"<title>{html.escape(title)}</title></rect>"
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", colour: str = "black") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{html.escape(words)}</text>'


def picture(width: float, height: float, title: str, shapes: Iterable[str]) -> str:
    """Return a whole SVG file."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="sans-serif" font-size="11">',
            f"<title>{html.escape(title)}</title>",
            f'<rect width="{width:g}" height="{height:g}" fill="white"/>',
            *shapes,
            "</svg>\n",
        ]
    )
