"""Decode as CUDA C++ takes it: at the edges of what it takes, and where its shortcuts could show."""

from __future__ import annotations

import sys

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, PagedCase
from devices import needs_cuda
from pools import assert_all_same_bits, assert_same_bits
from test_paged_attention import attend, attend_as_reference, attend_to_sequences, refilled, slots_of
from torch_pagedkv.ops import cuda_attention as at_once
from torch_pagedkv.ops.kernel_choice import cuda_attention, cuda_attention_takes

# Few tokens of most sequences and many of some: a warp reads both, one after the other.
BOTH_KINDS = {"kv_lens": [5 + 11 * (i % 7) for i in range(150)], "query_lens": [1, 4, 1, 1, 2] * 30}
# Calls that CUDA C++ takes or leaves, at the edges of both.
EDGES = [
    PagedCase(name="bf16", kv_lens=[300, 1, 0, 64, 65], dtype=BF16, head_dim=128),
    PagedCase(name="fp16_groups_of_16", kv_lens=[300, 17], dtype=FP16, num_heads=32),
    PagedCase(name="groups_of_17", kv_lens=[300, 17], dtype=BF16, num_heads=34),
    PagedCase(name="wide_heads", kv_lens=[300, 17], dtype=BF16, head_dim=256),
    PagedCase(name="wide_heads_e4m3", kv_lens=[300, 17], dtype=BF16, pool_dtype=E4M3, head_dim=256, scales="per_head"),
    PagedCase(name="value_dim", kv_lens=[300, 17], dtype=BF16, head_dim=192, value_head_dim=128),
    PagedCase(name="speculative", kv_lens=[300, 17, 3], query_lens=[4, 1, 8], dtype=BF16, head_dim=128),
    PagedCase(name="speculative_e5m2", kv_lens=[300, 17], query_lens=[8, 3], dtype=FP16, pool_dtype=E5M2, scales="one"),
    PagedCase(name="speculative_window", kv_lens=[400, 90], query_lens=[8, 8], dtype=BF16,
              options={"window_size": (70, 0)}),
    PagedCase(name="both_kinds", dtype=BF16, head_dim=128, **BOTH_KINDS),
    PagedCase(name="both_kinds_wide", dtype=FP16, head_dim=256, options={"window_size": (40, 0)}, **BOTH_KINDS),
    PagedCase(name="both_kinds_e4m3", dtype=BF16, pool_dtype=E4M3, head_dim=128, **BOTH_KINDS),
    PagedCase(name="mixed", kv_lens=[300, 700, 5], query_lens=[1, 90, 2], dtype=BF16, head_dim=128, padding_rows=3),
    PagedCase(name="block_size_1", kv_lens=[150, 9], dtype=BF16, block_size=1),
    PagedCase(name="block_size_7", kv_lens=[150, 9], dtype=BF16, pool_dtype=E4M3, block_size=7),
    PagedCase(name="block_size_528", kv_lens=[1500, 9], dtype=BF16, block_size=528),
    PagedCase(name="many_sequences", kv_lens=[3 + 11 * (i % 7) for i in range(300)], dtype=BF16, head_dim=16),
    PagedCase(name="more_sequences", kv_lens=[3 + 11 * (i % 7) for i in range(600)], dtype=BF16, head_dim=16),
    # About as long as each other: a sequence is cut into equal shares, some of them without a tile.
    PagedCase(name="alike", kv_lens=[850 - i % 9 for i in range(40)], dtype=BF16, head_dim=64),
    PagedCase(name="alike_tokens", kv_lens=[410 - i % 9 for i in range(10)], query_lens=[3] * 10, dtype=BF16,
              num_heads=12, num_kv_heads=12, head_dim=16),
    PagedCase(name="whole_shares", kv_lens=[110 - i % 9 for i in range(1050)], dtype=BF16, head_dim=16),
    PagedCase(name="many_of_one_head", kv_lens=[200 + 9 * (i % 50) for i in range(150)], dtype=BF16, num_heads=3,
              num_kv_heads=1, head_dim=16),
    PagedCase(name="ragged", kv_lens=[3 + 97 * (i % 13) for i in range(33)], dtype=BF16, head_dim=64),
    PagedCase(name="one_long", kv_lens=[9000], dtype=BF16, num_heads=2, num_kv_heads=1, sinks=[0.3, -1.0]),
    PagedCase(name="all_options", kv_lens=[700, 20], dtype=BF16, alibi=True, sinks=[1.0, 0.0],
              options={"window_size": (300, 0), "softcap": 5.0}),
    PagedCase(name="rows_not_aligned", kv_lens=[70, 20], dtype=BF16, head_dim=20),
]  # fmt: skip


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_edges_of_decode(case, num_splits, device):
    """Against the float64 reference; the same bits again, in HND, and with other bytes where nobody looks."""
    case = case.with_(options={**case.options, "num_splits": num_splits})
    batch = case.build(device)
    out, lse = attend_as_reference(batch)
    if device == "cpu":
        return
    for again in (batch, case.with_(layout="HND").build(device), refilled(batch, 0x3C)):
        assert_all_same_bits(attend(again), (out, lse))


