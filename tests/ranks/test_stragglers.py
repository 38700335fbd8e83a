"""Ranks that are slowed down on purpose: the others wait for them, and the weights are what they were."""

import dataclasses
import os
import time

import pytest

from spark_dl import Faults
from spark_dl.rundir import checkpoint
from spark_dl.rundir.metrics import read_metrics
from spark_dl.track.time_split import SlowRanks
from tests.builders.models import MLP, same_bits, small_config
from tests.builders.settings import parallel as make_parallel
from tests.ranks.runs import cut_at, make_run, train

DELAY_S, STEPS, EVERY = 0.1, 32, 5
SLOW = Faults(straggler="constant", straggler_s=DELAY_S, straggler_ranks=(1,))
EVEN = dataclasses.replace(SLOW, straggler_ranks=())
"""All ranks take as long as the slow one, so that the run lasts as long."""
OTHERS = (
    {"strategy": "local_sgd", "sync_every_steps": 1}, {"strategy": "mesh", "zero_stage": 1}, {"strategy": "horovod"},
)  # fmt: skip


def test_F20_a_slow_rank_holds_up_ddp_and_changes_no_weights(tmp_path):
    delay_s, steps, trained = 0.2, 5, {}
    slow = Faults(straggler="constant", straggler_s=delay_s, straggler_ranks=(1,))
    for name, faults in (("even", Faults()), ("slow", slow)):
        run = make_run(tmp_path, cut_at(small_config(2, faults=faults), steps), name=name)
        trained[name] = checkpoint.load(train(run), "model.pt")["0"]
        seconds = [line["seconds"] for line in read_metrics(run.run_dir) if line["kind"] == "step"]
        assert len(seconds) == steps
    # The clock is that of rank 0, and may start when the first delay of rank 1 is nearly over.
    assert sum(seconds) > delay_s * (steps - 1)
    assert same_bits(trained["even"], trained["slow"])


def named(run):
    """The ranks that a driver names while the run goes on, as (rank, cause)."""
    watch = SlowRanks()
    lines = [line for line in read_metrics(run.run_dir) if line["kind"] == "step"]
    return [(slow.straggler.rank, slow.straggler.cause) for line in lines for slow in watch.put(line)]


def run_of(tmp_path, name, *, parallel=None, faults=EVEN, spec=MLP):
    if (parallel or {}).get("strategy") == "horovod":
        pytest.importorskip("horovod.torch", reason="no horovod", exc_type=ImportError)
    train = {"log_every": EVERY, "epochs": 99}
    config = cut_at(small_config(2, train, faults=faults, parallel=make_parallel(**(parallel or {}))), STEPS)
    return make_run(tmp_path, config, name=name, spec=spec)


@pytest.mark.slow
@pytest.mark.parametrize(
    "parallel",
    [{}, *(pytest.param(parallel, marks=pytest.mark.long) for parallel in OTHERS)], ids=str,
)  # fmt: skip
def test_F20_the_rank_that_the_others_wait_for_is_named_and_even_ranks_are_not(tmp_path, parallel):
    for name, faults, expected in (("slow", SLOW, [(1, "compute")]), ("even", EVEN, [])):
        run = run_of(tmp_path, name, parallel=parallel, faults=faults)
        train(run)
        assert named(run) == expected


def slow_rows(columns):
    if os.environ["RANK"] == "0":
        time.sleep(DELAY_S)
    return columns


@pytest.mark.slow
def test_F20_a_rank_whose_rows_come_late_is_named_with_that_cause(tmp_path):
    spec = dataclasses.replace(MLP, transform=slow_rows)
    run = run_of(tmp_path, "slow", faults=Faults(), spec=spec)
    train(run)
    assert named(run) == [(0, "data")]
