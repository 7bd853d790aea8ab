"""Random calls of the ops, as plain data: what a seed draws.

A call is a dictionary that JSON holds, so that one that found a fault can be kept word for word in
``fuzz_corpus.jsonl``, whatever becomes of the generator. It starts out right and is then changed in
a few places; ``legal`` says that every change is one that the contract allows.
"""

from __future__ import annotations

import random
from typing import Any

import torch

FLOATS = ["float32", "bfloat16", "float16"]
FP8 = ["float8_e4m3fn", "float8_e5m2"]
OTHER_DTYPES = [
    "float64",
    "int8",
    "uint8",
    "int16",
    "bool",
    "complex64",
    "int32",
    "int64",
    *FLOATS,
    *FP8,
]
HOSTILE_INTS = [-1, -2, 0, 1, 63, 64, 2**31 - 1, 2**31, -(2**31), 2**32, 2**40, 2**63 - 1, -(2**63)]
SPECIALS = [float("nan"), float("inf"), -float("inf"), 3e38, -3e38, 1e-40, 0.0, -0.0, 65504.0]
NUMBERS = [
    0,
    1,
    -1,
    2.5,
    -0.0,
    1e-46,
    5e-324,
    1e38,
    1e39,
    1e308,
    float("nan"),
    float("inf"),
    True,
    None,
    "x",
]
INTEGERS = [0, 1, 2, 3, -1, 2**31, 2**62, 2**63 - 1, -(2**63), 1.5, True, None, "x"]
WINDOWS = [
    [-1, -1],
    [0, 0],
    [3, 0],
    [-1, 2],
    [5, 5],
    [2**63 - 1, 2**63 - 1],
    [-2, 0],
    [0, -2],
    [],
    [1],
    [1, 2, 3],
]


Call = dict[str, Any]


def tensor(shape: list[int], dtype: str, values: list[int] | None = None, seed: int = 0) -> Call:
    """Describe a tensor: of these integers, or of random numbers. Changes add the rest."""
    return {"shape": shape, "dtype": dtype} | ({"seed": seed} if values is None else {"values": values})


def draw(seed: int) -> Call:
    """Return the call that a seed stands for."""
    rng = random.Random(seed)
    op = rng.choice(list(BASES))
    door = rng.choice(["dispatcher", "public"])
    call = {"op": op, "door": door, "legal": True, "arguments": BASES[op](rng)}
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3, 5])):
        arguments = call["arguments"]
        name = rng.choice(list(arguments))
        if isinstance(arguments[name], dict):
            legal = rng.choice(TENSOR_CHANGES)(rng, call, name)
        else:
            legal = _change_option(rng, call, name)
        call["legal"] = call["legal"] and legal
    return call


def _sizes(rng: random.Random) -> Call:
    num_kv_heads = rng.choice([1, 1, 2, 3])
    pool = rng.choice([*FLOATS, *FP8])
    return {
        "num_blocks": rng.choice([0, 1, 2, 5, 7]),
        "block_size": rng.choice([1, 2, 3, 16, 20]),
        "num_kv_heads": num_kv_heads,
        "num_heads": num_kv_heads * rng.choice([1, 2, 3, 5]),
        "head_dim": rng.choice([1, 4, 8, 20, 64]),
        "value_head_dim": rng.choice([1, 4, 8, 20, 64]),
        "pool": pool,
        "dtype": rng.choice(FLOATS) if pool in FP8 else pool,
    }


def _pools(rng: random.Random, of: Call) -> Call:
    shape = [of["num_blocks"], of["block_size"], of["num_kv_heads"]]
    return {
        name: tensor([*shape, of[dim]], of["pool"], seed=rng.randrange(99))
        for name, dim in (("key_cache", "head_dim"), ("value_cache", "value_head_dim"))
    }


def _index(rng: random.Random, values: list[int], shape: list[int] | None = None) -> Call:
    fits = all(-(2**31) <= value < 2**31 for value in values)
    return tensor(shape or [len(values)], rng.choice(["int32", "int64"]) if fits else "int64", values)


def _scales(rng: random.Random, of: Call, converts: bool) -> Call:
    shapes = [[], [1], [of["num_kv_heads"]]]
    return {
        name: tensor([*rng.choice(shapes)], "float32", seed=rng.randrange(99))
        if converts and rng.random() < 0.6
        else None
        for name in ("k_scale", "v_scale")
    }


