"""SwapSpace, and blocks that are shared, copied and swapped in real pools, held against plain tensors."""

from __future__ import annotations

import random

import pytest
import torch

from cases import BF16, E4M3, E5M2, FP16, FP32
from devices import needs_cuda
from pools import assert_same_bits
from torch_pagedkv.cache import BlockManager, OutOfBlocks, PagedBatch, PagedKVCache, SwapSpace
from torch_pagedkv.cache import swap_space as swap_space_module
from torch_pagedkv.ops import gather_kv, reshape_and_cache


def make(device, *, num_blocks=6, dtype=FP32, **sizes):
    cache = PagedKVCache(3, 2, 6, **{"block_size": 4, "num_blocks": num_blocks, "dtype": dtype, **sizes}, device=device)
    # Every byte there is: NaN payloads and negative zeros must survive too.
    cache.storage.view(torch.uint8).random_(256)
    return cache


def block_of(cache, block):
    return [pool[block].clone() for pair in cache for pool in pair]


@pytest.mark.parametrize("staging_blocks", [1, 2, 16])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, E4M3, E5M2], ids=str)
def test_bits_survive_the_way_there_and_back(dtype, layout, staging_blocks, device):
    cache = make(device, dtype=dtype, kv_layout=layout, value_head_dim=5)
    swap_space = SwapSpace(cache, 5, staging_blocks=staging_blocks)
    assert swap_space.nbytes == 5 * cache.bytes_per_block
    before = [block_of(cache, block) for block in range(6)]
    swap_space.swap_out([(4, 0), (1, 3), (5, 2), (0, 4)])
    cache.storage.view(torch.uint8).random_(256)
    untouched = [block_of(cache, block) for block in range(6)]
    swap_space.swap_in([(3, 0), (0, 4), (2, 2)])
    expected = {**dict(enumerate(untouched)), 0: before[1], 4: before[4], 2: before[5]}
    for block, tensors in expected.items():
        for actual, tensor in zip(block_of(cache, block), tensors):
            assert_same_bits(actual, tensor)


def test_a_block_may_go_to_several_places(device):
    cache = make(device)
    swap_space = SwapSpace(cache, 2)
    before = block_of(cache, 3)
    swap_space.swap_out([(3, 0), (3, 1)])
    swap_space.swap_in([(0, 1), (0, 2), (1, 5)])
    for block in (1, 2, 5):
        for actual, tensor in zip(block_of(cache, block), before):
            assert_same_bits(actual, tensor)


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_nothing_to_swap(num_blocks, device):
    cache = make(device, num_blocks=num_blocks)
    before = cache.storage.clone()
    swap_space = SwapSpace(cache, 0)
    swap_space.swap_out([])
    swap_space.swap_in([])
    cache.copy_blocks([])
    assert_same_bits(cache.storage, before)


BAD = [
    ([(1, 0), (6, 1)], ValueError, "pairs[1] must have a source in [0, 6), got 6"),
    ([(-1, 0)], ValueError, "pairs[0] must have a source in [0, 6), got -1"),
    ([(1, 0), (0, 6)], ValueError, "pairs[1] must have a destination in [0, 6), got 6"),
    ([(0, 1, 2)], ValueError, "pairs[0] must be a (source, destination), got (0, 1, 2)"),
    ([(1, 0), (0, 1.0)], TypeError, "pairs[1][1] must be an integer, got 1.0"),
    ([0], TypeError, "pairs[0] must be a sequence of integers, got 0"),
    (0, TypeError, "pairs must be a sequence of (source, destination), got 0"),
]
TWICE = ([(0, 1), (2, 1)], ValueError, "pairs must name a destination once, got 1 more often")
ITSELF = ([(1, 0), (2, 2)], ValueError, "pairs[1] must name two blocks, got 2 twice")


@pytest.mark.parametrize("method,more", [("swap_out", TWICE), ("swap_in", TWICE), ("copy_blocks", ITSELF)])
def test_refusals_change_nothing(method, more, device):
    cache = make(device)
    swap_space = SwapSpace(cache, 6)
    swap_space.swap_out([(block, block) for block in range(6)])
    before = cache.storage.clone()
    owner = cache if method == "copy_blocks" else swap_space
    for pairs, error, sentence in [*BAD, more]:
        with pytest.raises(error) as caught:
            getattr(owner, method)(pairs)
        assert str(caught.value) == f"{type(owner).__name__}.{method}: {sentence}"
    assert_same_bits(cache.storage, before)
    swap_space.swap_in([(block, block) for block in range(6)])
    assert_same_bits(cache.storage, before)


