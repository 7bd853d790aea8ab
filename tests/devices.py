"""The mark of tests that need a GPU, whatever else they take."""

from __future__ import annotations

import pytest
import torch

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA: no GPU on this machine")
