"""PagedAttention: what it computes, what it refuses, its state, and its life under compilers."""

from __future__ import annotations

import copy
import sys

import pytest
import torch
import torch._dynamo.testing

from cases import BF16, E4M3, FP32
from devices import needs_cuda
from torch_pagedkv import reference
from torch_pagedkv.cache import PagedBatch, PagedKVCache
from torch_pagedkv.nn import PagedAttention
from torch_pagedkv.ops.argument_checks import MAX_HEAD_DIM

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 8, 6
TABLES, LENGTHS, QUERIES = [[7, 2, 9], [4, 1]], [21, 5], [3, 2]
OPTIONS = {
    "softmax_scale": 0.7,
    "causal": False,
    "window_size": (3, 1),
    "softcap": 2.0,
    "alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0]),
    "sinks": torch.tensor([0.1, -1.0, 2.0, 0.0]),
    "num_splits": 2,
}


def make_batch(device="cpu", query_lens=QUERIES):
    return PagedBatch.from_sequences(TABLES, LENGTHS, query_lens, block_size=8, device=device)


def make_cache(device="cpu", dtype=FP32, **arguments):
    cache = PagedKVCache(
        1,
        KV_HEADS,
        DIM,
        value_head_dim=VALUE_DIM,
        block_size=8,
        num_blocks=10,
        dtype=dtype,
        device=device,
        **arguments,
    )
    for number, pool in enumerate(cache[0]):
        generator = torch.Generator().manual_seed(number)
        pool.copy_(torch.randn(pool.shape, generator=generator).to(dtype))
    return cache


def make_module(**options):
    return PagedAttention(HEADS, DIM, KV_HEADS, value_head_dim=VALUE_DIM, **options)


def make_rows(device="cpu", num_tokens=5, dtype=FP32):
    generator = torch.Generator().manual_seed(7)
    widths = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * VALUE_DIM]
    packed = torch.randn(num_tokens, sum(widths), generator=generator).to(device, dtype)
    flat = packed.split(widths, dim=1)
    heads = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM)]
    return flat, [rows.unflatten(1, sizes) for rows, sizes in zip(flat, heads, strict=True)]


def expect(rows, cache, batch, **options):
    """Write and read with the readable reference on CPU."""
    query, key, value = (row.cpu() for row in rows)
    key_cache, value_cache = (pool.cpu() for pool in cache)
    batch = batch.to("cpu")
    scales = {name: options.get(name) for name in ("k_scale", "v_scale")}
    reference.reshape_and_cache(key, value, key_cache, value_cache, batch.slot_mapping, **scales)
    read = (batch.block_table, batch.seqused_k, batch.cu_seqlens_q)
    options.pop("num_splits", None)
    return reference.paged_attention(query, key_cache, value_cache, *read, **options)[0]


@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_every_option_reaches_the_op(option, device):
    options = {} if option is None else {option: OPTIONS[option]}
    _, rows = make_rows(device)
    batch = make_batch(device)
    out = make_module(**options).to(device)(*rows, make_cache(device)[0], batch)
    torch.testing.assert_close(out.cpu(), expect(rows, make_cache()[0], batch, **options), atol=2e-4, rtol=2e-4)
    if option not in (None, "num_splits"):
        assert not torch.allclose(out.cpu(), expect(rows, make_cache()[0], batch), atol=1e-3)


def test_num_splits_reaches_the_op(monkeypatch):
    seen = []
    module = sys.modules[PagedAttention.__module__]
    read = module.paged_attention

    def record(*arguments, **options):
        seen.append(options["num_splits"])
        return read(*arguments, **options)

    monkeypatch.setattr(module, "paged_attention", record)
    make_module(num_splits=2)(*make_rows()[1], make_cache()[0], make_batch())
    assert seen == [2]


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.25, 4.0])], ids=["one", "heads"])
def test_scales_reach_write_and_read(scale, device):
    _, rows = make_rows(device)
    batch, cache = make_batch(device), make_cache(device, E4M3)
    out = make_module(k_scale=scale, v_scale=scale + 0.5).to(device)(*rows, cache[0], batch)
    scales = {"k_scale": scale, "v_scale": scale + 0.5}
    expected = expect(rows, make_cache(dtype=E4M3)[0], batch, **scales)
    torch.testing.assert_close(out.cpu(), expected, atol=2e-4, rtol=2e-4)


