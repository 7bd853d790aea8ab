"""Tensor parallelism: attention heads over devices, each rank with the pools of its own KV heads.

Two ways, both plain PyTorch. ``HeadwiseParallel`` is the style of a ``PagedAttention`` in a plan of
``parallelize_module``, between column-wise projections and a row-wise one; tensors are then local.
``register`` gives the ops sharding rules, so that DTensors sharded on heads go through them: no op
communicates, and none gathers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle

from torch_pagedkv.nn import PagedAttention

_OPS = torch.ops.torch_pagedkv
_KV_HEADS = Shard(2)  # of a pool, [num_blocks, block_size, num_kv_heads, head_dim]
_ROW_HEADS = Shard(1)  # of rows, [num_tokens, num_heads, head_dim]
_COPY = Replicate()


class HeadwiseParallel(ParallelStyle):
    """Give each rank of a mesh its share of a PagedAttention's heads, in a plan of ``parallelize_module``.

    Rank r keeps query heads ``[r * num_heads / n, (r + 1) * num_heads / n)`` and the KV heads that they
    read. The module then takes and gives local tensors: what ``ColwiseParallel`` projections hand out,
    and what a ``RowwiseParallel`` one takes. The pools that it is called with hold this rank's KV heads
    alone: ``PagedKVCache(num_layers, num_kv_heads // mesh.size(), ...)``. Tables, lengths and slots are
    the same on every rank.

    Sinks and ALiBi slopes, and scales of one for each KV head, are cut to the rank's heads: the tensors
    are replaced, not written.

    Raises (when it is applied):
        TypeError: the module is no PagedAttention.
        ValueError: num_kv_heads is no multiple of the mesh's size, or the mesh has several dimensions.

    Example:
        >>> from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
        >>> plan = {
        ...     "wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(),
        ...     "attention": HeadwiseParallel(), "wo": RowwiseParallel(),
        ... }   # for parallelize_module(block, mesh, plan)

    Source: Megatron-LM (Shoeybi et al. 2019); the styles of torch.distributed.tensor.parallel.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        name = type(self).__name__
        if not isinstance(module, PagedAttention):
            raise TypeError(f"{name}: module must be a PagedAttention, got {type(module).__name__}")
        _check_mesh(name, device_mesh)
        _check_divides(name, "num_kv_heads", module.num_kv_heads, device_mesh)
        size, rank = device_mesh.size(), device_mesh.get_local_rank()
        for part in ("sinks", "alibi_slopes", "k_scale", "v_scale"):
            tensor = getattr(module, part)
            if tensor is None or (part.endswith("scale") and tensor.numel() == 1):
                continue
            local = tensor.detach().chunk(size)[rank].clone()
            setattr(module, part, nn.Parameter(local, requires_grad=False) if part == "sinks" else local)
        module.num_heads //= size
        module.num_kv_heads //= size
        return module


def register() -> None:
    """Let DTensors on a mesh of one dimension go through the ops.

    Pools are sharded on their KV heads, ``Shard(2)``, or replicated, and that decides: queries, keys and
    values go along on their heads, ``Shard(1)``, tables, lengths, slots and ids are replicated, sinks,
    slopes and scales for each head are ``Shard(0)``. Of the former, one that is replicated where a
    shard is wanted is cut, which costs nothing, and one that is sharded elsewhere is redistributed, as
    DTensor does for any op; sinks, slopes and scales, which it does not redistribute, must be placed as
    said, or raise. Pools never are: they are written in place, so a placement that does not fit raises.
    ``paged_attention`` gives out ``Shard(1)`` and lse ``Shard(0)``; ``gather_kv`` gives ``Shard(2)``.
    Calling it again changes nothing.

    Returns:
        None.

    Raises (from the ops, on DTensors):
        ValueError: a pool has another placement, its KV heads are no multiple of the mesh's size, or
            the mesh has several dimensions.

    Example:
        >>> from torch_pagedkv.integrations import tensor_parallel
        >>> tensor_parallel.register()

    Source: torch.distributed.tensor.experimental.register_sharding.
    """
    register_sharding(_OPS.reshape_and_cache.default)(_reshape_and_cache)
    register_sharding(_OPS.paged_attention.default)(_paged_attention)
    register_sharding(_OPS.gather_kv.default)(_gather_kv)
    register_sharding(_OPS.copy_blocks.default)(_copy_blocks)
    register_sharding(_OPS.merge_attention_states.default)(_merge_attention_states)
    register_sharding(_OPS.compute_slot_mapping.default)(_compute_slot_mapping)


def _check_mesh(op: str, mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise ValueError(
            f"{op}: the device mesh must have one dimension (take the one of the heads out of a larger mesh "
            f"by its name), got {mesh.ndim}"
        )


def _check_divides(op: str, what: str, count: int, mesh: DeviceMesh) -> None:
    if count % mesh.size() != 0:
        raise ValueError(f"{op}: {what} must be a multiple of the mesh's size {mesh.size()}, got {count}")


def _are_sharded(op: str, key_cache: Any, value_cache: Any) -> bool:
    """Return whether pools are sharded on KV heads, or else replicated; refuse every other placement."""
    _check_mesh(op, key_cache.mesh)
    for name, pool in (("key_cache", key_cache), ("value_cache", value_cache)):
        if pool.placements[0] not in (_KV_HEADS, _COPY):
            raise ValueError(
                f"{op}: {name} must be sharded on its KV heads, Shard(2), or replicated, got {pool.placements[0]}"
            )
    if key_cache.placements != value_cache.placements:
        raise ValueError(
            f"{op}: value_cache must be placed as key_cache is, {key_cache.placements[0]}, "
            f"got {value_cache.placements[0]}"
        )
    if key_cache.placements[0] == _COPY:
        return False
    _check_divides(op, "key_cache's num_kv_heads", key_cache.shape[2], key_cache.mesh)
    return True


def _given(tensor: Any, placement: Any) -> Any:
    """Return the placement of an optional tensor: None where there is none."""
    return None if tensor is None else placement


def _scale(scale: Any, is_sharded: bool) -> Any:
    per_head = scale is not None and is_sharded and scale.ndim == 1 and scale.shape[0] > 1
    return _given(scale, Shard(0) if per_head else _COPY)


def _reshape_and_cache(key, value, key_cache, value_cache, slot_mapping, *, k_scale=None, v_scale=None):
    is_sharded = _are_sharded("reshape_and_cache", key_cache, value_cache)
    rows, pool = (_ROW_HEADS, _KV_HEADS) if is_sharded else (_COPY, _COPY)
    scales = [_scale(scale, is_sharded) for scale in (k_scale, v_scale)]
    return [([], [rows, rows, pool, pool, _COPY, *scales])]


def _paged_attention(query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q=None, **options):
    is_sharded = _are_sharded("paged_attention", key_cache, value_cache)
    pool = _KV_HEADS if is_sharded else _COPY
    index = [_COPY, _COPY, _given(cu_seqlens_q, _COPY)]

    def rule(on_heads: bool) -> tuple[list, list]:
        rows, per_head = (_ROW_HEADS, Shard(0)) if on_heads else (_COPY, _COPY)
        values: list[Any] = []
        for name, value in options.items():
            if name in ("alibi_slopes", "sinks"):
                values.append(_given(value, per_head))
            elif name in ("k_scale", "v_scale"):
                values.append(_scale(value, is_sharded))
            else:
                values.append(None)
        return [rows, per_head], [rows, pool, pool, *index, *values]

    # One KV head is read by every query head, so the heads of queries may be cut where it is replicated.
    if not is_sharded and key_cache.shape[2] == 1 and query.shape[1] % key_cache.mesh.size() == 0:
        return [rule(True), rule(False)]
    return [rule(is_sharded)]


def _gather_kv(key_cache, value_cache, block_table, seqused_k, *, k_scale=None, v_scale=None, dtype=None):
    is_sharded = _are_sharded("gather_kv", key_cache, value_cache)
    pool = _KV_HEADS if is_sharded else _COPY
    scales = [_scale(scale, is_sharded) for scale in (k_scale, v_scale)]
    return [([pool, pool], [pool, pool, _COPY, _COPY, *scales, None])]


def _copy_blocks(key_cache, value_cache, src_blocks, dst_blocks):
    pool = _KV_HEADS if _are_sharded("copy_blocks", key_cache, value_cache) else _COPY
    return [([], [pool, pool, _COPY, _COPY])]


def _merge_attention_states(out_a, lse_a, out_b, lse_b):
    rules = [(_ROW_HEADS, Shard(0)), (Shard(0), Shard(1)), (_COPY, _COPY)]  # on heads, on tokens, or copies
    return [([out, lse], [out, lse, out, lse]) for out, lse in rules]


def _compute_slot_mapping(block_table, seqused_k, cu_seqlens_q, block_size, num_tokens):
    return [([_COPY], [_COPY, _COPY, _given(cu_seqlens_q, _COPY), None, None])]
