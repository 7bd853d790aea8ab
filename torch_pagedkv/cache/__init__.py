"""Who owns which block, where its memory is, and what a batch has to say about it. No kernels."""

from torch_pagedkv.cache.addressing import Location, blocks_for, locate, slot_of
from torch_pagedkv.cache.allocator import BlockAllocator, OutOfBlocks
from torch_pagedkv.cache.batch import PagedBatch
from torch_pagedkv.cache.storage import PagedKVCache

__all__ = [
    "BlockAllocator",
    "Location",
    "OutOfBlocks",
    "PagedBatch",
    "PagedKVCache",
    "blocks_for",
    "locate",
    "slot_of",
]
