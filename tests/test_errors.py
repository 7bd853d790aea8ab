"""Every refused call: the sentence, the same through every door, and nothing written."""

from __future__ import annotations

import inspect

import expecttest
import pytest
import torch

import torch_pagedkv
from error_cases import CALLS, ERRORS
from pools import assert_same_bits


def refusal(function, call) -> Exception:
    with pytest.raises(Exception) as caught:
        function(**call)
    return caught.value


def positional(op, call):
    """Split a call by the schema: what is not keyword-only is passed by position through torch.ops."""
    schema = getattr(torch.ops.torch_pagedkv, op).default._schema
    args = [call[a.name] for a in schema.arguments if not a.kwarg_only]
    return args, {a.name: call[a.name] for a in schema.arguments if a.kwarg_only}


@pytest.mark.parametrize("case", ERRORS, ids=str)
def test_public_function_and_dispatcher_agree(case, device):
    """The public function and torch.ops raise one exception with one sentence, and write nothing."""
    if case.values and device == "cuda":
        pytest.skip("values are read on the device and raise nothing on CUDA")
    call = case.build(device)
    pools = [call[n] for n in ("key_cache", "value_cache") if n in call and call[n].device.type == device]
    before = [pool.detach().clone() for pool in pools]
    error = refusal(getattr(torch_pagedkv, case.op), call)
    assert type(error) in (ValueError, TypeError)
    assert str(error).startswith(f"{case.op}: ") and " must " in str(error) and ", got " in str(error)
    if not case.public_only:
        args, kwargs = positional(case.op, call)
        with pytest.raises(type(error)) as caught:
            getattr(torch.ops.torch_pagedkv, case.op)(*args, **kwargs)
        assert str(caught.value) == str(error)
    for pool, copy in zip(pools, before):
        assert_same_bits(pool.detach(), copy)


@pytest.mark.parametrize("case", [c for c in ERRORS if not c.public_only], ids=str)
def test_compiled_graph_holds_the_sentence(case, device):
    if case.values and device == "cuda":
        pytest.skip("values are read on the device and raise nothing on CUDA")
    call = case.build(device)
    sentence = str(refusal(getattr(torch_pagedkv, case.op), case.build(device)))
    torch._dynamo.reset()
    compiled = torch.compile(getattr(torch_pagedkv, case.op), fullgraph=True, backend="aot_eager")
    error = refusal(compiled, call)
    assert sentence in str(error)


def test_calls_that_the_table_changes_are_right(device):
    for op, make in CALLS.items():
        getattr(torch_pagedkv, op)(**make(device))


def test_public_signatures_match_the_schemas():
    for op in CALLS:
        schema = getattr(torch.ops.torch_pagedkv, op).default._schema
        parameters = inspect.signature(getattr(torch_pagedkv, op)).parameters
        names = [name for name in parameters if name != "return_lse"]
        assert names == [argument.name for argument in schema.arguments]


