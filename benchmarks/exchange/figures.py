"""Figures of the report on gradient exchange. Each draws the rows of one section as an SVG string."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]
_COLORS = {
    "ddp": "#1f77b4", "horovod": "#17becf", "ring": "#2ca02c", "halving_doubling": "#8c564b", "tree": "#bcbd22",
    "naive": "#7f7f7f", "reduce_broadcast": "#c7a76c", "tree_reduce": "#d62728", "shuffle_reduce": "#ff7f0e",
    "parameter_server": "#9467bd",
}  # fmt: skip
_MARKERS = "osD^vP*X"


def color_of(method: str) -> str:
    """Color of a method in all figures. `parameter_server async` has the color of `parameter_server`."""
    return _COLORS.get(method.split()[0], "#555555")


def exchange_times(rows: Rows, hosts: int) -> Callable[[Any], None]:
    """Draws seconds by gradient size, one line per method, with the limit of the link."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        here = [r for r in rows if r["hosts"] == hosts]
        for i, (method, points) in enumerate(_by(here, "method")):
            _line(axes, points, "mib", "seconds", i, method)
        limits = {r["mib"]: r["limit_s"] for r in here if r["method"] == "ddp" and r["limit_s"]}
        if limits:
            sizes = sorted(limits)
            axes.plot(sizes, [limits[s] for s in sizes], "k:", linewidth=1, label="limit of the link, all-reduce")
        axes.set(xscale="log", yscale="log", xlabel="gradient, MiB", ylabel="seconds")
        _finish(axes)

    return plot


def exchange_bytes(rows: Rows, hosts: int) -> Callable[[Any], None]:
    """Draws the bytes sent by a rank and over the busiest link, in gradients, at the largest size."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        here = [r for r in rows if r["hosts"] == hosts]
        largest = [r for r in here if r["mib"] == max(r["mib"] for r in here)]
        ordered = sorted(largest, key=lambda r: float(r["busiest_link_bytes"]))
        names = [r["method"] for r in ordered]
        for offset, key, label, alpha in (
            (-0.2, "bytes_per_rank", "sent by a rank, mean", 1.0),
            (0.2, "busiest_link_bytes", "busiest link, its busier direction", 0.45),
        ):
            values = [r[key] / (r["mib"] * 2**20) for r in ordered]
            axes.barh([i + offset for i in range(len(names))], values, 0.38, label=label, alpha=alpha,
                      color=[color_of(n) for n in names])  # fmt: skip
        axes.set_yticks(range(len(names)), names)
        axes.set_xlabel("times the gradient")
        _finish(axes)

    return plot


def breakdown(rows: Rows) -> Callable[[Any], None]:
    """Draws the parts of a step's time, as Figure 6 of Li et al. 2020."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        parts = {
            "forward_s": "#4c72b0", "backward_s": "#55a868", "exposed_s": "#c44e52", "optimizer_s": "#8172b2",
            "wait_s": "#cccccc", "other_s": "#eeeeee",
        }  # fmt: skip
        names = [f"{r['method']}" for r in rows]
        left = [0.0] * len(rows)
        for part, color in parts.items():
            widths = [float(r[part]) for r in rows]
            label = {"exposed_s": "exposed communication"}.get(part, part.removesuffix("_s"))
            axes.barh(names, widths, 0.6, left=left, color=color, label=label)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for i, r in enumerate(rows):
            axes.text(left[i], i, f"  {r['hidden_s']:.2f} s hidden" if r["hidden_s"] else "", va="center")
        axes.margins(x=0.18)
        axes.invert_yaxis()
        axes.set_xlabel("seconds of a step")
        _finish(axes)

    return plot


