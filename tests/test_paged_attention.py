"""paged_attention: values against the float64 reference, and the bits that nothing hidden may change."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32, PAGED, PagedCase
from pools import assert_same_bits, poison_
from tolerances import assert_close, assert_close_lse
from torch_pagedkv import reference


def attend(batch, **changes):
    args, options = batch.attention
    return torch_pagedkv.paged_attention(*args, **{**options, **changes}, return_lse=True)


def attend_to_sequences(batch, first, stop):
    """Return (out, lse) of a call with the sequences [first, stop) alone, and which rows of the batch they have."""
    starts = batch.cu_seqlens_q
    rows = slice(int(starts[first]), int(starts[stop]))
    part = copy.copy(batch)
    part.query, part.cu_seqlens_q = batch.query[rows], starts[first : stop + 1] - starts[first]
    part.block_table, part.seqused_k = batch.block_table[first:stop], batch.seqused_k[first:stop]
    return attend(part), rows


@contextlib.contextmanager
def one_thread():
    """The reference's many small products spend their time waiting for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def expect(batch):
    """Return the float64 reference's (out, lse), computed on the CPU."""
    args, options = batch.attention
    args = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
    options = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return reference.paged_attention(*args, **options, precision=torch.float64)


def largest_value(batch) -> float:
    """Return the magnitude of the largest value that the sequences hold, dequantised."""
    cache = batch.value_cache.float().nan_to_num(0.0)
    if "v_scale" in batch.options:
        cache = cache * batch.options["v_scale"].reshape(-1, 1)
    return cache.abs().max().item() if cache.numel() else 0.0


def attend_as_reference(batch):
    """Return (out, lse) of a call, which the float64 reference has within the budget."""
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))
    return out, lse


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_equals_float64_reference(case, device):
    batch = case.build(device)
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert out.dtype == case.dtype and out.is_contiguous() and lse.is_contiguous()
    assert_close_lse(lse, expected_lse)
    assert_close(out, expected_out, largest=largest_value(batch))


@pytest.mark.parametrize("case", PAGED[::3], ids=str)
def test_two_calls_give_the_same_bits(case, device):
    batch = case.build(device)
    for first, second in zip(attend(batch), attend(batch)):
        assert_same_bits(first, second)


CHUNK = next(c for c in PAGED if c.name == "chunk")
LONG = next(c for c in PAGED if c.name == "long_chunks").with_(options={"num_splits": 3})
MIXED = [
    CHUNK.with_(block_size=7),
    LONG,
    CHUNK.with_(dtype=BF16, pool_dtype=E4M3, scales="per_head"),
    CHUNK.with_(dtype=BF16, head_dim=128),
    CHUNK.with_(dtype=BF16, pool_dtype=E4M3, head_dim=128),
    CHUNK.with_(kv_lens=[70, 1, 17, 300], query_lens=None),
]


def refilled(batch, byte: int):
    """Rebuild the batch's pools with every byte that no sequence owns set to ``byte``."""
    changed = batch.case.build(batch.query.device.type)
    for cache, original in ((changed.key_cache, batch.key_cache), (changed.value_cache, batch.value_cache)):
        owned = {
            (block, offset)
            for blocks, length in zip(batch.tables, batch.case.kv_lens)
            for block, offset in slots_of(blocks, length, batch.case.block_size)
        }
        for block in range(cache.shape[0]):
            for offset in range(cache.shape[1]):
                if (block, offset) in owned:
                    cache[block, offset].copy_(original[block, offset])
                else:
                    cache[block, offset].view(torch.uint8).fill_(byte)
    return changed


