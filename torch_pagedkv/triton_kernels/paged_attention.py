"""paged_attention in Triton: tiles of query rows attend through the block table.

The rows of a tile are (token, head) pairs of one sequence and one KV head, so that a key is loaded
once for all the query heads that share it. Sequences with few rows (decode, speculation) take the
short tile, the others long ones; which one depends on the sequence alone, so a row's bits do not
depend on its batch. Both tiles run the same code.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.attention_tiles import (
    block_dim,
    choose_splits,
    choose_tiles,
    device_limits,
    heads_per_tile,
)
from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.fp8 import as_bytes, decoded_format
from torch_pagedkv.triton_kernels.online_softmax import (
    LOG2E,
    ScoreTerms,
    Visible,
    attend,
    finish,
    key_range,
)
from torch_pagedkv.triton_kernels.strides import per_head_stride, pool_strides, row_strides

_LARGEST = torch.finfo(torch.float32).max
# Pointers whose alignment no access depends on; a new alignment must not compile a new kernel.
_INDEX_POINTERS = (
    "lse", "block_table", "seqused_k", "cu_seqlens_q", "alibi_slopes", "sinks", "k_scale", "v_scale",
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
def _query_range(cu_seqlens_q, stride, sequence, num_sequences, num_tokens):
    """Rows [start, stop) of a sequence; the one past the last owns the padding at the end."""
    start = tl.load(cu_seqlens_q + sequence.to(tl.int64) * stride).to(tl.int64)
    is_padding = sequence == num_sequences
    following = cu_seqlens_q + (sequence + 1).to(tl.int64) * stride
    stop = tl.load(following, mask=~is_padding, other=0).to(tl.int64)
    stop = tl.where(is_padding, num_tokens, stop)
    start = tl.minimum(tl.maximum(start, 0), num_tokens).to(tl.int32)
    stop = tl.minimum(tl.maximum(stop, 0), num_tokens).to(tl.int32)
    return start, tl.maximum(start, stop)


@triton.jit
def _sequence_of_tile(cu_seqlens_q, stride, tile, num_sequences, TOKENS: tl.constexpr):
    """The sequence whose tiles include ``tile``: sequence i's begin at cu_seqlens_q[i] // TOKENS + i.

    That leaves every sequence at least the tiles it needs, and is known without a sum over lengths.
    """
    begun = 0
    for first in range(0, num_sequences + 1, 256):
        sequence = first + tl.arange(0, 256)
        valid = sequence <= num_sequences
        start = tl.load(cu_seqlens_q + sequence.to(tl.int64) * stride, mask=valid, other=0)
        begun += tl.sum((valid & (start.to(tl.int64) // TOKENS + sequence <= tile)).to(tl.int32), 0)
    return begun - 1


@triton.jit
def _all_blocks_exist(table_row, first, stop, num_blocks):
    """Whether columns [first, stop) of a table row all name blocks of the pool."""
    missing = 0
    for start in range(first, stop, 256):
        column = start + tl.arange(0, 256)
        block = tl.load(table_row + column, mask=column < stop, other=0)
        missing += tl.sum(((block < 0) | (block >= num_blocks)).to(tl.int32), 0)
    return missing == 0


@triton.jit
def _share_of_split(first, stop, split, num_splits, least_tiles):
    """The contiguous part of tiles [first, stop) that is a split's own, empty past the last part."""
    tiles = stop - first
    parts = tl.maximum(tl.minimum(num_splits, tl.cdiv(tiles, least_tiles)), 1)
    share = tiles // parts
    larger = tiles % parts  # so many parts take one tile more
    begin = first + split * share + tl.minimum(split, larger)
    end = begin + share + tl.where(split < larger, 1, 0)
    return tl.where(split < parts, begin, stop), tl.where(split < parts, end, stop)


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
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    LONG: tl.constexpr, SHORT_ROWS: tl.constexpr,
    GRANULE: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr,
    FORMAT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    HEAD_TILES: tl.constexpr = (GROUP + TILE_HEADS - 1) // TILE_HEADS
    TOKENS: tl.constexpr = BLOCK_M // TILE_HEADS
    HEADS: tl.constexpr = KV_HEADS * GROUP
    EDGE_GRANULE: tl.constexpr = min(GRANULE, EDGE_N)
    ONE_TOKEN: tl.constexpr = cu_seqlens_q is None or TOKENS == 1
    head_tile = tl.program_id(0) % (KV_HEADS * HEAD_TILES)
    index = tl.program_id(0) // (KV_HEADS * HEAD_TILES)
    split = tl.program_id(1)

    # Which rows.
    first = 0
    if cu_seqlens_q is None:
        sequence = index
        start, stop = index, index + 1
    elif LONG:
        # Late tiles of a causal sequence see the most keys: they start first.
        index = tl.num_programs(0) // (KV_HEADS * HEAD_TILES) - 1 - index
        sequence = _sequence_of_tile(
            cu_seqlens_q, vector_strides.start, index, num_sequences, TOKENS
        )
        if sequence < 0:
            return
        start, stop = _query_range(
            cu_seqlens_q, vector_strides.start, sequence, num_sequences, num_tokens
        )
        first = (index - (start // TOKENS + sequence)) * TOKENS
        if ((stop - start) * TILE_HEADS <= SHORT_ROWS) | (first >= stop - start):
            return
    else:
        sequence = index
        start, stop = _query_range(
            cu_seqlens_q, vector_strides.start, sequence, num_sequences, num_tokens
        )
        if ((stop - start) * TILE_HEADS > SHORT_ROWS) | (stop == start):
            return
    query_len = stop - start
    kv_head = head_tile // HEAD_TILES
    row = tl.arange(0, BLOCK_M)
    token = first + row // TILE_HEADS
    head_in_group = (head_tile % HEAD_TILES) * TILE_HEADS + row % TILE_HEADS
    head = (kv_head * GROUP + head_in_group).to(tl.int64)
    is_row = (row < TOKENS * TILE_HEADS) & (token < query_len) & (head_in_group < GROUP)

    # Which keys.
    is_sequence = sequence < num_sequences
    length_pointer = seqused_k + sequence.to(tl.int64) * vector_strides.length
    length = tl.load(length_pointer, mask=is_sequence, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), max_positions).to(tl.int32)
    offset = length - query_len
    lower, upper = key_range(token + offset, length, window_left, window_right)
    lowest, seen_by_all_to = key_range(first + offset, length, window_left, window_right)
    last = tl.minimum(first + TOKENS, query_len) - 1
    seen_by_all_from, highest = key_range(last + offset, length, window_left, window_right)
    visible = Visible(tl.where(is_row, lower, 0), tl.where(is_row, upper, 0), lowest, highest)
    first_tile = lowest // BLOCK_N
    stop_tile = tl.maximum(tl.cdiv(highest, BLOCK_N), first_tile)
    stop_tile = tl.where(highest > lowest, stop_tile, first_tile)
    first_tile, stop_tile = _share_of_split(first_tile, stop_tile, split, num_splits, least_tiles)
    inner_from = tl.minimum(tl.maximum(tl.cdiv(seen_by_all_from, BLOCK_N), first_tile), stop_tile)
    inner_to = tl.minimum(tl.maximum(seen_by_all_to // BLOCK_N, inner_from), stop_tile)
    table_row = block_table + sequence.to(tl.int64) * table_stride
    if LONG:
        # Looking once at all table entries keeps the inner loop free of masks.
        columns_from = inner_from * BLOCK_N // block_size
        columns_to = tl.cdiv(inner_to * BLOCK_N, block_size)
        if not _all_blocks_exist(table_row, columns_from, columns_to, num_blocks):
            inner_to = inner_from

    # Tiles that not every row sees whole are cut finer: less of them is computed in vain, and
    # masks and replaced values find the registers that they need.
    PARTS: tl.constexpr = BLOCK_N // EDGE_N
    edge_from = tl.minimum(tl.maximum(first_tile * PARTS, lowest // EDGE_N), inner_from * PARTS)
    edge_to = tl.minimum(tl.maximum(tl.cdiv(highest, EDGE_N), inner_to * PARTS), stop_tile * PARTS)

    # Attend.
    scale = softmax_scale
    if k_scale is not None:
        scale = scale * tl.load(k_scale + kv_head * vector_strides.k_scale)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if alibi_slopes is not None:
        slopes = alibi_slopes + head * vector_strides.slope
        slope = tl.load(slopes, mask=is_row, other=0.0).to(tl.float32)
    terms = ScoreTerms(scale, softcap, inverse_softcap, slope, token + offset)
    dim = tl.arange(0, BLOCK_D)
    query_place = (start + token).to(tl.int64) * query_strides.token + head * query_strides.head
    query_mask = is_row[:, None] & (dim < KEY_DIM)[None, :]
    rows = tl.load(query + query_place[:, None] + dim[None, :], mask=query_mask, other=0.0)
    keys = key_cache + kv_head.to(tl.int64) * key_strides.head
    values = value_cache + kv_head.to(tl.int64) * value_strides.head
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, maximum, total = attend(
        acc, maximum, total, rows, keys, values, table_row, visible, terms,
        key_strides, value_strides, num_blocks, block_size,
        edge_from, edge_to, inner_from * PARTS, (inner_to - inner_from) * PARTS,
        True, False, ONE_TOKEN, KEY_DIM, VALUE_DIM, EDGE_N, BLOCK_D, BLOCK_DV,
        EDGE_GRANULE, POWER_BLOCK_SIZE, FORMAT, HAS_SOFTCAP, alibi_slopes is not None, 1,
    )  # fmt: skip
    acc, maximum, total = attend(
        acc, maximum, total, rows, keys, values, table_row, visible, terms,
        key_strides, value_strides, num_blocks, block_size,
        inner_from, inner_to, inner_to, 0,
        False, LONG, ONE_TOKEN, KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV,
        GRANULE, POWER_BLOCK_SIZE, FORMAT, HAS_SOFTCAP, alibi_slopes is not None, STAGES,
    )  # fmt: skip

    # Write.
    dim = tl.arange(0, BLOCK_DV)
    mask = is_row[:, None] & (dim < VALUE_DIM)[None, :]
    place = (start + token).to(tl.int64) * HEADS + head
    if num_splits == 1:
        sink = maximum
        if sinks is not None:
            sink = tl.load(sinks + head * vector_strides.sink, mask=is_row, other=0.0).to(tl.float32)
        value_scale = 1.0
        if v_scale is not None:
            value_scale = tl.load(v_scale + kv_head * vector_strides.v_scale)
        acc, row_lse = finish(acc, maximum, total, sink, value_scale, sinks is not None)
        out_dtype: tl.constexpr = out.dtype.element_ty
        tl.store(out + place[:, None] * VALUE_DIM + dim[None, :], acc.to(out_dtype), mask=mask)
        tl.store(lse + head.to(tl.int64) * num_tokens + start + token, row_lse, mask=is_row)
    else:
        num_rows = num_tokens.to(tl.int64) * HEADS
        place += split * num_rows
        mask = mask & (total != 0.0)[:, None]  # an empty part is never read
        tl.store(partials + place[:, None] * VALUE_DIM + dim[None, :], acc, mask=mask)
        state = partials + num_splits * num_rows * VALUE_DIM
        tl.store(state + place, maximum, mask=is_row)
        tl.store(state + num_splits * num_rows + place, total, mask=is_row)


@triton.jit(
    do_not_specialize=["num_tokens", "num_splits"],
    do_not_specialize_on_alignment=["lse", "sinks", "v_scale"],
)
def _merge_splits_kernel(
    out, lse, partials, sinks, v_scale, sink_stride, v_scale_stride, num_tokens, num_splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Join the states of a row's splits, always in the same order, and the sink once."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    num_rows = num_tokens.to(tl.int64) * HEADS
    is_row = place < num_rows
    dim = tl.arange(0, BLOCK_DV)
    in_dim = dim < VALUE_DIM
    maxima = partials + num_splits * num_rows * VALUE_DIM + place
    totals = maxima + num_splits * num_rows
    maximum = tl.full([ROWS], float("-inf"), tl.float32)
    for split in range(num_splits):
        at = split * num_rows
        maximum = tl.maximum(maximum, tl.load(maxima + at, mask=is_row, other=float("-inf")))
    reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for split in range(num_splits):
        at = split * num_rows
        part_total = tl.load(totals + at, mask=is_row, other=0.0)
        part_maximum = tl.load(maxima + at, mask=is_row, other=float("-inf"))
        weight = tl.exp2((part_maximum - reference) * LOG2E)
        total += weight * part_total
        written = (is_row & (part_total != 0.0))[:, None] & in_dim[None, :]
        pointers = partials + (at + place)[:, None] * VALUE_DIM + dim[None, :]
        acc += weight[:, None] * tl.load(pointers, mask=written, other=0.0)

    head = (place % HEADS).to(tl.int32)
    sink = maximum
    if sinks is not None:
        sink = tl.load(sinks + head * sink_stride, mask=is_row, other=0.0).to(tl.float32)
    value_scale = 1.0
    if v_scale is not None:
        value_scale = tl.load(v_scale + (head // GROUP) * v_scale_stride, mask=is_row, other=1.0)[:, None]
    acc, row_lse = finish(acc, maximum, total, sink, value_scale, sinks is not None)
    out_dtype: tl.constexpr = out.dtype.element_ty
    mask = is_row[:, None] & in_dim[None, :]
    tl.store(out + place[:, None] * VALUE_DIM + dim[None, :], acc.to(out_dtype), mask=mask)
    tl.store(lse + head.to(tl.int64) * num_tokens + place // HEADS, row_lse, mask=is_row)


def launch(
    out, lse, query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale,
    causal, window_left, window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits,
) -> None:  # fmt: skip
    num_tokens, num_heads, value_dim = out.shape
    num_blocks, block_size, kv_heads, key_dim = key_cache.shape
    num_sequences, max_blocks = block_table.shape
    if num_tokens == 0:
        return
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
    window_right = -1 if window_right >= farthest else window_right
    if causal:
        window_right = 0
    limits = device_limits(out.device)
    group = num_heads // kv_heads
    tile_heads = heads_per_tile(group, max(key_dim, value_dim))
    short, long = choose_tiles(query.dtype, key_cache.dtype, key_dim, value_dim, group, limits)
    head_tiles = kv_heads * triton.cdiv(group, tile_heads)
    packed = cu_seqlens_q is not None
    power = block_size & -block_size  # the largest power of two that divides it
    # Rows past cu_seqlens_q[-1] count as one more sequence.
    grids = [(short, (num_sequences + packed) * head_tiles)]
    if packed and num_tokens * tile_heads > short.rows:
        tokens = long.rows // tile_heads
        grids.append((long, (num_tokens // tokens + num_sequences + 1) * head_tiles))
    num_splits, least_tiles = choose_splits(
        num_splits, grids[-1][1], max_positions, short.keys, limits
    )
    num_rows = num_tokens * num_heads
    partials = lse
    if num_splits > 1:
        partials = out.new_empty(num_splits * num_rows * (value_dim + 2), dtype=torch.float32)
    with device_of(out):
        for tile, programs in grids:
            _attention_kernel[(programs, num_splits)](
                out, lse, partials, query, as_bytes(key_cache), as_bytes(value_cache),
                block_table, seqused_k, cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale,
                row_strides(query), pool_strides(key_cache), pool_strides(value_cache),
                VectorStrides(
                    seqused_k.stride(0), cu_seqlens_q.stride(0) if packed else 0,
                    per_head_stride(alibi_slopes), per_head_stride(sinks),
                    per_head_stride(k_scale), per_head_stride(v_scale),
                ),
                block_table.stride(0), num_tokens, num_sequences, num_blocks, max_positions,
                block_size, softmax_scale, softcap, min(1.0 / softcap, _LARGEST) if softcap else 0.0,
                window_left, window_right, num_splits, least_tiles,
                kv_heads, group, tile_heads, key_dim, value_dim,
                tile.rows, tile.keys, tile.edge_keys, block_dim(key_dim), block_dim(value_dim),
                tile is long, short.rows, min(power, tile.keys), power if power == block_size else 0,
                decoded_format(key_cache.dtype, limits.converts_float8), softcap > 0.0, tile.stages,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip
        if num_splits > 1:
            rows = max(1, 1024 // block_dim(value_dim))
            _merge_splits_kernel[(triton.cdiv(num_rows, rows),)](
                out, lse, partials, sinks, v_scale, per_head_stride(sinks),
                per_head_stride(v_scale), num_tokens, num_splits,
                num_heads, group, value_dim, rows, block_dim(value_dim),
            )  # fmt: skip
