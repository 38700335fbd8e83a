"""Writes the measurements of models that are cut or sharded as one self-contained HTML page, and as JSON beside it.

The page has the form of the report on gradient exchange, and links to it if it is there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange.report import Column, Section, check
from benchmarks.parallel import figures, vgg16
from benchmarks.parallel.parallel import summary
from spark_dl.track.plots import draw, render_page

Rows = Sequence[Mapping[str, Any]]
_SHOWN = {"naive": 4, "gpipe": 4, "1f1b": 8, "interleaved": 8, "zero_bubble": 8, "zbv": 8}
"""Number of micro-batches in the picture of a schedule."""


def write_report(
    results: Mapping[str, Any], path: str | Path, *, exchange_report: str | Path, literature: Sequence[str]
) -> None:
    """Writes the results as JSON, and the page `path` beside it. Called on the driver. Raises as `check` does.

    exchange_report: page to link to, if it is there. literature: lines of the last section.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    check(path)
    path.with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    about = results["about"]
    sections = [build(results[key]) for key, build in _SECTIONS.items() if results.get(key)]
    if literature:
        sections.append(Section("Published figures", ["Formulas of the planner beside the papers."], [], [], [],
                                lines=literature))  # fmt: skip
    url = os.path.relpath(exchange_report, path.parent)
    html = render_page(
        "benchmarks.exchange", "report.html",
        title="Models that are cut: ZeRO, tensor ranks, pipelines, plans",
        about=" · ".join(str(about[key]) for key in ("date", "network", "machine")),
        link={"url": url, "title": "Report on gradient exchange"} if Path(exchange_report).is_file() else None,
        answers=answers(results), sections=sections, left_out=results["left_out"],
        facts={key: value for key, value in about.items() if value},
    )  # fmt: skip
    path.write_text(html, encoding="utf-8")


def answers(results: Mapping[str, Any]) -> list[str]:
    """Returns the results in sentences."""
    found, main = [], summary(results)
    if held := main.get("held_bytes_per_parameter"):
        found.append("Bytes held per parameter (Adam in float32, 4 ranks): " + _listed(held) + ".")
    if rows := main.get("activations"):
        kept, again = (next(row["held"] for row in rows if row["form"] == form) for form in ("kept", "full"))
        found.append(
            f"Activations that are computed again take {again / kept:.2f} of the memory of those that are kept."
        )
    if sent := main.get("sent_per_gradient"):
        found.append("Bytes sent per rank and step, in gradients: " + _listed(sent) + ".")
    if bubbles := main.get("bubble"):
        worst = max(bubbles, key=lambda row: abs(row["measured"] - row["formula"]))
        found.append(
            f"The bubble that is farthest from its formula: {worst['schedule']} with {worst['micro_batches']} "
            f"micro-batches, {worst['measured']:.3f} (formula {worst['formula']:.3f})."
        )
    if pipedream := main.get("pipedream"):
        found.append(
            f"PipeDream reaches {pipedream['of_ideal']:.1%} of what its pipeline allows, and "
            f"{pipedream['times_gpipe']:.2f} times the steps of GPipe."
        )
    if planner := main.get("planner"):
        found.append(
            f"The plan that the planner chooses takes {planner['times_best']:.3f} times as long as the best of "
            f"{planner['plans']} plans that were measured (rank correlation {planner['rank_correlation']:.2f})."
        )
    for rate, rows in _by_rate(main.get("vgg16", [])).items():
        found.append(
            f"VGG-16 on 4 workers at {rate:g} Gbit/s, seconds of a mini-batch: "
            + ", ".join(f"{row['form']} {row['mini_batch_s']:.3f}" for row in rows) + "."
        )  # fmt: skip
    return found


def _by_rate(rows: Rows) -> dict[float, list[Mapping[str, Any]]]:
    found: dict[float, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["rate_gbit"], []).append(row)
    return found


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())


def _held(rows: Rows) -> Section:
    columns = [_text("form", "form"), _text("point", "point"),
               *(_number(key, key) for key in ("held", "weights", "gradients", "optimizer", "other", "formula")),
               _number("unit", "a unit")]  # fmt: skip
    return Section(
        "Bytes that a rank holds",
        ["Of all tensors of a rank, from their storages, per parameter: after the model is built, when the rank holds "
         "most in the passes of a step, and after the step of the optimizer. Other: activations, buffers of an "
         "exchange, and the gathered weights of ZeRO-3. A unit is a layer, which has the size of a bucket (Rajbhandari "
         "et al. 2020)."],
        [draw(figures.held(rows), height=4.6)], columns, _table(rows, columns),
    )  # fmt: skip


def _activations(rows: Rows) -> Section:
    columns = [_text("form", "form"), _text("zero_stage", "ZeRO stage"),
               *(_number(key, title, "{:.1f}".format) for key, title in (
                   ("held", "held"), ("formula", "kept by the formula"), ("most", "with gradients of a block"),
               ))]  # fmt: skip
    return Section(
        "Activations of a rank",
        ["At most, in the passes of a step, in multiples of one activation of the width of the model, for each row: "
         "with all activations kept, and with blocks that compute them again (Chen et al. 2016). With ZeRO-3, the "
         "gathered weights of a block count, too."],
        [], columns, _table(rows, columns),
    )  # fmt: skip


