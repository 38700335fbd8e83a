"""Files by path or URL: whole or not at all."""

import errno
import os
import pathlib
import socket
import stat

import pytest

from spark_dl import storage
from spark_dl.rundir.generations import create_exclusively
from spark_dl.storage import local_files

NAMES = ["plain", "two words", "größe-模型", "a#b", "100%", "a%20b", "what?", "semi;colon", "a&b=c", "[x]", "é+ü", "~"]


@pytest.fixture(params=["path", "url"])
def url_of(request):
    """A folder as a plain path, or as a file:// URL."""
    return str if request.param == "path" else pathlib.Path.as_uri


@pytest.mark.parametrize("name", NAMES)
def test_any_name_can_be_written_read_listed_and_deleted(tmp_path, url_of, name):
    folder = tmp_path / name
    url = storage.join(url_of(folder), "file.bin")
    assert not storage.exists(url)
    storage.write_bytes(url, b"content")
    assert (folder / "file.bin").read_bytes() == b"content"
    assert storage.exists(url)
    assert storage.read_bytes(url) == b"content"
    assert storage.list_names(url_of(folder)) == ["file.bin"]
    storage.delete(url)
    assert not storage.exists(url)
    assert storage.list_names(url_of(folder)) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_file_may_have_any_name_too(tmp_path, name):
    storage.write_bytes(storage.join(str(tmp_path), name), b"1")
    assert os.listdir(tmp_path) == storage.list_names(str(tmp_path)) == [name]


@pytest.mark.parametrize(("url", "names", "joined"), [
    ("", ("a",), "a"), ("a", ("b", "c"), "a/b/c"), ("/a/", ("b",), "/a/b"), ("s3://bucket", ("a",), "s3://bucket/a"),
    ("s3://bucket/a?region=x", ("b",), "s3://bucket/a/b?region=x"), ("s3://bucket", ("a b#1",), "s3://bucket/a%20b%231"),
])  # fmt: skip
def test_names_are_added_to_the_path_of_a_url(url, names, joined):
    assert storage.join(url, *names) == joined


def test_what_is_appended_without_a_buffer_is_in_the_file_at_once(tmp_path):
    with local_files.append(str(tmp_path / "log"), buffering=0) as file:
        file.write(b"a line\n")
        assert (tmp_path / "log").read_bytes() == b"a line\n"


@pytest.mark.parametrize("name", NAMES)
def test_absolute_is_a_path_that_another_process_understands(tmp_path, url_of, name, monkeypatch):
    assert storage.absolute(url_of(tmp_path / name)) == str(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert storage.absolute(name) == str(tmp_path / name)
    assert storage.absolute(f"{url_of(tmp_path / name)}/") == str(tmp_path / name)


def test_a_write_replaces_the_whole_file(tmp_path):
    path = str(tmp_path / "f")
    storage.write_bytes(path, b"long content")
    storage.write_bytes(path, b"short")
    assert storage.read_bytes(path) == b"short"
    storage.write_bytes(path, b"")
    assert storage.read_bytes(path) == b""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, step):
    path = tmp_path / "f"
    path.write_bytes(b"old")

    def fail(*args):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, fail)
        with pytest.raises(OSError, match="No space left"):
            storage.write_bytes(str(path), b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


def test_content_that_is_not_bytes_leaves_nothing(tmp_path):
    with pytest.raises(TypeError):
        storage.write_bytes(str(tmp_path / "f"), "text")
    assert os.listdir(tmp_path) == []


def test_the_content_is_durable_before_the_name_is(tmp_path, monkeypatch):
    calls = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    storage.write_bytes(str(tmp_path / "f"), b"1")
    assert calls == ["fsync", "replace", "fsync"]  # the content, its name, the folder


def test_names_are_sorted_and_of_files_and_folders(tmp_path):
    for name in ("b", "c/inner", "a"):
        storage.write_bytes(str(tmp_path / name), b"")
    assert storage.list_names(str(tmp_path)) == ["a", "b", "c"]
    assert storage.list_names(str(tmp_path / "nowhere")) == []


def test_a_folder_is_deleted_with_all_in_it_and_what_is_not_there_is_no_error(tmp_path):
    storage.write_bytes(str(tmp_path / "d" / "e" / "f"), b"")
    storage.delete(str(tmp_path / "d"))
    storage.delete(str(tmp_path / "d"))
    assert os.listdir(tmp_path) == []


def test_of_a_folder_only_known_files_are_deleted_and_the_folder_with_the_last_one(tmp_path):
    folder, deleted = tmp_path / "d", []
    (folder / "known").mkdir(parents=True)
    for name in ("first", "known 1", "known 2", "other"):
        (folder / name).write_text(name)
    (folder / "known link").symlink_to(tmp_path)

    def is_known(name):
        deleted.append((folder / "first").exists())
        return name.startswith("known")

    assert sorted(storage.delete_known(str(folder), is_known, first="first")) == ["known", "other"]
    assert sorted(os.listdir(folder)) == ["known", "other"]
    assert not any(deleted)  # the first one marks the folder as partly deleted
    (folder / "known").rmdir()
    assert storage.delete_known(str(folder), lambda name: True, first="first") == []
    assert not folder.exists()
    assert storage.delete_known(str(folder), lambda name: True, first="first") == []
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match=r"link is a symbolic link to .*, which is not followed"):
        storage.delete_known(str(tmp_path / "link"), lambda name: True, first="first")


