"""Parameter servers on real ranks: parity, rows, staleness, stragglers, resume, and ranks that stand still."""

import dataclasses
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from spark_dl import Checkpoint, ModelSpec, ParameterServer, worker
from spark_dl.launch.failures.errors import describe
from spark_dl.rundir import checkpoint, saving
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, MLP, blobs, same_bits, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.test_parity import assert_same_training

MODES = ("sync", "k_sync", "k_batch_sync", "async", "k_async", "k_batch_async")


def servers(trainers, num_servers=1, mode="sync", *, train=None, data=None, launch=None, sections=None, **parallel):
    """Settings of a run of `trainers` ranks that train and `num_servers` more."""
    parallel = ParameterServer(num_servers=num_servers, server_mode=mode, **parallel)
    launch = {"threads": 1, **(launch or {})}
    return small_config(trainers + num_servers, train, data, launch, parallel=parallel, **(sections or {}))


def train_rank(run):
    return worker.main(run).result


def train(run):
    return run_ranks(train_rank, run.config.launch.num_ranks, run)


def make_run(tmp_path, config, *, rows=245, spec=MLP, name="run", **run):
    url = str(tmp_path / f"{name}-data")
    shards = run.pop("train", None) or write_dataset(url, blobs(rows), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name), **run)


def resume(run, config):
    saved = checkpoint.latest(run.run_dir)
    checkpoint.check_same_settings(saved, config)
    generation = checkpoint.start_generation(run.run_dir)
    return dataclasses.replace(run, config=config, checkpoint=saved.url, generation=generation)


def with_train(config, **changes):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **changes))


# Parity


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("trainers", "num_servers"), [(2, 1), (3, 2), (4, 1)])
def test_sync_gives_the_weights_of_one_process(tmp_path, trainers, num_servers):
    """22 steps, with a short last batch, momentum and micro-batches."""
    optimizer = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "accumulation_steps": 2}
    assert_same_training(tmp_path, servers(trainers, num_servers, train=optimizer), 509)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "trainers"), [("k_sync", 2), ("k_sync", 4), ("k_async", 3)])
def test_to_wait_for_all_ranks_is_sync_in_every_mode_that_counts_ranks(tmp_path, mode, trainers):
    assert_same_training(tmp_path, servers(trainers, 1, mode, server_k=trainers), 509)  # 22 steps


def test_the_gradient_is_clipped_by_its_whole_norm(tmp_path):
    assert_same_training(tmp_path, servers(2, train={"clip_grad_norm": 0.3}), 245)


