"""Prefill as Hopper's kernel takes it: many tiles of rows and keys, and where its shortcuts could show."""

from __future__ import annotations

import pytest
import torch

from cases import BF16, FP16, PagedCase
from devices import needs_cuda
from pools import LAYOUTS, assert_all_same_bits, assert_same_bits
from test_paged_attention import attend, attend_as_reference, expect, largest_value, permute_blocks, refilled, slots_of
from tolerances import assert_close, assert_close_lse
from torch_pagedkv.ops.kernel_choice import TAKES_ALL, TAKES_SHORT, cuda_attention, cuda_attention_takes

# Chunks that end inside tiles of 32 to 128 tokens and of 128 keys, and beside them decodes.
LENGTHS = {"kv_lens": [700, 257, 40, 300, 1], "query_lens": [300, 257, 1, 33, 1]}
CASES = [
    PagedCase(name="bf16_64", dtype=BF16, head_dim=64, **LENGTHS),
    PagedCase(name="bf16_128", dtype=BF16, head_dim=128, **LENGTHS),
    PagedCase(name="fp16_64", dtype=FP16, head_dim=64, **LENGTHS),
    PagedCase(name="fp16_128", dtype=FP16, head_dim=128, **LENGTHS),
    PagedCase(name="bf16_256", dtype=BF16, head_dim=256, **LENGTHS),
    PagedCase(name="bf16_96", dtype=BF16, head_dim=96, **LENGTHS),
    PagedCase(name="fp16_40", dtype=FP16, head_dim=40, block_size=8, **LENGTHS),
    PagedCase(name="value_dim", dtype=BF16, head_dim=192, value_head_dim=128, **LENGTHS),
    PagedCase(name="wider_values", dtype=BF16, head_dim=64, value_head_dim=112, **LENGTHS),
    PagedCase(name="fp16_256_window", dtype=FP16, head_dim=256, options={"window_size": (150, 0)}, **LENGTHS),
    PagedCase(name="long", kv_lens=[1500], query_lens=[1400], dtype=BF16, head_dim=128, num_heads=2, num_kv_heads=1),
    PagedCase(name="one_head", dtype=BF16, head_dim=128, num_heads=2, num_kv_heads=2, **LENGTHS),
    PagedCase(name="groups_of_4", dtype=BF16, head_dim=128, num_heads=8, num_kv_heads=2, **LENGTHS),
    PagedCase(name="groups_of_5", dtype=BF16, head_dim=64, num_heads=5, num_kv_heads=1, **LENGTHS),
    PagedCase(name="groups_of_17", dtype=BF16, head_dim=128, num_heads=17, num_kv_heads=1, **LENGTHS),
    PagedCase(name="block_size_1", dtype=BF16, head_dim=128, block_size=1, **LENGTHS),
    PagedCase(name="block_size_7", dtype=BF16, head_dim=64, block_size=7, **LENGTHS),
    PagedCase(name="block_size_48", dtype=BF16, head_dim=128, block_size=48, **LENGTHS),
    PagedCase(name="block_size_128", dtype=BF16, head_dim=128, block_size=128, **LENGTHS),
    PagedCase(name="block_size_256", dtype=BF16, head_dim=64, block_size=256, **LENGTHS),
    PagedCase(name="window", dtype=BF16, head_dim=128, options={"window_size": (150, 0)}, **LENGTHS),
    PagedCase(name="window_inside", dtype=BF16, head_dim=64, options={"window_size": (5, 0)}, **LENGTHS),
    PagedCase(name="not_causal", dtype=BF16, head_dim=128, options={"causal": False}, **LENGTHS),
    PagedCase(name="both_windows", dtype=BF16, head_dim=128, options={"causal": False, "window_size": (90, 60)},
              **LENGTHS),
    PagedCase(name="softcap", dtype=BF16, head_dim=128, options={"softcap": 2.0}, **LENGTHS),
    PagedCase(name="sinks", dtype=BF16, head_dim=128, sinks=[0.5, -torch.inf, 3.0, 40.0], **LENGTHS),
    PagedCase(name="alibi", dtype=BF16, head_dim=64, alibi=True, **LENGTHS),
    PagedCase(name="large_scale", dtype=BF16, head_dim=64, options={"softmax_scale": 3.0}, **LENGTHS),
    PagedCase(name="all_options", dtype=FP16, head_dim=128, alibi=True, sinks=[1.0, 0.0], num_heads=6, padding_rows=3,
              options={"window_size": (300, 0), "softcap": 5.0}, **LENGTHS),
    PagedCase(name="rows_without_keys", kv_lens=[0, 20, 130], query_lens=[40, 90, 140], dtype=BF16, head_dim=128,
              padding_rows=40, sinks=[0.5, -torch.inf]),
    PagedCase(name="many_sequences", kv_lens=[3 + 37 * (i % 9) for i in range(70)], dtype=BF16, head_dim=64,
              query_lens=[1 + (i * 7 % 3) * 17 for i in range(70)]),
    # As many tokens as if no sequence were long.
    PagedCase(name="one_is_long", kv_lens=[600] + [5 + i % 40 for i in range(200)], query_lens=[544] + [1] * 200,
              dtype=BF16, head_dim=128, num_heads=32, num_kv_heads=8),
    PagedCase(name="wide_indices", dtype=BF16, head_dim=128, table_dtype=torch.int64, length_dtype=torch.int64,
              **LENGTHS),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prefill_equals_float64_reference(case, device):
    """The same bits again, in other layouts, in another order of blocks and with other bytes where nobody looks."""
    batch = case.build(device)
    out, lse = attend_as_reference(batch)
    if device == "cpu":
        return
    for layout in LAYOUTS if case in CASES[:5] else ("HND", "offset"):
        assert_all_same_bits(attend(case.with_(layout=layout).build(device)), (out, lse))
    for byte in (0x00, 0xFF):
        assert_all_same_bits(attend(refilled(batch, byte)), (out, lse))
    permute_blocks(batch)
    assert_all_same_bits(attend(batch), (out, lse))


@needs_cuda
@pytest.mark.parametrize("case", CASES, ids=str)
def test_which_long_sequences_are_left_to_triton(case):
    """Those that Triton reads as fast or faster, and all where the GPU is not Hopper's."""
    if cuda_attention(0) is None:
        pytest.skip("CUDA C++: the library was not built (make cuda)")
    is_even = case.value_head_dim in (None, case.head_dim) and case.block_size % 16 == 0
    is_taken = is_even and case.head_dim in (64, 128, 256) and torch.cuda.get_device_capability()[0] == 9
    arguments = case.build("cuda").attention[0]
    assert int(cuda_attention_takes()(*arguments[:4])) == (TAKES_ALL if is_taken else TAKES_SHORT)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("value", [1e3, float("nan"), float("inf")])
@pytest.mark.parametrize("window", [(-1, -1), (70, 0)], ids=["causal", "window"])
def test_hidden_keys_change_no_bit_of_a_row(value, window, head_dim, device):
    """NaN and infinities reach the rows that see them, and no other row of the same tile."""
    case = PagedCase(name="hidden", kv_lens=[400], query_lens=[200], dtype=BF16, head_dim=head_dim)
    batch = case.with_(options={"window_size": window}).build(device)
    expected, expected_lse = attend(batch)
    row = 100
    hidden = [*range(200 + row + 1, 400)] + (list(range(200 + row - 70)) if window[0] > 0 else [])
    for block, offset in [slots_of(batch.tables[0], 400, 16)[p] for p in hidden]:
        batch.key_cache[block, offset] = value
        batch.value_cache[block, offset] = value
    out, lse = attend(batch)
    assert_same_bits(out[row], expected[row])
    assert_same_bits(lse[:, row].contiguous(), expected_lse[:, row].contiguous())
    if value != 1e3:
        assert not out[row + 1 :].float().isfinite().any()


@pytest.mark.parametrize("position", [3, 150, 290, 399])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_visible_values_that_are_not_finite_reach_the_output(value, position, device):
    batch = PagedCase(name="visible", kv_lens=[400], query_lens=[200], dtype=BF16, head_dim=128).build(device)
    block, offset = slots_of(batch.tables[0], 400, 16)[position]
    batch.value_cache[block, offset, 1, 3] = value
    out, _ = attend(batch)
    expected, _ = expect(batch)
    assert_close(out, expected, largest=5.0)
    assert not out[-1, 2, 3].isfinite() and out[-1, 0].isfinite().all()


@pytest.mark.parametrize("entry", [-1, 2**31 - 1])
def test_blocks_outside_the_pool_are_not_seen(entry, device):
    """Their keys count for nothing: the rest is as if the window began after them."""
    if device == "cpu":
        pytest.skip("the CPU refuses such entries")
    case = PagedCase(name="outside", kv_lens=[400], query_lens=[100], dtype=BF16, head_dim=128, block_size=16)
    batch = case.build(device)
    batch.block_table[0, 3] = entry
    out, lse = attend(batch)
    hidden = case.build(device)
    for block, offset in slots_of(hidden.tables[0], 64, 16)[48:]:
        hidden.key_cache[block, offset] = 0.0
        hidden.value_cache[block, offset] = 0.0
    expected_out, expected_lse = expect(hidden)
    # Keys of zeros have the weight exp(0) and no value: take it out of the sums.
    kept = -torch.expm1(torch.log(torch.tensor(16.0)) - expected_lse)
    assert_close_lse(lse, expected_lse + torch.log(kept))
    assert_close(out, expected_out / kept.T.unsqueeze(-1), largest=largest_value(hidden))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_queries_at_any_address(head_dim, device):
    """Rows that the copy engine does not take give the bits of those that it does."""
    case = PagedCase(name="address", dtype=BF16, head_dim=head_dim, padding_rows=2, **LENGTHS)
    batch = case.build(device)
    expected = attend(batch)
    for shift in (1, 2, 4):
        wide = torch.full((*batch.query.shape[:2], head_dim + 9), float("nan"), dtype=BF16, device=device)
        wide[..., shift : shift + head_dim] = batch.query
        batch.query = wide[..., shift : shift + head_dim]
        assert_all_same_bits(attend(batch), expected)


def test_a_row_of_a_chunk_does_not_depend_on_its_batch(device):
    alone = PagedCase(name="alone", kv_lens=[500], query_lens=[140], dtype=BF16, head_dim=128).build(device)
    expected, expected_lse = attend(alone)
    for neighbours, query_lens in (([70] * 20, [1] * 20), ([900, 33], [700, 33])):
        lens, rows = [*neighbours, 500], sum(query_lens)
        batch = alone.case.with_(kv_lens=lens, query_lens=[*query_lens, 140]).build(device)
        batch.query[rows:] = alone.query
        sources = slots_of(alone.tables[0], 500, 16)
        for target, source in zip(slots_of(batch.tables[-1], 500, 16), sources, strict=True):
            batch.key_cache[target] = alone.key_cache[source]
            batch.value_cache[target] = alone.value_cache[source]
        out, lse = attend(batch)
        assert_same_bits(out[rows:], expected)
        assert_same_bits(lse[:, rows:].contiguous(), expected_lse)


@pytest.mark.parametrize("magnitude", [4400.0, 1e10, 1e30, 3e38])
def test_scores_of_any_size(magnitude, device):
    """Rows of a chunk whose scores overflow: a row that sees one key gives its value."""
    batch = PagedCase(name="extreme", kv_lens=[40, 40], query_lens=[40, 40], dtype=BF16, head_dim=128).build(device)
    for row, sign in ((0, 1.0), (1, -1.0)):
        for block, offset in slots_of(batch.tables[row], 40, 16):
            batch.key_cache[block, offset] = sign * magnitude
    batch.query.fill_(magnitude)
    out, lse = attend(batch)
    assert lse.isfinite().all()
    for row, blocks in ((0, batch.tables[0]), (40, batch.tables[1])):
        assert_same_bits(out[row], batch.value_cache[blocks[0], 0].repeat_interleave(2, 0))
    expected, _ = expect(batch)
    assert_close(out, expected, largest=5.0)


@pytest.mark.parametrize("growth", [1.0, 6.0, 60.0])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_maxima_that_grow_from_tile_to_tile(dtype, growth, device):
    """Weights are relative to a maximum that lags behind, or to a new one at every tile."""
    batch = PagedCase(name="growing", kv_lens=[1000], query_lens=[200], dtype=dtype, head_dim=128).build(device)
    for position, (block, offset) in enumerate(slots_of(batch.tables[0], 1000, 16)):
        batch.key_cache[block, offset] *= growth * position / 1000
    attend_as_reference(batch)


def test_replayed_graph_takes_new_lengths(device):
    if device == "cpu":
        pytest.skip("CUDA graphs")
    case = PagedCase(name="graph", kv_lens=[500, 300], query_lens=[200, 100], dtype=BF16, head_dim=128)
    batch = case.build(device)
    attend(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = attend(batch)
    batch.seqused_k.copy_(torch.tensor([450, 120]))
    batch.cu_seqlens_q.copy_(torch.tensor([0, 60, 160]))
    graph.replay()
    expected, expected_lse = attend(batch)
    assert_same_bits(out, expected)
    assert_same_bits(lse, expected_lse)
