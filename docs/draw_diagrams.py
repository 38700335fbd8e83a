"""Draws the diagrams of `concepts.md` into `docs/images`, each for light and for dark pages.

python docs/draw_diagrams.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

FOLDER = Path(__file__).parent / "images"
Point = tuple[float, float]


@dataclasses.dataclass
class Canvas:
    """A drawing of 100 units in width, in the colors of one kind of page."""

    height: float
    ink: str
    boxes: dict[str, str]
    """Fill colors, by the word by which a diagram asks for them."""

    def __post_init__(self) -> None:
        self.figure = Figure(figsize=(8, 8 * self.height / 100))
        self.axes = self.figure.add_axes((0.0, 0.0, 1.0, 1.0))
        self.axes.set(xlim=(0, 100), ylim=(self.height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, align: str = "left", size: float = 9) -> None:
        self.axes.text(x, y, text, ha=align, va="center", size=size, color=self.ink)

    def box(self, x: float, y: float, width: float, height: float, text: str = "", fill: str = "plain") -> None:
        style = "round,pad=0,rounding_size=0.8"
        color = self.boxes[fill]
        self.axes.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=color, edgecolor=self.ink, lw=0.8))
        self.text(x + width / 2, y + height / 2, text, "center")

    def arrow(self, start: Point, end: Point, style: str = "-|>", bend: float = 0.0) -> None:
        shape = {"arrowstyle": style, "color": self.ink, "lw": 1.1, "connectionstyle": f"arc3,rad={bend}"}
        self.axes.annotate("", end, start, arrowprops=shape)


def draw_ranks(canvas: Canvas) -> None:
    """The driver, two executors with two slots each, and what goes between them."""
    canvas.box(1, 9, 20, 13, "driver\ntrain()", "driver")
    for executor, x in enumerate((33, 69)):
        canvas.box(x, 4, 30, 21)
        canvas.text(x + 15, 6.8, f"executor {executor + 1}", "center")
        for slot in range(2):
            rank = 2 * executor + slot
            canvas.box(x + 2 + 13.5 * slot, 9.5, 12.5, 13, f"slot\n\nrank {rank}", f"rank {rank}")
    canvas.arrow((21, 13), (33, 13))
    canvas.text(27, 11, "starts", "center", 8)
    canvas.arrow((33, 19), (21, 19))
    canvas.text(27, 21.2, "progress,\nfailures", "center", 8)
    canvas.arrow((63, 15), (69, 15), "<|-|>")
    canvas.text(66, 29, "gradients, from rank to rank (all-reduce)", "center", 8)


def draw_order(canvas: Canvas) -> None:
    """Four ranges of a dataset, their shuffled rows, two global batches, and who reads what on 1, 2 and 4 ranks."""
    left, width = 20, 19.5
    ranges = ("d a c b", "h f e g", "k i l j", "p n m o")
    canvas.text(1, 5, "dataset")
    canvas.text(1, 13, "shuffled in ranges")
    for number, rows in enumerate(ranges):
        x = left + 20 * number
        canvas.box(x, 2, width, 6, f"range {number}", f"rank {number}")
        for place, row in enumerate(rows.split()):
            canvas.box(x + 4.9 * place, 10.5, 4.6, 5, row, f"rank {number}")
    for step, y in ((1, 20), (2, 27)):
        canvas.text(1, y + 2.5, f"global batch of step {step}")
        for number, rows in enumerate(ranges):
            canvas.box(left + 20 * number + 7, y, 5, 5, rows.split()[step - 1], f"rank {number}")
    for ranks, y in ((1, 36), (2, 43), (4, 50)):
        canvas.text(1, y + 2.5, f"on {ranks} rank{'s' if ranks > 1 else ''}")
        for rank in range(ranks):
            first = [rows.split()[0] for rows in ranges][rank * 4 // ranks : (rank + 1) * 4 // ranks]
            span = 80 / ranks
            canvas.box(left + rank * span, y, span - 0.5, 5, f"rank {rank}: {' '.join(first)}", "driver")


def draw_checkpoint(canvas: Canvas) -> None:
    """A checkpoint from the files of the ranks to its end, and the ways back to it."""
    canvas.box(1, 3, 22, 11, "all ranks write\ntheir files")
    canvas.box(38, 3, 24, 11, "committed:\nit has a MANIFEST.json", "driver")
    canvas.box(77, 3, 22, 11, "deleted")
    canvas.arrow((23, 8.5), (38, 8.5))
    canvas.text(30.5, 4.5, "rank 0 writes\nthe manifest", "center", 8)
    canvas.arrow((62, 8.5), (77, 8.5))
    canvas.text(69.5, 4.5, "checkpoint.keep\nnewer ones exist", "center", 8)
    canvas.box(1, 24, 22, 11, "never counts;\nits files are deleted later")
    canvas.arrow((12, 14), (12, 24))
    canvas.text(13, 19, "a rank is killed", size=8)
    canvas.box(38, 24, 24, 11, "all ranks start again\nfrom the newest one", "rank 1")
    canvas.arrow((47, 14), (47, 24))
    canvas.text(48.5, 19, "failure: a restart\nresume=True: a new call", size=8)
    canvas.box(77, 24, 22, 11, "kept: the best one", "rank 2")
    canvas.arrow((62, 12), (77, 26), bend=-0.15)


DIAGRAMS: dict[str, tuple[Callable[[Canvas], None], float]] = {
    "ranks": (draw_ranks, 31.0),
    "order": (draw_order, 56.0),
    "checkpoint": (draw_checkpoint, 37.0),
}
"""Name of a diagram, its function, and its height."""
LIGHT = {
    "plain": "#f6f6f6",
    "driver": "#e2e6ee",
    "rank 0": "#cfe2f3",
    "rank 1": "#fbe3c6",
    "rank 2": "#d6ecd2",
    "rank 3": "#ecd6ea",
}
DARK = {
    "plain": "#22252a",
    "driver": "#343c4a",
    "rank 0": "#24445f",
    "rank 1": "#5e4420",
    "rank 2": "#2b4d27",
    "rank 3": "#523050",
}


def main() -> None:
    """Writes the files."""
    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "spark_dl", "font.sans-serif": ["Arial", "DejaVu Sans"]}
    ):
        for name, (draw, height) in DIAGRAMS.items():
            for suffix, ink, boxes in (("", "#222222", LIGHT), ("-dark", "#dddddd", DARK)):
                canvas = Canvas(height, ink, boxes)
                draw(canvas)
                canvas.figure.savefig(FOLDER / f"{name}{suffix}.svg", transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
