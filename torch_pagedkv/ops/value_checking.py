"""The checking mode: values of index tensors on CUDA raise what they raise on CPU.

Kernels on CUDA never leave the pool and raise nothing, because reading a value would wait for the
device. While the mode is on, a call does so first. While it is off, a call reads one bool.
"""

from __future__ import annotations

import os

import torch

from torch_pagedkv.reference import value_checks

VARIABLE = "TORCH_PAGEDKV_CHECKS"

enabled = os.environ.get(VARIABLE, "0") not in ("", "0")


class checks:
    """Switch the checking mode on or off for the process, or for the time of a ``with`` block.

    On CUDA a slot past the pool, a block id outside of it, a length or a prefix sum out of range is
    skipped or clamped: the kernels do not leave the pool and say nothing. In the checking mode a
    call first reads those values, which waits for the device, and raises the ValueError that the
    same call raises on CPU, with nothing written. On CPU values are always checked.

    The mode holds for all threads, for eager calls and for those inside compiled functions. It
    starts switched on if ``TORCH_PAGEDKV_CHECKS=1`` is in the environment. Leave it off where speed
    counts.

    Args:
        enabled: whether calls on CUDA check values from now on.

    Returns:
        An object to ignore, or to use in a ``with`` statement: at the end of the block the mode is
        what it was before.

    Raises:
        TypeError: enabled is no bool.

    In the checking mode the ops raise NotImplementedError while a CUDA graph is captured: a graph
    that is replayed could check nothing. Capture with the mode off, check the same steps eagerly.

    Not checked:
        Values that are no index: NaN in keys, scales or queries is legal in any mode.

    Example:
        >>> import torch, torch_pagedkv
        >>> with torch_pagedkv.checks(True):
        ...     slots = torch_pagedkv.compute_slot_mapping(
        ...         torch.tensor([[7, 2, 9]]), torch.tensor([21]), None, 16, 1
        ...     )
        >>> slots.tolist()
        [36]

    Source: ours; the form is that of ``torch.autograd.set_detect_anomaly``.
    """

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(f"checks: enabled must be a bool, got {type(enabled).__name__}")
        self.before = _switch(enabled)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        _switch(self.before)


def _switch(on: bool) -> bool:
    """Set the mode and return what it was."""
    global enabled
    before, enabled = enabled, on
    return before


def check_write(op: str, slot_mapping, key_cache) -> None:
    """Check the values that a write reads."""
    _refuse_capture(op, slot_mapping)
    num_blocks, block_size = key_cache.shape[:2]
    value_checks.check_slots(op, slot_mapping, num_blocks * block_size)


def check_batch(op: str, block_table, seqused_k, cu_seqlens_q, **sizes: int | None) -> None:
    """Check the values that describe a batch, of the ``sizes`` that the reference's check takes."""
    _refuse_capture(op, block_table)
    value_checks.check_batch(op, block_table, seqused_k, cu_seqlens_q, **sizes)


def check_copies(op: str, key_cache, src_blocks, dst_blocks) -> None:
    """Check the ids of blocks to copy."""
    _refuse_capture(op, src_blocks)
    value_checks.check_block_copies(op, src_blocks, dst_blocks, key_cache.shape[0])


def _refuse_capture(op: str, tensor: torch.Tensor) -> None:
    """Raise before a read-back would spoil the capture with an error that names nothing."""
    if not tensor.is_cuda:
        return
    with torch.cuda.device(tensor.device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise NotImplementedError(
            f"{op}: checks must be off while a CUDA graph is captured, because values can be read "
            f"in eager calls only, got checks that {VARIABLE} or torch_pagedkv.checks switched on"
        )
