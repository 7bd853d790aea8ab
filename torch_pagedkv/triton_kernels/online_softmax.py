"""The inner loop of attention: a tile of query rows meets the KV tiles of one sequence."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.fp8 import load_as

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
FLOAT32_MAX: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).max)


class Visible(NamedTuple):
    """What the rows of a tile may see: keys [lower, upper) of each row, [lowest, highest) of any."""

    lower: tl.tensor
    upper: tl.tensor
    lowest: tl.tensor
    highest: tl.tensor


class ScoreTerms(NamedTuple):
    """What makes a score of a product of query and key."""

    scale: tl.tensor
    softcap: tl.tensor
    inverse_softcap: tl.tensor
    slope: tl.tensor
    position: tl.tensor


@triton.jit
def tanh(x):
    # With exponentials of negative numbers only, nothing overflows. Near 0 the quotient cancels,
    # and the odd Taylor polynomial is exact to float32 there.
    size = tl.abs(x)
    decayed = tl.exp2(size * (-2.0 * LOG2E))
    quotient = (1.0 - decayed) / (1.0 + decayed)
    square = x * x
    series = 1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0)))
    return tl.where(size < 0.2, x * series, tl.where(x < 0.0, -quotient, quotient))


@triton.jit
def is_finite(x):
    """Whether floats of any width are neither NaN nor infinite, from their exponent bits."""
    if x.dtype.primitive_bitwidth == 32:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    if x.dtype == tl.float16:
        return (x.to(tl.int16, bitcast=True) & 0x7C00) != 0x7C00
    return (x.to(tl.int16, bitcast=True) & 0x7F80) != 0x7F80


@triton.jit
def key_range(position, length, window_left, window_right):
    """The keys [lower, upper) that a query at ``position`` sees; a window of -1 has no limit."""
    position = position.to(tl.int64)
    lower = tl.where(window_left >= 0, tl.maximum(position - window_left, 0), 0)
    upper = tl.where(window_right >= 0, position + window_right + 1, length)
    upper = tl.minimum(tl.maximum(upper, 0), length)
    return tl.minimum(lower, upper).to(tl.int32), upper.to(tl.int32)


@triton.jit
def _locate(
    tile, table_row, needed, block_size, BLOCK_N: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr
):
    """(block, offset) of a tile's positions; columns are read where needed, None: everywhere."""
    position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if POWER_BLOCK_SIZE >= BLOCK_N:
        # The whole tile lies in one block, and at least one of its positions is needed.
        block = tl.load(table_row + tile // (POWER_BLOCK_SIZE // BLOCK_N))
        return block.to(tl.int64), (position % POWER_BLOCK_SIZE).to(tl.int64)
    else:
        if POWER_BLOCK_SIZE > 0:
            entry = table_row + position // POWER_BLOCK_SIZE
            offset = position % POWER_BLOCK_SIZE
        else:
            entry = table_row + position // block_size
            offset = position % block_size
        if needed is None:
            block = tl.load(entry)
        else:
            block = tl.load(entry, mask=needed, other=-1)
        return block.to(tl.int64), offset.to(tl.int64)


@triton.jit
def _load_rows(
    cache, place, loaded, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Load rows of WIDTH elements as [rows, BLOCK]; 0 past their ends and where not ``loaded``."""
    dim = tl.arange(0, BLOCK)
    mask = None
    if WIDTH < BLOCK:
        mask = (dim < WIDTH)[None, :]
        if loaded is not None:
            mask = mask & loaded[:, None]
    elif loaded is not None:
        mask = loaded[:, None]
    return load_as(cache + place[:, None] + dim[None, :], mask, FORMAT, DTYPE)


@triton.jit
def _scores(
    query, key, position, terms, HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr
):  # fmt: skip
    """Scaled, capped and biased products; finite unless query or key holds a NaN."""
    scores = tl.dot(query, tl.trans(key), input_precision="ieee") * terms.scale
    # An overflowed score is still a score: a row whose only key has one takes that key's value.
    scores = tl.clamp(scores, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    if HAS_SOFTCAP:
        scores = terms.softcap * tanh(scores * terms.inverse_softcap)
    if HAS_SLOPES:
        distance = position[None, :] - terms.position[:, None]
        scores += terms.slope[:, None] * distance.to(tl.float32)
        scores = tl.clamp(scores, -FLOAT32_MAX, FLOAT32_MAX, propagate_nan=tl.PropagateNan.ALL)
    return scores


@triton.jit
def _add_nonfinite_values(
    acc, weights, seen, values, place, loaded,
    HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the tile's NaN and infinite values to the rows that see them, and only to those."""
    dim = tl.arange(0, BLOCK_D)
    key = tl.arange(0, BLOCK_N)
    for chosen in range(BLOCK_N):
        is_chosen = key == chosen
        weight = tl.sum(tl.where(is_chosen[None, :], weights, 0.0), 1)
        row_sees = tl.sum((is_chosen[None, :] & seen).to(tl.int32), 1) > 0
        chosen_place = tl.sum(tl.where(is_chosen, place, 0), 0)
        chosen_loaded = tl.sum((is_chosen & loaded).to(tl.int32), 0) > 0
        pointers = values + chosen_place + dim
        value = load_as(pointers, (dim < HEAD_DIM) & chosen_loaded, FORMAT, DTYPE)
        added = row_sees[:, None] & ~is_finite(value)[None, :]
        # A select, not a sum with 0: the other elements keep even the sign of a zero.
        acc = tl.where(added, acc + weight[:, None] * value.to(tl.float32)[None, :], acc)
    return acc


@triton.jit
def attend(
    acc, maximum, total, query, keys, values, table_row, visible, terms, key_strides, value_strides,
    num_blocks, block_size, first_tile, stop_tile, skip_from, skipped,
    EDGE: tl.constexpr, TRUSTED: tl.constexpr, ONE_TOKEN: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    POWER_BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold KV tiles into the softmax state (acc, maximum, total) of a tile of rows.

    EDGE: the tiles hold keys that some row may not see. Otherwise every row sees all, except, if
    not TRUSTED, keys whose table entry names no block. Tiles [first_tile, stop_tile) are visited,
    without ``skipped`` of them from ``skip_from`` on.
    """
    DTYPE: tl.constexpr = query.dtype
    for index in tl.range(first_tile, stop_tile - skipped, num_stages=STAGES):
        tile = index
        loaded = None  # the positions of the tile whose rows are read; None: all
        if EDGE:
            tile = tl.where(index < skip_from, index, index + skipped)
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        if EDGE:
            loaded = (position >= visible.lowest) & (position < visible.highest)
        block, offset = _locate(tile, table_row, loaded, block_size, BLOCK_N, POWER_BLOCK_SIZE)
        if EDGE:
            loaded = loaded & (block >= 0) & (block < num_blocks)
        elif not TRUSTED:
            loaded = tl.broadcast_to((block >= 0) & (block < num_blocks), [BLOCK_N])

        key_place = block * key_strides.block + offset * key_strides.token
        key = _load_rows(keys, key_place, loaded, KEY_DIM, BLOCK_D, FORMAT, DTYPE)
        scores = _scores(query, key, position, terms, HAS_SOFTCAP, HAS_SLOPES)
        if EDGE:
            seen = position[None, :] >= visible.lower[:, None]
            seen = seen & (position[None, :] < visible.upper[:, None]) & loaded[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        elif not TRUSTED:
            scores = tl.where(loaded[None, :], scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        reference = new_maximum
        if EDGE or not TRUSTED:
            # A row that has seen no key yet: -inf minus -inf would be NaN.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        # Differences are multiplied by log2(e), not scores: the largest score then has the weight 1
        # exactly, and no score can overflow by it.
        weights = tl.exp2((scores - reference[:, None]) * LOG2E)
        decay = tl.exp2((maximum - reference) * LOG2E)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        maximum = new_maximum

        value_place = block * value_strides.block + offset * value_strides.token
        value = _load_rows(values, value_place, loaded, VALUE_DIM, BLOCK_DV, FORMAT, DTYPE)
        if EDGE and not ONE_TOKEN:
            # A key that one row sees and another does not: its weight of 0 would not hide a NaN.
            finite = is_finite(value)
            value = tl.where(finite, value, 0.0)
            acc = tl.dot(weights.to(DTYPE), value, acc, input_precision="ieee")
            if tl.min(tl.min(finite.to(tl.int32), 1), 0) == 0:
                acc = _add_nonfinite_values(
                    acc, weights, seen, values, value_place, loaded,
                    VALUE_DIM, BLOCK_N, BLOCK_DV, FORMAT, DTYPE,
                )  # fmt: skip
        else:
            acc = tl.dot(weights.to(DTYPE), value, acc, input_precision="ieee")
    return acc, maximum, total


@triton.jit
def finish(acc, maximum, total, sink, value_scale, HAS_SINK: tl.constexpr):
    """Turn a softmax state into (rows of out, lse); the sink is one more logit without a value."""
    seen = total != 0.0
    if HAS_SINK:
        joined = tl.maximum(maximum, sink)
        reference = tl.where(joined == float("-inf"), 0.0, joined)
        decay = tl.exp2((maximum - reference) * LOG2E)
        acc = acc * decay[:, None]
        total = total * decay + tl.exp2((sink - reference) * LOG2E)
        maximum = joined
    divisor = tl.where(total == 0.0, 1.0, total)
    rows = acc / divisor[:, None] * value_scale
    # Selected, because a value scale that is not finite would make NaN of 0.
    rows = tl.where(seen[:, None], rows, 0.0)
    return rows, tl.where(total == 0.0, float("-inf"), maximum + tl.log(divisor))
