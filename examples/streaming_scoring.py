"""Files that arrive in a folder are scored by Structured Streaming, each row exactly once, also over a restart.

A network learns scikit-learn's digits and is saved. Then images arrive, in files. A streaming query with a checkpoint
loads the model, scores all files that are there, a file in each micro-batch, and stops. More files arrive, and a second
query continues where the first one stopped, as after a restart or in the next run of a scheduled job.

.venv/bin/python examples/streaming_scoring.py
.venv/bin/python examples/streaming_scoring.py --master spark://host:7077 --folder hdfs:///tmp/streaming_scoring

Promise: the id of every image is in the result exactly once, with the prediction of the batch `transform`.
The exit code is 1 if it is not.
"""

import argparse
import sys
import time

import torch
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_digits

import spark_dl
from spark_dl.ml import TorchClassificationModel, TorchClassifier


def read_digits(spark: SparkSession) -> DataFrame:
    """The images: `id`, `image`, 64 floats in [0, 1], and `label`."""
    images, labels = load_digits(return_X_y=True)
    rows = ((i, image.tolist(), int(label)) for i, (image, label) in enumerate(zip(images / 16, labels, strict=True)))
    return spark.createDataFrame(rows, "id BIGINT, image ARRAY<FLOAT>, label BIGINT")


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


def train(df: DataFrame, args: argparse.Namespace, folder: str) -> TorchClassificationModel:
    classifier = TorchClassifier(
        build_model,
        featuresCol="image",
        numRanks=args.ranks,
        epochs=args.epochs,
        lr=0.01,
        settings={"train.optimizer": "Adam"},
        runDir=f"{folder}/runs",
        saveFormat="export",  # a saved model of the other format needs this file as a module
    )
    return classifier.fit(df)


def deliver(images: DataFrame, folder: str, files: int) -> None:
    """Images arrive as Parquet files. Spark moves each file to the folder once it is complete."""
    for file in range(files):
        part = images.filter(F.pmod(F.xxhash64("id"), F.lit(files)) == file).select("id", "image")
        part.coalesce(1).write.mode("append").parquet(f"{folder}/incoming")


def score(spark: SparkSession, folder: str) -> list[int]:
    """Scores the files that have arrived since the last call. Returns the number of rows of each micro-batch.

    The checkpoint knows which files are done. The sink knows which micro-batches it has, and adds none of them twice.
    """
    model = TorchClassificationModel.load(f"{folder}/model")
    incoming = spark.readStream.schema("id BIGINT, image ARRAY<FLOAT>").option("maxFilesPerTrigger", 1)
    scored = model.transform(incoming.parquet(f"{folder}/incoming")).select("id", "prediction", "probability")
    sink = scored.writeStream.format("parquet").option("checkpointLocation", f"{folder}/checkpoint")
    query = sink.trigger(availableNow=True).start(f"{folder}/scored")
    query.awaitTermination()  # raises if the query failed
    return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    where = "folder or URL that all hosts reach; each run makes a new folder in it"
    parser.add_argument("--folder", default="runs/streaming_scoring", help=where)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--files", type=int, default=3, help="files that arrive before each query (default: 3)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    folder = f"{args.folder}/{time.strftime('%Y%m%d-%H%M%S')}"
    spark = spark_dl.build_session("streaming_scoring", master=args.master)
    digits = read_digits(spark).repartition(args.ranks).cache()
    known, new = digits.filter("id % 3 = 0"), digits.filter("id % 3 > 0")

    model = train(known, args, folder)
    model.write().save(f"{folder}/model")
    print(f"{model.result.rows:,} rows in {model.result.seconds:.0f} s, training loss {model.result.train_loss:.3f}")

    for start, part in enumerate(("id % 3 = 1", "id % 3 = 2"), 1):
        deliver(new.filter(part), folder, args.files)
        print(f"query {start}: rows of each micro-batch: {score(spark, folder)}", flush=True)

    expected = model.transform(new).select("id", "label", F.col("prediction").alias("expected")).cache()
    scored = spark.read.parquet(f"{folder}/scored").select("id", "prediction").cache()
    both = expected.join(scored, "id").agg(
        F.count_if(F.col("prediction") == F.col("expected")).alias("equal"),
        F.count_if(F.col("prediction") == F.col("label")).alias("right"),
    )  # fmt: skip
    rows, ids, total = scored.count(), scored.select("id").distinct().count(), expected.count()
    equal, right = both.first()
    spark.stop()
    print(f"{right / total:.1%} of the digits are right; the result is in {folder}/scored")
    print(f"{total} images: {rows} rows scored, {ids} ids, {equal} predictions equal to those of the batch transform")
    if not rows == ids == equal == total:
        sys.exit("error: a row is missing, repeated or has another prediction")


if __name__ == "__main__":
    main()