class _Drawn(nn.Module):
    """Has parameters that are not trained and a buffer, of values that no seed tells."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 16), nn.Linear(16, 3)
        self.first.requires_grad_(False)
        draw = np.random.default_rng()
        self.first.weight.copy_(torch.tensor(draw.normal(size=(16, 4))))
        self.register_buffer("scale", torch.tensor(draw.uniform(0.5, 2.0, 16), dtype=torch.float32))

    def forward(self, features):
        return self.last(torch.tanh(self.first(features) * self.scale))


def test_what_no_seed_tells_is_that_of_rank_0_on_all_ranks(tmp_path):
    config = servers(2, train={"epochs": 4, "global_batch_size": 240})
    run = make_run(tmp_path, config, rows=240, spec=ModelSpec(build=_Drawn))
    train(run)
    torch.manual_seed(config.train.seed)
    model = _Drawn()
    weights = checkpoint.load(checkpoint.latest(run.run_dir), "model.pt")["0"]
    model.load_state_dict({**model.state_dict(), **{n: w for n, w in weights.items() if not n.startswith("last")}})
    optimizer = torch.optim.SGD(model.last.parameters(), lr=config.train.lr)
    columns = {name: torch.from_numpy(values) for name, values in blobs(240).items()}
    expected = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(columns["features"]), columns["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    losses = [line["loss"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_trainers(tmp_path, rows):
    assert_same_training(tmp_path, servers(4), rows)


# Learning


def digits():
    from sklearn.datasets import load_digits

    images, label = load_digits(return_X_y=True)
    return {"features": (images / 16).astype(np.float32), "label": label}


def build_digits_mlp():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@pytest.fixture(scope="module")
def digits_runs(tmp_path_factory):
    """Trains on the digits, and returns the accuracy in percent on a fifth of them, and the result."""
    folder = tmp_path_factory.mktemp("digits")
    shards = write_dataset(str(folder / "data"), digits(), group_rows=100, shard_rows=500)
    accuracy = {"accuracy": {"class": "MulticlassAccuracy", "num_classes": 10, "average": "micro"}}
    settings = {
        "train": {
            "epochs": 16,
            "lr": 0.05,
            "optimizer_args": {"momentum": 0.9},
            "metrics": accuracy,
            "log_every": 50,
            "scheduler": "ExponentialLR",
            "scheduler_args": {"gamma": 0.85},  # what is left of the noise is little
        },
        "data": {"validation_fraction": 0.2, "shuffle_window_rows": 2048},
        "sections": {"checkpoint": Checkpoint(every_epochs=100)},
    }

    def run(name, config):
        spec = ModelSpec(build=build_digits_mlp)
        result = train(Run(spec=spec, config=config, train=shards, run_dir=str(folder / name)))[0]
        return 100 * result["metrics"]["accuracy"], result

    one_rank = small_config(1, settings["train"], settings["data"], {"threads": 1}, **settings["sections"])
    return settings, run, run("one", one_rank)[0]


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_learns_the_digits_as_well_as_one_process(digits_runs, mode):
    settings, run, expected = digits_runs
    k = 2 if mode.startswith("k_") else 0
    accuracy, result = run(mode, servers(3, 1, mode, server_k=k, **settings))
    assert expected > 95
    assert accuracy >= expected - 1
    assert (result["staleness"]["max"] == 0) == (mode in ("sync", "k_sync", "k_batch_sync"))


# Rows


def _code_loss(output, batch):
    """Whatever the weights are, a row's loss is its own number: sums of losses tell which rows were used."""
    return batch["code"].float() + 0 * output.sum(1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", MODES)
def test_an_epoch_uses_every_row_once(tmp_path, mode):
    """Also rows whose computation was cancelled or too old, and those of the short last batch; also when resumed."""
    rng = np.random.default_rng(0)
    columns = {"features": blobs(403)["features"], "code": rng.integers(0, 1 << 16, 403)}
    shards = write_dataset(str(tmp_path / "data"), columns, group_rows=40, shard_rows=120)
    k = 2 if mode.startswith("k_") else 0
    staleness = {"max_staleness": 1} if "async" in mode else {}
    config = servers(
        3, 1, mode, server_k=k, **staleness, sections={"straggler": "exponential", "straggler_s": 0.004},
        train={"epochs": 3}, data={"features": ("features",), "label": None},
    )  # fmt: skip
    spec = ModelSpec(build=MLP.build, forward=_forward_features, loss=_code_loss)
    run = make_run(tmp_path, with_train(config, max_steps=17), spec=spec, train=shards)
    # Column "code" is read as a feature, so that the loss has it.
    run = dataclasses.replace(run, config=_reading(run.config, ("features", "code")))
    cut = train(run)[0]
    assert cut["steps"] == 17
    result = train(resume(run, _reading(config, ("features", "code"))))[0]
    assert result["rows"] == 3 * 403
    for entry in result["history"]:
        assert round(entry["train_loss"] * 403, 3) == columns["code"].sum()
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert [line["step"] for line in lines] == list(range(1, result["steps"] + 1))
    if mode == "sync":
        assert result["steps"] == 27
    counts = result["staleness"]["counts"]
    assert sum(counts.values()) >= 3 * 26  # mini-batches with a row
    assert set(counts) <= ({"0", "1"} if "async" in mode else {"0"})


def _forward_features(model, batch):
    return model(batch["features"])


def _reading(config, features):
    return dataclasses.replace(config, data=dataclasses.replace(config.data, features=features))


# Staleness and stragglers


def test_staleness_is_measured_and_bounded(tmp_path):
    delay = {"straggler": "constant", "straggler_s": 0.1, "straggler_ranks": (0,)}
    slow = {"sections": delay, "train": {"log_every": 5}}
    free = train(make_run(tmp_path, servers(3, 1, "async", **slow), rows=960, name="free"))[0]["staleness"]
    assert free["max"] > 2
    assert free["discarded"] == 0
    counts = {int(s): n for s, n in free["counts"].items()}
    assert free["mean"] == pytest.approx(sum(s * n for s, n in counts.items()) / sum(counts.values()))
    run = make_run(tmp_path, servers(3, 1, "async", max_staleness=2, **slow), rows=960, name="bounded")
    bounded = train(run)[0]["staleness"]
    assert bounded["max"] <= 2
    assert bounded["discarded"] > 0
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert all(line["staleness"] <= 2 for line in lines)
    assert lines[-1]["discarded"] == bounded["discarded"]


@pytest.mark.slow
def test_a_slow_rank_holds_up_sync_alone(tmp_path):
    """20 steps and a rank that takes a second for each: the other modes give its mini-batches to the others."""
    delay = {"straggler": "constant", "straggler_s": 1.0, "straggler_ranks": (1,)}
    slow = {"sections": delay, "train": {"epochs": 1}}
    seconds = {}
    for mode, k in (("k_sync", 2), ("k_batch_sync", 2), ("async", 0), ("k_async", 2), ("k_batch_async", 3)):
        config = servers(3, 1, mode, server_k=k, **slow)
        result = train(make_run(tmp_path, config, rows=960, name=mode))[0]
        assert result["rows"] == 960
        seconds[mode] = result["seconds"]
    assert max(seconds.values()) < 10, seconds  # sync would take at least 20


# Going on from a checkpoint

EVERYTHING = {
    "epochs": 3, "optimizer_args": {"momentum": 0.9}, "scheduler": "StepLR", "warmup_steps": 4,
    "scheduler_args": {"step_size": 1, "gamma": 0.5},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("num_servers", "stop_at"), [(1, 1), (1, 6), (2, 8)])
def test_a_resumed_sync_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, num_servers, stop_at):
    """With dropout, batch norm, momentum, a scheduler and warm-up, on servers and trainers."""
    config = servers(2, num_servers, train=EVERYTHING, data={"validation_fraction": 0.1})
    whole = make_run(tmp_path, config, spec=DROPOUT_MLP, name="whole")
    whole_result = train(whole)[0]
    cut = dataclasses.replace(whole, config=with_train(config, max_steps=stop_at), run_dir=str(tmp_path / "cut"))
    train(cut)
    assert checkpoint.latest(cut.run_dir).step == stop_at
    result = train(resume(cut, config))[0]
    ends = [checkpoint.latest(run.run_dir) for run in (whole, cut)]
    for name in ("model.pt", *(f"rank-{2 + s:05d}.pt" for s in range(num_servers))):
        a, b = (checkpoint.load(end, name) for end in ends)
        a, b = ((x["0"] if name == "model.pt" else x["state"]["block"]["state"][0]) for x in (a, b))
        assert a
        assert same_bits(a, b), name
    a, b = (checkpoint.load(end, "training.pt") for end in ends)
    assert a["settings"] == b["settings"]
    assert a["progress"] == b["progress"]
    assert result["history"] == whole_result["history"]
    assert result["staleness"] == whole_result["staleness"]


