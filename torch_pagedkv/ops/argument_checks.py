"""What can be said of arguments without reading a tensor's values: ranks, sizes, strides, dtypes, devices.

Every check raises ``<op>: <argument> must <expectation>, got <actual>``; TypeError for dtypes, ValueError
for the rest. Kernels and fakes run the same checks, so tracing refuses what running would refuse.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
POOL_DTYPES = FLOAT_DTYPES + FP8_DTYPES
PER_HEAD_DTYPES = (*FLOAT_DTYPES, torch.float64)
MAX_HEAD_DIM = 512
INT64_MAX = 2**63 - 1
FLOAT32_MAX = torch.finfo(torch.float32).max
FLOAT32_SMALLEST = torch.finfo(torch.float32).smallest_normal


def differ(a: Any, b: Any) -> bool:
    """Return whether two sizes differ; sizes only known at run time are left to the kernel."""
    if type(a) is int and type(b) is int:
        return a != b
    return guard_or_false(a != b)


def exceeds(a: Any, b: Any) -> bool:
    """Return whether size a is above size b; as with ``differ``, unknown sizes pass."""
    if type(a) is int and type(b) is int:
        return a > b
    return guard_or_false(a > b)


def name_dtypes(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(str(d).removeprefix("torch.") for d in dtypes)


def check_tensors(op: str, **arguments: Any) -> None:
    """Refuse what is no tensor at the public function's door, where the dispatcher's words are opaque."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(value).__name__}")


