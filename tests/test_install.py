"""Installing: what a build makes with and without a compiler, and what an import does then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
SOURCES = ("csrc", "_build", "torch_pagedkv", "setup.py", "pyproject.toml", "MANIFEST.in")
OPTIONAL_SOURCES = ("README.md", "LICENSE")
LIBRARY = "torch_pagedkv/_native.abi3.so"

needs_compiler = pytest.mark.skipif(
    not (shutil.which("c++") or shutil.which("g++")), reason="no C++ compiler on this machine"
)


def run_python(*arguments: str, package: Path = ROOT, **variables: str) -> str:
    """Run a fresh Python that imports the package from ``package``; return all that it printed."""
    environment = {**os.environ, "PYTHONPATH": str(package), **variables}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        cwd=package,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def source_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources as a clean clone has them: nothing built."""
    copy = tmp_path_factory.mktemp("source")
    built = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in SOURCES + OPTIONAL_SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=built)
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def build_wheel(source: Path, target: Path, **variables: str) -> tuple[Path, str]:
    """Build a wheel; return it and what the build printed."""
    options = ("--verbose", "--no-deps", "--no-build-isolation", "--no-index")
    printed = run_python("-m", "pip", "wheel", *options, "-w", str(target), ".", package=source, **variables)
    (wheel,) = target.glob("*.whl")
    return wheel, printed


