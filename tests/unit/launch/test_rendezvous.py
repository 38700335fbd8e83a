"""How ranks meet: who becomes which rank, and which ranks do not fit together."""

import dataclasses
import os
import re
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.gpus import device_indices, first, gpus_of_local_rank, gpus_of_task, name_on_host
from spark_dl.launch.rendezvous import Peer, check_peers, deal_ranks, join, local_address
from spark_dl.world import World

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def peers(hosts, **different):
    """A peer for each host, in the order of their partitions; `different` gives values by partition."""
    same = {
        "address": "10.0.0.1",
        "port": 0,
        "device": "cpu",
        "gpu": "cpu",
        "python": "3.11.7",
        "torch": "2.6.0",
        "spark_dl": "0.1.0",
    }
    found = [Peer(partition=i, host=host, pid=100 + i, **same) for i, host in enumerate(hosts)]
    for what, values in different.items():
        found = [dataclasses.replace(p, **{what: v}) for p, v in zip(found, values, strict=True)]
    return found


@pytest.mark.parametrize(("hosts", "ranks"), [
    ("a", [0]),
    ("aaa", [0, 1, 2]),
    ("abab", [0, 2, 1, 3]),
    ("abba", [0, 3, 1, 2]),
    ("cab", [0, 1, 2]),
    ("zayaz", [0, 4, 1, 3, 2]),
])  # fmt: skip
def test_ranks_of_a_host_lie_together_and_rank_0_is_partition_0(hosts, ranks):
    assert deal_ranks(peers(hosts)) == ranks
    assert deal_ranks(peers(hosts)[::-1]) == ranks  # whatever the order in which they came


def test_peers_that_agree_pass():
    check_peers(peers("aabb"))
    devices = ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    check_peers(peers("aabb", device=devices, gpu=devices))
    check_peers(peers("aa", device=["cuda:0", "cuda:0"], gpu=["GPU 2", "GPU 3"]))  # each sees its own GPU alone


@pytest.mark.parametrize(("what", "values"), [
    ("python", ["3.11.7", "3.11.7", "3.10.1"]),
    ("torch", ["2.6.0", "2.7.0", "2.6.0"]),
    ("spark_dl", ["0.1.0", "0.1.0", "0.2.0"]),
])  # fmt: skip
def test_another_version_is_an_error_with_the_version_of_every_rank(what, values):
    with pytest.raises(RuntimeError, match=f"do not agree on {what}") as caught:
        check_peers(peers("aab", **{what: values}))
    for task, (host, value) in enumerate(zip("aab", values, strict=True)):
        assert f"task {task} on {host}: {value}" in str(caught.value)


def test_some_on_gpus_and_some_on_cpus_is_an_error():
    with pytest.raises(
        RuntimeError, match="do not agree on device_type: task 0 on a: cuda, task 1 on b: cpu; set launch.device"
    ):
        check_peers(peers("ab", device=["cuda:0", "cpu"]))


def test_one_gpu_for_two_ranks_is_an_error_that_names_both():
    with pytest.raises(RuntimeError, match=r"tasks 1 and 2 on b were both given cuda:0.*spark\.task\.resource\.gpu"):
        check_peers(peers("abb", device=["cuda:0"] * 3, gpu=["cuda:0"] * 3))


# A world of one


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
    assert events == [{"kind": "joined", "rank": 0}]


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


def test_half_an_environment_is_an_error(no_torchrun, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"MASTER_ADDR is not.*torchrun"), join(Launch()):
        pass


def test_a_host_without_an_address_is_an_error_that_names_it(monkeypatch):
    def refuse(*args, **kwargs):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    with pytest.raises(RuntimeError, match="host name 'worker-7' does not resolve"):
        local_address("worker-7")


def test_the_address_of_a_host_is_its_ipv4_address_where_it_has_one(monkeypatch):
    found = [(socket.AF_INET6, 1, 6, "", ("fe80::1", 0, 0, 0)), (socket.AF_INET, 1, 6, "", ("10.0.0.7", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found)
    assert local_address("worker-7") == "10.0.0.7"
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: found[:1])
    assert local_address("worker-7") == "fe80::1"


def test_a_rank_is_reached_by_the_interface_that_was_chosen_or_else_by_its_host_s_name(monkeypatch):
    world = World(0, 1, 0, 1, "worker-7", torch.device("cpu"), dist.HashStore())
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: [(socket.AF_INET, 1, 6, "", ("10.255.255.7", 0))])
    assert (world.address, world.interface) == ("10.255.255.7", None)  # no interface here has it
    world = dataclasses.replace(world, socket_interface="lo")
    assert (world.address, world.interface) == ("127.0.0.1", "lo")


