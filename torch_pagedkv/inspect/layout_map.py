"""NHD and HND as address maps: which token's head lies where in a block."""

from __future__ import annotations

import dataclasses

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.inspect import svg
from torch_pagedkv.inspect.token_walk import hnd_strides, nhd_strides
from torch_pagedkv.ops.argument_checks import MAX_HEAD_DIM

_OWNER = "map_layouts"
_MOST_CELLS = 4096  # of a block: more can not be looked at
_WIDTH, _HEIGHT = 58.0, 22.0  # of a cell of the SVG, in pixels


@dataclasses.dataclass(frozen=True)
class LayoutMaps:
    """One block in both layouts; ``print`` it, or draw it with ``svg``.

    A cell is one head of one token: head_dim elements that lie together. Cells stand in the order
    of their addresses.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    offset: int | None  # of the token that is marked

    @property
    def strides(self) -> dict[str, tuple[int, int, int]]:
        """Strides of block, token and head in elements, by layout."""
        sizes = (self.block_size, self.num_kv_heads, self.head_dim)
        return {"NHD": nhd_strides(*sizes), "HND": hnd_strides(*sizes)}

    def rows(self, layout: str) -> list[list[tuple[int, int, int]]]:
        """Return (element, token, head) of each cell in the order of addresses, a row for each run of the outer one."""
        _, token_stride, head_stride = self.strides[layout]
        cells = sorted(
            (token * token_stride + head * head_stride, token, head)
            for token in range(self.block_size)
            for head in range(self.num_kv_heads)
        )
        width = self.num_kv_heads if layout == "NHD" else self.block_size
        return [cells[i : i + width] for i in range(0, len(cells), width)]

    def __str__(self) -> str:
        lines = [f"a block of {self.block_size} tokens, {self.num_kv_heads} KV heads of {self.head_dim}"]
        for layout, strides in self.strides.items():
            lines.append(f"{layout}: strides of block, token, head {', '.join(map(str, strides))}")
            for row in self.rows(layout):
                cells = (
                    f"[t{token} h{head}]" if token == self.offset else f" t{token} h{head} " for _, token, head in row
                )
                lines.append(f"  element {row[0][0]:6} {' '.join(cells)}".rstrip())
        return "\n".join(lines)

    def svg(self) -> str:
        """Return the text of an SVG file with both layouts, coloured by token."""
        shapes, y = [], 20.0
        widest = max(self.block_size, self.num_kv_heads)
        for layout, strides in self.strides.items():
            shapes.append(svg.text(10, y, f"{layout}: strides of block, token, head {', '.join(map(str, strides))}"))
            y += 8
            for row in self.rows(layout):
                shapes.append(svg.text(62, y + 15, str(row[0][0]), anchor="end"))
                for column, (element, token, head) in enumerate(row):
                    x, colour = 70 + column * _WIDTH, svg.PALETTE[token % len(svg.PALETTE)]
                    title = f"token {token} head {head}: elements {element} to {element + self.head_dim - 1}"
                    is_marked = token == self.offset
                    shapes.append(svg.rectangle(x, y, _WIDTH, _HEIGHT, colour, title, bold=is_marked))
                    words = f"t{token} h{head}"
                    shapes.append(svg.text(x + _WIDTH / 2, y + 15, words, anchor="middle", colour="white"))
                y += _HEIGHT
            y += 26
        return svg.picture(max(80 + widest * _WIDTH, 380), y - 10, "NHD and HND", shapes)


def map_layouts(block_size: int, num_kv_heads: int, head_dim: int, *, offset: int | None = None) -> LayoutMaps:
    """Map one block of a pool in both layouts: which token's head lies at which element.

    NHD: ``token * num_kv_heads * head_dim + head * head_dim``, all heads of a token together. HND:
    ``head * block_size * head_dim + token * head_dim``, all tokens of a head together.

    Args:
        block_size: tokens in the block.
        num_kv_heads: KV heads; together at most 4096 cells.
        head_dim: size of a head, at most 512.
        offset: a token of the block to mark, or None.

    Returns:
        LayoutMaps: ``print`` it, or write its ``svg()`` into a file.

    Raises:
        ValueError, TypeError: a number is out of range or no integer.

    Example:
        >>> from torch_pagedkv import inspect
        >>> print(inspect.map_layouts(3, 2, 64, offset=1))
        a block of 3 tokens, 2 KV heads of 64
        NHD: strides of block, token, head 384, 128, 64
          element      0  t0 h0   t0 h1
          element    128 [t1 h0] [t1 h1]
          element    256  t2 h0   t2 h1
        HND: strides of block, token, head 384, 64, 192
          element      0  t0 h0  [t1 h0]  t2 h0
          element    192  t0 h1  [t1 h1]  t2 h1

    Source: ours.
    """
    block_size = check_integer(_OWNER, "block_size", block_size, 1, _MOST_CELLS)
    num_kv_heads = check_integer(_OWNER, "num_kv_heads", num_kv_heads, 1, _MOST_CELLS // block_size)
    head_dim = check_integer(_OWNER, "head_dim", head_dim, 1, MAX_HEAD_DIM)
    if offset is not None:
        offset = check_integer(_OWNER, "offset", offset, 0, block_size - 1)
    return LayoutMaps(block_size, num_kv_heads, head_dim, offset)
