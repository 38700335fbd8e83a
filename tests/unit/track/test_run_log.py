"""What a run folder tells about its run, whatever state it is in."""

import os
import socket

import pytest

from spark_dl.rundir import generations
from spark_dl.track.report import report
from spark_dl.track.run_log import read_run
from tests.builders.run_folders import LINES, OLD, START, make_run

ENDS = [
    ({"outcome": "finished"}, "finished"),
    ({"outcome": "stopped early"}, "stopped early"),
    ({"outcome": "failed", "error": "RankError: rank 1"}, "failed"),
    ({"outcome": "interrupted"}, "interrupted"),
    ({"outcome": "running", "ended": None}, "running"),
    ({"outcome": "running", "ended": None, "host": socket.gethostname(), "pid": os.getpid()}, "running"),
    ({"outcome": "running", "ended": None, "host": socket.gethostname(), "pid": 2**22 + 1}, "interrupted"),
    (None, "running"),
]


@pytest.mark.parametrize(("driver", "expected"), ENDS, ids=range(len(ENDS)))
def test_how_a_run_ended(tmp_path, driver, expected):
    last = read_run(str(make_run(tmp_path / "run", driver=driver))).last
    assert last.outcome == expected
    assert last.error == (driver or {}).get("error", "")


def test_a_run_under_torchrun_ends_by_its_ranks(tmp_path):
    run = make_run(tmp_path / "run", driver=None, outcome="stopped early", ended=START + 50)
    (run / "generations/000001").unlink()
    (run / "environment/000001-ranks.json").rename(run / "environment/000000-ranks.json")
    last = read_run(str(run)).last
    assert (last.generation, last.outcome, last.ended) == (0, "stopped early", START + 50)


def test_an_attempt_that_another_one_replaced_does_not_go_on(tmp_path):
    run = make_run(tmp_path / "run", driver={"outcome": "running", "ended": None})
    make_run(run, generation=2, started=START + 200)
    first, second = read_run(str(run)).attempts
    assert (first.outcome, second.outcome) == ("interrupted", "finished")
    assert first.ended == START + 30  # its last line
    assert len(first.steps) == 20
    assert second.steps == []


def test_lines_of_restarts_are_passed_over(tmp_path):
    restart = {"kind": "restart", "attempt": 1, "reason": "rank 1 was killed", "step": None, "time": START + 5}
    run, same = (str(make_run(tmp_path / name, [*more, *LINES])) for name, more in (("a", [restart]), ("b", [])))
    found, expected = read_run(run), read_run(same)
    for kind in ("steps", "epochs", "checkpoints"):
        assert found.lines(kind) == expected.lines(kind)
    assert found.problems == []
    report(run)


@pytest.mark.parametrize(("lines", "expected"), [(OLD, "finished"), (OLD[:5], "not recorded")], ids=["whole", "cut"])
def test_how_a_run_of_an_older_version_ended(tmp_path, lines, expected):
    run = make_run(tmp_path / "run", lines, driver=None, ranks=None)
    (run / "environment").rmdir()
    assert read_run(str(run)).last.outcome == expected


@pytest.mark.parametrize(("end", "is_named"), [
    (b'{"kind": "step", "st', False), (b'{"kind": "step", "st\n', True), (b"[1]\n", True), (b"\xff\xfe<b>\n", True),
])  # fmt: skip
def test_a_damaged_last_line_is_left_out_and_named_if_it_is_whole(tmp_path, end, is_named):
    run = make_run(tmp_path / "run")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(end)
    found = read_run(str(run))
    assert [problem.split(":")[0] for problem in found.problems] == ["metrics.jsonl, line 24"] * is_named
    assert len(found.lines("steps")) == len([line for line in LINES if line["kind"] == "step"])


@pytest.mark.parametrize("content", [b"", b"[]", b'{"format": "other"}', b"\xff", b"[" * 100_000])
def test_a_damaged_record_is_left_out_and_named(tmp_path, content):
    run = make_run(tmp_path / "run")
    (run / "environment/000001-ranks.json").write_bytes(content)
    (run / "generations/000001").write_bytes(content)
    found = read_run(str(run))
    assert [problem.split(":")[0] for problem in found.problems] == ["environment/000001-ranks.json"]
    assert found.last.outcome == "finished"
    assert found.last.ranks == []


def test_attempts_of_a_run_that_was_overwritten_are_not_those_of_the_new_one(tmp_path):
    run = make_run(tmp_path / "run")
    make_run(run, generation=2, started=START + 200)
    for left in (run / "environment").glob("000001*"):  # what overwrite deletes; the number of the attempt stays
        left.unlink()
    assert [attempt.generation for attempt in read_run(str(run)).attempts] == [2]


def test_a_run_of_trials_is_an_error_that_names_one(tmp_path):
    trial = tmp_path / "search" / "trials" / "0000"
    trial.parent.mkdir(parents=True)
    make_run(trial)
    (trial / "config.yaml").write_text("")
    generations.start_generation(str(tmp_path / "search"))
    with pytest.raises(ValueError, match=r"is a run of spark_dl.tune, which has no report; .*search/trials/0000"):
        read_run(str(tmp_path / "search"))
    assert read_run(str(trial)).last.outcome == "finished"
