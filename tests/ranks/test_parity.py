"""Every strategy gives the weights that one process gives on the same global batches."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from spark_dl import Parallel, checkpoint, worker
from spark_dl.data.mixture import Mixture
from spark_dl.data.plan import Plan
from spark_dl.metrics import read_metrics
from spark_dl.spec import Run
from tests.datasets import global_batches, write_dataset
from tests.models import MLP, blobs, build_mlp, small_config
from tests.ranks.launcher import run_ranks


def train_rank(run):
    return worker.main(run).result


def reference(columns, config, group_rows):
    """Losses per step and weights of a plain loop over the same global batches, without the package's loop."""
    torch.manual_seed(config.train.seed)
    model = build_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr, **config.train.optimizer_args)
    plan = Plan(
        group_rows=group_rows, global_batch_size=config.train.global_batch_size, num_streams=config.data.num_streams,
        window_rows=config.data.shuffle_window_rows, seed=config.train.seed,
    )  # fmt: skip
    features, label = torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"])
    losses = []
    for epoch in range(config.train.epochs):
        for batch in global_batches(plan, epoch):
            ids = torch.tensor(batch)
            loss = F.cross_entropy(model(features[ids]), label[ids])
            optimizer.zero_grad()
            loss.backward()
            if config.train.clip_grad_norm:
                torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm)
            optimizer.step()
            losses.append(loss.item())
    return losses, model.state_dict()


def assert_same_training(tmp_path, config, rows, group_rows=40):
    columns = blobs(rows)
    shards = write_dataset(str(tmp_path / "data"), columns, group_rows=group_rows, shard_rows=3 * group_rows)
    losses, weights = reference(columns, config, tuple(n for s in shards.shards for n in s.row_groups))
    run = Run(spec=MLP, config=config, train=shards, run_dir=str(tmp_path / "run"))
    results = run_ranks(train_rank, config.launch.num_ranks, run)
    assert all(r == results[0] for r in results) or all(r["checkpoint"] == results[0]["checkpoint"] for r in results)
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert results[0]["rows"] == rows * config.train.epochs
    np.testing.assert_allclose([line["loss"] for line in lines], losses, rtol=1e-5)
    trained = checkpoint.load(checkpoint.find(run.run_dir), "model.pt")["0"]
    for name, expected in weights.items():
        torch.testing.assert_close(trained[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [480, 509, 17], ids=["whole batches", "short last batch", "fewer rows than streams"])
def test_same_as_one_process(tmp_path, num_ranks, rows):
    assert_same_training(tmp_path, small_config(num_ranks), rows)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_ranks_train_exactly(tmp_path, rows):
    assert_same_training(tmp_path, small_config(4), rows)


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
@pytest.mark.parametrize("accumulation_steps", [2, 5])
def test_accumulation_changes_nothing(tmp_path, num_ranks, accumulation_steps):
    assert_same_training(tmp_path, small_config(num_ranks, train={"accumulation_steps": accumulation_steps}), 245)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_momentum_and_clipping(tmp_path, num_ranks):
    optimizer = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
    assert_same_training(tmp_path, small_config(num_ranks, train=optimizer), 245)


def test_small_buckets(tmp_path):
    config = small_config(3, parallel=Parallel(bucket_mib=0.0001))
    assert_same_training(tmp_path, config, 245)


def test_a_mixture_trains_alike_on_any_number_of_ranks(tmp_path):
    datasets = {
        name: write_dataset(str(tmp_path / name), blobs(rows), group_rows=20, shard_rows=60)
        for name, rows in (("many", 245), ("few", 50))
    }
    trained = []
    for num_ranks in (1, 3):
        config = small_config(num_ranks, train={"global_batch_size": 96}, data={"proportions": {"many": 3, "few": 1}})
        run = Run(spec=MLP, config=config, train=Mixture(datasets), run_dir=str(tmp_path / f"run-{num_ranks}"))
        run_ranks(train_rank, num_ranks, run)
        losses = [line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
        trained.append((losses, checkpoint.load(checkpoint.find(run.run_dir), "model.pt")["0"]))
    (losses, weights), (expected_losses, expected) = trained
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)
