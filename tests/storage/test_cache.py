"""The cache of remote files: bounded, shared, whole, and safe against whatever happens to its processes."""

import contextlib
import fcntl
import hashlib
import multiprocessing
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest

from spark_dl import Shards, storage
from spark_dl.data.load.loader import ShardLoader
from spark_dl.data.store import cache as cache_module
from spark_dl.data.store.cache import DiskCache, build_cache
from tests.builders.models import small_config
from tests.storage.test_s3 import labels, write

MIB = 1 << 20


@pytest.fixture
def cache(tmp_path):
    return DiskCache(str(tmp_path / "cache"), 4 * MIB)


def put(s3, name, size=MIB, seed=0):
    content = random.Random(f"{name}{seed}").randbytes(size)
    storage.write_bytes(s3.url(name), content)
    return s3.url(name), content, {"sha256": hashlib.sha256(content).hexdigest(), "size": size}


def read(url, cache, **known):
    with cache.open_input(url, **known) as file:
        return file.read()


def lock_of(url, known):
    name = hashlib.sha256(f"{storage.absolute(url)}\n{known['sha256']}".encode()).hexdigest()
    return cache_module._lock_of(name)


def entries(cache):
    return sorted(n for n in os.listdir(cache.folder) if not n.startswith("lock-"))


def used_bytes(cache):
    return sum(os.lstat(os.path.join(cache.folder, n)).st_size for n in entries(cache))


@pytest.mark.parametrize("has_checksum", [True, False])
def test_a_file_is_fetched_once_and_kept_for_this_user_alone(s3, cache, monkeypatch, has_checksum):
    """Files of datasets that others wrote have no known checksum."""
    old = os.umask(0)
    try:
        url, content, known = put(s3, "once")
        known["sha256"] *= has_checksum
        assert read(url, cache, **known) == content
        monkeypatch.setattr(cache_module, "_download", None)
        if has_checksum:
            s3.client.delete_object(Bucket="bucket", Key="once")
        assert read(url, cache, **known) == content
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(cache.folder).st_mode) == 0o700
    modes = {stat.S_IMODE(os.stat(os.path.join(cache.folder, n)).st_mode) for n in os.listdir(cache.folder)}
    assert modes == {0o600}
    assert all(set(n) <= set("0123456789abcdef") and len(n) == 64 for n in entries(cache))


def test_the_least_recently_used_goes_and_the_bound_holds(s3, cache):
    files = [put(s3, f"lru-{i}") for i in range(6)]
    for url, content, known in files[:4]:
        assert read(url, cache, **known) == content
    first, *_, last = files
    read(first[0], cache, **first[2])  # used: the second is the oldest now
    read(last[0], cache, **last[2])
    assert used_bytes(cache) == 4 * MIB
    for i in (0, 2, 3, 5):
        s3.client.delete_object(Bucket="bucket", Key=f"lru-{i}")
        assert read(files[i][0], cache, **files[i][2]) == files[i][1]
    s3.client.delete_object(Bucket="bucket", Key="lru-1")
    with pytest.raises(FileNotFoundError):
        read(files[1][0], cache, **files[1][2])


def test_a_reader_keeps_what_it_has_open(s3, cache):
    url, content, known = put(s3, "open", 3 * MIB)
    with cache.open_input(url, **known) as file:
        for i in range(4):
            other, _, about = put(s3, f"other-{i}", 2 * MIB)
            read(other, cache, **about)
        s3.client.delete_object(Bucket="bucket", Key="open")
        assert len(entries(cache)) == 2
        assert file.read() == content


def test_what_is_larger_than_the_cache_and_what_is_local_is_read_where_it_is(s3, cache, tmp_path):
    url, content, known = put(s3, "large", 5 * MIB)
    assert read(url, cache, **known) == content
    (tmp_path / "f").write_bytes(b"1")
    assert read(str(tmp_path / "f"), cache, size=1) == b"1"
    assert not os.path.exists(cache.folder)


@pytest.mark.parametrize("damage", ["flip", "cut", "grow"])
def test_a_damaged_entry_is_found_and_fetched_again(s3, cache, damage, caplog):
    url, content, known = put(s3, f"damage-{damage}")
    read(url, cache, **known)
    path = os.path.join(cache.folder, *entries(cache))
    flipped = content[:99] + bytes([content[99] ^ 1]) + content[100:]
    with open(path, "wb") as file:
        file.write({"flip": flipped, "cut": content[:-1], "grow": content + b"x"}[damage])
    assert read(url, cache, **known) == content
    assert "is damaged and will be downloaded again" in caplog.text
    assert read(url, cache, **known) == content