def slots_of(blocks, length, block_size):
    return [(blocks[p // block_size], p % block_size) for p in range(length)]


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_unwritten_slots_change_no_bit(case, device):
    batch = case.build(device)  # NaN in every slot that no sequence owns
    expected = attend(batch)
    for byte in (0x00, 0x3C, 0xFF):
        for actual, wanted in zip(attend(refilled(batch, byte)), expected):
            assert_same_bits(actual, wanted)


def permute_blocks(batch) -> None:
    """Give every block another place in the pools, and the table their new places."""
    order = torch.randperm(batch.key_cache.shape[0], generator=torch.Generator().manual_seed(1))
    for cache in (batch.key_cache, batch.value_cache):
        moved = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        moved.copy_(moved.clone()[order])
    inverse = torch.argsort(order).to(batch.block_table)
    for row, blocks in enumerate(batch.tables):
        for column, block in enumerate(blocks):
            if batch.block_table[row, column] == block:  # not hidden before a window
                batch.block_table[row, column] = inverse[block]


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_physical_order_changes_no_bit(case, device):
    batch = case.build(device)
    expected = attend(batch)
    permute_blocks(batch)
    for actual, wanted in zip(attend(batch), expected):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("layout", ["HND", "mixed", "unbind", "packed", "packed_hnd", "layers", "padded", "offset"])
@pytest.mark.parametrize("case", MIXED, ids=str)
def test_layout_changes_no_bit(case, layout, device):
    for actual, wanted in zip(attend(case.with_(layout=layout).build(device)), attend(case.build(device))):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_query_strides_change_no_bit(case, device):
    batch = case.build(device)  # a slice of a wider projection
    expected = attend(batch)
    assert not batch.query.is_contiguous()
    for query in (batch.query.contiguous(), batch.query.transpose(0, 1).contiguous().transpose(0, 1)):
        batch.query = query
        for actual, wanted in zip(attend(batch), expected):
            assert_same_bits(actual, wanted)


@pytest.mark.parametrize("num_splits", [0, 1, 2, 8])
@pytest.mark.parametrize("options", [{}, {"window_size": (9, 0)}, {"softcap": 1.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("value", [1e3, float("nan"), float("inf")])
def test_hidden_keys_change_no_bit_of_a_row(value, options, num_splits, device):
    """Row i of a chunk must not notice keys and values after its own position, nor before its window."""
    case = PagedCase(name="hidden", kv_lens=[100], query_lens=[40], options={**options, "num_splits": num_splits})
    batch = case.build(device)
    expected = attend(batch)
    row, position = 20, 80
    hidden = [*range(position + 1, 100)]
    if "window_size" in options:
        hidden += range(position - 9)
    for block, offset in [slots_of(batch.tables[0], 100, 16)[p] for p in hidden]:
        batch.key_cache[block, offset] = value
        batch.value_cache[block, offset] = value
    out, lse = attend(batch)
    assert_same_bits(out[row], expected[0][row])
    assert_same_bits(lse[:, row].contiguous(), expected[1][:, row].contiguous())


@pytest.mark.parametrize("query_lens", [None, [1], [30]], ids=["decode", "one", "chunk"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_visible_values_that_are_not_finite_reach_the_output(value, query_lens, device):
    batch = PagedCase(name="visible", kv_lens=[50], query_lens=query_lens).build(device)
    block, offset = slots_of(batch.tables[0], 50, 16)[45]
    batch.value_cache[block, offset, 1, 3] = value
    out, _ = attend(batch)
    expected, _ = expect(batch)
    assert_close(out, expected, largest=5.0)
    assert not out[-1, 2, 3].isfinite() and out[-1, 0].isfinite().all()


@pytest.mark.parametrize("num_splits", [0, 1])
def test_a_window_as_long_as_the_sequence_is_no_window(num_splits, device):
    for case in (CHUNK, CHUNK.with_(kv_lens=[40, 5, 33, 301], query_lens=None)):
        batch = case.build(device)
        for left in (300, 10**9):
            for actual, wanted in zip(
                attend(batch, window_size=(left, 0), num_splits=num_splits), attend(batch, num_splits=num_splits)
            ):
                assert_same_bits(actual, wanted)


def test_window_of_one_token_returns_its_own_value(device):
    batch = PagedCase(name="own", kv_lens=[33, 7], query_lens=[9, 7], dtype=BF16).build(device)
    out, _ = attend(batch, window_size=(0, 0))
    row = 0
    for length, query_len, blocks in zip([33, 7], [9, 7], batch.tables):
        for block, offset in slots_of(blocks, length, 16)[length - query_len :]:
            assert_same_bits(out[row], batch.value_cache[block, offset].repeat_interleave(2, 0))
            row += 1


@pytest.mark.parametrize("head_dim", [64, 72, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("pool", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_every_fp8_byte_is_read_exactly_on_the_cpu(kv_heads, pool, dtype, head_dim):
    """Each sequence sees its last key alone, which has one element that its query picks."""
    numbers, heads = torch.arange(256), 4 * kv_heads
    factors = torch.tensor([1.0, -1.0, 2.0, 0.5] * kv_heads)
    picked = numbers * 37 % head_dim
    for shift in range(4):  # the keys of a block are not read alike
        byte = (numbers + shift).remainder(256).to(torch.uint8)
        finite = byte.view(pool).float().isfinite()
        keys = torch.zeros(256, head_dim, dtype=torch.uint8)
        keys[numbers, picked] = torch.where(finite, byte, 0)
        values = (byte.int()[:, None] + torch.arange(head_dim)).to(torch.uint8).view(pool)
        query = torch.zeros(256, heads, head_dim, dtype=dtype)
        query[numbers, :, picked] = factors.to(dtype)
        out, lse = torch_pagedkv.paged_attention(
            query,
            keys.view(16, 16, 1, head_dim).repeat(1, 1, kv_heads, 1).view(pool),
            values.view(torch.uint8).view(16, 16, 1, head_dim).repeat(1, 1, kv_heads, 1).view(pool),
            torch.arange(16).expand(256, 16),
            numbers + 1,
            softmax_scale=1.0,
            window_size=(0, 0),
            return_lse=True,
        )
        wanted = values.to(dtype)[:, None].expand_as(out)
        torch.testing.assert_close(out, wanted, rtol=0, atol=0, equal_nan=True)
        scores = torch.where(finite, byte.view(pool).float(), 0)
        assert torch.equal(lse, scores * factors[:, None])


@pytest.mark.parametrize("magnitude", [4400.0, 1e10, 1e30, 3e38])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_one_visible_key_gives_its_value_whatever_its_score(magnitude, dtype, device):
    batch = PagedCase(name="extreme", kv_lens=[1, 1], dtype=dtype).build(device)
    block = batch.tables[0][0]
    batch.key_cache[block, 0] = magnitude
    batch.key_cache[batch.tables[1][0], 0] = -magnitude
    batch.query.fill_(magnitude)
    slopes = torch.ones(4, device=device)
    for softcap, alibi_slopes in ((0.0, None), (50.0, None), (0.0, slopes), (50.0, slopes)):
        out, lse = attend(batch, softcap=softcap, alibi_slopes=alibi_slopes)
        assert_same_bits(out[0], batch.value_cache[block, 0].repeat_interleave(2, 0))
        assert_same_bits(out[1], batch.value_cache[batch.tables[1][0], 0].repeat_interleave(2, 0))
        assert lse.isfinite().all()
        if softcap:
            assert_close_lse(lse[:, 0], torch.full((4,), 50.0).double())


def test_decode_needs_no_causal_mask(device):
    batch = PagedCase(name="decode", kv_lens=[1, 16, 100]).build(device)
    for causal, not_causal in zip(attend(batch), attend(batch, causal=False)):
        assert_same_bits(causal, not_causal)


def test_chunk_equals_single_steps(device):
    """One call with n query tokens sees what n calls with one token each see."""
    batch = PagedCase(name="steps", kv_lens=[100], query_lens=[4]).build(device)
    out, _lse = attend(batch)
    for i in range(4):
        step = torch_pagedkv.paged_attention(
            batch.query[i : i + 1], batch.key_cache, batch.value_cache, batch.block_table, batch.seqused_k - 3 + i
        )
        assert_close(step, out[i : i + 1].double(), largest=5.0)


def test_num_splits_1_is_batch_invariant(device):
    """A row alone, among others, beside a long sequence and beside chunks: the same bits."""
    alone = PagedCase(name="alone", kv_lens=[300], dtype=BF16, options={"num_splits": 1}).build(device)
    expected, expected_lse = attend(alone)
    for neighbours, query_lens in (([70] * 20, None), ([5000], None), ([400, 9], [100, 9])):
        lens = [300, *neighbours]
        case = alone.case.with_(kv_lens=lens, query_lens=None if query_lens is None else [1, *query_lens])
        batch = case.build(device)
        batch.query[0] = alone.query[0]
        for p, (block, offset) in enumerate(slots_of(batch.tables[0], 300, 16)):
            source = slots_of(alone.tables[0], 300, 16)[p]
            batch.key_cache[block, offset] = alone.key_cache[source]
            batch.value_cache[block, offset] = alone.value_cache[source]
        out, lse = attend(batch)
        assert_same_bits(out[0], expected[0])
        assert_same_bits(lse[:, 0].contiguous(), expected_lse[:, 0].contiguous())


def test_sinks_do_not_depend_on_splits(device):
    case = PagedCase(name="sinks", kv_lens=[600, 9, 0], sinks=[0.0, 5.0, -torch.inf, 50.0])
    for options in ({}, {"window_size": (40, 0)}, {"softcap": 3.0}):
        batch = case.with_(options=options).build(device)
        expected_out, expected_lse = expect(batch)
        for num_splits in (0, 1, 2, 8):
            out, lse = attend(batch, num_splits=num_splits)
            assert_close(out, expected_out, largest=5.0)
            assert_close_lse(lse, expected_lse)
            assert out[2].count_nonzero() == 0


def test_no_sink_and_a_sink_of_minus_infinity_agree(device):
    batch = CHUNK.build(device)
    sinks = torch.full((4,), -torch.inf, device=device)
    for actual, wanted in zip(attend(batch, sinks=sinks), attend(batch)):
        assert_same_bits(actual, wanted)


def test_rows_without_keys_overwrite_what_stood_there(device):
    """Outputs come from the allocator: poison what it will hand out."""
    case = next(c for c in PAGED if c.name == "empty_ranges")
    batch = case.build(device)
    for shape in (batch.query.shape, (4, batch.query.shape[0])):
        for _ in range(4):
            poison_(torch.empty(shape, device=device))
    out, lse = attend(batch)
    expected_out, expected_lse = expect(batch)
    assert_close(out, expected_out, largest=5.0)
    assert_close_lse(lse, expected_lse)


def test_inputs_are_not_altered(device):
    batch = CHUNK.with_(padding_rows=2, sinks=[1.0]).build(device)
    args, options = batch.attention
    tensors = [*args, *options.values(), *batch.buffers]
    copies = [t.clone() for t in tensors]
    attend(batch)
    for tensor, before in zip(tensors, copies):
        assert_same_bits(tensor, before)
