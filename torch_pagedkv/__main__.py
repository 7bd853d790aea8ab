"""Command line: ``python -m torch_pagedkv info``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from torch_pagedkv.build_info import build_info


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_pagedkv")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser("info", help="say what this installation is made of")
    info.add_argument("--json", action="store_true", help="print it as JSON")
    info.set_defaults(run=print_info)
    options = parser.parse_args(arguments)
    return options.run(options)


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


if __name__ == "__main__":
    sys.exit(main())
