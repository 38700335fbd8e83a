"""Local SGD: ranks that step by themselves and average their weights, against a plain simulation in one process."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import Checkpoint, Launch, LocalSGD, ModelSpec
from spark_dl.data.load.build import build_loader
from spark_dl.data.plan import Plan, streams_of_rank
from spark_dl.evaluate import load_model
from spark_dl.launch.rank import rendezvous
from spark_dl.parallel.local_sgd import average_weights
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.builders.datasets import stream_batches
from tests.builders.models import DROPOUT_MLP, blobs, build_mlp, small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, make_run, rank_states, resume, train
from tests.ranks.test_parity import assert_same_training

LAUNCH = Launch(device="cpu", collective_timeout_s=20, start_timeout_s=20)


def local_sgd(every, start=0, **more):
    return LocalSGD(sync_every_steps=every, sync_start_step=start, **more)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_ranks", "rows"), [(1, 509), (2, 480), (3, 509), (4, 17), (4, 2)])
def test_with_an_average_after_every_step_it_is_a_single_process(tmp_path, num_ranks, rows):
    """Ranks have unequal parts of a short batch, or none at all: every row counts the same."""
    assert_same_training(tmp_path, small_config(num_ranks, parallel=local_sgd(1)), rows)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_before_its_start_it_is_a_single_process_with_any_optimizer(tmp_path, num_ranks):
    settings = {"optimizer_args": {"momentum": 0.9, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
    assert_same_training(tmp_path, small_config(num_ranks, train=settings, parallel=local_sgd(4, start=100)), 245)


def simulate(columns, config, group_rows):
    """Weights of a plain loop over the ranks, each with a model of its own."""
    ranks, parallel, train_settings = config.launch.num_ranks, config.parallel, config.train
    torch.manual_seed(train_settings.seed)
    first = build_mlp()
    models = [copy.deepcopy(first) for _ in range(ranks)]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr=train_settings.lr, **train_settings.optimizer_args) for m in models
    ]
    plan = Plan(
        group_rows=group_rows, global_batch_size=train_settings.global_batch_size,
        num_streams=config.loader.num_streams, window_rows=config.loader.shuffle_window_rows, seed=train_settings.seed,
    )  # fmt: skip
    features, label = torch.from_numpy(columns["features"]), torch.from_numpy(columns["label"])
    step, trained = 0, np.zeros(ranks)

    def average():
        shares = trained / trained.sum()
        with torch.no_grad():
            for parameters in zip(*(m.parameters() for m in models), strict=True):
                mean = sum(share * p.double() for share, p in zip(shares, parameters, strict=True)).float()
                for p in parameters:
                    p.copy_(mean)
        trained[:] = 0

    for epoch in range(train_settings.epochs):
        for batch in stream_batches(plan, epoch):
            parts = [[row for s in streams_of_rank(len(batch), r, ranks) for row in batch[s]] for r in range(ranks)]
            together = step < parallel.sync_start_step
            for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                rows = torch.tensor([row for part in parts for row in part] if together else parts[rank])
                if len(rows):
                    optimizer.zero_grad()
                    F.cross_entropy(model(features[rows]), label[rows]).backward()
                    optimizer.step()
                trained[rank] += 0 if together else len(rows)
            step += 1
            if not together and (step - parallel.sync_start_step) % parallel.sync_every_steps == 0:
                average()
        if trained.any():
            average()  # for the checkpoint at the end of the epoch
    return models[0].state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "every", "start", "rows"),
    [(2, 4, 0, 509), (3, 3, 5, 509), (3, 100, 0, 509), (2, 3, 5, 17), (3, 4, 0, 17)],
)
def test_weights_are_those_of_a_simulation(tmp_path, num_ranks, every, start, rows):
    settings = {"optimizer_args": {"momentum": 0.9, "weight_decay": 0.01}, "epochs": 3}
    config = small_config(num_ranks, train=settings, parallel=local_sgd(every, start))
    run = make_run(tmp_path, config, rows=rows)
    found = checkpoint.load(train(run), "model.pt")["0"]
    expected = simulate(blobs(rows), config, tuple(n for s in run.train.shards for n in s.row_groups))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("stop_at", [2, 8])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, num_ranks, stop_at):
    """The state of the optimizer is each rank's own. A checkpoint averages, so both runs make it at the same steps."""
    settings = {"optimizer": "Adam", "lr": 0.02, "warmup_steps": 3, "clip_grad_norm": 1.0}
    config = small_config(
        num_ranks, train=settings, parallel=local_sgd(3, start=4), checkpoint=Checkpoint(every_steps=2, keep=99)
    )
    whole = make_run(tmp_path, config, spec=DROPOUT_MLP, name="whole")
    uninterrupted = train(whole)
    cut = make_run(tmp_path, cut_at(config, stop_at), spec=DROPOUT_MLP, name="cut")
    saved = train(cut)
    assert saved.step == stop_at
    assert_same_to_the_bit(uninterrupted, resume(cut, saved, config))
    moments = [state["optimizer"]["state"][0]["exp_avg"] for state in rank_states(uninterrupted)]
    assert not torch.equal(moments[0], moments[1])


