"""Draw what bench_paged_attention.py measured on a GPU under the two limits of the device: a roofline.

    python benchmarks/bench_paged_attention.py --device cuda --rows rows.json
    python benchmarks/draw_roofline.py rows.json docs/roofline.png

A point is a call: to the right, how many operations it has for each byte that it has to move; upwards, how
many it did in a second. The slope is a plain read of memory, the level a plain matrix product, both from the
same run: nothing can lie above them (Williams et al. 2009).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def limit_of(point: dict, limits: dict) -> float:
    return min(point["operations_per_byte"] * limits["tb_per_s"], limits["tflops"])


def draw(measured: dict, path: str) -> None:
    limits, points = measured["limits"], measured["points"]
    for point in points:
        if point["kind"] == "prefill":
            point["case"] = f"prefill {point['case']}"
    cases = list(dict.fromkeys(point["case"] for point in points))
    names = sorted({point["who"] for point in points}, key=lambda name: (name == "ours", name))
    figure, (roof, parts) = pyplot.subplots(1, 2, figsize=(13, 0.22 * len(cases) + 2))
    intensities = [point["operations_per_byte"] for point in points]
    ends = [min(intensities) / 2, limits["tflops"] / limits["tb_per_s"], max(intensities) * 2]
    heights = [min(end * limits["tb_per_s"], limits["tflops"]) for end in ends]
    roof.loglog(ends, heights, "k--", label="limits")
    for number, name in enumerate(names):
        own = [point for point in points if point["who"] == name]
        style = {"color": "C0", "marker": "o"} if name == "ours" else {"color": f"C{number + 1}", "marker": "x"}
        x, y = [p["operations_per_byte"] for p in own], [p["tflops"] for p in own]
        roof.plot(x, y, linestyle="", label=name, **style)
        x, y = [p["tflops"] / limit_of(p, limits) for p in own], [cases.index(p["case"]) for p in own]
        parts.plot(x, y, linestyle="", **style)
    roof.set(xlabel="operations for each byte that has to be moved", ylabel="TFLOP/s")
    roof.legend(loc="lower right")
    parts.set(xlim=(0, 1.05), xlabel="part of the limit")
    parts.set_yticks(range(len(cases)), cases, fontsize=8)
    parts.invert_yaxis()
    for axes in (roof, parts):
        axes.grid(which="both", alpha=0.2)
    figure.suptitle(
        f"paged_attention on {limits['device']}: reading {limits['tb_per_s']:.2f} TB/s, "
        f"bfloat16 products {limits['tflops']:.0f} TFLOP/s",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
