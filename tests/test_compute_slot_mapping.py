"""compute_slot_mapping: against the reference, and against the address arithmetic by hand."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import PAGED
from torch_pagedkv import reference

SLOTS = [c for c in PAGED if "window_size" not in c.options]


@pytest.mark.parametrize("case", SLOTS, ids=str)
def test_equals_reference(case, device):
    args, _ = case.build(device).slots
    actual = torch_pagedkv.compute_slot_mapping(*args)
    expected = reference.compute_slot_mapping(*(a.cpu() if isinstance(a, torch.Tensor) else a for a in args))
    assert actual.dtype == torch.int64 and actual.device == args[0].device
    assert torch.equal(actual.cpu(), expected)


def test_by_hand(device):
    table = torch.tensor([[7, 2, 9], [4, 0, -1]], device=device, dtype=torch.int32)
    lengths = torch.tensor([21, 3], device=device, dtype=torch.int32)
    sums = torch.tensor([0, 6, 8], device=device)
    slots = torch_pagedkv.compute_slot_mapping(table, lengths, sums, 16, 10)
    assert slots.tolist() == [127, 32, 33, 34, 35, 36, 65, 66, -1, -1]


def test_slots_past_2_to_the_31(device):
    table = torch.tensor([[2**31 - 1]], device=device, dtype=torch.int32)
    slots = torch_pagedkv.compute_slot_mapping(table, torch.tensor([784], device=device), None, 784, 1)
    assert slots.tolist() == [(2**31 - 1) * 784 + 783]


def test_padded_decode_rows_have_no_slot(device):
    table = torch.tensor([[7], [0]], device=device)
    slots = torch_pagedkv.compute_slot_mapping(table, torch.tensor([3, 0], device=device), None, 16, 2)
    assert slots.tolist() == [114, -1]


@pytest.mark.parametrize(
    "lengths,sums,table,sentence",
    [
        (
            [65, 1],
            [0, 1, 2],
            [[0], [1]],
            r"seqused_k must be in \[0, max_blocks \* block_size = 64\], got 65 at index 0",
        ),
        ([1, -1], [0, 1, 2], [[0], [1]], r"seqused_k must be in .*, got -1 at index 1"),
        ([1, 1], [1, 1, 2], [[0], [1]], "cu_seqlens_q must start at 0, got 1 at index 0"),
        ([1, 1], [0, 2, 1], [[0], [1]], "cu_seqlens_q must not fall, got 1 after 2 at index 2"),
        ([9, 9], [0, 2, 9], [[0], [1]], "cu_seqlens_q must end at or below the number of tokens 5, got 9 at index 2"),
        ([9, 9], [0, 2, 4], [[0], [-3]], r"block_table must not be negative where it is used, got -3 at \[1, 0\]"),
    ],
)
def test_values_out_of_range(lengths, sums, table, sentence, device):
    """CPU raises; CUDA answers with slots that exist, or -1."""
    table = torch.tensor(table, device=device).repeat(1, 4)
    args = (table, torch.tensor(lengths, device=device), torch.tensor(sums, device=device), 16, 5)
    if device == "cpu":
        with pytest.raises(ValueError, match=f"compute_slot_mapping: {sentence}"):
            torch_pagedkv.compute_slot_mapping(*args)
    else:
        slots = torch_pagedkv.compute_slot_mapping(*args)
        assert ((slots >= -1) & (slots < 2 * 16)).all()
