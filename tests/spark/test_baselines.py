"""treeReduce and shuffle train what one process trains, go on where they stopped, and leave nothing behind."""

import dataclasses
import gc
import importlib
import os
import pathlib
import pickle
import random
import signal
import threading
import time
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spark_dl
from spark_dl import Hooks, ModelSpec, RankError, worker
from spark_dl.baselines.driver_loop import gradient_sum
from spark_dl.baselines.driver_loop.gradient_sum import only_gradients
from spark_dl.config import strategies
from spark_dl.data.load.mixture import Mixture
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.spec import Run
from spark_dl.track.time_split import split_of
from spark_dl.training.finite import NonFinite
from tests.builders import reference
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, MLP, blobs, build_mlp, same_bits, small_config
from tests.builders.settings import parallel
from tests.ranks import test_means as means

STRATEGIES = ["tree_reduce", "shuffle_reduce"]


def config_of(strategy, num_ranks, settings=None, launch=None, **sections):
    limits = {"start_timeout_s": 60, "collective_timeout_s": 60, **(launch or {})}
    return small_config(num_ranks, launch=limits, parallel=parallel(strategy, **(settings or {})), **sections)


def make_run(tmp_path, config, *, rows=245, spec=MLP, name="run", **run):
    shards = run.pop("train", None) or write_dataset(str(tmp_path / "data"), blobs(rows), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name), **run)


def train_from_driver(spark, run, **options):
    return strategies.find(run.config.parallel.strategy).train_from_driver(spark, run, **options)


def weights_of(run):
    return checkpoint.load(checkpoint.find(run.run_dir), "model.pt")["0"]


def assert_same_training(spark, tmp_path, config, rows=245):
    reference.assert_same_training(lambda run: train_from_driver(spark, run), tmp_path, config, rows)


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.modes("local")
@pytest.mark.parametrize("accumulation_steps", [1, 2])
@pytest.mark.parametrize(
    "name", ["class weights", "tags", "losses and weights", "sum and count", "GPT-2", "packs", "groups"]
)
def test_the_mean_is_over_what_the_loss_says(spark, tmp_path, name, accumulation_steps):
    train = {"accumulation_steps": accumulation_steps, "epochs": 1}
    config = means.config_of(name, 2, train, parallel=parallel("tree_reduce"))
    run = Run(spec=means.CASES[name][0], config=config, train=means.dataset(tmp_path), run_dir=str(tmp_path / "run"))
    train_from_driver(spark, run)
    _, expected = means.plain_loop(tmp_path, name, config)
    assert_close(weights_of(run), expected)


def assert_close(weights, expected):
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)


