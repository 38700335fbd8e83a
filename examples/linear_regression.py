"""Linear regression in three ways: a gradient written by hand, `nn.Linear`, and the exact solution of Spark ML.

The data are the 442 patients of scikit-learn's diabetes table: ten measurements, and the state of the disease a year
later. First, tensors and one all-reduce per step, in a function that runs on the ranks. Then, `nn.Linear` with
`spark_dl.train` and three strategies side by side: the ring of DDP, Horovod, if it is installed, and Spark's own
`treeReduce`.

.venv/bin/python examples/linear_regression.py
.venv/bin/python examples/linear_regression.py --master spark://host:7077 --folder hdfs:///tmp/linear_regression

Promise: the mean squared error of every way is at most 0.1 % above that of the exact solution, and that of all
strategies is the same, to 1 part in 100,000. The exit code is 1 if it is not.
"""

import argparse
import importlib.util
import math
import sys
import time

import torch
import torch.distributed as dist
from pyspark.ml.feature import StandardScaler, VectorAssembler
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.ml.regression import LinearRegression
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sklearn.datasets import load_diabetes

import spark_dl

TOLERANCE = 1e-3
"""How far a mean squared error may be above the exact one, as a fraction of it."""
AGREEMENT = 1e-5
"""How far the mean squared errors of two strategies may be apart, as a fraction of them."""
LR, MOMENTUM = 0.25, 0.85
STRATEGIES = {"ddp": spark_dl.DDP(), "horovod": spark_dl.Horovod(), "tree_reduce": spark_dl.TreeReduce()}


def read_diabetes(spark: SparkSession) -> DataFrame:
    """The table, with mean 0 and standard deviation 1 in each column: `features`, ten floats, and `target`."""
    table = spark.createDataFrame(load_diabetes(as_frame=True, scaled=False).frame)
    assembler = VectorAssembler(inputCols=table.columns, outputCol="columns")  # the target is the last one
    assembled = assembler.transform(table)
    scaler = StandardScaler(inputCol="columns", outputCol="scaled", withMean=True).fit(assembled)
    values = scaler.transform(assembled).select(vector_to_array("scaled", "float32").alias("v"))
    return values.select(F.slice("v", 1, 10).alias("features"), F.element_at("v", 11).alias("target"))


def solve(df: DataFrame) -> tuple[list[float], float]:
    """The exact weights and bias, by the normal equation."""
    vectors = df.withColumn("features", array_to_vector("features"))
    model = LinearRegression(labelCol="target", solver="normal").fit(vectors)
    return model.coefficients.tolist(), model.intercept


def descend(rows: spark_dl.RankRows, total: int, steps: int) -> tuple[list[float], float]:
    """Gradient descent by hand. Runs on every rank; `rows` are the rank's own, `total` the number over all ranks."""
    dist.init_process_group("gloo")
    batches = list(rows.batches(64))  # as many on every rank; filled places have weight 0
    x, y, weight = (torch.cat([batch[name] for batch in batches]) for name in ("features", "target", "weight"))
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)  # the last weight is the bias
    w, velocity = torch.zeros(11), torch.zeros(11)
    for _ in range(steps):
        gradient = 2 * x.T @ (weight * (x @ w - y))  # of the sum of squared errors of the rank's rows
        dist.all_reduce(gradient)  # the sum over the ranks: divided by all rows, it is the exact mean
        velocity = MOMENTUM * velocity + gradient / total
        w -= LR * velocity
    return w[:10].tolist(), w[10].item()


def build_model() -> torch.nn.Module:
    """Features [rows, 10] -> predictions [rows]."""
    return torch.nn.Sequential(torch.nn.Linear(10, 1), torch.nn.Flatten(0))


SPEC = spark_dl.ModelSpec(build=build_model, loss="MSELoss")


def train(df: DataFrame, strategy: str, total: int, args: argparse.Namespace) -> tuple[list[float], float]:
    """The same steps by `spark_dl.train`: each batch is the whole table.

    The size of a batch must be a multiple of the ranks and of `loader.num_streams`.
    """
    config = spark_dl.Config(
        data=spark_dl.Data(features=("features",), label="target"),
        train=spark_dl.Train(
            global_batch_size=args.ranks * math.ceil(total / args.ranks),
            epochs=args.steps,
            lr=LR,
            optimizer_args={"momentum": MOMENTUM},
        ),
        loader=spark_dl.Loader(num_streams=args.ranks),
        checkpoint=spark_dl.Checkpoint(every_epochs=args.steps),  # only at the end
        launch=spark_dl.Launch(num_ranks=args.ranks),
        parallel=STRATEGIES[strategy],
    )  # fmt: skip
    run_dir = f"{args.folder}/{strategy}"
    result = spark_dl.train(df, SPEC, config, run_dir=run_dir, overwrite=True, progress=False)
    linear = result.load_model(SPEC)[0]
    return linear.weight[0].tolist(), linear.bias.item()


def mean_squared_error(df: DataFrame, weights: list[float], bias: float) -> float:
    """Computed by Spark, of all rows. The variance of the target is 1: this is the part that is not explained."""
    products = (F.col("features")[i] * weight for i, weight in enumerate(weights))
    error = sum(products, F.lit(bias)) - F.col("target")
    return df.agg(F.avg(error * error)).first()[0]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--master", default="local[2]", help="Spark master URL (default: local[2])")
    parser.add_argument("--folder", default="runs/linear_regression", help="folder or URL that all hosts reach")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80, help="steps of each way (default: 80)")
    return parser.parse_args()


def main() -> None:
    args = parse()
    spark = spark_dl.build_session("linear_regression", master=args.master)
    df = read_diabetes(spark).cache()
    total = df.count()
    ways = {
        "exact, by Spark ML": lambda: solve(df),
        "by hand": lambda: spark_dl.run_on_dataframe(descend, df, num_ranks=args.ranks, total=total, steps=args.steps)[
            0
        ],
    }
    for strategy in STRATEGIES:
        if strategy == "horovod" and importlib.util.find_spec("horovod") is None:
            print("horovod is left out: it is not installed; `make setup-horovod` builds it")
            continue
        ways[f"nn.Linear, {strategy}"] = lambda strategy=strategy: train(df, strategy, total, args)

    errors = {}
    print(f"{'way':22} {'seconds':>7} {'mean squared error':>18}", flush=True)
    for way, fit in ways.items():
        start = time.monotonic()
        weights, bias = fit()
        seconds = time.monotonic() - start
        errors[way] = mean_squared_error(df, weights, bias)
        print(f"{way:22} {seconds:7.1f} {errors[way]:18.6f}", flush=True)
    spark.stop()

    exact, *others = errors.values()
    strategies = [error for way, error in errors.items() if way.startswith("nn.Linear")]
    excess, spread = max(others) / exact - 1, max(strategies) / min(strategies) - 1
    print(f"largest excess over the exact solution {excess:.4%}, between strategies {spread:.6%}")
    if not excess <= TOLERANCE:
        sys.exit(f"error: the excess is above {TOLERANCE:.1%}")
    if not spread <= AGREEMENT:
        sys.exit(f"error: the strategies are more than {AGREEMENT:.3%} apart")


if __name__ == "__main__":
    main()
