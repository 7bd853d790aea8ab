"""The library of CUDA C++ kernels: what can be said of it on a machine without a GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cases import PagedCase
from torch_pagedkv import native
from torch_pagedkv.ops import kernel_choice
from torch_pagedkv.ops.kernel_choice import TAKES_ALL, TAKES_NOTHING, TAKES_SHORT

ROOT = Path(__file__).resolve().parents[1]
ON_HOST = Path(__file__).parent / "cuda_on_host"

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="CUDA C++: no nvcc on this machine")
needs_library = pytest.mark.skipif(
    native.library_path(native.CUDA_LIBRARY_NAME) is None, reason="CUDA C++: the library was not built (make cuda)"
)


def run_python(program: str, **variables: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_nvcc
@pytest.mark.parametrize("program", sorted(path.name for path in ON_HOST.glob("*.cu")))
def test_device_functions_give_on_the_host_what_they_should(program, tmp_path):
    """Arithmetic that GPU code does is run on the CPU; each program prints how many results are wrong."""
    built = tmp_path / "program"
    # Without -mfma a fused multiply-add is a slow function call, but the same number.
    torch_directory = Path(torch.__file__).parent
    flags = ["-std=c++17", "-O2", "-arch=sm_80", "-DTORCH_TARGET_VERSION=0x020a000000000000"]
    flags += [f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'csrc/cuda'}", "-isystem", str(torch_directory / "include")]
    libraries = [f"-L{torch_directory / 'lib'}", "-ltorch_cpu", "-lc10"]
    subprocess.run(["nvcc", *flags, str(ON_HOST / program), *libraries, "-o", str(built)], check=True, timeout=300)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(torch_directory / "lib")}
    done = subprocess.run([str(built)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "0\n", done.stderr


def test_every_kernel_is_of_a_stem_and_its_source_registers_it():
    assert set(native.CUDA_STEMS) <= set(native.STEMS)
    for stem in native.CUDA_STEMS:
        assert f'library.impl("{stem}"' in (ROOT / f"csrc/cuda/{stem}.cu").read_text()


@needs_library
def test_the_library_loads_beside_any_torch():
    """It registers its ops with no CUDA in torch and initialises no device."""
    program = (
        "import torch; from torch_pagedkv import native\n"
        "torch.ops.load_library(native.library_path(native.CUDA_LIBRARY_NAME))\n"
        "assert all(hasattr(torch.ops.torch_pagedkv_cuda, stem) for stem in native.CUDA_STEMS)\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(native.compiled_with(native.CUDA_LIBRARY_NAME))"
    )
    assert run_python(program)[0].isdigit()


@needs_library
@pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf on this machine")
def test_the_library_needs_no_cuda_library():
    library = str(native.library_path(native.CUDA_LIBRARY_NAME))

    def lines(*options: str) -> list[list[str]]:
        done = subprocess.run(["readelf", "-W", *options, library], capture_output=True, text=True, check=True)
        return [line.split() for line in done.stdout.splitlines()]

    needed = [words[-1] for words in lines("--dynamic") if "(NEEDED)" in words]
    assert needed and not any("cuda" in name for name in needed)
    # The CUDA runtime inside must not be taken for torch's, nor want torch's.
    symbols = [words[7] for words in lines("--dyn-syms") if len(words) > 7]
    assert symbols and not any(name.startswith("cuda") for name in symbols)


@pytest.mark.slow
@needs_nvcc
def test_kernels_of_every_architecture_compile_without_a_warning(tmp_path):
    library = tmp_path / "library.so"
    command = [sys.executable, str(ROOT / "_build/cuda_library.py"), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    run_python(f"import torch; torch.ops.load_library({str(library)!r})")


@pytest.mark.parametrize("value", ["1", "cuda", "cpu"])
def test_a_part_can_be_switched_off(value):
    program = (
        "import torch; torch.version.cuda = '13.0'\n"
        "from torch_pagedkv import native\n"
        "print(native.why_missing(), native.why_cuda_missing(), sep='\\n')"
    )
    cpu, cuda = run_python(program, TORCH_PAGEDKV_DISABLE_NATIVE=value).split("\n")
    switched_off = "are switched off by TORCH_PAGEDKV_DISABLE_NATIVE"
    assert (switched_off in cpu) == (value != "cuda")
    assert (switched_off in cuda) == (value != "cpu")


def test_the_library_is_not_used_on_a_gpu_that_it_has_no_code_for(monkeypatch):
    monkeypatch.setattr(native, "why_cuda_missing", lambda: None)
    library = SimpleNamespace(runs_on=lambda device: device == 1, reshape_and_cache=SimpleNamespace(default="kernel"))
    monkeypatch.setattr(torch.ops, "torch_pagedkv_cuda", library, raising=False)
    kernels = [kernel_choice.cuda_kernel.__wrapped__("reshape_and_cache", device) for device in (-1, 0, 1)]
    assert kernels == [None, None, "kernel"]
    assert kernel_choice.cuda_kernel.__wrapped__("gather_kv", 1) is None


@pytest.mark.parametrize("takes", [TAKES_NOTHING, TAKES_SHORT, TAKES_ALL])
@pytest.mark.parametrize(
    "query_lens, launched",
    [
        (None, ["CUDA C++"]),
        ([1, 1], ["CUDA C++"]),
        ([40, 1], ["Triton, long", "CUDA C++"]),
        ([0, 9], ["Triton, long", "CUDA C++"]),
    ],
    ids=str,
)
def test_which_kernels_read(query_lens, launched, takes, monkeypatch):
    """Where CUDA C++ leaves the rows of long sequences, Triton takes such sequences, and before it."""
    module, launches = sys.modules["torch_pagedkv.ops.paged_attention"], []

    def kernel(*arguments):
        launches.extend(["CUDA C++"] if takes else [])
        return takes != TAKES_NOTHING

    def launch(*arguments, long_only, looks):
        launches.append("Triton, long" if long_only else "Triton")

    monkeypatch.setattr(module, "cuda_kernel", lambda stem, device: kernel)
    monkeypatch.setattr(module, "cuda_attention_takes", lambda: lambda *arguments: takes)
    monkeypatch.setattr(module, "triton_launcher", lambda stem: launch)
    batch = PagedCase(name="choice", kv_lens=[40, 30], query_lens=query_lens, dtype=torch.bfloat16).build("cpu")
    args, options = batch.attention
    module._checked(module._cuda, refuses=True)(*args, **options)
    expected = {TAKES_NOTHING: ["Triton"], TAKES_SHORT: launched, TAKES_ALL: ["CUDA C++"]}
    assert launches == expected[takes]
