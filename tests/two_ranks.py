"""Run the ``check_*`` functions of a module on two ranks, and collect what each of them says."""

from __future__ import annotations

import datetime
import functools
import importlib
import json
import os
import tempfile
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 2


def checks_of(module: str) -> list[str]:
    """Return the names of a module's checks."""
    return [name for name in vars(importlib.import_module(module)) if name.startswith("check_")]


@functools.cache
def outcomes(module: str, device: str) -> dict[str, str]:
    """Return for each check "" or the traceback of the first rank that failed; all checks share two processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_work, args=(module, device, folder), nprocs=NUM_RANKS)
        found = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(NUM_RANKS)]
    return {name: next((f"rank {r}: {f[name]}" for r, f in enumerate(found) if f[name]), "") for name in found[0]}


def assert_passes(module: str, check: str, device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < NUM_RANKS:
        pytest.skip("CUDA: fewer than two GPUs")
    outcome = outcomes(module, device)[check]
    assert not outcome, outcome


def _work(rank: int, module: str, device: str, folder: str) -> None:
    if device == "cuda":
        # NVLink multicast is not to be had in every virtual machine, and NCCL hangs where it only seems to be.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        torch.cuda.set_device(rank)
    torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=datetime.timedelta(seconds=120),
    )
    mesh = dist.init_device_mesh(device, (NUM_RANKS,), mesh_dim_names=("ranks",))
    found = {}
    for name in checks_of(module):
        torch.manual_seed(0)
        torch._dynamo.reset()
        try:
            getattr(importlib.import_module(module), name)(mesh)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
    Path(folder, str(rank)).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
