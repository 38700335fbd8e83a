"""Columns beside the model's inputs: weights, several labels and outputs, and metrics of the user's own."""

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from spark_dl import LocalSGD, ModelSpec, worker
from spark_dl.data.plan import Plan
from spark_dl.rundir import checkpoint
from spark_dl.spec import Run
from tests.builders.datasets import global_batches, write_dataset
from tests.builders.models import MLP, blobs, build_mlp, small_config
from tests.ranks.launcher import run_ranks

ROWS = 245


def train_rank(run):
    return worker.main(run).result


def columns():
    rng = np.random.default_rng(7)
    found = blobs(ROWS)
    size = np.abs(found["features"]).sum(1)
    return {**found, "size": size, "w": rng.integers(0, 4, ROWS) * 0.5}


def run_of(tmp_path, config, spec):
    shards = write_dataset(str(tmp_path / "data"), columns(), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / "run"))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_weighted_rows_train_as_in_one_process_and_do_not_depend_on_ranks(tmp_path, num_ranks):
    config = small_config(num_ranks, data={"weight": "w"})
    run = run_of(tmp_path, config, MLP)
    result = run_ranks(train_rank, num_ranks, run)[0]
    weights, loss = weighted_reference(run)
    trained = checkpoint.load(checkpoint.latest(run.run_dir), "model.pt")["0"]
    for name, expected in weights.items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-6)
    assert result["train_loss"] == pytest.approx(loss, rel=1e-5)


def weighted_reference(run):
    """Weights of a plain loop, and the mean loss of its last epoch: each row's loss times its weight, over the rows."""
    torch.manual_seed(run.config.train.seed)
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config.train.lr)
    plan = Plan(
        group_rows=tuple(n for s in run.train.shards for n in s.row_groups), global_batch_size=48, num_streams=24,
        window_rows=96, seed=3,
    )  # fmt: skip
    data = {name: torch.from_numpy(values) for name, values in columns().items()}
    for epoch in range(run.config.train.epochs):
        total = 0.0
        for batch in global_batches(plan, epoch):
            ids = torch.tensor(batch)
            rows = F.cross_entropy(model(data["features"][ids]), data["label"][ids], reduction="none")
            loss = (rows * data["w"][ids].float()).sum()
            total += loss.item()
            optimizer.zero_grad()
            (loss / len(ids)).backward()
            optimizer.step()
    return model.state_dict(), total / ROWS


@pytest.mark.parametrize("weight", [None, "w"])
def test_a_row_of_weight_0_is_no_row_of_its_own_where_ranks_train_alone(tmp_path, weight):
    config = small_config(2, data={"weight": weight}, parallel=LocalSGD(sync_every_steps=3))
    assert np.isfinite(run_ranks(train_rank, 2, run_of(tmp_path, config, MLP))[0]["train_loss"])


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.kind, self.size = nn.Linear(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, features):
        hidden = torch.tanh(self.body(features))
        return {"kind": self.kind(hidden), "size": self.size(hidden).squeeze(1)}


def both_losses(output, batch):
    return F.cross_entropy(output["kind"], batch["label"], reduction="none") + (output["size"] - batch["size"]).square()


def error_of_size(output, batch):
    return (output["size"] - batch["size"]).abs()


class LargestError(torchmetrics.Metric):
    """The largest error of size over all rows: a metric whose states are joined by a maximum."""

    def __init__(self):
        super().__init__()
        self.add_state("largest", torch.zeros(()), dist_reduce_fx="max")

    def update(self, output, batch):
        self.largest = torch.maximum(self.largest, error_of_size(output, batch).max())

    def compute(self):
        return self.largest


HEADS = ModelSpec(
    build=TwoHeads, loss=both_losses, metrics={"size error": error_of_size, "largest error": LargestError}
)
HEAD_DATA = {"label": None, "labels": ("label", "size"), "validation_fraction": 0.3}
HEAD_METRICS = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "label": "label", "output": "kind",
                             "average": "micro"}}  # fmt: skip


@pytest.mark.parametrize("weight", [None, "w"])
def test_models_with_several_outputs_have_metrics_of_each_and_of_the_users_own(tmp_path, weight):
    data = {**HEAD_DATA, "weight": weight}
    found = []
    for num_ranks in (1, 3):
        config = small_config(num_ranks, data=data, train={"metrics": HEAD_METRICS, "optimizer": "Adam", "lr": 0.01})
        (tmp_path / str(num_ranks)).mkdir()
        found.append(run_ranks(train_rank, num_ranks, run_of(tmp_path / str(num_ranks), config, HEADS))[0]["metrics"])
    alone, together = found
    assert alone.keys() == {"loss", "accuracy", "size error", "largest error"}
    assert alone["largest error"] > alone["size error"] > 0
    assert 0 < alone["accuracy"] < 1
    assert together == pytest.approx(alone, rel=1e-4)


def test_an_output_that_the_model_does_not_have_is_an_error_that_names_those_it_has(tmp_path):
    metrics = {"accuracy": {**HEAD_METRICS["accuracy"], "output": "sort"}}
    config = small_config(1, data=HEAD_DATA, train={"metrics": metrics})
    match = r"train.metrics.accuracy.output: found 'sort', the model's output has \['kind', 'size'\]"
    with pytest.raises(Exception, match=match):
        run_ranks(train_rank, 1, run_of(tmp_path, config, HEADS))
