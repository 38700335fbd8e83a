"""The run folder of a function of the user's own, on the driver."""

import pytest

from spark_dl.rundir import checkpoint, generations
from spark_dl.rundir.own_checkpoints import start_own_run
from tests.unit.rundir.test_checkpoint import handmade


def start(run_dir, **how):
    return start_own_run(run_dir, **{"resume": False, "overwrite": False, **how})


def url_of(env):
    """The checkpoint that ranks go on from, by their environment."""
    (url,) = [value for name, value in env.items() if "CHECKPOINT" in name]
    return url


def test_without_a_run_folder_there_is_no_run_and_nothing_to_resume_or_overwrite():
    assert start(None) is None
    for how in ("resume", "overwrite"):
        with pytest.raises(ValueError, match=f"^{how}: expected a run_dir with it, found none"):
            start(None, **{how: True})


def test_a_run_that_is_there_is_resumed_overwritten_or_an_error(tmp_path):
    run_dir = tmp_path / "run"
    handmade(run_dir, 3)
    with pytest.raises(ValueError, match=r"already has checkpoints \(the last one of step 3\); set resume"):
        start(run_dir)
    resumed = start(run_dir, resume=True)
    assert url_of(resumed.begin()).endswith("step-00000003.gen-0001")
    (run_dir / "notes.txt").write_text("of the user")
    overwritten = start(run_dir, overwrite=True)
    assert checkpoint.latest(str(run_dir)).step == 3  # nothing is deleted before the first attempt begins
    assert url_of(overwritten.begin()) == ""
    assert checkpoint.latest(str(run_dir)) is None
    assert (run_dir / "notes.txt").exists()


def test_a_later_attempt_goes_on_from_what_the_one_before_has_saved(tmp_path):
    run = start(tmp_path, overwrite=True)
    assert url_of(run.begin()) == ""
    handmade(tmp_path, 5)
    assert url_of(run.begin()).endswith("step-00000005.gen-0001")
    assert generations.read_generation(str(tmp_path)) == 2


def test_an_attempt_of_another_driver_ends_this_one(tmp_path):
    run = start(tmp_path)
    generations.start_generation(str(tmp_path))
    with pytest.raises(RuntimeError, match="this is attempt 1 of the run .*, and attempt 2 has started since"):
        run.begin()
