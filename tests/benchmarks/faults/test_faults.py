"""Which faults a seed draws, what they are counted as, when a rank is killed, and what a run has left."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.faults import chaos, draw, job, recovery
from benchmarks.faults.chaos import Row, summary, table
from benchmarks.faults.cluster import _ranks_of_failed_attempts
from benchmarks.faults.killer import Kill, Killer, parent_of
from benchmarks.faults.leftovers import left_files, left_processes
from benchmarks.faults.recovery import StepTimes

DRAW = {"num_ranks": 3, "steps": 48, "timeout_s": 8.0}


def test_a_seed_draws_the_same_faults_again_and_all_kinds_come():
    drawn = [draw.draw(f"{seed} ddp", **DRAW) for seed in range(50)]
    assert drawn == [draw.draw(f"{seed} ddp", **DRAW) for seed in range(50)]
    assert len({tuple(faults) for faults in drawn}) == 50
    assert {fault.kind for faults in drawn for fault in faults} == {*draw.KINDS}
    for faults in drawn:
        assert len({fault.kind for fault in faults}) == draw.PER_RUN
        assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)
        assert all(1 <= fault.step < 32 and 0 <= fault.rank < 3 for fault in faults)
        assert all(fault.seconds is None or fault.seconds < 8 / 3 or fault.seconds > 8 for fault in faults)
    assert draw.draw("1", **DRAW, kinds=["kill a rank"])[0].seconds is None


def row(**values):
    given = {"strategy": "ddp", "seed": 0, "faults": [{"kind": "kill a rank"}], "restarts": 1, "seconds": 2.0,
             "equal": True, "differs": [], "lost_rows": 0, "repeated_rows": 0, "hang": False, "leftovers": [],
             "error": None}  # fmt: skip
    return Row(**{**given, **values})


def test_a_seed_is_equal_if_all_its_runs_are():
    rows = [
        row(), row(strategy="mesh", faults=[{"kind": "stop a rank"}, {"kind": "kill a rank"}]),
        row(seed=1, lost_rows=2, repeated_rows=3), row(seed=1, strategy="mesh", equal=False, leftovers=["a", "b"]),
        row(seed=2, equal=False, hang=True, faults=[]),
    ]  # fmt: skip
    assert summary(rows) == {
        "seeds": 3, "faults": 5, "equal": 1, "lost_rows": 2, "repeated_rows": 3, "hangs": 1, "leftovers": 2,
    }  # fmt: skip
    assert list(table(rows)) == [
        "ddp: 3 runs, 2 equal, 1 hangs, 0 leftovers, 3 restarts; kill a rank 2",
        "mesh: 2 runs, 1 equal, 0 hangs, 2 leftovers, 2 restarts; kill a rank 2, stop a rank 1",
    ]


@pytest.mark.parametrize(("options", "message"), [
    ({"seeds": 0}, "seeds: expected at least 1, found 0"),
    ({"strategies": ("ddp", "dpp")}, "strategies: unknown dpp; expected some of ddp, parameter_server, mesh"),
])  # fmt: skip
def test_options_that_cannot_be_are_an_error(options, message):
    with pytest.raises(ValueError, match=message):
        chaos.Options(**options)


def test_a_rank_is_killed_in_the_process_that_it_has_now_and_times_are_those_of_the_next_attempt():
    killed = []
    killer = Killer({2: 1, 3: 0}, killed.append)
    joined = [{"kind": "joined", "rank": rank, "pid": 10 + rank} for rank in (0, 1)]
    steps = [{"kind": "step", "step": step} for step in (1, 2, 3, 4)]
    restart = {"kind": "restart", "error": "was killed"}
    for event in (*joined, *steps[:3]):  # the third comes from a rank that has not noticed yet
        killer(event)
    assert killed == [11]
    assert killer.done[0].noticed_s is None
    for event in (restart, {**joined[0], "pid": 20}, {**joined[1], "pid": 21}, *steps[1:]):
        killer(event)
    assert (killed, killer.left) == ([11, 20], [])
    first, second = killer.done
    assert (first.step, first.rank, second.step, second.rank) == (2, 1, 3, 0)
    assert 0 <= first.noticed_s <= first.again_s
    assert second.again_s is None
    with pytest.raises(AssertionError, match="a restart without a fault"):
        Killer({})(restart)


def test_the_ratios_of_checkpoints_are_medians_of_neighbors(capsys):
    kills = [Kill(10, 0, 0.0, noticed, noticed + 1) for noticed in (0.3, 0.5, 0.4)]
    rates = {"none": [10.0, 20.0, 10.0], "sync": [5.0, 15.0, 8.0], "async": [9.0, 19.0, 9.0]}
    assert recovery.summary(kills, rates) == {
        "noticed_s": 0.4, "training_again_s": 1.4, "async_steps_ratio": 0.9, "sync_steps_ratio": 0.75,
    }  # fmt: skip
    assert "sync: 8.00 steps per second" in capsys.readouterr().err


def test_the_rate_is_that_between_two_steps():
    times = StepTimes()
    for step in range(1, 8):
        times({"kind": "step", "step": step, "time": 100 + step / 4})
    times({"kind": "checkpoint", "step": 7, "time": 900.0})
    assert times.steps_per_s(3, 7) == 4


def test_a_state_has_the_size_of_weights_and_two_moments():
    assert recovery.state_mib(1024) == pytest.approx(25, abs=1)
    with pytest.raises(ValueError, match="steps: expected a multiple of 10, found 15"):
        recovery.Options(steps=15)


def test_a_job_is_the_same_after_a_line(tmp_path):
    given = job.Job(dataset="/data", run_dir=str(tmp_path / "run"), rows=96, strategy="mesh", num_ranks=3)
    assert job.Job(**json.loads(job.to_line(given))) == given
    assert given.config().parallel.zero_stage == 1
    assert job.read_events(given.events) == []
    with open(given.events, "w") as file:
        file.write('{"kind": "step", "step": 1}\n{"kind": "st')
    assert job.read_events(given.events) == [{"kind": "step", "step": 1}]


def test_the_ranks_of_all_attempts_but_the_last_must_have_ended():
    joined = [{"kind": "joined", "pid": pid} for pid in (1, 2, 3, 4)]
    restart = {"kind": "restart"}
    assert _ranks_of_failed_attempts(joined) == set()
    assert _ranks_of_failed_attempts([*joined[:2], restart, joined[2], restart, joined[3], joined[1]]) == {1, 3}


def test_what_is_left_is_found_by_process_port_and_file(tmp_path):
    (tmp_path / "a").mkdir()
    for name in ("model.pt", "model.pt.tmp-0123", "a/spark_dl-xyz"):
        (tmp_path / name).touch()
    assert left_files([tmp_path]) == {f"file {tmp_path}/model.pt.tmp-0123", f"file {tmp_path}/a/spark_dl-xyz"}
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    with subprocess.Popen(
        [sys.executable, "-c", code + "sys.stdin.read()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        port = int(process.stdout.readline())
        found = left_processes({"host0": [process.pid]}, [])
        assert parent_of(process.pid) == os.getpid()
        process.communicate("")
    assert sorted(text.split(" of ")[0].split(sys.executable)[0] for text in found) == [
        f"port on host0: {port}", f"process on host0: {process.pid} ",
    ]  # fmt: skip
    assert left_processes({"host0": [process.pid]}, [process.pid]) == set()
