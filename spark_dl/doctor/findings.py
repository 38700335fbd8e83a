"""What a diagnosis of a cluster has found, as lines for people and as data."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from spark_dl.cli.progress import text_table

OK, WARNING, ERROR = "ok", "warning", "error"


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """What was checked, such as `slots`."""
    level: str
    """`ok`, `warning`: a run can suffer from it, or `error`: a run fails."""
    found: str
    change: str = ""
    """What to change, with the name of the setting; empty if nothing."""


@dataclass(frozen=True)
class Diagnosis:
    """The findings about a cluster, those of errors first, and what each rank has told."""

    findings: tuple[Finding, ...]
    ranks: tuple[dict[str, Any], ...] = ()
    """Facts about each rank: host, versions, devices, disks, limits. Empty if no ranks could start."""
    mbit_per_s: tuple[tuple[float | None, ...], ...] = ()
    """Rate from each rank to each other one; None to itself, and where there is no connection."""
    seconds: float = field(default=0.0, compare=False)

    @property
    def is_healthy(self) -> bool:
        """Whether no check has found an error."""
        return not any(finding.level == ERROR for finding in self.findings)

    @property
    def text(self) -> str:
        """The findings as a table, with what to change."""
        rows = [[each.level, each.check, each.found] for each in self.findings]
        lines = list(text_table(["", "check", "found"], rows))
        changes = [f"- {each.check}: {each.change}" for each in self.findings if each.change]
        return "\n".join([*lines, *(["", "To change:", *changes] if changes else [])])

    def to_dict(self) -> dict[str, Any]:
        """Returns all as data that can be written as JSON."""
        return {
            "healthy": self.is_healthy, "findings": [vars(each) for each in self.findings], "ranks": list(self.ranks),
            "mbit_per_s": [list(row) for row in self.mbit_per_s], "seconds": self.seconds,
        }  # fmt: skip

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        """Called by notebooks."""
        return f"<pre>{html.escape(self.text)}</pre>"


def sort(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Returns errors first, then warnings, each in their order."""
    return tuple(sorted(findings, key=lambda each: (ERROR, WARNING, OK).index(each.level)))
