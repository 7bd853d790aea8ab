"""A decode step of a Llama-3-8B-shaped decoder on a GPU, beside the time in which its bytes can be read.

    python benchmarks/bench_decoder.py
    python benchmarks/bench_decoder.py --parts --batch 1 --mode sums --profile

The model is docs/examples/llama.py with random bfloat16 weights, fused projections and folded norms,
compiled whole, ``decode_step`` and all: slots, model, greedy choice. A step is one launch of a CUDA graph,
which torch records itself or, with ``--by-hand``, ``torch.cuda.graph`` around the same compiled code.
``--parts`` compiles one layer for all, which is done much sooner, and captures by hand. One compiled step
serves every length of its batch. A step's time is the median over steps that follow one another, so
lengths grow by one. Modes are torch's; ``sums`` is NormedLinear's way with a single row. max-autotune
tunes for minutes.

"bytes" is what a step has to read once: weights without the embedding, keys and values in use.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

import on_cuda
from machine import ROOT, print_header, print_row
from torch_pagedkv import PagedBatch, blocks_for

sys.path.insert(0, str(ROOT / "docs" / "examples"))
from llama import Config, Llama, compile_parts, decode_step, fuse_projections

BF16, BLOCK_SIZE, STEPS = torch.bfloat16, 16, 40
LLAMA_3_8B = dict(vocab=128256, width=4096, hidden=14336, heads=32, kv_heads=8, head_dim=128, rope_theta=500000.0)
RAGGED = [256 + 512 * i for i in range(32)]
LENGTHS = {
    1: {"1 x 8k": [8192], "1 x 32k": [32768]},
    32: {"32 x 8k": [8192] * 32, "32, ragged 256..16k": RAGGED, "32 x 1k": [1024] * 32},
}
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "sums")


class NormedLinear(torch.nn.Linear):
    """A projection with the RMSNorm before it, whose weights are folded into its own.

    ``as_sum``: a single row is compiled as a sum over products, which Inductor fuses with what stands
    around it, the norm included: the mean of the squares is a second sum over the same elements, taken
    anew for each output rather than in a kernel of its own.
    """

    eps: float | None = None  # no norm
    as_sum = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.as_sum and x.shape[0] == 1 and torch.compiler.is_compiling()):
            x = x if self.eps is None else F.rms_norm(x, x.shape[-1:], eps=self.eps)
            return super().forward(x)
        # A strided view is of a buffer: what it shows is stored once, not computed anew by each who reads it.
        rows = (x if self.eps is not None else x.as_strided(x.shape, x.stride())).unsqueeze(1).float()
        product = (rows * self.weight).sum(-1)
        if self.eps is None:
            return product.to(x.dtype)
        squares = (rows * rows).expand(-1, self.out_features, -1).mean(-1)
        product = (product * torch.rsqrt(squares + self.eps)).to(x.dtype)
        return product.as_strided(product.shape, product.stride())


def fold_norms(model: Llama) -> None:
    """Make every projection a NormedLinear, and move the norms into those that follow them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.__class__ = NormedLinear
    followed = [(model, "norm", model.head)]
    for layer in model.layers:
        followed.append((layer, "attention_norm", layer.attention.fused))
        followed.append((layer, "feed_forward_norm", layer.feed_forward.fused))
    for owner, name, linear in followed:
        norm = getattr(owner, name)
        linear.weight.mul_(norm.weight)
        linear.eps = torch.finfo(norm.weight.dtype).eps if norm.eps is None else norm.eps
        setattr(owner, name, torch.nn.Identity())


class Decoding:
    """A batch of fixed shapes, pools for its longest case, and the compiled step over them."""

    def __init__(self, model: Llama, batch_size: int) -> None:
        self.model, config = model, model.config
        cases = LENGTHS[batch_size].values()
        needed = [[blocks_for(length + STEPS + 16, BLOCK_SIZE) for length in case] for case in cases]
        self.num_blocks = max(map(sum, needed))
        size = (self.num_blocks, BLOCK_SIZE, config.kv_heads, config.head_dim)
        self.pools = [[torch.randn(size, dtype=BF16, device="cuda") for _ in "kv"] for _ in range(config.layers)]
        self.batch = PagedBatch.fixed(batch_size, max(map(max, needed)), device="cuda")
        self.tokens = torch.randint(config.vocab, (batch_size,), device="cuda")
        batch = (self.batch.block_table, self.batch.seqused_k, self.batch.slot_mapping)
        for tensor in (self.tokens, *batch, *itertools.chain(*self.pools)):
            torch._dynamo.mark_static_address(tensor)  # where they are is part of the graph: nothing is copied into it

    def start(self, lengths: list[int]) -> None:
        """Begin a step before ``lengths``, blocks in random order, the same one each time."""
        order = iter(torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(0)).tolist())
        tables = [[next(order) for _ in range(blocks_for(n + STEPS + 16, BLOCK_SIZE))] for n in lengths]
        self.batch.update_(tables, [length - 1 for length in lengths], block_size=BLOCK_SIZE)

    def step(self, run: Callable = decode_step) -> torch.Tensor:
        return run(self.model, self.tokens, self.pools, self.batch)

    def logits(self, run: Callable, lengths: list[int]) -> torch.Tensor:
        """Return the logits of a step with fixed tokens."""
        self.start(lengths)
        self.tokens.copy_(torch.arange(len(lengths)))
        return self.step(run).float().clone()

    def bytes(self, lengths: list[int]) -> tuple[int, int]:
        """Return the bytes of the weights that a step reads and of the keys and values in use."""
        embed = self.model.embed.weight
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters() if p is not embed)
        pool = self.pools[0][0]
        return weights, sum(lengths) * 2 * len(self.pools) * pool[0, 0].numel() * pool.element_size()


