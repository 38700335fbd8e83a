"""Draws `docs/images/contrast.svg`, the plot of the README, from the table of measured exchanges in `benchmarks.md`.

python docs/draw_contrast.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the benchmarks stand beside the package
from benchmarks.exchange.figures import draw

FOLDER = Path(__file__).parent
BARS = {
    "`ddp` (Gloo's ring)": "ddp",
    "`horovod`": "horovod",
    "`ddp`, `compression: fp16`": "ddp, fp16",
    "`ddp`, `compression: topk`": "ddp, top-k",
    "`parameter_server`, sync": "parameter_server, sync",
    "k_batch_async": "parameter_server, k_batch_async",
    "`shuffle_reduce`": "shuffle_reduce",
    "`tree_reduce`": "tree_reduce",
}
"""Rows of the table, and their names in the plot."""


def main() -> None:
    """Writes the plot."""
    seconds = _seconds((FOLDER / "benchmarks.md").read_text())

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        names = [*BARS.values()][::-1]
        values = [seconds[row] for row in [*BARS][::-1]]
        bars = axes.barh(
            names, values, color=["#4878a8" if n.startswith(("ddp", "horovod")) else "#c08050" for n in names]
        )
        axes.bar_label(bars, fmt="%.2f s", padding=3)
        axes.set_xlim(0, max(values) * 1.15)
        axes.set_xlabel("seconds to exchange a gradient of 64 MiB, 4 hosts, links of 200 Mbit/s")
        axes.spines[["top", "right"]].set_visible(False)

    path = FOLDER / "images" / "contrast.svg"
    path.parent.mkdir(exist_ok=True)
    path.write_text('<?xml version="1.0" encoding="utf-8"?>\n' + draw(plot, height=3.0) + "\n")


def _seconds(page: str) -> dict[str, float]:
    """The column of 64 MiB, by the name of the row."""
    rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \|", page, re.MULTILINE)
    return {name: float(value) for name, value in rows}


if __name__ == "__main__":
    main()