def _sent(rows: Rows) -> Section:
    columns = [_text("form", "form"), _number("sent_bytes", "MiB sent", _mib),
               _number("formula_bytes", "by the formula", _mib), _number("times_formula", "times the formula"),
               _number("per_gradient", "in gradients"), _text("formula", "formula")]  # fmt: skip
    return Section(
        "Bytes that a rank sends",
        ["In a step, on average over the ranks, as the network interfaces of their hosts count them, with headers. "
         "zero3_gloo uses Gloo's own reduce-scatter, which sends twice as much as needed."],
        [draw(figures.sent(rows), height=3)], columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _bubbles(rows: Rows) -> Section:
    columns = [_text("schedule", "schedule"), _number("stages_per_rank", "stages of a rank", str),
               _number("micro_batches", "micro-batches", str), _number("step_s", "step, s"),
               _number("measured", "bubble"), _number("formula", "formula"),
               _number("passes_per_s", "micro-batches through a layer, per second and rank")]  # fmt: skip
    shown = [row for row in rows if row["micro_batches"] == _SHOWN.get(row["schedule"])]
    return Section(
        "Schedules of pipelines",
        ["Layers sleep for a set time forward, for the gradient of the input, and for that of the weights, and "
         "exchange activations of 128 KiB. The bubble is the part of a step in which a rank does not sleep. The "
         "timelines show what the ranks have noted."],
        [draw(figures.bubbles(rows), width=9),
         *(figures.timeline(row, f"{row['schedule']}, {row['micro_batches']} micro-batches") for row in shown)],
        columns, _table(rows, columns),
    )  # fmt: skip


def _pipedream(rows: Rows) -> Section:
    columns = [_text("schedule", "schedule"), _number("steps", "steps", str), _number("rows", "rows of a step", str),
               _number("micro_batches", "micro-batches", str), _number("seconds", "seconds"),
               _number("steps_per_s", "steps per second"),
               _number("of_ideal", "of what the schedule allows")]  # fmt: skip
    return Section(
        "PipeDream and GPipe",
        ["The steps have equal rows, and the layers take a time for each row. PipeDream fills the pipeline once, GPipe "
         "in each step."],
        [figures.timeline(row, f"{row['schedule']}, the first of {row['steps']} steps") for row in rows],
        columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _plans(rows: Rows) -> Section:
    columns = [
        *(_number(key, key, str) for key in ("pipeline", "data")), _number("zero_stage", "ZeRO", str),
        _text("schedule", "schedule"), _number("micro_batches", "micro-batches", str), _text("stages", "layers"),
        _number("predicted_s", "predicted, s"), _number("measured_s", "measured, s"),
    ]  # fmt: skip
    rate, latency = rows[0]["rate_mbit"], rows[0]["latency_ms"]
    return Section(
        "Plans of a small chain",
        ["Each mesh, ZeRO stage, schedule and number of micro-batches, with the best cuts, in the order that the "
         f"planner predicts. Messages between the hosts were measured first: {rate:.0f} Mbit/s and {latency:.2f} ms."],
        [draw(figures.plans(rows))], columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _vgg16(rows: Rows) -> Section:
    columns = [
        _number("rate_gbit", "Gbit/s", "{:g}".format), _text("form", "form"), _text("stages", "layers of a stage"),
        _number("mini_batches", "mini-batches of a step", str), _number("mini_batch_s", "seconds of a mini-batch"),
        _number("predicted_s", "predicted"), _number("times_data_parallel", "times data parallel"),
    ]  # fmt: skip
    return Section(
        "VGG-16 on four workers",
        ["The layers sleep for the times that the authors of PipeDream measured for mini-batches of 128 images. Bytes "
         f"and rates are those of the profile and the network over {vgg16.SCALE}, so that all times are the true ones. "
         "Each pipeline has the cuts of the planner. PipeDream takes a step for each mini-batch, the others for four."],
        [draw(figures.vgg16(rows), height=3.4),
         *(figures.timeline({**row, "stages": 4}, f"{row['form']}, {row['rate_gbit']:g} Gbit/s") for row in rows)],
        columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _table(rows: Rows, columns: Sequence[Column]) -> list[list[str]]:
    return [["" if row.get(c.key) is None else c.form(row[c.key]) for c in columns] for row in rows]


def _text(key: str, title: str) -> Column:
    return Column(key, title, is_number=False)


def _number(key: str, title: str, form: Callable[[Any], str] = "{:.3f}".format) -> Column:
    return Column(key, title, form)


def _mib(value: float) -> str:
    return f"{value / 2**20:,.2f}"


_SECTIONS: Mapping[str, Callable[[Rows], Section]] = {
    "held": _held, "activations": _activations, "sent": _sent, "bubbles": _bubbles, "pipedream": _pipedream,
    "plans": _plans,
    "vgg16": _vgg16,
}  # fmt: skip
