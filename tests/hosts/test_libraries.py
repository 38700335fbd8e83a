"""Lightning, transformers and Accelerate on two hosts, of which one has two ranks and the other one."""

import pytest
import torch

from benchmarks.testbed import testbed
from benchmarks.testbed.standalone import start_spark
from tests.builders import libraries
from tests.builders.datasets import write_dataset
from tests.builders.models import blobs
from tests.hosts.conftest import run_driver
from tests.hosts.libraries_job import LIBRARIES, NUM_RANKS

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(300)]
ROWS = libraries.GLOBAL_BATCH * 4


@pytest.fixture(scope="module")
def results(possible, tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    write_dataset(str(folder / "data"), blobs(ROWS), group_rows=20)
    with testbed.hosts(2) as bed:
        master = start_spark(bed, cores_per_worker=2)
        return run_driver(bed, folder, "tests.hosts.libraries_job", master, str(folder / "data"), str(folder / "out"))


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
