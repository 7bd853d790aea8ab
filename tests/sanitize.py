"""Run the tests of the CPU kernels over a build with AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/sanitize.py [pytest arguments]

The library is built aside and the tests run in a copy of the tree, once for each instruction set
that this machine has. The first report ends a run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import LIBRARY, Copy
from native_build import NativeBuild

FLAGS = [
    "-O1", "-g1", "-w", "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined",
]  # fmt: skip
FILES = [
    "paged_attention", "reshape_and_cache", "gather_kv", "copy_blocks", "merge_attention_states",
    "compute_slot_mapping", "hostile_inputs", "fuzz_corpus", "properties", "errors",
]  # fmt: skip
# Whole graphs and pools of gigabytes say nothing here that the rest does not.
LEFT_OUT = "cpu and not compiled and not past_2_to and not far_apart and not dynamic"
CAPABILITIES = ["baseline", "avx2", "avx512", "avx512_vbmi", "avx512_bf16"]


def runtimes() -> str:
    """Return the sanitizers' libraries, which must come before everything else in the process."""

    def path_of(library: str) -> str:
        command = ["c++", f"-print-file-name={library}"]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return str(Path(found.stdout.strip()).resolve())

    return " ".join(map(path_of, ("libasan.so", "libubsan.so")))


def is_supported(copy: Copy, environment: dict[str, str]) -> bool:
    """Whether the machine has an instruction set; a kernel says so in a sentence if not."""
    program = (
        "import torch, torch_pagedkv\n"
        "torch_pagedkv.gather_kv(*torch.ones(2, 1, 1, 1, 1), torch.tensor([[0]]), torch.tensor([1]))"
    )
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=copy.root, env=environment, capture_output=True, text=True)
    if result.returncode and "must name kernels" not in result.stderr:
        print(result.stderr)
        raise SystemExit("the sanitized library does not run")
    return result.returncode == 0


def main() -> int:
    failed = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Copy(Path(directory))
        print("Building with sanitizers", flush=True)
        build = NativeBuild(copy.root, Path(directory) / "objects", FLAGS)
        build.link(build.compile(build.sources, Path(directory) / "objects"), copy.root / LIBRARY)
        paths = [f"tests/test_{file}.py" for file in FILES]
        tests = sys.argv[1:] or [*paths, "-k", LEFT_OUT]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        for capability in CAPABILITIES:
            environment = {
                **os.environ,
                "LD_PRELOAD": runtimes(),
                # Python and torch keep memory to their end.
                "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
                "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
                "TORCH_PAGEDKV_CPU_CAPABILITY": capability,
                # Ten times slower: fewer random examples.
                "TORCH_PAGEDKV_EXAMPLES": "60",
            }
            if not is_supported(copy, environment):
                print(f"{capability}: not on this machine", flush=True)
                continue
            print(f"{capability}:", flush=True)
            if subprocess.run(command, cwd=copy.root, env=environment).returncode:
                failed.append(capability)
    print(f"sanitizers: failed for {', '.join(failed)}" if failed else "sanitizers: no report")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
