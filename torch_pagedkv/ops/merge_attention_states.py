"""merge_attention_states: join two attentions over disjoint keys."""

from __future__ import annotations

import torch

from torch_pagedkv import reference
from torch_pagedkv.ops.argument_checks import (
    FLOAT_DTYPES,
    check_device,
    check_dtype,
    check_last_stride,
    check_rank,
    check_size,
    check_tensors,
)
from torch_pagedkv.ops.kernel_choice import native_kernel, triton_launcher
from torch_pagedkv.ops.registration import register_op

_NAME = "merge_attention_states"


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge the attentions of the same queries over two disjoint sets of keys into one over both.

    ``out = (exp(lse_a) * out_a + exp(lse_b) * out_b) / (exp(lse_a) + exp(lse_b))`` and
    ``lse = log(exp(lse_a) + exp(lse_b))``, in float32 and without overflow. It serves prefixes that
    sequences share and contexts that are spread over devices. A row with lse -inf is empty: its out
    is never read into the result, so merging with an empty part gives the other one, bit for bit. A
    sink belongs into one of the parts only.

    Args:
        out_a: [T, num_heads, value_head_dim], float32, bfloat16 or float16, last stride 1.
        lse_a: [num_heads, T] float32, natural logarithm, last stride 1.
        out_b, lse_b: the other part, shaped like the first; out_b may be another of float32, bfloat16
            and float16, lse_b is float32.

    All tensors are on one device.

    Returns:
        out: [T, num_heads, value_head_dim] in out_a's dtype, new and contiguous.
        lse: [num_heads, T] float32, new and contiguous.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: a dtype does not fit.
        NotImplementedError: a backward pass; CUDA tensors without Triton.

    Not checked:
        That the parts are of disjoint keys. NaN in a part that is not empty stays NaN.

    Example:
        >>> import torch, torch_pagedkv
        >>> out_a, out_b = torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
        >>> lse = torch.zeros(1, 1)
        >>> out, lse = torch_pagedkv.merge_attention_states(out_a, lse, out_b, lse)
        >>> out.tolist(), round(lse.item(), 4)
        ([[[0.5, 0.5]]], 0.6931)

    Source: the rescaling step of online softmax (Milakov and Gimelshein 2018), as FlashInfer's
    cascade attention uses it.
    """
    check_tensors(_NAME, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return _OP(out_a, lse_a, out_b, lse_b)


def _check(out_a, lse_a, out_b, lse_b) -> None:
    for name, out in (("out_a", out_a), ("out_b", out_b)):
        check_dtype(_NAME, name, out, FLOAT_DTYPES)
        check_rank(_NAME, name, out, "[num_tokens, num_heads, value_head_dim]")
        check_device(_NAME, name, out, "out_a", out_a)
        check_last_stride(_NAME, name, out)
        for dim, what in enumerate(("num_tokens", "num_heads", "value_head_dim")):
            check_size(_NAME, name, out, dim, out_a.shape[dim], f"out_a's {what}")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dtype(_NAME, name, lse, (torch.float32,))
        check_rank(_NAME, name, lse, "[num_heads, num_tokens]")
        check_device(_NAME, name, lse, "out_a", out_a)
        check_last_stride(_NAME, name, lse)
        check_size(_NAME, name, lse, 0, out_a.shape[1], "out_a's num_heads")
        check_size(_NAME, name, lse, 1, out_a.shape[0], "out_a's num_tokens")


def _outputs(out_a, lse_a) -> tuple[torch.Tensor, torch.Tensor]:
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


def _cpu(out_a, lse_a, out_b, lse_b):
    _check(out_a, lse_a, out_b, lse_b)
    kernel = native_kernel(_NAME)
    if kernel is None:
        return reference.merge_attention_states(out_a, lse_a, out_b, lse_b)
    out, lse = _outputs(out_a, lse_a)
    kernel(out, lse, out_a, lse_a, out_b, lse_b)
    return out, lse


def _cuda(out_a, lse_a, out_b, lse_b):
    _check(out_a, lse_a, out_b, lse_b)
    out, lse = _outputs(out_a, lse_a)
    triton_launcher(_NAME)(out, lse, out_a, lse_a, out_b, lse_b)
    return out, lse


def _fake(out_a, lse_a, out_b, lse_b):
    _check(out_a, lse_a, out_b, lse_b)
    return _outputs(out_a, lse_a)


_OP = register_op(
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