@pytest.mark.slow
def test_a_run_goes_on_with_other_trainers(tmp_path):
    """In sync exactly, as the order of rows does not depend on the ranks; the servers' momentum is found again."""
    momentum = {"optimizer_args": {"momentum": 0.9}}
    config = servers(2, 2, train=momentum)
    whole = make_run(tmp_path, config, name="whole")
    train(whole)
    cut = make_run(tmp_path, with_train(config, max_steps=8), name="cut", train=whole.train)
    train(cut)
    train(resume(cut, servers(3, 2, train=momentum)))
    expected, got = (checkpoint.load(checkpoint.latest(run.run_dir), "model.pt")["0"] for run in (whole, cut))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_asynchronous_run_goes_on_in_the_middle_of_an_epoch_with_other_trainers(tmp_path):
    config = servers(3, 1, "async", train={"max_steps": 25}, sections={"checkpoint": Checkpoint(every_steps=10)})
    run = make_run(tmp_path, config)  # 6 steps of 3 mini-batches
    assert train(run)[0]["steps"] == 25
    assert [s.step for s in checkpoint.list_checkpoints(run.run_dir)] == [20, 25]
    result = train(resume(run, with_train(servers(2, 1, "async"), max_steps=None)))[0]
    assert (result["epochs"], result["rows"]) == (2, 490)


@pytest.mark.slow
def test_a_trainer_without_work_waits_for_the_others_as_long_as_they_need(tmp_path):
    """Each update cancels what all others compute: the first one to be done waits for four of them, 8 s."""
    slow = {"straggler": "constant", "straggler_s": 2.0}
    train_settings, launch = {"epochs": 1}, {"collective_timeout_s": 3}
    config = servers(5, 1, "k_sync", train=train_settings, launch=launch, server_k=1, sections=slow)
    result = train(make_run(tmp_path, config, rows=48))[0]
    assert (result["rows"], result["steps"]) == (48, 5)


def train_and_list_checkpoints(run):
    """The steps at which this rank saved."""
    saved, save = [], saving.save

    def note(*args, **settings):
        saved.append(settings["about"].step)
        return save(*args, **settings)

    saving.save = note
    worker.main(run)
    return saved


def test_mini_batches_without_a_row_do_not_bring_a_checkpoint_again(tmp_path):
    """Of 2 rows the first trainer has none, and comes last: the updates are done before the epoch is."""
    slow = {"straggler": "constant", "straggler_s": 0.5, "straggler_ranks": (0,)}
    config = servers(3, mode="async", sections={"checkpoint": Checkpoint(every_steps=1), **slow})
    run = make_run(tmp_path, config, rows=2)
    for saved in run_ranks(train_and_list_checkpoints, 4, run):
        assert saved == [1, 2, 3, 4]  # two epochs


def build_large_mlp():
    return nn.Sequential(nn.Linear(4, 2000), nn.ReLU(), nn.Linear(2000, 3000), nn.ReLU(), nn.Linear(3000, 3))


