"""One way of taking URLs apart, on every kind of filesystem."""

import os
import re
import subprocess
import sys

import pytest

from spark_dl import storage
from spark_dl.storage.credentials import check_no_credentials
from tests.unit.test_storage import NAMES


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_folder_and_a_file_works_everywhere(folder, name):
    inner = storage.join(folder, name)
    url = storage.join(inner, name)
    assert storage.dirname(url) == inner
    assert not storage.exists(url)
    storage.write_bytes(url, b"content")
    assert storage.exists(url)
    assert storage.exists(inner)
    assert storage.read_bytes(url) == b"content"
    assert storage.list_names(folder) == storage.list_names(inner) == [name]
    assert storage.read_bytes(storage.absolute(url)) == b"content"
    assert storage.absolute(storage.join(url, "")) == storage.absolute(url)
    storage.write_bytes(storage.join(folder, "other"), b"")
    if folder.startswith("memory") and name in ("what?", "[x]"):
        with pytest.raises(ValueError, match="in a name as a pattern"):
            storage.delete(inner)
        return
    storage.delete(inner)
    assert storage.list_names(folder) == ["other"]
    storage.delete(inner)


def test_a_file_is_replaced_read_at_random_and_missing_ones_are_errors(folder):
    url = storage.join(folder, "f")
    storage.write_bytes(url, b"long content")
    storage.write_bytes(url, b"0123456789")
    with storage.open_input(url) as file:
        assert (file.size(), file.read_at(3, 4)) == (10, b"456")
    assert storage.info(url).size == 10
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(storage.join(folder, "not here"))
    assert storage.list_names(storage.join(folder, "nowhere")) == []


@pytest.mark.parametrize(
    ("url", "joined", "parent"),
    [
        ("s3://b/a?region=x", "s3://b/a/n%20%23%3F?region=x", "s3://b/?region=x"),
        ("s3://b?region=x", "s3://b/n%20%23%3F?region=x", "s3://b?region=x"),
        ("s3a://b/a%20b/ä b", "s3://b/a%20b/%C3%A4%20b/n%20%23%3F", "s3://b/a%20b"),
        ("s3://b/a#b", "s3://b/a%23b/n%20%23%3F", "s3://b/"),
        ("file:///a", "file:///a/n%20%23%3F", "file:///"),
        ("file:/a/b", "file:///a/b/n%20%23%3F", "file:///a"),
        ("hdfs:/a/b", "hdfs:///a/b/n%20%23%3F", "hdfs:///a"),
        ("viewfs:/a b", "viewfs:///a%20b/n%20%23%3F", "viewfs:///"),
        ("/a/b", "/a/b/n #?", "/a"),
        ("a", "a/n #?", ""),
        ("abfss://c@account.dfs.core.windows.net/p", "abfss://c@account.dfs.core.windows.net/p/n%20%23%3F",
         "abfss://c@account.dfs.core.windows.net/"),
    ],
)  # fmt: skip
def test_names_are_put_before_the_options_and_encoded(url, joined, parent):
    assert storage.join(url, "n #?") == joined
    assert storage.dirname(url) == parent


@pytest.mark.parametrize(("url", "way"), [
    ("s3:/b/k", "expected s3://b/k"), ("S3A:/b", "expected S3A://b"),
    ("gs:/b", "expected gs://b"), ("abfss:/c@a/b", "expected abfss://c@a/b"), ("http:/h/p", "expected http://h/p"),
    ("dbfs:/data/x", "expected the path /dbfs/data/x"), ("new-fs.v1:/x", "expected new-fs.v1://x"),
])  # fmt: skip
@pytest.mark.parametrize("call", [
    storage.absolute, storage.join, storage.make_folder, storage.resolve, storage.exists, storage.is_local,
    lambda url: storage.write_bytes(storage.join(url, "f"), b""),
])  # fmt: skip
def test_a_url_with_one_slash_is_never_a_folder_here(tmp_path, monkeypatch, url, way, call):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"^cannot open .*: {re.escape(way)}.*; a folder of this name here is ./"):
        call(url)
    assert os.listdir(tmp_path) == []


def test_a_folder_with_a_colon_in_its_name_can_be_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage.write_bytes("./ab:/f", b"1")
    assert storage.read_bytes(storage.absolute("./ab:/f")) == b"1"


