"""A rank that is killed in a step, in any group of a mesh: all others end soon."""

import os
import signal
import time

import pytest

from spark_dl import Mesh, ModelSpec, worker
from tests.builders.models import small_config
from tests.ranks.launcher import RankFailed, run_ranks
from tests.ranks.runs import make_run
from tests.ranks.test_mesh import build_wide

TIMEOUT_S = 3
MESHES = [
    (2, {"tensor": 2, "zero_stage": 1}),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [
            (1, {"pipeline": 2}),
            (2, {"pipeline": 2, "schedule": "pipedream"}),
            (3, {"pipeline": 2, "tensor": 2}),
            (0, {"zero_stage": 2}),
            (3, {"zero_stage": 3, "replicas": 2}),
        ]
    ),
]
"""(rank that is killed in a pass, mesh of four ranks)."""


class KilledIn:
    """The forward pass of a model, in which a rank is killed."""

    def __init__(self, victim, call, folder):
        self.victim, self.call, self.folder = victim, call, folder

    def __call__(self, model, batch):
        self.call -= 1
        rank = int(os.environ["RANK"])
        if rank == self.victim and not self.call:
            note_end(self.folder, rank)
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch["features"])


def note_end(folder, rank):
    (folder / f"end-{rank}").write_text(str(time.time()))


def train_rank(run, folder):
    try:
        worker.main(run)
    except RuntimeError:
        note_end(folder, os.environ["RANK"])
        raise


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("victim", "mesh"), MESHES)
def test_all_ranks_end_when_one_is_killed(tmp_path, victim, mesh):
    train = {"accumulation_steps": 2, "epochs": 100}
    config = small_config(4, train=train, launch={"collective_timeout_s": TIMEOUT_S}, parallel=Mesh(**mesh))
    spec = ModelSpec(build=build_wide, forward=KilledIn(victim, 9, tmp_path))
    with pytest.raises(RankFailed) as caught:
        run_ranks(train_rank, 4, make_run(tmp_path, config, spec=spec), tmp_path, wait_s=TIMEOUT_S + 10)
    assert f"rank {victim}:\ndied with exit code {-signal.SIGKILL}" in str(caught.value)
    ends = {rank: float((tmp_path / f"end-{rank}").read_text()) for rank in range(4)}
    assert max(ends.values()) - ends[victim] < TIMEOUT_S + 5, ends