@pytest.mark.parametrize("num_splits", [0, 1, 3])
@pytest.mark.parametrize(
    "pool_dtype, value", [(BF16, float("nan")), (BF16, float("inf")), (E4M3, float("nan")), (E5M2, float("inf"))]
)
def test_speculative_rows_do_not_see_later_tokens(pool_dtype, value, num_splits, device):
    """NaN and infinities in the keys and values of a later token reach its own rows and no earlier one."""
    case = PagedCase(name="later", kv_lens=[200], query_lens=[8], dtype=BF16, pool_dtype=pool_dtype, head_dim=128)
    batch = case.with_(options={"num_splits": num_splits}).build(device)
    expected, expected_lse = attend(batch)
    row = 4
    for block, offset in slots_of(batch.tables[0], 200, 16)[192 + row + 1 :]:
        for cache in (batch.key_cache, batch.value_cache):
            cache[block, offset].copy_(torch.full_like(cache[block, offset].float(), value))
    out, lse = attend(batch)
    assert_same_bits(out[: row + 1], expected[: row + 1])
    assert_same_bits(lse[:, : row + 1].contiguous(), expected_lse[:, : row + 1].contiguous())
    assert not out[row + 1 :].float().isfinite().any()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1.0, 1e6, 1e25])
def test_queries_of_any_size_meet_fp8_keys(magnitude, device):
    """They are multiplied as float16, which holds none of the small and large ones as they are."""
    case = PagedCase(name="size", kv_lens=[70, 9], dtype=BF16, pool_dtype=E4M3, head_dim=128)
    batch = case.with_(options={"softmax_scale": 0.1 / magnitude}).build(device)
    batch.query = (batch.query.float() * magnitude).to(BF16)
    attend_as_reference(batch)


@needs_cuda
@pytest.mark.parametrize("case", EDGES, ids=str)
def test_one_call_of_cpp_is_enough(case, monkeypatch):
    """What CUDA C++ takes whole never comes to the steps in Python, whose bits are the same, with LSE and without."""
    if cuda_attention(0) is None:
        pytest.skip("CUDA C++: the library was not built (make cuda)")
    module = sys.modules["torch_pagedkv.ops.paged_attention"]
    batch = case.build("cuda")
    with monkeypatch.context() as without:
        without.setattr(at_once, "cuda_attention", lambda device: None)
        expected = attend(batch)
    steps = []
    check_window = module.check_window
    monkeypatch.setattr(module, "check_window", lambda *arguments: steps.append(check_window(*arguments)))
    args, options = batch.attention
    for actual, wanted in zip(
        (*attend(batch), torch_pagedkv.paged_attention(*args, **options)), (*expected, expected[0])
    ):
        assert_same_bits(actual, wanted)
    # Of what it takes, others may serve rows that one sequence could have too many of. Each of two calls that
    # it leaves is checked by the public function and by the op.
    taken = int(cuda_attention_takes()(*args[:4]))
    may_be_long = batch.cu_seqlens_q is not None and batch.query.shape[0] * case.num_heads > 16 * case.num_kv_heads
    assert len(steps) == (0 if taken == 2 or (taken == 1 and not may_be_long) else 4)


@needs_cuda
def test_cpp_leaves_calls_without_doing_anything():
    case = PagedCase(name="left", kv_lens=[300, 9], query_lens=[40, 1], dtype=BF16, pool_dtype=E4M3, head_dim=128)
    batch = case.build("cuda")
    kernels = cuda_attention(0)
    if kernels is None:
        pytest.skip("CUDA C++: the library was not built (make cuda)")
    (query, *others, cu_seqlens_q), _ = batch.attention
    before = torch.cuda.memory_allocated()
    options = (None, True, -1, -1, 0.0, None, None, None, None, 0)
    assert kernels[1](query, *others, cu_seqlens_q, *options) == (None, None)
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    "num_splits, kv_len, mates, num_heads, num_kv_heads",
    [(1, 900, 300, 4, 2), (3, 900, 300, 4, 2), (64, 4500, 20, 16, 4)],
    ids=["whole", "three_parts", "many_parts"],
)
def test_many_batch_mates_change_no_bit_of_a_sequence(num_splits, kv_len, mates, num_heads, num_kv_heads, device):
    """However many parts there are to join in a call, those of a sequence are joined in one order."""
    if device == "cpu":
        pytest.skip("CUDA C++ joins parts in a launch of its own")
    case = PagedCase(name="mates", kv_lens=[kv_len] * mates, dtype=BF16, num_heads=num_heads,
                     num_kv_heads=num_kv_heads, options={"num_splits": num_splits})  # fmt: skip
    batch = case.build(device)
    out, lse = attend(batch)
    batch.query, batch.block_table, batch.seqused_k = batch.query[:1], batch.block_table[:1], batch.seqused_k[:1]
    alone, lse_alone = attend(batch)
    assert_same_bits(alone, out[:1])
    assert_same_bits(lse_alone, lse[:, :1].contiguous())


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "window_size": (90, 0)}], ids=["plain", "window"])
@pytest.mark.parametrize(
    "head_dim, pool_dtype", [(64, BF16), (128, FP16), (256, BF16), (64, E5M2), (128, E4M3), (256, E4M3)]
)
def test_tokens_of_batch_mates_change_no_bit_of_a_sequence(head_dim, pool_dtype, options, device):
    """How many tokens most sequences have chooses the kernel: for few, for many, for both apart."""
    dtype = FP16 if pool_dtype == FP16 else BF16
    case = PagedCase(name="rows", kv_lens=[300, 77, 60, 200, 17], query_lens=[1, 4, 1, 1, 1], dtype=dtype,
                     pool_dtype=pool_dtype, num_heads=8, num_kv_heads=2, head_dim=head_dim,
                     options={**options, "num_splits": 1})  # fmt: skip
    batch = case.build(device)
    out, lse = attend_as_reference(batch)
    for first, stop in ((0, 1), (0, 2), (1, 2), (1, 5), (2, 5)):
        alone, rows = attend_to_sequences(batch, first, stop)
        assert_all_same_bits(alone, (out[rows], lse[:, rows].contiguous()))