def test_a_missing_file_is_an_error_with_its_path(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"not here"):
        storage.read_bytes(str(tmp_path / "not here"))


def test_a_folder_in_the_place_of_a_file_is_an_error(tmp_path):
    storage.write_bytes(str(tmp_path / "f"), b"")
    with pytest.raises(OSError, match=r"f"):
        storage.write_bytes(str(tmp_path / "f" / "g"), b"")


def test_an_unknown_scheme_is_an_error_that_shows_the_url():
    with pytest.raises(ValueError, match="cannot open 'nosuch://bucket/x'"):
        storage.resolve("nosuch://bucket/x")


@pytest.mark.parametrize(("error", "expected"), [
    *((OSError(code, os.strerror(code)), RuntimeError) for code in (
        errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.EHOSTUNREACH,
    )),
    *((OSError(code, os.strerror(code)), ValueError) for code in (
        errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EROFS, errno.EEXIST,
    )),
    (OSError("AWS Error NETWORK_CONNECTION during HeadBucket operation: curlCode: 7"), RuntimeError),
    (OSError("An error occurred (NoSuchBucket): The specified bucket does not exist (HTTP 404)"), ValueError),
    (OSError("Bucket 'x' not found"), ValueError),
    (ValueError("an option"), ValueError),
])  # fmt: skip
def test_an_error_that_time_can_mend_is_a_runtime_error(error, expected):
    assert storage.error_class(error) is expected


def test_a_server_that_does_not_answer_is_no_wrong_url():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and does not listen
        url = f"ftp://127.0.0.1:{closed.getsockname()[1]}/x"
        with pytest.raises(RuntimeError, match=rf"cannot open '{url}': .*Connection refused"):
            storage.resolve(url)


@pytest.mark.parametrize(("url", "local"), [("/a/b", True), ("a", True), ("file:///a", True)])
def test_paths_and_file_urls_are_local(url, local):
    assert storage.is_local(url) is local


# Modes and links


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder):
    """The modes of a folder and of all in it, by path."""
    paths = [folder, *folder.rglob("*")]
    return {str(path.relative_to(folder.parent)): stat.S_IMODE(path.lstat().st_mode) for path in paths}


def write_all_ways(folder):
    storage.write_bytes(str(folder / "whole"), b"x")
    with storage.open_output(str(folder / "stream")) as file:
        file.write(b"x")
    storage.append(str(folder / "lines"), b"x")
    assert create_exclusively(str(folder / "new/one"), b"x")
    storage.make_folder(str(folder / "deep/er"))


def test_S13_files_are_for_their_user_alone_whatever_the_umask(tmp_path, no_umask):
    write_all_ways(tmp_path / "a" / "run")
    folders = {"a", "a/run", "a/run/new", "a/run/deep", "a/run/deep/er"}
    found = modes(tmp_path / "a")
    assert {name for name, mode in found.items() if mode == 0o700} == folders
    assert {found[name] for name in found.keys() - folders} == {0o600}
    assert len(found) == 9


@pytest.mark.parametrize(("shared", "folder", "file"), [(0o2770, 0o2770, 0o660), (0o2755, 0o2750, 0o640)])
def test_S13_a_folder_with_the_set_group_id_bit_is_shared_with_its_group(tmp_path, shared, folder, file):
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(shared)
    write_all_ways(tmp_path / "a" / "run")
    found = modes(tmp_path / "a" / "run")
    assert {m for m in found.values() if stat.S_ISGID & m} == {folder}
    assert {m for m in found.values() if not stat.S_ISGID & m} == {file}


