"""The dispatcher's view: schemas, opcheck for every op and case, no aliases, no gradients."""

from __future__ import annotations

import unittest.mock

import expecttest
import pytest
import torch

import torch_pagedkv
from cases import PAGED, WRITE, PagedCase
from error_cases import CALLS, write_call
from pools import bits

OPS = torch.ops.torch_pagedkv
GATHER = [c for c in PAGED if "window_size" not in c.options]


def opcheck(op, args, kwargs=None):
    """Run all four utilities of torch's opcheck, around two things that it cannot do.

    It compares with allclose, which does not know fp8, and it cannot copy an empty view with strides.
    """
    args, kwargs = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda t: t if t.numel() else t.new_empty(t.shape), (args, kwargs or {})
    )

    def allclose(a, b, **tolerance):
        if a.element_size() == 1:
            return torch.equal(bits(a), bits(b))
        return torch_allclose(a, b, **tolerance)

    torch_allclose = torch.allclose
    with unittest.mock.patch.object(torch, "allclose", allclose):
        torch.library.opcheck(op, args, kwargs)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_opcheck_paged_attention(case, device):
    args, options = case.build(device).attention
    opcheck(OPS.paged_attention.default, args, options)


@pytest.mark.parametrize("case", WRITE, ids=str)
def test_opcheck_reshape_and_cache(case, device):
    args, scales, _ = case.build(device)
    opcheck(OPS.reshape_and_cache.default, args, scales)


@pytest.mark.parametrize("case", GATHER, ids=str)
def test_opcheck_gather_kv(case, device):
    args, scales = case.build(device).gather
    opcheck(OPS.gather_kv.default, args, scales)


@pytest.mark.parametrize("case", GATHER, ids=str)
def test_opcheck_compute_slot_mapping(case, device):
    args, _ = case.build(device).slots
    opcheck(OPS.compute_slot_mapping.default, args)


@pytest.mark.parametrize("case", WRITE, ids=str)
def test_opcheck_copy_blocks(case, device):
    (_, _, key_cache, value_cache, _), _, _ = case.build(device)
    blocks = torch.tensor([0], device=device), torch.tensor([1], device=device)
    opcheck(OPS.copy_blocks.default, (key_cache, value_cache, *blocks))


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_opcheck_merge_attention_states(case, device):
    args, options = case.build(device).attention
    state = torch_pagedkv.paged_attention(*args, **options, return_lse=True)
    opcheck(OPS.merge_attention_states.default, (*state, *state))


def test_outputs_alias_no_input(device):
    """What an op returns is new memory, without tokens too."""
    for query_lens, kv_lens in (([3], [5]), ([0], [5]), ([], [])):
        batch = PagedCase(name="alias", kv_lens=kv_lens, query_lens=query_lens).build(device)
        args, options = batch.attention
        inputs = {t.untyped_storage().data_ptr() for t in (*args, *batch.buffers)}
        outputs = torch_pagedkv.paged_attention(*args, **options, return_lse=True)
        outputs += torch_pagedkv.gather_kv(*batch.gather[0])
        assert not any(o.numel() and o.untyped_storage().data_ptr() in inputs for o in outputs)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward_is_refused(compiled, device):
    """Inputs that want a gradient are legal until a backward pass reaches the op."""
    batch = PagedCase(name="grad", kv_lens=[5, 9], query_lens=[2, 3], sinks=[1.0]).build(device)
    args, options = batch.attention

    def attend(query, sinks):
        return torch_pagedkv.paged_attention(query, *args[1:], sinks=sinks) * 2

    expected = attend(args[0], options["sinks"])
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for wanting in (0, 1):
        inputs = [args[0].clone(), options["sinks"].clone()]
        inputs[wanting].requires_grad_()
        out = attend(*inputs)
        assert out.requires_grad and torch.equal(out, expected)
        with pytest.raises(NotImplementedError, match="paged_attention: backward must not be called"):
            out.sum().backward()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert not attend(*inputs).requires_grad