class Canary:
    """Leaves a file with the number of each process that unpickles it."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return hatch, (self.folder,)


def hatch(folder):
    pathlib.Path(folder, str(os.getpid())).touch()
    return Canary(folder)


def parts_of(spark, folder, findings):
    """Gradients of ranks with these findings, and with a canary in place of the first one, if there is a folder."""

    def part(rank):
        finding = Canary(folder) if folder and rank == 0 else findings[rank]
        return gradient_sum.GradientSum(np.ones(8, "float32"), finding=finding)

    tasks = spark.sparkContext.parallelize(range(len(findings)), len(findings))
    return only_gradients(tasks.map(part))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_S16_what_a_hostile_executor_sends_is_not_unpickled_by_the_driver(spark, tmp_path, strategy):
    config = config_of(strategy, 3)
    module = importlib.import_module(f"spark_dl.baselines.driver_loop.{strategy}")
    with pytest.raises(pickle.UnpicklingError, match=r"a task sent an object with tests.spark.test_baselines.hatch"):
        module.aggregate(parts_of(spark, str(tmp_path), [None] * 3), config)
    assert not (tmp_path / str(os.getpid())).exists()
    total = module.aggregate(parts_of(spark, "", [None, NonFinite(3, 1, 2), NonFinite(2, 0, 1, "w")]), config)
    assert (total.gradient.tolist(), total.finding) == ([3.0] * 8, NonFinite(2, 0, 1, "w"))
    assert spark.sparkContext.parallelize([{1}], 1).collect() == [{1}]  # other RDDs are as ever


def assert_ended(pids, wait_s=30):
    """Spark has ended their tasks; they notice when what they compute is done."""
    end = time.monotonic() + wait_s
    while (left := [pid for pid in pids if os.path.exists(f"/proc/{pid}")]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left


@pytest.mark.sampled(1)
@pytest.mark.modes("local")
@pytest.mark.parametrize(("strategy", "num_ranks"), [
    ("tree_reduce", 3), ("shuffle_reduce", 4),
])  # fmt: skip
def test_same_as_one_process(spark, tmp_path, strategy, num_ranks):
    assert_same_training(spark, tmp_path, config_of(strategy, num_ranks), rows=509)  # 22 steps; the last ones are short
    split = split_of([line for line in read_metrics(str(tmp_path / "run")) if line["kind"] == "step"])
    assert split.data.shape == (22, num_ranks)
    assert (split.compute > 0).all()
    parts = split.data + split.compute + split.communication + split.wait
    assert parts == pytest.approx(np.repeat(split.seconds[:, None], num_ranks, axis=1), rel=0.01, abs=1e-3)


class Counter(Hooks):
    steps: ClassVar[list[int]] = []

    def after_step(self, step):
        self.steps.append(step.position.global_step)


def to_zero(model, total_steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total_steps)
    return spark_dl.Optimization(optimizer=optimizer, scheduler=schedule, interval="step")


@pytest.mark.slow
@pytest.mark.modes("local")
def test_hooks_are_called_on_the_driver_whose_optimizer_gets_the_steps_of_the_run(spark, tmp_path):
    spec = ModelSpec(build=build_mlp, hooks=Counter, optimizer=to_zero)
    run = make_run(tmp_path, config_of("tree_reduce", 2, train={"log_every": 1, "max_steps": 5}), spec=spec)
    Counter.steps.clear()
    train_from_driver(spark, run)
    assert Counter.steps == [1, 2, 3, 4, 5]
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulation_momentum_and_clipping(spark, tmp_path, strategy):
    optimizer = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
    assert_same_training(spark, tmp_path, config_of(strategy, 3, train={**optimizer, "accumulation_steps": 5}))


@pytest.mark.sampled(2)
@pytest.mark.modes("local")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_rows_than_ranks_train_exactly(spark, tmp_path, strategy, rows):
    assert_same_training(spark, tmp_path, config_of(strategy, 4), rows)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_tree_with_a_level_in_between_and_more_ranks_than_slots(spark, tmp_path):
    """Of 8 gradients Spark makes 4 before the driver adds them up. The 4 slots have two ranks each, in turn."""
    assert_same_training(spark, tmp_path, config_of("tree_reduce", 8, {"tree_depth": 3}))


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_resumed_run_equals_uninterrupted_one_bit_for_bit(spark, tmp_path, strategy):
    """With dropout, batch norm, momentum, a scheduler and warm-up: all of their state comes back."""
    train = {
        "optimizer_args": {"momentum": 0.9}, "scheduler": "StepLR", "warmup_steps": 4,
        "scheduler_args": {"step_size": 1, "gamma": 0.5}, "clip_grad_norm": 1.0,
    }  # fmt: skip
    config = config_of(strategy, 3, train=train, data={"validation_fraction": 0.1})
    whole = make_run(tmp_path, config, spec=DROPOUT_MLP, name="whole")
    result = train_from_driver(spark, whole)
    cut_config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=3))
    cut = dataclasses.replace(whole, config=cut_config, run_dir=str(tmp_path / "cut"))
    train_from_driver(spark, cut)
    saved = checkpoint.latest(cut.run_dir)
    assert saved.step == 3
    generation = checkpoint.start_generation(cut.run_dir)
    resumed = dataclasses.replace(cut, config=config, checkpoint=saved.url, generation=generation)
    assert train_from_driver(spark, resumed)["history"] == result["history"]
    assert same_bits(weights_of(whole), weights_of(resumed))
    optimizers = [
        checkpoint.load(checkpoint.find(r.run_dir), "training.pt")["optimizer"]["state"] for r in (whole, resumed)
    ]
    assert all(same_bits(optimizers[0][slot], optimizers[1][slot]) for slot in optimizers[0])


@pytest.mark.slow
@pytest.mark.modes("local")
def test_resume_on_another_number_of_ranks_goes_on_exactly_with_a_scaled_rate(spark, tmp_path):
    config = config_of("tree_reduce", 2, train={"max_steps": 4, "lr_scaling": "linear"})
    run = make_run(tmp_path, config)
    train_from_driver(spark, run)
    saved = checkpoint.latest(run.run_dir)
    four = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, max_steps=6),
        launch=dataclasses.replace(config.launch, num_ranks=4),
    )
    generation = checkpoint.start_generation(run.run_dir)
    train_from_driver(spark, dataclasses.replace(run, config=four, checkpoint=saved.url, generation=generation))
    rates = [line["lr"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    assert rates == pytest.approx([0.2] * 4 + [0.4] * 2)


def _build_batch_norm_mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.slow
@pytest.mark.long_in("local-cluster")
@pytest.mark.modes("local-cluster")
@pytest.mark.timeout(300)
def test_same_as_ddp_with_batch_norm_and_validation(spark, tmp_path):
    """By the public function, on several JVMs; validation sees all of its rows, as an evaluation does."""
    shards, test = (
        write_dataset(str(tmp_path / name), blobs(rows, seed), group_rows=40, shard_rows=120)
        for name, rows, seed in (("train", 509, 0), ("test", 101, 1))
    )
    spec = ModelSpec(build=_build_batch_norm_mlp)
    ddp = spark_dl.train(shards, spec, small_config(3), run_dir=str(tmp_path / "ddp"), validation=test)
    expected = weights_of(ddp)
    for strategy in STRATEGIES:
        run_dir = str(tmp_path / strategy)
        result = spark_dl.train(shards, spec, config_of(strategy, 3), run_dir=run_dir, validation=test)
        assert (result.steps, result.rows) == (22, 1018)
        assert_close(weights_of(result), expected)
        found = spark_dl.evaluate(test, spec, run_dir)
        assert found["rows"] == 101
        assert result.metrics["loss"] == pytest.approx(found["loss"], rel=1e-6)
        assert result.metrics["loss"] == pytest.approx(ddp.metrics["loss"], rel=1e-4)


class _PartlyTrained(nn.Module):
    """Has parameters that are not trained, of values that no seed tells, one that no loss depends on, and buffers."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.spare = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(2, 2)
        self.first.requires_grad_(False)
        self.first.weight.copy_(torch.tensor(np.random.default_rng().normal(size=(16, 4))))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.tensor([1.5], dtype=torch.bfloat16))

    def forward(self, features):
        self.steps += 1
        return self.last(torch.tanh(self.first(features) * self.scale.float()))


