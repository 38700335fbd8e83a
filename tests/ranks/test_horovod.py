"""The horovod strategy on real ranks: the same weights as one process, resume, compression, errors."""

import dataclasses
import gc
import http.client
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.nn import functional as F

from spark_dl import Horovod, ModelSpec, worker
from spark_dl.parallel import hvd
from spark_dl.rundir import checkpoint
from spark_dl.spec import Run
from tests.builders import sockets
from tests.builders.datasets import write_dataset
from tests.builders.models import DROPOUT_MLP, MLP, blobs, build_mlp, same_bits, small_config
from tests.ranks.launcher import run_ranks
from tests.ranks.test_parity import assert_same_training

pytest.importorskip(
    "horovod.torch", reason="no horovod; `make setup-horovod` builds it, or says why it cannot", exc_type=ImportError
)


def config_of(num_ranks, parallel=None, **sections):
    return small_config(num_ranks, parallel=Horovod(**parallel or {}), **sections)


def train_rank(run):
    return worker.main(run).result


def make_run(tmp_path, config, *, spec=DROPOUT_MLP, name="run", **run):
    shards = run.pop("train", None) or write_dataset(str(tmp_path / "data"), blobs(245), group_rows=40, shard_rows=120)
    return Run(spec=spec, config=config, train=shards, run_dir=str(tmp_path / name), **run)


def final_state(run):
    saved = checkpoint.latest(run.run_dir)
    return checkpoint.load(saved, "model.pt")["0"], checkpoint.load(saved, "training.pt")


@pytest.mark.slow
def test_same_as_one_process_with_other_numbers_of_ranks_one_after_another(tmp_path):
    for i, num_ranks in enumerate([3, 2, 2, 4]):
        assert_same_training(tmp_path / str(i), config_of(num_ranks), 509)  # the last batch is short


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_ranks_train_exactly(tmp_path, rows):
    assert_same_training(tmp_path, config_of(4), rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("num_ranks", "accumulation_steps"), [(1, 2), (2, 5), (3, 2)])
def test_accumulation_with_momentum_and_clipping(tmp_path, num_ranks, accumulation_steps):
    optimizer = {"optimizer_args": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, "clip_grad_norm": 0.3}
    train = {"accumulation_steps": accumulation_steps, **optimizer}
    assert_same_training(tmp_path, config_of(num_ranks, train=train), 245)


@pytest.mark.slow
def test_small_buffers(tmp_path):
    assert_same_training(tmp_path, config_of(3, {"bucket_mib": 0.0001}), 245)


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "bucket_mib"), [(2, 25), (3, 1e-7)])
def test_resumed_run_equals_an_uninterrupted_one_bit_for_bit(tmp_path, num_ranks, bucket_mib):
    """With two ranks, or each gradient in a buffer of its own; else the order of three ranks' sums is left to time."""
    train = {
        "epochs": 3, "optimizer_args": {"momentum": 0.9}, "scheduler": "StepLR", "scheduler_args": {"step_size": 1},
        "warmup_steps": 4,
    }  # fmt: skip
    config = config_of(num_ranks, {"bucket_mib": bucket_mib}, train=train, data={"validation_fraction": 0.1})
    whole = make_run(tmp_path, config, name="whole")
    run_ranks(train_rank, num_ranks, whole)
    cut_config = dataclasses.replace(config, train=dataclasses.replace(config.train, max_steps=8))
    cut = make_run(tmp_path, cut_config, name="cut", train=whole.train)
    run_ranks(train_rank, num_ranks, cut)
    saved = checkpoint.latest(cut.run_dir)
    generation = checkpoint.start_generation(cut.run_dir)
    resumed = dataclasses.replace(cut, config=config, checkpoint=saved.url, generation=generation)
    run_ranks(train_rank, num_ranks, resumed)

    (weights, training), (weights_again, training_again) = final_state(whole), final_state(resumed)
    assert same_bits(weights, weights_again)
    for slot, state in training["optimizer"]["state"].items():
        assert same_bits(state, training_again["optimizer"]["state"][slot])
    assert training["progress"] == training_again["progress"]
    assert training["settings"] == training_again["settings"]


def build_other_weights_on_each_rank():
    torch.manual_seed(int(os.environ["RANK"]))
    return build_mlp()