def unpack(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.mark.slow
@needs_compiler
def test_wheel_holds_one_library_for_every_python(source_copy: Path, tmp_path: Path) -> None:
    wheel, printed = build_wheel(source_copy, tmp_path)

    assert "-cp310-abi3-" in wheel.name
    assert "NOT BUILT" not in printed
    assert "[-W" not in printed, "the compiler warned"
    installed = unpack(wheel, tmp_path / "installed")
    library = (installed / LIBRARY).read_bytes()
    assert str(source_copy).encode() not in library
    assert str(Path(torch.__file__).parent).encode() not in library
    facts = json.loads(run_python("-m", "torch_pagedkv", "info", "--json", package=installed))
    assert set(facts["kernels"]["cpu"].values()) == {"C++"}
    assert facts["native"]["library"] == str(installed / LIBRARY)
    assert torch.__version__.startswith(facts["native"]["compiled_with_torch"])


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_built_and_both_build_and_import_are_loud(
    source_copy: Path, tmp_path: Path
) -> None:
    built = shutil.ignore_patterns("build")
    clean = shutil.copytree(source_copy, tmp_path / "source", ignore=built)
    wheel, printed = build_wheel(clean, tmp_path, CXX="false", CC="false")

    assert "THE C++ KERNELS WERE NOT BUILT" in printed
    installed = unpack(wheel, tmp_path / "installed")
    assert not (installed / LIBRARY).exists()
    printed = run_python("-m", "torch_pagedkv", "info", package=installed)
    assert printed.count("running on the (slower) PyTorch reference") == 1
    assert "pip install --no-build-isolation" in printed


@pytest.mark.slow
def test_source_distribution_holds_what_a_build_needs(source_copy: Path, tmp_path: Path) -> None:
    printed = run_python(
        "-c",
        "import sys; sys.path.insert(0, '_build'); import backend; "
        f"print('archive', backend.build_sdist({str(tmp_path)!r}))",
        package=source_copy,
    )
    archive = tmp_path / printed.split("archive ")[-1].strip()
    shutil.unpack_archive(archive, tmp_path / "unpacked")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wanted = {p.relative_to(source_copy) for p in source_copy.glob("csrc/**/*.*")}
    wanted.add(Path("_build/backend.py"))
    assert all((unpacked / path).is_file() for path in wanted)


WITHOUT_SITE_PACKAGES = """
import sys
sys.path.insert(0, "_build")
import backend
sys.path[:] = [path for path in sys.path if "-packages" not in path]
sys.path_importer_cache.clear()
import importlib.util
assert importlib.util.find_spec("torch") is None
print(backend.torch_directory(), backend._torch_requirement())
"""


def test_isolated_build_compiles_with_the_torch_of_the_environment() -> None:
    printed = run_python("-c", WITHOUT_SITE_PACKAGES)
    assert printed.strip() == f"{Path(torch.__file__).parent} []"


def test_build_asks_for_a_torch_where_there_is_none() -> None:
    no_candidate = "backend._candidates = lambda: iter(())\nprint("
    program = WITHOUT_SITE_PACKAGES.replace("print(", no_candidate)
    assert run_python("-c", program).strip() == "None ['torch>=2.10']"
    printed = run_python("-c", program, TORCH_PAGEDKV_BUILD_TORCH="torch==2.13.0")
    assert printed.strip() == "None ['torch==2.13.0']"


@pytest.mark.parametrize("cuda, is_cuda", [("None", False), ("'13.0'", True)])
def test_the_build_tells_torches_for_cuda_by_their_files(cuda: str, is_cuda: bool, tmp_path: Path) -> None:
    for annotation in ("", ": Optional[str]"):
        (tmp_path / "version.py").write_text(f"__version__ = '2.11.0'\ncuda{annotation} = {cuda}\nhip = '6'\n")
        program = "import sys; sys.path.insert(0, '_build'); import backend, pathlib; "
        printed = run_python("-c", f"{program}print(backend.is_cuda_build(pathlib.Path({str(tmp_path)!r})))")
        assert printed.strip() == str(is_cuda)


EXTENSIONS = """
from distutils.core import run_setup
print(*(extension.name for extension in run_setup("setup.py", stop_after="init").ext_modules))
"""


@pytest.mark.parametrize("asked, is_built", [("1", True), ("0", False)])
def test_the_cuda_library_is_built_where_it_is_asked_for(asked: str, is_built: bool) -> None:
    printed = run_python("-c", f"import setuptools{EXTENSIONS}", TORCH_PAGEDKV_BUILD_CUDA=asked)
    assert ("torch_pagedkv._cuda" in printed.split()) == is_built


BLOCKED = """
import warnings
warnings.simplefilter("error")
import torch, torch_pagedkv
from torch_pagedkv import native
assert not native.is_available() and not hasattr(torch.ops.torch_pagedkv_native, "paged_attention")
pool = torch.zeros(3, 4, 2, 8)
token = torch.ones(1, 2, 8)
torch_pagedkv.reshape_and_cache(token, token, pool, pool.clone(), torch.tensor([5]))
assert pool[1, 1].eq(1).all()
print(native.why_missing())
"""


def test_blocked_library_is_not_loaded_and_the_reference_serves() -> None:
    printed = run_python("-c", BLOCKED, TORCH_PAGEDKV_DISABLE_NATIVE="1")
    assert printed.strip() == "the C++ kernels are switched off by TORCH_PAGEDKV_DISABLE_NATIVE"


def test_library_that_does_not_load_names_both_versions(tmp_path: Path) -> None:
    copied = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "torch_pagedkv", tmp_path / "torch_pagedkv", ignore=copied)
    (tmp_path / LIBRARY).write_bytes(b"torch_pagedkv compiled with torch 9.8.7")

    printed = run_python("-m", "torch_pagedkv", "info", package=tmp_path)

    assert printed.count("RuntimeWarning") == 1
    assert f"compiled with torch 9.8.7, in torch {torch.__version__}, did not load" in printed
    assert "paged_attention         reference" in printed


IMPORTED = """
import sys, torch, torch_pagedkv
assert not torch.cuda.is_initialized()
torch_pagedkv.build_info()
assert not torch.cuda.is_initialized()
assert not [name for name in sys.modules if name.startswith("torch_pagedkv.triton_kernels.")]
"""


def test_import_initialises_no_cuda_and_loads_no_triton_kernel() -> None:
    run_python("-c", IMPORTED)


def test_build_info_goes_through_json_and_into_the_info_command() -> None:
    facts = json.loads(run_python("-m", "torch_pagedkv", "info", "--json"))
    assert set(facts["kernels"]) == {"cpu", "cuda"}
    assert facts["torch"] == torch.__version__
    for device, kernels in facts["kernels"].items():
        assert (None in kernels.values()) <= (device in facts["why"])
