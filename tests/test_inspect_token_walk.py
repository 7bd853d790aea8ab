"""inspect.explain: the walk ends where the ops really write and read, and its lanes are the compiled kernel's."""

from __future__ import annotations

import re

import pytest
import torch

import torch_pagedkv
from cases import BF16, E4M3, E5M2, FP16, FP32
from pools import make_pools
from torch_pagedkv import inspect
from torch_pagedkv.__main__ import main
from torch_pagedkv.inspect.row_lanes import lanes_of_write

CHECKPOINT = ["explain", "--block-table", "7,2,9", "--block-size", "16", "--position", "20"]


def test_checkpoint():
    walk = inspect.explain([7, 2, 9], 16, 20)
    assert walk.place == (1, 4, 2, 36) and walk.meets
    assert walk.written_element(1, 63) == walk.read_element(1, 63) == (36 * 2 + 1) * 64 + 63
    assert walk.written_element(1, 63, "HND") == ((2 * 2 + 1) * 16 + 4) * 64 + 63
    assert walk.lanes.thread_of(2 * 64 - 1) == (0, 15)
    assert (walk.tile.index, walk.tile.keys, walk.tile.row, walk.tile.column) == (1, 16, 4, 1)
    assert [*walk.tile.looking_lanes] == [4, 20] and walk.tile.lane_of(63) == 7
    walk = inspect.explain([7, 2, 9], 16, 20, kernels="triton")
    assert (walk.tile.index, walk.tile.keys, walk.tile.row, walk.tile.column) == (0, 32, 20, 1)
    assert walk.lanes.thread_of(2 * 64 - 1) == (0, 31)


@pytest.mark.parametrize("layout", ["NHD", "HND", "padded", "packed_hnd", "layers"])
@pytest.mark.parametrize("block_size", [1, 7, 16])
@pytest.mark.parametrize("kernels,dtype", [("triton", FP32), ("cuda", BF16)], ids=str)
def test_ends_where_the_ops_write_and_read(kernels, dtype, layout, block_size, device):
    """A row written by the op stands at the elements of the walk's write; the gather finds those of its read."""
    table = [7, 2, 9, 4, 0]
    pools = make_pools(layout, 10, block_size, 3, 8, 8, dtype, device)
    key_cache, value_cache = pools[:2]
    size = key_cache.untyped_storage().nbytes() // dtype.itemsize
    memory = torch.as_strided(key_cache, (size,), (1,), 0)
    start = key_cache.storage_offset()
    for position in (0, block_size, 3 * block_size - 1, 5 * block_size - 1):
        named = {"strides": key_cache.stride()[:3], "num_kv_heads": 3, "head_dim": 8, "dtype": dtype}
        walk = inspect.explain(table, block_size, position, **named, kernels=kernels)
        key = torch.randn(1, 3, 8, device=device).to(dtype)
        slot = torch.tensor([walk.place.slot], device=device)
        torch_pagedkv.reshape_and_cache(key, key, key_cache, value_cache, slot)
        for element in (walk.written_element, walk.read_element):
            places = [start + element(head, dim) for head in range(3) for dim in range(8)]
            assert torch.equal(memory[places], key.flatten())
        tables = torch.tensor([table], device=device)
        length = torch.tensor([position + 1], device=device)
        keys, _ = torch_pagedkv.gather_kv(key_cache, value_cache, tables, length)
        assert torch.equal(keys[0, position].flatten(), memory[places])


def test_sides_are_computed_apart(monkeypatch):
    """A wrong step on one side is seen, because the other side does not take it."""
    from torch_pagedkv.inspect import token_walk

    honest = token_walk.tile_of_cuda_read

    def one_column_off(*arguments):
        import dataclasses

        tile = honest(*arguments)
        return dataclasses.replace(tile, column=tile.column + 1)

    monkeypatch.setattr(token_walk, "tile_of_cuda_read", one_column_off)
    walk = inspect.explain([7, 2, 9], 16, 20)
    assert not walk.meets and "DO NOT MEET" in str(walk)


