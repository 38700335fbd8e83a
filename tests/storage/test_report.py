"""A report of a run on each kind of store."""

import json

import pytest

import spark_dl
from spark_dl import storage
from spark_dl.rundir import generations
from tests.builders.run_folders import LINES


@pytest.mark.sampled(1)
def test_the_report_is_written_beside_its_run(folder):
    pytest.importorskip("matplotlib", reason="the report needs matplotlib")
    generations.start_generation(folder)
    content = "".join(json.dumps(line) + "\n" for line in LINES)
    storage.write_bytes(storage.join(folder, "metrics.jsonl"), content.encode())
    url = spark_dl.report(folder)
    assert url == storage.join(storage.absolute(folder), "report.html")
    assert spark_dl.report(folder) == url
    assert b"20 of 20" in storage.read_bytes(url)
    with pytest.raises(ValueError, match="no run at .*/other.*: expected a run_dir .*found nothing"):
        spark_dl.report(storage.join(folder, "other"))
