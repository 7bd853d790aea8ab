"""The instruction sets of the CPU kernels: each is forced in a process of its own and passes the same tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_pagedkv
from torch_pagedkv import native

VARIABLE = "TORCH_PAGEDKV_CPU_CAPABILITY"
CAPABILITIES = ("baseline", "avx2", "avx512", "avx512_vbmi", "avx512_bf16")
TESTS = Path(__file__).parent
STEMS = ("paged_attention", "reshape_and_cache", "gather_kv", "merge_attention_states")

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the C++ kernels were not built")


def run(capability: str, *command: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, VARIABLE: capability, "PYTHONPATH": str(TESTS.parent)}
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=900)


def name_of(capability: str) -> subprocess.CompletedProcess:
    """Print which kernels serve a process that the variable is given to."""
    program = "import torch_pagedkv; print(torch_pagedkv.native.cpu_capability())"
    return run(capability, "-c", program)


def require(capability: str) -> None:
    """Skip what this machine cannot run; the refusal has to say so."""
    named = name_of(capability)
    if named.returncode != 0:
        assert f"{VARIABLE} must name kernels that this machine can run" in named.stderr
        pytest.skip(f"this machine does not run {capability}")
    assert named.stdout.strip() == capability


def test_a_set_that_does_not_exist_is_refused():
    named = name_of("avx1024")
    assert named.returncode != 0
    assert f"{VARIABLE} must name kernels that this machine can run (baseline" in named.stderr
    assert "got avx1024" in named.stderr


def test_the_fastest_set_is_chosen_without_the_variable():
    runnable = [c for c in CAPABILITIES if name_of(c).returncode == 0]
    if "avx512_bf16" in runnable and "GenuineIntel" in Path("/proc/cpuinfo").read_text():
        runnable.remove("avx512_bf16")  # its products of bfloat16 take twice as long as those of float32
    assert name_of("").stdout.strip() == runnable[-1]


@pytest.mark.parametrize("capability", ["baseline", "avx1024"])
def test_the_info_command_names_the_set_in_use(capability):
    printed = run(capability, "-m", "torch_pagedkv", "info")
    assert printed.returncode == 0
    sentence = f"{VARIABLE} must name kernels that this machine can run" in printed.stdout
    assert sentence == (capability != "baseline")
    assert ("baseline kernels on this CPU" in printed.stdout) == (capability == "baseline")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_set_passes_the_tests_of_values(capability):
    require(capability)
    files = [str(TESTS / f"test_{stem}.py") for stem in STEMS]
    tests = run(capability, "-m", "pytest", *files, "-q", "-x", "-k", "cpu", "-p", "no:cacheprovider")
    assert tests.returncode == 0, tests.stdout[-3000:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("start", [0, 1], ids=["aligned", "odd"])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_write_past_the_caches_equals_indexing(dtype, start, num_threads):
    """Writes of many megabytes take another path than small ones."""
    tokens, heads, dim, slots = 4096, 8, 128, 4608
    size = slots * heads * dim
    buffer = torch.zeros(2 * size + 1, dtype=dtype)
    flat = [buffer[start + i * size :][:size].view(slots, heads, dim) for i in range(2)]
    pools = [pool.view(-1, 16, heads, dim) for pool in flat]
    packed = torch.randn(tokens, 3, heads, dim).to(dtype)
    generator = torch.Generator().manual_seed(0)
    slot_mapping = torch.randperm(slots, generator=generator)[:tokens]
    slot_mapping[::7] = -1
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        torch_pagedkv.reshape_and_cache(packed[:, 1], packed[:, 2], *pools, slot_mapping)
    finally:
        torch.set_num_threads(before)
    kept = slot_mapping >= 0
    for pool, rows in zip(flat, (packed[:, 1], packed[:, 2]), strict=True):
        expected = torch.zeros_like(pool)
        expected[slot_mapping[kept]] = rows[kept]
        assert torch.equal(pool, expected)


@pytest.mark.parametrize("lengths", [[5000], [5000, 3, 700, 1], [1500] * 5], ids=str)
@pytest.mark.parametrize("query_length", [1, 3, 40])
@pytest.mark.parametrize("window", [(-1, -1), (1100, 0)], ids=str)
def test_thread_counts_change_no_bit_of_long_sequences(lengths, query_length, window):
    """Sequences of several chunks, whose partial results are merged by whoever comes last."""
    torch.manual_seed(0)
    heads, dim = 2, 32
    query_lens = [min(query_length, length) for length in lengths]
    columns = -(-max(lengths) // 16)
    pools = torch.randn(2, columns * len(lengths), 16, heads, dim).unbind(0)
    block_table = torch.randperm(columns * len(lengths)).view(len(lengths), columns)
    sums = torch.tensor([0, *query_lens]).cumsum(0)
    query = torch.randn(sum(query_lens), 6, dim)

    def attend(num_threads: int):
        before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            return torch_pagedkv.paged_attention(
                query,
                *pools,
                block_table,
                torch.tensor(lengths),
                sums,
                window_size=window,
                return_lse=True,
            )
        finally:
            torch.set_num_threads(before)

    expected = attend(1)
    for num_threads in (2, 3, 7):
        for actual, wanted in zip(attend(num_threads), expected, strict=True):
            assert torch.equal(actual, wanted)
