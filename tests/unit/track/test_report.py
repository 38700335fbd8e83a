"""The page of a run: what it says is what stands in the run folder, whatever state the run is in."""

import importlib.util
import json
import re
import socket
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

import spark_dl
from spark_dl.config.load import build_config
from spark_dl.rundir import generations
from spark_dl.track.report import MOST_POINTS, thin_out
from tests.builders.run_folders import CONFIG, LINES, OLD, RANKS, START, epoch, make_run, saved, step

pytest.importorskip("matplotlib", reason="the report needs matplotlib")
EVIL = '<script>alert("$x$ & $y$")</script>'


class Text(HTMLParser):
    """The words that a reader sees, and the tags that were not closed."""

    def __init__(self, page):
        super().__init__()
        self.words, self.open, self.tags = [], [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "html", "use"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("html", "use"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "svg"} & {*self.open}:
            self.words.append(" ".join(data.split()))


def seen(folder, **how):
    """What a reader sees of the report of a run, in one line."""
    path = spark_dl.report(folder, **how)
    page = Path(path).read_text()
    found = Text(page)
    assert found.open == []
    assert "script" not in found.tags
    outside = re.findall(r"""(?:src|href)=["'](?!#)[^"']+""", page)
    assert [link for link in outside if "w3.org" not in link] == []
    return " ".join(filter(None, found.words))


def test_F22_the_page_says_which_steps_were_left_out(tmp_path):
    about = {"bad_rank": 1, "what": "the gradient of '<w>'", "epoch": 0, "steps": 20}
    skips = [{"kind": "skip", "step": at, "bad_step": at, "time": START + 11.0, **about} for at in (3, 12)]
    back = {"kind": "rollback", "step": 2, "bad_step": 3, "time": START + 12.0, **about}
    text = seen(make_run(tmp_path / "run", [*LINES, *skips, back]))
    assert "left out 2 steps with NaN or Inf (3, 12), first in the gradient of '<w>' on rank 1" in text
    assert "; the run went back to a checkpoint 1 time " in text
    assert "left out" not in seen(make_run(tmp_path / "healthy"))


def test_F12_the_page_says_which_checkpoints_were_not_written(tmp_path):
    about = {"epoch": 0, "steps": 20, "url": "/r/checkpoints/step-00000004.gen-0001", "reason": "rank 1 <No space>"}
    failed = {"kind": "checkpoint_failed", "step": 4, "time": START + 11.0, **about}
    text = seen(make_run(tmp_path / "run", [*LINES, failed]))
    assert "step-00000004.gen-0001 4 2023-11-14 22:13:31 UTC not written: rank 1 <No space>" in text


def test_validations_between_steps_are_in_the_table_the_figures_and_the_time(tmp_path):
    at = {"kind": "validation", "epoch": 0, "step": 5, "steps": 20, "time": START + 11.0, "validation_s": 3.0}
    run = make_run(tmp_path / "run", [*LINES, {**at, "metrics": {"loss": 0.3125, "f1": 0.6875}}])
    text = seen(run)
    assert " 1 5 0.3125 0.6875 " in text
    assert "validation 4 s" in text
    assert "<figcaption>Validation: f1</figcaption>" in (run / "report.html").read_text()


def test_the_page_says_what_the_run_did(tmp_path):
    run = make_run(
        tmp_path / "run", spark={"version": "4.0.1", "master": "yarn"},
        datasets={"train": {"rows": 12345, "shards": 3, "url": "/data/train"}},
    )  # fmt: skip
    (run / "checkpoints/step-00000020.gen-0001").mkdir(parents=True)
    text = seen(run)
    for part in (
        "run finished All steps were done.", "strategy ddp, 2 ranks on 2 hosts", "steps 20 of 20", "epochs 2 of 1",
        "training loss 0.5", "validation loss 0.125", "validation accuracy 0.875", "rows per second 1,234 (median)",
        "started 2023-11-14 22:13:20 UTC", "duration 99 s", "Spark 4.0.1", "Spark master yarn", "torch 2.0",
        "train 12,345 3 /data/train", "rank 0 host-0", "driver driver-host",
        "step-00000020.gen-0001 20 2023-11-14 22:13:50 UTC 0.125 kept", "validation 1 s", "checkpoints 125 ms",
        "Rank 1 on host-1 was busy 3.0 times as long as the median of the other ranks, in 20 of 20 log lines (steps "
        "1 to 20). It took 40 s longer, mostly to compute.",
    ):  # fmt: skip
        assert part in text
    assert "Damaged" not in text
    page = (run / "report.html").read_text()
    titles = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert titles == ["Loss", "Validation: accuracy", "Learning rate", "Rows per second",
                      "Seconds per step, mean of the ranks"]  # fmt: skip
    assert page.count("<svg ") == 5
    assert "#00a0" not in page  # every color is one of the page's
    widths = [float(width) for width in re.findall(r'style="width: ([\d.]+)%', page)]
    assert sum(widths) == pytest.approx(300, abs=0.2)  # the attempt, and two ranks


def test_the_page_has_the_time_before_the_ranks_and_the_metrics_of_test_rows(tmp_path):
    before = {"starting Spark": 6.0, "writing the train rows": 27.0, "nothing": 0, "damaged": "x"}
    test = {"kind": "test", "step": 20, "time": START + 99, "metrics": {"loss": 0.5, "accuracy": 0.9375}}
    run = make_run(tmp_path / "run", [*LINES, test], driver={"before": before})
    text = seen(run)
    for part in (
        "duration 2 min 12 s", "before the ranks 33 s", "starting Spark 6 s", "writing the train rows 27 s",
        "test loss 0.5", "test accuracy 0.9375", "validation accuracy 0.875",
    ):  # fmt: skip
        assert part in text
    assert "damaged" not in text
    page = (run / "report.html").read_text()
    widths = [float(width) for width in re.findall(r'<i class="before" style="width: ([\d.]+)%', page)]
    assert widths == [pytest.approx(100 * s / 132, abs=0.01) for s in (6, 27)]


def test_before_the_ranks_start_there_is_a_page(tmp_path):
    generations.start_generation(str(tmp_path))
    text = seen(tmp_path)
    assert "preparing The ranks have not started." in text
    assert "steps none" in text
    assert "There are no log lines. Checkpoints No checkpoint has been saved." in text


def test_a_run_of_an_older_version_has_a_page(tmp_path):
    run = make_run(tmp_path / "run", OLD, driver=None, ranks=None)
    (run / "environment").rmdir()
    (run / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    text = seen(run)
    assert "run finished" in text
    assert "Not measured: the version of spark_dl that wrote this run logged the times of one rank only." in text
    assert "Environment It was not recorded." not in text  # the first file of a run names the driver
    assert f"driver {socket.gethostname()}" in text
    assert "strategy ddp, 1 rank" in text


def test_a_run_without_validation_has_no_validation(tmp_path):
    lines = [step(1), epoch(0, 1, metrics={}, validation_s=None)]
    text = seen(make_run(tmp_path / "run", lines))
    assert "training loss 0.5" in text
    assert "validation loss" not in text
    assert "There are fewer than 3 log lines, which are too few to tell." in text


def test_lines_with_values_of_other_types_lose_only_these(tmp_path):
    bad = [{**step(n), key: value} for n, (key, value) in enumerate([
        ("loss", None), ("loss", float("nan")), ("lr", "x"), ("rows_per_s", []), ("ranks", 3), ("seconds", "x"),
        ("steps", None), ("epoch", None),
    ], 1)]  # fmt: skip
    more = [epoch(0, 8, metrics=None), epoch(None, 8, metrics={"a": [1.0, 2.0], "b": "c", "d": True}, train_loss=None)]
    text = seen(make_run(tmp_path / "run", [*bad, *more, {"kind": "new", "step": 1, "time": 1.0}, saved(8, "x")]))
    assert "epochs 2" in text
    assert "1, 2 c True" in text


def test_nothing_of_the_run_is_taken_for_html_or_mathematics(tmp_path):
    lines = [*(step(n, slow=1) for n in range(1, 6)), epoch(0, 5, metrics={EVIL: 1.0, "$\\frac$": 2.0}),
             epoch(1, 6, metrics={EVIL: 1.0}), saved(5, EVIL)]  # fmt: skip
    ranks = [{"host": EVIL, "device": EVIL, "threads": EVIL, "pid": EVIL}] * 2
    config = {**CONFIG, "parallel": {"strategy": EVIL}}
    run = make_run(
        tmp_path / "run <b>", lines, ranks=ranks, config=config, spark={"master": EVIL}, versions={EVIL: EVIL},
        datasets={EVIL: {"rows": EVIL, "url": EVIL}}, resumed_from=EVIL,
        driver={"error": EVIL, "outcome": EVIL},
    )  # fmt: skip
    text = seen(run)
    assert "run <b>" in text
    assert text.count(EVIL) >= 12
    assert f"Rank 1 on {EVIL} was busy" in text


def test_attempts_have_their_own_lines_and_times(tmp_path):
    run = make_run(tmp_path / "run", driver={"outcome": "failed", "error": "disk full", "ended": START + 30})
    later = [{**step(n, ranks=3), "time": START + 200 + n} for n in range(21, 31)]
    make_run(run, [*LINES, *later], generation=2, started=START + 200, ranks=[*RANKS, {"host": "host-2"}],
             driver={"ended": START + 240})  # fmt: skip
    text = seen(run)
    assert "run finished" in text
    assert "Attempt 2, log lines of steps 21 to 30" in text
    assert "Attempt 1, log lines of steps 1 to 20" in text
    assert "No rank was slower than the others for long." in text
    assert "1 2023-11-14 22:13:20 UTC 30 s failed 1 to 20 disk full" in text
    assert "duration 70 s" in text


def test_of_many_ranks_the_busiest_have_bars_and_all_have_a_row(tmp_path):
    lines = [step(n, ranks=64, slow=63) for n in range(1, 5)]
    run = make_run(tmp_path / "run", lines, ranks=[{"host": f"h{r}"} for r in range(64)])
    text = seen(run)
    page = (run / "report.html").read_text()
    assert page.count('<div class="bar">') == 33
    assert "Steps, by rank: rank 63 h63" in text
    assert "32 more ranks, which were busy for less time, are in the table." in text
    assert "0 h0 0 4 0.4 8" in text


@pytest.mark.parametrize(("strategy", "device", "ranks", "expected"), [
    ("ddp", "NVIDIA H100", {"data_s": [0.25, 0.5]}, "not measured: on GPUs the host does not wait for computation and "
     "exchanges, so its clock says nothing about them. Waiting for data: rank 0 500 ms, rank 1 1 s."),
    ("own", "cpu", {"data_s": [0.25, 0.5]}, "not measured: the strategy 'own' does not measure its exchanges."),
    ("parameter_server", "cpu", None, "Not measured: trainers and servers take no steps together. Waiting for data, "
     "the trainers, on average: 500 ms."),
])  # fmt: skip
def test_what_was_not_measured_has_its_reason(tmp_path, strategy, device, ranks, expected):
    plain = {k: v for k, v in step(1).items() if k not in ("ranks", "communication_s")}
    lines = [{**plain, "step": n, "data_s": 0.25, **({"ranks": ranks} if ranks else {})} for n in (1, 2)]
    run = make_run(
        tmp_path / "run", lines, ranks=[{**r, "device": device} for r in RANKS],
        config={**CONFIG, "parallel": {"strategy": strategy}},
    )  # fmt: skip
    text = seen(run)
    assert expected in text
    assert "Stragglers" not in text


def test_ranks_that_are_tasks_of_spark_have_their_own_words(tmp_path):
    config = build_config({"parallel": {"strategy": "tree_reduce"}}).to_dict()
    assert "Communication includes the scheduling of tasks" in seen(make_run(tmp_path / "run", config=config))


def test_many_lines_make_no_large_page(tmp_path):
    few, many = (
        len(Path(spark_dl.report(make_run(tmp_path / str(n), [step(i) for i in range(1, n)]))).read_text())
        for n in (MOST_POINTS, 10 * MOST_POINTS)
    )
    assert many < 1.1 * few


def test_thinned_out_points_are_means_of_neighbors():
    x, y = thin_out(np.arange(10.0 * MOST_POINTS), np.r_[np.nan, np.arange(1.0, 10 * MOST_POINTS)])
    assert len(x) == len(y) == MOST_POINTS
    assert x == pytest.approx(y)
    assert x[-1] == pytest.approx(10 * MOST_POINTS - 5.5)


@pytest.mark.parametrize("content", [None, "notes.txt"])
def test_a_folder_that_is_no_run_is_an_error_that_says_what_was_found(tmp_path, content):
    if content:
        (tmp_path / content).write_text("")
    found = "found notes.txt" if content else "found nothing"
    with pytest.raises(ValueError, match=rf"^no run at {tmp_path}: expected a run_dir .* with metrics.jsonl; {found}"):
        spark_dl.report(tmp_path)
    with pytest.raises(ValueError, match="no run at .*/missing: .*; found nothing"):
        spark_dl.report(tmp_path / "missing")


def test_the_page_goes_where_it_is_asked_for_and_replaces_reports_only(tmp_path):
    run = make_run(tmp_path / "run")
    path = tmp_path / "new" / "page.html"
    assert spark_dl.report(run, path) == str(path)
    assert spark_dl.report(run, path) == str(path)
    assert not (run / "report.html").exists()
    (run / "report.html").write_text("<!doctype html>mine")
    for where, what in ((None, "a file that is not a report"), (tmp_path / "new", "a folder")):
        with pytest.raises(ValueError, match=rf"^path: .* is {what}.*; nothing was changed"):
            spark_dl.report(run, where)
    assert (run / "report.html").read_text() == "<!doctype html>mine"


def test_without_its_packages_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"spark_dl.report needs jinja2: pip install matplotlib jinja2 \(the extra spark_dl\[plot\]",
    ):
        spark_dl.report(make_run(tmp_path / "run"))


def test_the_function_is_no_module():
    assert callable(spark_dl.report)


def test_the_page_says_why_the_device_was_idle(tmp_path, caplog):
    run = make_run(tmp_path / "run")
    assert "Profile" not in seen(run)
    (run / "profile").mkdir()
    about = {"steps": 5, "device": "gpu", "step_s": 0.02, "compute_s": 0.012, "communication_s": 0.002, "data_s": 0.005,
             "host_s": 0.001, "operations": 321.4, "top": [[EVIL, 0.008, 2.0]]}  # fmt: skip
    (run / "profile" / "rank-10.summary.json").write_text(json.dumps(about))
    (run / "profile" / "rank-2.summary.json").write_text(json.dumps({**about, "device": "cpu"}))
    (run / "profile" / "rank-3.summary.json").write_text("{")
    text = seen(run)
    why = "computes nothing for 40 % of it: wait for data 25 %, communication 10 %, the host 5 %."
    assert f"A step of rank 10 takes 20 ms and has 321 kernels. The GPU {why}" in text
    assert text.index(f"A step of rank 2 takes 20 ms and has 321 operations. The CPU {why}") < text.index("of rank 10")
    assert "What takes longest on rank 10" in text
    assert EVIL in text
    assert "rank-3.summary.json is left out of the report" in caplog.text
