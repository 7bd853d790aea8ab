"""What the documents say: programs and commands run as they stand, doctests pass, what is named exists."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import torch

import torch_pagedkv
from torch_pagedkv import native
from torch_pagedkv.__main__ import main

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.count(chr(10))}_lines")
def test_readme_programs_run_as_they_stand(program):
    torch._dynamo.reset()
    exec(compile(program, "README.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_doctests_of_pages(page):
    assert doctest.testfile(str(page), module_relative=False, encoding="utf-8").failed == 0


COMMANDS = [
    pytest.param(page, *parts, id=f"{relative(page)}-{i}")
    for page in PAGES
    for i, parts in enumerate(
        re.findall(r"^```console\n\$ ([^\n]*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    )
]


@pytest.mark.parametrize("page,command,printed", COMMANDS)
def test_commands_print_what_pages_say(page, command, printed, capsys, monkeypatch, tmp_path):
    """Each console block is one command of the package and all that it prints."""
    monkeypatch.chdir(tmp_path)
    program, *arguments = shlex.split(command.removeprefix("python -m "))
    assert program == "torch_pagedkv"
    assert main(arguments) == 0
    assert capsys.readouterr().out == printed


def modules() -> list[str]:
    found = pkgutil.walk_packages(torch_pagedkv.__path__, "torch_pagedkv.")
    # The library is no Python module, and __main__ is the command line.
    return [m.name for m in found if m.name.rpartition(".")[2] not in ("_native", "_cuda", "__main__")]


@pytest.mark.parametrize("name", modules())
def test_doctests_of_modules(name):
    for part in ("triton", "transformers"):
        if part in name:
            pytest.importorskip(part)
    assert doctest.testmod(importlib.import_module(name)).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    """Relative links name files of the tree, and their anchors name headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{relative(page)}: {target} is not there"
        assert not anchor or anchor in anchors(file), f"{relative(page)}: {target} is no heading"


@functools.cache
def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}


NUM_RULES = 17
CONTRACT = (ROOT / "docs/contract.md").read_text()
RULES = re.split(r"^## ", CONTRACT, flags=re.MULTILINE)[1:]
NAMED_TEST = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def proofs(text: str) -> list[tuple[str, str, str]]:
    """Return (backends, file, test) of every test in the lists of a part of the contract."""
    items = re.findall(r"^- ([A-Z, ]+): (.*?)(?=^- |^$|\Z)", text, re.MULTILINE | re.DOTALL)
    return [(backends, *test) for backends, item in items for test in NAMED_TEST.findall(item)]


@functools.cache
def functions_in(file: str) -> dict[str, ast.FunctionDef]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def runs_on(test: ast.FunctionDef) -> str:
    if "device" in [argument.arg for argument in test.args.args]:
        return "CPU, CUDA"
    decorators = " ".join(ast.unparse(decorator) for decorator in test.decorator_list)
    return "CUDA" if "cuda" in decorators else "CPU"


def test_the_contract_has_every_rule_once():
    numbers = [int(rule.partition(".")[0]) for rule in RULES if rule[0].isdigit()]
    assert numbers == list(range(1, NUM_RULES + 1))
    assert any(rule.startswith("Errors") for rule in RULES)


def test_a_rule_and_its_test_carry_the_same_name():
    titles = [re.sub(r"^\d+\. ", "", rule.partition("\n")[0]) for rule in RULES]
    tests = ["test_" + re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_") for title in titles]
    assert tests == [name for name in functions_in("test_contract.py") if name.startswith("test_")]
    for rule, test in zip(RULES, tests, strict=True):
        assert ("CPU, CUDA", "test_contract.py", test) in proofs(rule)


@pytest.mark.parametrize("backends,file,name", sorted(set(proofs(CONTRACT))))
def test_the_contract_says_truly_where_tests_run(backends, file, name):
    assert runs_on(functions_in(file)[name]) == backends


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_named_tests_exist(page):
    for file, name in NAMED_TEST.findall(page.read_text()):
        assert name in functions_in(file), f"{file} has no {name}"


@pytest.mark.parametrize("stem", native.STEMS)
def test_pages_of_ops_show_the_signature(stem):
    """The page has the signature as it is, and a row of its table for each parameter."""
    page = (ROOT / f"docs/ops/{stem}.md").read_text()
    parameters = inspect.signature(getattr(torch_pagedkv, stem)).parameters
    shown = ast.parse(re.search(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL).group(1))
    arguments = shown.body[0].args
    names = [argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]]
    required = [None] * (len(arguments.args) - len(arguments.defaults))
    defaults = [*required, *arguments.defaults, *arguments.kw_defaults]
    assert names == list(parameters)
    for name, default in zip(names, defaults, strict=True):
        actual = inspect.Parameter.empty if default is None else ast.literal_eval(default)
        assert actual == parameters[name].default, name
    rows = re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
    described = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert described >= set(parameters)


def described_arguments(docstring: str) -> dict[str, str]:
    """What a docstring says under Args of each parameter."""
    section = inspect.cleandoc(docstring).partition("\nArgs:\n")[2].partition("\nReturns:")[0]
    entries = re.findall(r"^    ([\w, ]+?): (.*?)(?=^    \w|^\S|\Z)", section, re.MULTILINE | re.DOTALL)
    return {name.strip(): " ".join(text.split()) for names, text in entries for name in names.split(",")}


@pytest.mark.parametrize("stem", native.STEMS)
def test_pages_of_ops_say_what_docstrings_say(stem):
    """Page and docstring describe the same arguments, with the same shapes and the same kinds of integers."""
    described = described_arguments(getattr(torch_pagedkv, stem).__doc__)
    page = (ROOT / f"docs/ops/{stem}.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \| (.*?) \| (.*?) \|", page, re.MULTILINE)
    assert rows
    for names, shape, dtype in rows:
        for name in re.findall(r"`(\w+)`", names):
            for part in re.findall(r"\[[^\]]*\]", shape):
                assert part in described[name], f"{name}: {part} is not in its docstring"
            for part in re.findall(r"\b(?:float|bfloat|int)\w+", dtype):
                assert part in described[name], f"{name}: {part} is not in its docstring"


def test_the_site_has_every_page():
    """mkdocs.yml names each page once; it is read as text, as the site's tools are not installed here."""
    named = re.findall(r"^ +- ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    assert sorted(named) == sorted(pages)