def test_fp8_keys_are_stored_as_they_are_and_read_with_the_scale(device):
    scale = torch.tensor(0.25, device=device)
    _, (query, key, value) = make_rows(device)
    cache, other = make_cache(device, E4M3), make_cache(device, E4M3)
    batch = make_batch(device)
    module = make_module(k_scale=scale, v_scale=scale)
    out = module(query, key, value, cache[0], batch)
    quantised = ((key / scale).to(E4M3), (value / scale).to(E4M3))
    assert torch.equal(out, module(query, *quantised, other[0], batch))


def test_a_scale_with_a_pool_that_is_not_fp8_raises_before_the_write():
    cache = make_cache()
    before = cache.storage.clone()
    with pytest.raises(ValueError, match="k_scale must be None"):
        make_module(k_scale=torch.ones(1))(*make_rows()[1], cache[0], make_batch())
    assert torch.equal(cache.storage, before)


def test_flat_rows_give_flat_output_of_the_same_bits(device):
    flat, rows = make_rows(device)
    module, batch = make_module(), make_batch(device)
    caches = make_cache(device), make_cache(device)
    out = module(*rows, caches[0][0], batch)
    flat_out = module(*flat, caches[1][0], batch)
    assert out.shape == (5, HEADS, VALUE_DIM)
    assert flat_out.shape == (5, HEADS * VALUE_DIM)
    assert torch.equal(flat_out, out.flatten(1))
    assert torch.equal(caches[0].storage, caches[1].storage)


def test_without_keys_nothing_is_written(device):
    _, (query, key, value) = make_rows(device)
    cache, batch, module = make_cache(device), make_batch(device), make_module()
    out = module(query, key, value, cache[0], batch)
    after = cache.storage.clone()
    assert torch.equal(module(query, None, None, cache[0], batch), out)
    assert torch.equal(cache.storage, after)


def test_decode_steps_equal_one_prefill(device):
    torch.manual_seed(0)
    module = make_module(sinks=OPTIONS["sinks"], window_size=(6, 0)).to(device)
    _, (query, key, value) = make_rows(device, num_tokens=20)
    caches = [make_cache(device, kv_layout=layout) for layout in ("NHD", "HND")]
    prefill = PagedBatch.from_sequences([[7, 2, 9]], [20], [20], block_size=8, device=device)
    whole = module(query, key, value, caches[0][0], prefill)
    step = PagedBatch.fixed(2, 3, device=device)
    for t in range(20):
        if t == 0:
            step.update_([[7, 2, 9]], [1], block_size=8)
        else:
            step.advance_(block_size=8)
        rows = [torch.cat([r[t : t + 1], torch.full_like(r[:1], torch.nan)]) for r in (query, key, value)]
        out = module(*rows, caches[1][0], step)
        torch.testing.assert_close(out[0], whole[t])
        assert not out[1].any()  # a padding row has no keys: a zero sink takes all the weight
    for pool, other in zip(*(cache[0] for cache in caches), strict=True):
        assert torch.equal(pool, other)


