"""PagedBatch: built from lists, refilled in place, advanced on the device, through compilers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
import torch.utils._python_dispatch
from hypothesis import given, settings
from hypothesis import strategies as st

from devices import needs_cuda
from torch_pagedkv.cache import PagedBatch, slot_of
from torch_pagedkv.ops import compute_slot_mapping

BLOCK_SIZE = 16


def tensors(batch):
    return batch.block_table, batch.seqused_k, batch.cu_seqlens_q, batch.slot_mapping


def as_lists(batch):
    return [None if tensor is None else tensor.tolist() for tensor in tensors(batch)]


@st.composite
def sequences(draw, max_batch=4, max_blocks=4):
    """Block tables, lengths and query lengths of a legal batch, and its block size."""
    block_size = draw(st.integers(1, 5))
    tables, seq_lens, query_lens = [], [], []
    for _ in range(draw(st.integers(0, max_batch))):
        table = draw(st.lists(st.integers(0, 30), max_size=max_blocks))
        tables.append(table)
        seq_lens.append(draw(st.integers(0, len(table) * block_size)))
        query_lens.append(draw(st.integers(0, seq_lens[-1])))
    return tables, seq_lens, query_lens, block_size


def test_checkpoint(device):
    batch = PagedBatch.from_sequences([[7, 2, 9]], [21], [1], block_size=16, device=device)
    assert as_lists(batch) == [[[7, 2, 9]], [21], [0, 1], [36]]
    assert all(tensor.device.type == device for tensor in tensors(batch))


@given(case=sequences())
@settings(deadline=None)
def test_from_sequences_agrees_with_addressing_and_with_the_op(case):
    tables, seq_lens, query_lens, block_size = case
    batch = PagedBatch.from_sequences(tables, seq_lens, query_lens, block_size=block_size)
    width = max(map(len, tables), default=0)
    assert batch.block_table.shape == (len(tables), width)
    assert batch.block_table.tolist() == [t + [-1] * (width - len(t)) for t in tables]
    assert batch.seqused_k.tolist() == seq_lens
    assert batch.cu_seqlens_q.tolist() == [sum(query_lens[:i]) for i in range(len(tables) + 1)]
    expected = [
        slot_of(table, position, block_size)
        for table, length, query in zip(tables, seq_lens, query_lens, strict=True)
        for position in range(length - query, length)
    ]
    assert batch.slot_mapping.tolist() == expected
    assert (batch.num_sequences, batch.num_tokens) == (len(tables), sum(query_lens))
    dtypes = [tensor.dtype for tensor in tensors(batch)]
    assert dtypes == [torch.int32, torch.int32, torch.int32, torch.int64]
    table, lengths, starts, slots = tensors(batch)
    assert torch.equal(compute_slot_mapping(table, lengths, starts, block_size, len(slots)), slots)


@given(before=sequences(), after=sequences())
@settings(deadline=None)
def test_update_leaves_nothing_of_the_step_before(before, after):
    used, fresh = (PagedBatch.fixed(5, 6, 100) for _ in range(2))
    addresses = [tensor.data_ptr() for tensor in tensors(used)]
    for tables, seq_lens, query_lens, block_size in (before, after):
        used.update_(tables, seq_lens, query_lens, block_size=block_size)
    fresh.update_(*after[:3], block_size=after[3])
    assert as_lists(used) == as_lists(fresh)
    assert [tensor.data_ptr() for tensor in tensors(used)] == addresses
    exact = PagedBatch.from_sequences(*after[:3], block_size=after[3])
    n, width, num_tokens = exact.num_sequences, exact.block_table.shape[1], exact.num_tokens
    assert torch.equal(used.block_table[:n, :width], exact.block_table)
    assert torch.equal(used.slot_mapping[:num_tokens], exact.slot_mapping)
    assert used.seqused_k.tolist() == exact.seqused_k.tolist() + [0] * (5 - n)
    assert used.cu_seqlens_q.tolist() == exact.cu_seqlens_q.tolist() + [num_tokens] * (5 - n)
    assert bool((used.block_table[n:] == -1).all() and (used.block_table[:, width:] == -1).all())
    assert bool((used.slot_mapping[num_tokens:] == -1).all())


class OpsOn(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the ops that run on a device, whatever they return."""

    def __init__(self, device):
        super().__init__()
        self.device, self.names = device, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves((args, result))
        if any(isinstance(leaf, torch.Tensor) and leaf.device.type == self.device for leaf in leaves):
            self.names.append(function.overloadpacket.__name__)
        return result


