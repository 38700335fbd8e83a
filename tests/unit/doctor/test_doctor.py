"""From what the ranks tell to findings: each fault beside healthy ranks, about which nothing is said."""

import json
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from spark_dl import Launch, storage
from spark_dl.doctor import ask, doctor, leftovers, on_rank
from spark_dl.doctor.findings import ERROR, OK, WARNING, Diagnosis, Finding, sort
from spark_dl.launch.rank.peers import versions


def rank(host, **changed):
    return {
        "host": host, "address": f"10.0.0.{host[-1]}", "interface": "eth0", "pid": 7, **versions(),
        "executor": f"{host}:7", "gpus": [], "own_gpus": [], "disk_free_bytes": 50 << 30, "shm_free_bytes": 1 << 30,
        "open_files": 65536, "writes": "", "missing": [], "time": 100.0, "mbit_per_s": [900.0] * 3, "link_errors": {},
        **changed,
    }  # fmt: skip


def findings(*ranks):
    found = [f for check in (doctor._versions, doctor._links, doctor._clocks, doctor._hosts) for f in check(ranks)]
    return [*found, *doctor._devices(ranks, Launch()), *doctor._folder(ranks, "/runs/1")]


HEALTHY = [rank("host1"), rank("host2"), rank("host2")]


def test_nothing_is_wrong_with_healthy_ranks():
    found = findings(*HEALTHY)
    assert {f.level for f in found} == {OK}
    assert not any(f.change for f in found)
    assert [f.check for f in found] == [
        "versions", "connections", "clocks", "disk", "shared memory", "open files", "devices", "run_dir",
    ]  # fmt: skip
    assert found[-1].found == "all hosts (2) write to /runs/1 and see it"


@pytest.mark.parametrize(("changed", "check", "level", "words", "key"), [
    ({"torch": "2.0"}, "version of torch", ERROR, "2.0 on host3", "the same version of torch"),
    ({"numpy": "1.0"}, "version of numpy", WARNING, "1.0 on host3", "the same version of numpy"),
    ({"link_errors": {"0": "timed out"}}, "connection", ERROR, "host3 (10.0.0.3) cannot connect to host1 (10.0.0.1)",
     "GLOO_SOCKET_IFNAME"),
    ({"address_error": "host3 does not resolve"}, "address", ERROR, "does not resolve", "/etc/hosts"),
    ({"mbit_per_s": [100.0, 900.0, None]}, "connections", WARNING, "slow: host3 to host1 100", "slowest link"),
    ({"time": 107.5}, "clocks", WARNING, "7.5 s apart: host1 is behind host3", "NTP"),
    ({"gpus": ["H100 GPU-1"]}, "devices", WARNING, "host1: none; host2: none; host3: H100 GPU-1", "launch.device"),
    ({"disk_free_bytes": 1 << 29}, "disk", WARNING, "0.5 GiB free on host3", "spark.local.dir"),
    ({"shm_free_bytes": 0}, "shared memory", WARNING, "0.0 GiB free on host3", "--shm-size"),
    ({"open_files": 256}, "open files", WARNING, "256 allowed on host3", "ulimit"),
    ({"writes": "Read-only file system"}, "run_dir", ERROR, "host3 cannot write to /runs/1: Read-only", "all hosts"),
    ({"missing": [0]}, "run_dir", ERROR, "/runs/1 on host3 is another folder than on host1", "the same path"),
])  # fmt: skip
def test_one_rank_that_differs_is_named_with_what_to_change(changed, check, level, words, key):
    found = [f for f in findings(rank("host1"), rank("host2"), rank("host3", **changed)) if f.level != OK]
    assert [(f.check, f.level) for f in found] == [(check, level)]
    assert words in found[0].found
    assert key in found[0].change


@pytest.mark.parametrize(("rates", "slow"), [
    ([[None, 900, 90], [880, None, 80], [85, 95, None]], "host1 to host3 90, host2 to host3 80, host3 to host1 85, "
     "host3 to host2 95"),  # 4 of 6 links
    ([[None, 900, 800], [880, None, 90], [850, 870, None]], "host2 to host3 90"),
    ([[None, 90, 80], [88, None, 85], [85, 95, None]], ""),
])  # fmt: skip
def test_the_slow_links_of_three_hosts_are_named(rates, slow):
    (found,) = doctor._links([rank(f"host{i + 1}", mbit_per_s=row) for i, row in enumerate(rates)])
    assert found.level == (WARNING if slow else OK)
    assert found.found.partition("; slow: ")[2] == slow


def gpu_rank(host, gpu, executor=""):
    return rank(host, gpus=[f"H100 {gpu}"], own_gpus=[gpu], executor=executor or f"{host}:{gpu}")


