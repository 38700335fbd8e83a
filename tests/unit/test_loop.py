"""The training loop of one rank, in this process: what each step, epoch and end of a run does, and what is written."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spark_dl import ModelSpec, Optimization, Single, worker
from spark_dl.data.load.resume_check import dataset_digest
from spark_dl.data.plan import Plan
from spark_dl.launch.failures import rank_state
from spark_dl.rundir import checkpoint
from spark_dl.rundir.checkpoint import load_weights
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from spark_dl.training import row_metrics
from spark_dl.training.finite import NotFiniteTrainingError
from tests.builders.datasets import global_batches, write_dataset
from tests.builders.models import blobs, build_mlp, small_config
from tests.builders.reference import assert_same_training

ROWS, STEPS = 110, 3
"""Rows of an epoch, in steps of 48, 48 and 14."""


@pytest.fixture(autouse=True)
def alone(no_launcher):
    pass


def make_run(tmp_path, spec=None, name="run", validation=None, **fields):
    shards = write_dataset(str(tmp_path / f"data of {name}"), blobs(ROWS), group_rows=40, shard_rows=120)
    held_out = write_dataset(str(tmp_path / f"held out of {name}"), blobs(validation, seed=1)) if validation else None
    config = small_config(1, train={"parallel": Single(), **fields})
    return Run(
        spec=spec or ModelSpec(build=build_mlp), config=config, train=shards, run_dir=str(tmp_path / name),
        validation=held_out, generation=checkpoint.start_generation(str(tmp_path / name)),
    )  # fmt: skip


def train(run):
    return worker.main(run).result


def lines_of(run, kind="step"):
    return [line for line in read_metrics(run.run_dir) if line["kind"] == kind]


@pytest.mark.parametrize("fields", [
    {}, {"clip_grad_norm": 0.1}, {"optimizer": "AdamW", "optimizer_args": {"weight_decay": 0.1}, "lr": 0.01},
], ids=str)  # fmt: skip
def test_the_losses_and_weights_are_those_of_a_plain_loop(tmp_path, fields):
    assert_same_training(train, tmp_path, small_config(1, train={"parallel": Single(), **fields}), ROWS)


LOSSES = {
    "weights of classes": nn.CrossEntropyLoss(torch.tensor([0.2, 3.0, 1.0])),
    "an index that is left out": nn.CrossEntropyLoss(ignore_index=1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_over_something_else_than_rows_is_that_of_the_whole_batch(tmp_path, name):
    run = make_run(tmp_path, ModelSpec(build=build_mlp, loss=copy.deepcopy(LOSSES[name])), accumulation_steps=2)
    result = train(run)
    torch.manual_seed(run.config.train.seed)
    model, columns, rows, total = build_mlp(), blobs(ROWS), [], 0.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = Plan(
        group_rows=tuple(n for shard in run.train.shards for n in shard.row_groups), num_streams=24, window_rows=96,
        global_batch_size=48, seed=3,
    )  # fmt: skip
    for epoch in range(2):
        losses = []
        for batch in global_batches(plan, epoch):
            optimizer.zero_grad()
            loss = LOSSES[name](model(torch.tensor(columns["features"][batch])), torch.tensor(columns["label"][batch]))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            rows.append(len(batch))
        total = np.average(losses, weights=rows[-STEPS:])
        logged = [line["loss"] for line in lines_of(run)][epoch * STEPS : (epoch + 1) * STEPS]
        np.testing.assert_allclose(logged, losses, rtol=1e-5)
    for key, value in load_weights(checkpoint.latest(run.run_dir)).items():
        torch.testing.assert_close(value, model.state_dict()[key], rtol=1e-5, atol=1e-6)
    assert result["train_loss"] == pytest.approx(total, rel=1e-5)


def test_a_batch_in_which_nothing_counts_changes_nothing(tmp_path):
    spec = ModelSpec(build=build_mlp, loss=nn.CrossEntropyLoss(torch.zeros(3)))
    run = make_run(tmp_path, spec)
    before = torch.manual_seed(3) and build_mlp().state_dict()
    assert train(run)["train_loss"] == 0.0
    assert all(torch.equal(v, before[k]) for k, v in load_weights(checkpoint.latest(run.run_dir)).items())


@pytest.mark.parametrize(("fields", "steps"), [
    ({"every_steps": 2, "keep": 9}, [2, 3, 4, 6]), ({"every_steps": 3, "keep": 9}, [3, 6]), ({"keep": 9}, [3, 6]),
    ({"every_steps": 2, "every_epochs": 9, "keep": 9}, [2, 4, 6]), ({"every_epochs": 9, "keep": 9}, [6]),
    ({"every_epochs": 2, "epochs": 3, "keep": 9}, [6, 9]), ({"every_steps": 3, "every_epochs": 9, "keep": 9}, [3, 6]),
    ({"max_steps": 4, "keep": 9}, [3, 4]),
])  # fmt: skip
def test_checkpoints_are_saved_at_their_steps_at_epochs_and_at_the_end(tmp_path, fields, steps):
    run = make_run(tmp_path, **fields)
    result = train(run)
    assert [saved.step for saved in checkpoint.list_checkpoints(run.run_dir)] == steps
    assert [line["step"] for line in lines_of(run, "checkpoint")] == steps
    assert result["checkpoint"] == checkpoint.latest(run.run_dir).url


def test_the_lines_of_steps_and_epochs_and_the_result_are_those_of_the_run(tmp_path):
    run = make_run(tmp_path, validation=30, log_every=2, epochs=2)
    result = train(run)
    assert [line["step"] for line in lines_of(run)] == [2, 3, 4, 6]
    epochs = lines_of(run, "epoch")
    assert [line["step"] for line in epochs] == [3, 6]
    assert all(line["validation_s"] > 0 and math.isfinite(line["metrics"]["loss"]) for line in epochs)
    losses = [line["loss"] for line in lines_of(run)]
    assert epochs[0]["train_loss"] == pytest.approx((96 * losses[0] + 14 * losses[1]) / 110)
    assert epochs[1]["train_loss"] == pytest.approx((48 * losses[2] + 62 * losses[3]) / 110)
    assert result["train_loss"] == epochs[1]["train_loss"]
    assert result["metrics"] == epochs[1]["metrics"]
    assert (result["rows"], result["steps"], result["epochs"]) == (220, 6, 2)
    assert result["rows_per_s"] == pytest.approx(220 / result["seconds"])
    saved = checkpoint.latest(run.run_dir)
    history = checkpoint.load(saved, "training.pt")["progress"]["history"]
    assert [(each["epoch"], each["train_loss"], each["metrics"]) for each in history] == [
        (i, line["train_loss"], line["metrics"]) for i, line in enumerate(epochs)
    ]  # fmt: skip


def test_a_checkpoint_has_the_score_of_its_validation_and_the_rows_of_that(tmp_path):
    run = make_run(tmp_path, validation=30, early_stop_metric="loss")
    train(run)
    about = checkpoint.latest(run.run_dir).manifest
    assert about["score"] == lines_of(run, "epoch")[-1]["metrics"]["loss"]
    assert about["score_of"]["metric"] == "loss"
    assert about["score_of"]["rows"] == dataset_digest(run.validation)["sha256"]
    part = make_run(tmp_path, name="part", validation_fraction=0.2)
    train(part)
    assert checkpoint.latest(part.run_dir).manifest["score_of"] == {"metric": "loss", "mode": "min", "rows": None}


def waiting_for_a_validation(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return Optimization(optimizer=optimizer, scheduler=scheduler, monitor="loss")


def test_a_schedule_that_waits_for_a_validation_needs_one(tmp_path):
    spec = ModelSpec(build=build_mlp, optimizer=waiting_for_a_validation)
    with pytest.raises(ValueError, match="spec.optimizer: the scheduler monitors 'loss', which needs validation rows"):
        train(make_run(tmp_path, spec))
    train(make_run(tmp_path, spec, name="validated", validation=30))


def test_the_mean_loss_of_an_epoch_goes_on_in_the_middle_of_it(tmp_path):
    """Also where no line was due before the checkpoint."""
    whole = train(make_run(tmp_path, epochs=1))
    run = make_run(tmp_path, name="cut", epochs=1, max_steps=2, log_every=50)
    train(run)
    saved = checkpoint.latest(run.run_dir)
    config = dataclasses.replace(run.config, train=dataclasses.replace(run.config.train, max_steps=None))
    again = dataclasses.replace(run, config=config, checkpoint=saved.url,
                                generation=checkpoint.start_generation(run.run_dir))  # fmt: skip
    assert train(again)["train_loss"] == pytest.approx(whole["train_loss"], rel=1e-6)


def test_without_validation_rows_an_epoch_has_no_time_and_no_value_of_them(tmp_path):
    run = make_run(tmp_path, epochs=1)
    assert train(run)["metrics"] == {}
    (line,) = lines_of(run, "epoch")
    assert "validation_s" not in line


def test_max_steps_ends_a_run_within_an_epoch_which_has_no_line_but_a_validation(tmp_path):
    run = make_run(tmp_path, validation=30, max_steps=4)
    result = train(run)
    assert (result["steps"], result["epochs"], result["rows"]) == (4, 1, 110 + 48)
    assert [line["step"] for line in lines_of(run, "epoch")] == [3]
    assert result["metrics"]["loss"] != lines_of(run, "epoch")[0]["metrics"]["loss"]


def test_a_model_is_told_its_position_before_each_step_and_each_validation(tmp_path):
    told = []

    def build():
        model = build_mlp()
        model.register_forward_hook(lambda module, args, output: told.append(("forward", module.training)))
        return model

    spec = ModelSpec(build=build, set_position=lambda model, at: told.append(
        (at.epoch, at.step, at.global_step, at.is_validation)))  # fmt: skip
    train(make_run(tmp_path, spec, validation=30))
    positions = [each for each in told if each[0] != "forward"]
    assert positions == [
        (0, 0, 0, False), (0, 1, 1, False), (0, 2, 2, False), (0, 3, 3, True),
        (1, 0, 3, False), (1, 1, 4, False), (1, 2, 5, False), (1, 3, 6, True),
    ]  # fmt: skip
    forwards = [i for i, each in enumerate(told) if each[0] == "forward"]
    assert all(told[i][1] != told[max(j for j in range(i) if told[j][0] != "forward")][3] for i in forwards)


def test_a_state_that_no_checkpoint_can_hold_is_an_error_after_the_first_step(tmp_path):
    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["odd"] = object()

    steps = []
    spec = ModelSpec(
        build=build_mlp, optimizer=lambda model: Odd(model.parameters(), lr=0.1),
        set_position=lambda model, at: steps.append(at.global_step),
    )  # fmt: skip
    with pytest.raises(ValueError, match="spec.optimizer: Odd"):
        train(make_run(tmp_path, spec))
    assert steps == [0]


def spoiled(at):
    """A model whose loss is NaN in some steps, from 1."""
    count = iter(range(1, 99))

    def loss(output, label):
        losses = F.cross_entropy(output, label, reduction="none")
        return losses * math.nan if next(count) in at else losses

    return ModelSpec(build=build_mlp, loss=loss)


def test_steps_that_are_skipped_change_nothing_and_are_counted_apart(tmp_path):
    run = make_run(tmp_path, spoiled({2, 6}), on_nonfinite="skip", epochs=2, log_every=1)
    result = train(run)
    assert (result["steps"], result["rows"]) == (6, 220 - 48 - 14)
    assert (result["skipped_steps"], result["skipped_rows"]) == (2, 48 + 14)
    assert [(line["step"], line["rows"], line["in_a_row"]) for line in lines_of(run, "skip")] == [
        (2, 48, 1),
        (6, 14, 1),
    ]
    assert [line["step"] for line in lines_of(run)] == [1, 3, 4, 5]


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step_and_the_last_checkpoint(tmp_path):
    run = make_run(tmp_path, spoiled({5}))
    with pytest.raises(
        NotFiniteTrainingError, match=r"in step 5 \(step 2 of epoch 1\).* Its rows in that step: .*step-00000003"
    ):
        train(run)
    assert [saved.step for saved in checkpoint.list_checkpoints(run.run_dir)] == [3]


def test_an_error_that_an_earlier_step_has_caused_names_that_step(tmp_path):
    """Before the next log line ranks have not compared what they found, and user code fails at what it gets."""
    count = iter(range(1, 99))

    def loss(output, label):
        number = next(count)
        if number == 3:
            raise RuntimeError("a loss that takes no NaN")
        return F.cross_entropy(output, label, reduction="none") * (math.nan if number == 2 else 1)

    with pytest.raises(NotFiniteTrainingError, match="step 2") as caught:
        train(make_run(tmp_path, ModelSpec(build=build_mlp, loss=loss), log_every=50))
    assert str(caught.value.__cause__) == "a loss that takes no NaN"


def test_a_run_goes_back_to_its_checkpoint_and_leaves_out_the_step(tmp_path):
    run = make_run(tmp_path, spoiled({5}), on_nonfinite="rollback", max_nonfinite=2)
    result = train(run)
    assert (result["steps"], result["rollbacks"], result["skipped_steps"], result["skipped_rows"]) == (6, 1, 1, 48)
    (line,) = lines_of(run, "rollback")
    assert "step-00000003" in line["url"]
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4, 6]


def test_a_step_that_changes_what_no_checkpoint_has_is_told_once(tmp_path, caplog):
    class Counting(nn.Sequential):
        def __init__(self):
            super().__init__(*build_mlp())
            self.seen = torch.zeros(())

        def forward(self, x):
            self.seen += 1
            return super().forward(x)

    train(make_run(tmp_path, ModelSpec(build=Counting)))
    told = [message for message in caplog.messages if "which no checkpoint has" in message]
    assert len(told) == 1
    assert "seen" in told[0]


def test_the_mean_of_a_loss_of_the_batch_is_checked_in_the_first_step_alone(tmp_path):
    calls = []

    def batch_loss(model, batch):
        calls.append(len(batch["weight"]))
        return F.cross_entropy(model(batch["features"]), batch["label"], reduction="sum")

    with pytest.raises(ValueError, match="the mean of its halves"):
        train(make_run(tmp_path, ModelSpec(build=build_mlp, batch_loss=batch_loss)))
    calls.clear()
    mean = ModelSpec(build=build_mlp, batch_loss=lambda model, batch: batch_loss(model, batch) / len(batch["weight"]))
    train(make_run(tmp_path, mean, "mean"))
    checked = len(calls)
    calls.clear()
    train(make_run(tmp_path, mean, "unchecked", check_batch_loss=False))
    assert checked > len(calls) == 2 * STEPS


def test_a_run_leaves_no_hook_on_the_model_and_a_run_that_fails_neither(tmp_path):
    models = []

    def build():
        models.append(build_mlp())
        return models[-1]

    train(make_run(tmp_path, ModelSpec(build=build)))
    failing = dataclasses.replace(spoiled({2}), build=build)
    with pytest.raises(NotFiniteTrainingError):
        train(make_run(tmp_path, failing, "failing"))
    hooks = [
        handles for model in models for part in (*model.modules(), *model.parameters())
        for name, handles in vars(part).items() if name.endswith("_hooks")
    ] + [p._post_accumulate_grad_hooks for model in models for p in model.parameters()]  # fmt: skip
    assert len(models) >= 2
    assert not any(hooks)


class Count:
    """The number of rows, as a value of its own."""

    def __init__(self, model):
        self.rows = 0

    def update(self, batch):
        self.rows += len(batch["label"])

    def compute(self):
        return {"rows": float(self.rows)}


def test_values_of_an_evaluation_stand_beside_metrics_and_not_in_their_place(tmp_path):
    spec = ModelSpec(build=build_mlp, evaluation=Count)
    metric = {"class": "MulticlassAccuracy", "num_classes": 3}
    found = train(make_run(tmp_path, spec, validation=30, metrics={"accuracy": metric}))["metrics"]
    assert (found.keys(), found["rows"]) == ({"rows", "accuracy"}, 30.0)
    with pytest.raises(
        ValueError, match=r"^train.metrics, spec.metrics: spec.evaluation has a value 'rows', too; rename"
    ):
        train(make_run(tmp_path, spec, "same name", validation=30, metrics={"rows": metric}))


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_lines_that_cannot_be_written_end_a_run_unless_it_goes_on_where_no_checkpoint_can_be(
    tmp_path, caplog, on_error
):
    run = make_run(tmp_path, ModelSpec(build=build_mlp, set_position=lambda model, at: block(at)), on_error=on_error)
    lines, kept = tmp_path / "run" / "metrics.jsonl", tmp_path / "kept"

    def block(at):
        if at.global_step == 1:
            lines.rename(kept)
            lines.mkdir()
        if at.global_step == 4:
            lines.rmdir()
            kept.rename(lines)

    if on_error == "raise":
        with pytest.raises(OSError, match=r"metrics.jsonl"):
            train(run)
        return
    train(run)
    assert [line["step"] for line in lines_of(run)] == [1, 2, 3, 4, 5, 6]
    assert sum("its lines are written when this is possible" in record.getMessage() for record in caplog.records) == 1


def test_what_a_rank_does_is_known_with_the_step_that_it_is_in(tmp_path, monkeypatch):
    entered = []
    monkeypatch.setattr(rank_state, "enter", lambda phase, step=None: entered.append((phase, step)))
    train(make_run(tmp_path, validation=30, epochs=1))
    assert [step for phase, step in entered if phase == rank_state.TRAINING] == [1, 2, 3]
    assert entered.index((rank_state.VALIDATING, None)) > entered.index((rank_state.TRAINING, 3))


def test_rows_of_a_validation_are_prepared_as_those_of_training(tmp_path):
    spec = ModelSpec(
        build=build_mlp, transform=lambda batch: {**batch, "doubled": 2 * batch["features"]},
        forward=lambda model, batch: model(batch["doubled"]),
    )  # fmt: skip
    found = train(make_run(tmp_path, spec, validation=30))["metrics"]["loss"]
    plain = ModelSpec(build=build_mlp, forward=lambda model, batch: model(2 * batch["features"]))
    assert found == pytest.approx(train(make_run(tmp_path, plain, "plain", validation=30))["metrics"]["loss"], rel=1e-6)


def test_a_metric_asks_once_an_epoch_whether_the_run_ends(tmp_path, monkeypatch):
    """As a trial of `tune` does, which is pruned by what a validation has found."""
    asked = []
    monkeypatch.setattr(
        row_metrics, "ask", lambda progress, entry, world: asked.append((progress.epoch, entry["epoch"]))
    )
    train(make_run(tmp_path, validation=30, epochs=2))
    assert asked == [(1, 0), (2, 1)]
