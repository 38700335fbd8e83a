"""`diagnose` and jobs/doctor.py on real sessions: healthy ones, and ones in which a run would fail."""

import json
import time

import pytest

import spark_dl
from tests.builders.models import small_config
from tests.spark.test_jobs import PLAIN, run_job


@pytest.mark.modes("local", "local-cluster", "connect")
@pytest.mark.slow_in("local-cluster", "connect")
def test_a_healthy_session_has_no_errors(spark, mode, tmp_path):
    start = time.monotonic()
    found = spark_dl.diagnose(small_config(3), run_dir=tmp_path / "run", spark=spark)
    assert time.monotonic() - start < 30
    assert found.is_healthy, found.text
    checks = [finding.check for finding in found.findings]
    assert {"slots", "versions", "connections", "clocks", "devices", "disk", "run_dir"} <= {*checks}
    assert len(found.ranks) == 3
    for rank, row in enumerate(found.mbit_per_s):
        assert [rate is None for rate in row] == [other == rank for other in range(3)]
    assert list((tmp_path / "run").iterdir()) == [], "the probes are deleted"
    assert spark_dl.launch(int, num_ranks=3, spark=spark) == [0] * 3


@pytest.mark.modes("local")
def test_what_forbids_a_launch_is_found_as_an_error(spark, tmp_path):
    found = spark_dl.diagnose(small_config(9), spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert error.check == "slots and settings"
    assert "9 ranks need 9 task slots at the same time, and the cluster has 4" in error.found
    assert error.change.startswith("lower launch.num_ranks")
    assert "not checked, as no ranks started" in found.text
    assert not found.is_healthy
    assert found.ranks == ()

    (tmp_path / "file").touch()
    found = spark_dl.diagnose(small_config(2), run_dir=tmp_path / "file" / "run", spark=spark)
    (error,) = [finding for finding in found.findings if finding.level == "error"]
    assert (error.check, found.findings[0]) == ("run_dir", error)
    assert "cannot write to" in error.found


@pytest.mark.slow
def test_the_job_prints_a_table_and_json_and_ends_with_1_if_a_run_would_fail(tmp_path):
    master = ["--master", "local[2]", "--launch.num_ranks", "2"]
    out, err = run_job(*PLAIN, "jobs/doctor.py", *master, "--run_dir", str(tmp_path / "run"))
    assert json.loads(out.splitlines()[-1])["healthy"] is True
    assert "connections" in err
    out, err = run_job(*PLAIN, "jobs/doctor.py", *master[:3], "3", "--json", code=1)
    found = json.loads(out.splitlines()[-1])
    assert found["healthy"] is False
    assert "task slots" in found["findings"][0]["found"]
    assert "check " not in err
