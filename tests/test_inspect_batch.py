"""inspect.check: a sound batch has no findings, and each fault has its sentence."""

from __future__ import annotations

import pytest
import torch

from torch_pagedkv import BlockAllocator, PagedBatch, inspect

SIZES = {"block_size": 4, "num_blocks": 8}


def make(tables, lengths, queries=None, device="cpu") -> PagedBatch:
    return PagedBatch.from_sequences(tables, lengths, queries, block_size=4, device=device)


@pytest.mark.parametrize(
    "batch",
    [
        make([], []),
        make([[7, 2, 1]], [9]),
        make([[7, 2, 1], [5]], [9, 3], [4, 3]),
        make([[7, 2, 1], [7, 2, 3]], [9, 10], [1, 2]),  # a prefix that is only read
        make([[-1, 2, 1]], [9]),  # a released block
        make([[7], [], [3]], [2, 0, 4], [0, 0, 4]),
        PagedBatch.fixed(3, 2),
        PagedBatch.fixed(3, 2, 5),
    ],
)
def test_sound_batches_have_no_findings(batch):
    assert inspect.check(batch, **SIZES) == []


def test_padding_of_a_fixed_batch_is_sound(device):
    for batch in (PagedBatch.fixed(4, 3, device=device), PagedBatch.fixed(4, 3, 9, device=device)):
        batch.update_([[7, 2], [5]], [5, 3], block_size=4)
        assert inspect.check(batch, **SIZES) == []


def test_a_generation_loop_is_sound():
    allocator = BlockAllocator(8)
    tables = [allocator.allocate(2), allocator.allocate(1)]
    assert inspect.check(make(tables, [7, 2], [7, 2]), allocator, block_size=4) == []
    allocator.share(tables[0][:1])
    fork = [tables[0][0], *allocator.allocate(1)]
    assert inspect.check(make([*tables, fork], [8, 3, 8]), allocator, block_size=4) == []


def changed(field: str, index, value) -> PagedBatch:
    batch = make([[7, 2, 1], [5]], [9, 3], [4, 3])
    getattr(batch, field)[index] = value
    return batch


FAULTS = {
    "slot 25 of token 1 disagrees with the table: position 6 of sequence 0 belongs into slot 10": (
        changed("slot_mapping", 1, 25)
    ),
    "slot 32 of token 1 lies outside of the pool's 32 slots": changed("slot_mapping", 1, 32),
    "slot -1 of token 1 stores nothing: position 6 of sequence 0 would stay unwritten": changed("slot_mapping", 1, -1),
    "cu_seqlens_q starts at 1, not at 0": changed("cu_seqlens_q", 0, 1),
    "cu_seqlens_q ends at 8, past the batch's 7 tokens": changed("cu_seqlens_q", 2, 8),
    "cu_seqlens_q falls from 4 to 3 at sequence 1": changed("cu_seqlens_q", 2, 3),
    "sequence 1 has a negative length, -3": changed("seqused_k", 1, -3),
    "sequence 0 has 13 tokens, past its table's 3 blocks of 4": changed("seqused_k", 0, 13),
    "sequence 1 has 3 new tokens, more than its length 2 that includes them": changed("seqused_k", 1, 2),
    "sequence 0 names block 8 at 0, outside of the pool's 8 blocks": changed("block_table", (0, 0), 8),
    "sequence 0 names block 2 2 times: its tokens would overwrite each other": changed("block_table", (0, 0), 2),
    "position 5 of sequence 0 is new, and its table names no block there (-1)": changed("block_table", (0, 1), -1),
    "sequence 0 writes into block 5, which sequence 1 names too: copy it first": changed("block_table", (0, 2), 5),
    "slot 10 is given twice, to tokens 1 and 2": changed("slot_mapping", 2, 10),
}


@pytest.mark.parametrize("sentence", FAULTS)
def test_faults(sentence):
    assert sentence in inspect.check(FAULTS[sentence], **SIZES)


def test_a_single_fault_has_a_single_finding():
    assert len(inspect.check(changed("slot_mapping", 1, 25), **SIZES)) == 1
    assert len(inspect.check(changed("seqused_k", 0, 13), **SIZES)) == 1


def test_padding_rows_with_slots():
    batch = PagedBatch.fixed(2, 3, 5)
    batch.update_([[7]], [2], [2], block_size=4)
    batch.slot_mapping[4] = 3
    assert inspect.check(batch, **SIZES) == ["slot 3 of token 4 is a padding row's, which should have none (-1)"]


def test_ownership():
    allocator = BlockAllocator(8)
    first, second = allocator.allocate(3), allocator.allocate(1)
    taken = make([first, [first[0], *second]], [9, 5])
    assert inspect.check(taken, allocator, block_size=4) == [
        "block 0 is not shared by so many: sequences 0 and 1 name it, and its owners are 1"
    ]
    assert inspect.check(make([first, [6, 7]], [9, 5]), allocator, block_size=4) == [
        "block 6 is free, and sequence 1 names it",
        "block 7 is free, and sequence 1 names it",
    ]
    allocator.share(first)
    assert inspect.check(make([first], [9]), allocator, block_size=4) == [
        "sequence 0 writes into block 2, which has 2 owners: copy it first"
    ]
    both = inspect.check(make([first, first], [9, 9]), allocator, block_size=4)
    assert both == [
        "sequence 0 writes into block 2, which sequence 1 names too: copy it first",
        "sequence 1 writes into block 2, which sequence 0 names too: copy it first",
        "slot 8 is given twice, to tokens 0 and 1",
    ]


def test_refusals():
    batch = make([[7]], [1])
    with pytest.raises(TypeError, match="check: batch must be a PagedBatch, got list"):
        inspect.check([], block_size=4)
    with pytest.raises(TypeError, match="check: allocator must be a BlockAllocator or None, got int"):
        inspect.check(batch, 3, block_size=4)
    with pytest.raises(ValueError, match="check: block_size must be >= 1, got 0"):
        inspect.check(batch, block_size=0)
    wrong = PagedBatch(batch.block_table, torch.zeros(2).int(), None, batch.slot_mapping)
    with pytest.raises(ValueError, match="check: seqused_k must have 1 elements, got 2"):
        inspect.check(wrong, block_size=4)
    wrong = PagedBatch(batch.block_table, torch.zeros(1), None, batch.slot_mapping)
    with pytest.raises(ValueError, match=r"check: seqused_k must hold integers in 1 dimensions, got torch\.float32"):
        inspect.check(wrong, block_size=4)
