"""split_shared_prefix in Triton: one program finds out whether one sequence shares, and cuts its prefix off."""

import triton
import triton.language as tl

from torch_pagedkv.triton_kernels.device_guard import device_of

_SEQUENCES = 128
_COLUMNS = 1024


@triton.jit
def _sees_all(seqused_k, cu_seqlens_q, length_stride, start_stride, sequence, mask, prefix_len, CAUSAL: tl.constexpr):
    """Whether every query of a sequence sees the whole prefix, and there is one."""
    seen = tl.load(seqused_k + sequence * length_stride, mask=mask, other=0).to(tl.int64)
    if cu_seqlens_q is None:
        return mask & (seen >= prefix_len)  # its one query is its last token
    else:
        start = tl.load(cu_seqlens_q + sequence * start_stride, mask=mask, other=0).to(tl.int64)
        stop = tl.load(cu_seqlens_q + (sequence + 1) * start_stride, mask=mask, other=0).to(tl.int64)
        if CAUSAL:
            seen = seen - (stop - start) + 1
        return mask & (stop > start) & (seen >= prefix_len)


@triton.jit(
    do_not_specialize=[
        "num_sequences", "num_tokens", "max_blocks", "num_prefix_blocks", "block_size", "table_stride",
    ],
    do_not_specialize_on_alignment=[
        "leader_table", "one_length", "one_range", "rest_table", "rest_lengths", "shares",
        "block_table", "seqused_k", "cu_seqlens_q",
    ],
)  # fmt: skip
def _split_kernel(
    leader_table, one_length, one_range, rest_table, rest_lengths, shares,
    block_table, seqused_k, cu_seqlens_q, length_stride, start_stride, table_stride,
    num_sequences, num_tokens, max_blocks, num_prefix_blocks, block_size,
    CAUSAL: tl.constexpr, SEQUENCES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0).to(tl.int64)
    prefix_len = num_prefix_blocks.to(tl.int64) * block_size
    # The first sequence that sees it all says what the prefix is.
    leader = num_sequences.to(tl.int64)
    for first in range(0, num_sequences, SEQUENCES):
        sequence = first + tl.arange(0, SEQUENCES).to(tl.int64)
        sees = _sees_all(
            seqused_k, cu_seqlens_q, length_stride, start_stride, sequence, sequence < num_sequences,
            prefix_len, CAUSAL,
        )  # fmt: skip
        leader = tl.minimum(leader, tl.min(tl.where(sees, sequence, num_sequences), 0))
    is_there = leader < num_sequences
    leader = tl.where(is_there, leader, 0)
    is_first = own == 0

    column = tl.arange(0, COLUMNS)
    differing = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, num_prefix_blocks, COLUMNS):
        in_prefix = first + column < num_prefix_blocks
        ours = tl.load(block_table + own * table_stride + first + column, mask=in_prefix, other=0)
        theirs = tl.load(block_table + leader * table_stride + first + column, mask=in_prefix, other=0)
        differing += (ours != theirs).to(tl.int32)
        tl.store(leader_table + first + column, theirs, mask=in_prefix & is_first)
    sees = _sees_all(
        seqused_k, cu_seqlens_q, length_stride, start_stride, own, own >= 0, prefix_len, CAUSAL,
    )  # fmt: skip
    is_sharing = sees & (tl.sum(differing, 0) == 0)

    skipped = tl.where(is_sharing, num_prefix_blocks, 0)
    for first in range(0, max_blocks, COLUMNS):
        source = first + column + skipped
        # Past the end there is no block: a length past the table is hidden, as ever.
        block = tl.load(block_table + own * table_stride + source, mask=source < max_blocks, other=-1)
        tl.store(rest_table + own * max_blocks + first + column, block, mask=first + column < max_blocks)
    length = tl.load(seqused_k + own * length_stride)
    tl.store(rest_lengths + own, length - tl.where(is_sharing, prefix_len, 0))
    tl.store(shares + own, is_sharing)
    if is_first:
        tl.store(one_length, tl.where(is_there, prefix_len, 0))
        tl.store(one_range, 0)
        tl.store(one_range + 1, num_tokens)


def launch(
    leader_table, one_length, one_range, rest_table, rest_lengths, shares,
    block_table, seqused_k, cu_seqlens_q, num_prefix_blocks, block_size, num_tokens, causal,
) -> None:  # fmt: skip
    num_sequences, max_blocks = block_table.shape
    with device_of(block_table):
        _split_kernel[(num_sequences,)](
            leader_table, one_length, one_range, rest_table, rest_lengths, shares,
            block_table, seqused_k, cu_seqlens_q,
            seqused_k.stride(0), 0 if cu_seqlens_q is None else cu_seqlens_q.stride(0), block_table.stride(0),
            num_sequences, num_tokens, max_blocks, num_prefix_blocks, block_size, causal, _SEQUENCES, _COLUMNS,
        )  # fmt: skip
