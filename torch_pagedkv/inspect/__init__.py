"""Looks inside: follows a token to its bytes, checks a batch against itself, traces the online softmax, draws."""

from torch_pagedkv.inspect.batch_findings import check
from torch_pagedkv.inspect.layout_map import LayoutMaps, map_layouts
from torch_pagedkv.inspect.online_softmax import SoftmaxState, trace_softmax
from torch_pagedkv.inspect.pool_picture import draw_pool, draw_pool_history, pool_history_svg
from torch_pagedkv.inspect.token_walk import TokenWalk, explain

__all__ = [
    "LayoutMaps",
    "SoftmaxState",
    "TokenWalk",
    "check",
    "draw_pool",
    "draw_pool_history",
    "explain",
    "map_layouts",
    "pool_history_svg",
    "trace_softmax",
]
