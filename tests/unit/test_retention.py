"""What `spark_dl.clean` deletes: what is old, is ours and is not needed; and that it says so before."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import spark_dl
from spark_dl import Data, retention
from spark_dl.data.write.arrays import write_arrays
from spark_dl.rundir import environment
from tests.builders.run_folders import CONFIG, make_run
from tests.unit.rundir.test_checkpoint import handmade
from tests.unit.rundir.test_folder import a_run, files

DAY = 86400.0


def aged(folder, days):
    """The folder, whose files are so old."""
    at = time.time() - days * DAY
    for base, _, names in os.walk(folder):
        for name in names:
            os.utime(Path(base) / name, (at, at))
    return folder


def ended(folder, days, **driver):
    """A run that has ended, with the copies of its rows."""
    run = make_run(folder, driver={"outcome": "finished", **driver})
    write_arrays({"x": np.arange(50)}, str(run / "shards/train"), Data())
    handmade(run, 20, files={"model.pt": b"weights"})
    return aged(run, days)


def urls(found):
    return [Path(each.url).name for each in found]


@pytest.fixture
def runs(tmp_path):
    """Runs that are 40, 20, 10 and 1 days old, and a folder that is none."""
    for days in (40, 20, 10, 1):
        ended(tmp_path / "runs" / f"{days} days", days)
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "notes" / "x.txt").write_text("theirs")
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def folder_of_runs(tmp_path):
    (tmp_path / "runs").mkdir()


@pytest.mark.parametrize(("rules", "expected"), [
    ({"keep_last": 2}, ["40 days", "20 days"]),
    ({"older_than_days": 15}, ["40 days", "20 days"]),
    ({"older_than_days": 5, "keep_last": 3}, ["40 days"]),
    ({"older_than_days": 30, "keep_last": 1}, ["40 days"]),
    ({"keep_last": 9}, []),
    ({"older_than_days": 50}, []),
])  # fmt: skip
def test_runs_are_old_by_their_number_and_their_age(runs, rules, expected):
    before = files(runs)
    assert urls(spark_dl.clean(runs, **rules)) == expected
    assert files(runs) == before, "nothing is deleted without delete"
    found = spark_dl.clean(runs, **rules, delete=True)
    assert urls(found) == expected
    assert {*os.listdir(runs)} == {"40 days", "20 days", "10 days", "1 days", "notes"} - {*expected}
    assert urls(spark_dl.clean(runs, **rules)) == ([] if "older_than_days" in rules else expected[:0])


def test_the_size_of_a_run_is_that_of_the_files_that_are_deleted(runs):
    folder = runs / "40 days"
    (folder / "predictions").mkdir()
    (folder / "predictions" / "part-0.parquet").write_bytes(b"theirs" * 1000)
    aged(folder, 40)
    whole = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    (found,) = spark_dl.clean(runs, older_than_days=30)
    assert (found.kind, found.bytes, found.left) == ("run", whole - 6000, ("predictions",))
    assert found.changed == pytest.approx(time.time() - 40 * DAY, abs=60)
    spark_dl.clean(runs, older_than_days=30, delete=True)
    assert [*files(folder)] == ["predictions/part-0.parquet"], "what another program wrote stays"


def test_exactly_what_a_run_wrote_is_deleted_with_its_trials_and_its_report(tmp_path):
    run = a_run(tmp_path / "runs" / "old")
    (run / "config.yaml").write_text("ours")
    (run / "study.log").write_text("ours")
    trial = a_run(run / "trials" / "0003")
    for each in (run, trial):
        record = {"format": "spark_dl.environment", "outcome": "finished"}
        (each / "environment" / "000001-driver.json").write_text(json.dumps(record))
    (run / "report.html").write_text("<!-- a report of spark_dl --> ours")
    (trial / "report.html").write_text("of the user")
    (run / "shards" / "mine").mkdir()
    (run / "shards" / "mine" / "x").write_text("theirs")
    aged(tmp_path / "runs", 9)
    spark_dl.clean(tmp_path / "runs", older_than_days=5, delete=True)
    assert {*files(run)} == {"shards/mine/x", "trials/0003/report.html"}


def test_copies_of_rows_are_deleted_and_the_models_stay(runs):
    found = spark_dl.clean(runs, older_than_days=5, only_rows=True)
    assert [(each.kind, Path(each.url).parts[-3]) for each in found] == [
        ("rows", "40 days"), ("rows", "20 days"), ("rows", "10 days"),
    ]  # fmt: skip
    size = sum(path.stat().st_size for path in (runs / "40 days/shards/train").iterdir())
    assert found[0].bytes == size
    spark_dl.clean(runs, older_than_days=5, only_rows=True, delete=True)
    assert [run.name for run in sorted(runs.iterdir()) if (run / "shards/train").exists()] == ["1 days"]
    assert (runs / "40 days/checkpoints/step-00000020.gen-0001/MANIFEST.json").exists()
    assert urls(spark_dl.clean(runs / "1 days", only_rows=True)) == ["train"]


def score(metric, mode):
    return {"metric": metric, "mode": mode, "rows": None}


def test_of_checkpoints_the_last_and_the_best_are_always_kept(tmp_path):
    run = make_run(tmp_path / "runs" / "1")
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4), (4, 0.3)):
        handmade(run, step, files={"model.pt": b"weights"}, score=loss, score_of=score("loss", "min"))
    aged(run, 9)
    assert urls(spark_dl.clean(run, keep_last=1)) == [f"step-0000000{n}.gen-0001" for n in (1, 3)]
    assert urls(spark_dl.clean(run, keep_last=3)) == ["step-00000001.gen-0001"]
    assert urls(spark_dl.clean(run, older_than_days=30)) == []
    found = spark_dl.clean(run, keep_last=1, delete=True)
    assert [each.kind for each in found] == ["checkpoint", "checkpoint"]
    assert sorted(os.listdir(run / "checkpoints")) == ["step-00000002.gen-0001", "step-00000004.gen-0001"]
    assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(("days", "pid", "host", "goes_on"), [
    (0.5, None, "another-host", True),  # its driver cannot be asked
    (2, None, "another-host", False),  # and it has written nothing for a day
    (2, "own", None, True),
    (0.5, 2**22 + 1, None, False),
])  # fmt: skip
def test_a_run_that_goes_on_is_left_alone(tmp_path, days, pid, host, goes_on):
    import socket

    driver = {
        "outcome": environment.RUNNING, "ended": None, "pid": os.getpid() if pid == "own" else pid or 1,
        "host": host or socket.gethostname(),
    }  # fmt: skip
    run = ended(tmp_path / "runs" / "1", days, **driver)
    assert len(spark_dl.clean(tmp_path / "runs", older_than_days=0)) == (not goes_on)
    assert len(spark_dl.clean(tmp_path / "runs", only_rows=True)) == (not goes_on)
    if goes_on:
        with pytest.raises(ValueError, match="the run goes on, and deletes its old checkpoints itself"):
            spark_dl.clean(run, keep_last=1)


def test_links_are_not_followed(tmp_path, runs):
    elsewhere = ended(tmp_path / "elsewhere", 50)
    (runs / "link").symlink_to(elsewhere)
    assert "link" not in urls(spark_dl.clean(runs, older_than_days=5))
    before = files(elsewhere)
    (runs / "40 days/shards/validation").symlink_to(elsewhere / "shards/train")
    with pytest.raises(ValueError, match="symbolic link"):
        spark_dl.clean(runs, older_than_days=30, delete=True)
    assert files(elsewhere) == before


@pytest.mark.parametrize(("rules", "message"), [
    ({}, "keep_last: expected a number, older_than_days or only_rows, found none of them"),
    ({"keep_last": 0}, "keep_last: expected a whole number of at least 1, found 0"),
    ({"older_than_days": -1}, "older_than_days: expected a number of at least 0, found -1"),
    ({"older_than_days": float("nan")}, "older_than_days: expected a number of at least 0, found nan"),
    ({"keep_last": 3}, "found no run folder at .* or in it, and no store; expected one of them"),
])  # fmt: skip
def test_rules_that_say_nothing_and_folders_without_runs_are_refused(tmp_path, rules, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        spark_dl.clean(tmp_path, **rules)


def test_of_a_store_only_the_time_without_use_counts(tmp_path):
    store = tmp_path / "store"
    for key, days in (("a" * 64, 40), ("b" * 64, 10)):
        folder = store / key / "0123456789ab"
        write_arrays({"x": np.arange(50)}, str(folder), Data())
        aged(folder, days)
    found = spark_dl.clean(store, older_than_days=30)
    assert [(each.kind, each.url) for each in found] == [("dataset", str(store / ("a" * 64) / "0123456789ab"))]
    assert found[0].changed == pytest.approx(time.time() - 40 * DAY, abs=60)
    assert found[0].bytes == sum(path.stat().st_size for path in Path(found[0].url).iterdir())
    assert len(files(store)) == 6, "manifests, metadata and shards"
    assert spark_dl.clean(store, older_than_days=30, delete=True) == found
    assert [each.url for each in spark_dl.clean(store, older_than_days=0)] == [str(store / ("b" * 64) / "0123456789ab")]
    with pytest.raises(ValueError, match="is a store of datasets; expected older_than_days, without another rule"):
        spark_dl.clean(store, keep_last=1)


def test_a_dataset_of_a_store_that_a_run_uses_is_kept(tmp_path):
    folder = tmp_path / "store" / ("a" * 64)
    write_arrays({"x": np.arange(50)}, str(folder / "0123456789ab"), Data())
    (folder / "leases").mkdir()
    lease = {"expires": time.time() + 600, "run": "run"}
    (folder / "leases" / "0123456789ab.1").write_text(json.dumps(lease))
    aged(folder / "0123456789ab", 40)
    assert spark_dl.clean(tmp_path / "store", older_than_days=30) == []


def test_the_settings_of_a_run_are_no_run(tmp_path):
    (tmp_path / "runs" / "x").mkdir()
    (tmp_path / "runs" / "x" / "config.yaml").write_text(json.dumps(CONFIG))
    with pytest.raises(ValueError, match="found no run folder"):
        retention.clean(tmp_path / "runs", keep_last=1)
