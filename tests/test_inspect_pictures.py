"""Pictures: what they show is what is so, in text and in SVG that parses."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
import torch

from torch_pagedkv import BlockAllocator, PagedKVCache, inspect
from torch_pagedkv.__main__ import main

HISTORY = [{7: "A", 2: "A"}, {7: "A", 2: "A"}, {7: "A", 2: "A", 4: "B"}, {4: "B"}]


def shapes(drawn: str) -> list[tuple[str, str]]:
    """(title, colour) of every box with a title; parsing fails where the file is no XML."""
    root = ElementTree.fromstring(drawn)
    space = "{http://www.w3.org/2000/svg}"
    boxes = ((box.find(f"{space}title"), box.get("fill")) for box in root.iter(f"{space}rect"))
    return [(title.text, colour) for title, colour in boxes if title is not None]


def test_pool():
    assert inspect.draw_pool({7: "A", 2: "A", 9: "A", 4: "B"}, 10) == "      0  ..A.B..A.A"
    assert inspect.draw_pool({}, 0) == ""
    lines = inspect.draw_pool({64: "long name", 99: "B"}, 70).splitlines()
    assert lines == [f"      0  {'.' * 64}", "     64  l....."]


def test_colours_stand_around_letters_only():
    plain = inspect.draw_pool(HISTORY[2], 10)
    coloured = inspect.draw_pool(HISTORY[2], 10, use_colour=True)
    assert re.sub(r"\033\[\d+m", "", coloured) == plain
    assert len(set(re.findall(r"\033\[(\d\d)m", coloured))) == 2


def test_history_as_text_shows_changes_only():
    assert inspect.draw_pool_history(HISTORY, 8).splitlines() == [
        "step     1  ..A....A",
        "step     3  ..A.B..A",
        "step     4  ....B...",
    ]
    assert inspect.draw_pool_history([], 8) == ""


def test_history_as_svg():
    drawn = dict(shapes(inspect.pool_history_svg(HISTORY, 8)))
    cells = {title: colour for title, colour in drawn.items() if title.startswith("block")}
    assert len(cells) == 3 * 8
    first, second = drawn["sequence A"], drawn["sequence B"]
    assert first != second
    assert cells["block 7, step 3: sequence A"] == cells["block 2, step 1: sequence A"] == first
    assert cells["block 4, step 4: sequence B"] == second
    assert cells["block 7, step 4: free"] not in (first, second)


def test_svg_of_odd_things_is_xml():
    shapes(inspect.pool_history_svg([], 0))
    assert "sequence <A&\"'>" in dict(shapes(inspect.pool_history_svg([{0: "<A&\"'>"}], 1)))
    long = [{0: "A"} if step % 2 else {} for step in range(2000)]
    assert len(shapes(inspect.pool_history_svg(long, 1))) <= 401


def test_history_of_a_run():
    """A pool drawn from an allocator's life: blocks change hands and nothing else moves."""
    allocator = BlockAllocator(6)
    tables = {"A": allocator.allocate(2), "B": allocator.allocate(3)}
    history = [{block: name for name, table in tables.items() for block in table}]
    allocator.free(tables.pop("A"))
    tables["C"] = allocator.allocate(3)
    history.append({block: name for name, table in tables.items() for block in table})
    assert inspect.draw_pool_history(history, 6).splitlines() == ["step     1  AABBB.", "step     2  CCBBBC"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_maps_are_the_strides_of_the_cache(layout):
    """Every cell stands at the element where a pool of this layout has that token's head."""
    cache = PagedKVCache(1, 3, 8, num_blocks=2, block_size=5, kv_layout=layout, dtype=torch.float32, device="cpu")
    pool = cache[0][0]
    maps = inspect.map_layouts(5, 3, 8)
    assert maps.strides[layout] == pool.stride()[:3]
    cells = [cell for row in maps.rows(layout) for cell in row]
    assert [element for element, _, _ in cells] == list(range(0, 5 * 3 * 8, 8))
    start = pool.data_ptr()
    for element, token, head in cells:
        assert pool[0, token, head].data_ptr() - start == element * 4


def test_maps_as_text_and_svg():
    maps = inspect.map_layouts(4, 2, 64, offset=3)
    lines = str(maps).splitlines()
    assert lines[1] == "NHD: strides of block, token, head 512, 128, 64"
    assert lines[5] == "  element    384 [t3 h0] [t3 h1]"
    assert lines[7] == "  element      0  t0 h0   t1 h0   t2 h0  [t3 h0]"
    drawn = shapes(maps.svg())
    assert len(drawn) == 2 * 4 * 2
    titles = [title for title, _ in drawn]
    assert "token 3 head 1: elements 448 to 511" in titles and titles.count("token 0 head 0: elements 0 to 63") == 2
    assert maps.svg().count('stroke="black"') == 4


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        ((0, 2, 64), "map_layouts: block_size must be in [1, 4096], got 0"),
        ((16, 0, 64), "map_layouts: num_kv_heads must be in [1, 256], got 0"),
        ((16, 2, 513), "map_layouts: head_dim must be in [1, 512], got 513"),
    ],
)
def test_refusals(arguments, sentence):
    with pytest.raises(ValueError) as refusal:
        inspect.map_layouts(*arguments)
    assert str(refusal.value) == sentence
    with pytest.raises(ValueError, match=r"map_layouts: offset must be in \[0, 3\], got 4"):
        inspect.map_layouts(4, 2, 64, offset=4)
    for draw in (inspect.draw_pool, inspect.draw_pool_history, inspect.pool_history_svg):
        with pytest.raises(ValueError, match=f"{draw.__name__}: num_blocks must be >= 0, got -1"):
            draw({} if draw is inspect.draw_pool else [], -1)


def test_command(tmp_path, capsys):
    path = tmp_path / "layout.svg"
    command = ["layout", "--block-size", "4", "--offset", "3"]
    assert main([*command, "--svg", str(path)]) == 0
    maps = inspect.map_layouts(4, 2, 64, offset=3)
    assert capsys.readouterr().out == f"{maps}\ndrawn into {path}\n"
    assert path.read_text() == maps.svg()
    assert main([*command, "--svg", str(tmp_path / "nowhere" / "layout.svg")]) == 2
    assert "layout: svg must name a file that can be written, got" in capsys.readouterr().err
    assert main(["layout", "--block-size", "0"]) == 2
