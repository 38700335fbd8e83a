"""What the driver knows of the tasks of its ranks over Spark Connect: with Spark 4 their number, with 3.5 nothing."""

import queue
import time
import types

import pytest

from spark_dl import Launch
from spark_dl.launch import barrier
from spark_dl.launch.barrier import RankJob, _Watch


class Session:
    """As much of a session as the job of the ranks uses, as Spark 3.5 has it."""

    __module__ = "pyspark.sql.connect.session"  # by which a session over Spark Connect is known

    def addTag(self, tag):
        pass

    interruptTag = addTag  # noqa: N815


class Session4(Session):
    """With Spark's progress, which says how many tasks run."""

    __module__ = Session.__module__

    def __init__(self, running):
        self.running = running

    def registerProgressHandler(self, handler):
        handler([types.SimpleNamespace(num_tasks=2)], self.running, "", False)

    def removeProgressHandler(self, handler):
        pass


def watch(spark, seconds):
    """Waits as `run_barrier` does for a job of this length, with a shorter limit for the start of its ranks."""

    def collect():
        time.sleep(seconds)
        return ["a row"]

    events = queue.Queue()
    df = types.SimpleNamespace(collect=collect)
    job = RankJob(spark, df, 2, events, description="", computes_first=False)
    launch = Launch(num_ranks=2, start_timeout_s=0.2)
    _Watch(job, launch, None, None, None, list, limit_s=60).run(events)
    return job.rows


@pytest.mark.parametrize("spark", [Session(), Session4(running=2)], ids=["Spark 3.5", "ranks that run"])
def test_a_job_that_takes_longer_than_the_start_timeout_goes_on(spark):
    assert watch(spark, seconds=0.8) == ["a row"]


def test_B21_ranks_that_are_known_not_to_run_are_an_error_after_the_start_timeout():
    with pytest.raises(RuntimeError, match=r"^0 of 2 ranks started within launch\.start_timeout_s=0\.2 s"):
        watch(Session4(running=0), seconds=2)


def test_results_that_did_not_come_are_an_error():
    """Spark drops those that are too large for the driver, and says so in its log only."""
    row = {"rank": 1, "refused": "", "output": "[]", "result": b""}
    with pytest.raises(
        RuntimeError, match=r"the results of 2 of 3 ranks did not reach the driver; .* spark\.driver\.mem"
    ):
        barrier._results(types.SimpleNamespace(rows=[row], computes_first=True), 3, None)
    with pytest.raises(ValueError, match="the DataFrame has no rows; expected at least one"):
        barrier._results(types.SimpleNamespace(rows=[], computes_first=True), 3, None)
    with pytest.raises(RuntimeError, match="the results of 3 of 3 ranks"):
        barrier._results(types.SimpleNamespace(rows=[], computes_first=False), 3, None)
