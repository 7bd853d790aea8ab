"""Compiles the Triton kernels as launches would, for GPUs that need not be there; reads the code.

A launch is recorded instead of run, so that signatures, divisibility hints and options are those of
real calls.
"""

from __future__ import annotations

import os
import re
import subprocess

import pytest
import torch

from torch_pagedkv import native

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("this process interprets Triton", allow_module_level=True)

import importlib  # noqa: E402

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler.compiler import ASTSource, make_backend  # noqa: E402
from triton.runtime.jit import JITFunction, create_function_from_signature  # noqa: E402

from torch_pagedkv.ops import shared_prefix  # noqa: E402
from torch_pagedkv.triton_kernels import attention_tiles  # noqa: E402

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LIMITS = {
    80: attention_tiles.DeviceLimits(108, 166912, warp_groups=False, converts_float8=False, registers=65536),
    86: attention_tiles.DeviceLimits(84, 101376, warp_groups=False, converts_float8=False, registers=65536),
    90: attention_tiles.DeviceLimits(132, 232448, warp_groups=True, converts_float8=True, registers=65536),
    100: attention_tiles.DeviceLimits(148, 232448, warp_groups=True, converts_float8=True, registers=65536),
    942: attention_tiles.DeviceLimits(304, 65536, warp_groups=False, converts_float8=False),
}
# Other versions bring other assemblers, which may put a word or two aside.
SPILLED = 0 if triton.__version__.startswith("3.6.") else 64
TARGETS = {number: GPUTarget("cuda", number, 32) for number in (80, 86, 90, 100)}
TARGETS[942] = GPUTarget("hip", "gfx942", 64)
STEMS = (*native.STEMS, "shared_prefix")
KERNELS = {stem: importlib.import_module(f"torch_pagedkv.triton_kernels.{stem}") for stem in STEMS}


class Launch:
    """One recorded launch of a kernel."""

    def __init__(self, kernel, arguments, options, grid) -> None:
        self.kernel, self.arguments, self.options, self.grid = kernel, arguments, options, grid
        self.named = dict(zip(kernel.arg_names, arguments, strict=False))

    def specialise(self, capability: int):
        backend = make_backend(TARGETS[capability])
        binder = create_function_from_signature(self.kernel.signature, self.kernel.params, backend)
        options = {"debug": False, **self.options}
        return backend, options, binder(*self.arguments, **options)

    def compile(self, capability: int):
        backend, options, (bound, specialisation, rest) = self.specialise(capability)
        options, signature, constants, hints = self.kernel._pack_args(backend, options, bound, specialisation, rest)
        source = ASTSource(self.kernel, signature, constants, hints)
        return triton.compile(source, target=TARGETS[capability], options=options.__dict__)


def recorded_launches(stem: str, *arguments, capability: int = 90) -> list[Launch]:
    """Call a stem's launch; return the launches of its kernels."""
    launches = []

    def run(kernel, *values, grid, warmup, **options):
        launches.append(Launch(kernel, values, options, grid))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(KERNELS["paged_attention"], "device_limits", lambda _: LIMITS[capability])
        KERNELS[stem].launch(*arguments)
    return launches


@pytest.fixture
def record():
    return recorded_launches


def disassemble(compiled, tmp_path) -> tuple[str, int, int]:
    """(machine code, registers, bytes of stack) of a compiled kernel."""
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path

    def dump(what: str) -> str:
        command = [tool, what, cubin]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("--dump-resource-usage"))
    return dump("--dump-sass"), int(usage[1]), int(usage[2])


def spills_where_it_multiplies(code: str) -> list[str]:
    """Return what the loops with matrix products keep in memory for want of registers."""
    lines = [(int(place, 16), line) for place, line in re.findall(r"/\*([0-9a-f]{4,})\*/ +(.*?);", code)]
    jumps = [(re.search(r"BRA.* 0x([0-9a-f]+)", line), place) for place, line in lines]
    found = []
    for start, stop in [(int(jump[1], 16), place) for jump, place in jumps if jump and int(jump[1], 16) < place]:
        body = [line for place, line in lines if start <= place <= stop]
        if any("MMA" in line for line in body):
            found += [line for line in body if re.search(r"\b(LDL|STL)\b", line)]
    return found


