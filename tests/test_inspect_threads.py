"""What inspect.explain says of the CUDA C++ kernels is what their sources do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cases import BF16, E4M3, E5M2, FP16, FP32
from devices import needs_cuda
from pools import make_pools
from torch_pagedkv import inspect
from torch_pagedkv.inspect import cuda_kernels

CUDA = Path(__file__).resolve().parents[1] / "csrc/cuda"


def source(name: str) -> str:
    """A file without its comments, all white space as one blank."""
    return " ".join(re.sub(r"//.*", "", (CUDA / name).read_text()).split())


def constant(name: str, text: str) -> int:
    return int(re.search(rf"constexpr (?:int|int64_t) {name} = (\d+);", text).group(1))


def test_constants_are_those_of_the_sources():
    write, problem = source("reshape_and_cache.cu"), source("decode_problem.h")
    assert constant("kThreads", write) == cuda_kernels.WRITE_THREADS
    assert constant("kLongestSearch", write) == cuda_kernels.SEARCHED_TOKENS
    assert constant("kRows", problem) == cuda_kernels.QUERY_ROWS
    assert constant("kMostOfTeam", problem) == cuda_kernels.MOST_OF_TEAM
    assert constant("kMostDecodeDim", problem) == cuda_kernels.WIDEST_HEAD
    for_fp8, for_floats = source("decode_variant.cuh").partition("kIsFp8")[2].split("else", 1)
    for is_fp8, text in ((True, for_fp8), (False, for_floats)):
        tiles = re.findall(r"DecodeTile<POOL, (\d+), ROWS, (\d+),", text)
        assert {int(dim): int(keys) for dim, keys in tiles} == cuda_kernels.KEYS_OF_TILE[is_fp8]


@pytest.mark.parametrize(
    "name,step",
    [
        ("reshape_and_cache.cu", "passes = (packs + kThreads - 1) / kThreads;"),
        ("reshape_and_cache.cu", "lanes = (packs + passes - 1) / passes;"),
        (
            "reshape_and_cache.cu",
            "write_few<Move, false><<<1, lanes, 0, stream>>>(write); } else if (write.tokens <= kLongestSearch) {",
        ),
        ("reshape_and_cache.cu", "threads = std::max<uint32_t>(lanes, kLeastThreads); write_few<Move, true><<<"),
        ("reshape_and_cache.cu", "const int token = static_cast<int>(blockIdx.x), last ="),
        ("reshape_and_cache.cu", "uint32_t pack = threadIdx.x;"),
        ("reshape_and_cache.cu", "pack += blockDim.x;"),
        ("reshape_and_cache.cu", "is_key = pack < write.key.packs;"),
        ("reshape_and_cache.cu", "head = pack / side.packs_of_head; part = pack % side.packs_of_head;"),
        ("reshape_and_cache.cu", "is_one_head = source.heads == 1 || (adjoin && scales.is_one_for_all());"),
        ("reshape_and_cache.cu", "if constexpr (sizeof(Source) == 2) { if (takes_packs_of(16))"),
        ("reshape_and_cache.cu", "constexpr int kElements = 16 / sizeof(Source);"),
        ("decode_tile.cuh", "kRowBytes = DIM * POOL::kElementBytes;"),
        ("decode_sequence.cuh", "first_tile = sequence.lowest / TILE;"),
        ("decode_schedule.cuh", "item = group * problem.team + member;"),
        ("decode_attention.cuh", "const int member = static_cast<int>(number - team * problem.team);"),
        ("decode_attention.cuh", "through_share(problem, team, member, place, found.sequence, shares, tile, places);"),
        ("decode_loader.cuh", "kPacks = TILE::kRowBytes / 16;"),
        ("decode_loader.cuh", "tile = work.sequence.first_tile + segment.first;"),
        ("decode_loader.cuh", "position_ = tile * TILE::kKeys + static_cast<int>(threadIdx.x) % TILE::kKeys;"),
        ("decode_loader.cuh", "const int position = position_; position_ += TILE::kKeys;"),
        ("decode_schedule.cuh", ": segment.item / problem.head_tiles;"),
        ("decode_loader.cuh", "byte_(static_cast<int>(threadIdx.x) % kPacks * 16),"),
        ("decode_loader.cuh", "swizzled<TILE::kRowBytes>(static_cast<int>(threadIdx.x) % 32 / kPacks, byte_))"),
        ("decode_loader.cuh", "kRowsOfPass = 32 / kPacks;"),
        ("decode_loader.cuh", "place = moved<TILE::kRowBytes>(target, pass * kRowsOfPass, 0);"),
        ("decode_loader.cuh", "row = (pass * 32 + static_cast<int>(threadIdx.x) % 32) / kPacks;"),
        ("decode_shares.cuh", "const Shares equal{max(quotient(total + of_all - 1, of_all), least), 0};"),
        ("decode_launch.cu", "constexpr int kLeastPositionsOfPart = 64;"),
        ("decode_launch.cu", "least_tiles = std::max(1, kLeastPositionsOfPart / variant.tile);"),
        ("paged_attention.cu", "if (query.scalar_type() == ScalarType::Float) return false;"),
        ("paged_attention.cu", "cache.size(3) * element % 16 == 0 && cache.size(3) <= kMostDecodeDim;"),
        ("paged_attention.cu", "(cache.size(dim) == 1 || cache.stride(dim) * element % 16 == 0);"),
        ("decode_problem.h", "head_tiles = (group + kRows - 1) / kRows;"),
        ("decode_problem.h", "team = items < kMostOfTeam ? items : kMostOfTeam; while (items % team != 0) --team;"),
    ],
)
def test_steps_are_those_of_the_sources(name, step):
    """Whoever changes a step that is restated finds out here that the walk has to change too."""
    assert step in source(name)


PACKS = [
    (BF16, BF16, 8, 128, "NHD", (8, 256)),
    (BF16, BF16, 8, 128, "HND", (8, 256)),
    (BF16, BF16, 2, 64, "NHD", (8, 32)),
    (BF16, BF16, 16, 512, "HND", (8, 256)),
    (BF16, BF16, 3, 20, "NHD", (4, 30)),
    (BF16, BF16, 3, 20, "HND", (4, 30)),
    (BF16, BF16, 2, 20, "NHD", (8, 10)),  # heads adjoin, so packs may cross them
    (BF16, BF16, 2, 20, "HND", (4, 20)),
    (BF16, BF16, 3, 120, "NHD", (8, 90)),
    (BF16, BF16, 1, 63, "NHD", (1, 126)),
    (FP16, FP16, 12, 128, "NHD", (8, 192)),
    (FP32, FP32, 4, 64, "NHD", (4, 128)),
    (BF16, E4M3, 8, 128, "NHD", (16, 128)),
    (BF16, E4M3, 3, 40, "HND", (8, 30)),
    (FP16, E5M2, 2, 8, "NHD", (16, 2)),
    (BF16, E4M3, 3, 20, "HND", (1, 120)),
    (FP32, E5M2, 8, 128, "NHD", (4, 256)),
    (E4M3, E4M3, 8, 128, "HND", (16, 128)),
]


@pytest.mark.parametrize("dtype,pool,heads,dim,layout,expected", PACKS, ids=str)
def test_packs_and_threads_of_a_token(dtype, pool, heads, dim, layout, expected):
    """By hand, from the rules at the head of reshape_and_cache.cu."""
    key_cache, _, _ = make_pools(layout, 4, 16, heads, dim, dim, pool, "cpu")
    lanes = cuda_kernels.lanes_of_cuda_write(torch.empty((5, heads, dim), dtype=dtype), key_cache, 0)
    assert (lanes.pack, lanes.threads) == expected
    dealt = [lanes.thread_of(element) for element in range(heads * dim)]
    assert all(0 <= 32 * warp + lane < lanes.threads for warp, lane in dealt)
    for element in range(0, heads * dim, lanes.pack):
        assert len({dealt[e] for e in lanes.pack_of(element)}) == 1


@pytest.mark.parametrize("layout", ["padded", "packed_hnd", "layers"])
def test_packs_start_at_multiples_of_their_size(layout):
    key_cache, _, _ = make_pools(layout, 10, 7, 3, 8, 8, BF16, "cpu")
    lanes = cuda_kernels.lanes_of_cuda_write(torch.empty((1, 3, 8), dtype=BF16), key_cache, 0)
    assert all(stride % lanes.pack == 0 for stride in key_cache.stride()[:2])


def test_packs_do_not_cross_heads_that_lie_apart():
    rows = torch.empty((1, 2, 20), dtype=BF16)
    padded = torch.empty_strided((4, 16, 2, 20), (16 * 48, 48, 24, 1), dtype=BF16)
    assert cuda_kernels.lanes_of_cuda_write(rows, padded, 0).pack == 4


def test_tokens_of_a_call_have_ctas():
    for token in (0, 1, 20):
        walk = inspect.explain([7, 2, 9], 16, 20, token=token)
        assert walk.lanes.thread_of(127) == (0, 15)
        assert f"  token {token}: CTA {token}, threads 0 to 31\n" in str(walk)


TILES = [(64, BF16, 16, 8), (40, BF16, 16, 8), (256, FP16, 16, 32), (64, E4M3, 32, 4), (80, E5M2, 16, 8)]


@pytest.mark.parametrize("head_dim,dtype,keys,packs", TILES, ids=str)
def test_every_lane_of_a_warp_copies_as_much(head_dim, dtype, keys, packs):
    """A tile's keys, of which each takes as many packs as the widest head of its variant, fill the lanes in turn."""
    looking = []
    for position in range(64):
        tile = inspect.explain(range(8), 16, position, head_dim=head_dim, dtype=dtype, length=128).tile
        assert (tile.index, tile.row, tile.keys, tile.packs) == (*divmod(position, keys), keys, packs)
        looking += tile.looking_lanes
        copied = [tile.lane_of(feature) for feature in range(0, head_dim, 16 // dtype.itemsize)]
        first = tile.row * packs % 32
        assert copied == list(range(first, first + len(copied)))
    assert sorted(looking) == sorted([*range(32)] * (64 // keys))


@pytest.mark.parametrize(
    "num_kv_heads,num_heads,told",
    [
        (1, 16, "one warp for each KV head\n"),
        (2, 2, "one warp for each KV head, 2 of them side by side\n"),
        (8, 128, "one warp for each KV head, 8 of them side by side\n"),
        (12, 12, "one warp for each KV head, 6 of them side by side\n"),
        (11, 11, "one warp for each KV head\n"),
        (1, 17, "2 warps for each KV head, 2 of them side by side\n"),
        (3, 120, "3 warps for each KV head, 3 of them side by side\n"),
    ],
)
def test_heads_of_a_sequence_have_neighbouring_warps(num_kv_heads, num_heads, told):
    """By hand: a warp takes up to 16 query heads of a KV head, and of all such a team the largest part up to 8."""
    walk = inspect.explain([7, 2, 9], 16, 20, num_kv_heads=num_kv_heads, num_heads=num_heads)
    assert f"  KV tile 1 of 16 keys, row 4: {told}" in str(walk)


@pytest.mark.parametrize(
    "strides,num_kv_heads,is_aligned",
    [
        ([2048, 128, 64], 2, True),
        ([2052, 128, 64], 2, False),
        ([4096, 132, 64], 2, False),
        ([4096, 144, 68], 2, False),
        ([4096, 128, 68], 1, True),  # no step from head to head
    ],
)
def test_rows_that_start_anywhere_come_element_by_element(strides, num_kv_heads, is_aligned):
    walk = inspect.explain([7, 2, 9], 16, 20, strides=strides, num_kv_heads=num_kv_heads)
    assert walk.tile.is_aligned == is_aligned and walk.meets
    assert ("16 bytes each; the last" in str(walk)) == is_aligned
    assert ("16 bytes each (element by element, since rows start anywhere)" in str(walk)) != is_aligned


@pytest.mark.parametrize(
    "why,options",
    [
        ("CUDA C++ takes no float32", {"dtype": FP32}),
        ("CUDA C++ takes heads of up to 256", {"head_dim": 264}),
        ("CUDA C++ takes heads of multiples of 16 bytes", {"head_dim": 20}),
        ("CUDA C++ takes heads of multiples of 16 bytes", {"head_dim": 72, "dtype": E4M3}),
    ],
)
def test_what_cuda_cpp_does_not_take_is_told_as_triton(why, options):
    printed = str(inspect.explain([7, 2, 9], 16, 20, **options))
    assert f"read by paged_attention on CUDA, in Triton ({why})" in printed
    assert "written by reshape_and_cache on CUDA, in CUDA C++" in printed


@needs_cuda
@pytest.mark.parametrize("apart", [0, 1])
@pytest.mark.parametrize("head_dim,dtype", [(64, BF16), (20, BF16), (264, BF16), (256, FP16), (128, FP32)], ids=str)
def test_the_library_takes_what_the_walk_says(head_dim, dtype, apart):
    from torch_pagedkv.ops.kernel_choice import TAKES_NOTHING, cuda_attention_takes, cuda_kernel

    if cuda_kernel("paged_attention", torch.cuda.current_device()) is None:
        pytest.skip("CUDA C++: the library was not built")
    cache = torch.empty(4, 16, 2, head_dim + apart, dtype=dtype, device="cuda")[..., :head_dim]
    query = torch.empty(1, 2, head_dim, dtype=dtype, device="cuda")
    table = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    takes = cuda_attention_takes()(query, cache, cache, table)
    assert (takes != TAKES_NOTHING) == (cuda_kernels.why_cuda_decode_refuses(cache, dtype) is None)
