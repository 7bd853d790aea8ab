"""The online softmax in its plainest form: one program takes one query row and stores every state.

It is there to be read and compared, not to be fast: paged_attention does the same for tiles of rows.
"""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import as_bytes, decoded_format, load_as
from torch_pagedkv.triton_kernels.grid_sizes import next_power_of_2
from torch_pagedkv.triton_kernels.scores import tanh
from torch_pagedkv.triton_kernels.strides import per_head_stride, pool_strides, row_strides


@triton.jit
def _row_of(cu_seqlens_q, stride, num_sequences, token):
    """(sequence, how many of its queries come after this one, whether any sequence owns the row)."""
    if cu_seqlens_q is None:
        return token, 0 * token, token >= 0
    else:
        sequence = 0 * token
        stop = tl.load(cu_seqlens_q + stride).to(tl.int32)
        while (sequence < num_sequences - 1) & (stop <= token):
            sequence += 1
            stop = tl.load(cu_seqlens_q + (sequence + 1) * stride).to(tl.int32)
        return sequence, stop - 1 - token, token < stop


@triton.jit
def _softmax_trace_kernel(
    maxima, denominators, accumulators, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q,
    k_scale, v_scale, query_strides, key_strides, value_strides, table_stride, length_stride, start_stride,
    k_scale_stride, v_scale_stride, num_sequences, num_tiles, block_size, softmax_scale, softcap,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, TILE: tl.constexpr, BLOCK_N: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    num_tokens, num_heads = tl.num_programs(0), tl.num_programs(1)
    kv_head = head // GROUP
    sequence, queries_after, is_owned = _row_of(cu_seqlens_q, start_stride, num_sequences, token)
    length = tl.load(seqused_k + sequence * length_stride, mask=is_owned, other=0).to(tl.int32)
    visible = tl.where(is_owned, length - queries_after, 0)  # keys before this position
    dim, value_dim = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row = query + token.to(tl.int64) * query_strides.token + head * query_strides.head
    q = tl.load(row + dim, mask=dim < KEY_DIM, other=0.0).to(tl.float32)
    key_scale, value_scale = softmax_scale, 1.0
    if k_scale is not None:
        key_scale = key_scale * tl.load(k_scale + kv_head * k_scale_stride)
    if v_scale is not None:
        value_scale = tl.load(v_scale + kv_head * v_scale_stride)

    maximum, denominator = float("-inf"), 0.0
    accumulator = tl.zeros([BLOCK_DV], tl.float32)
    lane = tl.arange(0, BLOCK_N)
    for tile in range(num_tiles):
        position = tile * TILE + lane
        seen = (lane < TILE) & (position < visible)
        column = position // block_size
        block = tl.load(block_table + sequence.to(tl.int64) * table_stride + column, mask=seen, other=0).to(tl.int64)
        offset = (position % block_size).to(tl.int64)
        key_place = block * key_strides.block + offset * key_strides.token + kv_head * key_strides.head
        value_place = block * value_strides.block + offset * value_strides.token + kv_head * value_strides.head
        key = load_as(
            key_cache + key_place[:, None] + dim[None, :], seen[:, None] & (dim < KEY_DIM)[None, :], FORMAT, tl.float32
        )
        value = load_as(
            value_cache + value_place[:, None] + value_dim[None, :],
            seen[:, None] & (value_dim < VALUE_DIM)[None, :], FORMAT, tl.float32,
        )  # fmt: skip

        scores = tl.sum(q[None, :] * key.to(tl.float32), 1) * key_scale
        if HAS_SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores = tl.where(seen, scores, float("-inf"))
        # The step: a larger maximum shrinks what was summed before it.
        larger = tl.maximum(maximum, tl.max(scores, 0))
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        decay = tl.exp(maximum - reference)
        weights = tl.exp(scores - reference)
        denominator = denominator * decay + tl.sum(weights, 0)
        accumulator = accumulator * decay + tl.sum(weights[:, None] * value.to(tl.float32), 0) * value_scale
        maximum = larger

        place = (tile * num_tokens + token).to(tl.int64) * num_heads + head
        tl.store(maxima + place, maximum)
        tl.store(denominators + place, denominator)
        tl.store(accumulators + place * VALUE_DIM + value_dim, accumulator, mask=value_dim < VALUE_DIM)


def launch(
    maximum, denominator, accumulator, query, key_cache, value_cache, block_table, seqused_k,
    cu_seqlens_q, softmax_scale, softcap, k_scale, v_scale, tile,
) -> None:  # fmt: skip
    if not (query.is_cuda or triton.knobs.runtime.interpret):
        raise NotImplementedError(f"trace_softmax: kernel must be 'torch' on {query.device}, got 'triton'")
    num_tiles, num_tokens, num_heads, value_dim = accumulator.shape
    block_size, num_kv_heads, key_dim = key_cache.shape[1:]
    with device_of(query):
        _softmax_trace_kernel[(num_tokens, num_heads)](
            maximum, denominator, accumulator, query, as_bytes(key_cache), as_bytes(value_cache),
            block_table, seqused_k, cu_seqlens_q, k_scale, v_scale,
            row_strides(query), pool_strides(key_cache), pool_strides(value_cache),
            block_table.stride(0), seqused_k.stride(0), 0 if cu_seqlens_q is None else cu_seqlens_q.stride(0),
            per_head_stride(k_scale), per_head_stride(v_scale),
            seqused_k.shape[0], num_tiles, block_size, softmax_scale, softcap,
            num_heads // num_kv_heads, key_dim, value_dim, next_power_of_2(key_dim), next_power_of_2(value_dim),
            tile, next_power_of_2(tile), decoded_format(key_cache.dtype, False), softcap > 0.0,
        )  # fmt: skip
