"""Lightning, transformers and Accelerate on two hosts, of which one has two ranks and the other one."""

import json
import subprocess
import sys

import pytest
import torch

from spark_dl.bench.testbed import testbed
from spark_dl.bench.testbed.standalone import start_spark
from tests.builders import libraries
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
from tests.hosts.conftest import REPOSITORY
from tests.hosts.libraries_job import LIBRARIES, NUM_RANKS
from tests.spark.conftest import FAST_JVM

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
ROWS = libraries.GLOBAL_BATCH * 4


@pytest.fixture(scope="module")
def results(possible, tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    write_dataset(str(folder / "data"), blobs(ROWS), group_rows=20)
    with testbed.hosts(2) as bed:
        master = start_spark(bed, cores_per_worker=2)
        command = [sys.executable, "-m", "tests.hosts.libraries_job", master, str(folder / "data"), str(folder / "out")]
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            driver = bed.popen(
                bed.driver, command, cwd=REPOSITORY, env={"JAVA_TOOL_OPTIONS": FAST_JVM}, stdout=out, stderr=err
            )
        try:
            code = driver.wait(240)
        except subprocess.TimeoutExpired:
            code = "none in time"
        assert code == 0, testbed.read_tail(folder / "stderr")
    return json.loads((folder / "stdout").read_text().splitlines()[-1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_three_ranks_on_two_hosts_train_as_one_group(results, library):
    found = results[library]
    assert [(r["rank"], r["world_size"]) for r in found] == [(rank, NUM_RANKS) for rank in range(NUM_RANKS)]
    assert sorted((r["GROUP_RANK"], r["LOCAL_RANK"]) for r in found) in (
        [(0, 0), (0, 1), (1, 0)],
        [(0, 0), (1, 0), (1, 1)],
    )
    assert sum(r["rows"] for r in found) == ROWS * libraries.EPOCHS
    weights = [torch.tensor(r["weights"]) for r in found]
    assert all(torch.equal(w, weights[0]) for w in weights)
    if library != "transformers":  # which trains another model
        torch.testing.assert_close(weights[0], torch.tensor(results["alone"]), rtol=1e-5, atol=1e-6)
