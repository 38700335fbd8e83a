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
    """Keys of the causes that were found, by which they can be accepted, such as `dropout`."""
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
        if not found:
            return f"passed: {of}"
        return f"{len(found)} of {of}: the trained weights depend on what they should not depend on"

    @property
    def text(self) -> str:
        """The checks as a table, and below it what was found, and what to change."""
        lines = [self.summary, "", *text_table(["", "check", "differs by", "limit"], self._rows())]
        for names, first, notes in self._explained():
            lines += ["", f"{names}: {first.why}", *(f"  {note}" for note in notes)]
        return "\n".join(lines)

    def _explained(self) -> list[tuple[str, Check, list[str]]]:
        """Returns the checks that have something to say, those with the same cause together, and what they say."""
        groups: dict[tuple[str, str], list[Check]] = {}
        for check in self.checks:
            if check.why:
                groups.setdefault((check.why, check.change), []).append(check)
        found = []
        for checks in groups.values():
            first, notes = checks[0], list[str]()
            if seen := [check for check in checks if check.step is not None]:
                names = ", ".join(
                    f"{check.step} ({check.tensor})" if check.tensor else str(check.step) for check in seen
                )
                notes.append(f"first step with a difference: {names}")
            if first.change:
                notes.append(f"change: {first.change}")
            if tried := [f"{each.size_with_change:.1e}" for each in checks if each.size_with_change is not None]:
                notes.append(f"tried, it differs by {', '.join(tried)} then")
            found.append((", ".join(check.name for check in checks), first, notes))
        return found

    def _rows(self) -> list[list[str]]:
        return [
            [
                "accepted" if check.is_accepted and check.outcome != "same" else check.outcome, check.name,
                "" if check.size is None else "0" if check.size == 0 else f"{check.size:.1e}",
                "" if check.limit is None else "equal bits" if check.limit == 0 else f"{check.limit:.1e}",
            ]
            for check in self.checks
        ]  # fmt: skip

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
            explained=self._explained(),
            columns=["", "check", "differs by", "limit"], version=__version__,
        )  # fmt: skip
        storage.make_folder(storage.dirname(url))
        storage.write_bytes(url, text.encode())
        storage.write_bytes(f"{url.removesuffix('.html')}.json", json.dumps(self.to_dict(), indent=1).encode())

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return f"<pre>{html.escape(self.text)}</pre>"


def check_page(page: str | os.PathLike[str]) -> str:
    """Returns the URL of a page. Raises as `Certificate.write` does, before anything is computed."""
    url = storage.absolute(storage.text_of(page))
    plots.check_packages("a certificate as a page")
    plots.check_replaceable(url, _MARK, "a certificate", key="page")
    return url
