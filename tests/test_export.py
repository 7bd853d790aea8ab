"""torch.export and AOTInductor packages: pools as inputs and as buffers, sizes that stay dynamic, the bits of eager."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from decoder import BLOCK, DIM, KV_HEADS, WIDTH, Layer, decode_batch
from pools import assert_same_bits
from torch_pagedkv import PagedBatch, PagedKVCache

NUM_BLOCKS = 64
SHAPE = (NUM_BLOCKS, BLOCK, KV_HEADS, DIM)


class Arguments(torch.nn.Module):
    """Both pools are inputs."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = Layer(device)

    def forward(self, hidden, table, lengths, slots, key_cache, value_cache):
        return self.layer(hidden, (key_cache, value_cache), PagedBatch(table, lengths, None, slots))

    def pools(self, device: str) -> list[torch.Tensor]:
        return [torch.zeros(SHAPE, device=device) for _ in range(2)]


class Cache(Arguments):
    """The memory of a PagedKVCache is an input."""

    def forward(self, hidden, table, lengths, slots, cache):
        return super().forward(hidden, table, lengths, slots, *cache[0])

    def pools(self, device: str) -> list[PagedKVCache]:
        cache = PagedKVCache(1, KV_HEADS, DIM, num_blocks=NUM_BLOCKS, dtype=torch.float32, device=device)
        cache.storage.zero_()
        return [cache]


class Buffers(Arguments):
    """The module owns one tensor for both pools."""

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.register_buffer("pool", torch.zeros(2, *SHAPE, device=device))

    def forward(self, hidden, table, lengths, slots):
        return super().forward(hidden, table, lengths, slots, *self.pool.unbind(0))

    def pools(self, device: str) -> list:
        return []


FORMS = {"arguments": Arguments, "cache": Cache, "buffers": Buffers}


def make_model(form, device):
    torch.manual_seed(0)
    return FORMS[form](device).eval().requires_grad_(False)


def steps(device):
    """Two decode steps of three sequences, then one of five: later steps read what earlier ones wrote."""
    torch.manual_seed(1)
    for lengths in ([1, 1, 1], [2, 2, 2], [3, 3, 3, 1, 1]):
        batch = decode_batch(lengths, device)
        hidden = torch.randn(len(lengths), WIDTH, device=device)
        yield hidden, batch.block_table, batch.seqused_k, batch.slot_mapping


def export(form, device):
    model = make_model(form, device)
    sequences = torch.export.Dim("sequences", min=2, max=NUM_BLOCKS)
    args = (*next(steps(device)), *model.pools(device))
    dynamic = tuple({0: sequences} if position < 4 else None for position in range(len(args)))
    if form == "cache":
        dynamic = (*dynamic[:4], [None, None, None])  # its leaves: storage and two scales
    return torch.export.export(model, args, dynamic_shapes=dynamic)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_exported_programs_equal_eager(form, device, tmp_path):
    """Also after a round trip through a file."""
    program = export(form, device)
    torch.export.save(program, tmp_path / "program.pt2")
    model = make_model(form, device)
    pools = model.pools(device)
    expected = [model(*step, *pools) for step in steps(device)]
    for loaded in (program, torch.export.load(tmp_path / "program.pt2"), program.run_decompositions()):
        module, pools = loaded.module(), model.pools(device)
        for buffer in module.buffers():
            buffer.zero_()
        for step, wanted in zip(steps(device), expected, strict=True):
            assert_same_bits(module(*step, *pools), wanted)


LOAD = """
    import sys, torch
    folder, device = sys.argv[1:]
    from torch._inductor import aoti_load_package
    try:
        aoti_load_package(f"{folder}/buffers.pt2")
    except RuntimeError as error:
        print("before the import:", error)
    import torch_pagedkv
    for form in ("arguments", "buffers"):
        model = aoti_load_package(f"{folder}/{form}.pt2")
        steps, pools, expected = torch.load(f"{folder}/{form}.tensors")
        for step, wanted in zip(steps, expected, strict=True):
            assert torch.equal(model(*step, *pools), wanted), form
        print(form, "equal", sum(bool(pool.any()) for pool in pools))
"""


@pytest.mark.slow
@torch.no_grad()
def test_packages_run_in_another_process(device, tmp_path):
    """AOTInductor: the same bits, pools written in place, buffers that live from call to call.

    The package names the ops; the process that loads it has to know them, which an import sees to.
    """
    for form in ("arguments", "buffers"):
        package = torch._inductor.aoti_compile_and_package(
            export(form, device), package_path=str(tmp_path / f"{form}.pt2")
        )
        assert package
        model = make_model(form, device)
        pools = model.pools(device)
        expected = [model(*step, *pools) for step in steps(device)]
        torch.save((list(steps(device)), model.pools(device), expected), tmp_path / f"{form}.tensors")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LOAD), str(tmp_path), device],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "before the import: " in result.stdout
    assert "arguments equal 2\nbuffers equal 0\n" in result.stdout
