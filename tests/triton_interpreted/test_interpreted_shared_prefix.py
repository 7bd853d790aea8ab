"""Tests of the bookkeeping of cascade_attention, on the interpreted Triton kernel."""

import pytest

import test_shared_prefix
from test_shared_prefix import (  # noqa: F401
    test_dtypes_of_the_batch_are_kept,
    test_equals_reference,
    test_long_tables,
)
from torch_pagedkv.ops import shared_prefix


@pytest.fixture(autouse=True)
def on_the_kernel(monkeypatch):
    monkeypatch.setattr(test_shared_prefix, "OP", shared_prefix._cuda)
