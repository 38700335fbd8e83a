"""Files by path or URL: whole or not at all."""

import os
import pathlib

import pytest

from spark_dl import storage

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


@pytest.mark.parametrize(("url", "local"), [("/a/b", True), ("a", True), ("file:///a", True)])
def test_paths_and_file_urls_are_local(url, local):
    assert storage.is_local(url) is local
