"""Files that exactly one of several writers creates, on each kind of store."""

import contextlib
import http.client
import logging
import sys
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spark_dl import storage
from spark_dl.rundir import generations
from spark_dl.rundir.generations import create_exclusively
from tests.builders.s3 import BUCKET

TIMES = 10
WRITERS = 4


@pytest.fixture(autouse=True)
def _not_yet_warned():
    generations._warn_not_exclusive.cache_clear()


def at_once(write):
    """What each of several threads gets, all of which begin together."""
    start, found = threading.Barrier(WRITERS), []

    def run(i):
        start.wait(10)
        found.append(write(i))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_the_first_write_stays(folder, caplog):
    url = storage.join(folder, "generations", "000001")
    assert create_exclusively(url, b"first")
    assert not create_exclusively(url, b"second")
    assert storage.read_bytes(url) == b"first"
    assert not caplog.records


@pytest.mark.long
@pytest.mark.slow
def test_one_of_four_writers_wins_on_s3(s3):
    for _ in range(TIMES):
        url = s3.url(f"exclusive/{uuid.uuid4().hex}/a b#1")
        won = at_once(lambda i, url=url: (create_exclusively(url, b"%d" % i), i))
        winners = [i for wins, i in won if wins]
        assert len(won) == WRITERS
        assert len(winners) == 1
        assert storage.read_bytes(url) == b"%d" % winners[0]


