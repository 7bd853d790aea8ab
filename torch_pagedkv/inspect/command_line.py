"""The subcommands of ``python -m torch_pagedkv`` that look inside."""

from __future__ import annotations

import argparse
from pathlib import Path

from torch_pagedkv.inspect.layout_map import map_layouts
from torch_pagedkv.inspect.softmax_example import make_softmax_example, plot_softmax
from torch_pagedkv.inspect.token_walk import explain
from torch_pagedkv.ops.argument_checks import POOL_DTYPES, name_dtypes

_DTYPES = {name_dtypes((dtype,)): dtype for dtype in POOL_DTYPES}


def add_commands(commands: argparse._SubParsersAction) -> None:
    """Add the subcommands; each sets ``run``, which takes the parsed options and returns an exit status."""
    walk = commands.add_parser("explain", help="follow one token to its bytes, as written and as read")
    walk.add_argument("--block-table", required=True, type=_integers, metavar="7,2,9")
    walk.add_argument("--block-size", required=True, type=int)
    walk.add_argument("--position", required=True, type=int)
    walk.add_argument("--layout", default="NHD", help="NHD or HND")
    walk.add_argument("--strides", type=_integers, metavar="BLOCK,TOKEN,HEAD", help="of a pool that is neither")
    walk.add_argument("--num-kv-heads", type=int, default=2)
    walk.add_argument("--num-heads", type=int, help="query heads; default: as many as KV heads")
    walk.add_argument("--head-dim", type=int, default=64)
    walk.add_argument("--dtype", default="bfloat16", help=", ".join(_DTYPES))
    walk.add_argument("--length", type=int, help="tokens when it is read; default: position + 1")
    walk.add_argument("--token", type=int, help="its row in the call that writes it; default: position")
    walk.add_argument("--kernels", default="cuda", help="cuda (CUDA C++, where they were built) or triton")
    walk.set_defaults(run=_print_walk)

    softmax = commands.add_parser("softmax", help="show the online softmax, tile by tile")
    softmax.add_argument("--num-tokens", type=int, default=96)
    softmax.add_argument("--tile", type=int, default=16, help="keys in a tile")
    softmax.add_argument("--seed", type=int, default=0)
    softmax.add_argument("--plot", metavar="OUT.png", help="draw it as well, with matplotlib")
    softmax.set_defaults(run=_print_softmax)

    layout = commands.add_parser("layout", help="map a block in NHD and in HND")
    layout.add_argument("--block-size", required=True, type=int)
    layout.add_argument("--num-kv-heads", type=int, default=2)
    layout.add_argument("--head-dim", type=int, default=64)
    layout.add_argument("--offset", type=int, help="a token of the block to mark")
    layout.add_argument("--svg", type=Path, metavar="OUT.svg", help="draw it as well")
    layout.set_defaults(run=_print_layouts)


def _integers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _print_walk(options: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(options).items() if name not in ("command", "run")}
    if given["dtype"] not in _DTYPES:
        raise TypeError(f"explain: dtype must be {' or '.join(_DTYPES)}, got {given['dtype']}")
    print(explain(**{**given, "dtype": _DTYPES[given["dtype"]]}))
    return 0


def _print_softmax(options: argparse.Namespace) -> int:
    example = make_softmax_example(options.num_tokens, options.tile, options.seed)
    print(example)
    if options.plot is not None:
        plot_softmax(example, options.plot)
        print(f"drawn into {options.plot}")
    return 0


def _print_layouts(options: argparse.Namespace) -> int:
    maps = map_layouts(options.block_size, options.num_kv_heads, options.head_dim, offset=options.offset)
    print(maps)
    if options.svg is not None:
        try:
            options.svg.write_text(maps.svg())
        except OSError as error:
            raise ValueError(f"layout: svg must name a file that can be written, got {options.svg} ({error})") from None
        print(f"drawn into {options.svg}")
    return 0
