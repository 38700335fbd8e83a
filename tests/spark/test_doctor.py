"""`diagnose` and jobs/doctor.py on real sessions: healthy ones, and ones in which a run would fail."""

import functools
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from unittest import mock

import pytest

import spark_dl
from spark_dl.doctor import ask, on_rank
from spark_dl.launch.barrier import run_barrier
from spark_dl.launch.rank.marked import MARK, mark_of
from spark_dl.launch.rank.task import local_folders
from spark_dl.storage.owner import temporary_prefix
from spark_dl.world import address_of
from tests.builders.leftovers import dead_owner, kill_watcher, only_reaper, sleeping
from tests.builders.models import small_config
from tests.builders.mounts import dead_mount
from tests.spark.test_jobs import PLAIN, run_job


@pytest.mark.long_in("connect", "local-cluster")
@pytest.mark.modes("local", "local-cluster", "connect")
def test_a_healthy_session_has_no_errors(spark, mode, tmp_path):
    start = time.monotonic()
    found = spark_dl.diagnose(small_config(3), run_dir=tmp_path / "run", spark=spark)
    assert time.monotonic() - start < 100, "it waited for something that is not there, as Spark does for 120 s"
    assert found.is_healthy, found.text
    checks = [finding.check for finding in found.findings]
    assert {"slots", "versions", "connections", "clocks", "devices", "disk", "run_dir"} <= {*checks}
    assert len(found.ranks) == 3
    for rank, row in enumerate(found.mbit_per_s):
        assert [rate is None for rate in row] == [other == rank for other in range(3)]
    assert list((tmp_path / "run").iterdir()) == [], "the probes are deleted"
    assert spark_dl.launch(int, num_ranks=3, spark=spark) == [0] * 3


