"""The record of an attempt: how it ended, also if it failed, and no trouble of its own for the run."""

import logging

import pytest

from spark_dl import Config, Data
from spark_dl.data.dataset.manifest import read_shards
from spark_dl.rundir import environment
from spark_dl.spark_job import SessionEndedError
from spark_dl.spec import Run
from tests.builders.datasets import write_dataset
from tests.builders.models import MLP, blobs


@pytest.fixture
def run(tmp_path):
    write_dataset(str(tmp_path / "data"), blobs(10), group_rows=5, shard_rows=10)
    shards = read_shards(str(tmp_path / "data"))
    return Run(
        spec=MLP, config=Config(data=Data(label="label")), train=shards, run_dir=str(tmp_path / "run"), generation=3
    )


def driver_of(run):
    (attempt,), problems = environment.read(run.run_dir)
    assert problems == []
    assert attempt.generation == 3
    return attempt.driver


def test_an_attempt_runs_until_its_end_is_recorded(run):
    with environment.recorded(run, {"master": "yarn"}, {"writing the train rows": 2.0}) as record_end:
        found = driver_of(run)
        assert found["outcome"] == environment.RUNNING
        assert "ended" not in found
        record_end({"stopped_early": True, "steps": 7, "checkpoint": "not kept"})
    found = driver_of(run)
    assert (found["outcome"], found["steps"], found["spark"]) == (environment.STOPPED_EARLY, 7, {"master": "yarn"})
    assert found["ended"] >= found["started"]
    assert found["before"] == {"writing the train rows": 2.0}
    assert found["config"] == run.config.to_dict()
    assert found["datasets"]["train"]["rows"] == 10
    assert "checkpoint" not in found


@pytest.mark.parametrize(("error", "outcome"), [
    (RuntimeError("rank 1\n" + "x" * 99_999), environment.FAILED), (KeyboardInterrupt(), environment.INTERRUPTED),
    (SessionEndedError("the Spark session was stopped"), environment.INTERRUPTED),
])  # fmt: skip
def test_an_error_is_recorded_and_raised(run, error, outcome):
    with pytest.raises(type(error)), environment.recorded(run, {}, {}):
        raise error
    found = driver_of(run)
    assert found["outcome"] == outcome
    assert found["error"].startswith(f"{type(error).__name__}: {error}"[:50])
    assert len(found["error"]) <= 20_000


def test_a_folder_that_cannot_be_written_to_costs_no_run(run, tmp_path, caplog):
    (tmp_path / "run").write_text("a file")
    with caplog.at_level(logging.WARNING, "spark_dl"), environment.recorded(run, {}, {}) as record_end:
        record_end({})
    assert "so a report will not show it" in caplog.text


def test_only_one_rank_writes(run):
    with environment.recorded_on_ranks(run, [{"host": "a"}], writes=False) as record_end:
        record_end({})
    assert environment.read(run.run_dir) == ([], [])
    with environment.recorded_on_ranks(run, [{"host": "a"}], writes=True) as record_end:
        record_end({"steps": 5})
    (attempt,), _ = environment.read(run.run_dir)
    assert (attempt.ranks["ranks"], attempt.ranks["outcome"]) == ([{"host": "a"}], environment.FINISHED)
