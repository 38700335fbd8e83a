"""What the checks of `certify` have found: a table, data, and a page."""

from __future__ import annotations

import html
import json
import os
from dataclasses import dataclass, field
from typing import Any, Literal

from spark_dl import storage
from spark_dl._version import __version__
from spark_dl.cli.progress import text_table
from spark_dl.track import plots

Outcome = Literal["same", "differs", "failed", "not run"]

_MARK = "<!-- a certificate of spark_dl -->"


@dataclass(frozen=True)
class Check:
    """One way to train that should give the weights of one rank.

    Example:
        >>> check = spark_dl.certify(df, spec, config, only=("2 ranks",)).checks[-1]
        >>> check.name, check.outcome, check.size
    """

    name: str
    """What was changed, such as `2 ranks`."""
    outcome: Outcome
    """`failed`: the training raised an error. `not run`: what it needs is not there."""
    size: float | None = None
    """The part of what training did that differs: ||a - b|| / ||b - start||. None if nothing was compared."""
    limit: float | None = None
    """The largest size that rounding explains."""
    step: int | None = None
    """The first step after which the weights differ, from 1."""
    tensor: str = ""
    """The first tensor of the model that differs then."""
    causes: tuple[str, ...] = ()
    """Keys of the causes that were found, by which they can be accepted, such as `random`."""
    why: str = ""
    """The causes in words, or the error, or what is missing."""
    change: str = ""
    """What to change."""
    size_with_change: float | None = None
    """The size with this change, if it is a setting that was tried."""
    is_accepted: bool = False
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_fine(self) -> bool:
        """Whether this check is no reason to refuse a certificate."""
        return self.outcome in ("same", "not run") or self.is_accepted


@dataclass(frozen=True)
class Certificate:
    """The result of `certify`.

    Example:
        >>> certificate = spark_dl.certify(df, spec, config, only=("2 micro-batches",))
        >>> assert certificate.passed, certificate.text
    """

    checks: tuple[Check, ...]
    rows: int
    """Rows of the sample."""
    steps: int
    """Steps of each training."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def passed(self) -> bool:
        """Whether all that was checked is the same, or was accepted."""
        return all(check.is_fine for check in self.checks)

    @property
    def summary(self) -> str:
        """The outcome in a sentence."""
        found = [check for check in self.checks if not check.is_fine]
        num_run = sum(check.outcome != "not run" for check in self.checks)
        of = f"{num_run} checks of {self.steps} steps on {self.rows} rows, in {self.seconds:.0f} s"
        if left_out := len(self.checks) - num_run:
            of += f" ({left_out} not run)"
        if not found:
            return f"passed: {of}"
        return f"{len(found)} of {of}: the trained weights depend on what they should not depend on"

    @property
    def text(self) -> str:
        """The checks as a table, and below it what was found, and what to change."""
        lines = [self.summary, "", *text_table(list(self._columns), self._rows())]
        for names, why, change in self._explained():
            lines += ["", f"{names}: {why}", *([f"  change: {change}"] if change else [])]
        return "\n".join(lines)

    @property
    def _columns(self) -> tuple[str, ...]:
        has_tried = any(check.size_with_change is not None for check in self.checks)
        return ("", "check", "differs by", "limit", "from step", "first tensor", *["with the change"] * has_tried)

    def _rows(self) -> list[list[str]]:
        return [
            [
                "accepted" if check.is_accepted and check.outcome != "same" else check.outcome, check.name,
                _short(check.size), "equal bits" if check.limit == 0 else _short(check.limit),
                "" if check.step is None else str(check.step), check.tensor, _short(check.size_with_change),
            ][: len(self._columns)]
            for check in self.checks
        ]  # fmt: skip

    def _explained(self) -> list[tuple[str, str, str]]:
        """Returns the names of checks with the same cause, the cause, and what to change."""
        groups: dict[tuple[str, str], list[str]] = {}
        for check in self.checks:
            if check.why:
                groups.setdefault((check.why, check.change), []).append(check.name)
        return [("; ".join(names), why, change) for (why, change), names in groups.items()]

    def to_dict(self) -> dict[str, Any]:
        """Returns all as data that can be written as JSON."""
        return {
            "passed": self.passed, "rows": self.rows, "steps": self.steps, "seconds": self.seconds,
            "spark_dl": __version__, "checks": [{**vars(check), "causes": list(check.causes)} for check in self.checks],
        }  # fmt: skip

    def write(self, page: str | os.PathLike[str]) -> None:
        """Writes a self-contained HTML page, and the data beside it, with the ending `.json`.

        Raises ValueError for a file that is no certificate, and ModuleNotFoundError without the extra `plot`.
        """
        url = check_page(page)
        text = plots.render_page(
            "spark_dl.certify", "certificate.html", mark=_MARK, certificate=self, rows=self._rows(),
            explained=self._explained(), columns=self._columns, version=__version__,
        )  # fmt: skip
        storage.make_folder(storage.dirname(url))
        storage.write_bytes(url, text.encode())
        storage.write_bytes(f"{url.removesuffix('.html')}.json", json.dumps(self.to_dict(), indent=1).encode())

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return f"<pre>{html.escape(self.text)}</pre>"


def _short(size: float | None) -> str:
    return "" if size is None else "0" if size == 0 else f"{size:.1e}"


def check_page(page: str | os.PathLike[str]) -> str:
    """Returns the URL of a page. Raises as `Certificate.write` does, before anything is computed."""
    url = storage.absolute(storage.text_of(page))
    plots.check_packages("a certificate as a page")
    plots.check_replaceable(url, _MARK, "a certificate", key="page")
    return url
