"""Calls that once ended badly, and a fixed share of those that ``make fuzz`` would draw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fuzz_calls import draw
from fuzz_judge import judge

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "fuzz_corpus.jsonl").read_text().splitlines()]
SEEDS = {"cpu": 600, "cuda": 25}  # of each of the shares; on CUDA new sizes compile kernels


@pytest.mark.parametrize("entry", CORPUS, ids=lambda entry: f"{entry['call']['op']}-{entry['found'][:40]}")
def test_calls_that_once_ended_badly(entry, device):
    judge(entry["call"], device)


@pytest.mark.parametrize("share", range(16))
def test_calls_of_fixed_seeds(share, device):
    for number in range(SEEDS[device]):
        seed = share * 10**6 + number
        try:
            judge(draw(seed), device)
        except Exception as fault:
            raise AssertionError(f"seed {seed}: {fault}\n{json.dumps(draw(seed))}") from fault


def test_every_op_ends_in_results_and_in_sentences():
    """The calls that are drawn are neither all refused nor all right."""
    endings = {(call["op"], judge(call, "cpu")) for call in map(draw, range(600))}
    for op in {op for op, _ in endings}:
        assert {(op, "a result"), (op, "a sentence")} <= endings