@pytest.mark.slow
def test_pauses_while_weights_are_on_their_way(tmp_path):
    """Weights of 24 MB do not fit into the buffers of connections: a pause finds half sent ones, and goes on."""
    config = servers(2, 2, "async", train={"epochs": 1}, sections={"checkpoint": Checkpoint(every_steps=3, keep=1)})
    result = train(make_run(tmp_path, config, rows=960, spec=ModelSpec(build=build_large_mlp)))[0]
    assert (result["rows"], result["steps"]) == (960, 40)


@pytest.mark.slow
def test_early_stopping_and_schedules_are_those_of_every_strategy(tmp_path):
    stop = {
        "epochs": 50,
        "early_stop_metric": "loss",
        "early_stop_patience": 2,
        "early_stop_min_delta": 0.05,
        "lr": 0.3,
    }
    # What is no gain to one is none to the other, so that it is halved before the run stops.
    args = {"patience": 0, "threshold": 0.05, "threshold_mode": "abs", "factor": 0.5}
    plateau = {"scheduler": "ReduceLROnPlateau", "scheduler_args": args}
    config = servers(2, 2, "k_async", server_k=1, train={**stop, **plateau}, data={"validation_fraction": 0.2})
    run = make_run(tmp_path, config)
    results = train(run)
    assert all(r["stopped_early"] and r["epochs"] == results[0]["epochs"] < 50 for r in results)
    lines = read_metrics(run.run_dir)
    assert [line["kind"] for line in lines if line["kind"] != "step"][-2:] == ["epoch", "checkpoint"]
    assert len([line for line in lines if line["kind"] == "epoch"]) == results[0]["epochs"]
    assert min(line["lr"] for line in lines if line["kind"] == "step") < 0.3


# Errors


def _nan_loss(output, label):
    return nn.functional.cross_entropy(output, label, reduction="none") * float("nan")


class _Double(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec(build=MLP.build, loss=_nan_loss), r"the loss is not finite .* on rank [01] in step 1 "),
        (ModelSpec(build=_Double), "spec.build: parameter servers hold float32, found the parameter layer.weight of"),
        (ModelSpec(build=nn.Identity), "no parameter of the model requires a gradient"),
    ],
)
def test_what_cannot_be_trained_says_why(tmp_path, spec, message):
    with pytest.raises(RankFailed, match=message):
        train(make_run(tmp_path, servers(2), spec=spec))


def train_and_stand_still(run, rank):
    """Trains; after some steps the process of one rank is stopped, as by a host that hangs: connections stay open."""

    def stop():
        while not any(line["step"] >= 5 for line in read_metrics(run.run_dir)):
            time.sleep(0.01)
        Path(run.run_dir, "stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    me = os.environ["RANK"]
    if me == str(rank):
        threading.Thread(target=stop, daemon=True).start()
    try:
        worker.main(run)
    except RuntimeError as error:
        if not describe(error, {})["is_secondary"]:  # as the driver tells the cause from its consequences
            Path(run.run_dir, f"error-{me}").write_text(str(error))
        time.sleep(1)  # all ranks have seen it before the first one ends the test
        raise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "mode", "message"),
    [
        pytest.param(1, "sync", r"no gradient from rank 1 on host \S+ for (4|1\.6) s", marks=pytest.mark.long),
        (1, "k_sync", r"no gradient from rank 1 on host \S+ for (4|1\.6) s"),
        pytest.param(1, "k_batch_async", r"no gradient from rank 1 on host \S+ for (4|1\.6) s", marks=pytest.mark.long),
        pytest.param(
            2,
            "async",
            r"no message from rank 2 on host \S+, (the first|a parameter) server, for 8 s",
            marks=pytest.mark.long,
        ),
        pytest.param(
            3, "sync", r"no message from rank 3 on host \S+, a parameter server, for 2 s", marks=pytest.mark.long
        ),
    ],
)
def test_F29_a_rank_that_stands_still_is_named_in_bounded_time(tmp_path, rank, mode, message):
    """Trainers are ranks 0 and 1, servers 2 and 3, of which 2 is the first."""
    config = servers(
        2, 2, mode, server_k=int(mode.startswith("k_")), sections={"straggler": "constant", "straggler_s": 0.02},
        launch={"collective_timeout_s": 4}, train={"epochs": 100},
    )  # fmt: skip
    run = make_run(tmp_path, config, rows=9600)
    with pytest.raises(RankFailed):
        run_ranks(train_and_stand_still, 4, run, rank)
    errors = list(Path(run.run_dir).glob("error-*"))
    assert errors
    for path in errors:
        assert re.search(message, path.read_text())
        assert path.stat().st_mtime - Path(run.run_dir, "stopped").stat().st_mtime < 15
