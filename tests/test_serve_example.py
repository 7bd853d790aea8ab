"""The serving example: every way of preemption keeps the tokens, and its verdict is not a formality."""

from __future__ import annotations

import io
import random
import sys
import types

import pytest
import torch

from example_programs import run_program, spoil_one_token

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("examples_on_path")


def run_example(monkeypatch, *options: str) -> int:
    return run_program(monkeypatch, "serve", "--model", "random", "--every", "0", *options)


@pytest.mark.parametrize(
    "num_blocks,num_host_blocks,preempted",
    [
        (200, 0, "0 swapped out, 0 computed again"),
        (20, 200, " swapped out, 0 computed again"),
        (20, 0, "0 swapped out, "),
    ],
    ids=["roomy", "swap", "recompute"],
)
def test_tokens_are_those_of_each_request_alone(num_blocks, num_host_blocks, preempted, device, monkeypatch, capsys):
    run = ("--check", "--max-new-tokens", "24", "--device", device)
    pool = ("--num-blocks", str(num_blocks), "--num-host-blocks", str(num_host_blocks))
    assert run_example(monkeypatch, *run, *pool) == 0
    printed = capsys.readouterr().out
    assert "tokens equal to each request's alone: yes (32 of 32)" in printed
    assert f"preempted: {preempted}" in printed or f"{preempted}\n" in printed
    assert ("preempted: 0 swapped out, 0 computed again" in printed) == (num_blocks == 200)
    hits = next(line for line in printed.splitlines() if line.startswith("prefix hits"))
    assert int(hits.split()[2]) >= 30 * 64  # all but the first requests find the system prompt
    assert printed.count("[end]") == 32 and "\033" not in printed


def test_fails_when_a_token_differs(monkeypatch, capsys):
    spoil_one_token(monkeypatch, "serve")
    assert run_example(monkeypatch, "--check", "--max-new-tokens", "2") == 1
    assert "each request's alone: no (31 of 32)" in capsys.readouterr().out


def test_takes_requests_from_a_file_and_from_standard_input(tmp_path, monkeypatch, capsys):
    lines = "What is this?\n\n   And that one?\n" + "too long " * 500 + "\nThe last\n"
    file = tmp_path / "requests.txt"
    file.write_text(lines)
    assert run_example(monkeypatch, "--check", "--requests", str(file), "--max-new-tokens", "3") == 0
    from_file = capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run_example(monkeypatch, "--check", "--requests", "-", "--max-new-tokens", "3") == 0
    from_stdin = capsys.readouterr().out
    for printed in (from_file, from_stdin):
        assert "refused: request 3 must need 1 to 48 blocks, got " in printed
        assert "alone: yes (3 of 3)" in printed and "3 requests, 9 new tokens" in printed


def test_compares_with_the_batching_of_transformers(monkeypatch, capsys):
    assert run_example(monkeypatch, "--compare", "--max-new-tokens", "4") == 0
    printed = capsys.readouterr().out
    assert "32 of 32 have the same tokens" in printed
    header, ours, theirs = (line.split() for line in printed.splitlines()[-4:-1])
    assert header[-5:] == ["first", "token,", "median", "95", "%"]
    for line in (ours, theirs):
        seconds, median, most = float(line[-5]), float(line[-2]), float(line[-1])
        assert 0 <= median <= most <= seconds + 0.1
    assert ours[:3] == ["this", "server", theirs[1]] and theirs[0] == "generate_batch"


@pytest.mark.parametrize("count,rank", [(1, 1), (2, 2), (19, 19), (20, 19), (32, 31), (100, 95)])
def test_95_percent_of_the_requests_waited_no_longer(count, rank):
    import serve

    assert serve.percentile_95([float(i) for i in reversed(range(1, count + 1))]) == rank


@pytest.mark.parametrize("num_host_blocks", [0, 7, 100])
@pytest.mark.parametrize("num_blocks", [9, 14, 80])
def test_server_serves_everyone_and_leaves_nothing(num_blocks, num_host_blocks, monkeypatch):
    """Nothing is computed by a model here: who runs, waits or is preempted is what is looked at."""
    import server as module
    from server import Request, Server

    from torch_pagedkv import PagedKVCache

    def make_cache(config, *, num_blocks, block_size, dtype, device):
        return PagedKVCache(1, 1, 1, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=device)

    def choose(model, ids, positions, cache, batch):
        assert ids.shape == positions.shape == batch.slot_mapping.shape
        assert 0 < len(ids) <= 6 and batch.num_sequences <= 4
        assert len(set(batch.slot_mapping.tolist())) == len(ids)
        return ids[batch.cu_seqlens_q[1:].long() - 1] + 1

    monkeypatch.setattr(module.paged, "make_cache", make_cache)
    monkeypatch.setattr(module, "choose_tokens", choose)
    model = types.SimpleNamespace(config=None, dtype=torch.float32, device=torch.device("cpu"))
    sizes = {"num_blocks": num_blocks, "block_size": 4, "num_host_blocks": num_host_blocks}
    server = Server(model, [], **sizes, max_batch=4, max_tokens=6, max_new_tokens=8)
    choices = random.Random(0)
    requests = [Request(i, [1000 * (i % 3)] * choices.randrange(3, 28), 0.0) for i in range(8)]
    steps = 0
    for request in requests[:5]:
        server.submit(request)
    while server.step() is not None or steps < 10:
        steps += 1
        if steps == 10:
            for request in requests[5:]:
                server.submit(request)
        assert len(server.running) <= 4 and steps < 500
    for request in requests:
        first = request.prompt[-1] + 1
        assert request.is_done and request.generated == list(range(first, first + 8))
    assert server.manager.num_available == num_blocks and server.manager.num_host_free == num_host_blocks
    assert not server.waiting and not server.running
    preempted = server.counts.swapped_out + server.counts.computed_again
    assert (preempted > 0) == (num_blocks < 80) and server.counts.found_tokens > 0
    with pytest.raises(ValueError, match=rf"request 9 must need 1 to {num_blocks} blocks, got "):
        server.submit(Request(9, [1] * 4 * num_blocks, 0.0))
