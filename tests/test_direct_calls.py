"""Calls that leave the dispatcher out: when they do, and that nobody who looks on could tell."""

from __future__ import annotations

import contextlib
import importlib.util
import sys

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_pagedkv
from cases import BF16, FP32, PAGED, WRITE, PagedCase
from error_cases import CALLS
from pools import assert_same_bits
from torch_pagedkv import native
from torch_pagedkv.ops import direct_calls

# Without them every call goes the long way, which the other tests are about.
pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"C++: {native.why_missing()}")
OPS = ("reshape_and_cache", "paged_attention")
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    """Remembers the names of the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


class Subclass(torch.Tensor):
    pass


class Opaque(torch.Tensor):
    """Says nothing through __torch_function__, as DTensor does."""

    __torch_function__ = torch._C._disabled_torch_function_impl


@pytest.fixture
def dispatched(monkeypatch) -> list[str]:
    """The ops that public functions called through the dispatcher."""
    names = []
    for op in OPS:
        module = sys.modules[f"torch_pagedkv.ops.{op}"]

        def spy(*args, op=op, original=module._OP, **kwargs):
            names.append(op)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, "_OP", spy)
    return names


def usual_call(op: str, device: str) -> dict:
    """Return a call's arguments, of dtypes that kernels in C++ take: on CUDA they leave attention in float32."""
    arguments = CALLS[op](device)
    if device == "cuda":
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor) and value.dtype == FP32:
                arguments[name] = value.to(BF16)
    return arguments


def call(op: str, arguments: dict):
    return getattr(torch_pagedkv, op)(**arguments)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("op", OPS)
def test_usual_calls_skip_the_dispatcher(op, mode, device, dispatched):
    arguments = usual_call(op, device)
    with MODES[mode]():
        call(op, arguments)
        with torch.autocast(device):
            call(op, arguments)
    assert dispatched == []


@pytest.mark.parametrize(
    "look_on",
    [
        Functions,
        Dispatches,
        forward_ad.dual_level,
        lambda: torch.device("meta"),
        lambda: torch_pagedkv.checks(True),
        lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    ],
    ids=["function_mode", "dispatch_mode", "dual_level", "default_device", "checks", "profiler"],
)
@pytest.mark.parametrize("op", OPS)
def test_who_looks_on_is_served(op, look_on, device, dispatched):
    arguments = usual_call(op, device)
    with torch.no_grad(), look_on():
        call(op, arguments)
    assert dispatched == [op]
    with torch.no_grad():
        call(op, arguments)
    assert dispatched == [op]


@pytest.mark.parametrize("op", OPS)
def test_tensors_that_have_a_say_go_through_the_dispatcher(op, device, dispatched):
    for name, tensor in usual_call(op, device).items():
        if not isinstance(tensor, torch.Tensor):
            continue
        for wrap in (Subclass, Opaque):
            call(op, {**usual_call(op, device), name: tensor.as_subclass(wrap)})
            assert dispatched.pop() == op
    parameter = "key" if op == "reshape_and_cache" else "query"
    arguments = usual_call(op, device)
    arguments[parameter] = torch.nn.Parameter(arguments[parameter])
    with torch.no_grad():
        call(op, arguments)
    assert dispatched == []
    call(op, arguments)
    assert dispatched == [op]


@pytest.mark.parametrize("op", OPS)
def test_transforms_and_tracers_are_served(op, device, dispatched):
    """Inside a transform even tensors that it does not know go the long way."""
    arguments = usual_call(op, device)
    other = torch.ones(2, device=device)

    def with_a_call(x):
        result = call(op, arguments)
        return x.sum() if result is None else x.sum() + result.sum()

    transforms = [torch.vmap, torch.func.grad]
    if op == "paged_attention":  # this way of functionalizing knows no custom op that mutates
        transforms.append(torch.func.functionalize)
    for transform in transforms:
        transform(with_a_call)(other)
        assert dispatched.pop() == op
    with torch.no_grad():
        traced = torch.jit.trace(with_a_call, other, check_trace=False)
    assert set(dispatched) == {op}
    if op == "paged_attention":  # a trace drops what nothing is returned of
        assert f"torch_pagedkv::{op}" in str(traced.graph)


