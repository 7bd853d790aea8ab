"""PagedAttention: the module between a model's projections and its paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.cache.batch import PagedBatch
from torch_pagedkv.ops.argument_checks import (
    FP8_DTYPES,
    MAX_HEAD_DIM,
    check_optional_tensors,
    check_per_head,
    check_scales,
)
from torch_pagedkv.ops.attention_options import check_options, check_window
from torch_pagedkv.ops.paged_attention import paged_attention
from torch_pagedkv.ops.reshape_and_cache import reshape_and_cache

_OWNER = "PagedAttention"


class PagedAttention(nn.Module):
    """Write new keys and values to their blocks, then attend through the block table.

    It has no projections and no positional encoding: ``forward`` takes queries and keys as they
    enter the dot product. New token t is written to
    ``key_cache[slot // block_size, slot % block_size]`` with ``slot = batch.slot_mapping[t]``
    (``reshape_and_cache``), and then each query reads its sequence's keys through
    ``batch.block_table`` (``paged_attention``), the new ones included. The memory is not the
    module's: every call is given its layer's pools, which it writes in place.

    What the ops would refuse of these arguments is refused here.

    Args:
        num_heads: query heads.
        head_dim: size of a query and key head, at most 512.
        num_kv_heads: KV heads, a divisor of num_heads; None: num_heads.
        value_head_dim: size of a value and output head; None: head_dim.
        softmax_scale: factor of the scores; None: ``head_dim ** -0.5``.
        causal: mask keys after the query, aligned to the end of the sequence.
        window_size: (left, right), keys seen before and after the own position, inclusive; -1:
            unlimited. A sliding window of W tokens is ``(W - 1, 0)``.
        softcap: cap of the scores; 0: none.
        alibi_slopes: None or [num_heads], any float dtype; becomes a buffer.
        sinks: None, [num_heads] of any float dtype, or True for zeros to load a checkpoint into
            (a sink of 0 is a logit like any other: it takes weight). Becomes a parameter, found
            where weights are, with requires_grad False: the ops have no gradient.
        k_scale, v_scale: None (1) or float32, one element or [num_kv_heads]; become buffers. Only
            for fp8 pools: with another pool ``forward`` raises.
        num_splits: at most so many parts a sequence's keys are split into; 0: the kernel chooses,
            1: none, and a row's bits then do not depend on the other sequences of its batch.

    Buffers and parameter share memory with the tensors given and are part of the state dict, where
    what is None has no entry. The buffers keep their dtype when the module is cast (``.half()``,
    ``.to(torch.bfloat16)``), since scales have to be float32. All are read on the device at run
    time, so a compiled or captured ``forward`` sees changes made in place.

    Raises:
        ValueError: an argument's size, range or shape does not fit.
        TypeError: an argument's type or dtype does not fit.

    Example:
        >>> import torch, torch_pagedkv
        >>> from torch_pagedkv.cache import PagedBatch, PagedKVCache
        >>> attention = torch_pagedkv.nn.PagedAttention(num_heads=4, head_dim=8, num_kv_heads=2)
        >>> cache = PagedKVCache(1, 2, 8, num_blocks=10, dtype=torch.float32)
        >>> batch = PagedBatch.from_sequences(   # a prompt of 21 tokens
        ...     [[7, 2, 9]], seq_lens=[21], query_lens=[21], block_size=16
        ... )
        >>> query, key, value = torch.randn(21, 8, 8).split([4, 2, 2], dim=1)
        >>> attention(query, key, value, cache[0], batch).shape
        torch.Size([21, 4, 8])
        >>> key_cache, value_cache = cache[0]
        >>> torch.equal(key_cache[2, 4], key[20])
        True

    Source: PagedAttention (Kwon et al. 2023); write, then read, as in nano-vllm.
    """

    alibi_slopes: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    sinks: nn.Parameter | None

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        num_kv_heads: int | None = None,
        *,
        value_head_dim: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        sinks: torch.Tensor | bool | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
        num_splits: int = 0,
    ) -> None:
        super().__init__()
        self.num_heads = check_integer(_OWNER, "num_heads", num_heads, 1)
        self.num_kv_heads = self.num_heads
        if num_kv_heads is not None:
            self.num_kv_heads = check_integer(_OWNER, "num_kv_heads", num_kv_heads, 1)
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"{_OWNER}: num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got {self.num_heads}"
            )
        self.head_dim = check_integer(_OWNER, "head_dim", head_dim, 1, MAX_HEAD_DIM)
        self.value_head_dim = self.head_dim
        if value_head_dim is not None:
            self.value_head_dim = check_integer(_OWNER, "value_head_dim", value_head_dim, 1, MAX_HEAD_DIM)
        if not isinstance(causal, bool):
            raise TypeError(f"{_OWNER}: causal must be a bool, got {causal!r}")
        self.causal = causal
        check_window(_OWNER, window_size)
        self.window_size = (int(window_size[0]), int(window_size[1]))
        self.softmax_scale = _check_number("softmax_scale", softmax_scale)
        self.softcap = _check_number("softcap", softcap) or 0.0
        self.num_splits = check_integer(_OWNER, "num_splits", num_splits)
        check_options(_OWNER, self.softmax_scale, self.softcap, self.num_splits)
        if isinstance(sinks, bool):
            sinks = torch.zeros(self.num_heads) if sinks else None
        self._check_tensors(alibi_slopes, sinks, k_scale, v_scale)
        self.sinks = None if sinks is None else nn.Parameter(sinks.detach(), requires_grad=False)
        for name, tensor in (
            ("alibi_slopes", alibi_slopes),
            ("k_scale", k_scale),
            ("v_scale", v_scale),
        ):
            self.register_buffer(name, None if tensor is None else tensor.detach())

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        batch: PagedBatch,
    ) -> torch.Tensor:
        """Write key and value to their slots and return what the queries attend to.

        Args:
            query: [T, num_heads, head_dim] or flat, [T, num_heads * head_dim]; float32, bfloat16 or
                float16. Slices of a fused projection need no copy.
            key: [T', num_kv_heads, head_dim] or flat, T' >= batch.num_tokens, of the pool's dtype
                or, for an fp8 pool, any of query's. None, and value too: nothing is written, for
                layers that read another layer's pools.
            value: [T', num_kv_heads, value_head_dim] or flat, key's dtype.
            kv_cache: (key_cache, value_cache) of this layer, **mutated in place**.
            batch: where tokens and sequences live; T is its num_tokens.

        Returns:
            [T, num_heads, value_head_dim] in query's dtype, or flat as query was. Rows that pad the
            batch are 0.

        Raises:
            ValueError, TypeError: an argument's shape or dtype does not fit; on CPU also a slot,
                table entry or length out of range. The ops' sentences name the op.

        Not checked:
            The two ops check one after the other: where the read is what refuses, because a length
            or a table entry is out of range, the new tokens are written already.
            On CUDA the values of the batch's tensors; they can never lead outside of the pools.
        """
        if not isinstance(batch, PagedBatch):
            raise TypeError(f"{_OWNER}: batch must be a PagedBatch, got {type(batch).__name__}")
        key_cache, value_cache = self._check_pools(kv_cache)
        is_flat = query.dim() == 2
        query = _split_heads("query", query, self.num_heads, self.head_dim)
        if (key is None) != (value is None):
            raise ValueError(
                f"{_OWNER}: key and value must be given together or both be None, "
                f"got {'key' if value is None else 'value'} alone"
            )
        if key is not None:
            key = _split_heads("key", key, self.num_kv_heads, self.head_dim)
            value = _split_heads("value", value, self.num_kv_heads, self.value_head_dim)
            # Keys that are fp8 already hold what the scales have to be applied to when reading.
            quantises = key.dtype not in FP8_DTYPES
            reshape_and_cache(
                key,
                value,
                key_cache,
                value_cache,
                batch.slot_mapping,
                k_scale=self.k_scale if quantises else None,
                v_scale=self.v_scale if quantises else None,
            )
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            batch.block_table,
            batch.seqused_k,
            batch.cu_seqlens_q,
            softmax_scale=self.softmax_scale,
            causal=self.causal,
            window_size=self.window_size,
            softcap=self.softcap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            num_splits=self.num_splits,
        )
        return out.flatten(1) if is_flat else out

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        parts = [f"num_heads={self.num_heads}", f"head_dim={self.head_dim}"]
        parts.append(f"num_kv_heads={self.num_kv_heads}")
        defaults = {
            "value_head_dim": self.head_dim,
            "softmax_scale": None,
            "causal": True,
            "window_size": (-1, -1),
            "softcap": 0.0,
            "num_splits": 0,
        }
        for name, default in defaults.items():
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)}")
        for name in ("alibi_slopes", "sinks", "k_scale", "v_scale"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={list(getattr(self, name).shape)}")
        return ", ".join(parts)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # A cast of the model is not meant for constants: float32 scales are all that the ops take,
        # and a slope rounded to bfloat16 is wrong by whole logits at long distances.
        buffers = [buffer for buffer in self._buffers.values() if buffer is not None]

        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is buffer for buffer in buffers):
                return tensor.to(moved.device)
            return moved

        return super()._apply(keep_dtype, recurse)

    def _check_tensors(self, alibi_slopes: Any, sinks: Any, k_scale: Any, v_scale: Any) -> None:
        check_optional_tensors(_OWNER, alibi_slopes=alibi_slopes, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
        # The ops' own checks, against an empty query and an empty fp8 pool on the tensor's device.
        for name, tensor in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if tensor is not None:
                check_per_head(_OWNER, name, tensor, tensor.new_empty(0, self.num_heads, 1))
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            if scale is not None:
                pool = scale.new_empty((0, 1, self.num_kv_heads, 1), dtype=FP8_DTYPES[0])
                scales = (scale, None) if name == "k_scale" else (None, scale)
                check_scales(_OWNER, pool, True, *scales)

    def _check_pools(self, kv_cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
        is_pair = isinstance(kv_cache, (tuple, list)) and len(kv_cache) == 2
        if not is_pair or not all(isinstance(pool, torch.Tensor) for pool in kv_cache):
            raise TypeError(
                f"{_OWNER}: kv_cache must be the pair (key_cache, value_cache) of one layer, as a "
                f"PagedKVCache gives it for cache[layer], got {type(kv_cache).__name__}"
            )
        # A read alone would take any divisor of num_heads for the number of KV heads.
        for name, pool, head_dim in zip(
            ("key_cache", "value_cache"),
            kv_cache,
            (self.head_dim, self.value_head_dim),
            strict=True,
        ):
            if pool.dim() != 4 or pool.shape[2:] != (self.num_kv_heads, head_dim):
                raise ValueError(
                    f"{_OWNER}: {name} must have shape [num_blocks, block_size, "
                    f"{self.num_kv_heads}, {head_dim}], got {list(pool.shape)}"
                )
        return kv_cache[0], kv_cache[1]


def _check_number(name: str, value: Any) -> float | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{_OWNER}: {name} must be a number, got {value!r}")
    return None if value is None else float(value)


def _split_heads(name: str, tensor: torch.Tensor, num_heads: int, head_dim: int) -> torch.Tensor:
    """View [T, num_heads * head_dim] as [T, num_heads, head_dim]; that form passes as it is."""
    if tensor.dim() == 2 and tensor.shape[1] == num_heads * head_dim:
        return tensor.unflatten(1, (num_heads, head_dim))
    if tensor.dim() == 3 and tensor.shape[1:] == (num_heads, head_dim):
        return tensor
    raise ValueError(
        f"{_OWNER}: {name} must have shape [num_tokens, {num_heads}, {head_dim}] or "
        f"[num_tokens, {num_heads * head_dim}], got {list(tensor.shape)}"
    )
