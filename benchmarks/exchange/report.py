"""Writes the results of the gradient exchange benchmark as one self-contained HTML page: figures, tables, sentences.

The results are plain data, a list of rows for each section. All sections are optional:

    exchange      method, exact, hosts, mib, seconds, bytes_per_rank, busiest_link_bytes, limit_s, ratio_to_limit,
                  times_ring
    backends      backend, hosts, mib, seconds, bytes_per_rank, limit_s, ratio_to_limit, note (why it was not measured)
    crossings     method, hosts, faster_mib, slower_mib: measured sizes at which it is faster, and slower, than the ring
    breakdown     method, profile, step_s, forward_s, backward_s, hidden_s, exposed_s, optimizer_s, wait_s, other_s,
                  communication_s (alone), times_largest (of the larger of compute and communication)
    buckets       profile, bucket_mib, step_s, predicted_s; `auto_bucket_mib` is the choice of `bucket_mib: auto`
    compression   method, hosts, mib, rate_mbit, seconds, bytes_per_rank, times_ring, bytes_factor (of ddp's bytes)
    waves         method, ranks, slots, compute_s, step_s or refused_s and reason
    scaling       kind (weak, strong), method, ranks, step_s, efficiency, predicted_efficiency
    stragglers    method, accuracy, seconds, staleness, exact, update_s, theory_s, curve of {seconds, step, loss}
    model         method, hosts, mib, measured_s, predicted_s, held_out
    plan          method, ranks, messages, bytes_per_rank, busiest_link_bytes, measured_busiest_bytes
    left_out      strings: what failed, and why
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.exchange import figures
from benchmarks.exchange.answers import answers
from benchmarks.model.profiles import PROFILES
from spark_dl.parallel.cost.cost import server_bytes_per_s
from spark_dl.track.plots import check_packages, draw, render_page

Rows = Sequence[Mapping[str, Any]]
_WORKERS, _STEPS_PER_S, _RESNET50_BYTES = 256, 3, PROFILES["resnet50"]().gradient_bytes


@dataclass(frozen=True)
class Column:
    """Column of a table."""

    key: str
    title: str
    form: Callable[[Any], str] = str
    is_number: bool = True


@dataclass(frozen=True)
class Section:
    """Part of the page."""

    title: str
    texts: Sequence[str]
    figures: Sequence[str]
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    is_open: bool = False
    lines: Sequence[str] = ()
    """Shown as they are."""

    @property
    def words(self) -> list[int]:
        """Positions of the columns that are not numbers."""
        return [i for i, column in enumerate(self.columns) if not column.is_number]


def write_report(results: Mapping[str, Any], path: str | Path) -> None:
    """Writes the results as JSON, and the page `path` beside it. Called on the driver. Raises as `check` does."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).with_suffix(".json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    check(path)
    html = render_page(
        "benchmarks.exchange", "report.html",
        title="Gradient exchange: ring, Spark's aggregation, parameter servers",
        about=_about(results.get("about", {})),
        answers=answers(results),
        sections=[build(results) for key, build in _SECTIONS.items() if results.get(key)],
        left_out=results.get("left_out") or [],
        facts={key: value for key, value in results.get("about", {}).items() if value not in (None, "")},
    )  # fmt: skip
    Path(path).write_text(html, encoding="utf-8")


def check(path: str | Path) -> None:
    """Raises ValueError if `path` ends with .json, and ModuleNotFoundError without matplotlib or Jinja."""
    if Path(path).suffix == ".json":
        raise ValueError(
            f"report: expected the name of a page, such as report.html, found {path}; the JSON is written beside it"
        )
    check_packages("the report")


def _about(about: Mapping[str, Any]) -> str:
    parts = [about.get("date"), about.get("network"), about.get("machine")]
    return " · ".join(str(p) for p in parts if p)


def _table(rows: Rows, columns: Sequence[Column]) -> list[list[str]]:
    return [["" if row.get(c.key) is None else c.form(row[c.key]) for c in columns] for row in rows]


def _seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"


def _mib(value: float) -> str:
    return f"{value / 2**20:,.2f}"


def _text(key: str, title: str) -> Column:
    return Column(key, title, is_number=False)


def _number(key: str, title: str, form: Callable[[Any], str] = _seconds) -> Column:
    return Column(key, title, form)


def _percent(value: float) -> str:
    return f"{value:.1%}"


def _factor(value: float) -> str:
    return f"{value:.2f}"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _yes(value: Any) -> str:
    return "yes" if value else "no"


_EXACT = Column("exact", "exact", _yes, is_number=False)