@pytest.mark.parametrize("max_tokens", [None, 16], ids=["decode", "mixed"])
def test_update_allocates_nothing_on_the_device(max_tokens):
    """On any device other than the host's all that runs there is a copy into each tensor."""
    batch = PagedBatch.fixed(3, 4, max_tokens, device="meta")
    with OpsOn("meta") as ops:
        batch.update_([[7, 2, 9], [4]], [21, 3], block_size=16)
    assert ops.names == ["copy_"] * sum(tensor is not None for tensor in tensors(batch))


@needs_cuda
@pytest.mark.parametrize("max_tokens", [None, 512], ids=["decode", "packed"])
def test_update_takes_no_memory_of_the_gpu_and_does_not_wait(max_tokens):
    batch = PagedBatch.fixed(256, 64, max_tokens, device="cuda")
    query_lens = None if max_tokens is None else [2] * 200
    tables = [list(range(i, i + 64)) for i in range(200)]
    batch.update_(tables, [1000] * 200, query_lens, block_size=16)  # its pinned memory is there from now on
    torch.cuda.synchronize()
    addresses = [t.data_ptr() for t in batch._fields() if t is not None]
    counted = ("allocation.all.allocated", "requested_bytes.all.allocated", "num_alloc_retries")
    before = [torch.cuda.memory_stats()[name] for name in counted]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for length in (990, 1000, 1024):
            batch.update_(tables, [length] * 200, query_lens, block_size=16)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [torch.cuda.memory_stats()[name] for name in counted] == before
    assert [t.data_ptr() for t in batch._fields() if t is not None] == addresses
    expected = PagedBatch.fixed(256, 64, max_tokens, device="cpu")
    expected.update_(tables, [1024] * 200, query_lens, block_size=16)
    for actual, wanted in zip(batch._fields(), expected._fields()):
        assert (actual is None and wanted is None) or torch.equal(actual.cpu(), wanted)


def test_decode_form_has_one_token_for_each_sequence(device):
    batch = PagedBatch.from_sequences([[7, 2, 9], [4]], [21, 3], block_size=16, device=device)
    assert as_lists(batch) == [[[7, 2, 9], [4, -1, -1]], [21, 3], None, [36, 66]]
    fixed = PagedBatch.fixed(3, 4, device=device)
    assert as_lists(fixed) == [[[-1] * 4] * 3, [0, 0, 0], None, [-1, -1, -1]]
    fixed.update_([[7, 2, 9], [4]], [21, 3], [1, 1], block_size=16)
    assert as_lists(fixed) == [
        [[7, 2, 9, -1], [4, -1, -1, -1], [-1] * 4],
        [21, 3, 0],
        None,
        [36, 66, -1],
    ]


def test_the_form_does_not_depend_on_lengths():
    assert PagedBatch.from_sequences([[3]], [1], [1], block_size=16).cu_seqlens_q is not None


def test_fixed_is_all_padding(device):
    batch = PagedBatch.fixed(2, 3, 4, device=device)
    assert as_lists(batch) == [[[-1] * 3] * 2, [0, 0], [0, 0, 0], [-1] * 4]
    assert all(tensor.device.type == device for tensor in tensors(batch))


def test_blocks_before_the_new_tokens_may_be_released():
    batch = PagedBatch.from_sequences([[-1, 2, 9]], [21], [2], block_size=16)
    assert batch.slot_mapping.tolist() == [35, 36]


def test_tables_may_be_tensors():
    tables = torch.tensor([[7, 2, 9], [4, 0, 0]])
    batch = PagedBatch.from_sequences(tables, torch.tensor([21, 3]), block_size=16)
    assert batch.slot_mapping.tolist() == [36, 66]


