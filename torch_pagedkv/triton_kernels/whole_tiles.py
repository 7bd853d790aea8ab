"""The loop of long query tiles over the KV tiles that every row sees whole: no masks, no waits for the table."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.fp8 import load_as
from torch_pagedkv.triton_kernels.scores import LOG2E, scores_of

# Shifts up to this leave a float32 sum of products enough bits to weigh float16 values by.
LARGEST_SHIFT: tl.constexpr = tl.constexpr(2.0**20)


@triton.jit
def _entries(table_row, tile, exists, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The table entry of each position of a tile; one for all where a block holds the tile."""
    if BLOCK_SIZE % BLOCK_N == 0:
        column = tile // (BLOCK_SIZE // BLOCK_N)
    elif BLOCK_N % BLOCK_SIZE == 0:
        column = tile * (BLOCK_N // BLOCK_SIZE) + tl.arange(0, BLOCK_N) // BLOCK_SIZE
    else:
        column = (tile * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.uint32) // BLOCK_SIZE
    if exists is None:
        entries = tl.load(table_row + column)
    else:
        entries = tl.load(table_row + column, mask=exists, other=0)
    return entries.to(tl.int32)


@triton.jit
def _within(tile, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The offset of each position of a tile in its block."""
    lane = tl.arange(0, BLOCK_N)
    if BLOCK_SIZE % BLOCK_N == 0:
        within = (tile % (BLOCK_SIZE // BLOCK_N)) * BLOCK_N + lane
    elif BLOCK_N % BLOCK_SIZE == 0:
        within = lane % BLOCK_SIZE
    else:
        within = ((tile * BLOCK_N + lane).to(tl.uint32) % BLOCK_SIZE).to(tl.int32)
    return within


@triton.jit
def _places(entries, within, strides, ALIGNMENT: tl.constexpr, WIDE: tl.constexpr):
    if WIDE:
        place = entries.to(tl.int64) * strides.block + within.to(tl.int64) * strides.token
    else:  # half of the registers
        place = entries * strides.block + within * strides.token
    return tl.multiple_of(place, ALIGNMENT)


@triton.jit
def _rows(
    cache, place, WIDTH: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    dim = tl.arange(0, BLOCK)[None, :]
    mask = None
    if WIDTH < BLOCK:
        mask = dim < WIDTH
    return load_as(cache + place[:, None] + dim, mask, FORMAT, DTYPE)


@triton.jit
def fold_whole_tiles(
    query, keys, values, table_row, first_tile, stop_tile, terms, key_strides, value_strides,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_ALIGNMENT: tl.constexpr, VALUE_ALIGNMENT: tl.constexpr, SAME_STRIDES: tl.constexpr,
    WIDE: tl.constexpr, FORMAT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return (acc, maximum, total, redo) over tiles [first_tile, stop_tile), whose blocks all exist.

    WIDE: a pool reaches 2**31 elements or more. ``redo`` are the rows whose scores this loop can not
    weigh; their state is that of no tile.
    """
    DTYPE: tl.constexpr = query.dtype
    PLAIN: tl.constexpr = DTYPE != tl.float32 and not HAS_SOFTCAP and not HAS_SLOPES
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    unit = terms.scale * LOG2E
    # The entries of a tile are loaded while the one before is computed: loads that wait for loads
    # would take a stage of the pipeline from keys and values.
    entries = _entries(table_row, first_tile, first_tile < stop_tile, BLOCK_N, BLOCK_SIZE)
    for tile in tl.range(first_tile, stop_tile, num_stages=STAGES):
        within = _within(tile, BLOCK_N, BLOCK_SIZE)
        key_place = _places(entries, within, key_strides, KEY_ALIGNMENT, WIDE)
        value_place = key_place
        if not SAME_STRIDES:
            value_place = _places(entries, within, value_strides, VALUE_ALIGNMENT, WIDE)
        entries = _entries(table_row, tl.minimum(tile + 1, stop_tile - 1), None, BLOCK_N, BLOCK_SIZE)
        key = _rows(keys, key_place, KEY_DIM, BLOCK_D, FORMAT, DTYPE)
        if PLAIN:
            # Weights are 2 ** (product * unit - shift), one instruction and the power for each:
            # what the shift is rounded by, it is in all weights of a row alike.
            products = tl.dot(query, tl.trans(key))
            larger = tl.maximum(maximum, tl.max(products, 1))
            shift = larger * unit
            weights = tl.exp2(products * unit - shift[:, None])
            decay = tl.exp2(maximum * unit - shift)
        else:
            position = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            scores = scores_of(query, key, position, terms, HAS_SOFTCAP, HAS_SLOPES)
            larger = tl.maximum(maximum, tl.max(scores, 1))
            weights = tl.exp2((scores - larger[:, None]) * LOG2E)
            decay = tl.exp2((maximum - larger) * LOG2E)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        maximum = larger
        value = _rows(values, value_place, VALUE_DIM, BLOCK_DV, FORMAT, DTYPE)
        acc = tl.dot(weights.to(DTYPE), value, acc, input_precision="ieee")
    redo = tl.zeros([BLOCK_M], tl.int1)
    if PLAIN:
        weighed = (tl.abs(maximum * unit) < LARGEST_SHIFT) & (total > 0.0) & (total < float("inf"))
        redo = ~weighed & (first_tile < stop_tile)
        acc = tl.where(weighed[:, None], acc, 0.0)
        maximum = tl.where(weighed, maximum * terms.scale, float("-inf"))
        total = tl.where(weighed, total, 0.0)
    return acc, maximum, total, redo
