"""The one table of refused calls: which op, what is wrong with the call, and on which devices it is seen.

Every row changes one argument of a call that is right. ``values`` rows are wrong only in the values of an
index tensor: CPU raises, CUDA keeps inside the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from cases import BF16, E4M3, E5M2, FP32


def write_call(device: str, pool_dtype: torch.dtype = FP32) -> dict[str, Any]:
    pools = torch.zeros((2, 4, 16, 2, 8), device=device).to(pool_dtype).unbind(0)
    key = torch.ones((3, 2, 8), device=device)
    slots = torch.tensor([1, 2, -1], device=device)
    return dict(
        key=key,
        value=key.clone(),
        key_cache=pools[0],
        value_cache=pools[1],
        slot_mapping=slots,
        k_scale=None,
        v_scale=None,
    )


def attention_call(device: str, pool_dtype: torch.dtype = FP32) -> dict[str, Any]:
    pools = torch.zeros((2, 4, 16, 2, 8), device=device).to(pool_dtype).unbind(0)
    return dict(
        query=torch.ones((3, 4, 8), device=device),
        key_cache=pools[0],
        value_cache=pools[1],
        block_table=torch.tensor([[0, 1], [2, 3]], device=device, dtype=torch.int32),
        seqused_k=torch.tensor([20, 5], device=device, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 2, 3], device=device, dtype=torch.int32),
        softmax_scale=None,
        causal=True,
        window_size=(-1, -1),
        softcap=0.0,
        alibi_slopes=None,
        sinks=None,
        k_scale=None,
        v_scale=None,
        num_splits=0,
    )


def gather_call(device: str, pool_dtype: torch.dtype = FP32) -> dict[str, Any]:
    call = attention_call(device, pool_dtype)
    names = ("key_cache", "value_cache", "block_table", "seqused_k", "k_scale", "v_scale")
    return {name: call[name] for name in names} | {"dtype": None}


def copy_call(device: str, pool_dtype: torch.dtype = FP32) -> dict[str, Any]:
    pools = torch.zeros((2, 4, 16, 2, 8), device=device).to(pool_dtype).unbind(0)
    blocks = {"src_blocks": torch.tensor([0], device=device), "dst_blocks": torch.tensor([1], device=device)}
    return dict(key_cache=pools[0], value_cache=pools[1], **blocks)


def merge_call(device: str) -> dict[str, Any]:
    out, lse = torch.ones((3, 2, 8), device=device), torch.ones((2, 3), device=device)
    return dict(out_a=out, lse_a=lse, out_b=out.clone(), lse_b=lse.clone())


def slots_call(device: str) -> dict[str, Any]:
    call = attention_call(device)
    names = ("block_table", "seqused_k", "cu_seqlens_q")
    return {name: call[name] for name in names} | {"block_size": 16, "num_tokens": 3}


CALLS = {
    "reshape_and_cache": write_call,
    "paged_attention": attention_call,
    "gather_kv": gather_call,
    "copy_blocks": copy_call,
    "merge_attention_states": merge_call,
    "compute_slot_mapping": slots_call,
}


@dataclasses.dataclass(frozen=True)
class ErrorCase:
    op: str
    name: str
    change: Callable[[dict[str, Any]], dict[str, Any]]
    pool_dtype: torch.dtype = FP32
    values: bool = False  # only the values are wrong
    public_only: bool = False  # the dispatcher's own type check comes first

    def __str__(self) -> str:
        return f"{self.op}-{self.name}"

    def build(self, device: str) -> dict[str, Any]:
        make = CALLS[self.op]
        call = make(device) if self.pool_dtype == FP32 else make(device, self.pool_dtype)
        return {**call, **self.change(call)}


def _each(op: str, rows: dict[str, Callable], **common: Any) -> list[ErrorCase]:
    return [ErrorCase(op, name, change, **common) for name, change in rows.items()]


WRITE = "reshape_and_cache"
READ = "paged_attention"
ERRORS = [
    *_each(
        WRITE,
        {
            "key_rank": lambda c: {"key": c["key"][0]},
            "key_heads": lambda c: {"key": c["key"].repeat(1, 2, 1)},
            "key_head_dim": lambda c: {"key": c["key"].repeat(1, 1, 2)},
            "key_dtype": lambda c: {"key": c["key"].to(BF16)},
            "key_last_stride": lambda c: {"key": torch.ones(3, 2, 16, device=c["key"].device)[..., ::2]},
            "value_tokens": lambda c: {"value": c["value"][:2]},
            "value_dtype": lambda c: {"value": c["value"].double()},
            "value_heads": lambda c: {"value": c["value"][:, :1]},
            "pool_rank": lambda c: {"key_cache": c["key_cache"][0]},
            "pool_dtype": lambda c: {"key_cache": c["key_cache"].double()},
            "pools_dtypes": lambda c: {"value_cache": c["value_cache"].half()},
            "pools_sizes": lambda c: {"value_cache": c["value_cache"][:3]},
            "pools_block_sizes": lambda c: {"value_cache": c["value_cache"][:, :8]},
            "pool_last_stride": lambda c: {
                "value_cache": c["value_cache"].transpose(2, 3).contiguous().transpose(2, 3)
            },
            "pool_expanded": lambda c: {"key_cache": c["key_cache"][:1].expand(4, -1, -1, -1)},
            "pool_requires_grad": lambda c: {"key_cache": c["key_cache"].clone().requires_grad_()},
            "block_size_0": lambda c: {n: c[n][:, :0] for n in ("key_cache", "value_cache")},
            "head_dim_0": lambda c: {n: c[n][..., :0] for n in ("key", "key_cache")},
            "head_dim_513": lambda c: {
                "key": c["key"].new_zeros(3, 2, 513),
                "key_cache": c["key_cache"].new_zeros(4, 16, 2, 513),
            },
            "slots_rank": lambda c: {"slot_mapping": c["slot_mapping"][None]},
            "slots_0_dim": lambda c: {"slot_mapping": c["slot_mapping"][0]},
            "slots_float": lambda c: {"slot_mapping": c["slot_mapping"].float()},
            "slots_int16": lambda c: {"slot_mapping": c["slot_mapping"].short()},
            "slots_bool": lambda c: {"slot_mapping": c["slot_mapping"] > 0},
            "slots_longer": lambda c: {"slot_mapping": c["slot_mapping"].repeat(2)},
            "scale_without_fp8": lambda c: {"k_scale": torch.ones(1, device=c["key"].device)},
            "slots_device": lambda c: {"slot_mapping": c["slot_mapping"].to("meta")},
        },
    ),
    *_each(
        WRITE,
        {
            "scale_dtype": lambda c: {"v_scale": torch.ones(1, device=c["key"].device).double()},
            "scale_shape": lambda c: {"k_scale": torch.ones(3, device=c["key"].device)},
            "scale_rank": lambda c: {"k_scale": torch.ones(1, 2, device=c["key"].device)},
            "other_fp8": lambda c: {n: c[n].to(E5M2) for n in ("key", "value")},
            "fp8_bytes_with_scale": lambda c: (
                {n: c[n].to(E4M3) for n in ("key", "value")} | {"k_scale": torch.ones(1, device=c["key"].device)}
            ),
            "integer_key": lambda c: {"key": c["key"].int()},
        },
        pool_dtype=E4M3,
    ),
    *_each(WRITE, {"slot_past_end": lambda c: {"slot_mapping": c["slot_mapping"].new_tensor([0, 64, 1])}}, values=True),
    *_each(
        WRITE,
        {
            "key_list": lambda c: {"key": c["key"].tolist()},
            "scale_number": lambda c: {"k_scale": 0.5},
            "slots_none": lambda c: {"slot_mapping": None},
        },
        public_only=True,
    ),
    *_each(
        READ,
        {
            "query_rank": lambda c: {"query": c["query"][0]},
            "query_dtype": lambda c: {"query": c["query"].double()},
            "query_dtype_of_pool": lambda c: {"query": c["query"].to(BF16)},
            "query_head_dim": lambda c: {"query": c["query"][..., :4]},
            "query_heads": lambda c: {"query": c["query"][:, :3]},
            "query_last_stride": lambda c: {"query": torch.ones(3, 4, 16, device=c["query"].device)[..., ::2]},
            "pools_devices": lambda c: {"value_cache": c["value_cache"].to("meta")},
            "pools_sizes": lambda c: {"value_cache": c["value_cache"][:2]},
            "table_rank": lambda c: {"block_table": c["block_table"][0]},
            "table_float": lambda c: {"block_table": c["block_table"].float()},
            "table_uint8": lambda c: {"block_table": c["block_table"].to(torch.uint8)},
            "table_last_stride": lambda c: {"block_table": c["block_table"].T.contiguous().T},
            "lengths_rank": lambda c: {"seqused_k": c["seqused_k"][:, None]},
            "lengths_size": lambda c: {"seqused_k": c["seqused_k"][:1]},
            "lengths_float": lambda c: {"seqused_k": c["seqused_k"].float()},
            "lengths_int16": lambda c: {"seqused_k": c["seqused_k"].short()},
            "lengths_0_dim": lambda c: {"seqused_k": c["seqused_k"][0]},
            "lengths_device": lambda c: {"seqused_k": c["seqused_k"].to("meta")},
            "sums_size": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][:2]},
            "sums_float": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].float()},
            "sums_int16": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].short()},
            "sums_0_dim": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"][0]},
            "table_0_dim": lambda c: {"block_table": c["block_table"][0, 0]},
            "sums_missing": lambda c: {"cu_seqlens_q": None},
            "scale_nan": lambda c: {"softmax_scale": float("nan")},
            "window_below": lambda c: {"window_size": (-2, 0)},
            "window_single": lambda c: {"window_size": [4]},
            "softcap_negative": lambda c: {"softcap": -1.0},
            "softcap_infinite": lambda c: {"softcap": float("inf")},
            "softcap_nan": lambda c: {"softcap": float("nan")},
            "softcap_past_float32": lambda c: {"softcap": 1e39},
            "softcap_below_float32": lambda c: {"softcap": 1e-46},
            "scale_past_float32": lambda c: {"softmax_scale": -1e300},
            "splits_negative": lambda c: {"num_splits": -1},
            "slopes_size": lambda c: {"alibi_slopes": torch.ones(2, device=c["query"].device)},
            "slopes_integer": lambda c: {"alibi_slopes": torch.ones(4, device=c["query"].device, dtype=torch.int32)},
            "sinks_rank": lambda c: {"sinks": torch.ones(4, 1, device=c["query"].device)},
            "sinks_device": lambda c: {"sinks": torch.ones(4, device="meta")},
            "scale_without_fp8": lambda c: {"v_scale": torch.ones(1, device=c["query"].device)},
        },
    ),
    *_each(
        READ,
        {
            "length_past_table": lambda c: {"seqused_k": c["seqused_k"].new_tensor([33, 5])},
            "length_negative": lambda c: {"seqused_k": c["seqused_k"].new_tensor([20, -1])},
            "sums_start": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([1, 2, 3])},
            "sums_fall": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([0, 3, 2])},
            "sums_past_tokens": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([0, 2, 4])},
            "table_past_pool": lambda c: {"block_table": c["block_table"].new_tensor([[0, 4], [2, 3]])},
            "table_negative": lambda c: {"block_table": c["block_table"].new_tensor([[0, 1], [-7, 3]])},
        },
        values=True,
    ),
    *_each(
        READ,
        {
            "window_number": lambda c: {"window_size": 4},
            "window_float": lambda c: {"window_size": (1.5, 0)},
            "window_past_int64": lambda c: {"window_size": (2**70, 0)},
            "softcap_text": lambda c: {"softcap": "x"},
            "scale_tensor": lambda c: {"softmax_scale": torch.ones(())},
            "causal_none": lambda c: {"causal": None},
            "causal_number": lambda c: {"causal": 0},
            "splits_float": lambda c: {"num_splits": 1.5},
            "splits_past_int64": lambda c: {"num_splits": 2**70},
        },
        public_only=True,
    ),
    *_each(
        "gather_kv",
        {
            "table_rank": lambda c: {"block_table": c["block_table"][0]},
            "lengths_size": lambda c: {"seqused_k": c["seqused_k"][:1]},
            "dtype": lambda c: {"dtype": torch.int32},
            "fp8_of_another_pool": lambda c: {"dtype": E4M3},
            "scale_without_fp8": lambda c: {"k_scale": torch.ones(1, device=c["key_cache"].device)},
        },
    ),
    *_each(
        "gather_kv",
        {
            "length_past_table": lambda c: {"seqused_k": c["seqused_k"].new_tensor([20, 33])},
            "length_negative": lambda c: {"seqused_k": c["seqused_k"].new_tensor([-(2**31), 5])},
            "table_past_pool": lambda c: {"block_table": c["block_table"].new_tensor([[0, 4], [2, 3]])},
            "table_negative": lambda c: {"block_table": c["block_table"].new_tensor([[0, 1], [-1, 3]])},
        },
        values=True,
    ),
    *_each(
        "copy_blocks",
        {
            "sizes": lambda c: {"dst_blocks": c["dst_blocks"].repeat(2)},
            "float": lambda c: {"src_blocks": c["src_blocks"].float()},
            "int16": lambda c: {"dst_blocks": c["dst_blocks"].short()},
            "0_dim": lambda c: {"src_blocks": c["src_blocks"][0]},
            "device": lambda c: {"dst_blocks": c["dst_blocks"].to("meta")},
            "rank": lambda c: {"src_blocks": c["src_blocks"][None]},
            "pool_requires_grad": lambda c: {"value_cache": c["value_cache"].clone().requires_grad_()},
        },
    ),
    *_each(
        "copy_blocks",
        {
            "both_sides": lambda c: {"dst_blocks": c["src_blocks"].clone()},
            "named_twice": lambda c: {
                n: c[n].new_tensor(ids) for n, ids in (("src_blocks", [0, 3]), ("dst_blocks", [2, 2]))
            },
            "source_past_pool": lambda c: {"src_blocks": c["src_blocks"].new_tensor([4])},
            "destination_negative": lambda c: {"dst_blocks": c["dst_blocks"].new_tensor([-1])},
        },
        values=True,
    ),
    *_each(
        "merge_attention_states",
        {
            "out_rank": lambda c: {"out_a": c["out_a"][0]},
            "out_sizes": lambda c: {"out_b": c["out_b"][:2]},
            "out_dtype": lambda c: {"out_a": c["out_a"].int()},
            "lse_dtype": lambda c: {"lse_a": c["lse_a"].half()},
            "lse_transposed": lambda c: {"lse_b": c["lse_b"].T.contiguous()},
            "lse_device": lambda c: {"lse_b": c["lse_b"].to("meta")},
        },
    ),
    *_each(
        "compute_slot_mapping",
        {
            "block_size_float": lambda c: {"block_size": 1.5},
            "tokens_none": lambda c: {"num_tokens": None},
        },
        public_only=True,
    ),
    *_each("gather_kv", {"dtype_text": lambda c: {"dtype": "float32"}}, public_only=True),
    *_each(
        "compute_slot_mapping",
        {
            "table_float": lambda c: {"block_table": c["block_table"].float()},
            "block_size_0": lambda c: {"block_size": 0},
            "block_size_past_int64": lambda c: {"block_size": 2**62},
            "tokens_negative": lambda c: {"num_tokens": -1},
            "decode_tokens": lambda c: {"cu_seqlens_q": None},
        },
    ),
    *_each(
        "compute_slot_mapping",
        {
            "length_past_table": lambda c: {"seqused_k": c["seqused_k"].new_tensor([33, 5])},
            "length_negative": lambda c: {"seqused_k": c["seqused_k"].new_tensor([20, -7])},
            "sums_start": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([-1, 2, 3])},
            "sums_fall": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([0, 3, 2])},
            "sums_past_tokens": lambda c: {"cu_seqlens_q": c["cu_seqlens_q"].new_tensor([0, 2, 4])},
            "table_negative": lambda c: {"block_table": c["block_table"].new_tensor([[0, -1], [2, 3]])},
            "table_beyond_int64": lambda c: {"block_table": c["block_table"].long() + 2**62},
        },
        values=True,
    ),
]
