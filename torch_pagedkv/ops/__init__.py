"""What the ops promise: schemas, public functions, checks and fakes. Importing registers all of them."""

from torch_pagedkv.ops.compute_slot_mapping import compute_slot_mapping
from torch_pagedkv.ops.copy_blocks import copy_blocks
from torch_pagedkv.ops.gather_kv import gather_kv
from torch_pagedkv.ops.merge_attention_states import merge_attention_states
from torch_pagedkv.ops.paged_attention import paged_attention
from torch_pagedkv.ops.reshape_and_cache import reshape_and_cache

__all__ = [
    "compute_slot_mapping",
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
]
