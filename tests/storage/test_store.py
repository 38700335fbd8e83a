"""The store of shards by content, without Spark: who finds what, who may delete what."""

import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from spark_dl import Data, storage
from spark_dl.data.dataset.manifest import MANIFEST, read_shards
from spark_dl.data.store import store as store_module
from spark_dl.data.store.store import Lease, clean_store, find_or_write, reopen
from spark_dl.data.write.arrays import write_arrays
from tests.builders.another_user import let_others_in

KEY = "a" * 64
OTHER = "b" * 64


@pytest.fixture(params=["path", "s3"])
def folder(request, tmp_path, session_s3):
    return str(tmp_path / "store") if request.param == "path" else session_s3.url(f"store-{time.time_ns()}")


def write(url, rows=100):
    return write_arrays({"features": np.arange(rows), "label": np.arange(rows)}, url, Data())


def refuse(url):
    raise AssertionError("written although it was there")


def names(folder, key=KEY):
    return [n for n in storage.list_names(storage.join(folder, key)) if n != "leases"]


def leases(folder, key=KEY):
    return storage.list_names(storage.join(folder, key, "leases"))


def hold(folder, key=KEY, writer=write, trusted=()):
    return find_or_write(folder, key, writer, run="a test", trusted=trusted)


def test_what_was_written_is_found_again_with_its_age(folder, caplog):
    caplog.set_level(logging.INFO, "spark_dl")
    first, lease = hold(folder)
    lease.release()
    second, again = hold(folder, writer=refuse)
    again.release()
    assert first == second == read_shards(first.url)
    assert "shards found in the store, written" in caplog.text
    assert " s ago: " in caplog.text
    other, third = hold(folder, OTHER)
    third.release()
    assert other.url != first.url


def test_a_writer_that_fails_leaves_nothing(folder):
    def fail(url):
        write(url)
        raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        hold(folder, writer=fail)
    assert names(folder) == leases(folder) == []


@pytest.mark.sampled(1)
def test_who_commits_first_wins_and_the_other_uses_that(folder):
    inner = []

    def slow(url):
        inner.append(hold(folder))  # another run, which is through before this one
        if folder.startswith("s3"):
            time.sleep(1.1)  # S3 has whole seconds
        return write(url)

    found, lease = hold(folder, writer=slow)
    (first, other) = inner[0]
    assert found == first
    assert names(folder) == [storage.name(first.url)]
    lease.release()
    other.release()


def set_environ(environ):
    os.environ.update(environ)


def write_at_once(folder, start, index):
    start.wait(60)
    shards, lease = find_or_write(folder, KEY, write, run=f"writer {index}")
    assert len(read_shards(shards.url).shards) == 1
    lease.release()
    return shards.url


@pytest.mark.slow
def test_two_processes_that_write_the_same_lose_nothing(folder):
    context = multiprocessing.get_context("forkserver")
    environ = dict(os.environ)  # the server of forked processes may be older than the session's S3 keys
    with context.Manager() as manager, context.Pool(2, set_environ, [environ]) as pool:
        start = manager.Barrier(2)
        jobs = [pool.apply_async(write_at_once, (folder, start, i)) for i in range(2)]
        urls = [job.get(90) for job in jobs]
        pool.close()
        pool.join()
    # Both stay where each was the oldest when its writer looked: times are whole seconds on S3, and on a disk that of a
    # manifest's writing, before the rename by which others see it.
    assert len({*urls}) == len(names(folder))
    for url in urls:
        assert read_shards(url).rows == 100


def test_cleaning_keeps_what_is_held_and_what_is_young(folder):
    held, lease = hold(folder)
    _, released = hold(folder, OTHER)
    released.release()
    for days in (-1, float("nan")):
        with pytest.raises(ValueError, match="ttl_days: expected a number of at least 0"):
            clean_store(folder, ttl_days=days)
    assert clean_store(folder, ttl_days=1) == {"deleted": 0, "kept": 2, "denied": 0, "bytes": 0}
    time.sleep(1.1 if folder.startswith("s3") else 0.05)
    size = sum(f.size for f in storage.list_infos(storage.join(folder, OTHER, *names(folder, OTHER))))
    assert clean_store(folder, ttl_days=0) == {"deleted": 1, "kept": 1, "denied": 0, "bytes": size}
    assert read_shards(held.url) == held
    assert names(folder, OTHER) == leases(folder, OTHER) == []
    lease.release()
    time.sleep(0.05)
    assert clean_store(folder, ttl_days=0)["deleted"] == 1
    assert names(folder) == []
    assert clean_store(folder, ttl_days=0) == {"deleted": 0, "kept": 0, "denied": 0, "bytes": 0}


def test_a_use_counts_and_old_leases_are_tidied(folder, monkeypatch):
    for _ in range(3):
        hold(folder)[1].release()
    assert len(leases(folder)) == 3
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3 * 86400)
    hold(folder, writer=refuse)[1].release()
    monkeypatch.setattr(time, "time", lambda: real() + 5 * 86400)
    assert clean_store(folder, ttl_days=3)["kept"] == 1
    assert len(leases(folder)) == 1
    monkeypatch.setattr(time, "time", lambda: real() + 7 * 86400)
    assert clean_store(folder, ttl_days=3)["deleted"] == 1


