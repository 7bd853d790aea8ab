"""compute_slot_mapping in Triton: one lane finds the slot of one token."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of
from torch_pagedkv.triton_kernels.grid_sizes import cdiv

_TOKENS = 128


@triton.jit
def _last_start_at_or_before(cu_seqlens_q, stride, token, num_sequences):
    """The last sequence whose first row is at or before each token; -1 before the first one.

    Of sequences with one start all but the last have no query, so it is the one that owns the row.
    """
    low = tl.zeros_like(token)  # sequences known to start at or before the token
    high = low + num_sequences
    span = num_sequences
    while span > 0:  # high - low is never more than span, and lanes that are done stay as they are
        searching = low < high
        middle = (low + high) // 2
        start = tl.load(cu_seqlens_q + middle * stride, mask=searching, other=0).to(tl.int64)
        low = tl.where(searching & (start <= token), middle + 1, low)
        high = tl.where(searching & (start > token), middle, high)
        span = span // 2
    return low - 1


@triton.jit(
    do_not_specialize=[
        "table_stride", "num_tokens", "num_sequences", "max_positions", "block_size",
    ],
    do_not_specialize_on_alignment=["block_table", "seqused_k", "cu_seqlens_q"],
)  # fmt: skip
def _slot_mapping_kernel(
    slot_mapping, block_table, seqused_k, cu_seqlens_q, length_stride, start_stride,
    table_stride, num_tokens, num_sequences, max_positions, block_size, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    in_range = token < num_tokens
    if cu_seqlens_q is None:
        sequence = token
        stop = token + 1
        owned = in_range
    else:
        sequence = _last_start_at_or_before(cu_seqlens_q, start_stride, token, num_sequences)
        owned = in_range & (sequence >= 0)
        following = cu_seqlens_q + (sequence + 1) * start_stride
        stop = tl.load(following, mask=owned, other=0).to(tl.int64)
        stop = tl.minimum(stop, num_tokens)
        owned = owned & (token < stop)
    length = tl.load(seqused_k + sequence * length_stride, mask=owned, other=0).to(tl.int64)
    length = tl.minimum(tl.maximum(length, 0), max_positions)
    position = length - (stop - token)
    owned = owned & (position >= 0)
    entry = block_table + sequence * table_stride + position // block_size
    block = tl.load(entry, mask=owned, other=-1).to(tl.int64)
    slot = tl.where(block >= 0, block * block_size + position % block_size, -1)
    tl.store(slot_mapping + token, slot, mask=in_range)


def launch(slot_mapping, block_table, seqused_k, cu_seqlens_q, block_size: int) -> None:
    num_tokens = slot_mapping.shape[0]
    num_sequences, max_blocks = block_table.shape
    if num_tokens == 0:
        return
    if num_sequences == 0:
        slot_mapping.fill_(-1)
        return
    with device_of(slot_mapping):
        _slot_mapping_kernel[(cdiv(num_tokens, _TOKENS),)](
            slot_mapping, block_table, seqused_k, cu_seqlens_q,
            seqused_k.stride(0), 0 if cu_seqlens_q is None else cu_seqlens_q.stride(0),
            block_table.stride(0), num_tokens, num_sequences, max_blocks * block_size, block_size,
            _TOKENS,
        )  # fmt: skip
