"""Checkpoints of a function of the user's own: what `save` refuses, on all ranks at once."""

import collections
import enum
import os

import numpy as np
import pytest
import torch.distributed as dist

from spark_dl.rundir import checkpoint
from spark_dl.rundir.own_checkpoints import Checkpoints
from tests.ranks.launcher import RankFailed, run_ranks


def save(run_dir, url, *steps, state=None):
    """Saves a checkpoint at each step; a step can be a list with that of each rank."""
    dist.init_process_group("gloo")
    try:
        checkpoints, rank = Checkpoints(run_dir, 1, url, 2), dist.get_rank()
        of_rank = [step[rank] if isinstance(step, list) else step for step in steps]
        return [checkpoints.save(state or {"w": 1.0}, step=step) for step in of_rank]
    finally:
        dist.destroy_process_group()


def test_a_checkpoint_is_of_one_step_of_all_ranks(tmp_path):
    with pytest.raises(RankFailed, match=r"save: step: expected the same on all ranks, found 2 on rank 0, 3 on rank 1"):
        run_ranks(save, 2, str(tmp_path), "", 1, [2, 3])
    assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [1]
    assert len(os.listdir(tmp_path / "checkpoints")) == 1  # nothing was written of the others


def test_steps_grow_also_from_one_attempt_to_the_next(tmp_path):
    with pytest.raises(RankFailed, match=r"save: step: expected more than that of the checkpoint before, 5, found 5"):
        run_ranks(save, 2, str(tmp_path), "", 4, 5, 5)
    (url,) = {urls[0] for urls in run_ranks(save, 2, str(tmp_path), "", 6)}
    with pytest.raises(RankFailed, match=r"the checkpoint before, 6, found 1; count the steps from the first attempt"):
        run_ranks(save, 2, str(tmp_path), url, 1)
    run_ranks(save, 2, str(tmp_path), url, 7)
    assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [6, 7]


def load_save_and_load(run_dir, url, generation, steps):
    """Loads the checkpoint before and after others are saved, of which the last one is kept."""
    checkpoints = Checkpoints(run_dir, generation, url, 1)
    before = checkpoints.load()
    for step in steps:
        checkpoints.save({"w": 2.0}, step=step)
    return [(found.step, found.state) for found in (before, checkpoints.load())]


def test_the_loaded_checkpoint_stays_the_same_until_the_next_attempt_saves(tmp_path):
    ((_, url),) = run_ranks(save, 1, str(tmp_path), "", 3, 4)
    ((before, after),) = run_ranks(load_save_and_load, 1, str(tmp_path), url, 2, (5, 6, 7))
    assert before == after == (4, {"w": 1.0})
    assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [4, 7]
    run_ranks(load_save_and_load, 1, str(tmp_path), checkpoint.latest(str(tmp_path)).url, 3, (8, 9))
    assert [saved.step for saved in checkpoint.list_checkpoints(str(tmp_path))] == [7, 9]


def save_function(run_dir):
    save(run_dir, "", 1, state={"w": 1.0, "f": print})


def test_a_function_in_the_state_is_an_error_and_not_left_out(tmp_path):
    with pytest.raises(RankFailed, match=r"save: state\['f'\]: found a builtins.builtin_function_or_method"):
        run_ranks(save_function, 1, str(tmp_path))


Level = enum.IntEnum("Level", "LOW HIGH")
Place = collections.namedtuple("Place", "row column")
OF_OTHER_TYPES = {"IntEnum": Level.HIGH, "namedtuple": Place(1, 2), "array": np.zeros(2)}


def save_other(run_dir, kind):
    save(run_dir, "", 1, state={"w": [OF_OTHER_TYPES[kind]]})


@pytest.mark.parametrize("kind", OF_OTHER_TYPES)
def test_R27_an_object_that_could_not_be_loaded_again_is_an_error_when_it_is_saved(tmp_path, kind):
    with pytest.raises(
        RankFailed, match=rf"save: state\['w'\]\[0\]: found a .*{type(OF_OTHER_TYPES[kind]).__qualname__}"
    ):
        run_ranks(save_other, 1, str(tmp_path), kind)
