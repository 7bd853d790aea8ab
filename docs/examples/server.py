"""A batch server on a paged KV cache: the part of the serving example to read.

Requests join whenever they come. Each step takes the next token of every running request and fills
what is left of its budget of tokens with chunks of prompts. Requests that start with the same tokens
share the blocks of these. When the pool is full, the youngest request is swapped out to the host, or
gives its blocks up and is computed again where the host is full too.
"""

from __future__ import annotations

import collections
import dataclasses
import time

import torch
from batching import choose_tokens

from torch_pagedkv import BlockManager, OutOfBlocks, PagedBatch, SwapSpace, blocks_for
from torch_pagedkv.integrations import transformers as paged


@dataclasses.dataclass(eq=False)
class Request:
    """A prompt, what was generated from it, and the times of what happened to it."""

    number: int
    prompt: list[int]
    arrived: float
    generated: list[int] = dataclasses.field(default_factory=list)
    sequence: int | None = None  # the block manager's, in the pool or swapped out
    first_token: float = 0.0
    is_done: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


@dataclasses.dataclass
class Counts:
    """What a server has done."""

    steps: int = 0
    prompt_tokens: int = 0  # of admissions, those after a preemption too
    found_tokens: int = 0  # of these, how many were in the pool already
    swapped_out: int = 0
    computed_again: int = 0
    peak_blocks: int = 0
    most_running: int = 0


class Server:
    """Schedule requests, and run the model on what was scheduled, a step at a time."""

    def __init__(
        self,
        model: torch.nn.Module,
        end_tokens: list[int],
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        max_batch: int,
        max_tokens: int,
        max_new_tokens: int,
    ) -> None:
        self.model, self.end_tokens = model, end_tokens
        self.max_batch, self.max_tokens, self.max_new_tokens = max_batch, max_tokens, max_new_tokens
        self.cache = paged.make_cache(
            model.config, num_blocks=num_blocks, block_size=block_size, dtype=model.dtype, device=model.device
        )
        self.swap_space = SwapSpace(self.cache, num_host_blocks)
        self.manager = BlockManager(num_blocks, block_size, num_host_blocks=num_host_blocks)
        self.waiting: collections.deque[Request] = collections.deque()
        self.running: list[Request] = []  # oldest first
        self.counts = Counts()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        # The last token is never stored: nothing comes after it.
        needed = blocks_for(len(request.prompt) + self.max_new_tokens - 1, self.cache.block_size)
        if needed > self.cache.num_blocks or not request.prompt:
            raise ValueError(f"request {request.number} must need 1 to {self.cache.num_blocks} blocks, got {needed}")
        self.waiting.append(request)

    def step(self) -> list[Request] | None:
        """Run one step, and return the requests that have a new token; None: there is nothing to do."""
        step, advanced = self._schedule(), []
        if not step:
            return None
        for (request, num_new), token in zip(step, self._run(step), strict=True):
            stored = self.manager.num_stored(request.sequence)
            self.manager.commit(request.sequence, request.tokens[stored : stored + num_new])
            if stored + num_new < len(request.tokens):
                continue  # in the middle of its prompt: the token after the chunk is known already
            request.first_token = request.first_token or time.perf_counter()
            request.generated.append(token)
            advanced.append(request)
            if len(request.generated) == self.max_new_tokens or token in self.end_tokens:
                self.running.remove(request)
                self.manager.free(request.sequence)
                request.is_done = True
        self.counts.steps += 1
        return advanced

    def _schedule(self) -> list[tuple[Request, int]]:
        """Return the requests of the next step and their numbers of new tokens."""
        step, budget = [], self.max_tokens
        for request in list(self.running):
            if request not in self.running:
                continue  # an older one has taken its blocks in this very step
            num_new = min(self._num_new(request), budget)
            if num_new and self._make_room(request, num_new):
                step.append((request, num_new))
                budget -= num_new
        while budget and self.waiting and len(self.running) < self.max_batch and self._admit(self.waiting[0]):
            request = self.waiting.popleft()
            self.running.append(request)
            num_new = min(self._num_new(request), budget)
            self._reserve(request, num_new)
            step.append((request, num_new))
            budget -= num_new
        used = self.cache.num_blocks - self.manager.num_available
        self.counts.peak_blocks = max(self.counts.peak_blocks, used)
        self.counts.most_running = max(self.counts.most_running, len(self.running))
        return step

    def _num_new(self, request: Request) -> int:
        return len(request.tokens) - self.manager.num_stored(request.sequence)

    def _reserve(self, request: Request, num_tokens: int) -> None:
        self.cache.copy_blocks(self.manager.reserve(request.sequence, num_tokens))

    def _make_room(self, request: Request, num_new: int) -> bool:
        """Reserve room in the pool; False if the request had to leave it instead."""
        while True:
            try:
                self._reserve(request, num_new)
                return True
            except OutOfBlocks:
                youngest = self.running[-1]
                self._preempt(youngest)
                if youngest is request:
                    return False

    def _admit(self, request: Request) -> bool:
        """Bring a request into the pool if it has room for all of its tokens."""
        manager, tokens = self.manager, request.tokens
        if request.sequence is not None:  # it was swapped out
            if blocks_for(len(tokens), self.cache.block_size) > manager.num_available:
                return False
            self.swap_space.swap_in(manager.swap_in(request.sequence))
            return True
        sequence = manager.add(tokens)
        found = manager.num_stored(sequence)
        try:
            manager.reserve(sequence, len(tokens) - found)
        except OutOfBlocks:
            manager.free(sequence)
            return False
        request.sequence = sequence
        self.counts.prompt_tokens += len(tokens)
        self.counts.found_tokens += found
        return True

    def _preempt(self, request: Request) -> None:
        try:
            self.swap_space.swap_out(self.manager.swap_out(request.sequence))
            self.counts.swapped_out += 1
        except OutOfBlocks:  # the host is full
            self.manager.free(request.sequence)
            request.sequence = None
            self.counts.computed_again += 1
        self.running.remove(request)
        self.waiting.appendleft(request)

    def _run(self, step: list[tuple[Request, int]]) -> list[int]:
        """Store the new tokens' keys and values, and return the next token of each request."""
        ids, positions, tables, lengths = [], [], [], []
        for request, num_new in step:
            stored = self.manager.num_stored(request.sequence)
            ids += request.tokens[stored : stored + num_new]
            positions += range(stored, stored + num_new)
            tables.append(self.manager.block_table(request.sequence))
            lengths.append(stored + num_new)
        query_lens = [num_new for _, num_new in step]
        device = self.model.device
        batch = PagedBatch.from_sequences(tables, lengths, query_lens, block_size=self.cache.block_size, device=device)
        inputs = torch.tensor([ids, positions]).to(device)
        return choose_tokens(self.model, *inputs, self.cache, batch).tolist()
