"""Properties over random cases; hypothesis prints the case that fails as a row of cases.py.

The examples are the same in every run. For more of them, and others in each run, say how many:
TORCH_PAGEDKV_EXAMPLES=5000 python -m pytest tests/test_properties.py
"""

from __future__ import annotations

import os

import pytest
import torch

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import torch_pagedkv  # noqa: E402
from pools import LAYOUTS, assert_same_bits, bits  # noqa: E402
from strategies import (  # noqa: E402
    DTYPES,
    HEAD_DIMS,
    INDEX_DTYPES,
    long_cases,
    paged_cases,
    write_cases,
)
from test_copy_blocks import filled  # noqa: E402
from test_merge_attention_states import parts  # noqa: E402
from test_paged_attention import attend, expect, largest_value, permute_blocks, refilled  # noqa: E402
from tolerances import assert_close, assert_close_lse  # noqa: E402
from torch_pagedkv import reference  # noqa: E402
from torch_pagedkv.reference.paged_attention import visible_keys  # noqa: E402
from torch_pagedkv.reference.quantisation import quantise  # noqa: E402

EXAMPLES = os.environ.get("TORCH_PAGEDKV_EXAMPLES")
SEEDS = st.integers(0, 3)


def examples(count: int):
    """Run ``count`` fixed examples, or as many random ones as the environment asks for."""
    return settings(
        max_examples=int(EXAMPLES or count),
        derandomize=EXAMPLES is None,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def on_cpu(arguments):
    args, options = arguments
    move = lambda value: value.cpu() if isinstance(value, torch.Tensor) else value  # noqa: E731
    return [move(value) for value in args], {name: move(value) for name, value in options.items()}


@examples(600)
@given(case=paged_cases(), seed=SEEDS)
def test_attention_equals_float64_reference(case, seed, device):
    batch = case.build(device, seed)
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@examples(60)
@given(case=long_cases())
def test_chunks_and_splits_equal_float64_reference(case, device):
    batch = case.build(device)
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@examples(150)
@given(case=paged_cases() | long_cases(), data=st.data())
def test_a_sequence_alone_has_the_bits_that_it_has_in_its_batch(case, data, device):
    """With num_splits 1, that is; on CPU always."""
    splits = 1 if device == "cuda" else case.options.get("num_splits", 0)
    batch = case.with_(options={**case.options, "num_splits": splits}).build(device)
    if not case.kv_lens:
        return
    sequence = data.draw(st.integers(0, len(case.kv_lens) - 1), label="sequence")
    query_lens = case.query_lens or [1] * len(case.kv_lens)
    start = sum(query_lens[:sequence])
    rows = slice(start, start + query_lens[sequence])
    one, (args, options) = slice(sequence, sequence + 1), batch.attention
    out, lse = attend(batch)
    sums = None if case.query_lens is None else args[5].new_tensor([0, query_lens[sequence]])
    alone, alone_lse = torch_pagedkv.paged_attention(
        args[0][rows], *args[1:3], args[3][one], args[4][one], sums, **options, return_lse=True
    )
    assert_same_bits(alone, out[rows])
    assert_same_bits(alone_lse, lse[:, rows].contiguous())


@examples(400)
@given(case=paged_cases(), layout=st.sampled_from(LAYOUTS), byte=st.sampled_from([0, 0x3C, 0x7F, 0xFF]))
def test_nothing_that_should_not_matter_changes_a_bit(case, layout, byte, device):
    """Strides, the order of blocks, and what stands where no sequence has stored anything."""
    batch = case.build(device)
    expected = attend(batch)
    moved = case.with_(layout=layout).build(device)
    permute_blocks(moved)
    for other in (moved, refilled(batch, byte)):
        for actual, wanted in zip(attend(other), expected, strict=True):
            assert_same_bits(actual, wanted)


@examples(500)
@given(case=paged_cases(), data=st.data(), value=st.sampled_from([1e3, torch.nan, torch.inf]))
def test_hidden_keys_change_no_bit_of_a_row(case, data, value, device):
    """Change everything that one row may not see: its own bits stay."""
    batch = case.build(device)
    if batch.query.shape[0] == 0:
        return
    row = data.draw(st.integers(0, batch.query.shape[0] - 1), label="row")
    expected = attend(batch)
    starts = [0, *torch.tensor(case.query_lens or [1] * len(case.kv_lens)).cumsum(0).tolist()]
    for sequence, blocks in enumerate(batch.tables):
        length, position = (
            case.kv_lens[sequence],
            row + case.kv_lens[sequence] - starts[sequence + 1],
        )
        low = high = 0
        if starts[sequence] <= row < starts[sequence + 1]:
            window = case.options.get("window_size", (-1, -1))
            causal = case.options.get("causal", True)
            low, high = visible_keys(position, length, causal, window)
        for key in range(length):
            if not low <= key < high:
                block, offset = blocks[key // case.block_size], key % case.block_size
                batch.key_cache[block, offset] = value
                batch.value_cache[block, offset] = value
    out, lse = attend(batch)
    assert_same_bits(out[row], expected[0][row])
    assert_same_bits(lse[:, row].contiguous(), expected[1][:, row].contiguous())


@examples(500)
@given(case=paged_cases(windows=False), seed=SEEDS)
def test_gathers_and_slots_equal_the_reference(case, seed, device):
    batch = case.build(device, seed)
    args, scales = on_cpu(batch.gather)
    for actual, wanted in zip(
        torch_pagedkv.gather_kv(*batch.gather[0], **batch.gather[1]),
        reference.gather_kv(*args, **scales),
        strict=True,
    ):
        assert_same_bits(actual.cpu(), wanted)
    slots = torch_pagedkv.compute_slot_mapping(*batch.slots[0])
    assert torch.equal(slots.cpu(), reference.compute_slot_mapping(*on_cpu(batch.slots)[0]))


@examples(800)
@given(case=write_cases(), seed=SEEDS)
def test_writes_equal_the_reference(case, seed, device):
    args, scales, buffers = case.build(device, seed)
    expected_args, expected_scales, expected = case.build("cpu", seed)
    torch_pagedkv.reshape_and_cache(*args, **scales)
    reference.reshape_and_cache(*expected_args, **expected_scales)
    for actual, wanted in zip(buffers, expected, strict=True):
        assert_same_bits(actual.cpu(), wanted)


@examples(300)
@given(case=write_cases(), data=st.data())
def test_a_written_token_is_read_back(case, data, device):
    """Write, and gather through a table that names the token's block: the token, rounded once."""
    args, scales, _ = case.build(device)
    written = {slot: token for token, slot in enumerate(case.slots) if slot >= 0}
    if not written:
        return
    torch_pagedkv.reshape_and_cache(*args, **scales)
    slot = data.draw(st.sampled_from(sorted(written)), label="slot")
    block, offset = divmod(slot, case.block_size)
    table, length = (
        torch.tensor([[block]], device=device),
        torch.tensor([offset + 1], device=device),
    )
    gathered = torch_pagedkv.gather_kv(*args[2:4], table, length, dtype=args[2].dtype)
    (sources, scales), token = on_cpu((args[:2], scales)), written[slot]
    for actual, source, scale in zip(gathered, sources, ("k_scale", "v_scale"), strict=True):
        expected = quantise(source[token], actual.dtype, scales.get(scale))
        assert_same_bits(actual[0, offset].cpu(), expected)


@examples(300)
@given(data=st.data(), layout=st.sampled_from(LAYOUTS), index_dtype=INDEX_DTYPES)
def test_copied_blocks_equal_indexing(data, layout, index_dtype, device):
    dtype = data.draw(DTYPES | st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]))
    sizes = data.draw(st.tuples(st.integers(1, 20), st.integers(1, 4), st.tuples(HEAD_DIMS, HEAD_DIMS)))
    order = data.draw(st.permutations(range(9)))
    targets = order[: data.draw(st.integers(0, 8))]
    sources = [data.draw(st.sampled_from(order[len(targets) :])) for _ in targets]
    key_cache, value_cache, buffers = filled(layout, dtype, device, *sizes)
    *wanted_pools, expected = filled(layout, dtype, "cpu", *sizes)
    for cache in wanted_pools:
        for source, target in zip(sources, targets, strict=True):
            cache[target].copy_(cache[source].clone())
    ids = [torch.tensor(blocks, dtype=index_dtype, device=device) for blocks in (sources, targets)]
    torch_pagedkv.copy_blocks(key_cache, value_cache, *ids)
    for actual, wanted in zip(buffers, expected, strict=True):
        assert_same_bits(actual.cpu(), wanted)


