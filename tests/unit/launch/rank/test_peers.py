"""What follows from what the ranks tell each other: who becomes which rank, who does not fit together, the backend."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist

from spark_dl import Launch
from spark_dl.launch.rank import gpus
from spark_dl.launch.rank.peers import (
    TaskRecord,
    VersionError,
    backend_of,
    check_peers,
    check_versions,
    child_env,
    deal_ranks,
    describe,
    from_json,
    sharing,
    versions,
)


def peers(hosts, **different):
    """A peer for each host, in the order of their partitions; `different` gives values by partition."""
    same = {"address": "10.0.0.1", "python": "3.11.7", "torch": "2.6.0", "spark_dl": "0.1.0"}
    found = [
        TaskRecord(partition=i, host=host, executor=f"{host}:7", pid=100 + i, **same) for i, host in enumerate(hosts)
    ]
    for what, values in different.items():
        found = [dataclasses.replace(p, **{what: v}) for p, v in zip(found, values, strict=True)]
    return found


def on_gpus(hosts, identities, **different):
    """Each of them on its first device, with a GPU of this name; a letter is the end of a UUID."""
    named = [tuple(f"GPU-{name}" if name.isalpha() else f"GPU {name}" for name in own) for own in identities]
    return peers(hosts, **{"device": ["cuda:0"] * len(hosts), "gpus": named, "names": identities, **different})


@pytest.fixture
def nccl(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


@pytest.mark.parametrize(("hosts", "ranks"), [
    ("a", [0]),
    ("aaa", [0, 1, 2]),
    ("abab", [0, 2, 1, 3]),
    ("abba", [0, 3, 1, 2]),
    ("cab", [0, 1, 2]),
    ("zayaz", [0, 4, 1, 3, 2]),
])  # fmt: skip
def test_ranks_of_a_host_lie_together(hosts, ranks):
    assert deal_ranks(peers(hosts)) == ranks
    assert deal_ranks(peers(hosts)[::-1]) == ranks  # whatever the order in which they came


@pytest.mark.parametrize(("hosts", "devices", "sees", "ranks"), [
    ("aaa", "201", "xxx", [1, 2, 0]),  # the rank with GPU n is local rank n
    ("abab", "1100", "xxxx", [2, 0, 3, 1]),
    ("aaaa", "0000", "pqrs", [0, 1, 2, 3]),  # each executor sees its own GPU alone
    ("aaaa", "1100", "pqpq", [2, 0, 3, 1]),
])  # fmt: skip
def test_ranks_of_a_host_are_in_the_order_of_the_gpus_that_they_see(hosts, devices, sees, ranks):
    assert deal_ranks(peers(hosts, device=[f"cuda:{d}" for d in devices], sees=list(sees))) == ranks


def test_peers_that_agree_pass():
    check_peers(peers("aabb"), Launch())
    check_peers(on_gpus("aabb", ["0", "1", "0", "1"]), Launch())
    check_peers(on_gpus("aabb", ["A", "B", "C", "D"]), Launch())
    check_peers(on_gpus("ab", ["01", "01"]), Launch())


DRIVER = {"python": "3.11.7", "spark_dl": "0.5.0", "torch": "2.13.0+cpu", "numpy": "2.2.0", "pyarrow": "19.0.0"}


@pytest.mark.parametrize(("own", "table"), [
    ({"torch": "2.10.1+cu126"}, "torch 2.10.1+cu126 there and 2.13.0+cpu on the driver"),
    ({"spark_dl": "0.4.0", "numpy": "1.26.4"},
     "spark_dl 0.4.0 there and 0.5.0 on the driver, numpy 1.26.4 there and 2.2.0 on the driver"),
])  # fmt: skip
def test_B19_other_versions_than_the_driver_s_are_an_error_with_all_that_differ(own, table):
    message = f"the Python of the executor on h has other versions than the driver: {table}; install the versions of"
    with pytest.raises(VersionError, match=f"^{re.escape(message)}"):
        check_versions(DRIVER, {**DRIVER, **own}, "h")
    assert not VersionError.is_retryable


@pytest.mark.parametrize("own", [
    {}, {"torch": "2.13.1+cu126"}, {"numpy": "1.26.4", "pyarrow": "14.0.2", "python": "3.11.9"},
])  # fmt: skip
def test_B19_versions_that_work_together_pass(own):
    check_versions(DRIVER, {**DRIVER, **own}, "h")
    assert versions().keys() == DRIVER.keys()


@pytest.mark.parametrize(("what", "values"), [
    ("python", ["3.11.7", "3.11.7", "3.10.1"]),
    ("torch", ["2.6.0", "2.7.0", "2.6.0"]),
    ("spark_dl", ["0.1.0", "0.1.0", "0.2.0"]),
])  # fmt: skip
def test_B19_another_version_is_an_error_with_the_version_of_every_rank(what, values):
    with pytest.raises(RuntimeError, match=f"do not agree on {what}") as caught:
        check_peers(peers("aab", **{what: values}), Launch())
    for task, (host, value) in enumerate(zip("aab", values, strict=True)):
        assert f"task {task} on {host}: {value}" in str(caught.value)


def test_B23_some_on_gpus_and_some_on_cpus_is_an_error():
    with pytest.raises(
        RuntimeError, match="do not agree on device_type: task 0 on a: cuda, task 1 on b: cpu; set launch.device"
    ):
        check_peers(peers("ab", device=["cuda:0", "cpu"]), Launch())


EXECUTORS = ["a:1", "b:2", "b:3"]


@pytest.mark.parametrize(("hosts", "identities", "named"), [
    ("abb", ["0", "0", "0"], r"task 1 on b and task 2 on b have the same GPU, GPU 0"),
    ("abb", ["A", "B", "B"], r"task 1 on b and task 2 on b have the same GPU, GPU-B"),
    ("abc", ["A", "B", "A"], r"task 0 on a and task 2 on c have the same GPU, GPU-A"),  # containers on one host
    ("abb", ["AB", "CD", "DE"], r"task 1 on b and task 2 on b have the same GPU, GPU-D"),  # not their first ones
])  # fmt: skip
def test_B23_one_gpu_in_two_executors_is_an_error_that_names_both(hosts, identities, named):
    found = on_gpus(hosts, identities, executor=EXECUTORS)
    with pytest.raises(RuntimeError, match=rf"{named}, in two executors; .*discoveryScript.*launch\.gpus_per_rank"):
        check_peers(found, Launch())
    check_peers(found, Launch(gpus_per_rank=0.5))  # the user's choice
    with pytest.raises(RuntimeError, match=named):
        check_peers(found, Launch(gpus_per_rank=1))


def test_two_tasks_of_an_executor_have_one_gpu_only_if_spark_shares_it(nccl):
    found = on_gpus("aa", ["A", "A"])
    check_peers(found, Launch())
    assert [(a.partition, b.partition, gpu) for a, b, gpu in sharing(found)] == [(0, 1, "GPU-A")]
    assert backend_of(found) == "gloo"


@pytest.mark.parametrize(("found", "backend"), [
    (peers("ab"), "gloo"),
    (on_gpus("a", ["A"]), "nccl"),
    (on_gpus("ab", ["A", "B"]), "nccl"),
    (on_gpus("ab", ["0", "0"]), "nccl"),  # the same number on two hosts
    (on_gpus("aab", ["A", "B", "B"]), "gloo"),
    (on_gpus("aa", ["A", "B"], is_slice=[True, True]), "gloo"),  # may be parts of one GPU
    (on_gpus("ab", ["A", "B"], is_slice=[True, True]), "nccl"),
], ids=str)  # fmt: skip
def test_B24_nccl_is_used_where_each_rank_has_a_gpu_of_its_own(nccl, found, backend):
    assert backend_of(found) == backend


def test_B24_without_nccl_gpus_use_gloo(monkeypatch):
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert backend_of(on_gpus("ab", ["A", "B"])) == "gloo"


@pytest.mark.parametrize(("identities", "visible"), [
    (["A", "B", "C"], ["A,B,C"] * 3),
    (["AB", "CD"], ["A,C,B,D"] * 2),  # LOCAL_RANK is the index of the first of them
    (["ABC", "D"], ["A,D,B,C"] * 2),
    (["A", "A"], ["A", "A"]),  # shared: CUDA does not take a name twice
    (["A", "A", "B"], ["A", "A", "B"]),
    ([(), ()], ["", ""]),  # ranks on the CPU see no GPU
])  # fmt: skip
def test_in_a_child_process_the_gpu_of_a_local_rank_has_its_number(identities, visible):
    local = peers("a" * len(identities), names=[tuple(own) for own in identities])
    assert [child_env(p, local).get("CUDA_VISIBLE_DEVICES") for p in local] == visible


SEEN = gpus.Seen(None, ("GPU-A", "GPU-B", "GPU-C"))


@pytest.mark.parametrize(("seen", "indices", "addresses", "expected"), [
    (SEEN, [1, 2], ["1", "2"], (("GPU-B", "GPU-C"), ("GPU-B", "GPU-C"), "GPU-A,GPU-B,GPU-C")),
    (gpus.Seen("2,3", ("", "")), [1], ["3"], (("GPU 3",), ("3",), "GPU 2,GPU 3")),  # torch without UUIDs
    (gpus.Seen(None, ("", "")), [1], [], (("cuda:1",), ("1",), "cuda:0,cuda:1")),
    (gpus.Seen("MIG-X", ("GPU-A",), True), [0], ["0"], (("MIG-X",), ("MIG-X",), "MIG-X")),
    (gpus.Seen(None, ("GPU-A",), True), [0], ["MIG-X"], (("MIG-X",), ("0",), "cuda:0")),  # not the whole GPU
], ids=str)  # fmt: skip
def test_a_peer_on_gpus_says_which_and_what_it_sees(monkeypatch, seen, indices, addresses, expected):
    monkeypatch.setattr(gpus, "see_gpus", lambda: seen)
    peer = describe(3, "a", "a:7", [torch.device("cuda", i) for i in indices], addresses)
    assert (peer.gpus, peer.names, peer.sees) == expected
    assert (peer.partition, peer.host, peer.executor) == (3, "a", "a:7")
    assert (peer.device, peer.device_type) == (f"cuda:{indices[0]}", "cuda")
    assert peer.is_slice == seen.are_slices
    assert from_json(peer.to_json()) == peer


def test_a_peer_on_a_cpu_does_not_ask_for_gpus(monkeypatch):
    monkeypatch.setattr(gpus, "see_gpus", lambda: pytest.fail("CUDA would start"))
    peer = describe(0, "a", "a:7", [], ["3"])
    assert (peer.device, peer.gpus, peer.names, peer.sees) == ("cpu", (), (), "")
    assert from_json(peer.to_json()) == peer
