"""Looks for values that differ from Spark's, for as long as one says: `make fuzz MINUTES=10`.

Each round draws new cases with a seed of its own. What falls is made small, and kept as a test in `tests/fuzz/found/`,
which `make test-slow` runs from then on.
"""

import argparse
import itertools
import logging
import sys
import tempfile
import time
from collections import Counter

from tqdm import tqdm

from tests.fuzz import errors, run
from tests.fuzz.conftest import build_session


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first round; by default, the time")
    parser.add_argument("--only", choices=sorted(run.PROPERTIES), help="one kind of cases")
    parser.add_argument("--cases", type=int, default=20, help="cases of a round")
    args = parser.parse_args()
    logging.getLogger("spark_dl").setLevel(logging.CRITICAL)
    counts, found, seed = Counter(), [], args.seed
    names = itertools.cycle([args.only] if args.only else run.PROPERTIES)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, build_session(folder) as spark:
        bar = tqdm(
            total=round(60 * args.minutes),
            unit="s",
            desc="fuzz",
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} s{postfix}",
        )
        for seed, name in zip(itertools.count(args.seed), names):
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
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
