"""Generate with continuous batching on a paged KV cache, and check it against transformers.

Eight prompts of different lengths go through a small language model with real weights. Their
sequences share a pool that is too small for all of them at once (batching.py shows how that works),
the model is compiled once for all steps, and every token is compared with transformers' own.

    python docs/examples/generate.py
    python docs/examples/generate.py --prompt "Why is the sky blue?" --max-new-tokens 100
    python docs/examples/generate.py --model random --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path

# Read when torch and transformers are imported. Threads that wait shall sleep, not spin: that costs
# little on an idle machine, and on a busy one spinning makes every step take several times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")  # there is a live line of our own

import torch
from batching import Outcome, Runner, generate
from console import Progress
from prompts import PROMPTS
from smollm2 import Loaded, load
from transformers.utils import logging as transformers_logging
from transformers_baseline import end_tokens_of, generate_one_by_one, time_batch

from torch_pagedkv import blocks_for
from torch_pagedkv.inspect import draw_pool, pool_history_svg
from torch_pagedkv.integrations import transformers as paged

MODEL_HELP = "a path, a model id, random or random-smollm2 (default: SmolLM2-135M-Instruct)"


def main() -> int:
    args = parse_arguments()
    progress = Progress()
    transformers_logging.disable_progress_bar()
    with progress.working("loading the model (the bundled one is unpacked once)"):
        loaded = load(args.model, getattr(torch, args.dtype), args.device)
    questions = args.prompt or list(PROMPTS)
    prompts = [loaded.encode(question) for question in questions]
    check_that_each_fits(prompts, args)

    paged.register()
    outcome, graphs = run_paged(loaded.model, prompts, args, progress)
    print_texts(questions, outcome, loaded)
    with progress.working("transformers' generate, all prompts in a batch"):
        baseline = time_batch(loaded.model, prompts, args.max_new_tokens)
    print()
    print_speeds(outcome, baseline)
    print_pool(outcome, args, progress)
    print_graphs(outcome, graphs)
    return 0 if check_tokens(loaded.model, prompts, outcome, args, progress) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="HF_HUB_OFFLINE=0 in the environment lets --model fetch what is not on disk.",
    )
    add = parser.add_argument
    add("--prompt", action="append", help="a prompt; may be given again (default: eight built in)")
    add("--prompt-file", type=Path, help="a file with one prompt a line")
    add("--model", help=MODEL_HELP)
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    add("--max-new-tokens", type=int, default=48)
    add("--block-size", type=int, default=16, help="tokens in a KV block")
    add("--num-blocks", type=int, default=64, help="KV blocks in the pool")
    add("--max-batch", type=int, default=8, help="sequences that run at once")
    add("--max-tokens", type=int, default=64, help="new tokens that fit into a step")
    add("--pool-svg", type=Path, help="draw who owned which block, step by step, into this file")
    add("--no-compile", action="store_true", help="run the model as it is")
    add("--profile", action="store_true", help="say which ops took most of the time")
    args = parser.parse_args()
    for name in ("max_new_tokens", "block_size", "num_blocks", "max_batch", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(args, name)}")
    if args.prompt_file is not None:
        lines = args.prompt_file.read_text().splitlines()
        args.prompt = (args.prompt or []) + [line for line in lines if line.strip()]
    return args


def check_that_each_fits(prompts: list[list[int]], args: argparse.Namespace) -> None:
    longest = max(map(len, prompts))
    # The last token is never stored: nothing comes after it.
    needed = blocks_for(longest + args.max_new_tokens - 1, args.block_size)
    if needed > args.num_blocks:
        raise SystemExit(
            f"generate: --num-blocks must be at least {needed} for a prompt of {longest} tokens "
            f"and {args.max_new_tokens} new ones, got {args.num_blocks}"
        )


def run_paged(
    model: torch.nn.Module, prompts: list[list[int]], args: argparse.Namespace, progress: Progress
) -> tuple[Outcome, int | None]:
    """Generate on the paged cache; return what came out and the number of compiled graphs."""
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    runner = Runner(
        model,
        num_blocks=args.num_blocks,
        block_size=args.block_size,
        max_batch=args.max_batch,
        max_tokens=args.max_tokens,
    )
    if not args.no_compile:
        torch._dynamo.utils.counters.clear()
        with progress.working("compiling the model, once for all steps"):
            runner.compile()
    end_tokens = end_tokens_of(model)
    with torch.profiler.profile() if args.profile else contextlib.nullcontext() as profile:
        outcome = generate(runner, prompts, args.max_new_tokens, end_tokens, progress.show)
    progress.finish(f"generated {outcome.num_tokens} tokens in {len(outcome.step_sizes)} steps")
    if profile is not None:
        print_profile(profile)
    if args.no_compile:
        return outcome, None
    return outcome, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def print_profile(profile: torch.profiler.profile) -> None:
    """Print the ops that took most of the time by themselves, and their shares of all that ops took."""
    events = sorted(profile.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    for event in events[:8]:
        share = event.self_cpu_time_total / total
        print(f"{share:7.1%} {event.self_cpu_time_total / 1e6:8.2f} s {event.count:7d} calls  {event.key}")


def print_texts(questions: list[str], outcome: Outcome, loaded: Loaded) -> None:
    for question, sequence in zip(questions, outcome.sequences, strict=True):
        shown = question if len(question) <= 72 else f"{question[:50]} [...] {question[-15:]}"
        print(f"\n{sequence.name} {shown}\n  {loaded.decode(sequence.generated)}")
    print()


def print_speeds(outcome: Outcome, baseline: tuple[int, float]) -> None:
    tokens, seconds = baseline
    num_sequences = len(outcome.sequences)
    longest = max(len(sequence.prompt) for sequence in outcome.sequences)
    most_new = max(len(sequence.generated) for sequence in outcome.sequences)
    padded_bytes = num_sequences * (longest + most_new - 1) * outcome.kv_bytes_per_token
    rows = (
        (
            "torch_pagedkv",
            outcome.num_tokens / outcome.seconds,
            outcome.kv_bytes,
            f"at most {outcome.most_running} of {num_sequences} sequences at once; "
            f"{outcome.num_preempted} had to start again",
        ),
        (
            "transformers",
            tokens / seconds,
            padded_bytes,
            f"generate() with sdpa, all {num_sequences} prompts in one batch, padded on the left",
        ),
    )
    print(f"{'':14}{'tokens/s':>10}{'KV cache':>13}")
    for name, speed, num_bytes, remark in rows:
        print(f"{name:14}{speed:10.1f}{num_bytes / 1e6:10.1f} MB   {remark}")


def print_pool(outcome: Outcome, args: argparse.Namespace, progress: Progress) -> None:
    lengths = ", ".join(f"{name} {length}" for name, length in outcome.fullest_lengths.items())
    print(
        f"\nthe pool at its fullest, in step {outcome.fullest_step}: {len(outcome.fullest)} of "
        f"{args.num_blocks} blocks of {args.block_size} tokens, one letter a block\n"
        f"{draw_pool(outcome.fullest, args.num_blocks, use_colour=progress.is_live)}\n"
        f"  tokens stored: {lengths}\n"
    )
    if args.pool_svg is not None:
        args.pool_svg.write_text(pool_history_svg(outcome.owners, args.num_blocks))
        print(f"the pool over all steps is drawn in {args.pool_svg}\n")


def print_graphs(outcome: Outcome, graphs: int | None) -> None:
    if graphs is None:
        print("compiled graphs: none")
        return
    print(
        f"compiled graphs: {graphs}, recompiles: {graphs - 1}, in {len(outcome.step_sizes)} steps "
        f"of {min(outcome.step_sizes)} to {max(outcome.step_sizes)} new tokens and lengths up to "
        f"{outcome.longest}"
    )
    if outcome.cuda_graphs:
        print(f"CUDA graphs: {outcome.cuda_graphs}, one for each {Runner.ROWS} rows; a step was one launch")


def check_tokens(
    model: torch.nn.Module,
    prompts: list[list[int]],
    outcome: Outcome,
    args: argparse.Namespace,
    progress: Progress,
) -> bool:
    """Compare every token with transformers' greedy ones, each prompt alone, in float32."""
    if args.dtype != "float32":
        # In fewer bits two ways to the same sum may well choose different tokens.
        print(f"the tokens above are {args.dtype}'s; for the check both run again in float32")
        model = model.float()
        args = argparse.Namespace(**{**vars(args), "dtype": "float32", "no_compile": True, "profile": False})
        outcome, _ = run_paged(model, prompts, args, progress)
    expected = generate_one_by_one(model, prompts, args.max_new_tokens, progress.show)
    pairs = zip(outcome.sequences, expected, strict=True)
    same = [sequence.generated == tokens for sequence, tokens in pairs]
    verdict = "yes" if all(same) else "no"
    progress.finish(f"tokens identical to transformers' own attention: {verdict} ({sum(same)} of {len(same)})")
    return all(same)


if __name__ == "__main__":
    sys.exit(main())
