"""Continuous batching on a paged KV cache: the part of the example to read.

Sequences of different lengths share one pool of KV blocks. They join the running batch when blocks
are free, take one more block whenever they outgrow their last, and leave when they are done; if the
pool runs dry, the youngest gives its blocks back and starts again later. Prompts go through in
chunks that share their steps with other sequences' single new tokens.
"""

from __future__ import annotations

import collections
import dataclasses
import string
import time
from collections.abc import Callable

import torch

from torch_pagedkv import BlockAllocator, PagedBatch, PagedKVCache, blocks_for
from torch_pagedkv.integrations import transformers as paged


@dataclasses.dataclass(eq=False)
class Sequence:
    """A prompt and what was generated from it, and the blocks that hold its keys and values."""

    name: str
    prompt: list[int]
    generated: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)
    num_stored: int = 0  # tokens whose keys and values are in the pool

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def num_new(self) -> int:
        """Tokens that are known and not stored yet: what is left of the prompt, or the newest."""
        return len(self.prompt) + len(self.generated) - self.num_stored


class Scheduler:
    """Decide which sequences take part in the next step, and with how many new tokens."""

    def __init__(self, sequences: list[Sequence], cache: PagedKVCache, batch: PagedBatch) -> None:
        self.allocator = BlockAllocator(cache.num_blocks)
        self.block_size = cache.block_size
        self.max_batch = batch.num_sequences
        self.max_tokens = batch.num_tokens
        self.waiting = collections.deque(sequences)
        self.running: list[Sequence] = []  # oldest first
        self.num_preempted = 0

    def schedule(self) -> list[tuple[Sequence, int]]:
        """Return the sequences of the next step and their numbers of new tokens."""
        step, budget = [], self.max_tokens
        for sequence in list(self.running):
            num_new = min(sequence.num_new, budget)
            if num_new and self._grow(sequence, sequence.num_stored + num_new):
                step.append((sequence, num_new))
                budget -= num_new
        while budget and self.waiting and len(self.running) < self.max_batch:
            sequence = self.waiting[0]
            if blocks_for(sequence.num_new, self.block_size) > self.allocator.num_free:
                break  # it would have to stop halfway
            self.running.append(self.waiting.popleft())
            num_new = min(sequence.num_new, budget)
            self._grow(sequence, num_new)
            step.append((sequence, num_new))
            budget -= num_new
        return step

    def complete(self, step: list[tuple[Sequence, int]], next_tokens: list[int], is_last: Callable) -> None:
        """Take the tokens that a step chose, and let go of the sequences that are finished."""
        for (sequence, num_new), token in zip(step, next_tokens, strict=True):
            sequence.num_stored += num_new
            if sequence.num_new > 0:
                continue  # in the middle of its prompt: the token after the chunk is known already
            sequence.generated.append(token)
            if is_last(sequence):
                self._release(sequence)

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence blocks for num_tokens; False if it had to give up its own instead."""
        if sequence not in self.running:
            return False  # an older one has taken its blocks in this very step
        needed = blocks_for(num_tokens, self.block_size) - len(sequence.blocks)
        while needed > self.allocator.num_free:
            youngest = self.running[-1]
            self._release(youngest)
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
            if youngest is sequence:
                return False
        sequence.blocks += self.allocator.allocate(max(needed, 0))
        return True

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.free(sequence.blocks)
        sequence.blocks, sequence.num_stored = [], 0


def choose_tokens(
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    cache: PagedKVCache,
    batch: PagedBatch,
) -> torch.Tensor:
    """Return the likeliest next token of each sequence of the batch. This is what is compiled."""
    last_rows = batch.cu_seqlens_q[1:] - 1
    logits = paged.forward(model, input_ids, positions, cache, batch, logits_rows=last_rows)
    return logits.argmax(-1)


class Runner:
    """Turn what the scheduler decided into tensors, and run the model on them.

    Every step has room for max_batch sequences, and for its new tokens rounded up to a multiple of
    ROWS; what it does not use is padding. The number of tokens is a symbol in the compiled graph and
    lengths are values on the device, so one graph serves all steps. On CUDA each number of rows is then
    captured as a CUDA graph, and a step is one launch.
    """

    ROWS = 8  # matrix products cost as much for fewer

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        num_blocks: int,
        block_size: int,
        max_batch: int,
        max_tokens: int,
    ) -> None:
        device = model.device
        self.model = model
        self.cache = paged.make_cache(
            model.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=model.dtype,
            device=device,
        )
        self.batch = PagedBatch.fixed(max_batch, num_blocks, max_tokens, device=device)
        self.input_ids = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros(max_tokens, dtype=torch.int64, device=device)
        self.choose_tokens = choose_tokens
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # by rows: graph and next tokens

    def compile(self) -> None:
        """Compile a step, and capture it on CUDA, by running one without sequences: the pool stays as it is."""
        self.choose_tokens = torch.compile(choose_tokens, fullgraph=True)
        inputs = self._inputs(len(self.input_ids))
        for tensor in (*inputs[:2], inputs[2].slot_mapping):
            torch._dynamo.mark_dynamic(tensor, 0)
        self.batch.update_([], [], [], block_size=self.cache.block_size)
        self._choose(inputs)
        if self.model.device.type == "cuda":
            for num_tokens in range(len(self.input_ids), 0, -self.ROWS):  # most rows first: the others fit their memory
                self._capture(num_tokens)

    def _capture(self, num_tokens: int) -> None:
        inputs = self._inputs(num_tokens)
        self._choose(inputs)  # kernels are loaded before the capture
        memory = next((graph.pool() for graph, _ in self.captured.values()), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            next_tokens = self._choose(inputs)
        self.captured[len(inputs[0])] = graph, next_tokens

    def run(self, step: list[tuple[Sequence, int]]) -> list[int]:
        """Store the new tokens' keys and values, and return the next token of each sequence."""
        token_ids, token_positions = [], []
        for sequence, num_new in step:
            stop = sequence.num_stored + num_new
            token_ids += sequence.tokens[sequence.num_stored : stop]
            token_positions += range(sequence.num_stored, stop)
        self.input_ids[: len(token_ids)] = torch.tensor(token_ids, dtype=torch.int64)
        self.positions[: len(token_ids)] = torch.tensor(token_positions, dtype=torch.int64)
        self.batch.update_(
            [sequence.blocks for sequence, _ in step],
            [sequence.num_stored + num_new for sequence, num_new in step],
            [num_new for _, num_new in step],
            block_size=self.cache.block_size,
        )
        inputs = self._inputs(len(token_ids))
        if len(inputs[0]) in self.captured:
            graph, next_tokens = self.captured[len(inputs[0])]
            graph.replay()  # it reads the inputs where they are
        else:
            next_tokens = self._choose(inputs)
        return next_tokens[: len(step)].tolist()

    def _inputs(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, PagedBatch]:
        rows = min(max(-(-num_tokens // self.ROWS), 1) * self.ROWS, len(self.input_ids))
        batch = dataclasses.replace(self.batch, slot_mapping=self.batch.slot_mapping[:rows])
        return self.input_ids[:rows], self.positions[:rows], batch

    def _choose(self, inputs: tuple[torch.Tensor, torch.Tensor, PagedBatch]) -> torch.Tensor:
        input_ids, positions, batch = inputs
        return self.choose_tokens(self.model, input_ids, positions, self.cache, batch)


@dataclasses.dataclass
class Outcome:
    """What a run left behind."""

    sequences: list[Sequence]
    kv_bytes: int  # of the pool
    kv_bytes_per_token: int
    seconds: float = 0.0
    step_sizes: list[int] = dataclasses.field(default_factory=list)  # new tokens of each step
    longest: int = 0  # tokens in the pool of any one sequence
    num_preempted: int = 0
    most_running: int = 0
    owners: list[dict[int, str]] = dataclasses.field(default_factory=list)  # in each step
    fullest: dict[int, str] = dataclasses.field(default_factory=dict)  # block -> owner
    fullest_lengths: dict[str, int] = dataclasses.field(default_factory=dict)
    fullest_step: int = 0
    cuda_graphs: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.generated) for sequence in self.sequences)


def generate(
    runner: Runner,
    prompts: list[list[int]],
    max_new_tokens: int,
    end_tokens: list[int],
    show: Callable[[str], None],
) -> Outcome:
    """Generate from all prompts, greedily, until an end token or the maximum."""
    names = string.ascii_uppercase + string.ascii_lowercase + string.digits
    sequences = [Sequence(names[i % len(names)], prompt) for i, prompt in enumerate(prompts)]
    cache = runner.cache
    outcome = Outcome(sequences, cache.nbytes, cache.bytes_per_block // cache.block_size)
    scheduler = Scheduler(sequences, cache, runner.batch)

    def is_last(sequence: Sequence) -> bool:
        is_full = len(sequence.generated) == max_new_tokens
        return is_full or sequence.generated[-1] in end_tokens

    start = time.perf_counter()
    while step := scheduler.schedule():
        outcome.step_sizes.append(sum(num_new for _, num_new in step))
        outcome.longest = max(outcome.longest, *(s.num_stored + n for s, n in step))
        outcome.most_running = max(outcome.most_running, len(scheduler.running))
        owners = {block: s.name for s in scheduler.running for block in s.blocks}
        outcome.owners.append(owners)
        if len(owners) > len(outcome.fullest):
            outcome.fullest, outcome.fullest_step = owners, len(outcome.step_sizes)
            outcome.fullest_lengths = {s.name: s.num_stored for s in scheduler.running}
            outcome.fullest_lengths |= {s.name: s.num_stored + n for s, n in step}
        scheduler.complete(step, runner.run(step), is_last)
        outcome.seconds = time.perf_counter() - start
        show(
            f"step {len(outcome.step_sizes):4d} | running {' '.join(s.name for s, _ in step)} | "
            f"{len(scheduler.waiting)} waiting | blocks {len(owners)}/{cache.num_blocks} | "
            f"{outcome.num_tokens} tokens, {outcome.num_tokens / outcome.seconds:.1f} a second"
        )
    outcome.num_preempted = scheduler.num_preempted
    outcome.cuda_graphs = len(runner.captured)
    return outcome