@pytest.mark.parametrize(("third", "launch", "shown", "level", "words", "key"), [
    (("host2", "GPU-3"), {}, "host2: H100 GPU-2, H100 GPU-3", OK, "", ""),
    (("host2", "GPU-2", "host2:7"), {}, "host2: H100 GPU-2", ERROR,
     "ranks 1 on host2 and 2 on host2 have GPU-2", "spark.executor.resource.gpu.discoveryScript"),
    (("host3", "GPU-2"), {}, "host3: H100 GPU-2", ERROR,  # two containers
     "ranks 1 on host2 and 2 on host3 have GPU-2", "launch.gpus_per_rank below 1"),
    (("host2", "GPU-2", "host2:GPU-2"), {}, "host2: H100 GPU-2", WARNING,
     "ranks 1 on host2 and 2 on host2 have GPU-2", "spark.task.resource.gpu.amount"),
    (("host2", "GPU-2", "host2:7"), {"gpus_per_rank": 0.5}, "host2: H100 GPU-2", OK, "", ""),
    (("host3", "cuda:0"), {}, "host3: H100 cuda:0", OK, "", ""),  # only names with a UUID are of more than one host
])  # fmt: skip
def test_all_gpus_of_a_host_are_shown_and_one_that_two_ranks_got_is_named(third, launch, shown, level, words, key):
    ranks = [gpu_rank("host1", "cuda:0"), gpu_rank("host2", "GPU-2"), gpu_rank(*third)]
    first, *shared = doctor._devices(ranks, Launch(**launch))
    assert (first.check, first.level) == ("devices", OK)
    assert shown in first.found.split("; ")
    assert [(f.check, f.level, f.found) for f in shared] == ([("shared GPUs", level, words)] if words else [])
    assert all(key in f.change for f in shared)


def test_a_gpu_that_torch_cannot_use_is_an_error_that_names_the_host():
    broken = rank("host2", gpu_error="Spark gave this task GPU 0, but torch finds no CUDA here; install torch for CUDA")
    error, _ = doctor._devices([gpu_rank("host1", "GPU-1"), broken], Launch())
    assert (error.level, error.change) == (ERROR, "install torch for CUDA")
    assert error.found == "host2: Spark gave this task GPU 0, but torch finds no CUDA here"


def test_a_rank_tells_the_gpus_that_spark_gave_it_or_else_those_that_it_sees(monkeypatch):
    spark = {"gpu": SimpleNamespace(addresses=["1"])}
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # set by what is called, and taken back here
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "finds no CUDA here" in on_rank._gpus("auto", spark)["gpu_error"]
    found = [SimpleNamespace(name="H100", uuid=f"GPU-{i}") for i in range(2)]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(found))
    monkeypatch.setattr(torch.cuda, "get_device_properties", found.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: found[index].name)
    assert on_rank._gpus("auto", spark) == {"gpus": ["H100 GPU-1"], "own_gpus": ["GPU-1"]}
    assert on_rank._gpus("auto", {}) == {"gpus": ["H100 GPU-0", "H100 GPU-1"], "own_gpus": []}
    assert on_rank._gpus("cpu", spark) == {"gpus": [], "own_gpus": []}


@pytest.mark.parametrize(("events", "late"), [
    ([], "rank 0 on an unknown host, rank 1 on an unknown host, rank 2 on an unknown host"),
    (["started 0", "started 2"], "rank 1 on an unknown host"),
    (["started 0", "started 1", "started 2", "waits 0", "waits 2"], "rank 1 on host1"),
    (["started 0", "started 1", "started 2", "waits 1"], "rank 0 on host0, rank 2 on host2"),
    (["started 0", "started 1", "started 2", "waits 0", "waits 1", "waits 2"],
     "rank 0 on host0, rank 1 on host1, rank 2 on host2"),
])  # fmt: skip
def test_the_ranks_for_which_the_others_wait_are_named(events, late):
    answers = ask.Answers(3)
    for kind, task in (event.split() for event in events):
        answers.take({"kind": kind, "task": int(task), "host": f"host{task}"})
    assert answers.missing() == late


def test_B19_a_version_that_only_the_driver_has_is_a_warning():
    (found,) = [f for f in findings(*(rank(f"host{i}", torch="2.0") for i in (1, 2, 3))) if f.level != OK]
    assert (found.check, found.level) == ("version of torch", WARNING)


def test_a_host_without_shared_memory_is_not_looked_at():
    assert "shared memory" not in {f.check for f in findings(*(rank("host1", shm_free_bytes=None) for _ in range(3)))}


