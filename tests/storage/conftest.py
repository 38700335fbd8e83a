import pathlib
import shutil
import subprocess
import uuid

import pytest

from tests.builders.s3 import S3Server, sessions_server

session_s3 = pytest.fixture(scope="session")(sessions_server)


@pytest.fixture
def s3(session_s3):
    return session_s3


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """For LD_PRELOAD: ends a process, or lets a call fail, at a point of a save."""
    if (compiler := shutil.which("cc") or shutil.which("gcc")) is None:
        pytest.skip("no C compiler")
    path = tmp_path_factory.mktemp("kill_points") / "kill_points.so"
    source = pathlib.Path(__file__).parent / "kill_points" / "kill_points.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", path, source, "-ldl"], check=True)
    return path


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
