"""python -m torch_pagedkv doctor: it finds nothing here, and would find what there is."""

from __future__ import annotations

import json

import pytest
import torch

import torch_pagedkv
from torch_pagedkv import doctor, native
from torch_pagedkv.__main__ import main


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(doctor, "_CALLS", 2)
    monkeypatch.setattr(doctor, "_ROUNDS", 1)


def test_this_environment_is_healthy(device, capsys):
    assert main(["doctor", "--device", device]) == 0
    printed = capsys.readouterr()
    rows = [line.split("|")[1:-1] for line in printed.out.splitlines() if line.startswith("| ")][1:]
    assert [row[0].strip() for row in rows] == [*native.STEMS, "PagedAttention"]
    for name, *counts, eager, compiled in rows:
        assert [int(count) for count in counts] == [0, 0, 0] + [1] * (device == "cuda"), name
        assert int(eager) > 0 and int(compiled) > 0
    assert "paged_attention (2 of 7): compiling" in printed.err and "paged_attention: timing" in printed.err


def test_breaks_recompiles_copies_and_failures_are_found(monkeypatch, capsys):
    pool = torch.zeros(doctor._POOL_NUMEL)

    def breaks(batch):
        torch._dynamo.graph_break()
        return batch.seqused_k + 1

    state = {"calls": 0.5}

    def recompiles(batch):
        state["calls"] *= 2.0  # a float of Python is a constant of the graph
        return batch.seqused_k * state["calls"]

    def copies(batch):
        return (pool + 1).sort()[0][:3] * batch.seqused_k[0]

    def fails(batch):
        return torch_pagedkv.paged_attention(None, pool, pool, batch.block_table, batch.seqused_k)

    calls = {"breaks": breaks, "recompiles": recompiles, "copies": copies, "fails": fails}
    monkeypatch.setattr(doctor, "_calls", lambda device: calls)
    assert main(["doctor", "--device", "cpu", "--json"]) == 1
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["breaks"]["graph_breaks"] == 1
    assert found["recompiles"]["recompiles"] >= 1
    assert found["copies"]["pool_copies"] >= 1
    assert "TypeError" in found["fails"]["failure"] or "query must be a tensor" in found["fails"]["failure"]
    assert main(["doctor", "--device", "cpu"]) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_sentence(capsys):
    assert main(["doctor", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == "doctor: --device must be cpu where torch finds no GPU, got cuda\n"


def test_a_step_of_two_graphs_is_found():
    counts = dict(graph_breaks=0, recompiles=0, pool_copies=0)
    healthy = [doctor.Finding("some", **counts, graph_launches=launches).is_healthy for launches in (None, 0, 1, 2)]
    assert healthy == [True, False, True, False]