BAD = [
    (
        {"num_heads": 6, "num_kv_heads": 4},
        ValueError,
        "num_heads must be a multiple of num_kv_heads = 4",
    ),
    (
        {"num_heads": 2, "num_kv_heads": 4},
        ValueError,
        "num_heads must be a multiple of num_kv_heads = 4",
    ),
    ({"num_heads": 0}, ValueError, "num_heads must be >= 1, got 0"),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be >= 1, got 0"),
    ({"num_heads": 4.0}, TypeError, "num_heads must be an integer, got 4.0"),
    ({"head_dim": 0}, ValueError, f"head_dim must be in [1, {MAX_HEAD_DIM}], got 0"),
    ({"head_dim": MAX_HEAD_DIM + 1}, ValueError, f"head_dim must be in [1, {MAX_HEAD_DIM}], got"),
    ({"value_head_dim": MAX_HEAD_DIM + 1}, ValueError, "value_head_dim must be in [1,"),
    ({"window_size": (-2, 0)}, ValueError, "window_size must be a pair (left, right)"),
    ({"window_size": 4}, ValueError, "window_size must be a pair (left, right)"),
    ({"window_size": (1, 2, 3)}, ValueError, "window_size must be a pair (left, right)"),
    ({"window_size": (1.0, 0)}, ValueError, "window_size must be a pair (left, right)"),
    ({"softcap": -1.0}, ValueError, "softcap must be >= 0"),
    ({"softcap": float("nan")}, ValueError, "softcap must be finite in float32, got nan"),
    ({"softcap": float("inf")}, ValueError, "softcap must be finite in float32, got inf"),
    ({"softcap": "2"}, TypeError, "softcap must be a number, got '2'"),
    ({"softmax_scale": float("nan")}, ValueError, "softmax_scale must be finite in float32, got nan"),
    ({"softmax_scale": True}, TypeError, "softmax_scale must be a number, got True"),
    ({"causal": 1}, TypeError, "causal must be a bool, got 1"),
    ({"num_splits": -1}, ValueError, "num_splits must be >= 0"),
    ({"num_splits": 2**63}, ValueError, "num_splits must be less than 2"),
    ({"num_splits": 1.0}, TypeError, "num_splits must be an integer, got 1.0"),
    ({"alibi_slopes": torch.ones(2)}, ValueError, "alibi_slopes must have num_heads = 4"),
    ({"alibi_slopes": [1.0] * 4}, TypeError, "alibi_slopes must be a tensor or None, got list"),
    ({"sinks": torch.ones(4, 1)}, ValueError, "sinks must have shape [num_heads]"),
    ({"sinks": torch.ones(4, dtype=torch.int32)}, TypeError, "sinks must have dtype"),
    ({"k_scale": 0.5}, TypeError, "k_scale must be a tensor or None, got float"),
    ({"k_scale": torch.ones(4)}, ValueError, "k_scale must have one element or"),
    ({"v_scale": torch.ones(1, 1)}, ValueError, "v_scale must have one element or"),
    ({"v_scale": torch.ones(1, dtype=BF16)}, TypeError, "v_scale must have dtype float32"),
]


@pytest.mark.parametrize("arguments,error,sentence", BAD, ids=lambda value: None)
def test_constructor_refusals(arguments, error, sentence):
    with pytest.raises(error) as caught:
        PagedAttention(**({"num_heads": HEADS, "head_dim": DIM, "num_kv_heads": KV_HEADS} | arguments))
    assert str(caught.value).startswith(f"PagedAttention: {sentence}")


def forward_refusals():
    _, (query, key, value) = make_rows()
    pools = make_cache()[0]
    wide = make_cache(dtype=FP32)
    yield (query, key, None, pools), ValueError, "key and value must be given together"
    yield (query, None, value, pools), ValueError, "key and value must be given together"
    yield (query[:, :2], key, value, pools), ValueError, "query must have shape [num_tokens, 4, 8]"
    yield (query[:, 0], key, value, pools), ValueError, "query must have shape [num_tokens, 4, 8]"
    yield (query, key, key, pools), ValueError, "value must have shape [num_tokens, 2, 6]"
    yield (query, key, value, wide), TypeError, "kv_cache must be the pair (key_cache, value_cache)"
    yield (query, key, value, pools[::-1]), ValueError, "key_cache must have shape"
    heads = [pool[:, :, :1] for pool in pools]
    yield (query, None, None, heads), ValueError, "key_cache must have shape"


