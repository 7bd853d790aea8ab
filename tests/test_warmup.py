"""warmup: afterwards no call on these pools compiles a Triton kernel, whatever its lengths."""

from __future__ import annotations

import importlib

import pytest
import torch

import torch_pagedkv
from devices import needs_cuda
from torch_pagedkv import kernel_warmup, native
from torch_pagedkv.ops.kernel_choice import triton_launcher

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
HEADS, KV_HEADS, DIM = 8, 2, 64


def pools(device: str, pool_dtype=BF16, layout="NHD", block_size=16):
    shape = (2, 40, block_size, KV_HEADS, DIM) if layout == "NHD" else (2, 40, KV_HEADS, block_size, DIM)
    both = torch.zeros(shape, device=device).to(pool_dtype)
    return (both if layout == "NHD" else both.transpose(2, 3)).unbind(0)


def call_with_many_lengths(key_cache, value_cache, options, scales) -> None:
    """Serve batches of every size that Triton could tell apart: 1, multiples of 16, and others."""
    device, block_size = key_cache.device, key_cache.shape[1]
    for size in (1, 2, 7, 16, 33, 48):
        wide = torch.zeros(size, size + 3, dtype=torch.int32, device=device)
        lengths = torch.zeros(size, dtype=torch.int32, device=device)
        for table in (wide[:, :size], wide[:, 1 : size + 1]):
            for num_tokens, query_len in ((size, None), (size, 1), (5 * size + 3, 5), (300 * size + 1, 300)):
                rows = (torch.zeros(num_tokens, n, DIM, dtype=BF16, device=device) for n in (HEADS, KV_HEADS, KV_HEADS))
                query, key, value = rows
                starts = None
                if query_len is not None:
                    starts = torch.arange(size + 1, dtype=torch.int32, device=device) * query_len
                slots = torch_pagedkv.compute_slot_mapping(table, lengths, starts, block_size, num_tokens)
                torch_pagedkv.reshape_and_cache(key, value, key_cache, value_cache, slots, **scales)
                for more in ({}, {"num_splits": 3}, {"num_splits": 1, "window_size": (64, 3), "causal": False}):
                    batch, more = (table, lengths, starts), {**options, **scales, **more}
                    out, lse = torch_pagedkv.paged_attention(
                        query, key_cache, value_cache, *batch, return_lse=True, **more
                    )
                torch_pagedkv.merge_attention_states(out, lse, out, lse)
            torch_pagedkv.gather_kv(key_cache, value_cache, table, lengths, **scales)
        ids = torch.arange(20, dtype=torch.int32, device=device)
        torch_pagedkv.copy_blocks(key_cache, value_cache, ids[: min(size, 20)], 20 + ids[: min(size, 20)])


VARIANTS = [
    dict(),
    dict(layout="HND", block_size=48),
    dict(pool_dtype=E4M3, scales=("k_scale", "v_scale")),
    dict(options=("softcap", "sinks", "alibi_slopes")),
]


def arguments(device: str, options=(), scales=(), **pool):
    values = dict(softcap=30.0, sinks=torch.zeros(HEADS, device=device), alibi_slopes=torch.zeros(HEADS, device=device))
    options = {name: values[name] for name in options}
    return pools(device, **pool), options, {name: torch.ones(1, device=device) for name in scales}


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_no_length_is_a_kernel_that_warmup_has_not_launched(variant, monkeypatch):
    """Recorded instead of run: this needs no GPU."""
    compiled = pytest.importorskip("test_triton_compile")
    launches = []

    def run(kernel, *values, grid, warmup, **options):
        launches.append(compiled.Launch(kernel, values, options, grid))

    monkeypatch.setattr(compiled.JITFunction, "run", run)
    monkeypatch.setattr(compiled.KERNELS["paged_attention"], "device_limits", lambda _: compiled.LIMITS[90])
    for stem in native.STEMS:
        monkeypatch.setattr(importlib.import_module(f"torch_pagedkv.ops.{stem}"), "native_kernel", triton_launcher)
    both, options, scales = arguments("cpu", **variant)
    kernel_warmup.call_every_op(both, HEADS, BF16, options, scales, torch.int32, torch.int64)
    warm = compiled.specialisations(launches)
    launches.clear()
    call_with_many_lengths(*both, options, scales)
    assert compiled.specialisations(launches) <= warm
    # Not one more than needed, and the write, the two tiles, decode, the merges and the rest are among them.
    assert len(warm) == len(compiled.specialisations(launches)) >= 9


@needs_cuda
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_nothing_compiles_afterwards_on_cuda(variant):
    from torch_pagedkv.triton_kernels.compiled_kernels import num_compiled

    both, options, scales = arguments("cuda", **variant)
    before = num_compiled()
    assert torch_pagedkv.warmup(*both, HEADS, dtype=BF16, **options, **scales) == num_compiled() - before
    before = num_compiled()
    call_with_many_lengths(*both, options, scales)
    assert num_compiled() == before > 0
    assert torch_pagedkv.warmup(*both, HEADS, dtype=BF16, **options, **scales) == 0


def test_pools_stay_as_they_are(device):
    key_cache, value_cache = pools(device)
    key_cache.fill_(1.0)
    value_cache.fill_(2.0)
    torch_pagedkv.warmup(key_cache, value_cache, HEADS)
    assert (key_cache == 1.0).all() and (value_cache == 2.0).all()


def test_nothing_is_compiled_on_cpu():
    assert torch_pagedkv.warmup(*pools("cpu"), HEADS) == 0


def test_what_is_refused(device):
    both = pools(device)
    with pytest.raises(ValueError, match=r"^warmup: num_heads must be a positive multiple of num_kv_heads = 2, got 3$"):
        torch_pagedkv.warmup(*both, 3)
    with pytest.raises(TypeError, match=r"^warmup: dtype must be float32, bfloat16, float16 or None, got torch.int32$"):
        torch_pagedkv.warmup(*both, HEADS, dtype=torch.int32)
    with pytest.raises(TypeError, match=r"^warmup: slot_dtype must be torch.int32 or torch.int64, got torch.int16$"):
        torch_pagedkv.warmup(*both, HEADS, slot_dtype=torch.int16)
    with pytest.raises(TypeError, match=r"^warmup: key_cache must have dtype"):
        torch_pagedkv.warmup(both[0].int(), both[1], HEADS)
