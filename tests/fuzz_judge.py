"""What a random call may end in: the reference's result, or a sentence; what it leaves alone."""

from __future__ import annotations

import re
from typing import Any

import torch

import torch_pagedkv
from fuzz_build import Buffers, build
from fuzz_calls import Call
from pools import bits
from torch_pagedkv import reference

OPS = torch.ops.torch_pagedkv
WRITES = ("reshape_and_cache", "copy_blocks")
# Sentences about values: what fakes do not see, and CUDA does not raise.
ABOUT_VALUES = re.compile(
    r"(slot_mapping must be below|seqused_k must be in|cu_seqlens_q must (start|not fall|end)|"
    r"block_table must (be in|not be negative|name blocks)|(src|dst)_blocks must (be in|name each))"
)


class Fault(AssertionError):
    """A call that ended in something else."""


def judge(call: Call, device: str) -> str:
    """Make a described call and return what it ended in; raise Fault where it must not end so."""
    op = call["op"]
    arguments, buffers = build(call, device)
    twins, expected_buffers = build(call, device)
    outcome = attempt(call, arguments)
    if isinstance(outcome, Exception):
        ending = _check_exception(call, outcome, arguments)
    else:
        ending = "a result"
    about_values = isinstance(outcome, Exception) and ABOUT_VALUES.search(str(outcome))
    has_values = not any(isinstance(t, torch.Tensor) and t.is_meta for t in arguments.values())
    if has_values and (ending == "a result" or about_values):
        _check_against_reference(op, device, outcome, twins)
    _check_buffers(buffers, expected_buffers)
    if ending == "a result" or (ending == "a sentence" and not about_values):
        _check_fake(call, outcome)
    return ending


def attempt(call: Call, arguments: dict[str, Any]) -> Any:
    """Go through the door that the call names; return the result or the exception."""
    op = call["op"]
    overload = getattr(OPS, op).default
    names = overload._schema.arguments
    positional = [arguments[a.name] for a in names if not a.kwarg_only]
    named = {a.name: arguments[a.name] for a in names if a.kwarg_only}
    if call["door"] == "public":
        overload = getattr(torch_pagedkv, op)
        named |= {"return_lse": True} if op == "paged_attention" else {}
    try:
        result = overload(*positional, **named)
        if any(isinstance(a, torch.Tensor) and a.is_cuda for a in arguments.values()):
            torch.cuda.synchronize()
        return result
    except Exception as error:
        return error


def _check_exception(call: Call, error: Exception, arguments: dict[str, Any]) -> str:
    op, text = call["op"], str(error)
    is_ours = isinstance(error, (ValueError, TypeError, NotImplementedError)) and text.startswith(f"{op}: ")
    if is_ours and " must " in text and ", got " in text:
        if call["legal"] and not ABOUT_VALUES.search(text):
            raise Fault(f"a legal call is refused: {text}")
        return "a sentence"
    if f"torch_pagedkv::{op}()" in text and isinstance(error, (TypeError, RuntimeError)):
        return "a schema error of torch"
    if isinstance(error, TypeError) and "must be" in text and "not" in text:
        return "a schema error of torch"  # an integer that is too wide
    if isinstance(error, NotImplementedError) and "no tensor arguments" in text:
        return "a schema error of torch"  # nothing says which device the call is for
    num_tokens = arguments.get("num_tokens")
    no_memory = isinstance(error, MemoryError) or re.search("allocate|overflow", text)
    if type(num_tokens) is int and num_tokens > 2**40 and no_memory:
        return "no memory"
    raise Fault(f"{type(error).__name__}: {text}") from error


def _check_against_reference(op: str, device: str, outcome: Any, twins: dict[str, Any]) -> None:
    """The same sentence about values, or the same values; it writes into the twins' buffers."""
    twins = {n: t.detach() if isinstance(t, torch.Tensor) else t for n, t in twins.items()}
    try:
        with torch.no_grad():
            expected = getattr(reference, op)(**_plain(twins))
    except ValueError as error:
        if device == "cuda" and not isinstance(outcome, Exception):
            return
        if str(error) != str(outcome):
            raise Fault(f"the reference says: {error}; got {outcome!r:.500}") from error
        return
    if isinstance(outcome, Exception):
        raise Fault(f"the reference gives a result; got {outcome}")
    if op in WRITES:
        return  # the buffers are compared
    if op == "compute_slot_mapping":
        if not torch.equal(outcome, expected):
            raise Fault(f"got slots {outcome.tolist()}, expected {expected.tolist()}")
    elif op == "gather_kv":
        for actual, wanted in zip(outcome, expected, strict=True):
            _same(actual, wanted, "gathered")
    elif _is_comparable(twins):
        exact = getattr(reference, op)(**_plain(twins), precision=torch.float64)
        values = twins.get("value_cache", twins.get("out_a"))
        # Products may have overflowed on the way to such a logarithm.
        in_range = ~((exact[1].abs() > 1e30) & exact[1].isfinite())
        masks = (in_range.T.unsqueeze(-1), in_range)
        for name, *states, mask in zip(("out", "lse"), outcome, expected, exact, masks, strict=True):
            _close(name, *states, mask, values)