def attention(
    *, dtype=BF16, pool=None, heads=32, kv_heads=8, dim=128, block_size=16, packed=True,
    tokens=4096, sequences=4, columns=512, options=False, num_splits=0, layout="NHD",
):  # fmt: skip
    """Arguments of paged_attention's launch; pools of 8 blocks do, as nothing is read."""
    pool = pool or dtype
    shape = (8, block_size, kv_heads, dim)
    key_cache = value_cache = torch.empty(shape, dtype=pool)
    if layout == "HND":
        head_major = torch.empty(8, kv_heads, block_size, dim, dtype=pool)
        key_cache = value_cache = head_major.transpose(1, 2)
    sequences = sequences if packed else tokens
    scale = torch.ones(1) if pool.itemsize == 1 else None
    vector = torch.ones(heads) if options else None
    table = torch.zeros(sequences, columns, dtype=torch.int32)
    starts = torch.zeros(sequences + 1, dtype=torch.int32) if packed else None
    return (
        torch.empty(tokens, heads, dim, dtype=dtype), torch.empty(heads, tokens),
        torch.empty(tokens, heads, dim, dtype=dtype), key_cache, value_cache,
        table, torch.zeros(sequences, dtype=torch.int32), starts, 0.1, True,
        63 if options else -1, -1, 30.0 if options else 0.0, vector, vector, scale, scale,
        num_splits,
    )  # fmt: skip


