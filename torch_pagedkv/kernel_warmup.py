"""warmup: compile the Triton kernels of a model's shapes before the first request."""

from __future__ import annotations

import torch

from torch_pagedkv.ops import (
    compute_slot_mapping,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    reshape_and_cache,
)
from torch_pagedkv.ops.argument_checks import FLOAT_DTYPES, FP8_DTYPES, INDEX_DTYPES, check_pools
from torch_pagedkv.ops.value_checking import checks

_NAME = "warmup"
# More query tokens than a short tile has rows, and more positions than two KV tiles have.
_LONG_QUERY = 257
_POSITIONS = 1024


def warmup(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_heads: int,
    *,
    dtype: torch.dtype | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    index_dtype: torch.dtype = torch.int32,
    slot_dtype: torch.dtype = torch.int64,
) -> int:
    """Compile every Triton kernel that calls on these pools will need, whatever their lengths.

    Each of the six ops is called with no token to store and no key to see, in the forms that are
    different kernels: decode and packed queries, short and long ones, with and without split keys;
    queries, keys and values contiguous and as slices of one projection. Afterwards no number of
    tokens, sequences, table columns or splits, no window, mask or softmax scale compiles anything.
    What CUDA C++ kernels serve needs no compiling. On CPU nothing is called.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], a layer's pool as later calls get
            it, since kernels depend on its strides; not altered. Layers with pools of the same
            shape and strides share kernels.
        value_cache: [num_blocks, block_size, num_kv_heads, value_head_dim], not altered.
        num_heads: query heads, a multiple of num_kv_heads.
        dtype: of queries, keys and values; None: the pool's, or bfloat16 for an fp8 pool.
        softcap: 0 is one kernel, any other number another one.
        alibi_slopes, sinks, k_scale, v_scale: as later calls get them.
        index_dtype: of block_table, seqused_k, cu_seqlens_q and the ids of copy_blocks.
        slot_dtype: of slot_mapping where it is written.

    Returns:
        How many kernels were compiled, or found in Triton's cache on disk, now: 0 on CPU, and 0 at a
        second call.

    Raises:
        ValueError, TypeError: what the ops raise for such arguments.

    Not checked:
        Index tensors and vectors are taken to have stride 1. Other strides, or tensors that start at
        an address that is no multiple of 16 bytes, may be kernels of their own.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.zeros(2, 3, 16, 2, 64).unbind(0)
        >>> torch_pagedkv.warmup(key_cache, value_cache, num_heads=8)      # CPU: nothing to compile
        0

    Source: ours.
    """
    check_pools(_NAME, key_cache, value_cache, written=True)
    if dtype is None:
        dtype = torch.bfloat16 if key_cache.dtype in FP8_DTYPES else key_cache.dtype
    if dtype not in FLOAT_DTYPES:
        raise TypeError(f"{_NAME}: dtype must be float32, bfloat16, float16 or None, got {dtype}")
    for name, given in (("index_dtype", index_dtype), ("slot_dtype", slot_dtype)):
        if given not in INDEX_DTYPES:
            raise TypeError(f"{_NAME}: {name} must be torch.int32 or torch.int64, got {given}")
    num_kv_heads = key_cache.shape[2]
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(
            f"{_NAME}: num_heads must be a positive multiple of num_kv_heads = {num_kv_heads}, got {num_heads}"
        )
    if not key_cache.is_cuda:
        return 0
    from torch_pagedkv.triton_kernels.compiled_kernels import num_compiled

    before = num_compiled()
    with checks(False):
        pools = (key_cache, value_cache)
        options = dict(softcap=softcap, alibi_slopes=alibi_slopes, sinks=sinks)
        call_every_op(pools, num_heads, dtype, options, dict(k_scale=k_scale, v_scale=v_scale), index_dtype, slot_dtype)
    return num_compiled() - before


def call_every_op(pools, num_heads, dtype, options, scales, index_dtype, slot_dtype) -> None:
    """Call each op in every form that is a kernel of its own, on sequences without a key."""
    key_cache, _ = pools
    num_blocks, block_size = key_cache.shape[:2]
    columns = -(-_POSITIONS // block_size)

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=index_dtype, device=key_cache.device)

    table, lengths = zeros(1, columns), zeros(1)
    nowhere = torch.full((1,), -1, dtype=slot_dtype, device=key_cache.device)
    for num_tokens in (1, _LONG_QUERY):
        starts = zeros(2)
        starts[1] = num_tokens
        for query, key, value in _projections(pools, num_heads, dtype, num_tokens):
            reshape_and_cache(key, value, *pools, nowhere, **scales)
            for num_splits in (1, 2):
                attended = paged_attention(
                    query, *pools, table, lengths, starts, num_splits=num_splits, return_lse=True, **options, **scales
                )
                if num_tokens == 1:
                    paged_attention(query, *pools, table, lengths, num_splits=num_splits, **options, **scales)
    merge_attention_states(*attended, *attended)
    gather_kv(*pools, table, lengths, **scales)
    if num_blocks > 0:
        outside = zeros(1).sub_(1)
        copy_blocks(*pools, outside, outside)
    compute_slot_mapping(table, lengths, starts, block_size, num_tokens)
    compute_slot_mapping(table, lengths, None, block_size, 1)


def _projections(pools, num_heads, dtype, num_tokens):
    """Yield (query, key, value) as tensors of their own, then as slices of one projection."""
    key_cache, value_cache = pools
    num_kv_heads, head_dim, value_head_dim = key_cache.shape[2], key_cache.shape[3], value_cache.shape[3]
    shapes = ((num_heads, head_dim), (num_kv_heads, head_dim), (num_kv_heads, value_head_dim))
    yield tuple(torch.zeros(num_tokens, *shape, dtype=dtype, device=key_cache.device) for shape in shapes)
    widths = [heads * dim for heads, dim in shapes]
    packed = torch.zeros(num_tokens, sum(widths), dtype=dtype, device=key_cache.device)
    yield tuple(part.unflatten(1, shape) for part, shape in zip(packed.split(widths, dim=1), shapes, strict=True))
