"""Modules and functions over the ops."""

from torch_pagedkv.nn.cascade_attention import cascade_attention
from torch_pagedkv.nn.paged_attention import PagedAttention

__all__ = ["PagedAttention", "cascade_attention"]
