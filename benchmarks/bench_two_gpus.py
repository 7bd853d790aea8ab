"""Decode on two GPUs of one host beside one of them: tensor parallelism at batch 32, context parallelism at 256k.

    python benchmarks/bench_two_gpus.py
    python benchmarks/bench_two_gpus.py --symmetric-memory
    python benchmarks/bench_two_gpus.py --device cpu    # tries the program: two processes, a small model

The model is that of bench_decoder.py. Each of its layers is compiled (one graph serves them all), and the
whole step is captured as one CUDA graph, collectives included. Both GPUs first run the one-GPU case, each
for itself; results of two are compared with those of one before anything is timed. A step's time is the
median over steps that follow one another, of the slower rank.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# NVLink multicast is not to be had in every virtual machine, and NCCL hangs where it only seems to be.
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config as inductor
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from bench_decoder import BF16, BLOCK_SIZE, LLAMA_3_8B
from machine import ROOT, print_header, print_row
from torch_pagedkv import PagedBatch, paged_attention, reshape_and_cache
from torch_pagedkv.integrations.context_parallel import context_parallel_attention, local_batch
from torch_pagedkv.integrations.tensor_parallel import HeadwiseParallel

sys.path.insert(0, str(ROOT / "docs" / "examples"))
from llama import Config, Llama, decode_step, fuse_projections

NUM_RANKS, STEPS = 2, 30
SMALL = dict(vocab=512, width=128, hidden=256, layers=2, heads=8, kv_heads=4, head_dim=16)
PLAN = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
PLAN |= {"attention.attention": HeadwiseParallel(), "attention.wo": RowwiseParallel()}
PLAN |= {f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")}
PLAN |= {"feed_forward.down": RowwiseParallel()}


def make_pools(config: Config, kv_heads: int, num_blocks: int, device: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return a pair of tensors for each layer: what a layer that is compiled by itself is given in place."""
    size = (num_blocks, BLOCK_SIZE, kv_heads, config.head_dim)
    return [tuple(torch.empty(size, dtype=BF16, device=device).normal_() for _ in "kv") for _ in range(config.layers)]