@pytest.mark.parametrize("length", [1, 31, 32, 33, 500, 5000])
def test_every_key_is_read_by_one_split_and_tile(length):
    """Splits and tiles go up with the position, and a tile's keys are those at multiples of its size."""
    table = list(range(400))
    before = None
    for position in range(0, length, 7):
        tile = inspect.explain(table, 16, position, length=length, kernels="triton").tile
        assert tile.index * tile.keys + tile.row == position
        assert tile.is_whole == (position < length // 64 * 64)
        assert 0 <= tile.split < tile.num_splits
        now = (tile.split, position)
        assert before is None or before <= now
        before = now


LANES = [
    (BF16, BF16, 8, 128, "NHD"),
    (BF16, BF16, 8, 128, "HND"),
    (BF16, BF16, 2, 64, "NHD"),
    (BF16, BF16, 16, 512, "HND"),
    (BF16, BF16, 3, 20, "HND"),
    (BF16, BF16, 3, 20, "NHD"),
    (BF16, BF16, 8, 40, "NHD"),
    (BF16, BF16, 4, 80, "HND"),
    (BF16, BF16, 1, 63, "NHD"),
    (FP16, FP16, 2, 8, "HND"),
    (FP32, FP32, 4, 64, "NHD"),
    (FP32, FP32, 8, 512, "NHD"),
    (BF16, E4M3, 8, 128, "NHD"),
    (BF16, E4M3, 32, 128, "HND"),
    (FP32, E5M2, 8, 128, "NHD"),
    (E4M3, E4M3, 8, 128, "HND"),
]


@pytest.mark.parametrize("dtype,pool,heads,dim,layout", LANES, ids=str)
def test_lanes_are_those_of_the_compiled_kernel(dtype, pool, heads, dim, layout):
    """The kernel as a launch on sm_90 compiles it says how it deals elements to threads."""
    launch_of = pytest.importorskip("test_triton_compile").recorded_launches
    key_cache, value_cache, _ = make_pools(layout, 4, 16, heads, dim, dim, pool, "cpu")
    rows = torch.empty((5, heads, dim), dtype=dtype)
    (launch,) = launch_of("reshape_and_cache", rows, rows, key_cache, value_cache, torch.zeros(5).long(), None, None)
    code = launch.compile(90).asm["ttgir"]
    dealt = dict(re.findall(r"^(#blocked\d*) = #ttg.blocked<(.*)>$", code, re.MULTILINE))
    stores = re.findall(r"tt\.store .*tensor<(\d+)x!tt\.ptr<\w+>, (#blocked\d*)>", code)
    lanes = lanes_of_write(rows, key_cache)
    assert stores
    for size, name in stores:
        told = f"sizePerThread = [{lanes.pack}], threadsPerWarp = [32], warpsPerCTA = [{lanes.warps}], order = [0]"
        assert int(size) == lanes.tile and dealt[name] == f"{{{told}}}"


def test_threads_of_a_row():
    """Every element has one thread, packs lie side by side, and a tile starts again at thread 0."""
    lanes = lanes_of_write(torch.empty((1, 16, 512), dtype=BF16), torch.empty((1, 16, 16, 512), dtype=BF16))
    assert (lanes.tile, lanes.pack, lanes.warps) == (4096, 8, 8)
    assert [lanes.thread_of(e) for e in (0, 7, 8, 256, 2047, 2048, 4096)] == [
        (0, 0), (0, 0), (0, 1), (1, 0), (7, 31), (0, 0), (0, 0),
    ]  # fmt: skip
    assert lanes.pack_of(13) == range(8, 16)


REFUSED = {
    "explain: position must be in [0, 48), got 48": {"position": 48},
    "explain: block_size must be >= 1, got 0": {"block_size": 0},
    "explain: block_table must hold an id >= 0 at 1, got -1": {"block_table": [7, -1, 9]},
    "explain: layout must be 'NHD' or 'HND', got 'NDH'": {"layout": "NDH"},
    "explain: strides must be the three of block, token and head, got 2": {"strides": [1, 2]},
    "explain: strides[0] must be >= 0, got -1": {"strides": [-1, 2, 3]},
    "explain: num_kv_heads must be in [1, 1024], got 0": {"num_kv_heads": 0},
    "explain: num_heads must be a multiple of num_kv_heads = 2, got 3": {"num_heads": 3},
    "explain: head_dim must be in [1, 512], got 513": {"head_dim": 513},
    "explain: length must be in [21, 48], got 20": {"length": 20},
    "explain: length must be in [21, 48], got 49": {"length": 49},
    "explain: token must be >= 0, got -1": {"token": -1},
    "explain: kernels must be 'cuda' or 'triton', got 'cpu'": {"kernels": "cpu"},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_refusals(sentence):
    with pytest.raises(ValueError) as refusal:
        inspect.explain(**{"block_table": [7, 2, 9], "block_size": 16, "position": 20, **REFUSED[sentence]})
    assert str(refusal.value) == sentence


def test_refusals_of_kinds():
    with pytest.raises(TypeError, match=r"explain: dtype must be float32 or .*, got torch\.int8"):
        inspect.explain([7, 2, 9], 16, 20, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"explain: head_dim must be an integer, got 1\.5"):
        inspect.explain([7, 2, 9], 16, 20, head_dim=1.5)
    with pytest.raises(ValueError, match="explain: strides must be of a block that memory can hold"):
        inspect.explain([7, 2, 9], 16, 20, strides=[1, 2**62, 1])


def test_a_long_table_is_shortened():
    printed = str(inspect.explain(range(400), 16, 1000))
    assert "block_table [..., 60, 61, 62, 63, 64, ...], block_size 16" in printed


def test_command_prints_the_walk(capsys):
    assert main(CHECKPOINT) == 0
    assert capsys.readouterr().out == f"{inspect.explain([7, 2, 9], 16, 20)}\n"
    options = "--layout HND --num-kv-heads 4 --num-heads 8 --head-dim 128 --dtype float8_e4m3fn --length 40"
    options += " --token 3 --kernels triton"
    assert main([*CHECKPOINT, *options.split()]) == 0
    named = {"layout": "HND", "num_kv_heads": 4, "num_heads": 8, "head_dim": 128, "dtype": E4M3, "length": 40}
    named |= {"token": 3, "kernels": "triton"}
    assert capsys.readouterr().out == f"{inspect.explain([7, 2, 9], 16, 20, **named)}\n"


@pytest.mark.parametrize(
    "options,sentence",
    [
        (["--position", "48"], "explain: position must be in [0, 48), got 48\n"),
        (["--layout", "NDH"], "explain: layout must be 'NHD' or 'HND', got 'NDH'\n"),
        (["--dtype", "int8"], "explain: dtype must be float32 or bfloat16 or float16 or float8_e4m3fn or "),
    ],
)
def test_command_refuses_with_a_sentence(options, sentence, capsys):
    assert main([*CHECKPOINT, *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(sentence)


def test_command_refuses_what_is_no_number(capsys):
    with pytest.raises(SystemExit) as stop:
        main([*CHECKPOINT, "--block-size", "x"])
    assert stop.value.code == 2 and "invalid int value: 'x'" in capsys.readouterr().err
