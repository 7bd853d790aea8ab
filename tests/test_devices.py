"""What depends on the device: memory, streams, capture, default devices, threads."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from functools import partial

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, PAGED, WRITE, PagedCase
from devices import needs_cuda
from pools import assert_same_bits

needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="CUDA: fewer than two GPUs")


def attend(batch):
    args, options = batch.attention
    return torch_pagedkv.paged_attention(*args, **options, return_lse=True)


def bytes_beyond(outputs_of) -> int:
    """Return the most bytes allocated while a call ran, less those of its outputs."""
    outputs_of()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs = outputs_of() or ()
    peak = torch.cuda.max_memory_allocated() - before
    # The allocator rounds every tensor up to 512 bytes.
    return peak - sum(-(-o.numel() * o.element_size() // 512) * 512 for o in outputs)


@needs_cuda
@pytest.mark.parametrize("num_splits", [0, 1, 2, 8])
@pytest.mark.parametrize("query_lens", [None, [1, 1], [64, 3]], ids=["decode", "ones", "chunks"])
def test_attention_allocates_its_scratch_and_no_more(query_lens, num_splits):
    scratch = {}
    for length in (2000, 8000):
        case = PagedCase(
            name="memory", kv_lens=[length, 40], query_lens=query_lens, dtype=BF16, options={"num_splits": num_splits}
        )
        batch = case.build("cuda")
        tokens, heads, dim = batch.query.shape
        scratch[length] = bytes_beyond(partial(attend, batch))
        splits = num_splits or 128
        # A counter for prefill on Hopper takes the smallest piece of memory that torch gives out.
        limit = (0 if splits == 1 else splits * tokens * heads * (dim + 2) * 4) + 512
        assert scratch[length] <= limit


@needs_cuda
def test_the_other_ops_allocate_their_outputs_only():
    batch = PagedCase(name="memory", kv_lens=[700, 40], dtype=BF16, pool_dtype=E4M3, scales="per_head").build("cuda")
    state = attend(batch)
    args, scales, _ = WRITE[0].build("cuda")
    blocks = torch.tensor([0], device="cuda"), torch.tensor([1], device="cuda")
    calls = [
        lambda: torch_pagedkv.gather_kv(*batch.gather[0], **batch.gather[1]),
        lambda: [torch_pagedkv.compute_slot_mapping(*batch.slots[0])],
        lambda: torch_pagedkv.merge_attention_states(*state, *state),
        lambda: torch_pagedkv.reshape_and_cache(*args, **scales),
        lambda: torch_pagedkv.copy_blocks(*args[2:4], *blocks),
    ]
    for call in calls:
        assert bytes_beyond(call) == 0


@needs_cuda
@pytest.mark.parametrize("query_lens", [None, [1, 1, 1], [9, 1, 2]], ids=["decode", "ones", "mixed"])
def test_a_captured_graph_serves_every_length(query_lens):
    """Captured at length 12 on a side stream, replayed at others with slots and tables changed in place."""
    case = PagedCase(name="graph", kv_lens=[2000, 700, 40], query_lens=query_lens, dtype=BF16, head_dim=128)
    batch = case.build("cuda")
    args, options = batch.attention
    key = torch.randn(batch.query.shape[0], case.num_kv_heads, 128, device="cuda", dtype=BF16)

    def step():
        slots = torch_pagedkv.compute_slot_mapping(*batch.slots[0])
        torch_pagedkv.reshape_and_cache(key, key, *args[1:3], slots)
        return torch_pagedkv.paged_attention(*args, **options, return_lse=True)

    saved = [buffer.clone() for buffer in batch.buffers]
    step()
    batch.seqused_k.fill_(12)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = step()
    for lengths in ([12, 12, 12], [9, 13, 40], [2000, 700, 17], [1999, 500, 40], [12, 0, 9]):
        key.normal_()
        batch.seqused_k.copy_(torch.tensor(lengths, dtype=torch.int32))
        for buffer, copy in zip(batch.buffers, saved):
            buffer.copy_(copy)
        graph.replay()
        replayed = [t.clone() for t in (*captured, *batch.buffers)]
        for buffer, copy in zip(batch.buffers, saved):
            buffer.copy_(copy)
        eager = [*step(), *batch.buffers]
        for actual, wanted in zip(replayed, eager):
            assert_same_bits(actual, wanted)


@needs_cuda
@pytest.mark.parametrize("query_lens", [None, [9, 1]], ids=["decode", "chunks"])
def test_a_captured_graph_sees_other_scales(query_lens):
    case = PagedCase(
        name="scales", kv_lens=[700, 40], query_lens=query_lens, dtype=BF16, pool_dtype=E4M3, scales="per_head"
    )
    batch = case.build("cuda")
    write, scales, buffers = WRITE[0].with_(dtype=BF16, pool_dtype=E4M3, scales="one").build("cuda")

    def step():
        torch_pagedkv.reshape_and_cache(*write, **scales)
        return attend(batch)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for scale in (*scales.values(), batch.options["k_scale"], batch.options["v_scale"]):
        scale.mul_(1.7)
    graph.replay()
    replayed = [t.clone() for t in (*captured, *buffers)]
    for actual, wanted in zip(replayed, (*step(), *buffers), strict=True):
        assert_same_bits(actual, wanted)


@needs_cuda
def test_the_first_call_may_be_captured():
    """In a fresh process, kernels are compiled and loaded while the stream is capturing."""
    program = """
        import torch, torch_pagedkv
        pools = torch.zeros(2, 4, 16, 2, 64, device="cuda").unbind(0)
        key, query = torch.ones(1, 2, 64, device="cuda"), torch.ones(1, 4, 64, device="cuda")
        slots, table = torch.tensor([32], device="cuda"), torch.tensor([[2]], device="cuda")
        length = torch.tensor([1], device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch_pagedkv.reshape_and_cache(key, key, *pools, slots)
            out = torch_pagedkv.paged_attention(query, *pools, table, length)
        graph.replay()
        torch.cuda.synchronize()
        assert (out == 1).all()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=300)