def make_batch(lengths: list[int], device: str) -> tuple[PagedBatch, int]:
    """Return a decode batch in the step before ``lengths``, and how many blocks it has."""
    width = -(-(max(lengths) + 4 * STEPS) // BLOCK_SIZE)
    order = torch.randperm(len(lengths) * width, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [order[i * width : (i + 1) * width] for i in range(len(lengths))]
    before = [length - 1 for length in lengths]
    return PagedBatch.from_sequences(tables, before, block_size=BLOCK_SIZE, device=device), len(order)


def captured(step: Callable[[], torch.Tensor], device: str) -> Callable[[], object]:
    """Return what replays a step as one CUDA graph; NCCL's own thread may work beside the capture."""
    for _ in range(3):
        step()
    if device == "cpu":
        return step
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def milliseconds(step: Callable[[], object], device: str) -> float:
    """Return the median time of a step, of the slower rank."""
    times = []
    if device == "cpu":
        for _ in range(5):
            before = time.perf_counter()
            step()
            times.append((time.perf_counter() - before) * 1e3)
    else:
        for _ in range(3):
            step()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        events[0].record()
        for event in events[1:]:
            step()
            event.record()
        torch.cuda.synchronize()
        times = [first.elapsed_time(last) for first, last in itertools.pairwise(events)]
    slowest = torch.tensor(statistics.median(times), device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def report(name: str, one: float, two: float, error: float) -> None:
    if dist.get_rank() == 0:
        print_row(name, one, two, one / two, error)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    error = ((actual.float() - expected.float()).norm() / expected.float().norm()).item()
    assert error < 5e-2, f"relative error {error:.2g}"
    return error


def new_model(config: Config, device: str) -> Llama:
    torch.manual_seed(0)  # the same weights on every rank
    torch.set_default_dtype(BF16)
    with torch.device(device):
        model = Llama(config).requires_grad_(False)
    torch.set_default_dtype(torch.float32)
    return model


def prepare(model: Llama, pools: list, lengths: list[int], device: str) -> tuple[torch.Tensor, Callable, Callable]:
    """Compile the layers; return the logits of the first step, the step, and it captured."""
    fuse_projections(model)
    for layer in model.layers:
        layer.compile(fullgraph=True, dynamic=False)
    batch, _ = make_batch(lengths, device)
    tokens = torch.arange(len(lengths), device=device)

    def step() -> torch.Tensor:
        return decode_step(model, tokens, pools, batch)

    logits = step().clone()
    return logits, step, captured(step, device)


def tensor_parallel(mesh, config: Config, lengths: list[int]) -> None:
    """Time a decode step of the model on one GPU, and of its halves on two."""
    device = mesh.device_type
    _, num_blocks = make_batch(lengths, device)
    whole = new_model(config, device)
    halves = copy.deepcopy(whole)
    pools = make_pools(config, config.kv_heads, num_blocks, device)
    heads = config.kv_heads // mesh.size()
    mine = slice(mesh.get_local_rank() * heads, (mesh.get_local_rank() + 1) * heads)
    local = [tuple(pool[:, :, mine].contiguous() for pool in pair) for pair in pools]
    expected, _, step = prepare(whole, pools, lengths, device)
    one = milliseconds(step, device)
    del whole, pools, step
    torch._dynamo.reset()
    for layer in halves.layers:
        parallelize_module(layer, mesh, PLAN)
    parallelize_module(halves, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})
    logits, _, step = prepare(halves, local, lengths, device)
    error = relative_error(logits, expected)
    report(f"tensor parallel decoder, {len(lengths)} x {lengths[0]}", one, milliseconds(step, device), error)


class ContextParallelAttention(torch.nn.Module):
    """What stands in the place of PagedAttention where the blocks of a sequence are on several ranks."""

    def __init__(self, config: Config, mesh) -> None:
        super().__init__()
        self.kv_heads, self.head_dim, self.mesh = config.kv_heads, config.head_dim, mesh

    def forward(self, query, key, value, kv_cache, batch):
        key, value = (rows.view(-1, self.kv_heads, self.head_dim) for rows in (key, value))
        reshape_and_cache(key, value, *kv_cache, batch.slot_mapping)
        return context_parallel_attention(query, *kv_cache, batch, mesh=self.mesh)


def context_parallel(mesh, config: Config, length: int) -> None:
    """Time the attention of all layers to one long sequence, on one GPU and with half of its blocks on each of two."""
    device, rank = mesh.device_type, mesh.get_local_rank()
    batch, num_blocks = make_batch([length], device)
    batch.advance_(block_size=BLOCK_SIZE)
    torch.manual_seed(0)
    pools = make_pools(config, config.kv_heads, num_blocks, device)
    owned = batch.block_table[0, rank :: mesh.size()].long()
    local_pools = [tuple(pool[owned] for pool in pair) for pair in pools]
    table = torch.arange(len(owned), device=device, dtype=torch.int32)[None]
    # Lengths stay as they are: the read of a step costs the same, and nothing but it is timed.
    local = local_batch(PagedBatch(table, batch.seqused_k, None, batch.slot_mapping), block_size=BLOCK_SIZE, mesh=mesh)
    heads = (config.layers, 1, config.heads, config.head_dim)
    query = torch.randn(heads, device=device).to(BF16)
    key = torch.randn(config.layers, 1, config.kv_heads, config.head_dim, device=device).to(BF16)
    attention = ContextParallelAttention(config, mesh)

    def on_one() -> torch.Tensor:
        outs = []
        for layer, (key_cache, value_cache) in enumerate(pools):
            reshape_and_cache(key[layer], key[layer], key_cache, value_cache, batch.slot_mapping)
            outs.append(paged_attention(query[layer], key_cache, value_cache, batch.block_table, batch.seqused_k))
        return torch.stack(outs)

    def on_two() -> torch.Tensor:
        return torch.stack([attention(query[i], key[i], key[i], pair, local) for i, pair in enumerate(local_pools)])

    error = relative_error(on_two(), on_one())
    one, two = (milliseconds(captured(step, device), device) for step in (on_one, on_two))
    report(f"context parallel attention, {config.layers} layers, 1 x {length}", one, two, error)


def use_symmetric_memory(mesh) -> None:
    """Let Inductor sum what is short by reading the other rank's memory, in place of a call of NCCL."""
    enable_symm_mem_for_group(mesh.get_group().group_name)
    inductor._collective.auto_select = True
    inductor._collective.one_shot_all_reduce_threshold_bytes = 2**20


def work(rank: int, folder: str, args: argparse.Namespace) -> None:
    """Run on a rank what is asked for; each case's failure is its own."""
    if args.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if args.device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=60),
        device_id=torch.device("cuda", rank) if args.device == "cuda" else None,
    )
    mesh = dist.init_device_mesh(args.device, (NUM_RANKS,), mesh_dim_names=("ranks",))
    if args.symmetric_memory:
        use_symmetric_memory(mesh)
    is_small = args.device == "cpu"
    config = Config(**SMALL) if is_small else Config(**LLAMA_3_8B, layers=args.layers)
    cases = {
        "tensor": lambda: tensor_parallel(mesh, config, [200] * 4 if is_small else [8192] * 32),
        "context": lambda: context_parallel(mesh, config, 1000 if is_small else 2**18),
    }
    if rank == 0:
        print_header("case", "one GPU, ms a step", "two, ms a step", "times as fast", "error")
    with torch.no_grad():
        for name in args.only:
            cases[name]()
            if args.device == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--symmetric-memory", action="store_true", help="sum by Inductor's one-shot kernels, not NCCL")
    parser.add_argument("--only", nargs="+", default=["context", "tensor"], choices=("tensor", "context"))
    args = parser.parse_args()
    if args.device == "cuda":
        import on_cuda

        print(f"{torch.cuda.device_count()} of {on_cuda.describe()}", flush=True)
        if torch.cuda.device_count() < NUM_RANKS:
            raise SystemExit(f"bench_two_gpus: torch must see {NUM_RANKS} GPUs, got {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, args=(str(Path(folder)), args), nprocs=NUM_RANKS)


if __name__ == "__main__":
    main()
