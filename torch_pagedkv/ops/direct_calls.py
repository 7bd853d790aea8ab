"""Calls that go straight to a kernel: those in which the dispatcher would do nothing but find it.

The way through the dispatcher and the Autograd kernel costs an eager call more than a small kernel takes. A
public function may leave it out where nobody could tell: where no mode, transform, tracer or profiler looks
on, no tensor is of a class that has a say in what becomes of it, and nothing wants a gradient. The kernel is
the one that the dispatcher would have called, so results and refusals are the same.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from torch_pagedkv.ops import value_checking

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_OPTIONAL_TENSORS = _TENSORS | {type(None)}

try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._autograd import _profiler_enabled
    from torch._C._functorch import peek_interpreter_stack
except ImportError:  # a torch that cannot be asked: every call goes the long way
    _len_torch_dispatch_stack = functools.partial(int, 1)


def may_skip_dispatcher(tensors: tuple[Any, ...], optional: tuple[Any, ...] = ()) -> bool:
    """Return whether a call with these tensors, and with these or None, needs no more than its kernel."""
    return not (
        is_dynamo_compiling()  # first: the compiler looks no further
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or peek_interpreter_stack() is not None
        or _get_tracing_state() is not None
        or _profiler_enabled()
        or value_checking.enabled
        or forward_ad._current_level >= 0
        or not _TENSORS.issuperset(map(type, tensors))
        or (optional and not _OPTIONAL_TENSORS.issuperset(map(type, optional)))
        or (is_grad_enabled() and _any_wants_gradient(tensors + optional))
    )


def _any_wants_gradient(tensors: tuple[torch.Tensor | None, ...]) -> bool:
    return any([tensor is not None and tensor.requires_grad for tensor in tensors])
