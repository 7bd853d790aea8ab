"""Compiles csrc/cuda into torch_pagedkv/_cuda.abi3.so with nvcc; any torch from 2.10 on has the headers.

    python _build/cuda_library.py [TARGET]        the library for another machine, also without a GPU here

No CUDA build of torch is needed and none is linked, so one library serves every torch from 2.10 on:
build it where nvcc is, carry it to where the GPU is.

``TORCH_PAGEDKV_CUDA_ARCHITECTURES`` names the GPUs to compile for; the default is all that the kernels
are written for and nvcc knows. GPUs newer than the last one compile its PTX when the library is loaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1].resolve()
NAME = "torch_pagedkv._cuda"
ARCHITECTURES_VARIABLE = "TORCH_PAGEDKV_CUDA_ARCHITECTURES"
ARCHITECTURES = ("80", "90a", "100")


def find_nvcc() -> str | None:
    """Return the path of nvcc, of ``CUDA_HOME`` first."""
    home = os.environ.get("CUDA_HOME")
    in_home = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    return in_home or shutil.which("nvcc")


def sources() -> list[Path]:
    return [ROOT / "csrc/compiled_with.cpp", *sorted(ROOT.glob("csrc/cuda/**/*.cu"))]


def _code_flags(nvcc: str) -> list[str]:
    wanted = os.environ.get(ARCHITECTURES_VARIABLE, "").replace(",", " ").replace(";", " ").split()
    if not wanted:
        listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=True).stdout
        known = set(listed.replace("compute_", "").split())
        wanted = [number for number in ARCHITECTURES if number.rstrip("a") in known]
    flags = [f"-gencode=arch=compute_{number},code=sm_{number}" for number in wanted]
    # PTX with an "a" serves that one architecture only.
    portable = [number for number in wanted if not number.endswith("a")]
    if portable:
        flags.append(f"-gencode=arch=compute_{portable[-1]},code=compute_{portable[-1]}")
    return flags


def _compile_flags(torch: Path) -> list[str]:
    host = (
        "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra",
        f"-ffile-prefix-map={ROOT}=.", f"-ffile-prefix-map={torch}=torch",
    )  # fmt: skip
    return [
        "-std=c++17",
        "-O3",
        "-DTORCH_TARGET_VERSION=0x020a000000000000",
        f"-I{ROOT / 'csrc'}",
        f"-I{ROOT / 'csrc/cuda'}",
        "-isystem",
        str(torch / "include"),
        *(flag for option in host for flag in ("-Xcompiler", option)),
    ]


def build(target: Path, torch: Path, nvcc: str) -> None:
    """Compile and link the library, as many files at once as there are cores."""
    code, flags = _code_flags(nvcc), _compile_flags(torch)
    with tempfile.TemporaryDirectory() as directory:

        def compile_one(source: Path) -> str:
            built = str(Path(directory) / f"{source.stem}.o")
            gpu = code if source.suffix == ".cu" else []
            _run([nvcc, "-c", str(source), "-o", built, *flags, *gpu])
            return built

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, sources()))
        linked = Path(directory) / "linked.so"
        # The CUDA runtime is inside and stays invisible: torch brings another one.
        libraries = [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", "-ldl"]
        hidden = ["-Xlinker", "--exclude-libs=ALL"]
        _run([nvcc, "-shared", "-cudart", "static", *code, *objects, *libraries, *hidden, "-o", str(linked)])
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)  # a process that has the old one loaded keeps it
        shutil.copy(linked, target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.stdout:
        print(done.stdout, file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:3])} failed with {done.returncode}")


def main() -> None:
    from backend import torch_directory

    nvcc, torch = find_nvcc(), torch_directory()
    if nvcc is None or torch is None:
        raise SystemExit(f"cuda_library: {'nvcc' if nvcc is None else 'torch >= 2.10'} must be installed, got none")
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "torch_pagedkv/_cuda.abi3.so"
    build(target.resolve(), torch, nvcc)
    print(target)


if __name__ == "__main__":
    main()