@torch.no_grad()
@pytest.mark.parametrize("op", OPS)
def test_modes_profilers_and_compilers_see_the_public_op(op, device):
    arguments = usual_call(op, device)
    name = f"torch_pagedkv::{op}"
    with Dispatches() as mode:
        call(op, arguments)
    assert mode.names == [name]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(op, arguments)
    assert name in {event.key for event in profile.key_averages()}
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch._dynamo.reset()
    torch.compile(getattr(torch_pagedkv, op), fullgraph=True, backend=backend)(**arguments)
    assert f"torch_pagedkv.{op}.default" in seen


@torch.no_grad()
@pytest.mark.parametrize("case", [*PAGED, *WRITE], ids=str)
def test_both_ways_give_the_same_bits(case, device):
    results = []
    for context in (contextlib.nullcontext, Functions):
        with context():
            if isinstance(case, PagedCase):
                args, options = case.build(device).attention
                results.append(torch_pagedkv.paged_attention(*args, **options, return_lse=True))
            else:
                args, scales, buffers = case.build(device)
                torch_pagedkv.reshape_and_cache(*args, **scales)
                results.append(buffers)
    for direct, dispatched in zip(*results, strict=True):
        assert_same_bits(direct, dispatched)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_outputs_own_their_memory_and_no_more(dtype, device):
    args, _ = PagedCase(name="memory", kv_lens=[40, 700], dtype=dtype, head_dim=64).build(device).attention
    outputs = torch_pagedkv.paged_attention(*args, return_lse=True)
    for output in outputs:
        assert output.is_contiguous() and output.untyped_storage().nbytes() == output.nbytes
        assert output._version == 0 and not output.requires_grad and not output.is_inference()
    with torch.inference_mode():
        assert all(output.is_inference() for output in torch_pagedkv.paged_attention(*args, return_lse=True))


@torch.no_grad()
@pytest.mark.parametrize("pools_are_inference", [False, True])
def test_writes_are_counted(pools_are_inference, device):
    with torch.inference_mode(pools_are_inference):
        arguments = CALLS["reshape_and_cache"](device)
    pools = arguments["key_cache"], arguments["value_cache"]
    if pools_are_inference:
        return call("reshape_and_cache", arguments)
    before = [pool._version for pool in pools]
    call("reshape_and_cache", arguments)
    assert all(pool._version > version for pool, version in zip(pools, before, strict=True))


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{"softcap": 1}, {"softmax_scale": 1}, {"window_size": [3, 0]}, {"softcap": None}],
    ids=str,
)
def test_options_of_other_types_are_the_dispatchers(options, device, dispatched):
    arguments = usual_call("paged_attention", device)
    converted = {"softcap": 1.0, "softmax_scale": 1.0, "window_size": (3, 0)}
    exact = {name: 0.0 if value is None else converted[name] for name, value in options.items()}
    expected = call("paged_attention", {**arguments, **exact})
    assert dispatched == []
    assert_same_bits(call("paged_attention", {**arguments, **options}), expected)
    assert dispatched == ["paged_attention"]


@pytest.mark.parametrize(
    "module, name", [(torch._C, "_get_tracing_state"), (torch._C._functorch, "peek_interpreter_stack")], ids=str
)
def test_a_torch_that_cannot_be_asked_skips_nothing(module, name, monkeypatch):
    monkeypatch.delattr(module, name)
    specification = importlib.util.spec_from_file_location("another_direct_calls", direct_calls.__file__)
    another = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(another)
    tensors = (torch.ones(1),)
    assert not another.may_skip_dispatcher(tensors, ()) and direct_calls.may_skip_dispatcher(tensors, ())
