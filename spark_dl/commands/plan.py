"""Plans how a model is laid out on ranks: pipeline, data and tensor ranks, ZeRO stage, micro-batches, stages.

spark-dl plan profile.json --ranks 8 --hosts 2 --global_batch_size 64 --memory_gib 16
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import spark_dl
from spark_dl import cli

OPTIONS = {
    "profile": cli.Option(
        is_positional=True, help="JSON file or URL with the times and sizes of the layers; see docs/planner.md"
    ),
    "ranks": cli.Option(kind=int, help="number of ranks"),
    "global_batch_size": cli.Option(kind=int, help="rows of a step"),
    "hosts": cli.Option(kind=int, default=1, help="hosts, with equally many ranks"),
    "memory_gib": cli.Option(kind=float | None, help="memory of a rank's device; by default without a limit"),
    "optimizer": cli.Option(default="adam", help="adam, momentum or sgd in float32, or mixed_adam"),
    "rate_mbit": cli.Option(kind=float, default=10_000.0, help="Mbit/s of a host's link, in each direction"),
    "latency_ms": cli.Option(kind=float, default=0.1, help="of a message between hosts"),
    "local_rate_mbit": cli.Option(kind=float, default=80_000.0, help="Mbit/s between two ranks of a host"),
    "local_latency_ms": cli.Option(kind=float, default=0.02, help="of a message within a host"),
    "zero_stages": cli.Option(kind=tuple[int, ...], default=(0, 1, 2, 3), help="to choose from"),
    "schedules": cli.Option(kind=tuple[str, ...], default=("1f1b", "gpipe"), help="to choose from"),
    "page": cli.Option(kind=str | None, help="HTML page to write, with a picture of the stages"),
}


def main(given: Sequence[str]) -> NoReturn:
    """Runs the command with these arguments, and exits."""
    job = cli.parse("plan", str(__doc__), OPTIONS, given, has_settings=False)
    cli.run(lambda: plan(job))


def plan(job: cli.Job) -> dict[str, Any]:
    """Plans, shows a table, and returns what the command prints."""
    options = {name: value for name, value in job.args.items() if name not in ("profile", "ranks")}
    options["global_batch_size"] = job.required("global_batch_size")
    found = spark_dl.plan_mesh(job.args["profile"], num_ranks=job.required("ranks"), **options)
    sys.stderr.write(f"{found.text}\n")
    return found.to_dict()
