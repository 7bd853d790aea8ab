"""Which query rows a program of attention takes, and which KV tiles these rows need.

All of it is decided on the device from lengths, so that a grid is a matter of shapes alone.
"""

from typing import NamedTuple

import triton
import triton.language as tl


class Visible(NamedTuple):
    """Keys [lower, upper) that each row of a tile sees, and [lowest, highest) that any does."""

    lower: tl.tensor
    upper: tl.tensor
    lowest: tl.tensor
    highest: tl.tensor


class TileRanges(NamedTuple):
    """A program's KV tiles: [first, stop), of which every row sees [inner_from, inner_to) whole."""

    first: tl.tensor
    stop: tl.tensor
    inner_from: tl.tensor
    inner_to: tl.tensor


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
    """The sequence that owns ``tile``: sequence i's tiles begin at cu_seqlens_q[i] // TOKENS + i.

    That leaves every sequence at least the tiles it needs, and takes no sum over lengths.
    """
    begun = 0
    for first in range(0, num_sequences + 1, 256):
        sequence = first + tl.arange(0, 256)
        valid = sequence <= num_sequences
        start = tl.load(cu_seqlens_q + sequence.to(tl.int64) * stride, mask=valid, other=0)
        begun += tl.sum((valid & (start.to(tl.int64) // TOKENS + sequence <= tile)).to(tl.int32), 0)
    return tl.maximum(begun - 1, 0)


@triton.jit
def take_rows(
    cu_seqlens_q, stride, num_sequences, num_tokens,
    PROGRAMS_PER_TILE: tl.constexpr, TILE_HEADS: tl.constexpr, TOKENS: tl.constexpr,
    LONG: tl.constexpr, SHORT_ROWS: tl.constexpr,
):  # fmt: skip
    """(sequence, rows start and stop of its query, first token of this tile in it).

    Tiles that another grid takes, and those that no sequence needs, get no rows.
    """
    tile = tl.program_id(0) // PROGRAMS_PER_TILE
    if cu_seqlens_q is None:
        return tile, tile, tile + 1, 0
    elif LONG:
        # Late tiles of a causal sequence see the most keys: they start first.
        tile = tl.num_programs(0) // PROGRAMS_PER_TILE - 1 - tile
        sequence = _sequence_of_tile(cu_seqlens_q, stride, tile, num_sequences, TOKENS)
        start, stop = _query_range(cu_seqlens_q, stride, sequence, num_sequences, num_tokens)
        first = (tile - start // TOKENS - sequence) * TOKENS
        is_short = (stop - start) * TILE_HEADS <= SHORT_ROWS
        stop = tl.where(is_short | (first < 0) | (first >= stop - start), start, stop)
        return sequence, start, stop, first
    else:
        start, stop = _query_range(cu_seqlens_q, stride, tile, num_sequences, num_tokens)
        stop = tl.where((stop - start) * TILE_HEADS > SHORT_ROWS, start, stop)
        return tile, start, stop, 0


@triton.jit
def _key_range(position, length, window_left, window_right):
    """The keys [lower, upper) that a query at ``position`` sees; a window of -1 has no limit."""
    position = position.to(tl.int64)
    lower = tl.where(window_left >= 0, tl.maximum(position - window_left, 0), 0)
    upper = tl.where(window_right >= 0, position + window_right + 1, length)
    upper = tl.minimum(tl.maximum(upper, 0), length)
    return tl.minimum(lower, upper).to(tl.int32), upper.to(tl.int32)


@triton.jit
def _share_of_split(first, stop, num_splits, least_tiles):
    """The contiguous part of tiles [first, stop) that is this split's, empty past the last part."""
    split = tl.program_id(1)
    tiles = stop - first
    parts = tl.maximum(tl.minimum(num_splits, tl.cdiv(tiles, least_tiles)), 1)
    share = tiles // parts
    larger = tiles % parts  # so many parts take one tile more
    begin = first + split * share + tl.minimum(split, larger)
    end = begin + share + tl.where(split < larger, 1, 0)
    return tl.where(split < parts, begin, stop), tl.where(split < parts, end, stop)


@triton.jit
def take_keys(
    token, is_row, first, last, offset, length, window_left, window_right, num_splits, least_tiles,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(Visible, TileRanges) of tokens [first, last] at positions token + offset.

    Tiles lie at multiples of BLOCK_N whatever the window, so a window that hides nothing changes
    no bit, and entries before it are not read.
    """
    lower, upper = _key_range(token + offset, length, window_left, window_right)
    lowest, seen_by_all_to = _key_range(first + offset, length, window_left, window_right)
    seen_by_all_from, highest = _key_range(last + offset, length, window_left, window_right)
    visible = Visible(tl.where(is_row, lower, 0), tl.where(is_row, upper, 0), lowest, highest)
    first_tile = lowest // BLOCK_N
    stop_tile = tl.where(highest > lowest, tl.cdiv(highest, BLOCK_N), first_tile)
    first_tile, stop_tile = _share_of_split(first_tile, stop_tile, num_splits, least_tiles)
    inner_from = tl.minimum(tl.maximum(tl.cdiv(seen_by_all_from, BLOCK_N), first_tile), stop_tile)
    inner_to = tl.minimum(tl.maximum(seen_by_all_to // BLOCK_N, inner_from), stop_tile)
    return visible, TileRanges(first_tile, stop_tile, inner_from, inner_to)


@triton.jit
def all_blocks_exist(table_row, first, stop, num_blocks, block_size):
    """Whether the table entries of positions [first, stop) all name blocks of the pool."""
    missing = 0
    stop_column = tl.cdiv(stop, block_size)
    for start in range(first // block_size, stop_column, 256):
        column = start + tl.arange(0, 256)
        block = tl.load(table_row + column, mask=column < stop_column, other=0)
        missing += tl.sum(((block < 0) | (block >= num_blocks)).to(tl.int32), 0)
    return missing == 0
