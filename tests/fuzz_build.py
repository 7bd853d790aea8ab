"""The tensors that a described call has, each inside a buffer with guards on both sides."""

from __future__ import annotations

from typing import Any

import torch

from pools import poison_

GUARD = 64  # elements before and after what a tensor uses of its buffer
Buffers = list[torch.Tensor]


def build(call: dict[str, Any], device: str) -> tuple[dict[str, Any], Buffers]:
    """Return the arguments by name, and the bytes of every buffer on the CPU or a GPU."""
    arguments, buffers = {}, []
    for name, value in call["arguments"].items():
        if isinstance(value, dict):
            value = _tensor(value, device, buffers)
        elif name == "dtype" and isinstance(value, str):
            value = getattr(torch, value)
        arguments[name] = value
    return arguments, buffers


def _strides(of: dict[str, Any]) -> list[int]:
    """Strides of the described layout, which never lead below the tensor's first element."""
    shape, rank = of["shape"], len(of["shape"])
    order = of.get("order") or list(range(rank))
    padding, expand, odd_strides = of.get("padding", 0), of.get("expand"), of.get("odd_strides")
    strides, step = [0] * rank, 1
    for dim in reversed(order):
        strides[dim] = step = step * (2 if dim == of.get("step") else 1)
        step *= max(shape[dim], 1) + (padding if dim != order[0] else 0)
    if expand is not None:
        strides[expand] = 0
    if odd_strides is not None:
        strides = [odd_strides if size == 1 else stride for size, stride in zip(shape, strides)]
    return strides


def _tensor(of: dict[str, Any], device: str, buffers: Buffers) -> torch.Tensor:
    dtype, shape, strides = getattr(torch, of["dtype"]), of["shape"], _strides(of)
    if of.get("device", "cuda") != "cuda":  # a GPU is only asked for where there is one
        device = of["device"]
    span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides)) if 0 not in shape else 0
    buffer = torch.empty(span + 2 * GUARD, dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        poison_(buffer)
    else:
        buffer.fill_(1 if dtype == torch.bool else 0x5A)
    view = buffer.as_strided(shape, strides, GUARD)
    target, source = view, _elements(of, view.numel()).view(shape)
    if "expand" in of and shape[of["expand"]] > 0:  # one element for all of them
        target, source = target.select(of["expand"], 0), source.select(of["expand"], 0)
    target.copy_(source)
    if device != "cpu":
        buffer = buffer.to(device)
        view = buffer.as_strided(shape, strides, GUARD)
    if device != "meta":
        buffers.append(buffer.view(torch.uint8))
    if of.get("requires_grad") and (dtype.is_floating_point or dtype.is_complex):
        view = view.detach().requires_grad_()
    return view


def _elements(of: dict[str, Any], count: int) -> torch.Tensor:
    """The values in logical order, in the described dtype."""
    dtype = getattr(torch, of["dtype"])
    if "values" in of:
        repeated = (of["values"] or [0]) * count
        values = torch.tensor(repeated[:count], dtype=torch.int64)
    else:
        generator = torch.Generator().manual_seed(of["seed"])
        values = torch.randn(count, generator=generator)
        for position, special in of.get("specials", ()) if count else ():
            values[position % count] = special
    return values.to(dtype)