def left(host, *found, is_complete=True):
    of_host = [{"name": name, "done": done} for name, done in found]
    return {"host": host, "leftovers": {"is_complete": is_complete, "found": of_host}}


PROCESS, FOLDER = "process 7 (sleep 600)", "/tmp/spark_dl-7-1-1-0123abcd-x"


@pytest.mark.parametrize(("hosts", "is_reaped", "level", "words", "change"), [
    ([left("host1"), left("host2")], False, OK, "none of dead runs on host1, host2", ""),
    ([left("host1", (PROCESS, "found"), (FOLDER, "found")), left("host2")], False, WARNING,
     f"host1: 2 of dead runs found: {PROCESS}, {FOLDER}", "run spark-dl doctor --reap"),
    ([left("host1", *[(f"{FOLDER}{i}", "found") for i in range(9)])], False, WARNING,
     f"host1: 9 of dead runs found: {FOLDER}0, {FOLDER}1, {FOLDER}2, ...", "run spark-dl doctor --reap"),
    ([left("host1", (PROCESS, "ended"), (FOLDER, "deleted"))], True, OK,
     f"host1: 1 of dead runs ended: {PROCESS}; host1: 1 of dead runs deleted: {FOLDER}", ""),
    ([left("host1", (PROCESS, "ended"), (FOLDER, "not deleted: why"))], True, WARNING,
     f"host1: 1 of dead runs ended: {PROCESS}; host1: 1 of dead runs not deleted: why: {FOLDER}",
     "run spark-dl doctor --reap again, or end and delete them yourself"),
    ([left("host1", is_complete=False)], True, WARNING,
     "host1: a folder or a process did not answer within 4 s",
     "look at the disks of spark.local.dir and the temporary folder of this host"),
])  # fmt: skip
def test_what_dead_runs_have_left_is_told_by_host(hosts, is_reaped, level, words, change):
    (found,) = doctor._leftovers(hosts, is_reaped=is_reaped)
    assert (found.check, found.level, found.found, found.change) == ("leftovers", level, words, change)


@pytest.mark.skipif(leftovers.place() is None, reason="owners are known by /proc")
def test_the_host_of_the_driver_is_looked_at_if_it_has_no_rank():
    own = {**rank("host1"), "place": leftovers.place(), **left("host1")}
    elsewhere = {**rank("host2"), "place": [1, "0123abcd", 2], **left("host2")}
    second = {**elsewhere, "leftovers": None}  # the first one of a host looks
    assert [each["host"] for each in doctor._looked_at([own, elsewhere, second], reap=False)] == ["host1", "host2"]
    driver = socket.gethostname()
    assert [each["host"] for each in doctor._looked_at([elsewhere, second], reap=False)] == ["host2", driver]
    assert [each["host"] for each in doctor._looked_at([], reap=False)] == [driver]


def test_nothing_is_said_of_leftovers_where_owners_are_not_known():
    assert list(doctor._leftovers([], is_reaped=True)) == []


def test_a_diagnosis_shows_errors_first_and_what_to_change():
    mixed = [Finding("a", OK, "fine"), Finding("b", WARNING, "slow", "set b"), Finding("c", ERROR, "<none>", "set c")]
    found = Diagnosis(sort(mixed))
    assert not found.is_healthy
    assert Diagnosis(tuple(mixed[:2])).is_healthy
    lines = found.text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["error", "warning", "ok"]
    assert lines[-2:] == ["- c: set c", "- b: set b"]
    assert "&lt;none&gt;" in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict()))["healthy"] is False


def test_the_probes_of_ranks_that_were_killed_while_they_wrote_are_deleted_and_nothing_else(tmp_path):
    killed = (
        "import os, sys\nfrom spark_dl import storage\n"
        "with storage.writing(sys.argv[1]) as file:\n"
        "    file.write(b'half')\n    file.flush()\n    os.kill(os.getpid(), 9)"
    )
    names = ["probe-doctor-ab-1", "probe-doctor-cd-1", "report.json"]
    for name in names[:2]:
        subprocess.run([sys.executable, "-c", killed, tmp_path / name], timeout=60, check=False)
    for name in ("probe-doctor-ab-0", "report.json"):
        storage.write_bytes(str(tmp_path / name), b"whole")
    assert len(list(tmp_path.glob("*.tmp-*"))) == 2
    ask.delete_probes(str(tmp_path), "probe-doctor-ab-")
    assert [path.name.split(".tmp-")[0] for path in sorted(tmp_path.iterdir())] == names[1:]
    ask.delete_probes(str(tmp_path / "none"), "probe-doctor-ab-")
    ask.delete_probes("", "probe-doctor-ab-")
