"""PagedKVCache: one allocation, views in either layout, an argument of compiled functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from cases import BF16, E4M3, E5M2, FP16, FP32
from torch_pagedkv.cache import PagedKVCache
from torch_pagedkv.ops import reshape_and_cache
from torch_pagedkv.ops.argument_checks import MAX_HEAD_DIM

LAYOUTS = ["NHD", "HND"]


def make(num_layers=3, num_kv_heads=2, head_dim=6, **arguments):
    defaults = {"block_size": 4, "num_blocks": 5, "dtype": FP32}
    return PagedKVCache(num_layers, num_kv_heads, head_dim, **(defaults | arguments))


@pytest.mark.parametrize("value_head_dim", [None, 4, 10])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_tile_one_allocation(layout, value_head_dim, device):
    cache = make(kv_layout=layout, value_head_dim=value_head_dim, device=device)
    cache.storage.fill_(-1)
    pools = [pool for pair in cache for pool in pair]
    assert len(pools) == 2 * len(cache) == 6
    for number, pool in enumerate(pools):
        width = 6 if number % 2 == 0 else value_head_dim or 6
        assert pool.shape == (5, 4, 2, width)
        assert (pool.transpose(1, 2) if layout == "HND" else pool).is_contiguous()
        assert pool.device == cache.device and cache.device.type == device
        assert pool.untyped_storage().data_ptr() == cache.storage.untyped_storage().data_ptr()
        pool.fill_(number)
    # No pool overlaps another one, and together they are all of the storage.
    assert [int((cache.storage == number).sum()) for number in range(6)] == [p.numel() for p in pools]
    assert sum(p.numel() for p in pools) == cache.storage.numel()
    assert cache.storage.untyped_storage().nbytes() == cache.nbytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_what_it_says_where_both_have_one_shape(layout):
    cache = make(num_kv_heads=4, block_size=4, kv_layout=layout)
    key_cache, _ = cache[1]
    expected = (24, 6) if layout == "NHD" else (6, 24)
    assert (key_cache.stride(1), key_cache.stride(2)) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unaliased_pools_share_memory_and_no_storage(layout, device):
    """What torch would take for views of one tensor it copies in compiled functions that are given them."""
    for dtype in (FP32, BF16, FP16, E4M3, E5M2):
        cache = make(dtype=dtype, kv_layout=layout, value_head_dim=4, device=device)
        pools = [pool for pair in cache.unaliased() for pool in pair]
        for pool, view in zip(pools, (pool for pair in cache for pool in pair), strict=True):
            assert (pool.dtype, pool.shape, pool.stride()) == (view.dtype, view.shape, view.stride())
            assert pool.data_ptr() == view.data_ptr() and pool.storage_offset() == 0
            assert pool._base is None and not pool.is_inference()
        assert len({pool.untyped_storage().data_ptr() for pool in pools}) == 6


def test_unaliased_pools_keep_their_memory(device):
    cache = make(device=device)
    cache.storage.fill_(7)
    key_cache, _ = cache.unaliased()[2]
    del cache
    others = [torch.zeros(5760 // 4, device=device) for _ in range(8)]
    assert len(others) == 8 and bool((key_cache == 7).all())


def test_pools_without_memory_are_not_given_out():
    with pytest.raises(ValueError, match="unaliased: the pools must have memory, got a Tensor on meta"):
        make(device="meta").unaliased()
    with FakeTensorMode(), pytest.raises(ValueError, match="must have memory, got a FakeTensor on cpu"):
        make(device="cpu").unaliased()


def test_unaliased_pools_of_an_empty_cache(device):
    assert [pool.shape[0] for pair in make(num_blocks=0, device=device).unaliased() for pool in pair] == [0] * 6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layer_is_written_and_no_other(layout, device):
    cache = make(kv_layout=layout, device=device)
    cache.storage.fill_(-1)
    key = torch.arange(12.0, device=device).view(1, 2, 6)
    slot_mapping = torch.tensor([9], device=device)
    reshape_and_cache(key, key + 100, *cache[1], slot_mapping)
    assert torch.equal(cache[1][0][2, 1], key[0])
    assert torch.equal(cache[1][1][2, 1], key[0] + 100)
    assert int((cache.storage == -1).sum()) == cache.storage.numel() - 24


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
def test_sizes_in_bytes(dtype):
    cache = make(dtype=dtype, value_head_dim=4)
    assert cache.dtype == dtype
    assert cache.bytes_per_block == 3 * 4 * 2 * (6 + 4) * dtype.itemsize
    assert cache.nbytes == 5 * cache.bytes_per_block
    assert cache.nbytes == sum(pool.numel() * pool.element_size() for pair in cache for pool in pair)


@pytest.mark.parametrize("spare", [0, 1, 959])
def test_a_budget_is_rounded_down_to_whole_blocks(spare):
    cache = make(num_blocks=None, memory_bytes=7 * 1152 + spare)
    assert (cache.bytes_per_block, cache.num_blocks) == (1152, 7)


def test_no_blocks_is_a_legal_pool():
    cache = make(num_blocks=0)
    assert cache[2][1].shape == (0, 4, 2, 6) and cache.nbytes == 0


def test_indexing_is_that_of_a_sequence():
    cache = make()
    assert cache[-1][0].data_ptr() == cache[2][0].data_ptr()
    assert [k.data_ptr() for k, _ in cache] == [cache[i][0].data_ptr() for i in range(3)]
    for layer in (3, -4):
        with pytest.raises(IndexError, match="layer must be in"):
            cache[layer]
    with pytest.raises(TypeError, match="layer must be an integer"):
        cache[0:1]


def test_device_is_torchs_default_unless_given():
    with torch.device("meta"):
        assert make().device.type == "meta"
        assert make(device="cpu").device.type == "cpu"
    assert make().device.type == "cpu"


def test_made_in_inference_mode_it_can_be_written_outside():
    with torch.inference_mode():
        cache = make()
    cache[0][0].fill_(1)


@pytest.mark.parametrize("scale", [torch.tensor(0.5), torch.ones(1), torch.ones(2)])
def test_scales_are_kept_as_they_are(scale):
    cache = make(dtype=E4M3, k_scale=scale, v_scale=scale)
    assert cache.k_scale is scale and cache.v_scale is scale


BAD = [
    ({"num_layers": 0}, ValueError, "num_layers must be >= 1, got 0"),
    ({"num_kv_heads": 0}, ValueError, "num_kv_heads must be >= 1, got 0"),
    ({"head_dim": 0}, ValueError, f"head_dim must be in [1, {MAX_HEAD_DIM}], got 0"),
    ({"head_dim": MAX_HEAD_DIM + 1}, ValueError, f"head_dim must be in [1, {MAX_HEAD_DIM}], got"),
    ({"value_head_dim": MAX_HEAD_DIM + 1}, ValueError, "value_head_dim must be in [1,"),
    ({"block_size": 0}, ValueError, "block_size must be >= 1, got 0"),
    ({"block_size": 16.0}, TypeError, "block_size must be an integer, got 16.0"),
    ({"num_layers": True}, TypeError, "num_layers must be an integer, got True"),
    ({"num_blocks": -1}, ValueError, "num_blocks must be >= 0, got -1"),
    ({"num_blocks": None}, ValueError, "exactly one of num_blocks and memory_bytes must be given"),
    ({"memory_bytes": 10**6}, ValueError, "num_blocks and memory_bytes must be given, got both"),
    (
        {"num_blocks": None, "memory_bytes": 1151},
        ValueError,
        "memory_bytes must hold one block of 1152 bytes, got 1151",
    ),
    ({"num_blocks": None, "memory_bytes": 1e9}, TypeError, "memory_bytes must be an integer"),
    ({"kv_layout": "nhd"}, ValueError, "kv_layout must be 'NHD' or 'HND', got 'nhd'"),
    ({"dtype": torch.float64}, TypeError, "dtype must be float32 or bfloat16"),
    ({"dtype": torch.int8}, TypeError, "dtype must be float32 or bfloat16"),
    ({"k_scale": torch.ones(1)}, ValueError, "k_scale must be None"),
    ({"dtype": E4M3, "v_scale": 0.5}, TypeError, "v_scale must be a tensor or None, got float"),
    ({"dtype": E4M3, "k_scale": torch.ones(3)}, ValueError, "k_scale must have one element or"),
    ({"dtype": E5M2, "k_scale": torch.ones(1, dtype=BF16)}, TypeError, "k_scale must have dtype"),
    (
        {"dtype": E4M3, "v_scale": torch.ones(1, device="meta")},
        ValueError,
        "v_scale must be on cpu",
    ),
]


@pytest.mark.parametrize("arguments,error,sentence", BAD, ids=lambda value: None)
def test_refusals(arguments, error, sentence):
    with pytest.raises(error) as caught:
        make(**arguments)
    assert str(caught.value).startswith("PagedKVCache: ")
    assert sentence in str(caught.value)


def write_layers(cache, key, slot_mapping):
    for layer in range(len(cache)):
        key_cache, value_cache = cache[layer]
        reshape_and_cache(key + layer, key - layer, key_cache, value_cache, slot_mapping)
    return sum(key_cache[0, 0].sum() + value_cache[0, 1].sum() for key_cache, value_cache in cache)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_is_an_argument_of_a_compiled_function(layout, backend, device):
    torch._dynamo.reset()
    cache = make(kv_layout=layout, value_head_dim=6, device=device)
    cache.storage.fill_(-1)
    eager = copy.deepcopy(cache)
    address = cache.storage.data_ptr()
    compiled = torch.compile(write_layers, backend=backend, fullgraph=True)
    key = torch.randn(3, 2, 6, device=device)
    slot_mapping = torch.tensor([1, 7, -1], device=device)
    result = compiled(cache, key, slot_mapping)
    torch.testing.assert_close(result, write_layers(eager, key, slot_mapping))
    assert torch.equal(cache.storage, eager.storage)
    assert cache.storage.data_ptr() == address


def test_a_compiled_graph_has_one_input_for_all_layers():
    torch._dynamo.reset()
    inputs = []

    def backend(graph, example_inputs):
        inputs.extend(t for t in example_inputs if isinstance(t, torch.Tensor))
        return graph

    cache = make()
    compiled = torch.compile(write_layers, backend=backend, fullgraph=True)
    compiled(cache, torch.randn(1, 2, 6), torch.tensor([0]))
    assert len(inputs) == 3  # storage, key and slot_mapping


def test_pytree_round_trip():
    cache = make(dtype=E4M3, k_scale=torch.ones(2), kv_layout="HND", value_head_dim=4)
    leaves, spec = pytree.tree_flatten(cache)
    assert leaves[0] is cache.storage and leaves[1] is cache.k_scale
    other = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert repr(other) == repr(cache)
    assert other[2][1].data_ptr() == cache[2][1].data_ptr()
    assert other[2][1].stride() == cache[2][1].stride()


def test_deepcopy_has_its_own_memory():
    cache = make()
    cache.storage.fill_(1)
    copy.deepcopy(cache)[0][0].fill_(2)
    assert torch.equal(cache.storage, torch.ones_like(cache.storage))


def test_files_with_a_cache_load_with_weights_only(tmp_path):
    cache = make(dtype=E4M3, k_scale=torch.ones(2), kv_layout="HND", value_head_dim=4)
    cache.storage.view(torch.uint8).random_()
    torch.save(cache, tmp_path / "cache.pt")
    other = torch.load(tmp_path / "cache.pt", weights_only=True)
    assert repr(other) == repr(cache) and torch.equal(other.k_scale, cache.k_scale)
    assert torch.equal(other.storage.view(torch.uint8), cache.storage.view(torch.uint8))
