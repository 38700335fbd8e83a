"""A model that does not fit the memory of one rank, and that four ranks train with ZeRO-3.

Shows: what one rank must hold (weights, gradients and the two moments of Adam, 16 bytes for each parameter), the error
of a rank without memory, and `Mesh(zero_stage=3)`, which gives each rank a part of all of them.

When a rank builds the model, the operating system limits its data (`setrlimit` with RLIMIT_DATA) to what it has then,
and `--limit-mib` more. It refuses what is above that, as a device does. Needs Linux.

Promises: a rank alone ends with the error that it has no memory left, with one block of text at a time; four ranks with
the same limit, and as many blocks in a step, train. Otherwise, the exit code is 1.

.venv/bin/python examples/memory_limit.py
.venv/bin/python examples/memory_limit.py --blocks 12 --limit-mib 400
"""

import argparse
import functools
import resource
import sys
from pathlib import Path

from gpt import GPT, forward, loss, paths_of, read_blocks
from pyspark import TaskContext
from pyspark.sql import DataFrame
from torch import nn

import spark_dl

RANKS = 4
MIB = 2**20


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run_dir", default="runs/memory_limit")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=6, help="of the model (default: 6)")
    parser.add_argument("--limit-mib", type=int, default=270, help="memory of a rank for the model (default: 270)")
    parser.add_argument("--steps", type=int, default=8)
    return parser.parse_args()


def build_limited(width: int, num_blocks: int, limit_mib: int) -> nn.Module:
    """Builds the model on a rank, which can then have `limit_mib` more than now."""
    if TaskContext.get() is not None:  # not on the driver
        lines = Path("/proc/self/status").read_text().splitlines()
        (now_kib,) = [int(line.split()[1]) for line in lines if line.startswith("VmData:")]
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (now_kib * 1024 + limit_mib * MIB, most))
    return GPT(width, num_blocks, head_dim=64)


def train(rows: DataFrame, args: argparse.Namespace, num_ranks: int, parallel: spark_dl.Parallel) -> float | None:
    """Trains with one block of text for each rank at a time. Returns the loss, or None if a rank has no memory left."""
    build = functools.partial(build_limited, args.width, args.blocks, args.limit_mib)
    config = spark_dl.Config(
        data=spark_dl.Data(features=("codes",), label=None),
        loader=spark_dl.Loader(num_streams=RANKS),
        train=spark_dl.Train(
            global_batch_size=RANKS, accumulation_steps=RANKS // num_ranks, max_steps=args.steps, optimizer="AdamW",
            lr=3e-4, log_every=1,
        ),
        launch=spark_dl.Launch(num_ranks=num_ranks),
        parallel=parallel,
    )  # fmt: skip
    spec = spark_dl.ModelSpec(build=build, forward=forward, loss=loss, layers=["embed", "blocks.*", "norm", "head"])
    try:
        run_dir = f"{args.run_dir}/{num_ranks}"
        return spark_dl.train(rows, spec, config, run_dir=run_dir, overwrite=True).train_loss
    except RuntimeError as error:
        if "has no memory left" not in str(error):
            raise
        print(f"{num_ranks} rank: {str(error).splitlines()[0]}")
        return None


def main() -> None:
    args = parse()
    # Without it, glibc keeps memory of large tensors that torch has freed, here that of gathered weights.
    conf = {"spark.executorEnv.MALLOC_MMAP_THRESHOLD_": str(MIB)}
    spark = spark_dl.build_session("memory_limit", master=f"local[{RANKS}]", conf=conf)
    rows = read_blocks(spark, paths_of("json")).orderBy("file", "position").limit(RANKS * args.steps).select("codes")
    num_parameters = sum(p.numel() for p in GPT(args.width, args.blocks, head_dim=64).parameters())
    needed = 16 * num_parameters / MIB
    print(f"{num_parameters / 1e6:.1f} million parameters: {needed:.0f} MiB with Adam; a rank has {args.limit_mib} MiB")
    alone = train(rows, args, 1, spark_dl.DDP())
    sharded = train(rows, args, RANKS, spark_dl.Mesh(zero_stage=3))
    spark.stop()
    one = "has no memory left" if alone is None else f"trains to a loss of {alone:.3f}"
    four = "have no memory left" if sharded is None else f"train to a loss of {sharded:.3f}"
    limits = f"{needed:.0f} MiB of states, {args.limit_mib} MiB for each rank"
    print(f"{limits}: 1 rank {one}, {RANKS} ranks with ZeRO-3 {four}")
    sys.exit(0 if alone is None and sharded is not None else 1)


if __name__ == "__main__":
    main()
