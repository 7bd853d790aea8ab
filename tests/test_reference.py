"""The oracle itself: against dense softmax written another way, and as what runs without the C++ part."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import PAGED
from tolerances import assert_close, assert_close_lse
from torch_pagedkv import reference


def dense(batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend over gathered copies with one mask matrix a sequence and torch's logsumexp, in float64."""
    case, (args, options) = batch.case, batch.attention
    query, key_cache, value_cache, _, _, sums = args
    group = case.num_heads // case.num_kv_heads
    out = torch.zeros((*query.shape[:2], value_cache.shape[3]), dtype=torch.float64)
    lse = torch.full(query.shape[1::-1], -math.inf, dtype=torch.float64)
    sinks = options.get("sinks", torch.full((case.num_heads,), -math.inf)).double()
    lse[:] = sinks[:, None]
    starts = sums.tolist() if sums is not None else list(range(len(case.kv_lens) + 1))
    left, right = options.get("window_size", (-1, -1))
    for row, (length, blocks) in enumerate(zip(case.kv_lens, batch.tables)):
        rows = slice(starts[row], starts[row + 1])
        count = rows.stop - rows.start
        if count == 0 or length == 0:
            continue

        def gathered(cache, name, length=length, blocks=blocks):
            scale = options.get(name, torch.ones(1)).double().reshape(-1, 1)
            dense = torch.zeros((length, *cache.shape[2:]), dtype=torch.float64)
            for position in range(length):
                block, offset = blocks[position // case.block_size], position % case.block_size
                dense[position] = cache[block, offset].double() * scale
            return dense.repeat_interleave(group, 1)

        keys, values = gathered(key_cache, "k_scale"), gathered(value_cache, "v_scale")
        positions = torch.arange(count)[:, None] + length - count
        distance = torch.arange(length)[None] - positions
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if options.get("causal", True):
            hidden |= distance > 0
        if left >= 0:
            hidden |= distance < -left
        if right >= 0:
            hidden |= distance > right
        scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys)
        scores = scores * options.get("softmax_scale", case.head_dim**-0.5)
        softcap = options.get("softcap", 0.0)
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        if "alibi_slopes" in options:
            scores = scores + options["alibi_slopes"].double()[:, None, None] * distance
        scores = scores.masked_fill(hidden, -math.inf)
        column = sinks[:, None, None].expand(-1, count, 1)
        total = torch.logsumexp(torch.cat([scores, column], dim=-1), dim=-1)
        lse[:, rows] = total
        weights = torch.exp(scores - total[..., None]).nan_to_num(0.0)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values)
    return out, lse


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_attention_equals_dense_softmax(case):
    batch = case.build("cpu")
    args, options = batch.attention
    out, lse = reference.paged_attention(*args, **options, precision=torch.float64)
    expected_out, expected_lse = dense(batch)
    torch.testing.assert_close(out, expected_out, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("case", PAGED[::5], ids=str)
def test_float32_is_close_to_float64(case):
    args, options = case.build("cpu").attention
    out, lse = reference.paged_attention(*args, **options)
    expected_out, expected_lse = reference.paged_attention(*args, **options, precision=torch.float64)
    assert_close(out, expected_out, largest=40.0 if case.pool != case.dtype else 5.0)
    assert_close_lse(lse, expected_lse)


@pytest.mark.slow
def test_the_reference_serves_where_the_library_is_missing():
    """The tests of values and errors pass with the C++ part blocked."""
    tests = Path(__file__).parent
    files = ["paged_attention", "reshape_and_cache", "gather_kv", "copy_blocks", "compute_slot_mapping"]
    files += ["merge_attention_states", "errors", "registration", "hostile_inputs"]
    which = ["-k", "cpu and not opcheck", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *which]
    command += [str(tests / f"test_{file}.py") for file in files]
    environment = {**os.environ, "TORCH_PAGEDKV_DISABLE_NATIVE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout[-5000:]