def test_the_cause_of_a_missing_libjvm_is_told_each_time(monkeypatch):
    """libhdfs tells it once, and then only that a prior attempt has failed."""
    program = (
        "from spark_dl import storage\n"
        "for url in ('hdfs:///x', 'hdfs://name:1/y'):\n"
        "    try: storage.resolve(url)\n"
        "    except Exception as error: print(str(error).partition(': ')[2])"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR")}
    env |= {"JAVA_HOME": "/nowhere", "LD_LIBRARY_PATH": "/nowhere"}
    out = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60, env=env).splitlines()
    assert len(out) == 2
    assert "Prior attempt" not in out[1]
    assert out[0] == out[1]


NAMES = ("apikey", "api_key", "auth", "passwd", "pass", "code", "jwt", "accessKey", "bearer", "Authorization",
         "X-Api-Key")  # fmt: skip


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:MARKER@bucket/x",
        "s3://bucket/x?secret_key=MARKER",
        "abfss://c@a.dfs.core.windows.net/x?client_secret=MARKER",
        "abfss://c@a.dfs.core.windows.net/x?sig=MARKER",
        "gs://bucket/x?access_token=MARKER&scheme=http",
        "s3://AKIA:MARK/MARKER@bucket/x",
        "s3a://AKIA:MARKER/7@bucket/x@y",
        "s3://AKIA:1234/MARKER@bucket/x",  # no port
        "gs://key:a?MARKER@bucket/x",
        "hdfs://user:MARKER/x@namenode:8020/x",
        "abfss://c@a:MARKER/7@a.dfs.core.windows.net/x",
        "https://ghp_MARKER@host/x",
        "https://MARKER@host/x",
        "sftp://glpat-MARKER@host/x",
        *(f"https://host/x?region=eu&{name}=MARKER" for name in NAMES),
        "abfss://c@a.dfs.core.windows.net/x?connection_string=AccountName=a;AccountKey=MARKER",
        "abfss://c@a.dfs.core.windows.net/x?conn=AccountName%3Da%3BAccountKey%3DMARKER",
        "https://host/x?to=hf_MARKER",
        "https://host/x?to=eyJMARKER.eyJMARKER.x",
    ],
)
def test_credentials_in_a_url_are_refused_and_not_repeated(url):
    for use in (storage.resolve, storage.read_bytes, storage.absolute, storage.list_names):
        with pytest.raises(ValueError, match="has credentials") as caught:
            use(url)
        assert "MARKER" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a@b",
        "s3://bucket/x:y@z",
        "s3://bucket/x:y@z?region=eu-central-1",
        "gs://bucket/user:name/a@b",
        "hdfs://namenode:8020/a@b:c",
        "hdfs://[::1]:8020/a@b",
        "hdfs://user@namenode:8020/a@b",
        "abfss://c@localhost:10000/a@b",
        "sftp://user@host/x",
        "s3://bucket/x?role_arn=arn:aws:iam::1:role/key-reader&session_name=keys&endpoint_override=token-host:9000",
        "s3://bucket/code/token?region=auth-1&tls_ca_file_path=/a/b",
        "/data/user:name@host/x",
        "file:///data/user:name@host/x",
    ],
)
def test_paths_may_have_the_signs_of_credentials(url):
    at = storage._parse(url)  # to resolve it would need a server
    check_no_credentials(at.scheme, at.host, at.path, at.options)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/x", "nosuch"),
        ("adl://store/x", "adlfs"),  # a package of fsspec's that is not installed here
        ("s3://bucket/x?no_such_option=1", "no_such_option"),
        ("file:///x?scheme=http", "%3F"),
        ("file://host/x", "neither a host"),
    ],
)
def test_what_cannot_be_opened_is_an_error_that_shows_the_url_and_the_reason(url, message):
    with pytest.raises(ValueError, match="cannot open") as caught:
        storage.resolve(url)
    assert message in str(caught.value)
    assert url in str(caught.value)


def test_a_filesystem_is_made_once_for_a_bucket_and_anew_after_a_fork(s3):
    first, path = storage.resolve(s3.url("a/b"))
    assert path == "bucket/a/b"
    assert storage.resolve(s3.url("c"))[0] is first
    url = s3.url("forked")
    storage.write_bytes(url, b"1" * 100_000)
    pid = os.fork()
    if pid == 0:
        ok = storage.resolve(url)[0] is not first and storage.read_bytes(url) == b"1" * 100_000
        storage.write_bytes(s3.url("by the child"), b"2")
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert storage.read_bytes(s3.url("by the child")) == b"2"


def test_a_process_that_used_s3_ends(s3):
    code = f"from spark_dl import storage; storage.write_bytes({s3.url('ends')!r}, b'1')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