def _is_comparable(arguments: dict[str, Any]) -> bool:
    """Whether float32 has an answer: not for scales that are not finite, nor for sinks of +inf."""
    scales = [arguments.get(name) for name in ("k_scale", "v_scale")]
    sinks = arguments.get("sinks")
    has_limits = all(scale is None or scale.isfinite().all() for scale in scales)
    return has_limits and (sinks is None or bool((sinks < torch.inf).all()))


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as the reference takes them."""
    plain = {n: tuple(a) if n == "window_size" else a for n, a in arguments.items()}
    return plain | ({"softcap": plain["softcap"] or 0.0} if "softcap" in plain else {})


def _same(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    kinds = [(t.shape, t.dtype, t.stride()) for t in (actual, wanted.contiguous())]
    if kinds[0] != kinds[1]:
        raise Fault(f"{what}: shape, dtype and strides are {kinds[0]}, not {kinds[1]}")
    is_same = bits(actual) == bits(wanted)
    if actual.element_size() > 1:
        is_same |= actual.isnan() & wanted.isnan()
    if not is_same.all():
        raise Fault(f"{what}: {(~is_same).sum()} of {actual.numel()} elements differ")


def _close(name: str, actual, rough, precise, mask, values: torch.Tensor) -> None:
    """Compare where float32 and float64 agree; infinities and NaN must then be where theirs are.

    Elsewhere the inputs are too extreme for float32: whatever comes out is right.
    """
    if actual.shape != rough.shape or actual.dtype != rough.dtype or not actual.is_contiguous():
        raise Fault(f"{name}: {actual.dtype} {list(actual.shape)} is not {rough.dtype} {list(rough.shape)}")
    finite = values.double()[values.double().isfinite()]
    largest = max(1.0, finite.abs().max().item() if finite.numel() else 1.0, _largest(precise))
    budget = (1e-5 if actual.dtype == torch.float32 else 2 * torch.finfo(actual.dtype).eps) * largest
    actual, rough, precise = actual.double(), rough.double(), precise.double()

    def differ(a: torch.Tensor, b: torch.Tensor, limit: float) -> torch.Tensor:
        same = (a == b) | (a.isnan() & b.isnan())
        return ~same & ~((a - b).abs() <= limit)

    wrong = mask & ~differ(rough, precise, budget)
    wrong &= differ(actual, rough, 2 * budget) & differ(actual, precise, 2 * budget)
    if wrong.any():
        first = wrong.nonzero()[0].tolist()
        at = tuple(first)
        raise Fault(f"{name}: {wrong.sum()} elements are wrong; {actual[at]} for {precise[at]} at {first}")


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _check_buffers(actual: Buffers, expected: Buffers) -> None:
    """Guards, inputs, and what was written: every byte is what the reference leaves there."""
    for number, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        different = (got != wanted).nonzero().flatten()
        if different.numel():
            raise Fault(
                f"buffer {number} of {got.numel()} bytes: {different.numel()} bytes differ, "
                f"from byte {different[0].item()} on"
            )


def _check_fake(call: Call, outcome: Any) -> None:
    """Tracing refuses what running refuses, by the same sentence, and knows the results' shapes."""
    if any(isinstance(of, dict) and "device" in of for of in call["arguments"].values()):
        return
    arguments, _ = build(call, "meta")
    fake = attempt(call, arguments)
    if isinstance(outcome, Exception) or isinstance(fake, Exception):
        # Without a scale's elements its device is all that the sentence can name.
        if type(fake) is not type(outcome) or str(fake).replace("meta", "cpu") != str(outcome).replace("cuda:0", "cpu"):
            raise Fault(f"the fake ends in {fake!r:.300}, the kernel in {outcome!r:.300}")
        return
    outcome, fake = ((x if isinstance(x, tuple) else (x,)) for x in (outcome, fake))
    for real, traced in zip(outcome, fake, strict=True):
        if real is None and traced is None:
            continue
        if (real.shape, real.dtype, real.stride()) != (traced.shape, traced.dtype, traced.stride()):
            raise Fault(f"the fake returns {traced.dtype} {list(traced.shape)} {traced.stride()}")
