"""Strategies that do not send whole gradients learn the UCI digits as well as the exact ones, with fewer bytes."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

from spark_dl import ModelSpec, worker
from spark_dl.rundir import checkpoint
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.settings import make_config, parallel
from tests.ranks.launcher import run_ranks

METHODS = {
    "exact": {},
    "bf16": {"compression": "bf16"},
    "powersgd": {"compression": "powersgd", "powersgd_rank": 2, "compression_start_step": 30},
    "threshold": {"compression": "threshold", "threshold": 0.01, "compression_start_step": 30},
    "topk": {"compression": "topk", "topk_ratio": 0.01, "compression_start_step": 30},
    "horovod fp16": {"strategy": "horovod", "compression": "fp16"},
    "local_sgd": {"strategy": "local_sgd", "sync_every_steps": 8},
    "post_local_sgd": {"strategy": "local_sgd", "sync_every_steps": 8, "sync_start_step": 100},
}
NUM_TEST, NUM_RANKS, EPOCHS = 360, 3, 10


def build_classifier():
    """About a quarter of a million parameters."""
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 448), nn.ReLU(), nn.Linear(448, 10))


def digits():
    features, label = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(label))
    return (features[order] / 16).astype(np.float32), label[order].astype(np.int64)


def train_and_count(run):
    """Trains as a rank; returns the bytes that each collective called from Python was given."""
    given = []
    real = {name: getattr(dist, name) for name in ("all_reduce", "all_gather")}

    def all_reduce(tensor, *args, **kwargs):
        given.append(("all_reduce", tensor.nbytes))
        return real["all_reduce"](tensor, *args, **kwargs)

    def all_gather(parts, tensor, *args, **kwargs):
        given.append(("all_gather", tensor.nbytes))
        return real["all_gather"](parts, tensor, *args, **kwargs)

    dist.all_reduce, dist.all_gather = all_reduce, all_gather
    try:
        worker.main(run)
    finally:
        dist.all_reduce, dist.all_gather = real["all_reduce"], real["all_gather"]
    return given


def sent(given, ranks):
    """Bytes that a rank sends: of a ring all-reduce and a ring all-gather (Patarasuk and Yuan 2009)."""
    return sum((2 * (ranks - 1) / ranks if name == "all_reduce" else ranks - 1) * size for name, size in given)


def make_run(tmp_path, method, num_ranks):
    features, label = digits()
    columns = {"features": features[NUM_TEST:], "label": label[NUM_TEST:]}
    shards = write_dataset(str(tmp_path / "data"), columns, group_rows=120, shard_rows=720)
    buckets = {} if "strategy" in METHODS[method] else {"bucket_mib": 0.5}
    config = make_config(
        global_batch_size=48, epochs=EPOCHS, lr=0.05, optimizer_args={"momentum": 0.9}, log_every=1000,
        scheduler="ExponentialLR", scheduler_args={"gamma": 0.8}, num_streams=24, num_ranks=num_ranks, threads=1,
        parallel=parallel(**buckets, **METHODS[method]), collective_timeout_s=60, start_timeout_s=60,
    )  # fmt: skip
    return Run(spec=ModelSpec(build=build_classifier), config=config, train=shards, run_dir=str(tmp_path / method))


def accuracy(run):
    """In percent, on rows that were not trained on."""
    features, label = digits()
    model = build_classifier()
    model.load_state_dict(checkpoint.load(checkpoint.latest(run.run_dir), "model.pt")["0"])
    with torch.no_grad():
        guess = model(torch.from_numpy(features[:NUM_TEST])).argmax(1).numpy()
    return 100 * float((guess == label[:NUM_TEST]).mean())


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("exact"), "exact", 1)
    run_ranks(train_and_count, 1, run)
    return accuracy(run)


@pytest.mark.slow
@pytest.mark.parametrize("method", [name for name in METHODS if name != "exact"])
@pytest.mark.long
def test_the_same_accuracy_within_a_point_with_fewer_bytes(tmp_path, expected, method):
    """What Horovod sends is not counted: its collectives are not torch's."""
    if method.startswith("horovod"):
        pytest.importorskip("horovod.torch", reason="no horovod; see `make setup-horovod`", exc_type=ImportError)
    run = make_run(tmp_path, method, NUM_RANKS)
    given = run_ranks(train_and_count, NUM_RANKS, run)[0]
    assert expected > 95
    assert accuracy(run) >= expected - 1
    steps = EPOCHS * math.ceil(run.train.rows / 48)
    size = 4 * sum(p.numel() for p in build_classifier().parameters())
    whole = steps * 2 * (NUM_RANKS - 1) / NUM_RANKS * size
    if "compression_start_step" in METHODS[method]:
        whole_steps = METHODS[method]["compression_start_step"]
        assert sent(given, NUM_RANKS) < whole * (whole_steps / steps + 1 / 8)
    elif METHODS[method].get("strategy") == "local_sgd":
        whole_steps = METHODS[method].get("sync_start_step", 0)
        assert sent(given, NUM_RANKS) < whole * (whole_steps / steps + 1 / 6)
    elif not method.startswith("horovod"):
        assert sent(given, NUM_RANKS) == pytest.approx(whole / 2, rel=0.05)
