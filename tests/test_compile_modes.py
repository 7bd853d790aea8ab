"""Compiled functions under torch's modes: inference_mode, no_grad, inputs that want a gradient, autocast, vmap."""

from __future__ import annotations

import contextlib

import pytest
import torch

import torch_pagedkv
from cases import BF16
from decoder import BLOCK, DIM, HEADS, KV_HEADS, WIDTH, Layer, decode_batch, new_cache
from pools import assert_same_bits
from torch_pagedkv import PagedKVCache


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def compile_whole(function, backend="aot_eager"):
    return torch.compile(function, fullgraph=True, backend=backend)


def make_inputs(device):
    torch.manual_seed(0)
    return Layer(device), torch.randn(2, WIDTH, device=device), decode_batch([5, 9], device)


def test_modes_give_the_bits_of_eager(device):
    """One compiled layer serves inference_mode, no_grad and ordinary calls, in any order."""
    layer, hidden, batch = make_inputs(device)
    compiled, caches = compile_whole(layer), [new_cache(1, device) for _ in range(2)]
    for mode in (torch.inference_mode, torch.no_grad, contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        results = []
        for function, cache in zip((compiled, layer), caches):
            with mode():
                cache.storage.zero_()
                results.append(function(hidden, cache[0], batch))
        assert results[0].requires_grad == results[1].requires_grad == (mode is contextlib.nullcontext)
        torch.testing.assert_close(*results)
        assert_same_bits(caches[0].storage, caches[1].storage)


def test_pools_of_inference_mode(device):
    """Pools that were made in inference mode, with views taken inside the function."""
    with torch.inference_mode():
        layer, hidden, batch = make_inputs(device)
        pool = torch.zeros(2, 16, BLOCK, KV_HEADS, DIM, device=device)
        copy = pool.clone()

        def step(hidden, pool):
            return layer(hidden, pool.unbind(0), batch)

        torch.testing.assert_close(compile_whole(step, "inductor")(hidden, pool), step(hidden, copy))
        assert_same_bits(pool, copy)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_backward_pass_is_refused_when_it_comes(backend, device):
    """Parameters that want a gradient compile; the sentence comes from the backward pass, as in eager."""
    layer, hidden, batch = make_inputs(device)
    for function in (layer, compile_whole(layer, backend)):
        out = function(hidden, new_cache(1, device)[0], batch)
        with pytest.raises(NotImplementedError, match="paged_attention: backward must not be called"):
            out.sum().backward()
        assert layer.fused.weight.grad is None


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_pool_that_wants_a_gradient_is_refused(backend, device):
    layer, hidden, batch = make_inputs(device)
    pools = [torch.zeros(16, BLOCK, KV_HEADS, DIM, device=device, requires_grad=True) for _ in range(2)]
    sentence = "reshape_and_cache: key_cache must not require grad"
    with pytest.raises(ValueError, match=sentence):
        layer(hidden, pools, batch)
    with pytest.raises(Exception, match=sentence):
        compile_whole(layer, backend)(hidden, pools, batch)
    assert not any(pool.any() for pool in pools)


@torch.no_grad()
def test_autocast_casts_projections_and_never_the_ops(device):
    """Under autocast the pool has the dtype that autocast gives to keys; the ops take what comes."""
    layer, hidden, batch = make_inputs(device)
    caches = [PagedKVCache(1, KV_HEADS, DIM, num_blocks=64, dtype=BF16, device=device) for _ in range(2)]
    for cache in caches:
        cache.storage.zero_()

    def attend(hidden, cache):
        query, key, value = layer.fused(hidden).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=1)
        return layer.attention(query, key, value, cache[0], batch)

    with torch.autocast(device, dtype=BF16):
        expected, actual = attend(hidden, caches[0]), compile_whole(attend)(hidden, caches[1])
    assert expected.dtype == BF16
    assert_same_bits(actual, expected)
    assert_same_bits(caches[0].storage, caches[1].storage)
    assert caches[0].storage.any()


@torch.no_grad()
def test_autocast_beside_a_float32_pool_is_refused(device):
    """Nothing is cast on the quiet: keys that autocast made bfloat16 do not fit a float32 pool."""
    layer, hidden, batch = make_inputs(device)
    cache = new_cache(1, device)
    sentence = "reshape_and_cache: key must have dtype float32, got bfloat16"
    with torch.autocast(device, dtype=BF16):
        with pytest.raises(TypeError, match=sentence):
            layer(hidden, cache[0], batch)
        with pytest.raises(Exception, match=sentence):
            compile_whole(layer)(hidden, cache[0], batch)
    assert not cache.storage.any()


def test_vmap_is_refused_while_tracing(device):
    pools, batch = new_cache(1, device)[0], decode_batch([5, 9], device)
    key = torch.randn(3, 2, KV_HEADS, DIM, device=device)

    def attend(query):
        return torch_pagedkv.paged_attention(query, *pools, batch.block_table, batch.seqused_k)

    def store(key):
        torch_pagedkv.reshape_and_cache(key, key, *pools, batch.slot_mapping)
        return key

    query = torch.randn(3, 2, HEADS, DIM, device=device)
    with pytest.raises(Exception, match=r"paged_attention: arguments must not be batched by torch\.vmap"):
        compile_whole(torch.vmap(attend))(query)
    with pytest.raises(Exception, match=r"reshape_and_cache: arguments must not be batched by torch\.vmap"):
        compile_whole(torch.vmap(store))(key)
    assert not pools[0].any()