@pytest.mark.slow
def test_on_another_number_of_ranks_the_optimizers_begin_with_their_mean(tmp_path):
    settings = {"optimizer": "Adam", "lr": 0.02, "lr_scaling": "linear"}
    config = small_config(2, train=settings, parallel=local_sgd(3))
    run = make_run(tmp_path, cut_at(config, 6))
    saved = train(run)
    three = dataclasses.replace(config, launch=dataclasses.replace(config.launch, num_ranks=3))
    resume(run, saved, three)
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert {line["lr"] for line in lines[:6]} == {0.04}
    assert [line["lr"] for line in lines[6:]] == pytest.approx([0.06] * (len(lines) - 6))
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
def test_mixed_precision_learns(tmp_path):
    config = small_config(2, train={"precision": "bf16-mixed", "epochs": 6, "lr": 0.3}, parallel=local_sgd(4, start=3))
    run = make_run(tmp_path, config, rows=51)
    train(run)
    losses = [line["train_loss"] for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_ranks_evaluate_the_average(tmp_path):
    config = small_config(
        2, parallel=local_sgd(100), data={"validation_fraction": 0.2}, checkpoint=Checkpoint(every_epochs=100)
    )
    run = make_run(tmp_path, config)
    saved = train(run)
    last = [line for line in read_metrics(run.run_dir) if line["kind"] == "epoch"][-1]
    again = make_run(tmp_path, config, name="again", checkpoint=saved.url)
    # the weights of the checkpoint that follows are those that were evaluated
    assert last["metrics"]["loss"] == pytest.approx(validation_loss(again), rel=1e-5)


@torch.no_grad()
def validation_loss(run):
    model = load_model(run.spec, run.checkpoint)
    loader = build_loader(run.train, run.config, rank=0, world_size=1, split="validation", shuffle=False)
    total = 0.0
    for step in loader.epoch(0):
        for batch in step.micro_batches:
            losses = F.cross_entropy(model(batch["features"]), batch["label"], reduction="none")
            total += float((losses * batch["weight"]).sum())
    return total / loader.plan.rows


class _Model(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.trained = nn.Parameter(torch.full((3,), float(value)))
        self.small = nn.Parameter(torch.full((2,), float(value), dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.tensor([value / 3]), requires_grad=False)
        self.register_buffer("mean", torch.tensor([10.0 * value]))
        self.register_buffer("table", torch.linspace(0, 1, 1000) / 3)
        self.register_buffer("count", torch.tensor(value))


def average(shares):
    with rendezvous.join(LAUNCH) as world:
        model = _Model(world.rank)
        average_weights(model, shares[world.rank])
        return {name: value.tolist() for name, value in model.state_dict().items()}


def test_weights_and_statistics_are_averaged_and_constants_stay_as_they_are():
    found = run_ranks(average, 3, [0.5, 0.3, 0.2])
    for rank, state in enumerate(found):
        assert state["trained"] == pytest.approx([0.7] * 3)
        assert state["small"] == pytest.approx([0.7] * 2, rel=0.01)
        assert state["mean"] == pytest.approx([7.0])
        assert state["table"] == (torch.linspace(0, 1, 1000) / 3).tolist()
        assert state["frozen"] == torch.tensor([rank / 3]).tolist()
        assert state["count"] == rank
        assert all(state[name] == found[0][name] for name in ("trained", "small", "mean"))


def test_batch_norm_may_be_synchronized(tmp_path):
    spec = ModelSpec(build=DROPOUT_MLP.build)
    run = make_run(tmp_path, small_config(3, parallel=local_sgd(2, sync_batchnorm=True)), spec=spec, rows=51)
    train(run)
    losses = [line["train_loss"] for line in read_metrics(run.run_dir) if line["kind"] == "epoch"]
    assert len(losses) == 2
