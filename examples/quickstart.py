"""A DataFrame, a model, two ranks: the whole of it.

.venv/bin/python examples/quickstart.py
"""

import argparse

import torch

import spark_dl


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))


def predict(scores: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"prediction": scores.argmax(dim=1), "probability": scores.softmax(dim=1)[:, 1]}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help
    spark = spark_dl.build_session("quickstart", master="local[2]")  # or the session that you have

    # Points in the plane; those inside of the unit circle are of class 1.
    points = spark.range(20_000).selectExpr("randn(1) AS x", "randn(2) AS y")
    df = points.selectExpr("array(CAST(x AS FLOAT), CAST(y AS FLOAT)) AS features",
                           "CAST(x * x + y * y < 1 AS BIGINT) AS label")  # fmt: skip

    spec = spark_dl.ModelSpec(build=build_model, loss="CrossEntropyLoss", predict=predict)
    config = spark_dl.Config(
        data=spark_dl.Data(features=("features",), label="label"),
        train=spark_dl.Train(
            epochs=5,
            optimizer="Adam",
            lr=0.01,
            validation_fraction=0.1,
            metrics={"accuracy": {"class": "MulticlassAccuracy", "num_classes": 2, "average": "micro"}},
        ),
        launch=spark_dl.Launch(num_ranks=2),
    )  # fmt: skip
    result = spark_dl.train(df, spec, config, run_dir="runs/quickstart", overwrite=True)
    print(f"{result.rows} rows in {result.seconds:.0f} s, loss {result.train_loss:.3f}")
    spark_dl.predict(df, spec, result.checkpoint).select("features", "label", "probability").show(5)
    spark.stop()
