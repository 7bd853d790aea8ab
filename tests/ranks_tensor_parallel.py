"""What holds on each of two ranks of tensor parallelism; test_tensor_parallel.py runs it."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_pagedkv
from torch_pagedkv import PagedAttention, PagedBatch, PagedKVCache
from torch_pagedkv.integrations import tensor_parallel
from torch_pagedkv.integrations.tensor_parallel import HeadwiseParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "docs" / "examples"))
from llama import Config, Llama, fuse_projections

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 16, 16
COPY = Replicate()


def place(mesh, tensor, placement):
    """Make a DTensor of what every rank has whole."""
    if isinstance(placement, Shard):
        tensor = tensor.chunk(mesh.size(), placement.dim)[mesh.get_local_rank()].contiguous()
    return DTensor.from_local(tensor, mesh, [placement])


class Call:
    """A write and a read of three sequences, whole, and the same arguments as DTensors."""

    def __init__(self, mesh, dtype=torch.float32, **scales) -> None:
        device = mesh.device_type
        self.mesh = mesh
        self.query, self.key, self.value = (
            torch.randn(3, heads, DIM).to(device) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        self.pools = [torch.zeros(4, BLOCK, KV_HEADS, DIM, device=device).to(dtype) for _ in range(2)]
        self.table = torch.tensor([[1], [2], [3]], device=device)
        self.lengths, self.slots = torch.tensor([2, 3, 4], device=device), torch.tensor([17, 34, 51], device=device)
        self.sinks = torch.randn(HEADS).to(device)
        self.scales = {name: torch.tensor(scale, device=device) for name, scale in scales.items()}

    def place(self, tensor, placement=COPY):
        return place(self.mesh, tensor, placement)

    def placed_pools(self, placement):
        return [self.place(pool, placement) for pool in self.pools]

    def placed_scales(self):
        return {n: self.place(scale, Shard(0) if scale.numel() > 1 else COPY) for n, scale in self.scales.items()}


def check_ops_on_heads_communicate_nothing(mesh):
    """Write, read, gather, copy and merge with pools sharded on KV heads: the whole's bits, no collective."""
    tensor_parallel.register()
    for dtype, scales in ((torch.float32, {}), (torch.float8_e4m3fn, {"k_scale": [0.5, 0.25], "v_scale": [2.0]})):
        call = Call(mesh, dtype, **scales)
        pools, on_heads = call.placed_pools(Shard(2)), Shard(1)
        index = (call.place(call.table), call.place(call.lengths))
        with CommDebugMode() as seen:
            key, value = call.place(call.key, on_heads), call.place(call.value)  # a copy is cut
            slots = torch_pagedkv.compute_slot_mapping(*index, None, BLOCK, 3)
            torch_pagedkv.reshape_and_cache(key, value, *pools, slots, **call.placed_scales())
            query, sinks = call.place(call.query, on_heads), call.place(call.sinks, Shard(0))
            state = torch_pagedkv.paged_attention(
                query, *pools, *index, sinks=sinks, return_lse=True, **call.placed_scales()
            )
            merged = torch_pagedkv.merge_attention_states(*state, *state)
            gathered = torch_pagedkv.gather_kv(*pools, *index, dtype=torch.float32, **call.placed_scales())
            ids = [call.place(torch.tensor([block], device=mesh.device_type)) for block in (1, 0)]
            torch_pagedkv.copy_blocks(*pools, *ids)
        assert seen.get_total_counts() == 0, seen.get_comm_counts()
        whole, index = call.pools, (call.table, call.lengths)
        torch_pagedkv.reshape_and_cache(call.key, call.value, *whole, call.slots, **call.scales)
        expected = torch_pagedkv.paged_attention(
            call.query, *whole, *index, sinks=call.sinks, return_lse=True, **call.scales
        )
        wanted = [*expected, *torch_pagedkv.merge_attention_states(*expected, *expected)]
        wanted += torch_pagedkv.gather_kv(*whole, *index, dtype=torch.float32, **call.scales)
        torch_pagedkv.copy_blocks(*whole, *(i.to_local() for i in ids))
        for actual, tensor in zip([*state, *merged, *gathered, *pools], [*wanted, *whole], strict=True):
            (placement,) = actual.placements
            local = tensor.float().chunk(mesh.size(), placement.dim)[mesh.get_local_rank()]
            assert torch.equal(actual.to_local().float(), local)


def check_replicated_pools(mesh):
    """Without a shard everything is a copy; with one KV head the query heads may be cut all the same."""
    tensor_parallel.register()
    call = Call(mesh)
    pools, index = call.placed_pools(COPY), (call.place(call.table), call.place(call.lengths))
    torch_pagedkv.reshape_and_cache(call.place(call.key), call.place(call.value), *pools, call.place(call.slots))
    torch_pagedkv.reshape_and_cache(call.key, call.value, *call.pools, call.slots)
    out = torch_pagedkv.paged_attention(call.place(call.query), *pools, *index)
    expected = torch_pagedkv.paged_attention(call.query, *call.pools, call.table, call.lengths)
    assert torch.equal(out.to_local(), expected)
    one_head = [call.place(pool[:, :, :1]) for pool in call.pools]
    with CommDebugMode() as seen:
        out = torch_pagedkv.paged_attention(call.place(call.query, Shard(1)), *one_head, *index)
    assert seen.get_total_counts() == 0 and out.placements == (Shard(1),)
    expected = torch_pagedkv.paged_attention(
        call.query, *(pool[:, :, :1] for pool in call.pools), call.table, call.lengths
    )
    assert torch.equal(out.to_local(), expected.chunk(mesh.size(), 1)[mesh.get_local_rank()])


