"""The online softmax, step by step: a FlashAttention forward over paged keys that shows its running state."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_batch,
    check_dtype,
    check_head_dim,
    check_numbers,
    check_optional_tensors,
    check_pools,
    check_rows,
    check_scales,
    check_size,
    check_tensors,
)
from torch_pagedkv.ops.attention_options import check_options

_OWNER = "trace_softmax"
_LARGEST_TILE = 1024


@dataclasses.dataclass(frozen=True)
class SoftmaxState:
    """What attention keeps of the keys that it has seen; a later key changes it, and never needs them again.

    Attributes:
        maximum: [..., num_heads] the largest score, -inf where no key was seen.
        denominator: [..., num_heads] the sum of ``exp(score - maximum)``.
        accumulator: [..., num_heads, value_head_dim] the sum of ``exp(score - maximum) * value``.
    """

    maximum: torch.Tensor
    denominator: torch.Tensor
    accumulator: torch.Tensor

    @classmethod
    def of_keys(cls, scores: torch.Tensor, values: torch.Tensor) -> SoftmaxState:
        """Return the state of keys on their own: scores [num_heads, keys], values [keys, num_heads, dim]."""
        if scores.shape[-1] == 0:
            return cls.of_nothing(scores.shape[0], values)
        maximum = scores.amax(-1)
        weights = torch.exp(scores - maximum[:, None])
        return cls(maximum, weights.sum(-1), torch.einsum("hn,nhd->hd", weights, values))

    @classmethod
    def of_nothing(cls, num_heads: int, values: torch.Tensor) -> SoftmaxState:
        """Return the state before the first key, in the dtype and on the device of ``values``."""
        zeros = values.new_zeros(num_heads)
        return cls(zeros - torch.inf, zeros, values.new_zeros(num_heads, values.shape[-1]))

    def merge(self, other: SoftmaxState) -> SoftmaxState:
        """Return the state of both sets of keys: each side is rescaled from its own maximum to the common one."""
        maximum = torch.maximum(self.maximum, other.maximum)
        # Where neither side has seen a key, -inf minus -inf would be NaN.
        reference = torch.where(maximum == -torch.inf, 0.0, maximum)
        mine, theirs = torch.exp(self.maximum - reference), torch.exp(other.maximum - reference)
        return SoftmaxState(
            maximum,
            mine * self.denominator + theirs * other.denominator,
            mine[..., None] * self.accumulator + theirs[..., None] * other.accumulator,
        )

    @property
    def lse(self) -> torch.Tensor:
        """[num_heads, ...] ``log(sum of exp(score))`` so far, as paged_attention returns it."""
        return (self.maximum + torch.log(self.denominator)).movedim(-1, 0)

    @property
    def out(self) -> torch.Tensor:
        """[..., num_heads, value_head_dim] what attention over the keys so far would return."""
        seen = self.denominator[..., None]
        return torch.where(seen == 0, 0.0, self.accumulator / torch.where(seen == 0, 1.0, seen))


def trace_softmax(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    tile: int = 16,
    softmax_scale: float | None = None,
    softcap: float = 0.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    kernel: str = "torch",
) -> list[SoftmaxState]:
    """Run causal attention over paged keys tile by tile, and return the running state after every tile.

    Key j of sequence s lies at ``key_cache[block_table[s, j // block_size], j % block_size]``. Tile t
    holds the positions [t * tile, (t + 1) * tile) of each sequence. After it a row's state is that
    of the keys before ``(t + 1) * tile`` that the row sees; the last state's ``out`` and ``lse`` are
    what ``paged_attention`` returns.

    Args:
        query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale, softcap,
            k_scale, v_scale: as ``paged_attention`` takes them.
        tile: positions in a tile, at most 1024.
        kernel: "torch", readable PyTorch on any device, or "triton", a small Triton kernel for CUDA
            tensors.

    Returns:
        A list of states, one after each tile up to the end of the longest sequence, none where all
        are empty: maximum and denominator [T, num_heads], accumulator [T, num_heads,
        value_head_dim], float32. Rows past a sequence's last tile, and padding, keep theirs.

    Raises:
        ValueError: shapes, devices, numbers, lengths or used table entries do not fit.
        TypeError: a dtype or a kind of argument does not fit.
        NotImplementedError: the Triton kernel is asked for, and there is no Triton or no CUDA tensor.

    Not checked:
        Nothing is left out; checking reads the lengths, so a call waits for the device.

    Example:
        >>> import torch
        >>> from torch_pagedkv import inspect
        >>> cache = torch.tensor([1.0, 3.0, 2.0, 0.0]).view(2, 2, 1, 1)  # two blocks of two tokens
        >>> states = inspect.trace_softmax(
        ...     torch.ones(1, 1, 1), cache, cache, torch.tensor([[1, 0]]), torch.tensor([4]), tile=2
        ... )
        >>> [(s.maximum.item(), round(s.denominator.item(), 4)) for s in states]  # keys 2, 0; then 1, 3
        [(2.0, 1.1353), (3.0, 1.553)]

    Source: online softmax (Milakov and Gimelshein 2018) as in FlashAttention (Dao et al. 2022).
    """
    tensors = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache,
        "block_table": block_table, "seqused_k": seqused_k,
    }  # fmt: skip
    check_tensors(_OWNER, **tensors)
    check_optional_tensors(_OWNER, cu_seqlens_q=cu_seqlens_q, k_scale=k_scale, v_scale=v_scale)
    tile = check_integer(_OWNER, "tile", tile, 1, _LARGEST_TILE)
    if kernel not in ("torch", "triton"):
        raise ValueError(f"{_OWNER}: kernel must be 'torch' or 'triton', got {kernel!r}")
    batch = (query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q)
    _check(*batch, softmax_scale, softcap, k_scale, v_scale)
    scale = query.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    longest = max(seqused_k.tolist(), default=0)
    run = _torch_states if kernel == "torch" else _triton_states
    return run(batch, -(-longest // tile), tile, scale, softcap, k_scale, v_scale)


def _check(
    query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, softmax_scale, softcap, k_scale, v_scale
) -> None:
    check_dtype(_OWNER, "query", query, FLOAT_DTYPES)
    check_rows(_OWNER, "query", query, "[num_tokens, num_heads, head_dim]", "key_cache", key_cache)
    check_head_dim(_OWNER, "query", query.shape[2])
    check_pools(_OWNER, key_cache, value_cache, written=False)
    check_dtype(_OWNER, "key_cache", key_cache, (query.dtype, *FP8_DTYPES))
    check_size(_OWNER, "key_cache", key_cache, 3, query.shape[2], "query's head_dim")
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    num_tokens, num_heads, _ = query.shape
    if num_heads % num_kv_heads:
        raise ValueError(f"{_OWNER}: query must have a multiple of {num_kv_heads} heads, got {num_heads}")
    check_batch(_OWNER, block_table, seqused_k, cu_seqlens_q, block_size, "query", query)
    if cu_seqlens_q is None:
        check_size(_OWNER, "block_table", block_table, 0, num_tokens, "query's num_tokens")
    check_scales(_OWNER, key_cache, key_cache.dtype in FP8_DTYPES, k_scale, v_scale)
    check_numbers(_OWNER, softcap=softcap, **({} if softmax_scale is None else {"softmax_scale": softmax_scale}))
    check_options(_OWNER, softmax_scale, softcap, 0)
    sizes = {"num_tokens": num_tokens, "block_size": block_size, "num_blocks": num_blocks, "window_left": -1}
    value_checking.check_batch(_OWNER, block_table, seqused_k, cu_seqlens_q, **sizes)


def _torch_states(batch, num_tiles, tile, scale, softcap, k_scale, v_scale) -> list[SoftmaxState]:
    query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q = batch
    num_tokens, num_heads, _ = query.shape
    value_dim = value_cache.shape[3]
    states = [
        SoftmaxState.of_nothing(num_heads, query.new_empty((0, value_dim), dtype=torch.float32))
        for _ in range(num_tokens)
    ]
    starts = list(range(num_tokens + 1)) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    lengths = seqused_k.tolist()
    after_tiles = []
    for first in range(0, num_tiles * tile, tile):
        for sequence, length in enumerate(lengths):
            begin, end = starts[sequence : sequence + 2]
            for token in range(begin, end):
                sees_before = length - (end - begin) + (token - begin) + 1  # causal, aligned at the end
                positions = torch.arange(first, max(first, min(first + tile, sees_before, length)))
                keys, values = (
                    _take(cache, block_table[sequence], positions.to(query.device), each)
                    for cache, each in ((key_cache, k_scale), (value_cache, v_scale))
                )
                group = num_heads // keys.shape[1]
                keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
                scores = torch.einsum("hd,nhd->hn", query[token].float(), keys) * scale
                if softcap > 0.0:
                    scores = softcap * torch.tanh(scores / softcap)
                states[token] = states[token].merge(SoftmaxState.of_keys(scores, values))
        after_tiles.append(_stack(states))
    return after_tiles


def _take(cache: torch.Tensor, table: torch.Tensor, positions: torch.Tensor, scale: Any) -> torch.Tensor:
    """Return the rows [positions, num_kv_heads, head_dim] of a sequence, as float32."""
    block_size = cache.shape[1]
    places = table[positions // block_size].long(), positions % block_size
    if cache.dtype not in FP8_DTYPES:
        return cache[places].float()
    rows = cache.view(torch.uint8)[places].view(cache.dtype).float()  # not every device indexes fp8
    return rows if scale is None else rows * scale.reshape(-1, 1)


def _stack(states: list[SoftmaxState]) -> SoftmaxState:
    fields = (dataclasses.astuple(state) for state in states)
    return SoftmaxState(*(torch.stack(rows) for rows in zip(*fields, strict=True)))


def _triton_states(batch, num_tiles, tile, scale, softcap, k_scale, v_scale) -> list[SoftmaxState]:
    try:
        from torch_pagedkv.triton_kernels.softmax_trace import launch
    except ImportError as error:
        raise NotImplementedError(
            f"{_OWNER}: kernel must be 'torch' where Triton cannot be imported, got 'triton' ({error})"
        ) from error
    query, _, value_cache = batch[:3]
    rows = (num_tiles, *query.shape[:2])
    maximum, denominator = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    accumulator = query.new_empty((*rows, value_cache.shape[3]), dtype=torch.float32)
    if num_tiles and query.numel():
        launch(maximum, denominator, accumulator, *batch, scale, softcap, k_scale, v_scale, tile)
    return [SoftmaxState(*state) for state in zip(maximum, denominator, accumulator, strict=True)]
