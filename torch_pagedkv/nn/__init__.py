"""Modules over the ops."""

from torch_pagedkv.nn.paged_attention import PagedAttention

__all__ = ["PagedAttention"]
