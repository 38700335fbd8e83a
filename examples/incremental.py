"""A table that gets a new partition each month: the model goes on from its last checkpoint, on the new rows only.

The table is a Parquet folder with a partition for each month of 2013. A network learns from the months up to April
which flights arrive more than 15 minutes late. Then May arrives, and later June. Each time, `train.init_from` starts a
new run from the weights of the one before, on the rows of the new month alone. The month after that, which neither
model has seen, shows what the update is worth. Destinations keep the indices of the first run.

.venv/bin/python examples/incremental.py
.venv/bin/python examples/incremental.py --first-months 3 --arriving 4
.venv/bin/python examples/incremental.py --master spark://host:7077 --data /shared/flights.csv.zip --folder /shared/incr

The data are those of `flights.py`, which downloads them once.
Promise: after each of the two updates, the area under the ROC curve on the next month is higher than before. The exit
code is 1 if it is not. Seasons differ, so this need not be true of every month.
"""

import argparse
import sys
from pathlib import Path

import torch
from flights import DATA, EntityEmbeddings, auroc, read_flights
from pyspark.sql import DataFrame
from torch import Tensor, nn

import spark_dl

WORDS = {"carrier": 31, "origin": 7, "dest": 127}
"""The most words that each vocabulary can have. One more index is for all others."""
CATEGORIES = (*WORDS, "weekday", "hour")
SIZES = [*(most + 1 for most in WORDS.values()), 8, 24]
NUMBERS = ("distance / 1000 - 1", "departures / 10 - 2", "departure_minute / 360 - 2", "arrival_minute / 360 - 2.5")
"""Scaled by constants: statistics of a month would differ from those of the month before."""


def build_model() -> nn.Module:
    return EntityEmbeddings(SIZES, len(NUMBERS))


def forward(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Indices of the categories and numbers -> logits [rows]."""
    return model(torch.stack([batch[name] for name in CATEGORIES], dim=1), batch["numbers"])[:, 0]


def predict(logits: Tensor) -> dict[str, Tensor]:
    return {"score": logits.double()}


SPEC = spark_dl.ModelSpec(build=build_model, forward=forward, predict=predict, loss="BCEWithLogitsLoss")


def train(rows: DataFrame, run_dir: str, args: argparse.Namespace, init_from: str | None = None) -> str:
    """Trains on some rows, from the weights of an earlier run if there is one. Returns the run folder."""
    is_first = init_from is None
    config = spark_dl.Config(
        data=spark_dl.Data(
            features=(*CATEGORIES, "numbers"),
            label="label",
            encode={name: {"as": "vocabulary", "max_size": most} for name, most in WORDS.items()},
            cast={"weekday": "int64", "hour": "int64", "label": "float32"},
        ),
        train=spark_dl.Train(
            epochs=args.epochs if is_first else 1,
            global_batch_size=512,
            optimizer="Adam",
            lr=0.003 if is_first else 0.0005,  # a few steps on new rows must not undo what was learnt before
            init_from=init_from,
        ),
        launch=spark_dl.Launch(num_ranks=args.ranks),
    )
    result = spark_dl.train(rows, SPEC, config, run_dir=run_dir, overwrite=True)
    print(f"{run_dir}: {result.steps} steps, {result.seconds:.0f} s, loss {result.train_loss:.4f}", flush=True)
    return run_dir


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--data", type=Path, default=DATA, help="flights.csv.zip, which is downloaded if it is missing")
    parser.add_argument("--folder", default="runs/incremental", help="folder that all hosts reach, for table and runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2, help="of the first training (default: 2)")
    parser.add_argument("--first-months", type=int, default=4, help="months of the first training (default: 4)")
    parser.add_argument("--arriving", type=int, default=2, help="months that arrive one by one (default: 2)")
    args = parser.parse_args()
    if not 1 <= args.first_months <= 12 - args.arriving - 1:
        parser.error("--first-months and --arriving: at least one month of 2013 must be left to test on")
    return args


def main() -> None:
    args = parse()
    spark = spark_dl.build_session("incremental", master=args.master)
    numbers = f"array({', '.join(f'CAST({number} AS FLOAT)' for number in NUMBERS)}) AS numbers"
    flights = read_flights(spark, args.data).selectExpr(*CATEGORIES, "month", numbers, "label")
    flights = flights.coalesce(2 * args.ranks).cache()
    table = f"{args.folder}/table"

    # What the job that loads the table does; the months that have arrived so far.
    flights.filter(f"month <= {args.first_months}").write.partitionBy("month").mode("overwrite").parquet(table)
    run_dir = train(spark.read.parquet(table), f"{args.folder}/run-{args.first_months:02}", args)

    worse = []
    for month in range(args.first_months + 1, args.first_months + args.arriving + 1):
        flights.filter(f"month = {month}").write.partitionBy("month").mode("append").parquet(table)
        new_rows = spark.read.parquet(table).filter(f"month = {month}")  # Spark reads this partition only
        updated = train(new_rows, f"{args.folder}/run-{month:02}", args, init_from=run_dir)

        unseen = flights.filter(f"month = {month + 1}")
        before, after = (auroc(spark_dl.predict(unseen, SPEC, run), "score") for run in (run_dir, updated))
        print(f"month {month} arrived, {new_rows.count():,} flights: ", end="")
        print(f"AUROC on month {month + 1}: {before:.4f} before, {after:.4f} after", flush=True)
        worse += [month] * (after <= before)
        run_dir = updated
    spark.stop()
    if worse:
        sys.exit(f"error: the model is not better after the update with month {', '.join(map(str, worse))}")


if __name__ == "__main__":
    main()
