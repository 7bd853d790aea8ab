"""Random rows of the table of cases, for hypothesis: what it shrinks to can be pasted into cases.py."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from cases import BF16, E4M3, E5M2, FP16, FP32, PagedCase, WriteCase
from pools import LAYOUTS

DTYPES = st.sampled_from([FP32, BF16, FP16])
INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])
# Around the ends of tiles and blocks, where kernels go wrong, and anywhere.
LENGTHS = st.integers(0, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129, 200])
QUERY_LENGTHS = st.integers(0, 5) | st.sampled_from([16, 17, 33])
HEAD_DIMS = st.integers(1, 40) | st.sampled_from([64, 80, 96, 128, 192, 256, 512])
BLOCK_SIZES = st.sampled_from([16, 1, 2, 3, 7, 8, 32, 48, 64, 100, 128, 300])
RATIOS = st.integers(1, 5) | st.sampled_from([7, 8, 16, 17])


@st.composite
def attention_options(draw, head_dim: int) -> dict:
    """Options of paged_attention, the default left out."""
    options = {}
    if draw(st.booleans()):
        # Scores of moderate size: float32 rounds a score of 1000 more than a budget can allow for.
        options["softmax_scale"] = round(draw(st.floats(-2, 2)) * head_dim**-0.5, 4)
    if draw(st.booleans()):
        options["causal"] = False
    if draw(st.booleans()):
        left = draw(st.integers(-1, 40) | st.sampled_from([2**31, 2**63 - 1]))
        options["window_size"] = (left, draw(st.integers(-1, 20) | st.just(2**63 - 1)))
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([0.5, 2.0, 30.0]))
    if draw(st.booleans()):
        options["num_splits"] = draw(st.sampled_from([1, 2, 3, 8, 200]))
    return options


@st.composite
def paged_cases(draw, windows: bool = True) -> PagedCase:
    kv_lens = draw(st.lists(LENGTHS, max_size=4))
    queries = st.lists(QUERY_LENGTHS, min_size=len(kv_lens), max_size=len(kv_lens))
    query_lens = draw(st.none() | queries)
    num_kv_heads = draw(st.integers(1, 3))
    head_dim = draw(HEAD_DIMS)
    dtype = draw(DTYPES)
    pool_dtype = draw(st.sampled_from([None, E4M3, E5M2]))
    options = draw(attention_options(head_dim))
    if not windows:
        options.pop("window_size", None)
    return PagedCase(
        name="found",
        kv_lens=kv_lens,
        query_lens=query_lens,
        num_heads=num_kv_heads * draw(RATIOS),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_head_dim=draw(st.none() | HEAD_DIMS),
        block_size=draw(BLOCK_SIZES),
        layout=draw(st.sampled_from(LAYOUTS)),
        dtype=dtype,
        pool_dtype=pool_dtype,
        table_dtype=draw(INDEX_DTYPES),
        length_dtype=draw(INDEX_DTYPES),
        extra_columns=draw(st.integers(0, 2)),
        padding_rows=0 if query_lens is None else draw(st.integers(0, 3)),
        scales=draw(st.sampled_from(["none", "one", "per_head"])) if pool_dtype else "none",
        alibi=draw(st.booleans()),
        sinks=draw(st.none() | st.lists(st.sampled_from([0.0, 5.0, -2.5, -torch.inf]), min_size=1, max_size=3)),
        options=options,
    )


@st.composite
def long_cases(draw) -> PagedCase:
    """A sequence that is cut into chunks or splits, beside a short one."""
    length = draw(st.integers(1000, 4200) | st.sampled_from([1023, 1024, 1025, 2048, 2049, 3072]))
    dtype = draw(DTYPES)
    window = draw(st.none() | st.tuples(st.sampled_from([0, 60, 1000, 1030, 3000]), st.just(0)))
    options = {"num_splits": draw(st.sampled_from([0, 1, 2, 3, 8]))}
    pool_dtype = draw(st.sampled_from([None, E4M3]))
    return PagedCase(
        name="found",
        kv_lens=[length, draw(st.integers(0, 70))],
        query_lens=draw(st.none() | st.tuples(st.sampled_from([1, 2, 9, 40, 70]), st.integers(0, 2))),
        num_heads=draw(st.sampled_from([1, 3, 4])),
        num_kv_heads=1,
        head_dim=draw(st.integers(1, 20)),
        value_head_dim=draw(st.none() | st.integers(1, 20)),
        block_size=draw(st.sampled_from([16, 7, 64, 300])),
        dtype=dtype,
        pool_dtype=pool_dtype,
        scales=draw(st.sampled_from(["none", "one"])) if pool_dtype else "none",
        alibi=draw(st.booleans()),
        sinks=draw(st.none() | st.just([1.0, -torch.inf])),
        options=options | ({"window_size": window} if window else {}),
    )


@st.composite
def write_cases(draw) -> WriteCase:
    num_blocks, block_size = draw(st.integers(0, 5)), draw(BLOCK_SIZES)
    num_slots = num_blocks * block_size
    slots = draw(st.lists(st.integers(0, num_slots - 1), max_size=20, unique=True)) if num_slots else []
    for negative in draw(st.lists(st.sampled_from([-1, -2, -(2**31)]), max_size=3)):
        slots.insert(draw(st.integers(0, len(slots))), negative)
    pool_dtype = draw(st.sampled_from([None, E4M3, E5M2]))
    dtype = draw(DTYPES if pool_dtype else DTYPES | st.sampled_from([E4M3, E5M2]))
    return WriteCase(
        name="found",
        slots=slots,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=draw(st.integers(1, 5)),
        head_dim=draw(HEAD_DIMS),
        value_head_dim=draw(st.none() | HEAD_DIMS),
        layout=draw(st.sampled_from(LAYOUTS)),
        dtype=dtype,
        pool_dtype=pool_dtype,
        index_dtype=draw(INDEX_DTYPES),
        padding_rows=draw(st.integers(0, 2)),
        source=draw(st.sampled_from(["packed", "contiguous", "expanded"])),
        scales=draw(st.sampled_from(["none", "one", "scalar", "per_head"])) if pool_dtype else "none",
    )
