"""F11: a process that saves a checkpoint is killed at every write, sync, rename and request, each in turn."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spark_dl.rundir.checkpoint import FOLDER
from tests.builders.s3 import ENV

HERE = pathlib.Path(__file__).parent / "kill_points"
LIMIT_S = 540
pytestmark = pytest.mark.timeout(600)


def run(kind, *arguments, env):
    """The step that a resume begins with after each point, before (or half of) and after the call."""
    command = [sys.executable, "-m", "tests.storage.kill_points.saves", kind, *arguments]
    done = subprocess.run(
        command, env={**os.environ, **env}, cwd=HERE.parents[2], capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_whole(steps, at_least):
    """The previous checkpoint until the new one is committed, then the new one, never neither."""
    for found in steps.values():
        assert len(found) > at_least
        assert {*found} == {1, 2}, found
        assert found == sorted(found), found


@pytest.mark.slow
def test_F11_killed_at_every_call_of_a_save_on_disk(library, tmp_path):
    steps = run("disk", str(tmp_path / "runs"), env={"LD_PRELOAD": str(library)})
    # 4 files: each is created, written, synced and renamed, and its folder synced; then the old ones are deleted.
    assert_whole(steps, at_least=25)
    assert FOLDER in os.listdir(tmp_path / "runs" / "disk-0-0")


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_F11_a_rank_killed_at_every_call_leaves_no_mix_of_steps(library, tmp_path, victim):
    steps = run(f"ranks{victim}", str(tmp_path / "runs"), env={"LD_PRELOAD": str(library)})
    if victim:  # its file alone does not commit
        assert all({*found[:-1]} == {1} and found[-1] == 2 for found in steps.values()), steps
    else:
        assert_whole(steps, at_least=8)


@pytest.mark.long
def test_F11_killed_at_every_request_of_a_save_on_s3(s3, tmp_path):
    steps = run("s3", s3.url("kill-points"), s3.address, env=ENV)
    assert_whole(steps, at_least=8)
