"""compute_slot_mapping on a CPU beside the formula in PyTorch, for one decode step.

python benchmarks/bench_compute_slot_mapping.py --threads 2 1
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import torch_pagedkv
from machine import compare


def cases() -> Iterator[tuple[str, dict[str, Callable[[], object]]]]:
    """Yield what is measured, with the calls that do the same; results are compared first."""
    for sequences in (1, 64, 1024):
        block_table = torch.randint(0, 10**6, (sequences, 128))
        lengths = torch.randint(1, 2048, (sequences,))

        def formula(block_table=block_table, lengths=lengths):
            positions = lengths - 1
            columns = (positions // 16).unsqueeze(1)
            return block_table.gather(1, columns).squeeze(1) * 16 + positions % 16

        def ours(block_table=block_table, lengths=lengths):
            return torch_pagedkv.compute_slot_mapping(block_table, lengths, None, 16, len(lengths))

        assert torch.equal(ours(), formula())
        yield f"{sequences} sequences", {"ours": ours, "formula": formula}


if __name__ == "__main__":
    compare("compute_slot_mapping", __doc__, cases)
