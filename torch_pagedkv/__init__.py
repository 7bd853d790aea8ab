"""A paged KV cache as plain PyTorch: custom ops, the bookkeeping of blocks, and a drop-in module."""

from torch_pagedkv.ops import (
    compute_slot_mapping,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    reshape_and_cache,
)

__version__ = "0.1.0"

__all__ = [
    "compute_slot_mapping",
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
]
