"""paged_attention: attend through a block table, without gathering keys and values first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops import value_checking
from torch_pagedkv.ops.argument_checks import (
    FLOAT_DTYPES,
    FP8_DTYPES,
    check_batch,
    check_dtype,
    check_integers,
    check_numbers,
    check_optional_tensors,
    check_per_head,
    check_pools,
    check_rank,
    check_rows,
    check_scales,
    check_size,
    check_tensors,
    differ,
)
from torch_pagedkv.ops.attention_options import (
    ALL_KEYS,
    AttentionOptions,
    are_exact,
    are_plain,
    check_options,
    check_window,
)
from torch_pagedkv.ops.checked_once import checked_once
from torch_pagedkv.ops.cuda_attention import attend_at_once, attend_plainly
from torch_pagedkv.ops.direct_calls import may_skip_dispatcher
from torch_pagedkv.ops.kernel_choice import (
    CUDA_ROWS,
    TAKES_ALL,
    TAKES_NOTHING,
    TAKES_SHORT,
    cuda_attention_takes,
    cuda_kernel,
    native_kernel,
    triton_launcher,
)
from torch_pagedkv.ops.registration import register_op

_NAME = "paged_attention"


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = ALL_KEYS,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attend from packed query tokens to their sequences' keys and values in paged pools.

    Key j of sequence s lies at ``key_cache[block_table[s, j // block_size], j % block_size]``. Query
    i of the sequence's query_len stands at position ``p = i + seqused_k[s] - query_len`` and sees
    key j where ``j < seqused_k[s]``, ``j <= p`` (causal), ``j >= p - left`` and ``j <= p + right``.
    Its scores are scaled, capped (``softcap * tanh(score / softcap)``), biased by
    ``alibi_slope * (j - p)``, masked, and go through a float32 softmax that a sink joins as one more
    logit. Query head h reads KV head ``h // (num_heads // num_kv_heads)``. Nothing that a row may
    not see can change a bit of it, whatever stands there, NaN included.

    Args:
        query: [T, num_heads, head_dim], float32, bfloat16 or float16; any strides with the last one
            1; num_heads a multiple of num_kv_heads.
        key_cache: [num_blocks, block_size, num_kv_heads, head_dim], query's dtype, float8_e4m3fn or
            float8_e5m2; any strides with the last one 1.
        value_cache: [num_blocks, block_size, num_kv_heads, value_head_dim], key_cache's dtype; its
            strides are its own.
        block_table: [num_sequences, max_blocks], int32 or int64, last stride 1. Entries past
            ``ceil(seqused_k / block_size)`` and those wholly before the window are never read.
        seqused_k: [num_sequences], int32 or int64: tokens of the sequence in the cache, new ones
            included. 0 is legal.
        cu_seqlens_q: [num_sequences + 1], int32 or int64: prefix sums of the query lengths, from 0.
            Rows past its last element are padding. None: one query token a sequence.
        softmax_scale: factor of the scores; None: ``head_dim ** -0.5``.
        causal: mask keys after the query, aligned to the end of the sequence.
        window_size: (left, right), keys seen before and after the own position, inclusive; -1:
            unlimited. A sliding window of W tokens is ``(W - 1, 0)``.
        softcap: cap of the scores; 0: none.
        alibi_slopes: None or [num_heads], any float dtype.
        sinks: None or [num_heads], any float dtype: logits that take weight and give no value.
        k_scale, v_scale: None (1) or float32, one element or [num_kv_heads]: factors of the stored
            elements of fp8 pools, read on the device at run time.
        num_splits: at most so many parts a sequence's keys are split into; 0: the kernel chooses,
            1: none, and a row's bits then do not depend on the other sequences of its batch.
        return_lse: also return the log-sum-exp.

    All tensors are on one device.

    Returns:
        out: [T, num_heads, value_head_dim] in query's dtype, new and contiguous. Rows that see no
        key are 0.
        lse (with ``return_lse``): [num_heads, T] float32, natural logarithm, the sink included.
        Rows that see no key: -inf, or the sink.

    Raises:
        ValueError: shapes, strides, devices or options do not fit; on CPU also a length, prefix sum
            or used table entry out of range.
        TypeError: a dtype does not fit.
        NotImplementedError: a backward pass; CUDA tensors without Triton.

    Not checked:
        On CUDA values of index tensors raise nothing (but see ``checks``): lengths are clamped to
        the table, and a key whose table entry is outside the pool is not seen.

    Example:
        >>> import torch, torch_pagedkv
        >>> key_cache, value_cache = torch.randn(2, 10, 16, 2, 8).unbind(0)
        >>> query = torch.randn(1, 4, 8)                    # one token, position 20
        >>> block_table = torch.tensor([[7, 2, 9]])
        >>> out = torch_pagedkv.paged_attention(
        ...     query, key_cache, value_cache, block_table, torch.tensor([21])
        ... )
        >>> out.shape
        torch.Size([1, 4, 8])

    Source: PagedAttention (Kwon et al. 2023) over FlashAttention's online softmax (Dao et al. 2022);
    split keys as in Flash-Decoding; sinks as in GPT-OSS.
    """
    tensors = (query, key_cache, value_cache, block_table, seqused_k)
    optional = (cu_seqlens_q, alibi_slopes, sinks, k_scale, v_scale)
    has_none = cu_seqlens_q is alibi_slopes is sinks is k_scale is v_scale is None
    if may_skip_dispatcher(tensors, () if has_none else optional):
        if has_none and are_plain(causal, window_size, softcap, num_splits) and not return_lse:
            out = attend_plainly(tensors, softmax_scale, num_splits)
            if out is not None:
                return out
        if are_exact(softmax_scale, causal, window_size, softcap, num_splits):
            options = (softmax_scale, causal, window_size, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits)
            done = (attend_at_once if query.is_cuda else _attend_on_cpu)(*tensors, cu_seqlens_q, *options)
            if done is not None:
                return done if return_lse else done[0]
    check_tensors(
        _NAME,
        query=query,
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=block_table,
        seqused_k=seqused_k,
    )
    check_optional_tensors(
        _NAME,
        cu_seqlens_q=cu_seqlens_q,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    check_window(_NAME, window_size)
    softcap = 0.0 if softcap is None else softcap
    check_numbers(_NAME, softcap=softcap)
    if softmax_scale is not None:
        check_numbers(_NAME, softmax_scale=softmax_scale)
    check_integers(_NAME, num_splits=num_splits)
    if not isinstance(causal, bool):  # None would silently mean False
        raise TypeError(f"{_NAME}: causal must be a bool, got {type(causal).__name__}")
    out, lse = _OP(
        query,
        key_cache,
        value_cache,
        block_table,
        seqused_k,
        cu_seqlens_q,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
    )
    return (out, lse) if return_lse else out


def _check(query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, options) -> None:
    check_dtype(_NAME, "query", query, FLOAT_DTYPES)
    check_pools(_NAME, key_cache, value_cache, written=False)
    check_dtype(_NAME, "key_cache", key_cache, (query.dtype, *FP8_DTYPES))
    check_rows(_NAME, "query", query, "[num_tokens, num_heads, head_dim]", "key_cache", key_cache)
    check_size(_NAME, "query", query, 2, key_cache.shape[3], "key_cache's head_dim")
    num_heads, num_kv_heads = query.shape[1], key_cache.shape[2]
    if num_heads < 1 or num_heads % num_kv_heads != 0:
        raise ValueError(
            f"{_NAME}: query must have a positive multiple of num_kv_heads = {num_kv_heads} heads, got {num_heads}"
        )
    batch = (block_table, seqused_k, cu_seqlens_q)
    check_batch(_NAME, *batch, key_cache.shape[1], "key_cache", key_cache)
    if cu_seqlens_q is None and differ(query.shape[0], block_table.shape[0]):
        raise ValueError(
            f"{_NAME}: query must have one token for each of the {block_table.shape[0]} sequences "
            f"where cu_seqlens_q is None, got {query.shape[0]}"
        )
    check_options(_NAME, options.softmax_scale, options.softcap, options.num_splits)
    check_per_head(_NAME, "alibi_slopes", options.alibi_slopes, query)
    check_per_head(_NAME, "sinks", options.sinks, query)
    is_fp8 = key_cache.dtype in FP8_DTYPES
    check_scales(_NAME, key_cache, is_fp8, options.k_scale, options.v_scale)


@checked_once
def _check_once(query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, *options) -> None:
    _check(query, key_cache, value_cache, block_table, seqused_k, cu_seqlens_q, AttentionOptions(*options))


def _checked(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    *,
    refuses: bool = False,
    at_once: Callable[..., tuple[torch.Tensor, torch.Tensor] | None] = lambda *arguments: None,
) -> Callable[..., Any]:
    """Put the schema's defaults and the checks before ``run(query, batch, options)``.

    Where it ``refuses`` by itself what the checks refuse, they are only asked for the words. ``at_once`` is
    given the arguments first, as they are, and returns None where it does not take them.
    """

    def kernel(
        query,
        key_cache,
        value_cache,
        block_table,
        seqused_k,
        cu_seqlens_q=None,
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        sinks=None,
        k_scale=None,
        v_scale=None,
        num_splits=0,
    ):
        batch = (key_cache, value_cache, block_table, seqused_k, cu_seqlens_q)
        tensors = (alibi_slopes, sinks, k_scale, v_scale)
        done = at_once(query, *batch, softmax_scale, causal, window_size, softcap, *tensors, num_splits)
        if done is not None:
            return done
        check_rank(_NAME, "query", query, "[num_tokens, num_heads, head_dim]")
        check_window(_NAME, window_size)
        left, right = window_size
        scale = max(query.shape[2], 1) ** -0.5 if softmax_scale is None else softmax_scale
        options = AttentionOptions(scale, causal, left, right, softcap, *tensors, num_splits)
        if not refuses:
            _check(query, *batch, options)
            return run(query, batch, options)
        try:
            return run(query, batch, options)
        except Exception as error:
            refusal = error
        _check(query, *batch, options)
        raise refusal

    return kernel


def _outputs(query, batch, options) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty((num_tokens, num_heads, batch[1].shape[3]))
    return out, query.new_empty((num_heads, num_tokens), dtype=torch.float32)


def _cpu(query, batch, options):
    kernel = native_kernel(_NAME)
    if kernel is None:
        _check(query, *batch, options)
        named = options._asdict()
        window_size = (named.pop("window_left"), named.pop("window_right"))
        return reference.paged_attention(query, *batch, window_size=window_size, **named)
    options = options.for_kernel(_NAME, query)
    out, lse = _outputs(query, batch, options)
    kernel(out, lse, query, *batch, *options)
    return out, lse


def _cuda(query, batch, options):
    if value_checking.enabled:
        _check(query, *batch, options)
        num_blocks, block_size = batch[0].shape[:2]
        sizes = dict(block_size=block_size, num_blocks=num_blocks, window_left=options.window_left)
        value_checking.check_batch(_NAME, *batch[2:], num_tokens=query.shape[0], **sizes)
    out, lse = _outputs(query, batch, options)
    kernel = cuda_kernel(_NAME, query.get_device())
    taken = TAKES_NOTHING
    if kernel is not None:
        arguments = (out, lse, query, *batch, *options.for_kernel(_NAME, query))
        are_short = batch[4] is None or query.shape[0] * query.shape[1] <= CUDA_ROWS * batch[0].shape[2]
        if are_short and kernel(*arguments):
            return out, lse
        if not are_short:
            taken = cuda_attention_takes()(query, *batch[:3])
        if taken == TAKES_ALL and kernel(*arguments):
            return out, lse
    looks = _check_once(query, *batch, *options)
    # Only the device knows lengths. Triton writes the rows of longer sequences, then CUDA C++ those of
    # the others; a sequence's own rows alone decide, so its bits do not depend on its batch.
    long_only = taken == TAKES_SHORT
    triton_launcher(_NAME)(out, lse, query, *batch, *options, long_only=long_only, looks=looks)
    if taken == TAKES_SHORT:
        kernel(*arguments)
    return out, lse


_CPU = _checked(_cpu, refuses=True)


def _attend_on_cpu(query, *arguments) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Attend; None for what is not on the CPU or is refused, which goes the long way and has its words there."""
    if not query.is_cpu:
        return None
    try:
        return _CPU(query, *arguments)
    except Exception:
        return None


_OP = register_op(
    "paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, "
    "Tensor seqused_k, Tensor? cu_seqlens_q=None, *, float? softmax_scale=None, bool causal=True, "
    "int[] window_size=[-1, -1], float softcap=0.0, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None, int num_splits=0) -> (Tensor, Tensor)",
    cpu=_CPU,
    cuda=_checked(_cuda, refuses=True, at_once=attend_at_once),
    fake=_checked(_outputs),
)