@pytest.mark.slow
@pytest.mark.modes("local")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_weights_that_are_not_trained_are_those_of_the_driver(spark, tmp_path, strategy):
    train = {"optimizer_args": {"weight_decay": 0.1}, "max_steps": 4, "global_batch_size": 240}
    run = make_run(tmp_path, config_of(strategy, 2, train=train), spec=ModelSpec(build=_PartlyTrained), rows=240)
    losses = []
    train_from_driver(spark, run, report=lambda event: losses.append(event["loss"]) if "loss" in event else None)
    weights = weights_of(run)
    torch.manual_seed(run.config.train.seed)
    model = _PartlyTrained()
    assert torch.equal(weights["spare.weight"], model.spare.weight)  # no weight decay without a gradient
    assert weights["steps"] == 2  # of 2 steps an epoch, by rank 0
    model.first.load_state_dict({name: weights[f"first.{name}"] for name in ("weight", "bias")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    columns = {name: torch.from_numpy(values) for name, values in blobs(240).items()}
    expected = []
    for _ in losses:
        loss = F.cross_entropy(model(columns["features"]), columns["label"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-5)
    assert_close({"w": weights["last.weight"]}, {"w": model.last.weight.detach()})


def _freeze(model, position):
    model[0].requires_grad_(position.global_step < 2)


def _thaw(model, position):
    model[0].requires_grad_(position.global_step >= 2)


@pytest.mark.modes("local")
@pytest.mark.parametrize(("function", "step"), [(_freeze, 3), (_thaw, 1)], ids=["frozen later", "trained later"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_M17_a_part_that_is_frozen_or_trained_later_is_named(spark, tmp_path, strategy, function, step):
    spec = dataclasses.replace(MLP, set_position=function)
    run = make_run(tmp_path, config_of(strategy, 2), spec=spec)
    with pytest.raises(ValueError, match=rf"requires_grad has changed before step {step}: '0\.weight' \(frozen\)"):
        train_from_driver(spark, run)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_mixture_and_fp16(spark, tmp_path):
    datasets = {
        name: write_dataset(str(tmp_path / name), blobs(rows), group_rows=20, shard_rows=60)
        for name, rows in (("many", 245), ("few", 50))
    }
    train = {"global_batch_size": 96, "precision": "fp16-mixed"}
    mixed = {"proportions": {"many": 3, "few": 1}, "epoch_size": 300}
    config = config_of("shuffle_reduce", 3, train=train, data=mixed)
    run = make_run(tmp_path, config, train=Mixture(datasets))
    alone = dataclasses.replace(run, config=small_config(1, train=train, data=mixed), run_dir=str(tmp_path / "alone"))
    assert train_from_driver(spark, run)["rows"] == worker.main(alone).result["rows"]
    for name, expected in weights_of(alone).items():  # in fp16 the sums of parts of a batch are rounded by themselves
        torch.testing.assert_close(weights_of(run)[name], expected, rtol=1e-2, atol=1e-2)
    scalers = [
        checkpoint.load(checkpoint.find(r.run_dir), "training.pt")["extra"]["scaler"]["scale"] for r in (run, alone)
    ]
    assert scalers[0] == scalers[1]


class _Recorder:
    """Leaves a line for each call, by process and thread. A loader has a thread of its own each time it is opened."""

    def __init__(self, folder):
        self.folder = str(folder)

    def record(self, name):
        with open(os.path.join(self.folder, name), "a") as file:
            file.write(f"{os.getpid()} {threading.get_native_id()}\n")

    def lines(self, name):
        path = os.path.join(self.folder, name)
        return open(path).read().splitlines() if os.path.exists(path) else []

    def pids(self):
        return {int(line.split()[0]) for line in self.lines("builds")}

    def build(self):
        self.record("builds")
        return build_mlp()

    def transform(self, batch):
        self.record("loads")
        return batch


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_models_and_loaders_stay_open_between_steps_and_are_closed_in_the_end(spark, tmp_path):
    recorder = _Recorder(tmp_path)
    spec = ModelSpec(build=recorder.build, transform=recorder.transform)
    run = make_run(tmp_path, config_of("tree_reduce", 2, launch={"collective_timeout_s": 10}), spec=spec, rows=480)
    assert train_from_driver(spark, run)["steps"] == 20
    num_workers, num_ranks, epochs = 4, 2, 2
    builds, loads = recorder.lines("builds"), recorder.lines("loads")
    assert len(builds) == len(recorder.pids()) <= 1 + num_workers  # the driver's, too
    assert 20 * num_ranks <= len(loads)
    assert len(set(loads)) <= num_workers * num_ranks * epochs < 20 * num_ranks
    deadline = time.monotonic() + run.config.launch.collective_timeout_s + 10
    while (found := _threads_of_workers(spark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not found


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
def test_workers_do_not_look_through_the_objects_of_torch_after_every_task(spark):
    frozen = spark.sparkContext.parallelize(range(4), 4).map(lambda _: gc.get_freeze_count()).collect()
    assert min(frozen) > 50_000


def _threads_of_workers(spark):
    """Threads of ours in any of the Python workers."""

    def threads(_):
        time.sleep(0.3)  # so that each of them has one of these tasks
        yield from (t.name for t in threading.enumerate() if t.name.startswith(("spark_dl", "ThreadPool")))

    return spark.sparkContext.parallelize(range(4), 4).mapPartitions(threads).collect()


class _Fault:
    """A loss that fails in the second step of rank 1."""

    def __init__(self, kind, folder):
        self.kind, self.flag = kind, str(folder / "flag")

    def __call__(self, output, label):
        from pyspark import TaskContext

        if TaskContext.get().partitionId() == 1:
            if os.path.exists(self.flag):
                self.fail()
            open(self.flag, "w").close()
        return F.cross_entropy(output, label, reduction="none")

    def fail(self):
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ZeroDivisionError("the culprit")


@pytest.mark.sampled(2)
@pytest.mark.long_in("local-cluster")
@pytest.mark.slow
@pytest.mark.modes("local", "local-cluster")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_F29_a_task_that_fails_is_one_error_that_names_the_rank(spark, tmp_path, strategy, kind):
    message = {
        "raise": r"^rank 1 on .* \(pid \d+\) failed: ZeroDivisionError: the culprit\n\nTraceback on the rank:",
        "kill": r"^rank 1 on \S+ was killed: its Python process ended without an error",
    }[kind]
    spec = ModelSpec(build=build_mlp, loss=_Fault(kind, tmp_path))
    run = make_run(tmp_path, config_of(strategy, 2), spec=spec)
    with pytest.raises(RankError, match=message) as error:
        train_from_driver(spark, run)
    assert error.value.rank == 1
    if kind == "raise":
        assert 'raise ZeroDivisionError("the culprit")' in str(error.value)
    assert train_from_driver(spark, dataclasses.replace(run, spec=MLP, config=_two_steps(run.config)))["steps"] == 2


def _two_steps(config):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=2))


SLOW = {"straggler": "constant", "straggler_s": 10.0}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_step_that_takes_too_long_is_an_error_and_leaves_no_task(spark, tmp_path):
    limits = {"start_timeout_s": 2, "collective_timeout_s": 1}
    recorder = _Recorder(tmp_path)
    spec = ModelSpec(build=recorder.build)
    run = make_run(tmp_path, config_of("tree_reduce", 2, launch=limits, **SLOW), spec=spec)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done within 3 s; raise launch.collective_timeout_s"):
        train_from_driver(spark, run)
    assert time.monotonic() - start < 60  # its steps take longer
    assert_ended(recorder.pids() - {os.getpid()})


@pytest.mark.slow
@pytest.mark.modes("local")
def test_an_interrupt_leaves_no_task(spark, tmp_path):
    recorder = _Recorder(tmp_path)
    run = make_run(tmp_path, config_of("shuffle_reduce", 2, **SLOW), spec=ModelSpec(build=recorder.build))

    def interrupt():
        end = time.monotonic() + 30
        while len(recorder.pids()) < 3 and time.monotonic() < end:  # the driver's and those of two ranks
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        train_from_driver(spark, run)
    other.join()
    assert len(recorder.pids()) == 3
    assert_ended(recorder.pids() - {os.getpid()})


@pytest.mark.slow
@pytest.mark.modes("local")
def test_the_user_s_session_and_random_numbers_stay_as_they_were(spark, tmp_path):
    context = spark.sparkContext
    context.setJobGroup("mine", "my own jobs")
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    try:
        train_from_driver(spark, make_run(tmp_path, config_of("tree_reduce", 2, train={"max_steps": 1})))
        assert context.getLocalProperty("spark.jobGroup.id") == "mine"
        assert context.getLocalProperty("spark.job.description") == "my own jobs"
    finally:
        context.setJobGroup(None, None)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states


@pytest.mark.modes("connect")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_connect_is_refused_before_anything_runs(spark, tmp_path, strategy):
    shards = write_dataset(str(tmp_path / "data"), blobs(50))
    with pytest.raises(ValueError, match=f"parallel.strategy: '{strategy}' uses RDDs"):
        spark_dl.train(shards, MLP, config_of(strategy, 2), run_dir=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
