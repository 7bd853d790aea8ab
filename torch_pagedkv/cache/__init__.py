"""Who owns which block, where its memory is, and what a batch has to say about it. No kernels."""

from torch_pagedkv.cache.addressing import Location, blocks_for, locate, slot_of
from torch_pagedkv.cache.allocator import BlockAllocator, OutOfBlocks
from torch_pagedkv.cache.batch import PagedBatch
from torch_pagedkv.cache.block_manager import BlockManager
from torch_pagedkv.cache.storage import PagedKVCache
from torch_pagedkv.cache.swap_space import SwapSpace

__all__ = [
    "BlockAllocator",
    "BlockManager",
    "Location",
    "OutOfBlocks",
    "PagedBatch",
    "PagedKVCache",
    "SwapSpace",
    "blocks_for",
    "locate",
    "slot_of",
]