def refusal(function, *args) -> str:
    try:
        function(*args)
    except Exception as error:  # torch wraps what a rule raises
        return str(error)
    return "not refused"


def check_placements_that_do_not_fit(mesh):
    """A pool is never redistributed, since what is written to a copy is lost; nothing is written."""
    tensor_parallel.register()
    call = Call(mesh)
    rows = [call.place(call.key), call.place(call.value)]

    def write(key_cache, value_cache):
        torch_pagedkv.reshape_and_cache(*rows, key_cache, value_cache, call.place(call.slots))

    blocks, heads, copies = (call.placed_pools(placement) for placement in (Shard(0), Shard(2), COPY))
    assert "key_cache must be sharded on its KV heads, Shard(2), or replicated" in refusal(write, *blocks)
    assert "value_cache must be placed as key_cache is" in refusal(write, heads[0], copies[1])
    odd = [call.place(pool[:, :, :1], Shard(0)).redistribute(mesh, [Shard(2)]) for pool in call.pools]
    index = (call.place(call.table), call.place(call.lengths))
    assert "num_kv_heads must be a multiple of the mesh's size 2, got 1" in refusal(
        torch_pagedkv.gather_kv, *odd, *index
    )
    assert not any(pool.to_local().any() for pool in (*blocks, *heads, *copies))
    square = torch.distributed.init_device_mesh(mesh.device_type, (2, 1), mesh_dim_names=("data", "heads"))
    flat = [DTensor.from_local(pool, square, [COPY, COPY]) for pool in (*call.pools, call.table, call.slots)]
    assert "the device mesh must have one dimension" in refusal(torch_pagedkv.gather_kv, *flat[:3], flat[3])
    for module, sentence in (
        (torch.nn.Linear(2, 2), "HeadwiseParallel: module must be a PagedAttention, got Linear"),
        (PagedAttention(3, 8), "HeadwiseParallel: num_kv_heads must be a multiple of the mesh's size 2, got 3"),
    ):
        assert sentence in refusal(parallelize_module, module, mesh, HeadwiseParallel())


def check_module_state_is_cut(mesh):
    options = {"sinks": torch.arange(4.0), "alibi_slopes": torch.arange(4.0), "k_scale": torch.arange(2.0)}
    module = PagedAttention(4, 8, 2, v_scale=torch.ones(1), **options)
    parallelize_module(module, mesh, HeadwiseParallel())
    assert (module.num_heads, module.num_kv_heads) == (2, 1)
    for name, tensor in options.items():
        assert torch.equal(getattr(module, name), tensor.chunk(2)[mesh.get_local_rank()])
    assert module.v_scale.tolist() == [1.0] and isinstance(module.sinks, torch.nn.Parameter)


def check_parallelize_module_over_llama(mesh):
    """The example's model, its projections column- and row-wise: one reduction after each attention and MLP."""
    config, device = Config(layers=2), mesh.device_type
    whole = Llama(config).to(device).requires_grad_(False)
    model = copy.deepcopy(whole)
    plan = {f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {"attention.attention": HeadwiseParallel(), "attention.wo": RowwiseParallel()}
    plan |= {"feed_forward.gate": ColwiseParallel(), "feed_forward.up": ColwiseParallel()}
    plan |= {"feed_forward.down": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    sizes = dict(block_size=BLOCK, num_blocks=8, dtype=torch.float32, device=device)
    cache = PagedKVCache(config.layers, config.kv_heads, config.head_dim, **sizes)
    local, other = (
        PagedKVCache(config.layers, config.kv_heads // mesh.size(), config.head_dim, **sizes) for _ in range(2)
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths, queries in (([20, 3], [20, 3]), ([21, 4], None)):
        other.storage.copy_(local.storage)
        batch = PagedBatch.from_sequences([[5, 1], [2]], lengths, queries, block_size=BLOCK, device=device)
        tokens = torch.arange(batch.num_tokens, device=device)
        expected = whole(tokens, tokens, cache, batch)
        with CommDebugMode() as seen:
            actual = model(tokens, tokens, local, batch)
        assert seen.get_total_counts() == 2 * config.layers, seen.get_comm_counts()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(compiled(tokens, tokens, other, batch), expected, atol=1e-5, rtol=1e-5)
    fuse_projections(model)  # of the rank's own rows
    torch.testing.assert_close(model(tokens, tokens, local, batch), expected, atol=1e-5, rtol=1e-5)
    for layer in range(config.layers):
        for pool, part in zip(cache[layer], local[layer]):
            heads = pool.chunk(mesh.size(), 2)[mesh.get_local_rank()]
            torch.testing.assert_close(part[5], heads[5])