def check_optional_tensors(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None and not isinstance(value, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor or None, got {type(value).__name__}")


def check_integers(op: str, **arguments: Any) -> None:
    """Refuse what is no integer at the public function's door; the compiler's symbolic ones pass."""
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise TypeError(f"{op}: {name} must be an integer, got {type(value).__name__}")
        if type(value) is int and not -(2**63) <= value < 2**63:
            raise ValueError(f"{op}: {name} must fit into int64, got {value}")


def check_numbers(op: str, **arguments: Any) -> None:
    for name, value in arguments.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")


def check_dtype(op: str, name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor is None:  # torch.ops lets None through as an undefined tensor
        check_tensors(op, **{name: tensor})
    if tensor.dtype not in allowed:
        raise TypeError(f"{op}: {name} must have dtype {name_dtypes(allowed)}, got {name_dtypes((tensor.dtype,))}")


def check_device(op: str, name: str, tensor: torch.Tensor, anchor_name: str, anchor: torch.Tensor) -> None:
    if tensor.device != anchor.device:
        raise ValueError(f"{op}: {name} must be on {anchor.device} like {anchor_name}, got {tensor.device}")


def check_rank(op: str, name: str, tensor: torch.Tensor, dims: str) -> None:
    """Refuse a tensor that does not have as many dimensions as the pattern ``dims`` has names."""
    if tensor is None:
        check_tensors(op, **{name: tensor})
    if tensor.dim() != dims.count(",") + 1:
        raise ValueError(f"{op}: {name} must have shape {dims}, got {list(tensor.shape)}")


def check_last_stride(op: str, name: str, tensor: torch.Tensor) -> None:
    if differ(tensor.stride(-1), 1) and exceeds(tensor.shape[-1], 1):
        raise ValueError(f"{op}: {name} must have stride 1 in its last dimension, got stride {tensor.stride(-1)}")


def check_size(op: str, name: str, tensor: torch.Tensor, dim: int, size: Any, what: str) -> None:
    if differ(tensor.shape[dim], size):
        raise ValueError(f"{op}: {name} must have {what} = {size} in dimension {dim}, got shape {list(tensor.shape)}")


def check_rows(op: str, name: str, tensor: torch.Tensor, dims: str, anchor_name: str, anchor: torch.Tensor) -> None:
    """Check a [tokens, heads, head_dim] tensor's rank, device and last stride."""
    check_rank(op, name, tensor, dims)
    check_device(op, name, tensor, anchor_name, anchor)
    check_last_stride(op, name, tensor)


def check_head_dim(op: str, name: str, head_dim: Any) -> None:
    if head_dim < 1 or head_dim > MAX_HEAD_DIM:
        raise ValueError(f"{op}: {name} must have a head_dim in [1, {MAX_HEAD_DIM}], got {head_dim}")


def check_pools(op: str, key_cache: torch.Tensor, value_cache: torch.Tensor, *, written: bool) -> None:
    """Check both pools against each other; ``written`` pools must not overlap themselves or want a gradient."""
    check_dtype(op, "key_cache", key_cache, POOL_DTYPES)
    check_dtype(op, "value_cache", value_cache, (key_cache.dtype,))
    check_rank(op, "key_cache", key_cache, "[num_blocks, block_size, num_kv_heads, head_dim]")
    check_rank(op, "value_cache", value_cache, "[num_blocks, block_size, num_kv_heads, value_head_dim]")
    check_device(op, "value_cache", value_cache, "key_cache", key_cache)
    for dim, what in enumerate(("num_blocks", "block_size", "num_kv_heads")):
        check_size(op, "value_cache", value_cache, dim, key_cache.shape[dim], f"key_cache's {what}")
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        for dim, what in ((1, "block_size"), (2, "num_kv_heads")):
            if cache.shape[dim] < 1:
                raise ValueError(f"{op}: {name} must have {what} >= 1, got shape {list(cache.shape)}")
        check_head_dim(op, name, cache.shape[3])
        check_last_stride(op, name, cache)
        if written:
            _check_writable(op, name, cache)


def fix_storage_offsets(*caches: torch.Tensor) -> None:
    """Make the compiler treat where a written pool starts in its storage as a constant.

    Inductor has no lowering of a symbolic storage offset and takes 0 for it (pytorch issue 198068): a
    write through a view that was taken inside the function would go to the start of the storage. An
    offset is made of sizes and strides, so these become constants of the graph: a pool of another
    size compiles anew, where the offset is not a constant by itself.
    """
    for cache in caches:
        if not isinstance(cache.storage_offset(), int):
            for number in (*cache.shape, *cache.stride(), cache.storage_offset()):
                int(number)


def _check_writable(op: str, name: str, cache: torch.Tensor) -> None:
    if cache.requires_grad:
        raise ValueError(
            f"{op}: {name} must not require grad (it is written in place, for inference), got requires_grad=True"
        )
    for size, stride in zip(cache.shape, cache.stride()):
        if stride == 0 and size > 1:
            raise ValueError(
                f"{op}: {name} must not be an expanded view (its elements share memory), "
                f"got strides {tuple(cache.stride())}"
            )


def check_index(op: str, name: str, tensor: torch.Tensor, dims: str, anchor_name: str, anchor: torch.Tensor) -> None:
    """Check the dtype, rank and device of a tensor of slots, block ids, lengths or prefix sums."""
    check_dtype(op, name, tensor, INDEX_DTYPES)
    check_rank(op, name, tensor, dims)
    check_device(op, name, tensor, anchor_name, anchor)


def check_batch(
    op: str,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    block_size: Any,
    anchor_name: str,
    anchor: torch.Tensor,
) -> None:
    """Check the tensors that describe a batch's sequences against each other."""
    check_index(op, "block_table", block_table, "[num_sequences, max_blocks]", anchor_name, anchor)
    check_last_stride(op, "block_table", block_table)
    max_blocks = block_table.shape[1]
    if type(max_blocks) is int and type(block_size) is int and max_blocks * block_size > INT64_MAX:
        raise ValueError(
            f"{op}: block_table must reach less than 2**63 positions, "
            f"got max_blocks = {max_blocks} of block_size = {block_size}"
        )
    check_index(op, "seqused_k", seqused_k, "[num_sequences]", anchor_name, anchor)
    check_size(op, "seqused_k", seqused_k, 0, block_table.shape[0], "block_table's num_sequences")
    if cu_seqlens_q is not None:
        check_index(op, "cu_seqlens_q", cu_seqlens_q, "[num_sequences + 1]", anchor_name, anchor)
        check_size(op, "cu_seqlens_q", cu_seqlens_q, 0, block_table.shape[0] + 1, "num_sequences + 1")


def check_scales(
    op: str,
    key_cache: torch.Tensor,
    converts: bool,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    """Check the scales of fp8 pools; where nothing is converted (``converts`` False) none may be given."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        if not converts:
            raise ValueError(
                f"{op}: {name} must be None where nothing is converted to or from fp8, got a tensor "
                f"with a pool of dtype {name_dtypes((key_cache.dtype,))}"
            )
        check_dtype(op, name, scale, (torch.float32,))
        check_device(op, name, scale, "key_cache", key_cache)
        num_kv_heads = key_cache.shape[2]
        if scale.dim() > 1 or (differ(scale.numel(), 1) and differ(scale.numel(), num_kv_heads)):
            raise ValueError(
                f"{op}: {name} must have one element or shape [num_kv_heads = {num_kv_heads}], "
                f"got shape {list(scale.shape)}"
            )


def check_per_head(op: str, name: str, tensor: torch.Tensor | None, query: torch.Tensor) -> None:
    """Check an optional tensor of one float for each query head."""
    if tensor is None:
        return
    check_dtype(op, name, tensor, PER_HEAD_DTYPES)
    check_rank(op, name, tensor, "[num_heads]")
    check_device(op, name, tensor, "query", query)
    check_size(op, name, tensor, 0, query.shape[1], "num_heads")


def check_finite(op: str, name: str, value: float) -> None:
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise ValueError(f"{op}: {name} must be finite in float32, got {value}")
