"""Compiles csrc into torch_pagedkv/_native.abi3.so; everything else is in pyproject.toml.

torch is only read from (headers and libraries), never imported: no nvcc, no ninja. Where nvcc and a
CUDA build of torch are found, csrc/cuda becomes a second library, torch_pagedkv/_cuda.abi3.so;
``TORCH_PAGEDKV_BUILD_CUDA=1`` asks for it anyway, ``0`` never builds it.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()
sys.path.insert(0, str(ROOT / "_build"))

import cuda_library  # noqa: E402
from backend import is_cuda_build, torch_directory  # noqa: E402


class BuildNative(build_ext):
    """Compile the files of the library side by side, and be loud where that is impossible."""

    def build_extension(self, ext: Extension) -> None:
        if ext.name == cuda_library.NAME:
            return self.build_cuda(ext)
        compile_in_order = self.compiler.compile

        def compile_side_by_side(sources, **options):
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                jobs = [pool.submit(compile_in_order, [source], **options) for source in sources]
                return [built for job in jobs for built in job.result()]

        self.compiler.compile = compile_side_by_side
        try:
            super().build_extension(ext)
        except Exception as error:  # setuptools swallows it: the extension is optional
            say_not_built(f"compiling them failed ({error})")
            raise
        finally:
            self.compiler.compile = compile_in_order

    def build_cuda(self, ext: Extension) -> None:
        nvcc, torch = cuda_library.find_nvcc(), torch_directory()
        try:
            if nvcc is None or torch is None:
                raise RuntimeError(f"no {'torch >= 2.10 to compile with' if torch is None else 'nvcc'} was found")
            cuda_library.build(Path(self.get_ext_fullpath(ext.name)).resolve(), torch, nvcc)
        except Exception as error:
            print(
                f"\ntorch_pagedkv: THE CUDA C++ KERNELS WERE NOT BUILT: {error}.\n"
                "torch_pagedkv: the package installs without them; Triton serves CUDA tensors.\n",
                file=sys.stderr,
            )
            if asked_for_cuda():
                raise


def asked_for_cuda() -> bool | None:
    """Return what the environment says of the CUDA kernels, or None where it says nothing."""
    variable = os.environ.get("TORCH_PAGEDKV_BUILD_CUDA", "")
    return None if variable == "" else variable != "0"


def say_not_built(reason: str) -> None:
    print(
        f"\ntorch_pagedkv: THE C++ KERNELS WERE NOT BUILT: {reason}.\n"
        "torch_pagedkv: the package installs without them; CPU tensors will run on the slower "
        "PyTorch reference. Install again with a C++17 compiler to get them.\n",
        file=sys.stderr,
    )


def native_library() -> list[Extension]:
    if sys.platform == "win32":
        say_not_built("they need GCC or Clang")
        return []
    torch = torch_directory()
    if torch is None:
        say_not_built("no torch >= 2.10 to compile with was found")
        return []
    return [
        Extension(
            "torch_pagedkv._native",
            sources=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.cpp")),
            depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.h")),
            include_dirs=["csrc"],
            library_dirs=[str(torch / "lib")],
            libraries=["torch_cpu", "c10"],
            language="c++",
            # The oldest torch that may load the library: newer entry points stay invisible.
            define_macros=[("TORCH_TARGET_VERSION", "0x020a000000000000")],
            extra_compile_args=[
                "-isystem",  # torch's headers have warnings of their own
                str(torch / "include"),
                "-std=c++17",
                "-O3",
                # Lets loops with a choice between two results vectorise; no value changes by it.
                "-fno-trapping-math",
                "-g0",
                "-Wall",
                "-Wextra",
                "-fvisibility=hidden",
                f"-ffile-prefix-map={ROOT}=.",
                f"-ffile-prefix-map={torch}=torch",
            ],
            py_limited_api=True,
            optional=True,
        )
    ]


def cuda_kernels() -> list[Extension]:
    torch, asked = torch_directory(), asked_for_cuda()
    found = cuda_library.find_nvcc() is not None and torch is not None and is_cuda_build(torch)
    if sys.platform == "win32" or not (found if asked is None else asked):
        return []
    files = [str(path.relative_to(ROOT)) for path in cuda_library.sources()]
    headers = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("csrc/**/*.*h"))
    return [
        Extension(cuda_library.NAME, sources=files, depends=headers, py_limited_api=True, optional=not asked),
    ]


setup(
    ext_modules=native_library() + cuda_kernels(),
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
