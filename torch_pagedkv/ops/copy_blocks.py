"""copy_blocks: copy whole KV blocks inside the pools."""

from __future__ import annotations

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    check_index,
    check_pools,
    check_size,
    check_tensors,
    fix_storage_offsets,
)
from torch_pagedkv.ops.kernel_choice import native_kernel, triton_launcher
from torch_pagedkv.ops.registration import register_op

_NAME = "copy_blocks"


def copy_blocks(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    src_blocks: torch.Tensor,
    dst_blocks: torch.Tensor,
) -> None:
    """Copy KV blocks onto other blocks of the same pools, the step of copy-on-write.

    ``key_cache[dst_blocks[i]] = key_cache[src_blocks[i]]`` for every i, values alike, bit for bit.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], **mutated in place**; float32,
            bfloat16, float16, float8_e4m3fn or float8_e5m2; any strides with the last one 1.
        value_cache: [num_blocks, block_size, num_kv_heads, value_head_dim], **mutated in place**,
            key_cache's dtype; its strides are its own.
        src_blocks, dst_blocks: [num_copies], int32 or int64. A block may be a source many times,
            a destination once, and not both.

    All tensors are on one device.

    Returns:
        None.

    Raises:
        ValueError: shapes, strides or devices do not fit, a pool requires grad; on CPU also a block
            outside the pool, a destination named twice, a block that is source and destination
            (nothing is written then).
        TypeError: a dtype does not fit.

    Not checked:
        On CUDA values of index tensors raise nothing (but see ``checks``): a copy from or to a block
        outside the pool is skipped, and what overlaps is copied in no particular order.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.arange(6.0).view(2, 3, 1, 1, 1).unbind(0)
        >>> torch_pagedkv.copy_blocks(key_cache, value_cache, torch.tensor([0]), torch.tensor([2]))
        >>> key_cache.flatten().tolist(), value_cache.flatten().tolist()
        ([0.0, 1.0, 0.0], [3.0, 4.0, 3.0])

    Source: the op of this name in vLLM.
    """
    check_tensors(_NAME, key_cache=key_cache, value_cache=value_cache, src_blocks=src_blocks, dst_blocks=dst_blocks)
    _OP(key_cache, value_cache, src_blocks, dst_blocks)


def _check(key_cache, value_cache, src_blocks, dst_blocks) -> None:
    check_pools(_NAME, key_cache, value_cache, written=True)
    check_index(_NAME, "src_blocks", src_blocks, "[num_copies]", "key_cache", key_cache)
    check_index(_NAME, "dst_blocks", dst_blocks, "[num_copies]", "key_cache", key_cache)
    check_size(_NAME, "dst_blocks", dst_blocks, 0, src_blocks.shape[0], "src_blocks' num_copies")


def _cpu(key_cache, value_cache, src_blocks, dst_blocks) -> None:
    _check(key_cache, value_cache, src_blocks, dst_blocks)
    kernel = native_kernel(_NAME) or reference.copy_blocks
    kernel(key_cache, value_cache, src_blocks, dst_blocks)


def _cuda(key_cache, value_cache, src_blocks, dst_blocks) -> None:
    _check(key_cache, value_cache, src_blocks, dst_blocks)
    if value_checking.enabled:
        value_checking.check_copies(_NAME, key_cache, src_blocks, dst_blocks)
    triton_launcher(_NAME)(key_cache, value_cache, src_blocks, dst_blocks)


def _fake(key_cache, value_cache, src_blocks, dst_blocks) -> None:
    _check(key_cache, value_cache, src_blocks, dst_blocks)
    fix_storage_offsets(key_cache, value_cache)


_OP = register_op(
    "copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor src_blocks, Tensor dst_blocks) -> ()",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
    mutates=(0, 1),
)
