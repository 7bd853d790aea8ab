"""Inputs that are legal and that kernels get wrong: odd strides, ends of memory, others' bits."""

from __future__ import annotations

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP32, PAGED, PagedCase, WriteCase
from pools import assert_same_bits, bits, make_pools
from test_paged_attention import attend, expect, largest_value, slots_of
from tolerances import assert_close, assert_close_lse
from torch_pagedkv import reference
from torch_pagedkv.reference.quantisation import quantise

CHUNK = next(c for c in PAGED if c.name == "chunk")
DECODE = next(c for c in PAGED if c.name == "decode")


def assert_all_same_bits(actual, expected) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        assert_same_bits(got, wanted)


def spread(tensor: torch.Tensor, step: int) -> torch.Tensor:
    """Return a copy whose elements stand ``step`` apart in each dimension but the last of a matrix."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] * step), -7, dtype=tensor.dtype, device=tensor.device)
    wide[..., ::step] = tensor
    return wide[..., ::step]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", [CHUNK, DECODE], ids=str)
def test_index_tensors_of_any_stride(case, index_dtype, device):
    """Lengths, prefix sums and slots with other numbers between them; each with a dtype of its own."""
    batch = case.build(device)
    expected = attend(batch), torch_pagedkv.compute_slot_mapping(*batch.slots[0])
    gathered = torch_pagedkv.gather_kv(*batch.gather[0])
    batch.seqused_k = spread(batch.seqused_k.to(index_dtype), 3)
    if batch.cu_seqlens_q is not None:
        batch.cu_seqlens_q = spread(batch.cu_seqlens_q, 2)
    assert_all_same_bits(attend(batch), expected[0])
    assert torch.equal(torch_pagedkv.compute_slot_mapping(*batch.slots[0]), expected[1])
    assert_all_same_bits(torch_pagedkv.gather_kv(*batch.gather[0]), gathered)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_slots_and_block_ids_of_any_stride(index_dtype, device):
    case = WriteCase(name="spread", index_dtype=index_dtype)
    (*args, slots), _, buffers = case.build(device)
    (*expected_args, expected_slots), _, expected = case.build(device)
    torch_pagedkv.reshape_and_cache(*args, spread(slots, 3))
    torch_pagedkv.reshape_and_cache(*expected_args, expected_slots)
    blocks = [torch.tensor(ids, device=device, dtype=index_dtype) for ids in ([0, 3], [1, 4])]
    torch_pagedkv.copy_blocks(*args[2:], *(spread(ids, 2) for ids in blocks))
    torch_pagedkv.copy_blocks(*expected_args[2:], *blocks)
    assert_all_same_bits(buffers, expected)


def test_one_length_for_all_sequences(device):
    """An expanded length, of stride 0."""
    batch = DECODE.with_(kv_lens=[40, 40, 40]).build(device)
    expected = attend(batch)
    batch.seqused_k = batch.seqused_k[:1].expand(3)
    assert_all_same_bits(attend(batch), expected)


@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2])
def test_scales_sinks_and_slopes_of_any_stride_and_float_dtype(pool_dtype, device):
    case = CHUNK.with_(pool_dtype=pool_dtype, scales="per_head", alibi=True, sinks=[0.5, -torch.inf, 2.0, 0.25])
    batch = case.build(device)
    batch.options["alibi_slopes"] = batch.options["alibi_slopes"].to(BF16).float()
    expected = attend(batch)
    gathered = torch_pagedkv.gather_kv(*batch.gather[0], **batch.gather[1])
    for name in ("k_scale", "v_scale"):
        batch.options[name] = spread(batch.options[name], 2)
    assert_all_same_bits(torch_pagedkv.gather_kv(*batch.gather[0], **batch.gather[1]), gathered)
    for dtype in (FP32, BF16, torch.float16, torch.float64):
        changed = {name: spread(batch.options[name].to(dtype), 3) for name in ("sinks", "alibi_slopes")}
        assert_all_same_bits(attend(batch, **changed), expected)
    written = WriteCase(name="scales", dtype=BF16, pool_dtype=pool_dtype, scales="per_head")
    (args, scales, buffers), (wanted_args, wanted_scales, wanted) = (
        written.build(device),
        written.build(device),
    )
    torch_pagedkv.reshape_and_cache(*args, **{name: spread(scale, 2) for name, scale in scales.items()})
    torch_pagedkv.reshape_and_cache(*wanted_args, **wanted_scales)
    assert_all_same_bits(buffers, wanted)


def with_odd_strides(tensor: torch.Tensor, stride: int) -> torch.Tensor:
    """Give dimensions of one element a stride that no address depends on."""
    strides = [stride if size == 1 else own for size, own in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())


@pytest.mark.parametrize("stride", [0, 1, 7, 2**40])
def test_dimensions_of_one_element_have_any_stride(stride, device):
    """One block, one token in it, one head, one element: in pools, tokens, tables and states."""
    for sizes in ({"block_size": 1}, {"num_heads": 3, "num_kv_heads": 1}, {"head_dim": 1}):
        batch = DECODE.with_(kv_lens=[1], extra_columns=0, **sizes).build(device)
        out, lse = attend(batch)
        names = ("key_cache", "value_cache", "query", "block_table", "seqused_k")
        for name in names:
            setattr(batch, name, with_odd_strides(getattr(batch, name), stride))
        assert_all_same_bits(attend(batch), (out, lse))
        state = (with_odd_strides(out, stride), with_odd_strides(lse, stride))
        merged = torch_pagedkv.merge_attention_states(*state, *state)
        assert_all_same_bits(merged, torch_pagedkv.merge_attention_states(out, lse, out, lse))
        key = torch.randn((1, *batch.key_cache.shape[2:]), device=device)
        slots = torch.tensor([batch.tables[0][0] * batch.case.block_size], device=device)
        pools = (batch.key_cache, batch.value_cache)
        torch_pagedkv.reshape_and_cache(with_odd_strides(key, stride), key, *pools, with_odd_strides(slots, stride))
        assert_same_bits(batch.key_cache[batch.tables[0][0], 0], key[0])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_blocks_as_long_as_there_are_heads(layout, device):
    """8 tokens a block and 8 KV heads: shapes do not tell the layouts apart, strides do."""
    case = CHUNK.with_(block_size=8, num_heads=8, num_kv_heads=8, layout=layout)
    out, lse = attend(case.build(device))
    assert_all_same_bits((out, lse), attend(case.with_(layout="padded").build(device)))
    expected_out, expected_lse = expect(case.build(device))
    assert_close(out, expected_out, largest=5.0)
    assert_close_lse(lse, expected_lse)


@pytest.mark.parametrize("lengths", [[64], [65], [129, 16], [1, 128]])
@pytest.mark.parametrize("query_lens", [None, [3, 1]], ids=["decode", "chunks"])
def test_tensors_that_end_their_memory(query_lens, lengths, device):
    """Tables without a spare column, pools without a spare block, in memory of just their size."""
    queries = query_lens and query_lens[: len(lengths)]
    batch = DECODE.with_(kv_lens=lengths, query_lens=queries, extra_columns=0, block_size=16).build(device)
    expected = attend(batch)
    used = max(max(blocks) for blocks in batch.tables) + 1
    for name, size in (("key_cache", used), ("value_cache", used), ("query", None)):
        tensor = getattr(batch, name)[:size]
        setattr(batch, name, torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor))
    table = batch.block_table.where((batch.block_table >= 0) & (batch.block_table < used), -1)
    batch.block_table = torch.empty(table.shape, dtype=table.dtype, device=device).copy_(table)
    assert_all_same_bits(attend(batch), expected)


@pytest.mark.parametrize("pool_dtype", [FP32, BF16, E4M3, E5M2])
@pytest.mark.parametrize("query_lens", [None, [7, 5, 1]], ids=["decode", "chunks"])
def test_bits_of_another_layer_change_nothing(query_lens, pool_dtype, device):
    """Memory that held float32 states, used as a pool of another dtype without being zeroed."""
    dtype = pool_dtype if pool_dtype.itemsize > 1 else FP32
    case = CHUNK.with_(kv_lens=[40, 5, 33], query_lens=query_lens, dtype=dtype, pool_dtype=pool_dtype)
    clean, used = case.build(device), case.build(device)
    for cache, source in ((used.key_cache, clean.key_cache), (used.value_cache, clean.value_cache)):
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(cache.numel(), generator=generator) * 1e3
        states.view(torch.int32)[::5] = torch.randint(-(2**31), 2**31, states[::5].shape, generator=generator).int()
        noise = states.view(torch.uint8)[: cache.numel() * cache.element_size()]
        cache.copy_(noise.view(cache.dtype).view(cache.shape).to(device))
        for length, blocks in zip(case.kv_lens, case.build(device).tables, strict=True):
            for block, offset in slots_of(blocks, length, case.block_size):
                cache[block, offset].copy_(source[block, offset])
    assert_all_same_bits(attend(used), attend(clean))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize(
    "case", [CHUNK, DECODE, CHUNK.with_(block_size=7, dtype=BF16)], ids=["chunk", "decode", "bf16"]
)
def test_a_row_does_not_notice_its_neighbours(value, case, device):
    """A query, a sequence's keys and its values that are not finite stay its own affair."""
    expected_out, expected_lse = attend(case.build(device))
    batch = case.build(device)
    query_lens = case.query_lens or [1] * len(case.kv_lens)
    first, count = sum(query_lens[:2]), query_lens[2]
    for block, offset in slots_of(batch.tables[2], case.kv_lens[2], case.block_size):
        batch.key_cache[block, offset] = value
        batch.value_cache[block, offset] = value
    batch.query[1] = value
    out, lse = attend(batch)
    others = [row for row in range(out.shape[0]) if row != 1 and not first <= row < first + count]
    assert_same_bits(out[others], expected_out[others])
    assert_same_bits(lse[:, others], expected_lse[:, others])


