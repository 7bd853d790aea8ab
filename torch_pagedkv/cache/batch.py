"""The index tensors of a batch: made for one step, or of fixed shapes and refilled in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from torch_pagedkv.cache.addressing import NO_BLOCK
from torch_pagedkv.cache.argument_checks import check_integer
from torch_pagedkv.cache.host_layout import NO_SLOT, check_fits, check_sequences, lay_out
from torch_pagedkv.ops.compute_slot_mapping import compute_slot_mapping


@dataclasses.dataclass(frozen=True, eq=False)
class PagedBatch:
    """Say where the tokens of a batch of sequences live: the four index tensors of the ops.

    Token i of sequence s's query_len new ones stands at position
    ``p = i + seqused_k[s] - query_len`` and is written to the slot
    ``block_table[s, p // block_size] * block_size + p % block_size``, which is its element of
    slot_mapping. One batch serves all layers.

    There are two forms, and which one a batch has never depends on lengths, so a compiled function
    sees no change of form by chance: with ``cu_seqlens_q`` each sequence has any number of new
    tokens, 0 included; where it is None each has exactly one (decode).

    ``from_sequences`` makes the tensors for one step. ``fixed`` makes them with fixed shapes, and
    ``update_`` refills them in place: what a CUDA graph needs, as their addresses never change. A
    batch is a pytree node, so it is an argument like any other for
    ``torch.compile(fullgraph=True)`` and ``torch.export``.

    Args:
        block_table: [num_sequences, max_blocks] int32, the block ids of each sequence, padded with
            -1; what stands past ``ceil(seqused_k / block_size)`` is never read.
        seqused_k: [num_sequences] int32, tokens of each sequence in the cache, new ones included;
            0: a padding sequence.
        cu_seqlens_q: [num_sequences + 1] int32, prefix sums of the numbers of new tokens, or None.
        slot_mapping: [num_tokens] int64, the slot of each new token; negative: none.

    Returns:
        A batch whose fields can not be rebound; their elements can be written.

    Not checked:
        The tensors given to the class itself: the ops check shapes and dtypes whenever they run.

    Example:
        >>> batch = PagedBatch.from_sequences(
        ...     [[7, 2, 9], [4]], seq_lens=[21, 3], query_lens=[1, 3], block_size=16
        ... )
        >>> batch.slot_mapping
        tensor([36, 64, 65, 66])
        >>> batch.block_table
        tensor([[ 7,  2,  9],
                [ 4, -1, -1]], dtype=torch.int32)
        >>> batch.seqused_k, batch.cu_seqlens_q
        (tensor([21,  3], dtype=torch.int32), tensor([0, 1, 4], dtype=torch.int32))

    Source: slot_mapping and block_table as in vLLM, the other two as in FlashAttention.
    """

    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    slot_mapping: torch.Tensor

    @property
    def num_sequences(self) -> int:
        """Rows of the block table, padding included: a shape, never read from the device."""
        return self.block_table.shape[0]

    @property
    def num_tokens(self) -> int:
        """Elements of slot_mapping, padding included: a shape, never read from the device."""
        return self.slot_mapping.shape[0]

    @classmethod
    def from_sequences(
        cls,
        block_tables: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        *,
        block_size: int,
        device: torch.device | str | int | None = None,
    ) -> PagedBatch:
        """Build the batch of one step from the bookkeeping of its sequences.

        Everything is computed on the host; each tensor is copied once, for CUDA from pinned memory
        and without waiting for it.

        Args:
            block_tables: for each sequence its block ids in order, at least
                ``ceil(seq_len / block_size)`` of them. Ids before the new tokens may be negative
                (released blocks, which a sliding window no longer sees).
            seq_lens: tokens of each sequence, the new ones included.
            query_lens: new tokens of each sequence, 0 to its seq_len; None: the decode form, one
                new token each and no cu_seqlens_q.
            block_size: tokens in a block.
            device: None: torch's default device.

        Returns:
            A new batch without padding: max_blocks is the longest table, num_tokens the sum of
            query_lens.

        Raises:
            ValueError: the arguments have different lengths, a table is too short, a new token's
                block is negative, or a length is out of range.
            TypeError: an id or a length is not an integer.
            RuntimeError: called inside a CUDA graph capture.

        Not checked:
            Ids at or past the pool's num_blocks, and two sequences that write to one block.
        """
        owner = "PagedBatch.from_sequences"
        sequences = check_sequences(owner, block_tables, seq_lens, query_lens, block_size)
        device = torch.get_default_device() if device is None else torch.device(device)
        # Inference tensors could not be written outside of inference mode by advance_.
        with torch.inference_mode(False):
            host = lay_out(
                sequences,
                num_sequences=len(sequences.tables),
                max_blocks=max(map(len, sequences.tables), default=0),
                num_tokens=len(sequences.slots),
                is_decode=query_lens is None,
                pin_memory=device.type == "cuda",
            )
            return cls(*host).to(device, non_blocking=True)

    @classmethod
    def fixed(
        cls,
        max_batch: int,
        max_blocks: int,
        max_tokens: int | None = None,
        *,
        device: torch.device | str | int | None = None,
    ) -> PagedBatch:
        """Make a batch of fixed shapes, all padding, for ``update_`` to refill.

        Padding does nothing: slots of -1 are not written, sequences of length 0 see no key, and
        rows past ``cu_seqlens_q[-1]`` give 0.

        Args:
            max_batch: sequences that fit.
            max_blocks: blocks of a sequence that fit.
            max_tokens: new tokens that fit, of all sequences together; None: the decode form, one
                for each sequence and no cu_seqlens_q.
            device: None: torch's default device.

        Returns:
            A new batch: num_sequences is max_batch, num_tokens max_tokens (or max_batch).

        Raises:
            ValueError, TypeError: a size is negative or not an integer.

        Example:
            >>> batch = PagedBatch.fixed(2, max_blocks=3)
            >>> batch.update_([[7, 2, 9]], seq_lens=[21], block_size=16)
            >>> batch.slot_mapping, batch.seqused_k
            (tensor([36, -1]), tensor([21,  0], dtype=torch.int32))
        """
        owner = "PagedBatch.fixed"
        num_sequences = check_integer(owner, "max_batch", max_batch, 0)
        max_blocks = check_integer(owner, "max_blocks", max_blocks, 0)
        num_tokens = num_sequences
        if max_tokens is not None:
            num_tokens = check_integer(owner, "max_tokens", max_tokens, 0)
        # Inference tensors could not be written outside of inference mode by update_.
        with torch.inference_mode(False):
            int32 = {"dtype": torch.int32, "device": device}
            return cls(
                block_table=torch.full((num_sequences, max_blocks), NO_BLOCK, **int32),
                seqused_k=torch.zeros(num_sequences, **int32),
                cu_seqlens_q=None if max_tokens is None else torch.zeros(num_sequences + 1, **int32),
                slot_mapping=torch.full((num_tokens,), NO_SLOT, dtype=torch.int64, device=device),
            )

    def update_(
        self,
        block_tables: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        query_lens: Sequence[int] | None = None,
        *,
        block_size: int,
    ) -> None:
        """Refill the tensors in place with the sequences of the next step, and pad the rest.

        Every element is written, so nothing of the step before survives; shapes and addresses stay.
        On CUDA nothing is allocated on the device, and the host does not wait.
        The copies are ordered on the current stream: call it on the stream that replays the graph.

        Args:
            block_tables, seq_lens, block_size: as in ``from_sequences``; at most num_sequences
                sequences of at most max_blocks blocks.
            query_lens: as in ``from_sequences``, together at most num_tokens; None: one each, which
                is all that the decode form takes.

        Raises:
            ValueError: as ``from_sequences``, or it does not fit; nothing has changed.
            TypeError, RuntimeError: as ``from_sequences``; nothing has changed.

        Not checked:
            As ``from_sequences``.
        """
        owner = "PagedBatch.update_"
        sequences = check_sequences(owner, block_tables, seq_lens, query_lens, block_size)
        num_sequences, max_blocks = self.block_table.shape
        check_fits(owner, "block_tables", "sequences", len(sequences.tables), num_sequences)
        for i, table in enumerate(sequences.tables):
            check_fits(owner, f"block_tables[{i}]", "blocks", len(table), max_blocks)
        is_decode = self.cu_seqlens_q is None
        if is_decode and any(n != 1 for n in sequences.query_lens):
            raise ValueError(
                f"{owner}: query_lens must be 1 for each sequence of a batch without cu_seqlens_q, "
                f"got {sequences.query_lens}"
            )
        check_fits(owner, "query_lens", "tokens in total", len(sequences.slots), self.num_tokens)
        host = lay_out(
            sequences,
            num_sequences=num_sequences,
            max_blocks=max_blocks,
            num_tokens=self.num_tokens,
            is_decode=is_decode,
            pin_memory=self.block_table.is_cuda,
        )
        for tensor, filled in zip(self._fields(), host, strict=True):
            if tensor is not None:
                tensor.copy_(filled, non_blocking=True)

    def advance_(self, *, block_size: int) -> None:
        """Append one token to every live sequence of a decode batch, on the device and in place.

        ``seqused_k += 1`` where it is above 0, and slot_mapping follows from the block table.
        Nothing goes through the host, so it can be part of a CUDA graph or of a compiled step. The
        block table is not touched: before a sequence enters a new block, write the block's id to
        its row, or call ``update_``.

        Args:
            block_size: tokens in a block.

        Raises:
            ValueError: the batch has cu_seqlens_q; on CPU also if a sequence has no block for the
                token (nothing has changed then).

        Not checked:
            On CUDA a token that has no block gets slot -1: it is not stored.

        Example:
            >>> batch = PagedBatch.from_sequences([[7, 2, 9]], seq_lens=[20], block_size=16)
            >>> batch.advance_(block_size=16)
            >>> batch.seqused_k, batch.slot_mapping
            (tensor([21], dtype=torch.int32), tensor([36]))
        """
        if self.cu_seqlens_q is not None:
            raise ValueError("PagedBatch.advance_: cu_seqlens_q must be None (a decode batch), got a tensor")
        num_sequences, max_blocks = self.block_table.shape
        lengths = self.seqused_k + self.seqused_k.clamp(0, 1)
        slots = compute_slot_mapping(self.block_table, lengths, None, block_size, num_sequences)
        # On CUDA the op clamps lengths to the table: the token would overwrite the one before it.
        slots.masked_fill_(lengths > max_blocks * block_size, NO_SLOT)
        self.seqused_k.copy_(lengths)
        self.slot_mapping.copy_(slots)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PagedBatch:
        """Return the batch on a device; tensors that are there already are not copied."""
        return PagedBatch(
            *(None if tensor is None else tensor.to(device, non_blocking=non_blocking) for tensor in self._fields())
        )

    def _fields(self) -> tuple[torch.Tensor | None, ...]:
        return self.block_table, self.seqused_k, self.cu_seqlens_q, self.slot_mapping


torch.export.register_dataclass(PagedBatch, serialized_type_name="torch_pagedkv.PagedBatch")
# It holds tensors only: files that carry one, exported programs too, load with weights_only.
torch.serialization.add_safe_globals([PagedBatch])
