"""Builds the C++ kernels aside, with other flags or from other sources, as setup.py says they are built."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension
from setuptools.dist import Distribution


def extension_of(root: Path) -> Extension:
    """Return what setup.py of a source tree wants built."""
    from distutils.core import run_setup

    before = Path.cwd()
    os.chdir(root)
    try:
        distribution: Distribution = run_setup("setup.py", stop_after="init")
    finally:
        os.chdir(before)
    if not distribution.ext_modules:
        raise SystemExit("no torch to compile with, or no compiler that is known here")
    return distribution.ext_modules[0]


class NativeBuild:
    """The objects of a library, each compiled once for each set of flags."""

    def __init__(self, root: Path, directory: Path, flags: list[str]) -> None:
        self.root, self.directory = root, directory
        self.extension = extension_of(root)
        self.flags = [*self.extension.extra_compile_args, *flags]
        self.sources = list(self.extension.sources)
        directory.mkdir(parents=True, exist_ok=True)

    def compile(self, sources: list[str], directory: Path) -> dict[str, Path]:
        """Compile sources, two at a time; return the object of each."""
        directory.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda source: self._compile_one(source, directory), sources)
            return dict(zip(sources, objects, strict=True))

    def _compile_one(self, source: str, directory: Path) -> Path:
        target = directory / source.replace("/", "_").replace(".cpp", ".o")
        macros = [f"-D{name}={value}" for name, value in self.extension.define_macros]
        includes = [f"-I{path}" for path in self.extension.include_dirs]
        command = [
            "c++",
            *macros,
            *includes,
            *self.flags,
            "-fPIC",
            "-MMD",
            "-c",
            source,
            "-o",
            str(target),
        ]
        built = subprocess.run(command, cwd=self.root, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"{source} does not compile:\n{built.stderr[-2000:]}")
        return target

    def link(self, objects: dict[str, Path], library: Path) -> None:
        paths = [f"-L{path}" for path in self.extension.library_dirs]
        libraries = [f"-l{name}" for name in self.extension.libraries]
        # A new file: a process that has the old one loaded keeps it.
        library.unlink(missing_ok=True)
        command = ["c++", "-shared", *self.flags, *map(str, objects.values()), *paths, *libraries]
        subprocess.run([*command, "-o", str(library)], cwd=self.root, check=True)

    def sources_that_include(self, file: str, objects: dict[str, Path]) -> list[str]:
        """Return the sources whose objects were compiled from a file."""

        def reads(source: str) -> bool:
            listed = objects[source].with_suffix(".d").read_text().split()
            return any(os.path.normpath(name) == os.path.normpath(file) for name in listed)

        return [source for source in objects if reads(source)]