# Devices

GPU_3 = {"gpu": SimpleNamespace(addresses=["3"])}


@pytest.mark.parametrize(("wanted", "resources"), [("cpu", {}), ("auto", {}), ("cpu", GPU_3)])
def test_a_task_without_a_gpu_or_that_wants_none_uses_the_cpu(wanted, resources):
    assert gpus_of_task(wanted, resources) == ()
    assert first(()) == torch.device("cpu")


def test_a_gpu_that_spark_did_not_give_is_an_error():
    with pytest.raises(RuntimeError, match="Spark gave this task no GPU"):
        gpus_of_task("cuda", {})


def test_a_gpu_that_torch_does_not_see_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"GPU 3, but torch .* finds no CUDA"):
        gpus_of_task("auto", GPU_3)


@pytest.mark.parametrize(("addresses", "visible", "expected"), [
    (["3"], None, [3]), (["3"], "3,2,1,0,4,5,6,7", [0]), (["2", "5"], None, [2, 5]),
])  # fmt: skip
def test_the_gpus_are_those_that_spark_gave(monkeypatch, addresses, visible, expected):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = gpus_of_task("auto", {"gpu": SimpleNamespace(addresses=addresses)})
    assert found == tuple(torch.device("cuda", index) for index in expected)
    assert first(found) == found[0]


A, B, MIG = "GPU-aaaa-1", "GPU-bbbb-2", "MIG-GPU-cc/1/0"


@pytest.mark.parametrize(("addresses", "visible", "count", "expected"), [
    (["0"], None, 1, [0]), (["3"], None, 8, [3]), (["2", "5"], None, 8, [2, 5]),  # all GPUs of the host are seen
    (["2"], "2,3", 2, [0]), (["3"], "2,3", 2, [1]), (["3", "2"], "2,3", 2, [1, 0]), (["0"], "1,0", 2, [1]),
    (["1"], " 3, 1 ,0", 3, [1]), (["3"], "2,3,99,1", 2, [1]),  # CUDA stops at a GPU that is not there
    (["3"], "3", 1, [0]), (["0"], "3", 1, [0]), (["3"], None, 1, [0]), (["2", "5"], None, 2, [0, 1]),  # only its own
    ([A], f"{B},{A}", 2, [1]), ([A], "GPU-bb,GPU-aa", 2, [1]), ([MIG], MIG, 1, [0]), ([MIG], None, 1, [0]),
    (["1"], f"{A},{B}", 2, [1]), ([A, B], None, 2, [0, 1]), ([A], "0", 1, [0]),
    (["3"], "", 8, [3]), (["3"], "0", 8, [3]),  # set when CUDA had started: the process sees all of them
])  # fmt: skip
def test_an_address_of_spark_becomes_the_index_that_torch_has_for_it(addresses, visible, count, expected):
    assert device_indices(addresses, visible, count) == expected


@pytest.mark.parametrize(("addresses", "visible", "count"), [
    (["0"], "2,3", 2), (["2", "1"], "2,3,4", 3), (["5"], None, 2), ([A], None, 8), ([MIG], f"{A},{B}", 2),
    (["2"], f"{A},{B}", 2), ([A], "0,1", 2), (["0", "1"], "3", 1),
])  # fmt: skip
def test_an_address_that_cannot_be_found_is_an_error_that_names_what_is_seen(addresses, visible, count):
    named = re.escape(f"{addresses}, and torch finds {count} with CUDA_VISIBLE_DEVICES={visible or '(not set)'};")
    with pytest.raises(RuntimeError, match=named):
        device_indices(addresses, visible, count)


@pytest.mark.parametrize(("visible", "count", "names"), [
    (None, 2, ["cuda:0", "cuda:1"]), ("2,3", 2, ["GPU 2", "GPU 3"]), (A, 1, [f"GPU {A}"]), ("", 2, ["cuda:0", "cuda:1"])
])  # fmt: skip
def test_processes_that_see_different_gpus_name_them_differently(visible, count, names):
    found = [name_on_host(torch.device("cuda", index), visible, count) for index in range(count)]
    assert found == names
    assert name_on_host(torch.device("cpu"), visible, count) == "cpu"


@pytest.mark.parametrize(("local_rank", "local_world_size", "expected"), [(0, 1, [0, 1, 2]), (0, 2, [0]), (2, 3, [2])])
def test_a_rank_that_is_alone_on_its_host_has_all_of_its_gpus(monkeypatch, local_rank, local_world_size, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    found = gpus_of_local_rank("auto", local_rank, local_world_size)
    assert found == tuple(torch.device("cuda", index) for index in expected)
    assert gpus_of_local_rank("cpu", local_rank, local_world_size) == ()
