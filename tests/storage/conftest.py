import uuid

import pytest

from tests.builders.s3 import S3Server, sessions_server

session_s3 = pytest.fixture(scope="session")(sessions_server)


@pytest.fixture
def s3(session_s3):
    return session_s3


@pytest.fixture
def own_s3(session_s3):
    """A server that a test may kill."""
    server = S3Server()
    yield server
    server.kill()


@pytest.fixture(params=["path", "file", "memory", "s3"])
def folder(request, tmp_path, session_s3):
    """The URL of a new folder on each kind of filesystem: plain path, file://, by fsspec, by pyarrow."""
    name = f"f{uuid.uuid4().hex}"
    if request.param == "s3":
        return session_s3.url(name)
    return {"path": str(tmp_path / name), "file": (tmp_path / name).as_uri(), "memory": f"memory://host/{name}"}[
        request.param
    ]
