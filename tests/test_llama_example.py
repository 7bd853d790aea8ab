"""The plain Llama: tokens of the compiled model are those of the eager one, wherever its pools are."""

from __future__ import annotations

import sys

import pytest
import torch
from torch._dynamo.utils import counters

from torch_pagedkv import PagedBatch

PROMPTS = [[1, 2, 3], [7] * 40, [5], list(range(100, 117))]


@pytest.fixture(autouse=True)
def llama(examples_on_path):
    import llama

    torch._dynamo.reset()
    counters.clear()
    return llama


@pytest.mark.parametrize("pools", ["arguments", "buffers", "one-pool"])
def test_compiled_tokens_are_those_of_eager(pools, device, llama):
    """Sequences join and leave in every step; the graphs are those of the batch's forms, and no more."""
    model, memory = llama.build(pools, device)
    expected = llama.generate(model, memory, PROMPTS, 6, device)
    assert [len(text) - len(prompt) for text, prompt in zip(expected, PROMPTS, strict=True)] == [6] * len(PROMPTS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert llama.generate(compiled, memory, PROMPTS, 6, device) == expected
    assert counters["stats"]["unique_graphs"] <= 4 and not counters["graph_break"]


@torch.no_grad()
def test_parts_are_three_graphs(device, llama):
    """A layer compiled once serves all four, beside what comes before and after them; logits as eager."""
    config = llama.Config()
    model = llama.Llama(config).to(device).requires_grad_(False)
    llama.fuse_projections(model)
    logits = []
    for compiles in (False, True):
        if compiles:
            llama.compile_parts(model, backend="aot_eager")
        pools = [[torch.zeros(8, 16, config.kv_heads, config.head_dim, device=device) for _ in "kv"] for _ in range(4)]
        batch = PagedBatch.from_sequences([[3, 1], [5, 2]], [14, 3], block_size=16, device=device)
        tokens = torch.tensor([7, 9], device=device)
        logits.append([llama.decode_step(model, tokens, pools, batch).clone() for _ in range(5)])
    torch.testing.assert_close(*logits)
    assert counters["stats"]["unique_graphs"] == 3 and not counters["graph_break"]


@pytest.mark.slow
def test_the_program(device, llama, monkeypatch, capsys):
    options = ["--mode", "reduce-overhead", "--device", device, "--max-new-tokens", "5"]
    monkeypatch.setattr(sys, "argv", ["llama.py", *options])
    assert llama.main() == 0
    assert "tokens as eager: True" in capsys.readouterr().out


def test_positions_are_rotations(llama):
    """The product of two rotated vectors depends on the distance of their positions alone."""
    config = llama.Config()
    query, key = torch.randn(2, 1, 1, config.head_dim)
    dots = [
        (
            llama.rotate(query, llama.rotation(torch.tensor([p]), config))
            * llama.rotate(key, llama.rotation(torch.tensor([p - 3]), config))
        ).sum()
        for p in (3, 10, 500)
    ]
    torch.testing.assert_close(dots[1:], [dots[0]] * 2, atol=1e-4, rtol=1e-4)
