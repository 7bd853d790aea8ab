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

OURS, PEER = {"color": "C0", "marker": "o"}, {"marker": "x", "alpha": 0.7}


def draw(measured: dict, path: str) -> None:
    limits, points = measured["limits"], measured["points"]
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    intensities = [point["operations_per_byte"] for point in points]
    ends = [min(intensities) / 2, limits["tflops"] / limits["tb_per_s"], max(intensities) * 2]
    axes.loglog(ends, [min(end * limits["tb_per_s"], limits["tflops"]) for end in ends], "k--", label="limits")
    names = sorted({point["who"] for point in points}, key=lambda name: (name != "ours", name))
    for name in names:
        own = [point for point in points if point["who"] == name]
        style = OURS if name == "ours" else PEER
        x, y = [p["operations_per_byte"] for p in own], [p["tflops"] for p in own]
        axes.plot(x, y, linestyle="", label=name, **style)
    axes.set(xlabel="operations for each byte that has to be moved", ylabel="TFLOP/s")
    axes.set_title(
        f"paged_attention on {limits['device']}: reading {limits['tb_per_s']:.2f} TB/s, "
        f"bfloat16 products {limits['tflops']:.0f} TFLOP/s",
        fontsize=10,
    )
    for kind, at in (("decode", 0.02), ("prefill", 0.72)):
        axes.text(at, 0.95, kind, transform=axes.transAxes, fontsize=10, style="italic", va="top")
    axes.grid(which="both", alpha=0.2)
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    draw(json.loads(Path(sys.argv[1]).read_text()), sys.argv[2])