@pytest.mark.parametrize("known", ["sha256", "size only"])
def test_a_truncated_or_changed_remote_file_is_an_error_and_leaves_nothing(s3, cache, known):
    url, content, about = put(s3, "changed")
    for other in (content[:-1], bytes(MIB)):
        storage.write_bytes(url, other)
        if known == "sha256":
            with pytest.raises(OSError, match="changed.* is damaged: found .* expected 1048576 bytes"):
                read(url, cache, **about)
            assert entries(cache) == []
        else:  # the files of others have no checksum: their new version is another entry
            assert read(url, cache) == other


def test_a_version_without_checksum_is_not_mistaken_for_another(s3, cache):
    url, content, _ = put(s3, "version")
    assert read(url, cache) == content
    end = time.time() + 1.1  # S3 has whole seconds
    while time.time() < end:
        time.sleep(0.1)
    url, new, _ = put(s3, "version", seed=1)
    assert read(url, cache) == new != content


def test_folders_that_are_made_are_not_open_to_others(s3, tmp_path):
    url, content, known = put(s3, "made")
    umask = os.umask(0)
    try:
        assert read(url, DiskCache(str(tmp_path / "a" / "b" / "cache"), 4 * MIB), **known) == content
    finally:
        os.umask(umask)
    modes = [stat.S_IMODE(os.stat(tmp_path / name).st_mode) for name in ("a", "a/b", "a/b/cache")]
    assert modes == [0o755, 0o755, 0o700]


@pytest.mark.parametrize("spoil", ["mode", "link", "file"])
def test_a_folder_that_others_can_reach_is_refused(s3, cache, tmp_path, spoil):
    url, _, known = put(s3, "refused")
    if spoil == "mode":
        os.mkdir(cache.folder)
        os.chmod(cache.folder, 0o770)
    elif spoil == "link":
        os.mkdir(tmp_path / "elsewhere", 0o700)
        os.symlink(tmp_path / "elsewhere", cache.folder)
    else:
        open(cache.folder, "w").close()
    with pytest.raises((ValueError, FileExistsError), match="cache"):
        read(url, cache, **known)
    assert spoil != "link" or os.listdir(tmp_path / "elsewhere") == []


def test_an_entry_that_goes_while_room_is_made_is_no_error(s3, cache, monkeypatch):
    files = [put(s3, f"going-{i}") for i in range(5)]
    for url, content, known in files[:4]:
        assert read(url, cache, **known) == content
    scan = cache_module._scan

    def scan_and_drop(folder, temporary):  # as another process does that finds an entry damaged
        found = scan(folder, temporary)
        os.unlink(min(found[0])[2])
        return found

    monkeypatch.setattr(cache_module, "_scan", scan_and_drop)
    url, content, known = files[4]
    assert read(url, cache, **known) == content
    assert len(entries(cache)) == 4


@pytest.mark.parametrize("has_checksum", [True, False])
def test_S13_links_that_were_planted_are_not_followed(s3, cache, tmp_path, has_checksum):
    url, content, known = put(s3, "planted")
    known["sha256"] *= has_checksum
    read(url, cache, **known)
    path = os.path.join(cache.folder, *entries(cache))
    (tmp_path / "target").write_bytes(content)
    os.unlink(path)
    os.symlink(tmp_path / "target", path)
    with pytest.raises(OSError, match="symbolic links"):
        read(url, cache, **known)


def used_bytes_now(cache):
    """As `used_bytes`, while other processes rename and drop files: by two listings that agree, or 0 for none such.

    A single listing can have a file by its old and its new name.
    """
    before = None
    for _ in range(20):
        found = {}
        for entry in os.scandir(cache.folder):
            with contextlib.suppress(FileNotFoundError):
                found[entry.name] = os.stat(entry.path, follow_symlinks=False).st_size
        if found == before:
            return sum(found.values())
        before = found
    return 0


@pytest.mark.slow
def test_many_processes_share_a_small_cache(s3, cache):
    files = [put(s3, f"many-{i}", 200_000 + i) for i in range(12)]
    about = [(url, known) for url, _, known in files]
    limit = 1_000_000
    small = DiskCache(cache.folder, limit)
    worst = 0
    with multiprocessing.get_context("forkserver").Pool(3) as pool:
        jobs = [pool.apply_async(read_all, (cache.folder, limit, about, seed, 40)) for seed in range(3)]
        end = time.monotonic() + 90
        while not all(job.ready() for job in jobs):
            assert time.monotonic() < end, "readers did not end"
            if os.path.isdir(cache.folder):
                worst = max(worst, used_bytes_now(small))
            time.sleep(0.002)
        assert [job.get() for job in jobs] == [40] * 3
        pool.close()
        pool.join()
    assert 0 < worst <= limit
    assert used_bytes(small) <= limit


