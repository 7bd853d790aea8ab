"""Plant faults in a copy of the tree, one at a time: some test must notice each of them.

    python tests/mutants.py [--only WORDS]

mutants.txt names the faults. Those of the C++ kernels are compiled, for the baseline instruction
set, those of the Triton kernels interpreted. Prints what noticed each fault, and fails where nothing
did, or where a fault's text is no longer in its file.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from native_build import NativeBuild

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "torch_pagedkv/_native.abi3.so"
# Optimising less compiles faster; the instruction sets are one source, so one of them is enough.
FLAGS = ["-O1", "-w"]
OTHER_SETS = re.compile(r"kernels_(avx|neon|sve)")
# In one of its environments the tests must notice. Without the C++ kernels, which check for
# themselves, nothing stands behind the checks in Python, as on CUDA.
ENVIRONMENTS = {
    "torch_pagedkv/reference": [{"TORCH_PAGEDKV_DISABLE_NATIVE": "1"}],
    "torch_pagedkv/nn": [{}],
    "torch_pagedkv/inspect": [{}],
    "torch_pagedkv/ops": [{"TORCH_PAGEDKV_DISABLE_NATIVE": "1"}, {}],
    "torch_pagedkv/cache": [{}],
    "torch_pagedkv/integrations": [{}],
    "csrc": [{"TORCH_PAGEDKV_CPU_CAPABILITY": "baseline"}],
    "torch_pagedkv/triton_kernels": [{"TRITON_INTERPRET": "1"}],
}
SECONDS_OF_A_RUN = 600


class Mutant(NamedTuple):
    file: str
    name: str
    old: str
    new: str
    tests: str

    @property
    def room(self) -> str:
        return next(room for room in ENVIRONMENTS if self.file.startswith(room))


def read_mutants(path: Path) -> list[Mutant]:
    mutants, file, name = [], "", ""
    texts: dict[str, list[str]] = {"-": [], "+": []}
    for line in path.read_text().splitlines():
        mark, text = line[:1], line[2:]
        if mark == "=":
            file = text
        elif mark in texts:
            texts[mark].append(text)
        elif mark == "?":
            mutants.append(Mutant(file, name, "\n".join(texts["-"]), "\n".join(texts["+"]), text))
            texts = {"-": [], "+": []}
        elif mark not in ("", "#"):
            name = line
    return mutants


class Copy:
    """A copy of the tree in which faults are planted and tests are run."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "tree"
        command = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
        for name in [*filter(None, listed.split("\0")), LIBRARY]:
            if (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self.directory = directory
        self.build: NativeBuild | None = None

    def compile_all(self) -> None:
        """Compile the C++ kernels as they are; mutants then compile the files that they touch."""
        self.build = NativeBuild(self.root, self.directory / "objects", FLAGS)
        self.objects = self.build.compile(self.build.sources, self.directory / "objects")
        self.build.link(self.objects, self.root / LIBRARY)

    def plant(self, mutant: Mutant) -> None:
        path = self.root / mutant.file
        source = path.read_text()
        if source.count(mutant.old) != 1:
            raise LookupError(f"its text stands {source.count(mutant.old)} times in {mutant.file}")
        path.write_text(source.replace(mutant.old, mutant.new))
        if mutant.room == "csrc":
            touched = self.build.sources_that_include(mutant.file, self.objects)
            touched = [source for source in touched if not OTHER_SETS.search(source)]
            changed = self.build.compile(touched, self.directory / "changed")
            self.build.link({**self.objects, **changed}, self.root / LIBRARY)

    def restore(self, mutant: Mutant) -> None:
        shutil.copy2(ROOT / mutant.file, self.root / mutant.file)
        if mutant.room == "csrc":
            self.build.link(self.objects, self.root / LIBRARY)

    def run(self, room: str, tests: str) -> str | None:
        """Run tests; return what noticed something, or None."""
        words = shlex.split(tests)
        files, expression = words, "cpu or not cuda"
        if "-k" in words:
            files, expression = words[: words.index("-k")], " ".join(words[words.index("-k") + 1 :])
        paths = []
        for file in files:
            folder, _, stem = file.rpartition("/")
            paths.append(str(Path("tests", folder, f"test_{stem}.py")))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:randomly",
        ]
        for variables in ENVIRONMENTS[room]:
            noticed = self._run([*command, *paths, "-k", expression], variables)
            if noticed:
                return noticed
        return None

    def _run(self, command: list[str], variables: dict[str, str]) -> str | None:
        environment = {**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"}
        environment.pop("PYTEST_ADDOPTS", None)
        try:
            result = subprocess.run(
                command,
                cwd=self.root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=SECONDS_OF_A_RUN,
            )
        except subprocess.TimeoutExpired:
            return "the time limit"
        if result.returncode == 0:
            return None
        if result.returncode < 0:
            return f"a crash (signal {-result.returncode})"
        noticed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+)", result.stdout, re.MULTILINE)
        if result.returncode != 1 or noticed is None:
            raise LookupError(f"its tests do not run:\n{result.stdout[-1500:]}{result.stderr[-500:]}")
        return noticed.group(1)


def try_all(copy: Copy, mutants: list[Mutant]) -> int:
    """Return how many mutants nothing noticed or could not be planted."""
    passes: set[tuple[str, str]] = set()
    bad = 0
    for number, mutant in enumerate(mutants, 1):
        began = time.monotonic()
        try:
            if mutant.room == "csrc" and copy.build is None:
                copy.compile_all()
            # A test that fails by itself notices nothing.
            if (mutant.room, mutant.tests) not in passes:
                failed = copy.run(mutant.room, mutant.tests)
                if failed:
                    raise LookupError(f"{failed} fails without it")
                passes.add((mutant.room, mutant.tests))
            copy.plant(mutant)
            noticed = copy.run(mutant.room, mutant.tests)
            verdict = f"killed by {noticed}" if noticed else "SURVIVED"
        except (LookupError, RuntimeError) as error:
            noticed, verdict = None, f"INVALID: {error}"
        finally:
            copy.restore(mutant)
        bad += noticed is None
        where = mutant.file.removeprefix("torch_pagedkv/")
        seconds = time.monotonic() - began
        print(f"{number:3} {where:32} {mutant.name:36} {seconds:4.0f} s  {verdict}", flush=True)
    return bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="words of a file or of a name")
    parser.add_argument("--skip", type=int, default=0, help="leave out so many of them")
    parser.add_argument("--list", action="store_true", help="check that every text is there, run nothing")
    options = parser.parse_args()
    mutants = read_mutants(Path(__file__).with_name("mutants.txt"))
    mutants = [mutant for mutant in mutants if options.only in f"{mutant.file} {mutant.name}"]
    mutants = mutants[options.skip :]
    if options.list:
        stale = [m for m in mutants if (ROOT / m.file).read_text().count(m.old) != 1]
        for mutant in stale:
            print(f"{mutant.file}: {mutant.name}: {mutant.old!r}")
        print(f"{len(mutants)} mutants, {len(stale)} without their text")
        return 1 if stale else 0
    with tempfile.TemporaryDirectory() as directory:
        bad = try_all(Copy(Path(directory)), mutants)
    print(f"{len(mutants) - bad} of {len(mutants)} mutants killed")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
