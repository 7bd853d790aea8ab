"""What the bookkeeping of blocks costs on the host, in microseconds a token.

Decode: every sequence reserves room for a token, the batch is refilled, every sequence commits it.
Prefill: sequences are added, store their prompts and end; with all, none or their first half found.

    python benchmarks/bench_block_bookkeeping.py --threads 1
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator

import torch

from machine import describe, parse, print_header, print_row, times_of
from torch_pagedkv import BlockManager, PagedBatch, blocks_for

NUM_SEQUENCES, BLOCK_SIZE = 256, 16
MAX_LENGTH = 4096


def decode(length: int, prefix_caching: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the parts of a step of all sequences, each of about length tokens."""
    per_sequence = blocks_for(MAX_LENGTH, BLOCK_SIZE)
    manager = BlockManager(NUM_SEQUENCES * per_sequence, BLOCK_SIZE, prefix_caching=prefix_caching)
    choose = random.Random(0)

    def start() -> int:
        tokens = [choose.randrange(50_000) for _ in range(length + choose.randrange(BLOCK_SIZE))]
        number = manager.add(tokens)
        manager.reserve(number, len(tokens))
        manager.commit(number, tokens)
        return number

    sequences = [start() for _ in range(NUM_SEQUENCES)]
    batch = PagedBatch.fixed(NUM_SEQUENCES, per_sequence)
    tokens = itertools.count()

    def advance() -> None:
        for i, sequence in enumerate(sequences):
            if manager.num_stored(sequence) == MAX_LENGTH:
                manager.free(sequence)
                sequences[i] = start()
            manager.reserve(sequences[i], 1)
            manager.commit(sequences[i], [next(tokens)])

    def update() -> None:
        tables = [manager.block_table(sequence) for sequence in sequences]
        lengths = [manager.num_stored(sequence) for sequence in sequences]
        batch.update_(tables, lengths, block_size=BLOCK_SIZE)

    yield "reserve, commit", advance
    yield "PagedBatch.update_", update


def prefill(length: int, num_found: int) -> Callable[[], object]:
    """Return a call that adds, stores and ends all sequences, of which num_found tokens are found."""
    manager = BlockManager(NUM_SEQUENCES * blocks_for(length + 1, BLOCK_SIZE), BLOCK_SIZE)
    numbers = itertools.count()
    prefix = list(range(num_found))

    def run() -> None:
        alive = []
        for _ in range(NUM_SEQUENCES):
            prompt = prefix + [next(numbers) + 10**6] * (length + 1 - num_found)
            sequence = manager.add(prompt)
            rest = prompt[manager.num_stored(sequence) :]
            manager.reserve(sequence, len(rest))
            manager.commit(sequence, rest)
            alive.append(sequence)
        for sequence in alive:
            manager.free(sequence)

    return run


def main() -> None:
    arguments = parse(__doc__, seconds=1.0)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe()}\n")
        print_header(f"decode, {NUM_SEQUENCES} sequences", "tokens each", "prefix caching", "us a token")
        for length in (256, 2048):
            for caching in (True, False):
                calls = dict(decode(length, caching))
                taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
                for name, seconds in taken.items():
                    print_row(name, length, "on" if caching else "off", seconds / NUM_SEQUENCES * 1e6)
        print()
        print_header(f"prefill, {NUM_SEQUENCES} sequences", "tokens each", "found", "us a token")
        for found in (0, 512, 1024):
            calls = {"add, reserve, commit, free": prefill(1024, found)}
            taken = times_of(calls, arguments.seconds, disturbed=arguments.disturbed)
            for name, seconds in taken.items():
                print_row(name, 1024, found, seconds / NUM_SEQUENCES / 1024 * 1e6)


if __name__ == "__main__":
    main()