class Sentences(expecttest.TestCase):
    def test_sentences(self):
        lines = []
        for case in ERRORS:
            error = refusal(getattr(torch_pagedkv, case.op), case.build("cpu"))
            lines.append(f"{case.name}: {type(error).__name__}: {error}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
key_rank: ValueError: reshape_and_cache: key must have shape [num_tokens, num_kv_heads, head_dim], got [2, 8]
key_heads: ValueError: reshape_and_cache: key must have key_cache's num_kv_heads = 2 in dimension 1, got shape [3, 4, 8]
key_head_dim: ValueError: reshape_and_cache: key must have key_cache's head_dim = 8 in dimension 2, got shape [3, 2, 16]
key_dtype: TypeError: reshape_and_cache: key must have dtype float32, got bfloat16
key_last_stride: ValueError: reshape_and_cache: key must have stride 1 in its last dimension, got stride 2
value_tokens: ValueError: reshape_and_cache: value must have key's num_tokens = 3 in dimension 0, got shape [2, 2, 8]
value_dtype: TypeError: reshape_and_cache: value must have dtype float32, got float64
value_heads: ValueError: reshape_and_cache: value must have value_cache's num_kv_heads = 2 in dimension 1, got shape [3, 1, 8]
pool_rank: ValueError: reshape_and_cache: key_cache must have shape [num_blocks, block_size, num_kv_heads, head_dim], got [16, 2, 8]
pool_dtype: TypeError: reshape_and_cache: key_cache must have dtype float32 or bfloat16 or float16 or float8_e4m3fn or float8_e5m2, got float64
pools_dtypes: TypeError: reshape_and_cache: value_cache must have dtype float32, got float16
pools_sizes: ValueError: reshape_and_cache: value_cache must have key_cache's num_blocks = 4 in dimension 0, got shape [3, 16, 2, 8]
pools_block_sizes: ValueError: reshape_and_cache: value_cache must have key_cache's block_size = 16 in dimension 1, got shape [4, 8, 2, 8]
pool_last_stride: ValueError: reshape_and_cache: value_cache must have stride 1 in its last dimension, got stride 2
pool_expanded: ValueError: reshape_and_cache: key_cache must not be an expanded view (its elements share memory), got strides (0, 16, 8, 1)
pool_requires_grad: ValueError: reshape_and_cache: key_cache must not require grad (it is written in place, for inference), got requires_grad=True
block_size_0: ValueError: reshape_and_cache: key_cache must have block_size >= 1, got shape [4, 0, 2, 8]
head_dim_0: ValueError: reshape_and_cache: key_cache must have a head_dim in [1, 512], got 0
head_dim_513: ValueError: reshape_and_cache: key_cache must have a head_dim in [1, 512], got 513
slots_rank: ValueError: reshape_and_cache: slot_mapping must have shape [num_tokens], got [1, 3]
slots_0_dim: ValueError: reshape_and_cache: slot_mapping must have shape [num_tokens], got []
slots_float: TypeError: reshape_and_cache: slot_mapping must have dtype int32 or int64, got float32
slots_int16: TypeError: reshape_and_cache: slot_mapping must have dtype int32 or int64, got int16
slots_bool: TypeError: reshape_and_cache: slot_mapping must have dtype int32 or int64, got bool
slots_longer: ValueError: reshape_and_cache: slot_mapping must have at most as many elements as key has tokens, 3, got 6
scale_without_fp8: ValueError: reshape_and_cache: k_scale must be None where nothing is converted to or from fp8, got a tensor with a pool of dtype float32
slots_device: ValueError: reshape_and_cache: slot_mapping must be on cpu like key_cache, got meta
scale_dtype: TypeError: reshape_and_cache: v_scale must have dtype float32, got float64
scale_shape: ValueError: reshape_and_cache: k_scale must have one element or shape [num_kv_heads = 2], got shape [3]
scale_rank: ValueError: reshape_and_cache: k_scale must have one element or shape [num_kv_heads = 2], got shape [1, 2]
other_fp8: TypeError: reshape_and_cache: key must have dtype float8_e4m3fn or float32 or bfloat16 or float16, got float8_e5m2
fp8_bytes_with_scale: ValueError: reshape_and_cache: k_scale must be None where nothing is converted to or from fp8, got a tensor with a pool of dtype float8_e4m3fn
integer_key: TypeError: reshape_and_cache: key must have dtype float8_e4m3fn or float32 or bfloat16 or float16, got int32
slot_past_end: ValueError: reshape_and_cache: slot_mapping must be below num_blocks * block_size = 64, got 64 at index 1
key_list: TypeError: reshape_and_cache: key must be a tensor, got list
scale_number: TypeError: reshape_and_cache: k_scale must be a tensor or None, got float
slots_none: TypeError: reshape_and_cache: slot_mapping must be a tensor, got NoneType
query_rank: ValueError: paged_attention: query must have shape [num_tokens, num_heads, head_dim], got [4, 8]
query_dtype: TypeError: paged_attention: query must have dtype float32 or bfloat16 or float16, got float64
query_dtype_of_pool: TypeError: paged_attention: key_cache must have dtype bfloat16 or float8_e4m3fn or float8_e5m2, got float32
query_head_dim: ValueError: paged_attention: query must have key_cache's head_dim = 8 in dimension 2, got shape [3, 4, 4]
query_heads: ValueError: paged_attention: query must have a positive multiple of num_kv_heads = 2 heads, got 3
query_last_stride: ValueError: paged_attention: query must have stride 1 in its last dimension, got stride 2
pools_devices: ValueError: paged_attention: value_cache must be on cpu like key_cache, got meta
pools_sizes: ValueError: paged_attention: value_cache must have key_cache's num_blocks = 4 in dimension 0, got shape [2, 16, 2, 8]
table_rank: ValueError: paged_attention: block_table must have shape [num_sequences, max_blocks], got [2]
table_float: TypeError: paged_attention: block_table must have dtype int32 or int64, got float32
table_uint8: TypeError: paged_attention: block_table must have dtype int32 or int64, got uint8
table_last_stride: ValueError: paged_attention: block_table must have stride 1 in its last dimension, got stride 2
lengths_rank: ValueError: paged_attention: seqused_k must have shape [num_sequences], got [2, 1]
lengths_size: ValueError: paged_attention: seqused_k must have block_table's num_sequences = 2 in dimension 0, got shape [1]
lengths_float: TypeError: paged_attention: seqused_k must have dtype int32 or int64, got float32
lengths_int16: TypeError: paged_attention: seqused_k must have dtype int32 or int64, got int16
lengths_0_dim: ValueError: paged_attention: seqused_k must have shape [num_sequences], got []
lengths_device: ValueError: paged_attention: seqused_k must be on cpu like key_cache, got meta
sums_size: ValueError: paged_attention: cu_seqlens_q must have num_sequences + 1 = 3 in dimension 0, got shape [2]
sums_float: TypeError: paged_attention: cu_seqlens_q must have dtype int32 or int64, got float32
sums_int16: TypeError: paged_attention: cu_seqlens_q must have dtype int32 or int64, got int16
sums_0_dim: ValueError: paged_attention: cu_seqlens_q must have shape [num_sequences + 1], got []
table_0_dim: ValueError: paged_attention: block_table must have shape [num_sequences, max_blocks], got []
sums_missing: ValueError: paged_attention: query must have one token for each of the 2 sequences where cu_seqlens_q is None, got 3
scale_nan: ValueError: paged_attention: softmax_scale must be finite in float32, got nan
window_below: ValueError: paged_attention: window_size must be a pair (left, right) of integers >= -1, got (-2, 0)
window_single: ValueError: paged_attention: window_size must be a pair (left, right) of integers >= -1, got (4,)
softcap_negative: ValueError: paged_attention: softcap must be >= 0 (0: off), got -1.0
softcap_infinite: ValueError: paged_attention: softcap must be finite in float32, got inf
softcap_nan: ValueError: paged_attention: softcap must be finite in float32, got nan
softcap_past_float32: ValueError: paged_attention: softcap must be finite in float32, got 1e+39
softcap_below_float32: ValueError: paged_attention: softcap must be 0 (off) or normal in float32, got 1e-46
scale_past_float32: ValueError: paged_attention: softmax_scale must be finite in float32, got -1e+300
splits_negative: ValueError: paged_attention: num_splits must be >= 0 (0: the kernel chooses), got -1
slopes_size: ValueError: paged_attention: alibi_slopes must have num_heads = 4 in dimension 0, got shape [2]
slopes_integer: TypeError: paged_attention: alibi_slopes must have dtype float32 or bfloat16 or float16 or float64, got int32
sinks_rank: ValueError: paged_attention: sinks must have shape [num_heads], got [4, 1]
sinks_device: ValueError: paged_attention: sinks must be on cpu like query, got meta
scale_without_fp8: ValueError: paged_attention: v_scale must be None where nothing is converted to or from fp8, got a tensor with a pool of dtype float32
length_past_table: ValueError: paged_attention: seqused_k must be in [0, max_blocks * block_size = 32], got 33 at index 0
length_negative: ValueError: paged_attention: seqused_k must be in [0, max_blocks * block_size = 32], got -1 at index 1
sums_start: ValueError: paged_attention: cu_seqlens_q must start at 0, got 1 at index 0
sums_fall: ValueError: paged_attention: cu_seqlens_q must not fall, got 2 after 3 at index 2
sums_past_tokens: ValueError: paged_attention: cu_seqlens_q must end at or below the number of tokens 3, got 4 at index 2
table_past_pool: ValueError: paged_attention: block_table must be in [0, num_blocks = 4) where it is used, got 4 at [0, 1]
table_negative: ValueError: paged_attention: block_table must be in [0, num_blocks = 4) where it is used, got -7 at [1, 0]
window_number: ValueError: paged_attention: window_size must be a pair (left, right) of integers >= -1, got 4
window_float: ValueError: paged_attention: window_size must be a pair (left, right) of integers >= -1, got (1.5, 0)
window_past_int64: ValueError: paged_attention: window_size must be a pair (left, right) of integers >= -1, got (1180591620717411303424, 0)
softcap_text: TypeError: paged_attention: softcap must be a number, got str
scale_tensor: TypeError: paged_attention: softmax_scale must be a number, got Tensor
causal_none: TypeError: paged_attention: causal must be a bool, got NoneType
causal_number: TypeError: paged_attention: causal must be a bool, got int
splits_float: TypeError: paged_attention: num_splits must be an integer, got float
splits_past_int64: ValueError: paged_attention: num_splits must fit into int64, got 1180591620717411303424
table_rank: ValueError: gather_kv: block_table must have shape [num_sequences, max_blocks], got [2]
lengths_size: ValueError: gather_kv: seqused_k must have block_table's num_sequences = 2 in dimension 0, got shape [1]
dtype: TypeError: gather_kv: dtype must be float32 or bfloat16 or float16, got int32
fp8_of_another_pool: TypeError: gather_kv: dtype must be float32 or bfloat16 or float16, got float8_e4m3fn
scale_without_fp8: ValueError: gather_kv: k_scale must be None where nothing is converted to or from fp8, got a tensor with a pool of dtype float32
length_past_table: ValueError: gather_kv: seqused_k must be in [0, max_blocks * block_size = 32], got 33 at index 1
length_negative: ValueError: gather_kv: seqused_k must be in [0, max_blocks * block_size = 32], got -2147483648 at index 0
table_past_pool: ValueError: gather_kv: block_table must be in [0, num_blocks = 4) where it is used, got 4 at [0, 1]
table_negative: ValueError: gather_kv: block_table must be in [0, num_blocks = 4) where it is used, got -1 at [1, 0]
sizes: ValueError: copy_blocks: dst_blocks must have src_blocks' num_copies = 1 in dimension 0, got shape [2]
float: TypeError: copy_blocks: src_blocks must have dtype int32 or int64, got float32
int16: TypeError: copy_blocks: dst_blocks must have dtype int32 or int64, got int16
0_dim: ValueError: copy_blocks: src_blocks must have shape [num_copies], got []
device: ValueError: copy_blocks: dst_blocks must be on cpu like key_cache, got meta
rank: ValueError: copy_blocks: src_blocks must have shape [num_copies], got [1, 1]
pool_requires_grad: ValueError: copy_blocks: value_cache must not require grad (it is written in place, for inference), got requires_grad=True
both_sides: ValueError: copy_blocks: dst_blocks must name each block once and none of src_blocks, got 0 at index 0, which is in src_blocks
named_twice: ValueError: copy_blocks: dst_blocks must name each block once and none of src_blocks, got 2 at index 1, which is in dst_blocks before
source_past_pool: ValueError: copy_blocks: src_blocks must be in [0, num_blocks = 4), got 4 at index 0
destination_negative: ValueError: copy_blocks: dst_blocks must be in [0, num_blocks = 4), got -1 at index 0
out_rank: ValueError: merge_attention_states: out_a must have shape [num_tokens, num_heads, value_head_dim], got [2, 8]
out_sizes: ValueError: merge_attention_states: out_b must have out_a's num_tokens = 3 in dimension 0, got shape [2, 2, 8]
out_dtype: TypeError: merge_attention_states: out_a must have dtype float32 or bfloat16 or float16, got int32
lse_dtype: TypeError: merge_attention_states: lse_a must have dtype float32, got float16
lse_transposed: ValueError: merge_attention_states: lse_b must have out_a's num_heads = 2 in dimension 0, got shape [3, 2]
lse_device: ValueError: merge_attention_states: lse_b must be on cpu like out_a, got meta
block_size_float: TypeError: compute_slot_mapping: block_size must be an integer, got float
tokens_none: TypeError: compute_slot_mapping: num_tokens must be an integer, got NoneType
dtype_text: TypeError: gather_kv: dtype must be a torch.dtype or None, got str
table_float: TypeError: compute_slot_mapping: block_table must have dtype int32 or int64, got float32
block_size_0: ValueError: compute_slot_mapping: block_size must be >= 1, got 0
block_size_past_int64: ValueError: compute_slot_mapping: block_table must reach less than 2**63 positions, got max_blocks = 2 of block_size = 4611686018427387904
tokens_negative: ValueError: compute_slot_mapping: num_tokens must be >= 0, got -1
decode_tokens: ValueError: compute_slot_mapping: num_tokens must be num_sequences = 2 where cu_seqlens_q is None, got 3
length_past_table: ValueError: compute_slot_mapping: seqused_k must be in [0, max_blocks * block_size = 32], got 33 at index 0
length_negative: ValueError: compute_slot_mapping: seqused_k must be in [0, max_blocks * block_size = 32], got -7 at index 1
sums_start: ValueError: compute_slot_mapping: cu_seqlens_q must start at 0, got -1 at index 0
sums_fall: ValueError: compute_slot_mapping: cu_seqlens_q must not fall, got 2 after 3 at index 2
sums_past_tokens: ValueError: compute_slot_mapping: cu_seqlens_q must end at or below the number of tokens 3, got 4 at index 2
table_negative: ValueError: compute_slot_mapping: block_table must not be negative where it is used, got -1 at [0, 1]
table_beyond_int64: ValueError: compute_slot_mapping: block_table must name blocks whose slots fit in int64, got 4611686018427387905 at [0, 1]""",
        )
