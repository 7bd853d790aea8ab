"""What has to be compiled only once: equal layers, and what another process compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from cases import FP32
from decoder import BLOCK, DIM, KV_HEADS, WIDTH, Layer, decode_batch, new_cache
from torch_pagedkv import PagedKVCache

LAYERS = 24


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


class OwnCacheLayer(Layer):
    """A layer that is given a cache of its own and takes the views of its pools inside."""

    def forward(self, hidden, cache, batch):
        return super().forward(hidden, cache[0], batch)


def run_layers(layers, hidden, caches, batch):
    for layer, cache in zip(layers, caches, strict=True):
        hidden = layer(hidden, cache, batch)
    return hidden


def make_layers(device):
    layers = torch.nn.ModuleList(OwnCacheLayer(device) for _ in range(LAYERS)).requires_grad_(False)
    return layers, [new_cache(1, device) for _ in range(LAYERS)]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_equal_layers_compile_once(backend, device):
    """Module.compile on each of 24 layers: one graph serves all, in every step."""
    layers, caches = make_layers(device)
    expected_caches = [new_cache(1, device) for _ in range(LAYERS)]
    steps = [(torch.randn(2, WIDTH, device=device), decode_batch([n, n + 20], device)) for n in (1, 2)]
    expected = [run_layers(layers, hidden, expected_caches, batch) for hidden, batch in steps]
    counter = CompileCounterWithBackend(backend)
    for layer in layers:
        layer.compile(fullgraph=True, backend=counter)
    for (hidden, batch), wanted in zip(steps, expected):
        torch.testing.assert_close(run_layers(layers, hidden, caches, batch), wanted)
    assert counter.frame_count == 1
    for cache, wanted in zip(caches, expected_caches):
        torch.testing.assert_close(cache.storage, wanted.storage)


@pytest.mark.xfail(reason="torch functionalizes no mutating custom op in a nested region (pytorch issue 186807)")
@torch.no_grad()
def test_equal_layers_as_nested_regions(device):
    layers, caches = (some[:2] for some in make_layers(device))
    hidden, batch = torch.randn(2, WIDTH, device=device), decode_batch([1, 21], device)
    expected = run_layers(layers, hidden, [new_cache(1, device) for _ in layers], batch)
    region = torch.compiler.nested_compile_region(lambda layer, *args: layer(*args))

    def whole(hidden, caches, batch):
        for layer, cache in zip(layers, caches, strict=True):
            hidden = region(layer, hidden, cache, batch)
        return hidden

    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden, caches, batch), expected)


def run_process(program: str, cache_directory, **environment: str) -> str:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache_directory), **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


STEP = """
import sys, torch, torch_pagedkv
from torch._dynamo.utils import counters

@torch.compile(fullgraph=True)
def attend(query, key, pools, table, lengths, slots):
    torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
    return torch_pagedkv.paged_attention(query, *pools, table, lengths)  # no code to compile in C++: that is slow

def step():
    with torch.device("{device}"), torch.no_grad():
        pools = [torch.zeros(4, 16, 2, 8) for _ in range(2)]
        out = attend(torch.ones(2, 4, 8), torch.ones(2, 2, 8), pools, torch.tensor([[2], [1]]),
                     torch.tensor([1, 1]), torch.tensor([32, 16]))
    assert (out == 1).all() and pools[0].count_nonzero() == 32, out
"""
REPORT = """
print("graphs", counters["stats"]["unique_graphs"], "hits", counters["inductor"]["fxgraph_cache_hit"],
      "misses", counters["inductor"]["fxgraph_cache_miss"], "whole", counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_first_call_and_what_later_processes_find(device, tmp_path):
    """A process may compile in its first call; the next finds that on disk, another one in artifacts it loads."""
    file, program = tmp_path / "artifacts", STEP.format(device=device)
    save = f"open({str(file)!r}, 'wb').write(torch.compiler.save_cache_artifacts()[0])\n"
    load = f"torch.compiler.load_cache_artifacts(open({str(file)!r}, 'rb').read())\n"
    first = run_process(program + "step()\n" + save + REPORT, tmp_path / "disk")
    second = run_process(program + "step()\n" + REPORT, tmp_path / "disk")
    elsewhere = run_process(program + load + "step()\n" + REPORT, tmp_path / "empty")
    assert first.endswith("graphs 1 hits 0 misses 1 whole 0\n")
    assert second.endswith("graphs 1 hits 1 misses 0 whole 1\n")
    assert elsewhere.endswith("graphs 1 hits 1 misses 0 whole 1\n")


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@torch.no_grad()
def test_modes_of_the_compiler(mode, device):
    """reduce-overhead records CUDA graphs; they, too, see lengths, tables and pools as they are in each step."""
    layer = OwnCacheLayer(device).requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    caches = [PagedKVCache(1, KV_HEADS, DIM, block_size=BLOCK, num_blocks=16, dtype=FP32, device=device) for _ in "ab"]
    for cache in caches:
        cache.storage.zero_()
    torch._dynamo.mark_static_address(caches[0].storage)  # of what else is given and written no graph is recorded
    for length in range(1, 21):
        hidden, batch = torch.randn(2, WIDTH, device=device), decode_batch([length, 2 * length], device)
        torch.compiler.cudagraph_mark_step_begin()
        actual = compiled(hidden, caches[0], batch).clone()
        torch.testing.assert_close(actual, layer(hidden, caches[1], batch))
    torch.testing.assert_close(caches[0].storage, caches[1].storage)
    assert counters["stats"]["unique_graphs"] == 1
    if device == "cuda":
        assert counters["inductor"]["cudagraph_skips"] == 0
