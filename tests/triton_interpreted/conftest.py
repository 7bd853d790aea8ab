"""Runs the tests of this folder on the Triton kernels, in Triton's interpreter, on CPU tensors.

Triton interprets or compiles for the whole life of a process, so these tests need one of their own:
``TRITON_INTERPRET=1 pytest tests/triton_interpreted``. tests/test_triton_interpreter.py starts it;
without the variable nothing here is collected.
"""

from __future__ import annotations

import importlib
import os
import re

import numpy as np
import pytest
import torch

IS_INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
# Cases that take seconds to interpret and whose like is among the others.
SLOW = re.compile(
    r"long_chunks|eight_splits|block_size_(256|528|784)|_of_1|head_dim_(40|56|72|100|112|120|160|192)"
    r"|layout_(unbind|layers|packed|mixed)|cpu-prefix_sums|1000.0|no_window\[cpu-0|_float(16|32)\]"
    r"|-(plain|softcap|window)-[128]\]"
)
GATHERED = re.compile(r"e4m3_one|e5m2_none|value_dim|exact_table|block_size_7|layout_(HND|padded)|empty")
collect_ignore_glob = [] if IS_INTERPRETING else ["test_*.py"]


def round_bfloat16_to_nearest() -> None:
    """Make the interpreter convert and multiply bfloat16 as GPUs do.

    It keeps bfloat16 as uint16, truncates when it makes one, loses bits of subnormal ones when it
    widens them, and multiplies the integers in tl.dot.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    dot, truncate, extend = builder.create_dot, builder.create_fp_trunc, builder.create_fp_ext

    def to_float32(operand):
        if operand.dtype.scalar != tl.bfloat16:
            return operand
        wide = operand.data.astype(np.uint32) << 16
        return handle(wide.view(np.float32), tl.float32)

    def create_dot(self, a, b, accumulator, *rest):
        return dot(self, to_float32(a), to_float32(b), accumulator, *rest)

    def create_fp_trunc(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.bfloat16)
            return handle(rounded.view(torch.int16).numpy().view(np.uint16), target.scalar)
        return truncate(self, source, target)

    def create_fp_ext(self, source, target):
        wide = to_float32(source)
        return wide if wide.dtype.scalar == target.scalar else extend(self, source, target)

    builder.create_dot, builder.create_fp_trunc = create_dot, create_fp_trunc
    builder.create_fp_ext = create_fp_ext


def put_triton_in_place_of_cpp() -> None:
    from torch_pagedkv import native
    from torch_pagedkv.ops.kernel_choice import triton_launcher

    for stem in native.STEMS:
        importlib.import_module(f"torch_pagedkv.ops.{stem}").native_kernel = triton_launcher


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item.nodeid for item in items if "triton_interpreted" in item.nodeid]
    slow = {name for name in here if "cuda" in name or SLOW.search(name)}
    slow |= {name for name in here if "test_gathered" in name and not GATHERED.search(name)}
    items[:] = [item for item in items if item.nodeid not in slow]


if IS_INTERPRETING:
    round_bfloat16_to_nearest()
    put_triton_in_place_of_cpp()
