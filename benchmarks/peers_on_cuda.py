"""What people use instead on a GPU, each optional: a peer that is not installed is left out with a sentence.

A reader takes a case and returns a call that gives [T, num_heads, head_dim]; it raises NotImplementedError
for a case that the peer does not take. A case has query, key_cache, value_cache (NHD), block_table,
seqused_k, cu_seqlens_q, scale, query_lengths, lengths and block_size.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Reader = Callable[[Any], Callable[[], torch.Tensor]]
Writer = Callable[..., None]
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def _is_quantised(case: Any) -> bool:
    return case.key_cache.dtype in FP8


def _flash_attention_3() -> Reader:
    from flash_attn_interface import flash_attn_with_kvcache

    def reader(case):
        if _is_quantised(case):
            raise NotImplementedError("fp8 keys need fp8 queries")
        return lambda: flash_attn_with_kvcache(
            case.query,
            case.key_cache,
            case.value_cache,
            cache_seqlens=case.seqused_k,
            page_table=case.block_table,
            cu_seqlens_q=case.cu_seqlens_q,
            max_seqlen_q=max(case.query_lengths),
            softmax_scale=case.scale,
            causal=True,
        )

    return reader


def _flashinfer() -> Reader:
    import flashinfer

    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")

    def reader(case):
        counts = [-(-length // case.block_size) for length in case.lengths]
        ends = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
        blocks = torch.cat([row[:count] for row, count in zip(case.block_table, counts, strict=True)])
        last = torch.tensor([(length - 1) % case.block_size + 1 for length in case.lengths], dtype=torch.int32)
        heads = (case.query.shape[1], case.key_cache.shape[2], case.query.shape[2], case.block_size)
        dtypes = {"q_data_type": case.query.dtype, "kv_data_type": case.key_cache.dtype}
        if max(case.query_lengths) == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
            wrapper.plan(ends, blocks, last, *heads, **dtypes)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            plan = (case.cu_seqlens_q, ends.cuda(), blocks, last.cuda())
            wrapper.plan(*plan, *heads, causal=True, **dtypes)
        return lambda: wrapper.run(case.query, (case.key_cache, case.value_cache))

    return reader


def _vllm() -> Reader:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    def reader(case):
        if _is_quantised(case):
            raise NotImplementedError("its arguments for fp8 change between releases")
        out = torch.empty_like(case.query)
        arguments = dict(
            q=case.query,
            k=case.key_cache,
            v=case.value_cache,
            out=out,
            cu_seqlens_q=case.cu_seqlens_q,
            max_seqlen_q=max(case.query_lengths),
            seqused_k=case.seqused_k,
            max_seqlen_k=max(case.lengths),
            softmax_scale=case.scale,
            causal=True,
            window_size=(-1, -1),
            block_table=case.block_table,
            softcap=0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
        )

        def call():
            unified_attention(**arguments)
            return out

        return call

    return reader


def _torch_varlen() -> Reader:
    from torch.nn.attention.varlen import varlen_attn

    if "block_table" not in inspect.signature(varlen_attn).parameters:
        raise ImportError(f"varlen_attn of torch {torch.__version__} has no block_table")

    def reader(case):
        if _is_quantised(case):
            raise NotImplementedError("it takes no fp8 pool")
        longest = (max(case.query_lengths), max(case.lengths))
        options = {"scale": case.scale, "window_size": (-1, 0), "enable_gqa": True}
        batch = {"seqused_k": case.seqused_k, "block_table": case.block_table}
        pools = (case.key_cache, case.value_cache)
        return lambda: varlen_attn(case.query, *pools, case.cu_seqlens_q, None, *longest, **options, **batch)

    return reader


def _gather_and_sdpa() -> Reader:
    def reader(case):
        lengths, query_lengths = set(case.lengths), set(case.query_lengths)
        if len(lengths) > 1 or query_lengths != {1} or _is_quantised(case):
            raise NotImplementedError("as people write it: one token each, equal lengths, no fp8")
        (length,) = lengths

        def call():
            pools = (case.key_cache, case.value_cache)
            rows = (pool[case.block_table.long()].flatten(1, 2)[:, :length].transpose(1, 2) for pool in pools)
            out = F.scaled_dot_product_attention(case.query[:, :, None], *rows, scale=case.scale, enable_gqa=True)
            return out.squeeze(2)

        return call

    return reader


def _vllm_write() -> Writer:
    import vllm._custom_ops as ops

    def write(key, value, key_cache, value_cache, slots, scale):
        kind = "auto" if scale is None else "fp8"
        one = torch.ones(1, device="cuda") if scale is None else scale
        ops.reshape_and_cache_flash(key, value, key_cache, value_cache, slots, kind, one, one)

    return write


def _index_put() -> Writer:
    def write(key, value, key_cache, value_cache, slots, scale):
        if scale is not None or key_cache.stride(1) < key_cache.stride(2):
            raise NotImplementedError("NHD pools of the keys' dtype only")
        for rows, cache in ((key, key_cache), (value, value_cache)):
            cache.view(-1, *cache.shape[2:])[slots] = rows

    return write


READERS = {
    "FlashAttention 3": _flash_attention_3,
    "FlashInfer": _flashinfer,
    "vLLM Triton": _vllm,
    "torch varlen_attn": _torch_varlen,
    "gather + SDPA": _gather_and_sdpa,
}
WRITERS = {"vLLM": _vllm_write, "index_put": _index_put}


def load(loaders: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the peers that are there; say of each other one why it is not."""
    found = {}
    for name, loader in loaders.items():
        try:
            found[name] = loader()
        except Exception as error:  # a peer may fail to import in ways of its own
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            print(f"{name} is left out: {reason}", file=sys.stderr)
    return found
