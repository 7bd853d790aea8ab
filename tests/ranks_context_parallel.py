"""What holds on each of two ranks of context parallelism; test_context_parallel.py runs it."""

from __future__ import annotations

import torch
from torch.distributed.tensor.debug import CommDebugMode

import torch_pagedkv
from torch_pagedkv import PagedBatch, blocks_for
from torch_pagedkv.integrations.context_parallel import context_parallel_attention, local_batch, local_length

HEADS, KV_HEADS, DIM, VALUE_DIM, BLOCK, BLOCKS = 4, 2, 16, 8, 4, 64


class Ranks:
    """The whole sequences in one pool, for reference, and this rank's share of them in another."""

    def __init__(self, mesh, dtype=torch.float32) -> None:
        self.mesh, self.device = mesh, mesh.device_type
        self.rank, self.num_ranks = mesh.get_local_rank(), mesh.size()
        self.whole, self.local = (
            [torch.full((BLOCKS, BLOCK, KV_HEADS, d), torch.nan, dtype=dtype, device=self.device) for d in sizes]
            for sizes in 2 * [(DIM, VALUE_DIM)]
        )
        self.dtype = dtype

    def batches(self, lengths, queries):
        """Return the reference's batch and the rank's; sequence i owns 16 blocks of either pool, in falling order."""
        here = [local_length(n, block_size=BLOCK, rank=self.rank, num_ranks=self.num_ranks) for n in lengths]
        whole, local = (
            [[16 * i + 15 - column for column in range(blocks_for(n, BLOCK))] for i, n in enumerate(counts)]
            for counts in (lengths, here)
        )
        width = max(map(len, local), default=0)
        rows = [row + [-1] * (width - len(row)) for row in local]
        table = torch.tensor(rows, dtype=torch.int32, device=self.device).reshape(len(rows), width)
        batch = PagedBatch.from_sequences(whole, lengths, queries, block_size=BLOCK, device=self.device)
        mixed = PagedBatch(table, batch.seqused_k, batch.cu_seqlens_q, torch.empty_like(batch.slot_mapping))
        return batch, local_batch(mixed, block_size=BLOCK, mesh=self.mesh)

    def rows(self, num_tokens):
        def make(heads, dim):
            return torch.randn(num_tokens, heads, dim).to(self.device, self.dtype)

        return make(HEADS, DIM), make(KV_HEADS, DIM), make(KV_HEADS, VALUE_DIM)

    def step(self, lengths, queries=None, **options):
        """Write and read both ways; return both outputs."""
        whole, local = self.batches(lengths, queries)
        query, key, value = self.rows(whole.num_tokens)
        torch_pagedkv.reshape_and_cache(key, value, *self.whole, whole.slot_mapping)
        torch_pagedkv.reshape_and_cache(key, value, *self.local, local.slot_mapping)
        read = (whole.block_table, whole.seqused_k, whole.cu_seqlens_q)
        expected = torch_pagedkv.paged_attention(query, *self.whole, *read, **options)
        return context_parallel_attention(query, *self.local, local, mesh=self.mesh, **options), expected


def check_prefill_chunks_and_decode(mesh):
    """Prompts that end within a block, at its end and in the first one; a chunk; single steps; an empty sequence."""
    ranks = Ranks(mesh)
    for lengths, queries in (
        ([37, 8, 3, 0], [37, 8, 3, 0]),
        ([45, 9, 4, 0], [8, 1, 1, 0]),
        ([46, 10, 5], None),
        ([47, 11, 6, 1], None),
        ([3, 1], [3, 1]),  # one rank owns no block
        ([], []),
    ):
        torch.testing.assert_close(*ranks.step(lengths, queries), atol=2e-6, rtol=2e-5)


def check_options(mesh):
    sinks = torch.randn(HEADS).to(mesh.device_type)
    for options in ({"sinks": sinks}, {"softcap": 3.0, "softmax_scale": 0.5}):
        torch.testing.assert_close(*Ranks(mesh).step([21, 5], [21, 5], **options), atol=2e-6, rtol=2e-5)


def check_half_precision(mesh):
    """Parts are merged in float32: two roundings to bfloat16, the part's and the result's."""
    actual, expected = Ranks(mesh, torch.bfloat16).step([60, 33], [60, 33])
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, atol=2**-7, rtol=2**-7)


def check_one_collective_and_the_same_bits(mesh):
    ranks = Ranks(mesh)
    with CommDebugMode() as seen:
        out, _ = ranks.step([37, 8], [37, 8])
    assert seen.get_total_counts() == 1, seen.get_comm_counts()
    gathered = [torch.empty_like(out) for _ in range(ranks.num_ranks)]
    torch.distributed.all_gather(gathered, out)
    assert all(torch.equal(other, out) for other in gathered)


def check_padding_rows(mesh):
    """Rows past the last sequence write nothing and give 0."""
    ranks = Ranks(mesh)
    table = torch.tensor([[3, 2, 1]], dtype=torch.int32, device=ranks.device)
    whole = PagedBatch.from_sequences([[0, 1, 2]], [9], [9], block_size=BLOCK, device=ranks.device)
    slots = torch.empty(12, dtype=torch.int64, device=ranks.device)
    local = local_batch(
        PagedBatch(table, whole.seqused_k, whole.cu_seqlens_q, slots), block_size=BLOCK, mesh=ranks.mesh
    )
    assert (local.slot_mapping[9:] == -1).all() and (local.seqused_k[9:] == 0).all()
    query, key, value = ranks.rows(12)
    torch_pagedkv.reshape_and_cache(key, value, *ranks.local, local.slot_mapping)
    assert not context_parallel_attention(query, *ranks.local, local, mesh=ranks.mesh)[9:].any()


def check_compiles_whole(mesh):
    ranks = Ranks(mesh)
    ranks.step([37, 8], [37, 8])
    whole, local = ranks.batches([38, 9], None)
    query, key, value = ranks.rows(2)

    def step(query, key, value, pools, table, lengths, slots):
        rank_batch = local_batch(PagedBatch(table, lengths, None, slots), block_size=BLOCK, mesh=mesh)
        torch_pagedkv.reshape_and_cache(key, value, *pools, rank_batch.slot_mapping)
        return context_parallel_attention(query, *pools, rank_batch, mesh=mesh)

    pools = [pool.clone() for pool in ranks.local]
    args = (local.block_table, whole.seqused_k, whole.slot_mapping)
    expected = step(query, key, value, ranks.local, *args)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value, pools, *args), expected)
    for pool, wanted in zip(pools, ranks.local):
        assert torch.equal(pool.nan_to_num(7.0), wanted.nan_to_num(7.0))


def check_refusals(mesh):
    square = torch.distributed.init_device_mesh(mesh.device_type, (2, 1), mesh_dim_names=("context", "heads"))
    try:
        local_batch(None, block_size=BLOCK, mesh=square)
        raise AssertionError("not refused")
    except ValueError as error:
        assert "local_batch: mesh must have one dimension" in str(error)
