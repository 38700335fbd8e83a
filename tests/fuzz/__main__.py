"""Looks for values that differ from Spark's, for as long as one says: `make fuzz MINUTES=10`.

Each round draws new cases with a seed of its own. What falls is made small, and kept in `tests/fuzz/found/`, which
`make test-slow` tries from then on.
"""

import argparse
import contextlib
import itertools
import logging
import os
import sys
import tempfile
import time
from collections import Counter

from tqdm import tqdm

from tests.fuzz import errors, run
from tests.spark.conftest import CONF, FAST_JVM, REPOSITORY

SAMPLE = {
    "tables": 6, "windows": 4, "states": 20, "resumed": 4, "settings": 10, "damage": 10, "keys": 4, "ties": 2,
    "changes": 2,
}  # fmt: skip
"""Cases of each kind in `make test-slow`. Together, they take about a minute."""


def main():
    """Draws cases for some minutes, or those of the sample. Exits with 1 if one of them falls."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round; by default, the time")
    parser.add_argument("--only", choices=sorted(run.PROPERTIES), help="one kind of cases")
    parser.add_argument("--cases", type=int, default=20, help="cases of a round")
    parser.add_argument("--sample", action="store_true", help="the cases of make test-slow, and those that were found")
    args = parser.parse_args()
    logging.getLogger("spark_dl").setLevel(logging.CRITICAL)
    logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    names = [args.only] if args.only else list(run.PROPERTIES)
    with tempfile.TemporaryDirectory() as folder, build_session(folder) as spark:
        found = run_sample(spark, folder, names) if args.sample else run_minutes(spark, folder, names, args)
    sys.exit(bool(found))


@contextlib.contextmanager
def build_session(folder):
    """A local session with two slots, with the settings of the tests. # folder: for the warehouse"""
    from pyspark.sql import SparkSession

    os.environ.update(PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(REPOSITORY), SPARK_LOCAL_IP="127.0.0.1")
    os.environ["JAVA_TOOL_OPTIONS"] = FAST_JVM
    builder = SparkSession.builder.master("local[2]").config("spark.sql.warehouse.dir", str(folder))
    for key, value in {**CONF, "spark.sql.shuffle.partitions": "2"}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()


def run_sample(spark, folder, names):
    """The same cases each time, and what was found before. Returns how many fell."""
    failures = [run.try_found(path, spark, folder) for path in run.found_cases()]
    for name in names:
        cases, failure = run.run_round(name, spark, folder, seed=1, cases=SAMPLE[name], shrink=False)
        print(f"{name}: {cases} cases")
        failures.append(failure)
    failures = [failure for failure in failures if failure is not None]
    for failure in failures:
        print(f"{failure.name}: {failure}")
    return len(failures)


def run_minutes(spark, folder, names, args):
    """Rounds of new cases until the time is up. Returns how many fell."""
    counts, found, start = Counter(), [], time.monotonic()
    shown = "{l_bar}{bar}| {n_fmt}/{total_fmt} s{postfix}"
    bar = tqdm(total=round(60 * args.minutes), unit="s", desc="fuzz", bar_format=shown)
    for seed, name in zip(itertools.count(args.seed), itertools.cycle(names)):
        cases, failure = run.run_round(name, spark, folder, seed=seed, cases=args.cases)
        counts[name] += cases
        if failure is not None:
            found.append(failure.keep())
            tqdm.write(f"{name}, seed {seed}: {failure}\nkept as {found[-1]}\n")
        bar.n = min(bar.total, round(time.monotonic() - start))
        bar.set_postfix_str(", ".join(f"{n} {what}" for what, n in counts.items()) + f"; found {len(found)}")
        if bar.n >= bar.total:
            break
    bar.close()
    print(f"cases: {dict(counts)}, seeds {args.seed} to {seed}, found: {len(found)}")
    print("What was refused most often, which must be clear and right:")
    for words, count in errors.REFUSED.most_common(40):
        print(f"{count:7} {words}")
    return len(found)


if __name__ == "__main__":
    main()