def buckets(rows: Rows, chosen_mib: float | None) -> Callable[[Any], None]:
    """Draws step time by bucket size, as Figures 7 and 8 of Li et al. 2020, with the choice of `bucket_mib: auto`."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for i, (profile, points) in enumerate(_by(rows, "profile")):
            _line(axes, points, "bucket_mib", "step_s", i, f"{profile}, measured", color=f"C{i}")
            predicted = [p for p in points if p.get("predicted_s") is not None]
            axes.plot([p["bucket_mib"] for p in predicted], [p["predicted_s"] for p in predicted], "--", color=f"C{i}",
                      linewidth=1, label=f"{profile}, model")  # fmt: skip
        if chosen_mib is not None:
            axes.axvline(chosen_mib, color="#555555", linestyle=":", label=f"auto: {chosen_mib:g} MiB")
        axes.set(xscale="log", xlabel="bucket, MiB", ylabel="seconds of a step", ylim=(0, None))
        _finish(axes)

    return plot


def scaling(rows: Rows) -> Callable[[Any], None]:
    """Draws weak and strong scaling efficiency by ranks, measured and predicted."""

    def plot(figure: Any) -> None:
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("weak", "strong"), strict=True):
            here = [r for r in rows if r["kind"] == kind]
            for i, (method, points) in enumerate(_by(here, "method")):
                _line(axes, points, "ranks", "efficiency", i, method)
                predicted = [p for p in points if p.get("predicted_efficiency") is not None]
                axes.plot([p["ranks"] for p in predicted], [p["predicted_efficiency"] for p in predicted], "--",
                          color=color_of(method), linewidth=1)  # fmt: skip
            axes.set(xscale="log", xlabel="ranks", title=f"{kind} scaling", ylim=(0, 1.08))
            axes.set_xticks(ranks := sorted({r["ranks"] for r in here}), [str(r) for r in ranks])
            axes.minorticks_off()
            _finish(axes)
        figure.axes[0].set_ylabel("efficiency (dashed: model)")

    return plot


def error_runtime(rows: Rows) -> Callable[[Any], None]:
    """Draws loss by time and by steps under stragglers, as the error-runtime curves of Dutta et al. 2018."""

    def plot(figure: Any) -> None:
        for axes, key in zip(figure.subplots(1, 2, sharey=True), ("seconds", "step"), strict=True):
            for i, row in enumerate(rows):
                curve = row["curve"]
                axes.plot([p[key] for p in curve], [p["loss"] for p in curve], color=f"C{i}", linewidth=1.2,
                          label=row["method"])  # fmt: skip
            axes.set(yscale="log", xlabel="seconds" if key == "seconds" else "weight updates")
            _finish(axes, legend=key == "step")
        figure.axes[0].set_ylabel("training loss")

    return plot


def large_clusters(rows: Rows) -> Callable[[Any], None]:
    """Draws the counted sequential messages and bytes over the busiest link, up to thousands of ranks."""

    def plot(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for i, (method, points) in enumerate(_by(rows, "method")):
            _line(left, points, "ranks", "messages", i, method)
            gib = [{"ranks": p["ranks"], "gib": p["busiest_link_bytes"] / 2**30} for p in points]
            _line(right, gib, "ranks", "gib", i, method, color=color_of(method))
        left.set(xscale="log", yscale="log", xlabel="ranks", ylabel="sequential messages")
        right.set(xscale="log", yscale="log", xlabel="ranks", ylabel="GiB over the busiest link")
        _finish(left)
        _finish(right, legend=False)

    return plot


def prediction(rows: Rows) -> Callable[[Any], None]:
    """Draws measured and predicted seconds. Points that were not used for the fit are filled."""

    def plot(figure: Any) -> None:
        axes = figure.subplots()
        for method, points in _by(rows, "method"):
            for held_out in (False, True):
                here = [p for p in points if p["held_out"] == held_out]
                axes.plot([p["measured_s"] for p in here], [p["predicted_s"] for p in here], "o", markersize=5,
                          color=color_of(method), fillstyle="full" if held_out else "none",
                          label=method if held_out else None)  # fmt: skip
        ends = [min(p["measured_s"] for p in rows), max(p["measured_s"] for p in rows)]
        axes.plot(ends, ends, "k:", linewidth=1)
        low, high = ([factor * end for end in ends] for factor in (0.85, 1.15))
        axes.fill_between(ends, low, high, color="k", alpha=0.07, label="±15 %")
        axes.set(xscale="log", yscale="log", xlabel="measured, seconds", ylabel="model, seconds")
        _finish(axes)

    return plot


def _line(axes: Any, points: Iterable[Mapping[str, Any]], x: str, y: str, i: int, label: str, color: str = "") -> None:
    ordered = sorted(points, key=lambda p: float(p[x]))
    axes.plot([p[x] for p in ordered], [p[y] for p in ordered], marker=_MARKERS[i % len(_MARKERS)], markersize=4,
              linewidth=1.2, label=label, color=color or color_of(label))  # fmt: skip


def _by(rows: Rows, key: str) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Returns the rows grouped by a column, in the order of first occurrence."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row[key], []).append(row)
    return list(found.items())


def _finish(axes: Any, *, legend: bool = True) -> None:
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)