def read_all(folder, limit, files, seed, repeats):
    order = random.Random(seed)
    for _ in range(repeats):
        url, known = order.choice(files)
        assert hashlib.sha256(read(url, DiskCache(folder, limit), **known)).hexdigest() == known["sha256"]
    return repeats


SLOW_READER = """
import sys, time
from spark_dl.data.store import cache
write = cache._write
def slow(file, chunk):
    write(file, chunk[:1000])
    print("writing", flush=True)
    time.sleep(60)
cache._write = slow
url, folder, limit, sha256, size = sys.argv[1:]
cache.DiskCache(folder, int(limit)).open_input(url, sha256=sha256, size=int(size))
"""


@pytest.mark.slow
def test_a_process_killed_in_a_download_leaves_nothing_for_long(s3, cache):
    url, content, known = put(s3, "killed", 3 * MIB)
    command = [sys.executable, "-c", SLOW_READER, url, cache.folder, str(cache.limit_bytes)]
    process = subprocess.Popen([*command, known["sha256"], str(known["size"])], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "writing\n"
        (left,) = entries(cache)
        assert ".tmp-" in left
        # Its room is taken, and it is alive: another file is read past the cache.
        for number in range(3):  # those few that have the same lock wait for each other
            other, other_content, about = put(s3, f"killed-other-{number}", 2 * MIB)
            if lock_of(other, about) != lock_of(url, known):
                break
        assert read(other, cache, **about) == other_content
        assert entries(cache) == [left]
        # Whoever wants the same file waits for it, and goes on at once when it is killed.
        found = []
        waiting = threading.Thread(target=lambda: found.append(read(url, cache, **known)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        waiting.join(20)
        assert found == [content]
    finally:
        process.kill()
        process.wait(10)
        process.stdout.close()
    assert len(entries(cache)) == 1
    assert left not in entries(cache)


def test_what_a_killed_process_wrote_of_the_same_file_takes_no_room_while_it_ends(s3, cache):
    """Its locks go one by one: that on the file's name may be gone while that on what it wrote is still held."""
    url, content, known = put(s3, "ending", 3 * MIB)
    assert read(url, cache, **known) == content
    (name,) = entries(cache)
    left = os.path.join(cache.folder, f"{name}.tmp-0a1b2c3d")
    os.rename(os.path.join(cache.folder, name), left)
    with open(left, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert read(url, cache, **known) == content
        assert entries(cache) == [name]


def test_a_download_that_stands_still_holds_up_nobody_for_long(s3, cache, monkeypatch):
    url, content, known = put(s3, "stuck")
    os.mkdir(cache.folder, 0o700)
    monkeypatch.setattr(cache_module, "_LOCK_WAIT_S", 0.1)
    monkeypatch.setattr(cache_module, "_try_lock", lambda descriptor: False)
    assert read(url, cache, **known) == content
    assert entries(cache) == []


def test_a_full_disk_is_an_error_that_names_the_setting(s3, cache, monkeypatch):
    url, _, known = put(s3, "full")

    class Full:
        def write(self, chunk):
            raise OSError(28, "No space left on device")

    real = cache_module._write
    monkeypatch.setattr(cache_module, "_write", lambda file, chunk: real(Full(), chunk))
    with pytest.raises(OSError, match=r"shards\.cache_dir.*No space left.*shards\.cache_mib"):
        read(url, cache, **known)
    assert entries(cache) == []


def test_the_loader_reads_through_it(s3, tmp_path):
    shards, _ = write(s3.url("cached-set"))
    expected = labels(shards)
    config = small_config(1, data={"cache_dir": str(tmp_path / "cache"), "cache_mib": 8})
    cache = build_cache(config.shards)

    def through():
        steps = [b.micro_batches[0] for b in ShardLoader(shards, config, rank=0, world_size=1).epoch(0)]
        return [n for s in steps for n in s["label"][s["weight"] > 0].tolist()]

    assert through() == expected
    assert len(entries(cache)) == len(shards.shards)
    for shard in shards.shards:
        s3.client.delete_object(Bucket="bucket", Key=f"cached-set/{shard.name}")
    assert through() == expected


@pytest.mark.parametrize(
    ("settings", "key"),
    [({"cache_mib": 8}, "cache_dir"), ({"cache_dir": "relative"}, "cache_dir"), ({"cache_mib": -1}, "cache_mib")],
)
def test_settings_that_do_not_fit_are_refused(settings, key):
    with pytest.raises(ValueError, match=rf"^shards\.{key}: "):
        Shards(**settings)
    assert build_cache(Shards()) is None
    assert build_cache(Shards(cache_dir="/a", cache_mib=3)) == DiskCache("/a", 3 * MIB)
