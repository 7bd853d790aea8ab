"""_split_shared_prefix: CUDA's one kernel says what the PyTorch of the reference says, to the bit."""

from __future__ import annotations

import os

import pytest
import torch

from torch_pagedkv.ops import shared_prefix
from torch_pagedkv.reference.shared_prefix import split_shared_prefix

OP = torch.ops.torch_pagedkv._split_shared_prefix.default
# (lengths, prefix sums or None, sequences whose tables begin otherwise)
BATCHES = {
    "all_share": ([70, 60, 48], None, ()),
    "first_is_short": ([20, 70, 0, 47, 90], None, ()),
    "first_is_other": ([70, 60, 90], None, (0,)),
    "nobody_is_long_enough": ([20, 0, 47], None, ()),
    "one": ([70], None, ()),
    "chunks": ([70, 53, 90, 61], [0, 7, 12, 13, 26], ()),
    "a_query_in_the_prefix": ([54, 53, 60], [0, 7, 12, 42], ()),
    "no_queries": ([70, 53, 90], [0, 0, 5, 5], (1,)),
    "values_out_of_range": ([-5, 10**6, 70], [3, 1, 900, 2], ()),
    "many": ([40 + i % 50 for i in range(300)], None, tuple(range(0, 300, 7))),
}


def build(name, device, table_dtype=torch.int32, length_dtype=torch.int32, columns=9):
    lengths, sums, others = BATCHES[name]
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 1000, (len(lengths), columns + 3), generator=generator, dtype=table_dtype)
    table = wide[:, 1 : columns + 1]  # a slice of a wider table
    table[:, :3] = table[0, :3].clone()
    for i in others:
        table[i, 2] = 1000
    batch = [table, torch.tensor(lengths, dtype=length_dtype)]
    batch.append(None if sums is None else torch.tensor(sums, dtype=torch.int64))
    return [None if t is None else t.to(device) for t in batch]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [1, 3, 9])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_reference(name, blocks, causal, device):
    batch = build(name, device)
    sizes = (blocks, 16, len(BATCHES[name][0]), causal)
    for actual, expected in zip(OP(*batch, *sizes), split_shared_prefix(*batch, *sizes), strict=True):
        assert actual.dtype == expected.dtype and actual.is_contiguous()
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("blocks", [1024, 1500, 2500])
def test_long_tables(blocks, device):
    """More columns than a program takes at once; the last block of the prefix decides too."""
    table = torch.arange(2600).expand(3, -1).clone()
    table[1, blocks - 1] += 1
    batch = (table.to(device), torch.full((3,), 2600 * 4, device=device, dtype=torch.int64), None)
    actual = OP(*batch, blocks, 4, 3, True)
    assert actual[5].tolist() == [True, False, True]
    for mine, expected in zip(actual, split_shared_prefix(*batch, blocks, 4, 3, True), strict=True):
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [(torch.int32, torch.int64), (torch.int64, torch.int32)], ids=str)
def test_dtypes_of_the_batch_are_kept(dtypes, device):
    batch = build("first_is_other", device, *dtypes)
    parts = OP(*batch, 3, 16, 3, True)
    assert [p.dtype for p in parts] == [dtypes[0], dtypes[1], torch.int32, dtypes[0], dtypes[1], torch.bool]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="opcheck traces")
@pytest.mark.parametrize("name", ["all_share", "chunks"])
def test_opcheck(name, device):
    torch.library.opcheck(OP, (*build(name, device), 3, 16, len(BATCHES[name][0]), True))


def test_refusals():
    table, lengths, _ = build("all_share", "cpu")
    for sentence, arguments in {
        "num_prefix_blocks must be in [0, 9], got 10": (table, lengths, None, 10, 16, 3, True),
        "block_table must have a row, got 0": (table[:0], lengths[:0], None, 3, 16, 0, True),
        "query must have less than 2**31 tokens, got 2147483648": (table, lengths, None, 3, 16, 2**31, True),
    }.items():
        with pytest.raises(ValueError) as refusal:
            OP(*arguments)
        assert str(refusal.value) == f"{shared_prefix._OWNER}: {sentence}"
