"""From the bookkeeping of sequences, plain lists, to checked and padded tensors on the host."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from torch_pagedkv.cache.addressing import NO_BLOCK, slots_between
from torch_pagedkv.cache.argument_checks import check_integer, check_integers

NO_SLOT = -1


class Sequences(NamedTuple):
    """Checked bookkeeping of a batch's sequences, plain Python."""

    tables: list[array]
    seq_lens: list[int]
    query_lens: list[int]
    slots: list[int]


class HostTensors(NamedTuple):
    """The fields of a batch, in their order."""

    block_table: torch.Tensor
    seqused_k: torch.Tensor
    cu_seqlens_q: torch.Tensor | None
    slot_mapping: torch.Tensor


def check_sequences(owner: str, block_tables: Any, seq_lens: Any, query_lens: Any, block_size: Any) -> Sequences:
    """Check the lists and find the new tokens' slots; query_lens None: one token each."""
    block_size = check_integer(owner, "block_size", block_size, 1)
    tables = _check_tables(owner, block_tables)
    lengths = check_integers(owner, "seq_lens", seq_lens, 0)
    queries = [1] * len(tables)
    if query_lens is not None:
        queries = check_integers(owner, "query_lens", query_lens, 0)
    for name, values in (("seq_lens", lengths), ("query_lens", queries)):
        if len(values) != len(tables):
            raise ValueError(
                f"{owner}: {name} must have one element for each of {len(tables)} block_tables, got {len(values)}"
            )
    slots: list[int] = []
    for i, (table, length, query) in enumerate(zip(tables, lengths, queries, strict=True)):
        if length > len(table) * block_size:
            raise ValueError(
                f"{owner}: block_tables[{i}] must have {-(-length // block_size)} blocks of "
                f"{block_size} for {length} tokens, got {len(table)}"
            )
        if length > torch.iinfo(torch.int32).max:
            raise ValueError(f"{owner}: seq_lens[{i}] must fit into int32, got {length}")
        if query > length:
            raise ValueError(f"{owner}: seq_lens[{i}] must include {query} new tokens, got {length}")
        start = length - query
        written = table[start // block_size : -(-length // block_size)] if query else ()
        if min(written, default=0) < 0:
            raise ValueError(f"{owner}: block_tables[{i}] must hold ids >= 0 for its new tokens, got {min(written)}")
        slots.extend(slots_between(table, start, length, block_size))
    return Sequences(tables, lengths, queries, slots)


def _check_tables(owner: str, block_tables: Iterable[Any]) -> list[array]:
    if isinstance(block_tables, (str, bytes)) or not isinstance(block_tables, Iterable):
        raise TypeError(f"{owner}: block_tables must be a sequence of lists of block ids, got {block_tables!r}")
    tables = []
    for i, table in enumerate(block_tables):
        try:
            if isinstance(table, (str, bytes)):  # an array would take bytes for its raw memory
                raise TypeError
            tables.append(array("i", table.tolist() if hasattr(table, "tolist") else table))
        except TypeError:
            raise TypeError(f"{owner}: block_tables[{i}] must be a sequence of block ids, got {table!r}") from None
        except OverflowError:
            raise ValueError(f"{owner}: block_tables[{i}] must hold ids that fit into int32, got {table!r}") from None
    return tables


def check_fits(owner: str, name: str, what: str, needed: int, available: int) -> None:
    if needed > available:
        raise ValueError(f"{owner}: {name} must have at most {available} {what}, got {needed}")


def lay_out(
    sequences: Sequences,
    *,
    num_sequences: int,
    max_blocks: int,
    num_tokens: int,
    is_decode: bool,
    pin_memory: bool,
) -> HostTensors:
    """Lay the sequences out in CPU tensors of the given sizes, padded."""
    if pin_memory and torch.cuda.is_current_stream_capturing():
        # The graph would keep the address of host memory that is gone by the time of its replay.
        raise RuntimeError("PagedBatch: a batch must be filled before a CUDA graph capture, not in it")
    padding = num_sequences - len(sequences.tables)
    ids = array("i")
    for table in sequences.tables:
        ids.extend(table)
        ids.extend(array("i", [NO_BLOCK]) * (max_blocks - len(table)))
    ids.extend(array("i", [NO_BLOCK]) * (max_blocks * padding))
    starts = [0]
    for query in sequences.query_lens:
        starts.append(starts[-1] + query)
    starts += starts[-1:] * padding
    slots = sequences.slots + [NO_SLOT] * (num_tokens - len(sequences.slots))
    lengths = sequences.seq_lens + [0] * padding
    return HostTensors(
        block_table=_host_tensor(ids, pin_memory).view(num_sequences, max_blocks),
        seqused_k=_host_tensor(array("i", lengths), pin_memory),
        cu_seqlens_q=None if is_decode else _host_tensor(array("i", starts), pin_memory),
        slot_mapping=_host_tensor(array("q", slots), pin_memory),
    )


def _host_tensor(values: array, pin_memory: bool) -> torch.Tensor:
    dtype = torch.int32 if values.typecode == "i" else torch.int64
    # A new pinned tensor each time: a copy may still be reading the one before.
    tensor = torch.empty(len(values), dtype=dtype, device="cpu", pin_memory=pin_memory)
    if len(values) > 0:  # frombuffer takes no empty buffer
        tensor.copy_(torch.frombuffer(values, dtype=dtype))
    return tensor
