"""The house: who imports whom, one stem in every room, sizes, and the order of docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import torch_pagedkv
from torch_pagedkv import native

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_pagedkv"
ROOMS = {
    "ops": "torch_pagedkv/ops/{}.py",
    "reference": "torch_pagedkv/reference/{}.py",
    "triton_kernels": "torch_pagedkv/triton_kernels/{}.py",
    "csrc/cpu": "csrc/cpu/{}.cpp",
    "tests": "tests/test_{}.py",
    "docs/ops": "docs/ops/{}.md",
}
# What a room may import of the package; ops and inspect may import triton_kernels inside of functions too.
ALLOWED = {
    "reference": {"reference"},
    "triton_kernels": {"triton_kernels"},
    "ops": {"ops", "reference", "native"},
    "cache": {"cache", "ops"},
    "nn": {"nn", "cache", "ops"},
    "inspect": {"inspect", "cache", "ops"},
    "integrations": {"integrations", "nn", "cache", "ops", ""},
}
SECTIONS = ("Args:", "Returns:", "Raises:", "Not checked:", "Example:", "Source:")


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted((PACKAGE / room).rglob("*.py"))]


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.AST, *, inside_functions: bool) -> set[str]:
    """Return the full names of the modules that a tree imports."""
    names = set()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef) or inside_functions:
            names |= imported(child, inside_functions=inside_functions)
    if isinstance(node, ast.Import):
        names.update(alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        names.add(node.module)
        names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def rooms_of(names: set[str]) -> set[str]:
    """Return the rooms that hold the modules; "" stands for the package's public names."""
    rooms = set()
    for name in names:
        package, _, rest = name.partition(".")
        if package != "torch_pagedkv" or not rest:
            continue  # what "from torch_pagedkv import x" takes is told by x
        room = rest.partition(".")[0]
        is_room = (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").is_file()
        rooms.add(room if is_room else "")
    return rooms


@pytest.mark.parametrize("path", sources(*ALLOWED), ids=relative)
def test_imports_run_one_way(path):
    tree = ast.parse(path.read_text())
    room = path.relative_to(PACKAGE).parts[0]
    assert rooms_of(imported(tree, inside_functions=False)) <= ALLOWED[room]
    names = imported(tree, inside_functions=True)
    assert rooms_of(names) <= ALLOWED[room] | ({"triton_kernels"} if room in ("ops", "inspect") else set())
    if room != "triton_kernels":
        assert not any(name.split(".")[0] == "triton" for name in names)


@pytest.mark.parametrize(
    "stem", ["addressing", "allocator", "argument_checks", "block_manager", "prefix_cache", "sequences"]
)
def test_who_owns_which_block_is_plain_python(stem):
    tree = ast.parse((PACKAGE / "cache" / f"{stem}.py").read_text())
    assert not any(name.split(".")[0] == "torch" for name in imported(tree, inside_functions=True))


def test_nothing_optional_is_imported_with_the_package():
    program = """
        import sys, torch, torch_pagedkv
        loaded = {"torch_pagedkv.triton_kernels", "torch_pagedkv.integrations", "transformers"}
        assert not loaded & set(sys.modules), loaded & set(sys.modules)
        assert not torch.cuda.is_initialized()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)


@pytest.mark.parametrize("stem", native.STEMS)
@pytest.mark.parametrize("room", ROOMS)
def test_every_stem_has_its_file_in_every_room(room, stem):
    assert (ROOT / ROOMS[room].format(stem)).is_file()


def test_the_stems_are_the_ops():
    """A public module of a room that is no stem would be half an op."""
    for stem in native.STEMS:
        assert stem in torch_pagedkv.__all__
    pages = {path.stem for path in (ROOT / "docs/ops").glob("*.md")}
    assert pages == set(native.STEMS)


def limit_of(path: Path) -> int:
    if path.parent == ROOT / "tests":
        return 450
    is_kernel = path.suffix != ".py" or path.parent.name == "triton_kernels"
    return 500 if is_kernel else 350


def code() -> list[Path]:
    patterns = ("torch_pagedkv/**/*.py", "csrc/**/*.[ch]*", "tests/*.py", "docs/examples/*.py")
    top = [ROOT / "setup.py", ROOT / "_build/backend.py"]
    return top + sorted(path for pattern in patterns for path in ROOT.glob(pattern))


@pytest.mark.parametrize("path", code(), ids=relative)
def test_files_are_small(path):
    assert len(path.read_text().splitlines()) <= limit_of(path)


@pytest.mark.parametrize("path", code(), ids=relative)
def test_no_file_is_named_after_nothing(path):
    assert not {"utils", "util", "common", "helpers", "misc"} & set(path.stem.split("_"))


@pytest.mark.parametrize("stem", native.STEMS)
def test_docstrings_of_ops_keep_the_order(stem):
    docstring = getattr(torch_pagedkv, stem).__doc__
    lines = [line.strip() for line in docstring.splitlines()]
    assert lines[0].endswith(".") and lines[1] == ""
    places = [next((i for i, line in enumerate(lines) if line.startswith(section)), None) for section in SECTIONS]
    assert None not in places, dict(zip(SECTIONS, places, strict=True))
    assert places == sorted(places)
    assert ">>> " in docstring


@pytest.mark.parametrize("name", torch_pagedkv.__all__)
def test_public_things_have_docstrings(name):
    assert (getattr(torch_pagedkv, name).__doc__ or "").strip()