BAD = [
    (
        ([[7]], [17], [1]),
        ValueError,
        "block_tables[0] must have 2 blocks of 16 for 17 tokens, got 1",
    ),
    (([[7]], [3], [4]), ValueError, "seq_lens[0] must include 4 new tokens, got 3"),
    (([[7]], [0]), ValueError, "seq_lens[0] must include 1 new tokens, got 0"),
    (([[7, -1]], [17], [1]), ValueError, "block_tables[0] must hold ids >= 0 for its new tokens"),
    (([[7, -1]], [20], [8]), ValueError, "block_tables[0] must hold ids >= 0 for its new tokens"),
    (([[7]], [1, 2], [1]), ValueError, "seq_lens must have one element for each of 1 block_tables"),
    (
        ([[7]], [1], [1, 1]),
        ValueError,
        "query_lens must have one element for each of 1 block_tables",
    ),
    (([[7]], [-1], [0]), ValueError, "seq_lens[0] must be >= 0, got -1"),
    (([[7]], [1], [-1]), ValueError, "query_lens[0] must be >= 0, got -1"),
    (([[7]], [1.0], [1]), TypeError, "seq_lens[0] must be an integer, got 1.0"),
    (([[7]], [1], [True]), TypeError, "query_lens[0] must be an integer, got True"),
    (([[7.0]], [1], [1]), TypeError, "block_tables[0] must be a sequence of block ids, got [7.0]"),
    (([7], [1], [1]), TypeError, "block_tables[0] must be a sequence of block ids, got 7"),
    (([b"1234"], [1], [1]), TypeError, "block_tables[0] must be a sequence of block ids"),
    ((7, [1], [1]), TypeError, "block_tables must be a sequence of lists of block ids, got 7"),
    (([[2**31]], [1], [1]), ValueError, "block_tables[0] must hold ids that fit into int32"),
]


@pytest.mark.parametrize("arguments,error,sentence", BAD, ids=lambda value: None)
def test_refusals_change_nothing(arguments, error, sentence):
    with pytest.raises(error) as caught:
        PagedBatch.from_sequences(*arguments, block_size=BLOCK_SIZE)
    assert str(caught.value).startswith(f"PagedBatch.from_sequences: {sentence}")
    batch = PagedBatch.fixed(2, 2, 20)
    batch.update_([[5, 6]], [20], [3], block_size=BLOCK_SIZE)
    before = as_lists(batch)
    with pytest.raises(error) as caught:
        batch.update_(*arguments, block_size=BLOCK_SIZE)
    assert str(caught.value).startswith(f"PagedBatch.update_: {sentence}")
    assert as_lists(batch) == before


