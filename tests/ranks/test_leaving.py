"""How a rank leaves: nothing of DDP is left when its process group goes."""

import dataclasses
import datetime
import gc
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from spark_dl import DDP, Launch, LocalSGD, ModelSpec, worker
from spark_dl.channel import Address
from spark_dl.launch.failures import errors
from spark_dl.launch.failures.errors import is_secondary
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.store import RankStore, StoreServer
from spark_dl.parallel import ddp
from spark_dl.world import World
from tests.builders.models import MLP, build_mlp, small_config
from tests.ranks.launcher import kill_ranks, run_ranks
from tests.ranks.runs import make_run


def left_at_the_end(run):
    """How many of DDP's objects are left when the process group goes, of how many, and what the run raised."""
    made, left, raised = [], [], ""
    destroy = dist.destroy_process_group

    def wrap(*args, **options):
        module = DistributedDataParallel(*args, **options)
        made.append(weakref.ref(module))
        return module

    def look(*args):
        left.append(sum(ref() is not None for ref in made))
        destroy(*args)

    gc.disable()  # they go with their last reference, not at some time later
    try:
        with (
            mock.patch.object(ddp, "DistributedDataParallel", wrap),
            mock.patch.object(dist, "destroy_process_group", look),
        ):
            worker.main(run)
    except ZeroDivisionError as error:
        raised = str(error)
    finally:
        gc.enable()
    return left[-1], len(made), raised


class FailsInAStep:
    """A loss that fails in the second step: DDP sees the first batch twice."""

    calls = 0

    def __call__(self, output, labels):
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("no loss")
        return nn.functional.cross_entropy(output, labels, reduction="none")


STRATEGIES = pytest.mark.parametrize(
    "parallel",
    [DDP(), DDP(compression="topk"), LocalSGD(sync_every_steps=2, sync_start_step=2)],
    ids=["ddp", "topk", "post_local_sgd"],
)


@STRATEGIES
def test_ddp_goes_before_its_process_group(tmp_path, parallel):
    run = make_run(tmp_path, small_config(2, parallel=parallel))
    assert run_ranks(left_at_the_end, 2, run) == [(0, 1, "")] * 2


@STRATEGIES
def test_also_where_a_step_fails(tmp_path, parallel):
    spec = ModelSpec(build=build_mlp, loss=FailsInAStep())
    run = make_run(tmp_path, small_config(2, parallel=parallel), spec=spec)
    assert run_ranks(left_at_the_end, 2, run) == [(0, 1, "no loss")] * 2


def error_of(run, failing, store_port):
    """What the run raises on this rank, where one of them fails in a step."""
    if store_port:  # rank 0 holds the store, as where the ranks are started without torchrun's agent
        os.environ.update(MASTER_PORT=str(store_port), TORCHELASTIC_USE_AGENT_STORE="False")
    loss = FailsInAStep() if os.environ["RANK"] == failing else MLP.loss
    try:
        worker.main(dataclasses.replace(run, spec=ModelSpec(build=build_mlp, loss=loss)))
    except (ZeroDivisionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("failing", "has_agent"), [("0", True), ("1", True), ("0", False)])
def test_without_a_driver_each_rank_says_what_failed_first(tmp_path, failing, has_agent):
    store_port = None
    if not has_agent:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            store_port = probe.getsockname()[1]
    run = make_run(tmp_path, small_config(3))
    expected = [f"RuntimeError: rank {failing} on {socket.gethostname()} failed: ZeroDivisionError: no loss"] * 3
    expected[int(failing)] = "ZeroDivisionError: no loss"
    try:
        assert run_ranks(error_of, 3, run, failing, store_port) == expected
    finally:
        kill_ranks()  # their environment is another one


@pytest.mark.slow
def test_a_store_that_does_not_answer_hides_no_error():
    """Its host stands still: connections stay open, and nothing comes."""
    wait = datetime.timedelta(seconds=5)
    held = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=wait, wait_for_workers=False)
    answers = threading.Event()
    answers.set()

    def pump(source, target):
        while content := source.recv(1 << 16):
            answers.wait()
            target.sendall(content)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = []

        def connect():
            store.append(dist.TCPStore(*listener.getsockname(), timeout=wait, wait_for_workers=False))

        client = threading.Thread(target=connect, daemon=True)
        client.start()
        ours, _ = listener.accept()
        theirs = socket.create_connection(("127.0.0.1", held.port))
        for ends in ((ours, theirs), (theirs, ours)):
            threading.Thread(target=pump, args=ends, daemon=True).start()
        client.join(10)
        world = World(1, 2, 1, 2, "here", torch.device("cpu"), store[0])
        answers.clear()
        start = time.monotonic()
        for error in (ValueError("own"), RuntimeError("Connection closed by peer")):
            errors.publish(world, error)
            errors.raise_published(world, error)
        assert time.monotonic() - start < 20
        ours.close()
        theirs.close()


def test_a_rank_that_is_done_does_not_fail_because_the_rank_with_the_store_has_failed():
    listener, secret = socket.create_server(("127.0.0.1", 0)), bytes(32)
    server = StoreServer(listener, secret)
    store = RankStore(Address("127.0.0.1", listener.getsockname()[1], secret), datetime.timedelta(seconds=20))
    store.set("key", "value")
    server.close()
    with pytest.raises(dist.DistNetworkError):
        store.set("key", "value")
    rendezvous._leave(World(1, 2, 0, 1, "host", torch.device("cpu"), store), Launch())
    store.close()


def test_an_error_of_storage_is_no_sign_of_a_lost_rank():
    read = RuntimeError("cannot read row group 0 of s3://b/part-0: Connection reset by peer")
    read.__cause__ = OSError("Connection reset by peer")
    lost = RuntimeError("rank 0 lost rank 1: Connection reset by peer")
    lost.__cause__ = ConnectionResetError("Connection reset by peer")
    assert not is_secondary(read)
    assert is_secondary(lost)


LEAVES = """
import os, torch
from spark_dl.config import Launch
from spark_dl.launch.rank.rendezvous import join

def gloo_threads():
    return sum("gloo" in open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task"))

def train():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    return gloo_threads()

with join(Launch(device="cpu")):
    print(train() > 0)
print(gloo_threads())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted by Linux's /proc")
@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 does not name its threads")
def test_no_thread_of_a_process_group_is_left():
    """In a process of its own: what it imports, and when, makes the difference."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "0"], done.stderr