def test_the_lease_of_a_process_that_died_holds_until_it_expires(folder, monkeypatch):
    _, lease = hold(folder)
    lease._stop.set()  # as if its process had been killed
    lease._thread.join()
    assert clean_store(folder, ttl_days=0)["kept"] == 1
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + store_module.LEASE_S + 5)
    assert clean_store(folder, ttl_days=0)["deleted"] == 1


@pytest.mark.sampled(1)
def test_a_lease_is_renewed(folder, monkeypatch):
    monkeypatch.setattr(store_module, "LEASE_S", 0.5)
    _, lease = hold(folder)
    end = time.monotonic() + 2
    while time.monotonic() < end:
        assert clean_store(folder, ttl_days=0)["deleted"] == 0
        time.sleep(0.1)
    lease.release()


def test_what_a_killed_writer_left_goes_when_it_is_old(folder, monkeypatch):
    shards = write(storage.join(folder, KEY, "0123456789ab"))
    storage.delete(storage.join(shards.url, MANIFEST))
    assert clean_store(folder, ttl_days=1000) == {"deleted": 0, "kept": 1, "denied": 0, "bytes": 0}
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + store_module.HALF_WRITTEN_S + 5)
    assert clean_store(folder, ttl_days=1000)["deleted"] == 1
    assert names(folder) == []


def test_a_dataset_that_is_removed_under_a_reader_keeps_its_files(folder):
    shards, lease = hold(folder)
    assert not store_module._remove(storage.dirname(shards.url), storage.name(shards.url))
    assert shards.shards[0].name in storage.list_names(shards.url)
    again, other = hold(folder)  # nobody else finds it
    assert again.url != shards.url
    other.release()
    lease.release()


def test_a_stored_dataset_that_is_not_whole_is_an_error_that_says_what_to_delete_and_holds_no_lease(folder):
    shards, lease = hold(folder)
    lease.release()
    storage.delete(storage.join(shards.url, shards.shards[0].name))
    with pytest.raises(
        ValueError, match=rf"is incomplete: .* in the store: delete the folder {re.escape(shards.url)}, and run again"
    ):
        hold(folder)
    assert not [thread for thread in threading.enumerate() if thread.name == "spark_dl lease"]
    assert clean_store(folder, ttl_days=0)["deleted"] == 1


def test_a_resumed_run_opens_what_it_used_or_says_that_it_is_gone(folder):
    shards, lease = hold(folder)
    lease.release()
    found, again = reopen(shards.url, run="resumed")
    again.release()
    assert found == shards
    storage.delete(storage.join(shards.url, MANIFEST))
    with pytest.raises(ValueError, match=r"no longer in the store: "):
        reopen(shards.url, run="resumed")


def test_folders_of_others_in_the_store_are_left_alone(folder):
    storage.write_bytes(storage.join(folder, "mine", "0123456789ab", "x"), b"1")
    storage.write_bytes(storage.join(folder, KEY, "mine", "x"), b"1")
    clean_store(folder, ttl_days=0)
    assert storage.exists(storage.join(folder, "mine", "0123456789ab", "x"))
    assert storage.exists(storage.join(folder, KEY, "mine", "x"))


def test_a_lease_that_cannot_be_read_holds(folder):
    shards, lease = hold(folder)
    lease.drop()
    broken = storage.join(folder, KEY, "leases", f"{storage.name(shards.url)}.x.json")
    storage.write_bytes(broken, b"{")
    assert clean_store(folder, ttl_days=0)["kept"] == 1


def test_a_lease_says_whose_it_is(folder):
    lease = Lease(storage.join(folder, KEY), "0123456789ab", "runs/1")
    (name,) = leases(folder)
    content = storage.read_bytes(storage.join(folder, KEY, "leases", name)).decode()
    lease.drop()
    assert all(word in content for word in ('"host"', '"pid"', '"run": "runs/1"', '"expires"'))
    assert leases(folder) == []


NOBODY = """
import logging, os, sys
from spark_dl.data.store import store
logging.basicConfig()
os.umask(0o022)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
if sys.argv[2] == "clean":
    print(sorted(store.clean_store(sys.argv[1], ttl_days=0).items()))
else:
    print(store.find_or_write(sys.argv[1], sys.argv[2], None, run="of nobody", trusted=sys.argv[3:]))
"""