def _exchange(results: Mapping[str, Any]) -> Section:
    rows = results["exchange"]
    columns = [
        _text("method", "method"), _EXACT, _number("hosts", "hosts", _plain), _number("mib", "MiB", _plain),
        _number("seconds", "seconds"), _number("bytes_per_rank", "MiB sent per rank", _mib),
        _number("busiest_link_bytes", "MiB, busiest link", _mib), _number("limit_s", "limit, s"),
        _number("ratio_to_limit", "of the limit", _percent), _number("times_ring", "times DDP's ring", _factor),
    ]  # fmt: skip
    drawn = [
        draw(plot(rows, hosts))
        for hosts in sorted({r["hosts"] for r in rows})
        for plot in (figures.exchange_times, figures.exchange_bytes)
    ]
    return Section(
        "One exchange, by method and size",
        ["Random gradients, inside a running job. For all-reduces, DDP and Horovod: median seconds of the slowest "
         "rank, from gradients on every rank to their sum on every rank. For treeReduce, the shuffle and parameter "
         "servers: median time of a training step, which includes the weight update and the scheduling of tasks. If "
         "an update needs the gradients of only K trainers: the mean over as many updates as use one gradient of each "
         "trainer. With parameter servers, one host is the server. Bytes are counted by the hosts' network "
         "interfaces. Exact methods give the weights of a single process. The limit is 2 N (P - 1) / P bytes per rank "
         "at the link's rate, the least possible for whole gradients (Patarasuk & Yuan 2009)."],
        drawn, columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _backends(results: Mapping[str, Any]) -> Section:
    rows = results["backends"]
    columns = [
        _text("backend", "backend"), _number("hosts", "hosts", _plain), _number("mib", "MiB", _plain),
        _number("seconds", "seconds"), _number("bytes_per_rank", "MiB sent per rank", _mib),
        _number("limit_s", "limit, s"), _number("ratio_to_limit", "of the limit", _percent), _text("note", "note"),
    ]  # fmt: skip
    return Section(
        "Backends",
        ["One all-reduce of one tensor by each backend alone, without Spark: median seconds of the slowest rank. Gloo "
         "and NCCL are those of torch. MPI is Open MPI with mpi4py: `mpirun` starts its ranks, and all its messages "
         "use TCP. The limit is that of the table above."],
        [], columns, _table(rows, columns),
    )  # fmt: skip


def _breakdown(results: Mapping[str, Any]) -> Section:
    rows = results["breakdown"]
    parts = ("step", "forward", "backward", "hidden", "exposed", "optimizer", "wait", "other")
    columns = [
        _text("method", "method"), _text("profile", "profile"), *(_number(f"{part}_s", part) for part in parts),
        _number("times_largest", "times the larger of compute and communication", _factor),
    ]  # fmt: skip
    return Section(
        "Time of a step by parts",
        ["Computation is simulated: it takes a set time, and produces random gradients in real sizes and order. "
         "Hidden communication runs during the backward pass. Ranks wait for exposed communication. For DDP, the parts "
         "are means over the ranks, and the step is that of the slowest. For treeReduce, the shuffle and parameter "
         "servers, all other time counts as exposed, including scheduling, pickling and the weight update."],
        [draw(figures.breakdown(rows))], columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _buckets(results: Mapping[str, Any]) -> Section:
    rows = results["buckets"]
    columns = [_text("profile", "profile"), _number("bucket_mib", "bucket, MiB", _plain), _number("step_s", "step, s"),
               _number("predicted_s", "model, s")]  # fmt: skip
    return Section(
        "Bucket size",
        ["Small buckets start early, but each has a latency. Large buckets start late. In Li et al. 2020 (Figures 7, "
         "8), medium sizes are best."],
        [draw(figures.buckets(rows, results.get("auto_bucket_mib")))], columns, _table(rows, columns),
    )  # fmt: skip


def _where_compression_pays(results: Mapping[str, Any]) -> Section:
    rows = results["compression"]
    columns = [
        _text("method", "method"), _number("rate_mbit", "Mbit/s", _plain), _number("hosts", "hosts", _plain),
        _number("mib", "MiB", _plain), _number("seconds", "seconds"),
        _number("times_ring", "times DDP's ring", _factor), _number("bytes_per_rank", "MiB sent per rank", _mib),
        _number("bytes_factor", "of its bytes", _percent),
    ]  # fmt: skip
    return Section(
        "When compression helps",
        ["The same exchanges on links of the set rate, and on links without a limit, where only the time to compress "
         "and decompress remains."],
        [], columns, _table(rows, columns),
    )  # fmt: skip


def _fewer_slots(results: Mapping[str, Any]) -> Section:
    rows = results["waves"]
    columns = [
        _text("method", "method"), _number("ranks", "ranks", _plain), _number("slots", "slots", _plain),
        _number("compute_s", "compute of a rank, s"), _number("step_s", "step, s"),
        _number("refused_s", "refused after, s"), _text("reason", "reason"),
    ]  # fmt: skip
    return Section(
        "Fewer slots than ranks",
        ["Independent tasks can run in waves. The ranks of a ring must all run at once."],
        [], columns, _table(rows, columns),
    )  # fmt: skip


def _scaling(results: Mapping[str, Any]) -> Section:
    rows = results["scaling"]
    columns = [
        _text("kind", "kind"), _text("method", "method"), _number("ranks", "ranks", _plain),
        _number("step_s", "step, s"), _number("efficiency", "efficiency", _percent),
        _number("predicted_efficiency", "model", _percent),
    ]  # fmt: skip
    return Section(
        "Scaling",
        ["Weak: the computation of each rank does not depend on the number of ranks. Strong: the ranks share the "
        "computation of one step."],
        [draw(figures.scaling(rows), width=9)], columns, _table(rows, columns),
    )  # fmt: skip


def _stragglers(results: Mapping[str, Any]) -> Section:
    rows = [{**r, **(r.get("staleness") or {})} for r in results["stragglers"]]
    columns = [
        _text("method", "method"), _number("seconds", "seconds"), _number("accuracy", "accuracy", _percent),
        _number("mean", "mean staleness", lambda v: f"{v:.2f}"), _number("max", "largest", _plain),
        _number("update_s", "update, s"), _number("theory_s", "by theory, s"),
        _EXACT,
    ]  # fmt: skip
    return Section(
        "Slow ranks: loss by time and by steps",
        ["Each gradient computation is delayed by a random time. Exact methods give the weights of a single process. "
         "The others save time, but use stale or fewer gradients (Dutta et al. 2018). The theoretical time of an "
         "update includes only the delays, not computation and communication."],
        [draw(figures.error_runtime(rows), width=9)], columns, _table(rows, columns), is_open=True,
    )  # fmt: skip


def _model(results: Mapping[str, Any]) -> Section:
    rows = results["model"]
    columns = [
        _text("method", "method"), _number("hosts", "hosts", _plain), _number("mib", "MiB", _plain),
        _number("measured_s", "measured, s"), _number("predicted_s", "model, s"),
        Column("held_out", "held out", _yes, is_number=False),
    ]  # fmt: skip
    held_out = [abs(r["predicted_s"] / r["measured_s"] - 1) for r in rows if r["held_out"]]
    worst = f" The largest error on {len(held_out)} held-out points is {max(held_out):.1%}." if held_out else ""
    return Section(
        "Cost model and measurements",
        ["A model of latency, bandwidth and work per byte for each method, fitted on some of the points and checked on "
         "the others." + worst],
        [draw(figures.prediction(rows))], columns, _table(rows, columns),
    )  # fmt: skip


def _plan(results: Mapping[str, Any]) -> Section:
    rows = results["plan"]
    columns = [
        _text("method", "method"), _number("ranks", "ranks", _plain), _number("messages", "messages", "{:,.0f}".format),
        _number("bytes_per_rank", "MiB sent per rank", _mib), _number("busiest_link_bytes", "MiB, busiest link", _mib),
        _number("measured_busiest_bytes", "measured", _mib),
    ]  # fmt: skip
    return Section(
        "Messages and bytes on large clusters",
        ["Counted for ResNet-50's gradient and methods that send whole gradients: sequential messages, and bytes. "
         "Times depend on the network and were not measured. The first row of a method is for the measured number of "
         "hosts, with the bytes that their interfaces counted for the largest gradient, in "
         "proportion.",
         f"For comparison: {_WORKERS} workers that each send {_STEPS_PER_S} gradients of ResNet-50 per second bring "
         f"one parameter server {server_bytes_per_s(_WORKERS, _RESNET50_BYTES, _STEPS_PER_S) / 2**30:.1f} GiB/s; in a "
         f"ring each rank sends {_STEPS_PER_S * 2 * _RESNET50_BYTES * (_WORKERS - 1) / _WORKERS / 2**30:.2f} GiB/s."],
        [draw(figures.large_clusters(rows), width=9)], columns, _table(rows, columns),
    )  # fmt: skip


_SECTIONS: dict[str, Callable[[Mapping[str, Any]], Section]] = {
    "exchange": _exchange, "backends": _backends, "compression": _where_compression_pays, "breakdown": _breakdown,
    "buckets": _buckets, "waves": _fewer_slots, "scaling": _scaling, "stragglers": _stragglers, "model": _model,
    "plan": _plan,
}  # fmt: skip
