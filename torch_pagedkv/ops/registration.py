"""The dispatcher's side of an op: schema, kernels, fake, and the refusal to differentiate.

``Library.define`` and ``impl`` are used directly: a call through them costs about 3 us, through
``torch.library.custom_op`` more than ten times that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

LIBRARY = torch.library.Library("torch_pagedkv", "DEF")

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset
# What the public function calls; it counts no write to tensors of inference mode, which have no version.
_increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
_KERNELS_ONLY = torch._C._after_ADInplaceOrView_keyset


def register_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
    mutates: tuple[int, ...] = (),
) -> torch._ops.OpOverload:
    """Define an op and return its overload.

    Args:
        schema: the schema, mutated arguments marked.
        cpu, cuda: the kernels of the two devices.
        fake: what the op returns, in shapes; it runs the same checks as the kernels.
        mutates: positions of the arguments that the schema marks as mutated.
    """
    name = schema.partition("(")[0]
    # Strides carry a pool's layout, so the compiler must pass them on exactly as they are.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
    LIBRARY.define(schema, tags=tags)
    op = getattr(torch.ops.torch_pagedkv, name).default
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torch_pagedkv::{name}", fake, lib=LIBRARY)
    kernels = {torch._C.DispatchKey.CPU: cpu, torch._C.DispatchKey.CUDA: cuda}
    LIBRARY.impl(name, _autograd_kernel(op, mutates, kernels), "Autograd", with_keyset=True)
    LIBRARY.impl(name, _refuse_vmap(name), "FuncTorchBatched")
    return op


def _refuse_vmap(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            f"{name}: arguments must not be batched by torch.vmap (a batch is packed tokens and a row "
            "of the block table for each sequence), got a batched tensor"
        )

    return refuse


def _autograd_kernel(
    op: torch._ops.OpOverload, mutates: tuple[int, ...], kernels: dict[torch._C.DispatchKey, Callable[..., Any]]
) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, (*args, *kwargs.values()))
        if not mutates and torch.is_grad_enabled():
            tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
            if any(t.requires_grad for t in tensors):
                if torch._C._functorch.peek_interpreter_stack() is not None:
                    raise NotImplementedError(_no_gradient(op, "a transform of torch.func"))
                return _InferenceOnly.apply(op, keyset, args, kwargs, *tensors)
        # Where nothing but a kernel is left to come, calling it here saves a second way through the dispatcher.
        backend = kernels.get((keyset & _KERNELS_ONLY).highestPriorityTypeId())
        if backend is None:
            result = op.redispatch(keyset & _AFTER_AUTOGRAD, *args, **kwargs)
        else:
            result = backend(*args, **kwargs)
        if mutates:
            count_write(*[args[position] for position in mutates])
        return result

    return kernel


def count_write(*tensors: torch.Tensor) -> None:
    """Tell autograd that tensors were written."""
    _increment_version(tensors)


def _refuse_tangents(op: torch._ops.OpOverload, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None:
            raise NotImplementedError(_no_gradient(op, "forward-mode differentiation"))


def _no_gradient(op: torch._ops.OpOverload, actual: str) -> str:
    name = op._schema.name.partition("::")[2]
    return f"{name}: arguments must not be differentiated, the op is for inference, got {actual}"


class _InferenceOnly(torch.autograd.Function):
    """Run an op on tensors that require grad, and leave a node whose backward refuses."""

    @staticmethod
    def forward(ctx, op, keyset, args, kwargs, *tensors):
        ctx.op_name = op._schema.name.partition("::")[2]
        ctx.shapes = [(t.shape, t.dtype) if t.requires_grad else None for t in tensors]
        return op.redispatch(keyset & _AFTER_AUTOGRAD, *args, **kwargs)

    @staticmethod
    def backward(ctx, *grads):
        refuse = torch.ops.torch_pagedkv._refuse_backward.default
        gradients = (
            None if shape is None else refuse(grads[0], shape[0], shape[1], ctx.op_name) for shape in ctx.shapes
        )
        return (None, None, None, None, *gradients)


def _refuse_backward(grad: torch.Tensor, size: list[int], dtype: torch.dtype, op: str) -> torch.Tensor:
    raise NotImplementedError(
        f"{op}: backward must not be called, the op is for inference and has no gradient; "
        "detach its inputs or call it under torch.no_grad(), got a backward pass through it"
    )


def _refuse_backward_fake(grad, size, dtype, op):
    # Only the running backward raises, so that a compiled forward works as the eager one does.
    return grad.new_empty(size, dtype=dtype)


LIBRARY.define("_refuse_backward(Tensor grad, SymInt[] size, ScalarType dtype, str op) -> Tensor")
LIBRARY.impl("_refuse_backward", _refuse_backward, "CompositeExplicitAutograd")
torch.library.register_fake("torch_pagedkv::_refuse_backward", _refuse_backward_fake, lib=LIBRARY)
