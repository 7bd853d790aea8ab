"""A paged KV cache as plain PyTorch: custom ops, the bookkeeping of blocks, and a drop-in module.

``reshape_and_cache`` scatters new keys and values into the slots of a shared pool, ``paged_attention``
attends through a block table without gathering first; both trace whole under
``torch.compile(fullgraph=True)``. Importing this package initialises no device.
"""

from torch_pagedkv import cache, inspect, nn
from torch_pagedkv.build_info import VERSION, build_info
from torch_pagedkv.cache import (
    BlockAllocator,
    BlockManager,
    OutOfBlocks,
    PagedBatch,
    PagedKVCache,
    SwapSpace,
    blocks_for,
    locate,
    slot_of,
)
from torch_pagedkv.kernel_warmup import warmup
from torch_pagedkv.nn import PagedAttention, cascade_attention
from torch_pagedkv.ops import (
    compute_slot_mapping,
    copy_blocks,
    gather_kv,
    merge_attention_states,
    paged_attention,
    reshape_and_cache,
)
from torch_pagedkv.ops.value_checking import checks

__version__ = VERSION

__all__ = [
    "BlockAllocator",
    "BlockManager",
    "OutOfBlocks",
    "PagedAttention",
    "PagedBatch",
    "PagedKVCache",
    "SwapSpace",
    "blocks_for",
    "build_info",
    "cache",
    "cascade_attention",
    "checks",
    "compute_slot_mapping",
    "copy_blocks",
    "gather_kv",
    "inspect",
    "locate",
    "merge_attention_states",
    "nn",
    "paged_attention",
    "reshape_and_cache",
    "slot_of",
    "warmup",
]
