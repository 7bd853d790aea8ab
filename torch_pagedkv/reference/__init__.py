"""What correct means: every op in readable PyTorch, on any device, with no kernel behind it.

These functions are the oracle of the tests and benchmarks, and what a CPU without the C++ part runs.
They take the arguments of the public functions of the same names and do not check shapes or dtypes.
"""

from torch_pagedkv.reference.compute_slot_mapping import compute_slot_mapping
from torch_pagedkv.reference.copy_blocks import copy_blocks
from torch_pagedkv.reference.gather_kv import gather_kv
from torch_pagedkv.reference.merge_attention_states import merge_attention_states
from torch_pagedkv.reference.paged_attention import paged_attention
from torch_pagedkv.reference.reshape_and_cache import reshape_and_cache

__all__ = [
    "compute_slot_mapping",
    "copy_blocks",
    "gather_kv",
    "merge_attention_states",
    "paged_attention",
    "reshape_and_cache",
]
