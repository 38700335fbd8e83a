"""Ranks that stand still while another attempt takes their place: when they wake, they change nothing."""

import dataclasses
import hashlib
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from spark_dl import Checkpoint, ModelSpec, worker
from spark_dl.rundir import checkpoint
from tests.builders.models import build_mlp, small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import make_run, train_rank

WAIT_S = 30


@dataclasses.dataclass(frozen=True)
class Freezes:
    """`ModelSpec.set_position` of a model whose rank 0 stops in a step, as on a host that is swapped out."""

    sign: str
    step: int

    def __call__(self, model, position):
        if position.global_step + 1 == self.step and os.environ.get("RANK") == "0":
            Path(self.sign).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)


def contents(run_dir):
    """What the history of a run consists of, by name."""
    files = [path for path in Path(run_dir).rglob("*") if path.is_file() and path.parent.name != "environment"]
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("step", [4, 6], ids=["in an epoch", "at its end"])
def test_F06_ranks_that_wake_after_a_newer_attempt_leave_its_history_as_it_is(tmp_path, step):
    """In epochs of 6 steps, with a checkpoint after steps 2, 4 and so on."""
    sign, config = tmp_path / "pid", small_config(2, checkpoint=Checkpoint(every_steps=2))
    spec = ModelSpec(build=build_mlp, set_position=Freezes(str(sign), step))
    run = make_run(tmp_path, config, spec=spec)
    older = dataclasses.replace(run, generation=checkpoint.start_generation(run.run_dir))
    errors = []

    def train_older():
        try:
            run_ranks(train_rank, 2, older)
        except RankFailed as error:
            errors.append(str(error))

    thread = threading.Thread(target=train_older)
    thread.start()
    end = time.monotonic() + WAIT_S
    while not (sign.exists() and sign.read_text()) and time.monotonic() < end:
        time.sleep(0.01)
    try:
        saved = checkpoint.find(run.run_dir)
        assert saved.step == step - 2
        alone = dataclasses.replace(config, launch=dataclasses.replace(config.launch, num_ranks=1))
        generation = checkpoint.start_generation(run.run_dir)
        newer = dataclasses.replace(run, config=alone, checkpoint=saved.url, generation=generation)
        assert worker.main(newer).result["steps"] == 12
        before, kept = contents(run.run_dir), checkpoint.list_checkpoints(run.run_dir)
    finally:
        os.kill(int(sign.read_text()), signal.SIGCONT)
        woken = time.monotonic()
        thread.join(WAIT_S)
    assert time.monotonic() - woken < 10
    after = contents(run.run_dir)
    assert before.items() <= after.items()
    # What rank 1 wrote before it heard of it has no manifest, and the next checkpoint of the run deletes it.
    assert all(".gen-0001/rank-" in name for name in after.keys() - before.keys())
    assert checkpoint.list_checkpoints(run.run_dir) == kept
    (error,) = errors
    assert "this is attempt 1 of the run" in error
    assert "attempt 2 has started since" in error