@examples(400)
@given(
    shape=st.tuples(st.integers(0, 20), st.integers(1, 5), HEAD_DIMS),
    dtype=DTYPES,
    empty=st.tuples(*[st.lists(st.integers(0, 99), max_size=10)] * 2),
    seed=SEEDS,
)
def test_merged_states_equal_float64_reference(shape, dtype, empty, seed, device):
    out_a, lse_a, out_b, lse_b = parts(dtype, device, *shape, seed=seed)
    for out, lse, cells in ((out_a, lse_a, empty[0]), (out_b, lse_b, empty[1])):
        for cell in cells:
            if lse.numel():
                head, token = divmod(cell % lse.numel(), shape[0])
                lse[head, token] = -torch.inf
                out[token, head] = torch.nan
    out, lse = torch_pagedkv.merge_attention_states(out_a, lse_a, out_b, lse_b)
    args, _ = on_cpu(((out_a, lse_a, out_b, lse_b), {}))
    expected_out, expected_lse = reference.merge_attention_states(*args, precision=torch.float64)
    assert_close(out, expected_out, largest=5.0)
    assert_close_lse(lse, expected_lse)
    only_a = ((args[3] == -torch.inf) & (args[1] != -torch.inf)).T
    assert torch.equal(bits(out.cpu()[only_a]), bits(args[0][only_a]))