@pytest.mark.parametrize("arguments,error,sentence", forward_refusals(), ids=lambda value: None)
def test_forward_refusals(arguments, error, sentence):
    with pytest.raises(error) as caught:
        make_module()(*arguments, make_batch())
    assert f"PagedAttention: {sentence}" in str(caught.value)


def full_module(**changes):
    scales = {"k_scale": torch.tensor([0.5, 0.25]), "v_scale": torch.tensor(0.3)}
    return make_module(**(OPTIONS | scales | changes))


@pytest.mark.parametrize("cast", [lambda m: m.half(), lambda m: m.to(BF16), lambda m: m.double()])
def test_a_cast_of_the_module_leaves_scales_and_slopes_alone(cast):
    module = torch.nn.Sequential(full_module(), torch.nn.Linear(2, 2))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    cast(module)
    assert module[1].weight.dtype == module[0].sinks.dtype != FP32
    assert len(before) == 3
    for name, buffer in module.named_buffers():
        assert buffer.dtype == FP32 and torch.equal(buffer, before[name])


def test_a_cast_that_moves_moves_the_scales():
    module = full_module().to("meta", BF16)
    assert {(b.dtype, b.device.type) for b in module.buffers()} == {(FP32, "meta")}


def test_state_dict_round_trip():
    module = full_module()
    other = full_module(sinks=True, alibi_slopes=torch.zeros(4), k_scale=torch.ones(2), v_scale=torch.ones(()))
    state = module.state_dict()
    assert sorted(state) == ["alibi_slopes", "k_scale", "sinks", "v_scale"]
    other.load_state_dict(state)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name])
    assert make_module().state_dict() == {}


def test_sinks_are_a_parameter_without_gradient():
    assert make_module().sinks is None and make_module(sinks=False).sinks is None
    sinks = make_module(sinks=True).sinks
    assert isinstance(sinks, torch.nn.Parameter) and not sinks.requires_grad
    assert sinks.tolist() == [0.0] * HEADS


def test_given_tensors_are_shared_not_copied():
    scale = torch.tensor([0.5, 0.25])
    module = full_module(k_scale=scale)
    scale.mul_(2)
    assert module.k_scale.tolist() == [1.0, 0.5]


def test_deepcopy_has_its_own_state():
    module = full_module()
    other = copy.deepcopy(module)
    other.k_scale.zero_()
    other.sinks.zero_()
    assert module.k_scale.all() and module.sinks.any()


def test_repr_says_what_is_not_the_default():
    assert repr(PagedAttention(4, 8)) == "PagedAttention(num_heads=4, head_dim=8, num_kv_heads=4)"
    text = repr(full_module())
    for part in ("value_head_dim=6", "softmax_scale=0.7", "causal=False", "window_size=(3, 1)"):
        assert part in text
    for part in ("softcap=2.0", "num_splits=2", "sinks=[4]", "k_scale=[2]", "v_scale=[]"):
        assert part in text


