"""transformers' own ``generate`` on the same model: the yardstick and the oracle of the example."""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import transformers


def generate_one_by_one(model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int, show) -> list[list[int]]:
    """Return the greedy tokens of each prompt, each alone: no padding, no batch mates."""
    results = []
    for i, prompt in enumerate(prompts):
        show(f"transformers, prompt {i + 1} of {len(prompts)} alone")
        results += _generate(model, [prompt], max_new_tokens)
    return results


def time_batch(model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int) -> tuple[int, float]:
    """Return tokens and seconds of all prompts in one batch, padded left to the longest."""
    _generate(model, prompts, 2)  # whatever is done only once is done now
    start = time.perf_counter()
    results = _generate(model, prompts, max_new_tokens)
    return sum(map(len, results)), time.perf_counter() - start


class Batched(NamedTuple):
    """What continuous batching made of the prompts, and what it took."""

    tokens: list[list[int]]
    seconds: float
    cpu_seconds: float  # of all CPUs
    waits: list[float]  # of each request, from its submission to its first token


def generate_batch(model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int, **sizes: int) -> Batched:
    """Generate greedily by transformers' continuous batching."""
    end_tokens = end_tokens_of(model)
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    start, cpu_start = time.perf_counter(), time.process_time()
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=end_tokens or None,
            pad_token_id=end_tokens[0] if end_tokens else 0,
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        record_timestamps=True,
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    model.set_attn_implementation(implementation)
    by_number = sorted(outputs, key=lambda name: int(name.rpartition("_")[2]))
    requests = [outputs[name] for name in by_number]
    tokens = [_until_end(list(request.generated_tokens), end_tokens) for request in requests]
    # The clock of both stamps is time.perf_counter.
    waits = [request.timestamps[0] - request.created_time for request in requests]
    return Batched(tokens, seconds, cpu_seconds, waits)


def end_tokens_of(model: torch.nn.Module) -> list[int]:
    """Return the tokens that end a sequence."""
    end_tokens = model.generation_config.eos_token_id
    if end_tokens is None:
        return []
    return [end_tokens] if isinstance(end_tokens, int) else list(end_tokens)


@torch.no_grad()
def _generate(model: torch.nn.Module, prompts: list[list[int]], max_new_tokens: int) -> list[list[int]]:
    end_tokens = end_tokens_of(model)
    padding = end_tokens[0] if end_tokens else 0
    width = max(map(len, prompts))
    padded = [[padding] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    tokens = model.generate(
        torch.tensor(padded, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        generation_config=transformers.GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=end_tokens or None,
            pad_token_id=padding,
        ),
    )
    model.set_attn_implementation(implementation)
    return [_until_end(row, end_tokens) for row in tokens[:, width:].tolist()]


def _until_end(tokens: list[int], end_tokens: list[int]) -> list[int]:
    for i, token in enumerate(tokens):
        if token in end_tokens:
            return tokens[: i + 1]
    return tokens