def test_tables_of_sequences_without_a_query_are_not_read(device):
    """Nor do their entries, whatever they are, keep the call from running."""
    case = CHUNK.with_(kv_lens=[40, 5, 33], query_lens=[3, 0, 2])
    batch = case.build(device)
    expected = attend(batch), torch_pagedkv.compute_slot_mapping(*batch.slots[0])
    batch.block_table[1] = -5
    batch.block_table[1, 0] = 2**31 - 1
    assert_all_same_bits(attend(batch), expected[0])
    assert torch.equal(torch_pagedkv.compute_slot_mapping(*batch.slots[0]), expected[1])


@pytest.mark.parametrize("num_splits", [0, 1, 8])
@pytest.mark.parametrize("query_lens", [None, [40]], ids=["decode", "chunk"])
@pytest.mark.parametrize("loud", [0, 1])
def test_parts_of_very_different_scores(loud, query_lens, num_splits, device):
    """A sequence one half of which has scores hundreds above the other's, in any order of the parts."""
    case = PagedCase(name="loud", kv_lens=[2600], query_lens=query_lens, num_heads=2, num_kv_heads=1, head_dim=16)
    batch = case.build(device)
    places = slots_of(batch.tables[0], 2600, 16)
    for position in range(1300 * loud, 1300 * loud + 1250):
        block, offset = places[position]
        batch.key_cache[block, offset] *= 500
    out, lse = attend(batch, num_splits=num_splits)
    expected_out, expected_lse = expect(batch)
    assert lse.max() > 500 and out.isfinite().all()
    assert_close(out, expected_out, largest=200.0)  # scores of thousands keep few bits after the point
    assert_close_lse(lse, expected_lse)


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("case", [CHUNK, DECODE], ids=str)
def test_sinks_of_any_size(case, num_splits, device):
    """One that takes all the weight, one that takes none: neither overflows."""
    batch = case.with_(sinks=[1e4, -1e4, 3e38, -3e38]).build(device)
    out, lse = attend(batch, num_splits=num_splits)
    without_out, without_lse = attend(batch, sinks=None, num_splits=num_splits)
    assert out[:, ::2].count_nonzero() == 0
    assert (lse[0] == 1e4).all() and (lse[2] == 3e38).all()
    for got, wanted in ((out[:, 1::2], without_out[:, 1::2]), (lse[1::2], without_lse[1::2])):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("block_size", [272, 544, 1056, 2112])
