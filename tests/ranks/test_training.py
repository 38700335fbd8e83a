"""What the training loop does on real ranks: resume, schedules, early stop, precision, errors."""

import dataclasses
import logging
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.faults import ledger
from spark_dl import (
    DDP,
    Checkpoint,
    Config,
    Launch,
    LocalSGD,
    Mesh,
    ModelSpec,
    Optimization,
    ParameterServer,
    Single,
    worker,
)
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.launch.rank import rendezvous
from spark_dl.rundir import checkpoint, run_folder, saving
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, MLP, blobs, build_dropout_mlp, same_bits, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import assert_same_to_the_bit, cut_at, resume, train
from tests.ranks.test_forward import BY_PARTS, WHOLE

ACCURACY = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 3}}


def train_rank(run):
    return worker.main(run).result


def evaluate_rank(run):
    return worker.main(run, task="evaluate").result


def make_run(tmp_path, config, *, rows=245, spec=DROPOUT_MLP, name="run", **run):
    url = tmp_path / "data"
    shards = run.pop("train", None) or write_dataset(str(url), blobs(rows), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name), **run)


def final_state(run):
    saved = checkpoint.latest(run.run_dir)
    training = checkpoint.load(saved, "training.pt")
    return checkpoint.load(saved, "model.pt")["0"], training


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("num_ranks", "stop_at"),
    [(1, 5), (2, 11), (3, 5), *(pytest.param(*at, marks=pytest.mark.slow) for at in ((1, 6), (2, 8), (3, 1), (3, 11)))],
)
def test_resumed_run_equals_uninterrupted_one_bit_for_bit(tmp_path, num_ranks, stop_at):
    """With dropout, batch norm, momentum, a scheduler and warm-up: all of their state comes back."""
    train = {
        "epochs": 3, "optimizer_args": {"momentum": 0.9}, "scheduler": "StepLR", "warmup_steps": 4,
        "scheduler_args": {"step_size": 1, "gamma": 0.5}, "clip_grad_norm": 1.0,
    }  # fmt: skip
    config = small_config(num_ranks, train=train, data={"validation_fraction": 0.1})
    whole = make_run(tmp_path, config, name="whole")
    run_ranks(train_rank, num_ranks, whole)
    cut_config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=stop_at))
    cut = make_run(tmp_path, cut_config, name="cut", train=whole.train)
    run_ranks(train_rank, num_ranks, cut)
    saved = checkpoint.latest(cut.run_dir)
    assert saved.step == stop_at
    checkpoint.check_same_settings(saved, config)
    generation = checkpoint.start_generation(cut.run_dir)
    resumed = dataclasses.replace(cut, config=config, checkpoint=saved.url, generation=generation)
    run_ranks(train_rank, num_ranks, resumed)

    (weights, training), (weights_again, training_again) = final_state(whole), final_state(resumed)
    assert same_bits(weights, weights_again)
    assert training["settings"] == training_again["settings"]
    for slot, state in training["optimizer"]["state"].items():
        assert same_bits(state, training_again["optimizer"]["state"][slot])
    assert training["progress"] == training_again["progress"]


