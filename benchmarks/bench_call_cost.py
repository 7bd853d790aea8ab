"""What one eager call costs the host: public function, op, bare kernel, beside torch's own in-place ops.

    python benchmarks/bench_call_cost.py --threads 1
    python benchmarks/bench_call_cost.py --device cuda

Hardly any work is in a call: one token is written, one sequence of 20 tokens is read (32 heads on 8 of 128); on
CUDA also one of 8192 tokens, whose keys are split, so that two kernels are launched. There the host only launches;
the device is waited for between rounds, outside of the time. "op" is torch.ops' door, "kernel" the C++ one without
anything of ours in Python around it. Median of rounds of 100 calls.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import torch_pagedkv
from machine import describe, parse, print_header, print_row

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 32, 8, 128, 16, 64
LENGTHS = {"cpu": {"read": 20}, "cuda": {"read": 20, "read, split": 8192}}
CALLS, WARM_CALLS = 100, 20
MODES = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


def calls_of(device: str) -> dict[str, dict[str, Callable[[], object]]]:
    """Return for each row of the table its calls."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    pools = torch.zeros(2, NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM, device=device, dtype=dtype).unbind(0)
    packed = torch.randn(1, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device, dtype=dtype)
    query, key, value = packed.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    slots, zeros = torch.tensor([36], device=device), torch.zeros_like(packed)
    ops = torch.ops.torch_pagedkv
    calls = {
        "write": {
            "function": lambda: torch_pagedkv.reshape_and_cache(key, value, *pools, slots),
            "op": lambda: ops.reshape_and_cache.default(key, value, *pools, slots),
            "kernel": _write_kernel(device, key, value, *pools, slots, None, None),
        }
    }
    for row, length in LENGTHS[device].items():
        blocks = torch.arange(-(-length // BLOCK_SIZE), device=device, dtype=torch.int32) % NUM_BLOCKS
        batch = (query, *pools, blocks[None], torch.tensor([length], device=device, dtype=torch.int32))
        calls[row] = {
            "function": lambda batch=batch: torch_pagedkv.paged_attention(*batch),
            "op": lambda batch=batch: ops.paged_attention.default(*batch),
            "kernel": _read_kernel(device, *batch),
        }
    calls["torch"] = {
        "index_put_": lambda: pools[0].view(-1, KV_HEADS, HEAD_DIM).index_put_((slots,), key),
        "add_": lambda: zeros.add_(zeros),
    }
    return calls


def _write_kernel(device: str, *arguments) -> Callable[[], object]:
    kernel = getattr(torch.ops, _namespace(device)).reshape_and_cache.default
    return lambda: kernel(*arguments)


def _read_kernel(device: str, query, *batch) -> Callable[[], object]:
    options, per_head = (True, -1, -1, 0.0), (None, None, None, None)
    if device == "cuda":
        kernel = torch.ops.torch_pagedkv_cuda.paged_attention_plain.default
        return lambda: kernel(query, *batch, HEAD_DIM**-0.5, 0)
    kernel = torch.ops.torch_pagedkv_native.paged_attention.default
    out, lse = torch.empty_like(query), torch.empty(HEADS, 1)
    return lambda: kernel(out, lse, query, *batch, None, HEAD_DIM**-0.5, *options, *per_head, 0)


def _namespace(device: str) -> str:
    native = torch_pagedkv.native
    missing = native.why_missing() if device == "cpu" else native.why_cuda_missing()
    if missing is not None:
        raise SystemExit(f"--device {device}: {missing}")
    return "torch_pagedkv_native" if device == "cpu" else "torch_pagedkv_cuda"


def microseconds(calls: dict[str, Callable[[], object]], seconds: float, device: str, clock) -> dict[str, float]:
    """Time the calls in turn, round after round; return each one's median time of a call."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    stop = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < stop or len(next(iter(times.values()))) < 5:
        for name, call in calls.items():
            for _ in range(WARM_CALLS):
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            before = clock()
            for _ in range(CALLS):
                call()
            times[name].append((clock() - before) / CALLS * 1e6)
            if device == "cuda":
                torch.cuda.synchronize()
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    arguments = parse(__doc__, seconds=0.3, device={"default": "cpu", "choices": ["cpu", "cuda"]})
    clock = time.thread_time if arguments.disturbed else time.perf_counter
    if arguments.device == "cuda":
        import on_cuda

        describe_it = on_cuda.describe
    else:
        describe_it = describe
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        print(f"\n{describe_it()}\n")
        print_header("mode", "call", "function, us", "op, us", "kernel, us")
        calls = calls_of(arguments.device)
        rows = [row for row in calls if row != "torch"]
        for mode, context in MODES.items():
            for row in rows:
                with context():
                    taken = microseconds(calls[row], arguments.seconds, arguments.device, clock)
                print_row(mode, row, *taken.values())
        with torch.no_grad():
            taken = microseconds(calls["torch"], arguments.seconds, arguments.device, clock)
        print("\nno_grad: " + ", ".join(f"{name} {time_of:.3g} us" for name, time_of in taken.items()))


if __name__ == "__main__":
    main()
