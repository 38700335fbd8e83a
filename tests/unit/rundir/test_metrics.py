"""The lines that a run writes, as a driver reads them that has no listener."""

import json
import logging

import pytest

from spark_dl import storage
from spark_dl.rundir import generations, metrics


def write(run_dir, *lines):
    (run_dir / metrics.FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_only_lines_that_are_new_are_news(tmp_path):
    first, second = ({"kind": "step", "step": n, "time": float(n)} for n in (1, 2))
    write(tmp_path, first)
    poll = metrics.follow(str(tmp_path))
    assert poll() == []
    write(tmp_path, first, second)
    assert poll() == [{**second, "kind": "step"}]
    assert poll() == []


def test_a_folder_that_cannot_be_read_for_a_while_ends_nothing_and_loses_nothing(tmp_path, monkeypatch, caplog):
    poll = metrics.follow(str(tmp_path))
    write(tmp_path, {"kind": "step", "step": 1, "time": 1.0})

    def fail(url):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING, "spark_dl"):
        broken.setattr(storage, "read_bytes", fail)
        assert poll() == []
    assert "cannot read the metrics" in caplog.text
    assert [line["step"] for line in poll()] == [1]


def open_log(run_dir, *, goes_on, first_step=0, generation=0):
    return metrics.MetricsLog(
        str(run_dir), writes=True, first_step=first_step, report=lambda event: None, generation=generation,
        goes_on=goes_on,
    )  # fmt: skip


def restart(attempt, step=None):
    return {"kind": "restart", "attempt": attempt, "reason": "rank 1 was killed", "step": step, "time": 1e9 * attempt}


def found(run_dir):
    return [(line["kind"], line["step"]) for line in metrics.read_metrics(str(run_dir))]


def test_lines_of_restarts_stay_when_steps_are_repeated(tmp_path):
    log = open_log(tmp_path, goes_on=False, generation=1)
    log.write("step", step=1)
    metrics.add_restart(str(tmp_path), restart(1), from_start=True)  # without a checkpoint
    assert found(tmp_path) == [("restart", None)]
    log = open_log(tmp_path, goes_on=False, generation=2)
    for step in (1, 2, 3):
        log.write("step", step=step)
    with (tmp_path / metrics.FILE).open("a") as file:
        file.write('{"kind": "st')  # the rank is killed
    metrics.add_restart(str(tmp_path), restart(2, 3), from_start=False)
    first = [("restart", None), ("step", 1), ("step", 2)]
    assert found(tmp_path) == [*first, ("step", 3), ("restart", 3)]
    log = open_log(tmp_path, goes_on=False, first_step=2, generation=3)
    assert found(tmp_path) == [*first, ("restart", 3)]
    log.write("step", step=3)
    log.go_back(1)
    assert found(tmp_path) == [("restart", None), ("step", 1), ("restart", 3)]


def test_another_run_in_the_folder_begins_without_them(tmp_path):
    metrics.add_restart(str(tmp_path), restart(1), from_start=False)
    open_log(tmp_path, goes_on=False)
    assert found(tmp_path) == []


def test_a_driver_that_follows_passes_over_its_own_lines_whatever_its_clock_says(tmp_path):
    metrics.add_restart(str(tmp_path), restart(1), from_start=False)
    poll = metrics.follow(str(tmp_path))
    step = {"kind": "step", "step": 1, "time": 5.0}
    write(tmp_path, restart(1), step)
    assert poll() == [step]


def test_F12_lines_that_cannot_be_written_are_written_later(tmp_path, caplog):
    log, path = open_log(tmp_path, goes_on=True), tmp_path / metrics.FILE
    log.write("step", step=1)
    path.unlink()
    path.mkdir()
    with caplog.at_level(logging.WARNING, "spark_dl"):
        log.write("step", step=2)
        log.write("step", step=3)
        log.flush()
    assert [record.message.split(": ")[0] for record in caplog.records] == [f"cannot write to {path}"]
    path.rmdir()
    log.write("step", step=4)
    log.write("step", step=5)
    assert [line["step"] for line in metrics.read_metrics(str(tmp_path))] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("scheme", ["", "memory://host"])
@pytest.mark.parametrize("goes_on", [True, False])
def test_F12_a_store_that_cannot_be_listed_loses_no_line_and_a_newer_attempt_still_ends_this_one(
    tmp_path, scheme, goes_on, caplog
):
    run_dir = f"{scheme}{tmp_path}"
    marks = storage.join(run_dir, generations.FOLDER)
    generation = generations.start_generation(run_dir)
    log = open_log(run_dir, goes_on=goes_on, generation=generation)
    storage.delete(marks)
    storage.write_bytes(marks, b"")  # a file, which cannot be listed
    if not goes_on:
        with pytest.raises(NotADirectoryError):
            log.write("epoch", step=1) if not scheme else log.flush()
        return
    log.write("epoch", step=1)
    log.flush()
    assert "its lines are written when this is possible" in caplog.text
    storage.delete(marks)
    generations.start_generation(run_dir)
    log.write("epoch", step=2)
    log.flush()
    assert found(run_dir) == [("epoch", 1), ("epoch", 2)]
    generations.start_generation(run_dir)
    with pytest.raises(RuntimeError, match="attempt 2 has started since"):
        log.flush()


def test_without_that_they_are_an_error(tmp_path):
    log = open_log(tmp_path, goes_on=False)
    (tmp_path / metrics.FILE).unlink()
    (tmp_path / metrics.FILE).mkdir()
    with pytest.raises(IsADirectoryError):
        log.write("step", step=2)
