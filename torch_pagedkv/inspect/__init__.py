"""Looks inside: follows a token to its bytes, finds what does not fit together in a batch."""

from torch_pagedkv.inspect.batch_findings import check
from torch_pagedkv.inspect.token_walk import TokenWalk, explain

__all__ = ["TokenWalk", "check", "explain"]