def test_function_transforms_are_refused(device):
    """torch.func has no way through an op: each transform meets a sentence, never a zero derivative."""
    args, _ = PagedCase(name="func", kv_lens=[5]).build(device).attention
    write = write_call(device)

    def attend(query):
        return torch_pagedkv.paged_attention(query, *args[1:]).sum()

    def store(key):
        torch_pagedkv.reshape_and_cache(**{**write, "key": key})

    query, keys = args[0], write["key"][None]
    refused = [
        (lambda: torch.func.jvp(attend, (query,), (query,)), "paged_attention: arguments must not be differentiated"),
        (lambda: torch.func.grad(attend)(query), "paged_attention: arguments must not be differentiated"),
        (lambda: torch.vmap(attend)(query[None]), "paged_attention: arguments must not be batched by torch.vmap"),
        (lambda: torch.vmap(store)(keys), "reshape_and_cache: arguments must not be batched by torch.vmap"),
    ]
    for call, sentence in refused:
        with pytest.raises(NotImplementedError, match=sentence):
            call()
    assert write["key_cache"].count_nonzero() == 0


def test_keys_that_want_a_gradient_are_stored(device):
    call = write_call(device)
    call["key"].requires_grad_()
    torch_pagedkv.reshape_and_cache(**call)
    assert call["key_cache"].count_nonzero() == 32 and not call["key_cache"].requires_grad


def test_writes_are_seen_by_autograd(device):
    """A pool saved for backward and then written must not give a silently wrong gradient."""
    call = write_call(device)
    weight = torch.ones_like(call["key_cache"], requires_grad=True)
    loss = (weight * call["key_cache"]).sum()
    version = call["value_cache"]._version
    torch_pagedkv.reshape_and_cache(**call)
    assert call["value_cache"]._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writes_work_in_inference_mode(device):
    with torch.inference_mode():
        call = write_call(device)
        torch_pagedkv.reshape_and_cache(**call)
    assert call["key_cache"].count_nonzero() == 32
    outside = write_call(device)
    outside["key"] = call["key"]
    torch_pagedkv.reshape_and_cache(**outside)
    assert outside["key_cache"].count_nonzero() == 32
    with torch.inference_mode():
        call["key_cache"].zero_()
    call["key"] = call["key"].clone()
    torch_pagedkv.reshape_and_cache(**call)  # pools from inference mode, outside of it
    assert call["key_cache"].count_nonzero() == 32


def test_fakes_need_no_device():
    """Fakes answer for CUDA tensors on a machine without a GPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=False):
        for op in CALLS:
            call = CALLS[op]("cpu")
            for name, real in call.items():
                if isinstance(real, torch.Tensor):
                    layout = (real.shape, real.stride())
                    call[name] = torch.empty_strided(*layout, dtype=real.dtype, device="cuda")
            result = getattr(torch_pagedkv, op)(**call)
            for tensor in result if isinstance(result, tuple) else [result]:
                assert tensor is None or tensor.device.type == "cuda"


def test_tags():
    """Strides are a pool's layout, and the compiler must not choose others."""
    for op in CALLS:
        tags = getattr(OPS, op).default.tags
        assert {torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag} <= set(tags)


class Schemas(expecttest.TestCase):
    def test_schemas(self):
        """The write ops mark both pools as mutated, the others nothing."""
        text = "\n".join(str(getattr(OPS, op).default._schema) for op in CALLS)
        self.assertExpectedInline(
            text,
            """\
torch_pagedkv::reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, Tensor? k_scale=None, Tensor? v_scale=None) -> ()
torch_pagedkv::paged_attention(Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q=None, *, float? softmax_scale=None, bool causal=True, int[] window_size=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? k_scale=None, Tensor? v_scale=None, int num_splits=0) -> (Tensor, Tensor)
torch_pagedkv::gather_kv(Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seqused_k, *, Tensor? k_scale=None, Tensor? v_scale=None, ScalarType? dtype=None) -> (Tensor, Tensor)
torch_pagedkv::copy_blocks(Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor src_blocks, Tensor dst_blocks) -> ()
torch_pagedkv::merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)
torch_pagedkv::compute_slot_mapping(Tensor block_table, Tensor seqused_k, Tensor? cu_seqlens_q, SymInt block_size, SymInt num_tokens) -> Tensor""",
        )
