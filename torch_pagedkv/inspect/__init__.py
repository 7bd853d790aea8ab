"""Looks inside: follows a token to its bytes, checks a batch against itself, traces the online softmax."""

from torch_pagedkv.inspect.batch_findings import check
from torch_pagedkv.inspect.online_softmax import SoftmaxState, trace_softmax
from torch_pagedkv.inspect.token_walk import TokenWalk, explain

__all__ = ["SoftmaxState", "TokenWalk", "check", "explain", "trace_softmax"]