def test_S13_a_planted_link_is_replaced_or_refused_and_never_followed(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    for name in ("whole", "stream", "lines", "new", "twin"):
        if name != "twin":
            (tmp_path / name).symlink_to(target)
    storage.write_bytes(str(tmp_path / "whole"), b"ours")
    with storage.open_output(str(tmp_path / "stream")) as file:
        file.write(b"ours")
    with pytest.raises(OSError, match="lines"):
        storage.append(str(tmp_path / "lines"), b"ours")
    assert not create_exclusively(str(tmp_path / "new"), b"ours")
    for name in ("whole", "stream"):
        assert (tmp_path / name).read_bytes() == b"ours"
        assert not (tmp_path / name).is_symlink()
    storage.append(str(tmp_path / "twin"), b"our")
    storage.append(str(tmp_path / "twin"), b"s")
    assert (tmp_path / "twin").read_bytes() == b"ours"
    assert target.read_bytes() == b"theirs"


def test_S13_a_planted_pipe_keeps_nobody_waiting(tmp_path):
    os.mkfifo(tmp_path / "lines")
    with pytest.raises(OSError, match="lines"):
        storage.append(str(tmp_path / "lines"), b"ours")
    reader = os.open(tmp_path / "lines", os.O_RDONLY | os.O_NONBLOCK)  # so that it can be opened
    with pytest.raises(OSError, match="lines is not a file"):
        storage.append(str(tmp_path / "lines"), b"ours")
    assert os.read(reader, 9) == b""
    os.close(reader)


def test_a_file_that_could_not_be_written_is_named_and_what_was_there_stays(tmp_path):
    path = str(tmp_path / "x")
    storage.write_bytes(path, b"before")

    def fail(error):
        with storage.writing(path) as file:
            file.write(b"a part")
            raise error

    for error, named in ((OSError(errno.ENOSPC, "no space"), path), (OSError(errno.EIO, "broken", "/other"), "/other")):
        with pytest.raises(OSError, match="no space|broken") as caught:
            fail(error)
        assert caught.value.filename == named
    with pytest.raises(ValueError, match="^of the caller$"):
        fail(ValueError("of the caller"))
    assert storage.read_bytes(path) == b"before"
    assert os.listdir(tmp_path) == ["x"]


def test_a_tilde_at_the_beginning_is_the_home_folder(tmp_path, monkeypatch):
    """Settings and notebooks have no shell that replaces it, and a folder of this name would be made."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert storage.absolute("~/runs/1") == str(tmp_path / "runs" / "1")
    assert storage.absolute("runs/~/1") == str(tmp_path / "runs" / "~" / "1")


def test_the_root_is_a_folder_of_its_own():
    assert storage.absolute("/") == storage.absolute("file:///") == "/"


def test_options_do_not_change_what_a_url_names():
    """A folder that other options reach is the same one, which `overwrite` must not delete."""
    plain = storage.identity("s3://bucket/run/data")
    assert plain == storage.identity("s3a://bucket/run/data/?region=eu-west-1&scheme=http")
    assert storage.identity("s3://bucket/run/data?region=a") == storage.identity("s3://bucket/run/data?region=b")
    assert len({plain, storage.identity("s3://bucket/run/date"), storage.identity("s3://other/run/data")}) == 3


@pytest.mark.parametrize(("url", "root"), [
    ("hdfs://host:8020/a/b?user=me", "hdfs://host:8020/?user=me"), ("viewfs://cluster/a", "viewfs://cluster/"),
    ("hdfs:///a", "hdfs:///"), ("s3://bucket/a?region=x", "s3://bucket?region=x"),
])  # fmt: skip
def test_a_file_system_is_opened_at_its_root(monkeypatch, url, root):
    """pyarrow refuses a URL of HDFS without a path, and takes the path of other stores for a folder to begin in."""
    opened = []

    class Opens:
        @staticmethod
        def from_uri(of_root):
            opened.append(of_root)
            return object(), "/"

    monkeypatch.setattr(storage.fs, "FileSystem", Opens)
    storage._filesystem.cache_clear()
    storage.resolve(url)
    storage._filesystem.cache_clear()
    assert opened == [root]


def test_a_link_within_a_folder_of_a_run_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    assert storage.within(str(tmp_path / "run"), "a", "b") == str(tmp_path / "run" / "a" / "b")
    (tmp_path / "run" / "a").symlink_to(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}/run/a is a symbolic link to {tmp_path}, expected a file or fol"):
        storage.within(str(tmp_path / "run"), "a", "b")


def test_errors_of_local_files_and_of_missing_ones_are_not_changed(tmp_path):
    for url, error in ((str(tmp_path), OSError(5, "as it is")), ("s3://bucket/a", FileNotFoundError(2, "missing"))):
        with pytest.raises(OSError, match="as it is|missing") as caught, storage.explained(url):
            raise error
        assert caught.value is error
    with pytest.raises(OSError, match="s3://bucket/a"), storage.explained("s3://bucket/a"):
        raise OSError("no answer")


def test_a_name_that_fsspec_takes_for_a_pattern_is_not_deleted():
    for name in ("a*b", "a%3Fb", "a[b]"):
        storage.write_bytes(f"memory://host/patterns/{name}/x", b"1")
        with pytest.raises(ValueError, match=r"cannot delete memory://host/patterns/.*: fsspec would use"):
            storage.delete(f"memory://host/patterns/{name}/x")
        with pytest.raises(ValueError, match=r"cannot delete memory://host/patterns/.*: fsspec would use"):
            storage.delete_known(f"memory://host/patterns/{name}", lambda name: True, first="x")
        assert storage.read_bytes(f"memory://host/patterns/{name}/x") == b"1"