class TwoLayers(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(make_module(**options) for _ in range(2))

    def forward(self, query, key, value, cache, batch):
        for number, layer in enumerate(self.layers):
            out = layer(query, key, value, cache[number], batch)
            query = query + torch.nn.functional.pad(out, (0, DIM - VALUE_DIM))
        return query


def two_layer_cache(device, dtype=FP32):
    cache = PagedKVCache(
        2,
        KV_HEADS,
        DIM,
        value_head_dim=VALUE_DIM,
        block_size=8,
        num_blocks=10,
        dtype=dtype,
        device=device,
    )
    cache.storage.copy_(torch.full(cache.storage.shape, torch.nan))
    return cache


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiles_whole_and_once_for_each_form(backend, device):
    torch._dynamo.reset()
    model = TwoLayers(sinks=True).to(device).requires_grad_(False)
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    caches = two_layer_cache(device), two_layer_cache(device)
    for step in range(4):
        lengths = [19 + step, 2 + step]
        queries = [19, 2] if step == 0 else None
        batch = PagedBatch.from_sequences(TABLES, lengths, queries, block_size=8, device=device)
        _, rows = make_rows(device, num_tokens=batch.num_tokens)
        out = compiled(*rows, caches[0], batch)
        torch.testing.assert_close(out, model(*rows, caches[1], batch), atol=1e-4, rtol=1e-4)
    assert counter.frame_count == 2  # with prefix sums, and decode
    nan_free = [cache.storage.nan_to_num(-7.0) for cache in caches]
    torch.testing.assert_close(*nan_free, atol=1e-4, rtol=1e-4)


def test_a_compiled_module_sees_a_scale_change_in_place(device):
    torch._dynamo.reset()
    module = make_module(k_scale=torch.ones(1), v_scale=torch.ones(1)).to(device)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    _, rows = make_rows(device)
    batch = make_batch(device)
    for scale in (1.0, 0.25):
        module.k_scale.fill_(scale)
        module.v_scale.fill_(scale * 2)
        cache, other = make_cache(device, E4M3), make_cache(device, E4M3)
        assert torch.equal(compiled(*rows, cache[0], batch), module(*rows, other[0], batch))
    assert counter.frame_count == 1


def test_exports_with_the_cache_as_an_argument():
    model = TwoLayers(sinks=True)
    caches = two_layer_cache("cpu"), two_layer_cache("cpu")
    _, rows = make_rows()
    batch = PagedBatch.from_sequences(TABLES, [3, 2], [3, 2], block_size=8)
    program = torch.export.export(model, (*rows, caches[0], batch))
    expected = model(*rows, caches[1], batch)
    for module in (program.module(), program.run_decompositions().module()):
        caches[0].storage.fill_(torch.nan)
        assert torch.equal(module(*rows, caches[0], batch), expected)
        assert torch.equal(caches[0].storage.nan_to_num(-7.0), caches[1].storage.nan_to_num(-7.0))


def test_a_refusal_under_compilation_keeps_its_sentence():
    torch._dynamo.reset()
    compiled = torch.compile(make_module(), backend="eager", fullgraph=True)
    _, (query, key, value) = make_rows()
    with pytest.raises(Exception, match="PagedAttention: query must have shape"):
        compiled(query[:, :2], key, value, make_cache()[0], make_batch())


@needs_cuda
def test_one_captured_graph_serves_every_step():
    device = "cuda"
    model = TwoLayers(sinks=True).to(device)
    caches = two_layer_cache(device), two_layer_cache(device)
    batch = PagedBatch.fixed(4, 3, device=device)
    rows = [row.contiguous() for row in make_rows(device, num_tokens=4)[1]]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.no_grad():
        for _ in range(2):
            model(*rows, caches[0], batch)
            batch.advance_(block_size=8)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        batch.advance_(block_size=8)
        out = model(*rows, caches[0], batch)
        with pytest.raises(RuntimeError, match="must be filled before a CUDA graph capture"):
            batch.update_([[1]], [1], block_size=8)
    batch.update_(TABLES, [1, 4], block_size=8)
    caches[0].storage.normal_()
    caches[1].storage.copy_(caches[0].storage)
    for step in range(1, 13):
        if step == 7:  # a sequence joins between replays
            batch.update_([*TABLES, [3, 0]], [7, 10, 1], block_size=8)
        for number, row in enumerate(rows):
            row.copy_(torch.randn(row.shape, generator=torch.Generator().manual_seed(step + number)))
        graph.replay()
        lengths = [1 + step, 4 + step] if step < 7 else [1 + step, 4 + step, step - 5]
        tables = TABLES if step < 7 else [*TABLES, [3, 0]]
        eager = PagedBatch.fixed(4, 3, device=device)
        eager.update_(tables, lengths, block_size=8)
        with torch.no_grad():
            expected = model(*rows, caches[1], eager)
        assert torch.equal(out, expected)
        assert torch.equal(caches[0].storage, caches[1].storage)
        assert torch.equal(batch.slot_mapping, eager.slot_mapping)