@pytest.mark.slow
def test_four_drivers_on_s3_get_a_generation_each(s3):
    for _ in range(TIMES // 4):
        run_dir = s3.url(f"runs/{uuid.uuid4().hex}")
        assert sorted(at_once(lambda _, run_dir=run_dir: generations.start_generation(run_dir))) == [1, 2, 3, 4]
        assert generations.read_generation(run_dir) == 4


def test_without_boto3_it_is_written_and_the_weaker_guarantee_is_logged_once(s3, monkeypatch, caplog):
    for name in ("boto3", "boto3.session"):
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    run_dir = s3.url(f"runs/{uuid.uuid4().hex}")
    with caplog.at_level(logging.WARNING, "spark_dl"):
        assert [generations.start_generation(run_dir) for _ in range(3)] == [1, 2, 3]
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "s3:// cannot create a file exclusively" in caplog.text
    assert "install spark_dl[s3]" in caplog.text


class Forwards(BaseHTTPRequestHandler):
    """Passes everything on to a real store, without headers that `left_out` names."""

    left_out = ("expect",)

    def body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":  # as pyarrow sends what it writes
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def forward(self):
        connection = http.client.HTTPConnection(self.server.behind, timeout=20)
        body = self.body()
        headers = {k: v for k, v in self.headers.items() if k.lower() not in (*self.left_out, "transfer-encoding")}
        connection.request(self.command, self.path, body, headers)
        answer = connection.getresponse()
        content = answer.read()
        if self.loses_the_answer():
            self.close_connection = True
            connection.close()
            return
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        connection.close()

    def loses_the_answer(self):
        return False

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815 - names of the standard library

    def log_message(self, *args):
        pass


class DropsTheCondition(Forwards):
    """A store that ignores If-None-Match, as some do."""

    left_out = ("if-none-match", "expect")


class LosesAnAnswer(Forwards):
    """The answer to the first conditional write is lost on its way."""

    def loses_the_answer(self):
        is_lost = self.command == "PUT" and "If-None-Match" in self.headers and not self.server.lost
        self.server.lost |= is_lost
        return is_lost


class GivesNoAnswer(Forwards):
    """Closes the connection of each conditional write."""

    def loses_the_answer(self):
        return self.command == "PUT" and "If-None-Match" in self.headers


class Refuses(Forwards):
    """Answers conditional writes with a status and a code of S3, `server.status`."""

    def refuse(self):
        if "If-None-Match" not in self.headers:
            self.forward()
            return
        status, code = self.server.status
        content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
        self.body()
        self.server.refused += 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_PUT = refuse  # noqa: N815 - a name of the standard library


@contextlib.contextmanager
def store_behind(handler, s3):
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.behind, server.lost, server.refused = s3.address, False, 0
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"s3://{BUCKET}/{uuid.uuid4().hex}?endpoint_override=127.0.0.1:{server.server_port}&scheme=http", server
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


def test_a_store_that_ignores_the_condition_is_noticed(s3, caplog):
    with store_behind(DropsTheCondition, s3) as (url, _), caplog.at_level(logging.WARNING, "spark_dl"):
        assert create_exclusively(url, b"first")
    assert "the store ignores the condition" in caplog.text


def test_a_write_whose_answer_was_lost_is_repeated_and_its_own(s3):
    """The repeated write finds the file, which is that of the first one: a checkpoint that is committed."""
    with store_behind(LosesAnAnswer, s3) as (url, server):
        assert create_exclusively(url, b"mine")
        assert server.lost
        assert not create_exclusively(url, b"of another")
        assert storage.read_bytes(url) == b"mine"


def test_a_store_that_knows_no_condition_is_written_to_and_the_weaker_guarantee_is_logged(s3, caplog):
    with store_behind(Refuses, s3) as (url, server), caplog.at_level(logging.WARNING, "spark_dl"):
        server.status = 501, "NotImplemented"
        assert create_exclusively(url, b"first")
        assert storage.read_bytes(url) == b"first"
        assert not create_exclusively(url, b"second")
    assert "the store does not support conditional puts" in caplog.text


def test_conflicts_with_other_writers_are_tried_again_and_end_in_an_error(s3, monkeypatch):
    monkeypatch.setattr(generations, "_CONFLICT_WAIT_S", 0.01)
    with store_behind(Refuses, s3) as (url, server):
        server.status = 409, "ConditionalRequestConflict"
        with pytest.raises(OSError, match="other writers conflict with each of 5 conditional puts"):
            create_exclusively(url, b"mine")
        assert server.refused == 5
        assert not storage.exists(url)


def test_other_answers_are_errors_with_their_status(s3):
    with store_behind(Refuses, s3) as (url, server):
        server.status = 400, "BadDigest"
        with pytest.raises(OSError, match=r"BadDigest.*\(HTTP 400\)"):
            create_exclusively(url, b"mine")


@pytest.mark.slow
def test_a_store_that_gives_no_answer_is_an_error(s3):
    with store_behind(GivesNoAnswer, s3) as (url, _), pytest.raises(OSError, match="Connection was closed before we"):
        create_exclusively(url, b"mine")


def test_no_access_is_an_error_that_says_where_credentials_come_from(own_s3):
    url = own_s3.url("x")
    storage.make_folder(url)
    own_s3.check_credentials()
    with pytest.raises(PermissionError, match=r"no access to s3://bucket/x.*AWS_ACCESS_KEY_ID"):
        create_exclusively(url, b"1")


def test_a_store_without_exclusive_writes_gives_what_it_can(tmp_path, monkeypatch, caplog):
    """As HDFS, GCS and Azure through pyarrow: looked for, written, read back."""
    from fsspec.implementations.memory import MemoryFileSystem

    opened = MemoryFileSystem._open

    def only_plain_modes(self, path, mode="rb", **kwargs):
        if "x" in mode:
            raise NotImplementedError(f"mode {mode}")
        return opened(self, path, mode, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "_open", only_plain_modes)
    gives_what_it_can(caplog)


@pytest.mark.parametrize("refuses", [True, False])
def test_a_mode_that_is_refused_by_value_or_gives_nothing_is_no_exclusive_write(monkeypatch, caplog, refuses):
    """As implementations of fsspec that read the mode themselves, and its memory before 2024."""
    from fsspec.implementations.memory import MemoryFileSystem

    opened = MemoryFileSystem.open

    def of_two_modes(self, path, mode="rb", **kwargs):
        if "x" not in mode:
            return opened(self, path, mode, **kwargs)
        if refuses:
            raise ValueError(f"mode {mode}")
        return None

    monkeypatch.setattr(MemoryFileSystem, "open", of_two_modes)
    gives_what_it_can(caplog)


def gives_what_it_can(caplog):
    url = f"memory://host/{uuid.uuid4().hex}"
    with caplog.at_level(logging.WARNING, "spark_dl"):
        assert create_exclusively(url, b"first")
        assert not create_exclusively(url, b"second")
    assert storage.read_bytes(url) == b"first"
    assert caplog.text.count("memory:// cannot create a file exclusively") == 1