def test_block_sizes_that_no_tile_divides(block_size, device):
    lengths = [block_size - 1, block_size, block_size + 1, 2 * block_size + 1]
    case = PagedCase(
        name="blocks",
        kv_lens=lengths,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        block_size=block_size,
    )
    for query_lens in (None, [2, 1, 3, 1]):
        batch = case.with_(query_lens=query_lens).build(device)
        out, lse = attend(batch)
        expected_out, expected_lse = expect(batch)
        assert_close(out, expected_out, largest=largest_value(batch))
        assert_close_lse(lse, expected_lse)


@pytest.mark.parametrize("head_dim", [8, 20, 46, 56, 63, 100])
@pytest.mark.parametrize("pool_dtype", [BF16, E4M3])
def test_rows_that_start_anywhere(pool_dtype, head_dim, device):
    """Head sizes whose rows are not aligned, in pools that start at an odd element."""
    scales = "one" if pool_dtype == E4M3 else "none"
    case = WriteCase(
        name="odd",
        head_dim=head_dim,
        dtype=BF16,
        pool_dtype=pool_dtype,
        layout="offset",
        scales=scales,
    )
    args, options, buffers = case.build(device)
    expected_args, expected_options, expected = case.build("cpu")
    torch_pagedkv.reshape_and_cache(*args, **options)
    reference.reshape_and_cache(*expected_args, **expected_options)
    assert_all_same_bits([buffer.cpu() for buffer in buffers], expected)
    read = CHUNK.with_(head_dim=head_dim, dtype=BF16, pool_dtype=pool_dtype, layout="offset").build(device)
    assert_all_same_bits(attend(read), attend(read.case.with_(layout="NHD").build(device)))