def _batch(rng: random.Random, of: Call, queries: bool) -> Call:
    sequences, columns = rng.choice([0, 1, 2, 3]), rng.choice([0, 1, 2, 4])
    capacity = columns * of["block_size"] if of["num_blocks"] else 0
    lengths = [rng.randint(0, min(capacity, 70)) for _ in range(sequences)]
    table = []
    for length in lengths:
        used = -(-length // of["block_size"])
        table += [rng.randrange(of["num_blocks"]) for _ in range(used)]
        table += [rng.choice(HOSTILE_INTS) for _ in range(columns - used)]
    table = [value if abs(value) < 2**31 or rng.random() < 0.3 else -1 for value in table]
    batch = {
        "block_table": _index(rng, table, [sequences, columns]),
        "seqused_k": _index(rng, lengths),
    }
    if queries:
        sums = [0]
        for _ in range(sequences):
            sums.append(sums[-1] + rng.choice([0, 1, 1, 2, 5]))
        batch["cu_seqlens_q"] = _index(rng, sums) if rng.random() < 0.6 else None
    return batch


def _tokens(rng: random.Random, batch: Call) -> int:
    sums = batch["cu_seqlens_q"]
    return len(batch["seqused_k"]["values"]) if sums is None else sums["values"][-1] + rng.choice([0, 0, 2])


def _write(rng: random.Random) -> Call:
    of, tokens = _sizes(rng), rng.choice([0, 1, 3, 9])
    num_slots = of["num_blocks"] * of["block_size"]
    slots = rng.sample(range(num_slots), min(tokens, num_slots))
    slots = [slot if rng.random() < 0.8 else rng.choice([-1, -7, -(2**40)]) for slot in slots]
    dtype = rng.choice([of["dtype"], of["pool"]])
    arguments = {name: tensor([tokens, of["num_kv_heads"], of[dim]], dtype, seed=rng.randrange(99))
                 for name, dim in (("key", "head_dim"), ("value", "value_head_dim"))}  # fmt: skip
    converts = dtype != of["pool"]
    return {
        **arguments,
        **_pools(rng, of),
        "slot_mapping": _index(rng, slots),
        **_scales(rng, of, converts),
    }


def _attend(rng: random.Random) -> Call:
    of = _sizes(rng)
    batch = _batch(rng, of, queries=True)
    query = tensor([_tokens(rng, batch), of["num_heads"], of["head_dim"]], of["dtype"], seed=rng.randrange(99))
    per_head = {
        name: tensor([of["num_heads"]], rng.choice([*FLOATS, "float64"]), seed=rng.randrange(99))
        if rng.random() < 0.3
        else None
        for name in ("alibi_slopes", "sinks")
    }
    options = {
        "softmax_scale": None,
        "causal": rng.random() < 0.7,
        "window_size": [-1, -1],
        "softcap": 0.0,
    }
    scales = _scales(rng, of, of["pool"] in FP8)
    return {
        "query": query,
        **_pools(rng, of),
        **batch,
        **options,
        **per_head,
        **scales,
        "num_splits": 0,
    }


def _gather(rng: random.Random) -> Call:
    of = _sizes(rng)
    dtype = rng.choice([None, *FLOATS, of["pool"]])
    scales = _scales(rng, of, of["pool"] in FP8 and dtype != of["pool"])
    return {**_pools(rng, of), **_batch(rng, of, queries=False), **scales, "dtype": dtype}


def _copy(rng: random.Random) -> Call:
    of = _sizes(rng)
    blocks = rng.sample(range(of["num_blocks"]), of["num_blocks"])
    copies = rng.randint(0, max(0, len(blocks) - 1))
    sources = [rng.choice(blocks[copies:]) for _ in range(copies)]
    return {
        **_pools(rng, of),
        "src_blocks": _index(rng, sources),
        "dst_blocks": _index(rng, blocks[:copies]),
    }


def _merge(rng: random.Random) -> Call:
    tokens, heads, dim = rng.choice([0, 1, 5]), rng.choice([1, 2, 5]), rng.choice([1, 4, 20, 64])
    arguments = {}
    for part in ("a", "b"):
        arguments[f"out_{part}"] = tensor([tokens, heads, dim], rng.choice(FLOATS), seed=rng.randrange(99))
        arguments[f"lse_{part}"] = tensor([heads, tokens], "float32", seed=rng.randrange(99))
    return arguments


def _slots(rng: random.Random) -> Call:
    of = _sizes(rng)
    batch = _batch(rng, of, queries=True)
    return {**batch, "block_size": of["block_size"], "num_tokens": _tokens(rng, batch)}


BASES = {
    "reshape_and_cache": _write,
    "paged_attention": _attend,
    "gather_kv": _gather,
    "copy_blocks": _copy,
    "merge_attention_states": _merge,
    "compute_slot_mapping": _slots,
}


# Changes of a tensor: each returns whether the contract allows the call that it makes.


def _is_pool(call: Call, name: str) -> bool:
    return name.endswith("_cache") and call["op"] in ("reshape_and_cache", "copy_blocks")


def _change_dtype(rng: random.Random, call: Call, name: str) -> bool:
    of = call["arguments"][name]
    if "values" in of and rng.random() < 0.5 and all(abs(v) < 2**31 for v in of["values"]):
        of["dtype"] = rng.choice(["int32", "int64"])
        return True
    of["dtype"] = rng.choice(OTHER_DTYPES)
    return False


def _change_shape(rng: random.Random, call: Call, name: str) -> bool:
    of = call["arguments"][name]
    shape = of["shape"]
    if not shape or rng.random() < 0.2:
        shape.insert(rng.randint(0, len(shape)), rng.choice([1, 1, 2]))
    elif rng.random() < 0.3:
        shape.pop(rng.randrange(len(shape)))
    elif rng.random() < 0.2:
        rng.shuffle(shape)
    else:
        dim = rng.randrange(len(shape))
        shape[dim] = max(0, rng.choice([0, 1, shape[dim] - 1, shape[dim] + 1, shape[dim] * 2, 513]))
        while torch.Size(shape).numel() > 2**18:
            shape[shape.index(max(shape))] //= 2
    for layout in ("order", "step", "expand", "odd_strides"):
        of.pop(layout, None)
    return False


def _change_strides(rng: random.Random, call: Call, name: str) -> bool:
    """Another order of storage, room between rows: the last dimension stays dense."""
    of = call["arguments"][name]
    rank = len(of["shape"])
    of["padding"] = rng.choice([0, 1, 3])
    if rank > 1 and rng.random() < 0.5:
        of["order"] = [*rng.sample(range(rank - 1), rank - 1), rank - 1]
        of["padding"] = 0
    if rng.random() < 0.4:
        of["odd_strides"] = rng.choice([0, 1, 7, 2**40])
    if rank and rng.random() < 0.3:
        of["step"] = rng.randrange(rank)
        is_index = "values" in of and rank == 1
        return call["legal"] and (of["step"] < rank - 1 or is_index)
    return True


def _expand(rng: random.Random, call: Call, name: str) -> bool:
    of = call["arguments"][name]
    if not of["shape"]:
        return True
    of["expand"] = rng.randrange(len(of["shape"]))
    if "values" in of or _is_pool(call, name):
        return False
    return of["expand"] < len(of["shape"]) - 1


def _transpose(rng: random.Random, call: Call, name: str) -> bool:
    of = call["arguments"][name]
    of["order"] = rng.sample(range(len(of["shape"])), len(of["shape"]))
    return False


def _change_values(rng: random.Random, call: Call, name: str) -> bool:
    of = call["arguments"][name]
    if "values" not in of:
        specials = [[rng.randrange(2**16), rng.choice(SPECIALS)] for _ in range(rng.choice([1, 3]))]
        of["specials"] = of.get("specials", []) + specials
        return True
    if of["values"]:
        for _ in range(rng.choice([1, 1, 3])):
            position = rng.randrange(len(of["values"]))
            near = of["values"][position] + rng.choice([-1, 1, 2])
            near = min(max(near, -(2**63)), 2**63 - 1)
            of["values"][position] = rng.choice([near, rng.choice(of["values"]), rng.choice(HOSTILE_INTS)])
        if any(not -(2**31) <= value < 2**31 for value in of["values"]):
            of["dtype"] = "int64"
    return False


def _move(rng: random.Random, call: Call, name: str) -> bool:
    call["arguments"][name]["device"] = rng.choice(["meta", "cpu", "cuda"])
    return False


def _drop(rng: random.Random, call: Call, name: str) -> bool:
    call["arguments"][name] = rng.choice([None, None, 3, "x", [1, 2]])
    return False


def _require_grad(rng: random.Random, call: Call, name: str) -> bool:
    call["arguments"][name]["requires_grad"] = True
    return False


TENSOR_CHANGES = [
    _change_dtype, _change_shape, _change_strides, _change_strides, _expand, _transpose,
    _change_values, _change_values, _change_values, _move, _drop, _require_grad,
]  # fmt: skip


def _change_option(rng: random.Random, call: Call, name: str) -> bool:
    choices = {
        "window_size": WINDOWS,
        "causal": [True, False, 0, 1, None, "x"],
        "num_splits": INTEGERS,
        "block_size": INTEGERS,
        # None that memory has room for and that takes long.
        "num_tokens": [0, 1, 2, -1, 2**16, 2**62, 2**63 - 1, -(2**63), 1.5, None],
        "dtype": [*OTHER_DTYPES, None],
    }
    drawn = rng.choice(choices.get(name, NUMBERS))
    if name in ("k_scale", "v_scale", "alibi_slopes", "sinks", "cu_seqlens_q") and rng.random() < 0.7:
        drawn = tensor(rng.choice([[], [1], [2], [3], [1, 2]]), rng.choice(["float32", *OTHER_DTYPES]))
    call["arguments"][name] = drawn
    return False
