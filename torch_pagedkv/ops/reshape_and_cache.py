"""reshape_and_cache: put the keys and values of new tokens into their slots."""

from __future__ import annotations

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_dtype,
    check_index,
    check_optional_tensors,
    check_pools,
    check_rows,
    check_scales,
    check_size,
    check_tensors,
    exceeds,
    fix_storage_offsets,
)
from torch_pagedkv.ops.checked_once import checked_once
from torch_pagedkv.ops.direct_calls import may_skip_dispatcher
from torch_pagedkv.ops.kernel_choice import cuda_kernel, native_kernel, triton_launcher
from torch_pagedkv.ops.registration import count_write, register_op

_NAME = "reshape_and_cache"


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Write the keys and values of new tokens into their slots of the paged pools.

    Token t goes to ``key_cache[slot // block_size, slot % block_size]`` with
    ``slot = slot_mapping[t]``, its value to the same place of ``value_cache``. Negative slots are
    skipped: they pad a batch to a fixed shape. An fp8 pool stores ``saturate(x / scale)``, the
    division in float32, to the nearest representable value; NaN stays NaN.

    Args:
        key: [T', num_kv_heads, head_dim], the pool's dtype (bits are copied), or float32, bfloat16
            or float16 for an fp8 pool. Any strides with the last one 1, so slices of a fused
            projection need no copy. Rows past T are padding and never read.
        value: [T', num_kv_heads, value_head_dim], key's dtype, any strides with the last one 1.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], **mutated in place**. float32,
            bfloat16, float16, float8_e4m3fn or float8_e5m2; any strides with the last one 1 (NHD,
            HND and packed pools alike).
        value_cache: [num_blocks, block_size, num_kv_heads, value_head_dim], **mutated in place**,
            key_cache's dtype; its strides are its own.
        slot_mapping: [T] with T <= T', int64 or int32: ``physical_block * block_size + offset``;
            negative: the token is not stored.
        k_scale, v_scale: None (1) or float32, one element or [num_kv_heads], read on the device at
            run time; only for an fp8 pool and a key that is not fp8.

    All tensors are on one device.

    Returns:
        None.

    Raises:
        ValueError: shapes, strides, devices or scales do not fit, a pool requires grad; on CPU a
            slot at or past ``num_blocks * block_size`` (nothing is written then).
        TypeError: a dtype does not fit.

    Not checked:
        On CUDA a slot past the pool writes nothing and raises nothing (but see ``checks``). Of two
        tokens with one slot the last wins on CPU, either one on CUDA. Keys and values that lie in the
        pools themselves, where the call writes: what is read of them may be what it wrote.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.zeros(2, 3, 16, 1, 4).unbind(0)
        >>> key = value = torch.ones(2, 1, 4)
        >>> torch_pagedkv.reshape_and_cache(
        ...     key, value, key_cache, value_cache, torch.tensor([36, -1])
        ... )
        >>> key_cache[2, 4, 0].tolist(), int(key_cache.count_nonzero())
        ([1.0, 1.0, 1.0, 1.0], 4)

    Source: the op of this name in vLLM (``reshape_and_cache_flash``), whose slot convention this is.
    """
    tensors = (key, value, key_cache, value_cache, slot_mapping)
    if may_skip_dispatcher(tensors, () if k_scale is v_scale is None else (k_scale, v_scale)):
        device = key_cache.get_device()
        kernel = cuda_kernel(_NAME, device) if device >= 0 else native_kernel(_NAME)
        if kernel is not None and not key_cache.requires_grad and not value_cache.requires_grad:
            try:
                kernel(*tensors, k_scale, v_scale)
                return count_write(key_cache, value_cache)
            except Exception:
                pass  # nothing was written; the long way has the words for it
    check_tensors(
        _NAME,
        key=key,
        value=value,
        key_cache=key_cache,
        value_cache=value_cache,
        slot_mapping=slot_mapping,
    )
    check_optional_tensors(_NAME, k_scale=k_scale, v_scale=v_scale)
    _OP(key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)


def _check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale) -> None:
    check_pools(_NAME, key_cache, value_cache, written=True)
    is_fp8 = key_cache.dtype in FP8_DTYPES
    accepted = (key_cache.dtype, *FLOAT_DTYPES) if is_fp8 else (key_cache.dtype,)
    check_dtype(_NAME, "key", key, accepted)
    check_dtype(_NAME, "value", value, (key.dtype,))
    check_rows(_NAME, "key", key, "[num_tokens, num_kv_heads, head_dim]", "key_cache", key_cache)
    check_rows(_NAME, "value", value, "[num_tokens, num_kv_heads, value_head_dim]", "key_cache", key_cache)
    check_size(_NAME, "value", value, 0, key.shape[0], "key's num_tokens")
    for name, rows, cache in (("key", key, key_cache), ("value", value, value_cache)):
        check_size(_NAME, name, rows, 1, cache.shape[2], f"{name}_cache's num_kv_heads")
        check_size(_NAME, name, rows, 2, cache.shape[3], f"{name}_cache's head_dim")
    check_index(_NAME, "slot_mapping", slot_mapping, "[num_tokens]", "key_cache", key_cache)
    if exceeds(slot_mapping.shape[0], key.shape[0]):
        raise ValueError(
            f"{_NAME}: slot_mapping must have at most as many elements as key has tokens, "
            f"{key.shape[0]}, got {slot_mapping.shape[0]}"
        )
    check_scales(_NAME, key_cache, is_fp8 and key.dtype not in FP8_DTYPES, k_scale, v_scale)


_check_once = checked_once(_check)


def _cpu(key, value, key_cache, value_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    arguments = (key, value, key_cache, value_cache, slot_mapping)
    kernel = native_kernel(_NAME)
    if kernel is None:
        _check(*arguments, k_scale, v_scale)
        return reference.reshape_and_cache(*arguments, k_scale=k_scale, v_scale=v_scale)
    _run(kernel, arguments, k_scale, v_scale)


def _cuda(key, value, key_cache, value_cache, slot_mapping, k_scale=None, v_scale=None) -> None:
    arguments = (key, value, key_cache, value_cache, slot_mapping)
    kernel = None if slot_mapping is None else cuda_kernel(_NAME, slot_mapping.get_device())
    if kernel is not None and not value_checking.enabled:
        return _run(kernel, arguments, k_scale, v_scale)
    looks = _check_once(*arguments, k_scale, v_scale)
    if value_checking.enabled:
        value_checking.check_write(_NAME, slot_mapping, key_cache)
    if kernel is None:
        return triton_launcher(_NAME)(*arguments, k_scale, v_scale, looks)
    _run(kernel, arguments, k_scale, v_scale)


def _run(kernel, arguments, k_scale, v_scale) -> None:
    """Call a C++ kernel, which refuses what _check refuses in a fraction of its time; _check has the words."""
    _, _, key_cache, value_cache, _ = arguments
    if key_cache is None or value_cache is None or key_cache.requires_grad or value_cache.requires_grad:
        _check(*arguments, k_scale, v_scale)  # what a kernel cannot see
    try:
        return kernel(*arguments, k_scale, v_scale)
    except Exception as error:
        refusal = error
    _check(*arguments, k_scale, v_scale)
    raise refusal


def _fake(key, value, key_cache, value_cache, slot_mapping, *, k_scale=None, v_scale=None) -> None:
    _check(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)
    fix_storage_offsets(key_cache, value_cache)


_OP = register_op(
    "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
    "Tensor slot_mapping, *, Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    mutates=(2, 3),
)
