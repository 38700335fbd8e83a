"""Reproduces published figures with the planner's formulas, and prints them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.literature import bert, gpipe, pipedream, zero
from spark_dl.cli.progress import text_table

PROFILES = "$SPARK_DL_TEST_DATA/pipedream_profiles"


@dataclass(frozen=True)
class Options:
    """Of the command."""

    profiles: str = PROFILES
    """Folder with PipeDream's profiles. Variables of the environment are filled in."""


def measure(options: Options, show: Callable[[str], None]) -> dict[str, Any]:
    """Returns the figures of each section, and shows them as tables. What cannot be had is said."""
    results: dict[str, Any] = {"zero": _zero(), "gpipe": gpipe.rows(), "bert_large": bert.rows()}
    try:
        results["pipedream"] = pipedream.rows(options.profiles)
    except FileNotFoundError as error:
        results["pipedream_left_out"] = str(error)
    for line in lines(results):
        show(line)
    return results


def _zero() -> dict[str, Any]:
    found = zero.cells()
    return {"cells": len(found), "equal": sum(cell["equal"] for cell in found), "rows": found}


def lines(results: Mapping[str, Any]) -> Iterator[str]:
    """Returns the tables, with what fits and what does not."""
    yield from _zero_lines(results["zero"])
    yield from _gpipe_lines(results["gpipe"])
    yield from _pipedream_lines(results.get("pipedream"), results.get("pipedream_left_out", ""))
    yield from _bert_lines(results["bert_large"])


def _zero_lines(results: Mapping[str, Any]) -> Iterator[str]:
    yield "ZeRO, table 1 (Rajbhandari et al. 2020, arXiv:1910.02054): GB per device, formula / published"
    by_ranks: dict[int, list[str]] = {}
    for cell in results["rows"]:
        both = f"{_plain(cell['formula_gb'])} / {_plain(cell['published_gb'])}"
        by_ranks.setdefault(cell["ranks"], []).append(both if cell["equal"] else f"{both} DIFFERENT")
    columns = [f"{model}, ZeRO-{stage}" for model in zero.MODELS for stage in (1, 2, 3)]
    yield from text_table(["ranks", *columns], [[str(ranks), *cells] for ranks, cells in by_ranks.items()])
    yield f"{results['equal']} of {results['cells']} cells are equal as printed. The paper rounds some and cuts others."
    yield ""


def _gpipe_lines(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "GPipe, table 2 (Huang et al. 2019, arXiv:1811.06965): Transformer, formula K M / (M + K - 1)"
    yield from text_table(
        ["M", "K", "published", "formula", "error", ""],
        [[str(r["micro_batches"]), str(r["stages"]), f"{r['published']:.1f}", f"{r['formula']:.2f}",
          f"{r['error']:+.1%}", "fits" if r["fits"] else "DOES NOT FIT"] for r in rows],
    )  # fmt: skip
    yield "M = 32 fits: the formula is 4 to 8 % above the paper. It counts no transfers, and takes stages as equal."
    yield "M = 4 does not fit for K = 4 and 8: the paper measured more than the formula allows. A reason can be that"
    yield "GPipe recomputes activations, which a stage can do while it waits. The formula does not know that."
    yield ""


def _pipedream_lines(rows: list[dict[str, Any]] | None, left_out: str) -> Iterator[str]:
    yield "PipeDream, planner of section 3.1 (Narayanan et al. 2019, SOSP) on the profiles of its authors"
    if rows is None:
        yield f"Left out: {left_out}"
    else:
        yield from text_table(
            ["profile", "workers", "GB/s", "transfers", "replication", "cut", "s per stage", "times data parallel", ""],
            [_pipedream_cells(row) for row in rows],
        )  # fmt: skip
        yield "Published in brackets. Cut, seconds and factors are those of the authors' program; the replications with"
        yield "transfers are the plans in their repository, for which it gives no rate: 25 Gbit/s gives all three."
        yield "At 10 Gbit/s and with transfers, 16 workers get another plan. Ranks cannot run stages with different"
        yield "numbers of replicas: such plans are in the cost model alone."
    yield ""


def _pipedream_cells(row: Mapping[str, Any]) -> list[str]:
    def pair(key: str, form: str) -> str:
        published = row[f"published_{key}"]
        value = "" if row[key] is None else format(row[key], form)
        return value if published is None else f"{value} ({published})"

    return [
        row["profile"], str(row["workers"]), f"{row['bytes_per_s'] / 1e9:g}", "yes" if row["transfers"] else "no",
        pair("replication", ""), pair("cut", ""), pair("period_s", ".6f"), pair("times_data_parallel", ".3f"),
        "equal" if row["equal"] else "DIFFERENT",
    ]  # fmt: skip


def _bert_lines(results: Mapping[str, Any]) -> Iterator[str]:
    yield "BERT-Large, 330 M parameters, on K80 GPUs (lecture notes): minutes; computation / n + exchange (n - 1) / n^2"
    yield from text_table(
        ["GPUs", "published", "model", "error", "from 1 and 8 alone", "error"],
        [[str(r["gpus"]), str(r["published_min"]), f"{r['model_min']:.1f}", f"{r['error']:+.1%}",
          f"{r['from_1_and_8_min']:.1f}", f"{r['from_1_and_8_error']:+.1%}" if r["held_out"] else ""]
         for r in results["rows"]],
    )  # fmt: skip
    computation, exchange = results["computation_min"], results["exchange_min"]
    worst = max(results["rows"], key=lambda row: abs(row["error"]))
    yield (
        f"Computation {computation:.0f} min, exchange {exchange:.0f} min: on many GPUs, an exchange takes "
        f"{exchange / computation:.0%} of the"
    )
    yield f"computation of a step. The largest error is {worst['error']:+.1%}, on {worst['gpus']} GPUs. Two parameters"
    yield "for four figures prove little. The rate of the links is not known, as the notes give no number of steps."
    yield ""


def _plain(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".") if value < 100 else f"{value:g}"
