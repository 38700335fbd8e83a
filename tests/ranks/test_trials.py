"""Trials on groups of real ranks: each as if it were trained alone, whatever happens in the others."""

import dataclasses
import importlib.util
import math
import os
import threading
import time

import pytest
import torch
from torch import nn

from spark_dl import Horovod, LocalSGD, ModelSpec, ParameterServer
from spark_dl.launch.rank.sender import Reporter, Sender
from spark_dl.launch.watch import Listener
from spark_dl.rundir import checkpoint, generations
from spark_dl.rundir.metrics import read_metrics
from spark_dl.trials.hand_out import HandOut
from spark_dl.trials.rank import begin, run_trials
from tests.builders.models import DROPOUT_MLP, MLP, build_mlp, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import assert_same_to_the_bit, make_run, train


@dataclasses.dataclass
class Listed:
    """One training for each settings. `last_epoch`: the epoch after which each of them ends early, by number."""

    run: object
    configs: list
    arguments: dict = dataclasses.field(default_factory=dict)
    last_epoch: dict = dataclasses.field(default_factory=dict)
    given: int = 0
    results: dict = dataclasses.field(default_factory=dict)
    errors: dict = dataclasses.field(default_factory=dict)
    entries: list = dataclasses.field(default_factory=list)

    def next(self):
        if self.given == len(self.configs):
            return None
        self.given += 1
        number = self.given - 1
        return begin(self.run, number, self.configs[number], self.arguments.get(number, {}))

    def ends(self, order, entry):
        self.entries.append((order.trial, entry["epoch"]))
        return entry["epoch"] >= self.last_epoch.get(order.trial, math.inf)

    def finish(self, order, result, error):
        (self.results if error is None else self.errors)[order.trial] = result or str(error)


def rank_of_trials(run, spec, address):
    sender = Sender(address, int(os.environ["RANK"]))
    try:
        run_trials(run, spec, report=Reporter(sender, {"host": "here", "pid": os.getpid()}))
        sender.send({"kind": "done"})
    finally:
        sender.close()
    return torch.random.initial_seed()


def train_trials(trials, spec, num_groups):
    """Trains on groups of ranks, with the driver's listener in this process. Returns the events of the ranks."""
    listener, events = Listener("127.0.0.1"), []
    hand_out = HandOut(trials, trials.run.config.launch.num_ranks)

    def answer():
        while (event := listener.events.get())["kind"] != "over":
            events.append(event)
            if event["kind"] == "ask":
                for task, reply in hand_out.answer(event).items():
                    listener.answer(task, reply)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        num_ranks = num_groups * trials.run.config.launch.num_ranks
        run_ranks(rank_of_trials, num_ranks, trials.run, spec, listener.address)
    finally:
        listener.events.put({"kind": "over"})
        thread.join()
        listener.close()
    return events


def shared_run(tmp_path, config, spec=MLP):
    run = make_run(tmp_path, config, spec=spec)
    return dataclasses.replace(run, generation=generations.start_generation(run.run_dir))


def changed(config, **fields):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