@pytest.mark.slow
def test_all_ranks_take_the_weights_of_rank_0(tmp_path):
    spec, trained = ModelSpec(build=build_other_weights_on_each_rank), []
    for num_ranks in (1, 3):
        run = make_run(tmp_path / str(num_ranks), config_of(num_ranks), spec=spec)
        run_ranks(train_rank, num_ranks, run)
        trained.append(final_state(run)[0])
    for name, expected in trained[0].items():
        torch.testing.assert_close(trained[1][name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_an_optimizer_is_built_with_stays(tmp_path):
    """Adagrad keeps its first argument in its state alone."""
    args = {"initial_accumulator_value": 0.5}
    config = config_of(2, train={"optimizer": "Adagrad", "optimizer_args": args, "max_steps": 1})
    run = make_run(tmp_path, config, spec=MLP)
    run_ranks(train_rank, 2, run)
    state = final_state(run)[1]["optimizer"]["state"]
    assert all((s["sum"] >= 0.5).all() and (s["sum"] > 0.5).any() for s in state.values())


@pytest.mark.slow
def test_fp16_compression_is_close_and_not_the_same(tmp_path):
    runs = {}
    for name in ("none", "fp16"):
        run = make_run(tmp_path / name, config_of(3, {"compression": name}), spec=MLP)
        run_ranks(train_rank, 3, run)
        runs[name] = final_state(run)[0]
    for name, expected in runs["none"].items():
        difference = (runs["fp16"][name] - expected).abs().max()
        assert 1e-6 < difference < 2e-3


@pytest.mark.slow
def test_mixed_precision_learns(tmp_path):
    config = config_of(2, train={"precision": "fp16-mixed", "epochs": 6, "lr": 0.3})
    run = make_run(tmp_path, config, spec=MLP)
    result = run_ranks(train_rank, 2, run)[0]
    assert result["history"][-1]["train_loss"] < 0.8 * result["history"][0]["train_loss"]
    assert "scaler" in final_state(run)[1]["extra"]


def train_and_look_around(run):
    import horovod.torch

    worker.main(run)
    gc.collect()
    return {
        "initialized": horovod.torch.is_initialized(),
        "threads": [t.name for t in threading.enumerate() if t.name.startswith("spark_dl")],
        "variables": [name for name in os.environ if name.startswith("HOROVOD")],
        "models": sum(type(o) is torch.nn.BatchNorm1d for o in gc.get_objects()),
    }, (psutil.Process().num_threads(), len(psutil.Process().net_connections()))


@pytest.mark.slow
def test_a_run_leaves_nothing_in_the_process(tmp_path):
    runs = [make_run(tmp_path / name, config_of(2), name=name) for name in "abc"]
    _, before, after = [run_ranks(train_and_look_around, 2, run) for run in runs]
    clean = {"initialized": False, "threads": [], "variables": [], "models": 0}
    assert [left for left, _ in after] == [clean, clean]
    assert [more for _, more in after] == [more for _, more in before]  # torch and gloo keep some for themselves


class LetsDown:
    """A loss by which rank 1 lets the others down in its fourth step."""

    def __init__(self, how):
        self.how, self.calls = how, 0

    def __call__(self, output, label):
        self.calls += 1
        self.last_call = time.monotonic()
        if self.calls == 4 and os.environ["RANK"] == "1":
            if self.how == "raises":
                raise ZeroDivisionError("the culprit")
            if self.how == "sleeps":
                time.sleep(9)
            if self.how == "is frozen":
                waker = subprocess.Popen(["sh", "-c", f"sleep 9; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
                waker.wait()
        return F.cross_entropy(output, label, reduction="none")


def outcome(run):
    """How a run ended on this rank, and how many seconds after its last step began (or the run)."""
    start = time.monotonic()
    try:
        ended = worker.main(run).result["steps"]
    except Exception as error:
        ended = f"{type(error).__name__}: {error}"
    return ended, time.monotonic() - getattr(run.spec.loss, "last_call", start)


SHUT_DOWN = "HorovodInternalError: Horovod has been shut down"
LATE = "RuntimeError: other ranks did not come within launch.collective_timeout_s=3 s"


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("how", "timeout_s"), [("raises", 20), ("sleeps", 3), ("is frozen", 3)])
def test_a_rank_that_lets_the_others_down_ends_all(tmp_path, how, timeout_s):
    config = config_of(3, launch={"collective_timeout_s": timeout_s})
    run = make_run(tmp_path, config, spec=ModelSpec(build=build_mlp, loss=LetsDown(how)))
    outcomes = run_ranks(outcome, 3, run)
    culprit = outcomes.pop(1)[0]
    first = "ZeroDivisionError: the culprit" if how == "raises" else LATE
    assert first in culprit or culprit.startswith(SHUT_DOWN)
    for ended, _ in outcomes:  # as the first one to notice it has told the others, unless Horovod itself noticed
        assert first in ended or (how == "is frozen" and ended.startswith(SHUT_DOWN))
    assert max(seconds for _, seconds in outcomes) < 8  # they did not wait for it to come back
    again = make_run(tmp_path, config_of(3), spec=MLP, name="again", train=run.train)
    assert [ended for ended, _ in run_ranks(outcome, 3, again)] == [12, 12, 12]


def outcome_without_horovod_on_rank_1(run):
    if os.environ["RANK"] != "1":
        return outcome(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "horovod", None)  # as if it were not installed
        return outcome(run)


def test_a_rank_without_horovod_says_what_to_do_and_the_others_do_not_wait_for_long(tmp_path):
    run = make_run(tmp_path, config_of(2, launch={"start_timeout_s": 2}))
    (waited, seconds), (lacks, _) = run_ranks(outcome_without_horovod_on_rank_1, 2, run)
    assert lacks.startswith("ValueError: parallel.strategy: horovod is not installed in this Python; build it")
    assert waited == f"RuntimeError: rank 1 on {socket.gethostname()} failed: {lacks}"
    assert seconds < 6


class Slot:
    """A place of a rank, as far as Horovod's server knows it."""

    hostname, rank, local_rank, cross_rank, size, local_size, cross_size = "h", 0, 0, 0, 1, 1, 1

    def to_response_string(self):
        return "0,1,0,1,0,1"


def request(port, method, path, body=b""):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    client.request(method, path, body=body)
    answer = client.getresponse()
    return answer.status, answer.read()


class Canary:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


def test_S07_horovod_s_server_unpickles_nothing_and_is_there_while_ranks_connect_alone(tmp_path):
    canary = pickle.dumps(Canary(str(tmp_path / "canary")))
    before = sockets.listening([os.getpid()])
    with hvd._rendezvous_server("127.0.0.1", [Slot()]) as server:
        (place,) = sockets.listening([os.getpid()]) - before
        assert place[1:] == ("127.0.0.1", server.server_port)
        for path in ("/runfunc/func", "/global_/0", "/workers/x"):
            status, _ = request(server.server_port, "PUT", path, canary)
            assert status == 200
        assert request(server.server_port, "GET", "/global_/0") == (200, canary)  # bytes, as they came
    assert not (tmp_path / "canary").exists()
    assert sockets.listening([os.getpid()]) == before
