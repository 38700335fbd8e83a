"""A training function of your own on the rows of a DataFrame, with no storage that the executors share.

.venv/bin/python examples/run_on_dataframe.py
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import spark_dl


def train(rows: spark_dl.RankRows, epochs: int, lr: float) -> dict[str, object]:
    """Runs on every rank, with the environment of torchrun; `rows` are the rank's own, on its own disk."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    dataset = spark_dl.open_dataset(rows, batch_size=64)
    for epoch in range(epochs):
        dataset.set_epoch(epoch)
        for batch in dataset:  # as many batches on every rank
            x = torch.stack([batch["x"], batch["y"]], dim=1)
            losses = (model(x).squeeze(1) - batch["z"]) ** 2
            # Filled places have weight 0. DDP takes the mean over the ranks; this makes it the mean over the rows.
            loss = (losses * batch["weight"]).sum() * dist.get_world_size() / dataset.batch_rows
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {"rows": rows.shards.rows, "weights": model.module.state_dict()}


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()  # --help
    spark = spark_dl.build_session("run_on_dataframe", master="local[2]")  # or the session that you have
    points = spark.range(20_000).selectExpr("CAST(randn(1) AS FLOAT) AS x", "CAST(randn(2) AS FLOAT) AS y")
    df = points.selectExpr("x", "y", "3 * x - 2 * y + 1 AS z")

    results = spark_dl.run_on_dataframe(train, df, num_ranks=2, epochs=2, lr=0.1)
    print("rows of each rank:", [result["rows"] for result in results])
    print("weights, the same on both:", results[0]["weights"])
    spark.stop()