ADAM = {"optimizer": "Adam", "lr": 0.01, "optimizer_args": {"betas": [0.9, 0.99]}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_trials_have_the_weights_of_the_same_settings_trained_alone(tmp_path, num_ranks):
    """With dropout and batch norm: no random number and no setting of a trial reaches the next one."""
    base = small_config(num_ranks, train={"validation_fraction": 0.2})
    configs = [changed(base, **fields) for fields in ({"lr": 0.2}, ADAM, {"seed": 8, "global_batch_size": 24}, {})]
    trials = Listed(shared_run(tmp_path, base, DROPOUT_MLP), configs)
    events = train_trials(trials, DROPOUT_MLP, num_groups=2)
    assert trials.errors == {}
    assert {(e["trial"], e["rank"] // num_ranks) for e in events if e["kind"] == "epoch"} <= {
        (trial, group) for trial in range(4) for group in range(2)
    }
    for number, config in enumerate(configs):
        alone = train(make_run(tmp_path, config, spec=DROPOUT_MLP, name=f"alone-{number}"))
        own = checkpoint.latest(f"{trials.run.run_dir}/trials/{number:04d}")
        assert_same_to_the_bit(own, alone)
        last = [e for e in read_metrics(f"{tmp_path}/alone-{number}") if e["kind"] == "epoch"][-1]
        assert trials.results[number]["metrics"] == last["metrics"]


class Failing:
    """A loss that fails on one rank of a group, in the third step, if it is asked to; a class, for pickles."""

    def __init__(self, rank, kind):
        self.rank, self.kind, self.calls = rank, kind, 0

    def __call__(self, output, label):
        self.calls += 1
        if self.calls == 4 and os.environ["RANK"] == str(self.rank):  # DDP's first pass is one more
            if self.kind == "raise":
                raise ZeroDivisionError("no loss")
            if self.kind == "exit":
                raise SystemExit(3)
            if self.kind == "hang":
                time.sleep(60)
            return output.sum(1) * math.nan
        return nn.functional.cross_entropy(output, label, reduction="none")


def failing_spec(rank=None, kind="raise"):
    return ModelSpec(build=build_mlp, loss="CrossEntropyLoss" if rank is None else Failing(rank, kind))


def test_a_trial_that_fails_on_one_rank_ends_on_all_of_its_ranks_and_on_no_others(tmp_path):
    base = small_config(2, train={"epochs": 3})
    arguments = {1: {"rank": 1}, 2: {"rank": 0, "kind": "nan"}, 4: {"rank": 0, "kind": "exit"}}
    trials = Listed(shared_run(tmp_path, base), [base] * 6, arguments)
    start = time.monotonic()
    train_trials(trials, failing_spec, num_groups=2)
    assert time.monotonic() - start < 15  # and not the limit of a collective operation, for each of them
    assert sorted(trials.errors) == [1, 2, 4]
    for number, message in ((1, "ZeroDivisionError: no loss"), (2, "the loss is not finite"), (4, "sys.exit")):
        assert message in trials.errors[number]
        assert "Connection closed" not in trials.errors[number].split("Traceback")[0]
    alone = train(make_run(tmp_path, base, name="alone"))
    for number in (0, 3, 5):
        assert_same_to_the_bit(checkpoint.latest(f"{trials.run.run_dir}/trials/{number:04d}"), alone)


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_trial_ends_the_job_in_bounded_time(tmp_path):
    base = small_config(2, launch={"collective_timeout_s": 2})
    trials = Listed(shared_run(tmp_path, base), [base] * 2, {0: {"rank": 1, "kind": "hang"}})
    start = time.monotonic()
    message = (
        r"rank (0|2) waited longer than launch.collective_timeout_s=2 s for the driver, or for another rank of its "
        r"group \(ranks (0 to 1|2 to 3)\) to end a trial"
    )
    with pytest.raises(RankFailed, match=message):
        train_trials(trials, failing_spec, num_groups=2)
    assert time.monotonic() - start < 30
    assert sorted(trials.results) == [1]  # of the other group


def test_a_trial_that_is_pruned_ends_on_all_ranks_after_the_same_epoch(tmp_path):
    base = small_config(2, train={"epochs": 4})
    trials = Listed(shared_run(tmp_path, base), [base] * 3, last_epoch={0: 1, 2: 0})
    train_trials(trials, MLP, num_groups=2)
    assert {number: result["epochs"] for number, result in trials.results.items()} == {0: 2, 1: 4, 2: 1}
    assert [trials.results[number]["stopped_early"] for number in range(3)] == [True, False, True]
    assert sorted(trials.entries) == [(0, 0), (0, 1), *((1, epoch) for epoch in range(4)), (2, 0)]


HAS_HOROVOD = importlib.util.find_spec("horovod") is not None


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [
    LocalSGD(sync_every_steps=2), ParameterServer(server_mode="sync"),
    pytest.param(Horovod(), marks=pytest.mark.skipif(not HAS_HOROVOD, reason="Horovod is not installed")),
], ids=lambda parallel: parallel.strategy)  # fmt: skip
def test_groups_train_by_other_strategies_and_survive_a_failure_there(tmp_path, parallel):
    base = small_config(2, parallel=parallel)
    trials = Listed(shared_run(tmp_path, base), [base] * 4, {1: {"rank": 0}})
    train_trials(trials, failing_spec, num_groups=2)
    assert sorted(trials.errors) == [1]
    assert "ZeroDivisionError: no loss" in trials.errors[1]
    weights = [
        checkpoint.load(checkpoint.latest(f"{trials.run.run_dir}/trials/{number:04d}"), "model.pt")["0"]
        for number in (0, 2, 3)
    ]
    for other in weights[1:]:
        for name, tensor in weights[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)
