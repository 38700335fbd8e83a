"""F12: a storage that refuses a checkpoint ends the run, or with `checkpoint.on_error: warn` only that checkpoint."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from tests.ranks.runs import assert_same_to_the_bit

STEPS, REFUSED = 12, 4
WARN = {"on_error": "warn"}
BACKGROUND = {**WARN, "asynchronous": True}
CASES = {  # settings, fault, and words of the reason
    "whole": ({}, None, ""),
    "write": (WARN, (1, REFUSED, "rank-00001.pt", "write", "EIO"), "rank 1 cannot write to .*Input/output error"),
    "fsync": (BACKGROUND, (1, REFUSED, "rank-00001.pt", "fsync", "EIO"), "rank 1 cannot write to .*Input/output"),
    "folder": (WARN, (0, REFUSED, "", "open", "EROFS"), "rank 0 cannot write to .*Read-only file system"),
    "model": (WARN, (0, REFUSED, "model.pt", "open", "EACCES"), "rank 0 cannot write to .*Permission denied"),
    "manifest": (BACKGROUND, (0, REFUSED, "MANIFEST", "rename", "ENOSPC"), "cannot commit it: .*No space left"),
    "once at the end": (WARN, (1, STEPS, "rank-00001.pt", "write", "EIO"), "rank 1 cannot write to .*Input/output"),
    "at the end": (BACKGROUND, (1, STEPS, "rank-00001.pt", "write", "EIO", 9), "rank 1 cannot write to .*Input"),
    "raise": ({}, (1, REFUSED, "rank-00001.pt", "fsync", "EIO"), "rank 1 cannot write to .*Input/output error"),
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("refused")


@pytest.fixture(scope="module")
def results(library, folder):
    cases = [{"name": name, "settings": s, "fault": fault} for name, (s, fault, _) in CASES.items()]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "tests.storage.kill_points.refused", folder, json.dumps(cases)],
        env={**os.environ, "LD_PRELOAD": str(library)}, cwd=root, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def saved_steps(run_dir):
    return [saved.step for saved in checkpoint.list_checkpoints(run_dir)]


def assert_nothing_left(run_dir):
    """No temporary files, and no folder of a checkpoint that is not one."""
    folders = os.listdir(run_dir / "checkpoints")
    assert len(folders) == len(saved_steps(str(run_dir)))
    assert not [*run_dir.rglob("*.tmp-*"), *run_dir.rglob("UNFINISHED")]


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("whole", "at the end", "raise")])
def test_F12_training_goes_on_without_a_checkpoint_that_the_storage_refuses(results, folder, name):
    run_dir, (_, fault, reason) = folder / name, CASES[name]
    assert [rank["failed_checkpoints"] for rank in results[name]] == [1, 1], results[name]
    lines = [line for line in read_metrics(str(run_dir)) if line["kind"] == "checkpoint_failed"]
    assert [line["step"] for line in lines] == [fault[1]]
    with pytest.raises(RuntimeError, match=reason):
        raise RuntimeError(lines[0]["reason"])
    assert lines[0]["url"] == f"{run_dir}/checkpoints/step-{fault[1]:08d}.gen-0000"
    assert lines[0]["url"] in lines[0]["reason"]
    due = range(2, STEPS + 1, 2)
    assert saved_steps(str(run_dir)) == [step for step in due if step != REFUSED or fault[1] != REFUSED]
    assert_nothing_left(run_dir)
    for saved in checkpoint.list_checkpoints(str(run_dir)):
        whole = f"{folder}/whole/checkpoints/step-{saved.step:08d}.gen-0000"
        assert_same_to_the_bit(checkpoint.find(saved.url), checkpoint.find(whole))


@pytest.mark.parametrize(("name", "step"), [("at the end", STEPS), ("raise", REFUSED)])
def test_F12_the_run_ends_with_the_error_if_there_is_no_last_checkpoint(results, folder, name, step):
    with pytest.raises(RuntimeError, match=rf"checkpoint at step {step} not saved: {CASES[name][2]}"):
        raise RuntimeError(results[name])
    assert saved_steps(str(folder / name)) == [*range(2, step, 2)]
    assert checkpoint.find(str(folder / name)).step == step - 2
    assert_nothing_left(folder / name)
