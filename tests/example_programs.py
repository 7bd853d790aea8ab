"""Run the programs of docs/examples in the process of a test; the fixture ``examples_on_path`` finds them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable


def run_program(monkeypatch, name: str, *options: str) -> int:
    """Run a program with the options of a command line; return its exit status."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
    return importlib.import_module(name).main()


def spoil_one_token(monkeypatch, name: str) -> None:
    """Make the oracle of a program differ in the last token of its second text."""
    program = importlib.import_module(name)
    honest: Callable[..., list[list[int]]] = program.generate_one_by_one

    def wrong_in_one_token(*args):
        tokens = honest(*args)
        tokens[1][-1] += 1
        return tokens

    monkeypatch.setattr(program, "generate_one_by_one", wrong_in_one_token)
