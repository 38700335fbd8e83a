"""A whole training in a session that is secured as Spark can be, and what of its secrets is seen from outside."""

import base64
import hashlib
import json
import pathlib
import subprocess
import sys

import pytest

from tests.spark.conftest import REPOSITORY
from tests.spark.secured_job import CONF, MARKER, SEEN
from tests.spark.test_jobs import environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """The folder of the job, and its answer."""
    folder = tmp_path_factory.mktemp("secured")
    with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        done = subprocess.run(
            [sys.executable, "-m", "tests.spark.secured_job", str(folder)], cwd=REPOSITORY, stdout=out, stderr=err,
            env={**environment(), "PYTHONPATH": str(REPOSITORY)}, timeout=400,
        )  # fmt: skip
    assert done.returncode == 0, (folder / "err").read_text()[-4000:]
    return folder, json.loads((folder / "out").read_text().splitlines()[-1])


def test_S12_a_training_with_authentication_encryption_and_unix_sockets(secured):
    _, answer = secured
    conf = {key: value for key, value in CONF.items() if MARKER not in value}
    assert conf.items() <= answer["conf"].items()
    assert answer["steps"] == 4
    assert len(answer["given"]) == 2


def test_S10_of_a_session_that_encrypts_plain_gradients_are_refused(secured):
    _, answer = secured
    assert "spark.network.crypto.enabled: found true, but the ranks would send gradients" in answer["refused"]


def test_S09_no_secret_is_seen_from_outside(secured):
    folder, answer = secured
    assert answer["given"] == [hashlib.sha256(f"{MARKER}-env".encode()).hexdigest()] * 2  # the ranks have it
    secrets = [bytes.fromhex(line) for line in (folder / "secrets").read_text().split()]
    assert len(secrets) >= 6, "of the listeners and stores of three jobs"
    forms = {MARKER.encode()}
    for secret in secrets:
        forms |= {secret, secret.hex().encode(), base64.b64encode(secret), repr(secret)[2:-1].encode()}
    places = [folder / name for name in ("out", "err", "cmdlines", "rest", "traceback", "events", "run")]
    places.append(pathlib.Path(answer["logs"]))
    assert [*places[-1].rglob("stderr")], "the log of the executor"
    seen = {place.name: 0 for place in places}
    for place in places:
        for path in place.rglob("*") if place.is_dir() else [place]:
            if path.is_file() and path.suffix not in (".parquet", ".jar"):
                content = path.read_bytes()
                assert [form for form in forms if form in content] == [], path
                seen[place.name] += SEEN.encode() in content
    assert min(seen["rest"], seen["events"]) > 0, f"nothing was looked at: {seen}"
    assert "spark.network.crypto.enabled=true" in (folder / "cmdlines").read_text()
    assert "ValueError: the cause" in (folder / "traceback").read_text()
