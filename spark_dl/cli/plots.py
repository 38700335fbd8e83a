"""Plots of a run, with matplotlib, on the driver."""

from __future__ import annotations

from typing import Any

from spark_dl import storage
from spark_dl.training import metrics


def plot_loss(run_dir: str) -> str | None:
    """Draws `<run_dir>/loss.png`: training loss by step, validation loss by epoch. Returns its path.

    Returns None without metrics, without matplotlib (`pip install spark_dl[plot]`), or if the run folder is not on a
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
    if validated := [e for e in epochs if "loss" in e["metrics"]]:
        losses = [e["metrics"]["loss"] for e in validated]
        axes.plot([e["step"] for e in validated], losses, "o-", markersize=3, label="validation")
    axes.set(xlabel="step", ylabel="loss", yscale="log" if min(s["loss"] for s in steps) > 0 else "linear")
    axes.grid(alpha=0.3)
    axes.legend()
    path = storage.join(storage.absolute(run_dir), "loss.png")
    figure.savefig(path, dpi=120)
    return path


def build_figure(width: float = 8, height: float = 4.5) -> Any:
    """Returns an empty figure that needs no display, or None without matplotlib. width, height: in inches."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return None
    return Figure(figsize=(width, height), layout="constrained")
