"""The inner loop of attention: a tile of query rows meets the KV tiles of one sequence."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.fp8 import load_as
from torch_pagedkv.triton_kernels.query_tiles import Visible, all_blocks_exist
from torch_pagedkv.triton_kernels.scores import LOG2E, scores_of
from torch_pagedkv.triton_kernels.whole_tiles import fold_whole_tiles


@triton.jit
def is_finite(x):
    """Whether floats of any width are neither NaN nor infinite, from their exponent bits."""
    if x.dtype.primitive_bitwidth == 32:
        return (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    elif x.dtype == tl.float16:
        return (x.to(tl.int16, bitcast=True) & 0x7C00) != 0x7C00
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7F80) != 0x7F80


@triton.jit
def _locate(
    tile, table_row, lowest, highest, num_blocks, block_size, key_strides, value_strides,
    EDGE: tl.constexpr, BLOCK_N: tl.constexpr, GRANULE: tl.constexpr,
    POWER_BLOCK_SIZE: tl.constexpr, KEY_ALIGNMENT: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """(where a tile's positions lie in the key pool, in the value pool, whether to load them).

    GRANULE: a power of two that divides the block size, so that as many aligned positions share a
    table entry. EDGE: entries and rows outside [lowest, highest) are not read.
    """
    lane = tl.arange(0, BLOCK_N)
    position = tile * BLOCK_N + lane
    PARTS: tl.constexpr = BLOCK_N // GRANULE
    if PARTS <= 8:
        # A scalar entry for each part costs the pipeline no stage, unlike a vector of entries.
        loaded = tl.zeros([BLOCK_N], tl.int1)
        key_place = tl.zeros([BLOCK_N], tl.int64)
        value_place = tl.zeros([BLOCK_N], tl.int64)
        for part in tl.static_range(PARTS):
            start = tile * BLOCK_N + part * GRANULE
            column, offset = _divide(start, block_size, POWER_BLOCK_SIZE)
            if EDGE:
                needed = (start < highest) & (start + GRANULE > lowest)
                block = tl.load(table_row + column, mask=needed, other=-1).to(tl.int64)
            else:
                block = tl.load(table_row + column).to(tl.int64)
            here = lane // GRANULE == part
            loaded = tl.where(here, (block >= 0) & (block < num_blocks), loaded)
            key_start = block * key_strides.block + offset.to(tl.int64) * key_strides.token
            key_place = tl.where(here, key_start, key_place)
            value_start = block * value_strides.block + offset.to(tl.int64) * value_strides.token
            value_place = tl.where(here, value_start, value_place)
        within = (lane % GRANULE).to(tl.int64)
    else:
        column, within = _divide(position, block_size, POWER_BLOCK_SIZE)
        within = within.to(tl.int64)
        if EDGE:
            needed = (position >= lowest) & (position < highest)
            block = tl.load(table_row + column, mask=needed, other=-1).to(tl.int64)
        else:
            block = tl.load(table_row + column).to(tl.int64)
        loaded = (block >= 0) & (block < num_blocks)
        key_place = block * key_strides.block
        value_place = block * value_strides.block
    if EDGE:
        loaded = loaded & (position >= lowest) & (position < highest)
    # Said once more, since some versions of Triton forget it of selected values; without it rows
    # are read element by element.
    key_place = tl.multiple_of(key_place + within * key_strides.token, KEY_ALIGNMENT)
    value_place = tl.multiple_of(value_place + within * value_strides.token, VALUE_ALIGNMENT)
    return key_place, value_place, loaded


@triton.jit
def _divide(position, block_size, POWER_BLOCK_SIZE: tl.constexpr):
    """(logical block, offset in it) of positions; shifts where the block size is a power of two."""
    if POWER_BLOCK_SIZE > 0:
        return position // POWER_BLOCK_SIZE, position % POWER_BLOCK_SIZE
    else:
        return position // block_size, position % block_size


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
def _add_nonfinite_values(
    acc, first, visible, values, table_row, strides, num_blocks, block_size,
    WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
    POWER_BLOCK_SIZE: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Add the NaN and infinite values of the tile from ``first`` to the rows that see them only."""
    dim = tl.arange(0, BLOCK)
    stop = tl.minimum(first + BLOCK_N, visible.highest)
    first = tl.maximum(first, visible.lowest)
    for index in range(stop - first):
        position = first + index
        column, offset = _divide(position, block_size, POWER_BLOCK_SIZE)
        block = tl.load(table_row + column).to(tl.int64)
        exists = (block >= 0) & (block < num_blocks)
        place = block * strides.block + offset.to(tl.int64) * strides.token
        value = load_as(values + place + dim, (dim < WIDTH) & exists, FORMAT, DTYPE)
        sees = (position >= visible.lower) & (position < visible.upper)
        # A select, not a sum with 0: the other elements keep even the sign of a zero. Any weight
        # leaves an infinity what it is, so it needs none.
        added = sees[:, None] & ~is_finite(value)[None, :]
        acc = tl.where(added, acc + value.to(tl.float32)[None, :], acc)
    return acc


@triton.jit
def _fold(
    acc, maximum, total, query, keys, values, table_row, rows, terms, key_strides, value_strides,
    num_blocks, block_size, first_tile, stop_tile, whole_from, whole_to, skipped, redo,
    EDGE: tl.constexpr, LONG: tl.constexpr, ONE_TOKEN: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GRANULE: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr, FORMAT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Fold KV tiles into the softmax state (acc, maximum, total) of a tile of rows.

    EDGE: the tiles hold keys that some row may not see. Otherwise every row sees all, except keys
    whose table entry names no block. Tiles [first_tile, stop_tile) are visited, without ``skipped``
    of them from ``whole_from`` on. If LONG, only the rows ``redo`` take those in [whole_from, whole_to).
    """
    DTYPE: tl.constexpr = query.dtype
    for index in tl.range(first_tile, stop_tile - skipped, num_stages=STAGES):
        visible = rows
        tile = index
        if EDGE:
            tile = tl.where(index < whole_from, index, index + skipped)
        if LONG:
            is_whole = (tile >= whole_from) & (tile < whole_to)
            upper = tl.where(redo | ~is_whole, rows.upper, 0)
            visible = Visible(rows.lower, upper, rows.lowest, rows.highest)
        position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        key_place, value_place, loaded = _locate(
            tile, table_row, visible.lowest, visible.highest, num_blocks, block_size,
            key_strides, value_strides, EDGE, BLOCK_N, GRANULE, POWER_BLOCK_SIZE,
            KEY_ALIGNMENT, VALUE_ALIGNMENT,
        )  # fmt: skip
        REPLACES: tl.constexpr = EDGE and (LONG or not ONE_TOKEN)
        if REPLACES:
            # A key that one row sees and another does not: a weight of 0 would not hide its NaN.
            value = _load_rows(values, value_place, loaded, VALUE_DIM, BLOCK_DV, FORMAT, DTYPE)
            finite = is_finite(value)
            all_finite = tl.min(tl.min(finite.to(tl.int32), 1), 0) == 1
            value = tl.where(finite, value, 0.0)
        key = _load_rows(keys, key_place, loaded, KEY_DIM, BLOCK_D, FORMAT, DTYPE)
        scores = scores_of(query, key, position, terms, HAS_SOFTCAP, HAS_SLOPES)
        if EDGE:
            seen = position[None, :] >= visible.lower[:, None]
            seen = seen & (position[None, :] < visible.upper[:, None]) & loaded[None, :]
            scores = tl.where(seen, scores, float("-inf"))
        else:
            scores = tl.where(loaded[None, :], scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        # A row that has seen no key yet: -inf minus -inf would be NaN.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        # Differences are multiplied by log2(e), not scores: the largest score then has the weight 1
        # exactly, and no score can overflow by it.
        weights = tl.exp2((scores - reference[:, None]) * LOG2E)
        decay = tl.exp2((maximum - reference) * LOG2E)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        maximum = new_maximum

        if not REPLACES:
            value = _load_rows(values, value_place, loaded, VALUE_DIM, BLOCK_DV, FORMAT, DTYPE)
        acc = tl.dot(weights.to(DTYPE), value, acc, input_precision="ieee")
        if REPLACES and not all_finite:
            acc = _add_nonfinite_values(
                acc, tile * BLOCK_N, visible, values, table_row, value_strides, num_blocks,
                block_size, VALUE_DIM, BLOCK_N, BLOCK_DV, POWER_BLOCK_SIZE, FORMAT, DTYPE,
            )  # fmt: skip
    return acc, maximum, total


@triton.jit
def attend(
    query, keys, values, table_row, tiles, visible, terms, key_strides, value_strides,
    num_blocks, block_size,
    LONG: tl.constexpr, ONE_TOKEN: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EDGE_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    GRANULE: tl.constexpr, BLOCK_SIZE: tl.constexpr, POWER_BLOCK_SIZE: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, FORMAT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the softmax state (acc, maximum, total) of a tile of rows over its KV tiles."""
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    redo = tl.zeros([BLOCK_M], tl.int1)
    # Tiles that not every row sees whole are cut finer: less of them is computed in vain, and
    # masks and replaced values find the registers that they need.
    PARTS: tl.constexpr = BLOCK_N // EDGE_N
    EDGE_GRANULE: tl.constexpr = min(GRANULE, EDGE_N)
    inner_from, inner_to = tiles.inner_from, tiles.inner_to
    if LONG:
        # Looking once at all table entries keeps the loop over whole tiles free of masks.
        first, stop = inner_from * BLOCK_N, inner_to * BLOCK_N
        trusted = all_blocks_exist(table_row, first, stop, num_blocks, block_size)
        trusted = trusted & (terms.scale > 0.0) & (terms.scale < float("inf"))
        inner_to = tl.where(trusted, inner_to, inner_from)
        acc, maximum, total, redo = fold_whole_tiles(
            query, keys, values, table_row, inner_from, inner_to, terms, key_strides, value_strides,
            KEY_DIM, VALUE_DIM, BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_DV, BLOCK_SIZE,
            KEY_ALIGNMENT, VALUE_ALIGNMENT, SAME_STRIDES, WIDE, FORMAT, HAS_SOFTCAP, HAS_SLOPES, STAGES,
        )  # fmt: skip
    skipped = (inner_to - inner_from) * PARTS
    inner_part = inner_from * PARTS
    first_part = tl.minimum(tl.maximum(tiles.first * PARTS, visible.lowest // EDGE_N), inner_part)
    stop_part = tl.minimum(tl.cdiv(visible.highest, EDGE_N), tiles.stop * PARTS)
    stop_part = tl.maximum(stop_part, inner_to * PARTS)
    if LONG:
        skipped = tl.where(tl.max(redo.to(tl.int32), 0) == 1, 0, skipped)
    acc, maximum, total = _fold(
        acc, maximum, total, query, keys, values, table_row, visible, terms,
        key_strides, value_strides, num_blocks, block_size,
        first_part, stop_part, inner_part, inner_to * PARTS, skipped, redo,
        True, LONG, ONE_TOKEN, KEY_DIM, VALUE_DIM, EDGE_N, BLOCK_D, BLOCK_DV,
        EDGE_GRANULE, POWER_BLOCK_SIZE, KEY_ALIGNMENT, VALUE_ALIGNMENT, FORMAT,
        HAS_SOFTCAP, HAS_SLOPES, 1,
    )  # fmt: skip
    if LONG:
        return acc, maximum, total
    else:
        return _fold(
            acc, maximum, total, query, keys, values, table_row, visible, terms,
            key_strides, value_strides, num_blocks, block_size,
            inner_from, inner_to, inner_from, inner_to, 0, redo,
            False, False, ONE_TOKEN, KEY_DIM, VALUE_DIM, BLOCK_N, BLOCK_D, BLOCK_DV,
            GRANULE, POWER_BLOCK_SIZE, KEY_ALIGNMENT, VALUE_ALIGNMENT, FORMAT,
            HAS_SOFTCAP, HAS_SLOPES, STAGES,
        )  # fmt: skip


@triton.jit
def finish(acc, maximum, total, sink, value_scale, HAS_SINK: tl.constexpr):
    """Turn a softmax state into (rows of out, lse); the sink is one more logit without a value."""
    seen = total != 0.0
    if HAS_SINK:
        sink = sink.to(tl.float32)
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
