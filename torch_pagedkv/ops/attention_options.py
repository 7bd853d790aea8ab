"""What a call of paged_attention asks for besides its tensors, and what no kernel could honour of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_pagedkv.ops.argument_checks import FLOAT32_SMALLEST, INT64_MAX, PER_HEAD_DTYPES, check_finite, check_per_head

ALL_KEYS = (-1, -1)  # the window that has no limit
_INTEGER = frozenset({int})


def check_window(op: str, window_size: tuple[int, int]) -> None:
    """Refuse what is no (left, right) pair of -1 or more."""
    if isinstance(window_size, list):  # as the dispatcher hands it on
        window_size = tuple(window_size)
    is_pair = isinstance(window_size, tuple) and len(window_size) == 2
    if not is_pair or not (_is_side(window_size[0]) and _is_side(window_size[1])):
        raise ValueError(f"{op}: window_size must be a pair (left, right) of integers >= -1, got {window_size!r}")


def _is_side(side: object) -> bool:
    return isinstance(side, int) and -1 <= side < 2**63


def check_options(op: str, softmax_scale: float | None, softcap: float, num_splits: int) -> None:
    """Refuse numbers that no kernel could honour."""
    if softmax_scale is not None:
        check_finite(op, "softmax_scale", softmax_scale)
    check_finite(op, "softcap", softcap)
    if softcap < 0.0:
        raise ValueError(f"{op}: softcap must be >= 0 (0: off), got {softcap}")
    if 0.0 < softcap < FLOAT32_SMALLEST:
        raise ValueError(f"{op}: softcap must be 0 (off) or normal in float32, got {softcap}")
    if num_splits < 0:
        raise ValueError(f"{op}: num_splits must be >= 0 (0: the kernel chooses), got {num_splits}")
    if num_splits > INT64_MAX:
        raise ValueError(f"{op}: num_splits must be less than 2**63, got {num_splits}")


def are_exact(softmax_scale: object, causal: object, window_size: object, softcap: object, num_splits: object) -> bool:
    """Return whether the dispatcher would hand on the options just as they are."""
    return (
        (softmax_scale is None or type(softmax_scale) is float)
        and type(causal) is bool
        and type(window_size) is tuple
        and type(softcap) is float
        and _INTEGER.issuperset(map(type, (*window_size, num_splits)))
        and 0 <= num_splits <= INT64_MAX
    )


def are_plain(causal: object, window_size: object, softcap: object, num_splits: object) -> bool:
    """Return whether a call asks for nothing but splits, in just the types that the dispatcher would hand on."""
    return (
        causal is True
        and (window_size is ALL_KEYS or (are_exact(None, causal, window_size, 0.0, 0) and window_size == ALL_KEYS))
        and type(softcap) is float
        and softcap == 0.0
        and type(num_splits) is int
    )


class AttentionOptions(NamedTuple):
    """What follows the tensors of the batch, in the order in which kernels take it."""

    softmax_scale: float
    causal: bool
    window_left: int
    window_right: int
    softcap: float
    alibi_slopes: torch.Tensor | None
    sinks: torch.Tensor | None
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    num_splits: int

    def for_kernel(self, op: str, query: torch.Tensor) -> AttentionOptions:
        """Check what a C++ kernel can not see, and return options with float32 for each head."""
        check_options(op, self.softmax_scale, self.softcap, self.num_splits)
        options = self
        for name in ("alibi_slopes", "sinks"):
            per_head = getattr(self, name)
            if per_head is not None:
                check_per_head(op, name, per_head, query)
                options = options._replace(**{name: per_head.float().contiguous()})
        return options


def to_float32(per_head: torch.Tensor | None) -> torch.Tensor | None:
    """Return per_head as kernels read it; where its dtype is none that it may have, as it is."""
    if per_head is None or per_head.dtype is torch.float32 or per_head.dtype not in PER_HEAD_DTYPES:
        return per_head
    return per_head.float()
