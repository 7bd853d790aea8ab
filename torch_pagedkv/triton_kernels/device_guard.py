"""The device under which a kernel is launched."""

import contextlib

import torch

_SAME_DEVICE = contextlib.nullcontext()


def device_of(tensor: torch.Tensor):
    """Return a context in which the current device is ``tensor``'s.

    Triton launches on the current device and its current stream, so a call with tensors of
    another device has to change it; leaving it alone costs a third of switching.
    """
    if not tensor.is_cuda or tensor.get_device() == torch.cuda.current_device():
        return _SAME_DEVICE
    return torch.cuda.device(tensor.device)
