"""What dead ranks have left on a host, beside what those have that live: real processes, folders and owners."""

import dataclasses
import os
import time

import pytest

from spark_dl.doctor import leftovers
from spark_dl.storage.owner import temporary_prefix, this_process
from tests.builders.leftovers import Rank, dead_owner, only_reaper, sleeping

pytestmark = pytest.mark.skipif(this_process() is None, reason="owners are known by /proc")


@pytest.fixture(autouse=True)
def lock():
    with only_reaper():
        yield


@pytest.fixture(scope="module")
def dead():
    """The owner of what is left, and the name of a folder of it."""
    return dead_owner()


def folder_of(owner):
    return f"spark_dl-{owner}-a1b2c3d4"


def make(parent, name):
    (parent / name).mkdir(parents=True)
    (parent / name / "rows").touch()
    return parent / name


def done(found, *names):
    """What was done with these, in their order; None for what was not found."""
    wanted = [f"process {name} (" if isinstance(name, int) else str(name) for name in names]
    return [next((each["done"] for each in found["found"] if each["name"].startswith(w)), None) for w in wanted]


def test_processes_and_folders_of_a_dead_rank_are_ended_and_deleted_and_those_of_a_live_one_stay(tmp_path):
    alive = make(tmp_path, f"{temporary_prefix()}a1b2c3d4")
    with Rank(tmp_path) as rank, sleeping(this_process()) as healthy:
        left, others = [*rank.pids, rank.folder], [healthy.pid, alive]
        found = leftovers.look(reap=True, folders=[str(tmp_path)])
        assert done(found, *left, *others) == [None] * 5, "both live"
        rank.kill()
        assert rank.running() == sorted(rank.pids)

        found = leftovers.look(reap=False, folders=[str(tmp_path)])
        assert found["is_complete"]
        assert done(found, *left, *others) == ["found"] * 3 + [None] * 2
        assert f"process {rank.pids[0]} (sleep 600)" in [each["name"] for each in found["found"]]
        assert rank.running() == sorted(rank.pids), "nothing is changed without reap"
        assert os.listdir(rank.folder) == ["rows"]

        start = time.monotonic()
        found = leftovers.look(reap=True, folders=[str(tmp_path)])
        assert time.monotonic() - start < leftovers.LIMIT_S + 2
        assert done(found, *left, *others) == ["ended", "ended", "deleted", None, None]
        assert rank.running() == []
        assert not os.path.exists(rank.folder)
        assert healthy.poll() is None
        assert os.listdir(alive) == ["rows"]
        assert done(leftovers.look(reap=False, folders=[str(tmp_path)]), *left) == [None] * 3


def test_folders_are_found_in_those_of_other_executors_and_applications(tmp_path, dead):
    mine = tmp_path / "spark-1" / "executor-1" / "blockmgr-1"
    mine.mkdir(parents=True)
    places = [tmp_path, mine, tmp_path / "blockmgr-2", tmp_path / "spark-2" / "executor-7" / "blockmgr-3",
              tmp_path / "application_1_1" / "blockmgr-4"]  # fmt: skip
    left = [make(place, folder_of(dead)) for place in places]
    alive = [make(place, f"{temporary_prefix()}a1b2c3d4") for place in places]
    elsewhere = make(tmp_path / "data", folder_of(dead))
    found = leftovers.look(reap=True, folders=[str(mine)])
    assert done(found, *left) == ["deleted"] * len(left)
    assert not any(map(os.path.exists, left))
    assert all(map(os.path.exists, [*alive, elsewhere]))


@pytest.mark.parametrize("changed", [
    lambda dead: dataclasses.replace(dead, namespace=1),
    lambda dead: dataclasses.replace(dead, boot="0" * 8),
    lambda dead: this_process(),
], ids=["another container", "another host", "alive"])  # fmt: skip
def test_what_is_of_another_place_or_alive_is_left_alone(tmp_path, dead, changed):
    used_again = dataclasses.replace(this_process(), started=dead.started)
    left, kept = make(tmp_path, folder_of(used_again)), make(tmp_path, folder_of(changed(dead)))
    with sleeping(used_again) as ended, sleeping(changed(dead)) as running:
        found = leftovers.look(reap=True, folders=[str(tmp_path)])
        assert done(found, left, kept, ended.pid, running.pid) == ["deleted", None, "ended", None]
        assert running.poll() is None
        assert ended.wait(10) == -15
    assert os.listdir(kept) == ["rows"]


@pytest.mark.parametrize("name", ["spark_dl-abc", "spark_dl-12-34-0", "spark_dl-{0}", "spark_dl-{0}-", "x{0}-abc",
                                  "{0}-abc", "spark_dl-{0}-abc.d"])  # fmt: skip
def test_folders_with_other_names_are_left_alone(tmp_path, dead, name):
    kept = make(tmp_path, name.format(dead))
    assert done(leftovers.look(reap=True, folders=[str(tmp_path)]), kept) == [None]
    assert os.listdir(kept) == ["rows"]


def test_links_and_files_are_left_alone(tmp_path, dead):
    kept = make(tmp_path / "kept", folder_of(dead))
    below = tmp_path / "below"
    below.mkdir()
    (below / f"{folder_of(dead)}link").symlink_to(kept)
    (below / f"{folder_of(dead)}file").touch()
    (below / "blockmgr-1").symlink_to(tmp_path / "kept")
    assert done(leftovers.look(reap=True, folders=[str(below)]), tmp_path) == [None]
    assert os.listdir(kept) == ["rows"]
    assert len(os.listdir(below)) == 3


def test_what_is_of_another_user_is_left_alone(tmp_path, dead, monkeypatch):
    kept, user = make(tmp_path, folder_of(dead)), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with sleeping(dead) as process:
        assert done(leftovers.look(reap=True, folders=[str(tmp_path)]), kept, process.pid) == [None] * 2
        assert process.poll() is None
    assert os.listdir(kept) == ["rows"]


def test_a_session_that_a_dead_rank_has_started_does_not_end_itself(tmp_path, dead, monkeypatch):
    with sleeping(dead) as process:
        own = leftovers.marked.mark_of
        monkeypatch.setattr(leftovers.marked, "mark_of", lambda pid: own(process.pid if pid == "self" else pid))
        assert done(leftovers.look(reap=True, folders=[str(tmp_path)]), process.pid) == [None]
        assert process.poll() is None


def test_a_folder_that_cannot_be_deleted_is_told_with_the_reason(tmp_path, dead, monkeypatch):
    left = make(tmp_path, folder_of(dead))

    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(leftovers.shutil, "rmtree", refuse)  # root may delete everything
    found = leftovers.look(reap=True, folders=[str(tmp_path)])
    assert done(found, left) == [f"not deleted: [Errno 13] Permission denied: '{left}'"]


def test_a_disk_that_does_not_answer_is_told_in_time(tmp_path, dead, monkeypatch):
    monkeypatch.setattr(leftovers.shutil, "rmtree", lambda path: time.sleep(2))
    left, start = make(tmp_path, folder_of(dead)), time.monotonic()
    found = leftovers.look(reap=True, folders=[str(tmp_path)], limit_s=0.5)
    assert time.monotonic() - start < 1.5
    assert not found["is_complete"]
    assert done(found, left) == ["not ended or deleted within 4 s"]
