"""Registers of matrix products that are on their way, in the machine code of prefill attention.

Hopper's warpgroup products read and write registers after their instructions were issued. In a loop whose
products end in its next iteration the compiler does not keep their registers free, and what it then makes of
the kernel is wrong now and then only. Nothing but the machine code tells.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import triton

from torch_pagedkv import native

LIBRARY = native.library_path(native.CUDA_LIBRARY_NAME)
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

pytestmark = [
    pytest.mark.skipif(LIBRARY is None, reason="CUDA C++: the library was not built (make cuda)"),
    pytest.mark.skipif(not DISASSEMBLER.is_file(), reason="no cuobjdump in this triton"),
]

# Opcodes whose first register is read, not written.
READERS = re.compile(r"ST|BAR|SYNCS|BRA|[A-Z]*SETP|PLOP")
# The weights are the left matrix, in registers: sums, weights and the number of columns.
OF_VALUES = re.compile(r"HGMMA\.64x(\d+)x16\S* R(\d+), R(\d+), gdesc")
WAIT_FOR_ALL = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def kernels() -> dict[str, list[str]]:
    """Return the instructions of each prefill kernel for Hopper."""
    command = [str(DISASSEMBLER), "-sass", "-arch", "sm_90a", str(LIBRARY)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = {}
    for function in re.split(r"\n\s*Function : ", text)[1:]:
        name = function.split("\n", 1)[0]
        if "prefill_attention" in name:
            lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", function)
            found[name] = [re.sub(r"\s+", " ", line).strip() for line in lines]
    return found


def written(instruction: str) -> set[int]:
    """Return the registers that an instruction writes."""
    match = re.match(r"(?:@!?U?P\d )?(\S+) (?:U?P[\dT]+, )*R(\d+)", instruction)
    if match is None or READERS.match(match[1]):
        return set()
    width = 4 if ".128" in match[1] else 2 if re.search(r"\.64|WIDE|CS2R", match[1]) else 1
    return set(range(int(match[2]), int(match[2]) + width))


def test_nothing_writes_registers_of_products_on_their_way():
    checked = kernels()
    if not checked:
        pytest.skip("the library has no code for Hopper")
    for name, code in checked.items():
        products = [tuple(map(int, match.groups())) for match in map(OF_VALUES.search, code) if match]
        columns, sums = products[0][:2]
        busy = set(range(sums, sums + columns // 2))
        for _, _, weights in products:
            busy |= set(range(weights, weights + 4))
        # The loop begins behind the wait for the first scores. Products with the values of the iteration before
        # are on their way until the next wait for all.
        waits = [index for index, line in enumerate(code) if WAIT_FOR_ALL in line]
        last = max(index for index, line in enumerate(code[: waits[2]]) if "gsb0, 0x1" in line)
        back = next(index for index in range(last, waits[2]) if re.match(r"(@!?U?P\d )?BRA", code[index]))
        for line in code[waits[0] + 1 : waits[1]] + code[last:back]:
            assert not written(line) & busy, f"{name}: {line}"
