"""Plots, with matplotlib, and pages that contain them, with Jinja. On the driver."""

from __future__ import annotations

import html
import importlib.util
import io
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from pyarrow.fs import FileType

from spark_dl import storage
from spark_dl.rundir import metrics
from spark_dl.rundir.run_folder import PICTURE

TEXT, _LINE = "#00a001", "#00a002"
_PAGE_STYLE = {
    "text.color": TEXT, "axes.labelcolor": TEXT, "xtick.color": TEXT, "ytick.color": TEXT, "axes.edgecolor": _LINE,
    "grid.color": _LINE, "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "legend.facecolor": "none", "legend.edgecolor": "none", "axes.spines.right": False, "legend.fontsize": 8,
}  # fmt: skip


def plot_loss(run_dir: str) -> str | None:
    """Draws `<run_dir>/loss.png`: the losses of training and validation by step. Returns its path.

    Returns None without metrics, without matplotlib (the extra `spark_dl[plot]`), or if the run folder is not on a
    local disk.
    """
    lines = metrics.read_metrics(run_dir)
    steps = [line for line in lines if line["kind"] == "step"]
    if not steps or not storage.is_local(run_dir):
        return None
    figure = build_figure()
    if figure is None:
        return None
    axes = figure.subplots()
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], label="training", linewidth=1, alpha=0.5)
    epochs = [line for line in lines if line["kind"] == "epoch"]
    axes.plot([e["step"] for e in epochs], [e["train_loss"] for e in epochs], label="training, mean of the epoch")
    validations = [line for line in lines if line["kind"] in ("validation", "epoch")]
    if validated := [e for e in validations if "loss" in e["metrics"]]:
        losses = [e["metrics"]["loss"] for e in validated]
        axes.plot([e["step"] for e in validated], losses, "o-", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel="loss", yscale="log" if min(s["loss"] for s in steps) > 0 else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    path = storage.within(storage.absolute(run_dir), PICTURE)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=120)
    storage.write_bytes(path, drawn.getvalue())
    return path


def build_figure(width: float = 8, height: float = 4.5) -> Any:
    """Returns an empty figure that needs no display, or None without matplotlib. width, height: in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    return Figure(figsize=(width, height), layout="constrained")


def check_packages(what: str) -> None:
    """Raises ModuleNotFoundError without matplotlib or Jinja. what: what needs them, for the message."""
    for name in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{what} needs {name}: pip install matplotlib jinja2 (the extra spark_dl[plot])")


def draw(
    plot: Callable[[Any], None], *, width: float = 7.2, height: float = 4.0, style: Mapping[str, Any] | None = None
) -> str:
    """Calls `plot` on an empty matplotlib figure (sizes in inches) and returns an SVG element. style: of matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "spark_dl", "font.size": 9, **(style or {})}):
        figure = Figure(figsize=(width, height), layout="constrained")
        plot(figure)
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def draw_for_page(
    plot: Callable[[Any], None], *, title: str, colors: Mapping[str, str], width: float, height: float
) -> str:
    """Draws as `draw` does, in the colors of a page, for light and dark: `--text`, `--line` and those of `colors`.

    Args:
        colors: what `plot` draws with, by the name of the variable that the page has in its place.
    """
    svg = draw(plot, width=width, height=height, style=_PAGE_STYLE)
    for name, color in {**colors, "text": TEXT, "line": _LINE}.items():
        svg = svg.replace(color, f"var(--{name})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(title)}" ', 1)


def check_replaceable(url: str, mark: str, what: str, *, key: str = "path") -> None:
    """Raises ValueError if there is something at `url` that does not begin with `mark`, as `what` does.

    Args:
        key: argument that the user gave the URL by.
    """
    kind = storage.info(url).type
    if kind == FileType.NotFound:
        return
    if kind != FileType.File or mark.encode() not in storage.read_bytes(url)[:200]:
        found = "a folder" if kind == FileType.Directory else f"a file that is not {what}"
        raise ValueError(f"{key}: {url} is {found}; nothing was changed: pass the path of a new file")


def render_page(package: str, name: str, **values: Any) -> str:
    """Fills in a template of a package, which extends `page.html`. Values are escaped, unless it marks them as safe."""
    import jinja2

    pages = {name: _read_template(package, name), "page.html": _read_template("spark_dl.track", "page.html")}
    templates = jinja2.Environment(
        loader=jinja2.DictLoader(pages), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    return templates.get_template(name).render(values)


def _read_template(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
