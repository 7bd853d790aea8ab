"""What inspect.explain says of the CUDA C++ kernels is what their sources do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from cases import BF16, E4M3, E5M2, FP16, FP32
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
    assert constant("kWarps", problem) == cuda_kernels.WARPS_OF_DECODE
    assert constant("kMostDecodeDim", problem) == cuda_kernels.WIDEST_HEAD
    for_fp8, for_floats = source("decode_variant.cuh").partition("kIsFp8")[2].split("else", 1)
    for is_fp8, text in ((True, for_fp8), (False, for_floats)):
        tiles = re.findall(r"DecodeTile<POOL, (\d+), (\d+),", text)
        assert {int(dim): int(keys) for dim, keys in tiles} == cuda_kernels.KEYS_OF_WARP[is_fp8]


@pytest.mark.parametrize(
    "name,step",
    [
        ("reshape_and_cache.cu", "threads(lanes, std::max(1u, kThreads / lanes))"),
        ("reshape_and_cache.cu", "passes = (packs + kThreads - 1) / kThreads;"),
        ("reshape_and_cache.cu", "lanes = static_cast<uint32_t>((packs + passes - 1) / passes);"),
        ("reshape_and_cache.cu", "first_of_cta = static_cast<int64_t>(blockIdx.x) * blockDim.y * TOKENS;"),
        ("reshape_and_cache.cu", "first_token = first_of_cta + threadIdx.y;"),
        ("reshape_and_cache.cu", "token = first_token + i * blockDim.y;"),
        ("reshape_and_cache.cu", "uint32_t pack = threadIdx.x;"),
        ("reshape_and_cache.cu", "pack += blockDim.x;"),
        ("reshape_and_cache.cu", "is_key = pack < write.key.packs;"),
        ("reshape_and_cache.cu", "head = pack / side->packs_of_head, part = pack % side->packs_of_head;"),
        ("reshape_and_cache.cu", "write.tokens > 1 && write.tokens <= kLongestSearch) { write_tokens<Move, 1, true>"),
        ("reshape_and_cache.cu", "is_one_head = source.heads == 1 || (adjoin && scales.is_one_for_all());"),
        ("reshape_and_cache.cu", "constexpr int kElements = 16 / sizeof(Source);"),
        ("decode_tile.cuh", "kTile = 4 * KEYS;"),
        ("decode_fragments.cuh", "kPacks = TILE::kRowBytes / 16;"),
        ("decode_fragments.cuh", "position = start + static_cast<int>(threadIdx.x) % TILE::kKeys;"),
        ("decode_fragments.cuh", "byte = lane % kPacks * 16;"),
        ("decode_fragments.cuh", "row = (pass * 32 + lane) / kPacks;"),
        ("decode_attention.cuh", "((sequence.first_tile + segment.first + index) * kWarps + warp) * kKeys;"),
        ("paged_attention.cu", "if (query.scalar_type() == ScalarType::Float) return false;"),
        ("paged_attention.cu", "is_aligned = is_aligned && cache.size(3) * element % 16 == 0;"),
    ],
)
def test_steps_are_those_of_the_sources(name, step):
    """Whoever changes a step that is restated finds out here that the walk has to change too."""
    assert step in source(name)


PACKS = [
    (BF16, BF16, 8, 128, "NHD", (8, 256, 1)),
    (BF16, BF16, 8, 128, "HND", (8, 256, 1)),
    (BF16, BF16, 2, 64, "NHD", (8, 32, 8)),
    (BF16, BF16, 16, 512, "HND", (8, 256, 1)),
    (BF16, BF16, 3, 20, "NHD", (4, 30, 8)),
    (BF16, BF16, 3, 20, "HND", (4, 30, 8)),
    (BF16, BF16, 2, 20, "NHD", (8, 10, 25)),  # heads adjoin, so packs may cross them
    (BF16, BF16, 2, 20, "HND", (4, 20, 12)),
    (BF16, BF16, 3, 120, "NHD", (8, 90, 2)),
    (BF16, BF16, 1, 63, "NHD", (1, 126, 2)),
    (FP16, FP16, 12, 128, "NHD", (8, 192, 1)),
    (FP32, FP32, 4, 64, "NHD", (4, 128, 2)),
    (BF16, E4M3, 8, 128, "NHD", (8, 256, 1)),
    (BF16, E4M3, 3, 20, "HND", (1, 120, 2)),
    (FP32, E5M2, 8, 128, "NHD", (4, 256, 1)),
    (E4M3, E4M3, 8, 128, "HND", (16, 128, 2)),
]


@pytest.mark.parametrize("dtype,pool,heads,dim,layout,expected", PACKS, ids=str)
def test_packs_and_threads_of_a_token(dtype, pool, heads, dim, layout, expected):
    """By hand, from the rules at the head of reshape_and_cache.cu."""
    key_cache, _, _ = make_pools(layout, 4, 16, heads, dim, dim, pool, "cpu")
    lanes = cuda_kernels.lanes_of_cuda_write(torch.empty((5, heads, dim), dtype=dtype), key_cache, 0)
    assert (lanes.pack, lanes.threads, lanes.rows) == expected
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


def test_tokens_of_a_call_have_rows_of_a_cta():
    walks = [inspect.explain([7, 2, 9], 16, 20, token=token) for token in (0, 1, 7, 8, 20)]
    assert [walk.lanes.thread_of(127) for walk in walks] == [(0, 15), (1, 15), (7, 15), (0, 15), (4, 15)]


@pytest.mark.parametrize("head_dim,dtype,packs", [(64, BF16, 8), (40, BF16, 8), (128, E4M3, 8), (256, FP16, 32)])
def test_every_lane_of_a_warp_copies_as_much(head_dim, dtype, packs):
    """A warp's keys, of which each takes as many packs as the widest head of its variant, fill its lanes in turn."""
    copied = []
    for position in range(64):
        tile = inspect.explain(range(8), 16, position, head_dim=head_dim, dtype=dtype, length=128).tile
        assert tile.packs == packs and tile.index * tile.keys + tile.row == position
        assert tile.row == tile.warp * tile.keys_of_warp + tile.key_of_warp
        copied.append([tile.lane_of(feature) for feature in range(0, head_dim, 16 // dtype.itemsize)])
        first = tile.key_of_warp * packs % 32
        assert copied[-1] == list(range(first, first + len(copied[-1])))


@pytest.mark.parametrize(
    "why,options",
    [
        ("CUDA C++ takes no float32", {"dtype": FP32}),
        ("CUDA C++ takes heads of up to 256", {"head_dim": 264}),
        ("CUDA C++ takes rows at multiples of 16 bytes", {"head_dim": 20}),
        ("CUDA C++ takes rows at multiples of 16 bytes", {"strides": [4096, 132, 64]}),
    ],
)
def test_what_cuda_cpp_does_not_take_is_told_as_triton(why, options):
    printed = str(inspect.explain([7, 2, 9], 16, 20, **options))
    assert f"read by paged_attention on CUDA, in Triton ({why})" in printed
    assert "written by reshape_and_cache on CUDA, in CUDA C++" in printed


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA: no GPU on this machine")


@needs_cuda
@pytest.mark.parametrize("head_dim,dtype", [(64, BF16), (20, BF16), (264, BF16), (256, FP16), (128, FP32)], ids=str)
def test_the_library_takes_what_the_walk_says(head_dim, dtype):
    from torch_pagedkv.ops.kernel_choice import cuda_attention_takes, cuda_kernel

    if cuda_kernel("paged_attention", torch.cuda.current_device()) is None:
        pytest.skip("CUDA C++: the library was not built")
    cache = torch.empty(4, 16, 2, head_dim, dtype=dtype, device="cuda")
    query = torch.empty(1, 2, head_dim, dtype=dtype, device="cuda")
    table = torch.zeros(1, 4, dtype=torch.int32, device="cuda")
    takes = cuda_attention_takes()(query, cache, cache, table)
    assert takes == (cuda_kernels.why_cuda_decode_refuses(cache, dtype) is None)
