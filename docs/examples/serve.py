"""Serve requests that arrive over time from one small pool of KV blocks.

32 questions under one system prompt come in one after the other (or lines of a file, or of standard
input as they are typed). server.py shows how they share the pool; their answers are printed piece by
piece, and a summary at the end.

    python docs/examples/serve.py --check --compare
    python docs/examples/serve.py --requests questions.txt --every 0.5
    some_program | python docs/examples/serve.py --requests -
"""

from __future__ import annotations

import argparse
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

# Read when torch and transformers are imported; generate.py says why.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from console import Progress
from prompts import QUESTIONS, SYSTEM_PROMPT
from server import Request, Server
from smollm2 import Loaded, load
from transformers_baseline import Batched, end_tokens_of, generate_batch, generate_one_by_one

from torch_pagedkv.integrations import transformers as paged

PIECE = 8  # tokens between two pieces of an answer on the screen


class Arrivals:
    """Questions as they come: one after the other at a fixed rate, or lines as they are typed."""

    def __init__(self, questions: Iterable[str], every: float) -> None:
        self._lines: queue.Queue[str] = queue.Queue()
        self._thread = threading.Thread(target=self._read, args=(questions, every), daemon=True)
        self._thread.start()

    def _read(self, questions: Iterable[str], every: float) -> None:
        for question in questions:
            if question.strip():
                self._lines.put(question.strip())
                time.sleep(every)

    def take(self) -> list[str]:
        """Return the questions that have arrived since the last call."""
        return [self._lines.get() for _ in range(self._lines.qsize())]

    @property
    def is_over(self) -> bool:
        """Say whether nothing more will come; only true once all was taken."""
        return not self._thread.is_alive() and self._lines.empty()


class Screen:
    """Print answers piece by piece, above a live line of progress."""

    def __init__(self, loaded: Loaded) -> None:
        self._progress, self._decode = Progress(), loaded.decode
        self._shown: dict[int, int] = {}

    def show(self, advanced: list[Request], server: Server, start: float) -> None:
        """Show new pieces of answers, whole ones to their end, and how far the server is."""
        for request in advanced:
            if request.is_done or len(request.generated) % PIECE == 0:
                text, shown = self._decode(request.generated), self._shown.get(request.number, 0)
                self._shown[request.number] = len(text)
                end = " [end]" if request.is_done else ""
                self._progress.finish(f"{request.number:4d} | {text[shown:].strip()}{end}")
        counts, manager = server.counts, server.manager
        self._progress.show(
            f"step {counts.steps:4d} | {len(server.running)} running, {len(server.waiting)} waiting | "
            f"blocks {manager.num_blocks - manager.num_available}/{manager.num_blocks} | "
            f"{time.perf_counter() - start:.1f} s"
        )

    def finish(self, text: str) -> None:
        self._progress.finish(text)

    def working(self, text: str) -> None:
        self._progress.show(text)


def main() -> int:
    args = parse_arguments()
    loaded = load(args.model, torch.float32, args.device)
    model = loaded.model
    paged.register()
    model.set_attn_implementation(paged.ATTN_IMPLEMENTATION)
    options = ("num_blocks", "block_size", "num_host_blocks", "max_batch", "max_tokens", "max_new_tokens")
    server = Server(model, end_tokens_of(model), **{name: getattr(args, name) for name in options})
    screen = Screen(loaded)
    start, cpu_start = time.perf_counter(), time.process_time()
    requests = serve(server, loaded, arrivals_of(args), screen, args.system, start)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    print_summary(server, requests, seconds, screen)
    is_right = not args.check or check(model, requests, args.max_new_tokens, screen)
    if args.compare and requests:
        ours = Batched([r.generated for r in requests], seconds, cpu_seconds, waits_of(requests))
        compare(model, [request.prompt for request in requests], ours, args, screen)
    return 0 if is_right else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("--requests", help="a file with one question a line, or - for standard input (default: 32 built in)")
    add("--every", type=float, default=0.1, help="seconds between two requests, of a file or built in")
    add("--system", default=SYSTEM_PROMPT, help="the system prompt that all requests share")
    add("--model", help="a path, a model id, random or random-smollm2 (default: SmolLM2-135M-Instruct)")
    add("--device", default="cpu")
    add("--max-new-tokens", type=int, default=32)
    add("--block-size", type=int, default=16, help="tokens in a KV block")
    add("--num-blocks", type=int, default=48, help="KV blocks in the pool")
    add("--num-host-blocks", type=int, default=24, help="KV blocks that can be swapped out")
    add("--max-batch", type=int, default=32, help="requests that run at once")
    add("--max-tokens", type=int, default=64, help="new tokens of a step, of all requests together")
    add("--check", action="store_true", help="compare each answer with transformers' generate, each alone")
    add("--compare", action="store_true", help="run transformers' generate_batch on the same prompts")
    args = parser.parse_args()
    for name in ("max_new_tokens", "block_size", "num_blocks", "max_batch", "max_tokens"):
        if getattr(args, name) < 1:
            parser.error(f"{name} must be at least 1, got {getattr(args, name)}")
    if args.every < 0 or args.num_host_blocks < 0:
        parser.error("every and num_host_blocks must not be negative")
    return args