@pytest.mark.parametrize(
    "arguments,sentence",
    [
        (([[1], [2], [3]], [1] * 3), "block_tables must have at most 2 sequences, got 3"),
        (([[1], [2, 3, 4]], [1] * 2), "block_tables[1] must have at most 2 blocks, got 3"),
        (([[1, 2]], [30], [21]), "query_lens must have at most 20 tokens in total, got 21"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, sentence):
    batch = PagedBatch.fixed(2, 2, 20)
    before = as_lists(batch)
    with pytest.raises(ValueError) as caught:
        batch.update_(*arguments, block_size=BLOCK_SIZE)
    assert str(caught.value) == f"PagedBatch.update_: {sentence}"
    assert as_lists(batch) == before


def test_decode_form_takes_no_other_query_lengths():
    batch = PagedBatch.fixed(2, 2)
    with pytest.raises(ValueError, match="query_lens must be 1 for each sequence"):
        batch.update_([[1], [2]], [4, 4], [1, 2], block_size=BLOCK_SIZE)
    with pytest.raises(TypeError, match="block_size must be an integer"):
        batch.update_([[1]], [4], block_size=None)
    with pytest.raises(ValueError, match=r"PagedBatch\.fixed: max_blocks must be >= 0, got -1"):
        PagedBatch.fixed(2, -1)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_advance_is_update_with_one_token_more(compiled, device):
    torch._dynamo.reset()

    def step(batch):
        batch.advance_(block_size=4)

    if compiled:
        step = torch.compile(step, backend="aot_eager", fullgraph=True)
    tables, lengths = [[7, 2, 9], [4, 1, 3]], [3, 6]
    batch, expected = (PagedBatch.fixed(3, 3, device=device) for _ in range(2))
    batch.update_(tables, lengths, block_size=4)
    addresses = [t.data_ptr() for t in tensors(batch) if t is not None]
    for added in range(1, 7):  # sequence 1 fills its last block
        step(batch)
        expected.update_(tables, [length + added for length in lengths], block_size=4)
        assert as_lists(batch) == as_lists(expected)
    assert [t.data_ptr() for t in tensors(batch) if t is not None] == addresses


def test_advance_past_the_table_raises_on_cpu_and_stores_nothing_on_cuda(device):
    batch = PagedBatch.fixed(3, 2, device=device)
    # The second sequence leaves its row, the third enters a column that names no block yet.
    batch.update_([[1, 2], [3, 4], [5]], [5, 8, 4], block_size=4)
    before = as_lists(batch)
    if device == "cpu":
        with pytest.raises(ValueError, match="compute_slot_mapping: "):
            batch.advance_(block_size=4)
        assert as_lists(batch) == before
    else:
        batch.advance_(block_size=4)
        assert batch.slot_mapping.tolist() == [9, -1, -1]


def test_advance_refuses_a_batch_with_prefix_sums():
    batch = PagedBatch.from_sequences([[1]], [1], [1], block_size=4)
    with pytest.raises(ValueError, match="advance_: cu_seqlens_q must be None"):
        batch.advance_(block_size=4)


def test_fields_can_not_be_rebound():
    batch = PagedBatch.fixed(1, 1)
    with pytest.raises(AttributeError):
        batch.seqused_k = torch.zeros(1)


def test_default_device_moves_the_result_and_not_the_host_work():
    with torch.device("meta"):
        assert PagedBatch.fixed(1, 1, 1).block_table.device.type == "meta"
        batch = PagedBatch.from_sequences([[7]], [1], block_size=4)
        assert all(t.device.type == "meta" for t in tensors(batch) if t is not None)
        batch = PagedBatch.from_sequences([[7]], [1], block_size=4, device="cpu")
    assert as_lists(batch) == [[[7]], [1], None, [28]]


def test_to_moves_every_tensor():
    moved = PagedBatch.from_sequences([[7]], [1], [1], block_size=4).to("meta")
    assert [t.device.type for t in tensors(moved)] == ["meta"] * 4
    assert PagedBatch.fixed(1, 1).to("meta").cu_seqlens_q is None


def test_made_in_inference_mode_it_can_be_written_outside():
    with torch.inference_mode():
        fixed, exact = PagedBatch.fixed(1, 3), PagedBatch.from_sequences([[7]], [1], block_size=4)
    fixed.update_([[7, 2, 9]], [21], block_size=16)
    exact.advance_(block_size=4)
    assert exact.slot_mapping.tolist() == [29]


def lookup(batch):
    starts = 0 if batch.cu_seqlens_q is None else batch.cu_seqlens_q.sum()
    return batch.block_table.sum() + batch.seqused_k.sum() + batch.slot_mapping.sum() + starts


@pytest.mark.parametrize("query_lens", [[1, 3], None], ids=["mixed", "decode"])
def test_is_an_argument_of_compiled_and_exported_functions(query_lens):
    torch._dynamo.reset()
    batch = PagedBatch.from_sequences([[7, 2, 9], [4]], [21, 3], query_lens, block_size=16)
    compiled = torch.compile(lookup, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(batch), lookup(batch))

    class Lookup(torch.nn.Module):
        def forward(self, batch):
            return lookup(batch)

    program = torch.export.export(Lookup(), (batch,))
    other = copy.deepcopy(batch)
    other.seqused_k.add_(1)
    assert torch.equal(program.module()(other), lookup(other))


def test_new_lengths_do_not_compile_again():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(lookup, backend=counter, fullgraph=True)
    batch = PagedBatch.fixed(2, 4, 8)
    for length in range(1, 30):
        batch.update_([[7, 2, 9]], [length], [min(length, 8)], block_size=16)
        compiled(batch)
    assert counter.frame_count == 1


def test_files_with_a_batch_load_with_weights_only(tmp_path):
    batch = PagedBatch.from_sequences([[7, 2, 9]], [21], [3], block_size=16)
    torch.save(batch, tmp_path / "batch.pt")
    assert repr(torch.load(tmp_path / "batch.pt", weights_only=True)) == repr(batch)
