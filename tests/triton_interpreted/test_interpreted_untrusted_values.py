"""What kernels on CUDA make of values that the CPU refuses: skip or clamp, never leave a pool."""

from __future__ import annotations

import torch

from cases import BF16, PAGED, PagedCase
from pools import assert_same_bits
from torch_pagedkv import reference
from torch_pagedkv.triton_kernels import (
    compute_slot_mapping,
    copy_blocks,
    gather_kv,
    paged_attention,
    reshape_and_cache,
)

BAD_IDS = (-1, 7, 2**31 - 1)


def attend(query, cache, table, lengths, starts=None, *, causal=True, num_splits=1):
    out = torch.full_like(query, float("nan"))
    lse = torch.full((query.shape[1], query.shape[0]), float("nan"))
    paged_attention.launch(
        out, lse, query, cache, cache, table, lengths, starts, 0.25, causal, -1, -1, 0.0,
        None, None, None, None, num_splits,
    )  # fmt: skip
    return out, lse


def test_keys_of_ids_outside_the_pool_are_not_seen():
    cache = torch.randn(7, 16, 2, 16)
    query = torch.randn(40, 4, 16)
    lengths = torch.tensor([200])
    blocks = torch.arange(13)[None] % 7
    keys = cache[blocks[0]].flatten(0, 1)[:200].double()
    for bad in BAD_IDS:
        for column in (3, 12):
            table = blocks.clone()
            table[0, column] = bad
            for rows, starts in ((query, torch.tensor([0, 40])), (query[-1:], None)):
                out, lse = attend(rows, cache, table, lengths, starts, num_splits=2)
                hidden = torch.arange(200) // 16 == column
                seen = ~hidden & (torch.arange(200) <= torch.arange(200 - len(rows), 200)[:, None])
                scores = torch.einsum("tgd,nd->gtn", rows[:, :2].double(), keys[:, 0]) * 0.25
                scores = scores.masked_fill(~seen, -torch.inf)
                expected = torch.einsum("gtn,nd->tgd", scores.softmax(-1), keys[:, 0])
                torch.testing.assert_close(out[:, :2].double(), expected, atol=1e-5, rtol=0)
                expected_lse = scores.logsumexp(-1)
                torch.testing.assert_close(lse[:2].double(), expected_lse, atol=1e-5, rtol=0)


def test_lengths_are_clamped_to_the_table():
    cache = torch.randn(5, 4, 2, 16)
    query = torch.randn(2, 4, 16)
    table = torch.tensor([[3, 1], [4, 0]])
    clamped = attend(query, cache, table, torch.tensor([8, 0]))
    unclamped = attend(query, cache, table, torch.tensor([2**40, -5]))
    for first, second in zip(unclamped, clamped, strict=True):
        assert_same_bits(first, second)
    gathered = [torch.empty(2, 8, 2, 16) for _ in range(2)]
    gather_kv.launch(*gathered, cache, cache, table, torch.tensor([2**40, -5]), None, None)
    expected, _ = reference.gather_kv(cache, cache, table, torch.tensor([8, 0]))
    assert_same_bits(gathered[0], expected)


def test_prefix_sums_that_fall_or_pass_the_end_write_rows_of_the_output_only():
    cache = torch.randn(5, 4, 1, 16)
    table, lengths = torch.tensor([[3, 1], [4, 0]]), torch.tensor([8, 8])
    for starts in ([0, 9, 40], [0, 3, 1], [-7, 2, 5], [2, 3, 90], [5, 5, 5]):
        guarded = torch.full((9, 2, 16), 7.0)
        query, lse = torch.randn(5, 2, 16), torch.zeros(2, 5)
        paged_attention.launch(
            guarded[2:7], lse, query, cache, cache, table, lengths, torch.tensor(starts), 0.25,
            True, -1, -1, 0.0, None, None, None, None, 1,
        )  # fmt: skip
        assert (guarded[:2] == 7).all() and (guarded[7:] == 7).all()
        slots = torch.full((7,), 77)
        compute_slot_mapping.launch(slots[1:6], table, lengths, torch.tensor(starts), 4)
        assert slots[0] == slots[6] == 77 and (slots[1:6] < 20).all() and (slots[1:6] >= -1).all()


def test_ids_and_slots_outside_the_pool_are_skipped():
    guarded = torch.zeros(9, 4, 2, 16)
    cache = guarded[1:8]
    cache.normal_()
    before = guarded.clone()
    rows = torch.ones(4, 2, 16)
    slots = torch.tensor([28, 2**40, -(2**40), 2**31])
    reshape_and_cache.launch(rows, rows, cache, cache, slots, None, None)
    sources, destinations = torch.tensor([0, 7, -1, 2**40]), torch.tensor([7, 1, 2, 3])
    copy_blocks.launch(cache, cache, sources, destinations)
    assert_same_bits(guarded, before)
    for bad in BAD_IDS:
        gathered = [torch.empty(1, 8, 2, 16) for _ in range(2)]
        table, lengths = torch.tensor([[bad, 2]]), torch.tensor([7])
        gather_kv.launch(*gathered, cache, cache, table, lengths, None, None)
        assert (gathered[0][0, :4] == 0).all() and (gathered[0][0, 4:7] == cache[2, :3]).all()
    mapped = torch.empty(1, dtype=torch.int64)
    compute_slot_mapping.launch(mapped, torch.tensor([[2, -3]]), torch.tensor([6]), None, 4)
    assert mapped.item() == -1


def test_a_wider_table_changes_no_bit_though_splits_are_chosen_by_its_width():
    case = PagedCase(name="wide", kv_lens=[700, 90], num_heads=2, num_kv_heads=1, dtype=BF16)
    results = []
    for extra_columns in (0, 200):
        batch = case.with_(extra_columns=extra_columns).build("cpu")
        (query, key_cache, value_cache, table, lengths, _), _ = batch.attention
        out, lse = torch.empty_like(query, memory_format=torch.contiguous_format), torch.empty(2, 2)
        paged_attention.launch(
            out, lse, query, key_cache, value_cache, table, lengths, None, 0.125, True, -1, -1,
            0.0, None, None, None, None, 0,
        )  # fmt: skip
        results.append((out, lse))
    for first, second in zip(*results, strict=True):
        assert_same_bits(first, second)


def test_cases_leave_nothing_of_the_output_as_it_was():
    for case in PAGED:
        if case.name in ("empty_ranges", "query_longer_than_keys", "only_padding", "all_lengths_0"):
            batch = case.build("cpu")
            arguments, _ = batch.attention
            out, lse = attend(batch.query.contiguous(), batch.key_cache, *arguments[3:])
            assert not out.isnan().any() and not lse.isnan().any()
