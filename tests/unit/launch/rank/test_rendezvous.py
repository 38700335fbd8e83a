"""How ranks meet, and a world of one rank."""

import dataclasses
import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.rank import rendezvous
from spark_dl.launch.rank.peers import TaskRecord
from spark_dl.launch.rank.rendezvous import join, local_address
from spark_dl.launch.rank.sender import Reporter, Sender
from spark_dl.launch.rank.tasks import choose
from spark_dl.world import World

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def no_torchrun(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)


def test_without_an_environment_a_rank_is_alone(no_torchrun):
    events = []
    with join(Launch(device="cpu"), report=events.append) as world:
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (0, 1, 0, 1)
        assert world.device == torch.device("cpu")
        assert world.host == socket.gethostname()
        total = torch.tensor([3.0])
        dist.all_reduce(total)
        assert total.item() == 3.0
        world.store.set("key", "value")
        assert world.store.get("key") == b"value"
    assert events == [{"kind": "joined", "rank": 0, "device": "cpu"}]


def test_a_rank_leaves_the_process_as_it_found_it(no_torchrun):
    env, threads = dict(os.environ), torch.get_num_threads()
    with join(Launch(threads=threads + 1)):
        assert torch.get_num_threads() == threads + 1
        os.environ["LEFT_BY_A_MODEL"] = "1"
    assert dict(os.environ) == env
    assert torch.get_num_threads() == threads
    assert not dist.is_initialized()


def test_an_error_ends_the_group_and_comes_out(no_torchrun):
    env = dict(os.environ)
    with pytest.raises(KeyError, match="mine"), join(Launch()):
        raise KeyError("mine")
    assert not dist.is_initialized()
    assert dict(os.environ) == env
    with join(Launch()):
        assert dist.is_initialized()


def test_the_process_group_can_be_left_to_the_caller(no_torchrun):
    with join(Launch(), init_group=False) as world:
        assert not dist.is_initialized()
        assert world.world_size == 1


def test_B38_half_an_environment_is_an_error(no_torchrun, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR is not.*torchrun"), join(Launch()):
        pass


def test_B38_a_host_without_an_address_is_an_error_that_names_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(RuntimeError, match="host name 'worker-7' does not resolve"):
        local_address("worker-7")


def test_B38_the_address_of_a_host_is_its_ipv4_address_where_it_has_one(monkeypatch):
    found = [(socket.AF_INET6, 1, 6, "", ("fe80::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert local_address("worker-7") == "10.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found[:1])
    assert local_address("worker-7") == "fe80::1"


def test_B38_a_rank_is_reached_by_the_interface_that_was_chosen_or_else_by_its_host_s_name(monkeypatch):
    world = World(0, 1, 0, 1, "worker-7", torch.device("cpu"), dist.HashStore())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(socket.AF_INET, 1, 6, "", ("10.255.255.7", 0))])
    assert (world.address, world.interface) == ("10.255.255.7", None)  # no interface here has it
    world = dataclasses.replace(world, socket_interface="lo")
    assert (world.address, world.interface) == ("127.0.0.1", "lo")


JOIN = """
from spark_dl import Launch
from spark_dl.launch.rank.rendezvous import join
with join(Launch(device="cpu")):
    print("joined")
"""


@pytest.mark.slow
def test_S11_tls_that_torch_was_built_without_is_an_error_and_no_plain_connection(no_torchrun):
    """Gloo reads the variable once in a process."""
    ends = []
    for more in ({}, {"GLOO_DEVICE_TRANSPORT": "TCP_TLS"}):
        command, env = [sys.executable, "-c", JOIN], {**os.environ, **more}
        ends.append(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120))
    plain, tls = ends
    assert (plain.returncode, plain.stdout) == (0, "joined\n")
    assert (tls.returncode, tls.stdout) == (1, "")
    assert "GLOO_DEVICE_TRANSPORT: found TCP_TLS, which this build of torch does not have" in tls.stderr


def test_B38_a_store_that_cannot_be_reached_is_an_error_that_names_both_ends(no_torchrun):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        first = TaskRecord(
            partition=0, host="worker-7", executor="worker-7:1", address="127.0.0.1", port=closed.getsockname()[1]
        )  # fmt: skip
        launch = Launch(start_timeout_s=1.0)
        message = rf"a rank on {socket.gethostname()} cannot reach task 0 at 127.0.0.1:{first.port} within 1 s: "
        with pytest.raises(RuntimeError, match=message):
            rendezvous._open_tcp_store(first, 1, 2, launch, None)


def test_F31_where_the_driver_cannot_be_reached_no_host_is_left_out():
    """The ranks would have to meet by Spark's `allGather`, which all tasks would have to call."""
    unreachable = Sender(None, 0)
    tasks = choose(["a:1", "b:1", "c:1"], 1, 2, {"a"})
    with pytest.raises(
        RuntimeError, match="not all ranks have reached the driver's port within launch.start_timeout_s"
    ):
        rendezvous._exchange(None, Reporter(unreachable, {}, tasks=tasks), "", Launch(num_ranks=2))