@needs_cuda
def test_no_call_waits_for_the_device():
    batch = PagedCase(name="sync", kv_lens=[700, 40], query_lens=[30, 1]).build("cuda")
    (write, scales, _), state = WRITE[0].build("cuda"), attend(batch)
    blocks = torch.tensor([0], device="cuda"), torch.tensor([1], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(batch)
        torch_pagedkv.gather_kv(*batch.gather[0])
        torch_pagedkv.compute_slot_mapping(*batch.slots[0])
        torch_pagedkv.merge_attention_states(*state, *state)
        torch_pagedkv.reshape_and_cache(*write, **scales)
        torch_pagedkv.copy_blocks(*write[2:4], *blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_calls_follow_their_stream():
    """Eager calls on a side stream are ordered by it, without a wait for the default stream."""
    batch = PagedCase(name="stream", kv_lens=[300, 40], query_lens=[30, 1]).build("cuda")
    expected = attend(batch)
    stream = torch.cuda.Stream()
    query = batch.query.clone()
    batch.query = torch.zeros_like(query)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        batch.query.copy_(query)
        actual = attend(batch)
    torch.cuda.synchronize()
    for got, wanted in zip(actual, expected):
        assert_same_bits(got, wanted)


@needs_two_gpus
@pytest.mark.parametrize("case", PAGED[:3], ids=str)
def test_the_current_device_changes_nothing(case):
    expected = attend(case.build("cuda:0"))
    with torch.cuda.device(0):
        for actual, wanted in zip(attend(case.build("cuda:1")), expected):
            assert actual.device == torch.device("cuda:1")
            assert_same_bits(actual.cpu(), wanted.cpu())
        assert torch.cuda.current_device() == 0


def test_the_default_device_changes_nothing(device):
    case = PAGED[1]
    expected = attend(case.build(device))
    batch = case.build(device)
    with torch.device("meta"):
        actual = attend(batch)
        slots = torch_pagedkv.compute_slot_mapping(*batch.slots[0])
    assert slots.device.type == device
    for got, wanted in zip(actual, expected):
        assert_same_bits(got, wanted)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_thread_counts_change_no_bit(num_threads):
    cases = [c for c in PAGED if c.name in ("chunk", "long_chunks", "decode_bf16", "e4m3_per_head_float32")]
    expected = [attend(case.build("cpu")) for case in cases]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        actual = [attend(case.build("cpu")) for case in cases]
    finally:
        torch.set_num_threads(before)
    for got, wanted in zip(actual, expected):
        assert_same_bits(got[0], wanted[0])
        assert_same_bits(got[1], wanted[1])


def test_two_threads_at_once(device):
    batches = [PAGED[1].build(device, seed) for seed in (0, 1)]
    expected = [attend(batch) for batch in batches]
    failures = []

    def work(batch, wanted):
        try:
            for _ in range(20):
                out, lse = attend(batch)
                assert_same_bits(out, wanted[0])
                assert_same_bits(lse, wanted[1])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(batches, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_fork_after_import():
    program = """
        import os, torch, torch_pagedkv
        child = os.fork()
        pools = torch.zeros(2, 2, 16, 1, 8).unbind(0)
        torch_pagedkv.reshape_and_cache(torch.ones(1, 1, 8), torch.ones(1, 1, 8), *pools, torch.tensor([3]))
        assert pools[0].count_nonzero() == 8 and not torch.cuda.is_initialized()
        if child == 0:
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
