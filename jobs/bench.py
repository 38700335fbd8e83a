"""Measures spark_dl against its peers, both in one run, and ends with one JSON object.

jobs/bench.py launch    a warm launch of two ranks: spark_dl.launch and TorchDistributor
jobs/bench.py loader    rows per second of a shuffled epoch: our loader, Petastorm's, HF datasets, tensors in memory
jobs/bench.py shards    seconds to write a cached DataFrame: shards, df.write.parquet, Petastorm's converter
jobs/bench.py step      steps per second: the worker loop and a bare DDP loop under torchrun
"""

import argparse
from typing import Any

from spark_dl import build_session, cli
from spark_dl.bench import launch, loader, shards, step


def bench(args: argparse.Namespace) -> dict[str, Any]:
    if args.what == "step":
        return step.measure(num_ranks=args.ranks, repeats=args.repeats)
    if args.what == "loader":
        return loader.measure(repeats=args.repeats, scale=args.scale, petastorm_python=args.petastorm_python)
    spark = build_session("spark_dl bench", master=args.master or f"local[{args.ranks}]")
    if args.what == "shards":
        return shards.measure(spark, repeats=args.repeats, scale=args.scale, petastorm_python=args.petastorm_python)
    return launch.measure(spark, num_ranks=args.ranks, repeats=args.repeats)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["launch", "loader", "shards", "step"])
    parser.add_argument("--ranks", type=int, default=2, help="ranks of both (default: 2)")
    parser.add_argument("--repeats", type=int, default=7, help="counted repetitions, of which the median is taken")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="size of the datasets of `loader` and `shards` (default: 1)"
    )
    parser.add_argument("--petastorm_python", default=".venv-petastorm/bin/python", help="of Petastorm's environment")
    parser.add_argument("--master", help="Spark master URL for `launch` and `shards`; by default local[ranks]")
    arguments = parser.parse_args()
    cli.run(lambda: bench(arguments))