@pytest.mark.parametrize(
    "host_blocks,runs",
    [
        ([], []),
        ([4], [(0, 1, 4)]),
        ([2, 3, 4, 7, 9, 10], [(0, 3, 2), (3, 4, 7), (4, 6, 9)]),
        ([1, 1, 2], [(0, 1, 1), (1, 3, 1)]),
    ],
    ids=str,
)
def test_host_blocks_in_a_row_are_one_copy(host_blocks, runs):
    assert list(swap_space_module._runs(host_blocks)) == runs


def test_constructor_refusals():
    cache = make("cpu")
    with pytest.raises(ValueError, match="SwapSpace: num_blocks must be >= 0, got -1"):
        SwapSpace(cache, -1)
    with pytest.raises(ValueError, match="SwapSpace: staging_blocks must be >= 1, got 0"):
        SwapSpace(cache, 1, staging_blocks=0)
    with pytest.raises(TypeError, match="SwapSpace: cache must be a PagedKVCache, got int"):
        SwapSpace(7, 1)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "pairs",
    [[(0, 1), (0, 2), (4, 3)], [(0, 1), (1, 2)], [(0, 1), (2, 0)], [(0, 1), (2, 1)], [(0, 1), (1, 2), (5, 2), (2, 0)]],
    ids=["independent", "chain", "read_then_written", "written_twice", "all"],
)
def test_copies_of_blocks_take_place_in_their_order(pairs, layout, device):
    cache = make(device, kv_layout=layout, value_head_dim=5)
    expected = [block_of(cache, block) for block in range(6)]
    for source, destination in pairs:
        expected[destination] = expected[source]
    cache.copy_blocks(pairs)
    for block, tensors in enumerate(expected):
        for actual, tensor in zip(block_of(cache, block), tensors):
            assert_same_bits(actual, tensor)


class Stored:
    """A manager with real pools; each sequence's keys as it stored them, one row a token."""

    def __init__(self, device, *, sliding_window=None):
        self.cache = PagedKVCache(2, 1, 4, block_size=2, num_blocks=14, dtype=BF16, device=device)
        self.swap_space = SwapSpace(self.cache, 10, staging_blocks=2)
        self.manager = BlockManager(14, 2, num_host_blocks=10, sliding_window=sliding_window)
        self.window, self.rows = sliding_window, {}

    def add(self, tokens):
        number = self.manager.add(tokens)
        self.rows[number] = self.read(number)
        if self.window is None:  # else the first rows are out of sight
            assert self.rows[number][:, 0, 0].tolist() == tokens[: self.manager.num_stored(number)]
        return number

    def fork(self, number):
        child = self.manager.fork(number)
        self.rows[child] = self.rows[number].clone()

    def store(self, number, tokens):
        copies = self.manager.reserve(number, len(tokens))
        self.cache.copy_blocks(copies)
        length = self.manager.num_stored(number) + len(tokens)
        batch = PagedBatch.from_sequences(
            [self.manager.block_table(number)], [length], [len(tokens)], block_size=2, device=self.cache.device
        )
        rows = torch.randn(len(tokens), 1, 4, dtype=BF16, device=self.cache.device)
        rows[:, 0, 0] = torch.tensor(tokens)
        for layer, pools in enumerate(self.cache):
            reshape_and_cache(rows + layer, rows - layer, *pools, batch.slot_mapping)
        self.manager.commit(number, tokens)
        self.rows[number] = torch.cat([self.rows[number], rows])

    def free(self, number):
        self.manager.free(number)
        del self.rows[number]

    def swap(self, number):
        if self.manager.is_swapped_out(number):
            self.swap_space.swap_in(self.manager.swap_in(number))
        else:
            self.swap_space.swap_out(self.manager.swap_out(number))

    def read(self, number, layer=0, part=0):
        index = {"dtype": torch.int32, "device": self.cache.device}
        table = torch.tensor([self.manager.block_table(number)], **index).clamp(min=0)
        length = torch.tensor([self.manager.num_stored(number)], **index)
        return gather_kv(*self.cache[layer], table, length)[part][0, : int(length)].clone()

    def check(self):
        for number, rows in self.rows.items():
            if self.manager.is_swapped_out(number):
                continue
            first = self.manager.block_table(number).count(-1) * 2
            for layer in range(2):
                assert_same_bits(self.read(number, layer)[first:], (rows + layer)[first:])
                assert_same_bits(self.read(number, layer, 1)[first:], (rows - layer)[first:])