@pytest.mark.modes("local")
def test_what_forbids_a_launch_is_found_as_an_error(spark, tmp_path):
    found = spark_dl.diagnose(small_config(9), spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert error.check == "slots and settings"
    assert "9 ranks need 9 task slots at the same time, and the cluster has 4" in error.found
    assert error.change.startswith("lower launch.num_ranks")
    assert "not checked, as no ranks answered" in found.text
    assert not found.is_healthy
    assert found.ranks == ()
    assert "leftovers" in [finding.check for finding in found.findings], "the driver looks at its own host"

    (tmp_path / "file").touch()
    found = spark_dl.diagnose(small_config(2), run_dir=tmp_path / "file" / "run", spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert (error.check, found.findings[0]) == ("run_dir", error)
    assert "cannot write to" in error.found


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_folder_that_does_not_answer_is_a_finding_and_no_hang(spark, tmp_path, monkeypatch):
    monkeypatch.setattr(ask, "FILES_S", 1.5)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    healthy = spark_dl.diagnose(small_config(2), run_dir=run_dir, spark=spark)
    assert healthy.is_healthy, healthy.text
    with dead_mount(run_dir):
        found = spark_dl.diagnose(small_config(2), run_dir=run_dir, spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert error.check == "run_dir"
    assert error.found == (f"{found.ranks[0]['host']} cannot write to {run_dir}: no answer within 1.5 s: a dead mount?")
    assert error.change.startswith("set run_dir to ")
    assert len(found.ranks) == 2, "the ranks tell the rest"
    assert found.seconds < healthy.seconds + 6
    end = time.monotonic() + 10  # the calls that waited go on
    while (left := list(run_dir.iterdir())) and time.monotonic() < end:
        time.sleep(0.05)
    assert left == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.modes("local")
def test_the_interface_that_ranks_use_is_measured(spark):
    (rank,) = spark_dl.diagnose(small_config(1), spark=spark).ranks
    others = [name for _, name in socket.if_nameindex() if address_of("localhost", name) != rank["address"]]
    if not others:
        pytest.skip("this host has one interface")
    with mock.patch.dict(spark.sparkContext.environment, {"GLOO_SOCKET_IFNAME": others[0]}):
        (changed,) = spark_dl.diagnose(small_config(1), spark=spark).ranks
    assert (changed["interface"], changed["address"]) == (others[0], address_of("localhost", others[0]))
    assert changed["address"] != rank["address"]


def examine_and_fail(probe, report):
    """A rank to which the driver does not answer, after it has written its file."""

    class NoAnswer:
        def __call__(self, event):
            return report(event)

        def exchange(self, message, timeout_s):
            end = time.monotonic() + 20
            while not os.path.exists(probe) and time.monotonic() < end:
                time.sleep(0.01)
            raise RuntimeError(f"no answer; written: {os.path.exists(probe)}")

    return on_rank.examine([probe], bytes(32), 20.0, 8.0, "cpu", reap=False, report=NoAnswer())


@pytest.mark.modes("local")
def test_a_rank_that_fails_deletes_its_file(spark, tmp_path):
    with pytest.raises(spark_dl.RankError, match="no answer; written: True"):
        run_barrier(
            spark, functools.partial(examine_and_fail, str(tmp_path / "probe-doctor-0")), launch=small_config(1).launch
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.modes("local")
def test_a_rank_that_stops_is_named_after_the_limit(spark, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    spark_dl.launch(int, num_ranks=2, spark=spark)
    healthy = spark_dl.diagnose(small_config(2), run_dir=run_dir, spark=spark)
    assert healthy.is_healthy, healthy.text
    assert healthy.seconds < 10, "the processes of the ranks are there, from a launch before"

    def stop(answers, event):
        take(answers, event)
        if (event["kind"], event["task"]) == ("started", 1):
            os.kill(event["pid"], signal.SIGSTOP)

    take = ask.Answers.take
    monkeypatch.setattr(ask.Answers, "take", stop)
    monkeypatch.setattr(ask, "LIMIT_S", 1.0)  # 9 s for two ranks
    found = spark_dl.diagnose(small_config(2), run_dir=run_dir, spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert error.check == "answers of the ranks"
    assert f"no answer within 9 s from rank 1 on {healthy.ranks[1]['host']}: a process that is stopped" in error.found
    assert error.change.startswith("look at the processes and the mounts")
    assert found.seconds < 18
    assert list(run_dir.iterdir()) == [], "the driver deletes the probes"
    assert spark_dl.launch(int, num_ranks=2, spark=spark) == [0] * 2


def leave(told):
    """On each rank a process with a session of its own, and a folder. Rank 1 loses its watcher, and is killed."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    folder = tempfile.mkdtemp(prefix=temporary_prefix(), dir=local_folders()[0])
    rank = os.environ["RANK"]
    with open(os.path.join(told, rank), "w") as file:
        json.dump([child.pid, folder, os.environ[MARK]], file)
    if rank == "1":
        kill_watcher(os.getpid())
        os.kill(os.getpid(), 9)


@pytest.mark.slow
@pytest.mark.modes("local")
def test_what_a_killed_rank_and_watcher_have_left_is_found_and_reaped(spark, tmp_path):
    def left(found):
        (finding,) = [each for each in found.findings if each.check == "leftovers"]
        (host,) = [rank["leftovers"] for rank in found.ranks if rank["leftovers"]]  # one of the ranks has looked
        return finding, {each["name"]: each["done"] for each in host["found"]}

    with only_reaper():
        with pytest.raises(spark_dl.RankError):
            spark_dl.launch(leave, str(tmp_path), num_ranks=2, spark=spark)
        pid, folder, mark = json.loads((tmp_path / "1").read_text())
        process = f"process {pid} (sleep 600)"
        finding, found = left(spark_dl.diagnose(small_config(3), spark=spark))
        assert {found[process], found[folder]} == {"found"}
        assert (finding.level, finding.change) == ("warning", "run spark-dl doctor --reap")
        assert mark_of(pid) == mark
        assert os.path.isdir(folder)

        diagnosis = spark_dl.diagnose(small_config(3), reap=True, spark=spark)
        finding, found = left(diagnosis)
        assert (found[process], found[folder]) == ("ended", "deleted")
        assert " of dead runs ended: " in finding.found
        assert diagnosis.seconds < 10
        assert mark_of(pid) is None
        assert not os.path.exists(folder)
        assert not {process, folder} & left(spark_dl.diagnose(small_config(3), spark=spark))[1].keys()


@pytest.mark.slow
def test_the_job_prints_a_table_and_json_and_ends_with_1_if_a_run_would_fail(tmp_path):
    master = ["--master", "local[2]", "--launch.num_ranks", "2"]
    out, err = run_job(*PLAIN, "jobs/doctor.py", *master, "--run_dir", str(tmp_path / "run"))
    assert json.loads(out.splitlines()[-1])["healthy"] is True
    assert "connections" in err
    out, err = run_job(*PLAIN, "jobs/doctor.py", *master[:3], "3", "--json", code=1)
    found = json.loads(out.splitlines()[-1])
    assert found["healthy"] is False
    assert "task slots" in found["findings"][0]["found"]
    assert "check " not in err


@pytest.mark.slow
@pytest.mark.long
def test_the_job_reaps():
    owner = dead_owner()
    folder = tempfile.mkdtemp(prefix=f"spark_dl-{owner}-")
    with only_reaper(), sleeping(owner) as process:
        _, err = run_job(*PLAIN, "jobs/doctor.py", "--master", "local[2]", "--launch.num_ranks", "2", "--reap")
        assert process.wait(10) == -15
    assert not os.path.exists(folder)
    assert "of dead runs ended" in err
    assert "of dead runs deleted" in err