class Stochastic(nn.Module):
    """Draws from Python's generator and from NumPy's, as some models do to skip layers at random."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, features):
        return self.linear(features) * (random.random() + np.random.random())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("parallel", [{}, {"bucket_mib": "auto"}], ids=str)
def test_a_model_that_draws_from_other_generators_goes_on_where_it_was(tmp_path, parallel):
    config = small_config(2, train={"epochs": 2}, parallel=DDP(**parallel))
    whole = make_run(tmp_path, config, spec=ModelSpec(build=Stochastic), name="whole")
    cut = dataclasses.replace(whole, run_dir=str(tmp_path / "cut"), config=cut_at(config, 4))
    assert_same_to_the_bit(train(whole), resume(cut, train(cut), config))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", [(2, 3), (2, 1, 2)], ids=str)
def test_F28_resume_on_another_number_of_ranks_goes_on_exactly(tmp_path, numbers):
    config = small_config(2, train={"epochs": 2})
    whole = make_run(tmp_path, config, spec=MLP, name="whole")
    run_ranks(train_rank, 2, whole)
    cut = make_run(tmp_path, config, spec=MLP, name="cut", train=whole.train)
    train_on(cut, numbers)
    (weights, training), (expected, expected_training) = final_state(cut), final_state(whole)
    assert training["progress"]["rows"] == expected_training["progress"]["rows"] == 2 * 245
    for name, values in expected.items():
        torch.testing.assert_close(weights[name], values, rtol=1e-5, atol=1e-6)


def train_on(run, numbers):
    """Trains on these numbers of ranks, one after another: up to step 5, up to step 8, and to the end."""
    for number, stop_at in zip(numbers, (*(5, 8)[: len(numbers) - 1], None), strict=True):
        config = dataclasses.replace(run.config, launch=dataclasses.replace(run.config.launch, num_ranks=number))
        until = config if stop_at is None else cut_at(config, stop_at)
        saved = checkpoint.latest(run.run_dir)
        if saved is None:
            train(dataclasses.replace(run, config=until))
        else:
            checkpoint.check_same_settings(saved, config)
            resume(run, saved, until)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("numbers", [(2, 3), (2, 1, 2)], ids=str)
def test_F28_each_row_is_used_once_per_epoch_on_another_number_of_ranks(tmp_path, numbers):
    """Epochs of six steps are cut in the middle. The weights count the uses of each row."""
    rows = ledger.write_rows(tmp_path / "data", steps=6)
    settings, loader = ledger.settings(epochs=2)
    config = Config(data=ledger.DATA, train=settings, loader=loader, launch=Launch(device="cpu"))
    shards = read_shards(str(tmp_path / "data"))
    run = make_run(tmp_path, config, spec=ledger.build_spec(rows), train=shards)
    train_on(run, numbers)
    assert final_state(run)[1]["progress"]["global_step"] == 12
    assert ledger.read_ledger(final_state(run)[0], epochs=2) == ledger.Ledger(lost=0, repeated=0)


def test_F14_a_checkpoint_without_the_file_of_one_rank_is_not_used(tmp_path, caplog):
    config = small_config(2, train={"epochs": 2})
    whole = make_run(tmp_path, config, name="whole")
    train(whole)
    run_dir = tmp_path / "whole"
    before, newest = checkpoint.list_checkpoints(whole.run_dir)
    missing = Path(newest.url) / "rank-00001.pt"
    missing.unlink()
    with pytest.raises(ValueError, match=rf"checkpoint.strict: {missing} is damaged: it is missing"):
        run_folder.begin_attempt(str(run_dir), Config(checkpoint=Checkpoint(strict=True)), resume=True, overwrite=False)
    with caplog.at_level(logging.WARNING, "spark_dl"):
        generation, used = run_folder.begin_attempt(str(run_dir), config, resume=True, overwrite=False)
    assert used == before
    assert str(missing) in caplog.text
    assert used.url in caplog.text
    saved = train(dataclasses.replace(whole, checkpoint=used.url, generation=generation))
    twin = make_run(tmp_path, config, name="twin", train=whole.train)
    assert_same_to_the_bit(train(twin), saved)


def test_lr_scaling_is_explicit_and_survives_another_number_of_ranks(tmp_path):
    """Linear scaling: 2 ranks train at 2 x lr; resumed on 4 ranks, at 4 x lr, under the same schedule."""
    train = {"lr_scaling": "linear", "scheduler": "ExponentialLR", "scheduler_args": {"gamma": 0.5}, "max_steps": 6}
    config = small_config(2, train=train)
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, 2, run)
    assert {line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"} == {0.2}
    saved = checkpoint.latest(run.run_dir)
    four = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_steps=8),
        launch=dataclasses.replace(config.launch, num_ranks=4),
    )
    generation = checkpoint.start_generation(run.run_dir)
    run_ranks(train_rank, 4, dataclasses.replace(run, config=four, checkpoint=saved.url, generation=generation))
    later = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step" and line["step"] > 6]
    assert later == pytest.approx([0.2, 0.2])  # 0.1 x 4 ranks x 0.5 after the first epoch


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RMSprop", "Adadelta", "Adam", "AdamW", "NAdam"])
def test_every_optimizer_learns(tmp_path, optimizer):
    lr = {"Adadelta": 1.0, "SGD": 0.3}.get(optimizer, 0.02)
    run = make_run(tmp_path, small_config(1, train={"optimizer": optimizer, "lr": lr, "epochs": 8}), spec=MLP)
    result = run_ranks(train_rank, 1, run)[0]
    assert result["history"][-1]["train_loss"] < 0.8 * result["history"][0]["train_loss"]


@pytest.mark.parametrize(
    ("name", "args", "interval", "expected"),
    [
        ("StepLR", {"step_size": 1, "gamma": 0.1}, "epoch", [0.1] * 6 + [0.01] * 6),
        ("OneCycleLR", {"max_lr": 0.1, "total_steps": 12}, "step", None),
        ("ReduceLROnPlateau", {"patience": 0, "threshold": 10.0, "factor": 0.5}, "epoch", [0.1] * 6 + [0.05] * 6),
    ],
)
def test_schedulers(tmp_path, name, args, interval, expected):
    train = {"scheduler": name, "scheduler_args": args, "scheduler_interval": interval}
    run = make_run(tmp_path, small_config(2, train=train), spec=MLP)
    run_ranks(train_rank, 2, run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    if expected is None:
        one = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(one, **args)
        expected = []
        for _ in rates:
            expected.append(one.param_groups[0]["lr"])
            one.step()
            if len(expected) < 12:
                scheduler.step()
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize(("name", "args", "last"), [
    ("CosineAnnealingLR", {}, 0.1 * (1 + math.cos(math.pi * 11 / 12)) / 2),
    ("PolynomialLR", {"total_iters": "run"}, 0.1 / 12),
])  # fmt: skip
def test_a_schedule_ends_with_the_run_also_after_a_resume(tmp_path, name, args, last):
    train = {"scheduler": name, "scheduler_args": args, "scheduler_interval": "step"}
    config = small_config(2, train=train, checkpoint=Checkpoint(every_steps=5, keep=9))
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, 2, run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert (rates[0], rates[-1]) == pytest.approx((0.1, last))
    saved = checkpoint.list_checkpoints(run.run_dir)[0]
    resumed = dataclasses.replace(run, run_dir=str(tmp_path / "resumed"), checkpoint=saved.url)
    run_ranks(train_rank, 2, resumed)
    again = [line["lr"] for line in read_metrics(resumed.run_dir) if line["kind"] == "step"]
    assert again == rates[saved.step :]


def test_warmup_rises_linearly(tmp_path):
    run = make_run(tmp_path, small_config(1, train={"warmup_steps": 4, "epochs": 1}), spec=MLP)
    run_ranks(train_rank, 1, run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_the_rate_of_a_step_is_that_of_its_line_also_where_a_checkpoint_brings_the_line(tmp_path):
    config = small_config(
        1, train={"warmup_steps": 4, "epochs": 1, "log_every": 5}, checkpoint=Checkpoint(every_steps=2)
    )
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, 1, run)
    rates = {line["step"]: line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"}
    assert rates == pytest.approx({2: 0.05, 4: 0.1, 5: 0.1, 6: 0.1})


def build_half_frozen():
    model = build_dropout_mlp()
    model[1].eval()
    return model


def build_in_evaluation_mode():
    return build_dropout_mlp().eval()


@pytest.mark.parametrize(("spec", "parallel", "alone"), [
    (BY_PARTS, Mesh(zero_stage=3), WHOLE), (MLP, Mesh(pipeline=2), MLP), (MLP, Mesh(tensor=2), MLP),
], ids=["inside what gathers the weights", "over the stages", "once for all tensor ranks"])  # fmt: skip
def test_a_validation_computes_the_model_as_its_strategy_has_it(tmp_path, spec, parallel, alone):
    validated = {"validation_fraction": 0.2, "metrics": ACCURACY, "accumulation_steps": 2}
    cut = make_run(tmp_path, small_config(2, train=validated, parallel=parallel), spec=spec)
    whole = make_run(tmp_path, small_config(1, train=validated), spec=alone, train=cut.train, name="whole")
    found, expected = (run_ranks(train_rank, run.config.launch.num_ranks, run)[0]["metrics"] for run in (cut, whole))
    assert found == pytest.approx(expected, rel=1e-5)


def test_modules_that_are_frozen_stay_frozen_also_after_a_validation(tmp_path):
    config = small_config(2, data={"validation_fraction": 0.2})
    run = make_run(tmp_path, config, spec=ModelSpec(build=build_half_frozen))
    run_ranks(train_rank, 2, run)
    weights, _ = final_state(run)
    assert weights["1.running_mean"].tolist() == [0.0] * 16
    assert weights["1.num_batches_tracked"] == 0


def test_a_model_that_comes_in_evaluation_mode_is_trained_as_any_other(tmp_path):
    config = small_config(2, data={"validation_fraction": 0.2})
    run = make_run(tmp_path, config, spec=ModelSpec(build=build_in_evaluation_mode))
    other = dataclasses.replace(run, spec=DROPOUT_MLP, run_dir=str(tmp_path / "other"))
    for each in (run, other):
        run_ranks(train_rank, 2, each)
    assert same_bits(final_state(run)[0], final_state(other)[0])


def test_early_stopping_goes_on_by_the_settings_of_now(tmp_path):
    """A validation loss of which no change counts stops after one epoch more than the patience."""
    early = {"early_stop_metric": "loss", "early_stop_min_delta": 100.0, "epochs": 9}
    config = small_config(1, train={**early, "early_stop_patience": 1}, data={"validation_fraction": 0.2})
    run = make_run(tmp_path, config, spec=MLP)
    assert run_ranks(train_rank, 1, run)[0]["epochs"] == 2

    def again(**train):
        other = dataclasses.replace(config, train=dataclasses.replace(config.train, **train))
        saved = checkpoint.latest(run.run_dir)
        generation = checkpoint.start_generation(run.run_dir)
        resumed = dataclasses.replace(run, config=other, checkpoint=saved.url, generation=generation)
        result = run_ranks(train_rank, 1, resumed)[0]
        return result["epochs"], result["stopped_early"]

    assert again() == (2, True)  # as it was: nothing more to do
    assert again(early_stop_patience=3) == (4, True)
    # Another metric begins anew, and the first value of it is the best one.
    assert again(metrics=ACCURACY, early_stop_metric="accuracy", early_stop_mode="max") == (6, True)
    assert again(early_stop_metric=None) == (9, False)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_early_stop_by_all_ranks_at_once(tmp_path, num_ranks):
    train = {
        "epochs": 50,
        "early_stop_metric": "loss",
        "early_stop_patience": 2,
        "early_stop_min_delta": 0.05,
        "lr": 0.3,
    }
    run = make_run(tmp_path, small_config(num_ranks, train=train, data={"validation_fraction": 0.2}), spec=MLP)
    results = run_ranks(train_rank, num_ranks, run)
    assert all(r["stopped_early"] and r["epochs"] == results[0]["epochs"] < 50 for r in results)
    losses = [entry["metrics"]["loss"] for entry in results[0]["history"]]
    best = min(losses[:-2])
    assert all(loss > best - 0.05 for loss in losses[-2:])


@pytest.mark.parametrize(("parallel", "num_ranks"), [
    (DDP(), 3), (Single(), 1), (LocalSGD(sync_every_steps=2), 2), (Mesh(zero_stage=3), 2), (Mesh(pipeline=2), 2),
    (ParameterServer(num_servers=1), 3),
], ids=lambda each: getattr(each, "strategy", each))  # fmt: skip
def test_validations_between_steps_are_those_of_the_weights_then_and_change_nothing(tmp_path, parallel, num_ranks):
    held_out = write_dataset(str(tmp_path / "held_out"), blobs(90, seed=1), group_rows=40, shard_rows=120)
    sections = {"parallel": parallel, "checkpoint": Checkpoint(every_steps=2, keep=99)}
    settings = {"metrics": ACCURACY, "accumulation_steps": 1 if parallel.servers else 2}
    config = small_config(num_ranks, train={**settings, "validate_every_steps": 2}, **sections)
    spec = MLP if parallel.servers or isinstance(parallel, Mesh) else DROPOUT_MLP
    run = make_run(tmp_path, config, spec=spec, validation=held_out)
    run_ranks(train_rank, num_ranks, run)
    lines = {line["step"]: line for line in read_metrics(run.run_dir) if line["kind"] == "validation"}
    assert list(lines) == [2, 4, 8, 10]  # 6 and 12 are ends of epochs
    saved = {each.step: each for each in checkpoint.list_checkpoints(run.run_dir)}
    for step, line in lines.items():
        assert saved[step].manifest["score"] == line["metrics"]["loss"]
        one = small_config(1, train={"metrics": ACCURACY})
        alone = make_run(tmp_path, one, spec=spec, train=held_out, checkpoint=saved[step].url)
        found = run_ranks(evaluate_rank, 1, alone)[0]
        assert {name: found[name] for name in ("loss", "accuracy")} == pytest.approx(line["metrics"], rel=1e-5)

    without = small_config(num_ranks, train=settings, **sections)
    other = make_run(tmp_path, without, spec=spec, train=run.train, name="without", validation=held_out)
    run_ranks(train_rank, num_ranks, other)
    weights, expected = (checkpoint.load_weights(checkpoint.latest(each.run_dir)) for each in (run, other))
    assert same_bits(weights, expected)


def test_early_stopping_counts_the_validations_between_steps(tmp_path):
    early = {"early_stop_metric": "loss", "early_stop_min_delta": 100.0, "epochs": 9, "early_stop_patience": 3}
    config = small_config(2, train={**early, "validate_every_steps": 2, "validation_fraction": 0.2})
    run = make_run(tmp_path, config)
    result = run_ranks(train_rank, 2, run)[0]
    # The first value is the best one, and none after it, of steps 4, 5 (the end of the epoch) and 6, is better.
    assert (result["steps"], result["epochs"], result["stopped_early"]) == (6, 1, True)


def test_a_run_goes_on_between_validations_as_if_it_had_not_been_cut(tmp_path):
    early = {"early_stop_metric": "loss", "early_stop_min_delta": 100.0, "epochs": 9, "early_stop_patience": 4}
    settings = {**early, "validate_every_steps": 3, "validation_fraction": 0.2}
    config = small_config(2, train=settings, checkpoint=Checkpoint(every_steps=2, keep=99))
    whole = make_run(tmp_path, config, name="whole")
    expected = run_ranks(train_rank, 2, whole)[0]
    for step in (2, 4, 6):
        saved = next(each for each in checkpoint.list_checkpoints(whole.run_dir) if each.step == step)
        cut = dataclasses.replace(whole, run_dir=str(tmp_path / f"cut{step}"), checkpoint=saved.url)
        found = run_ranks(train_rank, 2, cut)[0]
        assert (found["steps"], found["metrics"]) == (expected["steps"], expected["metrics"])
        assert same_bits(final_state(whole)[0], final_state(cut)[0])


@pytest.mark.parametrize("precision", ["bf16-mixed", "fp16-mixed"])
def test_mixed_precision_learns_and_keeps_float32_weights(tmp_path, precision):
    config = small_config(2, train={"precision": precision, "epochs": 6, "lr": 0.3})
    run = make_run(tmp_path, config, spec=MLP)
    result = run_ranks(train_rank, 2, run)[0]
    assert result["history"][-1]["train_loss"] < 0.8 * result["history"][0]["train_loss"]
    weights, training = final_state(run)
    assert all(w.dtype == torch.float32 for w in weights.values())
    assert ("scaler" in training["extra"]) == (precision == "fp16-mixed")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("num_ranks", "rows"), [(1, 245), (2, 2), (3, 2), (3, 245)])
def test_evaluation_is_exact_to_the_row(tmp_path, num_ranks, rows):
    metrics = {
        "accuracy": {"class": "MulticlassAccuracy", "num_classes": 3, "average": "micro"},
        "auroc": {"class": "MulticlassAUROC", "num_classes": 3},
    }
    config = small_config(num_ranks, train={"metrics": metrics})
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, num_ranks, run)
    columns = blobs(rows, seed=9)
    test = write_dataset(str(tmp_path / "test"), columns, group_rows=16, shard_rows=64)
    saved = checkpoint.find(run.run_dir)
    got = run_ranks(evaluate_rank, num_ranks, dataclasses.replace(run, train=test, checkpoint=saved.url))
    assert all(r == got[0] for r in got)
    model = MLP.build()
    model.load_state_dict(checkpoint.load(saved, "model.pt")["0"])
    with torch.no_grad():
        output = model(torch.from_numpy(columns["features"]))
    label = torch.from_numpy(columns["label"])
    assert got[0]["rows"] == rows
    assert got[0]["loss"] == pytest.approx(nn.functional.cross_entropy(output, label).item(), rel=1e-5)
    right = int((output.argmax(1) == label).sum())
    assert round(got[0]["accuracy"] * rows) == right
    assert got[0]["accuracy"] == pytest.approx(right / rows)


def test_validation_rows_are_not_trained_on(tmp_path):
    config = small_config(2, train={"epochs": 1}, data={"validation_fraction": 0.25})
    result = run_ranks(train_rank, 2, make_run(tmp_path, config, rows=400, spec=MLP))[0]
    assert result["rows"] == 300


def test_checkpoints_by_steps_and_by_epochs(tmp_path):
    config = small_config(2, train={"epochs": 3}, checkpoint=Checkpoint(every_steps=4, every_epochs=2, keep=9))
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, 2, run)  # 6 steps an epoch: steps 4, 8, 12 (also an epoch's end), 16, 18 (the end)
    assert [s.step for s in checkpoint.list_checkpoints(run.run_dir)] == [4, 8, 12, 16, 18]


def halved_in_every_third_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.8)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    return Optimization(optimizer=optimizer, scheduler=scheduler, interval="step", frequency=3)


def test_a_scheduler_counts_the_steps_of_each_epoch(tmp_path):
    spec = ModelSpec(build=MLP.build, optimizer=halved_in_every_third_step)
    run = make_run(tmp_path, small_config(1, train={"epochs": 2}), spec=spec, rows=240)  # 5 steps in each
    train(run)
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([0.8, 0.8, 0.8, 0.4, 0.4, 0.4, 0.4, 0.4, 0.2, 0.2])


def test_rows_per_second_are_those_of_the_attempt(tmp_path):
    config = small_config(1, train={"epochs": 3})
    run = make_run(tmp_path, cut_at(config, 12), spec=MLP, rows=240)
    train(run)
    saved = checkpoint.latest(run.run_dir)
    results = run_ranks(train_rank, 1, dataclasses.replace(run, config=config, checkpoint=saved.url, generation=1))
    assert (saved.step, results[0]["steps"], results[0]["rows"]) == (12, 15, 720)
    assert results[0]["rows_per_s"] * results[0]["seconds"] == pytest.approx(720 - 12 * 48)


def _nan_loss(output, label):
    return nn.functional.cross_entropy(output, label, reduction="none") * torch.where(output.mean() > 1e9, 1.0, np.nan)


def test_nan_stops_all_ranks_before_a_checkpoint(tmp_path):
    config = small_config(2, train={"epochs": 1})
    run = make_run(tmp_path, config, spec=ModelSpec(build=MLP.build, loss=_nan_loss))
    with pytest.raises(RankFailed, match=r"the loss is not finite \(NaN or Inf\) on rank 0 in step 1 "):
        run_ranks(train_rank, 2, run)
    assert checkpoint.latest(run.run_dir) is None


def build_on_meta():
    with torch.device("meta"):
        return MLP.build()


class WithUnused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.used(x)


def build_frozen():
    model = WithUnused()
    model.unused.requires_grad_(False)
    return model


def test_B27_parameters_that_are_not_used_may_be_declared_or_frozen(tmp_path):
    config = small_config(2, train={"epochs": 1})
    run = make_run(tmp_path, config, spec=ModelSpec(build=build_frozen))
    steps = run_ranks(train_rank, 2, run)[0]["steps"]
    declared = dataclasses.replace(config, parallel=DDP(find_unused_parameters=True))
    run = dataclasses.replace(run, config=declared, spec=ModelSpec(build=WithUnused), run_dir=str(tmp_path / "unused"))
    assert run_ranks(train_rank, 2, run)[0]["steps"] == steps > 0


def _mean_loss(output, label):
    return nn.functional.cross_entropy(output, label)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(build=MLP.build, loss=_mean_loss), "spec.loss: expected one value per row"),
        (ModelSpec(build=dict), r"spec.build: expected a function that returns a torch.nn.Module, it returned \{\}"),
        (ModelSpec(build=nn.Identity), "no parameter of the model requires a gradient"),
        (
            ModelSpec(build=build_on_meta),
            r"spec\.build: expected weights with values, found '0\.weight' on the device 'meta'",
        ),
        (
            ModelSpec(build=MLP.build, loss="MSELoss"),
            r"spec\.loss: The size of tensor .* is \(24, 3\) float32, and the",
        ),
        (
            ModelSpec(build=WithUnused),
            "does not depend on the parameters unused.weight, unused.bias; use them in the forward pass",
        ),
    ],
)
def test_B27_a_model_that_does_not_fit_says_why(tmp_path, spec, message):
    with pytest.raises(RankFailed, match=message):
        run_ranks(train_rank, 2, make_run(tmp_path, small_config(2), spec=spec))


def test_F06_an_older_attempt_cannot_commit(tmp_path):
    """A rank that was cut off and comes back finds that the run has gone on without it."""
    run = make_run(tmp_path, small_config(2), spec=MLP)
    checkpoint.start_generation(run.run_dir)
    checkpoint.start_generation(run.run_dir)
    with pytest.raises(RankFailed, match="this is attempt 1 of the run .*attempt 2 has started since"):
        run_ranks(train_rank, 2, dataclasses.replace(run, generation=1))
    assert checkpoint.latest(run.run_dir) is None


def save_and_load_rank_states(run_dir):
    def state(rank):
        return {"left": {"w": torch.full((3,), float(rank)), "steps": 7, "seen": torch.tensor([4])}}

    with rendezvous.join(Launch()) as world:
        found = saving.contents(world.rank, model={}, training={}, of_rank=state(world.rank))
        about = saving.About(world_size=world.world_size, generation=1, step=1, config=Config(), columns=())
        commit = saving.save(run_dir, found, about)
        saved = checkpoint.open_checkpoint(commit.url, sha256=commit.sha256)
        own = saving.load_rank_state(saved, world.rank, world.world_size)
        return own, saving.load_rank_state(saved, 0, world.world_size + 1)


def test_what_each_rank_has_alone_is_saved_and_is_their_mean_for_another_number_of_ranks(tmp_path):
    checkpoint.start_generation(str(tmp_path))
    for rank, (own, other) in enumerate(run_ranks(save_and_load_rank_states, 3, str(tmp_path))):
        assert own["left"]["w"].tolist() == [rank] * 3
        assert own["left"]["steps"] == 7
        torch.testing.assert_close(other["left"]["w"], torch.ones(3))  # of 0, 1 and 2
        assert other["left"]["seen"].tolist() == [4]
