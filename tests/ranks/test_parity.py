"""Every strategy gives the weights that one process gives on the same global batches."""

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import DDP, ModelSpec, worker
from spark_dl.data.load.mixture import Mixture
from spark_dl.parallel.exchange.collectives import ALGORITHMS
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders import reference
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs, build_mlp, small_config
from tests.builders.settings import parallel
from tests.ranks.launcher import run_ranks


def train_rank(run):
    return worker.main(run).result


def assert_same_training(tmp_path, config, rows, **options):
    def train(run):
        results = run_ranks(train_rank, config.launch.num_ranks, run)
        assert all(r == results[0] for r in results) or all(
            r["checkpoint"] == results[0]["checkpoint"] for r in results
        )
        return results[0]

    reference.assert_same_training(train, tmp_path, config, rows, **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("num_ranks", "rows"),
    [
        pytest.param(4, 480, id="4-whole batches"),
        *(pytest.param(n, 509, id=f"{n}-short last batch") for n in (1, 2, 3)),
        *(pytest.param(n, 17, id=f"{n}-fewer rows than streams") for n in (1, 4)),
    ],
)
def test_same_as_one_process(tmp_path, num_ranks, rows):
    assert_same_training(tmp_path, small_config(num_ranks), rows)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_ranks_train_exactly(tmp_path, rows):
    assert_same_training(tmp_path, small_config(4), rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "accumulation_steps"), [(1, 2), (3, 5), (4, 2)])
def test_accumulation_changes_nothing(tmp_path, num_ranks, accumulation_steps):
    assert_same_training(tmp_path, small_config(num_ranks, train={"accumulation_steps": accumulation_steps}), 245)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_momentum_and_clipping(tmp_path, num_ranks):
    optimizer = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
    assert_same_training(tmp_path, small_config(num_ranks, train=optimizer), 245)


def test_small_buckets(tmp_path):
    config = small_config(3, parallel=DDP(bucket_mib=0.0001))
    assert_same_training(tmp_path, config, 245)


OUR_ALL_REDUCES = [(name, num_ranks) for name in ALGORITHMS for num_ranks in (2, 3, 4)]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("algorithm", "num_ranks"),
    [pytest.param(*case, marks=[] if case == ("ring", 3) else pytest.mark.slow) for case in OUR_ALL_REDUCES],
)
def test_every_all_reduce_of_ours(tmp_path, algorithm, num_ranks):
    """20 steps, with a bucket for each parameter, so that several are under way at a time."""
    config = small_config(num_ranks, parallel=DDP(all_reduce=algorithm, bucket_mib=0.0001))
    assert_same_training(tmp_path, config, 480)


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


@pytest.mark.parametrize(
    ("more", "num_ranks", "accumulation_steps"),
    [
        pytest.param({}, 3, 1, id="backend-3-1"),
        pytest.param({"all_reduce": "ring"}, 3, 3, id="ring-3-3"),
        pytest.param({}, 1, 2, id="backend-1-2", marks=pytest.mark.slow),
        pytest.param({"all_reduce": "ring"}, 1, 1, id="ring-1-1", marks=pytest.mark.slow),
        pytest.param({"all_reduce": "ring"}, 3, 2, id="ring-3-2", marks=pytest.mark.slow),
    ],
)
def test_a_static_graph_changes_nothing(tmp_path, num_ranks, accumulation_steps, more):
    train = {"optimizer_args": {"momentum": 0.9}, "accumulation_steps": accumulation_steps}
    config = small_config(num_ranks, train=train, parallel=parallel(static_graph=True, bucket_mib=0.0001, **more))
    assert_same_training(tmp_path, config, 245)


class RarelyWhole(nn.Module):
    """Has a layer for rows far out alone, which most batches do not have."""

    def __init__(self):
        super().__init__()
        self.for_all, self.for_few = build_mlp(), nn.Linear(4, 3)

    def forward(self, features):
        out, few = self.for_all(features), features[:, 0] > FAR
        return out.index_add(0, few.nonzero()[:, 0], self.for_few(features[few])) if few.any() else out


FAR = 4.0


@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_parameters_that_are_not_used_in_all_steps_and_on_all_ranks(tmp_path, num_ranks, accumulation_steps):
    """A layer that no rank used in a step stays as it is, also with momentum."""
    config = small_config(
        num_ranks, parallel=DDP(find_unused_parameters=True),
        train={"optimizer_args": {"momentum": 0.9}, "accumulation_steps": accumulation_steps},
    )  # fmt: skip
    steps, rows_that_use_it = 10, int((blobs(480)["features"][:, 0] > FAR).sum())
    assert 3 < rows_that_use_it < steps
    assert_same_training(tmp_path, config, 480, spec=ModelSpec(build=RarelyWhole))