@pytest.mark.parametrize("pool_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize("head_dim", [1, 3, 7, 19, 67])
def test_extreme_values_at_the_end_of_a_row(head_dim, dtype, pool_dtype, device):
    """Saturation, NaN and ties where a row's length is no multiple of any vector."""
    limit = torch.finfo(pool_dtype).max
    values = [
        limit,
        -limit,
        limit * 1.04,
        6e4,
        torch.inf,
        -torch.inf,
        torch.nan,
        -torch.nan,
        0.0,
        -0.0,
        1e-3,
    ]
    count = -(-len(values) // head_dim)
    key = torch.tensor((values * head_dim)[: count * head_dim]).view(count, 1, head_dim).to(dtype)
    pools = [torch.zeros((1, count, 1, head_dim), dtype=pool_dtype, device=device) for _ in range(2)]
    slots = torch.arange(count, device=device)
    torch_pagedkv.reshape_and_cache(key.to(device), key.to(device), *pools, slots)
    for pool in pools:
        assert torch.equal(bits(pool[0].cpu()), bits(quantise(key, pool_dtype, None)))


@pytest.mark.parametrize("num_threads", [1, 3])
def test_many_tokens_with_few_slots(num_threads, device):
    """Long enough for several threads: the last of the tokens with one slot wins on CPU, whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        num_tokens = 1000
        slots = torch.tensor([36, 5, 17, 62, 5] * (num_tokens // 5), device=device)
        key = torch.arange(num_tokens, device=device).view(-1, 1, 1).expand(-1, 4, 128).float()
        pools = [torch.full((4, 16, 4, 128), -1.0, device=device) for _ in range(2)]
        torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
    finally:
        torch.set_num_threads(before)
    for pool in pools:
        rows = pool.view(64, -1)
        assert (rows == rows[:, :1]).all()
        for slot in (36, 5, 17, 62):
            candidates = (slots == slot).nonzero().flatten()
            assert rows[slot, 0] in candidates
            if device == "cpu":
                assert rows[slot, 0] == candidates[-1]
        assert (rows[:, 0] >= 0).sum() == 4


def test_large_writes(device):
    """So many bytes that a kernel may write past the caches; slots in no order, heads adjoining."""
    case = WriteCase(
        name="large", slots=torch.randperm(640, generator=torch.Generator().manual_seed(0)).tolist(),
        num_blocks=40, num_kv_heads=8, head_dim=512, value_head_dim=64, dtype=BF16, source="contiguous",
    )  # fmt: skip
    for layout in ("NHD", "offset"):
        (args, _, buffers), (expected_args, _, expected) = (
            case.with_(layout=layout).build(place) for place in (device, "cpu")
        )
        torch_pagedkv.reshape_and_cache(*args)
        reference.reshape_and_cache(*expected_args)
        assert_all_same_bits([buffer.cpu() for buffer in buffers], expected)


@pytest.mark.parametrize("block_stride", [2**31 - 1024, 2**31 + 1024, 2**32 + 4096])
def test_blocks_that_lie_far_apart(block_stride, device):
    """Block strides about 2**31 and 2**32 elements: views of a buffer that is mostly somebody else's."""
    shape = (2, 4, 2, 8)
    buffer = torch.empty(block_stride + 64, dtype=torch.uint8, device=device)
    pools = [buffer.view(E4M3).as_strided(shape, (block_stride, 16, 8, 1)) for _ in range(1)] * 2
    for block in range(2):
        pools[0][block].view(torch.uint8).fill_(0x30)
    key = torch.full((1, 2, 8), 2.0, device=device)
    torch_pagedkv.reshape_and_cache(key, key, *pools, torch.tensor([7], device=device))
    assert (pools[0][1, 3].float() == 2).all()
    assert (pools[0].view(torch.uint8).cpu() == 0x30).sum() == pools[0].numel() - 16
    table, length = torch.tensor([[1, 0]], device=device), torch.tensor([4], device=device)
    keys, _ = torch_pagedkv.gather_kv(*pools, table, length)
    assert (keys[0, 3] == 2).all() and (keys[0, :3] == 0.5).all()
    out = torch_pagedkv.paged_attention(key, *pools, table, length, window_size=(0, 0))
    assert (out == 2).all()
    torch_pagedkv.copy_blocks(*pools, torch.tensor([1], device=device), torch.tensor([0], device=device))
    assert_same_bits(pools[0][0], pools[0][1])


def test_written_with_scales_and_read_with_them(device):
    """Stored is value / scale, read is stored * scale: attention over what the write op quantised."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn((2, 60, 2, 64), generator=generator).to(BF16).to(device)
    pools = make_pools("HND", 6, 16, 2, 64, 64, E4M3, device)[:2]
    scales = {
        "k_scale": torch.tensor(0.25, device=device),
        "v_scale": torch.tensor([4.0, 0.5], device=device),
    }
    table, length = torch.tensor([[3, 0, 5, 1]], device=device), torch.tensor([60], device=device)
    sums = torch.tensor([0, 60], device=device)
    slots = torch_pagedkv.compute_slot_mapping(table, length, sums, 16, 60)
    torch_pagedkv.reshape_and_cache(key, value, *pools, slots, **scales)
    keys, values = torch_pagedkv.gather_kv(*pools, table, length, **scales, dtype=FP32)
    torch.testing.assert_close(keys[0, :60], key.float(), rtol=0.07, atol=0.01)
    torch.testing.assert_close(values[0, :60], value.float(), rtol=0.07, atol=0.04)
    query = key.repeat_interleave(2, 1)
    out = torch_pagedkv.paged_attention(query, *pools, table, length, sums, **scales)
    plain = [cache.transpose(0, 1)[None] for cache in (keys[0, :60], values[0, :60])]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.float().transpose(0, 1)[None], *plain, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out.float(), expected[0].transpose(0, 1), rtol=0, atol=0.05)


def test_decode_from_the_first_token_to_the_two_thousandth(device):
    """Growing lengths, splits chosen by the kernel: always finite, and close to none."""
    case = PagedCase(name="growing", kv_lens=[2000, 700], num_heads=2, num_kv_heads=1, head_dim=32, dtype=BF16)
    batch = case.build(device)
    steps = range(1, 2001, 7) if device == "cpu" else range(1, 2001)
    for length in steps:
        batch.seqused_k.copy_(torch.tensor([length, min(length, 700)]))
        out, lse = attend(batch)
        whole, whole_lse = attend(batch, num_splits=1)
        assert out.isfinite().all() and lse.isfinite().all()
        assert_close(out, whole.double(), largest=5.0)
        assert_close_lse(lse, whole_lse.double())


def test_a_dynamic_number_of_tokens_becomes_none(device):
    """Under one dynamic compilation: 5 tokens, then none, then 3."""

    def step(key, query, pools, slots, table, lengths, sums):
        torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
        return torch_pagedkv.paged_attention(query, *pools, table, lengths, sums)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    table = torch.tensor([[1, 2], [0, 3]], device=device)
    for lens in ([3, 2], [0, 0], [1, 2]):
        tokens = sum(lens)
        pools = torch.zeros((2, 4, 16, 2, 8), device=device).unbind(0)
        arguments = (
            torch.ones((tokens, 2, 8), device=device), torch.ones((tokens, 4, 8), device=device), pools,
            torch.arange(tokens, device=device), table, torch.tensor([5, 6], device=device),
            torch.tensor([0, lens[0], tokens], device=device),
        )  # fmt: skip
        out = compiled(*arguments)
        assert out.shape == (tokens, 4, 8)
        assert_same_bits(out, step(*arguments))
