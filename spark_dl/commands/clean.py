"""Deletes old runs, checkpoints, copies of rows and datasets. Without --delete it only says what it would delete.

spark-dl clean runs --keep-last 7 --older-than 30d              # runs in a folder
spark-dl clean runs --older-than 30d --only_rows --delete       # the copies of their rows; the models stay
spark-dl clean runs/1 --keep-last 2                             # checkpoints of a run
spark-dl clean /data/store --older-than 90d                     # datasets of shards.store without use

With both rules, what is deleted must be old and not among the last. The last and the best checkpoint of a run, a run
that goes on, and files that spark_dl did not write are never deleted.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from spark_dl import cli
from spark_dl.cli.progress import text_table
from spark_dl.retention import clean
from spark_dl.track.report import when

OPTIONS = {
    "path": cli.Option(is_positional=True, help="folder or URL: of runs, of a run, or a store of datasets"),
    "keep_last": cli.Option(kind=int | None, help="how many of the newest are kept"),
    "older_than": cli.Option(kind=str | None, help="such as 30d or 12h: only what was not changed for so long"),
    "only_rows": cli.Option(kind=bool, default=False, help="of runs that have ended, delete only the copies of rows"),
    "delete": cli.Option(kind=bool, default=False, help="delete; without it, nothing is changed"),
}
_DAYS = {"d": 1.0, "h": 1 / 24, "w": 7.0}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    args = cli.parse("clean", str(__doc__), OPTIONS, given, has_settings=False).args
    cli.run(lambda: run(args))


def run(args: Mapping[str, Any]) -> dict[str, Any]:
    """Finds what is old, shows it, and returns what the command prints."""
    if args["keep_last"] is None and args["older_than"] is None and not args["only_rows"]:
        raise cli.UsageError("keep_last: expected --keep-last, --older-than or --only_rows, found none of them")
    found = clean(
        args["path"], keep_last=args["keep_last"], older_than_days=days(args["older_than"]),
        only_rows=args["only_rows"], delete=args["delete"],
    )  # fmt: skip
    if found:
        rows = [
            [each.kind, each.url, f"{each.bytes / 2**20:,.1f}", when(each.changed), ", ".join(each.left)]
            for each in found
        ]
        table = "\n".join(text_table(["what", "where", "MiB", "last change", "files that stay"], rows))
        sys.stderr.write(f"{table}\n")
    if not args["delete"]:
        cli.log.info("nothing was deleted; %s", "pass --delete to delete these" if found else "nothing is so old")
    return {
        "deleted" if args["delete"] else "would_delete": len(found),
        "bytes": sum(each.bytes for each in found),
        "urls": [each.url for each in found],
    }


def days(text: str | None) -> float | None:
    """Returns a duration such as `30d`, `12h` or `2w` in days. Raises UsageError for another text."""
    if text is None:
        return None
    if not (match := re.fullmatch(r"(\d+(?:\.\d+)?)([dhw])", text.strip())):
        raise cli.UsageError(f"older_than: expected a duration such as 30d, 12h or 2w, found {text!r}")
    return float(match[1]) * _DAYS[match[2]]
