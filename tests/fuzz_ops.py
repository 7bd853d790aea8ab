"""Throw random calls at the ops: each must end in the reference's result or in a sentence.

    python tests/fuzz_ops.py [--seconds 1800] [--seed N] [--device cpu]

Calls are made in a child process. If it dies, or does not come back from a call, the parent names
the seed and goes on behind it. What was found is appended to fuzz_corpus.jsonl, which tests replay.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import resource
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent))
CORPUS = TESTS / "fuzz_corpus.jsonl"
SECONDS_OF_A_CALL = {"cpu": 30, "cuda": 300}  # on CUDA a call may compile kernels
CHILD_MEMORY = 16 * 2**30


def run_child(first: int, device: str, at: Path) -> None:
    """Make calls for ever, telling what happens in lines of JSON; ``at`` holds the seed in work."""
    import torch

    from fuzz_calls import draw
    from fuzz_judge import judge

    if device == "cpu":  # a call for too much memory must fail in the child, not in the machine
        resource.setrlimit(resource.RLIMIT_AS, (CHILD_MEMORY, CHILD_MEMORY))
    torch.set_num_threads(2)
    file = os.open(at, os.O_WRONLY)
    endings: collections.Counter[str] = collections.Counter()
    told = time.monotonic()
    for seed in range(first, sys.maxsize):
        os.pwrite(file, b"%20d" % seed, 0)
        call = draw(seed)
        try:
            endings[f"{call['op']}: {judge(call, device)}"] += 1
        except Exception as fault:
            text = f"{type(fault).__name__}: {fault}"
            print(json.dumps({"seed": seed, "fault": text[:1000]}), flush=True)
        if time.monotonic() - told > 1:
            print(json.dumps({"endings": endings}), flush=True)
            endings.clear()
            told = time.monotonic()


class Fuzz:
    """The parent: starts children, counts what they tell, and writes down what they find."""

    def __init__(self, seed: int, device: str, seconds: float) -> None:
        self.seed, self.device, self.stop = seed, device, time.monotonic() + seconds
        self.endings: collections.Counter[str] = collections.Counter()
        self.found: dict[str, int] = {}
        self.told = time.monotonic()

    def run(self) -> int:
        """Return the exit status."""
        while time.monotonic() < self.stop:
            self.run_one_child()
        for ending, count in sorted(self.endings.items()):
            print(f"  {ending:60} {count:9}")
        self.tell(f"last seed {self.seed}")
        for fault, seed in self.found.items():
            print(f"  seed {seed}: {fault}")
        return 1 if self.found else 0

    def run_one_child(self) -> None:
        with tempfile.NamedTemporaryFile() as at:
            command = [sys.executable, __file__, "--child", at.name, "--seed", str(self.seed)]
            child = subprocess.Popen([*command, "--device", self.device], stdout=subprocess.PIPE)
            try:
                ending = self.listen(child, Path(at.name))
            finally:
                child.kill()
                child.wait()
            last = Path(at.name).read_bytes()
            self.seed = int(last or self.seed)
        if ending:
            self.write_down(self.seed, ending)
        self.seed += 1

    def listen(self, child: subprocess.Popen, at: Path) -> str | None:
        """Follow a child until the time is over (None), it dies, or it hangs."""
        selector = selectors.DefaultSelector()
        selector.register(child.stdout, selectors.EVENT_READ)
        seed, since = b"", time.monotonic()
        while time.monotonic() < self.stop:
            if selector.select(timeout=1):
                line = child.stdout.readline()
                if not line:
                    return f"the process ended with status {child.wait()}"
                self.hear(json.loads(line))
            if at.read_bytes() != seed:
                seed, since = at.read_bytes(), time.monotonic()
            elif time.monotonic() - since > SECONDS_OF_A_CALL[self.device]:
                return f"no answer within {SECONDS_OF_A_CALL[self.device]} seconds"
            if time.monotonic() - self.told > 10:
                self.told = time.monotonic()
                self.tell(f"{max(0, int(self.stop - self.told))} s left")
        return None

    def tell(self, more: str) -> None:
        calls, kinds = sum(self.endings.values()), len(self.found)
        print(f"{calls} calls, {kinds} kinds of faults, {more}", flush=True)

    def hear(self, message: dict[str, Any]) -> None:
        if "fault" in message:
            self.write_down(message["seed"], message["fault"])
        self.endings.update(message.get("endings", {}))

    def write_down(self, seed: int, fault: str) -> None:
        """Tell of a fault; keep the call where no other of its kind was found."""
        from fuzz_calls import draw

        call = draw(seed)
        kind = f"{call['op']}: {re.sub(r'[0-9][0-9.e+-]*', '#', fault)[:120]}"
        if kind in self.found:
            return
        self.found[kind] = seed
        print(f"FAULT, seed {seed}, {call['op']}: {fault}\n{json.dumps(call)}", flush=True)
        with CORPUS.open("a") as corpus:
            corpus.write(json.dumps({"found": fault.partition("\n")[0][:200], "call": call}) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=int(time.time()) * 10**6)
    parser.add_argument("--device", choices=list(SECONDS_OF_A_CALL), default="cpu")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.seed, options.device, options.child)
        return 0
    print(
        f"Calls from seed {options.seed} on, {options.seconds:.0f} seconds, {options.device}",
        flush=True,
    )
    return Fuzz(options.seed, options.device, options.seconds).run()


if __name__ == "__main__":
    sys.exit(main())
