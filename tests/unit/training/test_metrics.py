"""The lines that a run writes, as a driver reads them that has no listener."""

import json
import logging

from spark_dl import storage
from spark_dl.training import metrics


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
