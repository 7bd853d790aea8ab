"""The memory of a paged KV cache: the key and value pools of all layers in one allocation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from torch_pagedkv.cache.argument_checks import check_integer, check_pairs
from torch_pagedkv.ops.argument_checks import (
    FP8_DTYPES,
    MAX_HEAD_DIM,
    POOL_DTYPES,
    check_optional_tensors,
    check_scales,
    name_dtypes,
)
from torch_pagedkv.ops.copy_blocks import copy_blocks

_OWNER = "PagedKVCache"
_LAYOUTS = ("NHD", "HND")
_GEOMETRY = (
    "num_layers",
    "num_blocks",
    "block_size",
    "num_kv_heads",
    "head_dim",
    "value_head_dim",
    "kv_layout",
)


class PagedKVCache:
    """Hold the key and value pools of every layer of a model.

    ``cache[layer]`` is the pair (key_cache, value_cache) that the ops and ``PagedAttention`` take.
    Its logical shape is always [num_blocks, block_size, num_kv_heads, head_dim]; the token with
    slot s lies at ``key_cache[s // block_size, s % block_size]`` of every layer. ``kv_layout`` says
    how that lies in memory: "NHD" is the contiguous form, "HND" the transposed view of a contiguous
    [num_blocks, num_kv_heads, block_size, head_dim].

    All pools are views of ``cache.storage``, one flat tensor: the key pools of all layers, then the
    value pools, each without gaps. It is never zeroed, and never has to be: what was not written
    can not change a bit of a result. A compiled function that is *given* views copies them; give it
    the cache, or ``cache.unaliased()``.

    A cache is an argument like any other for ``torch.compile(fullgraph=True)`` and
    ``torch.export``: it is a pytree node with the leaves storage, k_scale and v_scale. A module
    that wants to own the memory registers ``cache.storage`` as a buffer (``persistent=False``).

    Args:
        num_layers: layers that have a pool of their own.
        num_kv_heads: KV heads of a layer (on this device, where heads are sharded).
        head_dim: size of a key head, at most 512.
        block_size: tokens in a block.
        num_blocks: blocks in each pool; or
        memory_bytes: a budget in bytes for all pools together, of which as many whole blocks are
            made as fit. Exactly one of the two must be given.
        value_head_dim: size of a value head; None: head_dim.
        kv_layout: "NHD" or "HND".
        dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
        device: None: torch's default device.
        k_scale, v_scale: None (1) or float32 on the pools' device, one element or [num_kv_heads];
            only for fp8 pools. Kept, not copied, next to the elements that they belong to: hand
            ``cache.k_scale`` to whatever writes and reads (the ops, or ``PagedAttention`` when it
            is made), since ``cache[layer]`` does not carry it.

    Returns:
        ``len(cache)`` is num_layers, iterating gives the layers' pairs. ``nbytes``,
        ``bytes_per_block`` (of one block in all layers), ``dtype``, ``device`` and every argument
        but memory_bytes are attributes. The pairs are views made anew by each access.

    Raises:
        ValueError: a size, layout or scale is out of range, none or both of num_blocks and
            memory_bytes are given, or the budget does not hold one block.
        TypeError: a size is not an integer, a dtype not one of the above.

    Not checked:
        That the device has the memory (allocating raises torch's own error).

    Example:
        >>> import torch, torch_pagedkv
        >>> cache = torch_pagedkv.cache.PagedKVCache(2, 4, 64, memory_bytes=1_000_000)
        >>> cache.bytes_per_block, cache.num_blocks, cache.nbytes
        (32768, 30, 983040)
        >>> key_cache, value_cache = cache[0]
        >>> key_cache.shape
        torch.Size([30, 16, 4, 64])
        >>> allocator = torch_pagedkv.cache.BlockAllocator(cache.num_blocks)

    Source: one pool for all layers and layouts by stride as in vLLM and FlashInfer.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    kv_layout: str
    storage: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        block_size: int = 16,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
        value_head_dim: int | None = None,
        kv_layout: str = "NHD",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | int | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> None:
        self.num_layers = check_integer(_OWNER, "num_layers", num_layers, 1)
        self.num_kv_heads = check_integer(_OWNER, "num_kv_heads", num_kv_heads, 1)
        self.head_dim = check_integer(_OWNER, "head_dim", head_dim, 1, MAX_HEAD_DIM)
        self.value_head_dim = self.head_dim
        if value_head_dim is not None:
            self.value_head_dim = check_integer(_OWNER, "value_head_dim", value_head_dim, 1, MAX_HEAD_DIM)
        self.block_size = check_integer(_OWNER, "block_size", block_size, 1)
        if kv_layout not in _LAYOUTS:
            raise ValueError(f"{_OWNER}: kv_layout must be 'NHD' or 'HND', got {kv_layout!r}")
        self.kv_layout = kv_layout
        if dtype not in POOL_DTYPES:
            raise TypeError(f"{_OWNER}: dtype must be {name_dtypes(POOL_DTYPES)}, got {dtype}")
        elements = self._elements_per_block()
        self.num_blocks = _choose_num_blocks(num_blocks, memory_bytes, elements * dtype.itemsize)
        # Inference tensors could not be written outside of inference mode.
        with torch.inference_mode(False):
            self.storage = torch.empty(self.num_blocks * elements, dtype=dtype, device=device)
        check_optional_tensors(_OWNER, k_scale=k_scale, v_scale=v_scale)
        check_scales(_OWNER, self[0][0], dtype in FP8_DTYPES, k_scale, v_scale)
        self.k_scale, self.v_scale = k_scale, v_scale

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the pools."""
        return self.storage.dtype

    @property
    def device(self) -> torch.device:
        """Device of the pools."""
        return self.storage.device

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block: its keys and values in all layers."""
        return self._elements_per_block() * self.storage.element_size()

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return self.num_blocks * self.bytes_per_block

    def unaliased(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the pools of all layers as tensors that are no views to torch.

        They share the cache's memory and keep it alive, but each has a storage of its own: a compiled
        function that is given the pools of a layer writes them in place, where it copies one of two
        views of one tensor (pytorch issue 139628; with torch 2.11 the results are wrong besides). Call
        it once, outside of compiled functions, and keep the list.

        Returns:
            num_layers pairs (key_cache, value_cache) like ``cache[layer]``.

        Raises:
            ValueError: the pools have no memory (the device meta, FakeTensorMode).

        Not checked:
            What torch does not know it can not look after. A compiled function must not be given both
            these and the cache. Writes to one are not counted in the version of the other. Do not
            move ``cache.storage`` in place while they are in use (``share_memory_``, sending the cache
            to another process, ``resize_``): they would point to memory that is gone.

        Example:
            >>> cache = PagedKVCache(2, 1, 4, num_blocks=3, dtype=torch.float32)
            >>> pools = cache.unaliased()
            >>> _ = pools[1][0].fill_(7)
            >>> cache[1][0].unique().tolist(), pools[1][0].storage_offset()
            ([7.0], 0)

        Source: DLPack, by which tensors of other libraries share memory.
        """
        if self.storage.is_meta or isinstance(self.storage, FakeTensor):
            raise ValueError(
                "PagedKVCache.unaliased: the pools must have memory, got a "
                f"{type(self.storage).__name__} on {self.storage.device}"
            )
        with torch.inference_mode(False):
            return [tuple(torch.from_dlpack(p) if p.numel() else p for p in pair) for pair in self]

    def copy_blocks(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy blocks onto other blocks in every layer, one pair after the other.

        The step of copy-on-write, bit for bit: ``key_cache[destination] = key_cache[source]`` in
        each layer, values alike. Pairs without a chain in them are one call of the op
        ``copy_blocks`` for all layers together.

        Args:
            pairs: (source, destination) of each copy, such as ``BlockManager.reserve`` returns. A
                block that was a destination may be a source later on: the copies take place in
                their order.

        Raises:
            ValueError: an id is outside the pool, or a block is to be copied onto itself; nothing
                was copied.
            TypeError: an id is not an integer.
            RuntimeError: called inside a CUDA graph capture, which would keep these ids for ever.

        Example:
            >>> cache = PagedKVCache(2, 1, 1, block_size=1, num_blocks=3, dtype=torch.float32)
            >>> _ = cache.storage.copy_(torch.arange(12))
            >>> cache.copy_blocks([(0, 1), (1, 2)])
            >>> cache.storage.tolist()
            [0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0, 6.0, 9.0, 9.0, 9.0]
        """
        owner = f"{_OWNER}.copy_blocks"
        pairs = check_pairs(owner, pairs, (self.num_blocks, self.num_blocks))
        for i, (source, destination) in enumerate(pairs):
            if source == destination:
                raise ValueError(f"{owner}: pairs[{i}] must name two blocks, got {source} twice")
        if not pairs:
            return
        if self.storage.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(f"{owner}: must be called outside of a CUDA graph capture, got a call inside one")
        # The pools of all layers lie one after the other: together they are one pool of more blocks.
        num_blocks = self.num_layers * self.num_blocks
        values_at = num_blocks * self.block_size * self.num_kv_heads * self.head_dim
        pools = self._pool(self.head_dim, 0, num_blocks), self._pool(self.value_head_dim, values_at, num_blocks)
        layers = torch.arange(0, num_blocks, self.num_blocks or 1, device="cpu").unsqueeze(1)
        for run in _without_chains(pairs):
            ids = torch.tensor(run, dtype=torch.int64, device="cpu").T.unsqueeze(1) + layers
            ids = ids.flatten(1)
            if self.device.type == "cuda":
                ids = ids.pin_memory()
            copy_blocks(*pools, *ids.to(self.device, non_blocking=True))

    def __len__(self) -> int:
        return self.num_layers

    def __getitem__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(layer, (int, torch.SymInt)):
            raise TypeError(f"{_OWNER}: layer must be an integer, got {layer!r}")
        if not -self.num_layers <= layer < self.num_layers:
            raise IndexError(f"{_OWNER}: layer must be in [{-self.num_layers}, {self.num_layers}), got {layer}")
        layer = layer % self.num_layers
        tokens = self.num_blocks * self.block_size * self.num_kv_heads
        key_offset = layer * tokens * self.head_dim
        value_offset = (self.num_layers * self.head_dim + layer * self.value_head_dim) * tokens
        return self._pool(self.head_dim, key_offset), self._pool(self.value_head_dim, value_offset)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return (self[layer] for layer in range(self.num_layers))

    def __repr__(self) -> str:
        geometry = ", ".join(f"{name}={getattr(self, name)!r}" for name in _GEOMETRY)
        return f"{_OWNER}({geometry}, dtype={self.dtype}, device='{self.device}')"

    def _elements_per_block(self) -> int:
        dims = self.head_dim + self.value_head_dim
        return self.num_layers * self.block_size * self.num_kv_heads * dims

    def _pool(self, head_dim: int, offset: int, num_blocks: int | None = None) -> torch.Tensor:
        # One view straight from the flat tensor: a compiled graph then has a single input that is
        # mutated, whatever the number of layers, and writes to it in place.
        num_blocks = self.num_blocks if num_blocks is None else num_blocks
        size = (num_blocks, self.block_size, self.num_kv_heads, head_dim)
        if self.kv_layout == "NHD":
            token_stride, head_stride = self.num_kv_heads * head_dim, head_dim
        else:
            token_stride, head_stride = head_dim, self.block_size * head_dim
        block_stride = self.block_size * self.num_kv_heads * head_dim
        strides = (block_stride, token_stride, head_stride, 1)
        return self.storage.as_strided(size, strides, offset)


def _choose_num_blocks(num_blocks: Any, memory_bytes: Any, bytes_per_block: int) -> int:
    if (num_blocks is None) == (memory_bytes is None):
        given = "neither" if num_blocks is None else "both"
        raise ValueError(f"{_OWNER}: exactly one of num_blocks and memory_bytes must be given, got {given}")
    if num_blocks is not None:
        return check_integer(_OWNER, "num_blocks", num_blocks, 0)
    budget = check_integer(_OWNER, "memory_bytes", memory_bytes, 0)
    if budget < bytes_per_block:
        raise ValueError(f"{_OWNER}: memory_bytes must hold one block of {bytes_per_block} bytes, got {budget}")
    return budget // bytes_per_block


def _without_chains(pairs: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Cut copies where one needs another before it to be done, or would come before it."""
    run: list[tuple[int, int]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if source in written or destination in written or destination in read:
            yield run
            run, read, written = [], set(), set()
        run.append((source, destination))
        read.add(source)
        written.add(destination)
    if run:
        yield run


def _flatten(cache: PagedKVCache) -> tuple[list[Any], list[Any]]:
    geometry = [getattr(cache, name) for name in _GEOMETRY]
    return [cache.storage, cache.k_scale, cache.v_scale], geometry


def _flatten_with_keys(cache: PagedKVCache) -> tuple[list[Any], list[Any]]:
    leaves, geometry = _flatten(cache)
    names = ("storage", "k_scale", "v_scale")
    return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)], geometry


def _unflatten(leaves: Any, geometry: list[Any]) -> PagedKVCache:
    cache = object.__new__(PagedKVCache)
    cache.storage, cache.k_scale, cache.v_scale = leaves
    for name, value in zip(_GEOMETRY, geometry, strict=True):
        setattr(cache, name, value)
    return cache


pytree.register_pytree_node(
    PagedKVCache,
    _flatten,
    _unflatten,
    serialized_type_name="torch_pagedkv.PagedKVCache",
    flatten_with_keys_fn=_flatten_with_keys,
)
# It holds tensors and sizes only: files that carry one, exported programs too, load with weights_only.
torch.serialization.add_safe_globals([PagedKVCache])
