"""Plans how a model is laid out on ranks: pipeline, data and tensor ranks, ZeRO stage, micro-batches, stages.

jobs/plan.py profile.json --ranks 8 --hosts 2 --global_batch_size 64 --memory_gib 16
"""

import argparse
import sys
from typing import Any

import spark_dl
from spark_dl import cli


def plan(args: argparse.Namespace) -> dict[str, Any]:
    options = {name: value for name, value in vars(args).items() if name not in ("profile", "ranks")}
    found = spark_dl.plan_mesh(args.profile, num_ranks=args.ranks, **options)
    sys.stderr.write(f"{found.text}\n")
    return found.to_dict()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in text.split(","))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", help="JSON file or URL with the times and sizes of the layers; see docs/planner.md")
    parser.add_argument("--ranks", type=int, required=True, help="number of ranks")
    parser.add_argument("--global_batch_size", type=int, required=True, help="rows of a step")
    parser.add_argument("--hosts", type=int, default=1, help="hosts, with equally many ranks (default: 1)")
    parser.add_argument("--memory_gib", type=float, help="memory of a rank's device (default: no limit)")
    parser.add_argument(
        "--optimizer", default="adam", help="adam, momentum or sgd in float32, or mixed_adam (default: adam)"
    )
    for name, link, message, rate, latency in (
        ("", "of a host's link, in each direction", "between hosts", 10_000.0, 0.1),
        ("local_", "between two ranks of a host", "within a host", 80_000.0, 0.02),
    ):
        parser.add_argument(f"--{name}rate_mbit", type=float, default=rate, help=f"Mbit/s {link} (default: {rate:g})")
        parser.add_argument(
            f"--{name}latency_ms", type=float, default=latency, help=f"of a message {message} (default: {latency:g})"
        )
    parser.add_argument(
        "--zero_stages", type=_numbers, default=(0, 1, 2, 3), help="comma-separated, to choose from (default: 0,1,2,3)"
    )
    parser.add_argument(
        "--schedules", type=_names, default=("1f1b", "gpipe"), help="comma-separated (default: 1f1b,gpipe)"
    )
    parser.add_argument("--page", help="HTML page to write, with a picture of the stages")
    return parser


if __name__ == "__main__":
    arguments = build_parser().parse_args()
    cli.run(lambda: plan(arguments))