def captured(run: Callable, decoding: Decoding) -> Callable:
    """Return a function that replays a step as one graph, captured on a side stream."""
    for _ in range(2):
        decoding.step(run)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = decoding.step(run)

    def replay(*_: object) -> torch.Tensor:
        graph.replay()
        return logits

    return replay


def milliseconds(decoding: Decoding, run: Callable) -> float:
    """Return the median time of steps that follow one another."""
    for _ in range(3):
        decoding.step(run)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
    events[0].record()
    for event in events[1:]:
        decoding.step(run)
        event.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in itertools.pairwise(events))


def print_kernels(decoding: Decoding, run: Callable) -> None:
    """Print what a step's kernels take: count and time of each, and how many launches of graphs there were."""
    with torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile:
        for _ in range(3):
            decoding.step(run)
        torch.cuda.synchronize()
    events = profile.key_averages()
    launches = sum(event.count for event in events if event.key == "cudaGraphLaunch")
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    print(f"in 3 steps {launches} graph launches; kernels of a step {total / 3e3:.3f} ms, the longest:")
    for event in kernels[:16]:
        mean = event.self_device_time_total / event.count
        print(f"  {event.self_device_time_total / 3:9.1f} us {event.count / 3:6.1f} x {mean:8.2f}  {event.key[:90]}")


def parse() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    add = parser.add_argument
    add("--batch", type=int, nargs="+", default=[1, 32], choices=LENGTHS)
    add("--mode", nargs="+", default=["reduce-overhead", "sums"], choices=MODES)
    add("--parts", action="store_true", help="compile one layer for all, and capture the step by hand")
    add("--by-hand", action="store_true", help="capture the compiled step with torch.cuda.graph")
    help = "1: let Inductor's kernels overlap their launches (triton.enable_pdl)"
    add("--pdl", type=int, nargs="+", default=[0], choices=(0, 1), help=help)
    add("--splits", type=int, nargs="+", default=[0], help="num_splits of PagedAttention; 0: the kernel chooses")
    add("--layers", type=int, default=32)
    add("--profile", action="store_true", help="say which kernels the first case takes")
    args = parser.parse_args()
    args.by_hand = args.by_hand or args.parts
    return args


def main() -> None:
    args = parse()
    print(on_cuda.describe())
    read_limit, _ = on_cuda.bytes_per_microsecond()
    print(f"reading: {read_limit / 1e6:.2f} TB/s; {args.layers} layers")
    torch.manual_seed(0)
    torch.set_default_dtype(BF16)
    with torch.device("cuda"), torch.no_grad():
        model = Llama(Config(**LLAMA_3_8B, layers=args.layers)).requires_grad_(False)
        fuse_projections(model)
        fold_norms(model)
    torch.set_default_dtype(torch.float32)
    for batch_size in args.batch:
        for mode, pdl, splits in itertools.product(args.mode, args.pdl, args.splits):
            torch._inductor.config.triton.enable_pdl = bool(pdl)
            for layer in model.layers:
                layer.attention.attention.num_splits = splits
            settings = [mode, "in parts" if args.parts else "whole", "by hand" if args.by_hand else "recorded by torch"]
            settings += ["PDL"] * pdl + [f"{splits} splits"] * bool(splits)
            print(f"\n{', '.join(settings)}:", flush=True)
            try:
                bench(model, batch_size, mode, args, read_limit)
            except Exception as error:  # the other ways are timed all the same
                print(f"fails: {type(error).__name__}: {str(error).strip().splitlines()[0][:200]}", flush=True)
            forget_compiled(model)
            torch.cuda.empty_cache()


def forget_compiled(model: Llama) -> None:
    """Make the model eager again."""
    torch._dynamo.reset()
    for name in ("begin", "finish"):
        vars(model).pop(name, None)
    for layer in model.layers:
        layer._compiled_call_impl = None


@torch.no_grad()
def bench(model: Llama, batch_size: int, mode: str, args: argparse.Namespace, read_limit: float) -> None:
    torch.cuda.reset_peak_memory_stats()
    decoding = Decoding(model, batch_size)
    for module in model.modules():
        if isinstance(module, NormedLinear):
            module.as_sum = mode == "sums"
    options = {**torch._inductor.list_mode_options(mode)} if mode != "sums" else {"max_autotune_pointwise": True}
    options["triton.cudagraphs"] = not args.by_hand
    cases = LENGTHS[batch_size]
    expected = [decoding.logits(decode_step, lengths) for lengths in cases.values()]
    before = time.perf_counter()
    if args.parts:
        run = decode_step
        compile_parts(model, dynamic=False, options=options)
    else:
        run = torch.compile(decode_step, fullgraph=True, dynamic=False, options=options)
    actual = [decoding.logits(run, lengths) for lengths in cases.values()]
    error = max(((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True))
    assert error < 5e-2, f"relative error of the logits {error:.2g}"
    if args.by_hand:
        run = captured(run, decoding)
    print(f"ready after {time.perf_counter() - before:.0f} s\n")
    print_header("case", "ms a step", "bytes need, ms", "of reading", "weights, GB", "KV, GB", "peak, GB", "error")
    for name, lengths in cases.items():
        decoding.start(lengths)
        taken = milliseconds(decoding, run)
        weights, kv = decoding.bytes(lengths)
        need = (weights + kv) / read_limit / 1e3
        peak = torch.cuda.max_memory_allocated() / 1e9
        print_row(name, taken, need, need / taken, weights / 1e9, kv / 1e9, peak, error)
    if args.profile:
        decoding.start(next(iter(cases.values())))
        print_kernels(decoding, run)


if __name__ == "__main__":
    main()
