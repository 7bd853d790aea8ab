"""Command line: ``python -m torch_pagedkv info``, ``doctor``, ``explain``, ``softmax`` and ``layout``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from torch_pagedkv.build_info import build_info
from torch_pagedkv.inspect import command_line


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_pagedkv")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="say what this installation is made of")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    info.set_defaults(run=print_info)
    command_line.add_commands(commands)
    doctor = commands.add_parser("doctor", help="compile every op and time it here: breaks, recompiles, copies, costs")
    doctor.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is a GPU")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.set_defaults(run=print_findings)
    options = parser.parse_args(arguments)
    try:
        return options.run(options)
    except (TypeError, ValueError, NotImplementedError) as error:  # the sentences of refused arguments
        print(error, file=sys.stderr)
        return 2


def print_info(options: argparse.Namespace) -> int:
    facts = build_info()
    if options.json:
        print(json.dumps(facts, indent=2))
        return 0
    cuda = f"CUDA {facts['torch_cuda']} build" if facts["torch_cuda"] else "CPU build"
    native = facts["native"]
    print(f"torch_pagedkv {facts['version']}")
    print(f"  python   {facts['python']}")
    print(f"  torch    {facts['torch']} ({cuda})")
    print(f"  triton   {facts['triton'] or 'not installed'}")
    print(f"  library  {native['library'] or 'none'}")
    if native["compiled_with_torch"]:
        print(f"           compiled with torch {native['compiled_with_torch']}")
    if native["cpu_capability"]:
        print(f"           {native['cpu_capability']} kernels on this CPU")
    print(f"  for cuda {facts['cuda']['library'] or 'none'}")
    if facts["cuda"]["library"]:
        in_use = facts["cuda"]["reason_missing"] or f"compiled with torch {facts['cuda']['compiled_with_torch']}"
        print(f"           {in_use}")
    for device, kernels in facts["kernels"].items():
        reason = facts["why"].get(device)
        print(f"kernels on {device}{f' ({reason})' if reason else ''}")
        for stem, kernel in kernels.items():
            print(f"  {stem:24}{kernel or 'none'}")
    return 0


def print_findings(options: argparse.Namespace) -> int:
    """Print a table of what the compiler makes of the ops; return 1 where anything is amiss."""
    import torch

    from torch_pagedkv.doctor import examine

    is_live = sys.stderr.isatty()

    def show(text: str) -> None:
        print(f"\r{text}\033[K" if is_live else text, end="" if is_live else "\n", file=sys.stderr, flush=True)

    if options.device == "cuda" and not torch.cuda.is_available():
        print("doctor: --device must be cpu where torch finds no GPU, got cuda", file=sys.stderr)
        return 2
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    findings = list(examine(device, show))
    if is_live:
        show("")
    if options.json:
        print(json.dumps({"device": device, "findings": [dataclasses.asdict(f) for f in findings]}, indent=2))
        return 0 if all(f.is_healthy for f in findings) else 1
    kernels = build_info()["kernels"][device]["paged_attention"]
    print(f"{kernels} kernels on {device}, torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    titles = ["", "graph breaks", "recompiles", "pool-sized copies", "eager, us", "compiled, us"]
    if device == "cuda":
        titles.insert(4, "graph launches")
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for f in findings:
        cells = [f.name, f.failure] + [""] * (len(titles) - 2)
        if not f.failure:
            launches = [f.graph_launches] if device == "cuda" else []
            counts = [f.graph_breaks, f.recompiles, f.pool_copies, *launches]
            cells = [f.name, *counts, f"{f.eager_us:.0f}", f"{f.compiled_us:.0f}"]
        print(f"| {' | '.join(map(str, cells))} |")
    return 0 if all(f.is_healthy for f in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