@pytest.mark.parametrize("sliding_window", [None, 5])
def test_what_a_sequence_sees_never_changes(sliding_window, device):
    torch.manual_seed(0)
    choose = random.Random(0)
    stored = Stored(device, sliding_window=sliding_window)
    done = dict.fromkeys(("store", "fork", "free", "swap"), 0)
    for i in range(400):
        tokens = [int(choose.random() < 0.2) for _ in range(choose.randrange(1, 6))]
        number = choose.choice(list(stored.rows) or [None])
        if number is None or (len(stored.rows) < 6 and choose.random() < 0.2):
            number = stored.add(tokens * 2)
        kind = choose.choice(list(done)) if len(stored.rows[number]) < 20 else "free"
        try:
            getattr(stored, kind)(number, *([tokens] if kind == "store" else []))
            done[kind] += 1
        except (OutOfBlocks, ValueError):  # the sequence is swapped out, or there is no room
            continue
        if i % 4 == 0:
            stored.check()
    assert min(done.values()) > 20


@needs_cuda
def test_swaps_do_not_make_the_host_wait():
    cache = make("cuda", num_blocks=64)
    swap_space = SwapSpace(cache, 64, staging_blocks=4)
    pairs = [(block, block) for block in range(40)]
    swap_space.swap_out(pairs)
    swap_space.swap_in(pairs)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        swap_space.swap_out(pairs)
        swap_space.swap_in(pairs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@needs_cuda
def test_blocks_may_be_overwritten_as_soon_as_swap_out_returns():
    cache = PagedKVCache(8, 8, 128, num_blocks=256, dtype=BF16, device="cuda")
    cache.storage.normal_()
    expected = cache.storage.clone()
    swap_space = SwapSpace(cache, 256)
    pairs = [(block, block) for block in range(256)]
    for _ in range(3):
        swap_space.swap_out(pairs)
        cache.storage.zero_()
        swap_space.swap_in(pairs)
        assert_same_bits(cache.storage, expected)


def swapped_space(num_blocks=12, **options):
    """A cache whose blocks have all been to the host and back once: later times copy nothing but bytes."""
    cache = make("cuda", num_blocks=num_blocks, dtype=BF16)
    swap_space = SwapSpace(cache, num_blocks, **options)
    everything = [(block, block) for block in range(num_blocks)]
    swap_space.swap_out(everything)
    swap_space.swap_in(everything)
    torch.cuda.synchronize()
    return cache, swap_space, everything


def keep_busy(stream, seconds=0.2):
    """Let a stream do nothing for so long; what is enqueued there comes after."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(int(seconds * 2_000_000_000))
        return stream.record_event()


@needs_cuda
def test_bytes_cross_the_bus_while_the_main_stream_computes():
    """Out: what comes after a swap does not wait for its bytes. In: its bytes do not wait for what came before."""
    cache, swap_space, everything = swapped_space(staging_blocks=6)
    expected = cache.storage.clone()
    main = torch.cuda.current_stream()
    torch.cuda.synchronize()
    swap_space.swap_out(everything)
    computed = keep_busy(main, seconds=2)  # others may use the GPU, too
    swap_space._stream.synchronize()
    assert not computed.query()
    cache.storage.zero_()
    torch.cuda.synchronize()
    computed = keep_busy(main, seconds=2)
    swap_space.swap_in(everything)
    swap_space._stream.synchronize()
    assert not computed.query()
    assert_same_bits(cache.storage, expected)


@needs_cuda
@pytest.mark.parametrize("staging_blocks", [1, 2, 5])
def test_nothing_is_used_again_before_its_copy_ended(staging_blocks):
    """Whichever stream is late, the other one does not take a block or a buffer from it."""
    cache, swap_space, everything = swapped_space(staging_blocks=staging_blocks)
    expected = cache.storage.clone()
    torch.cuda.synchronize()
    keep_busy(swap_space._stream)  # bytes leave late, and the pool is overwritten at once
    swap_space.swap_out(everything)
    cache.storage.zero_()
    torch.cuda.synchronize()
    keep_busy(torch.cuda.current_stream())  # buffers are emptied late
    swap_space.swap_in(everything)
    assert_same_bits(cache.storage, expected)

    before = [block_of(cache, block) for block in (1, 2)]
    keep_busy(swap_space._stream)  # host block 1 is given away while its bytes have not arrived
    swap_space.swap_in([(1, 5)])
    swap_space.swap_out([(2, 1)])
    swap_space.swap_in([(1, 6)])
    for block, tensors in zip((5, 6), before):
        for actual, tensor in zip(block_of(cache, block), tensors):
            assert_same_bits(actual, tensor)


@needs_cuda
def test_a_capture_is_refused():
    cache = make("cuda")
    swap_space = SwapSpace(cache, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(RuntimeError, match="swap_out: must be called outside of a CUDA graph capture"):
            swap_space.swap_out([(0, 0)])