ATTENTION = {
    "bf16": {},
    "bf16_decode": {"packed": False, "tokens": 16},
    "bf16_options": {"options": True},
    "fp16_dim_64": {"dtype": FP16, "dim": 64},
    "bf16_dim_80_hnd": {"dim": 80, "layout": "HND", "block_size": 528},
    "bf16_dim_256": {"dim": 256},
    "bf16_ratio_71": {"heads": 71, "kv_heads": 1, "dim": 64},
    "e4m3": {"pool": E4M3},
    "e5m2_decode": {"dtype": FP16, "pool": E5M2, "packed": False, "tokens": 16},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_on_sm_90_neither_spills_nor_waits_for_loads(name, record, tmp_path):
    launches = record("paged_attention", *attention(**ATTENTION[name]))
    for launch in launches:
        compiled = launch.compile(90)
        code, registers, stack = disassemble(compiled, tmp_path)
        # Room for a second program is worth a few registers kept in memory, which the first cache holds.
        is_capped = launch.options.get("maxnreg", 256) < 256
        assert stack <= SPILLED + 160 * is_capped, f"{registers} registers"
        assert len(spills_where_it_multiplies(code)) <= 24 * is_capped
        assert compiled.metadata.shared <= LIMITS[90].shared_memory
        if "merge" in launch.kernel.__name__:
            continue
        assert "LDGSTS.E.BYPASS.128" in code or "LDGSTS.E.128" in code
        assert ("HGMMA" in code) == (launch.named["BLOCK_M"] >= 64)
        # Table entries must not have taken a stage of the pipeline from keys and values.
        key_bytes = launch.named["key_cache"].element_size()
        width = launch.named["BLOCK_D"] + launch.named["BLOCK_DV"]
        steps = launch.named["STAGES"] - (launch.named["BLOCK_M"] < 64 or key_bytes == 1)
        assert compiled.metadata.shared >= steps * launch.named["BLOCK_N"] * width * key_bytes


@pytest.mark.parametrize(
    ("capability", "variant"),
    [
        (80, {}),
        (80, {"pool": E4M3}),
        (80, {"dtype": FP32, "dim": 256}),
        (80, {"dim": 512}),
        (86, {"dim": 256}),
        (100, {}),
        (100, {"pool": E4M3}),
        (100, {"dim": 256}),
        (942, {}),
        (942, {"pool": E4M3, "options": True}),
    ],
    ids=str,
)
def test_attention_fits_other_gpus(capability, variant, record):
    for launch in record("paged_attention", *attention(**variant), capability=capability):
        shared = launch.compile(capability).metadata.shared
        assert shared <= LIMITS[capability].shared_memory


def write(dtype, pool, scale=None, heads=8, dim=128):
    rows = torch.empty(64, heads, dim, dtype=dtype)
    cache = torch.empty(8, 16, heads, dim, dtype=pool)
    return rows, rows, cache, cache, torch.zeros(64, dtype=torch.int64), scale, scale


def split(table, lengths, starts):
    batch = (table, lengths, starts, 3, 16, len(lengths), True)
    return *shared_prefix._outputs(*batch), *batch


def others(stem: str) -> list[tuple]:
    """Arguments of the launches of the other ops, in the variants that compile differently."""
    cache = torch.empty(8, 16, 8, 128, dtype=BF16)
    packed = torch.empty(8, 16, 8, 256, dtype=E4M3).split(128, dim=-1)
    starts = torch.zeros(5, dtype=torch.int32)
    table, lengths = torch.zeros(4, 9, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    gathered = torch.empty(4, 9 * 16, 8, 128, dtype=BF16)
    out, lse = torch.empty(64, 8, 128, dtype=BF16), torch.empty(8, 64)
    ids = torch.zeros(3, dtype=torch.int64)
    return {
        "reshape_and_cache": [
            write(BF16, BF16), write(BF16, E4M3, torch.ones(8)), write(E5M2, E5M2),
            write(BF16, BF16, heads=2, dim=72), write(BF16, BF16, heads=4, dim=40),
        ],
        "gather_kv": [
            (gathered, gathered, cache, cache, table, lengths, None, None),
            (gathered, gathered, *packed, table, lengths, torch.ones(1), None),
        ],
        "copy_blocks": [(cache, cache, ids, ids), (*packed, ids, ids)],
        "compute_slot_mapping": [
            (torch.empty(64, dtype=torch.int64), table, lengths, starts, 16),
            (torch.empty(4, dtype=torch.int64), table, lengths, None, 16),
        ],
        "merge_attention_states": [(out, lse, out, lse, out, lse)],
        "shared_prefix": [split(table, lengths, None), split(table, lengths, starts)],
    }[stem]  # fmt: skip


@pytest.mark.parametrize("capability", (80, 90, 100))
@pytest.mark.parametrize("stem", [stem for stem in STEMS if stem != "paged_attention"])
def test_the_other_kernels_compile_without_spills(stem, capability, record, tmp_path):
    for arguments in others(stem):
        (launch,) = record(stem, *arguments)
        code, _, stack = disassemble(launch.compile(capability), tmp_path)
        assert stack == 0
        if stem in ("reshape_and_cache", "copy_blocks"):
            assert re.search(r"LDG\.E(\.\w+)*\.128", code)
            assert re.search(r"STG\.E(\.\w+)*\.(64|128)", code)


def specialisations(launches: list[Launch]) -> set[str]:
    return {repr((launch.kernel.__name__, launch.specialise(90)[2][1])) for launch in launches}


def test_batch_contents_compile_nothing_anew(record):
    """Sizes of 1, multiples of 16 and others are one kernel: counts, table widths, strides."""
    seen = {}
    for size in (1, 2, 7, 16, 33, 48):
        wide = torch.zeros(size, size + 3, dtype=torch.int32)
        kinds = {
            "packed": attention(tokens=300 + size, sequences=size, columns=size),
            "decode": attention(packed=False, tokens=size, columns=100 + size),
            "splits": attention(packed=False, tokens=size, columns=size, num_splits=3),
        }
        for kind, arguments in kinds.items():
            arguments = list(arguments)
            if kind == "decode":  # one row of a table is still a column slice of something
                arguments[5] = wide[:, 1 : size + 1]
            launches = record("paged_attention", *arguments)
            tiles = [launch for launch in launches if "merge" not in launch.kernel.__name__]
            seen.setdefault(kind, set()).update(specialisations(tiles))
        table, lengths = wide[:, :size], torch.zeros(size, dtype=torch.int32)
        starts = torch.zeros(size + 1, dtype=torch.int32)
        mapped = torch.empty(size, dtype=torch.int64)
        seen.setdefault("slots", set()).update(
            specialisations(record("compute_slot_mapping", mapped, table, lengths, starts, 16))
        )
        batches = split(wide[:, 1 : size + 3], lengths, starts), split(wide[:, 1 : size + 3], lengths, None)
        seen.setdefault("prefix", set()).update(
            *(specialisations(record("shared_prefix", *arguments)) for arguments in batches)
        )
        rows, cache = torch.empty(size, 8, 64, dtype=BF16), torch.empty(8, 16, 8, 64, dtype=BF16)
        writes = record("reshape_and_cache", rows, rows, cache, cache, mapped, None, None)
        seen.setdefault("write", set()).update(specialisations(writes))
    assert {kind: len(keys) for kind, keys in seen.items()} == {
        "packed": 2, "decode": 1, "splits": 1, "slots": 1, "write": 1, "prefix": 2,
    }  # fmt: skip
    assert seen["decode"] == seen["splits"]


@pytest.mark.parametrize(("num_blocks", "wide"), [(2**16, False), (2**17, True)])
def test_offsets_take_64_bits_where_a_pool_reaches_that_far(num_blocks, wide, record):
    arguments = list(attention())
    arguments[3] = arguments[4] = torch.empty(num_blocks, 16, 8, 128, dtype=BF16, device="meta")
    assert {launch.named["WIDE"] for launch in record("paged_attention", *arguments)} == {wide}
