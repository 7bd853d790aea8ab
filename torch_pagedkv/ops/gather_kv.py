"""gather_kv: read sequences out of the paged pools into dense tensors."""

from __future__ import annotations

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_batch,
    check_optional_tensors,
    check_pools,
    check_scales,
    check_tensors,
    name_dtypes,
)
from torch_pagedkv.ops.kernel_choice import native_kernel, triton_launcher
from torch_pagedkv.ops.registration import register_op

_NAME = "gather_kv"


def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys and values of sequences from paged pools, dequantised, in logical order.

    ``keys[s, j] = key_cache[block_table[s, j // block_size], j % block_size] * k_scale`` for
    ``j < seqused_k[s]``, and zero from there on.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], float32, bfloat16, float16,
            float8_e4m3fn or float8_e5m2; any strides with the last one 1.
        value_cache: [num_blocks, block_size, num_kv_heads, value_head_dim], key_cache's dtype; its
            strides are its own.
        block_table: [num_sequences, max_blocks], int32 or int64, last stride 1; entries past
            ``ceil(seqused_k / block_size)`` are never read.
        seqused_k: [num_sequences], int32 or int64.
        k_scale, v_scale: None (1) or float32, one element or [num_kv_heads]; only where fp8 is
            converted.
        dtype: float32, bfloat16, float16 or the pool's own (then bits are copied). None: the
            pool's, or bfloat16 for fp8 pools.

    All tensors are on one device.

    Returns:
        keys [num_sequences, max_blocks * block_size, num_kv_heads, head_dim] and values
        [..., value_head_dim], new and contiguous.

    Raises:
        ValueError: shapes, strides, devices or scales do not fit; on CPU also a length or used
            table entry out of range.
        TypeError: a dtype does not fit.
        NotImplementedError: a backward pass; CUDA tensors without Triton.

    Not checked:
        On CUDA values of index tensors raise nothing (but see ``checks``): lengths are clamped to
        the table, and tokens whose table entry is outside the pool are zero.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.arange(24.0).view(2, 3, 4, 1, 1).unbind(0)
        >>> keys, values = torch_pagedkv.gather_kv(
        ...     key_cache, value_cache, torch.tensor([[2, 0]]), torch.tensor([5])
        ... )
        >>> keys.flatten().tolist()
        [8.0, 9.0, 10.0, 11.0, 0.0, 0.0, 0.0, 0.0]

    Source: ours; what attention over a dense copy needs, and the way to look at a cache.
    """
    check_tensors(
        _NAME,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seqused_k=seqused_k,
    )
    check_optional_tensors(_NAME, k_scale=k_scale, v_scale=v_scale)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{_NAME}: dtype must be a torch.dtype or None, got {type(dtype).__name__}")
    return _OP(key_cache, value_cache, block_table, seqused_k, k_scale=k_scale, v_scale=v_scale, dtype=dtype)


def _check(key_cache, value_cache, block_table, seqused_k, k_scale, v_scale, dtype) -> torch.dtype:
    """Check the arguments and return the dtype of the result."""
    check_pools(_NAME, key_cache, value_cache, written=False)
    block_size = key_cache.shape[1]
    check_batch(_NAME, block_table, seqused_k, None, block_size, "key_cache", key_cache)
    is_fp8 = key_cache.dtype in FP8_DTYPES
    if dtype is None:
        dtype = torch.bfloat16 if is_fp8 else key_cache.dtype
    accepted = tuple(dict.fromkeys((*FLOAT_DTYPES, key_cache.dtype)))
    if dtype not in accepted:
        raise TypeError(f"{_NAME}: dtype must be {name_dtypes(accepted)}, got {name_dtypes((dtype,))}")
    check_scales(_NAME, key_cache, is_fp8 and dtype != key_cache.dtype, k_scale, v_scale)
    return dtype


def _outputs(key_cache, value_cache, block_table, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    num_sequences, max_blocks = block_table.shape
    _, block_size, num_kv_heads, head_dim = key_cache.shape
    shape = (num_sequences, max_blocks * block_size, num_kv_heads)
    keys = key_cache.new_empty((*shape, head_dim), dtype=dtype)
    return keys, value_cache.new_empty((*shape, value_cache.shape[3]), dtype=dtype)


def _cpu(key_cache, value_cache, block_table, seqused_k, *, k_scale=None, v_scale=None, dtype=None):
    batch = (key_cache, value_cache, block_table, seqused_k)
    dtype = _check(*batch, k_scale, v_scale, dtype)
    kernel = native_kernel(_NAME)
    if kernel is None:
        return reference.gather_kv(*batch, k_scale=k_scale, v_scale=v_scale, dtype=dtype)
    keys, values = _outputs(key_cache, value_cache, block_table, dtype)
    kernel(keys, values, *batch, k_scale, v_scale)
    return keys, values


def _cuda(key_cache, value_cache, block_table, seqused_k, *, k_scale=None, v_scale=None, dtype=None):
    batch = (key_cache, value_cache, block_table, seqused_k)
    dtype = _check(*batch, k_scale, v_scale, dtype)
    if value_checking.enabled:
        num_blocks, block_size = key_cache.shape[:2]
        sizes = dict(block_size=block_size, num_blocks=num_blocks, window_left=-1)
        num_tokens = block_table.shape[0]  # as if each sequence had one query that sees all
        value_checking.check_batch(_NAME, *batch[2:], None, num_tokens=num_tokens, **sizes)
    keys, values = _outputs(key_cache, value_cache, block_table, dtype)
    triton_launcher(_NAME)(keys, values, *batch, k_scale, v_scale)
    return keys, values


def _fake(key_cache, value_cache, block_table, seqused_k, *, k_scale=None, v_scale=None, dtype=None):
    dtype = _check(key_cache, value_cache, block_table, seqused_k, k_scale, v_scale, dtype)
    return _outputs(key_cache, value_cache, block_table, dtype)


_OP = register_op(
    "gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seqused_k, *, "
    "Tensor? k_scale=None, Tensor? v_scale=None, ScalarType? dtype=None) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
