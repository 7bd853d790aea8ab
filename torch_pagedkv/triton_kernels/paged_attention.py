"""paged_attention in Triton: tiles of query rows attend through the block table.

The rows of a tile are (token, head) pairs of one sequence and one KV head, so that a key is loaded
once for all the query heads that share it. Sequences with few rows (decode, speculation) take the
short tile, the others long ones; which one depends on the sequence alone, so a row's bits do not
depend on its batch. Both tiles run the same code.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.attention_tiles import (
    block_dim,
    choose_splits,
    choose_tiles,
    compiler_options,
    device_limits,
    heads_per_tile,
)
from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import as_bytes, decoded_format
from torch_pagedkv.triton_kernels.grid_sizes import cdiv
from torch_pagedkv.triton_kernels.launches import Launch, remembered
from torch_pagedkv.triton_kernels.online_softmax import attend, finish
from torch_pagedkv.triton_kernels.query_tiles import take_keys, take_rows
from torch_pagedkv.triton_kernels.scores import LOG2E, ScoreTerms
from torch_pagedkv.triton_kernels.strides import per_head_stride, pool_strides, row_strides

_LARGEST = torch.finfo(torch.float32).max
# Pointers whose alignment no access depends on; a new alignment must not compile a new kernel.
_INDEX_POINTERS = (
    "lse", "block_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks",
    "k_scale", "v_scale",
)  # fmt: skip


class VectorStrides(NamedTuple):
    """Strides of the one-dimensional tensors; 0 where one element serves all."""

    length: int
    start: int
    slope: int
    sink: int
    k_scale: int
    v_scale: int


@triton.jit
def _store_rows(out, rows, place, is_row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    dim = tl.arange(0, BLOCK)
    mask = is_row[:, None] & (dim < WIDTH)[None, :]
    tl.store(out + place[:, None] * WIDTH + dim[None, :], rows.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _store_part(
    partials, acc, maximum, total, token, head, is_row, num_tokens, num_splits,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store a split's state in [num_splits, num_tokens, HEADS] rows, then maxima, then totals."""
    num_rows = num_tokens.to(tl.int64) * HEADS
    place = (tl.program_id(1) * num_rows + token.to(tl.int64) * HEADS) + head
    # What an empty part would hold is never read.
    _store_rows(partials, acc, place, is_row & (total != 0.0), WIDTH, BLOCK)
    maxima = partials + num_splits * num_rows * WIDTH
    tl.store(maxima + place, maximum, mask=is_row)
    tl.store(maxima + num_splits * num_rows + place, total, mask=is_row)


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_tokens", "num_sequences", "num_blocks", "max_positions", "block_size",
        "window_left", "window_right", "num_splits", "least_tiles",
    ],
    do_not_specialize_on_alignment=_INDEX_POINTERS,
)  # fmt: skip
def _attention_kernel(
    out, lse, partials, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q,
    alibi_slopes, sinks, k_scale, v_scale,
    query_strides, key_strides, value_strides, vector_strides, table_stride,
    num_tokens, num_sequences, num_blocks, max_positions, block_size,
    softmax_scale, softcap, inverse_softcap, window_left, window_right, num_splits, least_tiles,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TILE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHORT_ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EDGE_N: tl.constexpr, GRANULE: tl.constexpr, LONG: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    TOKENS: tl.constexpr = BLOCK_M // TILE_HEADS
    sequence, start, stop, first = take_rows(
        cu_seqlens_q, vector_strides.start, num_sequences, num_tokens,
        KV_HEADS * HEAD_TILES, TILE_HEADS, TOKENS, LONG, SHORT_ROWS,
    )  # fmt: skip
    query_len = stop - start
    if query_len == 0:
        return
    head_tile = tl.program_id(0) % (KV_HEADS * HEAD_TILES)
    kv_head = head_tile // HEAD_TILES
    row = tl.arange(0, BLOCK_M)
    token = first + row // TILE_HEADS
    head_in_group = (head_tile % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    head = (kv_head * GROUP + head_in_group).to(tl.int64)
    is_row = (row < TOKENS * TILE_HEADS) & (token < query_len) & (head_in_group < GROUP)

    length_pointer = seqused_k + sequence.to(tl.int64) * vector_strides.length
    length = tl.load(length_pointer, mask=sequence < num_sequences, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), max_positions).to(tl.int32)
    last = tl.minimum(first + TOKENS, query_len) - 1
    visible, tiles = take_keys(
        token, is_row, first, last, length - query_len, length, window_left, window_right,
        num_splits, least_tiles, BLOCK_N,
    )  # fmt: skip
    scale = softmax_scale
    if k_scale is not None:
        scale = scale * tl.load(k_scale + kv_head * vector_strides.k_scale)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if alibi_slopes is not None:
        slopes = alibi_slopes + head * vector_strides.slope
        slope = tl.load(slopes, mask=is_row, other=0.0).to(tl.float32)
    terms = ScoreTerms(scale, softcap, inverse_softcap, slope, token + (length - query_len))
    dim = tl.arange(0, BLOCK_D)
    place = (start + token).to(tl.int64) * query_strides.token + head * query_strides.head
    mask = is_row[:, None] & (dim < KEY_DIM)[None, :]
    rows = tl.load(query + place[:, None] + dim[None, :], mask=mask, other=0.0)
    acc, maximum, total = attend(
        rows, key_cache + kv_head.to(tl.int64) * key_strides.head,
        value_cache + kv_head.to(tl.int64) * value_strides.head,
        block_table + sequence.to(tl.int64) * table_stride, tiles, visible, terms,
        key_strides, value_strides, num_blocks, block_size,
        LONG, cu_seqlens_q is None or TOKENS == 1, KEY_DIM, VALUE_DIM,
        BLOCK_M, BLOCK_N, EDGE_N, BLOCK_D, BLOCK_DV, GRANULE, BLOCK_SIZE,
        POWER_BLOCK_SIZE, KEY_ALIGNMENT, VALUE_ALIGNMENT, SAME_STRIDES,
        WIDE, FORMAT, HAS_SOFTCAP, alibi_slopes is not None, STAGES,
    )  # fmt: skip

    if num_splits == 1:
        sink, value_scale = maximum, 1.0
        if sinks is not None:
            sink = tl.load(sinks + head * vector_strides.sink, mask=is_row, other=0.0)
        if v_scale is not None:
            value_scale = tl.load(v_scale + kv_head * vector_strides.v_scale)
        acc, row_lse = finish(acc, maximum, total, sink, value_scale, sinks is not None)
        place = (start + token).to(tl.int64) * (KV_HEADS * GROUP) + head
        _store_rows(out, acc, place, is_row, VALUE_DIM, BLOCK_DV)
        tl.store(lse + head * num_tokens + start + token, row_lse, mask=is_row)
    else:
        _store_part(
            partials, acc, maximum, total, start + token, head, is_row, num_tokens, num_splits,
            KV_HEADS * GROUP, VALUE_DIM, BLOCK_DV,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["lse", "sinks", "v_scale"],
)
def _merge_splits_kernel(
    out, lse, partials, sinks, v_scale, sink_stride, v_scale_stride, num_tokens, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Join the states of one row's splits, always in the same order, and the sink once."""
    place = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    num_rows = num_tokens.to(tl.int64) * HEADS
    dim = tl.arange(0, BLOCK_DV)
    maxima = partials + num_splits * num_rows * VALUE_DIM
    totals = maxima + num_splits * num_rows
    maximum = tl.full([1], float("-inf"), tl.float32)
    for first in range(0, num_splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        part = maxima + split[None, :] * num_rows + place[:, None]
        largest = tl.load(part, mask=split[None, :] < num_splits, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(largest, 1))
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    acc = tl.zeros([1, BLOCK_DV], tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, num_splits, CHUNK):
        split = first + tl.arange(0, CHUNK)
        is_split = split < num_splits
        part = split * num_rows + place
        part_total = tl.load(totals + part, mask=is_split, other=0.0)
        part_maximum = tl.load(maxima + part, mask=is_split, other=float("-inf"))
        weight = tl.exp2((part_maximum - reference) * LOG2E)
        total += tl.sum(weight * part_total, 0)
        # An empty part wrote no row.
        written = (part_total != 0.0)[:, None] & (dim < VALUE_DIM)[None, :]
        pointers = partials + part[:, None] * VALUE_DIM + dim[None, :]
        rows = tl.load(pointers, mask=written, other=0.0)
        acc += tl.sum(weight[:, None] * rows, 0)[None, :]

    head = place % HEADS
    sink, value_scale = maximum, 1.0
    if sinks is not None:
        sink = tl.load(sinks + head * sink_stride)
    if v_scale is not None:
        value_scale = tl.load(v_scale + (head // GROUP) * v_scale_stride)[:, None]
    acc, row_lse = finish(acc, maximum, total, sink, value_scale, sinks is not None)
    _store_rows(out, acc, place, place < num_rows, VALUE_DIM, BLOCK_DV)
    tl.store(lse + head * num_tokens + place // HEADS, row_lse)


def _alignment(cache: torch.Tensor) -> int:
    """Return the power of two, up to 16, of elements that every row of a pool is a multiple of."""
    return math.gcd(16, cache.stride(0), cache.stride(1))


def _reach(cache: torch.Tensor) -> int:
    """Return how many elements behind a pool's first one its last one lies, at most."""
    return sum(size * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))


class _Plan(NamedTuple):
    """The launches of a call."""

    num_splits: int
    partial_elements: int
    tiles: tuple[Launch, ...]
    merge: Launch


def _plan(
    out, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
    causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits,
    long_only,
) -> _Plan:  # fmt: skip
    num_tokens, num_heads, value_dim = out.shape
    num_blocks, block_size, kv_heads, key_dim = key_cache.shape
    num_sequences, max_blocks = block_table.shape
    max_positions = max_blocks * block_size
    if max_positions >= 2**31:
        raise NotImplementedError(
            "paged_attention: block_table must reach less than 2**31 positions on CUDA, "
            f"got max_blocks * block_size = {max_positions}"
        )
    # No key is farther than this from any row: a wider window has no limit, and positions plus
    # windows stay small numbers.
    farthest = max_positions + num_tokens
    window_left = -1 if window_left >= farthest else window_left
    window_right = 0 if causal else -1 if window_right >= farthest else window_right

    limits = device_limits(out.device)
    group = num_heads // kv_heads
    tile_heads = heads_per_tile(group, max(key_dim, value_dim), query.dtype)
    short, long = choose_tiles(query.dtype, key_cache.dtype, key_dim, value_dim, group, limits)
    head_tiles = kv_heads * cdiv(group, tile_heads)
    packed = cu_seqlens_q is not None
    # Rows past cu_seqlens_q[-1] count as one more sequence.
    grids = {short: (num_sequences + packed) * head_tiles}
    if packed and num_tokens * tile_heads > short.rows:
        tokens = long.rows // tile_heads
        grids[long] = (num_tokens // tokens + num_sequences + 1) * head_tiles
    num_splits, least_tiles = choose_splits(
        num_splits, grids[short], grids.get(long, 0), max_positions, short.keys, limits
    )
    if long_only:
        # The same sequences are short to both: one token's heads fill more than half of short.rows,
        # or else it is 16.
        del grids[short]
    key_strides, value_strides = pool_strides(key_cache), pool_strides(value_cache)
    power = block_size & -block_size  # the largest power of two that divides it
    arguments = (
        row_strides(query), key_strides, value_strides,
        VectorStrides(
            seqused_k.stride(0), cu_seqlens_q.stride(0) if packed else 0,
            per_head_stride(alibi_slopes), per_head_stride(sinks),
            per_head_stride(k_scale), per_head_stride(v_scale),
        ),
        block_table.stride(0), num_tokens, num_sequences, num_blocks, max_positions, block_size,
        softmax_scale, softcap, min(1.0 / softcap, _LARGEST) if softcap else 0.0,
        window_left, window_right, num_splits, least_tiles,
        kv_heads, group, tile_heads, key_dim, value_dim, block_dim(key_dim), block_dim(value_dim),
        decoded_format(key_cache.dtype, limits.converts_float8), softcap > 0.0, short.rows,
        block_size, power if power == block_size else 0,
        _alignment(key_cache), _alignment(value_cache), key_strides == value_strides,
        max(_reach(key_cache), _reach(value_cache)) >= 2**31,
    )  # fmt: skip
    tiles = tuple(
        Launch(
            _attention_kernel, (programs, num_splits, 1), *arguments,
            tile.rows, tile.keys, tile.edge_keys, min(power, tile.keys), tile.is_long, tile.stages,
            **compiler_options(tile, limits),
        )
        for tile, programs in grids.items()
    )  # fmt: skip
    merge = Launch(
        _merge_splits_kernel, (num_tokens * num_heads, 1, 1),
        per_head_stride(sinks), per_head_stride(v_scale), num_tokens, num_splits,
        num_heads, group, value_dim, block_dim(value_dim), 16,
    )  # fmt: skip
    partial_elements = num_splits * num_tokens * num_heads * (value_dim + 2)
    return _Plan(num_splits, partial_elements, tiles, merge)


_plans = {}


def launch(
    out, lse, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
    causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits,
    long_only=False, looks=None,
) -> None:  # fmt: skip
    """Launch the grids of a call; ``long_only``: what another kernel writes afterwards is left undefined.

    That kernel takes the sequences of up to 16 rows for each KV head, and those of one token.
    ``looks`` stand for all arguments but the outputs, in calls that look alike; None: plan anew.
    """
    if out.shape[0] == 0:
        return
    plan = remembered(
        _plans, looks and (looks, long_only), _plan,
        out, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
        causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale,
        num_splits, long_only,
    )  # fmt: skip
    partials = lse
    if plan.num_splits > 1:
        partials = out.new_empty(plan.partial_elements, dtype=torch.float32)
    with device_of(out):
        for attend_tiles in plan.tiles:
            attend_tiles(
                out, lse, partials, query, as_bytes(key_cache), as_bytes(value_cache),
                block_table, seqused_k, cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale,
            )  # fmt: skip
        if plan.num_splits > 1:
            plan.merge(out, lse, partials, sinks, v_scale)