def as_nobody(tmp_path, *args):
    let_others_in(tmp_path)
    command = [sys.executable, "-c", NOBODY, str(tmp_path / "store"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def open_to_read(folder):
    for path, _, files in os.walk(folder):
        for name in (path, *(os.path.join(path, file) for file in files)):
            os.chmod(name, 0o755)


@pytest.mark.slow
@pytest.mark.parametrize(("what", "is_open"), [("write the lease", True), ("read", False)])
def test_another_user_who_may_not_use_the_store_is_told_what_to_change(tmp_path, what, is_open):
    folder = str(tmp_path / "store")
    hold(folder)[1].release()
    if is_open:
        open_to_read(folder)
    done = as_nobody(tmp_path, KEY)
    assert done.returncode == 1
    said = rf"NoLeaseError: shards.store: cannot {what} .*ermission denied.*group-writable folder with setgid"
    assert re.search(said, done.stderr.splitlines()[-1])


@pytest.mark.parametrize("trusted", [("root",), ("*",)])
def test_S13_users_of_a_group_share_a_store_with_the_set_group_id_bit(tmp_path, trusted):
    if os.geteuid() != 0:
        pytest.skip("only root can start a process of another user")
    store_folder = tmp_path / "store"
    store_folder.mkdir()
    os.chown(store_folder, -1, 65534)
    os.chmod(store_folder, 0o3770)
    umask = os.umask(0o077)
    try:
        held = hold(str(store_folder), trusted=trusted)
    finally:
        os.umask(umask)
    done = as_nobody(tmp_path, KEY, *trusted)
    assert done.returncode == 0, done.stderr
    assert names(str(store_folder)) == [held[1].name]
    assert "shards found in the store" in done.stderr or names(str(store_folder))[0] in done.stdout
    held[1].release()
    modes = {path: os.stat(path).st_mode & 0o7777 for path, _, _ in os.walk(store_folder)}
    own = modes.pop(held[0].url)
    assert own == (0o3770 if "*" in trusted else 0o3750)
    assert {*modes.values()} == {0o3770}
    assert os.stat(f"{held[0].url}/_manifest.json").st_mode & 0o777 == (0o660 if "*" in trusted else 0o640)


@pytest.fixture
def planted(tmp_path):
    """A store that a group shares, in which another user has written other rows under the key, a long time ago."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    folder = str(tmp_path / "store")
    theirs = f"{folder}/{KEY}/abcdefabcdef"
    write_arrays({"x": np.arange(7)}, theirs, Data())
    os.utime(f"{theirs}/_manifest.json", (1, 1))
    for path, _, files in os.walk(folder):
        for name in (path, *(os.path.join(path, file) for file in files)):
            os.chown(name, 65534, 65534)
    os.chmod(f"{folder}/{KEY}", 0o777)
    return folder


def test_S24_rows_that_another_user_has_put_under_a_key_are_not_used(planted, caplog):
    theirs = f"{planted}/{KEY}/abcdefabcdef"
    for _ in range(2):
        shards, lease = hold(planted)
        assert (shards.rows, shards.url == theirs) == (100, False)
        lease.release()
    assert re.search(f"{theirs} are not used: .* was written by the user nobody; .*trusted_writers", caplog.text)
    assert len(names(planted)) == 2  # ours was found the second time
    with pytest.raises(ValueError, match=r"written by another user.*set shards\.trusted_writers"):
        reopen(theirs, run="resumed")


@pytest.mark.parametrize("trusted", [("nobody",), ("65534",), ("*",)])
def test_S24_rows_of_a_user_who_is_trusted_are_used(planted, trusted):
    shards, lease = hold(planted, trusted=trusted)
    assert (shards.rows, shards.url) == (7, f"{planted}/{KEY}/abcdefabcdef")
    lease.release()
    reopen(shards.url, run="resumed", trusted=trusted)[1].release()


@pytest.mark.parametrize("name", ["", "_manifest.json"])
def test_S24_own_rows_that_others_can_change_are_not_used(tmp_path, caplog, name):
    folder = str(tmp_path / "store")
    mine = hold(folder)
    mine[1].release()
    os.chmod(os.path.join(mine[0].url, name), 0o770)
    again = hold(folder)
    again[1].release()
    assert again[0].url != mine[0].url
    assert "can be changed by other users (mode " in caplog.text


def test_S24_users_that_cannot_be_known_are_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"shards.trusted_writers: expected users that .* knows.*'no such user'"):
        hold(str(tmp_path), trusted=("no such user",))
    with pytest.raises(ValueError, match=r"shards.trusted_writers: expected nothing for s3://a/b, as an object store"):
        hold("s3://a/b", trusted=("nobody",))


@pytest.mark.slow
def test_another_user_cleans_what_he_may_and_counts_the_rest(tmp_path):
    folder = str(tmp_path / "store")
    for key in (KEY, OTHER):
        hold(folder, key)[1].release()
    open_to_read(folder)
    allowed = [folder, *(path for path, _, _ in os.walk(f"{folder}/{OTHER}"))]
    for path in allowed:
        os.chmod(path, 0o777)
    time.sleep(0.05)
    done = as_nobody(tmp_path, "clean")
    assert done.returncode == 0, done.stderr
    assert "('deleted', 1), ('denied', 1), ('kept', 0)]" in done.stdout
    assert re.search(rf"this user cannot delete \S+/{names(folder)[0]}: ", done.stderr)
    assert read_shards(storage.join(folder, KEY, names(folder)[0])).rows == 100
    assert names(folder, OTHER) == []


def test_a_store_that_does_not_exist_cannot_be_cleaned(folder):
    with pytest.raises(ValueError, match="shards.store: found nothing at .*, expected a store"):
        clean_store(folder, ttl_days=0)