def arrivals_of(args: argparse.Namespace) -> Arrivals:
    if args.requests == "-":
        return Arrivals(sys.stdin, 0.0)
    if args.requests is None:
        return Arrivals(QUESTIONS, args.every)
    return Arrivals(Path(args.requests).read_text().splitlines(), args.every)


def serve(
    server: Server, loaded: Loaded, arrivals: Arrivals, screen: Screen, system: str, start: float
) -> list[Request]:
    """Serve whatever arrives until nothing more comes; return the requests in their order."""
    requests: list[Request] = []
    while True:
        is_over = arrivals.is_over  # asked before taking: what comes in between is taken next time
        for question in arrivals.take():
            request = Request(len(requests) + 1, loaded.encode(question, system), time.perf_counter())
            try:
                server.submit(request)
            except ValueError as error:
                screen.finish(f"refused: {error}")
                continue
            requests.append(request)
        advanced = server.step()
        if advanced is not None:
            screen.show(advanced, server, start)
        elif is_over:
            return requests
        else:
            time.sleep(0.01)


def print_summary(server: Server, requests: list[Request], seconds: float, screen: Screen) -> None:
    counts, num_new = server.counts, sum(len(request.generated) for request in requests)
    waits = waits_of(requests) or [0.0]
    hits = counts.found_tokens / max(counts.prompt_tokens, 1)
    screen.finish(
        f"{len(requests)} requests, {num_new} new tokens in {counts.steps} steps and {seconds:.1f} s: "
        f"{num_new / seconds:.1f} tokens a second"
    )
    print(
        f"time to first token: median {statistics.median(waits):.2f} s, 95 % within {percentile_95(waits):.2f} s, "
        f"longest {max(waits):.2f} s\n"
        f"prefix hits: {counts.found_tokens} of {counts.prompt_tokens} prompt tokens ({hits:.0%})\n"
        f"peak: {counts.peak_blocks} of {server.cache.num_blocks} blocks, {counts.most_running} requests at once; "
        f"preempted: {counts.swapped_out} swapped out, {counts.computed_again} computed again"
    )


def waits_of(requests: list[Request]) -> list[float]:
    """Return each request's time to first token: from its arrival, waiting for its turn included."""
    return [request.first_token - request.arrived for request in requests]


def percentile_95(waits: list[float]) -> float:
    """Return the least wait that at least 95 % of all are within."""
    return sorted(waits)[-(-95 * len(waits) // 100) - 1]


def check(model: torch.nn.Module, requests: list[Request], max_new_tokens: int, screen: Screen) -> bool:
    """Say whether every request has the tokens that transformers generates from it alone."""
    prompts = [request.prompt for request in requests]
    alone = generate_one_by_one(model, prompts, max_new_tokens, screen.working)
    same = [request.generated == tokens for request, tokens in zip(requests, alone, strict=True)]
    verdict = "yes" if all(same) else "no"
    screen.finish(f"tokens equal to each request's alone: {verdict} ({sum(same)} of {len(same)})")
    return all(same)


def compare(
    model: torch.nn.Module, prompts: list[list[int]], ours: Batched, args: argparse.Namespace, screen: Screen
) -> None:
    """Run transformers' continuous batching on the same prompts, with a pool of the same size."""
    screen.working("transformers' generate_batch")
    sizes = {"block_size": args.block_size, "num_blocks": args.num_blocks, "max_batch_tokens": args.max_tokens}
    theirs = generate_batch(model, prompts, args.max_new_tokens, **sizes)
    columns = f"{'tokens':>8}{'seconds':>9}{'tokens/s':>10}{'CPU seconds':>13}{'first token, median':>21}{'95 %':>8}"
    screen.finish(f"{'':16}{columns}")
    for name, run in (("this server", ours), ("generate_batch", theirs)):
        num_new = sum(map(len, run.tokens))
        print(
            f"{name:16}{num_new:8d}{run.seconds:9.1f}{num_new / run.seconds:10.1f}{run.cpu_seconds:13.1f}"
            f"{statistics.median(run.waits):21.2f}{percentile_95(run.waits):8.2f}"
        )
    same = sum(map(list.__eq__, ours.tokens, theirs.tokens))
    print(
        "generate_batch had all requests at its start, as this server has with --every 0; "
        f"{same} of {len(prompts)} have the same tokens"
    )


if __name__ == "__main__":
    sys.exit(main())
